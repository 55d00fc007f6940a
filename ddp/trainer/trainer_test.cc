#include "ddp/trainer/trainer.h"

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

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
          EXPECT_DOUBLE_EQ(result->accuracy, alone->accuracy);
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
    EXPECT_GT(report.test.accuracy, 0.9);
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
  EXPECT_DOUBLE_EQ(static_cast<double>(correct) / 101, reports[0].test.accuracy);
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
  int event_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(options.log.dir)) {
    event_files += absl::StrContains(entry.path().filename().string(), "tfevents");
  }
  EXPECT_EQ(event_files, 1);
  std::ifstream lines(options.log.dir + "/metrics.jsonl");
  int evaluations = 0;
  for (std::string line; std::getline(lines, line);) {
    evaluations += absl::StrContains(line, "test/accuracy");
  }
  EXPECT_EQ(evaluations, 2);
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
  });
}

TEST(TrainTest, AStaticGraphAccumulates) {
  std::vector<double> losses[2];
  for (const bool static_graph : {false, true}) {
    TrainerOptions options = Quiet();
    options.accumulate = 3;
    options.data_parallel.static_graph = static_graph;
    RunRanks(2, [&](const session::Session& session) {
      auto report = Train(session, LineTask(), Halves(300), Halves(100), options);
      ASSERT_TRUE(report.ok()) << report.status();
      if (session.is_main()) losses[static_graph].push_back(report->test.loss);
    });
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
        EXPECT_GT(report->test.accuracy, 0.9) << precision << " stage " << stage;
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
  options.sync_bn = "none";
  options.model_wrapper = "passing";
  RunRanks(2, [&](const session::Session& session) {
    auto report = Train(session, LineTask(), Halves(4), Halves(100), options);
    EXPECT_TRUE(absl::StrContains(report.status().message(), "passing")) << report.status();
  });
}

std::atomic<int> wraps = 0, forwards = 0;

// A program's own wrapper.
class Passing : public ModelWrapper {
 public:
  explicit Passing(std::shared_ptr<ModelWrapper> inner) : inner_(std::move(inner)) {}
  void PreForward() override {
    ++forwards;
    inner_->PreForward();
  }
  void PostForward(const std::vector<at::Tensor>& outputs) override {
    inner_->PostForward(outputs);
  }
  void set_require_backward_grad_sync(bool require) override {
    inner_->set_require_backward_grad_sync(require);
  }
  void SyncBuffers() override { inner_->SyncBuffers(); }
  void zero_grad(bool set_to_none) override { inner_->zero_grad(set_to_none); }
  bool reduces_gradients() const override { return inner_->reduces_gradients(); }
  int world_size() const override { return inner_->world_size(); }

 private:
  std::shared_ptr<ModelWrapper> inner_;
};

const Registration<ModelWrapperRegistry> kPassing(
    "passing",
    [](std::shared_ptr<torch::nn::Module> module, c10::intrusive_ptr<c10d::ProcessGroup> group,
       const DataParallelOptions& options) -> absl::StatusOr<std::shared_ptr<ModelWrapper>> {
      ++wraps;
      auto inner = DataParallel::Create(std::move(module), std::move(group), options);
      if (!inner.ok()) return inner.status();
      return std::make_shared<Passing>(*std::move(inner));
    });

TEST(TrainTest, AProgramsOwnWrapperIsFoundByName) {
  const int wraps_before = wraps, forwards_before = forwards;
  std::map<std::string, double> losses;
  for (const std::string wrapper : {"ddp", "passing"}) {
    TrainerOptions options = Quiet();
    options.model_wrapper = wrapper;
    RunRanks(2, [&](const session::Session& session) {
      auto report = Train(session, LineTask(), Halves(300), Halves(100), options);
      ASSERT_TRUE(report.ok()) << report.status();
      if (session.is_main()) losses[wrapper] = report->test.loss;
    });
  }
  EXPECT_EQ(losses["ddp"], losses["passing"]);
  EXPECT_EQ(wraps - wraps_before, 2);
  EXPECT_EQ(forwards - forwards_before, 2 * 2 * 10);  // ranks, epochs, batches
  TrainerOptions options = Quiet();
  options.model_wrapper = "fsdp";
  const absl::Status unknown = Validate(options);
  EXPECT_TRUE(absl::StrContains(unknown.message(), "fsdp")) << unknown;
  EXPECT_TRUE(absl::StrContains(unknown.message(), "ddp, passing")) << unknown;
}

// Wrappers that do not look at DataParallelOptions::reduce_gradients.
template <bool reduces>
absl::StatusOr<std::shared_ptr<ModelWrapper>> WrapAnyhow(
    std::shared_ptr<torch::nn::Module> module, c10::intrusive_ptr<c10d::ProcessGroup> group,
    const DataParallelOptions& options) {
  DataParallelOptions own = options;
  own.reduce_gradients = reduces;
  return DataParallel::Create(std::move(module), std::move(group), own);
}
const Registration<ModelWrapperRegistry> kReducing("reducing", &WrapAnyhow<true>);
const Registration<ModelWrapperRegistry> kSilent("silent", &WrapAnyhow<false>);

TEST(TrainTest, GradientsAreReducedOnceOrTheWrapperIsRefused) {
  for (const int64_t stage : {0, 1, 2}) {
    for (const std::string wrapper : {"reducing", "silent"}) {
      TrainerOptions options = Quiet();
      options.zero.stage = stage;
      options.model_wrapper = wrapper;
      RunRanks(2, [&](const session::Session& session) {
        const absl::Status trained =
            Train(session, LineTask(), Halves(300), Halves(100), options).status();
        EXPECT_EQ(trained.ok(), (stage < 2) == (wrapper == "reducing")) << stage << trained;
        if (trained.ok()) return;
        EXPECT_TRUE(absl::StrContains(trained.message(), wrapper)) << trained;
        EXPECT_TRUE(absl::StrContains(trained.message(), "zero.stage")) << trained;
      });
    }
  }
}

TEST(TrainTest, TakesAModuleThatIsWrappedAlready) {
  RunRanks(2, [&](const session::Session& session) {
    const Task plain = LineTask();
    auto report = Train(session, plain, Halves(300), Halves(100), Quiet());
    ASSERT_TRUE(report.ok()) << report.status();

    auto module = std::dynamic_pointer_cast<Line>(LineTask().module);
    auto wrapped = *ddp::Wrap(module, session.process_group());
    const Task task = Classification("line", wrapped);
    auto of_wrapped = Train(session, task, Halves(300), Halves(100), Quiet());
    ASSERT_TRUE(of_wrapped.ok()) << of_wrapped.status();
    EXPECT_EQ(of_wrapped->test.loss, report->test.loss);

    auto alone = *ddp::Wrap(std::dynamic_pointer_cast<Line>(LineTask().module), nullptr);
    auto refused = Train(session, Classification("line", alone), Halves(300), Halves(100), Quiet());
    EXPECT_TRUE(absl::StrContains(refused.status().message(), "wrapped for 1 ranks"))
        << refused.status();
  });
}

// The bytes that the last record of metrics.jsonl has for this tag; -1 if it has none.
double Recorded(const std::string& log_dir, const std::string& tag) {
  std::ifstream lines(log_dir + "/metrics.jsonl");
  double value = -1;
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.find(absl::StrCat("\"", tag, "\":"));
    if (at != std::string::npos) value = std::stod(line.substr(at + tag.size() + 3));
  }
  return value;
}

