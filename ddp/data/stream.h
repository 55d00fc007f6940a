// Data that is read from front to back, in numbered shards: files of records, archives, columns of
// a database.
//
//   struct Lines : ddp::data::StreamOf<std::string> {
//     int64_t num_shards() const override { return paths.size(); }
//     int64_t shard_size(int64_t shard) const override { return lines_in[shard]; }
//     std::unique_ptr<ddp::data::ShardReaderOf<std::string>> Open(int64_t shard,
//                                                                 int64_t offset) const override;
//   };
//   Lines lines;
//   DDP_ASSIGN_OR_RETURN(options.sampler, lines.MakeSampler({.buffer_size = 1000, .seed = 1}));
//   trainer::Train(session, task, lines, test, options);
//
// RandomStreamOf is one whose examples depend on random numbers, as of augmentation.
//
// A stream is a data set: example `offset` of a shard has the index of the shard's first example
// plus offset. The order of an epoch, with the shuffle buffer, is that of ShardSampler (order.h), a
// function of (seed, epoch), whatever reads it: any number of ranks and workers, from any position.
// ConcatDataset (concat.h) and MixtureSampler mix streams by weights.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <numeric>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "c10/util/Exception.h"
#include "ddp/data/dataset.h"
#include "ddp/data/example_dataset.h"
#include "ddp/data/order.h"

namespace ddp::data {

// Reads the examples of one shard. One thread at a time uses it.
template <typename E>
class ShardReaderOf {
 public:
  virtual ~ShardReaderOf() = default;
  // The next example; not called behind the shard's end. May throw.
  virtual E Next() = 0;
};

namespace stream_internal {

// Streams of both kinds are records of type R in shards. `Base` collates examples. The functions of
// a stream must be thread-safe, unless it cannot seek.
template <typename R, typename Base>
class ShardsOf : public Base {
 public:
  virtual int64_t num_shards() const = 0;
  // Examples of a shard; constant. Count them once where the format does not say.
  virtual int64_t shard_size(int64_t shard) const = 0;
  // A reader whose first example is number `offset`, in [0, shard_size(shard)). May throw.
  virtual std::unique_ptr<ShardReaderOf<R>> Open(int64_t shard, int64_t offset) const = 0;
  // False: Open takes only offset 0, as of a compressed file. Then one worker of a loader reads the
  // shards from front to back, on each rank, and a run that is resumed skips what comes before in
  // its shards by reading it.
  virtual bool can_seek() const { return true; }
  // A stream that cannot seek keeps this many examples, which the order takes later than they are
  // read. No fewer are kept than a sampler of MakeSampler has in its buffer; if one of elsewhere
  // has a larger buffer, shards are read again.
  virtual int64_t kept_examples() const { return ShardOptions().buffer_size; }

  // The orders of this stream. Errors of ShardSampler.
  absl::StatusOr<SharedSampler> MakeSampler(const ShardOptions& options) const {
    std::vector<int64_t> sizes;
    for (int64_t shard = 0; shard < num_shards(); ++shard) sizes.push_back(shard_size(shard));
    if (options.shuffle) {
      const std::lock_guard lock(reading_);
      buffer_size_ = std::max(buffer_size_, options.buffer_size);
    }
    return ShardSampler(std::move(sizes), options);
  }

  int64_t size() const final { return Ends().empty() ? 0 : Ends().back(); }
  bool random_access() const final { return can_seek(); }

 protected:
  // The records are in the order of `indices`.
  std::vector<R> Read(absl::Span<const int64_t> indices) const {
    std::vector<R> records(indices.size());
    if (can_seek()) {
      Seek(indices, records);
    } else {
      ReadOn(indices, records);
    }
    return records;
  }

 private:
  // A seek that jumps over fewer examples reads them instead.
  static constexpr int64_t kShortSkip = 16;
  static constexpr size_t kOpenReaders = 64;

