// Metrics of evaluations; validation data within and between epochs; dry runs.

#include <atomic>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "checkpoint/manager.h"
#include "ddp/data/for_evaluation.h"
#include "ddp/data/order.h"
#include "ddp/data/subset.h"
#include "ddp/metrics/classification.h"
#include "ddp/metrics/mean.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

using absl::StrContains;
using Values = std::map<std::string, double>;

constexpr int64_t kExamples = 330;  // 11 batches of 16 on each of two ranks

std::string FolderFor(const std::string& name) {
  std::string test = testing::UnitTest::GetInstance()->current_test_info()->name();
  for (char& c : test) c = c == '/' ? '_' : c;
  const std::string folder = absl::StrCat(testing::TempDir(), "/evaluator_", test, "_", name);
  std::filesystem::remove_all(folder);
  return folder;
}

std::set<std::string> Names(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    names.insert(entry.path().lexically_relative(folder));
  }
  return names;
}

// Whose values are not those of steps: the error by example, and those by name.
Task TaskWithMetrics() {
  auto module = std::make_shared<Line>();
  const at::NoGradGuard no_grad;
  module->linear->weight.copy_(at::tensor({0.3, -0.2, 0.1, 0.4}).view({2, 2}));
  Task task =
      TaskOf<data::Batch>("line", module, [module](data::Batch& batch, const StepContext& context) {
        const at::Tensor output = module->forward(batch.input);
        const at::Tensor loss = torch::nn::functional::cross_entropy(output, batch.target);
        context.Update("margin", (output.select(1, 1) - output.select(1, 0)).abs());
        return StepOutput{.loss = Mean(loss, batch.input.size(0)),
                          .predictions = data::AnyBatch(Outputs{output, batch.target})};
      });
  task.metrics = [] {
    return std::vector<std::shared_ptr<metrics::Metric>>{std::make_shared<metrics::Mean>("margin"),
                                                         std::make_shared<metrics::Auc>()};
  };
  task.metric_names = {"f1", "top1", "confusion"};
  return task;
}

// What rank 0 and all others get.
absl::StatusOr<Evaluation> EvaluateOn(int world_size, const Task& task,
                                      const data::AnyDataset& dataset) {
  std::vector<absl::StatusOr<Evaluation>> all(world_size, absl::UnknownError("not run"));
  RunRanks(world_size, [&](const session::Session& session) {
    all[session.rank()] = Evaluate(session, task, dataset, {.batch_size = 7});
    if (!all[session.rank()].ok()) {
      session.ShareFailure(all[session.rank()].status()).IgnoreError();
    }
  });
  for (const auto& each : all) {
    EXPECT_EQ(each.ok(), all[0].ok()) << each.status() << all[0].status();
    if (each.ok() && all[0].ok()) {
      EXPECT_EQ(each->metrics, all[0]->metrics);
      EXPECT_EQ(each->table, all[0]->table);
    }
  }
  return all[0];
}

TEST(MetricsTest, AreExactOverRanksWithUnequalDataAndWithout) {
  const Task task = TaskWithMetrics();  // one model for all: its parameters are random
  for (const int64_t n : {101, 2}) {
    const auto alone = EvaluateOn(1, task, Halves(n));
    ASSERT_TRUE(alone.ok()) << alone.status();
    Values values = alone->metrics;
    EXPECT_EQ(values.erase("margin"), 1);
    for (const char* name : {"auc", "f1_macro", "f1_micro", "f1_weighted", "accuracy_top1"}) {
      EXPECT_EQ(values.count(name), 1) << name;
    }
    EXPECT_TRUE(StrContains(alone->table, "precision")) << alone->table;
    EXPECT_EQ(alone->examples, n);
    for (const int world_size : {2, 3}) {
      const auto together = EvaluateOn(world_size, task, Halves(n));
      ASSERT_TRUE(together.ok()) << together.status();
      Values same = together->metrics;
      // A sum of floating-point numbers depends on their order in its last digits.
      EXPECT_NEAR(same.at("margin"), alone->metrics.at("margin"), 1e-12);
      EXPECT_EQ(same.erase("margin"), 1);
      EXPECT_EQ(same, values) << world_size << " ranks, " << n << " examples";
      EXPECT_EQ(together->table, alone->table);
    }
  }
}

TEST(MetricsTest, WhatDoesNotFitIsSaid) {
  const auto error = [](Task task) {
    const auto result = EvaluateOn(2, task, Halves(30));
    return result.ok() ? "none" : std::string(result.status().message());
  };
  Task task = TaskWithMetrics();
  task.metric_names = {"top3"};
  EXPECT_TRUE(StrContains(error(task), "task 'line': metric 'top3' is not one of outputs of 2"))
      << error(task);
  task.metric_names = {"auc"};
  EXPECT_TRUE(StrContains(error(task), "two of the metrics have a value 'auc'")) << error(task);
  task = TaskWithMetrics();
  task.eval_step = [step = task.train_step](data::AnyBatch& batch, const StepContext& context) {
    StepOutput output = step(batch, context);
    output.predictions = data::AnyBatch();
    return output;
  };
  EXPECT_TRUE(StrContains(error(task), "has got nothing of a batch")) << error(task);
  task.metric_names.clear();
  EXPECT_TRUE(StrContains(error(task), "metric 'auc' has got nothing of a batch")) << error(task);
  task.metrics = nullptr;
  EXPECT_TRUE(StrContains(error(task), "updates a metric 'margin', but Task::metrics has none"))
      << error(task);
  task.eval_step = [](auto&, const auto&) { return StepOutput{}; };
  EXPECT_TRUE(absl::EndsWith(error(task), "evaluation step has given no loss")) << error(task);
  task.eval_step = [](auto&, const auto&) {
    const SumAndCount one = Mean(at::ones({}), 1);
    return StepOutput{.loss = one, .metrics = {{"loss", one}}};
  };
  EXPECT_TRUE(StrContains(error(task), "step gives a metric 'loss', which")) << error(task);
}

