// Watching a backend that reports no errors: what the wrapper does by itself.

#include "backends/watch/null_backend.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ATen/ops/ones.h"
#include "absl/log/log_entry.h"
#include "absl/log/log_sink.h"
#include "absl/log/log_sink_registry.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/watch/watch.h"
#include "base/backend_capabilities.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends::watch {
namespace {

using absl::StrContains;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

struct Watched {
  c10::intrusive_ptr<NullBackend> inner;
  BackendPtr backend;
};

// NCCL's capabilities are these.
constexpr BackendCapabilities kNotPolled = {.abort_ends_waits = true, .works_can_be_polled = false};

Watched Make(int rank, int size, const c10::intrusive_ptr<c10d::Store>& store,
             const WatchOptions& options = {}) {
  auto inner = c10::make_intrusive<NullBackend>(rank, size, "null");
  return {inner, Watch(inner, store, options)};
}

void AllReduce(const BackendPtr& backend, int64_t numel) {
  std::vector<at::Tensor> tensors = {at::ones({numel})};
  if (auto work = backend->allreduce(tensors)) work->wait();
}

// Calls until an error is thrown; returns its message.
std::string ErrorWithin(std::chrono::seconds limit, const BackendPtr& backend, int64_t numel) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (std::chrono::steady_clock::now() < end) {
    try {
      AllReduce(backend, numel);
    } catch (const std::exception& error) {
      return ExceptionMessage(error);
    }
    // Slow enough that calls compared after some seconds are still in the recorder.
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return "";
}

// The first line that is logged.
class FirstLine : public absl::LogSink {
 public:
  FirstLine() { absl::AddLogSink(this); }
  ~FirstLine() override { absl::RemoveLogSink(this); }
  void Send(const absl::LogEntry& entry) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (line_.empty()) line_ = std::string(entry.text_message());
    logged_.notify_all();
  }
  std::string Await() {
    std::unique_lock<std::mutex> lock(mutex_);
    logged_.wait_for(lock, std::chrono::seconds(20), [&] { return !line_.empty(); });
    return line_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable logged_;
  std::string line_;
};

// The backend does not notice the difference: both ranks continue. Only the first call differs.
TEST(NullBackendTest, ADifferenceWithoutSymptomsIsFound) {
  for (const BackendCapabilities& capabilities :
       {BackendCapabilities{}, BackendCapabilities{.abort_ends_waits = true}, kNotPolled}) {
    auto store = c10::make_intrusive<c10d::HashStore>();
    Watched one = Make(0, 2, store, {.capabilities = capabilities});
    Watched other = Make(1, 2, store, {.capabilities = capabilities});
    AllReduce(one.backend, 1000);
    AllReduce(other.backend, 1001);
    std::thread thread([&] {
      EXPECT_TRUE(StrContains(ErrorWithin(std::chrono::seconds(20), other.backend, 4), "#1"));
    });
    const std::string error = ErrorWithin(std::chrono::seconds(20), one.backend, 4);
    thread.join();
    EXPECT_TRUE(StrContains(error, "the ranks do not make the same call")) << error;
    EXPECT_EQ(one.inner->aborts, 1);
    EXPECT_EQ(other.inner->aborts, 1);
  }
}

// Thousands of calls between two comparisons: old signatures are still compared.
TEST(NullBackendTest, ADifferenceIsFoundAtAnySpeed) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  Watched one = Make(0, 2, store);
  Watched other = Make(1, 2, store);
  std::atomic<int> failed = 0;
  std::atomic<uint64_t> calls[2] = {0, 0};
  const auto run = [&](int rank, const BackendPtr& backend, int64_t first) {
    std::vector<at::Tensor> tensors = {at::ones({first})};
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    try {
      backend->allreduce(tensors)->wait();
      tensors = {at::ones({4})};
      while (std::chrono::steady_clock::now() < end) {
        backend->allreduce(tensors)->wait();
        // As with real collectives, no rank gets far ahead.
        ++calls[rank];
        while (calls[rank] > calls[1 - rank] + 1000 && failed == 0 &&
               std::chrono::steady_clock::now() < end) {
          std::this_thread::yield();
        }
      }
    } catch (const std::exception& error) {
      EXPECT_TRUE(StrContains(error.what(), "the ranks do not make the same call"));
      ++failed;
    }
  };
  std::thread thread([&] { run(1, other.backend, 7); });
  run(0, one.backend, 8);
  thread.join();
  EXPECT_EQ(failed, 2);
}

