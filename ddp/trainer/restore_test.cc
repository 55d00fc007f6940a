// What a run checks, says and writes when it resumes; resume_test.cc compares results.

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/status.h"
#include "checkpoint/manager.h"
#include "ddp/trainer/accelerator.h"
#include "ddp/trainer/guard/guard_testing.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"
#include "optim/kind.h"

namespace ddp::trainer {
namespace {

class RestoreTest : public testing::Test {
 protected:
  RestoreTest()
      : folder_(absl::StrCat(testing::TempDir(), "/",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    options_ = Quiet();
    options_.checkpoint.manager.directory = folder_ + "/checkpoints";
    options_.checkpoint.resume = "auto";
  }

  // Trains up to this step; 20 are an epoch. Goes on with the newest checkpoint, if there is one.
  absl::StatusOr<Report> TrainTo(int64_t step) {
    options_.stop_at_step = step;
    absl::StatusOr<Report> report = absl::UnknownError("not trained");
    RunRanks(world_size_, [&](const session::Session& session) {
      const auto mine = Train(session, LineTask(), Halves(examples_), Halves(60), options_);
      if (session.is_main()) report = mine;
    });
    return report;
  }

  // TrainTo, which must succeed; returns what it has printed.
  std::string PrintedTo(int64_t step) {
    testing::internal::CaptureStderr();
    const auto report = TrainTo(step);
    const std::string printed = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(report.ok()) << report.status();
    return printed;
  }

  std::string ConfigIn(int64_t step) const {
    auto state = checkpoint::Manager::Load(
        absl::StrCat(options_.checkpoint.manager.directory, "/epoch_0_step_", step, ".pt"));
    EXPECT_TRUE(state.ok()) << state.status();
    if (!state.ok() || !state->root.contains("config")) return "no config";
    return state->root.at("config").toStringRef();
  }

  // The checkpoint of this step, or of the end of epoch 1.
  optim::Dict StateAt(int64_t step) const {
    auto state = checkpoint::Manager::Load(
        step == 20 ? absl::StrCat(options_.checkpoint.manager.directory, "/epoch_1.pt")
                   : absl::StrCat(options_.checkpoint.manager.directory, "/epoch_", step / 20,
                                  "_step_", step, ".pt"));
    EXPECT_TRUE(state.ok()) << state.status();
    return state.ok() ? state->root : optim::NewDict();
  }

  const std::string folder_;
  TrainerOptions options_;
  int64_t examples_ = 320;
  int world_size_ = 1;
};

TEST_F(RestoreTest, AnotherSeedIsRefused) {
  ASSERT_TRUE(TrainTo(3).ok());
  options_.seed = 1;
  const absl::Status refused = TrainTo(6).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "trained with seed 0")) << refused;
  options_.seed = 0;
  EXPECT_TRUE(TrainTo(6).ok());
}

// Saved within an epoch and at its end, resumed, and taken by another run.
TEST_F(RestoreTest, AnExpandedBufferGoesOn) {
  for (const int world_size : {1, 2}) {
    for (const bool broadcasts : {true, false}) {
      SCOPED_TRACE(absl::StrCat(world_size, " ranks, broadcast_buffers=", broadcasts));
      std::filesystem::remove_all(folder_);
      TrainerOptions options = options_;
      options.data_parallel.broadcast_buffers = broadcasts;
      options.checkpoint.every_steps = 2;
      // The buffer of each rank after this step.
      const auto train_to = [&](int64_t step) {
        options.stop_at_step = step;
        std::vector<at::Tensor> counts(static_cast<size_t>(world_size));
        RunRanks(world_size, [&](const session::Session& session) {
          auto net = std::make_shared<Counting>();
          const auto report = Train(session, Classification("counting", net),
                                    Halves(64 * world_size), Halves(60), options);
          EXPECT_TRUE(report.ok()) << report.status();
          counts[static_cast<size_t>(session.rank())] = net->count;
        });
        return counts;
      };
      const auto expect = [](const std::vector<at::Tensor>& counts, double expected) {
        for (const at::Tensor& count : counts) {
          EXPECT_EQ(count.stride(0), 0);
          EXPECT_TRUE(at::equal(count, at::full({3, 2}, expected))) << count;
        }
      };
      expect(train_to(3), 3);
      expect(train_to(5), 5);
      const std::string folder = options.checkpoint.manager.directory;
      options.checkpoint.init_from =
          absl::StrCat(folder, "/", checkpoint::Manager::FolderAt(folder).List()->back().file);
      options.checkpoint.resume = "";
      options.checkpoint.manager.directory = folder_ + "/others";
      expect(train_to(1), 5 + 1);
    }
  }
}

TEST_F(RestoreTest, EntriesThatMakeNoSenseAreRefusedByName) {
  struct Entry {
    std::string key;
    c10::IValue value;
    std::vector<std::string> words;
  };
  const std::vector<Entry> entries = {
      {"epoch", std::string("one"), {"'epoch'", "integer"}},
      {"step", at::zeros({}), {"'step'", "integer"}},
      {"dataset_size", std::string("many"), {"'dataset_size'", "integer"}},
      {"progress", 1.5, {"'progress'", "from 0 to 1"}},
      {"progress", std::string("half"), {"'progress'", "from 0 to 1"}},
      {"epoch", int64_t{-1}, {"negative", "epoch -1"}},
      {"sample", int64_t{-16}, {"negative", "sample -16"}},
      {"step", int64_t{-3}, {"negative", "step -3"}},
      {"rng", c10::List<at::Tensor>(), {"'rng'", "list of 1 states"}},
      {"rng", int64_t{1}, {"'rng'", "list of 1 states"}},
      {"scaler", int64_t{1}, {"'scaler'", "dict"}},
      {"bucket_order", int64_t{1}, {"'bucket_order'", "list of integers"}},
      {"bucket_order", c10::List<double>({0.5}), {"'bucket_order'", "list of integers"}},
  };
  options_.precision = "fp16";  // has a scaler
  for (const Entry& entry : entries) {
    SCOPED_TRACE(absl::StrCat(entry.key, ": ", entry.words[1]));
    std::filesystem::remove_all(folder_);
    options_.checkpoint.save.callback = [&](checkpoint::State& state) {
      state.root.insert_or_assign(entry.key, entry.value);
    };
    ASSERT_TRUE(TrainTo(3).ok());
    const absl::Status refused = TrainTo(6).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    EXPECT_TRUE(absl::StrContains(refused.message(), "cannot resume from ")) << refused;
    for (const std::string& word : entry.words) {
      EXPECT_TRUE(absl::StrContains(refused.message(), word)) << refused;
    }
  }
}

// They are loaded last, and looked at before the model is.
TEST_F(RestoreTest, RandomNumbersThatDoNotFitChangeNothing) {
  for (const at::Tensor& saved : {at::zeros({16}, at::kByte), at::zeros({5056}, at::kFloat),
                                  at::full({5056}, 255, at::kByte)}) {
    SCOPED_TRACE(absl::StrCat(saved.numel(), " of ", c10::toString(saved.scalar_type())));
    std::filesystem::remove_all(folder_);
    options_.checkpoint.save.callback = [&](checkpoint::State& state) {
      c10::List<at::Tensor> states;
      states.push_back(saved);
      state.root.insert_or_assign("rng", states);
    };
    ASSERT_TRUE(TrainTo(3).ok());
    options_.stop_at_step = 6;
    RunRanks(world_size_, [&](const session::Session& session) {
      const Task task = LineTask();
      const absl::Status refused =
          Train(session, task, Halves(examples_), Halves(60), options_).status();
      EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
      EXPECT_TRUE(absl::StrContains(refused.message(), "rng: random generator state")) << refused;
      const std::vector<at::Tensor> initial = LineTask().module->parameters();
      const std::vector<at::Tensor> now = task.module->parameters();
      ASSERT_EQ(now.size(), initial.size());
      for (size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(at::equal(now[i], initial[i]));
    });
  }
}

// As those that the run finds there by itself. Elsewhere it is read, and has not what a run needs.
TEST_F(RestoreTest, AFileWithoutChecksumsInTheRunsOwnFolderIsRefused) {
  const std::string header = R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}   )";
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.size());
  for (const bool own : {true, false}) {
    const std::string folder =
        own ? options_.checkpoint.manager.directory : absl::StrCat(folder_, "/elsewhere");
    std::filesystem::create_directories(folder);
    const std::string path = absl::StrCat(folder, "/others.safetensors");
    std::ofstream(path, std::ios::binary) << bytes << header << "x";
    options_.checkpoint.resume = path;
    const absl::Status refused = TrainTo(3).status();
    EXPECT_FALSE(refused.ok());
    EXPECT_EQ(absl::StrContains(refused.message(), "is unverified: another program wrote it"), own)
        << refused;
  }
}

