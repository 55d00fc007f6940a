// A new run that begins with the weights of a checkpoint: CheckpointOptions::init_from.

#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/option_error.h"
#include "base/runfiles.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

using checkpoint::Dict;

class InitFromTest : public testing::Test {
 protected:
  InitFromTest()
      : folder_(absl::StrCat(testing::TempDir(), "/init_from_",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    options_ = Quiet();
    options_.log.progress = true;
    options_.epochs = 0;  // what a run begins with is what it ends with
    weights_ = checkpoint::NewTree();
    Net net(0);
    for (const auto& parameter : net.named_parameters()) {
      weights_.insert(parameter.key(), at::full_like(parameter.value().detach(), 0.25));
    }
    for (const auto& buffer : net.named_buffers()) {
      weights_.insert(buffer.key(), at::full_like(buffer.value(), 3));
    }
  }

  std::string Write(const Dict& root, const std::string& name, const std::string& format = "pt") {
    const std::string path = absl::StrCat(folder_, "/", name);
    checkpoint::State state;
    state.root = root;
    const absl::Status written = checkpoint::CreateFormat(format).value()->Write(state, path);
    EXPECT_TRUE(written.ok()) << written;
    return path;
  }

  static Dict Under(const std::string& key, const Dict& weights) {
    Dict root = checkpoint::NewTree();
    root.insert(key, weights);
    return root;
  }

  Dict Renamed(const std::string& prefix) const {
    Dict renamed = checkpoint::NewTree();
    for (const auto& entry : weights_) {
      renamed.insert(prefix + entry.key().toStringRef(), entry.value());
    }
    return renamed;
  }

  // Ranks begin with different weights of their own. All succeed, or all fail with one message.
  absl::Status Begin(int world_size = 1) {
    std::vector<absl::Status> results(static_cast<size_t>(world_size));
    ends_.clear();
    for (int rank = 0; rank < world_size; ++rank) ends_.push_back(checkpoint::NewTree());
    testing::internal::CaptureStderr();
    RunRanks(world_size, [&](const session::Session& session) {
      const auto rank = static_cast<size_t>(session.rank());
      Task task = NetTask();
      {
        const at::NoGradGuard no_grad;
        for (at::Tensor& parameter : task.module->parameters()) {
          parameter.fill_(-1.0 - session.rank());
        }
        for (at::Tensor& buffer : task.module->buffers()) buffer.fill_(10 + session.rank());
      }
      TrainerOptions options = options_;
      options.log.progress = options_.log.progress && session.is_main();
      const auto report = Train(session, task, Halves(64), Halves(60), options);
      results[rank] = report.status();
      EXPECT_TRUE(!report.ok() || report->steps == steps_) << report->steps;
      for (const auto& parameter : task.module->named_parameters()) {
        ends_[rank].insert(parameter.key(), parameter.value().detach().clone());
      }
      for (const auto& buffer : task.module->named_buffers()) {
        ends_[rank].insert(buffer.key(), buffer.value().clone());
      }
    });
    printed_ = testing::internal::GetCapturedStderr();
    for (const absl::Status& result : results) EXPECT_EQ(result.message(), results[0].message());
    return results[0];
  }

  void ExpectAllHave(const Dict& weights) const {
    for (const Dict& end : ends_) {
      for (const auto& entry : weights) {
        EXPECT_TRUE(at::equal(end.at(entry.key()).toTensor(), entry.value().toTensor()))
            << entry.key().toStringRef() << end.at(entry.key()).toTensor();
      }
    }
  }
  void ExpectPrinted(absl::string_view words) const {
    EXPECT_TRUE(absl::StrContains(printed_, words)) << words << " in:\n" << printed_;
  }
  static void ExpectRefused(const absl::Status& status, const std::vector<std::string>& words) {
    EXPECT_FALSE(status.ok());
    for (const std::string& word : words) {
      EXPECT_TRUE(absl::StrContains(status.message(), word)) << word << " in: " << status;
    }
  }

  const std::string folder_;
  TrainerOptions options_;
  Dict weights_ = checkpoint::NewTree();
  std::vector<Dict> ends_;
  std::string printed_;
  int64_t steps_ = 0;
};

TEST_F(InitFromTest, FilesOfAnyLayoutAndFormatGiveAllRanksTheirWeights) {
  options_.data_parallel.init_sync = false;  // the wrapper would hide that only rank 0 reads
  options_.data_parallel.broadcast_buffers = false;
  Dict both = Under("model", weights_);
  both.insert("epoch", int64_t{7});
  both.insert("optimizer", checkpoint::NewTree());
  const std::string safetensors = Write(both, "a.safetensors", "safetensors");
  for (const std::string& path :
       {Write(both, "ours.pt"), Write(Under("state_dict", weights_), "lightning.ckpt"),
        Write(Under("model_state_dict", weights_), "tutorial.tar"), Write(weights_, "bare.pth"),
        safetensors, safetensors + "/model.safetensors"}) {
    SCOPED_TRACE(path);
    options_.checkpoint.init_from = path;
    const absl::Status begun = Begin(2);
    ASSERT_TRUE(begun.ok()) << begun;
    ExpectAllHave(weights_);
    ExpectPrinted(absl::StrCat("initialised from ", path, ": ", weights_.size(), " tensors"));
    EXPECT_FALSE(absl::StrContains(printed_, "initialised: ")) << printed_;
  }
}

// Folders that Python's torch.distributed.checkpoint wrote, in one process, and with fully_shard in
// two: each rank gets whole weights, and nothing of the optimizer and what else there is.
TEST_F(InitFromTest, FoldersOfPythonsDcpGiveTheirWeights) {
  struct Layers : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      return last->forward(first->forward(x.repeat({1, 3})).relu());
    }
    torch::nn::Linear first{register_module("0", torch::nn::Linear(6, 5))};
    torch::nn::Linear last{register_module("2", torch::nn::Linear(5, 3))};
  };
  for (const std::string name : {"one_rank", "two_ranks"}) {
    SCOPED_TRACE(name);
    const std::string metadata =
        Runfile(absl::StrCat("libtorch_ddp/checkpoint/dcp/testdata/", name, "/.metadata")).value();
    options_.checkpoint.init_from = absl::StrCat(folder_, "/", name);
    std::filesystem::create_directories(options_.checkpoint.init_from);
    // Bazel's files are links, which are refused.
    for (const auto& file :
         std::filesystem::directory_iterator(std::filesystem::path(metadata).parent_path())) {
      std::filesystem::copy_file(file.path(), std::filesystem::path(options_.checkpoint.init_from) /
                                                  file.path().filename());
    }
    const Dict expected = checkpoint::CreateFormat("pt")
                              .value()
                              ->Read(options_.checkpoint.init_from + "/expected.pt")
                              .value()
                              .root.at("model")
                              .toGenericDict();
    ASSERT_EQ(expected.size(), 4u);
    RunRanks(2, [&](const session::Session& session) {
      const auto module = std::make_shared<Layers>();
      TrainerOptions options = options_;
      options.log.progress = false;
      options.data_parallel.init_sync = false;
      const auto report =
          Train(session, Classification("layers", module), Halves(64), Halves(60), options);
      ASSERT_TRUE(report.ok()) << report.status();
      for (const auto& parameter : module->named_parameters()) {
        EXPECT_TRUE(at::equal(parameter.value().detach(), expected.at(parameter.key()).toTensor()))
            << parameter.key() << " on rank " << session.rank();
      }
    });
  }
}

