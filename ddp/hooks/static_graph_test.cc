// Hooks with static_graph, whose first backward reduces all buckets at its end.

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/hooks/hooks_testing.h"
#include "ddp/hooks/powersgd.h"
#include "torch/nn/modules/embedding.h"

namespace ddp::hooks {
namespace {

// In one bucket, or in three from the first backward on: one per dtype, and that of a sparse
// gradient. All gradients have rank one, so that PowerSGD is exact.
struct Mixed : torch::nn::Module {
  explicit Mixed(bool several) {
    for (int i = 0; i < 4; ++i) {
      const auto dtype = several && i % 2 == 1 ? at::kDouble : at::kFloat;
      values.push_back(register_parameter(absl::StrCat("p", i), at::zeros({12, 9 + i}, dtype)));
    }
    if (several) {
      table = register_module("table",
                              torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 2).sparse(true)));
    }
  }
  at::Tensor forward(int rank, int step) {
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (const at::Tensor& value : values) sum = sum + (value * Gradient(value, rank, step)).sum();
    if (!table.is_empty()) sum = sum + table->forward(at::full({2}, rank, at::kLong)).sum();
    return sum;
  }
  static at::Tensor Gradient(const at::Tensor& value, int rank, int step) {
    const at::Tensor column = at::arange(value.size(0)).add(rank * rank + 1.0).sin();
    return at::outer(column, at::linspace(-1, 1 + step % 3, value.size(1))).to(value.dtype());
  }
  std::vector<at::Tensor> values;
  torch::nn::Embedding table{nullptr};
};

// Gradients that `ranks` have on average.
std::vector<at::Tensor> MeanOf(const std::vector<int>& ranks, bool several, int step) {
  Mixed net(several);
  for (const int rank : ranks)
    (net.forward(rank, step) / static_cast<int>(ranks.size())).backward();
  return Gradients(net);
}

struct Case {
  std::string name;
  CommHookOptions hook;
  double tolerance;
};

std::vector<Case> Cases() {
  const auto powersgd = [](const PowerSgdOptions& own) {
    CommHookOptions options = {.name = "powersgd"};
    options.implementations.Mutable<PowerSgdOptions>("powersgd") = own;
    return options;
  };
  return {
      {"allreduce", {.name = "allreduce"}, 1e-5},
      {"fp16_compress", {.name = "fp16_compress"}, 1e-2},
      {"bf16_compress", {.name = "bf16_compress"}, 5e-2},
      {"noop", {.name = "noop"}, 1e-6},
      {"powersgd",
       powersgd({.start_iter = 2, .min_compression_rate = 0.5, .use_error_feedback = false}), 1e-4},
      {"powersgd_from_the_first_step",
       powersgd({.start_iter = 0,
                 .min_compression_rate = 0.5,
                 .use_error_feedback = false,
                 .warm_start = false}),
       1e-4}};
}

class StaticGraphHookTest : public testing::TestWithParam<Case> {};

TEST_P(StaticGraphHookTest, GradientsAreThoseOfTheHook) {
  for (const bool several : {false, true}) {
    for (const bool views : {false, true}) {
      RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
        auto model = *Wrap(std::make_shared<Mixed>(several), group,
                           {.bucket_cap_mb = several ? 1e-4 : 25,
                            .gradient_as_bucket_view = views,
                            .static_graph = true});
        ASSERT_TRUE(Register(GetParam().hook, group, model->parallel()).ok());
        const std::string sizes = model->parallel().GetDDPLoggingData().strs_map["bucket_sizes"];
        EXPECT_EQ(std::count(sizes.begin(), sizes.end(), ','), several ? 2 : 0) << sizes;
        std::vector<int> ranks = {rank};
        if (GetParam().name != "noop") {
          ranks.clear();
          for (int i = 0; i < WorldSize(); ++i) ranks.push_back(i);
        }
        for (int step = 0; step < 6; ++step) {
          model->zero_grad();
          model->forward(rank, step).backward();
          const std::vector<at::Tensor> expected = MeanOf(ranks, several, step);
          const std::vector<at::Tensor> gradients = Gradients(*model->module());
          ASSERT_EQ(gradients.size(), expected.size());
          for (size_t i = 0; i < expected.size(); ++i) {
            const auto dense = [](const at::Tensor& x) { return x.is_sparse() ? x.to_dense() : x; };
            EXPECT_TRUE(at::allclose(dense(gradients[i]), dense(expected[i]), GetParam().tolerance,
                                     GetParam().tolerance))
                << "step " << step << ", tensor " << i << ", several buckets: " << several;
          }
        }
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Hooks, StaticGraphHookTest, testing::ValuesIn(Cases()),
                         [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

}  // namespace
}  // namespace ddp::hooks
