// The collectives, on memory: what each rank sends to whom, and who reduces what.
//
//   Task task = AllReduce(channel, {.dtype = backends::DType::kFloat}, tensor, /*count=*/1000);
//
// All but the barrier are made of non-blocking messages, tagged by what they belong to. A timeout
// can then tell whose message is missing, which MPI's own collectives (MPI_Iallgather, …) do not;
// ranks that disagree on call or size miss each other's messages instead of misreading them; and no
// size is bounded by an int. What a rank sends is at most twice its tensor, in at most two rounds
// of messages to all others, which suits some hundred ranks.
//
// Reductions are not left to MPI_Iallreduce. It has no fp16 or bf16, and an operation of our own
// (MPI_Op_create) would see two operands at a time and have to round after each; and the order in
// which it combines ranks is the library's affair. Instead rank r gets all ranks' r-th slices,
// combines them in the order of ranks (fp16 and bf16 in fp32, rounded once), and hands the result
// out. As many bytes travel as in a ring; the bits of the result are the same on all ranks, in all
// runs, and the same as those of the backend shm.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "backends/common/reduce_kernels.h"
#include "backends/mpi/operation.h"
#include "backends/mpi/requests.h"
#include "backends/mpi/task.h"

namespace ddp::backends::mpi {

// Collective, all of them: every rank of the channel runs the same one with sizes that fit each
// other. Memory is borrowed until MPI is done with it.

Task Barrier(Channel& channel);
Task Broadcast(Channel& channel, Buffer buffer, int root);

// What all have, in the order of ranks, end to end in `block`; all the same size.
Task AllGather(Channel& channel, Buffer mine, std::byte* block);
// By rank, into memory that lies apart, and of different sizes.
Task AllGatherApart(Channel& channel, Buffer mine, std::vector<Buffer> all);

// Gather, scatter and all-to-all, by what goes to whom and comes from whom: two lists by rank, with
// buffers of zero bytes where nothing does.
Task Exchange(Channel& channel, std::vector<Buffer> send, std::vector<Buffer> receive);

// In place. The reduction must pass backends::Check.
Task AllReduce(Channel& channel, backends::Reduction reduction, std::byte* tensor, size_t count);
// The result is at the root only, in place; other ranks' tensors stay as they are.
Task Reduce(Channel& channel, backends::Reduction reduction, std::byte* tensor, size_t count,
            int root);
// `inputs` by rank: what goes to whom, counts[rank] elements each. `output` may be this rank's
// input.
Task ReduceScatter(Channel& channel, backends::Reduction reduction, std::vector<std::byte*> inputs,
                   std::vector<size_t> counts, std::byte* output);

// One message, not a collective. The sizes of both sides must be equal.
inline constexpr int kAnySource = MPI_ANY_SOURCE;
Task Send(Channel& channel, Buffer buffer, int to, int tag);
Task Receive(Channel& channel, Buffer buffer, int from, int tag);

// What a coalesced collective is: `part(i)` for i = 0, 1, ..., parts - 1, one after another.
Task InTurn(Channel& channel, size_t parts, std::function<Task(size_t i)> part);

// Rank 0 waits until all have come, and lets them go. For Operation::on_timeout in rank 0: which
// ranks are missing; those that have come are told.
struct Roll {
  std::vector<std::byte> answer = std::vector<std::byte>(4096);  // ends with a zero
};
Task MonitoredBarrier(Channel& channel, Roll& roll);
std::string TellWhoIsMissing(Channel& channel, Roll& roll,
                             const std::function<std::string(int rank)>& name_of);

}  // namespace ddp::backends::mpi
