// What each rank keeps of a state to write it later, while the state changes.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/coordinator.h"
#include "base/coordinator_testing.h"
#include "base/file.h"
#include "checkpoint/manager.h"
#include "checkpoint/sharded/manifest.h"
#include "checkpoint/sharded/sharded_testing.h"
#include "checkpoint/staging.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint::sharded {
namespace {

TEST_F(ShardedTest, RanksStageOnlyWhatTheyWrite) {
  const auto more = [](int rank, State& state) {
    c10::impl::GenericDict model = state.root.at("model").toGenericDict();
    model.insert("tied.weight", model.at("embedding.weight"));
    model.insert("transposed", Embedding().narrow(0, 500, 1000).t());  // a part of its memory
    model.insert("nothing", at::empty({0, 3}));
    // These have no path of State::sharded: all ranks keep them.
    state.root.insert("a/b", at::ones({1000}));
    c10::impl::GenericList list(c10::AnyType::get());
    list.push_back(at::ones({2000}));
    state.root.insert("list", list);
    state.root.insert(rank == 0 ? "ours" : "theirs", at::ones({3000}));
    for (auto& [path, tensor] : state.sharded) {
      for (TensorPart& part : tensor.parts) part.tensor = part.tensor.clone();
    }
  };
  const auto files = [&] {
    std::map<std::string, std::string> contents;
    for (const std::string& name : Names()) contents[name] = ReadFile(File(name)).value();
    return contents;
  };
  for (const int size : {1, 2, 3}) {
    ASSERT_TRUE(Save(size, more).ok());
    const std::map<std::string, std::string> at_once = files();
    uint64_t unique = 0;
    const Manifest manifest = DecodeManifest(at_once.at("manifest.json")).value();
    for (const auto& [name, tensor] : manifest.tensors) unique += tensor.BytesOf(Whole{});
    std::filesystem::remove_all(directory_);
    std::vector<uint64_t> staged(static_cast<size_t>(size));
    RunCoordinatedRanks(size, [&](const Coordinator& ranks) {
      const auto manager = Manager::Create({.directory = directory_, .format = "sharded"}, ranks);
      ASSERT_TRUE(manager.ok()) << manager.status();
      State state = StateOf(ranks.rank(), size);
      more(ranks.rank(), state);
      const absl::StatusOr<State> mine = (*manager)->WhatThisRankWrites(state, {});
      ASSERT_TRUE(mine.ok()) << mine.status();
      Staging staging;
      const absl::StatusOr<State> copy = staging.Copy(*mine);
      ASSERT_TRUE(copy.ok()) << copy.status();
      EXPECT_TRUE(CheckCopy(*mine, *copy).ok());
      staged[static_cast<size_t>(ranks.rank())] = staging.bytes();
      // The original may change meanwhile.
      state.root.at("model").toGenericDict().at("embedding.weight").toTensor().zero_();
      const absl::Status saved = (*manager)->Save("epoch_1", *copy).status();
      EXPECT_TRUE(saved.ok()) << saved;
    });
    const std::map<std::string, std::string> later = files();
    ASSERT_EQ(later.size(), at_once.size());
    for (const auto& [name, bytes] : at_once) EXPECT_TRUE(later.at(name) == bytes) << name;
    uint64_t sum = 0;
    for (const uint64_t bytes : staged) {
      sum += bytes;
      EXPECT_LT(bytes, unique / static_cast<uint64_t>(size) * 5 / 4);
    }
    EXPECT_LE(sum, unique + static_cast<uint64_t>(size) * 6000 * sizeof(float));
    EXPECT_GE(sum, unique);
  }
}

// What one rank adds or edits may change who writes what: then all keep everything.
TEST_F(ShardedTest, WhereOneRankAloneEditsAllRanksKeepTheWhole) {
  for (const bool adds : {false, true}) {
    SCOPED_TRACE(adds);
    std::filesystem::remove_all(directory_);
    RunCoordinatedRanks(2, [&](const Coordinator& ranks) {
      const auto manager = Manager::Create({.directory = directory_, .format = "sharded"}, ranks);
      ASSERT_TRUE(manager.ok()) << manager.status();
      SaveOptions options;
      if (ranks.rank() == 0 && adds) {
        options.extra_ckpt = NewTree();
        options.extra_ckpt->insert("more", int64_t{7});
      } else if (ranks.rank() == 0) {
        options.callback = [](State& state) { state.root.insert("more", int64_t{7}); };
      }
      const absl::StatusOr<State> mine =
          (*manager)->WhatThisRankWrites(StateOf(ranks.rank(), 2), options);
      ASSERT_TRUE(mine.ok()) << mine.status();
      const c10::impl::GenericDict model = mine->root.at("model").toGenericDict();
      EXPECT_FALSE(model.at("embedding.weight").toTensor().is_meta());
      const absl::Status saved = (*manager)->Save("epoch_1", *mine, options).status();
      EXPECT_TRUE(saved.ok()) << saved;
    });
    const absl::StatusOr<State> read = Read();
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->root.at("more").toInt(), 7);
  }
}

