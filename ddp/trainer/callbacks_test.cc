// Callbacks of a run: their events, errors and requests to stop; and the built-in ones.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/TensorOperators.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "checkpoint/manager.h"
#include "ddp/trainer/callback_list.h"
#include "ddp/trainer/callbacks/early_stopping.h"
#include "ddp/trainer/callbacks/ema.h"
#include "ddp/trainer/callbacks/monitors.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"
#include "torch/optim/sgd.h"

namespace ddp::trainer {
namespace {

using absl::StrContains;
using checkpoint::LoadNotes;
using checkpoint::State;
using Metrics = std::map<std::string, double>;

// Calls a function at each event, with its name; counts steps, which is its state.
class Probe final : public Callback, public checkpoint::Stateful {
 public:
  using Body = std::function<absl::Status(const std::string& event, CallbackContext& run)>;
  explicit Probe(Body body, std::string name = "probe")
      : body_(std::move(body)), name_(std::move(name)) {}

  std::string name() const override { return name_; }
  checkpoint::Stateful* stateful() override { return this; }
  absl::Status OnSetUp(CallbackContext& run) override { return body_("set_up", run); }
  absl::Status OnStart(CallbackContext& run) override { return body_("start", run); }
  absl::Status OnEpochBegin(CallbackContext& run) override { return body_("epoch", run); }
  absl::Status OnEpochEnd(CallbackContext& run) override { return body_("epoch_end", run); }
  absl::Status OnStepEnd(CallbackContext& run, const at::Tensor& loss) override {
    EXPECT_EQ(loss.dim(), 0);
    ++steps;
    return body_("step", run);
  }
  absl::Status OnEvaluationBegin(CallbackContext& run) override { return body_("evaluation", run); }
  absl::Status OnEvaluationEnd(CallbackContext& run, const Metrics& metrics) override {
    if (metrics.empty()) return body_("evaluation_given_up", run);
    EXPECT_EQ(metrics.count("test/accuracy"), 1);
    return body_("evaluation_end", run);
  }
  absl::Status OnSave(CallbackContext& run, const std::string& checkpoint) override {
    return body_(absl::StrCat("save ", checkpoint), run);
  }
  absl::Status OnEnd(CallbackContext& run) override { return body_("end", run); }
  void OnException(CallbackContext& run, const absl::Status& error) override {
    body_(absl::StrCat("exception ", error.message()), run).IgnoreError();
  }

  absl::StatusOr<State> state_dict() override {
    State state;
    state.root.insert("steps", steps);
    return state;
  }
  absl::Status CheckStateDict(const State&) const override { return absl::OkStatus(); }
  absl::Status load_state_dict(const State& state, LoadNotes&) override {
    steps = state.root.at("steps").toInt();
    return absl::OkStatus();
  }

  int64_t steps = 0;

 private:
  const Body body_;
  const std::string name_;
};

double Measure(const torch::nn::Module& module) {
  return static_cast<double>(module.parameters().size());
}

// docs/training_callbacks.md shows it.
class Chat final : public trainer::Callback {
 public:
  std::string name() const override { return "chat"; }
  absl::Status OnStepEnd(trainer::CallbackContext& run, const at::Tensor&) override {
    if (run.is_recorded()) run.Record("train/chat", Measure(run.module()));
    if (run.position().step == 1000) run.RequestStop("enough");
    return absl::OkStatus();
  }
};

class Slow final : public Halves {
 public:
  Slow(int64_t n, int64_t ms) : Halves(n), delay_(absl::Milliseconds(ms)) {}
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    absl::SleepFor(delay_);
    return Halves::Get(indices);
  }

 private:
  const absl::Duration delay_;
};

absl::Status Nothing(const std::string&, CallbackContext&) { return absl::OkStatus(); }

std::vector<at::Tensor> Copies(const torch::nn::Module& module) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& parameter : module.parameters()) {
    copies.push_back(parameter.detach().clone());
  }
  return copies;
}

std::vector<at::Tensor> Averages(const Ema& ema) {
  std::vector<at::Tensor> copies;
  for (const auto& [name, average] : ema.average()) copies.push_back(average.clone());
  return copies;
}

void ExpectSameBits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

struct Result {
  absl::Status status;
  Report report;
  std::vector<at::Tensor> parameters;
  std::string printed;
};

