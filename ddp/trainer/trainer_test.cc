#include "ddp/trainer/trainer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "ddp/data/sampler.h"
#include "ddp/trainer/logging/sink_registry.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/optim/sgd.h"

namespace ddp::trainer {
namespace {

TEST(EvaluateTest, EveryExampleCountsOnceInAnyWorld) {
  std::optional<Evaluation> alone;
  for (int world_size : {1, 2, 3, 5}) {
    RunRanks(world_size, [&](const session::Session& session) {
      // 7 examples on 5 ranks in batches of 30: some ranks have one, none has a full batch.
      for (int64_t n : {7, 1001}) {
        auto result = Evaluate(session, LineTask(), Halves(n), {.batch_size = 30});
        ASSERT_TRUE(result.ok()) << result.status();
        EXPECT_EQ(result->examples, n);
        if (n == 1001 && session.is_main()) {
          if (!alone) alone = *result;
          EXPECT_EQ(result->metrics, alone->metrics);
          EXPECT_NEAR(result->loss, alone->loss, 1e-6);
        }
      }
    });
  }
}

TEST(TrainTest, LearnsAndReportsTheSameOnAllRanks) {
  std::vector<Report> reports(3);
  RunRanks(3, [&](const session::Session& session) {
    auto report = Train(session, LineTask(), Halves(900), Halves(100), Quiet());
    ASSERT_TRUE(report.ok()) << report.status();
    reports[session.rank()] = *report;
  });
  for (const Report& report : reports) {
    EXPECT_GT(report.test.metrics.at("accuracy"), 0.9);
    EXPECT_EQ(report.test.loss, reports[0].test.loss);
    EXPECT_EQ(report.epochs, 2);
    EXPECT_EQ(report.steps, 2 * 19);  // ceil(300 / 16) per epoch
  }
}

TEST(TrainTest, MaxStepsEndsTheRunWithinAnEpoch) {
  TrainerOptions options = Quiet();
  options.max_steps = 5;
  RunRanks(1, [&](const session::Session& session) {
    auto report = Train(session, LineTask(), Halves(900), Halves(100), options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->steps, 5);
    EXPECT_EQ(report->epochs, 0);
  });
}

// The first step of SGD is proportional to the learning rate.
TEST(TrainTest, TheScheduleScalesTheLearningRate) {
  const auto after_one_step = [](double lr, int64_t warmup_steps) {
    TrainerOptions options = Quiet();
    options.max_steps = 1;
    options.optimizer.lr = lr;
    options.schedule.warmup_steps = warmup_steps;
    const Task task = LineTask();
    RunRanks(1, [&](const session::Session& session) {
      auto report = Train(session, task, Halves(320), Halves(100), options);
      ASSERT_TRUE(report.ok()) << report.status();
    });
    return task.module->parameters()[0].detach();
  };
  const at::Tensor warming_up = after_one_step(0.5, 4);
  EXPECT_TRUE(at::equal(warming_up, after_one_step(0.125, 0)));
  EXPECT_FALSE(at::equal(warming_up, after_one_step(0.5, 0)));
}

// The run's length, and so the schedule's, is what ends first.
TEST(TrainTest, TheScheduleEndsWithTheRun) {
  const std::string folder = testing::TempDir() + "/schedule_ends";
  std::filesystem::remove_all(folder);
  TrainerOptions options = Quiet();
  options.epochs = 10;
  options.max_steps = 8;
  options.schedule.name = "cosine";
  options.log.every = 1;
  std::map<int64_t, double> rates[2];
  for (const int64_t stop : {0, 3}) {
    options.stop_at_step = stop;
    options.log.dir = absl::StrCat(folder, "/", stop);
    RunRanks(1, [&](const session::Session& session) {
      auto report = Train(session, LineTask(), Halves(320), Halves(100), options);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->steps, stop > 0 ? stop : 8);
    });
    rates[stop > 0] = Logged(options.log.dir, "train/lr");
  }
  ASSERT_EQ(rates[0].size(), 8);
  for (const auto& [step, rate] : rates[0]) {
    const double progress = static_cast<double>(step - 1) / 8;
    EXPECT_NEAR(rate, 0.5 * (1 + std::cos(M_PI * progress)) / 2, 1e-9) << step;
  }
  // To stop early changes nothing but the end.
  ASSERT_EQ(rates[1].size(), 3);
  for (const auto& [step, rate] : rates[1]) EXPECT_EQ(rate, rates[0][step]);
}

TEST(TrainTest, AStepAtWhichOneRankStopsIsAllRanks) {
  RunRanks(3, [&](const session::Session& session) {
    TrainerOptions options = Quiet();
    if (session.rank() > 0) options.stop_at_step = 5 - session.rank();
    auto report = Train(session, LineTask(), Halves(900), Halves(100), options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->steps, 3);
  });
}

// Of other examples, and of fewer on rank 1 and 2, which run out amid a step.
TEST(TrainTest, TheLossInLogsIsTheMeanOverTheExamplesOfAllRanks) {
  struct Sum {
    double loss = 0;
    int64_t examples = 0;
  };
  for (const bool even : {true, false}) {
    TrainerOptions options = Quiet();
    options.epochs = 1;
    options.even_batches = even;
    options.accumulate = 3;
    options.batch_size = 4;
    options.log.every = 1;
    options.log.dir = absl::StrCat(testing::TempDir(), "/mean_loss_", even);
    std::filesystem::remove_all(options.log.dir);
    std::mutex mutex;
    std::map<int64_t, Sum> expected;  // by step
    RunRanks(3, [&](const session::Session& session) {
      Task task = LineTask();
      int64_t batches = 0;
      task.loss = [&, loss = task.loss](const at::Tensor& output, const at::Tensor& target) {
        const at::Tensor value = loss(output, target);
        if (!value.requires_grad()) return value;
        const std::lock_guard lock(mutex);
        Sum& sum = expected[batches++ / 3 + 1];
        sum.loss += value.item<double>() * static_cast<double>(output.size(0));
        sum.examples += output.size(0);
        return value;
      };
      TrainerOptions mine = options;
      if (session.rank() > 0) mine.log = {.every = 7, .progress = false};
      auto report = Train(session, task, Halves(97), Halves(100), mine);
      ASSERT_TRUE(report.ok()) << report.status();
    });
    const std::map<int64_t, double> logged = Logged(options.log.dir, "train/loss");
    ASSERT_EQ(logged.size(), 3);  // 9 batches of rank 0
    ASSERT_EQ(expected.size(), 3);
    for (const auto& [step, sum] : expected) {
      EXPECT_NEAR(logged.at(step), sum.loss / static_cast<double>(sum.examples), 1e-9) << step;
    }
  }
}

// As torchvision's models do it.
struct OverridesTrain : Net {
  OverridesTrain() : Net(0) {}
  void train(bool on = true) override {
    Net::train(on);
    norm->eval();
  }
};

TEST(TrainTest, ModulesInEvaluationModeStayInIt) {
  const auto trained = [](const std::shared_ptr<Net>& net) {
    RunRanks(1, [&](const session::Session& session) {
      auto report = Train(session, Classification("net", net), Halves(160), Halves(50), Quiet());
      ASSERT_TRUE(report.ok()) << report.status();
    });
    EXPECT_TRUE(net->is_training());
    EXPECT_TRUE(net->drop->is_training());
    const bool drifted = net->norm->running_mean.abs().sum().item<double>() > 0;
    EXPECT_EQ(net->norm->is_training(), drifted);
    return drifted;
  };
  const auto frozen = std::make_shared<Net>(0);
  frozen->norm->eval();
  EXPECT_FALSE(trained(frozen));
  EXPECT_FALSE(trained(std::make_shared<OverridesTrain>()));
  EXPECT_TRUE(trained(std::make_shared<Net>(0)));
  // A module that has been used for predictions trains as a whole.
  const auto used = std::make_shared<Net>(0);
  used->eval();
  EXPECT_TRUE(trained(used));
}

// Of which the rest stays in evaluation mode; or a callback puts a part into it.
TEST(TrainTest, APartOfAModuleMayTrain) {
  struct Freezing final : Callback {
    std::string name() const override { return "freezing"; }
    absl::Status OnStart(CallbackContext& run) override {
      dynamic_cast<Net&>(run.module()).norm->eval();
      return absl::OkStatus();
    }
  };
  for (const bool by_callback : {false, true}) {
    const auto net = std::make_shared<Net>(0);
    TrainerOptions options = Quiet();
    if (by_callback) {
      options.callbacks = {std::make_shared<Freezing>()};
    } else {
      net->eval();
      net->out->train();
    }
    RunRanks(1, [&](const session::Session& session) {
      auto report = Train(session, Classification("net", net), Halves(160), Halves(50), options);
      ASSERT_TRUE(report.ok()) << report.status();
    });
    EXPECT_EQ(net->is_training(), by_callback);
    EXPECT_TRUE(net->out->is_training());
    EXPECT_FALSE(net->norm->is_training());
    EXPECT_EQ(net->norm->running_mean.abs().sum().item<double>(), 0);
  }
}

TEST(EvaluateTest, EachModuleHasItsModeAgain) {
  const auto net = std::make_shared<Net>(0);
  auto block = torch::nn::Sequential(torch::nn::Dropout(), torch::nn::Dropout());
  net->register_module("block", block);
  block->eval();
  block->ptr(1)->train();
  net->norm->eval();
  RunRanks(1, [&](const session::Session& session) {
    ASSERT_TRUE(Evaluate(session, Classification("net", net), Halves(50), {.batch_size = 30}).ok());
  });
  EXPECT_TRUE(net->is_training());
  EXPECT_TRUE(net->in->is_training());
  EXPECT_FALSE(net->norm->is_training());
  EXPECT_FALSE(block->is_training());
  EXPECT_FALSE(block->ptr(0)->is_training());
  EXPECT_TRUE(block->ptr(1)->is_training());
}

TEST(EvaluateTest, AfterAFailureEachModuleHasItsModeAgain) {
  const auto net = std::make_shared<Net>(0);
  net->norm->eval();
  Task task = Classification("net", net);
  task.correct = [](const at::Tensor&, const at::Tensor&) -> at::Tensor {
    throw std::runtime_error("broken");
  };
  RunRanks(1, [&](const session::Session& session) {
    const absl::Status failed = Evaluate(session, task, Halves(50), {.batch_size = 30}).status();
    EXPECT_TRUE(absl::StrContains(failed.message(), "broken")) << failed;
  });
  EXPECT_TRUE(net->is_training());
  EXPECT_TRUE(net->in->is_training());
  EXPECT_FALSE(net->norm->is_training());
}

TEST(TrainTest, SavesEveryNthEpochAndTheLast) {
  const auto saved = [](int64_t every) {
    const std::string folder = absl::StrCat(testing::TempDir(), "/every_", every);
    std::filesystem::remove_all(folder);
    TrainerOptions options = Quiet();
    options.epochs = 3;
    options.checkpoint.manager.directory = folder;
    options.checkpoint.every = every;
    RunRanks(1, [&](const session::Session& session) {
      auto report = Train(session, LineTask(), Halves(320), Halves(100), options);
      ASSERT_TRUE(report.ok()) << report.status();
    });
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      if (name[0] != '.') names.push_back(name);  // without the notes beside checkpoints
    }
    std::sort(names.begin(), names.end());
    return names;
  };
  EXPECT_EQ(saved(1), (std::vector<std::string>{"epoch_1.pt", "epoch_2.pt", "epoch_3.pt"}));
  EXPECT_EQ(saved(2), (std::vector<std::string>{"epoch_2.pt", "epoch_3.pt"}));
  EXPECT_EQ(saved(0), std::vector<std::string>());
}

