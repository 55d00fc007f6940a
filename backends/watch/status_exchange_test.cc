#include "backends/watch/status_exchange.h"

#include <map>

#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

namespace ddp::backends::watch {
namespace {

using Detail = StatusExchange::Detail;

constexpr CallRecord kBarrier = {.kind = CollectiveKind::kBarrier};

struct Rank {
  Rank(int rank, const c10::intrusive_ptr<c10d::Store>& store)
      : options{.rank = rank, .size = 2, .store = store, .host = "host"} {}

  WatchdogOptions options;
  CallHistory history{2};
  GroupState state{nullptr, nullptr};
  LivenessMonitor liveness{options};
  StatusExchange exchange{options, history, state, liveness};
};

class StatusExchangeTest : public testing::Test {
 protected:
  RankReport Read(int rank) { return ReportStore(store_, 2).ReadAll()[rank].value(); }

  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  Rank a_{0, store_};
  Rank b_{1, store_};
};

TEST_F(StatusExchangeTest, PublishesTheLastCallAndOnRequestAll) {
  for (int i = 0; i < 3; ++i) a_.history.collectives().Begin(kBarrier);
  a_.history.CountMessage(/*sent=*/true, 1);
  a_.exchange.Publish(Detail::kLastCall);
  EXPECT_EQ(Read(0).count, 3);
  EXPECT_EQ(Read(0).tail.size(), 1);
  EXPECT_TRUE(Read(0).sent.empty());
  a_.exchange.Publish(Detail::kAllCalls);
  EXPECT_EQ(Read(0).tail.size(), 3);
  EXPECT_EQ(Read(0).sent, (std::map<int, uint64_t>{{1, 1}}));
  EXPECT_EQ(Read(0).host, "host");
  EXPECT_FALSE(Read(0).left);
}

TEST_F(StatusExchangeTest, AStallIsReportedOnceAndTheStoreKeepsTheLastOnly) {
  int64_t keys = 0;
  for (uint64_t number = 1; number <= 100; ++number) {
    EXPECT_TRUE(a_.exchange.store().ClaimStallReport(number, 0));
    EXPECT_FALSE(b_.exchange.store().ClaimStallReport(number, 1));
    EXPECT_TRUE(a_.exchange.store().ClaimStallReport(number, 0));
    if (number == 10) keys = store_->getNumKeys();
  }
  EXPECT_EQ(store_->getNumKeys(), keys);
}

TEST_F(StatusExchangeTest, AHeartbeatPublishesWhatIsNew) {
  EXPECT_TRUE(a_.exchange.HeartbeatDue());
  EXPECT_FALSE(a_.exchange.Heartbeat());
  EXPECT_FALSE(a_.exchange.HeartbeatDue());
  EXPECT_FALSE(ReportStore(store_, 2).ReadAll()[0]) << "nothing has changed";
  a_.history.collectives().Begin(kBarrier);
  EXPECT_FALSE(a_.exchange.Heartbeat()) << "not observed yet";
  a_.exchange.ObserveCalls();
  EXPECT_TRUE(a_.exchange.Heartbeat());
  EXPECT_EQ(Read(0).count, 1);
  EXPECT_FALSE(a_.exchange.Heartbeat());
}

TEST_F(StatusExchangeTest, ARequestIsAnsweredByAllRanks) {
  EXPECT_EQ(a_.exchange.answered_request(), 0);
  a_.exchange.RequestStatus(/*reuse_recent=*/true);
  EXPECT_EQ(a_.exchange.answered_request(), 1);
  EXPECT_EQ(Read(0).answered_request, 1);
  b_.exchange.AnswerRequests();
  EXPECT_EQ(Read(1).answered_request, 1);
  b_.exchange.RequestStatus(/*reuse_recent=*/true);
  EXPECT_EQ(b_.exchange.answered_request(), 1) << "the request of a moment ago is reused";
  b_.exchange.RequestStatus(/*reuse_recent=*/false);
  EXPECT_EQ(b_.exchange.answered_request(), 2);
}

TEST_F(StatusExchangeTest, AnAbortReachesTheOtherRanks) {
  EXPECT_EQ(a_.exchange.store().SetAbortReason("rank 2 has died"), "rank 2 has died");
  EXPECT_EQ(b_.exchange.store().SetAbortReason("another reason"), "rank 2 has died");
  b_.exchange.Heartbeat();
  EXPECT_EQ(b_.state.abort_reason(), "rank 2 has died");
  EXPECT_EQ(Read(1).answered_request, b_.exchange.answered_request());
}

TEST_F(StatusExchangeTest, DiscoveryEndsWhenAllHavePublished) {
  a_.exchange.Publish(Detail::kLastCall);
  a_.exchange.Heartbeat();
  EXPECT_TRUE(a_.exchange.IsDiscovering());
  b_.exchange.Publish(Detail::kLastCall);
  a_.exchange.Heartbeat();
  EXPECT_FALSE(a_.exchange.IsDiscovering());
}

TEST_F(StatusExchangeTest, LeavingIsPublished) {
  b_.state.RequestStop();
  b_.exchange.Leave();
  EXPECT_TRUE(Read(1).left);
}

}  // namespace
}  // namespace ddp::backends::watch
