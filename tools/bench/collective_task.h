// Tasks of a rank of //tools/bench:collectives, and their test data. Free of torch and MPI, since
// the programs of other libraries use it, too.
//
//   DDP_ASSIGN_OR_RETURN(CollectiveTask task, ParseTask("do=time op=allreduce dtype=float32
//   bytes=1024 …")); Pattern mine = Input(task, {.rank = 1, .world_size = 2}, task.seed);
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

// Value of CollectiveTask::variant: input and output share a buffer.
inline constexpr absl::string_view kInPlace = "in_place";

// A task, sent as a line of `name=value` words; words that are left out have these defaults.
struct CollectiveTask {
  // time: a burst of `iterations` calls between barriers. verify: `iterations` calls, each with new
  // data and a check of its result. free: release the buffers.
  enum class Do { kTime, kVerify, kFree } what = Do::kTime;
  CollectiveOp op = CollectiveOp::kAllReduce;
  Dtype dtype = Dtype::kFloat32;
  // Size of the larger of a rank's two buffers: all-gather's output, reduce-scatter's input.
  int64_t bytes = 0;
  int64_t iterations = 1;
  std::string through;  // which API of the program: process_group, backend, raw
  std::string variant;  // which of several variants, such as in_place
  bool arena = false;   // use tensors in the backend's shared memory
  uint64_t seed = 0;    // of the data
  // Seed of the data for the expected result. With a value other than `seed`, verification must
  // fail.
  uint64_t expected_seed = 0;
};

// InvalidArgument, with the word, for a line that cannot be parsed.
absl::StatusOr<CollectiveTask> ParseTask(absl::string_view line);

// Number of elements of the larger buffer, and of a rank's input and output. InvalidArgument if
// `bytes` is not a whole number of elements per rank.
absl::StatusOr<int64_t> Elements(const CollectiveTask& task, int world_size);
int64_t InputElements(const CollectiveTask& task, int world_size);
int64_t OutputElements(const CollectiveTask& task, int world_size);

struct Place {
  int rank = 0;
  int world_size = 1;
};

// An infinite sequence with a prime period, so that data that is displaced by a power of two, such
// as a wrong chunk, does not match. Small whole numbers, whose sums over up to 128 ranks are exact
// in every dtype. Thread-compatible.
class Pattern {
 public:
  Pattern(Dtype dtype, std::vector<uint8_t> period);

  // Writes elements first … first+n-1.
  void Fill(void* destination, int64_t n, int64_t first = 0) const;

  // Index in `source` of the first of n elements that differs from element first + index; nullopt
  // if all match.
  std::optional<int64_t> Mismatch(const void* source, int64_t n, int64_t first = 0) const;

 private:
  int64_t element_size_;
  std::vector<char> period_;  // encoded
};

// The input of a rank.
Pattern Input(const CollectiveTask& task, const Place& place, uint64_t seed);

// Compares a rank's output with the expected result of all ranks' inputs. Internal, with the
// position of the first difference.
absl::Status CheckOutput(const CollectiveTask& task, const Place& place, const void* output);

}  // namespace ddp::tools::bench
