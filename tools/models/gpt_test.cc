#include "tools/models/gpt.h"

#include <array>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/manager.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"
#include "tools/models/registry.h"

namespace ddp::tools::models {
namespace {

using trainer::Report;
using trainer::TrainerOptions;

constexpr int64_t kTokens = 11;
constexpr int64_t kContext = 6;

GptSizes Small(double dropout = 0) {
  return {.vocabulary = kTokens,
          .context = kContext,
          .layers = 2,
          .width = 16,
          .heads = 2,
          .dropout = dropout};
}

// Each example counts in steps of its own; its last targets are masked, at some all are.
class Counting : public data::Dataset {
 public:
  explicit Counting(int64_t n) : n_(n) {}
  int64_t size() const override { return n_; }
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    std::vector<at::Tensor> inputs, targets;
    for (const int64_t i : indices) {
      const at::Tensor tokens = (at::arange(kContext + 1) * (i % 5 + 1) + i).remainder(kTokens);
      inputs.push_back(tokens.narrow(0, 0, kContext));
      targets.push_back(tokens.narrow(0, 1, kContext).clone());
      targets.back()
          .narrow(0, kContext - i % 7 % (kContext + 1), i % 7 % (kContext + 1))
          .fill_(-100);
    }
    return {at::stack(inputs), at::stack(targets)};
  }

