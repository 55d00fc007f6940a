// Model `mlp`: three linear layers, 669,706 parameters on 28x28 inputs and 10 classes.

#include <functional>
#include <numeric>

#include "tools/models/registry.h"
#include "torch/nn/modules/linear.h"

namespace ddp::tools::models {
namespace {

struct Mlp : torch::nn::Module {
  Mlp(int64_t inputs, int64_t hidden, int64_t classes)
      : fc1(register_module("fc1", torch::nn::Linear(inputs, hidden))),
        fc2(register_module("fc2", torch::nn::Linear(hidden, hidden))),
        fc3(register_module("fc3", torch::nn::Linear(hidden, classes))) {}

  // [n, …] -> [n, classes]
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = input.flatten(1);
    x = fc1->forward(x).relu_();
    x = fc2->forward(x).relu_();
    return fc3->forward(x);
  }

  torch::nn::Linear fc1, fc2, fc3;
};

absl::StatusOr<trainer::Task> MakeMlp(const ModelOptions& options) {
  const int64_t inputs = std::accumulate(options.input_shape.begin(), options.input_shape.end(),
                                         int64_t{1}, std::multiplies<>());
  return trainer::Classification("mlp", std::make_shared<Mlp>(inputs, 512, options.num_classes));
}

const Registration<ModelRegistry> kMlp("mlp", ModelEntry{.create = &MakeMlp});

}  // namespace
}  // namespace ddp::tools::models
