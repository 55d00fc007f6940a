// The components of a run that have state, and checkpoints of all of them.
//
//   Components components;
//   components.Add({.name = keys::kModel, .stateful = &model, .required = true});
//   DDP_ASSIGN_OR_RETURN(checkpoint::State state, components.Capture(session, all_ranks_write));
//   DDP_RETURN_IF_ERROR(components.Restore(state, session, notes, unclaimed));
//
// docs/checkpoint.md describes the keys.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/implementation_options.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "checkpoint/state.h"
#include "checkpoint/stateful.h"
#include "ddp/amp/grad_scaler.h"
#include "ddp/data/dataset.h"
#include "ddp/distributed_optimizer.h"
#include "ddp/model_wrapper.h"
#include "ddp/session/session.h"
#include "ddp/trainer/keys.h"
#include "ddp/trainer/options.h"
#include "ddp/trainer/position.h"
#include "torch/nn/module.h"
#include "torch/ordered_dict.h"

namespace ddp::trainer {

// The effect of a checkpoint that lacks a component: it begins anew, which is said, or that is an
// error, but for the guard. What has taken steps already does not begin anew.
enum class MissingComponent { kBeginsAnew, kRefused };

// Of a name that a program gives and checkpoints hold: InvalidArgument, that `what` has one which
// is not UTF-8, or has a zero byte.
absl::Status CheckName(absl::string_view what, absl::string_view name);

// InvalidArgument: a program's component is null, or its name is empty, one of `others` or for
// another reason no key of its own in checkpoints.
absl::Status CheckComponent(const checkpoint::Component& component,
                            const std::vector<checkpoint::Component>& others);

// They are in the order in which they are saved and loaded. Thread-compatible.
class Components {
 public:
  // All ranks add the same, in one order.
  void Add(checkpoint::Component component) { components_.push_back(std::move(component)); }

  // Collective: state_dict of each. Unless all ranks write (Format::all_ranks_write), the entries
  // per rank of all ranks are gathered onto rank 0.
  absl::StatusOr<checkpoint::State> Capture(const session::Session& session,
                                            bool all_ranks_write) const;

  // Loads `state`, once all components have found that it fits. Adds to `notes` what is said, and
  // to `unclaimed` the keys that no component takes. InvalidArgument names the key or shape that
  // does not fit; nothing has changed then. Not collective.
  absl::Status Restore(const checkpoint::State& state, const session::Session& session,
                       checkpoint::LoadNotes& notes, std::vector<std::string>& unclaimed,
                       MissingComponent missing = MissingComponent::kBeginsAnew) const;

  // The entries per rank that Restore needs.
  checkpoint::PerRank per_rank() const;

 private:
  std::vector<checkpoint::Component> components_;
};

// The identity and the position of a run.
class RunState final : public checkpoint::Stateful {
 public:
  // `task`: the model's name. `options`, which outlive this: the configuration, and what compares
  // it with the saved one. `position` outlives this. `evaluated_weights`: the component whose
  // weights the run evaluates in the place of the model's, so that the metrics beside a checkpoint
  // are theirs; empty: none.
  RunState(std::string task, const TrainerOptions& options, int world_size, Position& position,
           std::string evaluated_weights = "")
      : task_(std::move(task)),
        options_(options),
        world_size_(world_size),
        position_(position),
        evaluated_weights_(std::move(evaluated_weights)) {}

  static checkpoint::Component As(RunState& state);

  absl::StatusOr<checkpoint::State> state_dict() override;
  // Also refuses a state that was saved within an epoch whose examples have another order with the
  // present seed and data set (OptionError for the seed), or are others, as far as the data set's
  // fingerprint tells.
  absl::Status CheckStateDict(const checkpoint::State& state) const override;
  // Seed, size and fingerprint of the data set stay as they are. A state without `sample`, of an
  // earlier version, is at the start of its epoch.
  absl::Status load_state_dict(const checkpoint::State& state,
                               checkpoint::LoadNotes& notes) override;

 private:
  const std::string task_;
  const TrainerOptions& options_;
  const int world_size_;
  Position& position_;
  const std::string evaluated_weights_;
};

// Parameters and buffers.
class ModelState final : public checkpoint::Stateful {
 public:
  explicit ModelState(torch::nn::Module& module) : module_(module) {}

  static checkpoint::Component As(ModelState& state);

  absl::StatusOr<checkpoint::State> state_dict() override;
  absl::Status CheckStateDict(const checkpoint::State& state) const override;
  absl::Status load_state_dict(const checkpoint::State& state,
                               checkpoint::LoadNotes& notes) override;

 private:
  torch::nn::Module& module_;
};

// The buffers of each rank, where these may differ (without
// DataParallelOptions::broadcast_buffers). The trainer gives all ranks rank 0's at the end of an
// epoch and before a checkpoint within one: a run that goes on needs those from before.
class RankBuffers final : public checkpoint::Stateful {
 public:
  RankBuffers(torch::nn::Module& module, int rank) : module_(module), rank_(rank) {}

  // Copies the present ones. The next state_dict has them; one without this before it has none.
  void TakeDown();

  absl::StatusOr<checkpoint::State> state_dict() override;
  absl::Status CheckStateDict(const checkpoint::State& state) const override;
  absl::Status load_state_dict(const checkpoint::State& state,
                               checkpoint::LoadNotes& notes) override;

 private:
  torch::nn::Module& module_;
  const int rank_;
  checkpoint::Dict taken_down_ = checkpoint::NewTree();
};

// The scale of the loss and its growth tracker. The scaler's options stay as they are. Of a run
// without one, the scale starts anew.
class ScalerState final : public checkpoint::Stateful {
 public:
  explicit ScalerState(GradScaler& scaler) : scaler_(scaler) {}