// NCCL's Works are not polled: a stall means that a rank has not called what others have.
TEST(NullBackendTest, WithoutCompletionARankThatIsBehindIsReported) {
  FirstLine log;
  auto store = c10::make_intrusive<c10d::HashStore>();
  Watched one = Make(0, 2, store, {.stall = absl::Seconds(1), .capabilities = kNotPolled});
  Watched other = Make(1, 2, store, {.stall = absl::Seconds(1), .capabilities = kNotPolled});
  AllReduce(one.backend, 5);
  AllReduce(other.backend, 5);
  AllReduce(one.backend, 6);
  EXPECT_TRUE(StrContains(log.Await(),
                          "#2 allreduce(sum) float32 [6]: reached by rank 0; not by "
                          "rank 1 (last call #1 allreduce(sum) float32 [5], "));
}

TEST(NullBackendTest, ItsOwnStateIsForwarded) {
  Watched watched = Make(0, 1, c10::make_intrusive<c10d::HashStore>());
  c10d::Backend& backend = *watched.backend;
  EXPECT_EQ(backend.getBackendName(), "null");
  backend.setGroupDesc("of training");
  backend.setBoundDeviceId(at::Device("cuda:1"));
  backend.setGroupUid("7");
  EXPECT_EQ(watched.inner->getGroupUid(), "7");
  EXPECT_EQ(backend.getGroupUid(), "7");
  EXPECT_EQ(watched.inner->getGroupDesc(), "of training");
  EXPECT_EQ(watched.inner->getBoundDeviceId(), at::Device("cuda:1"));
  EXPECT_FALSE(backend.hasHooks());
  backend.registerOnCompletionHook([](std::shared_ptr<c10d::WorkInfo>) {});
  EXPECT_TRUE(backend.hasHooks());
  EXPECT_TRUE(watched.inner->hasHooks());
  backend.shutdown();
  backend.abort();
  EXPECT_EQ(watched.inner->shutdowns, 1);
  EXPECT_EQ(watched.inner->aborts, 1);
}

// DistributedDataParallel gets the capabilities of the registry entry from the wrapper.
TEST(NullBackendTest, DeclaresWhatItWasGiven) {
  Watched watched = Make(0, 1, c10::make_intrusive<c10d::HashStore>(),
                         {.capabilities = {.collectives_use_callers_cores = true}});
  auto* declares = dynamic_cast<CapabilityProvider*>(watched.backend.get());
  ASSERT_NE(declares, nullptr);
  EXPECT_TRUE(declares->capabilities().collectives_use_callers_cores);
  EXPECT_FALSE(declares->capabilities().abort_ends_waits);
  declares->Progress([] { return false; });  // the inner backend does not support it
}

// A backend that merges and shrinks groups.
class Regrouping final : public NullBackend {
 public:
  Regrouping(int rank, int size) : NullBackend(rank, size, "null") {}
  bool supportsShrinking() const override { return true; }
  BackendPtr merge(const c10::intrusive_ptr<c10d::Store>&, const c10::intrusive_ptr<Options>&,
                   const int& rank, const int& size) override {
    return c10::make_intrusive<Regrouping>(rank, size);
  }
  // Ranks keep their order; excluded ranks do not call it.
  BackendPtr shrink(const std::vector<int64_t>& excluded, int,
                    const c10::intrusive_ptr<Options>&) override {
    int before = 0;
    for (int64_t rank : excluded) before += rank < getRank();
    return c10::make_intrusive<Regrouping>(getRank() - before,
                                           getSize() - static_cast<int>(excluded.size()));
  }
  void setTimeout(std::chrono::milliseconds given) override { timeout = given; }
  c10d::ErrorType getError() override { return c10d::ErrorType::COMM_ERROR; }

  std::chrono::milliseconds timeout{0};
};