// Options of the run count, also those for which the checkpoint lacks state.
TEST_F(RestoreTest, StateThatTheSavedOptionsDidNotNeedBegins) {
  struct Change {
    const char* optimizer;
    const char* option;
    const char* entry;
    std::function<void(OptimizerOptions&)> make;
  };
  const std::vector<Change> changes = {
      {"adam", "amsgrad", "max_exp_avg_sq", [](auto& options) { options.amsgrad = true; }},
      {"adamw", "amsgrad", "max_exp_avg_sq", [](auto& options) { options.amsgrad = true; }},
      {"sgd", "momentum", "momentum_buffer", [](auto& options) { options.momentum = 0.5; }},
      {"rmsprop", "momentum", "momentum_buffer", [](auto& options) { options.momentum = 0.5; }},
      {"rmsprop", "centered", "grad_avg", [](auto& options) { options.centered = true; }}};
  for (const Change& change : changes) {
    for (const auto& [format, stage] :
         {std::pair("pt", 0), std::pair("pt", 1), std::pair("sharded", 2)}) {
      SCOPED_TRACE(absl::StrCat(change.optimizer, ", ", change.option, ", ", format, ", ", stage));
      std::filesystem::remove_all(folder_);
      options_.optimizer = {.name = change.optimizer, .lr = 0.01, .momentum = 0};
      if (absl::string_view(change.optimizer).substr(0, 4) == "adam") {
        options_.optimizer.momentum.reset();
      }
      options_.zero.stage = stage;
      options_.checkpoint.manager.format = format;
      ASSERT_TRUE(TrainTo(3).ok());
      change.make(options_.optimizer);
      const std::string printed = PrintedTo(6);
      EXPECT_TRUE(absl::StrContains(printed, absl::StrCat("optimizer.", change.option))) << printed;
      if (absl::string_view(format) != "pt") continue;
      const auto states = StateAt(6).at("optimizer").toGenericDict().at("state").toGenericDict();
      ASSERT_FALSE(states.empty());
      for (const auto& state : states) {
        EXPECT_TRUE(state.value().toGenericDict().contains(change.entry));
      }
    }
  }
}

