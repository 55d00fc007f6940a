// The slow path of a watched group: a thread that seldom wakes, looks at what its rank has under
// way, and asks the other ranks, through the store, when something does not end.
//
//   auto watchdog = c10::make_intrusive<Watchdog>(std::move(options));
//   watchdog->Start();
//   const uint64_t number = watchdog->collectives().Begin(record);
//   … if it failed: throw watchdog->Explain(std::current_exception(), …);
//   watchdog->Stop();
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "backends/watch/board.h"
#include "backends/watch/door.h"
#include "backends/watch/examine.h"
#include "backends/watch/peers.h"
#include "backends/watch/recorder.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends::watch {

struct WatchdogOptions {
  int rank = 0;
  int size = 1;
  std::string name;                       // of the group, for messages: "gloo"
  c10::intrusive_ptr<c10d::Store> store;  // this watchdog's own connection
  std::string host;                       // HostId(); ranks of one host watch each other
  // Where the store is, for the way by which other hosts' ranks reach this one. Empty: unknown.
  std::string store_host;
  absl::Duration stall = absl::Seconds(30);  // zero: stalls are not reported
  // Whether collectives are noted as ended when they are. Else (NCCL) they count as ended once
  // called, and a stall is that of ranks that have not called what others have.
  bool sees_completion = true;
  // Whether "has died" in the backend's errors is said of a rank by its number in this group, and
  // not in some part of it, as hier has them.
  bool names_dead = false;
  // Whether its ranks' numbers are not the job's.
  bool is_subgroup = false;
  // Then Stop waits on rank 0 (for 1.4 s at most) for the others to have left, who would take the
  // store's end for a failure.
  bool rank_0_serves_store = false;
  // Ends, with errors, what the inner backend has under way. Called once at most, by the thread.
  std::function<void()> abort;
};

// Thread-safe. Lives as long as any Work of its group.
class Watchdog : public c10::intrusive_ptr_target {
 public:
  explicit Watchdog(WatchdogOptions options);
  ~Watchdog() override;

  void Start();
  // Tells the others that this rank leaves, and ends the thread. `abort` is not called afterwards.
  void Stop();
  // The same for a group that this rank gives up: pending and later calls fail. The caller aborts
  // the inner backend.
  void Abort();

  Recorder& collectives() { return collectives_; }
  // Sends and receives: noted down, never compared.
  Recorder& messages() { return messages_; }
  void CountMessage(bool sent, int peer);

  // Whether the group has been given up.
  bool condemned() const { return condemned_.load(std::memory_order_acquire); }
  // Then: what calls throw.
  std::exception_ptr Verdict(const std::string& what) const;

  // What to throw in the place of `error`, with which the call that `what` describes has failed: it
  // names the rank to blame, where that can be found within half a second (1.5 s if a rank on
  // another host is silent and its process not known to have ended). `number` is the collective's,
  // 0 for a message.
  std::exception_ptr Explain(const std::exception_ptr& error, const std::string& what,
                             uint64_t number);

  // `condemned` is called once if the group is given up, unless it is withdrawn before; at once if
  // that has happened already.
  uint64_t OnCondemned(std::function<void()> callback);
  void Withdraw(uint64_t id);

 private:
  using Clock = std::chrono::steady_clock;

  // A failed call that waits for its explanation.
  struct Request {
    uint64_t number = 0;
    bool answered = false;
    std::string answer;
  };
  // What the thread knows of the oldest collective under way.
  struct Watched {
    uint64_t number = 0;
    Clock::time_point since;
    bool compared = false;        // with the other ranks' calls
    bool blamed_on_dead = false;  // or found not to be
    bool reported = false;
  };

  void Run();
  void Observe();
  void Beat();
  void MeetPeers();
  // Whether it is not yet known of all ranks where their processes and doors are.
  bool Meeting() const;
  // At the doors of ranks on other hosts: once while all is well, and when something takes long.
  void KnockAtDoors();
  void AnswerRequests();
  void CheckOldest();
  void CheckOldestMessage();
  void CheckBehind();
  // Whether what is under way may be waiting for a rank whose process has ended.
  bool AwaitsDead() const;
  void Leave();

  Report Describe(bool with_tail);
  void Post(bool with_tail);
  void AnswerAlarm();
  void HearVerdict();
  absl::Duration DeathGrace() const;
  absl::Duration DeathPatience() const;
  Picture Gather(Question question, absl::Duration patience);
  Finding Investigate(uint64_t number, Question question, absl::Duration patience);
  absl::Duration Patience() const;
  absl::Duration RemotePatience() const;
  void Condemn(const std::string& finding);
  void GiveUp(std::string verdict);
  void ReportStall(uint64_t number, absl::Duration age, const std::string& text);
  std::string MessagesBetween(const Record& record);
  void Sleep(absl::Duration duration);
  static absl::Duration Since(Clock::time_point start);
  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }
  bool InForkedChild() const;

  WatchdogOptions options_;  // unchanged, but that `abort` moves to abort_
  const absl::Duration beat_;
  const int owner_pid_;
  Recorder collectives_;
  Recorder messages_;
  std::vector<std::atomic<uint64_t>> sent_;
  std::vector<std::atomic<uint64_t>> received_;

  std::atomic<bool> condemned_{false};
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;
  std::condition_variable wake_;      // the thread
  std::condition_variable answered_;  // those who wait for it
  std::string verdict_;
  std::string failure_;  // the first
  std::vector<std::shared_ptr<Request>> requests_;
  uint64_t next_callback_ = 1;
  std::map<uint64_t, std::function<void()>> callbacks_;
  bool finished_ = false;
  std::function<void()> abort_;
  std::thread thread_;

  // The thread's own.
  Board board_;
  Peers peers_;
  Door* own_door_ = nullptr;
  std::string door_;  // its address, or that there is none, once there is reason to look for it
  std::string told_door_;
  int64_t answered_alarm_ = 0;
  Clock::time_point answered_alarm_at_;
  Clock::time_point started_;
  Clock::time_point next_beat_;
  Clock::time_point next_knock_;
  uint64_t seen_count_ = 0;
  uint64_t posted_count_ = 0;
  uint64_t posted_signature_ = 0;
  Clock::time_point advanced_at_;
  Watched oldest_;
  Watched oldest_message_;
  Watched behind_;  // the first collective that not all ranks have called
  Record oldest_message_record_;
  std::optional<Clock::time_point> death_seen_;
};

}  // namespace ddp::backends::watch
