// Batches of a dataset in a given order, gathered ahead of their use by background threads.
//
//   DDP_ASSIGN_OR_RETURN(auto loader,
//                        Loader::Create(train, sampler.Indices(), {.batch_size = 64}));
//   while (true) {
//     DDP_ASSIGN_OR_RETURN(std::optional<Batch> batch, loader->Next());
//     if (!batch) break;  // the end of the epoch
//     …
//   }
//
// A loader serves one pass. To go on in the middle of an epoch, hand over the rest of its indices.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "ddp/data/dataset.h"

namespace ddp::data {

struct LoaderOptions {
  int64_t batch_size = 1;   // examples per batch, >= 1
  bool drop_last = false;   // drop the last batch if it is short
  int num_workers = 1;      // threads that call Dataset::Get; 0: Next calls it itself
  int prefetch_factor = 2;  // batches per worker that may exist ahead of Next, >= 1
};

// Batches come in the order of the indices, whatever the number of workers. At most num_workers *
// prefetch_factor batches are alive besides those the caller holds.
//
// Each worker runs torch's operators on one thread, so that it does not compete with the training
// step for more than one core.
//
// Thread-compatible. Nothing here is collective.
class Loader {
 public:
  // `dataset` must outlive the loader. InvalidArgument, naming it, for a bad option or an index
  // outside the dataset. Without indices there are no batches.
  static absl::StatusOr<std::unique_ptr<Loader>> Create(const Dataset& dataset,
                                                        std::vector<int64_t> indices,
                                                        const LoaderOptions& options);

  // Ends the workers, also in the middle of the epoch; waits for at most one running Dataset::Get
  // of each.
  ~Loader();

  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // The next batch; nullopt after the last. Blocks until it is there. Where the dataset threw, the
  // error comes in that batch's place with its number, and again from every later call.
  absl::StatusOr<std::optional<Batch>> Next();

  int64_t num_batches() const { return num_batches_; }

 private:
  class Workers;

  Loader(const Dataset& dataset, std::vector<int64_t> indices, const LoaderOptions& options);

  absl::StatusOr<Batch> Gather(int64_t number) const;

  const Dataset& dataset_;
  const std::vector<int64_t> indices_;
  const LoaderOptions options_;
  const int64_t num_batches_;
  int64_t next_ = 0;                  // number of the batch that Next returns next
  absl::Status failure_;              // what Next failed with
  std::unique_ptr<Workers> workers_;  // null with num_workers 0
};

}  // namespace ddp::data
