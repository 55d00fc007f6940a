// The manager with several ranks, as threads, and with a format that all of them write.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
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

State ShareOf(int64_t epoch, int rank, int size) {
  const FlatRange range = RangeOf(rank, size);
  State state = Joined(epoch);
  const at::Tensor whole = state.root.at("moment").toTensor();
  (void)state.root.erase("moment");
  state.sharded["moment"] = {.global_shape = {2, 5}, .parts = {{range, PartOf(whole, range, {})}}};
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
  // Without the notes beside checkpoints.
  std::vector<std::string> Names() const {
    std::vector<std::string> names = ListDirectory(directory_).value();
    std::erase_if(names, [&](const std::string& name) {
      return absl::StartsWith(name, ".epoch_") && absl::EndsWith(name, ".json");
    });
    return names;
  }
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
                .state = format == "parts" ? ShareOf(epoch, rank, size) : Joined(epoch)};
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
      EXPECT_TRUE(manager->Save("epoch_1", ShareOf(size, ranks.rank(), size)).ok());
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
            [](Rank& mine) { mine.state.sharded["moment"].parts[0].tensor = at::zeros({11}); });
    refused(absl::StatusCode::kInvalidArgument, "'root/c'", [](Rank& mine) {
      mine.state.root.insert("c", at::empty({2}, at::TensorOptions().device(at::kMeta)));
    });
  }
  // Found by rank 0, in what all have said.
  const absl::Status gap = Save(2, [](Rank& mine) {
    if (mine.rank == 2) mine.state.sharded.clear();
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
    const std::vector<std::string> expected = {
        "mkdir",                                // the temporary
        "open",     "write", "fsync", "close",  // rank 0's file
        "open",     "fsync", "close",           // the temporary
        "open",     "write", "fsync", "close",  // notes
        "rename",                               // the old notes go
        "open",     "fsync", "close",           // the folder
        "exchange",                             // the checkpoint
        "open",     "fsync", "close",           // the folder
        "rename",                               // the notes
        "open",     "fsync", "close",           // the folder
        "unlink",   "rmdir"};                   // the old ones
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
      const bool of_folder =
          call == "close" && nth >= 2 && calls[static_cast<size_t>(nth) - 2] == "open";
      const bool harmless = call == "unlink" || call == "rmdir" || of_folder;
      EXPECT_EQ(status.ok(), harmless) << what << ": " << status;
      if (!status.ok()) {
        EXPECT_TRUE(absl::StartsWith(status.message(), absl::StrCat("rank ", bad, ": ")))
            << what << ": " << status;
        EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << what << ": " << status;
      }
      // The old one, if it could not be removed, goes at the next start.
      if (nth > published) CreateAlone();
      SCOPED_TRACE(what);
      ExpectOnly("epoch_1.parts", status.ok() || nth > published ? 2 : 1);
      ASSERT_TRUE(Save(1).ok());
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
      EXPECT_TRUE(manager->Save(EpochName(epoch), ShareOf(epoch, ranks.rank(), kRanks)).ok());
    }
  });
  EXPECT_EQ(Names(), (std::vector<std::string>{"epoch_2.parts", "epoch_3.parts"}));
  // A kill between the removals of its files must not leave a half epoch_1: it is hidden first.
  // Each save renames its notes, too.
  EXPECT_EQ(std::count(counted.calls().begin(), counted.calls().end(), "rename"), 7);
}

