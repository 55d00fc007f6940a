// Options of the backend nccl: group.nccl.… of a program.
#pragma once

#include "base/options.h"

namespace ddp::backends::nccl {

struct NcclOptions {
  bool high_priority_stream = false;  // collectives overtake kernels of other streams
  bool nonblocking = false;           // communicators are made in the background
};

constexpr auto OptionsOf(const NcclOptions&) {
  return Options(
      Option("high_priority_stream", &NcclOptions::high_priority_stream,
             "collectives overtake kernels of other streams"),
      Option("nonblocking", &NcclOptions::nonblocking, "communicators are made in the background"));
}

}  // namespace ddp::backends::nccl
