// For the tests of when and how a run saves: runs of two and more ranks, what they leave in their
// folders, and a disk that fails.
#pragma once

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "ddp/session/session.h"
#include "ddp/trainer/trainer.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

namespace ddp::trainer {

// Two ranks have 11 batches of 16 per epoch; the last has 5 examples.
inline constexpr int64_t kExamples = 330;
// Without even_batches and without batches that are not full, rank 0 of three has 7, the others 6.
inline constexpr int64_t kUneven = 16 * 7 * 3 - 2;

struct Setting {
  const char* name;
  int world_size = 2;
  std::string optimizer = "sgd";
  int64_t accumulate = 1;
  double dropout = 0;
  bool broadcast_buffers = true;
  int64_t zero_stage = 0;
  std::string precision = "fp32";
  bool even_batches = true;
};

inline void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

// A folder of the running test's own.
inline std::string FolderFor(const std::string& name) {
  std::string test = testing::UnitTest::GetInstance()->current_test_info()->name();
  std::replace(test.begin(), test.end(), '/', '_');
  return absl::StrCat(testing::TempDir(), "/saver_", test, "_", name);
}

// What a rank does besides, by its rank.
using PerRank = std::function<void(int rank, TrainerOptions& options)>;

// Of each rank.
inline std::vector<absl::StatusOr<Report>> TrainRanks(const Setting& setting,
                                                      const TrainerOptions& options,
                                                      const PerRank& change = nullptr,
                                                      const data::Dataset& test = Halves(60)) {
  std::vector<absl::StatusOr<Report>> reports(setting.world_size, absl::UnknownError("not run"));
  RunRanks(setting.world_size, [&](const session::Session& session) {
    TrainerOptions mine = options;
    if (change) change(session.rank(), mine);
    Task task = NetTask(setting.dropout);
    if (setting.world_size == 1) {  // ranks that are threads share the generator
      // An evaluation may draw random numbers: training must not see which it drew.
      task.correct = [count = task.correct](const at::Tensor& output, const at::Tensor& target) {
        return count(output + at::rand({1}).mul(0), target);
      };
    }
    const auto& report = reports[session.rank()] =
        Train(session, task, Halves(setting.even_batches ? kExamples : kUneven), test, mine);
    // What gives the program its exit code.
    EXPECT_EQ(session.stopped_by(), report.ok() ? report->end.signal : 0);
  });
  return reports;
}

// Rank 0's, of a run in which no rank fails.
inline Report Trained(const Setting& setting, const TrainerOptions& options,
                      const PerRank& change = nullptr, const data::Dataset& test = Halves(60)) {
  const auto reports = TrainRanks(setting, options, change, test);
  for (const auto& report : reports) EXPECT_TRUE(report.ok()) << report.status();
  return reports[0].ok() ? *reports[0] : Report{};
}

// Empties the folder.
inline TrainerOptions OptionsOfRun(const Setting& setting, const std::string& folder) {
  TrainerOptions options = Quiet();
  options.optimizer = {.name = setting.optimizer, .lr = 0.05};
  options.schedule.name = "cosine";
  options.accumulate = setting.accumulate;
  options.zero.stage = setting.zero_stage;
  options.zero.overlap_gather = true;  // parameters are not all there when a step ends
  options.clip_norm = 0.5;
  options.precision = setting.precision;
  options.even_batches = setting.even_batches;
  options.drop_last = !setting.even_batches;
  options.grad_scaler = {.init_scale = 1e9, .backoff_factor = 1e-4, .growth_interval = 4};
  options.data_parallel.broadcast_buffers = setting.broadcast_buffers;
  options.checkpoint.manager.directory = folder;
  std::filesystem::remove_all(folder);
  return options;
}

// Names of the checkpoints in a folder.
inline std::set<std::string> Names(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (name[0] != '.') names.insert(name);
  }
  return names;
}

// The bytes of all files of a checkpoint.
inline std::map<std::string, std::string> BytesIn(const std::string& path) {
  std::map<std::string, std::string> files;
  if (!std::filesystem::is_directory(path)) return {{"", ReadFile(path).value_or("unreadable")}};
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    if (!entry.is_regular_file()) continue;
    files[entry.path().filename()] = ReadFile(entry.path()).value_or("unreadable");
  }
  return files;
}

// One rank's disk, on which writing the checkpoint of a name waits, and fails.
class Disk : public FileSystem {
 public:
  // A write waits until `until` returns true (null: it does not), which Notify asks again, and then
  // fails, if `error` is not 0.
  Disk(std::string name, int error, std::function<bool()> until = nullptr)
      : name_(std::move(name)), error_(error), until_(std::move(until)) {}

  void Notify() {
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }
  void WaitForFailure() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return failed_; });
  }
  // Called before the first such write waits.
  void set_on_write(std::function<void()> on_write) { on_write_ = std::move(on_write); }

  int Open(const char* path, int flags, mode_t mode) override {
    const int fd = FileSystem::Open(path, flags, mode);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (fd >= 0 && absl::StrContains(path, name_)) files_.insert(fd);
    return fd;
  }
  int Close(int fd) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      files_.erase(fd);
    }
    return FileSystem::Close(fd);
  }
  ssize_t Write(int fd, const void* data, size_t size) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (files_.count(fd) == 0) return FileSystem::Write(fd, data, size);
    if (on_write_) std::exchange(on_write_, nullptr)();
    changed_.wait(lock, [&] { return !until_ || until_(); });
    if (error_ == 0) return FileSystem::Write(fd, data, size);
    failed_ = true;
    changed_.notify_all();
    errno = error_;
    return -1;
  }

 private:
  const std::string name_;
  const int error_;
  const std::function<bool()> until_;
  std::function<void()> on_write_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::set<int> files_;
  bool failed_ = false;
};

}  // namespace ddp::trainer