TEST(TrainTest, TheBestByAMetricIsKeptAndEvaluated) {
  const std::string folder = testing::TempDir() + "/best";
  std::filesystem::remove_all(folder);
  TrainerOptions options = Quiet();
  options.epochs = 3;
  options.checkpoint.manager.directory = folder;
  options.checkpoint.manager.keep_last = 1;
  options.checkpoint.manager.keep_best = "test/loss:max";  // falls, so that the first is kept
  RunRanks(2, [&](const session::Session& session) {
    auto report = Train(session, LineTask(), Halves(320), Halves(100), options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_TRUE(std::filesystem::exists(folder + "/epoch_1.pt"));
    EXPECT_FALSE(std::filesystem::exists(folder + "/epoch_2.pt"));
    TrainerOptions evaluate = options;
    evaluate.eval_only = true;
    evaluate.checkpoint.resume = "best";
    report = Train(session, LineTask(), Halves(320), Halves(100), evaluate);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->epochs, 1);
  });
}

// The other ranks wait for it without a collective.
TEST(TrainTest, ASaveMayTakeLongerThanACollective) {
  constexpr absl::Duration kTimeout = absl::Seconds(6), kStall = absl::Seconds(5);
  const std::string folder = testing::TempDir() + "/slow_save";
  std::filesystem::remove_all(folder);
  TrainerOptions options = Quiet();
  options.epochs = 1;
  options.checkpoint.manager.directory = folder;
  options.checkpoint.save.callback = [&](checkpoint::State&) {
    absl::SleepFor(kTimeout + absl::Seconds(1));  // rank 0's work
  };
  testing::internal::CaptureStderr();
  RunRanks(
      2,
      [&](const session::Session& session) {
        auto report = Train(session, LineTask(), Halves(320), Halves(100), options);
        EXPECT_TRUE(report.ok()) << report.status();
      },
      kTimeout, kStall);
  const std::string printed = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(absl::StrContains(printed, "waiting for rank 0")) << printed;
  EXPECT_FALSE(absl::StrContains(printed, "has waited")) << printed;  // in a collective
}

