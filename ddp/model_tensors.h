// Collects a module's parameters and buffers for data parallelism. Private to data_parallel.h.
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
  NamedTensors parameters;   // all, including frozen ones, except ignored ones
  NamedTensors buffers;      // all except ignored ones
};

// `ignored`: names of parameters and buffers. A tensor with several names is ignored if one of them
// is listed. A gradient is sparse if the parameter is the weight of an Embedding or EmbeddingBag
// with sparse(true). InvalidArgument: the module has no tensor of an ignored name.
absl::StatusOr<ModelTensors> CollectModelTensors(const torch::nn::Module& module,
                                                 const std::vector<std::string>& ignored);

}  // namespace ddp