// A run of this program: only the weights are taken, and all else begins anew.
TEST_F(InitFromTest, ACheckpointOfARunGivesItsWeightsAndNothingElse) {
  for (const std::string format : {"pt", "sharded", "safetensors"}) {
    SCOPED_TRACE(format);
    options_.checkpoint.init_from = "";
    options_.epochs = 1;
    options_.optimizer = {.name = "adamw", .lr = 0.05};
    options_.schedule.name = "cosine";
    options_.checkpoint.manager.directory = absl::StrCat(folder_, "/first_", format);
    options_.checkpoint.manager.format = format;
    steps_ = 2;
    ASSERT_TRUE(Begin(2).ok());
    const Dict end = ends_[0];
    const std::string old =
        absl::StrCat(options_.checkpoint.manager.directory, "/epoch_1.", format);
    options_.checkpoint.init_from = old;
    options_.checkpoint.manager.directory = absl::StrCat(folder_, "/second_", format);
    options_.stop_at_step = 1;
    options_.log.dir = absl::StrCat(folder_, "/log_", format);
    options_.log.every = 1;
    steps_ = 1;
    const absl::Status begun = Begin(2);
    ASSERT_TRUE(begun.ok()) << begun;
    EXPECT_FALSE(at::equal(ends_[0].at("in.weight").toTensor(), end.at("in.weight").toTensor()));
    const auto lr = Logged(options_.log.dir, "train/lr");
    ASSERT_EQ(lr.size(), 1u);
    EXPECT_EQ(lr.begin()->first, 1);
    EXPECT_EQ(lr.begin()->second, 0.05) << "a cosine that begins";
    options_.stop_at_step = 0;
    options_.epochs = 0;
    options_.log.dir = "";
    options_.checkpoint.manager.directory = "";
    steps_ = 0;
    ASSERT_TRUE(Begin(2).ok());
    ExpectAllHave(end);
  }
}