TEST(TrainTest, PredictionsAreOfEachTestExampleOnceInOrder) {
  const std::string path = testing::TempDir() + "/predictions.jsonl";
  TrainerOptions options = Quiet();
  options.predictions = path;
  const auto test = Halves(101);  // no multiple of the ranks
  std::vector<Report> reports(3);
  RunRanks(3, [&](const session::Session& session) {
    auto report = Train(session, LineTask(), Halves(900), test, options);
    ASSERT_TRUE(report.ok()) << report.status();
    reports[session.rank()] = *report;
  });
  std::ifstream file(path);
  int64_t index = 0, correct = 0;
  for (std::string line; std::getline(file, line); ++index) {
    const int64_t target = test.Get({index}).target.item<int64_t>();
    const std::string start = absl::StrCat("{\"index\": ", index, ", \"target\": ", target, ", ");
    EXPECT_EQ(line.substr(0, start.size()), start);
    correct += line == absl::StrCat(start, "\"prediction\": ", target, "}");
  }
  EXPECT_EQ(index, 101);
  EXPECT_DOUBLE_EQ(static_cast<double>(correct) / 101, reports[0].test.metrics.at("accuracy"));
}

TEST(TrainTest, RanksThatDriftApartAreNoticed) {
  TrainerOptions options = Quiet();
  options.check_agreement_every = 2;
  RunRanks(2, [&](const session::Session& session) {
    Task task = LineTask();
    TrainerOptions mine = options;
    mine.on_step = [&](int64_t step, const at::Tensor&) {
      torch::NoGradGuard no_grad;
      if (step == 3 && session.rank() == 1) task.module->parameters()[0].add_(1);
      return StepAction::kContinue;
    };
    const auto report = Train(session, task, Halves(320), Halves(100), mine);
    EXPECT_TRUE(absl::StrContains(report.status().message(), "parameters after step 4: tensor '"))
        << report.status();
    EXPECT_TRUE(absl::StrContains(report.status().message(), "rank 1")) << report.status();
  });
}

