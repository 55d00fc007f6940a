// Decides when buckets of gradients are filled and reduced. Works on indices, without torch.
//
//   BucketSchedule schedule({{0, 1}, {1, 2}}, /*tensors=*/3, {fill, launch, release});
//
//   schedule.Arrive(1);  // fill(0, 1), fill(1, 1), release(1)
//
//   schedule.Arrive(0);  // fill(0, 0), release(0), launch(0)
//
// Buckets are reduced in one order, the same on all ranks. At most two have memory: the next one in
// that order, and one more. A gradient that belongs to others is held, as a whole, until all its
// buckets have had their turn. Where gradients arrive in the order of the buckets nothing is held
// for long; in any other order up to all of them are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace ddp::zero {

// Thread-compatible.
class BucketSchedule {
 public:
  // Buckets that are filled or being reduced at the same time.
  static constexpr int kMaxBuckets = 2;

  struct Events {
    // Copy the tensor's part into the bucket.
    std::function<void(size_t bucket, size_t tensor)> fill;
    // All parts of the bucket are there: reduce it.
    std::function<void(size_t bucket)> launch;
    // All buckets have the tensor's parts: its gradient is not needed any more.
    std::function<void(size_t tensor)> release;
  };

  // `tensors_of`: by bucket, in the order of their reduction.
  BucketSchedule(std::vector<std::vector<size_t>> tensors_of, size_t tensors, Events events);

  // A tensor's gradient is there: at most once per round.
  void Arrive(size_t tensor);
  bool has_arrived(size_t tensor) const { return has_arrived_[tensor]; }
  // Buckets that have been launched in this round.
  size_t launched() const { return next_; }
  // Begins a new round.
  void Reset();

 private:
  struct Bucket {
    std::vector<size_t> tensors;
    std::vector<bool> filled = {};  // with each of them
    size_t missing = 0;             // of them
    bool open = false;              // has memory, and is not launched
  };

  bool MayOpen(size_t bucket) const;
  void Fill(size_t bucket, size_t place);
  void FillFromHeld(size_t bucket);
  void LaunchReady();

  const Events events_;
  std::vector<Bucket> buckets_;
  // Each tensor has a list of its buckets, and of its place in each.
  struct InBucket {
    size_t bucket = 0;
    size_t place = 0;
  };
  std::vector<std::vector<InBucket>> buckets_of_;
  std::vector<size_t> unfilled_;  // by tensor: buckets that lack it
  std::vector<bool> has_arrived_;
  size_t next_ = 0;
  int open_ = 0;
};

// The buckets from the last registered parameters to the first. `places` has for each bucket the
// number of its first parameter, or -1 if it has none, and its place among buckets of one number.
std::vector<size_t> OrderByRegistration(const std::vector<std::pair<int64_t, int64_t>>& places);

// The buckets in the order in which they are complete if gradients arrive in the order `arrival`,
// ties in the order of `tensors_of`: indices of `tensors_of`. A tensor that is not in `arrival`
// comes after all others.
std::vector<size_t> OrderByArrival(const std::vector<std::vector<size_t>>& tensors_of,
                                   size_t tensors, const std::vector<int64_t>& arrival);

// The largest sum of `bytes` of gradients that are held at one time, where those of `arrival`
// arrive in that order, in buckets that are reduced in the order of `tensors_of`. Not counted: the
// gradient that has just arrived, if it goes into buckets at once.
int64_t PeakOfHeldBytes(const std::vector<std::vector<size_t>>& tensors_of,
                        const std::vector<int64_t>& bytes, const std::vector<int64_t>& arrival);

}  // namespace ddp::zero