TEST_F(RestoreTest, WhatAllGroupsHaveOtherwiseIsSaidOnce) {
  options_.optimizer.groups = "bias:lr=0.25";
  ASSERT_TRUE(TrainTo(3).ok());
  options_.optimizer.momentum = 0.5;
  const std::string printed = PrintedTo(6), line = "resumed with optimizer.momentum 0.5, saved 0.9";
  const size_t at = printed.find(line);
  EXPECT_NE(at, std::string::npos) << printed;
  EXPECT_EQ(printed.find(line, at + 1), std::string::npos) << printed;
}

TEST_F(RestoreTest, KeysThatAreMissingAreNamed) {
  for (const std::string key : {"task", "epoch", "world_size", "model", "rng"}) {
    std::filesystem::remove_all(folder_);
    options_.checkpoint.save.callback = [&](checkpoint::State& state) {
      EXPECT_EQ(state.root.erase(key), 1);
    };
    ASSERT_TRUE(TrainTo(3).ok());
    const absl::Status refused = TrainTo(6).status();
    EXPECT_TRUE(absl::StrContains(refused.message(), absl::StrCat("has no key '", key, "'")))
        << refused;
  }
}

TEST_F(RestoreTest, AnotherConfigurationHasAFileOfItsOwn) {
  const std::string first = "lr: 0.5\n", second = "lr: 0.25\n";
  options_.log.dir = folder_ + "/logs";
  const std::string file = options_.log.dir + "/config.yaml";
  options_.configuration = first;
  ASSERT_TRUE(TrainTo(3).ok());
  EXPECT_EQ(ReadFile(file).value_or(""), first);
  ASSERT_TRUE(TrainTo(5).ok());
  EXPECT_FALSE(std::filesystem::exists(options_.log.dir + "/config_step_3.yaml"));
  options_.configuration = second;
  ASSERT_TRUE(TrainTo(7).ok());
  EXPECT_EQ(ReadFile(file).value_or(""), first);
  EXPECT_EQ(ReadFile(options_.log.dir + "/config_step_5.yaml").value_or(""), second);
  EXPECT_EQ(ConfigIn(3), first);
  EXPECT_EQ(ConfigIn(5), first);
  EXPECT_EQ(ConfigIn(7), second);
  options_.configuration = "";
  ASSERT_TRUE(TrainTo(9).ok());
  EXPECT_EQ(ConfigIn(9), "no config");
}