 private:
  const int64_t n_;
};

trainer::Task MakeTask(double dropout = 0) {
  ModelOptions options = {
      .name = "gpt", .input_shape = {kContext}, .num_classes = kTokens, .token = "token"};
  options.implementations.Mutable<GptOptions>("gpt") = {
      .layers = 2, .width = 16, .heads = 2, .context = kContext, .dropout = dropout};
  torch::manual_seed(3);
  absl::StatusOr<trainer::Task> task = Make(options);
  EXPECT_TRUE(task.ok()) << task.status();
  return *std::move(task);
}

// Of each rank, all with the same weights. Made before the ranks run: as threads they share torch's
// generator, which a rank that has begun to train seeds anew.
std::vector<trainer::Task> MakeTasks(int ranks, double dropout = 0) {
  std::vector<trainer::Task> tasks;
  for (int rank = 0; rank < ranks; ++rank) tasks.push_back(MakeTask(dropout));
  return tasks;
}

class GptTest : public testing::Test {
 protected:
  GptTest()
      : folder_(absl::StrCat(testing::TempDir(), "/gpt_",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
  }

  TrainerOptions Options() const {
    TrainerOptions options = trainer::Quiet();
    options.batch_size = 8;
    options.optimizer = {.name = "adamw", .lr = 0.01, .weight_decay = 0.1, .no_decay = true};
    return options;
  }

  // The report, and the model's weights, of rank 0.
  struct Result {
    Report report;
    std::map<std::string, at::Tensor> weights;
  };
  Result Run(int ranks, const TrainerOptions& options, double dropout = 0) const {
    Result result;
    const std::vector<trainer::Task> tasks = MakeTasks(ranks, dropout);
    trainer::RunRanks(ranks, [&](const session::Session& session) {
      const trainer::Task& task = tasks[static_cast<size_t>(session.rank())];
      const auto report = trainer::Train(session, task, Counting(100), Counting(30), options);
      ASSERT_TRUE(report.ok()) << report.status();
      if (!session.is_main()) return;
      result.report = *report;
      for (const auto& item : task.module->named_parameters()) {
        result.weights[item.key()] = item.value().detach().clone();
      }
    });
    return result;
  }

  static void ExpectEqual(const Result& a, const Result& b) {
    EXPECT_EQ(a.report.test.loss, b.report.test.loss);
    ASSERT_EQ(a.weights.size(), b.weights.size());
    for (const auto& [name, tensor] : a.weights) {
      EXPECT_TRUE(at::equal(tensor, b.weights.at(name))) << name;
    }
  }

  const std::string folder_;
};

TEST_F(GptTest, SizesFollowTheDial) {
  const GptSizes sizes = SizesOf({.depth = 6}, 256).value();
  EXPECT_EQ(sizes.layers, 6);
  EXPECT_EQ(sizes.width, 384);
  EXPECT_EQ(sizes.heads, 12);
  EXPECT_EQ(SizesOf({.layers = 5, .width = 128}, 256).value().heads, 4);
  const auto odd = SizesOf({.width = 100, .heads = 3}, 256);
  EXPECT_TRUE(absl::StrContains(odd.status().message(), "heads")) << odd.status();
}

TEST_F(GptTest, TheEmbeddingIsOneParameter) {
  const auto gpt = std::make_shared<Gpt>(Small());
  int64_t elements = 0;
  for (const auto& parameter : gpt->parameters()) elements += parameter.numel();
  // Embeddings, blocks (12 width^2 and 13 width each), the last norm.
  EXPECT_EQ(elements, (kTokens + kContext) * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16);
  EXPECT_FALSE(gpt->named_parameters().contains("lm_head.weight"));
  // Both uses count.
  const at::Tensor tokens = at::arange(kContext).unsqueeze(0);
  gpt->forward(tokens).sum().backward();
  EXPECT_NE(gpt->named_parameters()["wte.weight"].grad()[kTokens - 1].abs().sum().item<float>(), 0);
}

TEST_F(GptTest, NoTokenSeesLaterOnes) {
  const auto gpt = std::make_shared<Gpt>(Small());
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::arange(kContext).unsqueeze(0);
  at::Tensor other = tokens.clone();
  other[0][4] = 9;
  const at::Tensor a = gpt->forward(tokens), b = gpt->forward(other);
  EXPECT_TRUE(at::allclose(a.narrow(1, 0, 4), b.narrow(1, 0, 4), 0, 1e-6));
  EXPECT_FALSE(at::allclose(a.select(1, 4), b.select(1, 4), 0, 1e-3));
  EXPECT_THROW(gpt->forward(at::zeros({1, kContext + 1}, at::kLong)), c10::Error);
}

TEST_F(GptTest, DropsOnlyInTraining) {
  const auto gpt = std::make_shared<Gpt>(Small(/*dropout=*/0.5));
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::arange(kContext).unsqueeze(0);
  gpt->eval();
  const at::Tensor whole = gpt->forward(tokens);
  EXPECT_TRUE(at::equal(gpt->forward(tokens), whole));
  // Blocks that add nothing leave the embedding's.
  for (auto& item : gpt->named_parameters()) {
    if (absl::StrContains(item.key(), "c_proj")) item.value().zero_();
  }
  const at::Tensor embedded = gpt->forward(tokens);
  gpt->train();
  EXPECT_FALSE(at::allclose(gpt->forward(tokens), embedded));
}

TEST_F(GptTest, WhatBlocksAddIsSmallInADeepModel) {
  const auto gpt = std::make_shared<Gpt>(
      GptSizes{.vocabulary = 300, .context = 8, .layers = 8, .width = 128, .heads = 4});
  const auto parameters = gpt->named_parameters();
  const double spread = 1 / std::sqrt(128.);
  EXPECT_NEAR(parameters["h.3.attn.c_attn.weight"].std().item<double>(), spread, 0.05 * spread);
  EXPECT_NEAR(parameters["h.3.mlp.c_proj.weight"].std().item<double>(), spread / 4, 0.02 * spread);
}

TEST_F(GptTest, LearnsAndSaysHowWell) {
  TrainerOptions options = Options();
  options.epochs = 15;
  options.metrics = {"perplexity", "top1"};
  const Result result = Run(2, options);
  // Only the first token of an example cannot be known.
  EXPECT_LT(result.report.test.loss, 1.7);
  EXPECT_NEAR(result.report.test.metrics.at("bits_per_token"),
              result.report.test.loss / std::log(2), 1e-5);
  EXPECT_NEAR(result.report.test.metrics.at("perplexity"), std::exp(result.report.test.loss), 1e-4);
  EXPECT_GT(result.report.test.metrics.at("accuracy_top1"), 0.5);
}

// What the steps of a rank tell callbacks of their losses.
class Losses final : public trainer::Callback {
 public:
  std::string name() const override { return "losses"; }
  absl::Status OnStepEnd(trainer::CallbackContext& run, const at::Tensor& loss) override {
    sum += loss.item<double>() * run.loss_count();
    count += run.loss_count();
    ++steps;
    without += run.loss_count() == 0;
    return absl::OkStatus();
  }

