#include "backends/shm/engine/engine.h"

#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backends/common/has_died.h"
#include "backends/shm/engine/futex.h"
#include "base/status.h"

namespace ddp::backends::shm {
namespace {

constexpr int64_t kMillisecond = 1'000'000;

// Interval at which sleeping threads check that their peers are alive. A death is reported within
// two intervals.
constexpr int64_t kCheckIntervalNs = 50 * kMillisecond;

// Maximum wait for a stopped peer that is writing to a tensor of this rank.
constexpr int64_t kLongestWriteNs = 10'000 * kMillisecond;

// After this number of intervals without operations, the group's thread sleeps without time limit.
constexpr int kIdleLooks = 20;

// Number of polls before the first reading of the clock or pause instruction, each of which takes a
// tenth of the fastest all-reduce.
constexpr int kTightLooks = 50;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

bool IsMessage(const EngineOp& op) {
  const Kind kind = op.requests[0].kind;
  return kind == Kind::kSend || kind == Kind::kRecv;
}

}  // namespace

int64_t NowNs() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

Engine::Engine(const View& view, int rank, std::vector<PeerInfo> peers,
               const EngineOptions& options)
    : view_(view),
      rank_(rank),
      peers_(std::move(peers)),
      options_(options),
      owner_(::getpid()),
      signals_(view, rank),
      mine_(view.control(rank)),
      collectives_(view, rank, options.direct),
      messages_(view, rank, [this](EngineOp* op, const absl::Status& status) {
        Complete(op, status.ok() ? status : Explain(op->requests[0], status));
      }) {}

// The group's thread holds a reference, so it is not running any more.
Engine::~Engine() {
  if (group_thread_.joinable()) group_thread_.detach();
}

template <typename Done>
bool Engine::Spin(const Done& done, int64_t yield_ns, int64_t deadline_ns) {
  // Peers need not wake a rank that polls. Written only if it changes: peers have this line cached.
  if (mine_.sleeping.load(std::memory_order_relaxed) != kNobody) {
    mine_.sleeping.store(kNobody, std::memory_order_relaxed);
  }
  int64_t since = 0;  // approximate time of the last progress; 0: not read yet
  bool spinning = false;
  int looks = 0;  // polls since the last progress
  while (true) {
    const bool moved = Advance();
    if (done()) return true;
    ++looks;
    if (moved) {
      since = 0;
      looks = 0;
    } else if (options_.spin_ns > 0 && looks < kTightLooks) {
      continue;
    } else if (since == 0) {
      since = NowNs();
      spinning = options_.spin_ns > 0;
    } else if (spinning) {
      Pause();
      if (looks % 8 == 0) spinning = NowNs() - since < options_.spin_ns;
    } else {
      const int64_t now = NowNs();
      if (now - since >= options_.spin_ns + yield_ns || now >= deadline_ns) return false;
      Enqueue();
      if (OthersWait()) return false;
      ::sched_yield();
    }
  }
}

bool Engine::OthersWait() const {
  return !finished_.empty() || (completed_ && num_waiters_.load(std::memory_order_relaxed) != 0);
}

void Engine::Submit(EngineOp* op) {
  Lock lock(driving_, std::try_to_lock);
  if (lock.owns_lock()) {
    Enqueue();
    Take(op);
  } else {
    {
      const std::lock_guard<std::mutex> submit_lock(submit_mutex_);
      submitted_.push_back(op);
      submitted_count_.store(submitted_.size(), std::memory_order_seq_cst);
    }
    // The thread that drives takes the operation, even if it is about to stop: it checks
    // submitted_count_ once more after it has unlocked. This try_lock comes after the store above,
    // so one of the two threads sees the other.
    if (!lock.try_lock()) {
      signals_.RingIfAsleep(rank_);
      return;
    }
    Enqueue();
  }
  if (!Spin([op] { return op->done(); }, expects_wait_ ? options_.submit_yield_ns : 0)) {
    unfinished_submit_ = op;
    unfinished_submit_ns_ = NowNs();
  }
  StopDriving(lock);
}

absl::Status Engine::Wait(EngineOp* op, int64_t deadline_ns) {
  while (!op->done()) {
    Lock lock(driving_, std::try_to_lock);
    if (lock.owns_lock()) {
      const bool in_time = Drive(op, deadline_ns);
      absl::Status late;
      if (!in_time && !op->done()) {
        late = absl::DeadlineExceededError(absl::StrCat("rank ", rank_, ": Timed out waiting for ",
                                                        ToString(op->requests[op->next_request_]),
                                                        Missing()));
      }
      StopDriving(lock);
      if (!late.ok()) return late;
      continue;
    }
    AwaitDriver([op] { return op->done(); });
    if (!op->done() && NowNs() >= deadline_ns) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", rank_, ": Timed out waiting for ", ToString(op->requests[0])));
    }
  }
  return op->status();
}

