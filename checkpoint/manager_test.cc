#include "checkpoint/manager.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/coordinator.h"
#include "base/file.h"
#include "base/file_faults.h"
#include "checkpoint/format.h"
#include "checkpoint/name.h"
#include "checkpoint/state_testing.h"

namespace ddp::checkpoint {
namespace {

class ManagerTest : public testing::Test {
 protected:
  ManagerTest() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ = absl::StrCat(testing::TempDir(), "/manager_test_", info->name());
    std::filesystem::remove_all(directory_);
  }
  std::unique_ptr<Manager> Make(FileSystem* files = FileSystem::Default(), int keep = 0) {
    return Manager::Create({.directory = directory_, .keep = keep, .files = files}, alone_).value();
  }
  std::string Path(absl::string_view name) const { return absl::StrCat(directory_, "/", name); }
  // Without the notes beside checkpoints, each of which must have its checkpoint.
  std::vector<std::string> Names() const {
    const std::vector<std::string> all = ListDirectory(directory_).value();
    std::vector<std::string> names;
    for (const std::string& name : all) {
      const bool is_beside = std::any_of(all.begin(), all.end(), [&](const std::string& other) {
        return name == absl::StrCat(".", other, ".json") ||
               name == absl::StrCat(".", other, ".pinned");
      });
      if (!is_beside) names.push_back(name);
    }
    return names;
  }
  static int64_t EpochIn(const State& state) { return state.root.at("epoch").toInt(); }

  std::string directory_;
  const SingleRank alone_;
};

State Epoch(int64_t epoch, int64_t elements = 10) {
  State state;
  state.root.insert("epoch", epoch);
  state.root.insert("model", at::full({elements}, epoch, at::kFloat));
  state.root.insert("optimizer", "o");
  state.root.insert("scheduler", "s");
  return state;
}

// Damages a tensor of an Epoch, and leaves sizes and names alone.
void FlipABit(const std::string& path) {
  std::string bytes = ReadFile(path).value();
  const size_t tensor = bytes.find("archive/data/0");
  ASSERT_NE(tensor, std::string::npos);
  bytes[tensor + 1000] ^= 1;
  ASSERT_TRUE(WriteFileAtomically(path, bytes).ok());
}

std::vector<std::string> Keys(const State& state) {
  std::vector<std::string> keys;
  for (const auto& entry : state.root) keys.push_back(entry.key().toStringRef());
  return keys;
}

TEST_F(ManagerTest, SavesFindsAndLoads) {
  auto manager = Make();
  EXPECT_EQ(manager->Newest().value(), std::nullopt);
  EXPECT_EQ(manager->Save("epoch_1", Epoch(1)).value(), Path("epoch_1.pt"));
  EXPECT_EQ(manager->Newest().value(), Path("epoch_1.pt"));
  const State state = manager->Load(Path("epoch_1.pt")).value();
  EXPECT_EQ(Difference(Epoch(1).root, state.root), "");
  EXPECT_EQ(Names(), std::vector<std::string>{"epoch_1.pt"});
}

TEST_F(ManagerTest, NewestGoesByNumber) {
  auto manager = Make();
  for (int epoch : {10, 9, 2}) {
    ASSERT_TRUE(manager->Save(absl::StrCat("epoch_", epoch), Epoch(epoch)).ok());
  }
  for (const char* name : {"best", "epoch_", "epoch_x", "epoch_-11", "epoch_12_final"}) {
    ASSERT_TRUE(manager->Save(name, Epoch(99)).ok());
  }
  ASSERT_TRUE(WriteFileAtomically(Path("epoch_20.txt"), "notes").ok());
  ASSERT_TRUE(WriteFileAtomically(Path(".epoch_30.pt.tmp-0123456789abcdef"), "part").ok());
  EXPECT_EQ(manager->Newest().value(), Path("epoch_10.pt"));
  EXPECT_EQ(EpochIn(manager->LoadNewest().value()->state), 10);
}

TEST_F(ManagerTest, ADamagedNewestIsPassedOver) {
  auto manager = Make();
  for (int epoch : {1, 2, 3}) {
    ASSERT_TRUE(manager->Save(absl::StrCat("epoch_", epoch), Epoch(epoch)).ok());
  }
  const std::string whole = ReadFile(Path("epoch_3.pt")).value();
  ASSERT_TRUE(WriteFileAtomically(Path("epoch_3.pt"), whole.substr(0, whole.size() / 2)).ok());
  ASSERT_TRUE(WriteFileAtomically(Path("epoch_7.pt"), "not one of ours").ok());
  testing::internal::CaptureStderr();
  EXPECT_EQ(manager->Newest().value(), Path("epoch_2.pt"));
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(absl::StrContains(log, Path("epoch_3.pt"))) << log;
  EXPECT_TRUE(absl::StrContains(log, Path("epoch_7.pt"))) << log;

  for (const char* name : {"epoch_1.pt", "epoch_2.pt"}) std::filesystem::remove(Path(name));
  const absl::Status status = manager->Newest().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(absl::StrContains(status.message(), Path("epoch_3.pt"))) << status;
}

// Only reading the whole tensor detects this damage.
TEST_F(ManagerTest, ANewestThatTurnsOutDamagedIsPassedOver) {
  auto manager = Make();
  for (int epoch : {1, 2, 3}) {
    ASSERT_TRUE(manager->Save(EpochName(epoch), Epoch(epoch, 1000)).ok());
  }
  FlipABit(Path("epoch_3.pt"));
  EXPECT_EQ(manager->Newest().value(), Path("epoch_3.pt"));
  testing::internal::CaptureStderr();
  const absl::StatusOr<std::optional<Loaded>> loaded = manager->LoadNewest();
  const std::string log = testing::internal::GetCapturedStderr();
  ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
  EXPECT_EQ((*loaded)->path, Path("epoch_2.pt"));
  EXPECT_EQ(EpochIn((*loaded)->state), 2);
  EXPECT_TRUE(absl::StrContains(log, absl::StrCat(Path("epoch_3.pt"), " is damaged"))) << log;
  EXPECT_TRUE(absl::StrContains(log, absl::StrCat("resuming from ", Path("epoch_2.pt")))) << log;
  EXPECT_TRUE(absl::StrContains(log, "epoch_3.pt.damaged")) << log;
  EXPECT_EQ(manager->Newest().value(), Path("epoch_2.pt"));

  for (const char* name : {"epoch_1.pt", "epoch_2.pt"}) FlipABit(Path(name));
  // What a request leaves out may be damaged.
  const auto epoch = manager->LoadNewest({{{"epoch", Whole{}}}});
  ASSERT_TRUE(epoch.ok() && epoch->has_value()) << epoch.status();
  EXPECT_EQ(EpochIn((*epoch)->state), 2);
  absl::Status status = manager->LoadNewest().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  for (const char* name : {"epoch_1.pt", "epoch_2.pt"}) {
    EXPECT_TRUE(absl::StrContains(status.message(), Path(name))) << status;
  }
  // At every start after that, too.
  for (int start = 0; start < 3; ++start) {
    const auto again = Make();
    for (const absl::Status& status : {again->LoadNewest().status(), again->Newest().status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "epoch_2.pt.damaged")) << status;
    }
  }
  EXPECT_EQ(Names(), (std::vector<std::string>{"epoch_1.pt.damaged", "epoch_2.pt.damaged",
                                               "epoch_3.pt.damaged"}));
}