// Before an epoch, after which nothing would be saved.
TEST(MetricsTest, PredictionsThatATaskDoesNotGiveAreRefusedBeforeTheFirstStep) {
  TrainerOptions options = Quiet();
  options.predictions = FolderFor("predictions") + "/file";
  options.on_step = [](int64_t, const at::Tensor&) {
    ADD_FAILURE() << "a step was taken";
    return StepAction::kStop;
  };
  for (const bool dry_run : {false, true}) {
    options.dry_run = dry_run;
    RunRanks(2, [&](const session::Session& session) {
      const auto module = std::make_shared<Line>();
      const Task task =
          TaskOf<data::Batch>("line", module, [module](data::Batch& batch, const StepContext&) {
            const at::Tensor output = module->forward(batch.input);
            return StepOutput{
                .loss = Mean(torch::nn::functional::cross_entropy(output, batch.target), 1)};
          });
      const auto report = Train(session, task, Halves(64), Halves(30), options);
      EXPECT_TRUE(StrContains(report.status().message(),
                              "file cannot be written: the evaluation step of this task gives "
                              "no predictions"))
          << report.status();
    });
  }
}

class Seen final : public metrics::Metric {
 public:
  Seen() : Metric("seen"), examples_(AddSums(at::zeros({1}, at::kLong))) {}
  std::map<std::string, double> Values() const override {
    return {{name(), examples_.item<double>()}};
  }

 private:
  absl::Status Accumulate(const at::Tensor&, const at::Tensor& target) override {
    examples_ += target.numel();
    return absl::OkStatus();
  }
  at::Tensor& examples_;
};

// Of the batches in which it does not, the metric gets the predictions.
TEST(MetricsTest, AStepMayUpdateAMetricInSomeBatches) {
  Task task = TaskWithMetrics();
  task.metric_names.clear();
  task.metrics = [] {
    return std::vector<std::shared_ptr<metrics::Metric>>{std::make_shared<Seen>()};
  };
  task.eval_step = [step = task.train_step](data::AnyBatch& batch, const StepContext& context) {
    StepContext quiet = context;
    quiet.update = nullptr;
    StepOutput output = step(batch, quiet);
    const auto& outputs = output.predictions.Get<Outputs>();
    if (batch.indices()[0] == 0) context.Update("seen", outputs.output, outputs.target);
    return output;
  };
  const auto evaluated = EvaluateOn(1, task, Halves(28));  // 4 batches of 7
  ASSERT_TRUE(evaluated.ok()) << evaluated.status();
  EXPECT_EQ(evaluated->metrics.at("seen"), 28);
}

struct Result {
  std::vector<absl::StatusOr<Report>> reports;
  std::vector<at::Tensor> parameters;  // and buffers, of rank 0
  const Report& report() const { return *reports[0]; }
};

struct Setting {
  const char* name;
  int world_size = 2;
  double dropout = 0;
  bool broadcast_buffers = true;
  int64_t zero_stage = 0;
  bool even_batches = true;
};

void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

// Evaluations draw random numbers. `validation`: of its own; null: none, or held out.
Result TrainRanks(const Setting& setting, const TrainerOptions& options,
                  const data::AnyDataset* validation = nullptr, int64_t examples = kExamples,
                  const std::function<void(Task&)>& change = nullptr) {
  Result result;
  result.reports.assign(setting.world_size, absl::UnknownError("not run"));
  RunRanks(setting.world_size, [&](const session::Session& session) {
    Task task = NetTask(setting.dropout);
    const auto count = task.correct;
    task.correct = [count](const at::Tensor& output, const at::Tensor& target) {
      return count(output + at::rand({1}).mul(0), target);
    };
    if (change) change(task);
    const Halves train(examples), test(50);
    absl::StatusOr<Report>& report = result.reports[session.rank()];
    report = validation == nullptr ? Train(session, task, train, test, options)
                                   : Train(session, task, train, *validation, test, options);
    if (!report.ok() || !session.is_main()) return;
    for (const at::Tensor& tensor : task.module->parameters()) {
      result.parameters.push_back(tensor.detach().clone());
    }
    for (const at::Tensor& tensor : task.module->buffers()) {
      result.parameters.push_back(tensor.clone());
    }
  });
  return result;
}

Result Trained(const Setting& setting, const TrainerOptions& options,
               const data::AnyDataset* validation = nullptr, int64_t examples = kExamples) {
  Result result = TrainRanks(setting, options, validation, examples);
  for (const auto& report : result.reports) EXPECT_TRUE(report.ok()) << report.status();
  if (!result.reports[0].ok()) result.reports[0] = Report{};
  return result;
}