// The two groups of two ranks differ in their first call, which only a watch notices.
void ExpectWatched(const BackendPtr& one, const BackendPtr& other) {
  EXPECT_EQ(one->getSize(), 2);
  EXPECT_EQ(one->getRank() + other->getRank(), 1);
  AllReduce(one, 1000);
  AllReduce(other, 1001);
  std::thread thread([&] { EXPECT_NE(ErrorWithin(std::chrono::seconds(20), other, 4), ""); });
  const std::string error = ErrorWithin(std::chrono::seconds(20), one, 4);
  thread.join();
  EXPECT_TRUE(StrContains(error, "the ranks do not make the same call")) << error;
}

TEST(NullBackendTest, MergedAndShrunkGroupsAreWatched) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<BackendPtr> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(Watch(c10::make_intrusive<Regrouping>(rank, 3), store, {}));
  }
  ASSERT_TRUE(ranks[0]->supportsShrinking());
  ExpectWatched(ranks[0]->shrink({1}), ranks[2]->shrink({1}));
  const auto merged = c10::make_intrusive<c10d::PrefixStore>("merged", store);
  ExpectWatched(ranks[0]->merge(merged, nullptr, 1, 2), ranks[1]->merge(merged, nullptr, 0, 2));
}

TEST(NullBackendTest, StoreAndBackendAreReleased) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto inner = c10::make_intrusive<NullBackend>(0, 1, "null");
  {
    const BackendPtr watched =
        Watch(inner, c10::make_intrusive<c10d::PrefixStore>("watch", store), {});
    EXPECT_TRUE(DeadRanks(watched).empty());
    EXPECT_TRUE(DeadRanks(inner).empty());
  }
  EXPECT_EQ(store.use_count(), 1);
  EXPECT_EQ(inner.use_count(), 1);
}

TEST(NullBackendTest, ForwardsTimeoutAndError) {
  const auto inner = c10::make_intrusive<Regrouping>(0, 1);
  const BackendPtr watched = Watch(inner, c10::make_intrusive<c10d::HashStore>(), {});
  watched->setTimeout(std::chrono::milliseconds(7));
  EXPECT_EQ(inner->timeout, std::chrono::milliseconds(7));
  EXPECT_EQ(watched->getError(), c10d::ErrorType::COMM_ERROR);
}

// Stands for hier on one host, whose factory returns a backend of shm.
class OnCallersCores final : public c10d::Backend, public CapabilityProvider {
 public:
  OnCallersCores() : Backend(0, 1) {}
  const std::string getBackendName() const override { return "null"; }
  BackendCapabilities capabilities() const override {
    return {.collectives_use_callers_cores = true};
  }
  void Progress(const std::function<bool()>& done) override { progressed = done(); }

  bool progressed = false;
};

TEST(NullBackendTest, ABackendsOwnDeclarationReplacesThatOfItsEntry) {
  auto inner = c10::make_intrusive<OnCallersCores>();
  const BackendPtr watched = Watch(inner, c10::make_intrusive<c10d::HashStore>(),
                                   {.capabilities = {.abort_ends_waits = true}});
  auto* declares = dynamic_cast<CapabilityProvider*>(watched.get());
  ASSERT_NE(declares, nullptr);
  EXPECT_TRUE(declares->capabilities().collectives_use_callers_cores);
  EXPECT_FALSE(declares->capabilities().abort_ends_waits);
  declares->Progress([] { return true; });
  EXPECT_TRUE(inner->progressed);
}

TEST(NullBackendTest, Rank0WaitsForTheOthersToLeaveButNotForever) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  Watched last = Make(0, 2, store, {.rank_0_serves_store = true});
  Watched other = Make(1, 2, store);
  std::atomic<bool> left = false;
  std::thread thread([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    left = true;
    other.backend.reset();
  });
  last.backend.reset();
  EXPECT_TRUE(left);
  thread.join();

  Watched alone = Make(0, 2, c10::make_intrusive<c10d::HashStore>(), {.rank_0_serves_store = true});
  const auto start = std::chrono::steady_clock::now();
  alone.backend.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(NullBackendTest, AForkedChildThatEndsLeavesTheParentAlone) {
  Watched watched = Make(0, 1, c10::make_intrusive<c10d::HashStore>());
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // it must not hang
    watched.backend.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  AllReduce(watched.backend, 3);
}

}  // namespace
}  // namespace ddp::backends::watch
