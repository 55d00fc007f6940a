// Hooks by name: the default, errors, noop, and a user's own.

#include "ddp/hooks/comm_hook.h"

#include <map>

#include "absl/strings/match.h"
#include "base/option_error.h"
#include "ddp/hooks/hooks_testing.h"
#include "ddp/hooks/powersgd.h"

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

}  // namespace
}  // namespace ddp::hooks