// The average of a run, for a run without one, to train on or to evaluate.
TEST_F(InitFromTest, AKeyGivesOtherWeightsThanTheModels) {
  for (const std::string format : {"pt", "sharded", "safetensors"}) {
    SCOPED_TRACE(format);
    const TrainerOptions quiet = options_;
    options_.epochs = 1;
    options_.ema.decay = 0.5;
    options_.checkpoint.manager.directory = absl::StrCat(folder_, "/first_", format);
    options_.checkpoint.manager.format = format;
    steps_ = 2;
    ASSERT_TRUE(Begin(2).ok());
    const Dict end = ends_[0];
    const std::string file =
        absl::StrCat(options_.checkpoint.manager.directory, "/epoch_1.", format);
    const auto state = checkpoint::Manager::Load(file);
    ASSERT_TRUE(state.ok()) << state.status();
    // Its parameters, and the model's buffers.
    Dict expected = end.copy();
    for (const auto& entry : state->root.at("ema").toGenericDict().at("weights").toGenericDict()) {
      expected.insert_or_assign(entry.key(), entry.value());
    }
    EXPECT_FALSE(at::equal(expected.at("out.weight").toTensor(), end.at("out.weight").toTensor()));
    options_ = quiet;
    options_.checkpoint.init_from = file;
    options_.checkpoint.init_key = "ema";
    steps_ = 0;
    for (const bool eval_only : {false, true}) {
      options_.eval_only = eval_only;
      const absl::Status begun = Begin(2);
      ASSERT_TRUE(begun.ok()) << begun;
      ExpectAllHave(expected);
      ExpectPrinted(
          absl::StrCat("initialised from ", file, ", ema: ", expected.size(), " tensors"));
    }
    options_.checkpoint.init_key = "mean";
    const absl::Status missing = Begin(2);
    EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
    ExpectRefused(missing, {"checkpoint.init_key=mean is no dict of weights in ",
                            "; those in it: ", "ema", "model"});
    EXPECT_FALSE(absl::StrContains(missing.message(), "optimizer")) << missing;
    // The model's weights are not taken in its place.
    options_.checkpoint.init_key = "optimizer";
    for (const bool strict : {true, false}) {
      options_.checkpoint.init_strict = strict;
      ExpectRefused(Begin(2), {"checkpoint.init_key=optimizer is no dict of weights in "});
    }
    options_ = quiet;
  }
  options_.checkpoint.init_key = "ema";
  ExpectRefused(Validate(options_), {"checkpoint.init_key=ema has no effect without init_from"});
  // Files that have the average alone.
  options_.checkpoint.init_from = Write(Under("ema_model", weights_), "average.pt");
  options_.checkpoint.init_key = "ema_model";
  ASSERT_TRUE(Begin(1).ok());
  ExpectAllHave(weights_);
  // The model's weights beside it are not taken in its place, as far as nothing in it fits.
  Dict beside = Under("model", weights_);
  beside.insert("ema_model", Renamed("other."));
  options_.checkpoint.init_from = Write(beside, "beside.pt");
  options_.checkpoint.init_strict = false;
  ExpectRefused(Begin(2), {"checkpoint.init_key=ema_model cannot be taken from ", "beside.pt",
                           "nothing in it fits the model"});
  options_.checkpoint.init_strict = true;
  options_.checkpoint.init_from = Write(weights_, "bare.pt");
  ExpectRefused(Begin(1), {"checkpoint.init_key=ema_model is no dict of weights"});
}

