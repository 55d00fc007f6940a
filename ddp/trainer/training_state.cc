#include "ddp/trainer/training_state.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/option_error.h"
#include "base/option_text.h"
#include "base/status.h"
#include "checkpoint/module_state.h"
#include "checkpoint/rng_state.h"
#include "ddp/all_gather.h"
#include "ddp/collective_status.h"
#include "ddp/zero/zero_redundancy_optimizer.h"
#include "optim/kind.h"
#include "optim/state_dict.h"
#include "torch/utils.h"

namespace ddp::trainer {
namespace {

// The states of each rank's generator for this type of device.
absl::StatusOr<std::vector<at::Tensor>> GatherRngStates(const session::Session& session,
                                                        c10::Device device) {
  const at::Tensor mine = checkpoint::RngState(device);
  if (!session.process_group()) return std::vector<at::Tensor>{mine};
  std::vector<at::Tensor> states;
  DDP_RETURN_IF_ERROR(CatchCollective("gathering the ranks' random states", [&] {
    states = AllGather(*session.process_group(), mine.to(session.device()));
    for (at::Tensor& state : states) state = state.cpu();
    return absl::OkStatus();
  }));
  return states;
}

// The state of a sharded optimizer is complete on rank 0 and empty on other ranks.
absl::StatusOr<optim::Dict> StateOf(torch::optim::Optimizer& optimizer) {
  auto* sharded = dynamic_cast<zero::ZeroRedundancyOptimizer*>(&optimizer);
  if (sharded == nullptr) return optim::OptimizerState(optimizer);
  return sharded->ConsolidateStateDict(/*to=*/0);
}

absl::Status LoadStateOf(torch::optim::Optimizer& optimizer, const c10::IValue& state) {
  auto* sharded = dynamic_cast<zero::ZeroRedundancyOptimizer*>(&optimizer);
  return sharded == nullptr ? optim::LoadOptimizerState(optimizer, state)
                            : sharded->LoadStateDict(state);
}

absl::StatusOr<c10::IValue> Entry(const checkpoint::State& state, const std::string& key) {
  auto it = state.root.find(key);
  if (it == state.root.end()) {
    return absl::InvalidArgumentError(absl::StrCat("the checkpoint has no key '", key,
                                                   "': this program did not write it, or a ",
                                                   "save option left it out"));
  }
  return it->value();
}

absl::StatusOr<int64_t> Integer(const checkpoint::State& state, const std::string& key) {
  DDP_ASSIGN_OR_RETURN(c10::IValue value, Entry(state, key));
  if (!value.isInt()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the checkpoint's key '", key, "' is not an integer but a ", value.tagKind()));
  }
  return value.toInt();
}

// Returns `otherwise` for a key that older checkpoints lack.
absl::StatusOr<int64_t> IntegerOr(const checkpoint::State& state, const std::string& key,
                                  int64_t otherwise) {
  if (!state.root.contains(key)) return otherwise;
  return Integer(state, key);
}

absl::Status CheckRngStates(const checkpoint::State& state, const std::string& key,
                            int64_t world_size) {
  DDP_ASSIGN_OR_RETURN(const c10::IValue states, Entry(state, key));
  if (states.isList() && states.toListRef().size() == static_cast<size_t>(world_size)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the checkpoint's key '", key, "' is not a list of ", world_size, " states"));
}

absl::Status CheckTask(const checkpoint::State& state, const Task& task) {
  DDP_ASSIGN_OR_RETURN(c10::IValue name, Entry(state, "task"));
  if (!name.isString() || name.toStringRef() != task.name) {
    return absl::InvalidArgumentError(absl::StrCat("the checkpoint is of model '",
                                                   name.isString() ? name.toStringRef() : "?",
                                                   "', but this run trains '", task.name, "'"));
  }
  return absl::OkStatus();
}

std::string Printed(const c10::IValue& value) {
  if (value.isDouble()) return FormatOption(value.toDouble());
  std::ostringstream text;
  text << value;
  return text.str();
}

void AddDifference(absl::string_view option, const c10::IValue& now, const c10::IValue& saved,
                   std::vector<std::string>& differences) {
  const std::string new_text = Printed(now), old_text = Printed(saved);
  if (new_text == old_text) return;
  differences.push_back(absl::StrCat(option, " ", new_text, ", saved ", old_text));
}

// An option of the learning rate, and its key in `scheduler`.
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

optim::Dict SchedulerState(double lr, const Schedule& schedule, int64_t step) {
  optim::Dict state = checkpoint::NewTree();
  for (const RateOption& option : RateOptions(lr, schedule)) state.insert(option.key, option.value);
  state.insert("last_step", step);
  state.insert("total_steps", schedule.total_steps());
  state.insert("steps_per_epoch", schedule.steps_per_epoch());
  state.insert("step_size", schedule.step_size());
  state.insert("first_step", schedule.pace().first_step);
  state.insert("first_time", schedule.pace().first_time);
  state.insert("time_per_step", schedule.pace().time_per_step);
  return state;
}

// The checkpoint's `scheduler`; unset if a save option has left it out.
std::optional<optim::Dict> SavedScheduler(const checkpoint::State& state) {
  const std::optional<c10::IValue> saved = optim::Find(state.root, "scheduler");
  if (!saved || !saved->isGenericDict()) return std::nullopt;
  return saved->toGenericDict();
}

// Removes entries that the optimizer does not keep with the options that it has now.
void ForgetEntries(const std::vector<std::string>& names, const optim::Dict& group,
                   optim::Dict& states) {
  const std::optional<c10::IValue> numbers = optim::Find(group, "params");
  if (names.empty() || !numbers || !numbers->isList()) return;
  for (const c10::IValue& number : numbers->toListRef()) {
    const auto found = states.find(number);
    if (found == states.end() || !found->value().isGenericDict()) continue;
    optim::Dict entries = found->value().toGenericDict().copy();
    for (const std::string& name : names) (void)entries.erase(name);
    states.insert_or_assign(number, entries);
  }
}

// An optimizer's state with the options of `optimizer` in place of the saved ones, but for those
// that the load refuses. A state that does not fit is returned as it is: the load says what is
// wrong.
c10::IValue WithOptionsOf(const torch::optim::Optimizer& optimizer, const c10::IValue& saved,
                          std::vector<std::string>& differences) {
  const absl::StatusOr<const optim::OptimizerKind*> found = optim::KindOf(optimizer);
  if (!found.ok() || !saved.isGenericDict()) return saved;
  const optim::OptimizerKind& kind = **found;
  optim::Dict root = saved.toGenericDict().copy();
  const std::optional<c10::IValue> saved_groups = optim::Find(root, "param_groups");
  const std::optional<c10::IValue> saved_states = optim::Find(root, "state");
  const auto& groups = optimizer.param_groups();
  if (!saved_groups || !saved_groups->isList() || !saved_states || !saved_states->isGenericDict() ||
      saved_groups->toListRef().size() != groups.size()) {
    return saved;
  }
  optim::Dict states = saved_states->toGenericDict().copy();
  c10::impl::GenericList changed(c10::AnyType::get());
  for (size_t g = 0; g < groups.size(); ++g) {
    const c10::IValue& saved_group = saved_groups->toListRef()[g];
    if (!saved_group.isGenericDict()) return saved;
    optim::Dict group = saved_group.toGenericDict().copy();
    const torch::optim::OptimizerOptions& options = groups[g].options();
    const std::unique_ptr<torch::optim::OptimizerOptions> before = options.clone();
    if (!kind.MatchesGroup(group) || !kind.ReadOptions(group, *before).ok()) return saved;
    optim::Dict now = optim::NewDict(), then = optim::NewDict();
    kind.WriteOptions(options, now);
    kind.WriteOptions(*before, then);
    for (const auto& entry : now) {
      const c10::IValue old = then.at(entry.key());
      if (Printed(entry.value()) == Printed(old)) continue;
      group.insert_or_assign(entry.key(), entry.value());
      // Saved is the rate of a step. CompareSchedule compares the rates before the schedule.
      if (entry.key().toStringRef() == "lr") continue;
      AddDifference(absl::StrCat("optimizer.", entry.key().toStringRef()), entry.value(), old,
                    differences);
    }
    const std::vector<std::string> kept = kind.PerElement(options);
    std::vector<std::string> forgotten;
    for (const std::string& name : kind.PerElement(*before)) {
      if (std::find(kept.begin(), kept.end(), name) == kept.end()) forgotten.push_back(name);
    }
    ForgetEntries(forgotten, group, states);
    changed.push_back(std::move(group));
  }
  root.insert_or_assign("param_groups", std::move(changed));
  root.insert_or_assign("state", std::move(states));
  return root;
}

// A scaler's state with the options of `scaler` in place of the saved ones.
optim::Dict WithOptionsOf(const GradScaler& scaler, const optim::Dict& saved,
                          std::vector<std::string>& differences) {
  optim::Dict state = saved.copy();
  const optim::Dict now = scaler.state_dict();
  for (const char* key : {"growth_factor", "backoff_factor", "growth_interval"}) {
    const std::optional<c10::IValue> old = optim::Find(saved, key);
    // The load refuses what is missing or no number.
    if (!old || !optim::AsNumber(*old) || optim::AsNumber(*old) == optim::AsNumber(now.at(key))) {
      continue;
    }
    AddDifference(absl::StrCat("grad_scaler.", key), now.at(key), *old, differences);
    state.insert_or_assign(key, now.at(key));
  }
  return state;
}

// A seed for the generators of a rank that goes on at `position` in another world.
uint64_t SeedAt(const Position& position, int rank, int world_size) {
  uint64_t hash = 0;
  for (const int64_t value : {position.seed, static_cast<int64_t>(world_size), position.epoch,
                              position.sample, position.step}) {
    // SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
    hash += static_cast<uint64_t>(value) + 0x9e3779b97f4a7c15;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
    hash ^= hash >> 31;
  }
  // Torch's CPU generator uses the low 32 bits only: a sum differs in them for all ranks.
  return hash + static_cast<uint64_t>(rank);
}

}  // namespace

absl::StatusOr<checkpoint::State> CaptureState(const session::Session& session, const Task& task,
                                               torch::optim::Optimizer& optimizer, double lr,
                                               const Schedule& schedule, const Position& position,
                                               const GradScaler* scaler) {
  checkpoint::State state;
  DDP_ASSIGN_OR_RETURN(c10::impl::GenericDict optimizer_state, StateOf(optimizer));
  DDP_ASSIGN_OR_RETURN(std::vector<at::Tensor> rng, GatherRngStates(session, c10::kCPU));
  state.root.insert("task", task.name);
  state.root.insert("model", checkpoint::ModuleState(*task.module));
  state.root.insert("optimizer", optimizer_state);
  state.root.insert("scheduler", SchedulerState(lr, schedule, position.step));
  state.root.insert("progress", schedule.Progress(position.step));
  state.root.insert("epoch", position.epoch);
  state.root.insert("sample", position.sample);
  state.root.insert("step", position.step);
  state.root.insert("seed", position.seed);
  state.root.insert("dataset_size", position.dataset_size);
  state.root.insert("world_size", static_cast<int64_t>(session.size()));
  state.root.insert("rng", c10::List<at::Tensor>(rng));
  if (!session.device().is_cpu()) {
    DDP_ASSIGN_OR_RETURN(rng, GatherRngStates(session, session.device()));
    state.root.insert("device_rng", c10::List<at::Tensor>(rng));
  }
  if (scaler != nullptr) state.root.insert("scaler", scaler->state_dict());
  return state;
}

absl::StatusOr<Position> RestoreState(const checkpoint::State& state,
                                      const session::Session& session, const Task& task,
                                      torch::optim::Optimizer& optimizer, GradScaler* scaler,
                                      std::vector<std::string>& differences) {
  DDP_RETURN_IF_ERROR(CheckTask(state, task));
  Position position;
  DDP_ASSIGN_OR_RETURN(position.epoch, Integer(state, "epoch"));
  DDP_ASSIGN_OR_RETURN(position.sample, IntegerOr(state, "sample", 0));
  DDP_ASSIGN_OR_RETURN(position.step, Integer(state, "step"));
  DDP_ASSIGN_OR_RETURN(position.seed, Integer(state, "seed"));
  DDP_ASSIGN_OR_RETURN(position.dataset_size, IntegerOr(state, "dataset_size", 0));
  if (position.epoch < 0 || position.sample < 0 || position.step < 0) {
    return absl::InvalidArgumentError(absl::StrCat("the checkpoint's position is negative: epoch ",
                                                   position.epoch, ", sample ", position.sample,
                                                   ", step ", position.step));
  }
  DDP_ASSIGN_OR_RETURN(int64_t world_size, Integer(state, "world_size"));
  DDP_ASSIGN_OR_RETURN(c10::IValue optimizer_state, Entry(state, "optimizer"));
  DDP_ASSIGN_OR_RETURN(c10::IValue model_state, Entry(state, "model"));
  DDP_ASSIGN_OR_RETURN(c10::IValue rng, Entry(state, "rng"));
  const bool same_world = world_size == session.size();
  // Older checkpoints lack the state of the device, and so do those of runs on the CPU.
  const bool has_device_rng = state.root.contains("device_rng") && !session.device().is_cpu();
  if (same_world) {
    DDP_RETURN_IF_ERROR(CheckRngStates(state, "rng", world_size));
    if (has_device_rng) DDP_RETURN_IF_ERROR(CheckRngStates(state, "device_rng", world_size));
  }
  // Load the model first: its error messages are more helpful than the optimizer's.
  DDP_RETURN_IF_ERROR(Annotate(checkpoint::LoadModuleState(*task.module, model_state), "model"));
  DDP_RETURN_IF_ERROR(Annotate(
      LoadStateOf(optimizer, WithOptionsOf(optimizer, optimizer_state, differences)), "optimizer"));
  if (scaler != nullptr && state.root.contains("scaler")) {
    DDP_ASSIGN_OR_RETURN(const c10::IValue saved, Entry(state, "scaler"));
    if (!saved.isGenericDict()) {
      return absl::InvalidArgumentError("the checkpoint's key 'scaler' is not a dict");
    }
    DDP_RETURN_IF_ERROR(
        scaler->load_state_dict(WithOptionsOf(*scaler, saved.toGenericDict(), differences)));
  }
  // Also the generators whose state was not saved.
  torch::manual_seed(SeedAt(position, session.rank(), session.size()));
  if (same_world) {
    DDP_RETURN_IF_ERROR(checkpoint::LoadRngState(rng.toListRef()[session.rank()]));
    if (has_device_rng) {
      DDP_RETURN_IF_ERROR(checkpoint::LoadRngState(
          state.root.at("device_rng").toListRef()[session.rank()], session.device()));
    }
  }
  return position;
}

absl::StatusOr<std::vector<int64_t>> BucketOrder(const checkpoint::State& state) {
  std::vector<int64_t> order;
  if (!state.root.contains("bucket_order")) return order;
  const c10::IValue& saved = state.root.at("bucket_order");
  const auto is_integer = [](const c10::IValue& value) { return value.isInt(); };
  if (!saved.isList() ||
      !std::all_of(saved.toListRef().begin(), saved.toListRef().end(), is_integer)) {
    return absl::InvalidArgumentError(
        "the checkpoint's key 'bucket_order' is not a list of integers");
  }
  for (const c10::IValue& index : saved.toListRef()) order.push_back(index.toInt());
  return order;
}

absl::Status CheckOrder(const checkpoint::State& state, const Position& now,
                        std::vector<std::string>& differences) {
  DDP_ASSIGN_OR_RETURN(const int64_t sample, IntegerOr(state, "sample", 0));
  DDP_ASSIGN_OR_RETURN(const int64_t seed, Integer(state, "seed"));
  DDP_ASSIGN_OR_RETURN(const int64_t size, IntegerOr(state, "dataset_size", now.dataset_size));
  constexpr char kWhy[] =
      ": the order of examples would change within the epoch; a checkpoint of the end of an epoch "
      "may be resumed so";
  if (sample > 0 && seed != now.seed) {
    return OptionError("seed", absl::StrCat(now.seed),
                       absl::StrCat("is not the seed of the checkpoint, which was trained with "
                                    "seed ",
                                    seed, kWhy));
  }
  if (sample > 0 && size != now.dataset_size) {
    return absl::InvalidArgumentError(absl::StrCat("the training set has ", now.dataset_size,
                                                   " examples, and that of the checkpoint had ",
                                                   size, kWhy));
  }
  AddDifference("seed", now.seed, seed, differences);
  AddDifference("a training set of", now.dataset_size, size, differences);
  return absl::OkStatus();
}

absl::StatusOr<SavedProgress> ProgressOf(const checkpoint::State& state, const Schedule& schedule,
                                         const Position& position) {
  SavedProgress saved = {.total_steps = schedule.total_steps(),
                         .steps_per_epoch = schedule.steps_per_epoch()};
  if (const std::optional<optim::Dict> scheduler = SavedScheduler(state)) {
    const auto number = [&](const char* key, double otherwise) {
      const std::optional<c10::IValue> value = optim::Find(*scheduler, key);
      return value ? optim::AsNumber(*value).value_or(std::nan("")) : otherwise;
    };
    const double total = number("total_steps", static_cast<double>(saved.total_steps));
    // Older checkpoints lack what follows.
    const double per_epoch = number(
        "steps_per_epoch", std::max(1.0, std::floor(total / static_cast<double>(std::max<int64_t>(
                                                                1, schedule.length().epochs)))));
    const double first_step = number("first_step", 0);
    saved.pace.first_time = number("first_time", 0);
    saved.pace.time_per_step = number("time_per_step", 1);
    constexpr double kMost = 9007199254740992.0;  // 2^53: beyond, a double skips integers
    if (!(total >= 1 && total <= kMost && per_epoch >= 0 && per_epoch <= kMost && first_step >= 0 &&
          first_step <= kMost && std::isfinite(saved.pace.first_time) &&
          saved.pace.time_per_step >= 0 && std::isfinite(saved.pace.time_per_step))) {
      return absl::InvalidArgumentError(
          "the checkpoint's key 'scheduler' has a number that makes no sense");
    }
    saved.total_steps = static_cast<int64_t>(total);
    saved.steps_per_epoch = static_cast<int64_t>(per_epoch);
    saved.pace.first_step = static_cast<int64_t>(first_step);
  }
  const std::optional<c10::IValue> progress = optim::Find(state.root, "progress");
  saved.progress = progress ? optim::AsNumber(*progress).value_or(-1)
                            : std::min(1.0, static_cast<double>(position.step) /
                                                static_cast<double>(saved.total_steps));
  if (saved.progress >= 0 && saved.progress <= 1) return saved;
  return absl::InvalidArgumentError("the checkpoint's key 'progress' is not a number from 0 to 1");
}

void CompareSchedule(const checkpoint::State& state, double lr, const Schedule& schedule,
                     std::vector<std::string>& differences) {
  const std::optional<optim::Dict> before = SavedScheduler(state);
  if (!before) return;
  for (const RateOption& option : RateOptions(lr, schedule)) {
    const std::optional<c10::IValue> saved = optim::Find(*before, option.key);
    if (saved) AddDifference(option.option, option.value, *saved, differences);
  }
}

absl::StatusOr<Position> RestoreModel(const checkpoint::State& state, const Task& task) {
  DDP_RETURN_IF_ERROR(CheckTask(state, task));
  DDP_ASSIGN_OR_RETURN(c10::IValue model_state, Entry(state, "model"));
  DDP_RETURN_IF_ERROR(Annotate(checkpoint::LoadModuleState(*task.module, model_state), "model"));
  Position position;
  position.epoch = Integer(state, "epoch").value_or(0);
  position.sample = Integer(state, "sample").value_or(0);
  position.step = Integer(state, "step").value_or(0);
  position.seed = Integer(state, "seed").value_or(0);
  return position;
}

}  // namespace ddp::trainer
