#include "ddp/trainer/training_state.h"

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/option_error.h"
#include "base/status.h"
#include "checkpoint/module_state.h"
#include "checkpoint/rng_state.h"
#include "ddp/all_gather.h"
#include "ddp/collective_status.h"
#include "ddp/zero/zero_redundancy_optimizer.h"
#include "optim/state_dict.h"

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

c10::impl::GenericDict SchedulerState(const Schedule& schedule, int64_t step) {
  c10::impl::GenericDict state = checkpoint::NewTree();
  state.insert("name", schedule.options().name);
  state.insert("last_step", step);
  state.insert("warmup_steps", schedule.options().warmup_steps);
  state.insert("total_steps", schedule.total_steps());
  state.insert("step_size", schedule.step_size());
  state.insert("gamma", schedule.options().gamma);
  return state;
}

std::string Printed(const c10::IValue& value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

}  // namespace

absl::StatusOr<checkpoint::State> CaptureState(const session::Session& session, const Task& task,
                                               torch::optim::Optimizer& optimizer,
                                               const Schedule& schedule, const Position& position,
                                               const GradScaler* scaler) {
  checkpoint::State state;
  DDP_ASSIGN_OR_RETURN(c10::impl::GenericDict optimizer_state, StateOf(optimizer));
  DDP_ASSIGN_OR_RETURN(std::vector<at::Tensor> rng, GatherRngStates(session, c10::kCPU));
  state.root.insert("task", task.name);
  state.root.insert("model", checkpoint::ModuleState(*task.module));
  state.root.insert("optimizer", optimizer_state);
  state.root.insert("scheduler", SchedulerState(schedule, position.step));
  state.root.insert("epoch", position.epoch);
  state.root.insert("sample", position.sample);
  state.root.insert("step", position.step);
  state.root.insert("seed", position.seed);
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
                                      torch::optim::Optimizer& optimizer, GradScaler* scaler) {
  DDP_RETURN_IF_ERROR(CheckTask(state, task));
  Position position;
  DDP_ASSIGN_OR_RETURN(position.epoch, Integer(state, "epoch"));
  DDP_ASSIGN_OR_RETURN(position.sample, IntegerOr(state, "sample", 0));
  DDP_ASSIGN_OR_RETURN(position.step, Integer(state, "step"));
  DDP_ASSIGN_OR_RETURN(position.seed, Integer(state, "seed"));
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
  DDP_RETURN_IF_ERROR(Annotate(LoadStateOf(optimizer, optimizer_state), "optimizer"));
  if (scaler != nullptr && state.root.contains("scaler")) {
    DDP_ASSIGN_OR_RETURN(const c10::IValue saved, Entry(state, "scaler"));
    if (!saved.isGenericDict()) {
      return absl::InvalidArgumentError("the checkpoint's key 'scaler' is not a dict");
    }
    DDP_RETURN_IF_ERROR(scaler->load_state_dict(saved.toGenericDict()));
  }
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

absl::Status CheckSeed(const checkpoint::State& state, int64_t seed) {
  DDP_ASSIGN_OR_RETURN(const int64_t saved, Integer(state, "seed"));
  if (saved == seed) return absl::OkStatus();
  return OptionError(
      "seed", absl::StrCat(seed),
      absl::StrCat("is not the seed of the checkpoint, which was trained with seed ", saved,
                   ": the order of examples would change in the middle of the run"));
}

std::vector<std::string> ScheduleDifferences(const checkpoint::State& state,
                                             const Schedule& schedule) {
  std::vector<std::string> differences;
  auto saved = state.root.find("scheduler");
  if (saved == state.root.end() || !saved->value().isGenericDict()) return differences;
  const auto before = saved->value().toGenericDict();
  for (const auto& entry : SchedulerState(schedule, 0)) {
    const std::string key = entry.key().toStringRef();
    auto it = before.find(entry.key());
    if (key == "last_step" || it == before.end()) continue;
    const std::string now = Printed(entry.value()), then = Printed(it->value());
    if (now != then) differences.push_back(absl::StrCat(key, " ", now, ", saved ", then));
  }
  return differences;
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
