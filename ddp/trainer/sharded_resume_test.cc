// Runs of several ranks that go on with a checkpoint: each rank gets what it needs, each byte is
// read once, and in format `sharded` the optimizer's state is found by the parameters' names.

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "checkpoint/manager.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

namespace {

std::atomic<uint64_t> bytes_read{0};

}  // namespace

// In the place of libc's: counts what all ranks, which are threads here, read from files.
extern "C" ssize_t pread(int fd, void* data, size_t size, off_t offset) {
  const ssize_t n = ::syscall(SYS_pread64, fd, data, size, offset);
  if (n > 0) bytes_read += static_cast<uint64_t>(n);
  return n;
}
extern "C" ssize_t pread64(int fd, void* data, size_t size, off_t offset) {
  return pread(fd, data, size, offset);
}

namespace ddp::trainer {
namespace {

using checkpoint::Dict;

// 1.3 MB of parameters: cut within blocks of checksums, and within tensors.
struct Wide : torch::nn::Module {
  Wide() {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(at::arange(parameter.numel(), at::kFloat).sin().mul(0.05).view_as(parameter));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    return out->forward(middle->forward(in->forward(x).relu()).relu());
  }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(2, 577))};
  torch::nn::Linear middle{register_module("middle", torch::nn::Linear(577, 577))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(577, 2))};
};

constexpr int64_t kExamples = 600;
constexpr int64_t kGlobalBatch = 60;  // of one, two, three and four ranks

class ShardedResumeTest : public testing::Test {
 protected:
  ShardedResumeTest()
      : folder_(absl::StrCat(testing::TempDir(), "/sharded_resume_",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    options_ = Quiet();
    options_.optimizer = {.name = "adamw", .lr = 0.01};
    options_.zero.stage = 1;
    options_.checkpoint.manager.directory = folder_ + "/run";
    options_.checkpoint.manager.format = "sharded";
    options_.checkpoint.resume = "auto";
  }

  // Up to this step, of a run whose global batch is the same in any world. All ranks return the
  // same. Sets parameters_, trained_batches_ and printed_.
  absl::Status TrainTo(int64_t step, int world_size) {
    std::vector<absl::Status> results(static_cast<size_t>(world_size));
    trained_batches_ = 0;
    testing::internal::CaptureStderr();
    RunRanks(world_size, [&](const session::Session& session) {
      TrainerOptions options = options_;
      options.batch_size = kGlobalBatch / world_size;
      options.stop_at_step = step;
      const auto module = std::make_shared<Wide>();
      Task task = Classification("wide", module);
      if (session.is_main()) CountTrainedBatches(task, trained_batches_);
      const auto report = Train(session, task, Halves(kExamples), Halves(60), options);
      results[static_cast<size_t>(session.rank())] = report.status();
      if (!report.ok() || !session.is_main()) return;
      EXPECT_EQ(report->steps, step);
      parameters_.clear();
      for (const at::Tensor& parameter : module->parameters()) {
        parameters_.push_back(parameter.detach().clone());
      }
    });
    printed_ = testing::internal::GetCapturedStderr();
    for (const absl::Status& result : results) EXPECT_EQ(result.message(), results[0].message());
    return results[0];
  }

  // Of the last TrainTo, which has gone on for so many steps as the run that was not interrupted.
  void ExpectWentOn(int64_t steps, const std::vector<at::Tensor>& expected, double relative,
                    double absolute) const {
    EXPECT_EQ(trained_batches_, steps);  // of the main rank
    ASSERT_EQ(parameters_.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::allclose(parameters_[i], expected[i], relative, absolute)) << i;
    }
  }

  std::string PathOf(int64_t step) const {
    return absl::StrCat(options_.checkpoint.manager.directory, "/epoch_0_step_", step, ".",
                        options_.checkpoint.manager.format);
  }

