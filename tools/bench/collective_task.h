// What one rank is asked to do by //tools/bench:collectives, and the data to do it on. Free of
// torch and of MPI, because the peers that we are compared with use it, too.
//
//   DDP_ASSIGN_OR_RETURN(Task task, ParseTask("do=time op=allreduce dtype=float32 bytes=1024 …"));
//   Pattern mine = Input(task, {.rank = 1, .world_size = 2}, task.seed);
//   mine.Fill(input, InputElements(task, 2));
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::tools::bench {

enum class CollectiveOp { kAllReduce, kReduceScatter, kAllGather, kBroadcast };
enum class Dtype { kFloat32, kFloat64, kFloat16, kBFloat16, kInt32, kInt64 };

int64_t ElementSize(Dtype dtype);  // bytes

// A rank's order, one line of `name=value` words. What a line leaves out has the default here.
// A variant: the input lies where the output wants it.
inline constexpr absl::string_view kInPlace = "in_place";

struct Task {
  // time: a burst of `iterations` calls between barriers. verify: so many calls, each on fresh
  // data, each result compared. free: give the buffers back.
  enum class Do { kTime, kVerify, kFree } what = Do::kTime;
  CollectiveOp op = CollectiveOp::kAllReduce;
  Dtype dtype = Dtype::kFloat32;
  // Of the larger of a rank's two buffers: what all-gather leaves, what reduce-scatter takes.
  int64_t bytes = 0;
  int64_t iterations = 1;
  std::string through;  // which of its ways into the collective a program takes
  std::string variant;  // which of several ways to do the same work
  bool arena = false;   // tensors in the backend's shared memory
  uint64_t seed = 0;    // of the data
  // Of the data that the result is compared with. Another than `seed` must fail.
  uint64_t expected_seed = 0;
};

// InvalidArgument names the word.
absl::StatusOr<Task> ParseTask(absl::string_view line);

// Elements of a rank's input and output. InvalidArgument where `bytes` is no whole number of
// elements for each rank.
absl::StatusOr<int64_t> Elements(const Task& task, int world_size);
int64_t InputElements(const Task& task, int world_size);
int64_t OutputElements(const Task& task, int world_size);

struct Place {
  int rank = 0;
  int world_size = 1;
};

// Endless elements that repeat after a prime number of them, so that data which ends up displaced
// by a power of two, as a wrong chunk would be, does not match. Small whole numbers, exact in each
// type also after they were summed over the ranks (at most 128 of them). Thread-compatible.
class Pattern {
 public:
  Pattern(Dtype dtype, std::vector<uint8_t> period);

  // Writes elements first … first+n-1.
  void Fill(void* destination, int64_t n, int64_t first = 0) const;

  // Index, counted from 0, of the first of n elements that is not element first+index.
  std::optional<int64_t> Mismatch(const void* source, int64_t n, int64_t first = 0) const;

 private:
  int64_t element_size_;
  std::vector<char> period_;  // encoded
};

// What a rank puts in.
Pattern Input(const Task& task, const Place& place, uint64_t seed);

// Compares a rank's output with what the inputs of all ranks make of it; Internal says where it
// differs.
absl::Status CheckOutput(const Task& task, const Place& place, const void* output);

}  // namespace ddp::tools::bench
