#include <chrono>
#include <limits>

#include "backends/shm/engine/engine.h"

namespace ddp::backends::shm {

void Engine::Progress(const std::function<bool()>& done) {
  while (!done()) {
    Lock lock(driving_, std::try_to_lock);
    if (!lock.owns_lock()) {
      AwaitDriver(done);
      continue;
    }
    Enqueue();
    const bool pending = !collectives_under_way_.empty();
    // Returns early if a callback has to be run: `done` may depend on it.
    if (pending) Drive(collectives_under_way_.back(), std::numeric_limits<int64_t>::max());
    StopDriving(lock);
    if (!pending) return;
  }
}

void Engine::AwaitDriver(const std::function<bool()>& done) {
  num_waiters_.fetch_add(1, std::memory_order_seq_cst);
  {
    std::unique_lock<std::mutex> waiters_lock(waiters_mutex_);
    // The time limit covers a thread that stops driving just before this wait.
    waiters_.wait_for(waiters_lock, std::chrono::milliseconds(5), done);
  }
  num_waiters_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace ddp::backends::shm
