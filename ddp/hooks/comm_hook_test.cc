// Hooks by name: the default, errors, noop, and a user's own.

#include "ddp/hooks/comm_hook.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/option_error.h"
#include "ddp/hooks/hooks_testing.h"
#include "ddp/hooks/powersgd.h"
#include "ddp/sent_tensors_testing.h"
#include "torch/nn/modules/embedding.h"

namespace ddp::hooks {
namespace {

// A user's own hook, with an option of its own, that does not count its bytes.
struct ScaledOptions {
  double factor = 2;
};
constexpr auto OptionsOf(const ScaledOptions&) {
  return Options(Option("factor", &ScaledOptions::factor, "of the sum").Above(0));
}

class ScaledHook : public c10d::CppCommHookInterface<GroupPtr> {
 public:
  ScaledHook(const GroupPtr& group, double factor) : CppCommHookInterface(group), factor_(factor) {}
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    std::vector<at::Tensor> tensors = {bucket.getBufferRef().mul_(factor_)};
    return state_->allreduce(tensors)->getFuture();
  }

 private:
  const double factor_;
};

absl::StatusOr<HookPtr> CreateScaled(const CommHookOptions& options, const GroupPtr& group) {
  return std::make_unique<ScaledHook>(
      group, options.implementations.Get<ScaledOptions>("scaled_in_test").factor);
}

const Registration<HookRegistry> kScaled("scaled_in_test",
                                         HookEntry{.create = &CreateScaled,
                                                   .options = &AnyOptions::Of<ScaledOptions>});

TEST(CommHookOptionsTest, AnUnknownNameListsWhatIsLinked) {
  const absl::Status status = Validate({.name = "lion"});
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(),
            "name=lion is none of allreduce, bf16_compress, fp16_compress, noop, powersgd, "
            "scaled_in_test");
  for (const std::string& name : HookRegistry::Names()) {
    EXPECT_TRUE(Validate({.name = name}).ok()) << name;
  }
}

TEST(CommHookOptionsTest, OptionsOfAHookAreSetByPath) {
  CommHookOptions options;
  const OptionList list = ListOptions(options);
  ASSERT_TRUE(list.Set("powersgd.matrix_approximation_rank", "3").ok());
  ASSERT_TRUE(list.Set("scaled_in_test.factor", "5").ok());
  EXPECT_EQ(options.implementations.Get<PowerSgdOptions>("powersgd").matrix_approximation_rank, 3);
  EXPECT_EQ(options.implementations.Get<ScaledOptions>("scaled_in_test").factor, 5);
  ASSERT_TRUE(list.Set("powersgd.matrix_approximation_rank", "0").ok());
  EXPECT_EQ(Validate(options).message(), "powersgd.matrix_approximation_rank=0 must be at least 1");
}

TEST(CommHookOptionsTest, PowerSgdStartsAfterBucketsAreRebuilt) {
  CommHookOptions options = {.name = "powersgd"};
  auto& own = options.implementations.Mutable<PowerSgdOptions>("powersgd");
  own.start_iter = 1;
  EXPECT_TRUE(absl::StartsWith(Validate(options).message(),
                               "powersgd.start_iter=1 must be at least 2 with"))
      << Validate(options);
  own.use_error_feedback = false;
  EXPECT_FALSE(Validate(options).ok());
  own.warm_start = false;
  EXPECT_TRUE(Validate(options).ok());
  // It does not matter to other hooks.
  own.warm_start = true;
  options.name = "noop";
  EXPECT_TRUE(Validate(options).ok());
}

TEST(WireDtypeTest, OnlyHooksThatReduceInADtypeHaveOne) {
  EXPECT_EQ(*WireDtypeOf({}), std::nullopt);
  EXPECT_EQ(*WireDtypeOf({.name = "bf16_compress"}), at::kBFloat16);
  EXPECT_EQ(*WireDtypeOf({.name = "fp16_compress"}), at::kHalf);
  for (const char* name : {"noop", "powersgd", "scaled_in_test"}) {
    EXPECT_EQ(WireDtypeOf({.name = name}).status().message(),
              absl::StrCat("name=", name,
                           " does not go with zero.stage=2, which reduces gradients itself and "
                           "takes allreduce, bf16_compress, fp16_compress"));
  }
}

const Shapes kShapes = {{20, 30}, {7}, {5, 4, 3}, {1000}};
constexpr int64_t kBytes = 4 * (600 + 7 + 60 + 1000);