// A program's own sink: lines in a file.
class LinesSink final : public logging::MetricSink {
 public:
  explicit LinesSink(const std::string& path) : file_(path, std::ios::app) {}
  absl::Status Scalars(int64_t step, absl::Span<const logging::Metric> metrics) override {
    for (const auto& metric : metrics) file_ << step << " " << metric.tag << "\n";
    return absl::OkStatus();
  }
  absl::Status Text(absl::string_view tag, absl::string_view, int64_t) override {
    file_ << "text " << tag << "\n";
    return absl::OkStatus();
  }
  absl::Status HyperParameters(
      const std::vector<std::pair<std::string, std::string>>& table) override {
    for (const auto& [name, value] : table) file_ << "option " << name << "=" << value << "\n";
    return absl::OkStatus();
  }
  absl::Status Flush() override {
    file_.flush();
    return absl::OkStatus();
  }

 private:
  std::ofstream file_;
};

const Registration<logging::SinkRegistry> kLines(
    "lines",
    [](const logging::SinkOptions& options)
        -> absl::StatusOr<std::unique_ptr<logging::MetricSink>> {
      return std::make_unique<LinesSink>(options.log_dir + ".lines");
    });

TEST(TrainTest, WritesToTheSinksThatAreNamed) {
  TrainerOptions options = Quiet();
  options.log.dir = testing::TempDir() + "/own_sink";
  options.hyper_parameters = {{"lr", "0.5"}};
  options.log.sinks = {"csv"};
  RunRanks(2, [&](const session::Session& session) {
    const absl::Status unknown =
        Train(session, LineTask(), Halves(320), Halves(100), options).status();
    EXPECT_TRUE(absl::StrContains(unknown.message(), "is none of jsonl, lines, tensorboard"))
        << unknown;
    TrainerOptions mine = options;
    mine.log.sinks = {"lines", "lines"};
    const auto report = Train(session, LineTask(), Halves(320), Halves(100), mine);
    EXPECT_TRUE(report.ok()) << report.status();
  });
  const std::string lines = ReadFile(options.log.dir + ".lines").value_or("");
  EXPECT_TRUE(absl::StartsWith(lines, "option lr=0.5\ntext hyper_parameters\n")) << lines;
  const size_t evaluated = lines.find("\n20 test/accuracy\n");
  EXPECT_NE(evaluated, std::string::npos) << lines;
  // Named twice, it is there once.
  EXPECT_EQ(lines.rfind("\n20 test/accuracy\n"), evaluated) << lines;
  EXPECT_FALSE(std::filesystem::exists(options.log.dir + "/metrics.jsonl"));
}