void ExpectSameBits(const Result& a, const Result& b) {
  ASSERT_EQ(a.parameters.size(), b.parameters.size());
  for (size_t i = 0; i < a.parameters.size(); ++i) {
    EXPECT_TRUE(at::equal(a.parameters[i], b.parameters[i])) << i;
  }
}

TrainerOptions OptionsOf(const Setting& setting, const std::string& name) {
  TrainerOptions options = Quiet();
  options.epochs = 3;
  options.optimizer = {.name = "adam", .lr = 0.01};
  options.ema = {.decay = 0.9, .eval = true};
  options.zero.stage = setting.zero_stage;
  options.zero.overlap_gather = true;
  options.even_batches = setting.even_batches;
  options.drop_last = !setting.even_batches;
  options.data_parallel.broadcast_buffers = setting.broadcast_buffers;
  options.checkpoint.manager.directory = FolderFor(name);
  options.log.dir = FolderFor(name + "_log");
  options.validation_size = 70;
  return options;
}

class ValidationTest : public testing::TestWithParam<Setting> {};

INSTANTIATE_TEST_SUITE_P(, ValidationTest,
                         testing::Values(Setting{"dropout", 1, 0.3}, Setting{"ranks"},
                                         Setting{"buffers", 2, 0, false},
                                         Setting{"zero", 2, 0, true, 2},
                                         Setting{"uneven", 3, 0, true, 0, false}),
                         [](const auto& info) { return info.param.name; });

TEST_P(ValidationTest, WithinAnEpochDoesNotChangeTheRun) {
  TrainerOptions options = OptionsOf(GetParam(), "seldom");
  options.validate.every = 0;
  const Result seldom = Trained(GetParam(), options);
  EXPECT_EQ(Logged(options.log.dir, "val/loss").size(), 1);
  EXPECT_EQ(Logged(options.log.dir, "test/loss").size(), 1);
  EXPECT_EQ(seldom.report().validation.examples, 70);
  for (const bool by_time : {false, true}) {
    options = OptionsOf(GetParam(), "often");
    options.validate.every_steps = by_time ? 0 : 2;
    options.validate.every_minutes = by_time ? 1e-6 : 0;
    const Result often = Trained(GetParam(), options);
    EXPECT_GT(Logged(options.log.dir, "val/loss").size(), 6) << by_time;
    EXPECT_EQ(Logged(options.log.dir, "test/loss").size(), 1);
    ExpectSameBits(seldom, often);
    EXPECT_EQ(often.report().validation.loss, seldom.report().validation.loss);
    EXPECT_EQ(often.report().test.loss, seldom.report().test.loss);
  }
}

// Raises a signal as its n-th batch is loaded. An example that is tried alone before is none.
class SignalInGet final : public Halves {
 public:
  explicit SignalInGet(int after) : Halves(40), left_(after) {}
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    if (indices.size() > 1 && --left_ == 0) raise(SIGUSR1);
    return Halves::Get(indices);
  }

 private:
  mutable std::atomic<int> left_;
};

// Early stopping and plateau count each validation once.
TEST_P(ValidationTest, StoppedInItAndResumedIsTheUninterruptedRun) {
  const auto options_of = [](const std::string& name) {
    TrainerOptions options = OptionsOf(GetParam(), name);
    options.validation_size = 0;
    options.validate.every_steps = 3;
    options.checkpoint.every_steps = 3;
    options.schedule = {.name = "plateau"};
    options.schedule.plateau = {.metric = "val/loss", .factor = 0.5, .patience = 1};
    options.early_stopping = {.metric = "val/accuracy:max", .patience = 6, .min_delta = 0.01};
    options.checkpoint.manager.keep_best = "val/loss:min";
    options.checkpoint.manager.keep_last = 100;
    return options;
  };
  TrainerOptions options = options_of("whole");
  const Halves validation(40);
  const Result whole = Trained(GetParam(), options, &validation);
  const auto losses = Logged(options.log.dir, "val/loss");
  ASSERT_GT(losses.size(), 5);
  // 40 examples on 1, 2 or 3 ranks are 2 batches of 30 or less, or one on each.
  int stops = 0;
  for (const int batch : {1, 4, 10}) {
    options = options_of("stopped");
    const SignalInGet stopping(batch);
    Result stopped = Trained(GetParam(), options, &stopping);
    EXPECT_EQ(stopped.report().end.Name(), "signal USR1");
    EXPECT_NE(stopped.report().end.saved, "");
    stops += stopped.report().steps < whole.report().steps;
    EXPECT_LT(Logged(options.log.dir, "val/loss").size(), losses.size());
    options.checkpoint.resume = "auto";
    const Result resumed = Trained(GetParam(), options, &validation);
    ExpectSameBits(whole, resumed);
    EXPECT_EQ(resumed.report().steps, whole.report().steps);
    EXPECT_EQ(resumed.report().end.why, whole.report().end.why);
    EXPECT_EQ(Logged(options.log.dir, "val/loss"), losses) << batch;
  }
  EXPECT_EQ(stops, 3);
}

const Setting kTwoRanks{"ranks"};

