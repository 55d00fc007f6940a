// A model and its loss, for the trainer.
//
//   auto net = std::make_shared<Net>();  // forward(Tensor) -> Tensor of logits [n, classes]
//   Task task = Classification("my_net", net);
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "ATen/core/Tensor.h"
#include "ddp/ddp.h"
#include "torch/nn/functional/loss.h"
#include "torch/nn/module.h"

namespace ddp::trainer {

// A plain value. Only the training thread calls the functions.
struct Task {
  // Saved in checkpoints; loading a checkpoint with another name is an error.
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  // The wrapper of a module that is wrapped already. Null: Train wraps the module, by
  // TrainerOptions::model_wrapper.
  std::shared_ptr<ModelWrapper> parallel = nullptr;

  // Runs the module on a batch's input.
  std::function<at::Tensor(const at::Tensor& input)> forward;
  // Mean loss over the batch: a scalar that requires a gradient.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)> loss;
  // Number of correct predictions in the batch: an integer scalar. Null: accuracy is reported as 0.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)> correct;

  // Convert 4-dimensional parameters and inputs to channels-last order, which makes convolutions on
  // CPUs about 1.6 times as fast. Parameters of a module that is wrapped already must be in it.
  bool channels_last = false;
};

// Cross entropy over logits [n, classes] and int64 targets [n].
template <typename M>
Task Classification(std::string name, std::shared_ptr<M> module, bool channels_last = false) {
  Task task;
  task.name = std::move(name);
  task.module = module;
  task.forward = [module](const at::Tensor& input) { return module->forward(input); };
  task.loss = [](const at::Tensor& output, const at::Tensor& target) {
    TORCH_CHECK(target.defined(),
                "the data set has given a batch without targets, which a classification needs");
    return torch::nn::functional::cross_entropy(output, target);
  };
  task.correct = [](const at::Tensor& output, const at::Tensor& target) {
    return output.argmax(1).eq(target).sum();
  };
  task.channels_last = channels_last;
  return task;
}

// The same for a module that is wrapped already; it must be on the session's device.
template <typename M>
Task Classification(std::string name, const std::shared_ptr<DistributedDataParallel<M>>& wrapped) {
  Task task = Classification(std::move(name), wrapped->module());
  task.parallel = wrapped->shared_parallel();
  return task;
}

}  // namespace ddp::trainer
