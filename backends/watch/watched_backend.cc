#include "backends/watch/watched_backend.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <system_error>
#include <thread>
#include <typeinfo>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backends/common/host.h"
#include "backends/watch/make_record.h"
#include "c10/util/Exception.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace ddp::backends::watch {
namespace {

using c10d::OpType;

// Maximum wait for the inner backend's destructor in another thread.
constexpr std::chrono::milliseconds kMaxDestructionTime(2000);

// Whether the backend rejected the arguments of the call, before it communicated with other ranks.
bool IsAboutArguments(const std::exception& error) {
  return typeid(error) == typeid(c10::Error) || typeid(error) == typeid(c10::ValueError) ||
         typeid(error) == typeid(c10::TypeError) || typeid(error) == typeid(c10::IndexError) ||
         typeid(error) == typeid(c10::NotImplementedError) ||
         typeid(error) == typeid(std::invalid_argument);
}

// A factory may return a backend of another kind than its registry entry describes, as hier does on
// a single host.
BackendCapabilities CapabilitiesOf(const c10d::Backend& backend, const WatchOptions& options) {
  const auto* declares = dynamic_cast<const CapabilityProvider*>(&backend);
  return declares == nullptr ? options.capabilities : declares->capabilities();
}

// Host name of the server of a TCPStore; empty for other stores.
std::string StoreHost(const c10::intrusive_ptr<c10d::Store>& store) {
  c10::intrusive_ptr<c10d::Store> inner = store;
  // Where c10's dynamic_intrusive_pointer_cast fails, it leaves a reference that nobody releases.
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    inner = prefixed->getUnderlyingNonPrefixStore();
  }
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(inner.get());
  return tcp != nullptr ? tcp->getHost() : "";
}

}  // namespace

WatchedBackend::WatchedBackend(BackendPtr inner, c10::intrusive_ptr<c10d::Store> store,
                               WatchOptions options)
    : ForwardingBackend(std::move(inner)),
      store_(std::move(store)),
      options_(std::move(options)),
      capabilities_(CapabilitiesOf(*inner_, options_)),
      wraps_work_(capabilities_.works_can_be_polled),
      waiting_(capabilities_.abort_ends_waits ? Waiting::kByBackend : Waiting::kByWatch) {
  WatchdogOptions watchdog;
  watchdog.rank = rank_;
  watchdog.size = size_;
  watchdog.name = options_.name.empty() ? inner_->getBackendName() : options_.name;
  watchdog.store = store_->clone();
  watchdog.host = options_.host.empty() ? HostId() : options_.host;
  watchdog.store_host = StoreHost(store_);
  watchdog.stall = options_.stall;
  watchdog.sees_completion = wraps_work_;
  watchdog.names_dead = waiting_ == Waiting::kByBackend;
  watchdog.is_subgroup = !options_.name.empty();
  watchdog.training_thread = options_.training_thread;
  watchdog.rank_0_serves_store = options_.rank_0_serves_store;
  watchdog.abort = [inner = inner_] { inner->abort(); };
  watchdog_ = c10::make_intrusive<Watchdog>(std::move(watchdog));
  watchdog_->Start();
}

// The inner backend's destructor may block: after an abort, on pending collectives until their
// timeout; and always in one of its own threads, for which it waits. A callback of a future runs
// there, and may have held the last reference to this group. Another thread destroys it then.
WatchedBackend::~WatchedBackend() {
  watchdog_->Stop();
  const bool may_wait_for_collectives = watchdog_->aborted() && waiting_ != Waiting::kByBackend;
  const bool may_be_its_own_thread = std::this_thread::get_id() != creator_;
  if (!may_wait_for_collectives && !may_be_its_own_thread) return;
  std::promise<void> destroyed;
  std::future<void> end = destroyed.get_future();
  try {
    std::thread([inner = std::move(inner_), destroyed = std::move(destroyed)]() mutable {
      inner.reset();
      destroyed.set_value();
    }).detach();
  } catch (const std::system_error&) {
    return;  // The system allows no further thread: the backend has been destroyed here.
  }
  // Usually the caller's thread is not the backend's: then it ends at once, not during exit().
  if (!may_wait_for_collectives) end.wait_for(kMaxDestructionTime);
}