// Early stopping counts it as the run does that was not stopped.
TEST(ValidationDataTest, ARunThatRollsBackToAStopInAValidationMakesItAgain) {
  const Halves validation(40);
  const auto options_of = [](const std::string& name) {
    TrainerOptions options = OptionsOf(kTwoRanks, name);
    options.epochs = 1;
    options.validation_size = 0;
    options.validate = {.every = 0, .every_steps = 3};
    options.checkpoint.every_steps = 3;
    options.early_stopping = {.metric = "val/accuracy:max", .patience = 2, .min_delta = 10};
    options.guard = {.on_anomaly = "rollback", .anomaly_deviations = 0};
    return options;
  };
  // A run's loss is NaN in one batch on each rank, the `nth` that it trains with.
  const auto trained = [](const TrainerOptions& options, const data::AnyDataset& validation,
                          int64_t nth) {
    Result result = TrainRanks(kTwoRanks, options, &validation, kExamples, [nth](Task& task) {
      task.loss = [loss = task.loss, batches = std::make_shared<int64_t>(0), nth](
                      const at::Tensor& output, const at::Tensor& target) {
        const at::Tensor value = loss(output, target);
        return output.requires_grad() && ++*batches == nth ? value * std::nan("") : value;
      };
    });
    for (const auto& report : result.reports) EXPECT_TRUE(report.ok()) << report.status();
    if (!result.reports[0].ok()) result.reports[0] = Report{};
    return result;
  };
  TrainerOptions options = options_of("whole");
  const Result whole = trained(options, validation, 5);
  EXPECT_EQ(whole.report().steps, 9);  // the third validation is the second without a gain
  EXPECT_EQ(whole.report().end.Name(), "callback");

  options = options_of("stopped");
  const Result stopped = trained(options, SignalInGet(1), 5);
  EXPECT_EQ(stopped.report().steps, 3);
  EXPECT_EQ(stopped.report().end.Name(), "signal USR1");
  options.checkpoint.resume = "auto";
  const Result resumed = trained(options, validation, 2);  // in step 5, too
  EXPECT_EQ(resumed.report().steps, 9);
  EXPECT_EQ(resumed.report().end.why, whole.report().end.why);
  ExpectSameBits(whole, resumed);
  // Each validation is in the log once.
  std::vector<std::string> steps;
  const std::string log = *ReadFile(options.log.dir + "/metrics.jsonl");
  for (const absl::string_view line : absl::StrSplit(log, '\n')) {
    if (StrContains(line, "\"val/loss\"")) {
      steps.emplace_back(line.substr(0, line.find(',')));
    }
  }
  EXPECT_EQ(steps, (std::vector<std::string>{"{\"step\":3", "{\"step\":6", "{\"step\":9"}));
  EXPECT_TRUE(StrContains(log, "\"event\":\"anomaly\"")) << log;
}

// After so many minutes since the last time, or since the run's begin; also at an epoch's last
// step.
TEST(ValidationDataTest, IsEvaluatedByTheClock) {
  const auto steps = [](double minutes, const std::function<void(int64_t)>& in_step) {
    TrainerOptions options = OptionsOf({"one", 1}, "run");
    options.validate = {.every = 0, .every_minutes = minutes};
    options.on_step = [&](int64_t step, const at::Tensor&) {
      in_step(step);
      return StepAction::kContinue;
    };
    Trained({"one", 1}, options);
    std::set<int64_t> steps;
    for (const auto& [step, loss] : Logged(options.log.dir, "val/loss")) steps.insert(step);
    return steps;
  };
  // 260 examples, 17 steps in each of 3 epochs.
  EXPECT_EQ(steps(1e-9, [](int64_t) {}).size(), 51);
  EXPECT_EQ(steps(1000, [](int64_t) {}), (std::set<int64_t>{51}));
  // The time begins anew.
  const auto once = steps(2. / 60, [](int64_t step) {
    if (step == 3) absl::SleepFor(absl::Seconds(2));
  });
  EXPECT_TRUE(once.contains(3));
  EXPECT_LT(once.size(), 20);
}

TEST(ValidationDataTest, IsEvaluatedEveryNthEpochAndAtTheEnd) {
  TrainerOptions options = OptionsOf(kTwoRanks, "run");
  options.validate.every = 2;
  options.checkpoint.manager.keep_best = "val/accuracy:max";
  const Result result = Trained(kTwoRanks, options);
  std::set<int64_t> steps;
  for (const auto& [step, loss] : Logged(options.log.dir, "val/loss")) steps.insert(step);
  EXPECT_EQ(steps, (std::set<int64_t>{18, 27}));  // of 260 examples, 9 per epoch
  steps.clear();
  for (const auto& [step, loss] : Logged(options.log.dir, "test/loss")) steps.insert(step);
  EXPECT_EQ(steps, (std::set<int64_t>{27}));
  EXPECT_EQ(result.report().best_by, "val/accuracy");
  const std::string summary = Summary(result.report(), 1);
  const std::string folder = options.checkpoint.manager.directory;
  EXPECT_TRUE(StrContains(summary, absl::StrCat("best checkpoint ", folder, "/epoch_"))) << summary;
  EXPECT_TRUE(StrContains(summary, ".pt by val/accuracy\n")) << summary;
  EXPECT_TRUE(StrContains(summary, absl::StrCat("last checkpoint ", folder, "/epoch_3.pt\n")))
      << summary;
  EXPECT_TRUE(StrContains(summary, "\nval accuracy ")) << summary;

  // A choice by test data is said.
  options = OptionsOf(kTwoRanks, "by_test");
  options.validation_size = 0;
  options.checkpoint.manager.keep_best = "test/accuracy:max";
  options.schedule = {.name = "plateau"};  // by test/loss
  const std::string by_test = Summary(Trained(kTwoRanks, options).report(), 1);
  for (const char* choice : {".pt by test/accuracy", "\nschedule.plateau.metric test/loss"}) {
    EXPECT_TRUE(StrContains(
        by_test, absl::StrCat(choice, " (chosen by test data: on other data expect less)\n")))
        << by_test;
  }
}

