#include "backends/hier/pipeline.h"

#include <algorithm>
#include <deque>

#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/full.h"
#include "absl/strings/str_cat.h"
#include "backends/hier/packing.h"

namespace ddp::backends::hier {
namespace {

using Kind = Item::Kind;

// Largest chunk, in bytes, and largest number of hosts, for which sending a chunk to all hosts
// takes less time than a second network latency.
constexpr int64_t kExchangeBytes = 32 << 10;
constexpr int kExchangeHosts = 8;

// Messages between two ranks are distinguished by their order only.
constexpr int kContribution = 0;
constexpr int kResult = 1;

// Smallest chunk that is packed, in bytes: packing takes a second message.
constexpr int64_t kPackableBytes = 64 << 10;

bool IsPackable(const at::Tensor& tensor) {
  const c10::ScalarType dtype = tensor.scalar_type();
  return (dtype == at::kFloat || dtype == at::kBFloat16) &&
         tensor.nbytes() >= static_cast<size_t>(kPackableBytes);
}

// Partition of a tensor: [cuts[i], cuts[i + 1]) are the elements of chunk i. Large chunks need the
// fewest calls, but the network is idle until the first chunk is ready, and the hosts are idle
// after the last one has been sent. So chunks grow from an eighth of the full size, and shrink to
// it.
std::vector<int64_t> Cuts(const at::Tensor& tensor, int64_t chunk_bytes) {
  const int64_t full = std::max<int64_t>(chunk_bytes / tensor.element_size(), 1);
  std::vector<int64_t> head = {0}, tail;
  int64_t end = tensor.numel();
  for (int64_t size = std::max<int64_t>(full / 8, 1); size < full && end - head.back() > 4 * size;
       size *= 2) {
    tail.push_back(end);
    end -= size;
    head.push_back(head.back() + size);
  }
  const int64_t begin = head.back(), count = (end - begin + full - 1) / full;
  for (int64_t i = 1; i <= count; ++i) head.push_back(begin + (end - begin) * i / count);
  head.insert(head.end(), tail.rbegin(), tail.rend());
  return head;
}

at::Tensor Chunk(const at::Tensor& tensor, const std::vector<int64_t>& cuts, size_t index) {
  if (!tensor.defined()) return tensor;
  return tensor.narrow(0, cuts[index], cuts[index + 1] - cuts[index]);
}

}  // namespace

std::vector<Item> AllreduceItems(const Topology& topology, const std::vector<at::Tensor>& tensors,
                                 int64_t chunk_bytes) {
  std::vector<Item> items;
  for (const at::Tensor& tensor : tensors) {
    const std::vector<int64_t> cuts = Cuts(tensor, chunk_bytes);
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const auto turn = static_cast<int>(items.size());
      Item item;
      item.kind = Kind::kAllreduce;
      item.data = Chunk(tensor, cuts, i);
      item.lane = turn % topology.lanes();
      const bool small = item.data.nbytes() <= static_cast<size_t>(kExchangeBytes) &&
                         topology.num_hosts() <= kExchangeHosts;
      // Two hosts always exchange their contributions.
      if (topology.num_hosts() > 2 && !small) {
        item.home = turn / topology.lanes() % topology.num_hosts();
      }
      items.push_back(std::move(item));
    }
  }
  return items;
}

std::vector<Item> BroadcastItems(const Topology& topology, const at::Tensor& tensor, int root,
                                 int64_t chunk_bytes) {
  const auto [home, local_rank] = topology.Find(root);
  const std::vector<int64_t> cuts = Cuts(tensor, chunk_bytes);
  std::vector<Item> items;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    Item item;
    item.kind = Kind::kBroadcast;
    item.data = Chunk(tensor, cuts, i);
    item.lane = static_cast<int>((local_rank + i) % topology.lanes());
    item.home = home;
    item.root_local_rank = local_rank;
    items.push_back(std::move(item));
  }
  return items;
}

std::vector<Item> ReduceItems(const Topology& topology, const at::Tensor& input,
                              const at::Tensor& output, int root, int64_t chunk_bytes) {
  const auto [home, local_rank] = topology.Find(root);
  const std::vector<int64_t> cuts = Cuts(input, chunk_bytes);
  std::vector<Item> items;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    Item item;
    item.kind = Kind::kReduce;
    item.input = Chunk(input, cuts, i);
    item.data = Chunk(output, cuts, i);
    // The lane of the root, if it is on one: its host then needs no local stage at the end.
    item.lane = static_cast<int>(
        local_rank < topology.lanes() ? local_rank : (local_rank + i) % topology.lanes());
    item.home = home;
    item.root_local_rank = local_rank;
    items.push_back(std::move(item));
  }
  return items;
}