// Other ranks read it where it lies.
TEST(CommHookByNameTest, OverShmNothingIsCopiedToBeSent) {
  if (BackendUnderTest() != "shm") GTEST_SKIP() << BackendUnderTest() << " has no arena";
  for (const std::string name : {"allreduce", "bf16_compress", "fp16_compress", "powersgd"}) {
    CommHookOptions options = {.name = name};
    options.implementations.Mutable<PowerSgdOptions>("powersgd") = {.start_iter = 2,
                                                                    .min_compression_rate = 1};
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(std::make_shared<Given>(kShapes), group, {.bucket_cap_mb = 1e-3});
      ASSERT_TRUE(Register(options, group, model->parallel()).ok());
      for (int step = 0; step < 4; ++step) {
        model->zero_grad();
        const int64_t before = model->parallel().comm_bytes().value();
        const at::Tensor loss = model->forward(RandomGradients(kShapes, rank, step));
        const SentTensors sent;
        loss.backward();
        // Of both matrices, [20, 30] and [5, 4 * 3], a column and a row; the others whole.
        const bool factors = name == "powersgd" && step >= 2;
        const int64_t bytes = factors               ? 4 * (20 + 30 + 5 + 12 + 7 + 1000)
                              : name == "powersgd"  ? kBytes
                              : name == "allreduce" ? kBytes
                                                    : kBytes / 2;
        EXPECT_EQ(model->parallel().comm_bytes().value() - before, bytes) << name << step;
        const std::vector<SentTensors::Tensor> tensors = sent.OfAtLeast(64);
        // Columns and rows are messages of their own, beside what goes whole.
        EXPECT_GE(tensors.size(), factors ? 3 : 1) << name << ", step " << step;
        for (const SentTensors::Tensor& tensor : tensors) {
          EXPECT_TRUE(tensor.in_arena) << name << ", step " << step << ": " << tensor.bytes
                                       << " bytes of " << tensor.operation;
        }
      }
    });
  }
}

TEST(CommHookByNameTest, AllReduceIsNoHook) {
  std::map<bool, std::vector<at::Tensor>> results;
  for (const bool named : {false, true}) {
    RunRanks(3, [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(std::make_shared<Given>(kShapes), group, {.bucket_cap_mb = 1e-3});
      if (named) {
        ASSERT_TRUE(Register({}, group, model->parallel()).ok());
      }
      EXPECT_FALSE(model->parallel().has_comm_hook());
      EXPECT_EQ(model->parallel().comm_bytes(), 0);
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        const at::Tensor loss = model->forward(RandomGradients(kShapes, rank, step));
        EXPECT_EQ(model->parallel().comm_bytes(), kBytes * step);
        loss.backward();
        EXPECT_EQ(model->parallel().comm_bytes(), kBytes * (step + 1));
        if (rank != 0) continue;
        for (const at::Tensor& one : Gradients(*model->module())) {
          results[named].push_back(one.clone());
        }
      }
      // Neither a forward without gradients nor an unsynchronised backward sends any.
      {
        const at::NoGradGuard no_grad;
        model->forward(RandomGradients(kShapes, rank, 3));
      }
      {
        const auto no_sync = model->no_sync();
        model->forward(RandomGradients(kShapes, rank, 3)).backward();
      }
      EXPECT_EQ(model->parallel().comm_bytes(), kBytes * 3);
    });
  }
  ExpectBits(results[true], results[false]);
}

TEST(CommHookByNameTest, NoopKeepsEachRanksOwnAndSendsNothing) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    GivenGradients run(kShapes, group, {.name = "noop"}, {.bucket_cap_mb = 1e-3});
    for (int step = 0; step < 4; ++step) {
      const std::vector<at::Tensor> own = RandomGradients(kShapes, rank, step);
      ExpectBits(run.Step(own), own);
      EXPECT_EQ(run.bytes, 0);
    }
    EXPECT_EQ(run.model->parallel().GetDDPLoggingData().strs_map["comm_hook"], "noop");
  });
}

TEST(CommHookByNameTest, AUsersOwnIsReachedByItsNameAndOptions) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    CommHookOptions options = {.name = "scaled_in_test"};
    options.implementations.Mutable<ScaledOptions>("scaled_in_test").factor = 3;
    auto model = *Wrap(std::make_shared<Given>(kShapes), group);
    ASSERT_TRUE(Register(options, group, model->parallel()).ok());
    model->forward(RandomGradients(kShapes, rank, 0)).backward();
    std::vector<at::Tensor> expected = MeanOfRandom(kShapes, WorldSize(), 0);
    for (at::Tensor& tensor : expected) tensor *= 3 * WorldSize();
    ExpectClose(Gradients(*model->module()), expected);
    EXPECT_EQ(model->parallel().comm_bytes(), std::nullopt);  // it does not count
  });
}

TEST(CommHookByNameTest, ASecondHookIsRefusedInEveryWorld) {
  const auto try_second = [](const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group);
    ASSERT_TRUE(model->register_comm_hook(std::make_unique<ScaledHook>(group, 2)).ok());
    EXPECT_TRUE(Register({}, group, model->parallel()).ok());
    const absl::Status status = Register({.name = "bf16_compress"}, group, model->parallel());
    ASSERT_TRUE(ProblemOf(status).has_value()) << status;
    EXPECT_EQ(ProblemOf(status)->path, "name");
    EXPECT_TRUE(absl::StrContains(status.message(), "has a communication hook already")) << status;
  };
  try_second(nullptr);
  RunRanks(WorldSize(), [&](int, const GroupPtr& group) { try_second(group); });
}

TEST(CommHookByNameTest, AWorldOfOneNeedsNoHook) {
  for (const std::string& name : HookRegistry::Names()) {
    GivenGradients run(kShapes, nullptr, {.name = name});
    const std::vector<at::Tensor> own = RandomGradients(kShapes, 0, 0);
    ExpectBits(run.Step(own), own);
    EXPECT_EQ(run.bytes, 0);
  }
}

// With static_graph the first backward reduces all buckets at its end.

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
