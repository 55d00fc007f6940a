// What each rank has for each other, in places that a pair of ranks swaps with every chunk
// (docs/shm_protocol.md, "Places"), run in every order that processors allow; and weakened in every
// way that matters, which must show.
#include <cstdio>
#include <functional>
#include <utility>
#include <vector>

#include "backends/shm/engine/layout.h"
#include "backends/shm/engine/model_checker.h"
#include "gtest/gtest.h"

namespace ddp::backends::shm {
namespace {

using model::Await;
using model::Expect;
using model::Explore;
using model::kAcquire;
using model::kRelaxed;
using model::kRelease;
using model::Order;
using model::Program;
using model::Result;
using model::Store;

struct Protocol {
  bool slots_first = true;  // a round of slots before the first chunk
  bool swaps = true;
  bool waits_for_idle = true;  // also for ranks that have nothing for this one
  Order staged_store = kRelease;
  Order staged_load = kAcquire;
};

bool All(int, int) { return true; }
bool OnlyToRankZero(int, int to) { return to == 0; }
bool ToTheNextOfThree(int from, int to) { return to == (from + 1) % 3; }

// The ranks go through so many chunks, of which `sends` says who has something for whom. Before
// that they read their own stages, as at the end of an all-reduce.
Result RunPlaces(int ranks, int chunks, const Protocol& protocol,
                 const std::function<bool(int from, int to)>& sends = All) {
  // Locations: a word of staged and one of slots per rank; of each stage a quota per other rank.
  const auto staged = [](int rank) { return rank; };
  const auto slot = [=](int rank) { return ranks + rank; };
  const auto quota = [=](int stage, int of, int chunk) {
    const int other = of < stage ? of : of - 1;
    return 2 * ranks + (stage * kStages + chunk % kStages) * (ranks - 1) + other;
  };
  const auto place = [&](int from, int to, int chunk) {
    const bool swapped = protocol.swaps && chunk / kStages % 2 == 0;
    return swapped ? quota(to, from, chunk) : quota(from, to, chunk);
  };
  const auto message = [](int from, int chunk) { return chunk * 4 + from + 1; };

  std::vector<Program> programs;
  for (int rank = 0; rank < ranks; ++rank) {
    Program program;
    const auto peers = [&](const std::function<void(int)>& each) {
      for (int i = 1; i < ranks; ++i) each((rank + i) % ranks);
    };
    peers([&](int peer) { program.push_back(Expect(quota(rank, peer, 0), 0)); });
    program.push_back(Store(slot(rank), 1, kRelease));
    if (protocol.slots_first) {
      peers([&](int peer) { program.push_back(Await(slot(peer), 1, kAcquire)); });
    }
    for (int chunk = 0; chunk <= chunks; ++chunk) {
      if (chunk < chunks) {
        peers([&](int peer) {
          if (!sends(rank, peer)) return;
          program.push_back(Store(place(rank, peer, chunk), message(rank, chunk), kRelaxed));
        });
        program.push_back(Store(staged(rank), chunk + 1, protocol.staged_store));
      }
      if (chunk == 0) continue;
      peers([&](int peer) {
        if (!sends(peer, rank) && !protocol.waits_for_idle) return;
        program.push_back(Await(staged(peer), chunk, protocol.staged_load));
        if (!sends(peer, rank)) return;
        program.push_back(Expect(place(peer, rank, chunk - 1), message(peer, chunk - 1)));
      });
    }
    programs.push_back(std::move(program));
  }
  return Explore(std::move(programs));
}

TEST(PlacesModelTest, EveryChunkIsReadAsItWasWritten) {
  const Result result = RunPlaces(2, 9, {});
  EXPECT_EQ(result.violation, "");
  std::printf("%zu states\n", result.states);
}

// Three ranks that all have something for each other come to nine million states, some gigabytes.
TEST(PlacesModelTest, AlsoWhereSomeHaveNothingToSend) {
  EXPECT_EQ(RunPlaces(2, 9, {}, OnlyToRankZero).violation, "");
  EXPECT_EQ(RunPlaces(3, 5, {}, OnlyToRankZero).violation, "");
  const Result ring = RunPlaces(3, 5, {}, ToTheNextOfThree);
  EXPECT_EQ(ring.violation, "");
  std::printf("%zu states\n", ring.states);
}

TEST(PlacesModelTest, ThoseMustBeWaitedForAsWell) {
  EXPECT_NE(RunPlaces(2, 9, {.waits_for_idle = false}, OnlyToRankZero).violation, "");
}

TEST(PlacesModelTest, WithoutSlotsAStageMayStillBeInUse) {
  EXPECT_NE(RunPlaces(2, 1, {.slots_first = false}).violation, "");
}

TEST(PlacesModelTest, PlacesThatAreNotSwappedNeedAcknowledgements) {
  EXPECT_NE(RunPlaces(2, 4, {.swaps = false}, OnlyToRankZero).violation, "");
}

TEST(PlacesModelTest, StagedMustReleaseAndAcquire) {
  EXPECT_NE(RunPlaces(2, 3, {.staged_store = kRelaxed}).violation, "");
  EXPECT_NE(RunPlaces(2, 3, {.staged_load = kRelaxed}).violation, "");
}

}  // namespace
}  // namespace ddp::backends::shm
