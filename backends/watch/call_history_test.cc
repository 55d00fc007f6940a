#include "backends/watch/call_history.h"

#include "c10/util/intrusive_ptr.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace ddp::backends::watch {
namespace {

class FakeWork final : public c10d::Work {
 public:
  void Complete() { finish(); }
  void abort() override {
    ++aborts;
    if (abort_fails) throw std::runtime_error("not supported");
  }

  int aborts = 0;
  bool abort_fails = false;
};

constexpr CallRecord kBarrier = {.kind = CollectiveKind::kBarrier};
constexpr CallRecord kReceive = {.root = 1, .kind = CollectiveKind::kRecv};

struct Call {
  uint64_t number;
  c10::intrusive_ptr<FakeWork> work = c10::make_intrusive<FakeWork>();
};

Call Begin(Recorder& recorder, const CallRecord& record) {
  Call call{recorder.Begin(record)};
  recorder.Attach(call.number, call.work.get());
  return call;
}

TEST(CallHistoryTest, TheOldestCollectiveIsTheFirstThatHasNotCompleted) {
  CallHistory history(2);
  EXPECT_FALSE(history.OldestCollective());
  const Call first = Begin(history.collectives(), kBarrier);
  const Call second = Begin(history.collectives(), kBarrier);
  ASSERT_TRUE(history.OldestCollective());
  EXPECT_EQ(history.OldestCollective()->number, first.number);
  EXPECT_EQ(history.OldestCollective()->record, kBarrier);
  first.work->Complete();
  EXPECT_EQ(history.OldestCollective()->number, second.number);
  EXPECT_TRUE(history.collectives().Tail(2)[0].ended);
  second.work->Complete();
  EXPECT_FALSE(history.OldestCollective());
  EXPECT_EQ(first.work.use_count(), 1) << "no reference leaks";
}

// A Work of a message in Gloo learns of its completion only in wait().
TEST(CallHistoryTest, OnlyMessagesThatAThreadWaitsForCount) {
  CallHistory history(2);
  const Call call = Begin(history.messages(), kReceive);
  EXPECT_FALSE(history.OldestMessage());
  history.messages().SetAwaited(call.number);
  ASSERT_TRUE(history.OldestMessage());
  EXPECT_EQ(history.OldestMessage()->record, kReceive);
  EXPECT_FALSE(history.OldestCollective());
  call.work->Complete();
  EXPECT_FALSE(history.OldestMessage());
}

TEST(CallHistoryTest, AbortsPendingMessagesOnly) {
  CallHistory history(2);
  const Call failing = Begin(history.messages(), kReceive);
  failing.work->abort_fails = true;
  const Call message = Begin(history.messages(), kReceive);
  const Call ended = Begin(history.messages(), kReceive);
  history.messages().End(ended.number);
  const Call collective = Begin(history.collectives(), kBarrier);
  history.AbortMessages();
  EXPECT_EQ(failing.work->aborts, 1);
  EXPECT_EQ(message.work->aborts, 1);
  EXPECT_EQ(ended.work->aborts, 0);
  EXPECT_EQ(collective.work->aborts, 0);
  EXPECT_EQ(failing.work.use_count(), 1);
}

TEST(CallHistoryTest, CountsMessagesByRank) {
  CallHistory history(2);
  history.CountMessage(/*sent=*/true, 1);
  history.CountMessage(/*sent=*/true, 1);
  history.CountMessage(/*sent=*/false, 0);
  history.CountMessage(/*sent=*/true, 2);
  history.CountMessage(/*sent=*/true, kNoRoot);
  EXPECT_EQ(history.sent(1), 2);
  EXPECT_EQ(history.sent(0), 0);
  EXPECT_EQ(history.received(0), 1);
  EXPECT_EQ(history.received(1), 0);
}

}  // namespace
}  // namespace ddp::backends::watch
