#include "ddp/trainer/logging/jsonl_writer.h"

#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "gtest/gtest.h"

namespace ddp::trainer::logging {
namespace {

std::string FreshPath() {
  const std::string path = testing::TempDir() + "/metrics.jsonl";
  std::filesystem::remove(path);
  return path;
}

std::unique_ptr<JsonlWriter> Open(const std::string& path) {
  auto writer = JsonlWriter::Open(path);
  EXPECT_TRUE(writer.ok()) << writer.status();
  return *std::move(writer);
}

std::vector<nlohmann::json> Lines(const std::string& path) {
  std::vector<nlohmann::json> lines;
  for (absl::string_view line : absl::StrSplit(*ReadFile(path), '\n', absl::SkipEmpty())) {
    lines.push_back(nlohmann::json::parse(line));
  }
  return lines;
}

TEST(JsonlWriterTest, OneLinePerCallAtOnce) {
  const std::string path = FreshPath();
  auto writer = Open(path);
  ASSERT_TRUE(writer->Scalars(10, {{"train/loss", 0.1}, {"train/lr", 3}}).ok());
  EXPECT_EQ(Lines(path).size(), 1);  // without Flush
  ASSERT_TRUE(writer->Scalar("test/accuracy", 1.0 / 3, 20).ok());
  ASSERT_TRUE(writer->Text("note", "a \"b\"\n\xff", 30).ok());
  const auto lines = Lines(path);
  ASSERT_EQ(lines.size(), 3);
  EXPECT_EQ(lines[0]["step"], 10);
  EXPECT_EQ(lines[0]["train/loss"], 0.1);
  EXPECT_EQ(lines[0]["train/lr"], 3.0);
  EXPECT_GT(lines[0]["time"], 1.6e9);
  EXPECT_LE(lines[0]["time"], lines[1]["time"]);
  EXPECT_EQ(lines[1]["test/accuracy"], 1.0 / 3);  // to the last bit
  EXPECT_EQ(lines[2]["note"], "a \"b\"\n\xef\xbf\xbd");
  EXPECT_TRUE(absl::StartsWith(*ReadFile(path), "{\"step\":10,\"time\":"));
}

TEST(JsonlWriterTest, NotFiniteNumbersStayValidJson) {
  const std::string path = FreshPath();
  const double infinity = std::numeric_limits<double>::infinity();
  ASSERT_TRUE(Open(path)
                  ->Scalars(1, {{"a", std::numeric_limits<double>::quiet_NaN()},
                                {"b", infinity},
                                {"c", -infinity}})
                  .ok());
  const auto lines = Lines(path);
  EXPECT_EQ(lines[0]["a"], "NaN");
  EXPECT_EQ(lines[0]["b"], "Infinity");
  EXPECT_EQ(lines[0]["c"], "-Infinity");
}

TEST(JsonlWriterTest, ContinuesAFileAndDropsATornLine) {
  const std::string path = FreshPath();
  ASSERT_TRUE(Open(path)->Scalar("x", 1, 1).ok());
  std::ofstream(path, std::ios::app) << "{\"step\":2,\"ti";
  ASSERT_TRUE(Open(path)->Scalar("x", 2, 2).ok());
  const auto lines = Lines(path);
  ASSERT_EQ(lines.size(), 2);
  EXPECT_EQ(lines[0]["x"], 1);
  EXPECT_EQ(lines[1]["x"], 2);
}

TEST(JsonlWriterTest, AResumedRunSaysNothingTwice) {
  const std::string path = FreshPath();
  ASSERT_TRUE(JsonlWriter::Open(path, /*resumed_at_step=*/4).ok());  // there is nothing yet
  {
    auto writer = Open(path);
    for (int64_t step : {1, 3, 10, 12, 2, 4, 3}) ASSERT_TRUE(writer->Scalar("x", 1, step).ok());
  }
  std::ofstream(path, std::ios::app) << "{\"note\":\"by hand\"}\n{\"step\":2,\"ti";
  auto resumed = JsonlWriter::Open(path, /*resumed_at_step=*/4);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  ASSERT_TRUE((*resumed)->Scalar("x", 2, 4).ok());
  std::vector<int64_t> steps;
  for (const auto& line : Lines(path)) steps.push_back(line.value("step", int64_t{-1}));
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 3, 2, 3, -1, 4}));
}

TEST(JsonlWriterTest, ErrorsNameThePath) {
  const absl::Status status = JsonlWriter::Open("/proc/none/metrics.jsonl").status();
  EXPECT_FALSE(status.ok());
  EXPECT_TRUE(absl::StrContains(status.message(), "/proc/none")) << status;
}

}  // namespace
}  // namespace ddp::trainer::logging
