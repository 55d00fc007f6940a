#include "checkpoint/manager.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/coordinator.h"
#include "base/file.h"
#include "base/file_faults.h"
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
  std::vector<std::string> Names() const { return ListDirectory(directory_).value(); }
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

  for (const char* name : {"epoch_1.pt", "epoch_2.pt"}) FlipABit(Path(name));
  const absl::Status status = manager->LoadNewest().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  for (const char* name : {"epoch_1.pt", "epoch_2.pt", "epoch_3.pt"}) {
    EXPECT_TRUE(absl::StrContains(status.message(), Path(name))) << status;
  }
  // What a request leaves out may be damaged.
  const auto epoch = manager->LoadNewest({{{"epoch", Whole{}}}});
  ASSERT_TRUE(epoch.ok() && epoch->has_value()) << epoch.status();
  EXPECT_EQ(EpochIn((*epoch)->state), 3);
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
  const State state = Epoch(1);
  SaveOptions options{.save_optimizer = false, .save_param_scheduler = false};
  options.extra_ckpt = NewTree();
  options.extra_ckpt->insert("note", "mine");
  options.callback = [](State& written) { written.root.insert("from callback", true); };
  const std::string path = manager->Save("epoch_1", state, options).value();
  const std::vector<std::string> expected = {"epoch", "model", "note", "from callback"};
  EXPECT_EQ(Keys(manager->Load(path).value()), expected);
  EXPECT_EQ(Keys(state), Keys(Epoch(1)));  // the caller's own is as it was

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
       {ManagerOptions{}, ManagerOptions{.directory = directory_, .keep = -1}}) {
    EXPECT_EQ(Manager::Create(bad, alone_).status().code(), absl::StatusCode::kInvalidArgument);
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

TEST_F(ManagerTest, EachFaultLeavesTheOldCheckpointAndNoTemporary) {
  FaultyFileSystem counted;
  auto manager = Make(&counted);
  const size_t before = counted.calls().size();
  ASSERT_TRUE(manager->Save("epoch_1", Epoch(1)).ok());
  const std::vector<std::string> calls(counted.calls().begin() + static_cast<ptrdiff_t>(before),
                                       counted.calls().end());
  const auto rename = std::find(calls.begin(), calls.end(), "rename") - calls.begin();
  for (int64_t nth = 1; nth <= static_cast<int64_t>(calls.size()); ++nth) {
    FaultyFileSystem files(
        {.nth = static_cast<int64_t>(before) + nth, .error = nth % 2 == 0 ? ENOSPC : EIO});
    const absl::Status status = Make(&files)->Save("epoch_1", Epoch(2)).status();
    const std::string& call = calls[static_cast<size_t>(nth) - 1];
    const bool renamed = nth > rename + 1;
    // Closing the folder after its sync can lose nothing.
    EXPECT_EQ(status.ok(), renamed && call == "close") << nth << " " << call;
    const State state = manager->Load(Path("epoch_1.pt")).value();
    EXPECT_EQ(EpochIn(state), renamed ? 2 : 1) << nth << " " << call;
    EXPECT_EQ(Names(), std::vector<std::string>{"epoch_1.pt"}) << nth << " " << call;
    ASSERT_TRUE(manager->Save("epoch_1", Epoch(1)).ok());
  }
}

// The order of system calls that makes a save survive a power failure.
TEST_F(ManagerTest, ContentIsDurableBeforeTheNameIs) {
  FaultyFileSystem files;
  auto manager = Make(&files);
  const ptrdiff_t before = static_cast<ptrdiff_t>(files.calls().size());
  ASSERT_TRUE(manager->Save("epoch_1", Epoch(1)).ok());
  std::vector<std::string> calls(files.calls().begin() + before, files.calls().end());
  calls.erase(std::unique(calls.begin(), calls.end()), calls.end());  // many writes
  const std::vector<std::string> expected = {"open",   "write", "fsync", "close",
                                             "rename", "open",  "fsync", "close"};
  EXPECT_EQ(calls, expected);
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

// After a killed save all visible checkpoints are complete, and the next start removes temporaries.
void ExpectWhole(const std::string& directory, absl::string_view when) {
  const std::vector<std::string> names = ListDirectory(directory).value();
  for (const std::string& name : names) {
    if (IsTemporaryName(name)) continue;
    const auto state = CreateFormat("pt").value()->Read(absl::StrCat(directory, "/", name));
    EXPECT_TRUE(state.ok()) << when << ": " << state.status();
  }
  const SingleRank alone;
  ASSERT_TRUE(Manager::Create({.directory = directory}, alone).ok());
  const std::vector<std::string> remaining = ListDirectory(directory).value();
  for (const std::string& name : remaining) {
    EXPECT_FALSE(IsTemporaryName(name)) << when << ": " << name;
  }
}

TEST_F(ManagerTest, KilledAtEverySystemCall) {
  FaultyFileSystem counted;
  ASSERT_TRUE(Make(&counted)->Save("epoch_1", Epoch(1)).ok());
  for (size_t nth = 1; nth <= counted.calls().size(); ++nth) {
    const pid_t child = fork();
    if (child == 0) {
      FaultyFileSystem files({.nth = static_cast<int64_t>(nth)});
      auto manager = Manager::Create({.directory = directory_, .files = &files}, alone_);
      if (manager.ok()) (*manager)->Save("epoch_1", Epoch(2)).IgnoreError();
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << nth;
    ExpectWhole(directory_, absl::StrCat("call ", nth));
  }
}

TEST_F(ManagerTest, KilledAtRandomMoments) {
  Make();
  constexpr int kKills = 50;
  std::mt19937 random(7);
  for (int kill_number = 0; kill_number < kKills; ++kill_number) {
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) {
      auto manager = Manager::Create({.directory = directory_}, alone_);
      if (!manager.ok() || write(ready[1], "x", 1) != 1) _exit(1);
      for (int64_t epoch = 0;; ++epoch) {
        if (!(*manager)->Save(absl::StrCat("epoch_", epoch % 3), Epoch(epoch, 20000)).ok()) {
          _exit(2);
        }
      }
    }
    char byte;
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    usleep(static_cast<useconds_t>(random() % 20000));  // the moment, not a synchronisation
    ASSERT_EQ(kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    close(ready[0]);
    close(ready[1]);
    ExpectWhole(directory_, absl::StrCat("kill ", kill_number));
  }
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
