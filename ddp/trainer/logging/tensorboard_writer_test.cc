#include "ddp/trainer/logging/tensorboard_writer.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "ddp/trainer/logging/event.pb.h"
#include "ddp/trainer/logging/sink_registry.h"
#include "gtest/gtest.h"

namespace ddp::trainer::logging {
namespace {

std::string FreshFolder() {
  const std::string folder =
      testing::TempDir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name();
  std::filesystem::remove_all(folder);
  return folder;
}

std::unique_ptr<TensorBoardWriter> Create(TensorBoardOptions options) {
  auto writer = TensorBoardWriter::Create(std::move(options));
  EXPECT_TRUE(writer.ok()) << writer.status();
  return *std::move(writer);
}

// CRC-32C bit by bit, from its definition: independent of the writer's.
uint32_t Crc32c(absl::string_view data) {
  uint32_t crc = ~uint32_t{0};
  for (unsigned char byte : data) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78 : 0);
  }
  return ~crc;
}

uint32_t Masked(uint32_t crc) { return (crc >> 15 | crc << 17) + 0xa282ead8; }

template <typename Integer>
Integer Take(absl::string_view& bytes) {
  Integer value = 0;
  EXPECT_GE(bytes.size(), sizeof(value));
  for (size_t i = 0; i < sizeof(value); ++i) {
    value |= static_cast<Integer>(static_cast<unsigned char>(bytes[i])) << 8 * i;
  }
  bytes.remove_prefix(sizeof(value));
  return value;
}

// Every record of the file, its framing checked byte by byte.
std::vector<tensorboard::Event> ReadEvents(const std::string& path) {
  const std::string contents = *ReadFile(path);
  absl::string_view rest = contents;
  std::vector<tensorboard::Event> events;
  while (!rest.empty()) {
    const absl::string_view length_bytes = rest.substr(0, 8);
    const uint64_t length = Take<uint64_t>(rest);
    EXPECT_EQ(Take<uint32_t>(rest), Masked(Crc32c(length_bytes)));
    EXPECT_LE(length + 4, rest.size());
    const absl::string_view data = rest.substr(0, length);
    rest.remove_prefix(length);
    EXPECT_EQ(Take<uint32_t>(rest), Masked(Crc32c(data)));
    EXPECT_TRUE(events.emplace_back().ParseFromArray(data.data(), static_cast<int>(data.size())));
  }
  return events;
}

