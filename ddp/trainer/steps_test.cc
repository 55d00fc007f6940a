// A task's own steps on its own batches; the gradient of a step is that of the sum of all sums by
// the sum of all counts.

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/manager.h"
#include "ddp/data/example_dataset.h"
#include "ddp/hooks/powersgd.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/linear.h"

namespace ddp::trainer {

// A user's batch: n sentences, of which each word has a loss unless it is masked.
struct Sentences {
  at::Tensor words;    // [n, length, 4]
  at::Tensor targets;  // [n, length]
  at::Tensor mask;     // [n, length]
};
constexpr auto FieldsOf(const Sentences&) {
  return Fields(Field("words", &Sentences::words), Field("targets", &Sentences::targets),
                Field("mask", &Sentences::mask));
}

// A user's examples and batches.
struct Cameras {
  at::Tensor rotation;  // [n, 3]
  std::vector<std::string> names;
  std::optional<at::Tensor> depth;  // [n]
};
constexpr auto FieldsOf(const Cameras&) {
  return Fields(Field("rotation", &Cameras::rotation), Field("names", &Cameras::names),
                Field("depth", &Cameras::depth));
}
struct CameraPredictions {
  at::Tensor error;  // [n]
  std::vector<std::string> names;
};
constexpr auto FieldsOf(const CameraPredictions&) {
  return Fields(Field("error", &CameraPredictions::error),
                Field("names", &CameraPredictions::names));
}

namespace {

constexpr int64_t kLength = 5;

// Integers. Of example i, i % (kLength + 1) words count; without `masks` all do.
class Text : public data::DatasetOf<Sentences> {
 public:
  Text(int64_t n, at::ScalarType dtype, bool masks = true) : n_(n), dtype_(dtype), masks_(masks) {}
  int64_t size() const override { return n_; }
  Sentences Get(absl::Span<const int64_t> indices) const override {
    const auto n = static_cast<int64_t>(indices.size());
    const at::Tensor index = at::tensor(std::vector<int64_t>(indices.begin(), indices.end()));
    const at::Tensor at = index.view({n, 1}) * kLength + at::arange(kLength);
    const at::Tensor words = (at.unsqueeze(2) * 7 + at::arange(4) * 3).remainder(5) - 2;
    const at::Tensor counted = at::arange(kLength).lt(index.view({n, 1}).remainder(kLength + 1));
    return {words.to(dtype_), at.remainder(3).to(dtype_),
            masks_ ? counted.to(dtype_) : at::ones({n, kLength}, dtype_)};
  }

 private:
  const int64_t n_;
  const at::ScalarType dtype_;
  const bool masks_;
};

// Two layers, whose parameters are small integers: then so are all gradients of sums, if `relu`.
struct WordNet : torch::nn::Module {
  explicit WordNet(at::ScalarType dtype, bool integers) : integers(integers) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : parameters()) {
      const at::Tensor values = at::arange(parameter.numel(), at::kDouble);
      parameter.copy_((integers ? values.remainder(3) - 1 : values.sin() / 2).view_as(parameter));
    }
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& words) {
    const at::Tensor hidden = in->forward(words);
    return out->forward(integers ? hidden.relu() : hidden.tanh()).squeeze(-1);
  }
  const bool integers;
  torch::nn::Linear in{register_module("in", torch::nn::Linear(4, 6))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(6, 1))};
};

Task WordTask(at::ScalarType dtype, bool integers) {
  auto net = std::make_shared<WordNet>(dtype, integers);
  return TaskOf<Sentences>("words", net, [net](Sentences& batch, const StepContext&) {
    const at::Tensor error = (net->forward(batch.words) - batch.targets) * batch.mask;
    const at::Tensor count = batch.mask.sum();
    return StepOutput{.loss = SumAndCount(error.pow(2).sum(), count),
                      .metrics = {{"error", SumAndCount(error.abs().sum().detach(), count)},
                                  {"length", SumAndCount(count, batch.mask.size(0))}}};
  });
}

