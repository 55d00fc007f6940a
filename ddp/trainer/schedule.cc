#include "ddp/trainer/schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/option_error.h"
#include "base/option_text.h"
#include "base/status.h"
#include "ddp/trainer/keys.h"
#include "ddp/trainer/taken_options.h"
#include "optim/kind.h"

namespace ddp::trainer {
namespace {

constexpr char kPlateauName[] = "plateau";  // also the key of its state

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
const Registration<ScheduleRegistry> kPlateau(kPlateauName, ScheduleEntry{.factor = &One,
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
  const bool needs_length = options.name != ScheduleOptions().name && options.name != kPlateauName;
  if (needs_length) return OptionError("name", options.name, problem);
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

namespace {

// An option of the learning rate, and its key in the state.
struct RateOption {
  const char* key;
  const char* option;
  c10::IValue value;
};

std::vector<RateOption> RateOptions(double lr, const Schedule& schedule) {
  const ScheduleOptions& options = schedule.options();
  return {{"name", "schedule.name", options.name},
          {"warmup_steps", "schedule.warmup_steps", options.warmup_steps},
          {"step_epochs", "schedule.step_epochs", options.step_epochs},
          {"gamma", "schedule.gamma", options.gamma},
          {"base_lr", "optimizer.lr", lr},
          {"epochs", "epochs", schedule.length().epochs},
          {"max_steps", "max_steps", schedule.length().max_steps}};
}

// Options that are not above and are not the defaults, as text by name: those that came later, and
// those of a program's own schedule.
optim::Dict OtherOptions(const Schedule& schedule) {
  ScheduleOptions options = schedule.options(), defaults;
  const auto table = ListOptions(options).Table(), standard = ListOptions(defaults).Table();
  const std::vector<RateOption> above = RateOptions(0, schedule);
  optim::Dict others = optim::NewDict();
  for (const auto& [path, value] : table) {
    const auto is_path = [&, &name = path](const RateOption& option) {
      return option.option == absl::StrCat("schedule.", name);
    };
    const bool is_default =
        std::find(standard.begin(), standard.end(), std::make_pair(path, value)) != standard.end();
    if (is_default || std::any_of(above.begin(), above.end(), is_path)) continue;
    others.insert(path, value);
  }
  return others;
}

// What of `others` differs, of which either may lack what is the default.
void AddDifferences(const optim::Dict& now, const optim::Dict& saved,
                    checkpoint::LoadNotes& notes) {
  ScheduleOptions defaults;
  std::map<std::string, std::string> standard;
  for (const auto& [path, value] : ListOptions(defaults).Table()) standard.emplace(path, value);
  const auto value_of = [&](const optim::Dict& dict, const std::string& path) -> c10::IValue {
    const std::optional<c10::IValue> given = optim::Find(dict, path.c_str());
    if (given) return *given;
    const auto found = standard.find(path);
    return found == standard.end() ? "" : found->second;
  };
  std::set<std::string> paths;
  for (const optim::Dict& dict : {now, saved}) {
    for (const auto& entry : dict) {
      if (entry.key().isString()) paths.insert(entry.key().toStringRef());
    }
  }
  for (const std::string& path : paths) {
    notes.AddDifference(absl::StrCat("schedule.", path), value_of(now, path),
                        value_of(saved, path));
  }
}

// Entries of schedule plateau.
constexpr char kBest[] = "best", kBad[] = "bad", kCooldown[] = "cooldown", kScale[] = "scale",
               kMetric[] = "metric", kMode[] = "mode";

optim::Dict PlateauDict(const Plateau& plateau) {
  optim::Dict dict = optim::NewDict();
  const Plateau::State& state = plateau.state();
  if (state.best) dict.insert(kBest, *state.best);
  dict.insert(kBad, state.bad);
  dict.insert(kCooldown, state.cooldown);
  dict.insert(kScale, state.scale);
  dict.insert(kMetric, plateau.options().metric);
  dict.insert(kMode, plateau.options().mode);
  return dict;
}

// The state of a run's plateau. What was learned of another metric is not taken, but rates stay
// reduced.
absl::StatusOr<Plateau::State> ReadPlateau(const c10::IValue& value,
                                           const PlateauOptions& options) {
  Plateau::State state;
  const auto wrong = [] {
    return absl::InvalidArgumentError("the checkpoint's key 'scheduler/plateau' makes no sense");
  };
  if (!value.isGenericDict()) return wrong();
  const optim::Dict dict = value.toGenericDict();
  const auto number = [&](const char* key) {
    const std::optional<c10::IValue> found = optim::Find(dict, key);
    return found ? optim::AsNumber(*found).value_or(std::nan("")) : std::nan("");
  };
  state.scale = number(kScale);
  const double bad = number(kBad), cooldown = number(kCooldown);
  constexpr double kMost = 1e15;
  if (!(state.scale >= 0 && state.scale <= 1 && bad >= 0 && bad <= kMost && cooldown >= 0 &&
        cooldown <= kMost)) {
    return wrong();
  }
  const auto is = [&](const char* key, const std::string& text) {
    const std::optional<c10::IValue> found = optim::Find(dict, key);
    return found && found->isString() && found->toStringRef() == text;
  };
  if (!is(kMetric, options.metric) || !is(kMode, options.mode)) return state;
  state.bad = static_cast<int64_t>(bad);
  state.cooldown = static_cast<int64_t>(cooldown);
  if (dict.contains(kBest)) state.best = number(kBest);
  return state;
}

}  // namespace

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule)
    : optimizer_(optimizer), fresh_(std::move(schedule)), schedule_(fresh_) {
  if (schedule_.options().name == kPlateauName) plateau_.emplace(schedule_.options().plateau);
  AddNewGroups();
}

void LRScheduler::AddNewGroups() {
  const auto& groups = optimizer_.param_groups();
  for (size_t g = base_lrs_.size(); g < groups.size(); ++g) {
    base_lrs_.push_back(groups[g].options().get_lr());
  }
}

double LRScheduler::step() {
  AddNewGroups();
  const double factor = schedule_.Factor(steps_++);
  const auto rate = [&](double base) { return (plateau_ ? plateau_->Rate(base) : base) * factor; };
  for (size_t g = 0; g < base_lrs_.size(); ++g) {
    optimizer_.param_groups()[g].options().set_lr(rate(base_lrs_[g]));
  }
  return rate(base_lr());
}

absl::Status LRScheduler::Evaluated(const std::map<std::string, double>& metrics) {
  if (!plateau_) return absl::OkStatus();
  const std::string& name = plateau_->options().metric;
  const auto metric = metrics.find(name);
  if (metric == metrics.end()) {
    std::vector<std::string> names;
    for (const auto& [known, value] : metrics) names.push_back(known);
    return OptionError("schedule.plateau.metric", name,
                       absl::StrCat("is no metric of this run's evaluation, which has ",
                                    absl::StrJoin(names, ", ")),
                       absl::StatusCode::kNotFound);
  }
  plateau_->Add(metric->second);
  return absl::OkStatus();
}

absl::StatusOr<checkpoint::State> LRScheduler::state_dict() {
  checkpoint::State state;
  optim::Dict& entries = state.root;
  for (const RateOption& option : RateOptions(base_lr(), schedule_)) {
    entries.insert(option.key, option.value);
  }
  // Absent where there is nothing to say, so that checkpoints of other runs stay the bytes they
  // are.
  if (optim::Dict others = OtherOptions(schedule_); !others.empty()) {
    entries.insert("options", std::move(others));
  }
  if (base_lrs_.size() > 1) {
    c10::impl::GenericList rates(c10::AnyType::get());
    for (const double rate : base_lrs_) rates.push_back(rate);
    entries.insert("base_lrs", std::move(rates));
  }
  if (schedule_.options().warmup_samples > 0) {
    entries.insert("samples_per_step", schedule_.length().samples_per_step);
  }
  if (plateau_) entries.insert(kPlateauName, PlateauDict(*plateau_));
  entries.insert("last_step", steps_);
  entries.insert("total_steps", schedule_.total_steps());
  entries.insert("steps_per_epoch", schedule_.steps_per_epoch());
  entries.insert("step_size", schedule_.step_size());
  entries.insert("first_step", schedule_.pace().first_step);
  entries.insert("first_time", schedule_.pace().first_time);
  entries.insert("time_per_step", schedule_.pace().time_per_step);
  entries.insert(keys::kProgress, progress());
  return state;
}

// Of a run that has saved nothing of its schedule.
SavedProgress LRScheduler::Unsaved() const {
  return {.total_steps = fresh_.total_steps(),
          .steps_per_epoch = fresh_.steps_per_epoch(),
          .samples_per_step = fresh_.length().samples_per_step};
}

absl::StatusOr<LRScheduler::Saved> LRScheduler::Read(const checkpoint::State& state) const {
  const optim::Dict& entries = state.root;
  Saved saved = {.schedule = Unsaved()};
  // A save option may have left out all but the progress.
  if (entries.contains("total_steps")) {
    const auto number = [&](const char* key, double otherwise) {
      const std::optional<c10::IValue> value = optim::Find(entries, key);
      return value ? optim::AsNumber(*value).value_or(std::nan("")) : otherwise;
    };
    const double total = number("total_steps", std::nan(""));
    // Older checkpoints lack what follows.
    const double per_epoch = number(
        "steps_per_epoch", std::max(1.0, std::floor(total / static_cast<double>(std::max<int64_t>(
                                                                1, schedule_.length().epochs)))));
    const double first_step = number("first_step", 0);
    const double samples =
        number("samples_per_step", static_cast<double>(saved.schedule.samples_per_step));
    const double steps = number("last_step", 0);
    Pace pace = {.first_time = number("first_time", 0),
                 .time_per_step = number("time_per_step", 1)};
    constexpr double kMost = 9007199254740992.0;  // 2^53: beyond, a double skips integers
    if (!(total >= 0 && total <= kMost && per_epoch >= 0 && per_epoch <= kMost && first_step >= 0 &&
          first_step <= kMost && samples >= 1 && samples <= kMost && steps >= 0 && steps <= kMost &&
          std::isfinite(pace.first_time) && pace.time_per_step >= 0 &&
          std::isfinite(pace.time_per_step))) {
      return absl::InvalidArgumentError(
          "the checkpoint's key 'scheduler' has a number that makes no sense");
    }
    saved.schedule.total_steps = static_cast<int64_t>(total);
    saved.schedule.steps_per_epoch = static_cast<int64_t>(per_epoch);
    pace.first_step = static_cast<int64_t>(first_step);
    if (entries.contains("time_per_step")) saved.schedule.pace = pace;
    saved.schedule.samples_per_step = static_cast<int64_t>(samples);
    if (entries.contains("last_step")) saved.steps = static_cast<int64_t>(steps);
  }
  const std::optional<c10::IValue> plateau = optim::Find(entries, kPlateauName);
  if (plateau && plateau_) {
    DDP_ASSIGN_OR_RETURN(saved.plateau, ReadPlateau(*plateau, plateau_->options()));
  }
  if (const std::optional<c10::IValue> progress = optim::Find(entries, keys::kProgress)) {
    saved.has_progress = true;
    saved.schedule.progress = optim::AsNumber(*progress).value_or(-1);
    if (!(saved.schedule.progress >= 0 && saved.schedule.progress <= 1)) {
      return absl::InvalidArgumentError(
          "the checkpoint's key 'progress' is not a number from 0 to 1");
    }
  }
  return saved;
}

absl::Status LRScheduler::CheckStateDict(const checkpoint::State& state) const {
  return Read(state).status();
}

absl::Status LRScheduler::load_state_dict(const checkpoint::State& state,
                                          checkpoint::LoadNotes& notes) {
  DDP_ASSIGN_OR_RETURN(loaded_, Read(state));
  for (const RateOption& option : RateOptions(base_lr(), schedule_)) {
    const std::optional<c10::IValue> saved = optim::Find(state.root, option.key);
    if (saved) notes.AddDifference(option.option, option.value, *saved);
  }
  const std::optional<c10::IValue> others = optim::Find(state.root, "options");
  if (state.root.contains("name")) {
    AddDifferences(OtherOptions(schedule_),
                   others && others->isGenericDict() ? others->toGenericDict() : optim::NewDict(),
                   notes);
  }
  const std::optional<c10::IValue> rates = optim::Find(state.root, "base_lrs");
  if (rates && rates->isList() && rates->toListRef().size() == base_lrs_.size()) {
    for (size_t g = 1; g < base_lrs_.size(); ++g) {
      notes.AddDifference(absl::StrCat("optimizer.lr of group ", g), base_lrs_[g],
                          rates->toListRef()[g]);
    }
  }
  if (loaded_->plateau) plateau_->set_state(*loaded_->plateau);
  return absl::OkStatus();
}

void LRScheduler::GoOn(int64_t steps, const StepsLeft& left) {
  Saved saved = loaded_.value_or(Saved{.schedule = Unsaved()});
  steps_ = saved.steps.value_or(steps);
  if (!saved.has_progress) {
    const auto total = static_cast<double>(std::max<int64_t>(1, saved.schedule.total_steps));
    saved.schedule.progress = std::min(1.0, static_cast<double>(steps_) / total);
    if (!saved.schedule.pace) saved.schedule.pace = Pace();
  }
  if (steps_ == 0 && steps > 0) {  // nothing tells how often its optimizer steps
    schedule_ = fresh_;
    return;
  }
  const double share = steps > 0 ? static_cast<double>(steps_) / static_cast<double>(steps) : 1.0;
  schedule_ = fresh_.Resumed(saved.schedule, steps_, left, share);
  if (steps_ == 0) return;
  // The rates of the last step again: a run that takes no further one saves them.
  --steps_;
  step();
}

}  // namespace ddp::trainer