  double sum = 0, count = 0;
  int steps = 0, without = 0;
};

// Trains on two ranks, whose losses these are, and returns what is printed.
std::string TrainTwo(const TrainerOptions& options, int64_t examples,
                     std::array<Losses, 2>& losses) {
  testing::internal::CaptureStdout();
  const std::vector<trainer::Task> tasks = MakeTasks(2);
  trainer::RunRanks(2, [&](const session::Session& session) {
    const trainer::Task& task = tasks[static_cast<size_t>(session.rank())];
    TrainerOptions mine = options;
    mine.callbacks = CallbacksOf({.name = "gpt", .token = "token"});
    Losses& of_rank = losses[static_cast<size_t>(session.rank())];
    mine.callbacks.emplace_back(std::shared_ptr<Losses>(), &of_rank);  // does not own it
    const auto report = trainer::Train(session, task, Counting(examples), Counting(30), mine);
    ASSERT_TRUE(report.ok()) << report.status();
  });
  return testing::internal::GetCapturedStdout();
}

// Each token of both ranks, whose examples differ, weighs the same.
void ExpectBitsOf(const std::array<Losses, 2>& losses, const std::string& printed) {
  const std::string begin = "bits per token ", end = " train, last 5 steps";
  ASSERT_TRUE(absl::StartsWith(printed, begin)) << printed;
  ASSERT_TRUE(absl::StrContains(printed, end)) << printed;
  const double mean = (losses[0].sum + losses[1].sum) / (losses[0].count + losses[1].count);
  EXPECT_NEAR(std::stod(printed.substr(begin.size())), mean / std::log(2), 2e-4);
}

TEST_F(GptTest, SaysHowWellAllRanksPredict) {
  TrainerOptions options = Options();
  options.max_steps = 5;
  std::array<Losses, 2> losses;
  const std::string printed = TrainTwo(options, 100, losses);
  ExpectBitsOf(losses, printed);
  EXPECT_GT(std::abs(losses[0].sum / losses[0].count - losses[1].sum / losses[1].count), 5e-4);
}

TEST_F(GptTest, ARankThatHasRunOutOfBatchesDoesNotCountAsKnowingAll) {
  TrainerOptions options = Options();
  options.epochs = 1;
  options.even_batches = false;
  std::array<Losses, 2> losses;
  // Rank 0 has 33 examples, in a batch more than rank 1 has.
  const std::string printed = TrainTwo(options, 65, losses);
  EXPECT_EQ(losses[1].steps, 5);
  EXPECT_EQ(losses[1].without, 1);
  ExpectBitsOf(losses, printed);
}

TEST_F(GptTest, TwoRanksTrainAsOneWithAccumulation) {
  TrainerOptions options = Options();
  options.epochs = 1;
  options.drop_last = true;
  const Result two = Run(2, options);
  options.accumulate = 2;
  const Result one = Run(1, options);
  // The masked targets differ between ranks and micro-batches: each token weighs the same.
  EXPECT_NEAR(two.report.test.loss, one.report.test.loss, 1e-3);
}

struct Setting {
  const char* name;
  std::function<void(TrainerOptions&)> set;
};

class GptSettingTest : public GptTest, public testing::WithParamInterface<Setting> {};

// A run that is stopped in its first epoch and resumed has the bits of one that was not.
TEST_P(GptSettingTest, ResumesBitForBit) {
  TrainerOptions options = Options();
  GetParam().set(options);
  std::filesystem::remove_all(folder_);
  const bool drops = std::string(GetParam().name) == "dropout";
  const int ranks = drops ? 1 : 2;  // ranks as threads share torch's generator
  const double dropout = drops ? 0.2 : 0;
  const Result whole = Run(ranks, options, dropout);
  EXPECT_TRUE(std::isfinite(whole.report.test.loss));
  options.checkpoint.manager.directory = folder_;
  options.checkpoint.resume = "auto";
  options.stop_at_step = 3;
  EXPECT_EQ(Run(ranks, options, dropout).report.steps, 3);
  options.stop_at_step = 0;
  ExpectEqual(Run(ranks, options, dropout), whole);
}

INSTANTIATE_TEST_SUITE_P(
    All, GptSettingTest,
    testing::Values(
        Setting{"plain", [](TrainerOptions&) {}}, Setting{"dropout", [](TrainerOptions&) {}},
        Setting{"bf16", [](TrainerOptions& o) { o.precision = "bf16"; }},
        Setting{"zero1", [](TrainerOptions& o) { o.zero.stage = 1; }},
        Setting{"zero2", [](TrainerOptions& o) { o.zero.stage = 2; }},
        Setting{"accumulate", [](TrainerOptions& o) { o.accumulate = 2; }},
        Setting{"ema", [](TrainerOptions& o) { o.ema = {.decay = 0.9, .eval = true}; }},
        Setting{"fp16_compress", [](TrainerOptions& o) { o.comm_hook.name = "fp16_compress"; }},
        Setting{"bf16_compress", [](TrainerOptions& o) { o.comm_hook.name = "bf16_compress"; }},
        Setting{"powersgd", [](TrainerOptions& o) { o.comm_hook.name = "powersgd"; }}),
    [](const auto& info) { return std::string(info.param.name); });

// GPT-2's form of a model's weights.
std::map<std::string, at::Tensor> OfGpt2(const Gpt& gpt) {
  std::map<std::string, at::Tensor> weights;
  for (const auto& item : gpt.named_parameters()) {
    const bool is_layer = absl::StrContains(item.key(), ".c_") && item.value().dim() == 2;
    const at::Tensor tensor = item.value().detach();
    weights["transformer." + item.key()] = is_layer ? tensor.t().contiguous() : tensor.clone();
  }
  weights["lm_head.weight"] = weights["transformer.wte.weight"].clone();
  for (int i = 0; i < 2; ++i) {
    weights[absl::StrCat("transformer.h.", i, ".attn.bias")] = at::ones({1, 1, 9, 9}).tril();
    weights[absl::StrCat("transformer.h.", i, ".attn.masked_bias")] = at::full({}, -1e4);
  }
  auto& positions = weights["transformer.wpe.weight"];
  positions = at::cat({positions, at::ones({3, 16})});
  return weights;
}

TEST_F(GptTest, TakesWeightsOfGpt2) {
  const auto from = std::make_shared<Gpt>(Small()), to = std::make_shared<Gpt>(Small());
  checkpoint::Dict weights = checkpoint::NewTree();
  for (const auto& [name, tensor] : OfGpt2(*from)) weights.insert(name, tensor);
  std::vector<std::string> notes;
  const auto taken = checkpoint::InitModule(*to, weights, {}, notes);
  ASSERT_TRUE(taken.ok()) << taken.status();
  for (const auto& item : from->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), to->named_parameters()[item.key()])) << item.key();
  }
  EXPECT_EQ(notes, (std::vector<std::string>{"wpe.weight: the first 6 of 9 positions",
                                             "8 weights [in, out], as of GPT-2, were transposed",
                                             "4 masks of attention were left out"}));
  // A last layer of its own is refused, and what is in our order stays so.
  weights.insert_or_assign("lm_head.weight", at::ones({kTokens, 16}));
  EXPECT_TRUE(absl::StrContains(checkpoint::InitModule(*to, weights, {}, notes).status().message(),
                                "lm_head.weight"));
  const auto again = checkpoint::InitModule(*to, checkpoint::ModuleState(*from), {}, notes);
  ASSERT_TRUE(again.ok()) << again.status();
}

TEST(GptRegistryTest, IsTrainedWithoutDecayOfNormsAndBiases) {
  std::map<std::string, std::string> defaults;
  for (const auto& [path, value] : DefaultsOf({.name = "gpt"})) defaults[path] = value;
  EXPECT_EQ(defaults["optimizer.name"], "adamw");
  EXPECT_EQ(defaults["optimizer.no_decay"], "true");
}

TEST(GptRegistryTest, RefusesOtherDataByName) {
  const absl::Status images =
      Make({.name = "gpt", .input_shape = {1, 28, 28}, .num_classes = 10}).status();
  EXPECT_TRUE(absl::StrContains(images.message(), "dataset=text")) << images;
  ModelOptions options = {.name = "gpt", .input_shape = {200}, .num_classes = 256, .token = "byte"};
  const absl::Status longer = Make(options).status();
  EXPECT_TRUE(absl::StrContains(longer.message(), "200 tokens of an example")) << longer;
}

}  // namespace
}  // namespace ddp::tools::models