TEST_F(InitFromTest, WhatDoesNotFitIsListedAndNothingIsTaken) {
  Dict other = Renamed("");
  EXPECT_EQ(other.erase("out.bias"), 1u);
  other.insert_or_assign("in.weight", at::zeros({3, 2}));
  other.insert_or_assign("norm.num_batches_tracked", at::zeros({}, at::kFloat));
  other.insert("head.weight", at::zeros({1}));
  options_.checkpoint.init_from = Write(Under("model", other), "other.pt");
  const absl::Status refused = Begin(2);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  ExpectRefused(refused,
                {"checkpoint.init_from", "1 missing in the checkpoint: out.bias",
                 "1 unknown to the model: head.weight",
                 "1 of another shape: in.weight (model [16, 2], checkpoint [3, 2])",
                 "1 that cannot be converted: norm.num_batches_tracked", "init_strict=false"});
  EXPECT_EQ(ends_[1].at("out.weight").toTensor()[0][0].item<double>(), -1)
      << "rank 0's, by the wrapper";

  options_.checkpoint.init_strict = false;
  ASSERT_TRUE(Begin(2).ok());
  Dict fits = Renamed("");
  for (const char* name : {"out.bias", "in.weight", "norm.num_batches_tracked"}) {
    EXPECT_EQ(fits.erase(name), 1u);
  }
  ExpectAllHave(fits);
  EXPECT_EQ(ends_[1].at("out.bias").toTensor()[0].item<double>(), -1);
  ExpectPrinted(absl::StrCat(": ", fits.size(), " tensors"));
  ExpectPrinted("initialised: 1 in the checkpoint found no place: head.weight");
  ExpectPrinted(
      "initialised: 3 in the model kept their initial values: out.bias, in.weight (model");

  options_.checkpoint.init_from = Write(Under("model", Renamed("other.")), "nothing.pt");
  ExpectRefused(Begin(2), {"nothing in it fits the model"});
}

TEST_F(InitFromTest, NamesAreMapped) {
  options_.checkpoint.init_from =
      Write(Under("state_dict", Renamed("module.backbone.")), "mapped.ckpt");
  ExpectRefused(Begin(), {"unknown to the model: backbone.in", "init_map"});
  options_.checkpoint.init_map = R"(^module\.backbone\.(.)=$1)";
  const absl::Status mapped = Begin();
  ASSERT_TRUE(mapped.ok()) << mapped;
  ExpectAllHave(weights_);
  options_.checkpoint.init_map = "^encoder=";
  const absl::Status unmatched = Begin(2);
  ExpectRefused(unmatched, {"checkpoint.init_map=^encoder= matches none"});
  options_.checkpoint.init_map = "(=";
  ExpectRefused(Begin(2), {"checkpoint.init_map=(= has no valid regular expression"});
  options_.checkpoint.init_map = R"((weight|bias)$=x)";
  ExpectRefused(Begin(2), {"makes one name of two", "become 'module.backbone.in.x'"});
}