TEST_F(RestoreTest, WhatOnlyTheConfigurationsTellIsSaid) {
  options_.configuration = "batch_size: 64\n";
  ASSERT_TRUE(TrainTo(3).ok());
  options_.configuration = "batch_size: 7\n";
  options_.optimizer.momentum = 0.5;
  std::string seen;
  options_.compare_configuration = [&](const std::string& saved, checkpoint::LoadNotes& notes) {
    seen = saved;
    notes.AddConfigured("batch_size", "7", "64");
    notes.AddConfigured("optimizer.momentum", "auto", "auto");
  };
  const std::string printed = PrintedTo(5);
  EXPECT_EQ(seen, "batch_size: 64\n");
  EXPECT_TRUE(absl::StrContains(printed, "resumed with batch_size 7, saved 64")) << printed;
  EXPECT_TRUE(absl::StrContains(printed, "resumed with optimizer.momentum 0.5, saved 0.9"))
      << printed;
  EXPECT_FALSE(absl::StrContains(printed, "auto, saved auto")) << printed;
}

// How often `text` has `words`.
int Count(const std::string& text, const std::string& words) {
  int count = 0;
  for (size_t at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) {
    ++count;
  }
  return count;
}

TEST_F(RestoreTest, AnotherDataSetIsRefusedWithinAnEpoch) {
  ASSERT_TRUE(TrainTo(3).ok());
  examples_ = 640;
  const absl::Status refused = TrainTo(6).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  for (const char* words : {"640 examples", "had 320", "order of examples"}) {
    EXPECT_TRUE(absl::StrContains(refused.message(), words)) << refused;
  }
  examples_ = 320;
  ASSERT_TRUE(TrainTo(20).ok());
  // The next epoch has an order of its own in any case.
  examples_ = 640;
  options_.seed = 1;
  const std::string printed = PrintedTo(25);
  EXPECT_EQ(Count(printed, "a training set of 640, saved 320"), 1) << printed;
  EXPECT_EQ(Count(printed, "seed 1, saved 0"), 1) << printed;
  options_.seed = 2;
  EXPECT_FALSE(TrainTo(26).ok());
}

// Without progress, too.
TEST_F(RestoreTest, TheRunsOptionsReplaceTheCheckpointsAndWhatIsLearnedStays) {
  for (const int64_t stage : {0, 1, 2}) {
    SCOPED_TRACE(absl::StrCat("stage ", stage));
    std::filesystem::remove_all(folder_);
    world_size_ = stage == 0 ? 1 : 2;  // so that there are shards
    examples_ = 320 * world_size_;
    options_.zero.stage = stage;
    options_.precision = "fp16";
    options_.optimizer = {.name = "sgd", .lr = 0.5, .momentum = 0.9, .weight_decay = 0};
    options_.grad_scaler = {.init_scale = 64, .growth_interval = 5};
    ASSERT_TRUE(TrainTo(7).ok());
    options_.optimizer = {.name = "sgd", .lr = 0.25, .momentum = 0.5, .weight_decay = 0.125};
    options_.grad_scaler = {.init_scale = 8, .growth_factor = 4, .growth_interval = 4};
    std::string printed = PrintedTo(8);
    for (const char* difference :
         {"optimizer.lr 0.25, saved 0.5", "optimizer.momentum 0.5, saved 0.9",
          "optimizer.weight_decay 0.125, saved 0", "grad_scaler.growth_factor 4, saved 2",
          "grad_scaler.growth_interval 4, saved 5"}) {
      EXPECT_EQ(Count(printed, difference), 1) << printed;
    }
    EXPECT_EQ(Count(printed, ", saved "), 5) << printed;
    const optim::Dict before = StateAt(7), after = StateAt(8);
    const auto group = [](const optim::Dict& state) {
      return state.at("optimizer")
          .toGenericDict()
          .at("param_groups")
          .toListRef()[0]
          .toGenericDict();
    };
    EXPECT_EQ(group(after).at("momentum").toDouble(), 0.5);
    EXPECT_EQ(group(after).at("weight_decay").toDouble(), 0.125);
    // The scale has grown after five steps, and two more were finite.
    const optim::Dict scaler = after.at("scaler").toGenericDict();
    EXPECT_EQ(before.at("scaler").toGenericDict().at("scale").toDouble(), 128);
    EXPECT_EQ(scaler.at("scale").toDouble(), 128);
    EXPECT_EQ(scaler.at("_growth_tracker").toInt(), 3);
    EXPECT_EQ(scaler.at("growth_factor").toDouble(), 4);
    // The step had the new rate.
    const auto entry = [](const optim::Dict& state, int64_t i) {
      return state.at("optimizer")
          .toGenericDict()
          .at("state")
          .toGenericDict()
          .at(i)
          .toGenericDict()
          .at("momentum_buffer")
          .toTensor();
    };
    const auto weight = [](const optim::Dict& state) {
      return state.at("model").toGenericDict().at("linear.weight").toTensor();
    };
    EXPECT_TRUE(at::allclose(weight(after), weight(before) - 0.25 * entry(after, 0)));

    // Without momentum there is none to keep; with it again, it begins anew.
    options_.optimizer.momentum = 0;
    ASSERT_TRUE(TrainTo(9).ok());
    EXPECT_TRUE(StateAt(9).at("optimizer").toGenericDict().at("state").toGenericDict().empty());
    options_.optimizer.momentum = 0.5;
    ASSERT_TRUE(TrainTo(10).ok());
    EXPECT_EQ(group(StateAt(10)).at("momentum").toDouble(), 0.5);
    EXPECT_EQ(Count(PrintedTo(11), ", saved "), 0);
  }
}

