// The manager with several ranks, as threads, and with a format that all of them write.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/coordinator.h"
#include "base/coordinator_testing.h"
#include "base/file.h"
#include "base/file_faults.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "checkpoint/name.h"
#include "checkpoint/parts.h"
#include "checkpoint/parts_format_testing.h"
#include "checkpoint/state_testing.h"

namespace ddp::checkpoint {
namespace {

constexpr int kRanks = 3;
constexpr int64_t kElements = 10;

// Elements [begin, end) on each rank of a world of `size`; the second has none.
FlatRange RangeOf(int rank, int size) {
  if (size == 1) return {0, kElements};
  const int64_t first = 4;
  if (rank == 0) return {0, first};
  return rank == size - 1 ? FlatRange{first, kElements} : FlatRange{first, first};
}

// The tensor that the parts of all ranks make up.
State Joined(int64_t epoch) {
  State state;
  state.root.insert("epoch", epoch);
  state.root.insert("moment", at::arange(epoch, epoch + kElements, at::kFloat).reshape({2, 5}));
  return state;
}

State PartOf(int64_t epoch, int rank, int size) {
  const FlatRange range = RangeOf(rank, size);
  State state = Joined(epoch);
  const at::Tensor whole = state.root.at("moment").toTensor();
  state.root.insert_or_assign("moment",
                              whole.view({-1}).narrow(0, range.begin, range.end - range.begin));
  state.shards["moment"] = {.global_shape = {2, 5}, .part = range};
  return state;
}

class ManagerRanksTest : public testing::Test {
 protected:
  // One rank's part in a test of a Save.
  struct Rank {
    int rank;
    std::string name = "epoch_1";
    State state;
    SaveOptions options = {};
    FileSystem* files = FileSystem::Default();
  };

  ManagerRanksTest() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ = absl::StrCat(testing::TempDir(), "/manager_ranks_test_", info->name());
    std::filesystem::remove_all(directory_);
  }
  std::string Path(absl::string_view name) const { return absl::StrCat(directory_, "/", name); }
  std::vector<std::string> Names() const { return ListDirectory(directory_).value(); }
  ManagerOptions Options(const std::string& format = "parts") const {
    return {.directory = directory_, .format = format};
  }

  // Saves once on all ranks, after `change`; the one result of all.
  absl::Status Save(int64_t epoch, const std::function<void(Rank&)>& change = nullptr,
                    const std::string& format = "parts", int size = kRanks) {
    std::vector<absl::Status> results(static_cast<size_t>(size));
    RunCoordinatedRanks(size, [&](const Coordinator& ranks) {
      const int rank = ranks.rank();
      Rank mine{.rank = rank,
                .state = format == "parts" ? PartOf(epoch, rank, size) : Joined(epoch)};
      if (change) change(mine);
      ManagerOptions options = Options(format);
      options.files = mine.files;
      const auto manager = Manager::Create(options, ranks);
      results[static_cast<size_t>(rank)] =
          manager.ok() ? (*manager)->Save(mine.name, mine.state, mine.options).status()
                       : manager.status();
    });
    for (const absl::Status& result : results) EXPECT_EQ(result, results[0]);
    return results[0];
  }

  // This is what the start of a new job does.
  void CreateAlone() const {
    const SingleRank alone;
    EXPECT_TRUE(Manager::Create(Options(), alone).ok());
  }

  // The folder has this one checkpoint, with the values of `epoch`, and no temporary.
  void ExpectOnly(const std::string& file, int64_t epoch) const {
    EXPECT_EQ(Names(), std::vector<std::string>{file});
    const absl::StatusOr<State> state = Manager::Load(Path(file));
    ASSERT_TRUE(state.ok()) << state.status();
    EXPECT_EQ(Difference(Joined(epoch).root, state->root), "");
  }