class CallbacksTest : public testing::Test {
 protected:
  CallbacksTest()
      : folder_(absl::StrCat(testing::TempDir(), "/",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    options_ = Quiet();
  }

  void Saves(const std::string& name = "checkpoints") {
    options_.checkpoint.manager.directory = absl::StrCat(folder_, "/", name);
    options_.checkpoint.resume = "auto";
  }

  // Trains with 40 steps per epoch at world size 1, 20 at 2.
  Result TrainRanks(
      int world_size,
      const std::function<std::vector<std::shared_ptr<Callback>>(int rank)>& callbacks = nullptr) {
    Result result;
    std::mutex mutex;
    testing::internal::CaptureStderr();
    RunRanks(world_size, [&](const session::Session& session) {
      TrainerOptions options = options_;
      if (callbacks) options.callbacks = callbacks(session.rank());
      const Task task = task_();
      const auto report = Train(session, task, Halves(640), Halves(60), options);
      if (session.rank() != 0) return;
      result.status = report.status();
      if (report.ok()) result.report = *report;
      result.parameters = Copies(*task.module);
    });
    result.printed = testing::internal::GetCapturedStderr();
    return result;
  }

  const std::string folder_;
  TrainerOptions options_;
  std::function<Task()> task_ = [] { return NetTask(); };
};

TEST_F(CallbacksTest, EventsComeInOneOrderOnAllRanks) {
  Saves();
  options_.max_steps = 25;
  std::vector<std::string> events[2];
  const Result result = TrainRanks(2, [&](int rank) {
    std::vector<std::shared_ptr<Callback>> both;
    for (const std::string name : {"a", "b"}) {
      both.push_back(std::make_shared<Probe>(
          [&, rank, name](const std::string& event, CallbackContext& run) {
            EXPECT_EQ(run.session().rank(), rank);
            std::string line = absl::StrCat(name, " ", event);
            if (event == "step") line = absl::StrCat(line, " ", run.position().step);
            events[rank].push_back(line);
            return absl::OkStatus();
          },
          name));
    }
    return both;
  });
  ASSERT_TRUE(result.status.ok()) << result.status;
  std::vector<std::string> expected;
  const auto both = [&](const std::string& event) {
    expected.push_back("a " + event);
    expected.push_back("b " + event);
  };
  both("set_up");
  both("start");
  both("epoch");
  for (int step = 1; step <= 20; ++step) both(absl::StrCat("step ", step));
  for (const char* event : {"epoch_end", "evaluation", "evaluation_end", "save epoch_1", "epoch"}) {
    both(event);
  }
  for (int step = 21; step <= 25; ++step) both(absl::StrCat("step ", step));
  for (const char* event :
       {"epoch_end", "evaluation", "evaluation_end", "save epoch_1_step_25", "end"}) {
    both(event);
  }
  EXPECT_EQ(events[0], expected);
  EXPECT_EQ(events[1], expected);
  EXPECT_TRUE(absl::EndsWith(result.report.last_checkpoint, "/epoch_1_step_25.pt"))
      << result.report.last_checkpoint;
  EXPECT_EQ(result.report.best_checkpoint, "");
}

TEST_F(CallbacksTest, AnErrorOnOneRankEndsAllWithItsName) {
  for (const std::string when : {"start", "epoch", "step", "evaluation_end", "end"}) {
    for (const bool throws : {false, true}) {
      SCOPED_TRACE(when);
      std::string seen;
      const Result result = TrainRanks(2, [&](int rank) {
        return std::vector<std::shared_ptr<Callback>>{std::make_shared<Probe>(
            [&, rank](const std::string& event, CallbackContext&) -> absl::Status {
              if (rank == 0 && absl::StartsWith(event, "exception")) seen = event;
              if (rank == 0 || event != when) return absl::OkStatus();
              if (throws) throw std::runtime_error("broken");
              return absl::DataLossError("broken");
            })};
      });
      EXPECT_TRUE(StrContains(result.status.message(), "rank 1: callback probe: broken"))
          << result.status;
      EXPECT_TRUE(StrContains(seen, "exception rank 1: callback probe: broken")) << seen;
    }
  }
}

// Ranks would wait for each other.
TEST_F(CallbacksTest, RanksHaveTheSameCallbacksWithNamesOfTheirOwn) {
  Result result = TrainRanks(2, [](int rank) {
    std::vector<std::shared_ptr<Callback>> all;
    if (rank == 1) all.push_back(std::make_shared<Probe>(Nothing));
    return all;
  });
  EXPECT_TRUE(StrContains(result.status.message(), "probe")) << result.status;
  options_.ema.decay = 0.5;
  for (const std::string name : {"ema", "model", "a/b"}) {
    result = TrainRanks(1, [&](int) {
      return std::vector<std::shared_ptr<Callback>>{std::make_shared<Probe>(Nothing, name)};
    });
    EXPECT_TRUE(StrContains(result.status.message(), name)) << result.status;
  }
  result = TrainRanks(1, [](int) { return std::vector<std::shared_ptr<Callback>>{nullptr}; });
  EXPECT_TRUE(StrContains(result.status.message(), "null")) << result.status;
}

// At any event, of a step, by one rank of two or both; the run has saved, and goes on from there.
TEST_F(CallbacksTest, ACallbackStopsTheRun) {
  options_.ema = {.decay = 0.9, .eval = true};
  const Result expected = TrainRanks(2);
  for (const std::string event :
       {"start 0", "epoch 0", "step 5", "save epoch_0_step_5 5", "epoch_end 20", "evaluation 20",
        "evaluation_end 20", "save epoch_1 20", "epoch 20"}) {
    const int64_t first = std::stoll(event.substr(event.rfind(' ')));
    for (const bool by_both : {false, true}) {
      SCOPED_TRACE(absl::StrCat(event, by_both));
      Saves(absl::StrCat(event, by_both));
      options_.checkpoint.every_steps = first == 5 ? 5 : 0;
      bool given_up = false;
      const auto stop_at = [&](const std::string& at) {
        return [&, at](int rank) {
          return std::vector<std::shared_ptr<Callback>>{
              std::make_shared<Probe>([&, rank, at](const std::string& now, CallbackContext& run) {
                if (rank == 0 && now == "evaluation_given_up") given_up = true;
                const bool asks = absl::StrCat(now, " ", run.position().step) == at;
                if (asks && (by_both || rank == 1)) run.RequestStop("for a reason");
                return absl::OkStatus();
              })};
        };
      };
      const Result stopped = TrainRanks(2, stop_at(event));
      ASSERT_TRUE(stopped.status.ok()) << stopped.status;
      const int64_t steps = stopped.report.steps;
      EXPECT_TRUE(steps == first || (steps == first + 1 && !by_both)) << steps;
      EXPECT_FALSE(given_up);  // that is for signals and time
      EXPECT_EQ(stopped.report.end.reason, EndReason::kCallback);
      EXPECT_EQ(stopped.report.end.why, "for a reason");
      EXPECT_EQ(std::filesystem::exists(stopped.report.end.saved), steps > 0);
      EXPECT_TRUE(StrContains(Summary(stopped.report, 1), "stopped by callback (for a reason)"));
      const Result whole = TrainRanks(2, stop_at(""));
      EXPECT_EQ(whole.report.steps, 40);
      ExpectSameBits(whole.parameters, expected.parameters);
      EXPECT_EQ(whole.report.test.loss, expected.report.test.loss);
    }
  }
}

// Of whole runs and of those that were stopped and resumed, with another callback's state.
TEST_F(CallbacksTest, AResumedRunHasTheBitsOfOneThatWasNot) {
  options_.ema = {.decay = 0.9, .warmup = true, .eval = true};
  options_.early_stopping = {.metric = "test/loss:min", .patience = 5};
  options_.optimizer = {.name = "adamw", .lr = 0.01};
  for (const int64_t stage : {0, 1, 2}) {
    SCOPED_TRACE(stage);
    options_.zero.stage = stage;
    options_.zero.overlap_gather = stage > 0;
    const auto train = [&](const std::string& name, int64_t step) {
      Saves(absl::StrCat(name, stage));
      options_.stop_at_step = step;
      std::vector<at::Tensor> all;
      std::shared_ptr<Probe> probe;
      const Result result = TrainRanks(2, [&](int rank) {
        auto mine = std::make_shared<Probe>(Nothing);
        if (rank == 0) probe = mine;
        return std::vector<std::shared_ptr<Callback>>{mine};
      });
      EXPECT_TRUE(result.status.ok()) << result.status;
      EXPECT_EQ(probe->steps, step > 0 ? step : 40);
      const auto state = checkpoint::Manager::Load(result.report.last_checkpoint);
      EXPECT_TRUE(state.ok()) << state.status();
      for (const auto& entry :
           state->root.at("ema").toGenericDict().at("weights").toGenericDict()) {
        all.push_back(entry.value().toTensor().clone());
      }
      EXPECT_EQ(state->root.at("ema").toGenericDict().at("updates").toInt(), probe->steps);
      const auto stopping = state->root.at("early_stopping").toGenericDict();
      EXPECT_EQ(stopping.contains("best"), probe->steps > 20);
      if (probe->steps > 20) all.push_back(at::tensor({stopping.at("best").toDouble()}));
      all.insert(all.end(), result.parameters.begin(), result.parameters.end());
      return all;
    };
    const std::vector<at::Tensor> whole = train("whole", 0);
    train("stopped", 7);
    train("stopped", 23);
    ExpectSameBits(train("stopped", 0), whole);
  }
}

// The average by its formula, from parameters that a callback after it sees: also where these come
// late, and in every step, epoch and evaluation.
TEST_F(CallbacksTest, TheAverageIsThatOfItsFormula) {
  for (const bool warmup : {false, true}) {
    for (const int64_t stage : {0, 2}) {
      SCOPED_TRACE(stage);
      options_.zero.stage = stage;
      options_.zero.overlap_gather = stage > 0;
      std::vector<at::Tensor> of_rank[2];
      const Result result = TrainRanks(2, [&](int rank) {
        auto ema = std::make_shared<Ema>(EmaOptions{.decay = 0.8, .warmup = warmup, .eval = true});
        auto expected = std::make_shared<std::vector<at::Tensor>>();
        auto check =
            std::make_shared<Probe>([=, &of_rank](const std::string& event, CallbackContext& run) {
              const std::vector<at::Tensor> weights = Copies(run.module());
              if (event == "start") *expected = weights;
              if (event == "evaluation") {
                ExpectSameBits(weights, *expected);
              } else if (event == "step") {
                const auto n = static_cast<double>(run.position().step - 1);
                const double decay = warmup ? std::min(0.8, (1 + n) / (10 + n)) : 0.8;
                const std::vector<at::Tensor> averages = Averages(*ema);
                for (size_t i = 0; i < weights.size(); ++i) {
                  const at::Tensor next = (*expected)[i] * decay + weights[i] * (1 - decay);
                  EXPECT_TRUE(at::allclose(averages[i], next, 1e-5, 1e-6)) << i;
                }
                *expected = averages;
              } else if (event == "evaluation_end") {
                ExpectSameBits(Averages(*ema), *expected);
              } else if (event == "end") {
                of_rank[rank] = Averages(*ema);
                const Task other = NetTask();
                EXPECT_TRUE(ema->CopyTo(*other.module).ok());
                ExpectSameBits(Copies(*other.module), of_rank[rank]);
                EXPECT_FALSE(ema->CopyTo(*LineTask().module).ok());
              }
              return absl::OkStatus();
            });
        return std::vector<std::shared_ptr<Callback>>{ema, check};
      });
      ASSERT_TRUE(result.status.ok()) << result.status;
      ExpectSameBits(of_rank[0], of_rank[1]);
    }
  }
}

// What a step adds to an average in bfloat16, of 8 bits, would be rounded to nothing.
TEST_F(CallbacksTest, TheAverageOfParametersIn16BitsIsInFloat32) {
  struct Narrow : torch::nn::Module {
    Narrow() {
      for (at::Tensor& parameter : parameters()) parameter.detach().fill_(0.5);
      to(at::kBFloat16);
    }
    at::Tensor forward(const at::Tensor& x) {
      return linear->forward(x.to(at::kBFloat16)).to(at::kFloat);
    }
    torch::nn::Linear linear{register_module("linear", torch::nn::Linear(2, 2))};
  };
  task_ = [] { return Classification("narrow", std::make_shared<Narrow>()); };
  options_.optimizer = {.name = "adamw", .lr = 0.01};
  const auto train = [&](const std::string& name, int64_t step) {
    Saves(absl::StrCat(name, options_.zero.stage));
    options_.stop_at_step = step;
    std::vector<at::Tensor> of_rank[2];
    const Result result = TrainRanks(2, [&](int rank) {
      auto ema = std::make_shared<Ema>(EmaOptions{.decay = 0.999, .eval = true});
      auto weights = std::make_shared<std::vector<at::Tensor>>();
      const auto check = [=, &averages = of_rank[rank]](const std::string& event,
                                                        CallbackContext& run) {
        const std::vector<at::Tensor> in_module = Copies(run.module()), now = Averages(*ema);
        for (size_t i = 0; i < now.size(); ++i) {
          if (event == "step") {
            const at::Tensor next = averages[i] * 0.999 + in_module[i].to(at::kFloat) * 0.001;
            EXPECT_TRUE(at::allclose(now[i], next, 1e-6, 0)) << i;
          } else if (event == "evaluation") {
            EXPECT_TRUE(at::equal(in_module[i], now[i].to(at::kBFloat16))) << i;
          }
        }
        if (event == "evaluation_end") ExpectSameBits(in_module, *weights);
        if (event == "evaluation_end") ExpectSameBits(now, averages);
        if (event == "start" || event == "step")
          std::tie(*weights, averages) = std::pair(in_module, now);
        return absl::OkStatus();
      };
      return std::vector<std::shared_ptr<Callback>>{ema, std::make_shared<Probe>(check)};
    });
    EXPECT_TRUE(result.status.ok()) << result.status;
    return of_rank[0];
  };
  for (const int64_t stage : {0, 1, 2}) {
    options_.zero.stage = stage;
    const std::vector<at::Tensor> whole = train("whole", 0);
    train("stopped", 7);
    train("stopped", 23);
    ExpectSameBits(train("stopped", 0), whole);
    EXPECT_FALSE(at::equal(whole[0], at::full_like(whole[0], 0.5)));
  }
  // As older checkpoints have it.
  options_.checkpoint.save.callback = [](State& state) {
    for (const auto& entry : state.root.at("ema").toGenericDict().at("weights").toGenericDict()) {
      entry.setValue(entry.value().toTensor().to(at::kBFloat16));
    }
  };
  train("older", 7);
  train("older", 9);
}

TEST_F(CallbacksTest, EvaluatingTheAverageLeavesTheRunAsItIs) {
  const Result plain = TrainRanks(2);
  options_.ema = {.decay = 0.99, .eval = true};
  Saves();
  const Result averaged = TrainRanks(2);
  ASSERT_TRUE(averaged.status.ok()) << averaged.status;
  ExpectSameBits(averaged.parameters, plain.parameters);
  EXPECT_NE(averaged.report.test.loss, plain.report.test.loss);

  // The average of the checkpoint, with another world size.
  options_.eval_only = true;
  const Result evaluated = TrainRanks(1);
  ASSERT_TRUE(evaluated.status.ok()) << evaluated.status;
  EXPECT_NEAR(evaluated.report.test.loss, averaged.report.test.loss, 1e-6);
  options_.ema.eval = false;
  const Result weights = TrainRanks(1);
  EXPECT_NEAR(weights.report.test.loss, plain.report.test.loss, 1e-6);
  // The values by which a checkpoint was chosen are the average's.
  constexpr char kNotChosen[] = "this evaluates the weights themselves";
  EXPECT_FALSE(StrContains(evaluated.printed, kNotChosen)) << evaluated.printed;
  EXPECT_TRUE(StrContains(weights.printed, kNotChosen)) << weights.printed;

  options_.ema = {.decay = 0.9, .eval = true};
  options_.checkpoint.resume = "";
  options_.checkpoint.init_from = averaged.report.last_checkpoint;
  EXPECT_TRUE(StrContains(TrainRanks(1).status.message(), "ema.eval"));
}

TEST_F(CallbacksTest, ARunWithoutAnAverageGetsOneWhenItGoesOn) {
  Saves();
  options_.stop_at_step = 5;
  const Result first = TrainRanks(1);
  ASSERT_TRUE(first.status.ok()) << first.status;
  options_.eval_only = true;
  options_.ema = {.decay = 0.5, .eval = true};
  EXPECT_TRUE(StrContains(TrainRanks(1).status.message(), "finds no average"));
  options_.eval_only = false;
  options_.stop_at_step = 6;
  auto ema = std::make_shared<Ema>(options_.ema);
  options_.ema = {};
  const Result second =
      TrainRanks(1, [&](int) { return std::vector<std::shared_ptr<Callback>>{ema}; });
  ASSERT_TRUE(second.status.ok()) << second.status;
  EXPECT_TRUE(StrContains(second.printed, "without ema, which the checkpoint does not have"));
  const std::vector<at::Tensor> averages = Averages(*ema);
  for (size_t i = 0; i < averages.size(); ++i) {
    EXPECT_TRUE(
        at::allclose(averages[i], (first.parameters[i] + second.parameters[i]) / 2, 1e-5, 1e-6));
  }
}

TEST_F(CallbacksTest, ARunThatDoesNotImproveStops) {
  options_.epochs = 9;
  task_ = LineTask;
  options_.optimizer.lr = 1e-9;  // so that nothing changes
  options_.early_stopping = {.metric = "test/loss:min", .patience = 2, .min_delta = 1e-3};
  options_.checkpoint.manager.keep_best = "test/loss:min";
  Saves();
  Result result = TrainRanks(2);
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.report.epochs, 3);
  EXPECT_TRUE(StrContains(result.report.end.why, "test/loss has not improved in 2 evaluations"));
  EXPECT_TRUE(StrContains(Summary(result.report, 1),
                          "\nearly_stopping.metric test/loss (chosen by test data: on other data "
                          "expect less)\n"))
      << Summary(result.report, 1);
  EXPECT_TRUE(absl::EndsWith(result.report.last_checkpoint, "/epoch_3.pt"));
  EXPECT_NE(result.report.best_checkpoint, "");
  // It has come to its end, also with another world size; but not with more patience.
  for (const int ranks : {1, 2}) {
    result = TrainRanks(ranks);
    EXPECT_EQ(result.report.epochs, 3);
    EXPECT_EQ(result.report.end.reason, EndReason::kCallback);
  }
  options_.early_stopping.patience = 4;
  result = TrainRanks(2);
  EXPECT_EQ(result.report.epochs, 5);
  // By another metric it begins anew.
  options_.early_stopping = {.metric = "test/accuracy:max", .patience = 1};
  result = TrainRanks(2);
  EXPECT_EQ(result.report.epochs, 7);
  EXPECT_TRUE(StrContains(result.printed, "without what early_stopping knew of test/loss:min"))
      << result.printed;