// By sentences, all of whose words count.
Task SentenceTask(at::ScalarType dtype, bool integers) {
  Task task = WordTask(dtype, integers);
  auto net = std::dynamic_pointer_cast<WordNet>(task.module);
  task.train_step = [net](data::AnyBatch& any, const StepContext&) {
    const auto& batch = any.Get<Sentences>();
    const at::Tensor loss = (net->forward(batch.words) - batch.targets).pow(2).sum();
    return StepOutput{.loss = SumAndCount(loss, any.size())};
  };
  task.counts_examples = true;
  return task;
}

// What one step over a whole data set of `n` does to the parameters, with a learning rate of 1.
struct Setting {
  int ranks = 1;
  int64_t batch_size = 0;
  int64_t accumulate = 1;
  std::function<void(TrainerOptions&)> set = nullptr;
};

template <typename MakeTask>
std::vector<at::Tensor> Step(const MakeTask& make, const data::AnyDataset& data,
                             const Setting& setting) {
  TrainerOptions options = Quiet();
  options.epochs = 1;
  options.optimizer.lr = 1;
  options.optimizer.momentum = 0;
  options.batch_size = setting.batch_size == 0 ? data.size() : setting.batch_size;
  options.accumulate = setting.accumulate;
  options.even_batches = setting.ranks == 1;
  if (setting.set) setting.set(options);
  std::vector<std::vector<at::Tensor>> changes(setting.ranks);
  RunRanks(setting.ranks, [&](const session::Session& session) {
    const Task task = make();
    std::vector<at::Tensor> before, after;
    for (const at::Tensor& each : task.module->parameters()) {
      before.push_back(each.detach().clone());
    }
    const auto report = Train(session, task, data, data, options);
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_EQ(report->steps, 1);
    const auto parameters = task.module->parameters();
    for (size_t i = 0; i < before.size(); ++i) {
      changes[session.rank()].push_back(parameters[i].detach() - before[i]);
    }
  });
  for (const auto& theirs : changes) {
    EXPECT_EQ(theirs.size(), changes[0].size());
    for (size_t i = 0; i < std::min(theirs.size(), changes[0].size()); ++i) {
      EXPECT_TRUE(at::equal(theirs[i], changes[0][i]));
    }
  }
  return changes[0];
}

// 26 examples: batches of 5 and 4, 5 and 4, 5 and 3; 16: of 5 and 1, 5, 5, so that ranks 1 and 2
// run out amid the step; 2: of 1, 1 and none.
TEST(SumsTest, RanksAndMicroBatchesEqualOneBatchBitByBit) {
  for (const int64_t n : {26, 16, 2}) {
    for (const bool by_words : {true, false}) {
      const Text data(n, at::kFloat, by_words);
      const auto make = [&] {
        return by_words ? WordTask(at::kFloat, true) : SentenceTask(at::kFloat, true);
      };
      const std::vector<at::Tensor> whole = Step(make, data, {});
      ASSERT_GT(whole.back().norm().item<double>(), 0);
      for (const int64_t stage : {0, 1, 2}) {
        SCOPED_TRACE(absl::StrCat(n, by_words ? " words" : " sentences", ", stage ", stage));
        const auto parts =
            Step(make, data, {3, 5, 2, [&](auto& options) { options.zero.stage = stage; }});
        ASSERT_EQ(parts.size(), whole.size());
        for (size_t i = 0; i < whole.size(); ++i) {
          EXPECT_TRUE(at::equal(parts[i], whole[i])) << i << "\n" << parts[i] << whole[i];
        }
      }
    }
  }
}