  struct Reader {
    int64_t shard = 0;
    int64_t offset = 0;  // of the next example
    std::unique_ptr<ShardReaderOf<R>> reader;

    R Next() {
      ++offset;
      return reader->Next();
    }
  };

  const std::vector<int64_t>& Ends() const {
    std::call_once(counted_, [this] {
      int64_t end = 0;
      for (int64_t shard = 0; shard < num_shards(); ++shard) {
        TORCH_CHECK(shard_size(shard) >= 0, "shard ", shard, " has a negative size");
        ends_.push_back(end += shard_size(shard));
      }
    });
    return ends_;
  }
  std::pair<int64_t, int64_t> ShardAndOffset(int64_t index) const {
    const std::vector<int64_t>& ends = Ends();
    const int64_t shard = std::upper_bound(ends.begin(), ends.end(), index) - ends.begin();
    return {shard, index - (shard == 0 ? 0 : ends[shard - 1])};
  }

  // Takes an open reader of the shard, at `offset` or up to `gap` examples before it; or opens one.
  Reader Take(int64_t shard, int64_t offset, int64_t gap) const {
    {
      const std::lock_guard lock(mutex_);
      for (auto each = open_.begin(); each != open_.end(); ++each) {
        if (each->shard != shard || each->offset > offset || offset - each->offset > gap) continue;
        Reader taken = std::move(*each);
        open_.erase(each);
        return taken;
      }
    }
    const int64_t from = can_seek() ? offset : 0;
    Reader opened = {.shard = shard, .offset = from, .reader = Open(shard, from)};
    TORCH_CHECK(opened.reader != nullptr, "the stream has not opened shard ", shard);
    return opened;
  }
  void PutBack(Reader reader) const {
    if (reader.offset >= shard_size(reader.shard)) return;
    const std::lock_guard lock(mutex_);
    open_.push_front(std::move(reader));
    if (can_seek() && open_.size() > kOpenReaders) open_.pop_back();
  }
  // Without seeks a shard that is closed before its end would be read again from its beginning. So
  // the rest of the one that was not used for the longest time is kept: all that is kept is within
  // the sampler's buffer, or in the shard that fills it.
  void CloseReaders() const {
    while (open_.size() > kOpenReaders) {
      Reader reader = std::move(open_.back());
      open_.pop_back();
      const int64_t size = shard_size(reader.shard);
      const int64_t first = Ends()[static_cast<size_t>(reader.shard)] - size;
      largest_closed_ = std::max(largest_closed_, size);
      while (reader.offset < size) KeepNext(reader, first);
    }
  }

  // An example that nobody wants is no reason to fail: this rank may have one behind it.
  void Skip(Reader& reader, int64_t offset) const {
    try {
      while (reader.offset < offset) reader.Next();
    } catch (const std::exception&) {
      reader = Take(reader.shard, offset, 0);
    }
  }

  // Reads in ascending order, so that readers go on where they can.
  void Seek(absl::Span<const int64_t> indices, std::vector<R>& records) const {
    std::vector<size_t> places(indices.size());
    std::iota(places.begin(), places.end(), size_t{0});
    std::sort(places.begin(), places.end(),
              [&](size_t a, size_t b) { return indices[a] < indices[b]; });
    Reader reader;
    for (const size_t place : places) {
      const auto [shard, offset] = ShardAndOffset(indices[place]);
      const bool goes_on = reader.reader != nullptr && reader.shard == shard &&
                           reader.offset <= offset && offset - reader.offset <= kShortSkip;
      if (!goes_on) {
        if (reader.reader != nullptr) PutBack(std::move(reader));
        reader = Take(shard, offset, kShortSkip);
      }
      Skip(reader, offset);
      records[place] = reader.Next();
    }
    if (reader.reader != nullptr) PutBack(std::move(reader));
  }

