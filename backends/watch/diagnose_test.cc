#include "backends/watch/diagnose.h"

#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace ddp::backends::watch {
namespace {

using Kind = Diagnosis::Kind;

CallRecord AllReduce(uint64_t numel = 1000) {
  CallRecord record{.kind = CollectiveKind::kAllReduce, .reduce_op = 0, .dtype = 6};
  record.Add(numel);
  return record;
}

CallRecord Broadcast(int32_t root = 0) {
  CallRecord record{.root = root, .kind = CollectiveKind::kBroadcast, .dtype = 6};
  record.Add(1000);
  return record;
}

// The report of a rank that has made these calls, the last of which has not ended.
RankReport Called(const std::vector<CallRecord>& calls) {
  RankReport report;
  report.host = "h";
  report.process = "100@1";
  for (const CallRecord& record : calls) {
    report.signature = Extend(report.signature, record);
    report.tail.push_back({.number = ++report.count,
                           .record = record,
                           .signature = report.signature,
                           .ended = report.count < calls.size()});
  }
  return report;
}

const CallRecord kBarrier = {.kind = CollectiveKind::kBarrier};

TEST(DiagnoseTest, AMismatchShowsBothSides) {
  const RankReport one = Called({kBarrier, AllReduce()});
  const RankReport other = Called({kBarrier, Broadcast()});
  const Diagnosis diagnosis =
      Diagnose({.rank = 0, .reports = {one, other, one, one}}, 2, Symptom::kSlow);
  EXPECT_EQ(diagnosis.kind, Kind::kMismatch);
  EXPECT_TRUE(diagnosis.fatal());
  EXPECT_EQ(diagnosis.text,
            "the ranks do not make the same call: ranks 0, 2, 3: #2 allreduce(sum) float32 [1000]; "
            "rank 1: #2 broadcast(root 0) float32 [1000]");
}

// Rank 0 waits in its second Coordinator call and has made one collective; rank 1 waits in the
// second collective and has begun one call.
TEST(DiagnoseTest, RanksThatWaitForEachOther) {
  RankReport outside = Called({kBarrier});
  outside.tail.back().ended = true;
  outside.rounds_begun = outside.waits_in_round = 2;
  RankReport inside = Called({kBarrier, AllReduce()});
  inside.rounds_begun = 1;
  inside.awaited = 2;
  inside.idle_ms = 1000;
  const auto of = [&](uint64_t number, Symptom symptom) {
    return Diagnose({.rank = 1, .reports = {outside, inside}}, number, symptom);
  };
  for (const auto& [number, symptom] :
       std::vector<std::pair<uint64_t, Symptom>>{{2, Symptom::kSlow}, {0, Symptom::kOutside}}) {
    const Diagnosis diagnosis = of(number, symptom);
    EXPECT_EQ(diagnosis.kind, Kind::kWaitForEachOther);
    EXPECT_TRUE(diagnosis.fatal());
    EXPECT_EQ(
        diagnosis.text,
        "the ranks wait for each other: rank 1 in #2 allreduce(sum) float32 [1000], which "
        "rank 0 has not called; rank 0 in a Coordinator call (a save, a load, or Agree, "
        "Broadcast, AllGather), which rank 1 has not made. All ranks must make the same calls "
        "in the same order");
  }
  EXPECT_EQ(of(0, Symptom::kSlow).kind, Kind::kNothing);

  // Each of these ends by itself.
  const RankReport before = inside;
  inside.rounds_begun = 2;  // rank 0 is about to see it
  EXPECT_EQ(of(2, Symptom::kSlow).kind, Kind::kMissing);
  inside = before;
  inside.awaited = 0;  // the training thread does something else meanwhile
  EXPECT_EQ(of(2, Symptom::kSlow).kind, Kind::kMissing);
  inside = before;
  inside.idle_ms = 0;  // it has just been called
  EXPECT_EQ(of(0, Symptom::kOutside).kind, Kind::kNothing);
  inside = before;
  outside.aborted = true;  // it waits to tell its failure
  EXPECT_EQ(of(2, Symptom::kSlow).kind, Kind::kAborted);
  EXPECT_EQ(of(0, Symptom::kOutside).kind, Kind::kNothing);
  outside.aborted = false;
  outside.waits_in_round = 0;  // another thread does
  EXPECT_EQ(of(2, Symptom::kSlow).kind, Kind::kMissing);
}

TEST(DiagnoseTest, ARankWhoseWorkHasEnded) {
  RankReport ended = Called({kBarrier});
  ended.tail.back().ended = true;
  ended.has_ended = true;
  const RankReport waiting = Called({kBarrier, AllReduce()});
  const Diagnosis diagnosis =
      Diagnose({.rank = 1, .reports = {ended, waiting, waiting}}, 2, Symptom::kSlow);
  EXPECT_EQ(diagnosis.kind, Kind::kWaitForEachOther);
  EXPECT_EQ(
      diagnosis.text,
      "the ranks wait for each other: rank 1 in #2 allreduce(sum) float32 [1000], which rank 0 "
      "has not called and will not: its work has ended. Give all ranks equally many batches, "
      "or use Join");
  // It has done its part, and the others are slow.
  EXPECT_EQ(Diagnose({.rank = 1, .reports = {ended, ended}}, 1, Symptom::kSlow).kind,
            Kind::kNothing);
}

TEST(DiagnoseTest, TheFirstMismatchCounts) {
  const RankReport one = Called({AllReduce(), Broadcast(), kBarrier});
  const RankReport other = Called({Broadcast(), AllReduce(), kBarrier});
  const Diagnosis diagnosis = Diagnose({.reports = {one, other}}, 3, Symptom::kSlow);
  EXPECT_EQ(
      diagnosis.text,
      "the ranks do not make the same call: rank 0: #1 allreduce(sum) float32 [1000]; rank 1: "
      "#1 broadcast(root 0) float32 [1000]");
}

TEST(DiagnoseTest, AMismatchOlderThanTheTailsIsFound) {
  RankReport one = Called({AllReduce(), kBarrier, kBarrier});
  RankReport other = Called({Broadcast(), kBarrier, kBarrier});
  one.tail.erase(one.tail.begin());
  other.tail.erase(other.tail.begin());
  const Diagnosis diagnosis = Diagnose({.reports = {one, other}}, 3, Symptom::kSlow);
  EXPECT_EQ(diagnosis.kind, Kind::kMismatch);
  EXPECT_TRUE(absl::StrContains(diagnosis.text, "since an earlier collective")) << diagnosis.text;
}

TEST(DiagnoseTest, ARankThatIsBehindIsNoMismatch) {
  RankReport ahead = Called({kBarrier, AllReduce()});
  RankReport behind = Called({kBarrier});
  behind.tail[0].ended = true;
  behind.idle_ms = 31'040;
  const Diagnosis diagnosis =
      Diagnose({.rank = 0, .reports = {ahead, behind, ahead, std::nullopt}}, 2, Symptom::kSlow);
  EXPECT_EQ(diagnosis.kind, Kind::kMissing);
  EXPECT_FALSE(diagnosis.fatal());
  EXPECT_EQ(diagnosis.text,
            "reached by ranks 0, 2; not by rank 1 (last call #1 barrier, 31s ago), rank 3 (has not "
            "reported since the group was created)");
}

TEST(DiagnoseTest, AMissingRankIsSlowOrUnresponsiveOrNew) {
  const RankReport ahead = Called({kBarrier, AllReduce()});
  GroupStatus status{.rank = 0, .reports = {ahead, Called({kBarrier}), Called({})}};
  EXPECT_EQ(Diagnose(status, 2, Symptom::kSlow).text,
            "reached by rank 0; not by rank 1 (last call #1 barrier, 0 ago and still under way), "
            "rank 2 (no call yet)");
  status.unresponsive = {1, 2};
  EXPECT_EQ(Diagnose(status, 2, Symptom::kSlow).text,
            "reached by rank 0; not by rank 1 (does not answer; last seen at #1 barrier), rank 2 "
            "(does not answer)");
}

TEST(DiagnoseTest, AllRanksHaveCalledIt) {
  const RankReport report = Called({AllReduce()});
  const Diagnosis diagnosis = Diagnose({.reports = {report, report}}, 1, Symptom::kSlow);
  EXPECT_EQ(diagnosis.kind, Kind::kNothing);
  EXPECT_TRUE(absl::StrContains(diagnosis.text, "all ranks have called it")) << diagnosis.text;
}

TEST(DiagnoseTest, DeadRanksAreNamedWithTheirLastCall) {
  const RankReport report = Called({kBarrier, AllReduce()});
  RankReport victim = Called({kBarrier});
  victim.process = "4711@5";
  const Diagnosis diagnosis =
      Diagnose({.rank = 0, .reports = {report, report, victim}, .dead = {2}}, 2, Symptom::kFailed);
  EXPECT_EQ(diagnosis.kind, Kind::kDead);
  EXPECT_EQ(
      diagnosis.text,
      "Connection closed by peer: rank 2 has died (process 4711); it was last seen at #1 barrier");
}

TEST(DiagnoseTest, AnAbortIsTheCauseThoughAllRanksHaveMadeTheCall) {
  const RankReport report = Called({kBarrier, AllReduce()});
  RankReport gone = report;
  gone.left = true;
  EXPECT_FALSE(Diagnose({.reports = {report, gone}}, 2, Symptom::kSlow).fatal());
  gone.aborted = true;
  for (const Symptom symptom : {Symptom::kSlow, Symptom::kFailed}) {
    const Diagnosis diagnosis = Diagnose({.reports = {report, gone}}, 2, symptom);
    EXPECT_EQ(diagnosis.kind, Kind::kAborted);
    EXPECT_TRUE(diagnosis.fatal());
    EXPECT_EQ(diagnosis.text,
              "Connection closed by peer: rank 1 has aborted the group after #2 allreduce(sum) "
              "float32 [1000]");
  }
  // An abort of its own explains nothing to a rank.
  EXPECT_FALSE(Diagnose({.rank = 1, .reports = {report, gone}}, 2, Symptom::kSlow).fatal());
}

TEST(DiagnoseTest, ARankThatLeftIsTheCauseForLaterCollectivesOnly) {
  const RankReport report = Called({kBarrier, AllReduce()});
  RankReport gone = Called({kBarrier});
  gone.left = true;
  GroupStatus status{.rank = 0, .reports = {report, gone}};
  Diagnosis diagnosis = Diagnose(status, 2, Symptom::kSlow);
  EXPECT_EQ(diagnosis.kind, Kind::kLeft);
  EXPECT_EQ(diagnosis.text, "Connection closed by peer: rank 1 left the group after #1 barrier");
  status.dead = {1};  // its process has ended, too: the same diagnosis
  diagnosis = Diagnose(status, 2, Symptom::kSlow);
  EXPECT_EQ(diagnosis.text,
            "Connection closed by peer: rank 1 left the group after #1 barrier, and its process "
            "has ended");

  // It has called this one.
  EXPECT_EQ(Diagnose(status, 1, Symptom::kSlow).kind, Kind::kNothing);
  // No collective is waited for.
  EXPECT_EQ(Diagnose(status, 0, Symptom::kSlow).kind, Kind::kNothing);
  // A message may have needed it.
  EXPECT_EQ(Diagnose(status, 0, Symptom::kFailed).kind, Kind::kDead);
}

TEST(DiagnoseTest, AfterAFailureUnresponsiveAndFailedRanksAreReported) {
  const RankReport report = Called({AllReduce()});
  RankReport failed = report;
  failed.failure = "#1 allreduce(sum) float32 [1000]: no space left";
  GroupStatus status{.rank = 0, .reports = {report, failed, report}, .unresponsive = {2}};
  EXPECT_EQ(Diagnose(status, 1, Symptom::kFailed).kind, Kind::kUnresponsive);
  EXPECT_EQ(Diagnose(status, 1, Symptom::kSlow).kind, Kind::kNothing);
  status.unresponsive.clear();
  const Diagnosis diagnosis = Diagnose(status, 1, Symptom::kFailed);
  EXPECT_EQ(diagnosis.kind, Kind::kFailed);
  EXPECT_EQ(diagnosis.text, "rank 1 has failed: #1 allreduce(sum) float32 [1000]: no space left");
  EXPECT_FALSE(diagnosis.fatal());
}

TEST(DiagnoseTest, SignaturesAreComparedWhereBothAreKnown) {
  Recorder mine({.acquire = [](void*) {}, .release = [](void*) {}});
  for (int i = 0; i < 5; ++i) mine.Begin(AllReduce());
  RankReport theirs = Called({AllReduce(), AllReduce(), AllReduce()});
  EXPECT_FALSE(SignaturesDiffer(mine, theirs));
  theirs = Called({AllReduce(), AllReduce(), AllReduce(7)});
  EXPECT_TRUE(SignaturesDiffer(mine, theirs));
  // They are ahead of us: signatures at their last mark are compared instead.
  theirs = Called(std::vector<CallRecord>(9, Broadcast()));
  EXPECT_FALSE(SignaturesDiffer(mine, theirs));
  theirs.mark = 4;
  theirs.mark_signature = *mine.SignatureAt(4);
  EXPECT_FALSE(SignaturesDiffer(mine, theirs));
  ++theirs.mark_signature;
  EXPECT_TRUE(SignaturesDiffer(mine, theirs));
}

}  // namespace
}  // namespace ddp::backends::watch