  options_.early_stopping.metric = "test/acuracy:max";
  EXPECT_TRUE(StrContains(TrainRanks(2).status.message(),
                          "early_stopping.metric=test/acuracy is no value of this run's "
                          "evaluation, which has test/accuracy, test/loss"));
  for (const std::string bad : {"test/loss", "test/loss:least", "test/loss:min:3"}) {
    options_.early_stopping.metric = bad;
    EXPECT_TRUE(StrContains(Validate(options_).message(), "must be a metric")) << bad;
  }
}

// As in the middle of an evaluation of the average.
TEST_F(CallbacksTest, AFailedEvaluationLeavesTheModuleItsWeights) {
  std::vector<at::Tensor> weights, averages;
  const Result result = TrainRanks(1, [&](int) {
    auto ema = std::make_shared<Ema>(EmaOptions{.decay = 0.9, .eval = true});
    const auto fail = [&, ema](const std::string& event, CallbackContext& run) -> absl::Status {
      if (event == "epoch_end") weights = Copies(run.module());
      if (event == "evaluation") return absl::DataLossError("broken");
      if (absl::StartsWith(event, "exception")) averages = Averages(*ema);
      return absl::OkStatus();
    };
    return std::vector<std::shared_ptr<Callback>>{ema, std::make_shared<Probe>(fail)};
  });
  EXPECT_TRUE(StrContains(result.status.message(), "broken"));
  ExpectSameBits(result.parameters, weights);
  EXPECT_FALSE(at::equal(averages[0], weights[0]));
}

