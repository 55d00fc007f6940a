// For tests of this folder: a module with prescribed gradients, with a hook chosen by name.
//
//   RunRanks(3, [](int rank, const GroupPtr& group) {
//     GivenGradients run({{8, 6}, {5}}, group, {.name = "bf16_compress"});
//     std::vector<at::Tensor> means = run.Step(Gradients);
//   });
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "ddp/hooks/comm_hook.h"
#include "ddp/nets_testing.h"
#include "gtest/gtest.h"

namespace ddp::hooks {

using Shapes = std::vector<std::vector<int64_t>>;

// The gradient of parameter i becomes gradients[i], an argument of forward.
struct Given : torch::nn::Module {
  explicit Given(const Shapes& shapes) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      values.push_back(register_parameter(absl::StrCat("p", i), at::zeros(shapes[i])));
    }
  }
  at::Tensor forward(const std::vector<at::Tensor>& gradients) {
    at::Tensor sum = at::zeros({});
    for (size_t i = 0; i < values.size(); ++i) sum = sum + (values[i] * gradients[i]).sum();
    return sum;
  }
  std::vector<at::Tensor> values;
};

// Random, but the same in each run.
inline std::vector<at::Tensor> RandomGradients(const Shapes& shapes, int rank, int step) {
  std::vector<at::Tensor> gradients;
  const auto generator = at::detail::createCPUGenerator(100 * step + rank);
  for (const auto& shape : shapes) gradients.push_back(at::randn(shape, generator));
  return gradients;
}

// The mean of RandomGradients over the ranks.
inline std::vector<at::Tensor> MeanOfRandom(const Shapes& shapes, int world_size, int step) {
  std::vector<at::Tensor> mean = RandomGradients(shapes, 0, step);
  for (int rank = 1; rank < world_size; ++rank) {
    const std::vector<at::Tensor> one = RandomGradients(shapes, rank, step);
    for (size_t i = 0; i < mean.size(); ++i) mean[i] += one[i];
  }
  for (at::Tensor& tensor : mean) tensor /= world_size;
  return mean;
}

class GivenGradients {
 public:
  GivenGradients(const Shapes& shapes, const GroupPtr& group, const CommHookOptions& options,
                 const DataParallelOptions& parallel = {})
      : model(*Wrap(std::make_shared<Given>(shapes), group, parallel)) {
    const absl::Status status = Register(options, group, model->parallel());
    EXPECT_TRUE(status.ok()) << status;
  }

  // Runs one backward. Returns copies of the parameters' gradients.
  std::vector<at::Tensor> Step(const std::vector<at::Tensor>& gradients) {
    model->zero_grad();
    const int64_t before = model->parallel().comm_bytes().value();
    model->forward(gradients).backward();
    bytes = model->parallel().comm_bytes().value() - before;
    std::vector<at::Tensor> results;
    for (const at::Tensor& gradient : Gradients(*model->module())) {
      results.push_back(gradient.clone());
    }
    return results;
  }

  std::shared_ptr<DistributedDataParallel<Given>> model;
  int64_t bytes = 0;  // that the last step sent
};

inline void ExpectBits(const std::vector<at::Tensor>& actual,
                       const std::vector<at::Tensor>& expected, const std::string& what = "") {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(at::equal(actual[i], expected[i])) << what << ": tensor " << i << "\n"
                                                   << actual[i].flatten().slice(0, 0, 8) << "\n"
                                                   << expected[i].flatten().slice(0, 0, 8);
  }
}

}  // namespace ddp::hooks
