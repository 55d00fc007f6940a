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
// A loader is for one pass. To resume within an epoch, pass the remaining indices. Loader is that
// of data::Batch; LoaderOf<Cameras> gives batches of another type, AnyLoader those of any.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status.h"
#include "ddp/data/batch.h"
#include "ddp/data/dataset.h"

namespace ddp::data {

struct LoaderOptions {
  int64_t batch_size = 1;   // examples per batch, >= 1
  bool drop_last = false;   // drop the last batch if it is short
  int num_workers = 1;      // threads that call GetAny; 0: Next calls it itself
  int prefetch_factor = 2;  // batches per worker that may exist ahead of Next, >= 1
};

// Batches are in the order of the indices, whatever the number of workers. At most num_workers *
// prefetch_factor batches exist besides those that the caller has taken.
//
// Each worker runs torch's operators on one thread, so it uses at most one core.
//
// Thread-compatible; not collective.
class AnyLoader {
 public:
  // `dataset` must outlive the loader. InvalidArgument for an invalid option or an index outside
  // the dataset, with its name or number. `indices` may be empty.
  static absl::StatusOr<std::unique_ptr<AnyLoader>> Create(const AnyDataset& dataset,
                                                           std::vector<int64_t> indices,
                                                           const LoaderOptions& options);

  // Stops the workers, also within an epoch. Waits for running calls of GetAny, at most one per
  // worker.
  ~AnyLoader();

  AnyLoader(const AnyLoader&) = delete;
  AnyLoader& operator=(const AnyLoader&) = delete;

  // Blocks until the next batch is loaded; nullopt after the last. If the dataset threw, returns an
  // error with the batch's number in its place, and again from every later call. The code is that
  // of StatusFromException (base/status.h).
  absl::StatusOr<std::optional<AnyBatch>> Next();

  // Number of batches in the whole pass.
  int64_t num_batches() const { return num_batches_; }

 private:
  class Workers;

  AnyLoader(const AnyDataset& dataset, std::vector<int64_t> indices, const LoaderOptions& options);

  absl::StatusOr<AnyBatch> Gather(int64_t number) const;

  const AnyDataset& dataset_;
  const std::vector<int64_t> indices_;
  const LoaderOptions options_;
  const int64_t num_batches_;
  int64_t next_ = 0;                  // number of the batch that Next returns next
  absl::Status failure_;              // the error that Next returned
  std::unique_ptr<Workers> workers_;  // null with num_workers 0
};

// The same for batches of type B: an AnyLoader whose batches are taken out.
template <Tree B>
class LoaderOf {
 public:
  // See AnyLoader.
  static absl::StatusOr<std::unique_ptr<LoaderOf>> Create(const AnyDataset& dataset,
                                                          std::vector<int64_t> indices,
                                                          const LoaderOptions& options) {
    DDP_ASSIGN_OR_RETURN(std::unique_ptr<AnyLoader> loader,
                         AnyLoader::Create(dataset, std::move(indices), options));
    return std::unique_ptr<LoaderOf>(new LoaderOf(std::move(loader)));
  }

  // As AnyLoader::Next; an error that names both types if the data set's batches are of another.
  absl::StatusOr<std::optional<B>> Next() {
    DDP_ASSIGN_OR_RETURN(std::optional<AnyBatch> batch, loader_->Next());
    if (!batch) return std::nullopt;
    return CatchStatus("", [&]() -> absl::StatusOr<std::optional<B>> {
      return std::optional<B>(std::move(batch->Get<B>()));
    });
  }

  int64_t num_batches() const { return loader_->num_batches(); }

 private:
  explicit LoaderOf(std::unique_ptr<AnyLoader> loader) : loader_(std::move(loader)) {}

  const std::unique_ptr<AnyLoader> loader_;
};

using Loader = LoaderOf<Batch>;

}  // namespace ddp::data