TEST(SumsTest, RanksAndMicroBatchesEqualOneBatchOfAnyNumbers) {
  for (const auto& [dtype, most] : {std::pair(at::kDouble, 1e-12), std::pair(at::kFloat, 2e-6)}) {
    const Text data(26, dtype);
    const auto make = [dtype = dtype] { return WordTask(dtype, false); };
    // Means over the words of a batch.
    const auto make_mean = [&] {
      Task task = make();
      task.train_step = [step = task.train_step](data::AnyBatch& batch,
                                                 const StepContext& context) {
        const SumAndCount loss = step(batch, context).loss;
        const double count = std::max(loss.count(), 1.0);
        return StepOutput{.loss = Mean(loss.value() / count, loss.count())};
      };
      return task;
    };
    const std::vector<at::Tensor> whole = Step(make, data, {});
    const std::vector<at::Tensor> clipped =
        Step(make, data, {.set = [](auto& options) { options.clip_norm = 0.5; }});
    EXPECT_GT(RelativeDifference(clipped[0], whole[0]), 0.1);
    for (const int64_t stage : {0, 1, 2}) {
      for (const bool clips : {false, true}) {
        SCOPED_TRACE(absl::StrCat(stage, " ", dtype == at::kFloat, clips));
        const auto set = [&](TrainerOptions& options) {
          options.zero.stage = stage;
          if (clips) options.clip_norm = 0.5;
        };
        for (const auto& parts :
             {Step(make, data, {3, 5, 2, set}), Step(make_mean, data, {3, 5, 2, set})}) {
          for (size_t i = 0; i < whole.size(); ++i) {
            EXPECT_LT(RelativeDifference(parts[i], (clips ? clipped : whole)[i]), most) << i;
          }
        }
      }
    }
  }
}

// A task by forward and loss, the mean over a batch.
TEST(SumsTest, MeansCountTheExamplesOfTheirBatch) {
  const Halves data(26);
  const std::vector<at::Tensor> whole = Step(LineTask, data, {});
  for (const int64_t batch_size : {5, 3, 2}) {
    const int64_t accumulate = (9 + batch_size - 1) / batch_size;
    const auto parts = Step(LineTask, data, {3, batch_size, accumulate});
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_LT(RelativeDifference(parts[i], whole[i]), 2e-6) << batch_size;
    }
  }
}

// With sums of 16-bit gradients, and hooks that take the mean over ranks.
TEST(SumsTest, WithHooksAndInLowPrecision) {
  const Text data(26, at::kFloat);
  const auto make = [] { return WordTask(at::kFloat, false); };
  const std::vector<at::Tensor> whole = Step(make, data, {});
  const std::map<std::string, std::function<void(TrainerOptions&)>> settings = {
      {"bf16_compress", [](auto& options) { options.comm_hook.name = "bf16_compress"; }},
      {"fp16_compress",
       [](auto& options) {
         options.comm_hook.name = "fp16_compress";
         options.zero.stage = 2;
       }},
      {"bf16", [](auto& options) { options.precision = "bf16"; }},
      {"bf16 and stage 2",
       [](auto& options) {
         options.precision = "bf16";
         options.zero.stage = 2;
       }},
      {"fp16", [](auto& options) {
         options.precision = "fp16";
         options.grad_scaler.init_scale = 1024;
       }}};
  // A mean of the batches' means differs by more than what low precision does.
  const auto make_means = [&] {
    Task task = make();
    task.train_step = [step = task.train_step](data::AnyBatch& batch, const StepContext& context) {
      const SumAndCount loss = step(batch, context).loss;
      return StepOutput{.loss = Mean(loss.value() / std::max(loss.count(), 1.0), 1)};
    };
    return task;
  };
  const auto in_order = [](auto& options) { options.shuffle = false; };
  EXPECT_GT(RelativeDifference(Step(make_means, data, {3, 5, 2, in_order})[0], whole[0]), 0.05);
  for (const auto& [name, set] : settings) {
    SCOPED_TRACE(name);
    const auto parts = Step(make, data, {3, 5, 2, set});
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_LT(RelativeDifference(parts[i], whole[i]), 0.05);
    }
  }
}

