#include "backends/conformance/runs.h"

#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/conformance/cover.h"
#include "backends/conformance/fuzz.h"
#include "backends/conformance/rank_pool.h"

namespace ddp::backends::conformance {
namespace {

// Calls `run` with each case and its number until it returns false.
void ForEachCase(const RunOptions& options, const std::function<bool(const Case&, uint64_t)>& run) {
  const std::vector<Case> cover = options.full ? std::vector<Case>() : PairwiseCover();
  const int64_t size = options.full ? FullProductSize() : static_cast<int64_t>(cover.size());
  for (int64_t i = options.shard; i < size; i += options.shards) {
    const std::optional<Case> c = options.full ? FullProduct(i) : cover[i];
    if (!c || FindGap(TraitsOf(options.backend), *c) != nullptr) continue;
    if (!absl::StrContains(CaseName(*c), options.filter)) continue;
    if (!run(*c, i * 10)) return;
  }
}

void PrintEnd(const RunOptions& options, absl::string_view what, int64_t done, int failures) {
  std::cout << options.backend << ": " << done << " " << what << ", " << failures << " failures"
            << std::endl;
}

}  // namespace

int RunCasesInThreads(const RunOptions& options) {
  std::map<int, std::unique_ptr<RankPool>> pools;
  int64_t cases = 0;
  int failures = 0;
  ForEachCase(options, [&](const Case& c, uint64_t salt) {
    std::unique_ptr<RankPool>& pool = pools[c.world_size];
    if (pool == nullptr) {
      pool = std::make_unique<RankPool>(options.backend, c.world_size, absl::Seconds(60));
    }
    const absl::Status worst =
        Worst(pool->Run([&](int, Groups& groups) { return groups.Run(c, salt); }));
    ++cases;
    if (!worst.ok()) {
      ++failures;
      std::cout << "FAILED " << options.backend << "_" << CaseName(c) << ": " << worst << std::endl;
      pool->Reset();
    }
    return true;
  });
  PrintEnd(options, "cases", cases, failures);
  return failures;
}

int RunHugeInThreads(const RunOptions& options) {
  // These sizes exceed 31 bits, in elements of one message and in bytes of all of them.
  constexpr int64_t kMessage = (int64_t{1} << 31) + 5, kHalf = (int64_t{1} << 30) + 5;
  const Case cases[] = {
      {.op = Op::kAllreduce, .dtype = c10::ScalarType::Byte, .count = kMessage},
      {.op = Op::kBroadcast, .dtype = c10::ScalarType::Byte, .count = kMessage},
      {.op = Op::kSendRecv, .dtype = c10::ScalarType::Float, .count = kHalf / 2},
      {.op = Op::kReduceScatterBase, .dtype = c10::ScalarType::Byte, .count = kHalf},
      {.op = Op::kAllgatherBase, .dtype = c10::ScalarType::Byte, .count = kHalf},
      {.op = Op::kAlltoallBase, .dtype = c10::ScalarType::Byte, .count = kHalf},
  };
  int failures = 0;
  int64_t done = 0;
  for (const Case& c : cases) {
    if (!absl::StrContains(CaseName(c), options.filter)) continue;
    RankPool pool(options.backend, c.world_size, absl::Minutes(10));
    const absl::Status worst =
        Worst(pool.Run([&](int, Groups& groups) { return groups.Run(c, /*salt=*/options.seed); }));
    ++done;
    if (worst.ok()) continue;
    ++failures;
    std::cout << "FAILED " << options.backend << "_" << CaseName(c) << ": " << worst << std::endl;
  }
  PrintEnd(options, "huge cases", done, failures);
  return failures;
}

int FuzzInThreads(const RunOptions& options) {
  constexpr int64_t kStepsPerGroup = 500;
  int64_t steps = 0;
  int failures = 0;
  uint64_t seed = options.seed;
  while (steps < options.steps) {
    for (int world_size : AllWorldSizes()) {
      RankPool pool(options.backend, world_size, absl::Seconds(60));
      const int64_t count = std::min(kStepsPerGroup, options.steps);
      const absl::Status worst = Worst(pool.Run(
          [&](int, Groups& groups) { return Fuzz(groups, {.seed = seed, .steps = count}); }));
      steps += count;
      if (!worst.ok()) {
        ++failures;
        std::cout << "FAILED " << options.backend << ", world size " << world_size << ": " << worst
                  << std::endl;
      }
    }
    ++seed;
  }
  PrintEnd(options, "steps", steps, failures);
  return failures;
}

int RunCases(const RunOptions& options, Groups& groups) {
  const int rank = groups.world().getRank(), world_size = groups.world().getSize();
  int64_t cases = 0;
  absl::Status status;
  ForEachCase(options, [&](Case c, uint64_t salt) {
    if (options.full && c.world_size != world_size) return true;
    // The cover holds each pair once, at some world size; here all of it runs at this one.
    c.world_size = world_size;
    if (!IsMeaningful(c) || FindGap(groups.traits(), c) != nullptr) return true;
    ++cases;
    status = groups.Run(c, salt);
    if (!status.ok()) {
      std::cout << "FAILED " << options.backend << "_" << CaseName(c) << ", rank " << rank << ": "
                << status << std::endl;
    }
    return status.ok();
  });
  if (rank == 0 || !status.ok()) PrintEnd(options, "cases", cases, status.ok() ? 0 : 1);
  return status.ok() ? 0 : 1;
}

int FuzzRank(const RunOptions& options, Groups& groups) {
  const absl::Status status = Fuzz(groups, {.seed = options.seed, .steps = options.steps});
  if (!status.ok()) std::cout << "FAILED " << options.backend << ": " << status << std::endl;
  if (groups.world().getRank() == 0 || !status.ok()) {
    PrintEnd(options, "steps", options.steps, status.ok() ? 0 : 1);
  }
  return status.ok() ? 0 : 1;
}

}  // namespace ddp::backends::conformance