// The error may be temporary; a run that went on with an older one would overwrite it.
TEST_F(ManagerTest, ANewestThatCannotBeOpenedIsNotPassedOver) {
  auto manager = Make();
  ASSERT_TRUE(manager->Save("epoch_3", Epoch(3)).ok());
  std::filesystem::create_symlink("epoch_4.pt", Path("epoch_4.pt"));  // ELOOP, for root too
  for (const absl::Status& status : {manager->Newest().status(), manager->LoadNewest().status()}) {
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), Path("epoch_4.pt"))) << status;
  }
  std::filesystem::remove(Path("epoch_4.pt"));
  EXPECT_EQ(manager->Newest().value(), Path("epoch_3.pt"));
}

// What it leads to may be on a disk that is not mounted.
TEST_F(ManagerTest, ALinkThatLeadsNowhereIsNotPassedOver) {
  auto manager = Make();
  for (const char* name : {"epoch_4.pt", "epoch_5.pt"}) {
    std::filesystem::create_symlink("/no such disk/checkpoint", Path(name));
    for (const absl::Status& status :
         {manager->Newest().status(), manager->LoadNewest().status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), Path(name))) << status;
    }
    EXPECT_TRUE(std::filesystem::is_symlink(Path(name)));
    std::filesystem::remove(Path(name));
    ASSERT_TRUE(manager->Save("epoch_3", Epoch(3)).ok());
  }
  // One that leads to a checkpoint is one.
  std::filesystem::create_symlink("epoch_3.pt", Path("epoch_4.pt"));
  EXPECT_EQ(manager->Newest().value(), Path("epoch_4.pt"));
}

TEST_F(ManagerTest, WithoutAFolderThereIsNoNewest) {
  const auto manager = Make();
  std::filesystem::remove_all(directory_);
  EXPECT_EQ(manager->Newest().value(), std::nullopt);
  EXPECT_FALSE(manager->LoadNewest().value().has_value());
}

TEST_F(ManagerTest, KeepsTheNewest) {
  auto manager = Make(FileSystem::Default(), /*keep=*/2);
  ASSERT_TRUE(manager->Save("best", Epoch(0)).ok());
  for (int epoch : {8, 9, 10, 11}) {
    ASSERT_TRUE(manager->Save(absl::StrCat("epoch_", epoch), Epoch(epoch)).ok());
  }
  const std::vector<std::string> expected = {"best.pt", "epoch_10.pt", "epoch_11.pt"};
  EXPECT_EQ(Names(), expected);
}

TEST_F(ManagerTest, PartsOfEpochsCountAndKeepLikeEpochs) {
  auto manager = Make(FileSystem::Default(), /*keep=*/3);
  int64_t number = 0;
  for (const std::string& name : {EpochStepName(0, 5), EpochName(1), EpochStepName(1, 30),
                                  EpochStepName(1, 7), StepName(3) + "x"}) {
    ASSERT_TRUE(manager->Save(name, Epoch(number++)).ok());
  }
  EXPECT_EQ(manager->Newest().value(), Path("epoch_1_step_30.pt"));
  EXPECT_EQ(EpochIn(manager->LoadNewest().value()->state), 2);
  std::vector<std::string> expected = {"epoch_1.pt", "epoch_1_step_30.pt", "epoch_1_step_7.pt",
                                       "step_3x.pt"};
  EXPECT_EQ(Names(), expected);
  ASSERT_TRUE(manager->Save(EpochName(2), Epoch(2)).ok());
  expected = {"epoch_1_step_30.pt", "epoch_1_step_7.pt", "epoch_2.pt", "step_3x.pt"};
  EXPECT_EQ(Names(), expected);
  EXPECT_EQ(manager->Newest().value(), Path("epoch_2.pt"));
  // What was just saved stays, however old it is.
  EXPECT_EQ(manager->Save(EpochName(0), Epoch(0)).value(), Path("epoch_0.pt"));
  EXPECT_TRUE(std::filesystem::exists(Path("epoch_0.pt")));
}

TEST_F(ManagerTest, StepsAloneAreARunToo) {
  auto manager = Make(FileSystem::Default(), /*keep=*/2);
  for (int64_t step : {9, 10, 100, 20}) {
    ASSERT_TRUE(manager->Save(StepName(step), Epoch(step)).ok());
  }
  EXPECT_EQ(EpochIn(manager->LoadNewest().value()->state), 100);
  const std::vector<std::string> expected = {"step_100.pt", "step_20.pt"};
  EXPECT_EQ(Names(), expected);
}

TEST_F(ManagerTest, StepsBesideEpochsAreRefused) {
  auto manager = Make();
  const auto refused = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    for (const char* name : {"step_5", "epoch_1"}) {
      EXPECT_TRUE(absl::StrContains(status.message(), name)) << status;
    }
  };
  ASSERT_TRUE(manager->Save(StepName(5), Epoch(0)).ok());
  refused(manager->Save(EpochName(1), Epoch(1)).status());
  refused(manager->Save(EpochStepName(1, 6), Epoch(1)).status());
  EXPECT_EQ(Names(), std::vector<std::string>{"step_5.pt"});
  EXPECT_TRUE(manager->Save("best", Epoch(1)).ok());
  std::filesystem::rename(Path("step_5.pt"), Path("epoch_1.pt"));
  refused(manager->Save(StepName(5), Epoch(1)).status());
  // A user copies a checkpoint by hand.
  std::filesystem::copy_file(Path("epoch_1.pt"), Path("step_5.pt"));
  refused(manager->Newest().status());
  refused(manager->LoadNewest().status());
}