TEST_F(RestoreTest, ACheckpointWithoutOptimizerGoesOnWithAFreshOneAndThatIsSaid) {
  options_.schedule.name = "cosine";
  options_.checkpoint.save.save_optimizer = false;
  options_.checkpoint.save.save_param_scheduler = false;
  ASSERT_TRUE(TrainTo(3).ok());
  const optim::Dict saved = StateAt(3);
  ASSERT_FALSE(saved.contains("optimizer"));
  options_.checkpoint.save = {};
  const std::string printed = PrintedTo(5);
  for (const char* lost : {"optimizer", "scheduler"}) {
    const std::string line =
        absl::StrCat("resumed without ", lost, ", which the checkpoint does not have");
    EXPECT_EQ(Count(printed, line), 1) << printed;
  }
  // Two of 40 steps more.
  EXPECT_EQ(StateAt(5).at("progress").toDouble(), 5.0 / 40);
  EXPECT_EQ(StateAt(5).at("step").toInt(), 5);
}

// As mmengine's resume without its optimizer.
TEST_F(RestoreTest, ACallbackEditsWhatIsLoaded) {
  for (const char* format : {"pt", "sharded"}) {
    options_.checkpoint.manager.format = format;
    options_.checkpoint.manager.directory = absl::StrCat(folder_, "/", format);
    options_.checkpoint.load = {};
    ASSERT_TRUE(TrainTo(3).ok());
    options_.checkpoint.load.callback = [](checkpoint::State& state) {
      (void)state.root.erase("optimizer");
    };
    const std::string printed = PrintedTo(5);
    EXPECT_EQ(Count(printed, "resumed without optimizer, which the checkpoint does not have"), 1)
        << printed;
    options_.checkpoint.load.callback = [](checkpoint::State&) { throw std::runtime_error("no"); };
    const absl::Status thrown = TrainTo(7).status();
    EXPECT_TRUE(absl::StrContains(thrown.message(), "callback after reading")) << thrown;
    EXPECT_TRUE(absl::StrContains(thrown.message(), "no")) << thrown;
  }
}

// The others do not wait for it.
TEST_F(RestoreTest, ACallbackThatThrowsOnOneRankIsAnErrorOfAll) {
  const Halves train(320);
  for (const char* format : {"pt", "sharded"}) {
    options_.checkpoint.manager.format = format;
    options_.checkpoint.manager.directory = absl::StrCat(folder_, "/", format);
    options_.checkpoint.resume = "auto";
    ASSERT_TRUE(TrainTo(3).ok());
    const std::string path =
        absl::StrCat(options_.checkpoint.manager.directory, "/epoch_0_step_3.", format);
    // By Train, and by a loop of one's own.
    const auto resume = [&](const session::Session& session, const std::string& from,
                            bool by_train) -> absl::Status {
      TrainerOptions options = options_;
      options.checkpoint.resume = by_train ? from : "";
      if (session.rank() == 1) {
        options.checkpoint.load.callback = [](checkpoint::State&) {
          throw std::runtime_error("no such key");
        };
      }
      if (by_train) return Train(session, LineTask(), train, Halves(60), options).status();
      DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options));
      DDP_RETURN_IF_ERROR(accelerator->PrepareLoader<data::Batch>(train).status());
      DDP_RETURN_IF_ERROR(accelerator->Prepare(std::make_shared<Line>()).status());
      return accelerator->LoadState(from);
    };
    for (const std::string& from : {std::string("auto"), path}) {
      for (const bool by_train : {true, false}) {
        RunRanks(2, [&](const session::Session& session) {
          const absl::Status failed = resume(session, from, by_train);
          for (const std::string& words :
               {std::string("rank 1: "),
                absl::StrCat("callback after reading ", path, ": no such key")}) {
            EXPECT_TRUE(absl::StrContains(failed.message(), words)) << from << ": " << failed;
          }
        });
      }
    }
    // It says nothing about the checkpoint.
    EXPECT_TRUE(TrainTo(5).ok());
  }
}

