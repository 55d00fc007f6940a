// Options of the backend nccl: group.nccl.… of a program.
#pragma once

#include "base/options.h"

namespace ddp::backends::nccl {

struct NcclOptions {
  // Collectives run on a stream of high priority, before kernels of other streams.
  bool high_priority_stream = false;
  // Communicators are created in the background.
  bool nonblocking = false;
};

constexpr auto OptionsOf(const NcclOptions&) {
  return Options(
      Option("high_priority_stream", &NcclOptions::high_priority_stream,
             "run collectives in high-priority streams"),
      Option("nonblocking", &NcclOptions::nonblocking, "create communicators in the background"));
}

}  // namespace ddp::backends::nccl
