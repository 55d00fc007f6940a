#include "ddp/trainer/lr_scheduler.h"

#include <algorithm>
#include <cmath>
#include <utility>

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

}  // namespace

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule)
    : optimizer_(optimizer), schedule_(std::move(schedule)) {
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
  for (size_t g = 0; g < base_lrs_.size(); ++g) {
    optimizer_.param_groups()[g].options().set_lr(base_lrs_[g] * factor);
  }
  return base_lr() * factor;
}

bool LRScheduler::has_ended() const {
  return schedule_.options().name == "cosine" && progress() > 1 - 1e-9;
}

absl::StatusOr<checkpoint::State> LRScheduler::state_dict() {
  checkpoint::State state;
  optim::Dict& entries = state.root;
  for (const RateOption& option : RateOptions(base_lr(), schedule_)) {
    entries.insert(option.key, option.value);
  }
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

absl::StatusOr<LRScheduler::Saved> LRScheduler::Read(const checkpoint::State& state) const {
  const optim::Dict& entries = state.root;
  Saved saved = {.schedule = {.total_steps = schedule_.total_steps(),
                              .steps_per_epoch = schedule_.steps_per_epoch()}};
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
    Pace& pace = saved.schedule.pace;
    pace.first_time = number("first_time", 0);
    pace.time_per_step = number("time_per_step", 1);
    constexpr double kMost = 9007199254740992.0;  // 2^53: beyond, a double skips integers
    if (!(total >= 1 && total <= kMost && per_epoch >= 0 && per_epoch <= kMost && first_step >= 0 &&
          first_step <= kMost && std::isfinite(pace.first_time) && pace.time_per_step >= 0 &&
          std::isfinite(pace.time_per_step))) {
      return absl::InvalidArgumentError(
          "the checkpoint's key 'scheduler' has a number that makes no sense");
    }
    saved.schedule.total_steps = static_cast<int64_t>(total);
    saved.schedule.steps_per_epoch = static_cast<int64_t>(per_epoch);
    pace.first_step = static_cast<int64_t>(first_step);
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
  return absl::OkStatus();
}

void LRScheduler::GoOn(int64_t steps, int64_t remaining) {
  Saved saved =
      loaded_.value_or(Saved{.schedule = {.total_steps = schedule_.total_steps(),
                                          .steps_per_epoch = schedule_.steps_per_epoch()}});
  if (!saved.has_progress) {
    saved.schedule.progress =
        std::min(1.0, static_cast<double>(steps) / static_cast<double>(saved.schedule.total_steps));
  }
  schedule_ = schedule_.Resumed(saved.schedule, steps, remaining);
  steps_ = steps;
}

}  // namespace ddp::trainer