TEST(TensorBoardWriterTest, TfRecordOfKnownBytes) {
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283);  // the standard's check value
  const std::string record = internal::TfRecord("abc");
  ASSERT_EQ(record.size(), 8 + 4 + 3 + 4);
  EXPECT_EQ(record.substr(0, 8), std::string("\3\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(record.substr(12, 3), "abc");
}

TEST(TensorBoardWriterTest, FileNameAndFirstRecord) {
  const std::string folder = FreshFolder() + "/a/b";
  const int64_t before = absl::ToUnixSeconds(absl::Now());
  auto writer = Create({.log_dir = folder});
  const std::string start = folder + "/events.out.tfevents.";
  ASSERT_TRUE(absl::StartsWith(writer->path(), start)) << writer->path();
  EXPECT_GE(std::stoll(writer->path().substr(start.size(), 10)), before);
  EXPECT_TRUE(absl::EndsWith(writer->path(), absl::StrCat(".", getpid(), ".0")));

  const auto events = ReadEvents(writer->path());
  ASSERT_EQ(events.size(), 1);
  EXPECT_EQ(events[0].file_version(), "brain.Event:2");
  EXPECT_EQ(events[0].step(), 0);
  EXPECT_GE(events[0].wall_time(), static_cast<double>(before));
}

TEST(TensorBoardWriterTest, TwoWritersHaveTwoFiles) {
  const std::string folder = FreshFolder();
  EXPECT_NE(Create({.log_dir = folder})->path(), Create({.log_dir = folder})->path());
}

TEST(TensorBoardWriterTest, ScalarsShareAnEvent) {
  auto writer = Create({.log_dir = FreshFolder()});
  ASSERT_TRUE(writer->Scalars(7, {{"train/loss", 0.25}, {"train/lr", 0}}).ok());
  ASSERT_TRUE(writer->Scalar("x", std::numeric_limits<double>::quiet_NaN(), 8).ok());
  ASSERT_TRUE(writer->Flush().ok());
  const auto events = ReadEvents(writer->path());
  ASSERT_EQ(events.size(), 3);
  EXPECT_EQ(events[1].step(), 7);
  ASSERT_EQ(events[1].summary().value_size(), 2);
  EXPECT_EQ(events[1].summary().value(0).tag(), "train/loss");
  EXPECT_EQ(events[1].summary().value(0).simple_value(), 0.25f);
  EXPECT_EQ(events[1].summary().value(1).value_case(),
            tensorboard::Summary::Value::kSimpleValue);  // also where it is 0
  EXPECT_EQ(events[2].step(), 8);
  EXPECT_TRUE(std::isnan(events[2].summary().value(0).simple_value()));
}

TEST(TensorBoardWriterTest, TextIsAStringTensorOfTheTextPlugin) {
  auto writer = Create({.log_dir = FreshFolder()});
  ASSERT_TRUE(writer->Text("hparams", "**bold**", 3).ok());
  ASSERT_TRUE(writer->Flush().ok());
  const auto events = ReadEvents(writer->path());
  ASSERT_EQ(events.size(), 2);
  const tensorboard::Summary::Value& value = events[1].summary().value(0);
  EXPECT_EQ(value.tag(), "hparams");
  EXPECT_EQ(value.metadata().plugin_data().plugin_name(), "text");
  EXPECT_EQ(value.tensor().dtype(), tensorboard::Tensor::STRING);
  ASSERT_EQ(value.tensor().shape().dimension_size(), 1);
  EXPECT_EQ(value.tensor().shape().dimension(0).size(), 1);
  ASSERT_EQ(value.tensor().string_value_size(), 1);
  EXPECT_EQ(value.tensor().string_value(0), "**bold**");
}

// The last event's data of TensorBoard's plugin "hparams".
tensorboard::HparamsData LastHparams(const TensorBoardWriter& writer, const std::string& tag) {
  const auto events = ReadEvents(writer.path());
  const tensorboard::Summary::Value& value = events.back().summary().value(0);
  EXPECT_EQ(value.tag(), tag);
  EXPECT_EQ(value.metadata().plugin_data().plugin_name(), "hparams");
  tensorboard::HparamsData data;
  EXPECT_TRUE(data.ParseFromString(value.metadata().plugin_data().content()));
  return data;
}

TEST(TensorBoardWriterTest, HyperParametersHaveTypes) {
  auto writer = Create({.log_dir = FreshFolder()});
  ASSERT_TRUE(writer
                  ->HyperParameters({{"lr", "0.1"},
                                     {"drop_last", "false"},
                                     {"name", "sgd"},
                                     {"none", ""},
                                     {"most", "inf"},
                                     {"milestones", "3,6"}})
                  .ok());
  ASSERT_TRUE(writer->Flush().ok());
  const auto data = LastHparams(*writer, "_hparams_/session_start_info");
  const auto& hparams = data.session_start().hparam();
  ASSERT_EQ(hparams.size(), 6);
  EXPECT_EQ(hparams[0].name(), "lr");
  EXPECT_EQ(hparams[0].value().number(), 0.1);
  EXPECT_EQ(hparams[1].value().kind_case(), tensorboard::SessionStart::Value::kBoolean);
  EXPECT_FALSE(hparams[1].value().boolean());
  EXPECT_EQ(hparams[2].value().text(), "sgd");
  for (int text = 2; text < 6; ++text) {
    EXPECT_EQ(hparams[text].value().kind_case(), tensorboard::SessionStart::Value::kText) << text;
  }
}

TEST(TensorBoardWriterTest, OnlyARunThatIsOverEndsItsSession) {
  auto writer = Create({.log_dir = FreshFolder()});
  for (const char* reason : {"signal TERM", "max_time", "stop_at_step"}) {
    ASSERT_TRUE(writer->Event(7, {{"event", "run_end"}, {"reason", reason}}).ok());
  }
  ASSERT_TRUE(writer->Event(7, {{"event", "other"}, {"reason", "end"}}).ok());
  ASSERT_TRUE(writer->Event(7, {}).ok());
  ASSERT_TRUE(writer->Flush().ok());
  EXPECT_EQ(ReadEvents(writer->path()).size(), 1);
  ASSERT_TRUE(writer->Event(7, {{"event", "run_end"}, {"reason", "end"}}).ok());
  ASSERT_TRUE(writer->Flush().ok());
  const auto data = LastHparams(*writer, "_hparams_/session_end_info");
  EXPECT_EQ(data.session_end().status(), tensorboard::SessionEnd::SUCCESS);
  EXPECT_GT(data.session_end().end_time(), 1e9);
}

TEST(SinkRegistryTest, HasBothWriters) {
  const std::string folder = FreshFolder();
  for (const char* name : {"jsonl", "tensorboard"}) {
    const auto open = SinkRegistry::Find(name);
    ASSERT_TRUE(open.ok()) << open.status();
    EXPECT_TRUE((*open)({.log_dir = folder}).ok()) << name;
  }
  EXPECT_EQ(SinkRegistry::Find("csv").status().message(),
            "unknown log sink 'csv'; linked into this program: jsonl, tensorboard");
}

// The bytes for TensorBoard's field numbers and types, derived by hand.
TEST(TensorBoardWriterTest, WireFormatIsTensorBoards) {
  tensorboard::Event event;
  event.set_step(5);
  auto* value = event.mutable_summary()->add_value();
  value->set_tag("t");
  value->set_simple_value(1.0f);
  EXPECT_EQ(event.SerializeAsString(),
            std::string("\x10\x05"   // 2: step
                        "\x2a\x0a"   // 5: summary, 10 bytes
                        "\x0a\x08"   // 1: value, 8 bytes
                        "\x0a\x01t"  // 1: tag
                        "\x15\x00\x00\x80\x3f",
                        14));  // 2: simple_value
}

TEST(TensorBoardWriterTest, AResumedRunMarksItsFirstStep) {
  auto writer = Create({.log_dir = FreshFolder(), .resumed_at_step = 120});
  const auto events = ReadEvents(writer->path());
  ASSERT_EQ(events.size(), 2);
  EXPECT_EQ(events[1].step(), 120);
  EXPECT_EQ(events[1].session_log().status(), tensorboard::SessionLog::START);
}

TEST(TensorBoardWriterTest, FlushesByItselfBySizeAndByTime) {
  auto by_size = Create(
      {.log_dir = FreshFolder(), .flush_interval = absl::InfiniteDuration(), .flush_bytes = 1000});
  ASSERT_TRUE(by_size->Scalar("x", 1, 1).ok());
  EXPECT_EQ(ReadEvents(by_size->path()).size(), 1);
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(by_size->Scalar("x", 1, 1).ok());
  EXPECT_GT(ReadEvents(by_size->path()).size(), 50);

  auto by_time = Create({.log_dir = FreshFolder(), .flush_interval = absl::ZeroDuration()});
  ASSERT_TRUE(by_time->Scalar("x", 1, 1).ok());
  EXPECT_EQ(ReadEvents(by_time->path()).size(), 2);
}

TEST(TensorBoardWriterTest, DestructorWritesTheRest) {
  auto writer = Create({.log_dir = FreshFolder()});
  const std::string path = writer->path();
  ASSERT_TRUE(writer->Scalar("x", 1, 1).ok());
  writer.reset();
  EXPECT_EQ(ReadEvents(path).size(), 2);
}

TEST(TensorBoardWriterTest, ErrorsNameTheFolder) {
  EXPECT_EQ(TensorBoardWriter::Create({}).status().code(), absl::StatusCode::kInvalidArgument);
  const absl::Status status = TensorBoardWriter::Create({.log_dir = "/proc/none"}).status();
  EXPECT_FALSE(status.ok());
  EXPECT_TRUE(absl::StrContains(status.message(), "/proc/none")) << status;
}

TEST(HparamsTableTest, IsMarkdown) {
  EXPECT_EQ(HparamsTable({{"lr", "0.1"}, {"a|b", "x\ny"}}),
            "| name | value |\n| --- | --- |\n| lr | 0.1 |\n| a\\|b | x y |\n");
}

}  // namespace
}  // namespace ddp::trainer::logging
