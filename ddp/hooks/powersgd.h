// Hook powersgd: gradients as products of two thin matrices (Vogels et al., arXiv:1905.13727), with
// the semantics of PyTorch's powerSGD_hook.
//
//   hooks::PowerSgdOptions options = {.matrix_approximation_rank = 2, .start_iter = 100};
//   model->register_comm_hook(std::make_unique<hooks::PowerSgdHook>(group, options));
//
// A gradient of n rows and m columns (all dimensions but the first) is approximated by P Q^T, of
// rank r = min(n, m, matrix_approximation_rank). Per backward:
//   1. P = M Q, summed over ranks in one message per bucket, with the tensors of the bucket that
//      are not compressed; then P's columns are made orthonormal;
//   2. Q = M^T P, averaged over ranks; the gradient becomes P Q^T on all ranks.
// A tensor is compressed if (n + m) r min_compression_rate < n m. So a backward sends, in elements,
//   sum over compressed tensors of (n + m) r, and the sum over the others of n m.
// The first start_iter synchronised backwards average without compression, and so do all of the
// buckets of complex gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/options.h"
#include "checkpoint/stateful.h"
#include "ddp/hooks/rounds.h"

namespace ddp::hooks {

// The treatment of a column that is zero after its projections on earlier columns have been
// subtracted.
enum class ZeroColumn {
  kKeep,     // stays zero: for a factor whose zero columns do not contribute to the result
  kReplace,  // a constant column of norm 1: for a factor from which the next step starts
};

// Makes the columns of matrices [batch, rows, columns], with columns <= rows, orthonormal, in
// place, with PyTorch's method: Gram-Schmidt for up to two columns and for 16-bit dtypes, and QR
// otherwise. `epsilon` is added to the norms that Gram-Schmidt divides by. Unlike PyTorch's,
// columns that depend on others become orthogonal, too, and columns of zeros do not become NaN with
// an epsilon of 0. Not collective. Thread-compatible.
void Orthogonalize(at::Tensor matrices, double epsilon, ZeroColumn zero);

// PyTorch's names and defaults, except start_iter (PyTorch: start_powerSGD_iter).
struct PowerSgdOptions {
  int64_t matrix_approximation_rank = 1;
  // Must be at least 2 with use_error_feedback or warm_start, since buckets are rebuilt before the
  // second backward.
  int64_t start_iter = 1000;
  double min_compression_rate = 2;
  // Adds what the approximation left out to the next gradients. Costs memory of the size of the
  // compressed gradients.
  bool use_error_feedback = true;
  // Starts from the Q of the previous backward instead of random numbers.
  bool warm_start = true;
  // Added to the norms of columns. Not needed here where PyTorch needs it: see Orthogonalize.
  double orthogonalization_epsilon = 0;
  // Seed of the initial Q. Must be the same on all ranks.
  int64_t random_seed = 0;
};

constexpr auto OptionsOf(const PowerSgdOptions&) {
  constexpr double kMost = 1e9;
  return Options(
      Option("matrix_approximation_rank", &PowerSgdOptions::matrix_approximation_rank,
             "rank of the approximation of each gradient")
          .AtLeast(1)
          .AtMost(kMost),
      Option("start_iter", &PowerSgdOptions::start_iter,
             "number of backwards before compression starts")
          .AtLeast(0)
          .AtMost(kMost),
      Option("min_compression_rate", &PowerSgdOptions::min_compression_rate,
             "compress only gradients that shrink by more than this factor")
          .AtLeast(0),
      Option("use_error_feedback", &PowerSgdOptions::use_error_feedback,
             "add what the approximation left out to the next gradients"),
      Option("warm_start", &PowerSgdOptions::warm_start,
             "start from the factors of the previous backward instead of random numbers"),
      Option("orthogonalization_epsilon", &PowerSgdOptions::orthogonalization_epsilon,
             "added to the norms of columns when they are made orthonormal")
          .AtLeast(0),
      Option("random_seed", &PowerSgdOptions::random_seed, "seed of the initial factors")
          .AtLeast(0)
          .AtMost(4294967295.0));
}

// All ranks have the same options. Its state is the number of backwards, the random numbers, and by
// bucket the factors, which are the same on all ranks; and what the approximation has left out,
// which is each rank's own. A load says in its notes what the options have no use for. A bucket
// that does not have the gradients of the saved one starts anew, which is logged.
class PowerSgdHook final : public RoundsHook, public checkpoint::Stateful {
 public:
  // Throws c10::Error if start_iter is too small; hooks::Validate reports this earlier.
  PowerSgdHook(c10::intrusive_ptr<c10d::ProcessGroup> group, const PowerSgdOptions& options);

  // {iteration, random_state, buckets: {"0": {shapes, qs}}}; per rank: {"0": errors}. Call these
  // between backwards.
  absl::StatusOr<checkpoint::State> state_dict() override;
  absl::Status CheckStateDict(const checkpoint::State& state) const override;
  absl::Status load_state_dict(const checkpoint::State& state,
                               checkpoint::LoadNotes& notes) override;

 protected:
  std::unique_ptr<BucketRounds> Begin(c10d::GradBucket& bucket) override;
  void EndBuckets() override { ++iteration_; }

 private:
  class Bucket;
  // State of a bucket between backwards. Flat tensors, in the order of its gradients.
  struct Memory {
    std::vector<std::vector<int64_t>> shapes;  // of the gradients that it was made for
    at::Tensor first = {};                     // uncompressed gradients, then Ps
    at::Tensor qs = {};
    at::Tensor last_qs = {};  // with warm_start: those of this backward, before they are updated
    // The errors of compressed gradients; undefined before the first one and without error
    // feedback.
    at::Tensor errors = {};
    bool has_qs = false;
  };

  // State of a bucket from a checkpoint.
  struct Saved {
    std::vector<std::vector<int64_t>> shapes;
    at::Tensor qs = {};      // undefined: there are none
    at::Tensor errors = {};  // likewise
  };
  struct Loaded {
    int64_t iteration = 0;
    std::mt19937 random;
    std::map<size_t, Saved> buckets;  // by index
  };
  absl::StatusOr<Loaded> Read(const checkpoint::State& state) const;
  std::string LeftOut(const Loaded& loaded) const;
  void TakeSaved(size_t index, Memory& memory);

  const PowerSgdOptions options_;
  std::mt19937 random_;
  int64_t iteration_ = 0;
  std::deque<Memory> memory_;        // by the bucket's index; references stay valid
  std::map<size_t, Saved> to_take_;  // by index; until the bucket's first backward with compression
  bool said_other_buckets_ = false;
};

// The shape of a gradient as PowerSGD sees it, and its share of a message.
struct PowerSgdShape {
  int64_t rows = 0, columns = 0;
  int64_t rank = 0;  // 0: not compressed

  int64_t sent() const { return rank > 0 ? (rows + columns) * rank : rows * columns; }
};

// Returns the shape for a gradient of these sizes. One without dimensions, or an empty one, is not
// compressed.
PowerSgdShape ShapeFor(at::IntArrayRef sizes, const PowerSgdOptions& options);

// numpy.random.RandomState(seed).randint(1000000000), where PyTorch's hook takes seeds from: the
// low 30 bits of std::mt19937's numbers, of which those out of range are skipped.
uint64_t NextSeed(std::mt19937& random);

}  // namespace ddp::hooks