// Hot path: reads no clock and allocates only the Work.
template <typename Call>
WatchedBackend::WorkPtr WatchedBackend::Watched(OpType type, const CallRecord& record,
                                                const Call& call) {
  if (C10_UNLIKELY(watchdog_->aborted())) {
    std::rethrow_exception(watchdog_->AbortError(ToString(record)));
  }
  Recorder& recorder = watchdog_->collectives();
  const uint64_t number = recorder.Begin(record);
  WorkPtr work;
  try {
    work = call();
  } catch (const std::exception&) {
    HandleError(recorder, number);
  }
  if (!work || !wraps_work_) {
    recorder.End(number);
    return work;
  }
  return c10::make_intrusive<WatchedWork>(rank_, type, std::move(work), watchdog_, recorder, number,
                                          waiting_);
}

template <typename Call>
WatchedBackend::WorkPtr WatchedBackend::WatchedMessage(OpType type, CollectiveKind kind,
                                                       const Tensors& tensors, int peer,
                                                       const Call& call) {
  const CallRecord record = MakeRecord(kind, tensors, kNoReduceOp, peer);
  if (C10_UNLIKELY(watchdog_->aborted())) {
    std::rethrow_exception(watchdog_->AbortError(ToString(record)));
  }
  Recorder& recorder = watchdog_->messages();
  const uint64_t number = recorder.Begin(record);
  WorkPtr work;
  try {
    work = call();
  } catch (const std::exception&) {
    HandleError(recorder, number);
  }
  watchdog_->CountMessage(kind == CollectiveKind::kSend, peer);
  if (!work || !wraps_work_) {
    recorder.End(number);
    return work;
  }
  return c10::make_intrusive<WatchedWork>(rank_, type, std::move(work), watchdog_, recorder, number,
                                          waiting_);
}

void WatchedBackend::HandleError(Recorder& recorder, uint64_t number) {
  const bool is_message = &recorder == &watchdog_->messages();
  const std::string name = recorder.Name(number);
  try {
    throw;
  } catch (const std::exception& error) {
    if (IsAboutArguments(error) && !watchdog_->aborted()) {
      recorder.Cancel(number);
      throw;
    }
  }
  recorder.End(number);
  std::rethrow_exception(
      watchdog_->Explain(std::current_exception(), name, is_message ? 0 : number));
}

