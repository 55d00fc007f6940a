// Backend `hier`: groups that span hosts. Inside a host ranks meet in shared memory, and what must
// cross hosts crosses once, from one rank of a host to one of another.
//
//   DDP_ASSIGN_OR_RETURN(auto backend, CreateHier(options, {}));
//   backend->allreduce(tensors)->wait();
//
// Composed of other backends, by their registered names: `local` among the ranks of a host, `cross`
// between hosts. A group on a single host is simply a `local` one, and one of a single rank per
// host a `cross` one. Hosts may have different numbers of ranks, in any order.
//
// Results are the same on all ranks, bit for bit, and from run to run: contributions are added up
// in the hosts first, then host by host.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "backends/backend.h"
#include "backends/hier/link.h"

namespace ddp::backends::hier {

struct HierOptions {
  std::string local = "shm";
  std::string cross = "gloo";

  // Which host this rank is on: ranks with equal texts share one. Empty: HostId() of
  // backends/common/host.h. Tests make hosts of one machine with it.
  std::string host_id = "";

  // Tensors are cut into chunks of up to so many bytes, a quarter of it on slow links (see link.h);
  // a rank works at so many at once.
  int64_t chunk_bytes = int64_t{2} << 20;
  int window = 4;

  // Whether fp32 and bf16 go to other hosts in fewer bits, without loss; see packing.h.
  Packing packing = Packing::kAuto;
};

// Collective. InvalidArgument for options that make no sense, NotFound for a part that is not
// linked in, DeadlineExceeded if a rank does not come within the timeout; otherwise what the parts'
// factories return, with the part's name.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateHier(const BackendOptions& options,
                                                             const HierOptions& hier);

}  // namespace ddp::backends::hier