// Callbacks of one run serve the next.
TEST_F(CallbacksTest, ANewRunBeginsWithNewState) {
  const EmaOptions options = {.decay = 0.9, .warmup = true, .eval = true};
  auto ema = std::make_shared<Ema>(options);
  auto stopping = std::make_shared<EarlyStopping>(
      EarlyStoppingOptions{.metric = "test/loss:min", .patience = 1, .min_delta = 1e3});
  const auto both = [&](int) { return std::vector<std::shared_ptr<Callback>>{ema, stopping}; };
  options_.epochs = 5;
  const Result first = TrainRanks(1, both);
  EXPECT_EQ(first.report.epochs, 2);  // the first evaluation is better than none
  const std::vector<at::Tensor> averages = Averages(*ema);
  const Result second = TrainRanks(1, both);
  EXPECT_EQ(second.report.epochs, 2);
  ExpectSameBits(second.parameters, first.parameters);
  ExpectSameBits(Averages(*ema), averages);
}

TEST_F(CallbacksTest, EarlyStoppingCountsEvaluationsThatAreNotBetter) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  // After how many evaluations it asks for the end; 0: not at all.
  const auto stops_after = [](const EarlyStoppingOptions& options,
                              const std::vector<double>& values) {
    size_t after = 0;
    RunRanks(1, [&](const session::Session& session) {
      Line module;
      const auto optimizer =
          MakeReplicated(std::make_unique<torch::optim::SGD>(module.parameters(), 0.1), nullptr,
                         GradScaler::Disabled());
      const Position position = {};
      CallbackList callbacks;
      callbacks.Add(std::make_shared<EarlyStopping>(options));
      callbacks.Begin(
          CallbackContext(session, module, {{"", *optimizer}}, position, [](absl::string_view) {}));
      for (size_t i = 0; i < values.size() && after == 0; ++i) {
        const Metrics metrics = {{"test/x", values[i]}};
        EXPECT_TRUE(callbacks.Call(&Callback::OnEvaluationEnd, metrics).ok());
        // One that was given up does not count.
        EXPECT_TRUE(callbacks.Call(&Callback::OnEvaluationEnd, Metrics()).ok());
        if (callbacks.TakeRequest()) after = i + 1;
      }
    });
    return after;
  };
  const EarlyStoppingOptions least = {.metric = "test/x:min", .patience = 2};
  EXPECT_EQ(stops_after(least, {5, 4, 3, 2, 1}), 0u);
  EXPECT_EQ(stops_after(least, {5, 6, 4, 5, 3, 3, 3}), 7u);  // an improvement resets the count
  EXPECT_EQ(stops_after(least, {1, 2, 3}), 3u);
  EXPECT_EQ(stops_after(least, {5, kNan, 4, kNan, kNan}), 5u);
  EXPECT_EQ(stops_after(least, {kNan, 7, 8, 9}), 4u);
  EXPECT_EQ(stops_after(least, {kNan, kNan, kNan}), 2u);  // there is never a best one
  EXPECT_EQ(stops_after({.metric = "test/x:max", .patience = 2}, {1, 2, 3, 3, 2}), 5u);
  const EarlyStoppingOptions by_far = {.metric = "test/x:min", .patience = 2, .min_delta = 1};
  EXPECT_EQ(stops_after(by_far, {5, 4.5, 4.2, 3.9}), 3u);
  EXPECT_EQ(stops_after(by_far, {5, 4.5, 3.9, 3.5, 2.8}), 0u);
}

