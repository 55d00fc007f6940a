#include "ddp/model_tensors.h"

#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/embedding.h"

namespace ddp {
namespace {

using Identities = std::set<const void*>;

const void* Identity(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }

Identities SparseWeights(const torch::nn::Module& module) {
  Identities weights;
  for (const auto& child : module.modules()) {
    if (const auto* one = dynamic_cast<const torch::nn::EmbeddingImpl*>(child.get())) {
      if (one->options.sparse()) weights.insert(Identity(one->weight));
    } else if (const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(child.get())) {
      if (bag->options.sparse()) weights.insert(Identity(bag->weight));
    }
  }
  return weights;
}

}  // namespace

absl::StatusOr<ModelTensors> CollectModelTensors(const torch::nn::Module& module,
                                                 const std::vector<std::string>& ignored) {
  const auto parameters = module.named_parameters();
  const auto buffers = module.named_buffers();
  Identities left_out;
  for (const std::string& name : ignored) {
    const at::Tensor* tensor = parameters.find(name);
    if (tensor == nullptr) tensor = buffers.find(name);
    if (tensor == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("ignored: the module has no parameter or buffer '", name,
                       "'; give full names, as in named_parameters()"));
    }
    left_out.insert(Identity(*tensor));
  }
  ModelTensors tensors;
  const Identities sparse = SparseWeights(module);
  Identities seen;
  for (const auto& item : parameters) {
    const auto& [name, parameter] = item.pair();
    const bool is_ignored = left_out.count(Identity(parameter)) != 0;
    if (!is_ignored) tensors.parameters.emplace_back(name, parameter);
    if (!parameter.requires_grad() || !seen.insert(Identity(parameter)).second) continue;
    tensors.trainable.emplace_back(name, parameter);
    if (is_ignored) continue;
    tensors.reduced.emplace_back(name, parameter);
    tensors.sparse.push_back(sparse.count(Identity(parameter)) != 0);
  }
  for (const auto& item : buffers) {
    if (left_out.count(Identity(item.value())) == 0) {
      tensors.buffers.emplace_back(item.key(), item.value());
    }
  }
  return tensors;
}

}  // namespace ddp
