// What reduces gradients in Train: model wrappers, modules that are wrapped already, communication
// hooks.

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ddp/hooks/powersgd.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/conv.h"

namespace ddp::trainer {
namespace {

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

TEST(WrapperTest, AProgramsOwnWrapperIsFoundByName) {
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

TEST(WrapperTest, OneThatCannotBeJoinedIsRefusedForUnevenBatches) {
  TrainerOptions options = Quiet();
  options.even_batches = false;
  options.model_wrapper = "passing";
  RunRanks(2, [&](const session::Session& session) {
    auto report = Train(session, LineTask(), Halves(4), Halves(100), options);
    EXPECT_TRUE(absl::StrContains(report.status().message(), "passing")) << report.status();
  });
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

TEST(WrapperTest, GradientsAreReducedOnceOrTheWrapperIsRefused) {
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

TEST(WrapperTest, ParametersOfARanksOwnAreRefusedWhereAllMustAgree) {
  const std::map<std::string, std::function<void(TrainerOptions&)>> settings = {
      {"clip_norm", [](TrainerOptions& options) { options.clip_norm = 1; }},
      {"zero.stage", [](TrainerOptions& options) { options.zero.stage = 1; }},
      {"check_agreement_every", [](TrainerOptions& options) { options.check_agreement_every = 2; }},
      {"", [](TrainerOptions&) {}}};
  for (const auto& [name, set] : settings) {
    SCOPED_TRACE(name);
    for (const bool wrapped : {false, true}) {
      TrainerOptions options = Quiet();
      set(options);
      RunRanks(2, [&](const session::Session& session) {
        Task task = LineTask();
        DataParallelOptions ignoring = {.reduce_gradients = options.zero.stage < 2,
                                        .ignored = {"linear.bias"}};
        TrainerOptions mine = options;
        if (wrapped) {
          task.parallel = *DataParallel::Create(task.module, session.process_group(), ignoring);
        } else {
          mine.data_parallel = ignoring;
        }
        const absl::Status trained = Train(session, task, Halves(300), Halves(100), mine).status();
        EXPECT_EQ(trained.ok(), name.empty()) << trained;
        if (trained.ok()) return;
        EXPECT_TRUE(absl::StrContains(trained.message(), "data_parallel.ignored")) << trained;
        EXPECT_TRUE(absl::StrContains(trained.message(), name)) << trained;
      });
    }
  }
}

// Nothing would mend a bit of a frozen parameter that has flipped.
TEST(WrapperTest, FrozenParametersAreComparedUnlessTheyAreARanksOwn) {
  for (const bool ignored : {false, true}) {
    TrainerOptions options = Quiet();
    options.check_agreement_every = 2;
    if (ignored) options.data_parallel.ignored = {"linear.bias"};
    RunRanks(2, [&](const session::Session& session) {
      const Task task = LineTask();
      at::Tensor bias = task.module->named_parameters()["linear.bias"];
      bias.set_requires_grad(false);
      TrainerOptions mine = options;
      mine.on_step = [&](int64_t step, const at::Tensor&) {
        if (step == 3 && session.rank() == 1) bias.add_(1);
        return StepAction::kContinue;
      };
      const absl::Status trained = Train(session, task, Halves(300), Halves(100), mine).status();
      EXPECT_EQ(trained.ok(), ignored) << trained;
      const char* message = "parameters after step 4: tensor 'linear.bias'";
      EXPECT_EQ(absl::StrContains(trained.message(), message), !ignored) << trained;
    });
  }
}

TEST(WrapperTest, TakesAModuleThatIsWrappedAlready) {
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

    Task mixed = task;
    mixed.module = LineTask().module;
    refused = Train(session, mixed, Halves(300), Halves(100), Quiet());
    EXPECT_TRUE(absl::StrContains(refused.status().message(), "is of another module"))
        << refused.status();
  });
}

struct Image : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return conv->forward(x.view({-1, 2, 1, 1}).expand({-1, 2, 3, 3})).flatten(1);
  }
  torch::nn::Conv2d conv{register_module("conv", torch::nn::Conv2d(2, 2, 3))};
};

// Its buckets have the parameters' order, which would change under them.
TEST(WrapperTest, AWrappedModuleMustBeInChannelsLastOrder) {
  RunRanks(2, [&](const session::Session& session) {
    for (const bool converted : {false, true}) {
      auto image = std::make_shared<Image>();
      if (converted) {
        const at::NoGradGuard no_grad;
        image->conv->weight.set_data(
            image->conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
      }
      Task task = Classification("image", *ddp::Wrap(image, session.process_group()));
      task.channels_last = true;
      const absl::Status status = Train(session, task, Halves(64), Halves(32), Quiet()).status();
      EXPECT_EQ(status.ok(), converted) << status;
      if (converted) continue;
      EXPECT_TRUE(
          absl::StrContains(status.message(), "'conv.weight' is not in channels-last order"))
          << status;
    }
  });
}

struct OnMeta : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight{register_parameter("weight", at::ones({2}, at::kMeta))};
};

// So are its buckets.
TEST(WrapperTest, AWrappedModuleMustBeOnTheSessionsDevice) {
  RunRanks(1, [&](const session::Session& session) {
    auto wrapped = ddp::Wrap(std::make_shared<OnMeta>(), session.process_group());
    ASSERT_TRUE(wrapped.ok()) << wrapped.status();
    const absl::Status status =
        Train(session, Classification("meta", *wrapped), Halves(64), Halves(32), Quiet()).status();
    EXPECT_TRUE(absl::StrContains(status.message(),
                                  "parameter 'weight' is on meta, and the "
                                  "session's device is cpu; move the module"))
        << status;
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
      for (const int64_t accumulate : {1, 2}) {
        SCOPED_TRACE(absl::StrCat(name, ", stage ", stage, ", accumulate ", accumulate));
        TrainerOptions options = Quiet();
        options.comm_hook.name = name;
        options.zero.stage = stage;
        options.accumulate = accumulate;
        options.log.dir = absl::StrCat(testing::TempDir(), "/", name, stage, accumulate);
        options.log.every = 3;
        RunRanks(2, [&](const session::Session& session) {
          auto report = Train(session, LineTask(), Halves(320), Halves(100), options);
          ASSERT_TRUE(report.ok()) << report.status();
          if (name == "noop" || accumulate > 1) return;
          EXPECT_GT(report->test.metrics.at("accuracy"), 0.9);
        });
        const double bytes = Recorded(options.log.dir, "train/comm_bytes");
        const double share = name == "noop" ? 0 : absl::EndsWith(name, "_compress") ? 0.5 : 1;
        if (stage < 2) {
          EXPECT_EQ(bytes, kBytes * share);  // only the last backward of a step reduces
        } else {
          // Each backward reduces, with padding.
          const auto backwards = static_cast<double>(accumulate);
          EXPECT_GE(bytes, backwards * kBytes * share);
          EXPECT_LE(bytes, backwards * 2 * 2 * 64 * share);
        }
        EXPECT_EQ(Recorded(options.log.dir, "train/gather_bytes") > 0, stage > 0);
      }
    }
  }
}

// With the options by default it would not: a thousand steps, and matrices of this size, go as they
// are.
TEST(CommHookTest, PowerSgdCompresses) {
  TrainerOptions options = Quiet();
  options.comm_hook.name = "powersgd";
  options.comm_hook.implementations.Mutable<hooks::PowerSgdOptions>("powersgd") = {
      .matrix_approximation_rank = 1, .start_iter = 5, .min_compression_rate = 1};
  options.log.dir = absl::StrCat(testing::TempDir(), "/powersgd");
  options.log.every = 1;
  RunRanks(2, [&](const session::Session& session) {
    auto report = Train(session, NetTask(), Halves(640), Halves(200), options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_GT(report->test.metrics.at("accuracy"), 0.8);
  });
  // Of both matrices (2 x 16) a column and a row; the biases and the norm's parameters whole.
  constexpr double kNumbers = 2 * (2 + 16) + 16 + 2 + 2 * 16;
  EXPECT_EQ(Recorded(options.log.dir, "train/comm_bytes"), 4 * kNumbers);
}

// If the count of the first step were taken for ever, the 16-bit gradients of the last ones would
// be infinite.
TEST(CommHookTest, TheGreatestCountSoFarScalesTheSums) {
  TrainerOptions options = Quiet();
  options.epochs = 1;
  options.optimizer = {.name = "sgd", .lr = 1, .momentum = 0.0};
  options.comm_hook.name = "fp16_compress";
  const auto end = [&](int64_t stop_at_step) {
    std::vector<at::Tensor> parameters;
    options.stop_at_step = stop_at_step;
    RunRanks(2, [&](const session::Session& session) {
      const auto line = std::make_shared<Line>();
      {
        const at::NoGradGuard no_grad;
        for (at::Tensor& parameter : line->parameters()) parameter.fill_(1);
      }
      const auto step = [=](data::Batch& batch, const StepContext& context) {
        const double count = context.step == 0 ? 4 : 1 << 15;
        const double gradient = context.step < 2 ? 1 : 1000;
        const at::Tensor mean = line->forward(at::ones_like(batch.input)).mean(0).sum() * gradient;
        return StepOutput{.loss = SumAndCount(mean * count, count)};
      };
      const auto report =
          Train(session, TaskOf<data::Batch>("line", line, step), Halves(128), Halves(60), options);
      ASSERT_TRUE(report.ok()) << report.status();
      if (session.is_main()) parameters = line->parameters();
    });
    return parameters;
  };
  const auto expect = [](const std::vector<at::Tensor>& parameters) {
    ASSERT_EQ(parameters.size(), 2u);
    for (const at::Tensor& each : parameters) {
      EXPECT_TRUE(at::equal(each, at::full_like(each, 1 - 2 - 2 * 1000))) << each;
    }
  };
  expect(end(0));
  // A checkpoint keeps it.
  options.checkpoint.manager.directory = testing::TempDir() + "/greatest_count";
  options.checkpoint.resume = "auto";
  std::filesystem::remove_all(options.checkpoint.manager.directory);
  end(2);
  expect(end(0));
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

// The norm that is logged is that of the mean gradient of both ranks, before it is clipped.
TEST(GradientNormTest, IsThatOfAllExamplesAlsoWhereItIsClipped) {
  const Halves data(32);
  std::vector<int64_t> all(32);
  std::iota(all.begin(), all.end(), 0);
  const data::Batch batch = data.Get(all);
  const Task alone = LineTask();
  alone.loss(alone.forward(batch.input), batch.target).backward();
  double squares = 0;
  for (const at::Tensor& parameter : alone.module->parameters()) {
    squares += parameter.grad().pow(2).sum().item<double>();
  }
  const double expected = std::sqrt(squares);
  ASSERT_GT(expected, 0.01);
  for (const int64_t stage : {0, 1, 2}) {
    for (const std::string precision : {"fp32", "fp16"}) {
      for (const bool clips : {false, true}) {
        SCOPED_TRACE(absl::StrCat(stage, precision, clips));
        TrainerOptions options = Quiet();
        options.max_steps = 1;
        options.zero.stage = stage;
        options.precision = precision;
        options.grad_scaler.init_scale = 1024;
        options.clip_norm = clips ? expected / 4 : 0;
        options.monitor.gradient_norm = true;
        options.log.dir = absl::StrCat(testing::TempDir(), "/norm_", stage, precision, clips);
        options.log.every = 1;
        std::filesystem::remove_all(options.log.dir);
        RunRanks(2, [&](const session::Session& session) {
          const auto report = Train(session, LineTask(), data, Halves(60), options);
          ASSERT_TRUE(report.ok()) << report.status();
        });
        const auto logged = Logged(options.log.dir, "train/gradient_norm");
        ASSERT_EQ(logged.size(), 1u);
        EXPECT_NEAR(logged.at(1), expected, expected * (precision == "fp32" ? 1e-5 : 0.02));
      }
    }
  }
}

// Six parameters on three ranks: each has at most a part of them.
TEST(OverlapGatherTest, OnStepSeesWholeParameters) {
  for (const int64_t stage : {1, 2}) {
    std::vector<std::vector<at::Tensor>> seen(3);
    RunRanks(3, [&](const session::Session& session) {
      TrainerOptions options = Quiet();
      options.zero.stage = stage;
      options.zero.overlap_gather = true;
      const Task task = LineTask();
      options.on_step = [&](int64_t, const at::Tensor&) {
        for (const at::Tensor& parameter : task.module->parameters()) {
          seen[session.rank()].push_back(parameter.detach().clone());
        }
        return StepAction::kContinue;
      };
      const auto report = Train(session, task, Halves(300), Halves(100), options);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->steps, 2 * 7);
    });
    for (int rank = 0; rank < 3; ++rank) {
      ASSERT_EQ(seen[rank].size(), 2 * 14);  // weight and bias after each step
      for (size_t i = 0; i < seen[0].size(); ++i) {
        EXPECT_TRUE(at::equal(seen[rank][i], seen[0][i])) << "stage " << stage << " rank " << rank;
      }
    }
  }
}

}  // namespace
}  // namespace ddp::trainer
