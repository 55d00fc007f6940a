#include "ddp/trainer/schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/option_error.h"
#include "base/option_text.h"
#include "base/status.h"
#include "ddp/trainer/taken_options.h"

namespace ddp::trainer {
namespace {

// Times that differ by less are equal.
constexpr double kRounding = 1e-6;

int64_t StepsOf(double epochs, double steps_per_epoch) {
  return static_cast<int64_t>(epochs * steps_per_epoch);
}

double One(const ScheduleOptions&, const ScheduleTime&) { return 1; }

double Step(const ScheduleOptions& options, const ScheduleTime& now) {
  const int64_t size = std::max<int64_t>(1, StepsOf(options.step_epochs, now.steps_per_epoch));
  return std::pow(options.gamma, static_cast<double>(now.steps() / size));
}

double MultiStep(const ScheduleOptions& options, const ScheduleTime& now) {
  const auto is_reached = [&](double epochs) {
    return StepsOf(epochs, now.steps_per_epoch) <= now.steps();
  };
  const auto reached =
      std::count_if(options.milestones.begin(), options.milestones.end(), is_reached);
  return std::pow(options.gamma, static_cast<double>(reached));
}

// From 1 to 0 as progress goes from 0 to 1.
double HalfCosine(double progress) { return (1.0 + std::cos(std::numbers::pi * progress)) / 2.0; }

double Cosine(const ScheduleOptions& options, const ScheduleTime& now) {
  return options.min_factor + (1 - options.min_factor) * HalfCosine(now.progress());
}

double Polynomial(const ScheduleOptions& options, const ScheduleTime& now) {
  return options.min_factor +
         (1 - options.min_factor) * std::pow(1 - now.progress(), options.power);
}

double Linear(const ScheduleOptions& options, const ScheduleTime& now) {
  return options.start_factor + (options.end_factor - options.start_factor) * now.progress();
}

double OneCycle(const ScheduleOptions& options, const ScheduleTime& now) {
  const double first = 1 / options.div_factor;
  const double last = first / options.final_div_factor;
  const double peak = options.pct_start * now.span - 1, end = now.span - 1;
  const auto between = [&](double from, double to, double begin, double stop) {
    const double part =
        stop > begin ? std::clamp((now.time - begin) / (stop - begin), 0.0, 1.0) : 1.0;
    if (options.anneal == "linear") return from + (to - from) * part;
    return to + (from - to) * HalfCosine(part);
  };
  return now.time <= peak ? between(first, 1, 0, peak) : between(1, last, peak, end);
}

const Registration<ScheduleRegistry> kConstant("constant", ScheduleEntry{.factor = &One,
                                                                         .ends_with_run = false});
const Registration<ScheduleRegistry> kStep("step",
                                           ScheduleEntry{.factor = &Step, .ends_with_run = false});
const Registration<ScheduleRegistry> kMultiStep(
    "multistep",
    ScheduleEntry{.factor = &MultiStep,
                  .ends_with_run = false,
                  .takes = {"milestones", "gamma"},
                  .check = [](const ScheduleOptions& options) {
                    return options.milestones.empty()
                               ? OptionError(
                                     "milestones", "[]",
                                     "must name the epochs of schedule multistep, as in 30,60")
                               : absl::OkStatus();
                  }});
const Registration<ScheduleRegistry> kCosine("cosine", ScheduleEntry{.factor = &Cosine,
                                                                     .takes = {"min_factor"}});
const Registration<ScheduleRegistry> kPolynomial("polynomial",
                                                 ScheduleEntry{.factor = &Polynomial,
                                                               .takes = {"power", "min_factor"}});
const Registration<ScheduleRegistry> kLinear(
    "linear", ScheduleEntry{.factor = &Linear, .takes = {"start_factor", "end_factor"}});
const Registration<ScheduleRegistry> kOneCycle(
    "onecycle",
    ScheduleEntry{.factor = &OneCycle,
                  .takes = {"pct_start", "anneal", "div_factor", "final_div_factor"},
                  .check = [](const ScheduleOptions& options) {
                    const bool warms_up = options.warmup_steps > 0 || options.warmup_epochs > 0 ||
                                          options.warmup_samples > 0;
                    return warms_up ? OptionError("name", "onecycle",
                                                  "rises by itself, for pct_start of the run, and "
                                                  "takes no warm-up")
                                    : absl::OkStatus();
                  }});
const Registration<ScheduleRegistry> kPlateau("plateau", ScheduleEntry{.factor = &One,
                                                                       .ends_with_run = false});

absl::Status CheckWarmUp(const ScheduleOptions& options) {
  std::string first;
  const auto check = [&](const char* name, double value) -> absl::Status {
    if (value == 0) return absl::OkStatus();
    if (first.empty()) {
      first = name;
      return absl::OkStatus();
    }
    return OptionError(name, FormatOption(value),
                       absl::StrCat("is given beside ", first, ": warm-up has one length"));
  };
  DDP_RETURN_IF_ERROR(check("warmup_steps", static_cast<double>(options.warmup_steps)));
  DDP_RETURN_IF_ERROR(check("warmup_epochs", options.warmup_epochs));
  return check("warmup_samples", static_cast<double>(options.warmup_samples));
}

int64_t WarmUp(const ScheduleOptions& options, const RunLength& length) {
  if (options.warmup_epochs > 0) {
    const double steps = options.warmup_epochs * static_cast<double>(length.steps_per_epoch);
    return static_cast<int64_t>(std::ceil(steps - kRounding));
  }
  const int64_t each = std::max<int64_t>(1, length.samples_per_step);
  const int64_t samples = options.warmup_samples;
  return samples > 0 ? samples / each + (samples % each != 0) : options.warmup_steps;
}

// What is left of a schedule in its present world.
struct ScheduleLeft {
  bool has_end = false;
  bool ends_with_run = false;  // the end is the run's, to which the schedule is stretched
  double steps = 0;            // of the schedule, to its end
  double end = 0;              // its time there
  // Behind the end, or without one: as much time as the examples of a step took.
  double time_per_step_behind = 1;
};

// The pace from `time`, after `step` steps, on: `before`, if that leads to the same end.
Pace PaceFrom(double time, int64_t step, const Pace& before, const ScheduleLeft& rest) {
  // Of data without an end a step is nothing beside all steps.
  const double rounding = kRounding * std::max(1.0, rest.end * 1e-8);
  const auto is_same = [](double a, double b, double most) { return std::abs(a - b) < most; };
  const bool arrives =
      rest.has_end &&
      is_same(before.Time(step) + rest.steps * before.time_per_step, rest.end, rounding);
  const bool is_behind = !rest.ends_with_run && !(rest.steps > 0 && rest.end > time);
  double time_per_step = rest.time_per_step_behind;
  if (!is_behind) {
    time_per_step = rest.steps > 0 ? std::max(0.0, rest.end - time) / rest.steps : 0.0;
  }
  const bool same_pace = is_same(before.Time(step), time, kRounding) &&
                         (arrives || (is_behind && is_same(before.time_per_step,
                                                           rest.time_per_step_behind, kRounding)));
  if (same_pace) return before;
  return {.first_step = step, .first_time = time, .time_per_step = time_per_step};
}

}  // namespace

absl::Status CheckSchedule(const ScheduleOptions& options) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  DDP_RETURN_IF_ERROR(CheckWarmUp(options));
  DDP_ASSIGN_OR_RETURN(const ScheduleEntry entry, ScheduleRegistry::Find(options.name));
  ScheduleOptions given = options, defaults;
  // Configurations of runs may have step_epochs and gamma with any schedule.
  DDP_RETURN_IF_ERROR(CheckTaken(ListOptions(given), ListOptions(defaults),
                                 {.name = options.name,
                                  .takes = entry.takes,
                                  .of_all = {"name", "warmup_steps", "warmup_epochs",
                                             "warmup_samples", "step_epochs", "gamma"}}));
  return entry.check == nullptr ? absl::OkStatus() : entry.check(options);
}

