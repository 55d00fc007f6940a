// Loads batches of a dataset in a given order, ahead of their use, with background threads.
//
//   DDP_ASSIGN_OR_RETURN(auto loader, Loader::Create(train, {.batch_size = 64}));
//   for (int epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);
//     DDP_RETURN_IF_ERROR(loader->Begin(sampler.ShareFrom(0)));
//     while (true) {
//       DDP_ASSIGN_OR_RETURN(std::optional<Batch> batch, loader->Next());
//       if (!batch) break;  // the end of the epoch
//       …
//     }
//   }
//
// Create(dataset, indices, options) makes one pass over some indices. Loader is that of
// data::Batch; LoaderOf<Cameras> gives batches of another type, AnyLoader those of any.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "c10/core/Device.h"
#include "ddp/data/batch.h"
#include "ddp/data/dataset.h"
#include "ddp/data/sampler.h"

namespace ddp::data {

struct LoaderOptions {
  int64_t batch_size = 1;   // examples per batch, >= 1
  bool drop_last = false;   // drop the last batch if it is short
  int num_workers = 1;      // threads that call GetAny; 0: Next calls it itself
  int prefetch_factor = 2;  // batches per worker that may exist ahead of Next, >= 1
  // The device to which batches are copied, if they are to be in pinned memory: then the copies run
  // beside the program. The CPU: they are not.
  c10::Device pin_memory_device = c10::Device(c10::kCPU);
  // A wait of Next for a worker that takes longer is reported in the log; zero: it is not.
  absl::Duration stall = absl::ZeroDuration();
};

// Batches are in the order of the pass, whatever the number of workers. At most num_workers *
// prefetch_factor batches exist besides those that the caller has taken. Random numbers of an
// example depend on its place alone (Share).
//
// Workers live as long as the loader. Each runs torch's operators on one thread, so it uses at most
// one core. A data set without random access has at most one.
//
// Thread-compatible; not collective.
class AnyLoader {
 public:
  // `dataset` must outlive the loader, which has no batches before Begin. InvalidArgument names an
  // invalid option.
  static absl::StatusOr<std::unique_ptr<AnyLoader>> Create(const AnyDataset& dataset,
                                                           const LoaderOptions& options);
  // Begins a first pass over `indices`, which may be empty. Also InvalidArgument for an index
  // outside the dataset.
  static absl::StatusOr<std::unique_ptr<AnyLoader>> Create(const AnyDataset& dataset,
                                                           std::vector<int64_t> indices,
                                                           const LoaderOptions& options);

  // Stops the workers, also within a pass. Waits for running calls of GetAny, at most one per
  // worker.
  ~AnyLoader();

  AnyLoader(const AnyLoader&) = delete;
  AnyLoader& operator=(const AnyLoader&) = delete;

  // Begins a pass. What is left of the one before is dropped; waits for running calls of GetAny.
  absl::Status Begin(Share share);

  // Blocks until the next batch is loaded; nullopt after the last. If the dataset threw, or the
  // order has an index outside it, returns an error in the batch's place, which names the batch and
  // the example, and again from every later call of the pass. The code is that of
  // StatusFromException (base/status.h).
  absl::StatusOr<std::optional<AnyBatch>> Next();

  // Number of batches in the whole pass.
  int64_t num_batches() const { return num_batches_; }

 private:
  class Workers;

  AnyLoader(const AnyDataset& dataset, const LoaderOptions& options);

  absl::StatusOr<AnyBatch> Gather(int64_t number) const;
  absl::StatusOr<AnyBatch> Read(int64_t first, int64_t size) const;

  const AnyDataset& dataset_;
  const LoaderOptions options_;
  Share share_;
  int64_t num_batches_ = 0;
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
                                                          const LoaderOptions& options) {
    DDP_ASSIGN_OR_RETURN(std::unique_ptr<AnyLoader> loader, AnyLoader::Create(dataset, options));
    return std::unique_ptr<LoaderOf>(new LoaderOf(std::move(loader)));
  }
  static absl::StatusOr<std::unique_ptr<LoaderOf>> Create(const AnyDataset& dataset,
                                                          std::vector<int64_t> indices,
                                                          const LoaderOptions& options) {
    DDP_ASSIGN_OR_RETURN(std::unique_ptr<AnyLoader> loader,
                         AnyLoader::Create(dataset, std::move(indices), options));
    return std::unique_ptr<LoaderOf>(new LoaderOf(std::move(loader)));
  }

  // See AnyLoader.
  absl::Status Begin(Share share) { return loader_->Begin(std::move(share)); }

  // Works as AnyLoader::Next; returns an error that names both types if the data set's batches are
  // of another.
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
