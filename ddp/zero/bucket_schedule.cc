#include "ddp/zero/bucket_schedule.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace ddp::zero {

BucketSchedule::BucketSchedule(std::vector<std::vector<size_t>> tensors_of, size_t tensors,
                               Events events)
    : events_(std::move(events)), buckets_of_(tensors), unfilled_(tensors), has_arrived_(tensors) {
  for (std::vector<size_t>& of_bucket : tensors_of) {
    for (size_t place = 0; place < of_bucket.size(); ++place) {
      buckets_of_[of_bucket[place]].push_back({.bucket = buckets_.size(), .place = place});
    }
    buckets_.push_back({.tensors = std::move(of_bucket)});
  }
  Reset();
}

void BucketSchedule::Reset() {
  for (Bucket& bucket : buckets_) {
    bucket.filled.assign(bucket.tensors.size(), false);
    bucket.missing = bucket.tensors.size();
    bucket.open = false;
  }
  for (size_t i = 0; i < buckets_of_.size(); ++i) unfilled_[i] = buckets_of_[i].size();
  has_arrived_.assign(has_arrived_.size(), false);
  next_ = 0;
  open_ = 0;
}

void BucketSchedule::Arrive(size_t tensor) {
  has_arrived_[tensor] = true;
  if (unfilled_[tensor] == 0) events_.release(tensor);
  for (const InBucket& in : buckets_of_[tensor]) {
    --buckets_[in.bucket].missing;
    // It may have been filled when the bucket before it was launched.
    if (!buckets_[in.bucket].filled[in.place] && MayOpen(in.bucket)) Fill(in.bucket, in.place);
    // At once: a large tensor lies in many buckets.
    LaunchReady();
  }
  // Buckets without tensors, of padding alone, may be the last ones.
  LaunchReady();
}

bool BucketSchedule::MayOpen(size_t bucket) const {
  if (bucket == next_ || buckets_[bucket].open) return true;
  const int others = open_ - (next_ < buckets_.size() && buckets_[next_].open ? 1 : 0);
  return others + 1 < kMaxBuckets;
}

void BucketSchedule::Fill(size_t index, size_t place) {
  Bucket& bucket = buckets_[index];
  if (!std::exchange(bucket.open, true)) ++open_;
  bucket.filled[place] = true;
  const size_t tensor = bucket.tensors[place];
  events_.fill(index, tensor);
  if (--unfilled_[tensor] == 0) events_.release(tensor);
}

void BucketSchedule::FillFromHeld(size_t index) {
  const Bucket& bucket = buckets_[index];
  for (size_t place = 0; place < bucket.tensors.size(); ++place) {
    if (has_arrived_[bucket.tensors[place]] && !bucket.filled[place]) Fill(index, place);
  }
}

void BucketSchedule::LaunchReady() {
  while (next_ < buckets_.size() && buckets_[next_].missing == 0) {
    FillFromHeld(next_);
    if (std::exchange(buckets_[next_].open, false)) --open_;
    events_.launch(next_++);
    if (next_ < buckets_.size()) FillFromHeld(next_);
  }
}

std::vector<size_t> OrderByRegistration(const std::vector<std::pair<int64_t, int64_t>>& places) {
  std::vector<size_t> order(places.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return places[a] > places[b]; });
  return order;
}

std::vector<size_t> OrderByArrival(const std::vector<std::vector<size_t>>& tensors_of,
                                   size_t tensors, const std::vector<int64_t>& arrival) {
  std::vector<size_t> position(tensors, arrival.size());
  for (size_t i = 0; i < arrival.size(); ++i) position[arrival[i]] = i;
  const auto complete = [&](size_t bucket) {
    size_t last = 0;
    for (const size_t tensor : tensors_of[bucket]) last = std::max(last, position[tensor] + 1);
    return last;
  };
  std::vector<size_t> order(tensors_of.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return complete(a) < complete(b); });
  return order;
}

int64_t PeakOfHeldBytes(const std::vector<std::vector<size_t>>& tensors_of,
                        const std::vector<int64_t>& bytes, const std::vector<int64_t>& arrival) {
  int64_t held = 0, peak = 0;
  BucketSchedule schedule(tensors_of, bytes.size(),
                          {.fill = [](size_t, size_t) {},
                           .launch = [](size_t) {},
                           .release = [&](size_t tensor) { held -= bytes[tensor]; }});
  for (const int64_t tensor : arrival) {
    held += bytes[tensor];
    schedule.Arrive(static_cast<size_t>(tensor));
    peak = std::max(peak, held);
  }
  return peak;
}

}  // namespace ddp::zero
