// The interface by which a component of a run (model, optimizer, schedule, communication hook, one
// of a user's own) gives its state to checkpoints and takes it back, under one name.
//
//   class Ema final : public checkpoint::Stateful {
//     absl::StatusOr<checkpoint::State> state_dict() override {
//       checkpoint::State state;
//       state.root.insert("average", average_);
//       return state;
//     }
//     absl::Status CheckStateDict(const checkpoint::State& state) const override {
//       return checkpoint::CheckTensor(state.root, "average", average_);
//     }
//     absl::Status load_state_dict(const checkpoint::State& state,
//                                  checkpoint::LoadNotes&) override {
//       average_.copy_(state.root.at("average").toTensor());
//       return absl::OkStatus();
//     }
//     at::Tensor average_;
//   };
//
// The names are those of torch.distributed.checkpoint. trainer::TrainerOptions::components takes
// such objects. InsertComponent and TakeComponent, below, say where their entries stand.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint {

using Dict = c10::impl::GenericDict;

// What is said about a load that succeeds: each line goes on after "resumed ". Thread-compatible.
class LoadNotes {
 public:
  void Add(std::string line) { lines_.push_back(std::move(line)); }
  // An option of the run, which counts, is not the one that was saved: "with momentum 0.5, saved
  // 0.9". Adds nothing if they are the same.
  void AddDifference(absl::string_view option, const c10::IValue& now, const c10::IValue& saved);
  // The same, where only the configurations of the two runs tell: left out if AddDifference is
  // called for the option, before or after.
  void AddConfigured(const std::string& option, absl::string_view now, absl::string_view saved);

  // In the order in which they were added, what configurations tell last.
  std::vector<std::string> lines() const;

 private:
  std::vector<std::string> lines_;
  std::set<std::string> compared_;                               // options of AddDifference
  std::vector<std::pair<std::string, std::string>> configured_;  // options and lines
};

// The state of a component is a State of its own: `root` has what is replicated, the same on every
// rank; `sharded` what is partitioned; `per_rank` what each rank has of its own. Thread-compatible.
// All ranks make the same calls.
class Stateful {
 public:
  virtual ~Stateful() = default;

  // May be collective. If one rank has a dict in `per_rank`, which may be empty, so have all.
  // Tensors may share memory with the component: the caller writes them before the component
  // changes.
  virtual absl::StatusOr<State> state_dict() = 0;

  // Whether `state` fits: its names, shapes and dtypes. Partitioned tensors are whole and in
  // `root`; tensors that were requested in parts are in `sharded`. `per_rank` has this rank's dict,
  // those of all ranks that saved it (takes_other_worlds), or none. InvalidArgument says what does
  // not fit. Changes nothing: all components are asked before the first is loaded. Not collective.
  virtual absl::Status CheckStateDict(const State& state) const = 0;

  // Takes `state`, which has passed CheckStateDict. Not collective. An error ends the run.
  virtual absl::Status load_state_dict(const State& state, LoadNotes& notes) = 0;

  // Whether a load takes the entries per rank of all ranks, also those of a world of another size.
  // If not, it gets this rank's own of a world of the same size; else none, and that is said.
  virtual bool takes_other_worlds() const { return false; }
};

// A component under its name.
struct Component {
  // Its key in the checkpoint. A user's component must not have one of the trainer's own
  // (ddp/trainer/keys.h).
  std::string name;
  Stateful* stateful = nullptr;  // not owned
  // Entries that stand at the checkpoint's top level instead, under these keys.
  std::vector<std::string> top_level = {};
  // The same goes for entries per rank: they stand beside the components in `per_rank`, or in
  // `root` as lists with one value per rank, as formats that rank 0 writes alone have them.
  std::vector<std::string> top_level_per_rank = {};
  // Whether a checkpoint without it is refused.
  bool required = false;
};

// Adds a component's state to a checkpoint: what it has in `root`, `sharded` and `per_rank` goes
// there, under its name, but for the entries at the top level. InvalidArgument: one of its keys is
// there already. Not collective.
absl::Status InsertComponent(const Component& component, const State& state, State& checkpoint);

// The reverse: removes from `rest`, whose dicts are not shared with others (DetachedCopy), what
// InsertComponent has added. `world_size` is that of the run that saved it. `reader` is a rank
// whose entries alone will do, as it reads them with PerRank::kOwn; otherwise there must be those
// of all ranks. Returns nullopt if the checkpoint has no entry of this component. InvalidArgument
// names a key that is not what it must be. Not collective.
absl::StatusOr<std::optional<State>> TakeComponent(const Component& component, int64_t world_size,
                                                   State& rest,
                                                   std::optional<int> reader = std::nullopt);
State DetachedCopy(const State& state);

// Implementations of CheckStateDict call it. InvalidArgument: `state` has no such entry, or it is
// not a tensor of the shape and dtype of `like`. Thread-safe.
absl::Status CheckTensor(const Dict& state, const std::string& name, const at::Tensor& like);

}  // namespace ddp::checkpoint
