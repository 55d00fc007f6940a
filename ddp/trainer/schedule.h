// Learning-rate schedules: a factor of the base rates as a function of the step, and LRScheduler,
// which sets the rates of an optimizer by one. What a checkpoint keeps of them does not depend on
// the world size.
//
//   DDP_ASSIGN_OR_RETURN(Schedule schedule, Schedule::Create({.name = "cosine"}, {.epochs = 4,
//   .steps_per_epoch = 100})); double lr = base_lr * schedule.Factor(step);
//
//   LRScheduler scheduler(optimizer, schedule);
//   loss.backward();
//   scheduler.step();      // before the optimizer's
//   optimizer.step();
//
// A program may link its own, in a target with alwayslink = True, and then say --schedule=sqrt:
//
//   const Registration<ScheduleRegistry> kSqrt(
//       "sqrt", ScheduleEntry{.factor = [](const ScheduleOptions&, const ScheduleTime& now) {
//         return 1 / std::sqrt(1 + now.time);
//       }});
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/implementation_options.h"
#include "base/options.h"
#include "base/registry.h"
#include "checkpoint/stateful.h"
#include "ddp/trainer/plateau.h"
#include "torch/optim/optimizer.h"

namespace ddp::trainer {

struct ScheduleOptions;

// The place in a schedule. Times are in optimizer steps of the world that the run began in, so that
// the factor is the same function of the examples that were used in any world.
struct ScheduleTime {
  double time = 0;             // since the end of the warm-up, at least 0
  double span = 1;             // from there to the end of the run, at least 1; infinite: no end
  double steps_per_epoch = 1;  // at least 1

  double progress() const { return std::min(1.0, time / span); }
  // Complete steps. A time that was resumed may be short of one by its rounding.
  int64_t steps() const { return static_cast<int64_t>(time + 1e-6); }
};

struct ScheduleEntry {
  std::function<double(const ScheduleOptions& options, const ScheduleTime& now)> factor;
  // Whether it is stretched to a run that has become longer. Others do not depend on the length,
  // and go on behind it.
  bool ends_with_run = true;
  // Names of the members of ScheduleOptions that it uses. Others may not be given, but for
  // step_epochs, gamma and warm-up.
  std::vector<std::string> takes = {};
  // OptionError for values that make no sense together; null: there are none.
  absl::Status (*check)(const ScheduleOptions& options) = nullptr;
  AnyOptions (*options)() = nullptr;  // its own, schedule.NAME.…; null: none
};

struct ScheduleTag {
  static constexpr absl::string_view kWhat = "schedule";
};
using ScheduleRegistry = Registry<ScheduleEntry, ScheduleTag>;

struct ScheduleOptions {
  std::string name = "constant";
  // Linear warm-up, by one of three. Steps; factor of the first: 1/warmup_steps. A run that is
  // resumed in another world counts them as steps of the world that it began in.
  int64_t warmup_steps = 0;
  double step_epochs = 1;               // step: epochs between decays
  double gamma = 0.1;                   // step, multistep: factor of each decay
  double warmup_epochs = 0;             // rounded up to steps
  int64_t warmup_samples = 0;           // examples of all ranks, rounded up to steps
  std::vector<double> milestones = {};  // multistep: epochs at which it decays
  double min_factor = 0;                // cosine, polynomial: factor at the end
  double power = 1;                     // polynomial
  double start_factor = 1;              // linear: at the beginning
  double end_factor = 0;                // linear: at the end
  double pct_start = 0.3;               // onecycle: part of the run in which rates rise
  std::string anneal = "cos";           // onecycle: cos, linear
  double div_factor = 25;               // onecycle: it begins at 1/div_factor
  double final_div_factor = 1e4;        // onecycle: it ends at 1/div_factor/final_div_factor
  PlateauOptions plateau = {};          // plateau