bool Engine::Drive(EngineOp* op, int64_t deadline_ns) {
  expects_wait_ =
      op == unfinished_submit_ && NowNs() - unfinished_submit_ns_ < options_.submit_yield_ns;
  int64_t yield_ns = options_.wait_yield_ns;
  while (true) {
    Enqueue();
    // Read before polling, so that a wake-up in between ends futex::Wait at once.
    const uint32_t bell = mine_.doorbell.load(std::memory_order_seq_cst);
    if (Spin([op] { return op->done(); }, yield_ns, deadline_ns)) return true;
    if (OthersWait()) return true;
    if (!ReadyToSleep(kWaiter)) continue;
    if (OthersWait()) return true;
    const int64_t now = NowNs();
    if (now >= deadline_ns) return false;
    futex::Wait(&mine_.doorbell, bell, kWaiter, std::min(kCheckIntervalNs, deadline_ns - now));
    mine_.sleeping.store(kNobody, std::memory_order_relaxed);
    CheckFailures();
    // During a long wait, such as for a checkpoint of rank 0, this thread does not yield-poll.
    const bool rung = mine_.doorbell.load(std::memory_order_relaxed) != bell;
    yield_ns = rung ? options_.wait_yield_ns : 0;
  }
}

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

bool Engine::ReadyToSleep(Sleeper who) {
  // Sequentially consistent, before the loads of Advance: see Signals::RingIfAsleep.
  mine_.sleeping.store(who, std::memory_order_seq_cst);
  Enqueue();
  if (!Advance()) return true;
  mine_.sleeping.store(kNobody, std::memory_order_relaxed);
  return false;
}

void Engine::StopDriving(Lock& lock) {
  while (true) {
    if (!idle() && !stopped_) {
      // From here on the group's thread advances the operations when a peer wakes it.
      while (!ReadyToSleep(kGroupThread) && !idle()) {
      }
      if (!group_thread_.joinable()) {
        group_thread_ = std::thread([self = shared_from_this()] { self->GroupThread(); });
      } else if (deep_asleep_.exchange(false, std::memory_order_seq_cst)) {
        mine_.doorbell.fetch_add(1, std::memory_order_seq_cst);
        futex::Wake(&mine_.doorbell, kGroupThread);
      }
    }
    std::vector<EngineOp*> finished;
    if (!finished_.empty()) finished.swap(finished_);
    completed_ = false;
    lock.unlock();
    for (EngineOp* op : finished) op->AfterDone();
    if (num_waiters_.load(std::memory_order_seq_cst) != 0) {
      const std::lock_guard<std::mutex> waiters_lock(waiters_mutex_);
      waiters_.notify_all();
    }
    if (submitted_count_.load(std::memory_order_seq_cst) == 0) return;
    if (!lock.try_lock()) return;
    Enqueue();
    Advance();
  }
}

void Engine::GroupThread() {
  int idle_looks = 0;
  while (!stopping_.load(std::memory_order_seq_cst)) {
    const uint32_t bell = mine_.doorbell.load(std::memory_order_seq_cst);
    {
      // Must block: with try_lock, the wake-up would be lost if another thread still held the lock.
      Lock lock(driving_);
      Enqueue();
      // No yields: the core is left to this rank's other threads.
      if (!idle()) Spin([this] { return idle(); }, /*yield_ns=*/0);
      CheckFailures();
      idle_looks = idle() ? idle_looks + 1 : 0;
      StopDriving(lock);
    }
    const bool deep = idle_looks > kIdleLooks;
    deep_asleep_.store(deep, std::memory_order_seq_cst);
    if (stopping_.load(std::memory_order_seq_cst)) break;
    // Another thread may have left operations to this one before it saw deep_asleep_.
    const bool left = mine_.sleeping.load(std::memory_order_seq_cst) == kGroupThread;
    futex::Wait(&mine_.doorbell, bell, kGroupThread,
                deep && !left ? int64_t{3600} * 1000 * kMillisecond : kCheckIntervalNs);
  }
}

void Engine::Enqueue() {
  if (submitted_count_.load(std::memory_order_seq_cst) == 0) return;
  std::vector<EngineOp*> taken;
  {
    const std::lock_guard<std::mutex> submit_lock(submit_mutex_);
    taken.swap(submitted_);
    submitted_count_.store(0, std::memory_order_seq_cst);
  }
  for (EngineOp* op : taken) Take(op);
}

