// The last reference to a group may be dropped by any thread.

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "backends/watch/null_backend.h"
#include "backends/watch/watch.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

namespace ddp::backends::watch {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using ThreadTask = std::function<void()>;

// Has a thread that runs one task. Its destructor waits for it, as Gloo's does.
class ThreadedBackend : public NullBackend {
 public:
  ThreadedBackend(std::future<ThreadTask> task, std::atomic<bool>* destroyed)
      : NullBackend(/*rank=*/0, /*size=*/1, "threaded"),
        destroyed_(destroyed),
        thread_([task = std::move(task)]() mutable { task.get()(); }) {}
  ~ThreadedBackend() override {
    thread_.join();
    *destroyed_ = true;
  }

 private:
  std::atomic<bool>* const destroyed_;
  std::thread thread_;
};

BackendPtr WatchedThreadedBackend(std::promise<ThreadTask>& task, std::atomic<bool>* destroyed) {
  return Watch(c10::make_intrusive<ThreadedBackend>(task.get_future(), destroyed),
               c10::make_intrusive<c10d::HashStore>(), {});
}

TEST(LifetimeTest, ABackendsOwnThreadMayDropTheLastReference) {
  std::atomic<bool> destroyed = false;
  std::promise<ThreadTask> task;
  auto group = std::make_shared<BackendPtr>(WatchedThreadedBackend(task, &destroyed));
  task.set_value([group = std::move(group)] { group->reset(); });
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (!destroyed && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(destroyed);
}

TEST(LifetimeTest, AnotherThreadHasDestroyedTheBackendWhenItGoesOn) {
  std::atomic<bool> destroyed = false;
  std::promise<ThreadTask> task;
  BackendPtr group = WatchedThreadedBackend(task, &destroyed);
  task.set_value([] {});
  std::thread([&] {
    group.reset();
    EXPECT_TRUE(destroyed);
  }).join();
}

}  // namespace
}  // namespace ddp::backends::watch