TEST_F(ManagerRanksTest, CreateFailsOnAllRanks) {
  const auto create = [&](const std::function<void(int, ManagerOptions&)>& change) {
    std::vector<absl::Status> results(kRanks);
    RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
      ManagerOptions options = Options();
      options.folder_limit = absl::Milliseconds(20);
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
            "rank 2: keep=-1 must be at least 0");
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

TEST_F(ManagerRanksTest, Rank0RenamesWhatAnyRankFindsDamaged) {
  for (int64_t epoch : {1, 2, 3}) {
    ASSERT_TRUE(Save(epoch, [&](Rank& mine) { mine.name = EpochName(epoch); }).ok());
  }
  FaultyFileSystem files[kRanks];
  testing::internal::CaptureStderr();
  RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
    ManagerOptions options = Options();
    options.files = &files[ranks.rank()];
    const auto manager = Manager::Create(options, ranks).value();
    BeforeReadOfThisThread() = [&](const std::string& path) {
      return ranks.rank() == 1 && absl::StrContains(path, "epoch_3") ? absl::DataLossError("torn")
                                                                     : absl::OkStatus();
    };
    const auto loaded = manager->LoadNewest();
    ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
    EXPECT_EQ((*loaded)->path, Path("epoch_2.parts"));
  });
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(absl::StrContains(log, "rank 1: torn; resuming from ")) << log;
  EXPECT_EQ(Names(),
            (std::vector<std::string>{"epoch_1.parts", "epoch_2.parts", "epoch_3.parts.damaged"}));
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::vector<std::string>& calls = files[rank].calls();
    EXPECT_EQ(std::count(calls.begin(), calls.end(), "rename"), rank == 0 ? 1 : 0) << rank;
  }
}

TEST_F(ManagerRanksTest, TwoJobsThatFindTheSameDamage) {
  for (int round = 0; round < 5; ++round) {
    std::filesystem::remove_all(directory_);
    for (int64_t epoch : {1, 2, 3}) {
      ASSERT_TRUE(Save(epoch, [&](Rank& mine) { mine.name = EpochName(epoch); }).ok());
    }
    std::filesystem::remove(Path("epoch_3.parts/rank_1.pt"));
    std::filesystem::resize_file(Path("epoch_2.parts/rank_2.pt"), 100);
    const auto job = [&] {
      RunCoordinatedRanks(2, [&](const Coordinator& ranks) {
        const auto manager = Manager::Create(Options(), ranks).value();
        const auto loaded = manager->LoadNewest();
        ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
        EXPECT_EQ((*loaded)->path, Path("epoch_1.parts"));
      });
    };
    std::thread other(job);
    job();
    other.join();
    // Each may have held the lock when the other asked; then the next start renames.
    job();
    EXPECT_EQ(Names(), (std::vector<std::string>{"epoch_1.parts", "epoch_2.parts.damaged",
                                                 "epoch_3.parts.damaged"}));
  }
}

// mmengine's options, where each rank writes what it has.
TEST_F(ManagerRanksTest, OptionsOfSaveOnAllRanks) {
  const auto with_optimizer = [](Rank& mine) {
    c10::impl::GenericDict optimizer = NewTree();
    optimizer.insert("lr", 0.5);
    mine.state.root.insert("optimizer", optimizer);
    mine.state.root.insert("scheduler", "s");
    mine.state.sharded["optimizer/moment"] = mine.state.sharded.at("moment");
  };
  const auto omitting = [&](Rank& mine) {
    with_optimizer(mine);
    mine.state.root.insert("optimizer.second", NewTree());
    mine.state.sharded["optimizer.second/moment"] = mine.state.sharded.at("moment");
    mine.options.save_optimizer = false;
    mine.options.save_param_scheduler = false;
  };
  for (const std::string format : {"parts", "pt"}) {
    // Of parts too, whoever writes them.
    ASSERT_TRUE(Save(
                    1,
                    [&](Rank& mine) {
                      mine.state = ShareOf(1, mine.rank, kRanks);
                      omitting(mine);
                    },
                    format)
                    .ok());
    ExpectOnly(absl::StrCat("epoch_1.", format), 1);
    std::filesystem::remove_all(directory_);
  }
  // A callback that drops an entry drops the parts below it; extra entries are on every rank.
  ASSERT_TRUE(Save(2, [&](Rank& mine) {
                with_optimizer(mine);
                mine.options.extra_ckpt = NewTree();
                mine.options.extra_ckpt->insert("note", "mine");
                mine.options.callback = [](State& state) {
                  for (const char* key : {"optimizer", "scheduler"}) (void)state.root.erase(key);
                  state.sharded.erase("moment");
                };
              }).ok());
  State expected;
  expected.root.insert("epoch", int64_t{2});
  expected.root.insert("note", "mine");
  EXPECT_EQ(Difference(expected.root, Manager::Load(Path("epoch_1.parts"))->root), "");
  // And on load, on each rank.
  RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
    const auto manager = Manager::Create(Options(), ranks).value();
    const auto loaded = manager->LoadNewest(
        {}, {.callback = [&](State& state) { state.root.insert("rank", int64_t{ranks.rank()}); }});
    EXPECT_EQ((*loaded)->state.root.at("rank").toInt(), ranks.rank());
    // One that throws on one rank is every rank's error.
    const absl::Status thrown =
        manager
            ->LoadNewest({}, {.callback =
                                  [&](State&) {
                                    if (ranks.rank() == 1) throw std::runtime_error("no such key");
                                  }})
            .status();
    EXPECT_TRUE(absl::StartsWith(thrown.message(), "rank 1: ")) << thrown;
    EXPECT_TRUE(absl::StrContains(thrown.message(), "no such key")) << thrown;
  });
}