// Also if no epoch before was to be validated: it is judged before it is saved.
TEST(ValidationDataTest, TheLastEpochsCheckpointHasItsValidation) {
  TrainerOptions options = OptionsOf(kTwoRanks, "run");
  options.validate.every = 0;
  options.checkpoint.manager.keep_best = "val/loss:min";
  EXPECT_EQ(Trained(kTwoRanks, options).report().best_checkpoint,
            options.checkpoint.manager.directory + "/epoch_3.pt");
}

// Within an epoch, and at the end of one after which no evaluation is due.
TEST(ValidationDataTest, TheCheckpointOfTheLastStepHasItsEvaluation) {
  for (const auto& [max_steps, metric] : std::vector<std::pair<int64_t, std::string>>{
           {5, "val/loss"}, {9, "val/loss"}, {5, "test/loss"}}) {
    SCOPED_TRACE(absl::StrCat(max_steps, " ", metric));
    TrainerOptions options = OptionsOf(kTwoRanks, "run");
    if (metric == "val/loss") {
      options.validate.every = 0;
    } else {
      options.validation_size = 0;
    }
    options.max_steps = max_steps;
    options.checkpoint.every_steps = max_steps;
    options.checkpoint.manager.keep_best = metric + ":min";
    const Report report = Trained(kTwoRanks, options).report();
    EXPECT_EQ(report.end.Name(), "max_steps");
    EXPECT_EQ(report.epochs, max_steps == 9 ? 1 : 0);
    EXPECT_NE(report.best_checkpoint, "");
    EXPECT_EQ(report.best_checkpoint, report.last_checkpoint);
    EXPECT_EQ(Logged(options.log.dir, metric).count(max_steps), 1);
  }
  // What was saved before its evaluation is no candidate.
  TrainerOptions options = OptionsOf(kTwoRanks, "without");
  options.stop_at_step = 5;
  Trained(kTwoRanks, options);
  options.stop_at_step = 0;
  options.max_steps = 5;
  options.checkpoint.resume = "auto";
  options.checkpoint.manager.keep_best = "val/loss:min";
  testing::internal::CaptureStderr();
  const Report report = Trained(kTwoRanks, options).report();
  const std::string printed = testing::internal::GetCapturedStderr();
  EXPECT_EQ(report.best_checkpoint, "");
  EXPECT_TRUE(StrContains(printed,
                          "keep_best=val/loss:min: there is no best checkpoint: no checkpoint in "))
      << printed;
  EXPECT_TRUE(StrContains(printed, "has a value of val/loss; none has any metric")) << printed;
}

// And one within an epoch that of its own step: the least loss and the greatest are not in one.
TEST(ValidationDataTest, ACheckpointWithinAnEpochHasTheValidationOfItsStep) {
  std::set<std::string> best;
  for (const std::string direction : {"min", "max"}) {
    TrainerOptions options = OptionsOf(kTwoRanks, "run");
    options.epochs = 1;
    options.validate.every_steps = 4;
    options.checkpoint.every_steps = 4;
    options.checkpoint.manager.keep_best = "val/loss:" + direction;
    best.insert(Trained(kTwoRanks, options).report().best_checkpoint);
  }
  EXPECT_EQ(best.size(), 2);
}

class CountsValidations final : public Callback {
 public:
  std::string name() const override { return "counts_validations"; }
  absl::Status OnEvaluationEnd(CallbackContext&, const Values& metrics) override {
    count += metrics.contains("val/loss") ? 1 : 0;
    return absl::OkStatus();
  }
  int count = 0;
};

// The checkpoint was saved after the validation of its step.
TEST(ValidationDataTest, AResumedRunDoesNotValidateItsStepAgain) {
  const Setting one{"one", 1};
  TrainerOptions options = OptionsOf(one, "run");
  options.validate = {.every = 0, .every_steps = 5};
  const auto counter = std::make_shared<CountsValidations>();
  options.callbacks = {counter};
  options.stop_at_step = 5;
  Trained(one, options);
  EXPECT_EQ(counter->count, 1);
  options.stop_at_step = 6;
  options.checkpoint.resume = "auto";
  EXPECT_EQ(Trained(one, options).report().steps, 6);
  EXPECT_EQ(counter->count, 2);  // after step 6, where the run stops
}