TEST_F(RestoreTest, ACosineThatHasEndedIsSaid) {
  options_.schedule.name = "cosine";
  options_.max_steps = 4;
  EXPECT_EQ(Count(PrintedTo(0), "had come to its end"), 0);
  options_.max_steps = 8;
  const std::string printed = PrintedTo(0);
  EXPECT_EQ(Count(printed, "learning rate stays 0 for the 4 steps"), 1) << printed;
  EXPECT_EQ(Count(printed, "max_steps 8, saved 4"), 1) << printed;
}

TEST_F(RestoreTest, AnotherScheduleIsReported) {
  constexpr char kDifference[] = "warmup_steps 7, saved 0";
  PrintedTo(3);
  const std::string same = PrintedTo(5);
  EXPECT_FALSE(absl::StrContains(same, ", saved ")) << same;
  options_.schedule.warmup_steps = 7;
  const std::string other = PrintedTo(7);
  EXPECT_TRUE(absl::StrContains(other, kDifference)) << other;
}

// This happens with --resume=PATH and a folder on each machine's own disk.
TEST_F(RestoreTest, AnotherFileOnAnotherRankIsRefused) {
  ASSERT_TRUE(TrainTo(3).ok());
  ASSERT_TRUE(TrainTo(6).ok());
  const std::string folder = options_.checkpoint.manager.directory;
  options_.checkpoint.manager.directory = "";
  for (const bool eval_only : {false, true}) {
    options_.eval_only = eval_only;
    RunRanks(2, [&](const session::Session& session) {
      TrainerOptions options = options_;
      options.checkpoint.resume =
          absl::StrCat(folder, "/epoch_0_step_", session.rank() == 0 ? 3 : 6, ".pt");
      const absl::Status refused =
          Train(session, LineTask(), Halves(320), Halves(60), options).status();
      EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
      for (const char* word : {"different checkpoints", "'position'", "rank 1"}) {
        EXPECT_TRUE(absl::StrContains(refused.message(), word)) << refused;
      }
    });
  }
}

// An evaluation may be another user's, or one of several.
TEST_F(RestoreTest, AnEvaluationRenamesNoDamage) {
  ASSERT_TRUE(TrainTo(3).ok());
  ASSERT_TRUE(TrainTo(6).ok());
  const std::string folder = options_.checkpoint.manager.directory;
  std::filesystem::resize_file(folder + "/epoch_0_step_6.pt", 100);
  const std::vector<std::string> before = ListDirectory(folder).value();
  options_.eval_only = true;
  for (int start = 0; start < 2; ++start) {
    const std::string printed = PrintedTo(0);
    EXPECT_TRUE(absl::StrContains(printed, "passed over a damaged checkpoint")) << printed;
    EXPECT_EQ(ListDirectory(folder).value(), before);
  }
  options_.eval_only = false;
  EXPECT_TRUE(TrainTo(6).ok());
  EXPECT_TRUE(std::filesystem::exists(folder + "/epoch_0_step_6.pt.damaged"));
}

// The error of one rank is not the run's: it goes on.
TEST_F(RestoreTest, DamageThatARunGetsOverIsNoError) {
  world_size_ = 2;
  for (const std::string format : {"safetensors", "sharded"}) {
    options_.checkpoint.manager.format = format;
    const std::string folder = options_.checkpoint.manager.directory = folder_ + "/" + format;
    ASSERT_TRUE(TrainTo(3).ok());
    ASSERT_TRUE(TrainTo(6).ok());
    const std::string path =
        absl::StrCat(folder, "/epoch_0_step_6.", format,
                     format == "sharded" ? "/rank_00000.safetensors" : "/model.safetensors");
    std::string bytes = ReadFile(path).value();
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    ASSERT_TRUE(WriteFileAtomically(path, bytes).ok());
    for (const bool eval_only : {true, false}) {
      options_.eval_only = eval_only;
      testing::internal::CaptureStderr();
      const absl::StatusOr<Report> report = TrainTo(5);
      const std::string printed = testing::internal::GetCapturedStderr();
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(Count(printed, "passed over a damaged checkpoint: "), 1) << printed;
      EXPECT_EQ(Count(printed, "error: "), 0) << printed;
      EXPECT_EQ(Count(printed, "rank 0: rank 0: "), 0) << printed;
      EXPECT_TRUE(absl::StrContains(report->last_checkpoint, eval_only ? "step_3." : "step_5."))
          << report->last_checkpoint;
    }
  }
}