TEST_F(ManagerRanksTest, AllRanksGoOnAfterOneCouldNotWrite) {
  for (int bad = 0; bad < kRanks; ++bad) {
    CreateAlone();
    RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
      ManagerOptions options = Options();
      options.on_save_error = "continue";
      FaultyFileSystem files({.call = "fsync", .nth = 1, .error = ENOSPC});
      if (ranks.rank() == bad) options.files = &files;
      const auto manager = Manager::Create(options, ranks).value();
      const auto save = [&](const std::string& name, int64_t epoch) {
        return manager->Save(name, ShareOf(epoch, ranks.rank(), kRanks)).status();
      };
      const absl::Status failed = save("epoch_2", 2);
      EXPECT_EQ(failed.code(), absl::StatusCode::kResourceExhausted) << failed;
      EXPECT_TRUE(absl::StartsWith(failed.message(), absl::StrCat("rank ", bad, ": "))) << failed;
      EXPECT_TRUE(manager->GoesOnAfter(failed)) << failed;
      const absl::Status refused = save(ranks.rank() == bad ? "a/b" : "epoch_3", 3);
      EXPECT_FALSE(manager->GoesOnAfter(refused)) << refused;
      const absl::Status other_name = save(ranks.rank() == 1 ? "epoch_9" : "epoch_3", 3);
      EXPECT_FALSE(manager->GoesOnAfter(other_name)) << other_name;
      // One that cannot make a copy to write, say.
      const auto agree = [&](const absl::Status& of_bad) {
        return manager->AgreeToSave(ranks, ranks.rank() == bad ? of_bad : absl::OkStatus());
      };
      const absl::Status lacks_memory = agree(absl::InternalError("no memory"));
      EXPECT_EQ(lacks_memory.message(), absl::StrCat("rank ", bad, ": no memory"));
      EXPECT_TRUE(manager->GoesOnAfter(lacks_memory)) << lacks_memory;
      EXPECT_FALSE(manager->GoesOnAfter(agree(absl::InvalidArgumentError("no state"))));
      EXPECT_TRUE(agree(absl::OkStatus()).ok());
      EXPECT_TRUE(save("epoch_1", 1).ok());
      if (ranks.rank() == bad) return;  // and does not answer
      const absl::Status missing = agree(absl::OkStatus());
      EXPECT_EQ(missing.code(), absl::StatusCode::kDeadlineExceeded) << missing;
      EXPECT_FALSE(manager->GoesOnAfter(missing)) << missing;
    });
    ExpectOnly("epoch_1.parts", 1);
  }
}

// Of the first save: rank 0 knows its own part, and looks for room for those of all.
TEST_F(ManagerRanksTest, RoomIsThatOfAllRanksParts) {
  struct Full : FileSystem {
    int Statvfs(const char*, struct statvfs* info) override {
      *info = {};
      info->f_blocks = info->f_bavail = free;
      info->f_frsize = 1;
      return 0;
    }
    uint64_t free = 4 * kElements - 1;
  } files;
  const auto save = [&](int64_t elements_of_a_rank) {
    return Save(1, [&](Rank& mine) {
      mine.files = &files;
      if (elements_of_a_rank == 0) return;
      auto& entries = mine.state.per_rank.emplace(mine.rank, NewTree()).first->second;
      entries.insert("error", at::zeros({elements_of_a_rank}, at::kFloat));
    });
  };
  EXPECT_EQ(save(0).code(), absl::StatusCode::kResourceExhausted);
  files.free += 1 + 4 * kRanks * 5 - 1;
  EXPECT_EQ(save(5).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Names().empty());
  files.free = 4 * kElements;
  EXPECT_TRUE(save(0).ok());
}

