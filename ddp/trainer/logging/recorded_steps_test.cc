#include "ddp/trainer/logging/recorded_steps.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "ddp/trainer/logging/sink_registry.h"
#include "gtest/gtest.h"

namespace ddp::trainer::logging {
namespace {

std::string NewFolder() {
  static int folders = 0;
  return absl::StrCat(testing::TempDir(), "/log_", ++folders);
}

class EachSinkTest : public testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<MetricSink> Open(const std::string& folder) {
    return SinkRegistry::Find(GetParam()).value()({.log_dir = folder}).value();
  }
};

TEST_P(EachSinkTest, OnlyStepsCount) {
  const std::string folder = NewFolder();
  EXPECT_EQ(*FindRecordedSteps(folder), std::nullopt);  // there is none
  std::unique_ptr<MetricSink> sink = Open(folder);
  ASSERT_TRUE(sink->Text("hyper_parameters", "| lr |", 0).ok());
  ASSERT_TRUE(sink->HyperParameters({{"lr", "0.1"}}).ok());
  ASSERT_TRUE(sink->Scalar("test/loss", 2.5, 0).ok());
  ASSERT_TRUE(sink->Flush().ok());
  EXPECT_EQ(*FindRecordedSteps(folder), std::nullopt);
  ASSERT_TRUE(sink->Scalar("train/loss", 2.5, 1).ok());
  ASSERT_TRUE(sink->Flush().ok());
  const auto found = *FindRecordedSteps(folder);
  ASSERT_TRUE(found.has_value());
  EXPECT_TRUE(absl::StartsWith(*found, folder)) << *found;
}

INSTANTIATE_TEST_SUITE_P(Sinks, EachSinkTest, testing::Values("jsonl", "tensorboard"));

TEST(FindRecordedStepsTest, OtherFilesAreNone) {
  const std::string folder = NewFolder();
  ASSERT_TRUE(MakeDirectories(folder).ok());
  for (const char* name : {"metrics.jsonl", "events.out.tfevents.1.host.7.0", "other.jsonl"}) {
    ASSERT_TRUE(WriteFileAtomically(absl::StrCat(folder, "/", name), "no such records\n").ok());
  }
  EXPECT_EQ(*FindRecordedSteps(folder), std::nullopt);
}

TEST(HoldsAnotherLogTest, NamesTheOptionAndWhatToDo) {
  const absl::Status with = HoldsAnotherLog("runs/a", "runs/a/metrics.jsonl", "say please");
  EXPECT_EQ(with.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(with.message(),
            "log.dir=runs/a holds the log of a run (runs/a/metrics.jsonl); say please, or choose "
            "another folder");
  EXPECT_TRUE(
      absl::EndsWith(HoldsAnotherLog("a", "b", "").message(), "(b); choose another folder"));
}

}  // namespace
}  // namespace ddp::trainer::logging