absl::Status CheckWithoutEpochs(const ScheduleOptions& options) {
  constexpr char kWhy[] = "epochs, but the sampler of the training set has no end: use ";
  if (options.warmup_epochs > 0) {
    return OptionError("warmup_epochs", FormatOption(options.warmup_epochs),
                       absl::StrCat("counts ", kWhy, "warmup_steps or warmup_samples"));
  }
  if (options.name == "step" || options.name == "multistep") {
    return OptionError("name", options.name,
                       absl::StrCat("decays by ", kWhy, "another schedule, or lr_lambda"));
  }
  return absl::OkStatus();
}

absl::Status CheckWithoutLength(const ScheduleOptions& options, absl::string_view why) {
  const std::string problem = absl::StrCat("depends on the length of the run", why);
  if (options.name != ScheduleOptions().name) return OptionError("name", options.name, problem);
  if (options.warmup_epochs == 0) return absl::OkStatus();
  return OptionError("warmup_epochs", FormatOption(options.warmup_epochs), problem);
}

Schedule::Schedule(const ScheduleOptions& options, const ScheduleEntry& entry,
                   const RunLength& length)
    : options_(options),
      entry_(entry),
      length_(length),
      total_steps_(length.is_known ? std::max<int64_t>(1, length.total_steps()) : 0),
      step_size_(std::max<int64_t>(
          1, StepsOf(options.step_epochs, static_cast<double>(length.steps_per_epoch)))),
      warmup_(WarmUp(options, length)) {}

