// Saves that are killed, or whose system calls fail. Whatever happens, the newest complete
// checkpoint is there with the right bits, and nothing else is left after the next save. And loads
// that fail, but not by damage: these leave the folder as it is.
//
// CHECKPOINT_FAULTS=long: more random moments, larger files, and more scenarios of the formats that
// write folders.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <limits.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/coordinator.h"
#include "base/coordinator_testing.h"
#include "base/file.h"
#include "base/xxh3.h"
#include "checkpoint/manager.h"
#include "checkpoint/name.h"
#include "checkpoint/parts.h"
#include "checkpoint/state_testing.h"

namespace {

// Which of the calls that open, read, or ask for a file fail. Set while there is one thread.
struct ReadFault {
  const char* of = nullptr;  // part of the paths that count; null: none
  int64_t first = 0;         // counts from 1
  bool for_good = false;     // whether all after it fail, too
  int error = 0;
  int64_t calls = 0;
};
ReadFault read_fault;

// Sets errno if so.
bool Fails(const char* path) {
  if (read_fault.of == nullptr || std::strstr(path, read_fault.of) == nullptr) return false;
  ++read_fault.calls;
  const bool fails = read_fault.calls == read_fault.first ||
                     (read_fault.for_good && read_fault.calls > read_fault.first);
  if (fails) errno = read_fault.error;
  return fails;
}

// What happens before the `left`-th call that opens such a file. Set while there is one thread.
struct OnOpen {
  const char* of = nullptr;  // part of the paths that count
  int64_t left = 0;
  std::function<void()> call = nullptr;
};
OnOpen on_open;

std::string PathOfDescriptor(int fd) {
  char path[PATH_MAX];
  const ssize_t size = ::readlink(absl::StrCat("/proc/self/fd/", fd).c_str(), path, sizeof(path));
  return std::string(path, size < 0 ? 0 : static_cast<size_t>(size));
}

}  // namespace