TEST(TrainTest, WritesLogsAndCheckpointsFromRankZeroAlone) {
  const std::string folder = testing::TempDir() + "/logs_and_checkpoints";
  TrainerOptions options = Quiet();
  options.log.dir = folder + "/logs";
  options.checkpoint.manager.directory = folder + "/checkpoints";
  options.hyper_parameters = {{"lr", "0.5"}};
  RunRanks(2, [&](const session::Session& session) {
    auto report = Train(session, LineTask(), Halves(320), Halves(100), options);
    ASSERT_TRUE(report.ok()) << report.status();
  });
  std::vector<std::string> event_files;
  for (const auto& entry : std::filesystem::directory_iterator(options.log.dir)) {
    if (!absl::StrContains(entry.path().filename().string(), "tfevents")) continue;
    event_files.push_back(ReadFile(entry.path()).value_or(""));
  }
  ASSERT_EQ(event_files.size(), 1);
  for (const char* text : {"hyper_parameters", "| lr | 0.5 |"}) {
    EXPECT_TRUE(absl::StrContains(event_files[0], text)) << text;
  }
  std::ifstream lines(options.log.dir + "/metrics.jsonl");
  int evaluations = 0;
  std::string epoch;
  for (std::string line; std::getline(lines, line);) {
    evaluations += absl::StrContains(line, "test/accuracy");
    if (absl::StrContains(line, "\"event\":\"epoch\"")) epoch = line;
  }
  EXPECT_EQ(evaluations, 2);
  // ddp/config/progress.cc reads it.
  EXPECT_TRUE(absl::EndsWith(epoch,
                             ",\"event\":\"epoch\",\"epoch\":\"2\",\"epochs\":\"2\","
                             "\"steps\":\"10\",\"step_in_epoch\":\"10\"}"))
      << epoch;
  EXPECT_TRUE(std::filesystem::exists(options.checkpoint.manager.directory + "/epoch_2.pt"));

  // A run from scratch must not overwrite them; a resumed run has nothing left to do.
  RunRanks(2, [&](const session::Session& session) {
    auto again = Train(session, LineTask(), Halves(320), Halves(100), options);
    EXPECT_EQ(again.status().code(), absl::StatusCode::kAlreadyExists) << again.status();
    TrainerOptions resumed = options;
    resumed.checkpoint.resume = "auto";
    auto report = Train(session, LineTask(), Halves(320), Halves(100), resumed);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->steps, 20);
    TrainerOptions evaluated = resumed;
    evaluated.eval_only = true;
    report = Train(session, LineTask(), Halves(320), Halves(100), evaluated);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->epochs, 2);
    EXPECT_EQ(report->steps, 20);
    // Going back to epoch 1 would overwrite epoch 2.
    TrainerOptions rewound = options;
    rewound.checkpoint.resume = options.checkpoint.manager.directory + "/epoch_1.pt";
    report = Train(session, LineTask(), Halves(320), Halves(100), rewound);
    EXPECT_EQ(report.status().code(), absl::StatusCode::kAlreadyExists) << report.status();
    Task other = LineTask();
    other.name = "other";
    report = Train(session, other, Halves(320), Halves(100), resumed);
    EXPECT_TRUE(absl::StrContains(report.status().message(), "is of model 'line'"))
        << report.status();
    EXPECT_EQ(ExitCodeIn(report.status()), kUsageExitCode);
  });
}

// Wraps as `ddp` and remembers whether the graph was said to be static.
std::atomic<bool> wrapped_static_graph = false;
const Registration<ModelWrapperRegistry> kRecording(
    "recording",
    [](std::shared_ptr<torch::nn::Module> module, c10::intrusive_ptr<c10d::ProcessGroup> group,
       const DataParallelOptions& options) -> absl::StatusOr<std::shared_ptr<ModelWrapper>> {
      wrapped_static_graph = options.static_graph;
      return DataParallel::Create(std::move(module), std::move(group), options);
    });

TEST(TrainTest, AStaticGraphAccumulates) {
  std::vector<double> losses[2];
  for (const bool static_graph : {false, true}) {
    TrainerOptions options = Quiet();
    options.accumulate = 3;
    options.data_parallel.static_graph = static_graph;
    options.model_wrapper = "recording";
    RunRanks(2, [&](const session::Session& session) {
      auto report = Train(session, LineTask(), Halves(300), Halves(100), options);
      ASSERT_TRUE(report.ok()) << report.status();
      if (session.is_main()) losses[static_graph].push_back(report->test.loss);
    });
    EXPECT_EQ(wrapped_static_graph, static_graph);
  }
  ASSERT_EQ(losses[0].size(), 1);
  EXPECT_NEAR(losses[0][0], losses[1][0], 1e-6);
}

TEST(TrainTest, WithSyncBatchNormTheRanksTrainAsOneProcess) {
  const auto loss_of = [](int world_size, const std::string& sync_bn) {
    TrainerOptions options = Quiet();
    options.batch_size = 48 / world_size;
    options.sync_bn = sync_bn;
    options.data_parallel.broadcast_buffers = false;
    double loss = 0;
    RunRanks(world_size, [&](const session::Session& session) {
      auto report = Train(session, NetTask(), Halves(480), Halves(100), options);
      ASSERT_TRUE(report.ok()) << report.status();
      if (session.is_main()) loss = report->test.loss;
    });
    return loss;
  };
  const double whole = loss_of(1, "torch");
  EXPECT_NEAR(loss_of(3, "torch"), whole, 1e-5);
  EXPECT_GT(std::abs(loss_of(3, "none") - whole), 1e-4);
}

// 33 examples on each rank: the last batch has one.
TEST(TrainTest, DropLastLeavesOutTheBatchThatIsNotFull) {
  RunRanks(2, [&](const session::Session& session) {
    const auto train = [&](bool drop_last, int64_t examples) {
      TrainerOptions options = Quiet();
      options.sync_bn = "torch";
      options.drop_last = drop_last;
      return Train(session, NetTask(), Halves(examples), Halves(33), options);
    };
    const absl::StatusOr<Report> report = train(true, 66);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->steps, 2 * 2);  // of two epochs
    EXPECT_EQ(report->test.examples, 33);
    const absl::Status nothing = train(true, 30).status();
    EXPECT_TRUE(
        absl::StrContains(nothing.message(), "drop_last=true leaves nothing of 30 examples"))
        << nothing;
    const absl::Status one = train(false, 66).status();
    EXPECT_TRUE(absl::StrContains(one.message(), "layer 'norm' has one value per channel on rank"))
        << one;
  });
}

