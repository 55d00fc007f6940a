#include "backends/shm/shm_group.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "backends/common/host.h"
#include "backends/common/peer.h"
#include "backends/shm/memory/fd_passing.h"
#include "base/cores.h"
#include "base/status.h"

namespace ddp::backends::shm {
namespace {

constexpr uint64_t kMagic = 0x6470'6473'686d'0003;  // and version
constexpr char kSegmentKey[] = "segment";
constexpr absl::string_view kFailed = "failed: ";

std::string RankKey(int rank) { return absl::StrCat("rank/", rank); }

EngineOptions OptionsFor(int world_size) {
  EngineOptions options;
  // Each rank sees only the cores that it is bound to. A rank that is bound to one core is assumed
  // to have it for itself; so ranks that are pinned to one core each do spin.
  if (BoundCores() > 1 && world_size > AvailableCores()) options.spin_ns = 0;
  return options;
}

// Exchanges the host and process identities of all ranks through the store.
absl::StatusOr<std::vector<ProcessIdentity>> WaitForPeers(const ShmJoinOptions& options) {
  const std::string host = HostId();
  DDP_RETURN_IF_ERROR(
      options.set(RankKey(options.rank), absl::StrCat(host, " ", ToString(Peer::Self()))));
  std::vector<ProcessIdentity> processes;
  std::vector<int> elsewhere;
  for (int rank = 0; rank < options.world_size; ++rank) {
    const absl::StatusOr<std::string> text = options.get(RankKey(rank));
    if (absl::IsDeadlineExceeded(text.status())) {
      return absl::DeadlineExceededError(
          absl::StrCat("Timed out: rank ", options.rank, " waited for rank ", rank,
                       " to create a group of ", options.world_size, " in shared memory"));
    }
    DDP_RETURN_IF_ERROR(text.status());
    const std::pair<std::string, std::string> parts = absl::StrSplit(*text, ' ');
    if (parts.first != host) elsewhere.push_back(rank);
    DDP_ASSIGN_OR_RETURN(ProcessIdentity process, ParseProcessIdentity(parts.second));
    processes.push_back(process);
  }
  if (!elsewhere.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "shared memory ends with the host, and seen from rank ", options.rank, " rank",
        elsewhere.size() == 1 ? " " : "s ", absl::StrJoin(elsewhere, ", "),
        elsewhere.size() == 1 ? " is" : " are",
        " on another one (or in a container with namespaces of its own); use hier or gloo"));
  }
  return processes;
}

absl::StatusOr<SharedMemory> MakeSegment(const ShmJoinOptions& options,
                                         const SegmentLayout& layout) {
  DDP_ASSIGN_OR_RETURN(SharedMemory memory, SharedMemory::Create(layout.bytes()));
  DDP_RETURN_IF_ERROR(memory.Reserve(0, layout.reserved_bytes()));
  Header& header = View(layout, memory.data()).header();
  header.magic = kMagic;
  header.fingerprint = layout.fingerprint();
  if (options.world_size == 1) return memory;
  DDP_ASSIGN_OR_RETURN(FdServer server, FdServer::Listen());
  DDP_RETURN_IF_ERROR(options.set(kSegmentKey, server.address()));
  DDP_RETURN_IF_ERROR(server.Serve(memory.fd(), options.world_size - 1, options.deadline));
  return memory;
}

absl::StatusOr<SharedMemory> ReceiveSegment(const ShmJoinOptions& options,
                                            const SegmentLayout& layout) {
  DDP_ASSIGN_OR_RETURN(std::string address, options.get(kSegmentKey));
  absl::string_view why = address;
  if (absl::ConsumePrefix(&why, kFailed)) {
    return absl::FailedPreconditionError(absl::StrCat("rank 0 made no segment: ", why));
  }
  DDP_ASSIGN_OR_RETURN(int fd, ReceiveFd(address, options.rank - 1, options.deadline));
  DDP_ASSIGN_OR_RETURN(SharedMemory memory, SharedMemory::Map(fd));
  const bool fits = memory.size() >= layout.bytes();
  const Header* header = reinterpret_cast<const Header*>(memory.data());
  if (!fits || header->magic != kMagic || header->fingerprint != layout.fingerprint()) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", options.rank,
                     " and rank 0 have different plans for their segment; "
                     "run the same binary with the same options of shm on all ranks"));
  }
  return memory;
}

}  // namespace

absl::StatusOr<std::shared_ptr<ShmGroup>> ShmGroup::Join(const ShmJoinOptions& options) {
  DDP_ASSIGN_OR_RETURN(SegmentLayout layout,
                       SegmentLayout::Plan(options.world_size, options.limits));
  std::vector<ProcessIdentity> processes = {Peer::Self()};
  if (options.world_size > 1) {
    DDP_ASSIGN_OR_RETURN(processes, WaitForPeers(options));
  }

  absl::StatusOr<SharedMemory> memory =
      options.rank == 0 ? MakeSegment(options, layout) : ReceiveSegment(options, layout);
  if (!memory.ok()) {
    if (options.rank == 0 && options.world_size > 1) {
      options.set(kSegmentKey, absl::StrCat(kFailed, memory.status().message())).IgnoreError();
    }
    return memory.status();
  }

  std::vector<PeerInfo> peers;
  for (int rank = 0; rank < options.world_size; ++rank) {
    PeerInfo info;
    info.name = absl::StrCat("rank ", rank, " (pid ", processes[rank].pid, ")");
    // Ranks may be threads of this process, which need no check.
    if (!(processes[rank] == Peer::Self())) {
      absl::StatusOr<Peer> peer = Peer::Open(processes[rank]);
      if (!peer.ok()) return Annotate(peer.status(), info.name);
      info.alive = [peer = std::make_shared<Peer>(*std::move(peer))] { return peer->Alive(); };
    }
    peers.push_back(std::move(info));
  }
  return std::shared_ptr<ShmGroup>(
      new ShmGroup(options.rank, layout, *std::move(memory), std::move(peers)));
}

ShmGroup::ShmGroup(int rank, const SegmentLayout& layout, SharedMemory memory,
                   std::vector<PeerInfo> peers)
    : rank_(rank), layout_(layout), memory_(std::move(memory)) {
  const View view(layout_, memory_.data());
  if (layout.arena_bytes() != 0) {
    arena_.emplace(&memory_, static_cast<size_t>(view.arena(rank) - memory_.data()),
                   layout.arena_bytes());
  }
  engine_ = std::make_shared<Engine>(view, rank, std::move(peers), OptionsFor(world_size()));
}

}  // namespace ddp::backends::shm
