// A loss of power at each moment of a save, as base/power_loss_testing.h models it: the old or the
// new checkpoint is there, after Save has returned the new one, and no fsync could be left out.
//
// CHECKPOINT_FAULTS=long: more subsets of what was not durable, and more scenarios of the formats
// that write folders.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/coordinator.h"
#include "base/coordinator_testing.h"
#include "base/file.h"
#include "base/power_loss_testing.h"
#include "checkpoint/manager.h"
#include "checkpoint/name.h"
#include "checkpoint/parts.h"
#include "checkpoint/state_testing.h"

namespace ddp::checkpoint {
namespace {

bool IsLong() {
  const char* faults = std::getenv("CHECKPOINT_FAULTS");
  return faults != nullptr && absl::string_view(faults) == "long";
}

struct Scenario {
  std::string description;
  std::string format;
  int ranks;
  int64_t before;    // epochs that are saved before
  std::string name;  // of the save
  int keep_last = 0;
  std::string verify = "never";
  // An fsync after which another one of the same folder comes, before anything depends on it.
  int64_t repeated_fsync = 0;
};

State StateOf(int64_t value, bool in_parts, int rank, int size) {
  State state;
  state.root.insert("epoch", value);
  const at::Tensor moment = at::arange(value, value + 12, at::kFloat);
  state.root.insert("moment", moment);
  if (in_parts) {
    const FlatRange range{12 * rank / size, 12 * (rank + 1) / size};
    (void)state.root.erase("moment");
    state.sharded["moment"] = {.global_shape = {12}, .parts = {{range, PartOf(moment, range, {})}}};
  }
  return state;
}

class PowerLossTest : public testing::TestWithParam<Scenario> {
 protected:
  PowerLossTest() {
    std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    for (char& c : name) c = c == '/' ? '_' : c;
    parent_ = absl::StrCat(testing::TempDir(), "/checkpoint_power_loss_test_", name);
    crashed_ = parent_ + "_crashed";
  }

  void Save(const std::string& name, int64_t value, FileSystem* files) const {
    const Scenario& scenario = GetParam();
    RunCoordinatedRanks(scenario.ranks, [&](const Coordinator& ranks) {
      auto manager = Manager::Create({.directory = parent_ + "/run/checkpoints",
                                      .format = scenario.format,
                                      .keep_last = scenario.keep_last,
                                      .verify = scenario.verify,
                                      .files = files},
                                     ranks);
      ASSERT_TRUE(manager.ok()) << manager.status();
      const bool in_parts = scenario.format == "parts" || scenario.format == "sharded";
      const absl::Status saved =
          (*manager)
              ->Save(name, StateOf(value, in_parts, ranks.rank(), scenario.ranks),
                     {.metrics = {{"value", static_cast<double>(value)}}})
              .status();
      ASSERT_TRUE(saved.ok()) << saved;
    });
  }

  // What is wrong with the folder after a loss of power; empty if nothing is. `is_saved`: Save has
  // returned.
  std::string Problem(const Tree& tree, bool is_saved) const {
    const Scenario& scenario = GetParam();
    WriteTree(tree, crashed_);
    const SingleRank alone;
    const std::string directory = crashed_ + "/run/checkpoints";
    const auto manager = Manager::Create(
        {.directory = directory, .format = scenario.format, .keep_best = "value:max"}, alone);
    if (!manager.ok()) return manager.status().ToString();
    // Each that is visible is whole.
    const Folder folder = Manager::FolderAt(directory);
    const std::vector<NamedFile> listed = folder.List().value();
    for (const NamedFile& named : listed) {
      const absl::StatusOr<State> state = Manager::Load(folder.PathOf(named.file));
      if (!state.ok()) return state.status().ToString();
      const int64_t value = state->root.at("epoch").toInt();
      const bool is_named = value == named.name.epochs ||
                            (value == 100 && absl::StartsWith(named.file, scenario.name));
      if (!is_named) return absl::StrCat(named.file, " has the value ", value);
      const std::string difference = Difference(StateOf(value, false, 0, 1).root, state->root);
      if (!difference.empty()) return difference;
      const std::optional<Notes> notes = folder.NotesOf(named.file);
      if (notes && notes->metrics.at("value") != static_cast<double>(value)) {
        return absl::StrCat(named.file, " has the notes of another");
      }
    }
    const auto newest = (*manager)->LoadNewest();
    if (!newest.ok()) return newest.status().ToString();
    const int64_t value = newest->has_value() ? (*newest)->state.root.at("epoch").toInt() : 0;
    if (value != 100 && (is_saved || value != scenario.before)) {
      return absl::StrCat("the newest has the value ", value);
    }
    if (!is_saved) return "";
    // The metrics, too.
    const auto best = (*manager)->Best();
    if (!best.ok()) return best.status().ToString();
    if (!best->has_value() || !absl::StrContains(**best, scenario.name)) return "another is best";
    return "";
  }