TEST(SumsTest, LogsAndEvaluationAreExactOverUnequalRanks) {
  const Text data(26, at::kDouble);
  const Task alone = WordTask(at::kDouble, true);
  data::AnyBatch all = [&] {
    std::vector<int64_t> indices(data.size());
    for (int64_t i = 0; i < data.size(); ++i) indices[i] = i;
    return data.GetAny(indices);
  }();
  std::map<std::string, double> expected;
  RunRanks(1, [&](const session::Session& session) {
    const StepOutput output = alone.train_step(all, {session, session.device()});
    expected["loss"] = output.loss.sum() / output.loss.count();
    for (const auto& [name, metric] : output.metrics) {
      expected[name] = metric.sum() / metric.count();
    }
  });
  TrainerOptions options = Quiet();
  options.epochs = 1;
  options.optimizer.lr = 0;
  options.batch_size = 5;
  options.eval_batch_size = 4;
  options.accumulate = 2;
  options.even_batches = false;
  options.log.dir = testing::TempDir() + "/exact_sums";
  options.log.every = 1;
  std::filesystem::remove_all(options.log.dir);
  std::string summary;
  RunRanks(3, [&](const session::Session& session) {
    const auto report = Train(session, WordTask(at::kDouble, true), data, data, options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->test.examples, 26);
    EXPECT_EQ(report->test.loss, expected["loss"]);
    EXPECT_EQ(report->test.metrics.size(), 2);
    EXPECT_EQ(report->test.metrics.at("error"), expected["error"]);
    if (session.is_main()) summary = Summary(*report, 1);
  });
  for (const std::string name : {"loss", "error", "length"}) {
    for (const std::string when : {"train/", "test/"}) {
      const auto logged = Logged(options.log.dir, when + name);
      ASSERT_EQ(logged.size(), 1) << when << name;
      EXPECT_EQ(logged.at(1), expected[name]) << when << name;
    }
  }
  EXPECT_EQ(summary.substr(0, 11), "test error ") << summary;
}

TEST(SumsTest, AStepThatCountsNothingChangesNothing) {
  // Nothing counts of examples 0, 6, 12, …
  class Masked : public Text {
   public:
    Masked(int64_t n, int64_t factor) : Text(n * factor, at::kFloat), n_(n), factor_(factor) {}
    int64_t size() const override { return n_; }
    Sentences Get(absl::Span<const int64_t> indices) const override {
      std::vector<int64_t> of_text;
      for (const int64_t index : indices) of_text.push_back(index * factor_);
      return Text::Get(of_text);
    }
    int64_t n_, factor_;
  };
  for (const int64_t stage : {0, 1, 2}) {
    for (const std::string precision : {"fp32", "fp16"}) {
      const Masked nothing(24, 6);
      TrainerOptions options = Quiet();
      options.batch_size = 2;
      options.zero.stage = stage;
      options.precision = precision;
      options.optimizer.momentum = 0.9;
      options.log.dir = absl::StrCat(testing::TempDir(), "/nothing_", stage, "_", precision);
      options.log.every = 1;
      std::filesystem::remove_all(options.log.dir);
      testing::internal::CaptureStderr();
      RunRanks(3, [&](const session::Session& session) {
        const Task task = WordTask(at::kFloat, true);
        std::vector<at::Tensor> before;
        for (const at::Tensor& each : task.module->parameters()) before.push_back(each.clone());
        const auto report = Train(session, task, nothing, Text(24, at::kFloat), options);
        ASSERT_TRUE(report.ok()) << report.status();
        EXPECT_EQ(report->steps, 8);
        for (size_t i = 0; i < before.size(); ++i) {
          EXPECT_TRUE(at::equal(before[i], task.module->parameters()[i]));
        }
      });
      const std::string printed = testing::internal::GetCapturedStderr();
      EXPECT_TRUE(absl::StrContains(printed, "step 1 changes nothing")) << printed;
      EXPECT_TRUE(absl::StrContains(printed, "such steps so far: 8")) << printed;
      EXPECT_FALSE(absl::StrContains(printed, "step 3 changes nothing")) << printed;
      // What there is of the steps is recorded: all but a loss.
      EXPECT_EQ(Logged(options.log.dir, "train/lr").size(), 8);
      EXPECT_TRUE(Logged(options.log.dir, "train/loss").empty());
    }
  }
}

// Of examples 0, 1 and 2, one for each rank, the first counts nothing: as if it were not there.
TEST(SumsTest, ARankWhoseBatchCountsNothingAddsNothing) {
  class Counted : public Text {
   public:
    Counted() : Text(2, at::kFloat) {}
    Sentences Get(absl::Span<const int64_t> indices) const override {
      std::vector<int64_t> of_text;
      for (const int64_t index : indices) of_text.push_back(index + 1);
      return Text::Get(of_text);
    }
  };
  const auto make = [] { return WordTask(at::kFloat, true); };
  const std::vector<at::Tensor> alone = Step(make, Counted(), {});
  ASSERT_GT(alone.back().norm().item<double>(), 0);
  for (const int64_t stage : {0, 1, 2}) {
    const auto parts = Step(make, Text(3, at::kFloat),
                            {3, 1, 1, [&](auto& options) { options.zero.stage = stage; }});
    ASSERT_EQ(parts.size(), alone.size());
    for (size_t i = 0; i < alone.size(); ++i) {
      EXPECT_TRUE(at::equal(parts[i], alone[i])) << i << " stage " << stage;
    }
  }
}