absl::StatusOr<Schedule> Schedule::Create(const ScheduleOptions& options, const RunLength& length,
                                          const LrLambda& lambda) {
  DDP_RETURN_IF_ERROR(CheckSchedule(options));
  if (lambda == nullptr) {
    DDP_ASSIGN_OR_RETURN(const ScheduleEntry entry, ScheduleRegistry::Find(options.name));
    return Schedule(options, entry, length);
  }
  if (options.name != ScheduleOptions().name) {
    return OptionError("name", options.name,
                       "is given beside lr_lambda, the program's own schedule: use one of the two");
  }
  const ScheduleEntry own{.factor = [lambda](const ScheduleOptions&, const ScheduleTime& now) {
    return lambda(now.progress(), now.steps());
  }};
  return Schedule(options, own, length);
}

Schedule Schedule::Resumed(const SavedProgress& saved, int64_t step, const StepsLeft& left,
                           double share) const {
  const bool had_length = saved.total_steps > 0;
  RunLength length = length_;
  if (had_length || !length_.is_known) length.steps_per_epoch = saved.steps_per_epoch;
  length.samples_per_step = saved.samples_per_step;
  Schedule resumed(options_, entry_, length);
  const bool ends_with_run = entry_.ends_with_run && length_.is_known;
  const Pace before = saved.pace.value_or(Pace());
  // Progress stands still once a run has passed its end, and where it has none.
  const double time = had_length && (ends_with_run || !saved.pace)
                          ? saved.progress * static_cast<double>(saved.total_steps)
                          : before.Time(step);
  if (!had_length && length_.is_known) {
    resumed.total_steps_ = std::max<int64_t>(1, std::llround(time / share) + left.in_run);
  } else if (ends_with_run) {
    resumed.total_steps_ = saved.total_steps;
  }

  ScheduleLeft rest = {.has_end = ends_with_run || left.in_epochs.has_value(),
                       .ends_with_run = ends_with_run};
  if (ends_with_run) {
    rest.steps = share * static_cast<double>(left.in_run);
    rest.end = share * static_cast<double>(resumed.total_steps_);
  } else {
    rest.steps = share * static_cast<double>(left.in_epochs.value_or(0));
    rest.end =
        share * (static_cast<double>(length.epochs) * static_cast<double>(length.steps_per_epoch));
  }
  if (left.in_epochs) {
    const auto not_0 = [](int64_t number) {
      return static_cast<double>(std::max<int64_t>(1, number));
    };
    rest.time_per_step_behind = not_0(length.steps_per_epoch) / not_0(length_.steps_per_epoch);
  }
  resumed.pace_ = PaceFrom(time, step, before, rest);
  return resumed;
}

double Schedule::Progress(int64_t step) const {
  if (!length_.is_known) return 0;
  return std::clamp(pace_.Time(step) / static_cast<double>(total_steps_), 0.0, 1.0);
}

double Schedule::Factor(int64_t step) const {
  const double time = pace_.Time(step);
  const auto warmup = static_cast<double>(warmup_);
  ScheduleTime now = {
      .time = std::max(0.0, time - warmup),
      .span = length_.is_known ? static_cast<double>(std::max<int64_t>(1, total_steps_ - warmup_))
                               : std::numeric_limits<double>::infinity(),
      .steps_per_epoch = static_cast<double>(std::max<int64_t>(1, length_.steps_per_epoch))};
  if (time >= warmup - kRounding) return entry_.factor(options_, now);
  now.time = 0;
  return std::min(1.0, (time + pace_.time_per_step) / warmup) * entry_.factor(options_, now);
}

bool Schedule::StaysZero(int64_t step) const {
  return entry_.ends_with_run && Progress(step) > 1 - 1e-9 && Factor(step) < 1e-12;
}

}  // namespace ddp::trainer