std::vector<Item> Interleave(std::vector<std::vector<Item>> lists) {
  size_t longest = 0;
  for (const std::vector<Item>& list : lists) longest = std::max(longest, list.size());
  std::vector<Item> items;
  for (size_t i = 0; i < longest; ++i) {
    for (std::vector<Item>& list : lists) {
      if (i < list.size()) items.push_back(std::move(list[i]));
    }
  }
  return items;
}

Pipeline::Pipeline(const Topology& topology, const Parts& parts, const HierReduction* reduction,
                   const Link& link, absl::Time deadline, int window)
    : topology_(topology),
      parts_(parts),
      reduction_(reduction),
      link_(link),
      deadline_(deadline),
      window_(window) {
  for (int host = 0; host < topology.num_hosts(); ++host) {
    if (host != topology.host) other_hosts_.push_back(host);
  }
}

// All ranks make all steps in the same order, so that the calls on each part match. A step waits
// only for earlier steps of other ranks.
void Pipeline::Run(std::vector<Item> items) {
  const auto count = static_cast<int64_t>(items.size());
  const int64_t to_combine = window_ / 2, to_finish = window_, to_drain = window_ + 2;
  std::deque<State> states;  // of items [first, begun)
  int64_t first = 0, begun = 0;
  const auto step = [&](int64_t index, void (Pipeline::*f)(State&)) {
    if (index >= first && index < begun) (this->*f)(states[index - first]);
  };
  for (int64_t i = 0; first < count; ++i) {
    if (begun < count) {
      states.emplace_back(std::move(items[begun++]));
      Begin(states.back());
    }
    step(i - 1, &Pipeline::SendContribution);
    step(i - to_combine, &Pipeline::CombineAtHome);
    step(i - to_finish, &Pipeline::Finish);
    if (i >= to_drain) {
      Drain(states.front());
      states.pop_front();
      ++first;
    }
  }
}

void Pipeline::Begin(State& state) {
  Item& item = state.item;
  if (!item.data.defined()) item.data = at::empty_like(item.input);
  if (item.input.defined()) item.data.copy_(item.input);
  state.data = {item.data};
  if (item.kind == Kind::kBroadcast) {
    if (AtHome(item)) LocalBroadcast(state, item.root_local_rank);
  } else {
    reduction_->Prepare(item.data);
    LocalReduce(state);
  }
  if (!OnLane(item)) return;

  // Receives are posted early, because gloo sends a message only after its receive has been posted.
  const bool adds_up =
      item.kind != Kind::kBroadcast && (item.home == Item::kEveryHost || AtHome(item));
  if (adds_up) {
    state.inbox.resize(topology_.num_hosts());
    for (int host : other_hosts_) {
      state.inbox[host] = at::empty_like(item.data);
      ReceiveFrom(state, host, state.inbox[host], kContribution);
    }
  } else if (item.kind != Kind::kReduce && !AtHome(item)) {
    // The result may overwrite this host's contribution: it arrives after that has been received.
    ReceiveFrom(state, item.home, item.data, kResult);
  }
}

void Pipeline::SendContribution(State& state) {
  const Item& item = state.item;
  if (!OnLane(item)) return;
  if (item.kind == Kind::kBroadcast) {
    if (!AtHome(item)) return;
    if (item.lane != item.root_local_rank) AwaitLocal(state);
    Send(state, other_hosts_, kResult);
    return;
  }
  if (AtHome(item)) return;
  AwaitLocal(state);
  if (item.home == Item::kEveryHost) {
    Send(state, other_hosts_, kContribution);
  } else {
    Send(state, {item.home}, kContribution);
  }
}

void Pipeline::CombineAtHome(State& state) {
  const Item& item = state.item;
  if (item.kind == Kind::kBroadcast || !OnLane(item) || !AtHome(item)) return;
  AwaitLocal(state);
  AwaitReceives(state);
  Combine(state);
  if (item.kind == Kind::kAllreduce) Send(state, other_hosts_, kResult);
}

void Pipeline::Finish(State& state) {
  const Item& item = state.item;
  if (OnLane(item)) {
    // Combine overwrites the memory that has been sent.
    AwaitAll(state.sends, "sending to");
    state.sends.clear();
    AwaitReceives(state);
    if (item.home == Item::kEveryHost) Combine(state);
  }
  switch (item.kind) {
    case Kind::kAllreduce:
      LocalBroadcast(state, item.lane);
      break;
    case Kind::kBroadcast:
      if (!AtHome(item)) LocalBroadcast(state, item.lane);
      break;
    case Kind::kReduce:
      if (AtHome(item) && item.lane != item.root_local_rank) LocalBroadcast(state, item.lane);
      break;
  }
}

void Pipeline::Drain(State& state) { AwaitLocal(state); }