  std::string directory_;
};

TEST_F(ManagerRanksTest, WrittenInPartsReadAtEveryWorldSize) {
  ASSERT_TRUE(Save(1).ok());
  ExpectOnly("epoch_1.parts", 1);
  EXPECT_EQ(ListDirectory(Path("epoch_1.parts")).value(),
            (std::vector<std::string>{"rank_0.pt", "rank_1.pt", "rank_2.pt"}));
  for (int size : {1, 2, 4}) {
    RunCoordinatedRanks(size, [&](const Coordinator& ranks) {
      const auto manager = Manager::Create(Options(), ranks).value();
      const auto loaded = manager->LoadNewest();
      ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
      EXPECT_EQ((*loaded)->path, Path("epoch_1.parts"));
      EXPECT_EQ(Difference(Joined(1).root, (*loaded)->state.root), "");
      // This replaces the checkpoint of another world size, a folder by a folder.
      EXPECT_TRUE(manager->Save("epoch_1", PartOf(size, ranks.rank(), size)).ok());
    });
    ExpectOnly("epoch_1.parts", size);
    ASSERT_TRUE(Save(1).ok());
  }
}

TEST_F(ManagerRanksTest, Rank0AloneWritesWhatOneRankWrites) {
  std::mutex mutex;
  std::vector<int> called;
  EXPECT_TRUE(Save(
                  1,
                  [&](Rank& mine) {
                    mine.options.callback = [&, rank = mine.rank](State&) {
                      const std::lock_guard<std::mutex> lock(mutex);
                      called.push_back(rank);
                    };
                  },
                  "pt")
                  .ok());
  EXPECT_EQ(called, std::vector<int>{0});
  ExpectOnly("epoch_1.pt", 1);
  RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
    const auto manager = Manager::Create(Options("pt"), ranks).value();
    const auto loaded = manager->LoadNewest();
    ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
    EXPECT_EQ(Difference(Joined(1).root, (*loaded)->state.root), "");
    EXPECT_EQ(manager->Save("epoch_1", Joined(2)).value(), Path("epoch_1.pt"));
    std::filesystem::remove(Path("epoch_1.pt"));
  });
  RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
    const auto manager = Manager::Create(Options("pt"), ranks).value();
    EXPECT_FALSE(manager->LoadNewest().value().has_value());
  });
}

TEST_F(ManagerRanksTest, WhatOneRankRefusesNoRankWrites) {
  ASSERT_TRUE(Save(1).ok());
  for (int bad = 0; bad < kRanks; ++bad) {
    const auto refused = [&](absl::StatusCode code, absl::string_view what,
                             const std::function<void(Rank&)>& change) {
      const absl::Status status = Save(2, [&](Rank& mine) {
        if (mine.rank == bad) change(mine);
      });
      EXPECT_EQ(status.code(), code) << status;
      EXPECT_TRUE(absl::StartsWith(status.message(), absl::StrCat("rank ", bad, ": "))) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
      ExpectOnly("epoch_1.parts", 1);
    };
    refused(absl::StatusCode::kInternal, "from callback", [](Rank& mine) {
      mine.options.callback = [](State&) { throw std::runtime_error("from callback"); };
    });
    refused(absl::StatusCode::kAlreadyExists, "'epoch'", [](Rank& mine) {
      mine.options.extra_ckpt = NewTree();
      mine.options.extra_ckpt->insert("epoch", int64_t{3});
    });
    refused(absl::StatusCode::kInvalidArgument, "'a/b'", [](Rank& mine) { mine.name = "a/b"; });
    refused(absl::StatusCode::kInvalidArgument, "'moment'",
            [](Rank& mine) { mine.state.root.insert_or_assign("moment", at::zeros({11})); });
    refused(absl::StatusCode::kInvalidArgument, "'root/c'",
            [](Rank& mine) { mine.state.root.insert("c", c10::complex<double>(1, 2)); });
  }
  // Found by rank 0, in what all have said.
  const absl::Status gap = Save(2, [](Rank& mine) {
    if (mine.rank == 2) mine.state.shards.clear();
  });
  EXPECT_EQ(gap.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(gap.message(), "'moment': no rank has elements [4, 10)")) << gap;
  ExpectOnly("epoch_1.parts", 1);
}

