// A run that is stopped and resumed equals an uninterrupted one: at any step, with any world size.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/progress_board.h"
#include "checkpoint/manager.h"
#include "ddp/hooks/powersgd.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

// Two ranks have 11 batches of 16 per epoch; the last has 5 examples.
constexpr int64_t kExamples = 330;

struct Setting {
  const char* name;
  int world_size = 2;
  std::string optimizer = "sgd";
  int64_t accumulate = 1;
  double dropout = 0;
  bool broadcast_buffers = true;
  int64_t zero_stage = 0;
  std::string precision = "fp32";
  bool static_graph = false;
  std::string comm_hook = "allreduce";
  std::string groups = "";  // with no_decay, if there are some
};

constexpr char kGroups[] = "^out:lr=0.02,norm:lr_mult=2:weight_decay=0";

class ResumeTest : public testing::TestWithParam<Setting> {
 protected:
  void SetUp() override { std::filesystem::remove_all(Root()); }

  std::string Root() const {
    std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    std::replace(name.begin(), name.end(), '/', '_');
    return absl::StrCat(testing::TempDir(), "/", name);
  }

  // Over hier two ranks would be on one host, where hier is shm.
  int world_size() const {
    const char* backend = std::getenv("DDP_TEST_BACKEND");
    const bool hier = backend != nullptr && absl::StartsWith(backend, "hier");
    return GetParam().world_size == 2 && hier ? 3 : GetParam().world_size;
  }

  TrainerOptions Options(const std::string& folder) const {
    TrainerOptions options = Quiet();
    options.optimizer = {.name = GetParam().optimizer, .lr = 0.05};
    options.optimizer.groups = GetParam().groups;
    if (!GetParam().groups.empty()) {
      options.optimizer.no_decay = true;
      options.optimizer.weight_decay = 0.1;
    }
    options.schedule.name = "cosine";
    options.accumulate = GetParam().accumulate;
    options.zero.stage = GetParam().zero_stage;
    options.clip_norm = 0.5;
    options.precision = GetParam().precision;
    // The scale is too large at first, and grows within the run.
    options.grad_scaler = {.init_scale = 1e9, .backoff_factor = 1e-4, .growth_interval = 4};
    options.data_parallel.broadcast_buffers = GetParam().broadcast_buffers;
    options.data_parallel.static_graph = GetParam().static_graph;
    options.comm_hook.name = GetParam().comm_hook;
    options.comm_hook.implementations.Mutable<hooks::PowerSgdOptions>("powersgd") = {
        .start_iter = 2, .min_compression_rate = 0.5};
    options.checkpoint.manager.directory = absl::StrCat(Root(), "/", folder);
    return options;
  }

  // All ranks report the same; it is returned. Sets trained_batches_.
  Report Run(const TrainerOptions& options) {
    trained_batches_ = 0;
    std::vector<Report> reports(world_size());
    RunRanks(world_size(), [&](const session::Session& session) {
      Task task = NetTask(GetParam().dropout);
      if (session.is_main()) CountTrainedBatches(task, trained_batches_);
      // An evaluation may draw random numbers: training must not see which it drew.
      const auto count = task.correct;
      task.correct = [count](const at::Tensor& output, const at::Tensor& target) {
        return count(output + at::rand({1}).mul(0), target);
      };
      auto report = Train(session, task, Halves(kExamples), Halves(60), options);
      ASSERT_TRUE(report.ok()) << report.status();
      reports[session.rank()] = *report;
    });
    for (const Report& report : reports) {
      EXPECT_EQ(report.steps, reports[0].steps);
      EXPECT_EQ(report.epochs, reports[0].epochs);
      EXPECT_EQ(report.test.loss, reports[0].test.loss);
    }
    return reports[0];
  }

  // Number of batches of rank 0 in the last Run: a run from scratch would end with the same tensors
  // as a resumed one.
  int64_t trained_batches_ = 0;
};

// Every tensor anywhere in a value, with its path.
void Tensors(const std::string& path, const c10::IValue& value,
             std::map<std::string, at::Tensor>& tensors) {
  if (value.isTensor()) tensors[path] = value.toTensor();
  if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      const std::string key =
          entry.key().isString() ? entry.key().toStringRef() : absl::StrCat(entry.key().toInt());
      Tensors(absl::StrCat(path, "/", key), entry.value(), tensors);
    }
  }
  if (value.isList()) {
    int i = 0;
    for (const c10::IValue& element : value.toListRef()) {
      Tensors(absl::StrCat(path, "/", i++), element, tensors);
    }
  }
}

std::map<std::string, at::Tensor> TensorsOf(const std::string& file) {
  std::map<std::string, at::Tensor> tensors;
  auto state = checkpoint::Manager::Load(file);
  EXPECT_TRUE(state.ok()) << state.status();
  if (!state.ok()) return tensors;
  Tensors("", c10::IValue(state->root), tensors);
  for (const auto& [rank, own] : state->per_rank) {
    Tensors(absl::StrCat("/per_rank/", rank), c10::IValue(own), tensors);
  }
  return tensors;
}

