#include "ddp/zero/sharded_optimizer.h"

#include <string>
#include <utility>

#include "base/status.h"
#include "ddp/zero/sharded_state.h"

namespace ddp::zero {
namespace {

class Sharded final : public DistributedOptimizer {
 public:
  Sharded(std::unique_ptr<ZeroRedundancyOptimizer> zero, std::unique_ptr<GradScaler> scaler,
          const Coordinator* ranks)
      : DistributedOptimizer(std::move(scaler)), zero_(std::move(zero)), ranks_(ranks) {}

  double clip_grad_norm_(double max_norm) override { return zero_->clip_grad_norm_(max_norm); }
  void zero_grad() override { zero_->zero_grad(); }
  void WaitForParameters() override { zero_->WaitForParameters(); }
  CommBytes comm_bytes() const override {
    const ZeroRedundancyOptimizer::CommBytes bytes = zero_->comm_bytes();
    return {.gradients = bytes.gradients, .parameters = bytes.parameters};
  }
  torch::optim::Optimizer& optimizer() override { return *zero_; }
  Joinable* joinable() override { return zero_.get(); }
  std::string Describe() const override { return zero_->Describe(); }

  absl::StatusOr<checkpoint::State> state_dict() override {
    if (ranks_ == nullptr) return DistributedOptimizer::state_dict();
    zero_->WaitForParameters();
    checkpoint::State under_key, state;
    DDP_RETURN_IF_ERROR(AddShardedState(*zero_, /*names=*/{}, *ranks_, kKey, under_key));
    state.root = under_key.root.at(kKey).toGenericDict();
    for (auto& [path, tensor] : under_key.sharded) {
      state.sharded.emplace(path.substr(sizeof(kKey)), std::move(tensor));  // without "optimizer/"
    }
    return state;
  }

 protected:
  absl::StatusOr<optim::Dict> WholeState() override {
    return zero_->ConsolidateStateDict(/*to=*/0);
  }
  absl::Status LoadWholeState(const c10::IValue& state) override {
    return zero_->LoadStateDict(state);
  }

 private:
  static constexpr char kKey[] = "optimizer";

  const std::unique_ptr<ZeroRedundancyOptimizer> zero_;
  const Coordinator* const ranks_;
};

}  // namespace

std::unique_ptr<DistributedOptimizer> MakeSharded(std::unique_ptr<ZeroRedundancyOptimizer> zero,
                                                  std::unique_ptr<GradScaler> scaler,
                                                  const Coordinator* ranks) {
  return std::make_unique<Sharded>(std::move(zero), std::move(scaler), ranks);
}

}  // namespace ddp::zero
