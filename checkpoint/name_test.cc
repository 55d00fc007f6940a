#include "checkpoint/name.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ddp::checkpoint {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

std::vector<NamedFile> Files(const std::vector<std::string>& names) {
  std::vector<NamedFile> files;
  for (const std::string& name : names) files.push_back({ParseName(name).value(), name});
  return files;
}

std::vector<std::string> NamesOf(const std::vector<NamedFile>& files) {
  std::vector<std::string> names;
  for (const NamedFile& file : files) names.push_back(file.file);
  return names;
}

TEST(NameTest, NamesComeBack) {
  EXPECT_EQ(EpochName(3), "epoch_3");
  EXPECT_EQ(EpochStepName(3, 120), "epoch_3_step_120");
  EXPECT_EQ(StepName(120), "step_120");
  for (int64_t n : {int64_t{0}, int64_t{1}, int64_t{10}, kMax}) {
    EXPECT_EQ(ParseName(EpochName(n)), (CheckpointName{n, std::nullopt}));
    EXPECT_EQ(ParseName(StepName(n)), (CheckpointName{std::nullopt, n}));
    EXPECT_EQ(ParseName(EpochStepName(n, 7)), (CheckpointName{n, 7}));
    EXPECT_EQ(ParseName(EpochStepName(7, n)), (CheckpointName{7, n}));
  }
}

TEST(NameTest, OtherNamesAreNoCheckpointsOfARun) {
  for (absl::string_view name : {"",
                                 "best",
                                 "epoch",
                                 "epoch_",
                                 "epoch_x",
                                 "epoch_-1",
                                 "epoch_+1",
                                 "epoch_ 1",
                                 "epoch_1 ",
                                 "epoch_01",
                                 "epoch_00",
                                 "Epoch_1",
                                 "xepoch_1",
                                 "epoch_1_",
                                 "epoch_1_final",
                                 "epoch_1step_2",
                                 "epoch_1_step_",
                                 "epoch_1_step_02",
                                 "epoch_1_step_-2",
                                 "epoch_1_step_2_",
                                 "epoch_1_step_2x",
                                 "epoch_1_epoch_2",
                                 "epoch_1.5",
                                 "step",
                                 "step_",
                                 "step_x",
                                 "step_-1",
                                 "step_01",
                                 "step_1_epoch_2",
                                 "_step_1",
                                 "epoch_9223372036854775808",
                                 "step_9223372036854775808",
                                 "epoch_99999999999999999999",
                                 "epoch_1_step_99999999999999999999"}) {
    EXPECT_EQ(ParseName(name), std::nullopt) << name;
  }
}

TEST(NameTest, OldestFirst) {
  std::mt19937 random(1);
  for (const std::vector<std::string>& sorted :
       {std::vector<std::string>{"epoch_0", "epoch_0_step_3", "epoch_0_step_20", "epoch_1",
                                 "epoch_1_step_19", "epoch_2", "epoch_9_step_1", "epoch_10"},
        std::vector<std::string>{"step_0", "step_9", "step_10", absl::StrCat("step_", kMax)},
        std::vector<std::string>{}}) {
    for (int i = 0; i < 20; ++i) {
      std::vector<std::string> shuffled = sorted;
      std::shuffle(shuffled.begin(), shuffled.end(), random);
      std::vector<NamedFile> files = Files(shuffled);
      ASSERT_TRUE(SortByAge(files).ok());
      EXPECT_EQ(NamesOf(files), sorted);
    }
  }
}

TEST(NameTest, StepsBesideEpochsAreRefused) {
  for (const char* epoch : {"epoch_0", "epoch_1_step_5"}) {
    for (const bool epoch_first : {true, false}) {
      std::vector<NamedFile> files =
          epoch_first ? Files({epoch, "step_7"}) : Files({"step_7", epoch});
      const absl::Status status = SortByAge(files);
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_TRUE(absl::StrContains(status.message(), epoch)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "step_7")) << status;
    }
  }
}

TEST(NameTest, FilesOfAFormat) {
  const std::vector<std::string> suffixes = {".pt", ".sharded"};
  EXPECT_EQ(ParseFileName("epoch_3.pt", suffixes)->name, (CheckpointName{3, std::nullopt}));
  EXPECT_EQ(ParseFileName("step_4.sharded", suffixes)->name, (CheckpointName{std::nullopt, 4}));
  EXPECT_EQ(ParseFileName("step_4.sharded", suffixes)->file, "step_4.sharded");
  for (const char* file : {"epoch_3", "epoch_3.txt", "best.pt", "epoch_3.pt.sharded", ".pt",
                           ".epoch_3.pt.tmp-0123456789abcdef"}) {
    EXPECT_FALSE(ParseFileName(file, suffixes).has_value()) << file;
  }
}

}  // namespace
}  // namespace ddp::checkpoint