TEST_F(ManagerTest, OptionsOfSave) {
  auto manager = Make();
  State state = Epoch(1);
  state.root.insert("optimizer.discriminator", 1);  // of a second model
  state.root.insert("scheduler.discriminator", 1);
  const std::vector<std::string> all = Keys(state);
  SaveOptions options{.save_optimizer = false, .save_param_scheduler = false};
  options.extra_ckpt = NewTree();
  options.extra_ckpt->insert("note", "mine");
  options.callback = [](State& written) { written.root.insert("from callback", true); };
  const std::string path = manager->Save("epoch_1", state, options).value();
  const std::vector<std::string> expected = {"epoch", "model", "note", "from callback"};
  EXPECT_EQ(Keys(manager->Load(path).value()), expected);
  EXPECT_EQ(Keys(state), all);  // the caller's own is as it was

  options.extra_ckpt->insert("model", "theirs");
  const absl::Status taken = manager->Save("epoch_2", state, options).status();
  EXPECT_EQ(taken.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(absl::StrContains(taken.message(), "'model'")) << taken;
  options.extra_ckpt = std::nullopt;
  options.callback = [](State&) { throw std::runtime_error("from callback"); };
  const absl::Status thrown = manager->Save("epoch_1", Epoch(7), options).status();
  EXPECT_TRUE(absl::StrContains(thrown.message(), Path("epoch_1.pt"))) << thrown;
  EXPECT_TRUE(absl::StrContains(thrown.message(), "from callback")) << thrown;
  EXPECT_EQ(Names(), std::vector<std::string>{"epoch_1.pt"});
  EXPECT_EQ(EpochIn(manager->Load(path).value()), 1);
}

TEST_F(ManagerTest, BadNamesFoldersAndSuffixes) {
  auto manager = Make();
  for (const char* name : {"", ".hidden", "../escape", "a/b"}) {
    EXPECT_EQ(manager->Save(name, Epoch(1)).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(manager->Load(Path("none.pt")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(manager->Load("latest").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Manager::Create({.directory = directory_, .format = "hdf5"}, alone_).status().code(),
            absl::StatusCode::kNotFound);
  for (const ManagerOptions& bad :
       {ManagerOptions{}, ManagerOptions{.directory = directory_, .keep = -1},
        ManagerOptions{.directory = directory_, .keep_last = -1},
        ManagerOptions{.directory = directory_, .keep = 1, .keep_last = 2},
        ManagerOptions{.directory = directory_, .keep_best = "test/accuracy"}}) {
    EXPECT_EQ(Manager::Create(bad, alone_).status().code(), absl::StatusCode::kInvalidArgument);
  }
  for (const ManagerOptions& unknown :
       {ManagerOptions{.directory = directory_, .verify = "always"},
        ManagerOptions{.directory = directory_, .on_save_error = "ignore"}}) {
    EXPECT_EQ(Manager::Create(unknown, alone_).status().code(), absl::StatusCode::kNotFound);
  }
  // Also root cannot write below a file, or in /proc.
  ASSERT_TRUE(WriteFileAtomically(Path("file"), "1").ok());
  for (const std::string& folder : {Path("file/checkpoints"), std::string("/proc/checkpoints")}) {
    const absl::Status status = Manager::Create({.directory = folder}, alone_).status();
    EXPECT_FALSE(status.ok()) << folder;
    EXPECT_TRUE(absl::StrContains(status.message(), folder.substr(0, folder.rfind('/')))) << status;
  }
}

TEST_F(ManagerTest, TheContentDecidesWhereTheSuffixSaysNothing) {
  auto manager = Make();
  ASSERT_TRUE(manager->Save("epoch_1", Epoch(1)).ok());
  std::filesystem::copy_file(Path("epoch_1.pt"), Path("model.pth"));
  EXPECT_TRUE(Manager::Load(Path("model.pth")).ok());
  ASSERT_TRUE(WriteFileAtomically(Path("model.onnx"), "another thing").ok());
  EXPECT_EQ(Manager::Load(Path("model.onnx")).status().code(), absl::StatusCode::kDataLoss);
}

// The format that knows a file says what it is: the others' reasons say only that it is not theirs.
TEST_F(ManagerTest, AFileOfNoFormatIsCalledWhatItIsOnce) {
  std::filesystem::create_directories(directory_);
  const auto error = [&](absl::string_view contents,
                         absl::StatusCode code = absl::StatusCode::kDataLoss) {
    EXPECT_TRUE(WriteFileAtomically(Path("e.bin"), contents).ok());
    const absl::Status status = Manager::Load(Path("e.bin")).status();
    EXPECT_EQ(status.code(), code) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(error(""), Path("e.bin is empty"));
  EXPECT_EQ(error("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5\n",
                  absl::StatusCode::kUnimplemented),
            Path("e.bin is a pointer of git LFS and not the file itself: `git lfs pull` fetches "
                 "that"));
  // A zip archive whose first 8 bytes could be the length of a header, and a header that is cut.
  const std::string zip("PK\x03\x04\0\0\0\0\x08\x08", 10);
  const std::string header("\x64\0\0\0\0\0\0\0{\"a\":", 13);
  for (const std::string& message : {error(zip + std::string(100, 'x')), error(header)}) {
    EXPECT_FALSE(absl::StrContains(message, "; ")) << message;
  }
  EXPECT_TRUE(absl::StrContains(error(header), "is cut off: its header needs 100 bytes"))
      << error(header);
  const std::string neither = error("another thing");
  EXPECT_TRUE(absl::StrContains(neither, "is not a zip archive")) << neither;
  EXPECT_TRUE(absl::StrContains(neither, "is no safetensors file")) << neither;
}

TEST_F(ManagerTest, AFolderThatIsNoCheckpointNamesOneInIt) {
  auto manager = Make();
  const auto error = [&](const std::string& folder) {
    const absl::Status status = Manager::Load(folder).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
    return std::string(status.message());
  };
  EXPECT_TRUE(absl::EndsWith(error(directory_), "; name a checkpoint in it")) << error(directory_);
  for (const int64_t epoch : {9, 10}) {
    ASSERT_TRUE(manager->Save(EpochName(epoch), Epoch(epoch)).ok());
  }
  ASSERT_TRUE(WriteFileAtomically(Path("epoch_11.pt"), "cut").ok());
  EXPECT_TRUE(absl::EndsWith(error(directory_), absl::StrCat(", such as ", Path("epoch_10.pt"))))
      << error(directory_);
  // As Python's trainers leave it.
  std::filesystem::create_directories(Path("hf"));
  ASSERT_TRUE(WriteFileAtomically(Path("hf/config.json"), "{}").ok());
  for (const char* file : {"hf/optimizer.pt", "hf/pytorch_model.bin"}) {
    std::filesystem::copy_file(Path("epoch_9.pt"), Path(file));
  }
  EXPECT_TRUE(
      absl::EndsWith(error(Path("hf/")), absl::StrCat(", such as ", Path("hf/pytorch_model.bin"))))
      << error(Path("hf/"));
  std::filesystem::remove(Path("hf/pytorch_model.bin"));
  std::filesystem::create_directories(Path("adapter"));
  State adapter;
  c10::impl::GenericDict weights = NewTree();
  weights.insert("lora_A", at::ones({2}));
  adapter.root.insert("model", weights);
  ASSERT_TRUE(CreateFormat("safetensors").value()->Write(adapter, Path("saved")).ok());
  std::filesystem::rename(Path("saved/model.safetensors"),
                          Path("adapter/adapter_model.safetensors"));
  EXPECT_TRUE(absl::EndsWith(error(Path("adapter")), "/adapter/adapter_model.safetensors"))
      << error(Path("adapter"));
}

// Starts another job in the folder at the moment that the temporary is complete.
class StartsAJob : public FileSystem {
 public:
  explicit StartsAJob(std::string directory) : directory_(std::move(directory)) {}
  int Rename(const char* from, const char* to) override {
    const SingleRank alone;
    EXPECT_TRUE(Manager::Create({.directory = directory_}, alone).ok());
    return FileSystem::Rename(from, to);
  }

 private:
  std::string directory_;
};

TEST_F(ManagerTest, AJobThatStartsDuringASaveLeavesItAlone) {
  StartsAJob files(directory_);
  const absl::Status status = Make(&files)->Save("epoch_1", Epoch(1)).status();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(Names(), std::vector<std::string>{"epoch_1.pt"});
}

// A run in which damage is found 20 times must not meet the same checkpoint at each start.
TEST_F(ManagerTest, TwentyStartsDoNotLoopOnDamage) {
  auto manager = Make();
  for (int epoch = 1; epoch <= 3; ++epoch) {
    ASSERT_TRUE(manager->Save(EpochName(epoch), Epoch(epoch, 1000)).ok());
  }
  // Both kinds: of the structure, and inside a tensor.
  FlipABit(Path("epoch_3.pt"));
  std::filesystem::resize_file(Path("epoch_2.pt"), 100);
  for (int start = 0; start < 20; ++start) {
    // Each start gets an epoch further, and saves it; the file is damaged before the next.
    const auto next = Make();
    const auto loaded = next->LoadNewest();
    ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
    ASSERT_EQ(EpochIn((*loaded)->state), 1) << start;
    ASSERT_TRUE(next->Save("epoch_2", Epoch(2, 1000)).ok());
    FlipABit(Path("epoch_2.pt"));
  }
}

// After a roll-back: the newest by number is damaged, and not what retention counts.
TEST_F(ManagerTest, DamageDoesNotShadowLaterLowerCheckpoints) {
  for (const bool read_only_folder : {false, true}) {
    std::filesystem::remove_all(directory_);
    for (int epoch : {1, 2, 9}) ASSERT_TRUE(Make()->Save(EpochName(epoch), Epoch(epoch)).ok());
    std::filesystem::resize_file(Path("epoch_9.pt"), 100);
    // Also where it cannot be renamed.
    FaultyFileSystem files({.call = "rename", .nth = read_only_folder ? 1 : 0, .error = EROFS});
    const auto resumed =
        Manager::Create({.directory = directory_, .keep_last = 2, .files = &files}, alone_).value();
    ASSERT_EQ(EpochIn(resumed->LoadNewest().value()->state), 2);
    ASSERT_TRUE(resumed->Save("epoch_3", Epoch(3)).ok());
    ASSERT_TRUE(resumed->Save("epoch_4", Epoch(4)).ok());
    const std::string damaged = read_only_folder ? "epoch_9.pt" : "epoch_9.pt.damaged";
    EXPECT_EQ(Names(), (std::vector<std::string>{"epoch_3.pt", "epoch_4.pt", damaged}));
    EXPECT_EQ(EpochIn(Make()->LoadNewest().value()->state), 4);
  }
}

// One that could not be renamed is not damaged any more once it is replaced.
TEST_F(ManagerTest, ASaveInThePlaceOfDamageCountsAgain) {
  for (int epoch : {1, 2}) ASSERT_TRUE(Make()->Save(EpochName(epoch), Epoch(epoch)).ok());
  std::filesystem::resize_file(Path("epoch_2.pt"), 100);
  FaultyFileSystem files({.call = "rename", .nth = 1, .error = EROFS});
  const auto resumed =
      Manager::Create({.directory = directory_, .keep_last = 1, .files = &files}, alone_).value();
  ASSERT_EQ(EpochIn(resumed->LoadNewest().value()->state), 1);
  for (int64_t epoch : {2, 3, 4}) {
    ASSERT_TRUE(resumed->Save(EpochName(epoch), Epoch(epoch)).ok());
  }
  EXPECT_EQ(Names(), std::vector<std::string>{"epoch_4.pt"});
}

TEST_F(ManagerTest, CheckpointsOfOtherFormatsAreNotRemoved) {
  const auto other =
      Manager::Create({.directory = directory_, .format = "safetensors"}, alone_).value();
  for (int64_t epoch : {1, 2}) ASSERT_TRUE(other->Save(EpochName(epoch), Epoch(epoch)).ok());
  const auto manager = Make(FileSystem::Default(), /*keep=*/1);
  for (int64_t epoch : {3, 4}) ASSERT_TRUE(manager->Save(EpochName(epoch), Epoch(epoch)).ok());
  EXPECT_EQ(Names(),
            (std::vector<std::string>{"epoch_1.safetensors", "epoch_2.safetensors", "epoch_4.pt"}));
}

TEST_F(ManagerTest, OfOneNameInTwoFormatsTheOneSavedLaterIsResumed) {
  const auto pt = Make();
  const auto other =
      Manager::Create({.directory = directory_, .format = "safetensors"}, alone_).value();
  ASSERT_TRUE(other->Save("step_10", Epoch(1)).ok());
  ASSERT_TRUE(pt->Save("step_10", Epoch(2)).ok());
  EXPECT_EQ(EpochIn(pt->LoadNewest().value()->state), 2);
  EXPECT_EQ(pt->Newest().value(), Path("step_10.pt"));
  ASSERT_TRUE(other->Save("step_10", Epoch(3)).ok());
  EXPECT_EQ(EpochIn(pt->LoadNewest().value()->state), 3);
  // Where the later one is damaged there is the other.
  std::filesystem::resize_file(Path("step_10.safetensors/training_state"), 9);
  EXPECT_EQ(EpochIn(pt->LoadNewest().value()->state), 2);
  EXPECT_EQ(Names(), (std::vector<std::string>{"step_10.pt", "step_10.safetensors.damaged"}));
}

// None of these is a reason to stop, or to lose what is in them.
TEST_F(ManagerTest, WhatElseMayHaveTheNameOfACheckpoint) {
  ASSERT_TRUE(Make()->Save("step_9", Epoch(9)).ok());
  ASSERT_TRUE(WriteFileAtomically(Path("step_10.pt"), "").ok());
  ASSERT_TRUE(WriteFileAtomically(Path("step_11.sharded"), "a file").ok());
  ASSERT_TRUE(WriteFileAtomically(Path("step_12.safetensors"), "").ok());
  for (const char* name : {"step_13.pt", "step_14.sharded", "step_15.safetensors"}) {
    std::filesystem::create_directories(Path(name));
  }
  ASSERT_TRUE(WriteFileAtomically(Path("step_13.pt/mine"), "1").ok());
  // No names of a run.
  for (const char* name : {"step_0020.pt", "step_9223372036854775808.pt"}) {
    ASSERT_TRUE(WriteFileAtomically(Path(name), "").ok());
  }
  // What a killed save of another format has left.
  std::filesystem::create_directories(Path(".step_10.sharded.tmp-0123456789abcdef/part"));
  const auto manager = Make(FileSystem::Default(), /*keep=*/1);
  EXPECT_EQ(EpochIn(manager->LoadNewest().value()->state), 9);
  ASSERT_TRUE(manager->Save("step_13", Epoch(13)).ok());
  EXPECT_EQ(Names(), (std::vector<std::string>{
                         "step_0020.pt", "step_10.pt.damaged", "step_11.sharded.damaged",
                         "step_12.safetensors.damaged", "step_13.pt", "step_13.pt.damaged",
                         "step_14.sharded.damaged", "step_15.safetensors.damaged",
                         "step_9223372036854775808.pt"}));
  EXPECT_EQ(ReadFile(Path("step_13.pt.damaged/mine")).value(), "1");
}

TEST_F(ManagerTest, ASaveDoesNotReplaceAFolderByAFile) {
  const auto manager = Make();
  std::filesystem::create_directories(Path("epoch_1.pt"));
  ASSERT_TRUE(WriteFileAtomically(Path("epoch_1.pt/mine"), "1").ok());
  const absl::Status status = manager->Save("epoch_1", Epoch(1)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat(Path("epoch_1.pt"), " is a folder")))
      << status;
  EXPECT_EQ(Names(), std::vector<std::string>{"epoch_1.pt"});
  EXPECT_TRUE(std::filesystem::exists(Path("epoch_1.pt/mine")));
  // A link is replaced, and not what it leads to, by files and by folders.
  for (const std::string format : {"pt", "safetensors"}) {
    for (const char* target : {"epoch_1.pt", "none"}) {
      const std::string path = Path(absl::StrCat("epoch_2.", format));
      std::filesystem::remove_all(path);
      std::filesystem::create_symlink(target, path);
      const auto saves =
          Manager::Create({.directory = directory_, .format = format}, alone_).value();
      const absl::Status saved = saves->Save("epoch_2", Epoch(2)).status();
      EXPECT_TRUE(saved.ok()) << format << ", " << target << ": " << saved;
      EXPECT_FALSE(std::filesystem::is_symlink(path));
      EXPECT_EQ(EpochIn(Manager::Load(path).value()), 2);
    }
  }
  EXPECT_TRUE(std::filesystem::exists(Path("epoch_1.pt/mine")));
}

TEST_F(ManagerTest, OnlyNewerOnesAreAbandoned) {
  const auto manager = Make();
  for (int64_t epoch : {1, 2, 3, 4}) {
    ASSERT_TRUE(manager->Save(EpochName(epoch), Epoch(epoch)).ok());
  }
  // Where there would be nothing to go back to, they stay.
  EXPECT_FALSE(manager->AbandonNewerThan(*ParseName(EpochName(0))).value());
  EXPECT_EQ(Names(),
            (std::vector<std::string>{"epoch_1.pt", "epoch_2.pt", "epoch_3.pt", "epoch_4.pt"}));
  EXPECT_TRUE(manager->AbandonNewerThan(*ParseName(EpochName(2))).value());
  EXPECT_EQ(Names(), (std::vector<std::string>{"epoch_1.pt", "epoch_2.pt", "epoch_3.pt.abandoned",
                                               "epoch_4.pt.abandoned"}));
  EXPECT_EQ(EpochIn(manager->LoadNewest().value()->state), 2);
  std::filesystem::resize_file(Path("epoch_1.pt"), 100);
  EXPECT_FALSE(manager->AbandonNewerThan(*ParseName(EpochName(1))).value());
  EXPECT_EQ(EpochIn(manager->LoadNewest().value()->state), 2);
}

// As if the process were killed in between.
TEST_F(ManagerTest, TheNewestIsAbandonedFirst) {
  for (int64_t epoch : {1, 2, 3, 4}) {
    ASSERT_TRUE(Make()->Save(EpochName(epoch), Epoch(epoch)).ok());
  }
  FaultyFileSystem files({.call = "rename", .nth = 2, .error = EROFS});
  EXPECT_FALSE(Make(&files)->AbandonNewerThan(*ParseName(EpochName(1))).ok());
  EXPECT_EQ(Names(), (std::vector<std::string>{"epoch_1.pt", "epoch_2.pt", "epoch_3.pt",
                                               "epoch_4.pt.abandoned"}));
}

TEST_F(ManagerTest, WhereOnlyAbandonedOnesAreLeftNoRunBeginsAnew) {
  ASSERT_TRUE(Make()->Save("epoch_1", Epoch(1)).ok());
  ASSERT_TRUE(Manager::FolderAt(directory_).Abandon("epoch_1.pt").ok());
  for (const absl::Status& status : {Make()->LoadNewest().status(), Make()->Newest().status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "rolled back past epoch_1.pt.abandoned"))
        << status;
  }
  ASSERT_TRUE(Make()->Save("epoch_1", Epoch(1)).ok());
  EXPECT_EQ(EpochIn(Make()->LoadNewest().value()->state), 1);
}

TEST_F(ManagerTest, OnlyARunThatWritesRenames) {
  ASSERT_TRUE(Make()->Save("epoch_1", Epoch(1, 1000)).ok());
  ASSERT_TRUE(Make()->Save("epoch_2", Epoch(2)).ok());
  std::filesystem::resize_file(Path("epoch_2.pt"), 100);
  ASSERT_TRUE(WriteFileAtomically(Path(".epoch_9.pt.tmp-0123456789abcdef"), "part").ok());
  const std::vector<std::string> before = ListDirectory(directory_).value();
  FaultyFileSystem files;
  const auto reader =
      Manager::Create({.directory = directory_, .files = &files, .read_only = true}, alone_)
          .value();
  EXPECT_EQ(EpochIn(reader->LoadNewest().value()->state), 1);
  EXPECT_EQ(reader->Newest().value(), Path("epoch_1.pt"));
  const absl::Status saved = reader->Save("epoch_3", Epoch(3)).status();
  EXPECT_EQ(saved.code(), absl::StatusCode::kFailedPrecondition) << saved;
  EXPECT_EQ(ListDirectory(directory_).value(), before);
  EXPECT_EQ(files.calls(), std::vector<std::string>());
  // What it has found damaged is not the newest for it, though only the data show that.
  FlipABit(Path("epoch_1.pt"));
  ASSERT_TRUE(Make()->Save("epoch_0_step_5", Epoch(0, 1000)).ok());
  EXPECT_EQ(reader->Newest().value(), Path("epoch_1.pt"));
  EXPECT_EQ(EpochIn(reader->LoadNewest().value()->state), 0);
  EXPECT_EQ(reader->Newest().value(), Path("epoch_0_step_5.pt"));
  EXPECT_TRUE(std::filesystem::exists(Path("epoch_1.pt")));
  // Another file of that name is not what was damaged.
  ASSERT_TRUE(Make()->Save("epoch_1", Epoch(1, 1000)).ok());
  EXPECT_EQ(reader->Newest().value(), Path("epoch_1.pt"));
  for (const char* name : {"epoch_1.pt", "epoch_0_step_5.pt"}) FlipABit(Path(name));
  EXPECT_TRUE(absl::IsDataLoss(reader->LoadNewest().status()));
  EXPECT_TRUE(absl::IsDataLoss(reader->Newest().status())) << reader->Newest().status();
  // It does not make a folder either.
  const auto nothing =
      Manager::Create({.directory = Path("none"), .read_only = true}, alone_).value();
  EXPECT_FALSE(nothing->LoadNewest().value().has_value());
  EXPECT_FALSE(std::filesystem::exists(Path("none")));
}

TEST_F(ManagerTest, KeepsWhatAnyRuleKeeps) {
  const auto manager = Manager::Create({.directory = directory_,
                                        .keep_last = 2,
                                        .keep_every = 4,
                                        .keep_best = "test/accuracy:max"},
                                       alone_)
                           .value();
  const auto save = [&](int64_t epoch, double accuracy) {
    ASSERT_TRUE(manager
                    ->Save(EpochName(epoch), Epoch(epoch),
                           {.metrics = {{"test/accuracy", accuracy}, {"test/loss", 1}}})
                    .ok());
  };
  for (int64_t epoch = 1; epoch <= 3; ++epoch) save(epoch, 0.1 * static_cast<double>(epoch));
  ASSERT_TRUE(Manager::FolderAt(directory_).Pin("epoch_2.pt").ok());
  save(4, 0.2);
  save(5, 0.9);
  for (int64_t epoch = 6; epoch <= 9; ++epoch) save(epoch, 0.3);
  EXPECT_EQ(Names(), (std::vector<std::string>{"epoch_2.pt", "epoch_4.pt", "epoch_5.pt",
                                               "epoch_8.pt", "epoch_9.pt"}));
  EXPECT_EQ(manager->Best().value(), Path("epoch_5.pt"));
  EXPECT_EQ(manager->Best("test/accuracy:min").value(), Path("epoch_2.pt"));
  ASSERT_TRUE(Manager::FolderAt(directory_).Unpin("epoch_2.pt").ok());
  // Notes that are lost may be the best's.
  std::filesystem::remove(Path(".epoch_4.pt.json"));
  save(10, 0.1);
  EXPECT_EQ(Names(), (std::vector<std::string>{"epoch_10.pt", "epoch_4.pt", "epoch_5.pt",
                                               "epoch_8.pt", "epoch_9.pt"}));
}

// What is misspelt would keep nothing, without a word.
TEST_F(ManagerTest, AMetricThatNoCheckpointHasIsSaid) {
  const auto manager =
      Manager::Create({.directory = directory_, .keep_best = "test/acuracy:max"}, alone_);
  ASSERT_TRUE(manager.ok()) << manager.status();
  const auto warnings_of = [&](const std::string& name, std::map<std::string, double> metrics) {
    testing::internal::CaptureStderr();
    EXPECT_TRUE((*manager)->Save(name, Epoch(1), {.metrics = std::move(metrics)}).ok());
    return testing::internal::GetCapturedStderr();
  };
  // One between two evaluations has no metrics.
  EXPECT_EQ(warnings_of("epoch_0_step_1", {}), "");
  const std::string warning = warnings_of("epoch_1", {{"test/accuracy", 0.5}, {"test/loss", 1.5}});
  EXPECT_TRUE(absl::StrContains(
      warning, "no test/acuracy in this checkpoint, which has test/accuracy, test/loss"))
      << warning;
  EXPECT_EQ(warnings_of("epoch_2", {{"test/accuracy", 0.5}}), "") << "said once";
}

TEST_F(ManagerTest, TheOlderNameOfKeepLast) {
  const auto manager = Make(FileSystem::Default(), /*keep=*/1);
  for (int64_t epoch : {1, 2}) ASSERT_TRUE(manager->Save(EpochName(epoch), Epoch(epoch)).ok());
  EXPECT_EQ(Names(), std::vector<std::string>{"epoch_2.pt"});
  ManagerOptions both{.directory = directory_, .keep = 3, .keep_last = 3};
  EXPECT_TRUE(Validate(both).ok());
  both.keep_last = 4;
  EXPECT_TRUE(absl::StrContains(Validate(both).message(), "keep_last"));
}

TEST_F(ManagerTest, TheBestIsLoaded) {
  auto manager = Make();
  EXPECT_FALSE(manager->LoadBest("m:max").value().has_value());
  for (int64_t epoch : {1, 2, 3, 4}) {
    SaveOptions options;
    if (epoch != 4) options.metrics = {{"m", static_cast<double>(epoch % 3)}, {"n", 1}};
    ASSERT_TRUE(manager->Save(EpochName(epoch), Epoch(epoch, 1000), options).ok());
  }
  EXPECT_EQ(EpochIn(manager->LoadBest("m:max").value()->state), 2);
  EXPECT_EQ(EpochIn(manager->LoadBest("m:min").value()->state), 3);
  EXPECT_EQ(manager->LoadBest("m:min").value()->path, Path("epoch_3.pt"));
  // The best complete one.
  FlipABit(Path("epoch_2.pt"));
  EXPECT_EQ(EpochIn(manager->LoadBest("m:max").value()->state), 1);
  EXPECT_EQ(manager->Best("m:max").value(), Path("epoch_1.pt"));
  const absl::Status none = manager->LoadBest("accuracy:max").status();
  EXPECT_EQ(none.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(none.message(), "there are m, n")) << none;
  ASSERT_TRUE(manager->Save("epoch_5", Epoch(5), {.metrics = {{"loss", std::nan("")}}}).ok());
  const absl::Status nan = manager->LoadBest("loss:min").status();
  EXPECT_TRUE(absl::StrContains(nan.message(), "a value of loss: it is nan in each")) << nan;
  for (const char* metric : {"", "m", "m:best"}) {
    EXPECT_EQ(manager->LoadBest(metric).status().code(), absl::StatusCode::kInvalidArgument);
  }
  for (const char* name : {"epoch_1.pt", "epoch_3.pt"}) FlipABit(Path(name));
  const absl::Status lost = manager->LoadBest("m:max").status();
  EXPECT_TRUE(absl::StrContains(lost.message(), "every checkpoint with a value of m in ")) << lost;
}

// The same state gives the same file, whatever is noted about it.
TEST_F(ManagerTest, NotesAreNoPartOfTheCheckpoint) {
  auto manager = Make();
  ASSERT_TRUE(manager->Save("epoch_1", Epoch(1), {.metrics = {{"m", 1}}}).ok());
  ASSERT_TRUE(manager->Save("best", Epoch(1), {.metrics = {{"m", 2}}}).ok());
  EXPECT_EQ(ReadFile(Path("epoch_1.pt")).value(), ReadFile(Path("best.pt")).value());
}

// Writes one bit of a tensor wrongly.
class FlipsABit : public FileSystem {
 public:
  ssize_t Write(int fd, const void* data, size_t size) override {
    std::string bytes(static_cast<const char*>(data), size);
    if (flips && size >= 4000) bytes[3000] ^= 1;  // of a tensor
    return FileSystem::Write(fd, bytes.data(), size);
  }
  bool flips = true;
};

TEST_F(ManagerTest, WhatIsReadBackWrongIsNotSaved) {
  FlipsABit files;
  files.flips = false;
  const auto manager =
      Manager::Create({.directory = directory_, .keep_last = 1, .verify = "saved", .files = &files},
                      alone_)
          .value();
  ASSERT_TRUE(manager->Save("epoch_1", Epoch(1, 1000)).ok());
  EXPECT_TRUE(Manager::FolderAt(directory_).NotesOf("epoch_1.pt")->verified);
  files.flips = true;
  for (const char* name : {"epoch_1", "epoch_2"}) {
    const absl::Status status = manager->Save(name, Epoch(2, 1000)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "reading back")) << status;
  }
  EXPECT_EQ(Names(), std::vector<std::string>{"epoch_1.pt"});
  EXPECT_EQ(EpochIn(manager->LoadNewest().value()->state), 1);
  // Without verification it is saved, and the newest that was verified stays.
  const auto trusting =
      Manager::Create({.directory = directory_, .keep_last = 1, .files = &files}, alone_).value();
  for (int64_t epoch : {2, 3}) {
    ASSERT_TRUE(trusting->Save(EpochName(epoch), Epoch(epoch, 1000)).ok());
  }
  EXPECT_EQ(Names(), (std::vector<std::string>{"epoch_1.pt", "epoch_3.pt"}));
  EXPECT_EQ(EpochIn(trusting->LoadNewest().value()->state), 1);
}

class Limited : public FaultyFileSystem {
 public:
  int Statvfs(const char*, struct statvfs* info) override {
    *info = {};
    info->f_blocks = uint64_t{1} << 40;
    info->f_frsize = 1;
    info->f_bavail = free;
    return 0;
  }
  uint64_t free = uint64_t{1} << 30;
};

TEST_F(ManagerTest, RoomIsCheckedBeforeAnythingIsWritten) {
  Limited files;
  const auto manager = Make(&files);
  const auto refused = [&](const std::string& name, int64_t elements) {
    const size_t before = files.calls().size();
    const absl::Status status = manager->Save(name, Epoch(1, elements)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), directory_)) << status;
    EXPECT_EQ(files.calls().size(), before);
  };
  // The first: by the state.
  files.free = 39'999;
  refused("epoch_1", 10'000);
  files.free = 1 << 30;
  ASSERT_TRUE(manager->Save("epoch_1", Epoch(1, 10'000)).ok());
  // Then by the last save.
  files.free = std::filesystem::file_size(Path("epoch_1.pt")) - 1;
  refused("epoch_2", 10'000);
  refused("epoch_1", 10'000);
  files.free += 1;
  EXPECT_TRUE(manager->Save("epoch_2", Epoch(1, 10'000)).ok());
}

// As the error of a full disk advises: deletes at a save come after it.
TEST_F(ManagerTest, ARunThatIsToKeepFewerMakesRoom) {
  Limited files;
  const auto save = [&](int keep, const std::string& name) {
    return Make(&files, keep)->Save(name, Epoch(1)).status();
  };
  for (const char* name : {"epoch_1", "epoch_2", "epoch_3"}) ASSERT_TRUE(save(0, name).ok());
  const std::vector<std::string> before = Names();
  files.free = 1;
  EXPECT_TRUE(absl::IsResourceExhausted(save(0, "epoch_4")));
  // Not by the newest, if that is damaged.
  std::filesystem::resize_file(Path("epoch_3.pt"), 100);
  EXPECT_TRUE(absl::IsResourceExhausted(save(1, "epoch_4")));
  EXPECT_EQ(Names(), before);
  std::filesystem::remove(Path("epoch_3.pt"));
  EXPECT_TRUE(absl::IsResourceExhausted(save(1, "epoch_4")));
  EXPECT_EQ(Names(), std::vector<std::string>{"epoch_2.pt"});
  // The name of the newest is durable before.
  const auto unlink = std::find(files.calls().rbegin(), files.calls().rend(), "fsync");
  EXPECT_EQ(absl::StrJoin(files.calls().rbegin(), unlink, " "), "unlink unlink unlink close");
}

TEST_F(ManagerTest, WhetherARunGoesOn) {
  for (const std::string on_save_error : {"stop", "continue"}) {
    const bool goes_on = on_save_error == "continue";
    Limited files;
    const auto manager =
        Manager::Create({.directory = directory_, .on_save_error = on_save_error, .files = &files},
                        alone_)
            .value();
    EXPECT_TRUE(manager->GoesOnAfter(manager->Save("epoch_1", Epoch(1)).status()));
    files.free = 1;
    testing::internal::CaptureStderr();
    EXPECT_EQ(manager->GoesOnAfter(manager->Save("epoch_2", Epoch(2)).status()), goes_on);
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_EQ(absl::StrContains(log, "was not saved (on_save_error=continue): "), goes_on) << log;
    // The next save tries again.
    files.free = 1 << 30;
    EXPECT_TRUE(manager->Save("epoch_3", Epoch(3)).ok());
    // What is wrong with the save will be wrong the next time, too.
    EXPECT_FALSE(manager->GoesOnAfter(manager->Save("a/b", Epoch(3)).status()));
    EXPECT_FALSE(manager->GoesOnAfter(manager->Save("step_3", Epoch(3)).status()));
    State state = Epoch(4);
    state.root.insert("c", c10::complex<double>(1, 2));
    const absl::Status refused = manager->Save("epoch_4", state).status();
    if (!refused.ok()) {
      EXPECT_FALSE(manager->GoesOnAfter(refused));
    }
    EXPECT_FALSE(manager->GoesOnAfter(absl::DeadlineExceededError("rank 3 does not answer")));
    std::filesystem::remove_all(directory_);
    const absl::Status gone = manager->Save("epoch_5", Epoch(5)).status();
    EXPECT_EQ(gone.code(), absl::StatusCode::kNotFound) << gone;
    EXPECT_TRUE(absl::StrContains(gone.message(), directory_)) << gone;
    EXPECT_EQ(manager->GoesOnAfter(gone), goes_on);
    std::filesystem::create_directories(directory_);
    EXPECT_TRUE(manager->Save("epoch_5", Epoch(5)).ok());
    EXPECT_EQ(Names(), std::vector<std::string>{"epoch_5.pt"});
  }
}

TEST_F(ManagerTest, CallbackOfALoad) {
  auto manager = Make();
  ASSERT_TRUE(manager->Save("epoch_1", Epoch(1)).ok());
  const LoadOptions edit{.callback = [](State& state) {
    state.root.insert("from callback", true);
    (void)state.root.erase("optimizer");
  }};
  const std::vector<std::string> expected = {"epoch", "model", "scheduler", "from callback"};
  EXPECT_EQ(Keys(manager->LoadNewest({}, edit).value()->state), expected);
  EXPECT_EQ(Keys(Manager::Load(Path("epoch_1.pt"), {}, {}, edit).value()), expected);
  const LoadOptions throws{.callback = [](State&) { throw std::runtime_error("no such key"); }};
  for (const absl::Status& status : {manager->LoadNewest({}, throws).status(),
                                     Manager::Load(Path("epoch_1.pt"), {}, {}, throws).status()}) {
    EXPECT_TRUE(absl::StrContains(status.message(), "no such key")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), Path("epoch_1.pt"))) << status;
  }
  // It says nothing about the file.
  EXPECT_EQ(Names(), std::vector<std::string>{"epoch_1.pt"});
}

TEST_F(ManagerTest, LeftoversStayWhileAnybodySaves) {
  Make();
  const std::string leftover = Path(".epoch_1.pt.tmp-0123456789abcdef");
  ASSERT_TRUE(WriteFileAtomically(leftover, "part").ok());
  {
    const auto saving = DirectoryLock::Shared(directory_);
    ASSERT_TRUE(saving.ok());
    Make();
    EXPECT_TRUE(std::filesystem::exists(leftover));
  }
  Make();
  EXPECT_FALSE(std::filesystem::exists(leftover));
}

}  // namespace
}  // namespace ddp::checkpoint
