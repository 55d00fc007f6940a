#include "backends/watch/report.h"

#include "gtest/gtest.h"

namespace ddp::backends::watch {
namespace {

RankReport Full() {
  RankReport report;
  report.host = "3f2a/net:[1]/pid:[2]";
  report.process = "4711@99";
  report.probe_address = "[2001:db8::1]:4711";
  report.answered_request = 3;
  report.count = 18'000'000'000'000'000'000u;
  report.signature = ~uint64_t{0};
  report.mark = 1024;
  report.mark_signature = 5;
  report.idle_ms = 1200;
  report.left = true;
  report.aborted = true;
  report.waits_in_round = 4;
  report.rounds_begun = 5;
  report.has_ended = true;
  report.awaited = 18;
  report.failure = "two lines:\n\"Connection closed\" \\ by peer\t\xff";
  CallRecord record{
      .root = 2, .kind = CollectiveKind::kReduce, .reduce_op = 8, .dtype = -1, .same_numel = false};
  record.Add(10);
  const CallRecord barrier = {.kind = CollectiveKind::kBarrier};
  report.tail.push_back({.number = 16, .record = record, .signature = 1, .ended = true});
  report.tail.push_back(
      {.number = 17, .record = barrier, .signature = Extend(1, barrier), .ended = true});
  report.tail.push_back(
      {.number = 18, .record = record, .signature = Extend(Extend(1, barrier), record)});
  report.sent[3] = 7;
  report.received[0] = 9;
  return report;
}

TEST(ReportTest, DecodeRestoresWhatWasEncoded) {
  const RankReport report = Full();
  const absl::StatusOr<RankReport> decoded = Decode(Encode(report));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(Encode(*decoded), Encode(report));
  EXPECT_EQ(decoded->host, report.host);
  EXPECT_EQ(decoded->process, report.process);
  EXPECT_EQ(decoded->probe_address, report.probe_address);
  EXPECT_EQ(decoded->answered_request, 3);
  EXPECT_EQ(decoded->count, report.count);
  EXPECT_EQ(decoded->signature, report.signature);
  EXPECT_EQ(decoded->mark, 1024);
  EXPECT_EQ(decoded->mark_signature, 5);
  EXPECT_EQ(decoded->idle_ms, 1200);
  EXPECT_TRUE(decoded->left);
  EXPECT_TRUE(decoded->aborted);
  EXPECT_EQ(decoded->failure, report.failure);
  EXPECT_EQ(decoded->waits_in_round, 4);
  EXPECT_EQ(decoded->rounds_begun, 5);
  EXPECT_TRUE(decoded->has_ended);
  EXPECT_EQ(decoded->awaited, 18);
  ASSERT_EQ(decoded->tail.size(), 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(decoded->tail[i].number, report.tail[i].number);
    EXPECT_EQ(decoded->tail[i].record, report.tail[i].record);
    EXPECT_EQ(decoded->tail[i].signature, report.tail[i].signature);
    EXPECT_EQ(decoded->tail[i].ended, report.tail[i].ended);
  }
  EXPECT_EQ(decoded->sent, report.sent);
  EXPECT_EQ(decoded->received, report.received);
}

TEST(ReportTest, DecodeRejectsAnythingElse) {
  const std::string text = Encode(Full());
  for (const std::string& bad :
       {std::string("nonsense"), text + "at 1 2\n", text + "kind 99 0 0 0 0 0 0 0\n",
        text + "calls 1\n", text + "open 19\n", std::string("calls 0\n"),
        std::string("tail 1 1\ncalls 0\n"), text.substr(0, text.size() - 2), text + "sent x 1\n",
        text + "sent 1 1 1\n"}) {
    EXPECT_EQ(Decode(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace ddp::backends::watch