void Pipeline::LocalReduce(State& state) {
  if (!parts_.local) return;
  InPart(parts_.local, "reducing", [&] {
    c10d::ReduceOptions options;
    options.reduceOp = reduction_->op();
    options.rootRank = state.item.lane;
    options.timeout = Remaining(deadline_);
    state.local.push_back(parts_.local.backend->reduce(state.data, options));
  });
}

void Pipeline::LocalBroadcast(State& state, int root) {
  if (!parts_.local) return;
  InPart(parts_.local, "broadcasting", [&] {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = Remaining(deadline_);
    state.local.push_back(parts_.local.backend->broadcast(state.data, options));
  });
}

void Pipeline::AwaitLocal(State& state) {
  for (const c10::intrusive_ptr<c10d::Work>& work : state.local) {
    Await(parts_.local, "waiting", *work, deadline_);
  }
  state.local.clear();
}

void Pipeline::Send(State& state, const std::vector<int>& hosts, int tag) {
  const at::Tensor& data = state.item.data;
  Transfer transfer;
  transfer.payload = data;
  if (IsPackable(data)) {
    size_t packed_bytes = 0;
    if (link_.packs()) {
      const auto number_bytes = static_cast<int>(data.element_size());
      at::Tensor packed =
          at::empty({static_cast<int64_t>(MaxPackedBytes(data.numel(), number_bytes))}, at::kByte);
      packed_bytes = Pack(data.const_data_ptr(), data.numel(), number_bytes,
                          packed.mutable_data_ptr<uint8_t>());
      if (packed_bytes < data.nbytes()) {
        transfer.payload = packed.narrow(0, 0, static_cast<int64_t>(packed_bytes));
      } else {
        packed_bytes = 0;
      }
    }
    transfer.packed_bytes = at::full({1}, static_cast<int64_t>(packed_bytes), at::kLong);
  }
  for (int host : hosts) {
    transfer.peer_host = host;
    transfer.works.clear();
    InPart(parts_.cross, "sending", [&] {
      for (const at::Tensor& message : {transfer.packed_bytes, transfer.payload}) {
        if (!message.defined()) continue;
        std::vector<at::Tensor> tensors = {message};
        transfer.works.push_back(parts_.cross.backend->send(tensors, host, tag));
      }
    });
    state.sends.push_back(transfer);
    sent_bytes_ += static_cast<int64_t>(data.nbytes());
  }
}

void Pipeline::ReceiveFrom(State& state, int host, at::Tensor tensor, int tag) {
  Transfer transfer;
  transfer.peer_host = host;
  if (IsPackable(tensor)) transfer.packed_bytes = at::empty({1}, at::kLong);
  transfer.payload = std::move(tensor);
  InPart(parts_.cross, "receiving", [&] {
    for (const at::Tensor& message : {transfer.packed_bytes, transfer.payload}) {
      if (!message.defined()) continue;
      // Packed data is shorter than the tensor, and is at its beginning.
      std::vector<at::Tensor> tensors = {message};
      transfer.works.push_back(parts_.cross.backend->recv(tensors, host, tag));
    }
  });
  state.receives.push_back(std::move(transfer));
}

void Pipeline::AwaitReceives(State& state) {
  AwaitAll(state.receives, "receiving from");
  for (Transfer& transfer : state.receives) Unpack(transfer);
  state.receives.clear();
}

void Pipeline::AwaitAll(std::vector<Transfer>& transfers, absl::string_view doing) {
  for (Transfer& transfer : transfers) {
    for (const c10::intrusive_ptr<c10d::Work>& work : transfer.works) {
      Await(parts_.cross, absl::StrCat(doing, " rank ", parts_.cross.ranks[transfer.peer_host]),
            *work, deadline_);
    }
  }
}

void Pipeline::Unpack(Transfer& transfer) {
  if (!transfer.packed_bytes.defined()) return;
  const int64_t bytes = transfer.packed_bytes.item<int64_t>();
  if (bytes == 0) return;
  at::Tensor& tensor = transfer.payload;
  InPart(parts_.cross, "unpacking", [&] {
    TORCH_CHECK(bytes > 0 && bytes < static_cast<int64_t>(tensor.nbytes()), bytes,
                " bytes for a tensor of ", tensor.nbytes());
    const at::Tensor packed = tensor.view(at::kByte).narrow(0, 0, bytes).clone();
    TORCH_CHECK(hier::Unpack(packed.const_data_ptr<uint8_t>(), bytes, tensor.numel(),
                             static_cast<int>(tensor.element_size()), tensor.mutable_data_ptr()),
                "the message is damaged");
  });
}

void Pipeline::Combine(State& state) {
  std::vector<at::Tensor> parts = std::move(state.inbox);
  parts[topology_.host] = state.item.data;
  reduction_->Combine(parts, state.item.data);
}

}  // namespace ddp::backends::hier
