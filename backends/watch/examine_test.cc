#include "backends/watch/examine.h"

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace ddp::backends::watch {
namespace {

using Kind = Finding::Kind;

Record AllReduce(uint64_t numel = 1000) {
  Record record{.op = Op::kAllReduce, .reduce_op = 0, .dtype = 6};
  record.Add(numel);
  return record;
}

Record Broadcast(int32_t root = 0) {
  Record record{.root = root, .op = Op::kBroadcast, .dtype = 6};
  record.Add(1000);
  return record;
}

// The report of a rank that has made these calls, the last of which is still under way.
Report Called(const std::vector<Record>& calls) {
  Report report;
  report.host = "h";
  report.process = "100@1";
  for (const Record& record : calls) {
    report.signature = Extend(report.signature, record);
    report.tail.push_back({.number = ++report.count,
                           .record = record,
                           .signature = report.signature,
                           .ended = report.count < calls.size()});
  }
  return report;
}

const Record kBarrier = {.op = Op::kBarrier};

TEST(ExamineTest, AMismatchShowsBothSides) {
  const Report one = Called({kBarrier, AllReduce()});
  const Report other = Called({kBarrier, Broadcast()});
  const Finding finding =
      Examine({.rank = 0, .reports = {one, other, one, one}}, 2, Question::kWhySlow);
  EXPECT_EQ(finding.kind, Kind::kMismatch);
  EXPECT_TRUE(finding.hopeless());
  EXPECT_EQ(finding.text,
            "the ranks do not make the same call: ranks 0, 2, 3: #2 allreduce(sum) float32 [1000]; "
            "rank 1: #2 broadcast(root 0) float32 [1000]");
}

TEST(ExamineTest, TheFirstMismatchCounts) {
  const Report one = Called({AllReduce(), Broadcast(), kBarrier});
  const Report other = Called({Broadcast(), AllReduce(), kBarrier});
  const Finding finding = Examine({.reports = {one, other}}, 3, Question::kWhySlow);
  EXPECT_EQ(
      finding.text,
      "the ranks do not make the same call: rank 0: #1 allreduce(sum) float32 [1000]; rank 1: "
      "#1 broadcast(root 0) float32 [1000]");
}

TEST(ExamineTest, AMismatchOlderThanTheTailsIsFound) {
  Report one = Called({AllReduce(), kBarrier, kBarrier});
  Report other = Called({Broadcast(), kBarrier, kBarrier});
  one.tail.erase(one.tail.begin());
  other.tail.erase(other.tail.begin());
  const Finding finding = Examine({.reports = {one, other}}, 3, Question::kWhySlow);
  EXPECT_EQ(finding.kind, Kind::kMismatch);
  EXPECT_TRUE(absl::StrContains(finding.text, "since an earlier collective")) << finding.text;
}

TEST(ExamineTest, ARankThatIsBehindIsNoMismatch) {
  Report ahead = Called({kBarrier, AllReduce()});
  Report behind = Called({kBarrier});
  behind.tail[0].ended = true;
  behind.idle_ms = 31'040;
  const Finding finding =
      Examine({.rank = 0, .reports = {ahead, behind, ahead, std::nullopt}}, 2, Question::kWhySlow);
  EXPECT_EQ(finding.kind, Kind::kMissing);
  EXPECT_FALSE(finding.hopeless());
  EXPECT_EQ(
      finding.text,
      "reached by ranks 0, 2; not by rank 1 (last call #1 barrier, 31s ago), rank 3 (has told "
      "nothing since the group began)");
}

TEST(ExamineTest, WhoIsMissingIsSaidToBeSlowOrSilentOrNew) {
  const Report ahead = Called({kBarrier, AllReduce()});
  Picture picture{.rank = 0, .reports = {ahead, Called({kBarrier}), Called({})}};
  EXPECT_EQ(Examine(picture, 2, Question::kWhySlow).text,
            "reached by rank 0; not by rank 1 (last call #1 barrier, 0 ago and still under way), "
            "rank 2 (no call yet)");
  picture.silent = {1, 2};
  EXPECT_EQ(Examine(picture, 2, Question::kWhySlow).text,
            "reached by rank 0; not by rank 1 (does not answer; last seen at #1 barrier), rank 2 "
            "(does not answer)");
}

TEST(ExamineTest, AllThereAndSlow) {
  const Report report = Called({AllReduce()});
  const Finding finding = Examine({.reports = {report, report}}, 1, Question::kWhySlow);
  EXPECT_EQ(finding.kind, Kind::kNothing);
  EXPECT_TRUE(absl::StrContains(finding.text, "all ranks have called it")) << finding.text;
}

TEST(ExamineTest, TheDeadAreNamedWithTheirLastCall) {
  const Report report = Called({kBarrier, AllReduce()});
  Report victim = Called({kBarrier});
  victim.process = "4711@5";
  const Finding finding = Examine({.rank = 0, .reports = {report, report, victim}, .dead = {2}}, 2,
                                  Question::kWhyFailed);
  EXPECT_EQ(finding.kind, Kind::kDead);
  EXPECT_EQ(
      finding.text,
      "Connection closed by peer: rank 2 has died (process 4711); it was last seen at #1 barrier");
}

TEST(ExamineTest, WhoLeftIsToBlameForLaterCollectivesOnly) {
  const Report report = Called({kBarrier, AllReduce()});
  Report gone = Called({kBarrier});
  gone.left = true;
  Picture picture{.rank = 0, .reports = {report, gone}};
  Finding finding = Examine(picture, 2, Question::kWhySlow);
  EXPECT_EQ(finding.kind, Kind::kLeft);
  EXPECT_EQ(finding.text, "Connection closed by peer: rank 1 left the group after #1 barrier");
  picture.dead = {1};  // its process has ended in the meantime: the same story
  finding = Examine(picture, 2, Question::kWhySlow);
  EXPECT_EQ(finding.text,
            "Connection closed by peer: rank 1 left the group after #1 barrier, and its process "
            "has ended");

  // It has done its part of this one.
  EXPECT_EQ(Examine(picture, 1, Question::kWhySlow).kind, Kind::kNothing);
  // Nothing in particular is waited for.
  EXPECT_EQ(Examine(picture, 0, Question::kWhySlow).kind, Kind::kNothing);
  // A message may have needed it.
  EXPECT_EQ(Examine(picture, 0, Question::kWhyFailed).kind, Kind::kDead);
}

TEST(ExamineTest, AfterAFailureSilenceAndOthersFailuresAreHints) {
  const Report report = Called({AllReduce()});
  Report failed = report;
  failed.failure = "#1 allreduce(sum) float32 [1000]: no space left";
  Picture picture{.rank = 0, .reports = {report, failed, report}, .silent = {2}};
  EXPECT_EQ(Examine(picture, 1, Question::kWhyFailed).kind, Kind::kSilent);
  EXPECT_EQ(Examine(picture, 1, Question::kWhySlow).kind, Kind::kNothing);
  picture.silent.clear();
  const Finding finding = Examine(picture, 1, Question::kWhyFailed);
  EXPECT_EQ(finding.kind, Kind::kFailed);
  EXPECT_EQ(finding.text, "rank 1 has failed: #1 allreduce(sum) float32 [1000]: no space left");
  EXPECT_FALSE(finding.hopeless());
}

TEST(ExamineTest, SignaturesAreComparedWhereBothKnowThem) {
  Recorder mine({.acquire = [](void*) {}, .release = [](void*) {}});
  for (int i = 0; i < 5; ++i) mine.Begin(AllReduce());
  Report theirs = Called({AllReduce(), AllReduce(), AllReduce()});
  EXPECT_FALSE(SignaturesDiffer(mine, theirs));
  theirs = Called({AllReduce(), AllReduce(), AllReduce(7)});
  EXPECT_TRUE(SignaturesDiffer(mine, theirs));
  // They are ahead; what they posted of their last mark is behind us.
  theirs = Called(std::vector<Record>(9, Broadcast()));
  EXPECT_FALSE(SignaturesDiffer(mine, theirs));
  theirs.mark = 4;
  theirs.mark_signature = *mine.SignatureAt(4);
  EXPECT_FALSE(SignaturesDiffer(mine, theirs));
  ++theirs.mark_signature;
  EXPECT_TRUE(SignaturesDiffer(mine, theirs));
}

}  // namespace
}  // namespace ddp::backends::watch