TEST_F(ManagerRanksTest, AFolderForEachRankIsRefused) {
  const std::string own = Path("own");
  std::filesystem::create_directories(own);
  for (const std::string format : {"parts", "pt"}) {
    RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
      ManagerOptions options = Options(format);
      options.folder_limit = absl::Milliseconds(20);
      if (ranks.rank() == 2) options.directory = own;
      const absl::Status status = Manager::Create(options, ranks).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      for (const std::string& part : {std::string("rank 2: "), own, directory_}) {
        EXPECT_TRUE(absl::StrContains(status.message(), part)) << status;
      }
    });
  }
  EXPECT_EQ(Names(), std::vector<std::string>{"own"});
}

TEST_F(ManagerRanksTest, WhatOneRankCannotReadNoRankLoads) {
  RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
    const auto manager = Manager::Create(Options(), ranks).value();
    for (int64_t epoch : {1, 2, 3}) {
      ASSERT_TRUE(manager->Save(EpochName(epoch), ShareOf(epoch, ranks.rank(), kRanks)).ok());
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
      ManagerOptions options = Options();
      options.read_only = true;  // what is said to be damaged here is to stay
      const auto manager = Manager::Create(options, ranks).value();
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

// A format that rank 0 writes alone gets what all ranks have, whole.
TEST_F(ManagerRanksTest, PartsAndEntriesOfAllRanksAreGatheredForOneWriter) {
  for (const int size : {1, 2, 3, 4}) {
    RunCoordinatedRanks(size, [&](const Coordinator& ranks) {
      const int rank = ranks.rank();
      State state;
      state.root.insert("epoch", int64_t{7});
      c10::impl::GenericDict optimizer = NewTree();
      state.root.insert("optimizer", optimizer);
      const at::Tensor weight = at::arange(2 * 3 * 8 * 4, at::kFloat).reshape({2, 3, 8, 4});
      // Two ranges per rank, in the order of a channels-last tensor; the last rank has none.
      ShardedTensor& shards = state.sharded["optimizer/state/weight/exp_avg"];
      shards = {.global_shape = {2, 3, 8, 4}, .memory_order = {0, 2, 3, 1}};
      const int owners = std::max(1, size - 1);
      for (int64_t block = 0; block < 2 && rank < owners; ++block) {
        const int64_t part = 96 / owners, begin = block * 96 + rank * part;
        const FlatRange range{begin, rank + 1 == owners ? (block + 1) * 96 : begin + part};
        shards.parts.push_back({range, PartOf(weight, range, shards.memory_order)});
      }
      c10::impl::GenericDict own = NewTree();
      own.insert("rng", at::full({3}, rank, at::kByte));
      own.insert("seen", int64_t{10} * rank);
      state.per_rank.emplace(rank, own);
      const auto manager = Manager::Create(Options("pt"), ranks);
      ASSERT_TRUE(manager.ok());
      const auto saved = (*manager)->Save("epoch_1", state);
      ASSERT_TRUE(saved.ok()) << saved.status();
      EXPECT_EQ(optimizer.size(), 0u) << "the caller's dict is its own";
      const auto loaded = (*manager)->LoadNewest();
      ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
      const State& read = (*loaded)->state;
      const at::Tensor whole = read.root.at("optimizer")
                                   .toGenericDict()
                                   .at("state")
                                   .toGenericDict()
                                   .at("weight")
                                   .toGenericDict()
                                   .at("exp_avg")
                                   .toTensor();
      EXPECT_TRUE(at::equal(whole, weight));
      ASSERT_EQ(read.per_rank.size(), static_cast<size_t>(size));
      for (int of = 0; of < size; ++of) {
        EXPECT_EQ(read.per_rank.at(of).at("seen").toInt(), 10 * of);
        EXPECT_TRUE(
            at::equal(read.per_rank.at(of).at("rng").toTensor(), at::full({3}, of, at::kByte)));
      }
      EXPECT_FALSE(read.root.contains("per_rank"));
      // Each rank asks for its parts, in the order of memory, and for its own entry.
      ReadRequest request;
      std::vector<Part> wanted;
      for (const TensorPart& part : shards.parts) wanted.push_back(part.part);
      request.parts["optimizer/state/weight/exp_avg"] = Wanted(wanted, {0, 2, 3, 1});
      request.parts["optimizer/state/weight/absent"] = Whole{};
      request.parts["optimizer/state/weight/absent"].optional = true;
      request.per_rank = PerRank::kOwn;
      const auto again = (*manager)->LoadNewest(request);
      ASSERT_TRUE(again.ok() && again->has_value()) << again.status();
      const ShardedTensor& given = (*again)->state.sharded.at("optimizer/state/weight/exp_avg");
      ASSERT_EQ(given.parts.size(), shards.parts.size());
      for (size_t i = 0; i < given.parts.size(); ++i) {
        EXPECT_TRUE(at::equal(given.parts[i].tensor, shards.parts[i].tensor));
      }
      ASSERT_EQ((*again)->state.per_rank.size(), 1u);
      EXPECT_EQ((*again)->state.per_rank.at(rank).at("seen").toInt(), 10 * rank);
    });
  }
}

// A message through the coordinator has 4 MiB.
TEST_F(ManagerRanksTest, APartOfSeveralMessagesIsGatheredWhole) {
  const int64_t part = (5 << 20) / 4 + 3;
  const at::Tensor whole = at::arange(kRanks * part, at::kFloat);
  const absl::Status status = Save(
      1,
      [&](Rank& mine) {
        const FlatRange range{mine.rank * part, (mine.rank + 1) * part};
        mine.state = {};
        mine.state.sharded["moment"] = {.global_shape = {kRanks * part},
                                        .parts = {{range, PartOf(whole, range, {})}}};
      },
      "pt");
  ASSERT_TRUE(status.ok()) << status;
  const absl::StatusOr<State> state = Manager::Load(Path("epoch_1.pt"));
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_TRUE(at::equal(state->root.at("moment").toTensor(), whole));
}

// Three tensors, of which each rank has a third, in a format that rank 0 writes alone.
State ThirdsOf(int64_t epoch, int rank) {
  State state;
  state.root.insert("epoch", epoch);
  for (const char* name : {"a", "b", "c"}) {
    const at::Tensor whole = at::arange(epoch, epoch + 30, at::kFloat);
    const FlatRange range{10 * rank, 10 * (rank + 1)};
    state.sharded[absl::StrCat("moments/", name)] = {.global_shape = {30},
                                                     .parts = {{range, PartOf(whole, range, {})}}};
  }
  return state;
}

class OneWriterTest : public ManagerRanksTest, public testing::WithParamInterface<std::string> {
 protected:
  absl::Status SaveThirds(int64_t epoch, const std::function<void(Rank&)>& change = nullptr) {
    return Save(
        epoch,
        [&](Rank& mine) {
          mine.state = ThirdsOf(epoch, mine.rank);
          if (change) change(mine);
        },
        GetParam());
  }
  void ExpectThirds(int64_t epoch, float first_of_b) {
    const std::string file = absl::StrCat("epoch_1.", GetParam());
    EXPECT_EQ(Names(), std::vector<std::string>{file});
    const absl::StatusOr<State> state = Manager::Load(Path(file));
    ASSERT_TRUE(state.ok()) << state.status();
    const c10::impl::GenericDict moments = state->root.at("moments").toGenericDict();
    EXPECT_EQ(moments.size(), 3u);
    EXPECT_TRUE(at::equal(moments.at("a").toTensor(), at::arange(epoch, epoch + 30, at::kFloat)));
    EXPECT_EQ(moments.at("b").toTensor()[0].item<float>(), first_of_b);
  }
};

// Rank 0 has no room for the rest, while the others wait to send it.
TEST_P(OneWriterTest, AFullDiskEndsTheOthersPart) {
  ASSERT_TRUE(SaveThirds(1).ok());
  int64_t nth = 1;
  for (;; ++nth) {
    FaultyFileSystem files({.call = "write", .nth = nth, .error = ENOSPC});
    const absl::Status status = SaveThirds(2, [&](Rank& mine) {
      if (mine.rank == 0) mine.files = &files;
    });
    // Two writes come after: the notes beside the checkpoint, and the proof of a shared folder.
    if (status.ok()) break;
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "disk full")) << status;
    if (absl::StrContains(status.message(), "saving checkpoint")) {
      EXPECT_TRUE(absl::StartsWith(status.message(), "rank 0: saving checkpoint")) << status;
      ExpectThirds(1, 1);
    }
  }
  EXPECT_GT(nth, 5);
  ExpectThirds(2, 2);
}

