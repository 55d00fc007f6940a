// Model `cnn`: three convolutions with BatchNorm, two linear layers; 98,554 parameters on 28x28
// inputs and 10 classes.

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tools/models/registry.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/linear.h"

namespace ddp::tools::models {
namespace {

torch::nn::Conv2d Conv3x3(int64_t in, int64_t out) {
  // No bias, since BatchNorm has one.
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1).bias(false));
}

struct Cnn : torch::nn::Module {
  Cnn(int64_t channels, int64_t height, int64_t width, int64_t classes)
      : conv1(register_module("conv1", Conv3x3(channels, 16))),
        conv2(register_module("conv2", Conv3x3(16, 32))),
        conv3(register_module("conv3", Conv3x3(32, 64))),
        bn1(register_module("bn1", torch::nn::BatchNorm2d(16))),
        bn2(register_module("bn2", torch::nn::BatchNorm2d(32))),
        bn3(register_module("bn3", torch::nn::BatchNorm2d(64))),
        fc1(register_module("fc1", torch::nn::Linear(64 * (height / 8) * (width / 8), 128))),
        fc2(register_module("fc2", torch::nn::Linear(128, classes))) {}

  // [n, channels, height, width] -> [n, classes]
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = at::max_pool2d(bn1->forward(conv1->forward(input)).relu_(), 2);
    x = at::max_pool2d(bn2->forward(conv2->forward(x)).relu_(), 2);
    x = at::max_pool2d(bn3->forward(conv3->forward(x)).relu_(), 2);
    x = fc1->forward(x.flatten(1)).relu_();
    return fc2->forward(x);
  }

  torch::nn::Conv2d conv1, conv2, conv3;
  torch::nn::BatchNorm2d bn1, bn2, bn3;
  torch::nn::Linear fc1, fc2;
};

absl::StatusOr<trainer::Task> MakeCnn(const ModelOptions& options) {
  const std::vector<int64_t>& shape = options.input_shape;
  if (shape.size() != 3 || shape[1] < 8 || shape[2] < 8) {
    return OptionError(
        "model.name", options.name,
        absl::StrCat("takes images [channels, height >= 8, width >= 8], and the data "
                     "set has examples [",
                     absl::StrJoin(shape, ", "), "]: choose another of them"));
  }
  return trainer::Classification(
      "cnn", std::make_shared<Cnn>(shape[0], shape[1], shape[2], options.num_classes),
      /*channels_last=*/true);
}

const Registration<ModelRegistry> kCnn("cnn", ModelEntry{.create = &MakeCnn});

}  // namespace
}  // namespace ddp::tools::models
