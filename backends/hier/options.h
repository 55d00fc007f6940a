// Options of the backend hier: group.hier.… of a program.
#pragma once

#include <cstdint>
#include <string>

#include "backends/backend.h"
#include "backends/hier/link.h"
#include "base/options.h"

namespace ddp::backends::hier {

// Must be equal on all ranks, except host_id.
struct HierOptions {
  std::string local = "shm";
  std::string cross = "gloo";

  // Identifies the host of this rank: ranks with equal ids share a host. Empty: HostId() of
  // backends/common/host.h. Tests use it to simulate several hosts on one machine.
  std::string host_id = "";

  // Maximum size of the chunks into which tensors are cut, in bytes, at least 1024; a quarter of it
  // on slow links (link.h).
  int64_t chunk_bytes = int64_t{2} << 20;
  // Pipeline depth: number of chunks that a rank starts before it finishes the first; at least 2.
  // Up to window + 3 chunks are in flight.
  int window = 4;

  // Whether fp32 and bf16 numbers are compressed, without loss, between hosts (packing.h). This
  // requires that `cross` takes messages that are shorter than the receive (gloo;
  // BackendCapabilities): otherwise kAlways is an error, and kAuto never packs.
  Packing packing = Packing::kAuto;
};

constexpr auto OptionsOf(const HierOptions&) {
  return Options(
      Option("local", &HierOptions::local, "backend among the ranks of a host")
          .OneOfThese(&BackendRegistry::Names),
      Option("cross", &HierOptions::cross, "backend between hosts")
          .OneOfThese(&BackendRegistry::Names),
      Option("chunk_bytes", &HierOptions::chunk_bytes,
             "maximum size of a chunk of the pipeline, in bytes; a quarter on slow links")
          .AtLeast(1024)
          .AtMost(int64_t{1} << 30),
      Option("window", &HierOptions::window,
             "pipeline depth: chunks started before the first is finished")
          .AtLeast(2)
          .AtMost(1024),
      Option("packing", &HierOptions::packing,
             "compress fp32 and bf16 between hosts, without loss; auto: if the link is slow"));
}

}  // namespace ddp::backends::hier