TEST(ValidationDataTest, APartIsHeldOutByTheSeed) {
  const Halves all(100);
  const auto [rest, last] = data::RandomSplit(all, 30, 1);
  std::set<int64_t> indices(rest.indices().begin(), rest.indices().end());
  EXPECT_EQ(indices.size(), 70);
  indices.insert(last.indices().begin(), last.indices().end());
  EXPECT_EQ(indices.size(), 100);
  EXPECT_EQ(data::RandomSplit(all, 30, 1).second.indices(), last.indices());
  EXPECT_NE(data::RandomSplit(all, 30, 2).second.indices(), last.indices());
  data::AnyBatch batch = last.GetAny({3, 0}, {});
  EXPECT_TRUE(at::equal(batch.Get<data::Batch>().input,
                        all.Get({last.indices()[3], last.indices()[0]}).input));

  TrainerOptions options = OptionsOf(kTwoRanks, "run");
  options.validation_size = 0.1;
  options.epochs = 1;
  EXPECT_EQ(Trained(kTwoRanks, options).report().validation.examples, 33);
  options.epochs = 2;
  options.checkpoint.resume = "auto";
  TrainerOptions other = options;
  other.seed = 1;
  EXPECT_TRUE(StrContains(TrainRanks(kTwoRanks, other).reports[0].status().message(),
                          "seed=1 is not that of the checkpoint, 0: other examples would be held"))
      << TrainRanks(kTwoRanks, other).reports[0].status();
  other = options;
  other.validation_size = 40;
  EXPECT_TRUE(StrContains(TrainRanks(kTwoRanks, other).reports[0].status().message(),
                          "validation_size=40 is not that of the checkpoint, 33"));
  // A larger set is divided otherwise, though the number is the same.
  other.validation_size = 33;
  const absl::Status grown =
      TrainRanks(kTwoRanks, other, nullptr, kExamples + 50).reports[0].status();
  EXPECT_TRUE(StrContains(grown.message(), "validation_size=33 would hold out other examples"))
      << grown;
  EXPECT_EQ(Trained(kTwoRanks, options).report().epochs, 2);

  // A run that has held out none has trained on all.
  options = OptionsOf(kTwoRanks, "none");
  options.validation_size = 0;
  options.epochs = 1;
  Trained(kTwoRanks, options);
  options.validation_size = 33;
  options.epochs = 2;
  options.checkpoint.resume = "auto";
  const absl::Status trained_on = TrainRanks(kTwoRanks, options).reports[0].status();
  EXPECT_TRUE(StrContains(trained_on.message(),
                          "validation_size=33 would hold out examples that the checkpoint's run "
                          "has trained on"))
      << trained_on;
}

// Counts what is read of it, and for evaluation.
class Shaken final : public data::Dataset, public data::EvaluatedOtherwise {
 public:
  int64_t size() const override { return 100; }
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    read += static_cast<int64_t>(indices.size());
    return plain_.Get(indices);
  }
  const data::AnyDataset& for_evaluation() const override { return plain_; }

  mutable std::atomic<int64_t> read = 0;

 private:
  const Halves plain_{100};
};

TEST(ValidationDataTest, WhatIsHeldOutIsReadForEvaluation) {
  TrainerOptions options = Quiet();
  options.validation_size = 30;
  const Shaken train;
  RunRanks(1, [&](const session::Session& session) {
    const auto report = Train(session, LineTask(), train, Halves(10), options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->validation.examples, 30);
  });
  // And two before the training, which show whether the data set draws from torch's generator.
  EXPECT_EQ(train.read.load(), options.epochs * 70 + 2);
}

TEST(ValidationDataTest, BesideThemThereMayBeNoTestData) {
  const auto train = [](const TrainerOptions& options, bool validates) {
    absl::StatusOr<Report> result = absl::UnknownError("not run");
    RunRanks(2, [&](const session::Session& session) {
      const Halves all(64), validation(20), none(0);
      auto report = validates ? Train(session, LineTask(), all, validation, none, options)
                              : Train(session, LineTask(), all, none, options);
      if (session.is_main()) result = std::move(report);
    });
    return result;
  };
  TrainerOptions options = Quiet();
  options.checkpoint.manager.directory = FolderFor("run");
  for (const bool eval_only : {false, true}) {
    options.eval_only = eval_only;
    options.checkpoint.resume = eval_only ? "auto" : "";
    const auto report = train(options, true);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->epochs, 2);
    EXPECT_EQ(report->validation.examples, 20);
    EXPECT_EQ(report->test.examples, 0);
    EXPECT_TRUE(StrContains(Summary(*report, 1), "test not evaluated"));
  }
  options = Quiet();
  options.on_step = [](int64_t, const at::Tensor&) -> StepAction {
    ADD_FAILURE() << "a step was taken";
    return StepAction::kStop;
  };
  EXPECT_TRUE(StrContains(train(options, false).status().message(),
                          "the test data have no examples, and there are no validation data"))
      << train(options, false).status();
  options.predictions = FolderFor("predictions") + "/file";
  EXPECT_TRUE(StrContains(train(options, true).status().message(),
                          "file is of the test data, which have no examples"))
      << train(options, true).status();
}