// A part that cannot be read, as one of a device that has failed.
TEST_P(OneWriterTest, ARankThatCannotSendFailsAll) {
  ASSERT_TRUE(SaveThirds(1).ok());
  for (const int failing : {0, 1, 2}) {
    for (const char* name : {"moments/a", "moments/c"}) {
      const absl::Status status = SaveThirds(2, [&](Rank& mine) {
        if (mine.rank != failing) return;
        at::Tensor& values = mine.state.sharded.at(name).parts[0].tensor;
        values = at::empty(values.sizes(), values.options().device(at::kMeta));
      });
      EXPECT_FALSE(status.ok());
      EXPECT_TRUE(
          absl::StartsWith(status.message(), absl::StrCat("rank ", failing, ": saving checkpoint")))
          << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "meta")) << status;
      ExpectThirds(1, 1);
    }
  }
  ASSERT_TRUE(SaveThirds(3).ok());
  ExpectThirds(3, 3);
}

// A callback sees what the checkpoint will have, though only rank 0 has one.
TEST_P(OneWriterTest, ACallbackGetsWholeTensors) {
  const absl::Status status = SaveThirds(1, [](Rank& mine) {
    if (mine.rank != 0) return;
    mine.options.callback = [](State& state) {
      EXPECT_TRUE(state.sharded.empty());
      state.root.at("moments").toGenericDict().at("b").toTensor()[0] = -7;
    };
  });
  ASSERT_TRUE(status.ok()) << status;
  ExpectThirds(1, -7);
}