  ImplementationOptions implementations = ImplementationOptions::From<ScheduleRegistry>();
};

constexpr auto OptionsOf(const ScheduleOptions&) {
  constexpr double kMost = 1e9;
  return Options(
      Option("name", &ScheduleOptions::name, "schedule of the learning rate")
          .OneOfThese(&ScheduleRegistry::Names),
      Option("warmup_steps", &ScheduleOptions::warmup_steps, "optimizer steps of linear warm-up")
          .AtLeast(0)
          .AtMost(kMost),
      Option("warmup_epochs", &ScheduleOptions::warmup_epochs, "warm-up in epochs instead of steps")
          .AtLeast(0)
          .AtMost(kMost),
      Option("warmup_samples", &ScheduleOptions::warmup_samples,
             "warm-up in examples of all ranks instead of steps")
          .AtLeast(0)
          .AtMost(1e15),
      Option("step_epochs", &ScheduleOptions::step_epochs,
             "with schedule step: epochs between decays of the learning rate")
          .AtLeast(1e-6)
          .AtMost(kMost),
      Option("gamma", &ScheduleOptions::gamma,
             "with schedules step and multistep: factor of each decay")
          .AtLeast(0)
          .AtMost(kMost),
      Option("milestones", &ScheduleOptions::milestones,
             "with schedule multistep: epochs at which the learning rate decays")
          .AtLeast(0)
          .AtMost(kMost),
      Option("min_factor", &ScheduleOptions::min_factor,
             "with schedules cosine and polynomial: factor at the end of the run")
          .AtLeast(0)
          .AtMost(1),
      Option("power", &ScheduleOptions::power, "with schedule polynomial: power of what is left")
          .Above(0)
          .AtMost(kMost),
      Option("start_factor", &ScheduleOptions::start_factor,
             "with schedule linear: factor at the beginning")
          .AtLeast(0)
          .AtMost(kMost),
      Option("end_factor", &ScheduleOptions::end_factor,
             "with schedule linear: factor at the end of the run")
          .AtLeast(0)
          .AtMost(kMost),
      Option("pct_start", &ScheduleOptions::pct_start,
             "with schedule onecycle: part of the run in which the learning rate rises")
          .AtLeast(0)
          .AtMost(1),
      Option("anneal", &ScheduleOptions::anneal, "with schedule onecycle: how it rises and falls")
          .OneOf("cos", "linear"),
      Option("div_factor", &ScheduleOptions::div_factor,
             "with schedule onecycle: the first rate is the base rate divided by this")
          .Above(0)
          .AtMost(1e30),
      Option("final_div_factor", &ScheduleOptions::final_div_factor,
             "with schedule onecycle: the last rate is the first divided by this")
          .Above(0)
          .AtMost(1e30),
      Nested("plateau", &ScheduleOptions::plateau, "schedule plateau"),
      Inline(&ScheduleOptions::implementations));
}

// Checks what Schedule::Create checks that does not depend on the run's length. OptionError.
// Thread-safe.
absl::Status CheckSchedule(const ScheduleOptions& options);

// OptionError for what counts epochs, of which a run has none whose sampler has no end
// (data::kEndless). Thread-safe.
absl::Status CheckWithoutEpochs(const ScheduleOptions& options);

// OptionError for what depends on the length of the run, of one that has none; `why` goes on after
// "depends on the length of the run". Thread-safe.
absl::Status CheckWithoutLength(const ScheduleOptions& options, absl::string_view why);

// A program's own schedule, for TrainerOptions::lr_lambda: the factor of the base rates after
// `step` steps, of which `progress`, in [0, 1], is the part that is done; both without warm-up, and
// in steps of the world that the run began in. `progress` is 0 if the run has no length
// (RunLength::is_known).
using LrLambda = std::function<double(double progress, int64_t step)>;

// The length of a run, in optimizer steps. The run ends with what comes first of its epochs and
// max_steps.
struct RunLength {
  int64_t epochs = 1;
  int64_t steps_per_epoch = 1;
  int64_t max_steps = 0;         // 0: no limit
  int64_t samples_per_step = 1;  // examples of all ranks
  // False: a loop ends it when it likes, having neither epochs of its own nor max_steps.
  bool is_known = true;

  // 0: not known.
  int64_t total_steps() const {
    if (!is_known) return 0;
    const int64_t all = epochs * steps_per_epoch;
    return max_steps > 0 ? std::min(all, max_steps) : all;
  }
};

// The time of a schedule at each step, in optimizer steps of the world that the run began in.
struct Pace {
  // They are of the run since it was resumed in its present world.
  int64_t first_step = 0;
  double first_time = 0;
  double time_per_step = 1;

