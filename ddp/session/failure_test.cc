// Session::ShareFailure: one rank fails while the others communicate; all return its error.
//
// The timeout of collectives is an hour, so a rank that does not learn of the failure hangs.

#include <cstdlib>
#include <functional>
#include <latch>
#include <string>
#include <vector>

#include "ATen/ops/ones.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "backends/conformance/rank_threads.h"
#include "ddp/collective_status.h"
#include "ddp/session/session.h"
#include "gtest/gtest.h"

namespace ddp::session {
namespace {

constexpr int kRanks = 3;

void AllReduce(const Session& session) {
  std::vector<at::Tensor> tensors = {at::ones({4})};
  session.process_group()->allreduce(tensors)->wait();
}

// Runs `body` as Run does, on ranks as threads, and returns the error of each. Then calls `after`.
std::vector<absl::Status> ErrorsOf(
    const std::function<absl::Status(const Session&)>& body,
    const std::function<void(const Session&)>& after = [](const Session&) {}) {
  std::vector<absl::Status> errors(kRanks);
  const char* backend = std::getenv("DDP_TEST_BACKEND");
  backends::RunRankThreads(
      kRanks, backend ? backend : "gloo",
      [&](const launchers::Rank& rank, const backends::Group& group) {
        const Session session(rank, group, c10::Device(c10::kCPU));
        errors[rank.rank] =
            session.ShareFailure(CatchCollective("", [&] { return body(session); }));
        after(session);
      },
      absl::Hours(1));
  return errors;
}

// The rank that fails; rank 0 serves the store.
class ShareFailureTest : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, ShareFailureTest, testing::Values(0, 1, 2));

TEST_P(ShareFailureTest, ReachesRanksInACollective) {
  for (const absl::Status& error : ErrorsOf([&](const Session& session) -> absl::Status {
         AllReduce(session);
         if (session.rank() == GetParam()) return absl::NotFoundError("no file");
         AllReduce(session);
         return absl::OkStatus();
       })) {
    EXPECT_EQ(error.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(error.message(), absl::StrCat("rank ", GetParam(), ": no file"));
    EXPECT_TRUE(WasAnnounced(error));
  }
}

TEST_P(ShareFailureTest, ReachesRanksInACoordinatorCall) {
  for (const absl::Status& error : ErrorsOf([&](const Session& session) -> absl::Status {
         if (session.rank() == GetParam()) return absl::NotFoundError("no file");
         return session.AllGather("bytes").status();
       })) {
    EXPECT_EQ(error.message(), absl::StrCat("rank ", GetParam(), ": no file"));
    EXPECT_TRUE(WasAnnounced(error));
  }
}

// A body that converts c10d's exceptions by itself, without CatchCollective's mark.
TEST_P(ShareFailureTest, IsNotHiddenByItsConsequences) {
  for (const absl::Status& error : ErrorsOf([&](const Session& session) -> absl::Status {
         if (session.rank() == GetParam()) return absl::NotFoundError("no file");
         try {
           AllReduce(session);
         } catch (const std::exception&) {
           return absl::UnavailableError("the all-reduce has failed");
         }
         return absl::OkStatus();
       })) {
    EXPECT_EQ(error.message(), absl::StrCat("rank ", GetParam(), ": no file"));
  }
}

// The rank in the collective learns of the failure, but not which it was.
TEST(ShareFailureAloneTest, NoRankWaitsForOneThatWorksAlone) {
  std::latch others(kRanks - 1);
  const absl::Time begin = absl::Now();
  const std::vector<absl::Status> errors = ErrorsOf(
      [&](const Session& session) -> absl::Status {
        if (session.rank() == 0) {
          others.wait();
          return absl::OkStatus();
        }
        if (session.rank() == 1) return absl::NotFoundError("no file");
        AllReduce(session);
        return absl::OkStatus();
      },
      [&](const Session& session) {
        if (session.rank() != 0) others.count_down();
      });
  EXPECT_LT(absl::Now() - begin, absl::Minutes(5));  // not the half hour of work_timeout
  EXPECT_EQ(errors[0], absl::OkStatus());
  EXPECT_EQ(errors[1].message(), "no file");
  EXPECT_FALSE(errors[2].ok());
  EXPECT_FALSE(WasAnnounced(errors[2]));
}

// All ranks know it already: nothing is waited for, and nothing is printed twice.
TEST(ShareFailureAgainTest, ReturnsWhatACoordinatorCallHasReturned) {
  for (const absl::Status& error : ErrorsOf([&](const Session& session) -> absl::Status {
         const bool fails = session.rank() == 1;
         const absl::Status agreed =
             session.Agree(fails ? absl::NotFoundError("no file") : absl::OkStatus());
         // The process group still works, and no rank aborts it.
         AllReduce(session);
         return agreed;
       })) {
    EXPECT_EQ(error.message(), "rank 1: no file");
  }
}

}  // namespace
}  // namespace ddp::session