  // Saves, with a file system that ignores an fsync (0: none), and returns the first problem after
  // a loss of power. Sets the number of fsyncs.
  std::string FirstProblem(int64_t ignored_fsync, uint32_t subsets, int64_t& fsyncs) {
    const Scenario& scenario = GetParam();
    std::filesystem::remove_all(parent_);
    std::filesystem::create_directories(parent_);
    for (int64_t epoch = 1; epoch <= scenario.before; ++epoch) {
      Save(EpochName(epoch), epoch, FileSystem::Default());
    }
    const Tree before = ReadTree(parent_);
    RecordingFileSystem files(parent_, ignored_fsync);
    Save(scenario.name, 100, &files);
    fsyncs = files.fsyncs();
    const size_t calls = files.trace().size();
    EXPECT_GT(calls, 10u);
    std::set<std::pair<bool, Tree>> seen;
    for (size_t done = 0; done <= calls; ++done) {
      const bool is_saved = done == calls;
      for (uint32_t seed = 0; seed < (is_saved ? 5 * subsets : subsets); ++seed) {
        const Kept kept = seed == 0 ? Kept::kNothing : seed == 1 ? Kept::kEverything : Kept::kSome;
        Tree tree = AfterPowerLoss(before, files.trace(), done, {.kept = kept, .seed = seed});
        const auto [place, is_new] = seen.emplace(is_saved, std::move(tree));
        if (!is_new) continue;
        const std::string problem = Problem(place->second, is_saved);
        if (!problem.empty()) {
          return absl::StrCat("after ", done, " of ", calls, " calls, subset ", seed, ": ",
                              problem);
        }
      }
    }
    return "";
  }

  std::string parent_;
  std::string crashed_;
};

TEST_P(PowerLossTest, TheOldOrTheNewAndNoFsyncIsForNothing) {
  int64_t fsyncs = 0;
  EXPECT_EQ(FirstProblem(0, IsLong() ? 300 : 10, fsyncs), "");
  ASSERT_GE(fsyncs, 3);
  for (int64_t ignored = 1; ignored <= fsyncs; ++ignored) {
    int64_t unused = 0;
    const bool is_needed = ignored != GetParam().repeated_fsync;
    EXPECT_EQ(FirstProblem(ignored, 30, unused) != "", is_needed) << "without fsync " << ignored;
  }
}

std::vector<Scenario> Scenarios() {
  std::vector<Scenario> all = {
      {"the first, in a new folder", "pt", 1, 0, "epoch_1"},
      {"replaces a file, read back", "pt", 2, 2, "epoch_2", 0, "saved"},
      {"a new folder, by all ranks", "parts", 2, 0, "epoch_1"},
      {"replaces a folder", "parts", 2, 2, "epoch_2"},
      // The folder is synced when the new one has its name, and when the old one has lost it.
      {"an old folder is deleted", "parts", 2, 2, "epoch_3", 2, "never", 5},
      {"a new folder, safetensors", "safetensors", 1, 0, "epoch_1"},
      {"replaces a folder, sharded", "sharded", 2, 2, "epoch_2"},
  };
  if (IsLong()) {
    all.push_back({"a new folder, sharded", "sharded", 2, 0, "epoch_1"});
    all.push_back({"replaces a folder, safetensors", "safetensors", 2, 2, "epoch_2"});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Saves, PowerLossTest, testing::ValuesIn(Scenarios()),
                         [](const testing::TestParamInfo<Scenario>& info) {
                           return absl::StrCat("scenario_", info.index);
                         });

}  // namespace
}  // namespace ddp::checkpoint