void Engine::Take(EngineOp* op) {
  if (!failure_.ok()) {
    Complete(op, Explain(op->requests[0], failure_));
  } else if (IsMessage(*op)) {
    messages_.Add(op);
  } else {
    collectives_under_way_.push_back(op);
  }
}

bool Engine::Advance() {
  bool moved = false;
  if (!collectives_under_way_.empty()) moved |= AdvanceCollectives();
  if (!messages_.idle()) moved |= messages_.Advance();
  return moved;
}

bool Engine::AdvanceCollectives() {
  bool moved = false;
  while (!collectives_under_way_.empty()) {
    EngineOp* op = collectives_under_way_.front();
    if (coroutine_.empty()) {
      coroutine_ = collectives_.Start(op->requests[op->next_request_]);
      moved = true;
    } else if (!coroutine_.Ready()) {
      return moved;
    }
    moved = true;
    if (!coroutine_.Advance()) continue;
    const absl::Status status = coroutine_.status();
    coroutine_ = Coroutine();
    if (!status.ok()) {
      Fail(status, /*tell_peers=*/true);
      return true;
    }
    if (++op->next_request_ < op->requests.size()) continue;
    collectives_under_way_.pop_front();
    Complete(op, absl::OkStatus());
  }
  return moved;
}

void Engine::Complete(EngineOp* op, absl::Status status) {
  op->status_ = std::move(status);
  if (op->calls_before_done && op->status_.ok()) op->BeforeDone();
  if (op->calls_after_done) finished_.push_back(op);
  op->done_.store(true, std::memory_order_release);
  completed_ = true;
}

absl::Status Engine::Explain(const Request& request, const absl::Status& cause) const {
  return absl::Status(cause.code(),
                      absl::StrCat("rank ", rank_, ": ", ToString(request), ": ", cause.message()));
}

absl::Status Engine::GoneOrDead(int peer) const {
  if (peer == rank_ || peer < 0) return absl::OkStatus();
  if (view_.control(peer).state.load(std::memory_order_seq_cst) == RankState::kLeft) {
    return absl::UnavailableError(
        absl::StrCat("Connection closed by peer: ", peers_[peer].name, " has left the group"));
  }
  if (peers_[peer].alive != nullptr && !peers_[peer].alive()) {
    return absl::UnavailableError(
        absl::StrCat("Connection closed by peer: ", peers_[peer].name, kHasDied));
  }
  return absl::OkStatus();
}

// For a receive from any rank: fails if any rank has died, or if all other ranks have left.
absl::Status Engine::AnyDeadOrAllGone() const {
  bool present = false;
  for (int peer = 0; peer < view_.world_size(); ++peer) {
    if (peer == rank_) continue;
    if (view_.control(peer).state.load(std::memory_order_seq_cst) != RankState::kPresent) continue;
    present = true;
    DDP_RETURN_IF_ERROR(GoneOrDead(peer));
  }
  return present ? absl::OkStatus()
                 : absl::UnavailableError(
                       "Connection closed by peer: all other ranks have left the group");
}

// The ranks that have not called the current collective, as text.
std::string Engine::Missing() const {
  if (collectives_under_way_.empty()) return "";
  std::vector<std::string> missing;
  for (int peer = 0; peer < view_.world_size(); ++peer) {
    uint64_t newest = 0;
    for (const Record& record : view_.control(peer).records) {
      newest = std::max(newest, record.sequence.load(std::memory_order_acquire));
    }
    if (newest < collectives_.sequence()) missing.push_back(peers_[peer].name);
  }
  if (missing.empty()) return "; all ranks have called it";
  return absl::StrCat("; not called by ", absl::StrJoin(missing, ", "));
}

void Engine::CheckFailures() {
  if (!failure_.ok()) return;
  // Another thread waits in Leave for this one to stop driving.
  if (stopping_.load(std::memory_order_seq_cst)) return EndAsLeft();
  if (view_.header().failure.state.load(std::memory_order_acquire) == Failure::kSet) {
    Fail(PublishedFailure(), /*tell_peers=*/false);
    return;
  }
  const int64_t now = NowNs();
  if (idle() || now - last_check_ns_ < kCheckIntervalNs / 2) return;
  last_check_ns_ = now;

  absl::Status error;
  if (!collectives_under_way_.empty() && !coroutine_.empty()) {
    for (int peer = 0; peer < view_.world_size() && error.ok(); ++peer) {
      error = collectives_.CheckSame(peer);
    }
    for (Reach reach = *coroutine_.pending(); error.ok() && !reach.Ready(); ++reach.peer) {
      error = GoneOrDead(reach.peer);
    }
  }
  messages_.ForEach([&](EngineOp*, int peer) {
    if (!error.ok()) return;
    error = peer == kAnySource ? AnyDeadOrAllGone() : GoneOrDead(peer);
  });
  // The peer may have completed its part before it ended.
  if (!error.ok() && Advance()) return;

  const auto late = [&](EngineOp* op) {
    if (op->deadline_ns_ == 0) {
      op->deadline_ns_ = now + std::min(op->timeout_ns, std::numeric_limits<int64_t>::max() - now);
    }
    if (error.ok() && now >= op->deadline_ns_) {
      error = absl::DeadlineExceededError(absl::StrCat("Timed out", Missing()));
    }
  };
  for (EngineOp* op : collectives_under_way_) late(op);
  messages_.ForEach([&](EngineOp* op, int) { late(op); });
  if (!error.ok()) Fail(error, /*tell_peers=*/true);
}