TEST(ValidationDataTest, OptionsThatCannotMeanAnythingAreRefused) {
  const Halves validation(40);
  const auto error = [&](const std::function<void(TrainerOptions&)>& change,
                         bool with_validation = false) {
    TrainerOptions options = Quiet();
    change(options);
    const auto report = TrainRanks(kTwoRanks, options, with_validation ? &validation : nullptr);
    return report.reports[0].ok() ? "none" : std::string(report.reports[0].status().message());
  };
  const std::vector<std::pair<std::string, std::string>> errors = {
      {error([](TrainerOptions& options) { options.validate.every_steps = 5; }),
       "validate.every_steps=5 has no effect without validation data"},
      {error([](TrainerOptions& options) { options.validate.every = 2; }),
       "validate.every=2 has no effect without validation data"},
      {error([](TrainerOptions& options) {
         options.checkpoint.manager.directory = FolderFor("none");
         options.checkpoint.manager.keep_best = "val/accuracy:max";
       }),
       "checkpoint.keep_best=val/accuracy is of validation data, of which there are none"},
      {error(
           [](TrainerOptions& options) { options.checkpoint.manager.keep_best = "test/loss:min"; }),
       "checkpoint.keep_best=test/loss:min has no effect without a folder for checkpoints"},
      {error([](TrainerOptions& options) {
         options.checkpoint.manager.directory = FolderFor("none");
         options.checkpoint.resume = "best";
       }),
       "checkpoint.resume=best needs keep_best"},
      {error([](TrainerOptions& options) { options.checkpoint.async = true; }),
       "checkpoint.async=true has no effect without a folder for checkpoints"},
      {error([](TrainerOptions& options) { options.checkpoint.every = 5; }),
       "checkpoint.every=5 has no effect without a folder for checkpoints"},
      {error([](TrainerOptions& options) { options.checkpoint.manager.keep_last = 2; }),
       "checkpoint.keep_last=2 has no effect without a folder for checkpoints"},
      {error([](TrainerOptions& options) { options.checkpoint.every = 0; }), "none"},
      {error([](TrainerOptions& options) {
         options.checkpoint.manager.directory = FolderFor("none");
         options.checkpoint.manager.keep_best = "train/loss:min";
       }),
       "checkpoint.keep_best=train/loss is no value of an evaluation: these begin with test/"},
      {error([](TrainerOptions& options) { options.early_stopping.metric = "test/loss:min"; },
             true),
       "early_stopping.metric=test/loss is of the test data, which are evaluated at the run's end "
       "alone, since there are validation data: use val/loss"},
      {error([](TrainerOptions& options) { options.early_stopping.metric = "accuracy:max"; }),
       "early_stopping.metric=accuracy is no value of an evaluation"},
      {error([](TrainerOptions& options) { options.schedule.name = "plateau"; }, true),
       "schedule.plateau.metric=test/loss is of the test data"},
      {error([](TrainerOptions& options) { options.early_stopping.patience = 4; }),
       "early_stopping.patience=4 has no effect without early_stopping.metric"},
      {error([](TrainerOptions& options) { options.early_stopping.min_delta = 0.5; }),
       "early_stopping.min_delta=0.5 has no effect without early_stopping.metric"},
      {error([](TrainerOptions& options) {
         options.checkpoint.manager.directory = FolderFor("none");
         options.checkpoint.check_staging = true;
       }),
       "checkpoint.check_staging=true has no effect without checkpoint.async or checkpoint.cont"},
      {error([](TrainerOptions& options) {
         options.checkpoint.manager.directory = FolderFor("none");
         options.checkpoint.every = 0;
         options.guard.on_anomaly = "rollback";
       }),
       "guard.on_anomaly=rollback needs checkpoints to go back to, and checkpoint.every=0 alone"},
      {error([](TrainerOptions& options) { options.guard.anomaly_deviations = 3; }),
       "guard.anomaly_deviations=3 has no effect without guard.on_anomaly"},
      {error([](TrainerOptions& options) { options.guard.anomaly_window = 10; }),
       "guard.anomaly_window=10 has no effect without guard.on_anomaly"},
      {error([](TrainerOptions& options) { options.validation_size = 330; }),
       "validation_size=330 leaves nothing of 330 examples"},
      {error([](TrainerOptions& options) { options.validation_size = 1.5; }),
       "validation_size=1.5 is neither a whole number of examples nor a part below 1"},
      {error([](TrainerOptions& options) { options.validation_size = 10; }, true),
       "validation_size=10 is given, but so are validation data"},
      {error([](TrainerOptions& options) {
         options.validation_size = 10;
         options.sampler = data::SequentialSampler(kExamples).value();
       }),
       "validation_size=10 does not go with the program's own sampler"},
      {error([](TrainerOptions& options) {
         options.metrics = {"f1", "ouc"};
       }),
       "metrics=ouc is none of auc, confusion, f1, perplexity, top5 (or another number); did you "
       "mean auc?"},
      {error([](TrainerOptions& options) {
         options.metrics = {"f1", "f1"};
       }),
       "metrics=f1 is given twice"},
  };
  for (const auto& [said, expected] : errors) EXPECT_TRUE(StrContains(said, expected)) << said;
}