// As of a rollback to before the first evaluation.
TEST_F(CallbacksTest, EarlyStoppingForgetsABestThatIsNotInTheState) {
  EarlyStopping stopping({.metric = "test/x:min"});
  LoadNotes ignored;
  const State before = stopping.state_dict().value(), later = stopping.state_dict().value();
  later.root.insert("best", 1.0);
  ASSERT_TRUE(stopping.load_state_dict(later, ignored).ok());
  EXPECT_TRUE(stopping.state_dict()->root.contains("best"));
  ASSERT_TRUE(stopping.load_state_dict(before, ignored).ok());
  EXPECT_FALSE(stopping.state_dict()->root.contains("best"));
}

TEST_F(CallbacksTest, StateThatIsNoneOfTheirsIsRefused) {
  const auto message = [](Callback& callback, const State& state) {
    return std::string(callback.stateful()->CheckStateDict(state).message());
  };
  State state;
  state.root.insert("other", 1);
  Ema ema({.decay = 0.5});
  EXPECT_TRUE(StrContains(message(ema, state), "has no 'weights', or no 'updates'"));
  EarlyStopping stopping({.metric = "test/loss:min"});
  EXPECT_TRUE(StrContains(message(stopping, state), "has no 'metric' or no 'since'"));
  options_.ema.decay = 0.5;
  options_.stop_at_step = 1;
  Saves();
  ASSERT_TRUE(TrainRanks(1).status.ok());
  task_ = LineTask;  // another model
  EXPECT_FALSE(TrainRanks(1).status.ok());
}

