// ZeroRedundancyOptimizer: any torch::optim optimizer whose state, and by choice gradients, are
// divided among the ranks (ZeRO stages 1 and 2, arXiv:1910.02054).
//
//   DDP_ASSIGN_OR_RETURN(auto optimizer, zero::ZeroRedundancyOptimizer::Create(
//       net->parameters(), group, optim::FactoryOf<torch::optim::AdamW>(options), {.stage = 1}));
//   loss.backward();                       // stage 1: DistributedDataParallel averages gradients
//   optimizer->clip_grad_norm_(1.0);
//   optimizer->step();                     // every rank updates its part; all gather the parts
//
// Stage 1 updates with the gradients that DistributedDataParallel has averaged. Stage 2 reduces
// gradients itself, in backward, each to its owner: wrap the module with
// {.reduce_gradients = false}, which leaves the rest of DistributedDataParallel as it is. After
// backward parameters then have no .grad, and step() uses up the gradients, whether zero_grad()
// follows or not.
//
// Parameters become views of flat storage (flat_parameters.h); their values are the same bits as
// with the unsharded optimizer, where the backend sums in rank order (shm, hier, mpi). What changes
// them otherwise (Wrap after Create, torch::load, in-place operations) counts from the next call of
// the optimizer on, as without sharding; Module::to another dtype or device is an error there.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/around_forward.h"
#include "ddp/clip_grad.h"
#include "ddp/join.h"
#include "ddp/unscale_gradients.h"
#include "ddp/zero/flat_parameters.h"
#include "ddp/zero/options.h"
#include "ddp/zero/sharded_gradients.h"
#include "optim/kind.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"
#include "torch/optim/optimizer.h"

namespace ddp::zero {

// A part of a parameter's state that this rank holds.
struct LocalState {
  int64_t parameter = 0;  // its number through all groups
  std::vector<int64_t> global_shape;
  // Dimensions from the slowest to the fastest in memory: {0, 1, 2, 3}; {0, 2, 3, 1} for channels
  // last.
  std::vector<int64_t> memory_order;
  // Elements of the parameter, flattened in that order, that each entry's tensor has.
  int64_t begin = 0;
  int64_t end = 0;
  // The entries have Python's names; tensors share their memory with the optimizer. Numbers (step)
  // are of the whole parameter.
  optim::Dict entries = optim::NewDict();
};

// The elements of a parameter's state that this rank holds, and the state that it may have.
struct LocalPieces {
  int64_t parameter = 0;  // its number through all groups
  int group = 0;
  std::vector<int64_t> global_shape;
  std::vector<int64_t> memory_order;  // as LocalState's
  at::ScalarType dtype = at::kFloat;  // of the state's tensors
  std::vector<std::string> entries;   // Python's names of tensors of the parameter's shape
  std::vector<std::string> scalars;   // those of numbers
  std::vector<std::pair<int64_t, int64_t>> pieces = {};  // [begin, end), ascending; may be none
};

// Thread-compatible. Keeps the parameters alive. Functions that are documented as collective must
// be called on all ranks, with the same arguments.
class ZeroRedundancyOptimizer : public torch::optim::Optimizer,
                                public Joinable,
                                public UnscalesGradients {
 public:
  static constexpr int kAllRanks = -1;

  // Not collective. Moves the parameters into flat storage. `group` null or of size 1: a world of
  // one. All ranks pass parameters of the same shapes, dtypes and values in the same order (as
  // DistributedDataParallel ensures), including frozen ones, which do not change. `factory` gets
  // the groups with this rank's pieces, tensors of one dimension; a group may have none.
  // OptionError: options out of range. InvalidArgument: stage 0, a parameter that is listed twice
  // or cannot be divided, LBFGS (its update couples all parameters), or an optimizer that
  // partition=flat cannot divide. FailedPrecondition: stage 2, and another object reduces the
  // gradient of a parameter.
  static absl::StatusOr<std::unique_ptr<ZeroRedundancyOptimizer>> Create(
      std::vector<torch::optim::OptimizerParamGroup> groups,
      c10::intrusive_ptr<c10d::ProcessGroup> group, optim::OptimizerFactory factory,
      const ZeroOptions& options = {.stage = 1});
  static absl::StatusOr<std::unique_ptr<ZeroRedundancyOptimizer>> Create(
      std::vector<at::Tensor> parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
      optim::OptimizerFactory factory, const ZeroOptions& options = {.stage = 1});

  // Collective. Uses the options of param_groups(), and includes groups that were added since;
  // gradients of their parameters take effect from the next backward on. In a Join, ranks that have
  // run out get the options of the others. Throws c10::Error: a sparse gradient, a parameter (by
  // its number) that was frozen when its group was added and no longer is, or that was moved to
  // another dtype or device, parameters added to an existing group, a group added in a Join after a
  // rank ran out, a failed collective, and in stage 2 a backward that has ended with an exception
  // (then call zero_grad() on all ranks).
  torch::Tensor step(LossClosure closure = nullptr) override;

  // Waits for the all-gather of step(). The forward of a DistributedDataParallel over the same
  // group calls it, and so do this object's functions and destructor. With overlap_gather, call it
  // before anything else reads or writes parameters (evaluation of the bare module, checkpoints,
  // averages of weights), which throws c10::Error before; with LibTorch before 2.15 it sees old
  // values.
  void WaitForParameters();

  // Resets the gradients of all parameters. Hides Optimizer::zero_grad, which does not reset stage
  // 2's gradients and cannot reset views of buckets. Collective in a Join (stage 2), like every
  // function that changes gradients, and after a backward that has ended with an exception (stage
  // 2), which must have ended at the same place on all ranks.
  void zero_grad(bool set_to_none = true);

  // Stage 2: while alive, backward accumulates whole local gradients and sends nothing.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(ShardedGradients* gradients)
        : gradients_(gradients), before_(gradients == nullptr || gradients->require_sync()) {
      if (gradients_ != nullptr) gradients_->set_require_sync(false);
    }
    ~NoSync() {
      if (gradients_ != nullptr) gradients_->set_require_sync(before_);
    }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    ShardedGradients* const gradients_;
    const bool before_;
  };
  NoSync no_sync() { return NoSync(gradients_.get()); }

