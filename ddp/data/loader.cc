#include "ddp/data/loader.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/log/absl_log.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "base/status.h"
#include "c10/core/DeviceGuard.h"

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

absl::Status CheckIndex(int64_t index, int64_t size) {
  if (index >= 0 && index < size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("index ", index, " is outside a dataset of ", size, " examples"));
}

}  // namespace

// Threads that load the batches 0 … count-1 of a pass into a ring buffer. Batch b goes to slot b
// modulo the ring's size, and is started only after batch b - size was taken, so its slot is free.
class AnyLoader::Workers {
 public:
  using Gather = std::function<absl::StatusOr<AnyBatch>(int64_t number)>;

  explicit Workers(Gather gather) : gather_(std::move(gather)) {}

  ~Workers() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    slot_freed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Drops the pass before, and returns when no thread is in a Gather.
  void End() {
    std::unique_lock lock(mutex_);
    begun_ = count_;
    idle_.wait(lock, [&] { return busy_ == 0; });
    for (auto& slot : ring_) slot.reset();
  }

  // After End. `threads`: there are at least so many then.
  void Begin(int64_t count, int64_t threads, int64_t prefetch_factor) {
    {
      std::lock_guard lock(mutex_);
      count_ = count;
      begun_ = taken_ = 0;
      const int64_t all = std::max<int64_t>(threads, static_cast<int64_t>(threads_.size()));
      ring_.resize(std::max<size_t>(ring_.size(), all * prefetch_factor));
    }
    while (static_cast<int64_t>(threads_.size()) < threads) {
      threads_.emplace_back([this] { Run(); });
    }
    slot_freed_.notify_all();
  }

  // Waits for the next batch and takes it. Call it at most `count` times. `stalled` is called each
  // time that the wait has taken another `stall`, if that is not zero.
  absl::StatusOr<AnyBatch> Take(absl::Duration stall,
                                const std::function<void(absl::Duration waited)>& stalled) {
    std::unique_lock lock(mutex_);
    auto& slot = ring_[taken_ % ring_.size()];
    const auto is_ready = [&] { return slot.has_value(); };
    if (stall > absl::ZeroDuration()) {
      const absl::Time begin = absl::Now();
      while (!batch_ready_.wait_for(lock, absl::ToChronoNanoseconds(stall), is_ready)) {
        stalled(absl::Now() - begin);
      }
    } else {
      batch_ready_.wait(lock, is_ready);
    }
    absl::StatusOr<AnyBatch> batch = *std::move(slot);
    slot.reset();
    ++taken_;
    lock.unlock();
    slot_freed_.notify_one();
    return batch;
  }

 private:
  void Run() {
    UseOneTorchThread();
    std::unique_lock lock(mutex_);
    while (true) {
      slot_freed_.wait(lock, [&] {
        return stop_ || (begun_ < count_ && begun_ - taken_ < static_cast<int64_t>(ring_.size()));
      });
      if (stop_) return;
      const int64_t number = begun_++;
      ++busy_;
      lock.unlock();
      absl::StatusOr<AnyBatch> batch = gather_(number);
      lock.lock();
      // The consumer stops at the first failure, so start no more batches.
      if (!batch.ok()) begun_ = count_;
      ring_[number % ring_.size()] = std::move(batch);
      if (--busy_ == 0) idle_.notify_one();
      batch_ready_.notify_one();
    }
  }

  const Gather gather_;

  std::mutex mutex_;
  std::condition_variable batch_ready_;
  std::condition_variable slot_freed_;
  std::condition_variable idle_;
  // Guarded by mutex_.
  int64_t count_ = 0;
  std::vector<std::optional<absl::StatusOr<AnyBatch>>> ring_;
  int64_t begun_ = 0;  // batches that workers have started
  int64_t taken_ = 0;  // batches that the consumer has taken
  int64_t busy_ = 0;   // threads in a Gather
  bool stop_ = false;

  std::vector<std::thread> threads_;
};

absl::StatusOr<std::unique_ptr<AnyLoader>> AnyLoader::Create(const AnyDataset& dataset,
                                                             const LoaderOptions& options) {
  const auto at_least = [](absl::string_view option, int64_t value, int64_t min) {
    if (value >= min) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("loader option ", option, " is ", value, "; it must be at least ", min));
  };
  DDP_RETURN_IF_ERROR(at_least("batch_size", options.batch_size, 1));
  DDP_RETURN_IF_ERROR(at_least("num_workers", options.num_workers, 0));
  DDP_RETURN_IF_ERROR(at_least("prefetch_factor", options.prefetch_factor, 1));
  return std::unique_ptr<AnyLoader>(new AnyLoader(dataset, options));
}