// Each group of each phase has a rate of its own.
TEST_F(CallbacksTest, RatesAreThoseOfAllPhases) {
  options_.log.dir = folder_ + "/logs";
  options_.log.every = 1;
  options_.max_steps = 2;
  options_.monitor.learning_rates = true;
  options_.optimizer = {.name = "sgd", .lr = 0.5, .groups = "bias:lr=0.25"};
  RunRanks(2, [&](const session::Session& session) {
    struct Pair : torch::nn::Module {
      torch::nn::Linear first{register_module("first", torch::nn::Linear(2, 2))};
      torch::nn::Linear second{register_module("second", torch::nn::Linear(2, 2))};
    };
    auto pair = std::make_shared<Pair>();
    const auto step_of = [](torch::nn::Linear& layer) {
      return StepOf<data::Batch>([&layer](data::Batch& batch, const StepContext&) {
        return StepOutput{.loss = Mean(layer(batch.input).square().mean(), batch.input.size(0))};
      });
    };
    Task task;
    task.name = "pair";
    task.module = pair;
    task.phases = {{.name = "first", .parameters = "first.*", .train_step = step_of(pair->first)},
                   {.name = "second",
                    .parameters = "second.*",
                    .train_step = step_of(pair->second),
                    .optimizer = OptimizerOptions{.name = "adam", .lr = 0.125},
                    .schedule = ScheduleOptions{.name = "linear"}}};
    TrainerOptions options = options_;
    options.callbacks = {
        std::make_shared<Probe>([&](const std::string& event, CallbackContext& run) {
          if (event == "step") {
            EXPECT_EQ(run.phases().size(), 2u);
            EXPECT_EQ(&run.optimizer(), &run.phases()[0].optimizer);
            EXPECT_EQ(run.phases()[1].suffix, ".second");
          }
          return absl::OkStatus();
        })};
    // The probe expects an accuracy of each evaluation.
    task.eval_step = StepOf<data::Batch>([&](data::Batch& batch, const StepContext&) {
      const at::Tensor sum = pair->first(batch.input).sum();
      return StepOutput{.loss = {sum, batch.input.size(0)},
                        .metrics = {{"accuracy", SumAndCount(sum, batch.input.size(0))}}};
    });
    const auto report = Train(session, task, Halves(640), Halves(60), options);
    ASSERT_TRUE(report.ok()) << report.status();
  });
  const auto rates = [&](const std::string& tag) {
    const auto logged = Logged(options_.log.dir, tag);
    return logged.size() == 2 ? std::vector<double>{logged.at(1), logged.at(2)}
                              : std::vector<double>();
  };
  EXPECT_EQ(rates("lr/group_0"), (std::vector<double>{0.5, 0.5}));
  EXPECT_EQ(rates("lr/group_1"), (std::vector<double>{0.25, 0.25}));
  const std::vector<double> second = rates("lr/group_0.second");
  ASSERT_EQ(second.size(), 2u);
  EXPECT_EQ(second, (std::vector<double>{0.125, 0.0625}));  // linear, to 0 after two steps
  EXPECT_TRUE(rates("lr/group_1.second").empty());
}