// As of an autoencoder.
class WithoutTargets : public Halves {
 public:
  using Halves::Halves;
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    return {Halves::Get(indices).input, {}};
  }
};

TEST(TrainTest, ADataSetMayHaveNoTargets) {
  RunRanks(2, [&](const session::Session& session) {
    const absl::Status refused =
        Train(session, LineTask(), WithoutTargets(64), WithoutTargets(32), Quiet()).status();
    EXPECT_TRUE(absl::StrContains(refused.message(), "a batch without targets")) << refused;
  });
  RunRanks(2, [&](const session::Session& session) {
    Task task = LineTask();
    task.loss = [](const at::Tensor& output, const at::Tensor&) { return output.pow(2).mean(); };
    task.correct = nullptr;
    auto report = Train(session, task, WithoutTargets(320), WithoutTargets(32), Quiet());
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_LT(report->test.loss, 0.01);
  });
}

TEST(TrainTest, InEachPrecisionAndStageItLearns) {
  std::map<std::string, double> losses;
  for (const std::string precision : {"fp32", "bf16", "fp16"}) {
    for (const int64_t stage : {0, 1, 2}) {
      TrainerOptions options = Quiet();
      options.precision = precision;
      options.zero.stage = stage;
      options.clip_norm = 1;
      // The first steps overflow and are skipped.
      options.grad_scaler.init_scale = 1e9;
      RunRanks(2, [&](const session::Session& session) {
        auto report = Train(session, LineTask(), Halves(900), Halves(100), options);
        ASSERT_TRUE(report.ok()) << report.status();
        EXPECT_GT(report->test.metrics.at("accuracy"), 0.9) << precision << " stage " << stage;
        if (!session.is_main()) return;
        if (stage == 0) losses[precision] = report->test.loss;
        EXPECT_EQ(report->test.loss, losses[precision]) << precision << " stage " << stage;
      });
    }
  }
  EXPECT_NE(losses["fp32"], losses["bf16"]);
  EXPECT_NE(losses["fp32"], losses["fp16"]);
  EXPECT_NEAR(losses["fp32"], losses["bf16"], 0.05);
}

TEST(TrainTest, ANaNThatStaysEndsARunInFp16WithAWord) {
  TrainerOptions options = Quiet();
  options.precision = "fp16";
  options.epochs = 100;
  testing::internal::CaptureStderr();
  RunRanks(2, [&](const session::Session& session) {
    Task task = LineTask();
    // The data of one rank.
    const bool bad = session.rank() == 1;
    task.loss = [bad, loss = task.loss](const at::Tensor& output, const at::Tensor& target) {
      return bad ? loss(output, target) * std::nan("") : loss(output, target);
    };
    const absl::Status failed = Train(session, task, Halves(100), Halves(100), options).status();
    EXPECT_TRUE(absl::StrContains(failed.message(), "GradScaler")) << failed;
    EXPECT_TRUE(absl::StrContains(failed.message(), "Look for NaN")) << failed;
  });
  const std::string printed = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(absl::StrContains(printed, "the last 10 steps in a row were skipped")) << printed;
}

TEST(TrainTest, WithUnevenBatchesEachExampleCountsOnce) {
  for (const int64_t examples : {97, 4, 2}) {
    for (const int64_t accumulate : {1, 2}) {
      std::map<int64_t, double> losses;
      for (const int64_t stage : {0, 1, 2}) {
        SCOPED_TRACE(
            absl::StrCat(examples, " examples, accumulate ", accumulate, ", stage ", stage));
        TrainerOptions options = Quiet();
        options.even_batches = false;
        options.accumulate = accumulate;
        options.zero.stage = stage;
        options.clip_norm = 0.7;
        options.batch_size = 4;
        options.optimizer = {.name = "adam", .lr = 0.05};
        std::vector<Report> reports(3);
        std::vector<std::atomic<int64_t>> used(3);
        RunRanks(3, [&](const session::Session& session) {
          Task task = LineTask();
          task.loss = [&, loss = task.loss](const at::Tensor& output, const at::Tensor& target) {
            if (output.requires_grad()) used[session.rank()] += output.size(0);
            return loss(output, target);
          };
          auto report = Train(session, task, Halves(examples), Halves(100), options);
          ASSERT_TRUE(report.ok()) << report.status();
          reports[session.rank()] = *report;
        });
        EXPECT_EQ(used[0] + used[1] + used[2], 2 * examples);
        for (const Report& report : reports) {
          EXPECT_EQ(report.epochs, 2);
          EXPECT_EQ(report.steps, reports[0].steps);
          EXPECT_EQ(report.test.loss, reports[0].test.loss);
        }
        losses[stage] = reports[0].test.loss;
      }
      EXPECT_NEAR(losses[1], losses[0], 1e-4);
      EXPECT_NEAR(losses[2], losses[0], 1e-4);
    }
  }
}