absl::StatusOr<std::unique_ptr<AnyLoader>> AnyLoader::Create(const AnyDataset& dataset,
                                                             std::vector<int64_t> indices,
                                                             const LoaderOptions& options) {
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<AnyLoader> loader, Create(dataset, options));
  for (const int64_t index : indices) DDP_RETURN_IF_ERROR(CheckIndex(index, dataset.size()));
  DDP_RETURN_IF_ERROR(loader->Begin(ShareOf(std::move(indices))));
  return loader;
}

AnyLoader::AnyLoader(const AnyDataset& dataset, const LoaderOptions& options)
    : dataset_(dataset), options_(options) {
  if (options.num_workers > 0) {
    workers_ = std::make_unique<Workers>([this](int64_t number) { return Gather(number); });
  }
}

AnyLoader::~AnyLoader() = default;

absl::Status AnyLoader::Begin(Share share) {
  if (workers_) workers_->End();
  share_ = std::move(share);
  num_batches_ = NumBatches(share_.size, options_);
  next_ = 0;
  failure_ = absl::OkStatus();
  if (!workers_ || num_batches_ == 0) return absl::OkStatus();
  return CatchStatus("loader", [&] {
    const int64_t most = dataset_.random_access() ? options_.num_workers : 1;
    workers_->Begin(num_batches_, std::min(most, num_batches_), options_.prefetch_factor);
    return absl::OkStatus();
  });
}

absl::StatusOr<std::optional<AnyBatch>> AnyLoader::Next() {
  DDP_RETURN_IF_ERROR(failure_);
  if (next_ == num_batches_) return std::nullopt;
  const auto stalled = [this](absl::Duration waited) {
    ABSL_LOG(WARNING) << "loader: has waited " << absl::ToInt64Seconds(waited) << " s for batch "
                      << next_ + 1 << " of " << num_batches_
                      << ", which a worker still reads: the data set's Get is slow, or hangs";
  };
  absl::StatusOr<AnyBatch> batch =
      workers_ ? workers_->Take(options_.stall, stalled) : Gather(next_);
  if (!batch.ok()) return failure_ = batch.status();
  ++next_;
  return *std::move(batch);
}

// The examples first … first+size-1 of this rank.
absl::StatusOr<AnyBatch> AnyLoader::Read(int64_t first, int64_t size) const {
  return CatchStatus("", [&]() -> absl::StatusOr<AnyBatch> {
    std::vector<int64_t> indices;
    std::vector<Random> random;
    for (int64_t i = first; i < first + size; ++i) {
      indices.push_back(share_.Index(i));
      DDP_RETURN_IF_ERROR(CheckIndex(indices.back(), dataset_.size()));
      random.emplace_back(share_.seed, share_.epoch, share_.Position(i));
    }
    AnyBatch batch = dataset_.GetAny(indices, absl::MakeSpan(random));
    batch.set_indices(std::move(indices));
    return batch;
  });
}

absl::StatusOr<AnyBatch> AnyLoader::Gather(int64_t number) const {
  const int64_t first = number * options_.batch_size;
  const int64_t size = std::min(options_.batch_size, share_.size - first);
  absl::StatusOr<AnyBatch> batch = Read(first, size);
  if (batch.ok() && !options_.pin_memory_device.is_cpu()) {
    const absl::Status pinned = CatchStatus("pinning the batch's memory", [&] {
      const c10::DeviceGuard guard(options_.pin_memory_device);
      batch->PinMemory();
      return absl::OkStatus();
    });
    if (!pinned.ok()) return pinned;
  }
  if (batch.ok()) return batch;
  // Which example it was, if one fails alone.
  const std::string of = absl::StrCat("loading batch ", number + 1, " of ", num_batches_);
  for (int64_t i = first; i < first + size; ++i) {
    const absl::Status alone = Read(i, 1).status();
    if (alone.ok()) continue;
    const absl::StatusOr<int64_t> index =
        CatchStatus("", [&] { return absl::StatusOr<int64_t>(share_.Index(i)); });
    return Annotate(alone, absl::StrCat(of, ", example ", index.value_or(-1), " at position ",
                                        share_.Position(i), " of the epoch"));
  }
  const absl::StatusOr<int64_t> index =
      CatchStatus("", [&] { return absl::StatusOr<int64_t>(share_.Index(first)); });
  return Annotate(batch.status(), absl::StrCat(of, " (", size, " examples, the first is number ",
                                               index.value_or(-1), ")"));
}

}  // namespace ddp::data