// About 10^5 words count in a step, and the sum of the losses does not fit into float16.
TEST(SumsTest, LargeSumsDoNotOverflowInFp16) {
  TrainerOptions options = Quiet();
  options.precision = "fp16";
  options.grad_scaler.init_scale = 1024;
  options.epochs = 1;
  options.batch_size = 4096;
  options.optimizer.lr = 1e-3;
  options.log.dir = testing::TempDir() + "/fp16_sums";
  options.log.every = 1;
  std::filesystem::remove_all(options.log.dir);
  RunRanks(2, [&](const session::Session& session) {
    const Text data(32768, at::kFloat);
    const auto report =
        Train(session, WordTask(at::kFloat, false), data, Text(8, at::kFloat), options);
    ASSERT_TRUE(report.ok()) << report.status();
  });
  const auto scales = Logged(options.log.dir, "train/loss_scale");
  EXPECT_EQ(scales.size(), 4);
  for (const auto& [step, scale] : scales) EXPECT_EQ(scale, 1024) << step;
}

TEST(SumsTest, AResumedRunHasTheBitsOfOneThatDidNotStop) {
  const Text data(60, at::kFloat);
  std::atomic<int64_t> steps;
  const auto train = [&](const std::string& name, int64_t stop, const std::string& resume) {
    TrainerOptions options = Quiet();
    CountSteps(options, steps);
    options.batch_size = 5;
    options.optimizer.lr = 0.01;
    options.optimizer.momentum = 0.9;
    options.comm_hook.name = "powersgd";  // has errors in the units of gradients
    options.comm_hook.implementations.Mutable<hooks::PowerSgdOptions>("powersgd").start_iter = 2;
    options.checkpoint.manager.directory = testing::TempDir() + "/sums_" + name;
    options.checkpoint.resume = resume;
    options.stop_at_step = stop;
    if (resume.empty()) std::filesystem::remove_all(options.checkpoint.manager.directory);
    std::vector<at::Tensor> parameters;
    RunRanks(3, [&](const session::Session& session) {
      const Task task = WordTask(at::kFloat, false);
      const auto report = Train(session, task, data, data, options);
      ASSERT_TRUE(report.ok()) << report.status();
      if (session.is_main()) parameters = task.module->parameters();
    });
    return parameters;
  };
  const auto whole = train("whole", 0, "");
  EXPECT_EQ(steps, 3 * 8);
  train("stopped", 3, "");
  const auto resumed = train("stopped", 0, "auto");
  EXPECT_EQ(steps, 3 * (8 - 3));
  ASSERT_EQ(resumed.size(), whole.size());
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(at::equal(resumed[i], whole[i])) << i;
}

TEST(StepsTest, WhatAStepMayNotGiveIsAnErrorOfAllRanks) {
  const auto net = std::make_shared<WordNet>(at::kFloat, true);
  using Step = std::function<StepOutput(Sentences&, const StepContext&)>;
  const auto loss_of = [net](Sentences& batch) {
    return (net->forward(batch.words) - batch.targets).pow(2);
  };
  const std::map<std::string, std::pair<Step, bool>> bad = {
      {"has given no loss", {[](auto&, auto&) { return StepOutput{}; }, false}},
      {"is one number",
       {[&](auto& batch, auto&) { return StepOutput{Mean(loss_of(batch), 1)}; }, false}},
      {"has no gradient",
       {[&](auto& batch, auto&) { return StepOutput{Mean(loss_of(batch).sum().detach(), 1)}; },
        false}},
      {"counts -1",
       {[&](auto& batch, auto&) { return StepOutput{Mean(loss_of(batch).sum(), -1)}; }, false}},
      {"counts 3 for a batch of 16 examples",
       {[&](auto& batch, auto&) { return StepOutput{Mean(loss_of(batch).sum(), 3)}; }, true}}};
  for (const auto& [what, step] : bad) {
    RunRanks(2, [&, what = what, step = step](const session::Session& session) {
      Task task = WordTask(at::kFloat, true);
      task.counts_examples = step.second;
      if (session.rank() == 1 || step.second) {
        task.train_step = TaskOf<Sentences>("", net, step.first).train_step;
      }
      const Text data(64, at::kFloat);
      const absl::Status status = Train(session, task, data, data, Quiet()).status();
      EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "words")) << status;
    });
  }
}

