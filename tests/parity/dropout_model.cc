// Model `dropout`, for tests: three linear layers with dropout between them. The other models draw
// no random numbers once they are initialised.

#include <functional>
#include <memory>
#include <numeric>

#include "absl/status/statusor.h"
#include "ddp/trainer/task.h"
#include "tools/models/registry.h"
#include "torch/nn/modules/dropout.h"
#include "torch/nn/modules/linear.h"

namespace ddp::tools::models {
namespace {

constexpr int64_t kHidden = 64;

struct DropoutNet : torch::nn::Module {
  DropoutNet(int64_t inputs, int64_t classes)
      : fc1(register_module("fc1", torch::nn::Linear(inputs, kHidden))),
        fc2(register_module("fc2", torch::nn::Linear(kHidden, kHidden))),
        fc3(register_module("fc3", torch::nn::Linear(kHidden, classes))),
        drop(register_module("drop", torch::nn::Dropout(0.5))) {}

  // [n, …] -> [n, classes]
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = drop->forward(fc1->forward(input.flatten(1)).relu());
    x = drop->forward(fc2->forward(x).relu());
    return fc3->forward(x);
  }

  torch::nn::Linear fc1, fc2, fc3;
  torch::nn::Dropout drop;
};

absl::StatusOr<trainer::Task> MakeDropoutNet(const ModelOptions& options) {
  const int64_t inputs = std::accumulate(options.input_shape.begin(), options.input_shape.end(),
                                         int64_t{1}, std::multiplies<>());
  return trainer::Classification("dropout",
                                 std::make_shared<DropoutNet>(inputs, options.num_classes));
}

const Registration<ModelRegistry> kDropout("dropout", ModelEntry{.create = &MakeDropoutNet});

}  // namespace
}  // namespace ddp::tools::models
