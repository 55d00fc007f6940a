// Backend `hier`: groups that span hosts. Ranks of one host use shared memory; data that must cross
// between two hosts crosses once, from one rank of the one to one rank of the other.
//
//   DDP_ASSIGN_OR_RETURN(auto backend, CreateHier(options, {}));
//   backend->allreduce(tensors)->wait();
//
// Composed of two other backends, by their registered names: `local` among the ranks of a host,
// `cross` between hosts. On a single host the group is a `local` one, with a single rank per host a
// `cross` one. Hosts may have different numbers of ranks, in any order.
//
// Results are bit-identical on all ranks and in all runs: contributions are added up inside each
// host first, then in the order of hosts.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "backends/backend.h"
#include "backends/hier/link.h"
#include "base/options.h"

namespace ddp::backends::hier {

// Options of the backend hier: group.hier.… of a program. Must be equal on all ranks, except
// host_id.
struct HierOptions {
  std::string local = "shm";
  std::string cross = "gloo";

  // Identifies the host of this rank: ranks with equal ids share a host. Empty: HostId() of
  // backends/common/host.h. Tests use it to simulate several hosts on one machine.
  std::string host_id = "";

  // Maximum size of the chunks into which tensors are cut, in bytes, at least 1024; a quarter of it
  // on slow links (link.h).
  int64_t chunk_bytes = int64_t{2} << 20;
  // Maximum number of chunks in flight, per rank; at least 1.
  int window = 4;

  // Whether fp32 and bf16 numbers are compressed, without loss, between hosts; see packing.h.
  Packing packing = Packing::kAuto;
};

constexpr auto OptionsOf(const HierOptions&) {
  return Options(
      Option("local", &HierOptions::local, "backend among the ranks of a host")
          .OneOfThese(&BackendRegistry::Names),
      Option("cross", &HierOptions::cross, "backend between hosts")
          .OneOfThese(&BackendRegistry::Names),
      Option("chunk_bytes", &HierOptions::chunk_bytes,
             "maximum size of the chunks into which tensors are cut; a quarter on slow links")
          .AtLeast(1024)
          .AtMost(int64_t{1} << 30),
      Option("window", &HierOptions::window, "maximum number of chunks under way, per rank")
          .AtLeast(1)
          .AtMost(1024),
      Option("packing", &HierOptions::packing,
             "compress fp32 and bf16 between hosts, without loss; auto: if the link is slow"));
}

// Collective. InvalidArgument for wrong options, NotFound if a part's backend is not linked in,
// DeadlineExceeded if a rank does not join within options.group.join_timeout; otherwise the errors
// of the parts' factories, with the name of the part.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateHier(const BackendOptions& options,
                                                             const HierOptions& hier);

}  // namespace ddp::backends::hier
