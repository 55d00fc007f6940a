#include "ddp/trainer/training_state.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>

#include "ATen/ops/from_blob.h"
#include "ATen/ops/tensor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/exit_code.h"
#include "base/option_error.h"
#include "base/status.h"
#include "base/utf8.h"
#include "checkpoint/consolidate.h"
#include "checkpoint/manager.h"
#include "checkpoint/module_state.h"
#include "checkpoint/name.h"
#include "checkpoint/rng_state.h"
#include "ddp/collective_status.h"
#include "ddp/gather/all_agree.h"
#include "ddp/gather/gather.h"
#include "ddp/trainer/keys.h"
#include "optim/kind.h"
#include "torch/csrc/autograd/grad_mode.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/utils.h"

namespace ddp::trainer {
namespace {

using checkpoint::Component;
using checkpoint::Dict;
using checkpoint::LoadNotes;
using checkpoint::State;

absl::Status MissingKey(absl::string_view key) {
  return absl::InvalidArgumentError(absl::StrCat("the checkpoint has no key '", key,
                                                 "': this program did not write it, or a ",
                                                 "save option left it out"));
}

absl::StatusOr<c10::IValue> Entry(const Dict& state, const char* key) {
  const std::optional<c10::IValue> value = optim::Find(state, key);
  if (!value) return MissingKey(key);
  return *value;
}

absl::StatusOr<int64_t> Integer(const Dict& state, const char* key) {
  DDP_ASSIGN_OR_RETURN(const c10::IValue value, Entry(state, key));
  if (!value.isInt()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the checkpoint's key '", key, "' is not an integer but a ", value.tagKind()));
  }
  return value.toInt();
}

// Returns `otherwise` for a key that older checkpoints lack.
absl::StatusOr<int64_t> IntegerOr(const Dict& state, const char* key, int64_t otherwise) {
  if (!state.contains(key)) return otherwise;
  return Integer(state, key);
}

// nullopt for a key that older checkpoints lack.
absl::StatusOr<std::optional<std::string>> Text(const Dict& state, const char* key) {
  if (!state.contains(key)) return std::nullopt;
  DDP_ASSIGN_OR_RETURN(const c10::IValue value, Entry(state, key));
  if (value.isString()) return value.toStringRef();
  return absl::InvalidArgumentError(
      absl::StrCat("the checkpoint's key '", key, "' is not a text but a ", value.tagKind()));
}

absl::Status CheckTask(const Dict& state, const std::string& task) {
  DDP_ASSIGN_OR_RETURN(const c10::IValue name, Entry(state, keys::kTask));
  if (name.isString() && name.toStringRef() == task) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the checkpoint is of model '",
                                                 name.isString() ? name.toStringRef() : "?",
                                                 "', but this run trains '", task, "'"));
}

absl::StatusOr<Position> PositionIn(const Dict& state) {
  Position position;
  DDP_ASSIGN_OR_RETURN(position.epoch, Integer(state, keys::kEpoch));
  DDP_ASSIGN_OR_RETURN(position.sample, IntegerOr(state, keys::kSample, 0));
  DDP_ASSIGN_OR_RETURN(position.step, Integer(state, keys::kStep));
  DDP_ASSIGN_OR_RETURN(position.seed, Integer(state, keys::kSeed));
  DDP_ASSIGN_OR_RETURN(position.dataset_size, IntegerOr(state, keys::kDatasetSize, 0));
  DDP_ASSIGN_OR_RETURN(position.order, IntegerOr(state, keys::kOrder, 0));
  DDP_ASSIGN_OR_RETURN(position.data_fingerprint, Text(state, keys::kFingerprint));
  DDP_ASSIGN_OR_RETURN(position.validation_size, IntegerOr(state, keys::kValidationSize, 0));
  DDP_ASSIGN_OR_RETURN(position.validated_step, IntegerOr(state, keys::kValidatedStep, 0));
  const std::optional<c10::IValue> counts = optim::Find(state, keys::kLossCounts);
  if (counts && counts->isList()) {
    for (const c10::IValue& count : counts->toListRef()) {
      position.loss_counts.push_back(optim::AsNumber(count).value_or(0));
    }
  }
  if (position.epoch >= 0 && position.sample >= 0 && position.step >= 0) return position;
  return absl::InvalidArgumentError(absl::StrCat("the checkpoint's position is negative: epoch ",
                                                 position.epoch, ", sample ", position.sample,
                                                 ", step ", position.step));
}