TEST_F(ManagerRanksTest, AllRanksSaveOneName) {
  for (const std::string format : {"parts", "pt"}) {
    ASSERT_TRUE(Save(1, nullptr, format).ok());
    const absl::Status status = Save(
        2,
        [](Rank& mine) {
          if (mine.rank == 1) mine.name = "epoch_2";
        },
        format);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 1: saves epoch_2")) << status;
    ExpectOnly(absl::StrCat("epoch_1.", format), 1);
    std::filesystem::remove_all(directory_);
  }
}

// Every call of Save that changes the disk, on each rank, with an older checkpoint in place.
TEST_F(ManagerRanksTest, EachFaultOfEachRankIsEverybodys) {
  ASSERT_TRUE(Save(1).ok());
  for (int bad = 0; bad < kRanks; ++bad) {
    FaultyFileSystem counted;
    const auto count = [&](Rank& mine) {
      if (mine.rank == bad) mine.files = &counted;
    };
    ASSERT_FALSE(Save(2, [&](Rank& mine) {
                   count(mine);
                   mine.name = "";  // ends before the first call
                 }).ok());
    const size_t before = counted.calls().size();
    ASSERT_TRUE(Save(1, count).ok());
    const std::vector<std::string> calls(
        counted.calls().begin() + 2 * static_cast<ptrdiff_t>(before), counted.calls().end());
    ASSERT_GE(calls.size(), 4u);
    const auto index = [&](absl::string_view call) {
      return std::find(calls.begin(), calls.end(), call) - calls.begin();
    };
    std::vector<std::string> order = calls;
    order.erase(std::unique(order.begin(), order.end()), order.end());  // many writes
    // Files, the folder's entries, then its name are durable; then the old one goes.
    const std::vector<std::string> file = {"open", "write", "fsync", "close"};
    const std::vector<std::string> expected = {"mkdir", "open",  "write", "fsync",    "close",
                                               "open",  "fsync", "close", "exchange", "open",
                                               "fsync", "close", "unlink"};
    EXPECT_EQ(order, bad == 0 ? expected : file);
    const ptrdiff_t published = index("exchange");
    EXPECT_EQ(published < static_cast<ptrdiff_t>(calls.size()), bad == 0);
    for (ptrdiff_t nth = 0; nth < static_cast<ptrdiff_t>(calls.size()); ++nth) {
      const std::string& call = calls[static_cast<size_t>(nth)];
      const std::string what = absl::StrCat("rank ", bad, ", call ", nth, ", ", call);
      FaultyFileSystem files({.nth = static_cast<int64_t>(before) + nth + 1, .error = ENOSPC});
      const absl::Status status = Save(2, [&](Rank& mine) {
        if (mine.rank == bad) mine.files = &files;
      });
      // Removing the old one, and closing a folder after its sync, can lose nothing.
      const bool harmless = call == "unlink" || (call == "close" && nth > index("close"));
      EXPECT_EQ(status.ok(), harmless) << what << ": " << status;
      if (!status.ok()) {
        EXPECT_TRUE(absl::StartsWith(status.message(), absl::StrCat("rank ", bad, ": ")))
            << what << ": " << status;
        EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << what << ": " << status;
      }
      // What could not be removed goes at the next start.
      if (call == "unlink") CreateAlone();
      SCOPED_TRACE(what);
      ExpectOnly("epoch_1.parts", status.ok() || nth > published ? 2 : 1);
      ASSERT_TRUE(Save(1).ok());
    }
  }
}

