// For tests of the guard: a task whose loss is spoilt in some steps; and a module with a buffer
// that says how often it has trained.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "ddp/trainer/trainer_testing.h"

namespace ddp::trainer {

// A factor of a rank's loss in a step, which has the number step + 1 in messages.
using Factor = std::function<double(int rank, int64_t step)>;

// NaN in the steps of these numbers, on one rank.
inline Factor NaNIn(const std::vector<int64_t>& numbers, int of_rank = 1) {
  return [=](int rank, int64_t step) {
    const bool is_in = std::find(numbers.begin(), numbers.end(), step + 1) != numbers.end();
    return rank == of_rank && is_in ? std::numeric_limits<double>::quiet_NaN() : 1;
  };
}

// A classifier.
template <typename M>
Task Spoilt(const std::shared_ptr<M>& module, const Factor& factor) {
  return TaskOf<data::Batch>("spoilt", module, [=](data::Batch& batch, const StepContext& context) {
    const at::Tensor loss =
        torch::nn::functional::cross_entropy(module->forward(batch.input), batch.target);
    const double by = context.training ? factor(context.session.rank(), context.step) : 1;
    return StepOutput{.loss = Mean(by == 1 ? loss : loss * by, batch.input.size(0))};
  });
}

// With an expanded buffer, which counts forwards in training.
struct Counting : Net {
  Counting() : Net(/*dropout=*/0) {}
  at::Tensor forward(const at::Tensor& x) {
    if (is_training()) count.narrow(0, 0, 1).add_(1);
    return Net::forward(x);
  }
  at::Tensor count{register_buffer("count", at::zeros({1, 2}).expand({3, 2}))};
};

inline Task SpoiltNet(const Factor& factor) {
  return Spoilt(std::make_shared<Net>(/*dropout=*/0), factor);
}

}  // namespace ddp::trainer
