// Whether to pack (packing.h) what goes to other hosts: worth it where the link is slower than the
// packing.
//
//   Link link(Packing::kAuto);
//   if (link.packs()) …
//   link.Record(bytes, elapsed);   // what a collective of this host has sent, and how fast
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"

namespace ddp::backends::hier {

// Each rank decides for what it sends; messages say what they are. kAuto: packed, once a collective
// of at least 1 MB has shown that the link carries less than 200 MB/s (1.6 Gbit/s).
enum class Packing { kAuto, kNever, kAlways };

// Not thread safe.
class Link {
 public:
  explicit Link(Packing packing) : packing_(packing) {}

  bool packs() const {
    if (packing_ != Packing::kAuto) return packing_ == Packing::kAlways;
    return bytes_per_s_ > 0 && bytes_per_s_ < kSlow;
  }

  void Record(int64_t bytes, absl::Duration elapsed) {
    if (bytes < kEnough || elapsed <= absl::ZeroDuration()) return;
    // A collective may have waited for a late rank; a good one is not forgotten for some time.
    bytes_per_s_ = std::max(bytes / absl::ToDoubleSeconds(elapsed), 0.9 * bytes_per_s_);
  }

 private:
  static constexpr double kSlow = 200e6;
  static constexpr int64_t kEnough = 1'000'000;

  const Packing packing_;
  double bytes_per_s_ = 0;  // 0: not known
};

}  // namespace ddp::backends::hier