// Counts files of tensors that are opened.
struct CountingFiles : FileSystem {
  int Open(const char* path, int flags, mode_t mode) override {
    if (absl::StrContains(path, "/rank_")) ++opened;
    return FileSystem::Open(path, flags, mode);
  }
  std::atomic<int> opened = 0;
};

TEST_F(ShardedTest, RanksAskEachOtherOnceWhatTheyWrite) {
  RunCoordinatedRanks(3, [&](const Coordinator& ranks) {
    const CountingCoordinator counted(ranks);
    const auto manager = Manager::Create({.directory = directory_, .format = "sharded"}, counted);
    ASSERT_TRUE(manager.ok()) << manager.status();
    for (int save = 0; save < 3; ++save) {
      State state = StateOf(ranks.rank(), 3);
      // What a rank has of its own may have another size in each save.
      state.per_rank.at(ranks.rank())
          .insert_or_assign("rng", at::full({16 + save * ranks.rank()}, save, at::kByte));
      const int before = counted.calls();
      const absl::StatusOr<State> mine = (*manager)->WhatThisRankWrites(state, {});
      ASSERT_TRUE(mine.ok()) << mine.status();
      EXPECT_EQ(counted.calls() - before, save == 0 ? 1 : 0);
      const c10::impl::GenericDict model = mine->root.at("model").toGenericDict();
      EXPECT_TRUE(model.at("embedding.weight").toTensor().is_meta());
      const absl::Status saved = (*manager)->Save("epoch_1", *mine).status();
      EXPECT_TRUE(saved.ok()) << saved;
    }
    EXPECT_GT(counted.gathered(), 0u);  // digests of blocks, which rank 0 alone writes down
  });
  const absl::StatusOr<State> read = Read();
  ASSERT_TRUE(read.ok()) << read.status();
  const c10::impl::GenericDict model = read->root.at("model").toGenericDict();
  EXPECT_TRUE(at::equal(model.at("embedding.weight").toTensor(), Embedding()));
  EXPECT_EQ(read->per_rank.at(2).at("rng").toTensor().numel(), 20);
}

TEST_F(ShardedTest, AStructureChangesOnAllRanksOrTheSaveFailsOnAll) {
  for (const bool on_all : {true, false}) {
    SCOPED_TRACE(on_all);
    std::filesystem::remove_all(directory_);
    CountingFiles files;
    RunCoordinatedRanks(3, [&](const Coordinator& ranks) {
      const auto manager =
          Manager::Create({.directory = directory_, .format = "sharded", .files = &files}, ranks);
      ASSERT_TRUE(manager.ok()) << manager.status();
      const auto save = [&](bool has_more) {
        State state = StateOf(ranks.rank(), 3);
        if (has_more) state.root.insert("more", at::ones({4}));
        const absl::StatusOr<State> mine = (*manager)->WhatThisRankWrites(state, {});
        return mine.ok() ? (*manager)->Save("epoch_1", *mine).status() : mine.status();
      };
      EXPECT_TRUE(save(false).ok());
      const int before = files.opened.load();
      EXPECT_GT(before, 0);
      const absl::Status saved = save(on_all || ranks.rank() == 1);
      if (on_all) {
        EXPECT_TRUE(saved.ok()) << saved;
      } else {
        EXPECT_EQ(saved.code(), absl::StatusCode::kInvalidArgument) << saved;
        EXPECT_TRUE(absl::StrContains(saved.message(), "the state of rank 1 has other tensors"))
            << saved;
        // No rank goes on before rank 0 does.
        EXPECT_TRUE(ranks.rank() != 0 || files.opened == before);
      }
      // All of them ask each other again.
      EXPECT_TRUE(save(on_all).ok());
    });
    EXPECT_EQ(Read()->root.contains("more"), on_all);
  }
}

TEST_F(ShardedTest, RowsThatAreNotThoseOfThisRankAreRefused) {
  for (const bool of_other : {false, true}) {
    std::vector<absl::Status> saved(2);
    RunCoordinatedRanks(2, [&](const Coordinator& ranks) {
      const auto manager = Manager::Create({.directory = directory_, .format = "sharded"}, ranks);
      State state = (*manager)->WhatThisRankWrites(StateOf(ranks.rank(), 2), {}).value();
      ShardedTensor& rows = state.sharded.at("model/embedding.weight");
      if (of_other) {
        std::get<Box>(rows.parts[0].part).offset[0] = ranks.rank() == 0 ? 750 : 0;
      } else {
        rows.parts.clear();
      }
      saved[static_cast<size_t>(ranks.rank())] = (*manager)->Save("epoch_1", state).status();
    });
    EXPECT_EQ(saved[0].code(), absl::StatusCode::kInvalidArgument) << saved[0];
    EXPECT_EQ(saved[1].code(), absl::StatusCode::kInvalidArgument) << saved[1];
    EXPECT_FALSE(std::filesystem::exists(Folder()));
  }
}

}  // namespace
}  // namespace ddp::checkpoint::sharded
