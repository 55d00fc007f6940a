#pragma once

#include <functional>
#include <thread>
#include <vector>

namespace ddp {

// For tests: calls body(0) … body(count - 1), each in a thread of its own, at the same time, and
// joins them.
inline void RunThreads(int count, const std::function<void(int index)>& body) {
  std::vector<std::thread> threads;
  for (int index = 0; index < count; ++index) threads.emplace_back([&, index] { body(index); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ddp