  double Time(int64_t step) const {
    return first_time + static_cast<double>(step - first_step) * time_per_step;
  }
};

// The progress of a run.
struct SavedProgress {
  double progress = 0;  // the part of the schedule that is done, in [0, 1]; the same in any world
  // The schedule's lengths, in steps of the world that the run began in.
  int64_t total_steps = 1;  // 0: the run had no length
  int64_t steps_per_epoch = 1;
  std::optional<Pace> pace = std::nullopt;  // nullopt: it was not saved
  int64_t samples_per_step = 1;
};

// The steps that a run has left in its present world.
struct StepsLeft {
  // The run has no max_steps.
  StepsLeft(int64_t in_epochs) : in_run(in_epochs), in_epochs(in_epochs) {}  // NOLINT: as a number
  StepsLeft(int64_t in_run, std::optional<int64_t> in_epochs)
      : in_run(in_run), in_epochs(in_epochs) {}

  int64_t in_run;  // to its end; not used if it has no length
  // The steps to the end of its epochs, whatever max_steps is; below 0: that was so many steps ago.
  // nullopt: a loop without a loader, whose steps are the same in any world.
  std::optional<int64_t> in_epochs;
};

// An immutable value; thread-safe.
//
// In the world that the run began in a step takes a time of exactly 1. If a run is resumed in
// another world, the time that is left is spread over the steps that are left: so that a schedule
// that ends with the run ends where the run ends, and others are at the same epochs.
class Schedule {
 public:
  // Makes the schedule of a run from its beginning. OptionError for options out of range, and for
  // another name than constant beside `lambda`, which is the schedule then.
  static absl::StatusOr<Schedule> Create(const ScheduleOptions& options, const RunLength& length,
                                         const LrLambda& lambda = nullptr);

  // This schedule, as Create has made it, for a run that was saved with `saved` after `step` steps
  // of all worlds, and has `left` in this one. One that ends with the run, as a cosine, ends with
  // the steps that the run has left. The others do not depend on the run's length: if that has
  // changed, or max_steps cuts it short, their decays stay as many epochs apart as they were, also
  // where a loop goes on after its epochs. Times are exactly those of the run that was saved, if
  // its pace leads to the same end.
  //
  // `share`: steps of this schedule per step of the run, which `left` is about: below 1 if its
  // optimizer does not step each time. What the schedule will not come to is not hurried to.
  Schedule Resumed(const SavedProgress& saved, int64_t step, const StepsLeft& left,
                   double share = 1) const;

  // Factor of the base learning rates for optimizer step `step`, counted from 0, of a time t after
  // warm-up, p = t / T, T = total_steps() - warmup(), m = min_factor. PyTorch's lr_scheduler of the
  // name in brackets has the same rates:
  // - constant, plateau: 1
  // - step (StepLR): gamma^floor(t / step_size())
  // - multistep (MultiStepLR): gamma^k, k milestones are reached
  // - cosine (CosineAnnealingLR): m + (1 - m) (1 + cos(pi p)) / 2 (Loshchilov and Hutter, SGDR,
  // 2017)
  // - polynomial (PolynomialLR): m + (1 - m) (1 - p)^power
  // - linear (LinearLR): start_factor + (end_factor - start_factor) p
  // - onecycle (OneCycleLR): from 1 / div_factor to 1 at t = pct_start T - 1, and to 1 / div_factor
  // /
  //   final_div_factor at T - 1, by a cosine or a line (Smith and Topin, arXiv:1708.07120)
  // During warm-up: (t' + 1) / warmup() of the factor after it, t' the time since the beginning.
  double Factor(int64_t step) const;

  // The part of the schedule that is done after `step` steps, in [0, 1]; 0 if the run has no
  // length.
  double Progress(int64_t step) const;

  // Whether the factor stays 0 from step `step` on, since the run's end is reached.
  bool StaysZero(int64_t step) const;

  const ScheduleOptions& options() const { return options_; }
  const RunLength& length() const { return length_; }
  // Warm-up included; at least 1, but 0 if the run has no length.
  int64_t total_steps() const { return total_steps_; }
  int64_t steps_per_epoch() const { return length_.steps_per_epoch; }
  // Steps between decays (torch.optim.lr_scheduler.StepLR).
  int64_t step_size() const { return step_size_; }
  int64_t warmup() const { return warmup_; }  // in steps, too
  const Pace& pace() const { return pace_; }

 private:
  Schedule(const ScheduleOptions& options, const ScheduleEntry& entry, const RunLength& length);

  ScheduleOptions options_;
  ScheduleEntry entry_;
  RunLength
      length_;  // with steps_per_epoch and samples_per_step of the world that the run began in
  int64_t total_steps_;
  int64_t step_size_;
  int64_t warmup_;
  Pace pace_;
};

// Sets the learning rates of an optimizer, by a schedule. Thread-compatible; not collective. Counts
// the steps that it has made.
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
