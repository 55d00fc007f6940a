// The collectives, as coroutines on memory: which rank sends what to which, and which one reduces.
//
//   Coroutine coroutine = AllReduce(channel, {.dtype = backends::DType::kFloat}, tensor,
//   /*count=*/1000);
//
// All but the barrier consist of non-blocking messages, whose tag identifies the collective. So a
// timeout can name the ranks whose messages are missing, which MPI's own collectives
// (MPI_Iallgather, …) cannot; a rank never receives the message of a different collective, nor one
// of another size than it expects; and sizes are not limited to an int.
//
// Reductions of large tensors are processed in pieces of 16 MiB. Of each piece, as of a large
// broadcast, a rank sends at most twice the bytes, in at most two rounds of messages to all others.
// Small reductions (64 KiB over all ranks) send the whole tensor to every rank that gets the
// result, in one round; small broadcasts use a binomial tree. Suited to some hundred ranks.
//
// Reductions do not use MPI_Iallreduce. It has no fp16 or bf16; a user-defined operation
// (MPI_Op_create) combines two operands at a time and would round after each; and the order in
// which it combines ranks depends on the library. Instead rank r receives the r-th slice of all
// ranks, combines them in rank order (fp16 and bf16 in fp32, rounded once), and sends the result to
// all. The number of bytes is that of a ring; results are bit-identical on all ranks, in all runs,
// and to those of the backend shm.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "backends/common/reduce_kernels.h"
#include "backends/mpi/coroutine.h"
#include "backends/mpi/operation.h"
#include "backends/mpi/requests.h"

namespace ddp::backends::mpi {

// All of them are collective: all ranks of the channel run the same one, with matching sizes.
// Memory is borrowed until MPI no longer uses it, which may be after the coroutine has failed
// (Requests::Idle).

Coroutine Barrier(Channel& channel);
Coroutine Broadcast(Channel& channel, Buffer buffer, int root);

// Concatenates `mine` of all ranks, in rank order, in `block`. All have the same size.
Coroutine AllGather(Channel& channel, Buffer mine, std::byte* block);
// The same to separate memory for each rank; sizes may differ between ranks.
Coroutine AllGatherApart(Channel& channel, Buffer mine, std::vector<Buffer> all);

// Gather, scatter and all-to-all: send[r] goes to rank r, receive[r] comes from rank r; buffers are
// empty where no data is sent.
Coroutine Exchange(Channel& channel, std::vector<Buffer> send, std::vector<Buffer> receive);

// The result is in place. The reduction must pass backends::Check.
Coroutine AllReduce(Channel& channel, backends::Reduction reduction, std::byte* tensor,
                    size_t count);
// The result is in place on the root; tensors of other ranks are not changed.
Coroutine Reduce(Channel& channel, backends::Reduction reduction, std::byte* tensor, size_t count,
                 int root);
// inputs[r], of counts[r] elements, goes to rank r. `output` may be this rank's own input.
Coroutine ReduceScatter(Channel& channel, backends::Reduction reduction,
                        std::vector<std::byte*> inputs, std::vector<size_t> counts,
                        std::byte* output);

// One message; not collective. The sizes of sender and receiver must be equal.
inline constexpr int kAnySource = MPI_ANY_SOURCE;
Coroutine Send(Channel& channel, Buffer buffer, int to, int tag);
Coroutine Receive(Channel& channel, Buffer buffer, int from, int tag);

// A coalesced collective: runs `part(i)` for i = 0, 1, ..., parts - 1, one after another.
Coroutine InTurn(Channel& channel, size_t parts, std::function<Coroutine(size_t i)> part);

// A barrier through rank 0, which waits for a message of every rank and then replies to all.
// ReportMissingRanks is for Operation::on_timeout on rank 0: returns the missing ranks as text, and
// sends the text to the waiting ranks.
struct BarrierReply {
  std::vector<std::byte> text = std::vector<std::byte>(4096);  // ends with a zero
};
Coroutine MonitoredBarrier(Channel& channel, BarrierReply& reply);
std::string ReportMissingRanks(Channel& channel, BarrierReply& reply,
                               const std::function<std::string(int rank)>& name_of);

}  // namespace ddp::backends::mpi