// The names are those in the log of a run that records what it can.
TEST(StepsTest, AMetricMayNotHaveANameOfTheTrainersOwn) {
  TrainerOptions options = Quiet();
  options.max_steps = options.zero.stage = 1;
  options.precision = "fp16";
  options.monitor = {.gradient_norm = true, .throughput = true, .memory = true};
  options.log.dir = testing::TempDir() + "/names";
  std::filesystem::remove_all(options.log.dir);
  const Text data(64, at::kFloat);
  RunRanks(2, [&](const session::Session& session) {
    ASSERT_TRUE(Train(session, SentenceTask(at::kFloat, true), data, data, options).ok());
  });
  std::set<std::string> names = {" ", "loss.out"};
  std::ifstream lines(options.log.dir + "/metrics.jsonl");
  for (std::string part; std::getline(lines, part, '"');) {
    if (absl::StartsWith(part, "train/")) names.insert(part.substr(6));
  }
  EXPECT_GE(names.size(), 12);
  for (const std::string& name : names) {
    int calls = 0;
    RunRanks(1, [&](const session::Session& session) {
      Task task = WordTask(at::kFloat, true);
      const auto step = [&, sound = std::exchange(task.train_step, nullptr)](
                            auto& batch, const StepContext& context) {
        ++calls;
        StepOutput output = sound(batch, context);
        output.metrics[name] = output.loss;
        return output;
      };
      task.phases = {{"in", "in.*", step}, {"out", "out.*", step}};
      const absl::Status status = Train(session, task, data, data, Quiet()).status();
      EXPECT_TRUE(absl::StrContains(status.message(), "training step gives a metric '" + name));
    });
    EXPECT_EQ(calls, 1) << name;
  }
}

TEST(StepsTest, BatchesOfAnotherTypeAreAnErrorThatNamesBoth) {
  RunRanks(2, [&](const session::Session& session) {
    const absl::Status status =
        Train(session, WordTask(at::kFloat, true), Halves(64), Halves(64), Quiet()).status();
    EXPECT_TRUE(absl::StrContains(status.message(), "ddp::data::Batch")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "ddp::trainer::Sentences")) << status;
  });
  RunRanks(2, [&](const session::Session& session) {
    const Text text(64, at::kFloat);
    const absl::Status status = Train(session, LineTask(), text, text, Quiet()).status();
    EXPECT_TRUE(absl::StrContains(status.message(), "ddp::trainer::Sentences")) << status;
  });
}

using Camera = std::tuple<at::Tensor, std::string, double>;

class Views : public data::ExampleDatasetOf<Camera, Cameras> {
 public:
  explicit Views(int64_t n) : n_(n) {}
  int64_t size() const override { return n_; }
  Camera Get(int64_t index) const override {
    const auto angle = static_cast<double>(index);
    return {at::tensor({angle, angle + 1, angle + 2}).sin().to(at::kFloat),
            absl::StrCat("camera ", index), angle};
  }
  // Odd batches have no depths.
  Cameras Collate(std::vector<Camera> examples, absl::Span<const int64_t> indices) const override {
    auto [rotation, names, depth] = data::Collate(std::move(examples), indices);
    return {rotation, names,
            indices[0] % 2 == 0 ? std::optional(depth.sin().to(at::kFloat)) : std::nullopt};
  }

 private:
  const int64_t n_;
};