// Scale and growth tracker of the gradient scaler; empty without one.
std::vector<double> ScaleAndTracker(const std::string& file) {
  auto state = checkpoint::Manager::Load(file);
  EXPECT_TRUE(state.ok()) << state.status();
  if (!state.ok() || !state->root.contains("scaler")) return {};
  const auto scaler = state->root.at("scaler").toGenericDict();
  return {scaler.at("scale").toDouble(), static_cast<double>(scaler.at("_growth_tracker").toInt())};
}

int64_t Integer(const std::string& file, const std::string& key) {
  auto state = checkpoint::Manager::Load(file);
  EXPECT_TRUE(state.ok()) << state.status();
  return state.ok() ? state->root.at(key).toInt() : -1;
}

// Compares all tensors of two checkpoints; random states only with a world size of 1.
void ExpectSame(const std::string& file, const std::string& other, int world_size) {
  const auto a = TensorsOf(file), b = TensorsOf(other);
  ASSERT_EQ(a.size(), b.size());
  ASSERT_GT(a.size(), 12);
  EXPECT_EQ(ScaleAndTracker(file), ScaleAndTracker(other));
  for (const auto& [path, tensor] : a) {
    if (world_size > 1 && absl::StartsWith(path, "/rng")) continue;
    ASSERT_EQ(b.count(path), 1) << path;
    EXPECT_TRUE(at::equal(tensor, b.at(path))) << path << " of " << other;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Settings, ResumeTest,
    testing::Values(Setting{"one_rank_dropout", 1, "sgd", 1, 0.3},
                    Setting{"one_rank_accumulating", 1, "adam", 3, 0.3}, Setting{"sgd"},
                    Setting{"adamw", 2, "adamw"}, Setting{"accumulating", 2, "sgd", 2},
                    Setting{"own_buffers", 2, "sgd", 2, 0, false}, Setting{"three_ranks", 3},
                    Setting{"three_ranks_zero_1", 3, "adamw", 2, 0, true, 1},
                    Setting{"three_ranks_zero_2", 3, "adamw", 1, 0, true, 2},
                    Setting{"three_ranks_static_graph", 3, "sgd", 2, 0, true, 0, "fp32", true},
                    Setting{"zero_1", 2, "adamw", 2, 0, true, 1},
                    Setting{"zero_2", 2, "adamw", 1, 0, true, 2},
                    Setting{"bf16", 2, "sgd", 1, 0, true, 0, "bf16"},
                    Setting{"fp16", 2, "sgd", 1, 0, true, 0, "fp16"},
                    Setting{"fp16_zero_2", 2, "adamw", 2, 0, true, 2, "fp16"},
                    Setting{"powersgd", 2, "sgd", 2, 0, true, 0, "fp32", false, "powersgd"},
                    Setting{"three_ranks_powersgd_zero_1", 3, "adamw", 1, 0, true, 1, "fp32", false,
                            "powersgd"},
                    Setting{"groups", 2, "rmsprop", 1, 0, true, 0, "fp32", false, "allreduce",
                            kGroups},
                    Setting{"three_ranks_groups_zero_2", 3, "adamw", 2, 0, true, 2, "fp32", false,
                            "allreduce", kGroups}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(ResumeTest, StoppedAtAStepAndResumedIsTheUninterruptedRun) {
  const Report whole = Run(Options("whole"));
  const int64_t whole_batches = trained_batches_;
  ASSERT_GE(whole_batches, whole.steps);
  const std::string last = Options("whole").checkpoint.manager.directory + "/epoch_2.pt";
  const int64_t per_epoch = whole.steps / 2;
  ASSERT_GT(per_epoch, 3);
  const std::vector<double> scale = ScaleAndTracker(last);
  ASSERT_EQ(scale.empty(), GetParam().precision != "fp16");
  if (!scale.empty()) {
    ASSERT_LT(scale[0], 1e9);
    // It has grown: 1e9, 1e5, 1e1, … and then no power of ten.
    ASSERT_GT(std::fmod(std::log10(scale[0]) + 40, 1), 0.05) << scale[0];
  }
  // The first step, the last but one of an epoch, its end, and within the second.
  for (int64_t stop : {int64_t{1}, per_epoch - 1, per_epoch, per_epoch + 2}) {
    // The run resumed after step 1 has its final buckets from step 4 on, the uninterrupted one from
    // step 3.
    if (GetParam().static_graph && stop == 1) continue;
    SCOPED_TRACE(absl::StrCat("stopped after step ", stop));
    TrainerOptions options = Options(absl::StrCat("stopped_at_", stop));
    options.stop_at_step = stop;
    Report report = Run(options);
    const int64_t stopped_batches = trained_batches_;
    EXPECT_EQ(report.steps, stop);
    EXPECT_EQ(report.epochs, stop / per_epoch);
    const std::string file =
        absl::StrCat(options.checkpoint.manager.directory, "/epoch_", stop / per_epoch,
                     stop % per_epoch == 0 ? "" : absl::StrCat("_step_", stop), ".pt");
    ASSERT_TRUE(std::filesystem::exists(file)) << file;
    EXPECT_EQ(Integer(file, "epoch"), stop / per_epoch);
    EXPECT_EQ(Integer(file, "step"), stop);
    EXPECT_EQ(Integer(file, "sample"),
              stop % per_epoch * 16 * world_size() * GetParam().accumulate);
    options.stop_at_step = 0;
    options.checkpoint.resume = file;
    options.checkpoint.manager.directory = absl::StrCat(Root(), "/resumed_at_", stop);
    report = Run(options);
    EXPECT_EQ(report.steps, whole.steps);
    EXPECT_EQ(report.epochs, 2);
    EXPECT_EQ(stopped_batches + trained_batches_, whole_batches);
    ExpectSame(last, options.checkpoint.manager.directory + "/epoch_2.pt", world_size());
  }
}

TEST_P(ResumeTest, StoppedByOneRanksOnStepAndResumedIsTheUninterruptedRun) {
  const Report whole = Run(Options("whole"));
  const int64_t whole_batches = trained_batches_;
  TrainerOptions options = Options("stopped");
  const int asking = world_size() - 1;
  // Each rank has options of its own, and only one asks.
  std::vector<Report> reports(world_size());
  RunRanks(world_size(), [&](const session::Session& session) {
    TrainerOptions mine = options;
    if (session.rank() == asking) {
      mine.on_step = [](int64_t step, const at::Tensor&) {
        return step == 2 ? StepAction::kStop : StepAction::kContinue;
      };
    }
    Task task = NetTask(GetParam().dropout);
    auto report = Train(session, task, Halves(kExamples), Halves(60), mine);
    ASSERT_TRUE(report.ok()) << report.status();
    reports[session.rank()] = *report;
  });
  for (const Report& report : reports) {
    EXPECT_EQ(report.steps, reports[0].steps);
    EXPECT_GE(report.steps, 2);
    EXPECT_LE(report.steps, 3);
    EXPECT_EQ(report.epochs, 0);
  }
  options.checkpoint.resume =
      absl::StrCat(options.checkpoint.manager.directory, "/epoch_0_step_", reports[0].steps, ".pt");
  EXPECT_EQ(Run(options).steps, whole.steps);
  EXPECT_EQ(reports[0].steps * options.accumulate + trained_batches_, whole_batches);
  ExpectSame(Options("whole").checkpoint.manager.directory + "/epoch_2.pt",
             options.checkpoint.manager.directory + "/epoch_2.pt", world_size());
}

TEST_P(ResumeTest, AllRanksThatAskInOneStepStopAtIt) {
  TrainerOptions options = Options("stopped");
  options.on_step = [](int64_t step, const at::Tensor&) {
    return step == 3 ? StepAction::kStop : StepAction::kContinue;
  };
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::filesystem::remove_all(options.checkpoint.manager.directory);
    EXPECT_EQ(Run(options).steps, 3);
  }
}

// The checkpoint does not tell which stage has written it.
class ZeroResumeTest : public ResumeTest {};

TEST_P(ZeroResumeTest, EachStageGoesOnWhereAnotherStopped) {
  TrainerOptions options = Options("whole");
  options.zero.stage = 0;
  const Report whole = Run(options);
  const int64_t whole_batches = trained_batches_;
  const std::string last = options.checkpoint.manager.directory + "/epoch_2.pt";
  for (int64_t before = 0; before <= 2; ++before) {
    for (int64_t after = 0; after <= 2; ++after) {
      SCOPED_TRACE(absl::StrCat("stage ", before, ", then ", after));
      options = Options(absl::StrCat("stage_", before, "_", after));
      options.stop_at_step = 3;
      options.zero.stage = before;
      Run(options);
      const int64_t stopped_batches = trained_batches_;
      options.stop_at_step = 0;
      options.zero.stage = after;
      options.checkpoint.resume = "auto";
      EXPECT_EQ(Run(options).steps, whole.steps);
      EXPECT_EQ(stopped_batches + trained_batches_, whole_batches);
      ExpectSame(last, options.checkpoint.manager.directory + "/epoch_2.pt", world_size());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, ZeroResumeTest,
                         testing::Values(Setting{"sgd"}, Setting{"adamw", 2, "adamw"},
                                         Setting{"groups", 2, "adamw", 1, 0, true, 0, "fp32", false,
                                                 "allreduce", kGroups}),
                         [](const auto& info) { return std::string(info.param.name); });

// The global batch is the same, and so are the gradients, up to the order of addition.
TEST(ResumeElsewhereTest, AnotherWorldSizeGoesOnWithTheRestOfTheEpoch) {
  for (const auto& [before, after] : std::vector<std::pair<int, int>>{{2, 1}, {1, 2}}) {
    SCOPED_TRACE(absl::StrCat(before, " ranks, then ", after));
    const std::string folder = absl::StrCat(testing::TempDir(), "/elsewhere_", before, "_", after);
    std::filesystem::remove_all(folder);
    int64_t trained_batches = 0;
    const auto train = [&](int world_size, const TrainerOptions& base) {
      trained_batches = 0;
      std::optional<std::vector<at::Tensor>> parameters;
      RunRanks(world_size, [&](const session::Session& session) {
        TrainerOptions options = base;
        options.batch_size = 32 / world_size;
        Task task = LineTask();
        if (session.is_main()) CountTrainedBatches(task, trained_batches);
        auto report = Train(session, task, Halves(kExamples), Halves(60), options);
        ASSERT_TRUE(report.ok()) << report.status();
        if (!session.is_main()) return;
        parameters.emplace();
        for (const at::Tensor& parameter : task.module->parameters()) {
          parameters->push_back(parameter.detach().clone());
        }
      });
      return parameters.value_or(std::vector<at::Tensor>());
    };
    TrainerOptions options = Quiet();
    options.optimizer.lr = 0.1;
    options.schedule.name = "cosine";
    const auto whole = train(before, options);
    options.checkpoint.manager.directory = folder;
    options.stop_at_step = 4;
    const auto stopped = train(before, options);
    options.checkpoint.resume = folder + "/epoch_0_step_4.pt";
    const auto loaded = train(after, options);  // it has taken the step
    EXPECT_EQ(trained_batches, 0);
    options.stop_at_step = 0;
    const auto resumed = train(after, options);
    EXPECT_EQ(trained_batches, 7 + 11);  // 202 and 330 examples, 32 at a time
    ASSERT_EQ(whole.size(), 2);
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_TRUE(at::equal(loaded[i], stopped[i]));
      EXPECT_FALSE(at::allclose(stopped[i], whole[i], 1e-3, 1e-3));
      EXPECT_TRUE(at::allclose(resumed[i], whole[i], 0, 1e-5)) << resumed[i] << whole[i];
    }
  }
}

// The rate of each step from `step` on, in another world.
std::map<int64_t, double> RatesOf(int world_size, TrainerOptions options) {
  options.log.dir = options.checkpoint.manager.directory + "_log";
  options.log.every = 1;
  RunRanks(world_size, [&](const session::Session& session) {
    auto report = Train(session, LineTask(), Halves(320), Halves(60), options);
    ASSERT_TRUE(report.ok()) << report.status();
  });
  return Logged(options.log.dir, "train/lr");
}

// The batch of a rank is the same, so that an epoch has 10 steps with 2 ranks, and 20 with one.
TEST(ResumeElsewhereTest, TheScheduleGoesOnAndEndsWithTheRun) {
  for (const bool fewer : {true, false}) {
    const int before = fewer ? 2 : 1, after = fewer ? 1 : 2;
    SCOPED_TRACE(absl::StrCat(before, " ranks, then ", after));
    const std::string folder = absl::StrCat(testing::TempDir(), "/rates_", before, "_", after);
    for (const auto* suffix : {"", "_log"}) std::filesystem::remove_all(folder + suffix);
    TrainerOptions options = Quiet();
    options.optimizer.lr = 1;
    options.schedule = {.name = "cosine", .warmup_steps = 8};
    options.checkpoint.manager.directory = folder;
    options.checkpoint.resume = "auto";
    options.stop_at_step = fewer ? 5 : 10;  // a quarter of the run
    const std::map<int64_t, double> first = RatesOf(before, options);
    ASSERT_EQ(first.size(), options.stop_at_step);
    const int64_t stopped = options.stop_at_step;
    const double total = fewer ? 20 : 40, pace = fewer ? 0.5 : 2;
    const int64_t left = fewer ? 30 : 15;
    const std::string at_stop = absl::StrCat(folder, "/epoch_0_step_", stopped, ".pt");
    EXPECT_EQ(checkpoint::Manager::Load(at_stop)->root.at("progress").toDouble(), 0.25);
    // Twice: with a stop in between, and without; to the same bits.
    std::map<int64_t, double> rates[2];
    for (const int64_t stop : {stopped + 7, int64_t{0}}) {
      options.checkpoint.manager.directory = absl::StrCat(folder, "_", stop);
      for (const auto* suffix : {"", "_log"}) {
        std::filesystem::remove_all(options.checkpoint.manager.directory + suffix);
      }
      options.checkpoint.resume = at_stop;
      options.stop_at_step = stop;
      rates[stop == 0] = RatesOf(after, options);
      if (stop == 0) continue;
      options.checkpoint.resume = "auto";
      options.stop_at_step = 0;
      rates[0] = RatesOf(after, options);
    }
    EXPECT_EQ(rates[0], rates[1]);
    ASSERT_EQ(rates[1].size(), left);
    for (int64_t k = 0; k < left; ++k) {
      const double time = 0.25 * total + pace * static_cast<double>(k);
      const double factor = time < 8 ? std::min(1.0, (time + pace) / 8)
                                     : (1 + std::cos(M_PI * (time - 8) / (total - 8))) / 2;
      EXPECT_NEAR(rates[1].at(stopped + k + 1), factor, 1e-9) << k;
    }
  }
}

// The loss gets smaller, so that each evaluation after the first is worse: the rates of each epoch
// are known, whatever the world size. Epochs have 10 steps with 2 ranks, and 20 with one.
TEST(ResumeElsewhereTest, APlateauGoesOnWithWhatItHasLearned) {
  const std::string folder = testing::TempDir() + "/plateau";
  for (const int64_t stop : {15, 20, 25, 30}) {
    for (const auto* suffix : {"", "_log"}) std::filesystem::remove_all(folder + suffix);
    TrainerOptions options = Quiet();
    options.epochs = 4;
    options.optimizer = {.name = "adamw", .lr = 0.01};
    options.optimizer.groups = "bias:lr_mult=2";
    options.schedule.name = "plateau";
    options.schedule.plateau = {.mode = "max", .factor = 0.5, .patience = 0};
    options.checkpoint.manager.directory = folder;
    options.checkpoint.resume = "auto";
    options.stop_at_step = stop;
    const std::map<int64_t, double> first = RatesOf(2, options);
    ASSERT_EQ(first.size(), stop);
    std::filesystem::remove_all(folder + "_log");
    options.stop_at_step = 0;
    const std::map<int64_t, double> second = RatesOf(1, options);
    const std::vector<double> of_epochs = {0.01, 0.01, 0.005, 0.0025};
    for (const auto& [step, rate] : first) EXPECT_EQ(rate, of_epochs[(step - 1) / 10]) << step;
    for (const auto& [step, rate] : second) {
      EXPECT_EQ(rate, of_epochs[(stop + step - 1) / 20]) << stop << " " << step;
    }
    EXPECT_EQ(second.size(), 2 * (40 - stop));
    const c10::IValue groups = checkpoint::Manager::Load(folder + "/epoch_4.pt")
                                   ->root.at("optimizer")
                                   .toGenericDict()
                                   .at("param_groups");
    ASSERT_EQ(groups.toListRef().size(), 2);
    EXPECT_EQ(groups.toListRef()[1].toGenericDict().at("lr").toDouble(), 0.005);
  }
}

// Nobody repeats the numbers of the run's start.
TEST(ResumeElsewhereTest, GeneratorsBeginAnewAtThePosition) {
  const std::string folder = testing::TempDir() + "/generators";
  for (const int ranks : {1, 2, 3}) std::filesystem::remove_all(absl::StrCat(folder, ranks));
  const auto drawn = [&](int world_size, int64_t stop, const std::string& resume) {
    TrainerOptions options = Quiet();
    options.checkpoint.manager.directory = absl::StrCat(folder, world_size);
    options.checkpoint.every = world_size == 2;
    options.checkpoint.resume = resume;
    options.stop_at_step = stop;
    double first = -1;
    RunRanks(world_size, [&](const session::Session& session) {
      Task task = LineTask();
      if (session.is_main()) {
        task.loss = [&, loss = task.loss](const at::Tensor& output, const at::Tensor& target) {
          if (first < 0) first = at::rand({}, at::kDouble).item<double>();
          return loss(output, target);
        };
      }
      auto report = Train(session, task, Halves(320), Halves(60), options);
      ASSERT_TRUE(report.ok()) << report.status();
    });
    return first;
  };
  drawn(2, 3, "");
  drawn(2, 5, folder + "2/epoch_0_step_3.pt");
  const double start = drawn(1, 1, "");
  const double three = drawn(1, 6, folder + "2/epoch_0_step_3.pt");
  const double five = drawn(1, 6, folder + "2/epoch_0_step_5.pt");
  EXPECT_EQ(three, drawn(1, 6, folder + "2/epoch_0_step_3.pt"));
  EXPECT_NE(three, start);
  EXPECT_NE(three, five);
  // Nor does another world repeat this one's.
  EXPECT_NE(three, drawn(3, 6, folder + "2/epoch_0_step_3.pt"));
}

// Stage 2 reduces buckets in the order of the checkpoint, and does not find its own.
TEST(ResumeElsewhereTest, TheOrderOfShardedGradientsIsRestored) {
  const std::string folder = testing::TempDir() + "/gradient_order";
  std::filesystem::remove_all(folder);
  TrainerOptions options = Quiet();
  options.zero.stage = 2;
  options.checkpoint.manager.directory = folder;
  options.checkpoint.resume = "auto";
  const auto order_of = [](const checkpoint::Dict& root) {
    std::vector<int64_t> order;
    for (const c10::IValue& number : root.at("gradient_order").toListRef()) {
      order.push_back(number.toInt());
    }
    return order;
  };
  // The order of the checkpoint of this step.
  const auto train_to = [&](int64_t step) {
    options.stop_at_step = step;
    RunRanks(2, [&](const session::Session& session) {
      const auto report = Train(session, LineTask(), Halves(kExamples), Halves(60), options);
      ASSERT_TRUE(report.ok()) << report.status();
    });
    auto state = checkpoint::Manager::Load(absl::StrCat(folder, "/epoch_0_step_", step, ".pt"));
    EXPECT_TRUE(state.ok()) << state.status();
    return order_of(state->root);
  };
  options.checkpoint.save.callback = [&](checkpoint::State& state) {
    std::vector<int64_t> order = order_of(state.root);
    std::reverse(order.begin(), order.end());
    state.root.insert_or_assign("gradient_order", c10::List<int64_t>(order));
  };
  const std::vector<int64_t> reversed = train_to(2);
  ASSERT_GE(reversed.size(), 2);
  options.checkpoint.save.callback = nullptr;
  EXPECT_EQ(train_to(4), reversed);
}

// Older checkpoints lack `sample` and `bucket_order`; otherwise they are the same.
TEST(ResumeElsewhereTest, ACheckpointWithoutASampleStandsAtItsEpochsBeginning) {
  const std::string folder = testing::TempDir() + "/without_sample";
  std::filesystem::remove_all(folder);
  TrainerOptions options = Quiet();
  options.schedule.name = "cosine";
  options.checkpoint.manager.directory = folder + "/whole";
  options.checkpoint.save.callback = [](checkpoint::State& state) {
    EXPECT_EQ(state.root.erase("sample"), 1);
    (void)state.root.erase("bucket_order");
  };
  int64_t trained_batches = 0;
  const auto train = [&](const TrainerOptions& mine) {
    trained_batches = 0;
    RunRanks(2, [&](const session::Session& session) {
      Task task = LineTask();
      if (session.is_main()) CountTrainedBatches(task, trained_batches);
      auto report = Train(session, task, Halves(kExamples), Halves(60), mine);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->epochs, 2);
      EXPECT_EQ(report->steps, 22);
    });
  };
  train(options);
  TrainerOptions resumed = options;
  resumed.checkpoint.manager.directory = folder + "/resumed";
  resumed.checkpoint.resume = options.checkpoint.manager.directory + "/epoch_1.pt";
  auto old = checkpoint::Manager::Load(resumed.checkpoint.resume);
  ASSERT_TRUE(old.ok()) << old.status();
  ASSERT_FALSE(old->root.contains("sample"));
  train(resumed);
  EXPECT_EQ(trained_batches, 11);
  const auto expected = TensorsOf(options.checkpoint.manager.directory + "/epoch_2.pt");
  const auto now = TensorsOf(resumed.checkpoint.manager.directory + "/epoch_2.pt");
  ASSERT_EQ(now.size(), expected.size());
  for (const auto& [path, tensor] : expected) {
    if (absl::StartsWith(path, "/rng")) continue;
    EXPECT_TRUE(at::equal(tensor, now.at(path))) << path;
  }
}

// The training steps in metrics.jsonl, in order.
std::vector<int64_t> LoggedSteps(const std::string& log_dir) {
  std::vector<int64_t> steps;
  std::ifstream file(log_dir + "/metrics.jsonl");
  for (std::string line; std::getline(file, line);) {
    if (!absl::StrContains(line, "train/loss")) continue;
    steps.push_back(std::strtoll(line.c_str() + std::string("{\"step\":").size(), nullptr, 10));
  }
  return steps;
}

TEST(ResumeLogTest, EveryStepIsLoggedOnce) {
  const std::string folder = testing::TempDir() + "/logged";
  std::filesystem::remove_all(folder);
  TrainerOptions options = Quiet();
  options.epochs = 1;
  options.log.every = 1;
  options.log.dir = folder + "/logs";
  options.checkpoint.manager.directory = folder + "/first";
  RunRanks(2, [&](const session::Session& session) {
    TrainerOptions mine = options;
    mine.stop_at_step = 4;
    EXPECT_TRUE(Train(session, LineTask(), Halves(kExamples), Halves(60), mine).ok());
    mine.checkpoint.resume = options.checkpoint.manager.directory + "/epoch_0_step_4.pt";
    mine.stop_at_step = 8;
    EXPECT_TRUE(Train(session, LineTask(), Halves(kExamples), Halves(60), mine).ok());
    // This run resumes from an older checkpoint: steps 5 to 8 are taken again.
    mine.checkpoint.manager.directory = folder + "/second";
    mine.stop_at_step = 0;
    EXPECT_TRUE(Train(session, LineTask(), Halves(kExamples), Halves(60), mine).ok());
  });
  std::vector<int64_t> expected;
  for (int64_t step = 1; step <= 11; ++step) expected.push_back(step);
  EXPECT_EQ(LoggedSteps(options.log.dir), expected);
}

TEST(ResumeLogTest, SaysWhereItGoesOnAndThatNothingIsLeft) {
  const std::string folder = testing::TempDir() + "/said";
  std::filesystem::remove_all(folder);
  TrainerOptions options = Quiet();
  options.log.progress = true;
  options.epochs = 1;
  options.checkpoint.manager.directory = folder;
  options.stop_at_step = 4;
  const auto run = [&] {
    testing::internal::CaptureStderr();
    RunRanks(2, [&](const session::Session& session) {
      auto report = Train(session, LineTask(), Halves(kExamples), Halves(60), options);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->steps, options.stop_at_step);
      EXPECT_EQ(report->test.examples, 60);
    });
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_TRUE(absl::StrContains(run(), "epoch 1/1 step 4/11"));
  options.checkpoint.resume = folder + "/epoch_0_step_4.pt";
  const std::string again = run();
  EXPECT_TRUE(absl::StrContains(again, "epoch 0, example 128, step 4")) << again;
  EXPECT_TRUE(absl::StrContains(again, "stop_at_step=4 is reached, at step 4: nothing is trained"))
      << again;
  options.stop_at_step = 6;
  const std::string more = run();
  EXPECT_TRUE(absl::StrContains(more, "epoch 1/1 step 6/11")) << more;
}

// Ranks of a job, also those that a launcher has started again.
void RunRanksOf(const std::string& job, int life, int world_size,
                const std::function<void(const session::Session&)>& body) {
  RunRanks(world_size, [&](const session::Session& first) {
    launchers::Rank place = first.place();
    place.restart_count = life;
    place.job = job;
    // Some launchers choose another one in each life.
    if (!job.empty()) place.run_id = absl::StrCat(job, " life ", life);
    body(session::Session(place, {.process_group = first.process_group(), .store = first.store()},
                          first.device()));
  });
}

class RestartTest : public testing::Test {
 protected:
  RestartTest()
      : folder_(absl::StrCat(testing::TempDir(), "/restart_",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    options_ = Quiet();
    options_.epochs = 1;
    options_.log.every = 1;
    options_.log.dir = folder_ + "/logs";
  }

  // Returns rank 0's error.
  absl::Status Begin(const TrainerOptions& options, int ranks = 2, int life = 0) {
    absl::Status status;
    RunRanksOf(job_, life, ranks,
               [&](const session::Session& session) { TrainOn(session, options, status); });
    return status;
  }
  absl::Status BeginAgain(const TrainerOptions& options, int ranks = 2) {
    return Begin(options, ranks, /*life=*/1);
  }
  static void TrainOn(const session::Session& session, const TrainerOptions& options,
                      absl::Status& status) {
    const auto report = Train(session, LineTask(), Halves(kExamples), Halves(60), options);
    if (session.is_main()) status = report.status();
  }

  // Each step of the epoch once, in order.
  void ExpectWholeLog() const {
    std::vector<int64_t> expected;
    for (int64_t step = 1; step <= 11; ++step) expected.push_back(step);
    EXPECT_EQ(LoggedSteps(options_.log.dir), expected);
  }

  // Of a later life of job "b" in folders of job "a".
  static void ExpectRefused(const absl::Status& status, absl::string_view option,
                            absl::string_view owner = "job a") {
    EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << status;
    for (const std::string& part : {absl::StrCat(option, "="),
                                    absl::StrCat(", of ", owner, "; this is a later life of job b"),
                                    std::string("choose another folder")}) {
      EXPECT_TRUE(absl::StrContains(status.message(), part)) << part << ": " << status;
    }
  }

  const std::string folder_;
  TrainerOptions options_;
  std::string job_;
};

TEST_F(RestartTest, GoesOnFromItsOwnCheckpointsWhateverItBeganFrom) {
  TrainerOptions other = Quiet();
  other.checkpoint.manager.directory = folder_ + "/other";
  other.stop_at_step = 2;
  ASSERT_TRUE(Begin(other).ok());
  const std::string begun_from = folder_ + "/other/epoch_0_step_2.pt";
  for (const std::string how : {"nothing", "resume", "init_from"}) {
    SCOPED_TRACE(how);
    TrainerOptions options = options_;
    if (how == "resume") options.checkpoint.resume = begun_from;
    if (how == "init_from") options.checkpoint.init_from = begun_from;
    const auto train = [&](const std::string& name, bool interrupted) {
      options.log.dir = options_.log.dir = absl::StrCat(folder_, "/", how, "_", name, "_log");
      options.checkpoint.manager.directory = absl::StrCat(folder_, "/", how, "_", name);
      options.stop_at_step = interrupted ? 5 : 0;
      ASSERT_TRUE(Begin(options).ok());
      options.stop_at_step = 0;
      if (!interrupted) return;
      const absl::Status again = BeginAgain(options);
      ASSERT_TRUE(again.ok()) << again;
    };
    train("whole", false);
    const std::vector<int64_t> whole_log = LoggedSteps(options_.log.dir);
    train("restarted", true);
    EXPECT_EQ(LoggedSteps(options_.log.dir), whole_log);
    const auto expected = TensorsOf(absl::StrCat(folder_, "/", how, "_whole/epoch_1.pt"));
    const auto found = TensorsOf(absl::StrCat(folder_, "/", how, "_restarted/epoch_1.pt"));
    ASSERT_EQ(found.size(), expected.size());
    for (const auto& [path, tensor] : expected) {
      if (absl::StartsWith(path, "/rng")) continue;  // of ranks that are threads
      EXPECT_TRUE(at::equal(tensor, found.at(path))) << path;
    }
  }
}

// The first life of "b" was killed before it was refused.
TEST_F(RestartTest, InAnotherJobsFolderALaterLifeIsRefusedAsTheFirst) {
  TrainerOptions begins = Quiet();
  begins.checkpoint.manager.directory = folder_ + "/begun_from";
  begins.stop_at_step = 2;
  ASSERT_TRUE(Begin(begins).ok());
  const std::string begun_from = folder_ + "/begun_from/epoch_0_step_2.pt";
  options_.checkpoint.manager.directory = folder_ + "/own";
  options_.stop_at_step = 5;
  job_ = "a";
  ASSERT_TRUE(Begin(options_).ok());
  options_.stop_at_step = 0;

  job_ = "b";
  TrainerOptions options = options_;
  options.log.dir = folder_ + "/logs_of_b";
  ExpectRefused(BeginAgain(options), "checkpoint.dir");
  options.checkpoint.init_from = begun_from;
  ExpectRefused(BeginAgain(options), "checkpoint.dir");
  options.checkpoint.init_from = "";
  options.checkpoint.resume = begun_from;
  ExpectRefused(BeginAgain(options), "checkpoint.dir");
  options.checkpoint.resume = "";
  options.checkpoint.manager.directory = "";
  options.log.dir = options_.log.dir;
  ExpectRefused(BeginAgain(options), "log.dir");

  // Those that were refused have changed nothing.
  job_ = "a";
  const absl::Status again = BeginAgain(options_);
  EXPECT_TRUE(again.ok()) << again;
  ExpectWholeLog();

  // A folder of an older version. A run that is told to go on may do so.
  std::filesystem::remove(folder_ + "/own/.job");
  job_ = "b";
  ExpectRefused(BeginAgain(options_), "checkpoint.dir", "an unknown job");
  options_.checkpoint.resume = "auto";
  EXPECT_TRUE(BeginAgain(options_).ok());
}

TEST_F(RestartTest, WhoGoesOnWithAnotherJobsCheckpointsIsTheirOwner) {
  options_.checkpoint.manager.directory = folder_ + "/own";
  options_.stop_at_step = 5;
  job_ = "b";
  ASSERT_TRUE(Begin(options_, 1).ok());
  options_.stop_at_step = 0;

  // It saves nothing.
  TrainerOptions failing = options_;
  failing.checkpoint.resume = "auto";
  failing.on_step = [](int64_t step, const at::Tensor&) {
    if (step == 7) throw std::runtime_error("it fails");
    return StepAction::kContinue;
  };
  job_ = "a";
  ASSERT_FALSE(Begin(failing, 1).ok());

  job_ = "b";
  ExpectRefused(BeginAgain(options_, 1), "checkpoint.dir");
  job_ = "a";
  const absl::Status again = BeginAgain(options_, 1);
  ASSERT_TRUE(again.ok()) << again;
  const std::vector<int64_t> logged = LoggedSteps(options_.log.dir);
  ASSERT_EQ(logged.size(), 21);
  for (int64_t step = 1; step <= 21; ++step) EXPECT_EQ(logged[step - 1], step);
}

TEST_F(RestartTest, WithoutCheckpointsItBeginsAgainFromWhatItBeganFrom) {
  TrainerOptions other = Quiet();
  other.checkpoint.manager.directory = folder_ + "/other";
  other.stop_at_step = 2;
  ASSERT_TRUE(Begin(other).ok());
  options_.checkpoint.manager.directory = folder_ + "/own";
  options_.checkpoint.resume = folder_ + "/other/epoch_0_step_2.pt";
  ASSERT_TRUE(BeginAgain(options_).ok());
  EXPECT_EQ(LoggedSteps(options_.log.dir).front(), 3);
}

// The first life has logged steps and saved nothing.
TEST_F(RestartTest, EveryStepIsLoggedOnce) {
  for (const bool has_folder : {false, true}) {
    std::filesystem::remove_all(folder_);
    TrainerOptions failing = options_;
    failing.on_step = [](int64_t step, const at::Tensor&) {
      if (step == 4) throw std::runtime_error("it fails");
      return StepAction::kContinue;
    };
    ASSERT_FALSE(Begin(failing, 1).ok());
    ASSERT_FALSE(LoggedSteps(options_.log.dir).empty());
    TrainerOptions again = options_;
    if (has_folder) {
      again.checkpoint.manager.directory = folder_ + "/own";
      again.checkpoint.resume = "auto";
    }
    const absl::Status status = has_folder ? Begin(again) : BeginAgain(again);
    ASSERT_TRUE(status.ok()) << status;
    ExpectWholeLog();
  }
}

TEST_F(RestartTest, ASecondRunIntoTheSameLogIsRefused) {
  ASSERT_TRUE(Begin(options_).ok());
  absl::Status second = Begin(options_);
  EXPECT_EQ(second.code(), absl::StatusCode::kAlreadyExists) << second;
  EXPECT_TRUE(absl::StrContains(second.message(), "metrics.jsonl")) << second;
  EXPECT_FALSE(absl::StrContains(second.message(), "resume=auto")) << second;
  options_.checkpoint.manager.directory = folder_ + "/own";
  second = Begin(options_);
  EXPECT_TRUE(absl::StrContains(second.message(), "resume=auto, or choose another folder"))
      << second;
  ExpectWholeLog();
  options_.checkpoint.resume = "auto";
  EXPECT_TRUE(Begin(options_).ok());
  ExpectWholeLog();
  options_.eval_only = true;
  EXPECT_TRUE(Begin(options_).ok());
}

TEST_F(RestartTest, TellsTheLauncherHowFarItComes) {
  const ProgressBoard board = ProgressBoard::Create().value();
  setenv(ProgressBoard::kVariable, absl::StrCat(board.fd()).c_str(), 1);
  const absl::Cleanup unset = [] { unsetenv(ProgressBoard::kVariable); };
  options_.checkpoint.manager.directory = folder_ + "/own";
  options_.checkpoint.every_steps = 2;
  options_.stop_at_step = 5;
  ASSERT_TRUE(Begin(options_).ok());
  EXPECT_EQ(board.Read()->begun_at, 0);
  EXPECT_EQ(board.Read()->step, 5);
  EXPECT_EQ(board.Read()->earlier_checkpoint, "");
  options_.stop_at_step = 0;
  ASSERT_TRUE(BeginAgain(options_).ok());
  EXPECT_EQ(board.Read()->begun_at, 5);
  EXPECT_EQ(board.Read()->step, 11);
  EXPECT_EQ(board.Read()->earlier_checkpoint, folder_ + "/own/epoch_0_step_4.pt");
}

}  // namespace
}  // namespace ddp::trainer