  static void Flip(const std::string& file) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    const auto at = static_cast<std::streamoff>(std::filesystem::file_size(file) / 2);
    stream.seekg(at);
    const char byte = static_cast<char>(stream.get() ^ 4);
    stream.seekp(at);
    stream.put(byte);
    ASSERT_TRUE(stream.good());
  }

  void CopyRun(const std::string& name) {
    std::filesystem::remove_all(folder_ + "/" + name);
    std::filesystem::copy(folder_ + "/run", folder_ + "/" + name,
                          std::filesystem::copy_options::recursive);
    options_.checkpoint.manager.directory = folder_ + "/" + name;
  }

  const std::string folder_;
  TrainerOptions options_;
  std::vector<at::Tensor> parameters_;
  int64_t trained_batches_ = 0;
  std::string printed_;
};

TEST_F(ShardedResumeTest, AnyWorldGoesOnAndReadsEachByteOnce) {
  struct Case {
    std::string format;
    int64_t stage;
  };
  for (const auto& [format, stage] : std::vector<Case>{
           {"sharded", 1}, {"sharded", 2}, {"sharded", 0}, {"pt", 1}, {"safetensors", 1}}) {
    options_.zero.stage = stage;
    options_.checkpoint.manager.format = format;
    options_.checkpoint.manager.directory = folder_ + "/run";
    std::filesystem::remove_all(folder_);
    ASSERT_TRUE(TrainTo(5, 2).ok());
    const std::vector<at::Tensor> expected = parameters_;
    std::filesystem::remove_all(folder_);
    ASSERT_TRUE(TrainTo(3, 2).ok());
    uint64_t unique = 0;
    if (std::filesystem::is_directory(PathOf(3))) {
      const std::vector<std::string> names = ListDirectory(PathOf(3)).value();
      for (const std::string& name : names) {
        unique += std::filesystem::file_size(PathOf(3) + "/" + name);
      }
    } else {
      unique = std::filesystem::file_size(PathOf(3));
    }
    ASSERT_GT(unique, 4'000'000);
    const auto expect_each_byte_once = [&] {
      EXPECT_LT(bytes_read, unique * 105 / 100);
      EXPECT_GT(bytes_read, unique * 99 / 100);
    };
    for (const int world_size : {2, 1, 3, 4}) {
      SCOPED_TRACE(absl::StrCat(format, ", stage ", stage, ", ", world_size, " ranks"));
      CopyRun(absl::StrCat("with_", world_size));
      bytes_read = 0;
      options_.checkpoint.every = 0;
      const absl::Status resumed = TrainTo(5, world_size);
      ASSERT_TRUE(resumed.ok()) << resumed;
      expect_each_byte_once();
      options_.checkpoint.every = 1;
      ExpectWentOn(2, expected, 1e-4, 1e-5);
    }
    // As Python's users call their files: the content tells the format.
    const std::string without_suffix = folder_ + "/model.bin";
    std::filesystem::copy(PathOf(3), without_suffix, std::filesystem::copy_options::recursive);
    const std::string with_suffix = PathOf(3);
    options_.checkpoint.manager.directory = "";
    for (const std::string& path : {with_suffix, without_suffix}) {
      SCOPED_TRACE(absl::StrCat(format, ", stage ", stage, ", ", path));
      options_.checkpoint.resume = path;
      bytes_read = 0;
      const absl::Status resumed = TrainTo(5, 4);
      ASSERT_TRUE(resumed.ok()) << resumed;
      expect_each_byte_once();
      ExpectWentOn(2, expected, 1e-4, 1e-5);
    }
    options_.checkpoint.resume = "auto";
  }
}