Task CameraTask() {
  auto net = std::make_shared<torch::nn::LinearImpl>(3, 1);
  const at::NoGradGuard no_grad;
  net->weight.fill_(0.5);
  net->bias.zero_();
  const auto step = [net](Cameras& batch, const StepContext& context) {
    EXPECT_EQ(batch.rotation.size(0), static_cast<int64_t>(batch.names.size()));
    const at::Tensor depth = net->forward(batch.rotation).squeeze(1);
    const at::Tensor error = batch.depth ? depth - *batch.depth : depth * 0;
    StepOutput output = {
        .loss = SumAndCount(error.pow(2).sum(), batch.depth ? batch.depth->size(0) : 0)};
    if (!context.training) {
      output.predictions = data::AnyBatch(CameraPredictions{depth, batch.names});
    }
    return output;
  };
  return TaskOf<Cameras>("cameras", net, step);
}

TEST(StepsTest, AUsersStructIsTrainedAndEvaluatedOnUnevenRanks) {
  TrainerOptions options = Quiet();
  options.batch_size = 2;
  options.epochs = 8;
  options.optimizer.lr = 0.1;
  options.even_batches = false;
  RunRanks(3, [&](const session::Session& session) {
    const Task task = CameraTask();
    const Views train(31), test(10);
    CameraPredictions before, after;
    const auto first = Evaluate(session, task, test, {.batch_size = 3}, &before);
    ASSERT_TRUE(first.ok()) << first.status();
    EXPECT_EQ(first->examples, 10);
    const auto report = Train(session, task, train, test, options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_LT(report->test.loss, first->loss);
    const auto last = Evaluate(session, task, test, {.batch_size = 3}, &after);
    ASSERT_TRUE(last.ok()) << last.status();
    ASSERT_EQ(after.names.size(), 10);
    for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(after.names[i], absl::StrCat("camera ", i));
    EXPECT_EQ(after.error.size(0), 10);
    // There is a file of classes only.
    Predictions classes;
    const absl::Status refused =
        Evaluate(session, task, test, {.batch_size = 3}, &classes).status();
    EXPECT_TRUE(absl::StrContains(refused.message(), "CameraPredictions")) << refused;
  });
  // Ranks without any example.
  RunRanks(3, [&](const session::Session& session) {
    CameraPredictions predictions;
    const auto result = Evaluate(session, CameraTask(), Views(2), {.batch_size = 3}, &predictions);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(predictions.names, (std::vector<std::string>{"camera 0", "camera 1"}));
  });
}

// Two inputs, of which one goes through the module twice.
using TwoInputs = std::pair<std::vector<at::Tensor>, at::Tensor>;

class Pairs : public data::DatasetOf<TwoInputs> {
 public:
  int64_t size() const override { return 300; }
  TwoInputs Get(absl::Span<const int64_t> indices) const override {
    const data::Batch batch = Halves(300).Get(indices);
    return {{batch.input, batch.input.flip(1)}, batch.target};
  }
};

TEST(StepsTest, TwoInputsAndSeveralForwards) {
  for (const bool finds_unused : {false, true}) {
    TrainerOptions options = Quiet();
    options.data_parallel.find_unused_parameters = finds_unused;
    options.accumulate = 2;
    options.epochs = 4;
    RunRanks(3, [&](const session::Session& session) {
      auto line = std::make_shared<Line>();
      const auto step = [line](TwoInputs& batch, const StepContext&) {
        const at::Tensor output = line->forward(batch.first[0]) + line->forward(batch.first[1]);
        const at::Tensor& target = batch.second;
        const at::Tensor correct = output.argmax(1).eq(target).sum();
        return StepOutput{
            .loss = Mean(torch::nn::functional::cross_entropy(output, target), target.size(0)),
            .metrics = {{"accuracy", SumAndCount(correct, target.size(0))}},
            .predictions = data::AnyBatch(Outputs{output, target})};
      };
      const Task task = TaskOf<TwoInputs>("pairs", line, step);
      const auto report = Train(session, task, Pairs(), Pairs(), options);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_GT(report->test.metrics.at("accuracy"), 0.9);
      Predictions predictions;
      ASSERT_TRUE(Evaluate(session, task, Pairs(), {.batch_size = 7}, &predictions).ok());
      EXPECT_EQ(predictions.target.size(0), 300);
    });
  }
}

}  // namespace
}  // namespace ddp::trainer
