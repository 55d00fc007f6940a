// The tensors of a module that data parallelism is about. Private to data_parallel.h.
#pragma once

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "ddp/verify.h"

namespace torch::nn {
class Module;
}

namespace ddp {

struct ModelTensors {
  NamedTensors trainable;    // parameters that require a gradient, each once
  NamedTensors reduced;      // of these, the ones whose gradients are averaged
  std::vector<bool> sparse;  // which of `reduced` get a sparse gradient
  NamedTensors parameters;   // of the whole module, frozen ones too, without the ignored
  NamedTensors buffers;      // without the ignored
};

// `ignored`: names of parameters and buffers. A parameter with several names is ignored if one of
// them is. A gradient is sparse if the parameter is the weight of an Embedding or EmbeddingBag with
// sparse(true). InvalidArgument: a name that the module does not have.
absl::StatusOr<ModelTensors> CollectModelTensors(const torch::nn::Module& module,
                                                 const std::vector<std::string>& ignored);

}  // namespace ddp