// Whatever the stage before and after.
TEST_F(ShardedResumeTest, TheStateHasTheParametersNames) {
  for (const int64_t stage : {0, 1, 2}) {
    SCOPED_TRACE(absl::StrCat("stage ", stage));
    std::filesystem::remove_all(folder_);
    options_.checkpoint.manager.directory = folder_ + "/run";
    options_.zero.stage = stage;
    ASSERT_TRUE(TrainTo(4, 2).ok());
    const std::vector<at::Tensor> expected = parameters_;
    std::filesystem::remove_all(folder_);
    ASSERT_TRUE(TrainTo(2, 2).ok());
    const std::string manifest = ReadFile(PathOf(2) + "/manifest.json").value();
    for (const char* name :
         {"model.in.weight", "optimizer.state.in.weight.exp_avg",
          "optimizer.state.out.bias.exp_avg_sq", "optimizer.state.middle.weight.step"}) {
      EXPECT_TRUE(absl::StrContains(manifest, absl::StrCat("\"", name, "\":{"))) << name;
    }
    EXPECT_FALSE(absl::StrContains(manifest, "optimizer.state.0."));
    const Dict optimizer =
        checkpoint::Manager::Load(PathOf(2))->root.at("optimizer").toGenericDict();
    const auto params =
        optimizer.at("param_groups").toListRef()[0].toGenericDict().at("params").toListRef().vec();
    ASSERT_EQ(params.size(), 6u);
    EXPECT_EQ(params[0].toStringRef(), "in.weight");
    EXPECT_EQ(optimizer.at("state").toGenericDict().size(), 6u);
    for (const int64_t after : {0, 1, 2}) {
      SCOPED_TRACE(absl::StrCat("then ", after));
      CopyRun(absl::StrCat("stage_", after));
      options_.zero.stage = after;
      const absl::Status resumed = TrainTo(4, 2);
      ASSERT_TRUE(resumed.ok()) << resumed;
      ExpectWentOn(2, expected, 1e-5, 1e-6);
    }
  }
}

// Files of earlier versions have numbers, and so have those of other formats.
TEST_F(ShardedResumeTest, NumbersInThePlaceOfNamesAreRead) {
  for (const int64_t stage : {0, 1}) {
    options_.zero.stage = stage;
    std::filesystem::remove_all(folder_);
    options_.checkpoint.manager.directory = folder_ + "/run";
    ASSERT_TRUE(TrainTo(4, 2).ok());
    const std::vector<at::Tensor> expected = parameters_;
    std::filesystem::remove_all(folder_);
    options_.checkpoint.save.callback = [](checkpoint::State& state) {
      const Dict optimizer = state.root.at("optimizer").toGenericDict();
      const std::vector<std::string> names = {"in.weight",   "in.bias",    "middle.weight",
                                              "middle.bias", "out.weight", "out.bias"};
      Dict states(c10::IntType::get(), c10::AnyType::get());
      c10::impl::GenericList params(c10::AnyType::get());
      for (size_t i = 0; i < names.size(); ++i) {
        const auto number = static_cast<int64_t>(i);
        params.push_back(number);
        states.insert(number, optimizer.at("state").toGenericDict().at(names[i]));
        for (const char* entry : {"exp_avg", "exp_avg_sq"}) {
          const auto path = [&](const std::string& key) {
            return absl::StrCat("optimizer/state/", key, "/", entry);
          };
          const auto found = state.sharded.find(path(names[i]));
          if (found == state.sharded.end()) continue;
          state.sharded.emplace(path(absl::StrCat(i)), found->second);
          state.sharded.erase(found);
        }
      }
      optimizer.insert_or_assign("state", states);
      optimizer.at("param_groups")
          .toListRef()[0]
          .toGenericDict()
          .insert_or_assign("params", params);
    };
    ASSERT_TRUE(TrainTo(2, 2).ok());
    EXPECT_TRUE(absl::StrContains(ReadFile(PathOf(2) + "/manifest.json").value(),
                                  "\"optimizer.state.0.exp_avg\":{"));
    options_.checkpoint.save.callback = nullptr;
    for (const int world_size : {2, 4}) {
      CopyRun(absl::StrCat("with_", world_size));
      const absl::Status resumed = TrainTo(4, world_size);
      ASSERT_TRUE(resumed.ok()) << resumed;
      ExpectWentOn(2, expected, 1e-4, 1e-5);
    }
  }
}

