// What is known of the network between the hosts, and what follows from it.
//
//   Link link(Packing::kAuto);
//   link.Record(bytes, elapsed);              // of an all-reduce: what this host has sent
//   if (link.due()) link.Agree(slowest(link.bytes_per_s()));  // the minimum over all ranks
//   if (link.slow()) …                        // small chunks, packed numbers
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"

namespace ddp::backends::hier {

// Whether numbers are packed (packing.h) on their way to other hosts. kAuto: where the link is
// slow.
enum class Packing { kAuto, kNever, kAlways };

// Not thread safe. All ranks record the same all-reduces, and so come to the same decisions at the
// same time; how fast each of them was is each rank's own.
class Link {
 public:
  explicit Link(Packing packing) : packing_(packing) {}

  // Less than 200 MB/s (1.6 Gbit/s), in the slowest place: a core packs faster than that, and what
  // a chunk takes on the network is long against what handling it costs. False until agreed on.
  bool slow() const { return slow_; }
  bool packs() const { return packing_ == Packing::kAuto ? slow_ : packing_ == Packing::kAlways; }

  void Record(int64_t bytes, absl::Duration elapsed) {
    ++recorded_;
    // A collective may have waited for a late rank: the best one counts.
    bytes_per_s_ = std::max(bytes_per_s_, bytes / absl::ToDoubleSeconds(elapsed));
  }

  // After the first record, the second, the fourth, …, the 256th, and every 256th.
  bool due() const { return recorded_ % 256 == 0 || (recorded_ & (recorded_ - 1)) == 0; }
  // The best since the last agreement.
  double bytes_per_s() const { return bytes_per_s_; }
  void Agree(double bytes_per_s) {
    slow_ = bytes_per_s < 200e6;
    bytes_per_s_ = 0;
  }

 private:
  const Packing packing_;
  int64_t recorded_ = 0;
  double bytes_per_s_ = 0;
  bool slow_ = false;
};

}  // namespace ddp::backends::hier