  // loss.backward(), to `inputs` alone if they are given. Stage 2 with find_unused_parameters:
  // takes part in the reduction of the other ranks also where `loss` reaches no parameter of this
  // object. After loss.backward() itself that is known only if `loss` depends on what the forward
  // of a wrapped module has returned and no inputs are chosen; else step() finds out, for one
  // backward.
  void Backward(const at::Tensor& loss, std::optional<at::TensorList> inputs = std::nullopt) {
    const int before = gradients_ ? gradients_->last_backward() : 0;
    loss.backward({}, /*retain_graph=*/std::nullopt, /*create_graph=*/false, inputs);
    if (gradients_) gradients_->FinishBackwardsAfter(before);
  }

  // Collective. clip_grad_norm_ and clip_grad_value_ of ddp/clip_grad.h over all parameters: on the
  // CPU the same bits as these give unsharded. In stage 1 they change the parameters' .grad as a
  // whole, on every rank, so that callers may change it further.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);
  void clip_grad_value_(double clip_value);

  // Collective. Multiplies all gradients by `inverse_scale`: in stage 1 the parameters' .grad as a
  // whole, on every rank, so that ddp::clip_grad_norm_ may follow. Returns whether any gradient on
  // any rank was infinite or NaN (PyTorch: GradScaler.unscale_); in stage 2 the next backward then
  // does not add to them, but begins anew. Throws c10::Error if parameters are float16, whose
  // gradients would underflow, or a gradient is sparse.
  bool unscale_(double inverse_scale) override;

  // Multiplies the gradients as unscale_ does. Collective in a Join, and with
  // find_unused_parameters in stage 2.
  void MultiplyGradients(double factor);

  // Collective. The state of all parameters as PyTorch's {state, param_groups}
  // (optim/state_dict.h), in the shapes of the parameters, on rank `to` or on all; on other ranks
  // "state" is empty. Where parameters have fp32 copies, their entry is "master_weight".
  // InvalidArgument for an optimizer of an unknown kind.
  absl::StatusOr<optim::Dict> ConsolidateStateDict(int to = 0);

  // Loads such a dict, from any world size, partition and stage, from an unsharded optimizer or
  // from Python. Every rank passes the complete dict and keeps its part; in the place of a tensor
  // of the parameter's shape, there may be a list of this rank's pieces of it (Pieces()), each of
  // one dimension. Not collective. InvalidArgument names group and parameter that do not fit;
  // nothing has changed then.
  absl::Status LoadStateDict(const c10::IValue& state);

  // Returns the state that this rank holds, for sharded checkpoints (sharded_state.h). Waits for
  // parameters, and takes in groups that were added. Not collective.
  absl::StatusOr<std::vector<LocalState>> LocalStates();

  // Returns the pieces of each parameter that is not frozen, in the order of their numbers, whether
  // there is state yet or not. Not collective.
  absl::StatusOr<std::vector<LocalPieces>> Pieces() const;

  // Collective. LibTorch's own format, as the unsharded optimizer writes and reads it: the whole
  // state is in every rank's memory meanwhile. Throws c10::Error, in a Join as well.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  ~ZeroRedundancyOptimizer() override;

  // Join uses these (ddp/join.h), with the module's wrapper before it in the list: a rank without
  // inputs makes the same steps, clips, resets and scaler's checks, so that its part is updated,
  // too. Optimizers of an unknown kind (optim/kind.h), whose options cannot be sent, are refused.
  c10::intrusive_ptr<c10d::ProcessGroup> join_group() const override { return group_; }
  c10::Device join_device() const override;
  absl::Status CheckJoin(const JoinOptions& options) const override;
  void Shadow(const JoinOperation& operation) override;
  bool IsReducing() const override { return gradients_ && gradients_->in_backward(); }
  void SetGradientFactor(double factor) override {
    if (gradients_) gradients_->set_factor(factor);
  }
  void FinishPending() override { WaitForParameters(); }