TEST_F(InitFromTest, WhatIsTakenAllTheSameIsSaid) {
  Dict half = checkpoint::NewTree();
  for (const auto& entry : weights_) {
    const at::Tensor tensor = entry.value().toTensor();
    half.insert("_orig_mod." + entry.key().toStringRef(),
                tensor.is_floating_point() ? tensor.to(at::kBFloat16) : tensor);
  }
  EXPECT_EQ(half.erase("_orig_mod.norm.num_batches_tracked"), 1u);
  options_.checkpoint.init_from = Write(half, "half.pt");
  ASSERT_TRUE(Begin(2).ok());
  Dict expected = Renamed("");
  EXPECT_EQ(expected.erase("norm.num_batches_tracked"), 1u);
  ExpectAllHave(expected);
  ExpectPrinted("dropped '_orig_mod.' from 8 names");
  ExpectPrinted("1 missing in the checkpoint, and left as they are: norm.num_batches_tracked");
  ExpectPrinted("initialised: 8 converted: in.weight (model Float, checkpoint BFloat16)");
}

TEST_F(InitFromTest, TheRunsOwnCheckpointComesFirst) {
  options_.checkpoint.init_from = Write(weights_, "init.pt");
  options_.checkpoint.resume = "auto";
  options_.checkpoint.manager.directory = folder_ + "/run";
  options_.epochs = 2;
  options_.stop_at_step = steps_ = 1;
  ASSERT_TRUE(Begin(2).ok());
  ExpectPrinted("initialised from ");
  const Dict first = ends_[0];
  std::filesystem::remove(options_.checkpoint.init_from);
  ASSERT_TRUE(Begin(2).ok());
  ExpectPrinted(absl::StrCat("init_from ", options_.checkpoint.init_from,
                             " is not read: this run goes on from its own ", folder_,
                             "/run/epoch_0_step_1.pt"));
  ExpectAllHave(first);
  // A run's folder that holds another run's checkpoints is refused as without init_from.
  options_.checkpoint.resume = "";
  options_.checkpoint.init_from = folder_ + "/run/epoch_0_step_1.pt";
  ExpectRefused(Begin(2), {"checkpoint.dir"});
  options_.checkpoint.manager.directory = "";
  ASSERT_TRUE(Begin(2).ok());
}

TEST_F(InitFromTest, OptionsThatContradictEachOtherAreRefused) {
  const std::string path = Write(weights_, "init.pt");
  options_.checkpoint.init_from = path;
  options_.checkpoint.resume = path;
  ExpectRefused(Validate(options_), {"checkpoint.init_from", "resume=", "goes on with an old one"});
  options_.checkpoint.resume = "";
  EXPECT_TRUE(Validate(options_).ok());
  options_.checkpoint.init_from = "";
  options_.checkpoint.init_strict = false;
  ExpectRefused(Validate(options_), {"checkpoint.init_strict"});
  options_.checkpoint.init_strict = true;
  options_.checkpoint.init_map = "a=b";
  ExpectRefused(Validate(options_), {"checkpoint.init_map"});
}

TEST_F(InitFromTest, WhatIsNoCheckpointIsAnErrorOfAllRanks) {
  options_.checkpoint.init_from = folder_ + "/missing.pt";
  const absl::Status missing = Begin(2);
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound) << missing;
  ExpectRefused(missing, {"checkpoint.init_from=", "missing.pt"});
  Dict numbers = checkpoint::NewTree();
  numbers.insert("epoch", int64_t{3});
  options_.checkpoint.init_from = Write(numbers, "numbers.pt");
  ExpectRefused(Begin(2), {"no weights", "1 keys: epoch"});
}