// Waits until no peer writes to a tensor of the current collective, because the tensor is about to
// be returned to its caller. A write ends soon, unless the peer dies or has been stopped.
void Engine::AwaitPeersWriting() const {
  if (collectives_under_way_.empty()) return;
  const int64_t until = NowNs() + kLongestWriteNs;
  for (int peer = 0; peer < view_.world_size(); ++peer) {
    if (peer == rank_) continue;
    while (collectives_.WritesToPeers(peer) && NowNs() < until) {
      if (peers_[peer].alive != nullptr && !peers_[peer].alive()) break;
      ::sched_yield();
    }
  }
}

void Engine::Fail(const absl::Status& cause, bool tell_peers) {
  if (!failure_.ok()) return;
  if (tell_peers) PublishFailure(cause);
  // All ranks report the first failure of the group.
  const absl::Status published = PublishedFailure();
  failure_ = tell_peers && !published.ok() ? published : cause;
  coroutine_ = Coroutine();
  AwaitPeersWriting();
  for (EngineOp* op : std::exchange(collectives_under_way_, {})) {
    Complete(op, Explain(op->requests[op->next_request_], failure_));
  }
  messages_.Fail(failure_);
}

void Engine::PublishFailure(const absl::Status& cause) {
  Failure& failure = view_.header().failure;
  uint32_t none = Failure::kNone;
  if (failure.state.compare_exchange_strong(none, Failure::kBeingWritten)) {
    failure.code = static_cast<uint32_t>(cause.code());
    const size_t length = std::min(cause.message().size(), sizeof(failure.text) - 1);
    std::memcpy(failure.text, cause.message().data(), length);
    failure.text[length] = '\0';
    failure.state.store(Failure::kSet, std::memory_order_seq_cst);
  }
  // All ranks report the first failure, so wait until it is written; with a limit, because its
  // writer may die.
  for (int looks = 0; looks < 1000 && PublishedFailure().ok(); ++looks) ::sched_yield();
  for (int peer = 0; peer < view_.world_size(); ++peer) signals_.Ring(peer);
}

absl::Status Engine::PublishedFailure() const {
  const Failure& failure = view_.header().failure;
  if (failure.state.load(std::memory_order_seq_cst) != Failure::kSet) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(failure.code), failure.text);
}

void Engine::Abort(const absl::Status& why) {
  PublishFailure(why);
  // If another thread drives, it sees the failure and releases the lock.
  Lock lock(driving_);
  Enqueue();
  Fail(why, /*tell_peers=*/true);
  StopDriving(lock);
}

void Engine::EndAsLeft() {
  Enqueue();
  Advance();
  Fail(absl::CancelledError(absl::StrCat(peers_[rank_].name, " has shut the group down")),
       /*tell_peers=*/false);
}

void Engine::Leave() {
  if (::getpid() != owner_) return;  // a forked child is not the rank
  mine_.state.store(RankState::kLeft, std::memory_order_seq_cst);
  stopping_.store(true, std::memory_order_seq_cst);
  signals_.Ring(rank_);
  Lock lock(driving_);
  EndAsLeft();
  stopped_ = true;
  std::thread group_thread = std::move(group_thread_);
  StopDriving(lock);
  for (int peer = 0; peer < view_.world_size(); ++peer) {
    if (peer != rank_) signals_.Ring(peer);
  }
  if (!group_thread.joinable()) return;
  // The group's thread itself may be running the callback that releases the group.
  if (group_thread.get_id() == std::this_thread::get_id()) {
    group_thread.detach();
  } else {
    group_thread.join();
  }
}

absl::Status Engine::failure() const {
  // failure_ of this rank is the same, unless the rank has left.
  return PublishedFailure();
}

}  // namespace ddp::backends::shm
