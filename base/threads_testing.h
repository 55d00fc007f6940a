#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdlib>
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

// For tests: while one exists, this process can start no thread. The system refuses a thread whose
// stack does not fit into the address space with the errno of one beyond a limit.
class NoThreads {
 public:
  NoThreads() {
    pthread_attr_t endless;
    if (pthread_getattr_default_np(&before_) != 0 || pthread_attr_init(&endless) != 0 ||
        pthread_attr_setstacksize(&endless, size_t{1} << 60) != 0 ||
        pthread_setattr_default_np(&endless) != 0) {
      std::abort();
    }
  }
  ~NoThreads() { pthread_setattr_default_np(&before_); }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

}  // namespace ddp