// Where the tensor stands among others, and how it is strided.
TEST_P(OneWriterTest, RootHasThePlaceOfATensor) {
  const at::Tensor values = at::arange(2 * 3 * 4 * 4, at::kFloat).reshape({2, 3, 4, 4});
  const auto place = [](const at::Tensor& like) {
    return at::empty_like(like, at::TensorOptions().device(at::kMeta));
  };
  const absl::Status status = Save(
      1,
      [&](Rank& mine) {
        const at::Tensor weight = values.contiguous(at::MemoryFormat::ChannelsLast);
        mine.state = {};
        mine.state.root.insert("z", place(weight));
        mine.state.root.insert("a", 1);
        ShardedTensor& parts = mine.state.sharded["z"];
        parts = {.global_shape = {2, 3, 4, 4}, .memory_order = {0, 2, 3, 1}};
        const FlatRange range{32 * mine.rank, 32 * (mine.rank + 1)};
        parts.parts.push_back({range, PartOf(weight, range, parts.memory_order)});
      },
      GetParam());
  ASSERT_TRUE(status.ok()) << status;
  const absl::StatusOr<State> state = Manager::Load(Path(absl::StrCat("epoch_1.", GetParam())));
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(state->root.begin()->key().toStringRef(), "z");
  const at::Tensor read = state->root.at("z").toTensor();
  EXPECT_TRUE(at::equal(read, values));
  EXPECT_EQ(read.is_contiguous(at::MemoryFormat::ChannelsLast), GetParam() == "pt");
  // One of another shape, or of a dense tensor's values, is in the way.
  for (const at::Tensor& other :
       {place(at::zeros({2})), at::zeros({2, 3, 4, 4}), place(values.to(at::kDouble))}) {
    const absl::Status refused = Save(
        1,
        [&](Rank& mine) {
          mine.state = {};
          mine.state.root.insert("z", other);
          mine.state.sharded["z"] = {.global_shape = {2, 3, 4, 4}};
        },
        GetParam());
    EXPECT_TRUE(absl::StrContains(refused.message(), "'z': the state has a value there"))
        << refused;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, OneWriterTest, testing::Values("pt", "safetensors"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace ddp::checkpoint