TEST_F(ManagerRanksTest, KilledAtEverySystemCall) {
  FaultyFileSystem counted[2];
  ASSERT_TRUE(Save(1, nullptr, "parts", 2).ok());
  ASSERT_TRUE(Save(
                  1, [&](Rank& mine) { mine.files = &counted[mine.rank]; }, "parts", 2)
                  .ok());
  for (int killer = 0; killer < 2; ++killer) {
    for (size_t nth = 1; nth <= counted[killer].calls().size(); ++nth) {
      const pid_t child = fork();
      if (child == 0) {
        FaultyFileSystem files({.nth = static_cast<int64_t>(nth)});
        Save(
            2,
            [&](Rank& mine) {
              if (mine.rank == killer) mine.files = &files;
            },
            "parts", 2)
            .IgnoreError();
        _exit(0);
      }
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << nth;
      const absl::StatusOr<State> state = Manager::Load(Path("epoch_1.parts"));
      ASSERT_TRUE(state.ok()) << "call " << nth << ": " << state.status();
      const int64_t epoch = state->root.at("epoch").toInt();
      CreateAlone();
      ExpectOnly("epoch_1.parts", epoch);
    }
  }
}

// Stands for NFS and other file systems without RENAME_EXCHANGE.
class WithoutExchange : public FileSystem {
  int Exchange(const char*, const char*) override {
    errno = EINVAL;
    return -1;
  }
};

TEST_F(ManagerRanksTest, AFolderThatCannotBeReplacedStays) {
  WithoutExchange files;
  const auto without = [&](Rank& mine) { mine.files = &files; };
  ASSERT_TRUE(Save(1, without).ok());
  const absl::Status status = Save(2, without);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(absl::StrContains(status.message(), "rank 0: ")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "remove the checkpoint first")) << status;
  ExpectOnly("epoch_1.parts", 1);
}

TEST_F(ManagerRanksTest, KeepsTheNewestFolders) {
  FaultyFileSystem counted;
  RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
    ManagerOptions options = Options();
    options.keep = 2;
    if (ranks.rank() == 0) options.files = &counted;
    const auto manager = Manager::Create(options, ranks).value();
    for (int64_t epoch : {1, 2, 3}) {
      EXPECT_TRUE(manager->Save(EpochName(epoch), PartOf(epoch, ranks.rank(), kRanks)).ok());
    }
  });
  EXPECT_EQ(Names(), (std::vector<std::string>{"epoch_2.parts", "epoch_3.parts"}));
  // A kill between the removals of its files must not leave a half epoch_1: it is hidden first.
  EXPECT_EQ(std::count(counted.calls().begin(), counted.calls().end(), "rename"), 4);
}

TEST_F(ManagerRanksTest, CreateFailsOnAllRanks) {
  const auto create = [&](const std::function<void(int, ManagerOptions&)>& change) {
    std::vector<absl::Status> results(kRanks);
    RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
      ManagerOptions options = Options();
      change(ranks.rank(), options);
      results[static_cast<size_t>(ranks.rank())] = Manager::Create(options, ranks).status();
    });
    for (const absl::Status& result : results) EXPECT_EQ(result, results[0]);
    return results[0];
  };
  EXPECT_TRUE(create([](int, ManagerOptions&) {}).ok());
  EXPECT_EQ(create([](int rank, ManagerOptions& options) {
              if (rank == 2) options.keep = -1;
            }).message(),
            "rank 2: checkpoint manager: keep -1 must not be negative");
  const absl::Status formats = create([](int rank, ManagerOptions& options) {
    if (rank == 1) options.format = "pt";
  });
  EXPECT_TRUE(absl::StrContains(formats.message(), "rank 1: checkpoint format 'pt'")) << formats;
  for (int bad = 0; bad < kRanks; ++bad) {
    const absl::Status folder = create([&](int rank, ManagerOptions& options) {
      if (rank == bad) options.directory = "/proc/checkpoints";
    });
    EXPECT_TRUE(absl::StartsWith(folder.message(), absl::StrCat("rank ", bad, ": "))) << folder;
    EXPECT_TRUE(absl::StrContains(folder.message(), "/proc")) << folder;
  }
}