  // Keeps what is read before it is wanted, and gives it away: who writes into a record, as
  // augmentation in place does, writes into one that nobody gets again.
  void ReadOn(absl::Span<const int64_t> indices, std::vector<R>& records) const {
    const std::lock_guard one_reader(reading_);
    for (size_t i = 0; i < indices.size(); ++i) {
      if (auto kept = kept_.find(indices[i]); kept != kept_.end()) {
        records[i] = std::move(kept->second.record);
        read_.erase(kept->second.read);
        kept_.erase(kept);
        continue;
      }
      const auto [shard, offset] = ShardAndOffset(indices[i]);
      const int64_t first = indices[i] - offset;
      Reader reader = Take(shard, offset, offset);
      while (reader.offset < offset) KeepNext(reader, first);
      records[i] = reader.Next();
      PutBack(std::move(reader));
      CloseReaders();
    }
  }
  // `first`: the index of the first example of its shard.
  void KeepNext(Reader& reader, int64_t first) const {
    const int64_t index = first + reader.offset;
    try {
      Keep(index, reader.Next());
    } catch (const std::exception& error) {
      TORCH_CHECK(false, "example ", index, ", which is read before, in shard ", reader.shard,
                  " of a stream that cannot seek: ", error.what());
    }
  }
  void Keep(int64_t index, R record) const {
    const auto [kept, is_new] = kept_.try_emplace(index);
    if (!is_new) return;
    kept->second = {.record = std::move(record), .read = read_.insert(read_.end(), index)};
    const int64_t most = std::max(kept_examples(), buffer_size_) + largest_closed_;
    if (static_cast<int64_t>(read_.size()) <= most) return;
    kept_.erase(read_.front());
    read_.pop_front();
  }

  mutable std::once_flag counted_;
  mutable std::vector<int64_t> ends_;  // of the shards' indices
  mutable std::mutex mutex_;
  mutable std::list<Reader> open_;  // the last used first
  // Only a stream that cannot seek uses the following.
  mutable std::mutex reading_;
  mutable int64_t buffer_size_ = 0;     // the largest of a sampler
  mutable int64_t largest_closed_ = 0;  // examples of a shard that CloseReaders has read
  mutable std::list<int64_t> read_;  // the indices of kept_, in the order in which they were read
  struct Kept {
    R record;
    std::list<int64_t>::iterator read;
  };
  mutable std::unordered_map<int64_t, Kept> kept_;
};

}  // namespace stream_internal

// A stream of examples of type E, collated into batches of type B as in ExampleDatasetOf.
template <Tree E, typename B = CollatedType<E>>
class StreamOf : public stream_internal::ShardsOf<E, collate_internal::CollatesInto<E, B>> {
 public:
  AnyBatch GetAny(absl::Span<const int64_t> indices, absl::Span<Random> = {}) const final {
    return AnyBatch(this->Collate(this->Read(indices), indices));
  }
};

// A stream whose readers give records of type R, out of which examples are made with random
// numbers: those of the example at its place in the epoch (random.h), whatever reads it.
//
//   struct Photos : ddp::data::RandomStreamOf<std::string, at::Tensor> {  // bytes, pixels
//     …  // as of Lines
//     at::Tensor Decode(std::string jpeg, ddp::data::Random& random) const override;
//   };
//
// R has a default constructor and copies. Decode must be thread-safe, also where the stream cannot
// seek, and may throw.
template <typename R, Tree E = R, typename B = CollatedType<E>>
class RandomStreamOf : public stream_internal::ShardsOf<R, collate_internal::CollatesInto<E, B>> {
 public:
  virtual E Decode(R record, Random& random) const = 0;

  AnyBatch GetAny(absl::Span<const int64_t> indices, absl::Span<Random> random = {}) const final {
    RequireRandom(indices, random);
    std::vector<R> records = this->Read(indices);
    std::vector<E> examples;
    examples.reserve(records.size());
    for (size_t i = 0; i < records.size(); ++i) {
      examples.push_back(Decode(std::move(records[i]), random[i]));
    }
    return AnyBatch(this->Collate(std::move(examples), indices));
  }
};

}  // namespace ddp::data