// An error if the examples of the epoch that `saved` is in have another order now.
absl::Status CheckOrder(const Position& saved, const Position& now) {
  constexpr char kWhy[] =
      ": the order of examples would change within the epoch; a checkpoint of the end of an epoch "
      "may be resumed so";
  if (saved.sample == 0) return absl::OkStatus();
  if (saved.seed != now.seed) {
    return OptionError("seed", absl::StrCat(now.seed),
                       absl::StrCat("is not the seed of the checkpoint, which was trained with "
                                    "seed ",
                                    saved.seed, kWhy));
  }
  if (saved.dataset_size != 0 && saved.dataset_size != now.dataset_size) {
    return absl::InvalidArgumentError(absl::StrCat("the training set has ", now.dataset_size,
                                                   " examples, and that of the checkpoint had ",
                                                   saved.dataset_size, kWhy));
  }
  // A data set that has a fingerprint is not one that has none.
  if (saved.data_fingerprint && saved.data_fingerprint != now.data_fingerprint) {
    const auto text = [](const std::optional<std::string>& fingerprint) {
      return fingerprint.value_or("").empty() ? "none" : *fingerprint;
    };
    return absl::InvalidArgumentError(absl::StrCat(
        "the training set has other contents than that of the checkpoint, or the same in another "
        "order: its fingerprint is ",
        text(now.data_fingerprint), ", not ", text(saved.data_fingerprint),
        ": the run would go on with other examples within the epoch; a checkpoint of the end of an "
        "epoch may be resumed so"));
  }
  return absl::OkStatus();
}