TEST_F(ManagerRanksTest, WhatOneRankCannotReadNoRankLoads) {
  RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
    const auto manager = Manager::Create(Options(), ranks).value();
    for (int64_t epoch : {1, 2, 3}) {
      ASSERT_TRUE(manager->Save(EpochName(epoch), PartOf(epoch, ranks.rank(), kRanks)).ok());
    }
  });
  using Paths = std::vector<std::string>;
  // LoadNewest on all ranks, where the reads of rank `bad` end as `fail` says: the epoch that all
  // have, or the error that all have.
  const auto load = [&](int bad, const std::function<absl::Status(const std::string&)>& fail,
                        const Paths& expected_reads) {
    std::vector<absl::Status> results(kRanks);
    std::vector<int64_t> epochs(kRanks, 0);
    RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
      const size_t rank = static_cast<size_t>(ranks.rank());
      const auto manager = Manager::Create(Options(), ranks).value();
      Paths reads;
      BeforeReadOfThisThread() = [&](const std::string& path) {
        reads.push_back(path);
        return ranks.rank() == bad ? fail(path) : absl::OkStatus();
      };
      const auto loaded = manager->LoadNewest();
      results[rank] = loaded.status();
      if (loaded.ok() && loaded->has_value()) {
        epochs[rank] = (*loaded)->state.root.at("epoch").toInt();
        EXPECT_EQ((*loaded)->path, Path(absl::StrCat("epoch_", epochs[rank], ".parts")));
      }
      EXPECT_EQ(reads, expected_reads) << rank;
    });
    for (const absl::Status& result : results) EXPECT_EQ(result, results[0]);
    EXPECT_EQ(epochs, std::vector<int64_t>(kRanks, epochs[0]));
    absl::StatusOr<int64_t> epoch = epochs[0];
    if (!results[0].ok()) epoch = results[0];
    return epoch;
  };
  const auto failing = [](const std::string& file, const absl::Status& status) {
    return [=](const std::string& path) {
      return absl::StrContains(path, file) ? status : absl::OkStatus();
    };
  };
  const Paths all = {Path("epoch_3.parts"), Path("epoch_2.parts"), Path("epoch_1.parts")};
  const Paths two(all.begin(), all.begin() + 2);
  const Paths one(all.begin(), all.begin() + 1);
  for (int bad = 0; bad < kRanks; ++bad) {
    const std::string name = absl::StrCat("rank ", bad, ": ");
    testing::internal::CaptureStderr();
    EXPECT_EQ(load(bad, failing("epoch_3", absl::DataLossError("torn")), two).value(), 2);
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(absl::StrContains(log, absl::StrCat(name, "torn; resuming from "))) << log;
    const absl::Status nothing_left =
        load(bad, failing("epoch_", absl::DataLossError("torn")), all).status();
    EXPECT_EQ(nothing_left.code(), absl::StatusCode::kDataLoss);
    EXPECT_TRUE(absl::StrContains(nothing_left.message(), absl::StrCat(name, "torn")))
        << nothing_left;
    // This is no damage and may be gone at the next try: no reason to go back to an older one.
    EXPECT_EQ(load(bad, failing("epoch_3", absl::UnavailableError("stale handle")), one).status(),
              absl::UnavailableError(absl::StrCat(name, "stale handle")));
  }
  // The checkpoint was removed since rank 0 chose it. Then rank 2 alone does not find it.
  EXPECT_EQ(load(0, failing("epoch_3", absl::NotFoundError("gone")), two).value(), 2);
  const absl::Status elsewhere =
      load(2, failing("epoch_3", absl::NotFoundError("gone")), one).status();
  EXPECT_EQ(elsewhere.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(elsewhere.message(), "rank 2: ")) << elsewhere;
  EXPECT_TRUE(absl::StrContains(elsewhere.message(), "one that all ranks see")) << elsewhere;
  EXPECT_EQ(load(0, failing("none", absl::OkStatus()), one).value(), 3);
  // Rank 0 passes over, unread, what is not complete.
  std::filesystem::remove(Path("epoch_3.parts/rank_1.pt"));
  std::filesystem::resize_file(Path("epoch_2.parts/rank_2.pt"), 100);
  EXPECT_EQ(load(0, failing("none", absl::OkStatus()), {Path("epoch_1.parts")}).value(), 1);
}

}  // namespace
}  // namespace ddp::checkpoint
