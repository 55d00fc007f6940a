#include "base/threads_testing.h"

#include <thread>
#include <vector>

namespace ddp {

void RunThreads(int count, const std::function<void(int index)>& body) {
  std::vector<std::thread> threads;
  for (int index = 0; index < count; ++index) threads.emplace_back([&, index] { body(index); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ddp