  // "zero stage 1: rank 0 holds 334,864 of 669,706 elements, state 2.7 of 5.4 MB". The state is
  // that after the first step.
  std::string Describe() const;

  // The dtype of the tensors in the state of a parameter: float32 where that has a copy in it.
  at::ScalarType StateDtype(const at::Tensor& parameter) const;

  int stage() const { return static_cast<int>(options_.stage); }
  // This rank's: it has one parameter per piece.
  torch::optim::Optimizer& inner() { return *inner_; }
  // Bytes that this rank has handed to collectives so far, as ddp/comm_bytes.h counts them: of
  // gradients to reduce-scatters (stage 2; padding included), and of updated parameters to
  // all-gathers. Not collective.
  struct CommBytes {
    int64_t gradients = 0;
    int64_t parameters = 0;
  };
  CommBytes comm_bytes() const {
    return {gradients_ ? gradients_->comm_bytes() : 0, gathered_bytes_};
  }
  // Stage 2: the most memory of buckets so far, and in the last backward that of gradients that
  // waited for their buckets.
  int64_t peak_bucket_bytes() const { return gradients_ ? gradients_->peak_bucket_bytes() : 0; }
  int64_t peak_held_bytes() const { return gradients_ ? gradients_->peak_held_bytes() : 0; }
  // Stage 2: the numbers of the parameters in the order of their gradients in the first backward,
  // in which buckets are reduced since. Empty before its end. A resumed run that restores it needs
  // no more memory in its first backward than the run before did; sums do not depend on it. Call
  // RestoreBucketOrder before the first backward, with the same order on all ranks; an order with a
  // number that is no parameter's changes nothing.
  std::vector<int64_t> bucket_order() const {
    return gradients_ ? gradients_->bucket_order() : std::vector<int64_t>();
  }
  void RestoreBucketOrder(const std::vector<int64_t>& order) {
    if (gradients_) gradients_->RestoreBucketOrder(order);
  }

 private:
  ZeroRedundancyOptimizer(c10::intrusive_ptr<c10d::ProcessGroup> group,
                          optim::OptimizerFactory factory, const ZeroOptions& options,
                          std::unique_ptr<torch::optim::OptimizerOptions> defaults)
      : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::move(defaults)),
        group_(std::move(group)),
        factory_(std::move(factory)),
        options_(options) {}

  // A piece of this rank with its gradient (undefined: none), a view.
  struct GradientPiece {
    const FlatParameters* range;
    const OwnedPiece* owned;
    at::Tensor gradient;
  };

  // Kinds of JoinOperation.
  enum InJoin : int64_t {
    kStep,
    kClipNorm,
    kClipNormChecked,  // error_if_nonfinite
    kClipValue,
    kUnscale,
    kMultiply,
    kZeroGrad,
    kBackward,
    kStateDict,
  };

  // Finishes what is pending, and takes in what callers have changed, before each operation.
  void Prepare();
  void AddNewParamGroups();
  void ShareWithShadows();
  void ShareGradients();
  void TakeStep();
  void CopyOptions();
  bool HasGradient(size_t range, int tensor) const;
  std::vector<GradientPiece> OwnGradients() const;
  std::vector<at::Tensor> GradientsToChange() const;
  void UpdatePieces();
  std::vector<NormSegment> NormSegments(const std::vector<GradientPiece>& own) const;
  void StartGather();
  int rank() const { return group_ ? group_->getRank() : 0; }
  int world_size() const { return group_ ? group_->getSize() : 1; }
  void AllReduce(at::Tensor& tensor, c10d::ReduceOp::RedOpType op) const;
  // A piece of some rank; `owned` if it is this one's.
  struct PieceOfRank {
    const FlatParameters* range;
    int owner;
    Piece piece;
    const OwnedPiece* owned;
  };
  std::vector<PieceOfRank> AllPieces() const;
  at::Tensor ExchangeStateTable(const optim::OptimizerKind& kind,
                                const std::vector<PieceOfRank>& pieces) const;
  void MovePiece(int owner, int to, const at::Tensor& source, at::Tensor slice) const;
  optim::Dict EntriesOf(const optim::OptimizerKind& kind, const OwnedPiece& owned) const;
  std::unique_ptr<torch::optim::Optimizer> UnshardedLikeThis() const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;  // null in a world of one
  optim::OptimizerFactory factory_;
  ZeroOptions options_;
  std::vector<size_t> group_sizes_;  // of the groups that have been taken in
  std::deque<FlatParameters> ranges_;
  std::set<const c10::TensorImpl*> sharded_;  // the parameters in them
  std::unique_ptr<torch::optim::Optimizer> inner_;
  std::unique_ptr<ShardedGradients> gradients_;  // stage 2 with two ranks or more
  struct Gather {
    FlatParameters* range = nullptr;
    std::vector<at::Tensor> outputs = {}, inputs = {};
    c10::intrusive_ptr<c10d::Work> work = nullptr;
  };
  std::vector<Gather> gathers_;
  bool knows_who_reduces_ = false;  // CheckWhoReduces before the first step
  int64_t gathered_bytes_ = 0;
  std::optional<AroundForward> around_forward_;
};

}  // namespace ddp::zero
