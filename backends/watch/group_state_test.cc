#include "backends/watch/group_state.h"

#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace ddp::backends::watch {
namespace {

TEST(GroupStateTest, AbortsOnceInOrderWithTheFirstReason) {
  std::vector<std::string> calls;
  GroupState state([&] { calls.push_back("messages"); }, [&] { calls.push_back("backend"); });
  state.OnAbort([&] { calls.push_back("callback"); });
  state.RemoveCallback(state.OnAbort([&] { calls.push_back("removed"); }));
  EXPECT_FALSE(state.aborted());
  EXPECT_EQ(state.abort_reason(), "");
  state.AbortGroup("rank 2 has died");
  state.AbortGroup("another reason");
  EXPECT_TRUE(state.aborted());
  EXPECT_EQ(state.abort_reason(), "rank 2 has died");
  EXPECT_EQ(calls, (std::vector<std::string>{"callback", "messages", "backend"}));
  EXPECT_EQ(state.OnAbort([&] { calls.push_back("late"); }), 0);
  EXPECT_EQ(calls.back(), "late");
}

TEST(GroupStateTest, ACallbackMayUseTheState) {
  GroupState state(nullptr, nullptr);
  std::string reason;
  state.OnAbort([&] { reason = state.abort_reason(); });
  state.AbortGroup("rank 2 has died");
  EXPECT_EQ(reason, "rank 2 has died");
}

TEST(GroupStateTest, AReleasedBackendIsNotAborted) {
  int messages = 0, backend = 0;
  GroupState state([&] { ++messages; }, [&] { ++backend; });
  state.ReleaseBackend();
  state.AbortGroup("aborted");
  EXPECT_EQ(messages, 1);
  EXPECT_EQ(backend, 0);
}

// What the watchdog's thread does.
void ExplainNext(GroupState& state, const std::string& explanation) {
  std::vector<std::shared_ptr<GroupState::FailedCall>> calls;
  while (calls.empty()) {
    state.AwaitWork(absl::Seconds(1));
    calls = state.TakeFailedCalls();
  }
  state.SetExplanation(calls, explanation);
}

TEST(GroupStateTest, AFailedCallWaitsForItsExplanation) {
  GroupState state(nullptr, nullptr);
  std::thread message([&] { ExplainNext(state, "rank 1 has left"); });
  EXPECT_EQ(state.Explain("recv", "closed", /*number=*/0), "rank 1 has left");
  message.join();
  EXPECT_EQ(state.first_failure(), "") << "of collectives only";
  for (const std::string call : {"#17 barrier", "#18 barrier"}) {
    std::thread thread([&] { ExplainNext(state, ""); });
    EXPECT_EQ(state.Explain(call, "closed", /*number=*/17), "");
    thread.join();
  }
  EXPECT_EQ(state.first_failure(), "#17 barrier: closed");
  EXPECT_FALSE(state.has_failed_calls());
}

TEST(GroupStateTest, AnAbortExplainsFailedCalls) {
  GroupState state(nullptr, nullptr);
  std::thread thread([&] {
    while (!state.has_failed_calls()) std::this_thread::yield();
    state.AbortGroup("rank 2 has died");
  });
  EXPECT_EQ(state.Explain("#17 barrier", "closed", 17), "rank 2 has died");
  thread.join();
  EXPECT_EQ(state.Explain("#18 barrier", "closed", 18), "rank 2 has died");
}

TEST(GroupStateTest, DeadRanksAreLookedForOnlyOnRequest) {
  GroupState state(nullptr, nullptr);
  EXPECT_FALSE(state.wants_dead_ranks());
  EXPECT_EQ(state.RequestDeadRanks(), std::set<int>());
  EXPECT_TRUE(state.wants_dead_ranks());
  state.SetDeadRanks({2});
  EXPECT_EQ(state.RequestDeadRanks(), std::set<int>{2});
}

TEST(GroupStateTest, NoCallWaitsForAThreadThatHasEnded) {
  GroupState state(nullptr, nullptr);
  EXPECT_FALSE(state.AwaitThreadEnd(absl::Milliseconds(1)));
  std::thread thread([&] {
    while (!state.has_failed_calls()) std::this_thread::yield();
    EXPECT_TRUE(state.RequestStop());
    EXPECT_FALSE(state.RequestStop());
    state.AwaitWork(absl::Hours(1));
    state.AwaitStop(absl::Hours(1));
    state.SetThreadEnded();
  });
  EXPECT_EQ(state.Explain("#17 barrier", "closed", 17), "");
  EXPECT_TRUE(state.AwaitThreadEnd(absl::Hours(1)));
  thread.join();
  EXPECT_EQ(state.Explain("#18 barrier", "closed", 18), "") << "stopping: does not wait";
}

}  // namespace
}  // namespace ddp::backends::watch