TEST(CommHookTest, TrainsWithEachAndReportsItsVolume) {
  constexpr double kBytes = 4 * 6;  // of Line
  for (const std::string& name : hooks::HookRegistry::Names()) {
    for (const int64_t stage : {0, 1, 2}) {
      if (stage == 2 && (name == "noop" || name == "powersgd")) continue;
      TrainerOptions options = Quiet();
      options.comm_hook.name = name;
      options.zero.stage = stage;
      options.log.dir = absl::StrCat(testing::TempDir(), "/", name, stage);
      options.log.every = 3;
      RunRanks(2, [&](const session::Session& session) {
        auto report = Train(session, LineTask(), Halves(320), Halves(100), options);
        ASSERT_TRUE(report.ok()) << name << ", stage " << stage << ": " << report.status();
        if (name == "noop") return;
        EXPECT_GT(report->test.accuracy, 0.9) << name << ", stage " << stage;
      });
      const double bytes = Recorded(options.log.dir, "train/comm_bytes");
      const double share = name == "noop" ? 0 : absl::EndsWith(name, "_compress") ? 0.5 : 1;
      if (stage < 2) {
        EXPECT_EQ(bytes, kBytes * share) << name << ", stage " << stage;
      } else {
        EXPECT_GE(bytes, kBytes * share);  // and padding
        EXPECT_LE(bytes, 2 * 2 * 64 * share);
      }
      EXPECT_EQ(Recorded(options.log.dir, "train/gather_bytes") > 0, stage > 0);
    }
  }
}

TEST(CommHookTest, RefusalsNameTheOption) {
  TrainerOptions options = Quiet();
  options.zero.stage = 2;
  options.comm_hook.name = "powersgd";
  EXPECT_EQ(Validate(options).message(),
            "comm_hook.name=powersgd does not go with zero.stage=2, which reduces gradients itself "
            "and takes allreduce, bf16_compress, fp16_compress");
  options.zero.stage = 1;
  EXPECT_TRUE(Validate(options).ok());
  options.comm_hook.name = "lion";
  EXPECT_EQ(Validate(options).message(),
            "comm_hook.name=lion is none of allreduce, bf16_compress, fp16_compress, noop, "
            "powersgd");
  options.comm_hook.name = "bf16_compress";
  options.even_batches = false;
  options.join.divide_by_initial_world_size = false;
  EXPECT_TRUE(absl::StrContains(Validate(options).message(), "comm_hook.name=bf16_compress"));
  options.zero.stage = 2;  // which divides by itself
  EXPECT_TRUE(Validate(options).ok());
  options.even_batches = true;
  options.zero.stage = 0;
  RunRanks(2, [&](const session::Session& session) {
    auto wrapped =
        *ddp::Wrap(std::dynamic_pointer_cast<Line>(LineTask().module), session.process_group());
    ASSERT_TRUE(
        hooks::Register({.name = "noop"}, session.process_group(), wrapped->parallel()).ok());
    auto refused =
        Train(session, Classification("line", wrapped), Halves(300), Halves(100), options);
    EXPECT_TRUE(absl::StrContains(refused.status().message(),
                                  "comm_hook.name=bf16_compress cannot be registered"))
        << refused.status();
  });
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
}

}  // namespace
}  // namespace ddp::trainer
