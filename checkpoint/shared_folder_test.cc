#include "checkpoint/shared_folder.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/coordinator.h"
#include "base/coordinator_testing.h"
#include "base/file.h"
#include "base/file_faults.h"
#include "checkpoint/outcomes.h"

namespace ddp::checkpoint {
namespace {

std::string Folder(const std::string& name) {
  const std::string path = absl::StrCat(testing::TempDir(), "/shared_folder_test_", name);
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

// Of three ranks with these folders; the same on all.
absl::Status Prove(const std::vector<std::string>& folders, absl::Duration limit,
                   FileSystem* files_of_rank_0 = FileSystem::Default()) {
  std::vector<absl::Status> results(folders.size());
  RunCoordinatedRanks(static_cast<int>(folders.size()), [&](const Coordinator& ranks) {
    const size_t rank = static_cast<size_t>(ranks.rank());
    SharedFolderOptions options{.limit = limit};
    if (rank == 0) options.files = files_of_rank_0;
    results[rank] = ProveShared(folders[rank], ranks, options);
  });
  for (const absl::Status& result : results) EXPECT_EQ(result, results[0]);
  return results[0];
}

TEST(SharedFolderTest, OneFolderForAll) {
  const std::string folder = Folder("one");
  EXPECT_TRUE(Prove({folder, folder, folder}, absl::Seconds(10)).ok());
  // Two spellings of one.
  EXPECT_TRUE(Prove({folder, folder + "/.", folder}, absl::Seconds(10)).ok());
  EXPECT_TRUE(Prove({folder}, absl::ZeroDuration()).ok());
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

TEST(SharedFolderTest, ARankWithAFolderOfItsOwnIsNamed) {
  const std::string shared = Folder("shared");
  const std::string own = Folder("own");
  for (size_t bad : {1, 2}) {
    std::vector<std::string> folders(3, shared);
    folders[bad] = own;
    const absl::Status status = Prove(folders, absl::Milliseconds(20));
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(absl::StartsWith(status.message(), absl::StrCat("rank ", bad, ": "))) << status;
    for (const std::string& part : {shared, own, std::string("on host ")}) {
      EXPECT_TRUE(absl::StrContains(status.message(), part)) << status;
    }
  }
  EXPECT_TRUE(std::filesystem::is_empty(shared));
}

// Stands for an NFS client that does not see rank 0's file at once: here the rank's folder is a
// link that leads to rank 0's a while later.
TEST(SharedFolderTest, ARankThatSeesItLaterWaits) {
  const std::string shared = Folder("late");
  const std::string link = absl::StrCat(testing::TempDir(), "/shared_folder_test_link");
  std::filesystem::remove(link);
  std::thread later([&] {
    // Once rank 0 has written its file.
    while (std::filesystem::is_empty(shared)) std::this_thread::yield();
    std::filesystem::create_directory_symlink(shared, link);
  });
  EXPECT_TRUE(Prove({shared, link, shared}, absl::Seconds(60)).ok());
  later.join();
}

TEST(SharedFolderTest, Rank0CannotWrite) {
  const std::string folder = Folder("full");
  FaultyFileSystem files({.call = "write", .nth = 1, .error = ENOSPC});
  const absl::Status status = Prove({folder, folder, folder}, absl::Seconds(10), &files);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_TRUE(absl::StartsWith(status.message(), "rank 0: ")) << status;
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

TEST(OutcomesTest, OfEachRank) {
  RunCoordinatedRanks(3, [](const Coordinator& ranks) {
    absl::StatusOr<std::string> mine = absl::StrCat("value\n", ranks.rank());
    if (ranks.rank() > 0) mine = absl::DataLossError(absl::StrCat("torn ", ranks.rank()));
    const Outcomes outcomes = GatherOutcomes(ranks, mine).value();
    ASSERT_EQ(outcomes.size(), 3u);
    EXPECT_EQ(outcomes[0].value(), "value\n0");
    EXPECT_EQ(outcomes[2].status(), absl::DataLossError("torn 2"));
    EXPECT_EQ(FirstFailure(outcomes), absl::DataLossError("rank 1: torn 1"));
    EXPECT_EQ(FirstFailure(GatherOutcomes(ranks, "").value()), absl::OkStatus());
  });
  const SingleRank alone;
  EXPECT_EQ(FirstFailure(GatherOutcomes(alone, absl::DataLossError("torn")).value()),
            absl::DataLossError("torn"));
  // What they have agreed on before.
  EXPECT_EQ(
      FirstFailure({absl::DataLossError("rank 1: torn"), absl::DataLossError("rank 1: torn")}),
      absl::DataLossError("rank 1: torn"));
  EXPECT_EQ(FirstFailure({absl::DataLossError("torn"), absl::DataLossError("torn")}),
            absl::DataLossError("rank 0: torn"));
  // A rank that has gone: the ranks could not be asked.
  RunCoordinatedRanks(2, [](const Coordinator& ranks) {
    if (ranks.rank() == 1) return;
    EXPECT_FALSE(GatherOutcomes(ranks, "").ok());
  });
}

// As the ranks that it has, but for their announcements, which RestoreTest sees.
TEST(TryingRanksTest, AgreeAsTheRanks) {
  RunCoordinatedRanks(3, [](const Coordinator& ranks) {
    const TryingRanks trying(ranks);
    const bool is_second = ranks.rank() == 1;
    EXPECT_EQ(trying.Agree(absl::OkStatus()), absl::OkStatus());
    absl::Status mine = is_second ? absl::DataLossError("torn") : absl::OkStatus();
    if (is_second) mine.SetPayload("key", absl::Cord("1"));
    const absl::Status agreed = trying.Agree(mine);
    EXPECT_EQ(agreed.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(agreed.message(), "rank 1: torn");
    EXPECT_EQ(agreed.GetPayload("key").has_value(), is_second);
    EXPECT_EQ(trying.Agree(agreed).message(), "rank 1: torn");
    EXPECT_EQ(trying.Broadcast(absl::StrCat("of ", ranks.rank())).value(), "of 0");
    EXPECT_EQ(trying
                  .Broadcast(absl::StatusOr<std::string>(mine.ok() ? absl::StatusOr<std::string>("")
                                                                   : mine))
                  .status()
                  .message(),
              "rank 1: torn");
    EXPECT_EQ(trying.AllGather("x").value().size(), 3u);
  });
}

}  // namespace
}  // namespace ddp::checkpoint
