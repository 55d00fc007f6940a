// The hierarchical algorithm. A collective is cut into items. Each item passes through up to three
// stages: local (inside hosts), across hosts, local. Several items are in flight at once, so that
// the local work on one item overlaps with the network transfer of another.
//
//   Pipeline pipeline(topology, parts, &reduction, link, deadline, /*window=*/4);
//   pipeline.Run(AllreduceItems(topology, {tensor}, chunk_bytes));
//
// Stages of an item, with two hosts of two ranks, 0 1 | 2 3. The lane is 0, for the reduce 1:
//
// clang-format off
//   operation          1. local                 2. across hosts           3. local
//   all-reduce         1 reduces to 0, 3 to 2   0 and 2 exchange, add     0 broadcasts to 1, 2 to 3
//   broadcast from 1   1 broadcasts to 0        0 sends to 2              2 broadcasts to 3
//   reduce to 3        0 reduces to 1, 2 to 3   1 sends to 3, which adds  none
// clang-format on
//
// Successive items of an all-reduce or a broadcast use successive lanes (topology.h), so that all
// ranks share the work and each host has several connections. Items of a reduce use the root's
// lane, if the root is on one: then stage 3 is not needed, but the root's lane does all the work
// between hosts. An all-gather is one broadcast from each rank, a reduce-scatter one reduce to each
// rank, all in flight together. Data is sent only once from one host to another.
//
// With three or more hosts, each item of an all-reduce is sent to one host, its home, which adds up
// and sends the result back; hosts take turns. Small items are exchanged between all hosts instead,
// which needs one network latency instead of two.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "backends/common/topology.h"
#include "backends/hier/hier_reduction.h"
#include "backends/hier/link.h"
#include "backends/hier/parts.h"

namespace ddp::backends::hier {

struct Item {
  enum class Kind { kAllreduce, kReduce, kBroadcast };
  static constexpr int kEveryHost = -1;

  Kind kind = Kind::kAllreduce;
  // Input and output of this rank, in place; contiguous. Undefined on ranks that do not receive the
  // result: scratch memory is allocated then.
  at::Tensor data;
  // Copied to `data` at the start, and not changed. Undefined: `data` holds the input.
  at::Tensor input;
  int lane = 0;
  // The host that adds up; kEveryHost: all do. For reduce and broadcast: the host of the root.
  int home = kEveryHost;
  int root_local_rank = 0;  // reduce and broadcast: local rank of the root, on host `home`
};

// The items of a collective, in the order in which all ranks must run them. Tensors are contiguous
// and 1-d; chunk_bytes is the maximum size of an item.
std::vector<Item> AllreduceItems(const Topology& topology, const std::vector<at::Tensor>& tensors,
                                 int64_t chunk_bytes);
std::vector<Item> BroadcastItems(const Topology& topology, const at::Tensor& tensor, int root,
                                 int64_t chunk_bytes);
// `output` is undefined on all ranks but the root.
std::vector<Item> ReduceItems(const Topology& topology, const at::Tensor& input,
                              const at::Tensor& output, int root, int64_t chunk_bytes);
// Merges lists: the first item of each list, then the second of each, and so on.
std::vector<Item> Interleave(std::vector<std::vector<Item>> lists);

// Runs one collective. Thread-compatible.
class Pipeline {
 public:
  // `window`: number of items begun before the first one is finished; at least 2. `reduction` may
  // be null for broadcasts. References are borrowed.
  Pipeline(const Topology& topology, const Parts& parts, const HierReduction* reduction,
           const Link& link, absl::Time deadline, int window);

  // Collective: all ranks run items of the same kinds, sizes, lanes and homes. Blocks until all are
  // done. Throws PartError.
  void Run(std::vector<Item> items);

  // Bytes that this rank has sent to other hosts, before packing.
  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  // A message to or from another host. If it may be packed, its packed size is sent before it.
  struct Transfer {
    int peer_host = 0;
    at::Tensor packed_bytes;  // int64, one element, 0: not packed. Undefined: never packed
    at::Tensor payload;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
  };
  struct State {
    explicit State(Item i) : item(std::move(i)) {}
    Item item;
    std::vector<at::Tensor> data;  // one: c10d takes its tensors by reference to a vector
    std::vector<c10::intrusive_ptr<c10d::Work>> local;
    std::vector<at::Tensor> inbox;  // by host: contributions received from other hosts
    std::vector<Transfer> sends, receives;
  };

  // The steps of an item, in this order; steps of other items run in between.
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