// The norm is only looked at.
TEST_F(CallbacksTest, AnInfiniteNormThatIsMonitoredChangesNothing) {
  options_.log.every = 1;
  options_.max_steps = 1;
  for (const int64_t stage : {0, 1, 2}) {
    options_.zero.stage = stage;
    std::vector<at::Tensor> ends[2];
    for (const bool monitored : {false, true}) {
      options_.monitor.gradient_norm = monitored;
      options_.log.dir = absl::StrCat(folder_, "/logs_", stage, "_", monitored);
      RunRanks(2, [&](const session::Session& session) {
        auto line = std::make_shared<Line>();
        {
          const at::NoGradGuard no_grad;
          for (at::Tensor& parameter : line->parameters()) parameter.fill_(1);
        }
        const auto step = [line](data::Batch& batch, const StepContext&) {
          const at::Tensor huge = line->linear->bias[0] * 3e38;
          return StepOutput{.loss = {huge * 3e38 * 4 + line->linear(batch.input).sum(), 1}};
        };
        ASSERT_TRUE(Train(session, TaskOf<data::Batch>("line", line, step), Halves(64), Halves(60),
                          options_)
                        .ok());
        if (session.is_main()) ends[monitored] = Copies(*line);
      });
    }
    ASSERT_EQ(ends[0].size(), 2u);
    ExpectSameBits({ends[1][0]}, {ends[0][0]});  // the weight, which is finite
    EXPECT_TRUE(ends[0][0].isfinite().all().item<bool>());
    EXPECT_TRUE(at::allclose(ends[1][1], ends[0][1], 0, 0, /*equal_nan=*/true));
  }
  // JSON has no infinity.
  const auto log = ReadFile(options_.log.dir + "/metrics.jsonl");
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_TRUE(StrContains(*log, "\"train/gradient_norm\":\"Infinity\"")) << *log;
}

TEST_F(CallbacksTest, MonitorsRecord) {
  options_.log.dir = folder_ + "/logs";
  options_.log.every = 5;
  options_.monitor = {
      .learning_rates = true, .gradient_norm = true, .throughput = true, .memory = true};
  const Result result = TrainRanks(
      2, [](int) { return std::vector<std::shared_ptr<Callback>>{std::make_shared<Chat>()}; });
  ASSERT_TRUE(result.status.ok()) << result.status;
  const auto values = [&](const std::string& tag) {
    const std::map<int64_t, double> logged = Logged(options_.log.dir, tag);
    EXPECT_EQ(logged.size(), 9) << tag;
    for (const auto& [step, value] : logged) EXPECT_TRUE(std::isfinite(value)) << tag;
    return logged;
  };
  EXPECT_EQ(values("train/chat").at(5), 6);
  EXPECT_EQ(values("lr/group_0").at(10), 0.5);
  EXPECT_GT(values("train/gradient_norm").at(10), 0);
  for (const auto& [step, speed] : values("train/examples_per_second")) EXPECT_GT(speed, 0) << step;
  for (const auto& [step, wait] : values("train/data_wait")) EXPECT_TRUE(0 < wait && wait < 1);
  EXPECT_GT(values("train/pss_mib").at(10), 1);
  EXPECT_GE(values("train/pss_mib_max").at(40), values("train/pss_mib").at(40));
  EXPECT_TRUE(Logged(options_.log.dir, "train/device_mib").empty());  // on the CPU

  // They look on only.
  options_.monitor = {};
  options_.log.dir = "";
  ExpectSameBits(TrainRanks(2).parameters, result.parameters);
}

