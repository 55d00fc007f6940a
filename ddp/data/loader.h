// Loads batches of a dataset in a given order, ahead of their use, with background threads.
//
//   DDP_ASSIGN_OR_RETURN(auto loader,
//                        Loader::Create(train, sampler.Indices(), {.batch_size = 64}));
//   while (true) {
//     DDP_ASSIGN_OR_RETURN(std::optional<Batch> batch, loader->Next());
//     if (!batch) break;  // the end of the epoch
//     …
//   }
//
// A loader is for one pass. To resume within an epoch, pass the remaining indices.
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

// Batches are in the order of the indices, whatever the number of workers. At most num_workers *
// prefetch_factor batches exist besides those that the caller has taken.
//
// Each worker runs torch's operators on one thread, so it uses at most one core.
//
// Thread-compatible; not collective.
class Loader {
 public:
  // `dataset` must outlive the loader. InvalidArgument for an invalid option or an index outside
  // the dataset, with its name or number. `indices` may be empty.
  static absl::StatusOr<std::unique_ptr<Loader>> Create(const Dataset& dataset,
                                                        std::vector<int64_t> indices,
                                                        const LoaderOptions& options);

  // Stops the workers, also within an epoch. Waits for running Dataset::Get calls, at most one per
  // worker.
  ~Loader();

  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // Blocks until the next batch is loaded; nullopt after the last. If the dataset threw, returns an
  // error with the batch's number in its place, and again from every later call. The code is that
  // of StatusFromException (base/status.h).
  absl::StatusOr<std::optional<Batch>> Next();

  // Number of batches in the whole pass.
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
  absl::Status failure_;              // the error that Next returned
  std::unique_ptr<Workers> workers_;  // null with num_workers 0
};

}  // namespace ddp::data