// An error if examples would be validated on that the checkpoint's run has trained on.
absl::Status CheckSplit(const Position& saved, const Position& now) {
  const auto other = [&](const char* option, int64_t is, int64_t was) {
    return OptionError(option, absl::StrCat(is),
                       absl::StrCat("is not that of the checkpoint, ", was,
                                    ": other examples would be held out as validation data, which "
                                    "the run has trained on"));
  };
  if (now.validation_size == 0) return absl::OkStatus();
  if (saved.validation_size == 0) {
    return OptionError("validation_size", absl::StrCat(now.validation_size),
                       "would hold out examples that the checkpoint's run has trained on, which "
                       "held out none; begin a new run, or give it validation data of their own");
  }
  if (saved.seed != now.seed) return other("seed", now.seed, saved.seed);
  if (saved.validation_size != now.validation_size) {
    return other("validation_size", now.validation_size, saved.validation_size);
  }
  if (saved.dataset_size == 0 || saved.dataset_size == now.dataset_size) return absl::OkStatus();
  return OptionError(
      "validation_size", absl::StrCat(now.validation_size),
      absl::StrCat("would hold out other examples than the checkpoint's run did, which has trained "
                   "on them: the training set has ",
                   now.dataset_size, " besides, and had ", saved.dataset_size,
                   "; go on with the same data, or give it validation data of their own"));
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

// Collective. For formats that rank 0 writes alone: moves the entries `top_level` of `per_rank`,
// which are small, to lists of all ranks' in rank 0's `root`, as in files of all versions. The
// others stay: checkpoint::Gathering takes them, tensor by tensor, from all ranks or from none.
// InvalidArgument, on every rank, if a rank lacks an entry of another one.
absl::Status GatherPerRank(const session::Session& session,
                           const std::vector<std::string>& top_level, State& state) {
  const auto is_at_top = [&](const c10::IValue& key) {
    return std::find(top_level.begin(), top_level.end(), key.toStringRef()) != top_level.end();
  };
  const Dict mine = state.per_rank.at(session.rank());
  Dict told = checkpoint::NewTree(), rest = checkpoint::NewTree();
  for (const auto& entry : mine) {
    // Of the others, the keys are compared.
    told.insert(entry.key(), is_at_top(entry.key()) ? entry.value() : c10::IValue());
    if (!is_at_top(entry.key())) rest.insert(entry.key(), entry.value());
  }
  DDP_ASSIGN_OR_RETURN(const std::vector<c10::IValue> all,
                       Gather(session.process_group(), c10::IValue(told), /*dst=*/0));
  state.per_rank.clear();
  if (!rest.empty()) state.per_rank.emplace(session.rank(), std::move(rest));
  std::vector<Dict> by_rank;  // on rank 0
  for (const c10::IValue& theirs : all) by_rank.push_back(theirs.toGenericDict());
  const absl::StatusOr<Dict> lists =
      checkpoint::ListsOfRanks(by_rank, checkpoint::MissingEntry::kRefused);
  DDP_RETURN_IF_ERROR(session.Agree(lists.status()));
  for (const auto& entry : *lists) {
    if (is_at_top(entry.key())) state.root.insert(entry.key(), entry.value());
  }
  return absl::OkStatus();
}

// With the component's name in front, if it is one that a user knows.
absl::Status About(const Component& component, const absl::Status& status) {
  const bool has_key = component.top_level.empty() && component.top_level_per_rank.empty();
  return has_key ? Annotate(status, component.name) : status;
}

// Keys of `rest`, what no component has taken.
std::vector<std::string> KeysOf(const State& rest) {
  std::vector<std::string> names;
  const auto add = [&](const std::string& prefix, const Dict& dict) {
    for (const auto& entry : dict) {
      const c10::IValue key = entry.key();
      const std::string name = absl::StrCat(prefix, key.isString() ? key.toStringRef()
                                                    : key.isInt()  ? absl::StrCat(key.toInt())
                                                                   : "?");
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  };
  add("", rest.root);
  for (const auto& [path, tensor] : rest.sharded) names.push_back(path);
  for (const auto& [rank, theirs] : rest.per_rank) {
    add(absl::StrCat(checkpoint::kPerRankEntries, "/"), theirs);
  }
  return names;
}

absl::Status CheckIsOfItsName(const Dict& state, const std::string& path) {
  const std::optional<checkpoint::CheckpointName> name =
      checkpoint::ParseName(std::filesystem::path(path).stem().string());
  const absl::StatusOr<int64_t> epoch = Integer(state, keys::kEpoch);
  const absl::StatusOr<int64_t> step = Integer(state, keys::kStep);
  // What lacks them, or has no such numbers, is refused later.
  if (!name || !epoch.ok() || !step.ok() || *epoch < 0 || *step < 0 ||
      (name->epochs.value_or(*epoch) == *epoch && name->steps.value_or(*step) == *step)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("its name says another time of the run than its contents, which are of epoch ",
                   *epoch, ", step ", *step, ": give it its own name, or move it elsewhere"));
}

}  // namespace

absl::Status CheckName(absl::string_view what, absl::string_view name) {
  const absl::Status text = CheckText(name);
  if (text.ok()) return text;
  return absl::InvalidArgumentError(
      absl::StrCat(what, " '", Printable(name), "' has a name that ", text.message()));
}

absl::Status CheckComponent(const Component& component, const std::vector<Component>& others) {
  DDP_RETURN_IF_ERROR(CheckName("component", component.name));
  const bool is_there = std::any_of(others.begin(), others.end(), [&](const Component& other) {
    return other.name == component.name;
  });
  const char* problem = component.name.empty()          ? "has no name"
                        : component.stateful == nullptr ? "is null"
                        : keys::IsTaken(component.name) ? "has the name of one of the trainer's"
                        : absl::StrContains(component.name, '/') ? "has a name with a slash"
                        : is_there                               ? "has the name of another one"
                                                                 : nullptr;
  if (problem == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("component '", component.name, "' ", problem));
}

absl::StatusOr<State> Components::Capture(const session::Session& session,
                                          bool all_ranks_write) const {
  State state;
  std::vector<std::string> top_level_per_rank;
  for (const Component& component : components_) {
    const absl::StatusOr<State> own = component.stateful->state_dict();
    DDP_RETURN_IF_ERROR(About(component, own.status()));
    DDP_RETURN_IF_ERROR(checkpoint::InsertComponent(component, *own, state));
    for (const std::string& key : component.top_level_per_rank) top_level_per_rank.push_back(key);
  }
  if (all_ranks_write || state.per_rank.empty()) return state;
  DDP_RETURN_IF_ERROR(GatherPerRank(session, top_level_per_rank, state));
  return state;
}

absl::Status Components::Restore(const checkpoint::State& state, const session::Session& session,
                                 LoadNotes& notes, std::vector<std::string>& unclaimed,
                                 MissingComponent missing) const {
  DDP_ASSIGN_OR_RETURN(const int64_t world_size, Integer(state.root, keys::kWorldSize));
  State rest = checkpoint::DetachedCopy(state);
  std::vector<std::optional<State>> found;
  for (const Component& component : components_) {
    // The guard knows what has happened since.
    const bool is_needed =
        component.required || (missing == MissingComponent::kRefused &&
                               component.top_level.empty() && component.name != keys::kGuard);
    // A save option leaves the progress of a schedule, at the top level.
    const bool has_progress_only =
        component.name == keys::kScheduler && !rest.root.contains(component.name);
    if (has_progress_only && missing == MissingComponent::kRefused) {
      return MissingKey(component.name);
    }
    DDP_ASSIGN_OR_RETURN(std::optional<State> taken,
                         checkpoint::TakeComponent(component, world_size, rest, session.rank()));
    if (!taken) {
      const std::vector<std::string>& keys = component.top_level_per_rank;
      if (is_needed) return MissingKey(keys.empty() ? component.name : keys[0]);
    }
    if (has_progress_only || (!taken && component.top_level.empty())) {
      notes.Add(absl::StrCat("without ", component.name, ", which the checkpoint does not have"));
    }
    if (!taken) {
      found.emplace_back();
      continue;
    }
    if (world_size != session.size() && !component.stateful->takes_other_worlds()) {
      const auto has_any = [](const auto& theirs) { return !theirs.second.empty(); };
      if (std::any_of(taken->per_rank.begin(), taken->per_rank.end(), has_any)) {
        notes.Add(absl::StrCat("without what each rank had of its own in ", component.name,
                               ": saved with a world size of ", world_size, ", now ",
                               session.size()));
      }
      taken->per_rank.clear();
    }
    DDP_RETURN_IF_ERROR(About(component, component.stateful->CheckStateDict(*taken)));
    found.push_back(std::move(taken));
  }
  for (size_t i = 0; i < components_.size(); ++i) {
    if (!found[i]) continue;
    DDP_RETURN_IF_ERROR(
        About(components_[i], components_[i].stateful->load_state_dict(*found[i], notes)));
  }
  unclaimed = KeysOf(rest);
  if (!unclaimed.empty()) {
    notes.Add(absl::StrCat("without what the checkpoint has under ", absl::StrJoin(unclaimed, ", "),
                           ": this run has no component that takes it"));
  }
  return absl::OkStatus();
}

checkpoint::PerRank Components::per_rank() const {
  const bool takes_all = std::any_of(
      components_.begin(), components_.end(),
      [](const Component& component) { return component.stateful->takes_other_worlds(); });
  return takes_all ? checkpoint::PerRank::kAll : checkpoint::PerRank::kOwn;
}

Component RunState::As(RunState& state) {
  return {.name = keys::kRun,
          .stateful = &state,
          .top_level = {keys::kTask, keys::kEpoch, keys::kSample, keys::kStep, keys::kSeed,
                        keys::kDatasetSize, keys::kValidationSize, keys::kValidatedStep,
                        keys::kWorldSize, keys::kLossCounts, keys::kOrder, keys::kFingerprint,
                        keys::kConfig, keys::kEvaluated},
          .required = true};
}

absl::StatusOr<State> RunState::state_dict() {
  State state;
  state.root.insert(keys::kTask, task_);
  state.root.insert(keys::kEpoch, position_.epoch);
  state.root.insert(keys::kSample, position_.sample);
  state.root.insert(keys::kStep, position_.step);
  state.root.insert(keys::kSeed, position_.seed);
  state.root.insert(keys::kDatasetSize, position_.dataset_size);
  if (position_.validation_size > 0) {
    state.root.insert(keys::kValidationSize, position_.validation_size);
  }
  if (position_.validated_step > 0) {
    state.root.insert(keys::kValidatedStep, position_.validated_step);
  }
  state.root.insert(keys::kWorldSize, static_cast<int64_t>(world_size_));
  if (!position_.loss_counts.empty()) {
    state.root.insert(keys::kLossCounts, c10::List<double>(position_.loss_counts));
  }
  if (position_.sample > 0 && position_.order != 0) {
    state.root.insert(keys::kOrder, position_.order);
  }
  if (position_.sample > 0 && position_.data_fingerprint) {
    state.root.insert(keys::kFingerprint, *position_.data_fingerprint);
  }
  if (!options_.configuration.empty()) {
    state.root.insert(keys::kConfig, options_.configuration);
  }
  if (!evaluated_weights_.empty()) state.root.insert(keys::kEvaluated, evaluated_weights_);
  return state;
}

absl::Status RunState::CheckStateDict(const State& state) const {
  DDP_RETURN_IF_ERROR(CheckTask(state.root, task_));
  DDP_ASSIGN_OR_RETURN(const Position saved, PositionIn(state.root));
  DDP_RETURN_IF_ERROR(CheckSplit(saved, position_));
  return CheckOrder(saved, position_);
}

absl::Status RunState::load_state_dict(const State& state, LoadNotes& notes) {
  DDP_ASSIGN_OR_RETURN(const Position saved, PositionIn(state.root));
  notes.AddDifference("seed", position_.seed, saved.seed);
  if (saved.dataset_size != 0) {
    notes.AddDifference("a training set of", position_.dataset_size, saved.dataset_size);
  }
  const std::optional<c10::IValue> configuration = optim::Find(state.root, keys::kConfig);
  if (options_.compare_configuration && configuration && configuration->isString()) {
    options_.compare_configuration(configuration->toStringRef(), notes);
  }
  position_.epoch = saved.epoch;
  position_.sample = saved.sample;
  position_.step = saved.step;
  position_.order = saved.order;
  position_.validated_step = saved.validated_step;
  position_.loss_counts = saved.loss_counts;
  return absl::OkStatus();
}

namespace {

absl::Status LoadModel(torch::nn::Module& module, const c10::IValue& state, LoadNotes& notes) {
  std::vector<std::string> remarks;
  DDP_RETURN_IF_ERROR(checkpoint::LoadModuleState(module, state, &remarks));
  for (const std::string& remark : remarks) notes.Add(absl::StrCat("with ", remark));
  return absl::OkStatus();
}

}  // namespace

Component ModelState::As(ModelState& state) {
  return {.name = keys::kModel, .stateful = &state, .required = true};
}

absl::StatusOr<State> ModelState::state_dict() {
  State state;
  state.root = checkpoint::ModuleState(module_);
  return state;
}

absl::Status ModelState::CheckStateDict(const State& state) const {
  return checkpoint::CheckModuleState(module_, state.root);
}

absl::Status ModelState::load_state_dict(const State& state, LoadNotes& notes) {
  return LoadModel(module_, state.root, notes);
}

void RankBuffers::TakeDown() {
  taken_down_ = checkpoint::NewTree();
  for (const auto& buffer : module_.named_buffers()) {
    taken_down_.insert(buffer.key(), buffer.value().detach().clone());
  }
}

absl::StatusOr<State> RankBuffers::state_dict() {
  State state;
  state.per_rank.emplace(rank_, std::exchange(taken_down_, checkpoint::NewTree()));
  return state;
}

absl::Status RankBuffers::CheckStateDict(const State& state) const {
  for (const auto& [rank, theirs] : state.per_rank) {
    if (theirs.empty()) continue;  // saved at the end of an epoch
    for (const auto& buffer : module_.named_buffers()) {
      DDP_RETURN_IF_ERROR(checkpoint::CheckTensor(theirs, buffer.key(), buffer.value()));
    }
  }
  return absl::OkStatus();
}

absl::Status RankBuffers::load_state_dict(const State& state, LoadNotes&) {
  const auto mine = state.per_rank.find(rank_);
  if (mine == state.per_rank.end() || mine->second.empty()) return absl::OkStatus();
  const torch::NoGradGuard no_grad;
  for (auto& buffer : module_.named_buffers()) {
    checkpoint::CopyValues(buffer.value(), mine->second.at(buffer.key()).toTensor());
  }
  return absl::OkStatus();
}

namespace {

// A scaler's state with the options of `scaler` in place of the saved ones.
Dict WithOptionsOf(const GradScaler& scaler, const Dict& saved, LoadNotes& notes) {
  Dict state = saved.copy();
  const Dict now = scaler.state_dict();
  for (const char* key : {"growth_factor", "backoff_factor", "growth_interval"}) {
    const std::optional<c10::IValue> old = optim::Find(saved, key);
    // The load refuses what is missing or no number.
    if (!old || !optim::AsNumber(*old) || optim::AsNumber(*old) == optim::AsNumber(now.at(key))) {
      continue;
    }
    notes.AddDifference(absl::StrCat("grad_scaler.", key), now.at(key), *old);
    state.insert_or_assign(key, now.at(key));
  }
  return state;
}

}  // namespace

absl::StatusOr<State> ScalerState::state_dict() {
  State state;
  state.root = scaler_.state_dict();
  return state;
}

absl::Status ScalerState::CheckStateDict(const State& state) const {
  LoadNotes ignored;
  return GradScaler::CheckStateDict(WithOptionsOf(scaler_, state.root, ignored));
}

absl::Status ScalerState::load_state_dict(const State& state, LoadNotes& notes) {
  return scaler_.load_state_dict(WithOptionsOf(scaler_, state.root, notes));
}

Component BucketOrder::As(BucketOrder& state) {
  return {.name = keys::kBuckets + state.suffix_,
          .stateful = &state,
          .top_level = {state.key_of_wrapper(), state.key_of_optimizer()}};
}

absl::StatusOr<State> BucketOrder::state_dict() {
  State state;
  // The other ranks may have another one before the second step.
  const std::vector<int64_t> order = parallel_.bucket_order();
  if (!order.empty()) state.root.insert(key_of_wrapper(), c10::List<int64_t>(order));
  if (optimizer_ == nullptr) return state;
  const std::vector<int64_t> gradients = optimizer_->bucket_order();
  if (!gradients.empty()) state.root.insert(key_of_optimizer(), c10::List<int64_t>(gradients));
  return state;
}

absl::Status BucketOrder::CheckStateDict(const State& state) const {
  const auto is_integer = [](const c10::IValue& value) { return value.isInt(); };
  for (const std::string& key : {key_of_wrapper(), key_of_optimizer()}) {
    const std::optional<c10::IValue> saved = optim::Find(state.root, key.c_str());
    if (!saved) continue;
    if (!saved->isList() ||
        !std::all_of(saved->toListRef().begin(), saved->toListRef().end(), is_integer)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the checkpoint's key '", key, "' is not a list of integers"));
    }
  }
  return absl::OkStatus();
}

absl::Status BucketOrder::load_state_dict(const State& state, LoadNotes&) {
  loaded_.clear();
  for (const std::string& key : {key_of_wrapper(), key_of_optimizer()}) {
    const std::optional<c10::IValue> saved = optim::Find(state.root, key.c_str());
    if (!saved) continue;
    for (const c10::IValue& index : saved->toListRef()) loaded_[key].push_back(index.toInt());
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> BucketOrder::Restore(const session::Session& session) {
  if (session.size() == 1) return true;
  DDP_ASSIGN_OR_RETURN(const auto orders,
                       BroadcastObject(session.process_group(),
                                       std::vector<std::vector<int64_t>>{
                                           loaded_[key_of_wrapper()], loaded_[key_of_optimizer()]},
                                       /*src=*/0));
  if (optimizer_ != nullptr) optimizer_->RestoreBucketOrder(orders[1]);
  if (orders[0].empty()) return true;
  bool restored = false;
  DDP_RETURN_IF_ERROR(CatchCollective("rebuilding the buckets of gradients", [&] {
    restored = parallel_.RestoreBucketOrder(orders[0]);
    return absl::OkStatus();
  }));
  return restored || !parallel_.reduces_gradients();
}

Component Generators::As(Generators& state) {
  return {.name = keys::kGenerators,
          .stateful = &state,
          .top_level = {},
          .top_level_per_rank = {keys::kRng, keys::kDeviceRng},
          .required = true};
}

absl::StatusOr<State> Generators::state_dict() {
  State state;
  Dict mine = checkpoint::NewTree();
  mine.insert(keys::kRng, checkpoint::RngState());
  if (!session_.device().is_cpu()) {
    mine.insert(keys::kDeviceRng, checkpoint::RngState(session_.device()));
  }
  state.per_rank.emplace(session_.rank(), std::move(mine));
  return state;
}

absl::Status Generators::CheckStateDict(const State& state) const {
  for (const auto& [rank, theirs] : state.per_rank) {
    if (!theirs.contains(keys::kRng)) return MissingKey(keys::kRng);
    DDP_RETURN_IF_ERROR(Annotate(checkpoint::CheckRngState(theirs.at(keys::kRng)), keys::kRng));
    if (session_.device().is_cpu() || !theirs.contains(keys::kDeviceRng)) continue;
    DDP_RETURN_IF_ERROR(
        Annotate(checkpoint::CheckRngState(theirs.at(keys::kDeviceRng), session_.device()),
                 keys::kDeviceRng));
  }
  return absl::OkStatus();
}

absl::Status Generators::load_state_dict(const State& state, LoadNotes&) {
  // Also those whose state was not saved.
  torch::manual_seed(SeedAt(position_, session_.rank(), session_.size()));
  if (state.per_rank.empty()) return absl::OkStatus();
  const Dict& mine = state.per_rank.at(session_.rank());
  DDP_RETURN_IF_ERROR(checkpoint::LoadRngState(mine.at(keys::kRng)));
  // Older checkpoints lack the state of the device, and so do those of runs on the CPU.
  if (session_.device().is_cpu() || !mine.contains(keys::kDeviceRng)) return absl::OkStatus();
  return checkpoint::LoadRngState(mine.at(keys::kDeviceRng), session_.device());
}

absl::StatusOr<Position> RestoreModel(const checkpoint::State& state, const std::string& task,
                                      torch::nn::Module& module, LoadNotes& notes) {
  DDP_RETURN_IF_ERROR(CheckTask(state.root, task));
  DDP_ASSIGN_OR_RETURN(const c10::IValue saved, Entry(state.root, keys::kModel));
  DDP_RETURN_IF_ERROR(Annotate(LoadModel(module, saved, notes), keys::kModel));
  Position position;
  position.epoch = Integer(state.root, keys::kEpoch).value_or(0);
  position.sample = Integer(state.root, keys::kSample).value_or(0);
  position.step = Integer(state.root, keys::kStep).value_or(0);
  position.seed = Integer(state.root, keys::kSeed).value_or(0);
  return position;
}

checkpoint::ReadRequest RequestModel() {
  checkpoint::ReadRequest request{.per_rank = checkpoint::PerRank::kNone};
  for (const char* key : {keys::kModel, keys::kTask, keys::kEpoch, keys::kSample, keys::kStep,
                          keys::kSeed, keys::kEvaluated}) {
    request.parts[key].optional = true;
  }
  return request;
}

absl::StatusOr<State> ReadCheckpoint(const session::Session& session, const std::string& path,
                                     const checkpoint::ReadRequest& request,
                                     const checkpoint::ManagerOptions& manager,
                                     const checkpoint::LoadOptions& load) {
  std::error_code ignored;  // then it is another folder
  const std::filesystem::path file =
      std::filesystem::absolute(path.substr(0, path.find_last_not_of('/') + 1), ignored);
  const bool is_own = !manager.directory.empty() &&
                      std::filesystem::equivalent(file.parent_path(), manager.directory, ignored);
  checkpoint::FormatOptions options{
      .implementations = manager.implementations, .ranks = &session, .accept_unverified = !is_own};
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> paths, session.AllGather(path));
  const bool same = std::all_of(paths.begin(), paths.end(),
                                [&](const std::string& other) { return other == path; });
  if (same) options.broadcast = BroadcastOver(session);
  return CatchStatus("", [&] { return checkpoint::Manager::Load(path, request, options, load); });
}

absl::StatusOr<std::optional<checkpoint::Loaded>> LoadOwn(const session::Session& session,
                                                          checkpoint::Manager& manager,
                                                          absl::string_view from,
                                                          const checkpoint::ReadRequest& request,
                                                          const checkpoint::LoadOptions& load) {
  // What was read, before a callback edits it.
  std::optional<Dict> read;
  checkpoint::LoadOptions options = load;
  if (load.callback) {
    options.callback = [&](State& state) {
      read = state.root.copy();
      load.callback(state);
    };
  }
  absl::StatusOr<std::optional<checkpoint::Loaded>> loaded =
      from == "best" ? manager.LoadBest("", request, options)
                     : manager.LoadNewest(request, options);
  if (absl::IsDataLoss(loaded.status()) || absl::IsUnimplemented(loaded.status())) {
    return WithExitCode(loaded.status(), kUsageExitCode);
  }
  if (!loaded.ok() || !*loaded) return loaded;
  const std::string& path = (*loaded)->path;
  const absl::Status named = CheckIsOfItsName(read.value_or((*loaded)->state.root), path);
  DDP_RETURN_IF_ERROR(session.Agree(WithExitCode(CannotResumeFrom(path, named), kUsageExitCode)));
  return loaded;
}

absl::Status CannotResumeFrom(const std::string& path, const absl::Status& error) {
  const absl::Status annotated = Annotate(error, absl::StrCat("cannot resume from ", path));
  return absl::IsInvalidArgument(error) ? WithExitCode(annotated, kUsageExitCode) : annotated;
}

absl::Status CheckSameState(const session::Session& session, const Position& position,
                            const torch::OrderedDict<std::string, at::Tensor>& parameters,
                            const std::string& path) {
  NamedTensors state = {
      {"position", at::tensor({position.epoch, position.sample, position.step}, at::kLong)
                       .to(session.device())}};
  for (const auto& parameter : parameters) state.emplace_back(parameter.key(), parameter.value());
  const absl::Status same = AllAgree(session.process_group(), state);
  if (!absl::IsFailedPrecondition(same)) return same;
  return Annotate(same, absl::StrCat("the ranks have read different checkpoints from ", path,
                                     "; put it in a folder that all machines share, or the same "
                                     "file on each machine"));
}

std::string DataText(int64_t examples, const std::string& fingerprint) {
  return absl::StrCat(examples, " examples",
                      fingerprint.empty() ? "" : absl::StrCat(" of fingerprint ", fingerprint));
}

std::string CannotSeekText(const data::AnyDataset& dataset) {
  if (dataset.random_access()) return "";
  return absl::StrCat("data set ", dataset.dataset_name(),
                      " is a stream that cannot seek: one worker reads it, and a run that is "
                      "resumed reads again what comes before in a shard");
}

absl::Status BeginInOrder(int64_t order, Position& position) {
  if (position.sample > 0 && position.order != 0 && position.order != order) {
    return WithExitCode(
        absl::InvalidArgumentError(absl::StrCat(
            "cannot resume within epoch ", position.epoch,
            ": the sampler gives its examples in another order than that of the checkpoint; go on "
            "with the same sampler, shuffle and weights, or from a checkpoint of the end of an "
            "epoch")),
        kUsageExitCode);
  }
  position.order = order;
  return absl::OkStatus();
}

checkpoint::BroadcastBytes BroadcastOver(const session::Session& session) {
  if (session.size() == 1) return nullptr;
  return [&session](void* data, size_t size, int from) {
    return CatchCollective("sharing a checkpoint", [&] {
      const at::Tensor bytes = at::from_blob(data, {static_cast<int64_t>(size)}, at::kByte);
      // Where no backend is on the CPU, bytes go through the device.
      const bool direct = DirectDevice(session.process_group()) == c10::DeviceType::CPU;
      at::Tensor message = direct ? bytes : bytes.to(session.device());
      std::vector<at::Tensor> messages = {message};
      c10d::BroadcastOptions options;
      options.rootRank = from;
      session.process_group()->broadcast(messages, options)->wait();
      if (!direct && session.rank() != from) bytes.copy_(message);
      return absl::OkStatus();
    });
  };
}

checkpoint::MoveToRank0 MoveOver(const session::Session& session) {
  if (session.size() == 1) return nullptr;
  return [&session](int from, const at::Tensor& bytes) {
    if (session.rank() != 0 && session.rank() != from) return absl::OkStatus();
    return CatchCollective("gathering a checkpoint", [&] {
      const bool direct = DirectDevice(session.process_group()) == c10::DeviceType::CPU;
      at::Tensor message = direct ? bytes : bytes.to(session.device());
      std::vector<at::Tensor> messages = {message};
      if (session.rank() == from) {
        session.process_group()->send(messages, /*dstRank=*/0, /*tag=*/0)->wait();
      } else {
        session.process_group()->recv(messages, from, /*tag=*/0)->wait();
        if (!direct) at::Tensor(bytes).copy_(message);
      }
      return absl::OkStatus();
    });
  };
}

}  // namespace ddp::trainer
