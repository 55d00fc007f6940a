// What each rank has of its own, on its way to rank 0.
#include "checkpoint/consolidate.h"

#include <ATen/Functions.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/coordinator.h"
#include "base/coordinator_testing.h"
#include "checkpoint/format.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint {
namespace {

constexpr int kRanks = 3;
constexpr int64_t kSmall = (64 << 10) / 4;  // elements of the largest small tensor

at::Tensor ValuesOf(int rank, int64_t i, int64_t elements) {
  return at::full({elements}, 10000 * rank + i, at::kInt);
}

c10::impl::GenericDict BuffersOf(int rank, int64_t number, int64_t elements) {
  c10::impl::GenericDict buffers = NewTree();
  for (int64_t i = 0; i < number; ++i) {
    buffers.insert(absl::StrCat(i), ValuesOf(rank, i, elements));
  }
  return buffers;
}

State StateOf(int rank, const c10::impl::GenericDict& buffers) {
  State state;
  state.per_rank.emplace(rank, NewTree()).first->second.insert("buffers", buffers);
  return state;
}

// On rank 0.
at::Tensor Gathered(const State& state, int rank, int64_t i) {
  const c10::impl::GenericDict by_key = state.root.at(kPerRankEntries).toGenericDict();
  const c10::impl::GenericDict buffers =
      by_key.at("buffers").toList().get(static_cast<size_t>(rank)).toGenericDict();
  return buffers.at(absl::StrCat(i)).toTensor();
}

TEST(ConsolidateTest, ManySmallTensorsTakeAsManyRoundsAsOne) {
  std::array<int, 2> calls = {};
  for (const int64_t number : {1, 300}) {
    RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
      const CountingCoordinator counted(ranks);
      const auto state =
          Consolidate(StateOf(ranks.rank(), BuffersOf(ranks.rank(), number, 16)), counted);
      ASSERT_TRUE(state.ok()) << state.status();
      if (ranks.rank() != 0) return;
      calls[number > 1 ? 1 : 0] = counted.calls();
      for (int rank = 0; rank < kRanks; ++rank) {
        for (int64_t i = 0; i < number; ++i) {
          EXPECT_TRUE(at::equal(Gathered(*state, rank, i), ValuesOf(rank, i, 16)));
        }
      }
    });
  }
  EXPECT_EQ(calls[0], calls[1]);
}

TEST(ConsolidateTest, TensorsOfAllSizesAreTheirRanks) {
  RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
    const auto elements_of = [](int rank, int64_t i) {
      return std::array{kSmall, int64_t{0}, kSmall + 1, int64_t{rank} + 1}[i % 4];
    };
    c10::impl::GenericDict buffers = NewTree();
    for (int64_t i = 0; i < 160; ++i) {
      buffers.insert(absl::StrCat(i), ValuesOf(ranks.rank(), i, elements_of(ranks.rank(), i)));
    }
    const auto state = Consolidate(StateOf(ranks.rank(), buffers), ranks);
    ASSERT_TRUE(state.ok()) << state.status();
    for (int rank = 0; rank < kRanks && ranks.rank() == 0; ++rank) {
      for (int64_t i = 0; i < 160; ++i) {
        EXPECT_TRUE(at::equal(Gathered(*state, rank, i), ValuesOf(rank, i, elements_of(rank, i))));
      }
    }
  });
}

// More than the 64 MiB that rank 0 holds, twice, as format safetensors asks for them.
TEST(ConsolidateTest, WhatRank0NoLongerHoldsComesAgain) {
  constexpr int64_t kNumber = 600;
  RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
    const CountingCoordinator counted(ranks);
    const auto gathering =
        Gathering::Begin(StateOf(ranks.rank(), BuffersOf(ranks.rank(), kNumber, kSmall)), counted);
    ASSERT_TRUE(gathering.ok()) << gathering.status();
    const int before = counted.calls();
    const absl::Status given = (*gathering)->Give([&](TensorSource* source) {
      for (int pass = 0; pass < 2; ++pass) {
        for (int rank = 0; rank < kRanks; ++rank) {
          for (int64_t i = 0; i < kNumber; ++i) {
            const at::Tensor place = Gathered((*gathering)->state(), rank, i);
            EXPECT_TRUE(source->Has(place.storage()));
            const absl::StatusOr<at::Tensor> values = source->Get(place.storage());
            if (!values.ok()) return values.status();
            EXPECT_TRUE(at::equal(*values, ValuesOf(rank, i, kSmall)));
          }
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(given.ok()) << given;
    // 75 MiB in messages of 4, with two calls each, and what ends it.
    const int calls = counted.calls() - before;
    EXPECT_GT(calls, 2 * 19);
    EXPECT_LT(calls, 2 * 2 * 20 + 5);
  });
}

TEST(ConsolidateTest, ASmallTensorThatCannotBeSentFailsAll) {
  for (int failing = 0; failing < kRanks; ++failing) {
    for (const char* name : {"0", "9"}) {
      RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
        const c10::impl::GenericDict buffers = BuffersOf(ranks.rank(), 10, 16);
        if (ranks.rank() == failing) {
          buffers.insert_or_assign(name, at::empty({16}, at::dtype(at::kInt).device(at::kMeta)));
        }
        const absl::Status status = Consolidate(StateOf(ranks.rank(), buffers), ranks).status();
        EXPECT_TRUE(absl::StartsWith(status.message(), absl::StrCat("rank ", failing, ": ")))
            << status;
        EXPECT_TRUE(absl::StrContains(status.message(), "meta")) << status;
      });
    }
  }
}

}  // namespace
}  // namespace ddp::checkpoint
