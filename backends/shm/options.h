// Options of the backend shm, and of hier's part inside a host: group.shm.… of a program.
#pragma once

#include <cstdint>

#include "base/options.h"

namespace ddp::backends::shm {

struct ShmOptions {
  // Maximum size of the segment that the ranks of one host share for messages, MiB.
  int64_t segment_mb = 256;
  // Tensors may live in shared memory (Backend::allocateTensor; DDP's gradient buckets), so that a
  // collective on them copies nothing.
  bool arena = true;
  // Maximum total size of these tensors, per rank, MiB.
  int64_t arena_mb = 4096;

  int64_t segment_bytes() const { return segment_mb << 20; }
  int64_t arena_bytes() const { return arena ? arena_mb << 20 : 0; }
};

constexpr auto OptionsOf(const ShmOptions&) {
  constexpr double kMostMebibytes = 1 << 20;
  return Options(Option("segment_mb", &ShmOptions::segment_mb,
                        "maximum memory that the ranks of a host share for messages, in MiB")
                     .Incidental()
                     .AtLeast(1)
                     .AtMost(kMostMebibytes),
                 Option("arena", &ShmOptions::arena,
                        "allocate gradient buckets in memory that the ranks of a host share")
                     .Incidental(),
                 Option("arena_mb", &ShmOptions::arena_mb,
                        "maximum size of gradient buckets and other tensors in shared memory, "
                        "per rank, in MiB")
                     .Incidental()
                     .AtLeast(1)
                     .AtMost(kMostMebibytes));
}

}  // namespace ddp::backends::shm