// It would be the newest at each start, and a run would go on from it again and again.
TEST_F(RestoreTest, ACheckpointUnderAnotherTimesNameIsRefused) {
  ASSERT_TRUE(TrainTo(3).ok());
  const std::string folder = options_.checkpoint.manager.directory;
  const std::string own = folder + "/epoch_0_step_3.pt";
  for (const char* other : {"/epoch_4.pt", "/epoch_0_step_9.pt"}) {
    std::filesystem::copy_file(own, folder + other);
    // Also where a callback edits what is loaded.
    options_.checkpoint.load.callback = [](checkpoint::State& state) {
      state.root.insert_or_assign("extra", true);
    };
    const absl::Status refused = TrainTo(6).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
    EXPECT_EQ(ExitCodeIn(refused), kUsageExitCode);
    options_.checkpoint.load.callback = nullptr;
    EXPECT_TRUE(absl::StrContains(refused.message(), other)) << refused;
    EXPECT_TRUE(absl::StrContains(refused.message(), "of epoch 0, step 3")) << refused;
    // A run that is given it by its path takes its contents.
    options_.checkpoint.resume = folder_ + other;
    std::filesystem::rename(folder + other, options_.checkpoint.resume);
    options_.checkpoint.manager.directory = folder_ + "/others";
    EXPECT_TRUE(TrainTo(6).ok());
    options_.checkpoint.resume = "auto";
    options_.checkpoint.manager.directory = folder;
    std::filesystem::remove_all(folder_ + "/others");
  }
  EXPECT_TRUE(TrainTo(6).ok());
}

// A loop of one's own: steps of nothing, which are counted and saved.
class LoopTest : public RestoreTest {
 protected:
  using Body = std::function<absl::Status(Accelerator&)>;

  // In the first life of a job, or in a later one.
  absl::Status Run(const Body& body, int restart_count = 0, const std::string& job = "") {
    absl::Status status;
    RunRanks(1, [&](const session::Session& first) {
      launchers::Rank place = first.place();
      place.restart_count = restart_count;
      place.job = job;
      const session::Session session(
          place, {.process_group = first.process_group(), .store = first.store()}, first.device());
      const auto accelerator = Accelerator::Create(session, "loop", options_);
      status = accelerator.ok() ? body(**accelerator) : accelerator.status();
    });
    return status;
  }
  static void Step(Accelerator& accelerator) { const auto scope = accelerator.Accumulate(); }
};

TEST_F(LoopTest, ARunThatHasComeToItsLastStepTakesNoMore) {
  options_.checkpoint.resume = "";
  options_.max_steps = 2;
  const Body body = [](Accelerator& accelerator) {
    DDP_RETURN_IF_ERROR(accelerator.LoadState());
    while (true) {
      DDP_ASSIGN_OR_RETURN(const bool more, accelerator.GoOn());
      if (!more) break;
      Step(accelerator);
    }
    EXPECT_EQ(accelerator.position().step, 2);
    return accelerator.SaveAndEnd();
  };
  for (int life = 0; life < 2; ++life) EXPECT_EQ(Run(body), absl::OkStatus());
  const Body asks_nothing = [](Accelerator& accelerator) {
    DDP_RETURN_IF_ERROR(accelerator.LoadState());
    return CatchStatus("", [&] {
      Step(accelerator);
      return absl::OkStatus();
    });
  };
  const absl::Status more = Run(asks_nothing);
  EXPECT_TRUE(absl::StrContains(more.message(), "has come to its last step, 2")) << more;
}

