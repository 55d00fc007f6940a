#include "ddp/data/loader.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status.h"

// The function is in libgomp, which LibTorch includes. It is declared here since <omp.h> may not be
// installed.
extern "C" void omp_set_num_threads(int);

namespace ddp::data {
namespace {

int64_t NumBatches(int64_t examples, const LoaderOptions& options) {
  const int64_t full = examples / options.batch_size;
  return full + (!options.drop_last && examples % options.batch_size != 0);
}

// Affects the calling thread only. at::set_num_threads would also change the default of threads
// that start later. Torch sets the number itself at a thread's first use: at::get_num_threads
// triggers that.
void UseOneTorchThread() {
  at::get_num_threads();
  omp_set_num_threads(1);
}

}  // namespace

// Threads that load batches 0 … count-1 into a ring buffer. Batch b goes to slot b modulo the
// ring's size, and is started only after batch b - size was taken, so its slot is free.
class AnyLoader::Workers {
 public:
  using Gather = std::function<absl::StatusOr<AnyBatch>(int64_t number)>;

  Workers(int64_t count, int threads, int64_t ring_size, Gather gather)
      : count_(count), gather_(std::move(gather)), ring_(ring_size) {
    try {
      for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
    } catch (...) {
      Stop();  // those that have started
      throw;
    }
  }

  ~Workers() { Stop(); }

  // Waits for the next batch and takes it. Call it at most `count` times.
  absl::StatusOr<AnyBatch> Take() {
    std::unique_lock lock(mutex_);
    auto& slot = ring_[taken_ % ring_.size()];
    batch_ready_.wait(lock, [&] { return slot.has_value(); });
    absl::StatusOr<AnyBatch> batch = *std::move(slot);
    slot.reset();
    ++taken_;
    lock.unlock();
    slot_freed_.notify_one();
    return batch;
  }

 private:
  void Stop() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    slot_freed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void Run() {
    UseOneTorchThread();
    std::unique_lock lock(mutex_);
    while (true) {
      slot_freed_.wait(lock, [&] {
        return stop_ || begun_ == count_ || begun_ - taken_ < static_cast<int64_t>(ring_.size());
      });
      if (stop_ || begun_ == count_) return;
      const int64_t number = begun_++;
      lock.unlock();
      absl::StatusOr<AnyBatch> batch = gather_(number);
      lock.lock();
      // The consumer stops at the first failure, so start no more batches.
      if (!batch.ok()) begun_ = count_;
      ring_[number % ring_.size()] = std::move(batch);
      batch_ready_.notify_one();
      // No batches are left, perhaps because of a failure: wake waiting workers, so that they exit.
      if (begun_ == count_) slot_freed_.notify_all();
    }
  }

  const int64_t count_;
  const Gather gather_;

  std::mutex mutex_;
  std::condition_variable batch_ready_;
  std::condition_variable slot_freed_;
  // Guarded by mutex_.
  std::vector<std::optional<absl::StatusOr<AnyBatch>>> ring_;
  int64_t begun_ = 0;  // batches that workers have started
  int64_t taken_ = 0;  // batches that the consumer has taken
  bool stop_ = false;

  std::vector<std::thread> threads_;
};

absl::StatusOr<std::unique_ptr<AnyLoader>> AnyLoader::Create(const AnyDataset& dataset,
                                                             std::vector<int64_t> indices,
                                                             const LoaderOptions& options) {
  const auto at_least = [](absl::string_view option, int64_t value, int64_t min) {
    if (value >= min) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("loader option ", option, " is ", value, "; it must be at least ", min));
  };
  DDP_RETURN_IF_ERROR(at_least("batch_size", options.batch_size, 1));
  DDP_RETURN_IF_ERROR(at_least("num_workers", options.num_workers, 0));
  DDP_RETURN_IF_ERROR(at_least("prefetch_factor", options.prefetch_factor, 1));
  const int64_t size = dataset.size();
  for (int64_t index : indices) {
    if (index < 0 || index >= size) {
      return absl::InvalidArgumentError(
          absl::StrCat("index ", index, " is outside a dataset of ", size, " examples"));
    }
  }
  return CatchStatus("loader", [&] {
    return std::unique_ptr<AnyLoader>(new AnyLoader(dataset, std::move(indices), options));
  });
}

AnyLoader::AnyLoader(const AnyDataset& dataset, std::vector<int64_t> indices,
                     const LoaderOptions& options)
    : dataset_(dataset),
      indices_(std::move(indices)),
      options_(options),
      num_batches_(NumBatches(indices_.size(), options)) {
  const int64_t threads = std::min<int64_t>(options.num_workers, num_batches_);
  if (threads > 0) {
    workers_ = std::make_unique<Workers>(num_batches_, threads, threads * options.prefetch_factor,
                                         [this](int64_t number) { return Gather(number); });
  }
}

AnyLoader::~AnyLoader() = default;

absl::StatusOr<std::optional<AnyBatch>> AnyLoader::Next() {
  DDP_RETURN_IF_ERROR(failure_);
  if (next_ == num_batches_) return std::nullopt;
  absl::StatusOr<AnyBatch> batch = workers_ ? workers_->Take() : Gather(next_);
  if (!batch.ok()) return failure_ = batch.status();
  ++next_;
  return *std::move(batch);
}

absl::StatusOr<AnyBatch> AnyLoader::Gather(int64_t number) const {
  const auto wanted =
      absl::MakeConstSpan(indices_).subspan(number * options_.batch_size, options_.batch_size);
  return CatchStatus(
      absl::StrCat("loading batch ", number + 1, " of ", num_batches_, " (", wanted.size(),
                   " examples, the first is number ", wanted.front(), ")"),
      [&] {
        AnyBatch batch = dataset_.GetAny(wanted);
        batch.set_indices({wanted.begin(), wanted.end()});
        return batch;
      });
}

}  // namespace ddp::data
