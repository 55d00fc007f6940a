// The algorithm: a collective is cut into items, and each goes through up to three stages, local,
// across hosts, local again, with several items under way at once, so that one item's local work
// overlaps with another's time on the network.
//
//   Pipeline pipeline(topology, parts, reduction, deadline, window);
//   pipeline.Run(AllreduceItems(topology, tensor, chunk_bytes));
//
// Stages, for a 2 x 2 world, ranks 0 1 | 2 3, an item on lane 0:
//
//   all-reduce   0 1 reduce to 0, 2 3 to 2;  0 and 2 exchange and add;  0 and 2 broadcast to 1 and
//   3 broadcast    from 1: 1 broadcasts to 0;  0 sends to 2;               2 broadcasts to 3 reduce
//   to 3:   as all-reduce;      0 sends to 2, which adds;   2 broadcasts to 3
//
// Successive items take successive lanes, so that all ranks share the work and each host has
// several connections. All-gather is a broadcast from each rank, reduce-scatter a reduce to each,
// at once. Each byte that must cross between two hosts crosses once.
//
// Of three and more hosts, all-reduce items are added up by one host each, in turns, and sent back;
// small ones, where latency is all, are exchanged by all.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "backends/hier/hier_reduction.h"
#include "backends/hier/link.h"
#include "backends/hier/parts.h"
#include "backends/hier/topology.h"

namespace ddp::backends::hier {

struct Item {
  enum class Kind { kAllreduce, kReduce, kBroadcast };
  static constexpr int kEveryHost = -1;

  Kind kind = Kind::kAllreduce;
  // What is sent and, where this rank gets the result, where it goes. Contiguous. Undefined where
  // the result goes nowhere on this rank: then scratch memory serves, for as long as it must.
  at::Tensor data;
  // What is copied to `data` first, so that it stays as it is; undefined: `data` holds it.
  at::Tensor input;
  int lane = 0;
  int home = kEveryHost;    // the host that adds up; for reduce and broadcast, the root's
  int root_local_rank = 0;  // of reduce and broadcast, on host `home`
};

// Items in the order in which all ranks must run them; tensors are contiguous and 1-d.
std::vector<Item> AllreduceItems(const Topology& topology, const std::vector<at::Tensor>& tensors,
                                 int64_t chunk_bytes);
std::vector<Item> BroadcastItems(const Topology& topology, const at::Tensor& tensor, int root,
                                 int64_t chunk_bytes);
// `output` is undefined on all ranks but the root.
std::vector<Item> ReduceItems(const Topology& topology, const at::Tensor& input,
                              const at::Tensor& output, int root, int64_t chunk_bytes);
// One list out of several: the first item of each, the second of each, and so on.
std::vector<Item> Interleave(std::vector<std::vector<Item>> lists);

class Pipeline {
 public:
  // `window` items are under way at once. `reduction` may be null for broadcasts.
  Pipeline(const Topology& topology, const Parts& parts, const HierReduction* reduction,
           const Link& link, absl::Time deadline, int window);

  // Collective: all ranks run items of the same kinds, sizes and places. Throws PartError.
  void Run(std::vector<Item> items);

  // What this rank has sent to other hosts, before packing.
  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  // A message and, where it may be packed, one before it that says so.
  struct Transfer {
    int peer_host = 0;
    at::Tensor packed_bytes;  // int64, one element: 0 if not packed; undefined: it cannot be
    at::Tensor payload;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
  };
  struct State {
    explicit State(Item i) : item(std::move(i)) {}
    Item item;
    std::vector<at::Tensor> data;  // one: c10d takes its tensors by reference to a vector
    std::vector<c10::intrusive_ptr<c10d::Work>> local;
    std::vector<at::Tensor> inbox;  // by host, what the other hosts contribute
    std::vector<Transfer> sends, receives;
  };

  // One item's way, in this order; other items' steps come between.
  void Begin(State& state);
  void SendContribution(State& state);
  void CombineAtHome(State& state);
  void Finish(State& state);
  void Drain(State& state);

  void LocalReduce(State& state);
  void LocalBroadcast(State& state, int root);
  void AwaitLocal(State& state);
  void Send(State& state, const std::vector<int>& hosts, int tag);
  void ReceiveFrom(State& state, int host, at::Tensor tensor, int tag);
  void AwaitReceives(State& state);
  void AwaitAll(std::vector<Transfer>& transfers, absl::string_view doing);
  void Unpack(Transfer& transfer);
  void Combine(State& state);

  bool OnLane(const Item& item) const { return topology_.local_rank == item.lane; }
  bool AtHome(const Item& item) const { return topology_.host == item.home; }

  const Topology& topology_;
  const Parts& parts_;
  const HierReduction* const reduction_;
  const Link& link_;
  const absl::Time deadline_;
  const int window_;
  std::vector<int> other_hosts_;
  int64_t sent_bytes_ = 0;
};

}  // namespace ddp::backends::hier
