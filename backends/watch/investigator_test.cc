#include "backends/watch/investigator.h"

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "backends/watch/probe.h"
#include "backends/watch/report_store.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

namespace ddp::backends::watch {
namespace {

using absl::StrContains;
using Detail = StatusExchange::Detail;
using Kind = Diagnosis::Kind;

constexpr CallRecord kBarrier = {.kind = CollectiveKind::kBarrier};
constexpr CallRecord kBroadcast = {.root = 0, .kind = CollectiveKind::kBroadcast};
constexpr absl::Duration kTimeout = absl::Seconds(20);  // does not pass if all ranks answer

struct Rank {
  Rank(int rank, const c10::intrusive_ptr<c10d::Store>& store, const std::string& host = "host")
      : options{.rank = rank, .size = 2, .store = store, .host = host} {
    exchange.Publish(Detail::kLastCall);
  }

  WatchdogOptions options;
  CallHistory history{2};
  GroupState state{nullptr, nullptr};
  LivenessMonitor liveness{options};
  StatusExchange exchange{options, history, state, liveness};
  Investigator investigator{options, state, liveness, exchange};
};

class InvestigatorTest : public testing::Test {
 protected:
  // Investigates on rank 0 while rank 1 answers status requests.
  Diagnosis Investigate(uint64_t number, Symptom symptom) {
    std::thread other([&] {
      while (b_.exchange.answered_request() == 0) b_.exchange.AnswerRequests();
    });
    const Diagnosis diagnosis = a_.investigator.Investigate(number, symptom, kTimeout);
    other.join();
    return diagnosis;
  }

  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  Rank a_{0, store_};
  Rank b_{1, store_};
};

TEST_F(InvestigatorTest, AMismatchAbortsTheGroupOnAllRanks) {
  a_.history.collectives().Begin(kBarrier);
  b_.history.collectives().Begin(kBroadcast);
  const Diagnosis diagnosis = Investigate(1, Symptom::kSlow);
  EXPECT_EQ(diagnosis.kind, Kind::kMismatch);
  EXPECT_EQ(a_.state.abort_reason(), diagnosis.text);
  b_.exchange.AnswerRequests();
  EXPECT_EQ(b_.state.abort_reason(), diagnosis.text);
  EXPECT_EQ(a_.investigator.Investigate(1, Symptom::kSlow, kTimeout).kind, Kind::kNothing);
}

TEST_F(InvestigatorTest, AMissingRankIsNotFatal) {
  a_.history.collectives().Begin(kBarrier);
  const Diagnosis diagnosis = Investigate(1, Symptom::kSlow);
  EXPECT_EQ(diagnosis.kind, Kind::kMissing);
  EXPECT_EQ(diagnosis.text, "reached by rank 0; not by rank 1 (no call yet)");
  EXPECT_FALSE(a_.state.aborted());
}

TEST_F(InvestigatorTest, ARankThatDoesNotAnswerIsUnresponsiveAfterTheTimeout) {
  const Diagnosis diagnosis =
      a_.investigator.Investigate(0, Symptom::kFailed, absl::Milliseconds(50));
  EXPECT_EQ(diagnosis.kind, Kind::kUnresponsive);
  EXPECT_TRUE(StrContains(diagnosis.text, "rank 1 does not answer")) << diagnosis.text;
  EXPECT_FALSE(a_.state.aborted());
}

// Two containers that share a network: a loopback address leads from one to the other.
constexpr char kHere[] = "boot/net:[1]/pid:[1]", kThere[] = "boot/net:[1]/pid:[2]";

// Rank 0 investigates; a probe of rank 1 was refused after it was found alive.
class RefusedProbeTest : public testing::Test {
 protected:
  RefusedProbeTest() {
    std::unique_ptr<ProbeListener> listener = std::move(ProbeListener::Open("127.0.0.1")).value();
    report_ = {.host = kThere, .process = "1@1", .probe_address = listener->address()};
    there_.Publish(1, report_);
    here_.liveness.Learn(here_.exchange.store().ReadAll());
    Peers& peers = here_.liveness.peers();
    peers.Probe({1});
    EXPECT_TRUE(peers.Unverified().empty());  // it was found alive
    listener.reset();
    while (peers.refused().empty()) {
      peers.Probe({1});
      std::this_thread::yield();
    }
  }
  // Rank 1 answers the next status request.
  void Answer() {
    while (there_.LatestRequest() == 0) std::this_thread::yield();
    report_.answered_request = there_.LatestRequest();
    there_.Publish(1, report_);
  }

  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  Rank here_{0, store_, kHere};
  ReportStore there_{store_, 2};
  RankReport report_;
};

TEST_F(RefusedProbeTest, WhoAnswersIsNotDead) {
  here_.history.collectives().Begin(kBarrier);
  std::thread answer([&] { Answer(); });
  const Diagnosis diagnosis = here_.investigator.Investigate(1, Symptom::kSlow, kTimeout);
  answer.join();
  EXPECT_EQ(diagnosis.kind, Kind::kMissing) << diagnosis.text;
  EXPECT_TRUE(here_.liveness.peers().Dead().empty());
}

TEST_F(RefusedProbeTest, WhoAnswersIsNoneOfTheDeadRanks) {
  std::thread answer([&] { Answer(); });
  EXPECT_EQ(here_.investigator.FindDeadRanks(kTimeout), std::set<int>());
  answer.join();
}

TEST_F(RefusedProbeTest, WhoDoesNotAnswerIsOneOfTheDeadRanks) {
  EXPECT_EQ(here_.investigator.FindDeadRanks(absl::Milliseconds(50)), std::set<int>{1});
  EXPECT_FALSE(here_.state.aborted());
}

TEST_F(RefusedProbeTest, AFailedCallEndsTheWaitForASignOfLife) {
  std::thread caller([&] { here_.state.Explain("#1 barrier", "closed", 1); });
  while (!here_.state.has_failed_calls()) std::this_thread::yield();
  EXPECT_EQ(here_.investigator.FindDeadRanks(absl::Hours(1)), std::nullopt);
  here_.investigator.ExplainFailedCalls();
  caller.join();
}

TEST_F(InvestigatorTest, ExplainsFailedCalls) {
  a_.history.collectives().Begin(kBarrier);
  b_.state.RequestStop();
  b_.exchange.Leave();
  std::string reason;
  std::thread caller([&] { reason = a_.state.Explain("#1 barrier", "closed", 1); });
  while (!a_.state.has_failed_calls()) std::this_thread::yield();
  a_.investigator.ExplainFailedCalls();
  caller.join();
  EXPECT_EQ(reason, "Connection closed by peer: rank 1 left the group before its first collective");
  a_.investigator.ExplainFailedCalls();  // there is none
}

}  // namespace
}  // namespace ddp::backends::watch