// Also with the options of the run: nothing can be rolled back, and no checkpoint is chosen.
TEST_F(InitFromTest, WeightsCanBeEvaluatedAlone) {
  options_.checkpoint.init_from = Write(weights_, "init.pt");
  options_.eval_only = true;
  options_.guard.on_anomaly = "rollback";
  options_.checkpoint.manager.keep_best = "val/loss:min";
  ASSERT_TRUE(Begin(2).ok());
  ExpectAllHave(weights_);
}

// Master copies of bf16 parameters are made of the weights that were taken. A learning rate of 0
// shows what a step starts from.
TEST_F(InitFromTest, CopiesOfParametersAreMadeAfterwards) {
  struct Halved : torch::nn::Module {
    Halved() { to(at::kBFloat16); }
    at::Tensor forward(const at::Tensor& x) {
      return linear->forward(x.to(at::kBFloat16)).to(at::kFloat);
    }
    torch::nn::Linear linear{register_module("linear", torch::nn::Linear(2, 2))};
  };
  Dict weights = checkpoint::NewTree();
  weights.insert("linear.weight", at::full({2, 2}, 0.5));
  weights.insert("linear.bias", at::full({2}, 0.25));
  options_.checkpoint.init_from = Write(weights, "init.pt");
  options_.zero.stage = 1;
  options_.optimizer.lr = 1e-30;
  options_.epochs = 1;
  RunRanks(2, [&](const session::Session& session) {
    const auto module = std::make_shared<Halved>();
    module->to(at::kBFloat16);
    TrainerOptions options = options_;
    options.log.progress = false;
    const auto report =
        Train(session, Classification("halved", module), Halves(64), Halves(60), options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->steps, 2);
    for (const auto& parameter : module->named_parameters()) {
      EXPECT_TRUE(at::equal(parameter.value().detach().to(at::kFloat),
                            weights.at(parameter.key()).toTensor()))
          << parameter.value();
    }
  });
}

TEST_F(InitFromTest, ACallbackEditsTheWeights) {
  options_.checkpoint.init_from = Write(Under("model", weights_), "model.pt");
  const auto edit = [](const Dict& weights) {
    for (const auto& entry : weights) {
      entry.setValue(at::full_like(entry.value().toTensor(), 7));
    }
  };
  options_.checkpoint.load.callback = [&](checkpoint::State& state) {
    edit(state.root.at("model").toGenericDict());
  };
  const absl::Status edited = Begin(2);
  ASSERT_TRUE(edited.ok()) << edited;
  edit(weights_);
  ExpectAllHave(weights_);
  options_.checkpoint.load.callback = [](checkpoint::State&) { throw std::runtime_error("no"); };
  ExpectRefused(Begin(2), {"checkpoint.init_from", "callback after reading ", "model.pt: no"});
}

// Of a resume.
TEST_F(InitFromTest, WhatAResumeTakesAllTheSameIsSaid) {
  options_.epochs = 1;
  options_.checkpoint.manager.directory = folder_ + "/run";
  options_.stop_at_step = steps_ = 1;
  options_.checkpoint.save.callback = [](checkpoint::State& state) {
    Dict wrapped = checkpoint::NewTree();
    for (const auto& entry : state.root.at("model").toGenericDict()) {
      wrapped.insert("module." + entry.key().toStringRef(), entry.value());
    }
    state.root.insert_or_assign("model", wrapped);
  };
  ASSERT_TRUE(Begin(2).ok());
  options_.checkpoint.resume = "auto";
  const absl::Status resumed = Begin(2);
  ASSERT_TRUE(resumed.ok()) << resumed;
  ExpectPrinted("resumed with model state: dropped 'module.' from 9 names");
}

}  // namespace
}  // namespace ddp::trainer