// In the place of libc's: reading does not go through FileSystem.
extern "C" ssize_t pread(int fd, void* data, size_t size, off_t offset) {
  if (read_fault.of != nullptr && Fails(PathOfDescriptor(fd).c_str())) return -1;
  return ::syscall(SYS_pread64, fd, data, size, offset);
}
extern "C" int stat(const char* path, struct stat* info) noexcept {
  return Fails(path) ? -1 : ::fstatat(AT_FDCWD, path, info, 0);
}
extern "C" int open(const char* path, int flags, ...) {
  if (on_open.of != nullptr && std::strstr(path, on_open.of) != nullptr && --on_open.left == 0) {
    on_open.call();
  }
  if (Fails(path)) return -1;
  mode_t mode = 0;
  if ((flags & (O_CREAT | O_TMPFILE)) != 0) {
    va_list more;
    va_start(more, flags);
    mode = va_arg(more, mode_t);
    va_end(more);
  }
  return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

namespace ddp::checkpoint {
namespace {

bool IsLong() {
  const char* faults = std::getenv("CHECKPOINT_FAULTS");
  return faults != nullptr && absl::string_view(faults) == "long";
}

// Calls `before` with the number (from 1) and name of each call that changes the disk, of all ranks
// of a process. It may return an errno to fail with; 0: makes the call.
class HookedFileSystem : public FileSystem {
 public:
  using Hook = std::function<int(int64_t number, absl::string_view call)>;
  explicit HookedFileSystem(Hook before = nullptr) : before_(std::move(before)) {}

  int64_t calls() const { return calls_; }

  int Open(const char* path, int flags, mode_t mode) override {
    return Fails("open") ? -1 : FileSystem::Open(path, flags, mode);
  }
  ssize_t Write(int fd, const void* data, size_t size) override {
    return Fails("write") ? -1 : FileSystem::Write(fd, data, size);
  }
  // The power stays on, so that waiting for the disk shows nothing.
  int Fsync(int) override { return Fails("fsync") ? -1 : 0; }
  int Rename(const char* from, const char* to) override {
    return Fails("rename") ? -1 : FileSystem::Rename(from, to);
  }
  int Exchange(const char* a, const char* b) override {
    return Fails("exchange") ? -1 : FileSystem::Exchange(a, b);
  }
  int Unlink(const char* path) override { return Fails("unlink") ? -1 : FileSystem::Unlink(path); }
  int Mkdir(const char* path, mode_t mode) override {
    return Fails("mkdir") ? -1 : FileSystem::Mkdir(path, mode);
  }
  int Rmdir(const char* path) override { return Fails("rmdir") ? -1 : FileSystem::Rmdir(path); }

 private:
  bool Fails(absl::string_view call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++calls_;
    const int error = before_ ? before_(calls_, call) : 0;
    errno = error;
    return error != 0;
  }

  Hook before_;
  std::mutex mutex_;
  int64_t calls_ = 0;
};

// One save, in a folder that has checkpoints.
struct Scenario {
  std::string description;
  std::string format;
  int ranks;
  std::string name;  // epoch_3 is there before
  int keep_last = 0;
  std::string verify = "never";
};

const std::vector<Scenario>& Scenarios() {
  static const auto* scenarios = [] {
    auto* all = new std::vector<Scenario>{
        {"new", "pt", 1, "epoch_4"},
        {"replaced", "pt", 1, "epoch_3"},
        {"new, old ones deleted, read back", "pt", 2, "epoch_4", 2, "saved"},
        {"new, by all ranks, old ones deleted", "parts", 2, "epoch_4", 2},
        {"replaced, by all ranks", "parts", 2, "epoch_3"},
        {"new, safetensors, old ones deleted", "safetensors", 1, "epoch_4", 2},
        {"replaced, sharded, read back", "sharded", 2, "epoch_3", 0, "saved"},
    };
    if (IsLong()) {
      all->push_back({"new, sharded, old ones deleted", "sharded", 2, "epoch_4", 2});
      all->push_back({"replaced, safetensors", "safetensors", 2, "epoch_3"});
    }
    return all;
  }();
  return *scenarios;
}

// Whether each rank has a part of the state's tensor.
bool InParts(const Scenario& scenario) {
  return scenario.format == "parts" || scenario.format == "sharded";
}

// What rank `rank` of `size` has of the state in which everything is `value`.
State StateOf(int64_t value, bool in_parts, int rank, int size) {
  const int64_t elements = IsLong() ? 100'000 : 300;
  State state;
  state.root.insert("epoch", value);
  const at::Tensor moment = at::arange(value, value + elements, at::kFloat);
  state.root.insert("moment", moment);
  if (in_parts) {
    const FlatRange range{elements * rank / size, elements * (rank + 1) / size};
    (void)state.root.erase("moment");
    state.sharded["moment"] = {.global_shape = {elements},
                               .parts = {{range, PartOf(moment, range, {})}}};
  }
  return state;
}

class ManagerFaultsTest : public testing::Test {
 protected:
  ManagerFaultsTest() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ = absl::StrCat(testing::TempDir(), "/manager_faults_test_", info->name());
    for (const Scenario& scenario : Scenarios()) std::filesystem::remove_all(PreparedFor(scenario));
  }

  // What a job does that saves once.
  absl::Status Save(const Scenario& scenario, const std::string& name, int64_t value,
                    FileSystem* files = nullptr, const std::string& on_save_error = "stop") const {
    HookedFileSystem no_faults;
    if (files == nullptr) files = &no_faults;
    std::vector<absl::Status> results(static_cast<size_t>(scenario.ranks));
    RunCoordinatedRanks(scenario.ranks, [&](const Coordinator& ranks) {
      absl::Status& result = results[static_cast<size_t>(ranks.rank())];
      ManagerOptions options{.directory = directory_,
                             .format = scenario.format,
                             .keep_last = scenario.keep_last,
                             .verify = scenario.verify,
                             .on_save_error = on_save_error,
                             .files = files,
                             .folder_limit = absl::Milliseconds(200)};
      auto manager = Manager::Create(options, ranks);
      result = manager.status();
      if (!manager.ok()) return;
      result = (*manager)
                   ->Save(name, StateOf(value, InParts(scenario), ranks.rank(), scenario.ranks),
                          {.metrics = {{"value", static_cast<double>(value)}}})
                   .status();
    });
    for (const absl::Status& result : results) EXPECT_EQ(result, results[0]);
    return results[0];
  }

  std::string PreparedFor(const Scenario& scenario) const {
    return absl::StrCat(directory_, "_prepared_", scenario.description);
  }

  // Checkpoints with numbers 1 to 3; with keep_last, the last ones of these.
  void Prepare(const Scenario& scenario) const {
    const std::string prepared = PreparedFor(scenario);
    std::filesystem::remove_all(directory_);
    if (!std::filesystem::exists(prepared)) {
      for (int64_t value = 1; value <= 3; ++value) {
        ASSERT_TRUE(Save(scenario, EpochName(value), value).ok());
      }
      std::filesystem::rename(directory_, prepared);
    }
    std::filesystem::copy(prepared, directory_, std::filesystem::copy_options::recursive);
  }

  // Number of calls of the scenario's save, with Create.
  int64_t CountCalls(const Scenario& scenario) const {
    Prepare(scenario);
    HookedFileSystem counted;
    EXPECT_TRUE(Save(scenario, scenario.name, 4, &counted).ok());
    return counted.calls();
  }

  // The value of the newest, which is right in each bit; also of each other that is visible. Notes
  // are those of their checkpoint, or lost.
  int64_t NewestValue(const Scenario& scenario) const {
    const Folder folder = Manager::FolderAt(directory_);
    int64_t newest = 0;
    const std::vector<NamedFile> listed = folder.List().value();
    for (const NamedFile& named : listed) {
      const absl::StatusOr<State> state = Manager::Load(folder.PathOf(named.file));
      EXPECT_TRUE(state.ok()) << state.status();
      if (!state.ok()) return -1;
      newest = state->root.at("epoch").toInt();
      EXPECT_EQ(Difference(StateOf(newest, false, 0, 1).root, state->root), "");
      EXPECT_TRUE(newest == *named.name.epochs ||
                  (newest == 4 && named.file.find(scenario.name) == 0))
          << named.file;
      const std::optional<Notes> notes = folder.NotesOf(named.file);
      if (notes) {
        EXPECT_EQ(notes->metrics.at("value"), static_cast<double>(newest)) << named.file;
      }
    }
    const SingleRank alone;
    const auto loaded =
        Manager::Create({.directory = directory_, .format = scenario.format, .read_only = true},
                        alone)
            .value()
            ->LoadNewest();
    EXPECT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
    if (!loaded.ok() || !loaded->has_value()) return -1;
    EXPECT_EQ((*loaded)->state.root.at("epoch").toInt(), newest);
    return newest;
  }

  // Saves once more, as the job that comes next, and looks for junk.
  void ExpectNoJunkAfterTheNextSave(const Scenario& scenario) const {
    const absl::Status next = Save(scenario, "epoch_5", 5);
    EXPECT_TRUE(next.ok()) << next;
    const std::vector<std::string> names = ListDirectory(directory_).value();
    const std::string suffix = absl::StrCat(".", scenario.format);
    for (const std::string& name : names) {
      const bool is_checkpoint = ParseFileName(name, {suffix}).has_value();
      const bool is_beside = std::any_of(names.begin(), names.end(), [&](const std::string& other) {
        return name == absl::StrCat(".", other, ".json");
      });
      EXPECT_TRUE(is_checkpoint || is_beside) << name;
    }
    EXPECT_EQ(NewestValue(scenario), 5);
    if (scenario.keep_last > 0) {
      // Of those that are verified the newest is among the last.
      EXPECT_EQ(Manager::FolderAt(directory_).List()->size(),
                static_cast<size_t>(scenario.keep_last));
    }
  }

  std::string directory_;
};

// Runs `body` in a child process, and waits until it is dead, however.
bool KilledIn(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

TEST_F(ManagerFaultsTest, KilledAtEverySystemCall) {
  for (const Scenario& scenario : Scenarios()) {
    SCOPED_TRACE(scenario.description);
    const int64_t calls = CountCalls(scenario);
    ASSERT_GT(calls, 10);
    bool saw_old = false;
    bool saw_new = false;
    for (int64_t killed = 1; killed <= calls; ++killed) {
      SCOPED_TRACE(killed);
      Prepare(scenario);
      ASSERT_TRUE(KilledIn([&] {
        HookedFileSystem files([&](int64_t number, absl::string_view) {
          if (number == killed) ::kill(::getpid(), SIGKILL);
          return 0;
        });
        Save(scenario, scenario.name, 4, &files).IgnoreError();
      }));
      const int64_t value = NewestValue(scenario);
      EXPECT_TRUE(value == 3 || value == 4) << value;
      saw_old = saw_old || value == 3;
      saw_new = saw_new || value == 4;
      ExpectNoJunkAfterTheNextSave(scenario);
      if (HasFailure()) return;
    }
    EXPECT_TRUE(saw_old && saw_new);
  }
}

TEST_F(ManagerFaultsTest, KilledAtRandomMoments) {
  std::mt19937 random(7);
  const int kills = IsLong() ? 300 : 10;
  for (const Scenario& scenario : Scenarios()) {
    SCOPED_TRACE(scenario.description);
    Prepare(scenario);
    for (int kill_number = 0; kill_number < kills; ++kill_number) {
      int ready[2];
      ASSERT_EQ(pipe(ready), 0);
      const pid_t child = fork();
      if (child == 0) {
        for (;;) {
          if (!Save(scenario, scenario.name, 4).ok()) _exit(1);
          if (write(ready[1], "x", 1) != 1) _exit(2);
        }
      }
      char byte;
      ASSERT_EQ(read(ready[0], &byte, 1), 1);
      usleep(static_cast<useconds_t>(random() % 10000));  // the moment, not a synchronisation
      ASSERT_EQ(kill(child, SIGKILL), 0);
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
      close(ready[0]);
      close(ready[1]);
      EXPECT_EQ(NewestValue(scenario), 4);
      if (HasFailure()) return;
    }
    ExpectNoJunkAfterTheNextSave(scenario);
  }
}

// Each call fails once, and from each call on all fail: a disk that is full or broken, or a folder
// that has become read-only.
TEST_F(ManagerFaultsTest, EachCallFails) {
  for (const Scenario& scenario : Scenarios()) {
    SCOPED_TRACE(scenario.description);
    const int64_t calls = CountCalls(scenario);
    for (const int error : {ENOSPC, EIO, EROFS}) {
      for (const bool for_good : {false, true}) {
        for (int64_t first = 1; first <= calls; ++first) {
          SCOPED_TRACE(absl::StrCat("error ", error, " at ", first, for_good ? " and after" : ""));
          Prepare(scenario);
          HookedFileSystem files([&](int64_t number, absl::string_view call) {
            // A full disk lets delete.
            const bool can_do = error == ENOSPC && (call == "unlink" || call == "rmdir");
            const bool fails = number == first || (for_good && number > first && !can_do);
            return fails ? error : 0;
          });
          const absl::Status status = Save(scenario, scenario.name, 4, &files, "continue");
          const int64_t value = NewestValue(scenario);
          EXPECT_TRUE(value == 4 || (value == 3 && !status.ok())) << value << " " << status;
          if (value == 3 && !for_good) {
            // The best is as before, too.
            const std::string old = absl::StrCat("epoch_3.", scenario.format);
            EXPECT_TRUE(Manager::FolderAt(directory_).NotesOf(old).has_value());
          }
          if (!status.ok()) {
            EXPECT_TRUE(absl::StrContains(status.message(), directory_)) << status;
            EXPECT_TRUE(scenario.ranks == 1 || absl::StartsWith(status.message(), "rank "))
                << status;
          }
          ExpectNoJunkAfterTheNextSave(scenario);
          if (HasFailure()) return;
        }
        // The short form takes one of the errors of each kind.
        if (!IsLong() && error != ENOSPC) break;
      }
    }
  }
}

TEST_F(ManagerFaultsTest, TheFolderIsDeletedMeanwhile) {
  for (const Scenario& scenario : Scenarios()) {
    SCOPED_TRACE(scenario.description);
    const int64_t calls = CountCalls(scenario);
    for (int64_t deleted = 1; deleted <= calls; ++deleted) {
      SCOPED_TRACE(deleted);
      Prepare(scenario);
      HookedFileSystem files([&](int64_t number, absl::string_view) {
        // The other rank may write meanwhile, so that something may be left.
        std::error_code ignored;
        if (number == deleted) std::filesystem::remove_all(directory_, ignored);
        return 0;
      });
      const absl::Status status = Save(scenario, scenario.name, 4, &files);
      if (!status.ok()) {
        EXPECT_TRUE(absl::StrContains(status.message(), directory_)) << status;
      }
      // The next job makes it again.
      EXPECT_TRUE(Save(scenario, "epoch_5", 5).ok());
      EXPECT_EQ(NewestValue(scenario), 5);
      if (HasFailure()) return;
    }
  }
}

// A run that goes on after an error: its next save works, and removes what the failed one left.
TEST_F(ManagerFaultsTest, TheNextSaveOfTheSameRun) {
  const SingleRank alone;
  const Scenario& scenario = Scenarios()[0];
  for (int64_t first = 1;; ++first) {
    SCOPED_TRACE(first);
    Prepare(scenario);
    int64_t failing = 0;
    HookedFileSystem files([&](int64_t number, absl::string_view) {
      return failing != 0 && number == failing ? EIO : 0;
    });
    const auto manager =
        Manager::Create({.directory = directory_, .on_save_error = "continue", .files = &files},
                        alone)
            .value();
    failing = files.calls() + first;
    const absl::Status status =
        manager->Save("epoch_4", StateOf(4, false, 0, 1), {.metrics = {{"value", 4}}}).status();
    if (files.calls() < failing) {
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_GT(first, 10);  // each call of the save has failed
      return;
    }
    EXPECT_TRUE(manager->GoesOnAfter(status)) << status;
    EXPECT_TRUE(
        manager->Save("epoch_5", StateOf(5, false, 0, 1), {.metrics = {{"value", 5}}}).ok());
    const std::vector<std::string> names = ListDirectory(directory_).value();
    for (const std::string& name : names) {
      EXPECT_FALSE(IsTemporaryName(name)) << name;
    }
    EXPECT_EQ(NewestValue(scenario), 5);
    if (HasFailure()) return;
  }
}

// A disk that fails once or for good, and a folder that may not be read, in a run that writes
// there: the checkpoint may be whole, so it is neither passed over nor renamed.
TEST_F(ManagerFaultsTest, AnErrorOfReadingIsNoDamage) {
  const SingleRank alone;
  for (const std::string format : {"pt", "safetensors", "sharded"}) {
    std::filesystem::remove_all(directory_);
    const Scenario scenario{"", format, 1, ""};
    for (int64_t value : {1, 2}) ASSERT_TRUE(Save(scenario, EpochName(value), value).ok());
    const std::vector<std::string> before = ListDirectory(directory_).value();
    for (const int error : {EIO, EACCES}) {
      for (const bool for_good : {false, true}) {
        int64_t failed = 0;
        bool has_all = false;
        for (int64_t first = 1; !has_all; ++first) {
          SCOPED_TRACE(
              absl::StrCat(format, ", error ", error, " at ", first, for_good ? " and after" : ""));
          const auto manager =
              Manager::Create({.directory = directory_, .format = format}, alone).value();
          read_fault = {.of = "/epoch_2.", .first = first, .for_good = for_good, .error = error};
          const auto loaded = manager->LoadNewest();
          has_all = read_fault.calls < first;
          read_fault = {};
          if (loaded.ok()) {
            ASSERT_TRUE(loaded->has_value());
            EXPECT_EQ((*loaded)->state.root.at("epoch").toInt(), 2);
          } else {
            ++failed;
            EXPECT_FALSE(absl::IsDataLoss(loaded.status())) << loaded.status();
            EXPECT_TRUE(absl::StrContains(loaded.status().message(), "/epoch_2."))
                << loaded.status();
          }
          EXPECT_EQ(ListDirectory(directory_).value(), before);
          if (HasFailure()) return;
        }
        EXPECT_GT(failed, 4);
      }
    }
  }
}

// The same checkpoint as a later version of the format might write it, with checksums that are
// right. The format pt has no version of its own.
void MakeNewer(const std::string& path) {
  if (absl::EndsWith(path, ".sharded")) {
    const std::string file = path + "/manifest.json";
    std::string text = ReadFile(file).value();
    text.resize(text.rfind(",\n\"xxh3\""));
    const std::string version = "\"version\":1";
    const size_t at = text.rfind(version);
    ASSERT_NE(at, std::string::npos);
    text.replace(at, version.size(), "\"version\":2");
    absl::StrAppend(&text, ",\n\"xxh3\": \"", HexOf(Xxh3(text)), "\"}\n");
    ASSERT_TRUE(WriteFileAtomically(file, text).ok());
    return;
  }
  const std::string file = path + "/training_state";
  std::string bytes = ReadFile(file).value();
  const std::string version = "\"ddp.version\":\"1\"", digest = "\"ddp.header_xxh3\":\"";
  const size_t at = bytes.find(version), digits = bytes.find(digest);
  ASSERT_TRUE(at != std::string::npos && digits != std::string::npos);
  bytes.replace(at, version.size(), "\"ddp.version\":\"2\"");
  // The checksum is that of the header with zeros in its place.
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  bytes.replace(digits + digest.size(), 16, 16, '0');
  const std::string now = HexOf(Xxh3(bytes.data(), sizeof(length) + length));
  bytes.replace(digits + digest.size(), 16, now);
  ASSERT_TRUE(WriteFileAtomically(file, bytes).ok());
}

TEST_F(ManagerFaultsTest, ANewerVersionIsNoDamage) {
  const SingleRank alone;
  for (const std::string format : {"safetensors", "sharded"}) {
    SCOPED_TRACE(format);
    std::filesystem::remove_all(directory_);
    const Scenario scenario{"", format, 1, ""};
    for (int64_t value : {1, 2}) ASSERT_TRUE(Save(scenario, EpochName(value), value).ok());
    MakeNewer(absl::StrCat(directory_, "/epoch_2.", format));
    const std::vector<std::string> before = ListDirectory(directory_).value();
    for (int start = 0; start < 2; ++start) {
      const auto manager =
          Manager::Create({.directory = directory_, .format = format}, alone).value();
      for (const absl::Status& status :
           {manager->LoadNewest().status(), manager->Newest().status()}) {
        EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
        EXPECT_TRUE(absl::StrContains(status.message(), "version")) << status;
        EXPECT_TRUE(absl::StrContains(status.message(), "/epoch_2.")) << status;
      }
      EXPECT_EQ(ListDirectory(directory_).value(), before);
    }
  }
}

// An evaluation beside a run, which saves another checkpoint and removes this one, at each moment
// of the load.
TEST(LoadTest, WhatARunRemovesMeanwhileIsNoDamage) {
  const SingleRank alone;
  for (const std::string format : {"pt", "safetensors", "sharded"}) {
    const std::string directory = absl::StrCat(testing::TempDir(), "/removed_meanwhile_", format);
    const std::string next = directory + "_next";
    for (int64_t nth = 1;; ++nth) {
      SCOPED_TRACE(absl::StrCat(format, ", before file ", nth, " is opened"));
      const auto save = [&](const std::string& folder, int64_t epoch) {
        std::filesystem::remove_all(folder);
        State state;
        state.root.insert("epoch", epoch);
        state.root.insert("model", at::arange(epoch, epoch + 100, at::kFloat));
        const auto run = Manager::Create({.directory = folder, .format = format}, alone).value();
        return run->Save(EpochName(epoch), state).value();
      };
      const std::string old = save(directory, 1), later = save(next, 2);
      const auto evaluation =
          Manager::Create({.directory = directory, .read_only = true}, alone).value();
      bool happened = false;
      on_open = {.of = "/epoch_1.", .left = nth, .call = [&] {
                   happened = true;
                   std::filesystem::rename(later, absl::StrCat(directory, "/epoch_2.", format));
                   std::filesystem::remove_all(old);
                 }};
      const auto loaded = evaluation->LoadNewest();
      on_open = {};
      ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
      if (!happened) break;
      // All of one of the two.
      const State& state = (*loaded)->state;
      const int64_t epoch = state.root.at("epoch").toInt();
      EXPECT_EQ(state.root.at("model").toTensor()[0].item<double>(), epoch);
      EXPECT_EQ((*loaded)->path, absl::StrCat(directory, "/", EpochName(epoch), ".", format));
    }
  }
}

}  // namespace
}  // namespace ddp::checkpoint
