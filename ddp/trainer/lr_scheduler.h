// Sets the learning rates of an optimizer, by a schedule.
//
//   LRScheduler scheduler(optimizer, schedule);
//   loss.backward();
//   scheduler.step();      // before the optimizer's
//   optimizer.step();
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/stateful.h"
#include "ddp/trainer/plateau.h"
#include "ddp/trainer/schedule.h"
#include "torch/optim/optimizer.h"

namespace ddp::trainer {

// Thread-compatible; not collective. Counts the steps that it has made.
//
// Its state is the schedule's options, its length and pace, and the number of steps that it has
// made; a load takes how far it had come, and says which options differ. With schedule plateau it
// is also what that has learned of the metric, which a load takes.
class LRScheduler final : public checkpoint::Stateful {
 public:
  // The base rate of a parameter group is the one that it has now, or, of a group that is added
  // later, at the first step after that. `optimizer` outlives this.
  LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule);

  // Sets the rate of each group for the next step of the optimizer: the base rate, which schedule
  // plateau may have reduced, times the schedule's factor. Returns that of the first group; 0 if
  // there is none.
  double step();

  // Takes the metrics, by name, of an evaluation that is a part of the run, the same on all ranks.
  // It has an effect with schedule plateau. NotFound: its metric is none of these.
  absl::Status Evaluated(const std::map<std::string, double>& metrics);

  // The part of the schedule that is done, in [0, 1]; 0 if the run has no length.
  double progress() const { return schedule_.Progress(steps_); }
  // Whether the rates stay 0 from now on, as at the end of a cosine.
  bool has_ended() const { return schedule_.StaysZero(steps_); }
  const Schedule& schedule() const { return schedule_; }

  // Entries: those of the dict `scheduler`, and `progress`.
  absl::StatusOr<checkpoint::State> state_dict() override;
  absl::Status CheckStateDict(const checkpoint::State& state) const override;
  absl::Status load_state_dict(const checkpoint::State& state,
                               checkpoint::LoadNotes& notes) override;

  // Call it after a load, with the number of steps that the run has taken, and what it has left
  // here: the schedule goes on after the steps that it has made itself, fewer than the run's if its
  // optimizer does not step each time, and what is left of it is spread over the rest
  // (Schedule::Resumed).
  void GoOn(int64_t steps, const StepsLeft& left);

 private:
  struct Saved {
    SavedProgress schedule;
    bool has_progress = false;                    // false: of an older checkpoint
    std::optional<int64_t> steps = std::nullopt;  // that it had made; nullopt: as many as the run
    std::optional<Plateau::State> plateau = std::nullopt;  // if it has some
  };
  SavedProgress Unsaved() const;
  absl::StatusOr<Saved> Read(const checkpoint::State& state) const;
  double base_lr() const { return base_lrs_.empty() ? 0 : base_lrs_[0]; }
  void AddNewGroups();

  torch::optim::Optimizer& optimizer_;
  const Schedule fresh_;  // of a run that begins here
  Schedule schedule_;
  std::optional<Plateau> plateau_;  // of schedule plateau
  std::vector<double> base_lrs_;    // by group
  int64_t steps_ = 0;
  std::optional<Saved> loaded_;
};

}  // namespace ddp::trainer
