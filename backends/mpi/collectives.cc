#include "backends/mpi/collectives.h"

#include <mpi.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp::backends::mpi {
namespace {

// Largest all-reduce, in bytes over all ranks, in which each rank sends its whole tensor to every
// other: one round instead of two.
constexpr size_t kOneRoundBytes = 64 << 10;

// Maximum size of a piece, in bytes: larger tensors are processed piece by piece, which bounds the
// memory for slices of other ranks.
constexpr size_t kPieceBytes = 16 << 20;

absl::Status StartExchange(Channel& channel, const std::vector<Buffer>& send,
                           const std::vector<Buffer>& receive) {
  // Each rank begins with its right-hand neighbour, so that not all write to rank 0 first.
  for (int step = 1; step < channel.size; ++step) {
    const int from = (channel.rank + channel.size - step) % channel.size;
    if (receive[from].bytes == 0) continue;
    channel.requests.Receive(receive[from], from, channel.tag, channel.comm);
  }
  for (int step = 1; step < channel.size; ++step) {
    const int to = (channel.rank + step) % channel.size;
    if (send[to].bytes == 0) continue;
    absl::Status status = channel.requests.Send(send[to], to, channel.tag, channel.comm);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void Copy(Buffer from, Buffer to) {
  if (from.bytes > 0 && from.data != to.data) std::memcpy(to.data, from.data, from.bytes);
}

// Elements [begin, end) of rank r's slice of `count` elements.
struct Slices {
  size_t count;
  int size;
  size_t Begin(int rank) const {
    return count / size * rank + std::min<size_t>(rank, count % size);
  }
  size_t Size(int rank) const { return Begin(rank + 1) - Begin(rank); }
};

// Sends the slice r of `tensor` from rank r to all ranks.
Coroutine AllGatherSlices(Channel& channel, std::byte* tensor, Slices slices, size_t element) {
  std::vector<Buffer> all;
  for (int rank = 0; rank < channel.size; ++rank) {
    all.push_back({tensor + slices.Begin(rank) * element, slices.Size(rank) * element});
  }
  std::vector<Buffer> send(channel.size, all[channel.rank]);
  return Exchange(channel, std::move(send), std::move(all));
}

// Binomial tree: each rank that has the data sends it on, to the farthest rank first.
Coroutine BroadcastAlongTree(Channel& channel, Buffer buffer, int root) {
  if (buffer.bytes == 0) co_return absl::OkStatus();
  const int place = (channel.rank - root + channel.size) % channel.size;  // the root's is 0
  int reach = 1;  // distance to the next receiver: below the lowest bit of `place`
  while (reach < channel.size && (place & reach) == 0) reach <<= 1;
  if (place != 0) {
    const int parent = (place - reach + root) % channel.size;
    channel.requests.Receive(buffer, parent, channel.tag, channel.comm);
    absl::Status status = co_await channel.requests;
    if (!status.ok()) co_return status;
  }
  for (reach >>= 1; reach > 0; reach >>= 1) {
    if (place + reach >= channel.size) continue;
    const int child = (place + reach + root) % channel.size;
    absl::Status status = channel.requests.Send(buffer, child, channel.tag, channel.comm);
    if (!status.ok()) co_return status;
  }
  co_return co_await channel.requests;
}

// Sends inputs[r] (`sizes[r]` elements) to rank r, and combines the received inputs and this rank's
// own, in rank order, to `output`, which may be this rank's own input.
Coroutine ReduceToOwners(Channel& channel, backends::Reduction reduction,
                         std::vector<std::byte*> inputs, std::vector<size_t> sizes,
                         std::byte* output) {
  const size_t element = backends::ElementSize(reduction.dtype);
  const size_t mine = sizes[channel.rank];
  std::vector<Buffer> send(channel.size), receive(channel.size);
  std::vector<const void*> sources(channel.size);
  std::byte* scratch = channel.Scratch(mine * element * channel.size);
  for (int rank = 0; rank < channel.size; ++rank) {
    send[rank] = {inputs[rank], sizes[rank] * element};
    receive[rank] = {scratch + rank * mine * element, mine * element};
    sources[rank] = rank == channel.rank ? inputs[rank] : receive[rank].data;
  }
  absl::Status status = StartExchange(channel, send, receive);
  if (!status.ok()) co_return status;
  status = co_await channel.requests;
  if (!status.ok()) co_return status;
  void* result = output;
  if (mine > 0) backends::Reduce(reduction, &result, 1, sources.data(), channel.size, mine);
  co_return absl::OkStatus();
}

// Reduces one piece of a tensor slice by slice, and sends it to the root, or to all with root -1.
Coroutine ReducePiece(Channel& channel, backends::Reduction reduction, std::byte* piece,
                      size_t count, int root) {
  const size_t element = backends::ElementSize(reduction.dtype);
  const bool keeps_result = root < 0 || root == channel.rank;
  const bool one_round = count * element * channel.size <= kOneRoundBytes;
  const Slices slices{count, channel.size};
  std::vector<std::byte*> inputs(channel.size, piece);
  std::vector<size_t> sizes(channel.size, count);
  if (one_round) {
    for (int rank = 0; rank < channel.size; ++rank) {
      if (root >= 0 && rank != root) sizes[rank] = 0;
    }
  } else {
    for (int rank = 0; rank < channel.size; ++rank) {
      inputs[rank] = piece + slices.Begin(rank) * element;
      sizes[rank] = slices.Size(rank);
    }
  }
  // If the tensor must not change, the result is written to this rank's part of the scratch memory.
  const size_t mine = sizes[channel.rank] * element;
  std::byte* output = keeps_result ? inputs[channel.rank]
                                   : channel.Scratch(mine * channel.size) + mine * channel.rank;
  absl::Status status =
      co_await ReduceToOwners(channel, reduction, std::move(inputs), std::move(sizes), output);
  if (!status.ok() || one_round) co_return status;

  if (root < 0) co_return co_await AllGatherSlices(channel, piece, slices, element);
  std::vector<Buffer> send(channel.size), receive(channel.size);
  if (channel.rank != root) {
    send[root] = {output, mine};
  } else {
    for (int rank = 0; rank < channel.size; ++rank) {
      if (rank == root) continue;
      receive[rank] = {piece + slices.Begin(rank) * element, slices.Size(rank) * element};
    }
  }
  co_return co_await Exchange(channel, std::move(send), std::move(receive));
}

Coroutine ReducePieces(Channel& channel, backends::Reduction reduction, std::byte* tensor,
                       size_t count, int root) {
  const size_t element = backends::ElementSize(reduction.dtype);
  const size_t piece = kPieceBytes / element;
  for (size_t begin = 0; begin < count; begin += piece) {
    absl::Status status = co_await ReducePiece(channel, reduction, tensor + begin * element,
                                               std::min(piece, count - begin), root);
    if (!status.ok()) co_return status;
  }
  co_return absl::OkStatus();
}

}  // namespace

Coroutine Barrier(Channel& channel) {
  absl::Status status =
      MpiStatus(MPI_Ibarrier(channel.comm, channel.requests.Add()), "MPI_Ibarrier");
  if (!status.ok()) co_return status;
  co_return co_await channel.requests;
}

Coroutine Broadcast(Channel& channel, Buffer buffer, int root) {
  const Slices slices{buffer.bytes, channel.size};
  if (buffer.bytes <= kOneRoundBytes || channel.size == 2) {
    co_return co_await BroadcastAlongTree(channel, buffer, root);
  }
  // The root scatters slices, then each rank sends its slice to all: the root sends each byte once.
  std::vector<Buffer> send(channel.size), receive(channel.size);
  for (int rank = 0; rank < channel.size; ++rank) {
    const Buffer slice = {buffer.data + slices.Begin(rank), slices.Size(rank)};
    if (channel.rank == root) send[rank] = slice;
    if (channel.rank == rank) receive[root] = slice;
  }
  absl::Status status = co_await Exchange(channel, std::move(send), std::move(receive));
  if (!status.ok()) co_return status;
  co_return co_await AllGatherSlices(channel, buffer.data, slices, /*element=*/1);
}

Coroutine AllGather(Channel& channel, Buffer mine, std::byte* block) {
  std::vector<Buffer> all;
  for (int rank = 0; rank < channel.size; ++rank) {
    all.push_back({block + rank * mine.bytes, mine.bytes});
  }
  return AllGatherApart(channel, mine, std::move(all));
}

Coroutine AllGatherApart(Channel& channel, Buffer mine, std::vector<Buffer> all) {
  std::vector<Buffer> send(channel.size, mine);
  return Exchange(channel, std::move(send), std::move(all));
}

Coroutine Exchange(Channel& channel, std::vector<Buffer> send, std::vector<Buffer> receive) {
  Copy(send[channel.rank], receive[channel.rank]);
  absl::Status status = StartExchange(channel, send, receive);
  if (!status.ok()) co_return status;
  co_return co_await channel.requests;
}

Coroutine AllReduce(Channel& channel, backends::Reduction reduction, std::byte* tensor,
                    size_t count) {
  return ReducePieces(channel, reduction, tensor, count, /*root=*/-1);
}

Coroutine Reduce(Channel& channel, backends::Reduction reduction, std::byte* tensor, size_t count,
                 int root) {
  return ReducePieces(channel, reduction, tensor, count, root);
}

Coroutine ReduceScatter(Channel& channel, backends::Reduction reduction,
                        std::vector<std::byte*> inputs, std::vector<size_t> counts,
                        std::byte* output) {
  const size_t element = backends::ElementSize(reduction.dtype);
  const size_t piece = std::max<size_t>(1, kPieceBytes / element / channel.size);
  const size_t longest = *std::max_element(counts.begin(), counts.end());
  for (size_t begin = 0; begin < longest; begin += piece) {
    std::vector<std::byte*> parts(channel.size);
    std::vector<size_t> sizes(channel.size);
    for (int rank = 0; rank < channel.size; ++rank) {
      const size_t from = std::min(begin, counts[rank]);
      parts[rank] = inputs[rank] + from * element;
      sizes[rank] = std::min(piece, counts[rank] - from);
    }
    std::byte* result = output + std::min(begin, counts[channel.rank]) * element;
    absl::Status status =
        co_await ReduceToOwners(channel, reduction, std::move(parts), std::move(sizes), result);
    if (!status.ok()) co_return status;
  }
  co_return absl::OkStatus();
}

Coroutine Send(Channel& channel, Buffer buffer, int to, int tag) {
  absl::Status status = channel.requests.Send(buffer, to, tag, channel.comm);
  if (!status.ok()) co_return status;
  co_return co_await channel.requests;
}

Coroutine Receive(Channel& channel, Buffer buffer, int from, int tag) {
  channel.requests.Receive(buffer, from, tag, channel.comm);
  co_return co_await channel.requests;
}

Coroutine InTurn(Channel&, size_t parts, std::function<Coroutine(size_t i)> part) {
  for (size_t i = 0; i < parts; ++i) {
    const Coroutine coroutine = part(i);
    absl::Status status = co_await coroutine;
    if (!status.ok()) co_return status;
  }
  co_return absl::OkStatus();
}

Coroutine MonitoredBarrier(Channel& channel, BarrierReply& reply) {
  static std::byte here{1};
  if (channel.rank != 0) {
    absl::Status status = channel.requests.Send({&here, 1}, 0, channel.tag, channel.comm);
    if (!status.ok()) co_return status;
    channel.requests.Receive({reply.text.data(), reply.text.size()}, 0, channel.tag, channel.comm);
    status = co_await channel.requests;
    const auto* text = reinterpret_cast<const char*>(reply.text.data());
    if (status.ok() && *text != '\0') status = absl::DeadlineExceededError(text);
    co_return status;
  }
  std::byte* marks = channel.Scratch(channel.size);
  for (int peer = 1; peer < channel.size; ++peer) {
    channel.requests.Receive({marks + peer, 1}, peer, channel.tag, channel.comm);
  }
  absl::Status status = co_await channel.requests;
  if (!status.ok()) co_return status;
  reply.text[0] = std::byte{0};
  for (int peer = 1; peer < channel.size; ++peer) {
    status = channel.requests.Send({reply.text.data(), reply.text.size()}, peer, channel.tag,
                                   channel.comm);
    if (!status.ok()) co_return status;
  }
  co_return co_await channel.requests;
}

std::string ReportMissingRanks(Channel& channel, BarrierReply& reply,
                               const std::function<std::string(int rank)>& name_of) {
  const std::vector<int> missing = channel.requests.MissingPeers();
  const std::string text =
      missing.empty() ? "the last rank came too late"
                      : absl::StrCat("never came: ",
                                     absl::StrJoin(missing, ", ", [&](std::string* out, int rank) {
                                       *out += name_of(rank);
                                     }));
  const size_t length = std::min(text.size(), reply.text.size() - 1);
  std::memcpy(reply.text.data(), text.data(), length);
  reply.text[length] = std::byte{0};
  for (int peer = 1; peer < channel.size; ++peer) {
    if (std::find(missing.begin(), missing.end(), peer) != missing.end()) continue;
    // Ranks that cannot be notified fail by their own timeout.
    (void)channel.requests.Send({reply.text.data(), reply.text.size()}, peer, channel.tag,
                                channel.comm);
  }
  return text;
}

}  // namespace ddp::backends::mpi