  absl::StatusOr<checkpoint::State> state_dict() override;
  absl::Status CheckStateDict(const checkpoint::State& state) const override;
  absl::Status load_state_dict(const checkpoint::State& state,
                               checkpoint::LoadNotes& notes) override;

 private:
  GradScaler& scaler_;
};

// The order in which rank 0's gradients are reduced, by the wrapper or by the optimizer; no entry
// of what has none.
class BucketOrder final : public checkpoint::Stateful {
 public:
  // `suffix`: of the names of its phase.
  BucketOrder(ModelWrapper& parallel, std::string suffix)
      : parallel_(parallel), suffix_(std::move(suffix)) {}
  void set_optimizer(DistributedOptimizer& optimizer) { optimizer_ = &optimizer; }

  static checkpoint::Component As(BucketOrder& state);

  absl::StatusOr<checkpoint::State> state_dict() override;
  absl::Status CheckStateDict(const checkpoint::State& state) const override;
  // Only remembers it.
  absl::Status load_state_dict(const checkpoint::State& state,
                               checkpoint::LoadNotes& notes) override;

  // Collective, before the first forward. Restores what was loaded, if anything was: rank 0's,
  // since files of one name may differ between machines. False: sums may round otherwise
  // (kOtherBuckets).
  absl::StatusOr<bool> Restore(const session::Session& session);

 private:
  std::string key_of_wrapper() const { return keys::kBucketOrder + suffix_; }
  std::string key_of_optimizer() const { return keys::kGradientOrder + suffix_; }

  ModelWrapper& parallel_;
  DistributedOptimizer* optimizer_ = nullptr;  // null: none yet
  const std::string suffix_;
  std::map<std::string, std::vector<int64_t>> loaded_;  // by key
};

// Torch's generators of each rank. In another world each rank seeds them from seed, rank, world
// size and position, so that no rank draws the numbers of the run's start again.
class Generators final : public checkpoint::Stateful {
 public:
  // `position` outlives this, and has been loaded before.
  Generators(const session::Session& session, const Position& position)
      : session_(session), position_(position) {}

  static checkpoint::Component As(Generators& state);

  absl::StatusOr<checkpoint::State> state_dict() override;
  absl::Status CheckStateDict(const checkpoint::State& state) const override;
  absl::Status load_state_dict(const checkpoint::State& state,
                               checkpoint::LoadNotes& notes) override;

 private:
  const session::Session& session_;
  const Position& position_;
};

// Loads the model alone, for evaluation. Position fields that `state` lacks are 0. Adds to `notes`
// what is said. InvalidArgument if `state` is of another task, or does not fit. Not collective.
absl::StatusOr<Position> RestoreModel(const checkpoint::State& state, const std::string& task,
                                      torch::nn::Module& module, checkpoint::LoadNotes& notes);
// The entries that it needs.
checkpoint::ReadRequest RequestModel();

// Reads a checkpoint of any linked format on all ranks. Collective, but where these read files of
// different names. One in the folder of `manager`, in which only the run writes, must have
// checksums, as those that the run finds there.
absl::StatusOr<checkpoint::State> ReadCheckpoint(const session::Session& session,
                                                 const std::string& path,
                                                 const checkpoint::ReadRequest& request,
                                                 const checkpoint::ManagerOptions& manager,
                                                 const checkpoint::LoadOptions& load);

// Collective. The newest checkpoint of a run's own folder, or the best; `from` is "auto" or "best".
// Errors of Manager::LoadNewest and LoadBest, and FailedPrecondition for a checkpoint whose name
// says another time of the run than its contents: it hides newer ones at each start, or older ones
// hide it. That, a folder with nothing but damage, and a checkpoint that this program cannot read
// (Unimplemented) would stay as they are however often a launcher started the run again, so they
// have the exit code of wrong options.
absl::StatusOr<std::optional<checkpoint::Loaded>> LoadOwn(const session::Session& session,
                                                          checkpoint::Manager& manager,
                                                          absl::string_view from,
                                                          const checkpoint::ReadRequest& request,
                                                          const checkpoint::LoadOptions& load);

// The error of a state that could not be read or taken, with the checkpoint's path. What does not
// fit the run (InvalidArgument) would not at another attempt, so it has the exit code of wrong
// options. OK stays OK.
absl::Status CannotResumeFrom(const std::string& path, const absl::Status& error);

// Collective. Whether all ranks have read one checkpoint: `path` may be another file on each
// machine, and nothing later would tell that the ranks train different models.
absl::Status CheckSameState(const session::Session& session, const Position& position,
                            const torch::OrderedDict<std::string, at::Tensor>& parameters,
                            const std::string& path);

// "640 examples of fingerprint 3f2a", by which the ranks compare their data sets. `fingerprint`: of
// data::AnyDataset; empty if it is not known.
std::string DataText(int64_t examples, const std::string& fingerprint);

// What a run says of a training set that cannot seek; empty of any other. It reads nothing.
std::string CannotSeekText(const data::AnyDataset& dataset);

// Call it before the examples of an epoch, or what is left of it, are loaded: `order` tells their
// order from others (data::Share::Fingerprint). InvalidArgument if it is not that of the checkpoint
// within an epoch. Not collective; alike on all ranks.
absl::Status BeginInOrder(int64_t order, Position& position);

inline constexpr char kOtherBuckets[] =
    "the buckets of gradients are not those it was saved with: sums may round otherwise";

// Formats share bytes by it, over the session's process group; null with a world size of 1.
// `session` must outlive it.
checkpoint::BroadcastBytes BroadcastOver(const session::Session& session);
// Rank 0 likewise gets the others' parts of tensors by it.
checkpoint::MoveToRank0 MoveOver(const session::Session& session);

}  // namespace ddp::trainer