WatchedBackend::WorkPtr WatchedBackend::broadcast(Tensors& tensors,
                                                  const c10d::BroadcastOptions& opts) {
  return Watched(OpType::BROADCAST,
                 MakeRecord(CollectiveKind::kBroadcast, tensors, kNoReduceOp, opts.rootRank),
                 [&] { return inner_->broadcast(tensors, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::allreduce(Tensors& tensors,
                                                  const c10d::AllreduceOptions& opts) {
  return Watched(OpType::ALLREDUCE,
                 MakeRecord(CollectiveKind::kAllReduce, tensors, Number(opts.reduceOp)),
                 [&] { return inner_->allreduce(tensors, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::allreduce_sparse(Tensors& tensors,
                                                         const c10d::AllreduceOptions& opts) {
  return Watched(OpType::_ALLREDUCE_SPARSE,
                 MakeRecord(CollectiveKind::kAllReduceSparse, tensors, Number(opts.reduceOp)),
                 [&] { return inner_->allreduce_sparse(tensors, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return Watched(OpType::ALLREDUCE_COALESCED,
                 MakeRecord(CollectiveKind::kAllReduceCoalesced, tensors, Number(opts.reduceOp)),
                 [&] { return inner_->allreduce_coalesced(tensors, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return Watched(OpType::REDUCE,
                 MakeRecord(CollectiveKind::kReduce, tensors, Number(opts.reduceOp), opts.rootRank),
                 [&] { return inner_->reduce(tensors, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& opts) {
  return Watched(OpType::ALLGATHER, MakeRecord(CollectiveKind::kAllGather, outputs),
                 [&] { return inner_->allgather(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                                          const c10d::AllgatherOptions& opts) {
  return Watched(OpType::_ALLGATHER_BASE, MakeRecord(CollectiveKind::kAllGatherSingle, output),
                 [&] { return inner_->all_gather_single(output, input, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& opts) {
  return Watched(OpType::ALLGATHER_COALESCED,
                 MakeRecord(CollectiveKind::kAllGatherCoalesced, outputs),
                 [&] { return inner_->allgather_coalesced(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::all_gather_single_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return Watched(OpType::COALESCED, MakeRecord(CollectiveKind::kAllGatherSingleCoalesced, outputs),
                 [&] { return inner_->all_gather_single_coalesced(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::gather(TensorLists& outputs, Tensors& inputs,
                                               const c10d::GatherOptions& opts) {
  return Watched(OpType::GATHER,
                 MakePartsRecord(CollectiveKind::kGather, inputs, outputs, opts.rootRank),
                 [&] { return inner_->gather(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                                const c10d::ScatterOptions& opts) {
  return Watched(OpType::SCATTER,
                 MakePartsRecord(CollectiveKind::kScatter, outputs, inputs, opts.rootRank),
                 [&] { return inner_->scatter(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                       const c10d::ReduceScatterOptions& opts) {
  return Watched(OpType::REDUCE_SCATTER,
                 MakeRecord(CollectiveKind::kReduceScatter, inputs, Number(opts.reduceOp)),
                 [&] { return inner_->reduce_scatter(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::reduce_scatter_single(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  return Watched(OpType::_REDUCE_SCATTER_BASE,
                 MakeRecord(CollectiveKind::kReduceScatterSingle, input, Number(opts.reduceOp)),
                 [&] { return inner_->reduce_scatter_single(output, input, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::reduce_scatter_single_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return Watched(
      OpType::COALESCED,
      MakeRecord(CollectiveKind::kReduceScatterSingleCoalesced, inputs, Number(opts.reduceOp)),
      [&] { return inner_->reduce_scatter_single_coalesced(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                                          std::vector<int64_t>& output_splits,
                                                          std::vector<int64_t>& input_splits,
                                                          const c10d::AllToAllOptions& opts) {
  CallRecord record = MakeRecord(CollectiveKind::kAllToAllSingle, input);
  record.same_numel = output_splits.empty() && input_splits.empty();
  return Watched(OpType::ALLTOALL_BASE, record, [&] {
    return inner_->all_to_all_single(output, input, output_splits, input_splits, opts);
  });
}

WatchedBackend::WorkPtr WatchedBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllToAllOptions& opts) {
  CallRecord record = MakeRecord(CollectiveKind::kAllToAll, inputs);
  record.same_numel = false;  // part sizes may differ between ranks
  return Watched(OpType::ALLTOALL, record, [&] { return inner_->alltoall(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::barrier(const c10d::BarrierOptions& opts) {
  ForwardProperties();
  return Watched(OpType::BARRIER, CallRecord{.kind = CollectiveKind::kBarrier},
                 [&] { return inner_->barrier(opts); });
}

void WatchedBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  Watched(OpType::BARRIER, CallRecord{.kind = CollectiveKind::kMonitoredBarrier}, [&] {
    inner_->monitoredBarrier(opts, wait_all_ranks);
    return WorkPtr();
  });
}

WatchedBackend::WorkPtr WatchedBackend::send(Tensors& tensors, int dst, int tag) {
  return WatchedMessage(OpType::SEND, CollectiveKind::kSend, tensors, dst,
                        [&] { return inner_->send(tensors, dst, tag); });
}

WatchedBackend::WorkPtr WatchedBackend::recv(Tensors& tensors, int src, int tag) {
  return WatchedMessage(OpType::RECV, CollectiveKind::kRecv, tensors, src,
                        [&] { return inner_->recv(tensors, src, tag); });
}

WatchedBackend::WorkPtr WatchedBackend::recvAnysource(Tensors& tensors, int tag) {
  return WatchedMessage(OpType::RECVANYSOURCE, CollectiveKind::kRecvAnySource, tensors, kNoRoot,
                        [&] { return inner_->recvAnysource(tensors, tag); });
}

void WatchedBackend::Progress(const std::function<bool()>& done) {
  if (auto* declares = dynamic_cast<CapabilityProvider*>(inner_.get())) declares->Progress(done);
}

void WatchedBackend::ForwardProperties() {
  if (getBoundDeviceId() != inner_->getBoundDeviceId()) {
    inner_->setBoundDeviceId(getBoundDeviceId());
  }
  if (getGroupDesc() != inner_->getGroupDesc()) inner_->setGroupDesc(getGroupDesc());
}

void WatchedBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  auto copy = hook;
  inner_->registerOnCompletionHook(std::move(hook));
  onCompletionHook_ = std::move(copy);  // read by hasHooks(), which is not virtual
}

void WatchedBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  inner_->setGroupUid(uid);
  ForwardProperties();
}

void WatchedBackend::eagerConnectSingleDevice(at::Device device) {
  ForwardProperties();
  inner_->eagerConnectSingleDevice(device);
}

WatchedBackend::BackendPtr WatchedBackend::Subgroup(BackendPtr inner,
                                                    const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::string& name) {
  if (!inner) return inner;  // this rank is not a member
  WatchOptions options = options_;
  options.name = absl::StrCat(options_.name.empty() ? getBackendName() : options_.name, "/", name);
  options.rank_0_serves_store = false;  // only the parent's group waits
  return Watch(std::move(inner), c10::make_intrusive<c10d::PrefixStore>("watch", store), options);
}

WatchedBackend::BackendPtr WatchedBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& opts) {
  ForwardProperties();
  // The inner split is called on all ranks, as NCCL requires, also on those outside the new group.
  const bool joins = std::find(ranks.begin(), ranks.end(), rank_) != ranks.end();
  c10::intrusive_ptr<c10d::Store> group_store = store;
  if (joins) group_store = c10::make_intrusive<c10d::PrefixStore>(splits_.Next(ranks), store);
  return Subgroup(inner_->split(group_store, ranks, opts), group_store,
                  absl::StrCat("ranks ", absl::StrJoin(ranks, ",")));
}

WatchedBackend::BackendPtr WatchedBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const c10::intrusive_ptr<Options>& opts,
                                                 const int& rank, const int& size) {
  return Subgroup(inner_->merge(store, opts, rank, size), store, "merged");
}

WatchedBackend::BackendPtr WatchedBackend::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
    const c10::intrusive_ptr<Options>& opts_override) {
  const std::string name =
      absl::StrCat("without ranks ", absl::StrJoin(ranks_to_exclude, ","), " ", ++subgroups_);
  return Subgroup(inner_->shrink(ranks_to_exclude, shrink_flags, opts_override),
                  c10::make_intrusive<c10d::PrefixStore>(name, store_), name);
}

void WatchedBackend::abort() {
  watchdog_->Abort();
  inner_->abort();
}

void WatchedBackend::shutdown() {
  watchdog_->Stop();
  inner_->shutdown();
}

c10::intrusive_ptr<c10d::Backend> Watch(c10::intrusive_ptr<c10d::Backend> inner,
                                        const c10::intrusive_ptr<c10d::Store>& store,
                                        const WatchOptions& options) {
  return c10::make_intrusive<WatchedBackend>(std::move(inner), store, options);
}

std::set<int> DeadRanks(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto* watched = dynamic_cast<WatchedBackend*>(backend.get());
  return watched != nullptr ? watched->DeadRanks() : std::set<int>();
}

}  // namespace ddp::backends::watch
