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
#include "backends/shm/engine/futex.h"
#include "base/status.h"

namespace ddp::backends::shm {
namespace {

constexpr int64_t kMillisecond = 1'000'000;

// A sleeper looks this often whether its peers live; a death is told within two of these.
constexpr int64_t kLookAroundNs = 50 * kMillisecond;

// So long is a peer waited for that has been stopped while it writes to this rank's tensor.
constexpr int64_t kLongestWriteNs = 10'000 * kMillisecond;

// So many of these without anything under way, and the group's thread sleeps for good.
constexpr int kIdleLooks = 20;

// Looks before the clock is read or a pause is made, each of which would cost a tenth of the
// fastest all-reduce.
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

// The group's thread has a part of the object, so it is not running any more.
Engine::~Engine() {
  if (group_thread_.joinable()) group_thread_.detach();
}

template <typename Done>
bool Engine::Spin(const Done& done, int64_t yield_ns, int64_t deadline_ns) {
  // Peers need not ring while somebody looks. Written only if need be: they have this line cached.
  if (mine_.sleeping.load(std::memory_order_relaxed) != kNobody) {
    mine_.sleeping.store(kNobody, std::memory_order_relaxed);
  }
  int64_t since = 0;  // when it last moved, about; 0: it has just moved
  bool spinning = false;
  int looks = 0;  // since it last moved
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
    // Whoever drives takes it, also if it is about to stop: it looks once more after it has
    // unlocked. This look comes after the store above, so one of the two sees the other.
    if (!lock.try_lock()) {
      signals_.RingIfAsleep(rank_);
      return;
    }
    Enqueue();
  }
  if (!Spin([op] { return op->done(); }, expects_wait_ ? options_.submit_yield_ns : 0)) {
    left_ = op;
    left_ns_ = NowNs();
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
  expects_wait_ = op == left_ && NowNs() - left_ns_ < options_.submit_yield_ns;
  int64_t yield_ns = options_.wait_yield_ns;
  while (true) {
    Enqueue();
    // Before the looks: a peer that has something to tell rings whether this rank sleeps or not.
    const uint32_t bell = mine_.doorbell.load(std::memory_order_seq_cst);
    if (Spin([op] { return op->done(); }, yield_ns, deadline_ns)) return true;
    if (OthersWait()) return true;
    if (!ReadyToSleep(kWaiter)) continue;
    if (OthersWait()) return true;
    const int64_t now = NowNs();
    if (now >= deadline_ns) return false;
    futex::Wait(&mine_.doorbell, bell, kWaiter, std::min(kLookAroundNs, deadline_ns - now));
    mine_.sleeping.store(kNobody, std::memory_order_relaxed);
    CheckFailures();
    // Who waits for long, rank 0's checkpoint say, leaves the core alone.
    const bool rung = mine_.doorbell.load(std::memory_order_relaxed) != bell;
    yield_ns = rung ? options_.wait_yield_ns : 0;
  }
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
      // From here on the group's thread sees to it, when a peer rings.
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
    for (EngineOp* op : finished) op->Finished();
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
      // Blocks: were it to give up because another thread holds this for a moment longer, the ring
      // that woke it would be lost.
      Lock lock(driving_);
      Enqueue();
      // No yields: this rank's other threads have better use for the core.
      if (!idle()) Spin([this] { return idle(); }, /*yield_ns=*/0);
      CheckFailures();
      idle_looks = idle() ? idle_looks + 1 : 0;
      StopDriving(lock);
    }
    const bool deep = idle_looks > kIdleLooks;
    deep_asleep_.store(deep, std::memory_order_seq_cst);
    if (stopping_.load(std::memory_order_seq_cst)) break;
    // Something may have been left to it since it looked, by a thread that did not see it go.
    const bool left = mine_.sleeping.load(std::memory_order_seq_cst) == kGroupThread;
    futex::Wait(&mine_.doorbell, bell, kGroupThread,
                deep && !left ? int64_t{3600} * 1000 * kMillisecond : kLookAroundNs);
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
    if (task_.empty()) {
      task_ = collectives_.Start(op->requests[op->next_request_]);
      moved = true;
    } else if (!task_.Ready()) {
      return moved;
    }
    moved = true;
    if (!task_.Advance()) continue;
    const absl::Status status = task_.status();
    task_ = Task();
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
  if (op->wants_completing && op->status_.ok()) op->Completing();
  if (op->wants_finished) finished_.push_back(op);
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
        absl::StrCat("Connection closed by peer: ", peers_[peer].name, " has died"));
  }
  return absl::OkStatus();
}

// Of those who may send to a receive from any rank: one that dies is the end of the group all the
// same, one that leaves is not as long as another is there.
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

// Ranks that have not called the collective under way.
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
  if (idle() || now - last_check_ns_ < kLookAroundNs / 2) return;
  last_check_ns_ = now;

  absl::Status trouble;
  if (!collectives_under_way_.empty() && !task_.empty()) {
    for (int peer = 0; peer < view_.world_size() && trouble.ok(); ++peer) {
      trouble = collectives_.CheckSame(peer);
    }
    for (Reach reach = *task_.pending(); trouble.ok() && !reach.Ready(); ++reach.peer) {
      trouble = GoneOrDead(reach.peer);
    }
  }
  messages_.ForEach([&](EngineOp*, int peer) {
    if (!trouble.ok()) return;
    trouble = peer == kAnySource ? AnyDeadOrAllGone() : GoneOrDead(peer);
  });
  // Before it went it may have done all that was needed.
  if (!trouble.ok() && Advance()) return;

  const auto late = [&](EngineOp* op) {
    if (op->deadline_ns_ == 0) {
      op->deadline_ns_ = now + std::min(op->timeout_ns, std::numeric_limits<int64_t>::max() - now);
    }
    if (trouble.ok() && now >= op->deadline_ns_) {
      trouble = absl::DeadlineExceededError(absl::StrCat("Timed out", Missing()));
    }
  };
  for (EngineOp* op : collectives_under_way_) late(op);
  messages_.ForEach([&](EngineOp* op, int) { late(op); });
  if (!trouble.ok()) Fail(trouble, /*tell_peers=*/true);
}

// A peer may be writing to a tensor of the collective under way, which its caller is about to get
// back. It is through in a moment, or dead; one that somebody has stopped is not waited for for
// ever.
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
  // What the first who failed says is everybody's.
  const absl::Status published = PublishedFailure();
  failure_ = tell_peers && !published.ok() ? published : cause;
  task_ = Task();
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
  // The first failure is everybody's, so it is waited for; not for ever, since its writer may die.
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
  // A thread that drives sees the failure when it wakes, if it has to wait at all.
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
  if (::getpid() != owner_) return;  // a forked child that ends: the rank is its parent
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
  // It may itself be running the callback that lets go of the group.
  if (group_thread.get_id() == std::this_thread::get_id()) {
    group_thread.detach();
  } else {
    group_thread.join();
  }
}

absl::Status Engine::failure() const {
  // Of this rank's own the failure is the same, or the group has been left.
  return PublishedFailure();
}

}  // namespace ddp::backends::shm