// As mmengine's resume without optimizer and schedule, of which each rank reads its parts.
TEST_F(ShardedResumeTest, ACallbackEditsWhatEachRankReads) {
  for (const std::string format : {"pt", "sharded"}) {
    SCOPED_TRACE(format);
    std::filesystem::remove_all(folder_);
    options_.checkpoint.manager.format = format;
    options_.checkpoint.manager.directory = folder_ + "/run";
    options_.checkpoint.load = {};
    options_.checkpoint.resume = "auto";
    ASSERT_TRUE(TrainTo(2, 2).ok());
    std::atomic<int> calls{0};
    options_.checkpoint.load.callback = [&](checkpoint::State& state) {
      ++calls;
      EXPECT_FALSE(state.sharded.empty());
      EXPECT_EQ(state.root.erase("optimizer"), 1);
      EXPECT_EQ(state.root.erase("scheduler"), 1);
      state.root.at("model").toGenericDict().insert_or_assign("out.bias", at::full({2}, 7.F));
    };
    for (const bool by_path : {false, true}) {
      CopyRun(by_path ? "by_path" : "newest");
      options_.checkpoint.resume = by_path ? PathOf(2) : "auto";
      calls = 0;
      const absl::Status resumed = TrainTo(2, 2);  // it goes on with step 2, and stops
      ASSERT_TRUE(resumed.ok()) << resumed;
      EXPECT_EQ(calls.load(), 2);
      EXPECT_TRUE(parameters_[5].eq(7).all().item<bool>()) << parameters_[5];
      EXPECT_TRUE(absl::StrContains(
          printed_, "resumed without optimizer, which the checkpoint does not have"))
          << printed_;
      const absl::Status trained = TrainTo(3, 2);
      EXPECT_TRUE(trained.ok()) << trained;
    }
  }
}

TEST_F(ShardedResumeTest, DamageThatOneRankFindsMakesAllTakeTheOneBefore) {
  ASSERT_TRUE(TrainTo(2, 2).ok());
  const std::vector<at::Tensor> before = parameters_;
  ASSERT_TRUE(TrainTo(3, 2).ok());
  // Of the parts of the optimizer's state, which each rank reads for itself; and of what all share.
  for (const std::string name :
       {"rank_00001.ranges", "rank_00000.ranges", "rank_00001.safetensors"}) {
    SCOPED_TRACE(name);
    CopyRun("damaged_" + name);
    Flip(PathOf(3) + "/" + name);
    options_.checkpoint.resume = PathOf(3);
    const std::string directory =
        std::exchange(options_.checkpoint.manager.directory, std::string());
    const absl::Status refused = TrainTo(4, 2);
    EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << refused;
    EXPECT_TRUE(absl::StrContains(refused.message(), name)) << refused;
    options_.checkpoint.manager.directory = directory;
    options_.checkpoint.resume = "auto";
    for (const int world_size : {4, 2}) {
      const absl::Status resumed = TrainTo(2, world_size);  // it goes on with step 2, and stops
      ASSERT_TRUE(resumed.ok()) << resumed;
      for (size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(at::equal(parameters_[i], before[i])) << i;
      }
      EXPECT_TRUE(std::filesystem::exists(PathOf(3) + ".damaged"));
    }
  }
}

TEST_F(ShardedResumeTest, ARankThatCannotReadIsAnErrorOfAll) {
  ASSERT_TRUE(TrainTo(2, 2).ok());
  std::filesystem::remove(PathOf(2) + "/rank_00001.ranges");
  std::filesystem::create_directory(PathOf(2) + "/rank_00001.ranges");
  const absl::Status refused = TrainTo(3, 4);
  EXPECT_FALSE(refused.ok());
  EXPECT_TRUE(absl::StrContains(refused.message(), "rank_00001.ranges")) << refused;
}

// Another model: its own check says what does not fit, not the reader.
TEST_F(ShardedResumeTest, AnotherShapeIsNamedByTheModel) {
  ASSERT_TRUE(TrainTo(2, 2).ok());
  RunRanks(2, [&](const session::Session& session) {
    struct Wider : torch::nn::Module {
      at::Tensor forward(const at::Tensor& x) { return out->forward(in->forward(x)); }
      torch::nn::Linear in{register_module("in", torch::nn::Linear(2, 1000))};
      torch::nn::Linear out{register_module("out", torch::nn::Linear(1000, 2))};
    };
    const auto module = std::make_shared<Wider>();
    const absl::Status refused =
        Train(session, Classification("wide", module), Halves(kExamples), Halves(60), options_)
            .status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    EXPECT_TRUE(absl::StrContains(refused.message(), "in.weight (model [1000, 2]")) << refused;
  });
}

}  // namespace
}  // namespace ddp::trainer