// Before the first step, and not after the first epoch.
TEST(ValidationDataTest, AValueThatNoEvaluationHasIsAnErrorAtOnce) {
  const Halves validation(40);
  const auto error = [&](const std::function<void(TrainerOptions&)>& change, bool validates) {
    TrainerOptions options = Quiet();
    options.on_step = [](int64_t, const at::Tensor&) -> StepAction {
      ADD_FAILURE() << "a step was taken";
      return StepAction::kStop;
    };
    change(options);
    const auto report = TrainRanks(kTwoRanks, options, validates ? &validation : nullptr);
    return report.reports[0].ok() ? "none" : std::string(report.reports[0].status().message());
  };
  EXPECT_TRUE(StrContains(
      error([](auto& options) { options.early_stopping.metric = "test/acuracy:max"; }, false),
      "early_stopping.metric=test/acuracy is no value of this run's evaluation, which has "
      "test/accuracy, test/loss; did you mean test/accuracy?"));
  EXPECT_TRUE(StrContains(error(
                              [](auto& options) {
                                options.schedule = {.name = "plateau"};
                                options.schedule.plateau.metric = "val/auc";
                              },
                              true),
                          "schedule.plateau.metric=val/auc is no value of this run's evaluation"));
  EXPECT_TRUE(StrContains(error(
                              [](auto& options) {
                                options.checkpoint.manager.directory = FolderFor("none");
                                options.checkpoint.manager.keep_best = "val/f1:max";
                              },
                              true),
                          "checkpoint.keep_best=val/f1 is no value"));
}

TEST(ValidationDataTest, MetricsAreInLogsChecksAndSummary) {
  TrainerOptions options = OptionsOf(kTwoRanks, "run");
  options.metrics = {"auc", "f1", "confusion"};
  options.validate.every_steps = 4;
  options.checkpoint.every_steps = 4;
  options.checkpoint.manager.keep_best = "val/auc:max";
  options.early_stopping = {.metric = "val/f1_macro:max", .patience = 1};
  const Result result = Trained(kTwoRanks, options);
  const auto auc = Logged(options.log.dir, "val/auc");
  EXPECT_GE(auc.size(), 2);
  EXPECT_EQ(Logged(options.log.dir, "val/f1_macro").size(), auc.size());
  EXPECT_EQ(Logged(options.log.dir, "test/auc").size(), 1);
  EXPECT_EQ(result.report().test.metrics.count("f1_weighted"), 1);
  // A checkpoint within an epoch has the values of a validation after the same step.
  EXPECT_NE(result.report().best_checkpoint, "");
  const std::string summary = Summary(result.report(), 1);
  EXPECT_TRUE(absl::StartsWith(summary, "class ")) << summary;
  EXPECT_EQ(summary.find("precision"), summary.rfind("precision")) << summary;
}

TEST(DryRunTest, LeavesNothing) {
  const std::string root = FolderFor("root");
  ASSERT_TRUE(MakeDirectories(root).ok());
  TrainerOptions options = OptionsOf(kTwoRanks, "unused");
  options.checkpoint.manager.directory = root + "/a/checkpoints";
  options.log.dir = root + "/a/log";
  options.predictions = root + "/a/predictions.jsonl";
  options.dry_run = true;
  std::atomic<int> steps = 0;
  options.on_step = [&](int64_t, const at::Tensor&) {
    ++steps;
    return StepAction::kContinue;
  };
  options.log.every = 1;
  options.eval_batch_size = 5;
  Result result = Trained(kTwoRanks, options);
  EXPECT_EQ(steps.load(), 2 * 2);
  EXPECT_EQ(result.report().end.Name(), "end");
  const std::string summary = Summary(result.report(), 1);
  EXPECT_TRUE(absl::StartsWith(summary,
                               "dry run: 2 steps, evaluated 20 validation and 20 test examples, "
                               "saved epoch_0_step_2.pt and removed it\nval accuracy "))
      << summary;
  EXPECT_EQ(Names(root), std::set<std::string>());

  // Beside the checkpoints of a run, from which it goes on, or which it must not overwrite.
  options.dry_run = false;
  options.epochs = 1;
  Trained(kTwoRanks, options);
  const std::set<std::string> before = Names(root);
  options.dry_run = true;
  options.epochs = 2;
  EXPECT_TRUE(StrContains(TrainRanks(kTwoRanks, options).reports[0].status().message(),
                          "holds a run's checkpoints"));
  options.checkpoint.resume = "auto";
  options.checkpoint.async = true;
  options.checkpoint.every_steps = 1;
  EXPECT_EQ(Trained(kTwoRanks, options).report().steps, 11);
  EXPECT_EQ(Names(root), before);

  // What is only evaluated is not saved.
  TrainerOptions evaluates = options;
  evaluates.eval_only = true;
  EXPECT_TRUE(StrContains(Trained(kTwoRanks, evaluates).report().dry_run, ", saved nothing"));
  evaluates.early_stopping.metric = "test/los:min";
  EXPECT_TRUE(StrContains(TrainRanks(kTwoRanks, evaluates).reports[0].status().message(),
                          "early_stopping.metric=test/los is no value of this run's evaluation"));

  // Also after a failure, in the save and in an evaluation.
  options.checkpoint.save.callback = [](checkpoint::State&) { throw std::runtime_error("no"); };
  EXPECT_FALSE(TrainRanks(kTwoRanks, options).reports[0].ok());
  options.checkpoint.save.callback = nullptr;
  result = TrainRanks(kTwoRanks, options, nullptr, kExamples, [](Task& task) {
    task.correct = [](const at::Tensor&, const at::Tensor&) -> at::Tensor {
      throw std::runtime_error("the evaluation fails");
    };
  });
  EXPECT_TRUE(StrContains(result.reports[0].status().message(), "the evaluation fails"))
      << result.reports[0].status();
  EXPECT_EQ(Names(root), before);
}

}  // namespace
}  // namespace ddp::trainer
