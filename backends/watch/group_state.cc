#include "backends/watch/group_state.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp::backends::watch {
namespace {

// The watchdog's thread limits its investigations itself; this is the limit if the store hangs.
constexpr absl::Duration kMaxExplainTime = absl::Seconds(3);

// Longer than the interval at which a waiting caller repeats its request.
constexpr std::chrono::seconds kWantsDeadRanks(10);

}  // namespace

GroupState::GroupState(std::function<void()> abort_messages, std::function<void()> abort_backend)
    : abort_messages_(std::move(abort_messages)), abort_backend_(std::move(abort_backend)) {}

std::string GroupState::abort_reason() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return abort_reason_;
}

void GroupState::AbortGroup(std::string reason) {
  std::map<uint64_t, std::function<void()>> callbacks;
  std::function<void()> abort_backend;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (aborted()) return;
    abort_reason_ = std::move(reason);
    aborted_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
    abort_backend.swap(abort_backend_);
    changed_.notify_all();
  }
  for (const auto& [id, callback] : callbacks) callback();
  if (abort_messages_) abort_messages_();
  if (abort_backend) abort_backend();
}

void GroupState::ReleaseBackend() {
  std::lock_guard<std::mutex> lock(mutex_);
  abort_backend_ = nullptr;
}

uint64_t GroupState::OnAbort(std::function<void()> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!aborted()) {
      callbacks_.emplace(next_callback_, std::move(callback));
      return next_callback_++;
    }
  }
  callback();
  return 0;
}

void GroupState::RemoveCallback(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  callbacks_.erase(id);
}

std::string GroupState::Explain(const std::string& call, const std::string& error,
                                uint64_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  std::string reason;
  if (!aborted() && !stopping()) {
    if (first_failure_.empty() && number != 0) first_failure_ = absl::StrCat(call, ": ", error);
    auto failed = std::make_shared<FailedCall>();
    failed->number = number;
    failed_calls_.push_back(failed);
    wake_.notify_all();
    changed_.wait_for(lock, absl::ToChronoMilliseconds(kMaxExplainTime),
                      [&] { return failed->explained || aborted() || thread_ended_; });
    reason = failed->explanation;
  }
  if (aborted()) reason = abort_reason_;
  return reason;
}

bool GroupState::has_failed_calls() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !failed_calls_.empty();
}

std::vector<std::shared_ptr<GroupState::FailedCall>> GroupState::TakeFailedCalls() {
  std::vector<std::shared_ptr<FailedCall>> calls;
  std::lock_guard<std::mutex> lock(mutex_);
  calls.swap(failed_calls_);
  return calls;
}

void GroupState::SetExplanation(const std::vector<std::shared_ptr<FailedCall>>& calls,
                                const std::string& explanation) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const std::shared_ptr<FailedCall>& call : calls) {
    call->explained = true;
    call->explanation = explanation;
  }
  changed_.notify_all();
}

std::string GroupState::first_failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return first_failure_;
}

std::set<int> GroupState::RequestDeadRanks() {
  std::lock_guard<std::mutex> lock(mutex_);
  dead_ranks_wanted_until_ = Clock::now() + kWantsDeadRanks;
  return dead_ranks_;
}

bool GroupState::wants_dead_ranks() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return Clock::now() < dead_ranks_wanted_until_;
}

std::set<int> GroupState::dead_ranks() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return dead_ranks_;
}

void GroupState::SetDeadRanks(std::set<int> ranks) {
  std::lock_guard<std::mutex> lock(mutex_);
  dead_ranks_ = std::move(ranks);
}

bool GroupState::RequestStop() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_.exchange(true)) return false;
  wake_.notify_all();
  return true;
}

void GroupState::SetThreadEnded() {
  std::lock_guard<std::mutex> lock(mutex_);
  thread_ended_ = true;
  changed_.notify_all();
}

bool GroupState::AwaitThreadEnd(absl::Duration timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout), [&] { return thread_ended_; });
}

void GroupState::AwaitWork(absl::Duration duration) {
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait_for(lock, absl::ToChronoNanoseconds(duration),
                 [&] { return stopping() || !failed_calls_.empty(); });
}

void GroupState::AwaitStop(absl::Duration duration) {
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait_for(lock, absl::ToChronoNanoseconds(duration), [&] { return stopping(); });
}

}  // namespace ddp::backends::watch