// What one process has in the end that takes all ranks' uneven batches, each example of a step with
// the same weight, with its own arithmetic of the schedule.
std::vector<at::Tensor> UnevenInOneProcess(const TrainerOptions& options, int ranks,
                                           int64_t examples) {
  const Task task = LineTask();
  const Halves data(examples);
  const int64_t batches =  // of rank 0, in an epoch
      (examples + ranks * options.batch_size - 1) / (ranks * options.batch_size);
  const int64_t steps = (batches + options.accumulate - 1) / options.accumulate;
  torch::optim::SGD sgd(
      task.module->parameters(),
      torch::optim::SGDOptions(0).momentum(0.9).weight_decay(options.optimizer.weight_decay));
  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    std::vector<std::vector<int64_t>> indices;
    for (int rank = 0; rank < ranks; ++rank) {
      auto sampler = *data::DistributedSampler::Create(
          examples, {.num_replicas = ranks, .rank = rank, .seed = options.seed, .pad = false});
      sampler.set_epoch(epoch);
      indices.push_back(sampler.Indices());
    }
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t first = step * options.accumulate;
      const int64_t last = std::min(first + options.accumulate, batches);
      int64_t count = 0;
      for (const std::vector<int64_t>& mine : indices) {
        for (int64_t batch = first; batch < last; ++batch) {
          const auto size = static_cast<int64_t>(mine.size());
          const int64_t begin = std::min(batch * options.batch_size, size);
          const int64_t end = std::min(begin + options.batch_size, size);
          if (begin == end) continue;
          const auto [input, target] = data.Get(absl::MakeConstSpan(&mine[begin], end - begin));
          const at::Tensor loss = task.loss(task.forward(input), target);
          (loss * (end - begin)).backward();
          count += end - begin;
        }
      }
      const double done = static_cast<double>(epoch * steps + step);
      const double factor =
          options.schedule.name == "cosine"
              ? (1 + std::cos(M_PI * done / static_cast<double>(options.epochs * steps))) / 2
              : std::pow(options.schedule.gamma, done);
      for (const at::Tensor& each : task.module->parameters()) {
        at::Tensor(each.grad()).div_(count);
      }
      sgd.param_groups()[0].options().set_lr(options.optimizer.lr * factor);
      sgd.step();
      task.module->zero_grad();
    }
  }
  return task.module->parameters();
}

// A rank that has run out goes on with the schedule of the others: of stages 1 and 2, its part of
// the parameters is its own to step.
TEST(TrainTest, WithUnevenBatchesAScheduleIsThatOfOneProcess) {
  for (const int ranks : {2, 3}) {
    for (const std::string schedule : {"cosine", "step"}) {
      for (const int64_t accumulate : {1, 2}) {
        TrainerOptions options = Quiet();
        options.even_batches = false;
        options.accumulate = accumulate;
        options.batch_size = 1;
        options.epochs = 3;
        options.optimizer.weight_decay = 0.01;
        options.schedule = {.name = schedule, .step_epochs = 1e-6, .gamma = 0.7};  // each step
        // A batch more on rank 0 than on the others, which may run out amid a step.
        const int64_t examples = 3 * ranks + 1;
        const std::vector<at::Tensor> expected = UnevenInOneProcess(options, ranks, examples);
        for (const int64_t stage : {0, 1, 2}) {
          SCOPED_TRACE(absl::StrCat(ranks, " ranks, ", schedule, ", accumulate ", accumulate,
                                    ", stage ", stage));
          options.zero.stage = stage;
          RunRanks(ranks, [&](const session::Session& session) {
            const Task task = LineTask();
            auto report = Train(session, task, Halves(examples), Halves(100), options);
            ASSERT_TRUE(report.ok()) << report.status();
            const std::vector<at::Tensor> trained = task.module->parameters();
            ASSERT_EQ(trained.size(), expected.size());
            for (size_t i = 0; i < trained.size(); ++i) {
              EXPECT_TRUE(at::allclose(trained[i], expected[i], 1e-5, 1e-5))
                  << "rank " << session.rank() << ": " << trained[i] << " and " << expected[i];
            }
          });
        }
      }
    }
  }
}

// Of ranks that have run out, what drop_last leaves out is none of a step's examples, whether the
// trainer knows their number or the steps count them.
TEST(TrainTest, WithUnevenBatchesThoseThatAreNotFullCountNothing) {
  TrainerOptions options = Quiet();
  options.even_batches = false;
  options.drop_last = true;
  options.batch_size = 4;
  std::vector<at::Tensor> ends[2];
  for (const bool by_step : {false, true}) {
    RunRanks(3, [&](const session::Session& session) {
      Task task = LineTask();
      if (by_step) {
        const auto line = std::dynamic_pointer_cast<Line>(task.module);
        task = TaskOf<data::Batch>("line", line, [line](data::Batch& batch, const StepContext&) {
          const at::Tensor loss =
              torch::nn::functional::cross_entropy(line->forward(batch.input), batch.target);
          return StepOutput{.loss = Mean(loss, batch.input.size(0))};
        });
      }
      // Two batches on rank 0, one and three examples on the others.
      const auto report = Train(session, task, Halves(22), Halves(60), options);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->steps, 4);
      if (!session.is_main()) return;
      for (const at::Tensor& each : task.module->parameters()) {
        ends[by_step].push_back(each.detach().clone());
      }
    });
  }
  ASSERT_EQ(ends[0].size(), 2);
  ASSERT_EQ(ends[1].size(), 2);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(at::allclose(ends[0][i], ends[1][i], 1e-5, 1e-6)) << ends[0][i] << ends[1][i];
  }
}