// Waiting is what the data set takes.
TEST_F(CallbacksTest, WaitingForDataIsMeasured) {
  options_.epochs = 1;
  options_.num_workers = 0;
  double waited = 0;
  options_.callbacks = {
      std::make_shared<Probe>([&](const std::string& event, CallbackContext& run) {
        if (event == "epoch_end") waited = run.data_wait_s();
        return absl::OkStatus();
      })};
  RunRanks(1, [&](const session::Session& session) {
    ASSERT_TRUE(Train(session, LineTask(), Slow(64, 50), Halves(60), options_).ok());
  });
  EXPECT_GE(waited, 4 * 0.05);
  EXPECT_LT(waited, 20);
}

// Of what came before the record, nothing counts.
TEST_F(CallbacksTest, ThroughputIsThatSinceTheRecordBefore) {
  class SlowFirst final : public Halves {
   public:
    SlowFirst() : Halves(128) {}
    data::Batch Get(absl::Span<const int64_t> indices) const override {
      // Two examples are read before the training; the others are four of eight batches.
      if (++read_ <= 6) absl::SleepFor(absl::Milliseconds(200));
      return Halves::Get(indices);
    }

   private:
    mutable std::atomic<int> read_ = 0;
  };
  options_.epochs = 1;
  options_.num_workers = 0;
  options_.log.dir = folder_ + "/logs";
  options_.log.every = 1;
  options_.monitor.throughput = true;
  RunRanks(1, [&](const session::Session& session) {
    ASSERT_TRUE(Train(session, LineTask(), SlowFirst(), Halves(60), options_).ok());
  });
  const auto speeds = Logged(options_.log.dir, "train/examples_per_second");
  ASSERT_EQ(speeds.size(), 8u);
  double fastest = 0;
  for (int64_t step = 6; step <= 8; ++step) fastest = std::max(fastest, speeds.at(step));
  EXPECT_GT(fastest, 4 * speeds.at(3));
}

// An evaluation or a save within an epoch, here one of 0.3 s after each second step, is no
// training.
TEST_F(CallbacksTest, TheThroughputIsThatOfTraining) {
  options_.epochs = 1;
  options_.num_workers = 0;
  options_.log.dir = folder_ + "/logs";
  options_.log.every = 1;
  options_.validate.every_steps = 2;
  options_.monitor.throughput = true;
  RunRanks(1, [&](const session::Session& session) {
    const Slow validation(1, 300);
    ASSERT_TRUE(Train(session, LineTask(), Halves(128), validation, Halves(60), options_).ok());
  });
  const auto speeds = Logged(options_.log.dir, "train/examples_per_second");
  ASSERT_EQ(speeds.size(), 8u);
  // Of steps after an evaluation; the fastest, since others may run on the machine.
  double fastest = 0;
  for (const int64_t step : {3, 5, 7}) fastest = std::max(fastest, speeds.at(step));
  EXPECT_GT(fastest, 16 / 0.25);
}

TEST_F(CallbacksTest, TheWaitForDataIsThatOfTheSlowestRank) {
  options_.num_workers = 0;
  options_.log.every = 1;
  options_.monitor.throughput = true;
  std::set<double> waits[2];  // of four steps each
  for (const bool slow : {false, true}) {
    options_.log.dir = absl::StrCat(folder_, "/logs_", slow);
    RunRanks(2, [&](const session::Session& session) {
      const Slow data(64, slow && session.rank() == 1 ? 100 : 0);
      ASSERT_TRUE(Train(session, LineTask(), data, Halves(60), options_).ok());
    });
    for (const auto& [step, wait] : Logged(options_.log.dir, "train/data_wait")) {
      waits[slow].insert(wait);
    }
    ASSERT_FALSE(waits[slow].empty());
  }
  EXPECT_GT(*waits[true].rbegin(), 0.3);  // rank 0 waits for rank 1, and not for data
  EXPECT_GT(*waits[true].rbegin(), *waits[false].begin());
}

// Ranks that have run out of batches make the same calls.
TEST_F(CallbacksTest, UnevenRanksMakeTheSameCalls) {
  options_.even_batches = false;
  options_.monitor.throughput = true;
  options_.log.dir = folder_ + "/logs";
  options_.log.every = 1;
  int64_t steps[3] = {};
  std::vector<at::Tensor> averages[3];
  RunRanks(3, [&](const session::Session& session) {
    TrainerOptions options = options_;
    options.epochs = 1;
    auto probe = std::make_shared<Probe>(Nothing);
    auto ema = std::make_shared<Ema>(EmaOptions{.decay = 0.5});
    options.callbacks = {probe, ema};
    const auto report = Train(session, LineTask(), Halves(97), Halves(60), options);
    ASSERT_TRUE(report.ok()) << report.status();
    steps[session.rank()] = probe->steps;
    averages[session.rank()] = Averages(*ema);
  });
  for (const int64_t of_rank : steps) EXPECT_EQ(of_rank, 3);
  ExpectSameBits(averages[0], averages[2]);
}

}  // namespace
}  // namespace ddp::trainer
