// What the training thread of a rank does outside of the group's calls, as far as the watchdogs of
// the ranks must know it: ranks of which one waits in a Coordinator call and another in a
// collective wait for each other, and no timeout but the collective's would end that.
//
//   auto thread = std::make_shared<TrainingThread>();   // by the thread itself
//   backend = Watch(backend, store, {.training_thread = thread});
//   thread->BeginRound(1);                              // a Coordinator call
//   thread->EndRound();
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "absl/strings/string_view.h"

namespace ddp::backends::watch {

// Begins the reason of errors of ranks that can never reach each other's calls. Errors of a
// collective are c10::Error, which carries no payload: ddp/session finds the words in its text.
inline constexpr absl::string_view kWaitForEachOther = "the ranks wait for each other: ";

// Thread-safe.
class TrainingThread {
 public:
  TrainingThread() = default;
  TrainingThread(const TrainingThread&) = delete;
  TrainingThread& operator=(const TrainingThread&) = delete;

  bool IsThisThread() const { return std::this_thread::get_id() == id_; }

  // Coordinator calls of this rank are numbered from 1, in rounds with those of other ranks. Of
  // another thread's call only the number counts: the training thread does not wait in it.
  void BeginRound(int64_t round) {
    rounds_begun_ = round;
    if (IsThisThread()) waits_in_round_ = round;
  }
  void EndRound() {
    if (IsThisThread()) waits_in_round_ = 0;
  }
  // The rank makes no further call of the group.
  void EndWork() { has_ended_ = true; }

  int64_t rounds_begun() const { return rounds_begun_; }
  int64_t waits_in_round() const { return waits_in_round_; }  // 0: in none
  bool has_ended() const { return has_ended_; }

 private:
  const std::thread::id id_ = std::this_thread::get_id();
  std::atomic<int64_t> rounds_begun_{0};
  std::atomic<int64_t> waits_in_round_{0};
  std::atomic<bool> has_ended_{false};
};

}  // namespace ddp::backends::watch
