#include "ddp/zero/sharded_optimizer.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/format.h"
#include "ddp/zero/sharded_state.h"
#include "optim/state_dict.h"

namespace ddp::zero {
namespace {

class Sharded final : public DistributedOptimizer {
 public:
  Sharded(std::unique_ptr<ZeroRedundancyOptimizer> zero, std::unique_ptr<GradScaler> scaler,
          const Coordinator* ranks, bool places)
      : DistributedOptimizer(std::move(scaler)),
        zero_(std::move(zero)),
        ranks_(ranks),
        places_(places) {}

  void Backward(const at::Tensor& loss, std::optional<at::TensorList> inputs) override {
    zero_->Backward(loss, inputs);
  }
  double clip_grad_norm_(double max_norm, double norm_type) override {
    return zero_->clip_grad_norm_(max_norm, norm_type);
  }
  void clip_grad_value_(double clip_value) override { zero_->clip_grad_value_(clip_value); }
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
    DDP_RETURN_IF_ERROR(AddShardedState(*zero_, saved_names(), *ranks_, kKey, under_key, places_));
    state.root = under_key.root.at(kKey).toGenericDict();
    if (saved_names().empty() && !names().empty() && zero_->param_groups().size() > 1) {
      state.root = optim::WithParamNames(state.root, names());
    }
    for (auto& [path, tensor] : under_key.sharded) {
      state.sharded.emplace(path.substr(sizeof(kKey)), std::move(tensor));  // without "optimizer/"
    }
    return state;
  }

  at::ScalarType StateDtype(const at::Tensor& parameter) const override {
    return zero_->StateDtype(parameter);
  }

  std::vector<int64_t> bucket_order() const override { return zero_->bucket_order(); }
  void RestoreBucketOrder(const std::vector<int64_t>& order) override {
    zero_->RestoreBucketOrder(order);
  }

  void RequestState(const std::string& key, checkpoint::ReadRequest& request) const override {
    // A checkpoint has names or, if it is older or of another format, numbers. Where a name looks
    // like a number, a path could mean another parameter: then the state is read whole.
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    for (const std::string& name : names()) {
      if (std::all_of(name.begin(), name.end(), is_digit)) return;
    }
    checkpoint::ReadRequest parts;
    for (const optim::ParameterNames& keys : {names(), optim::ParameterNames()}) {
      // What is wrong with the optimizer, its load says.
      if (!RequestShardedState(*zero_, keys, key, parts).ok()) return;
    }
    for (auto& [path, wanted] : parts.parts) {
      if (!wanted.whole()) request.parts.emplace(path, std::move(wanted));
    }
  }

 protected:
  absl::StatusOr<optim::Dict> WholeState() override {
    return zero_->ConsolidateStateDict(/*to=*/0);
  }
  absl::Status LoadWholeState(const c10::IValue& state) override {
    return zero_->LoadStateDict(state);
  }
  void MultiplyGradients(double factor) override { zero_->MultiplyGradients(factor); }
  absl::StatusOr<optim::Dict> Numbered(const checkpoint::State& state) const override {
    if (state.sharded.empty()) return DistributedOptimizer::Numbered(state);
    checkpoint::State under_key;
    under_key.root.insert(kKey, state.root);
    for (const auto& [path, tensor] : state.sharded) {
      under_key.sharded.emplace(absl::StrCat(kKey, "/", path), tensor);
    }
    return ShardedStateDict(*zero_, under_key, names(), kKey);
  }

 private:
  static constexpr char kKey[] = "optimizer";

  const std::unique_ptr<ZeroRedundancyOptimizer> zero_;
  const Coordinator* const ranks_;
  const bool places_;
};

}  // namespace

std::unique_ptr<DistributedOptimizer> MakeSharded(std::unique_ptr<ZeroRedundancyOptimizer> zero,
                                                  std::unique_ptr<GradScaler> scaler,
                                                  const Coordinator* ranks, bool places) {
  return std::make_unique<Sharded>(std::move(zero), std::move(scaler), ranks, places);
}

}  // namespace ddp::zero