// A launcher would start it again and again.
TEST_F(LoopTest, WhatNoAttemptCouldGoOnFromHasTheExitCodeOfWrongOptions) {
  const std::string own = options_.checkpoint.manager.directory + "/step_1.pt";
  const std::string other = options_.checkpoint.manager.directory + "/step_7.pt";
  options_.checkpoint.resume = "";
  EXPECT_EQ(Run([](Accelerator& accelerator) {
              Step(accelerator);
              return accelerator.SaveAndEnd();
            }),
            absl::OkStatus());
  const Body loads = [](Accelerator& accelerator) { return accelerator.LoadState(); };
  std::filesystem::copy_file(own, other);
  const absl::Status misnamed = Run(loads);
  EXPECT_TRUE(absl::StrContains(misnamed.message(), "of epoch 0, step 1")) << misnamed;
  EXPECT_EQ(ExitCodeIn(misnamed), kUsageExitCode);
  std::filesystem::remove(other);
  std::filesystem::resize_file(own, 100);
  for (int life = 0; life < 2; ++life) {
    const absl::Status damaged = Run(loads, life);
    EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
    EXPECT_EQ(ExitCodeIn(damaged), kUsageExitCode);
  }
}

// Of which the schedule would not know the length.
TEST_F(LoopTest, ALoaderAfterTheOptimizerOfAScheduleIsRefused) {
  options_.checkpoint.resume = "";
  options_.max_steps = 10;
  const Halves train(64);
  const Body body = [&](Accelerator& accelerator) -> absl::Status {
    DDP_ASSIGN_OR_RETURN(auto model, accelerator.Prepare(std::make_shared<Line>()));
    DDP_RETURN_IF_ERROR(accelerator.PrepareOptimizer(model).status());
    return accelerator.PrepareLoader<data::Batch>(train).status();
  };
  EXPECT_EQ(Run(body), absl::OkStatus());
  options_.schedule.name = "cosine";
  const absl::Status late = Run(body);
  EXPECT_TRUE(absl::StrContains(late.message(), "prepare the loader before the optimizer")) << late;
}

TEST_F(LoopTest, ASecondSaveOfAPositionKeepsItsMetrics) {
  options_.checkpoint.resume = "";
  options_.checkpoint.manager.keep_best = "test/loss:min";
  EXPECT_EQ(Run([](Accelerator& accelerator) {
              Step(accelerator);
              DDP_RETURN_IF_ERROR(accelerator.SaveState({{"test/loss", 1}}));
              return accelerator.SaveAndEnd();
            }),
            absl::OkStatus());
  EXPECT_EQ(Run([](Accelerator& accelerator) { return accelerator.LoadState("best"); }),
            absl::OkStatus());
}

TEST_F(LoopTest, ACallbackEditsWhatIsLoaded) {
  options_.checkpoint.resume = "";
  for (const char* format : {"pt", "sharded"}) {
    options_.checkpoint.manager.format = format;
    options_.checkpoint.manager.directory = absl::StrCat(folder_, "/", format);
    options_.checkpoint.load = {};
    EXPECT_EQ(Run([](Accelerator& accelerator) {
                Step(accelerator);
                return accelerator.SaveAndEnd();
              }),
              absl::OkStatus());
    options_.checkpoint.load.callback = [](checkpoint::State& state) {
      state.root.insert_or_assign("step", int64_t{5});
    };
    const std::string path =
        absl::StrCat(options_.checkpoint.manager.directory, "/step_1.", format);
    for (const std::string& from : {std::string("auto"), path}) {
      const Body loads = [&](Accelerator& accelerator) {
        DDP_RETURN_IF_ERROR(accelerator.LoadState(from));
        EXPECT_EQ(accelerator.position().step, 5) << from;
        return absl::OkStatus();
      };
      EXPECT_EQ(Run(loads), absl::OkStatus());
    }
  }
}

TEST_F(LoopTest, ALaterLifeGoesOnFromItsOwnCheckpoints) {
  options_.checkpoint.resume = "";
  const std::string begun_from = options_.checkpoint.manager.directory + "/step_1.pt";
  EXPECT_EQ(Run([](Accelerator& accelerator) {
              Step(accelerator);
              return accelerator.SaveAndEnd();
            }),
            absl::OkStatus());
  options_.checkpoint.manager.directory = folder_ + "/own";
  const Body body = [&](Accelerator& accelerator) {
    DDP_RETURN_IF_ERROR(accelerator.LoadState(begun_from));
    Step(accelerator);
    return accelerator.SaveAndEnd();
  };
  EXPECT_EQ(Run(body, 0, "a"), absl::OkStatus());
  // Another job, whose first life did not come to be refused.
  const absl::Status refused = Run(body, 1, "b");
  EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "job a; this is a later life of job b"))
      << refused;
  EXPECT_EQ(Run(body, 1, "a"), absl::OkStatus());
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/own/step_3.pt"));
}

}  // namespace
}  // namespace ddp::trainer
