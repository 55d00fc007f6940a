// Measures the network between hosts, and decides whether it counts as slow.
//
//   Link link(Packing::kAuto);
//   link.Record(bytes, elapsed);              // bytes that this host has sent in an all-reduce
//   if (link.due()) link.Agree(slowest(link.bytes_per_s()));  // the minimum over all ranks
//   if (link.slow()) …                        // smaller chunks, packed numbers
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ddp::backends::hier {

// Whether numbers are packed (packing.h) between hosts. kAuto: if the link is slow.
enum class Packing { kAuto, kNever, kAlways };
constexpr auto OptionNames(Packing) {
  return std::to_array<std::pair<absl::string_view, Packing>>(
      {{"auto", Packing::kAuto}, {"never", Packing::kNever}, {"always", Packing::kAlways}});
}

// Thread-compatible. All ranks record the same all-reduces, so that due() and slow() change at the
// same time on all of them; only bytes_per_s() differs between ranks.
class Link {
 public:
  explicit Link(Packing packing) : packing_(packing) {}

  // Whether the slowest rank has sent less than 200 MB/s (1.6 Gbit/s). A core packs faster than
  // that, and the transfer of a chunk takes long compared to its overhead. False before Agree.
  bool slow() const { return slow_; }
  bool packs() const { return packing_ == Packing::kAuto ? slow_ : packing_ == Packing::kAlways; }

  void Record(int64_t bytes, absl::Duration elapsed) {
    ++recorded_;
    // A collective may have waited for a late rank, so the fastest one counts.
    bytes_per_s_ = std::max(bytes_per_s_, bytes / absl::ToDoubleSeconds(elapsed));
  }

  // Whether the ranks are to agree now: after the 1st, 2nd, 4th, …, 256th and every 256th record.
  bool due() const { return recorded_ % 256 == 0 || (recorded_ & (recorded_ - 1)) == 0; }
  // The highest rate since the last Agree, in bytes per second.
  double bytes_per_s() const { return bytes_per_s_; }
  // `bytes_per_s`: the minimum over all ranks.
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