TEST(TrainTest, UnevenBatchesThatEndEarlyByChoiceAreAnError) {
  TrainerOptions options = Quiet();
  options.even_batches = false;
  options.batch_size = 1;
  options.join.throw_on_early_termination = true;
  RunRanks(3, [&](const session::Session& session) {
    auto report = Train(session, LineTask(), Halves(4), Halves(100), options);
    EXPECT_TRUE(absl::StrContains(report.status().message(), "rank 1, 2")) << report.status();
    EXPECT_EQ(report.status().code(), absl::StatusCode::kFailedPrecondition);
  });
  options.join.throw_on_early_termination = false;
  options.sync_bn = "torch";
  EXPECT_TRUE(absl::StrContains(Validate(options).message(), "even_batches")) << Validate(options);
}

TEST(TrainTest, OptionsThatHaveNoEffectBesideOthersAreNamed) {
  const auto printed = [](const TrainerOptions& options) {
    testing::internal::CaptureStderr();
    RunRanks(2, [&](const session::Session& session) {
      const auto report = Train(session, LineTask(), Halves(64), Halves(60), options);
      EXPECT_TRUE(report.ok()) << report.status();
    });
    return testing::internal::GetCapturedStderr();
  };
  TrainerOptions options = Quiet();
  options.epochs = 1;
  const std::string none = printed(options);
  EXPECT_EQ(none.find("has no effect"), std::string::npos) << none;
  options.zero.overlap_gather = true;
  options.zero.partition = "tensor";
  options.grad_scaler.growth_interval = 3;
  options.join.throw_on_early_termination = true;
  const std::string idle = printed(options);
  for (const char* line : {"zero.overlap_gather=true has no effect with zero.stage=0\n",
                           "zero.partition=tensor has no effect with zero.stage=0\n",
                           "grad_scaler.growth_interval=3 has no effect without precision=fp16\n",
                           "join.throw_on_early_termination=true has no effect with "
                           "even_batches=true\n"}) {
    const size_t at = idle.find(line);
    EXPECT_NE(at, std::string::npos) << line << " in:\n" << idle;
    EXPECT_EQ(idle.find(line, at + 1), std::string::npos) << idle;
  }
  options.zero.stage = 1;
  options.precision = "fp16";
  options.even_batches = false;
  const std::string used = printed(options);
  EXPECT_EQ(used.find("has no effect"), std::string::npos) << used;
}

TEST(AgreeTest, OneRanksErrorReachesAll) {
  RunRanks(3, [&](const session::Session& session) {
    EXPECT_TRUE(session.Agree(absl::OkStatus()).ok());
    absl::Status mine = session.rank() == 2 ? absl::NotFoundError("no file") : absl::OkStatus();
    absl::Status agreed = session.Agree(mine);
    EXPECT_EQ(agreed.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(agreed.message(), "rank 2: no file");
    EXPECT_EQ(*session.Broadcast(absl::StrCat("from ", session.rank())), "from 0");
  });
}

TEST(ValidateTest, NamesOptionAndValue) {
  TrainerOptions options;
  EXPECT_TRUE(Validate(options).ok());
  options.batch_size = 0;
  EXPECT_EQ(Validate(options).message(), "batch_size=0 must be at least 1");
  options = {};
  options.optimizer.lr = -1;
  EXPECT_EQ(Validate(options).message(), "optimizer.lr=-1 must be at least 0");
  options = {};
  options.schedule.step_epochs = std::nan("");
  EXPECT_FALSE(Validate(options).ok());
  options = {};
  options.checkpoint.resume = "auto";
  EXPECT_FALSE(Validate(options).ok());
  options = {};
  options.checkpoint.manager.format = "zip";
  EXPECT_EQ(Validate(options).code(), absl::StatusCode::kNotFound);
  options = {};
  options.log.dir = "caf\xe9";
  EXPECT_TRUE(absl::StrContains(Validate(options).message(), "log.dir=caf\\xe9 is not UTF-8"));
  options = {};
  options.data_parallel.static_graph = true;
  EXPECT_TRUE(Validate(options).ok());
  options.zero.stage = 2;
  EXPECT_TRUE(absl::StrContains(Validate(options).message(),
                                "data_parallel.static_graph=true has no effect with zero.stage=2"))
      << Validate(options);
}

}  // namespace
}  // namespace ddp::trainer
