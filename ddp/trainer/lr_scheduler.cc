#include "ddp/trainer/lr_scheduler.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/option_error.h"
#include "base/status.h"
#include "ddp/trainer/keys.h"
#include "optim/kind.h"

namespace ddp::trainer {
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
constexpr char kPlateau[] = "plateau";
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
  if (schedule_.options().name == kPlateau) plateau_.emplace(schedule_.options().plateau);
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
  if (plateau_) entries.insert(kPlateau, PlateauDict(*plateau_));
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
  const std::optional<c10::IValue> plateau = optim::Find(entries, kPlateau);
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
