#include "backends/watch/watched_backend.h"

#include <algorithm>
#include <typeinfo>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "backends/common/host.h"
#include "backends/watch/describe.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace ddp::backends::watch {
namespace {

using c10d::OpType;

// Whether the backend refused the call for what it was given, before any rank was asked.
bool IsAboutArguments(const std::exception& error) {
  return typeid(error) == typeid(c10::Error) || typeid(error) == typeid(c10::ValueError) ||
         typeid(error) == typeid(c10::TypeError) || typeid(error) == typeid(c10::IndexError) ||
         typeid(error) == typeid(c10::NotImplementedError) ||
         typeid(error) == typeid(std::invalid_argument);
}

// Empty if it is not a server's.
std::string StoreHost(const c10::intrusive_ptr<c10d::Store>& store) {
  c10::intrusive_ptr<c10d::Store> inner = store;
  if (auto prefixed = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(inner)) {
    inner = prefixed->getUnderlyingNonPrefixStore();
  }
  const auto tcp = c10::dynamic_intrusive_pointer_cast<c10d::TCPStore>(inner);
  return tcp ? tcp->getHost() : "";
}

}  // namespace

WatchedBackend::WatchedBackend(BackendPtr inner, c10::intrusive_ptr<c10d::Store> store,
                               WatchOptions options)
    : Backend(inner->getRank(), inner->getSize()),
      inner_(std::move(inner)),
      store_(std::move(store)),
      options_(std::move(options)),
      wraps_work_(options_.capabilities.works_can_be_polled),
      waiting_(options_.capabilities.abort_ends_waits ? Waiting::kByBackend : Waiting::kByWatch) {
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
  watchdog.rank_0_serves_store = options_.rank_0_serves_store;
  watchdog.abort = [inner = inner_] { inner->abort(); };
  watchdog_ = c10::make_intrusive<Watchdog>(std::move(watchdog));
  watchdog_->Start();
}

WatchedBackend::~WatchedBackend() {
  watchdog_->Stop();
  if (!watchdog_->condemned() || waiting_ == Waiting::kByBackend) return;
  // Its destructor waits for collectives that hang until their timeout: not at our expense.
  std::thread([inner = std::move(inner_)]() mutable { inner.reset(); }).detach();
}

// In the hot path: no clock, and no allocation but the Work's.
template <typename Call>
WatchedBackend::WorkPtr WatchedBackend::Watched(OpType type, const Record& record,
                                                const Call& call) {
  if (C10_UNLIKELY(watchdog_->condemned())) {
    std::rethrow_exception(watchdog_->Verdict(ToString(record)));
  }
  Recorder& recorder = watchdog_->collectives();
  const uint64_t number = recorder.Begin(record);
  WorkPtr work;
  try {
    work = call();
  } catch (const std::exception&) {
    Refused(recorder, number);
  }
  if (!work || !wraps_work_) {
    recorder.End(number);
    return work;
  }
  return c10::make_intrusive<WatchedWork>(rank_, type, std::move(work), watchdog_, recorder, number,
                                          waiting_);
}

template <typename Call>
WatchedBackend::WorkPtr WatchedBackend::WatchedMessage(OpType type, Op op, const Tensors& tensors,
                                                       int peer, const Call& call) {
  const Record record = Describe(op, tensors, kNoReduceOp, peer);
  if (C10_UNLIKELY(watchdog_->condemned())) {
    std::rethrow_exception(watchdog_->Verdict(ToString(record)));
  }
  Recorder& recorder = watchdog_->messages();
  const uint64_t number = recorder.Begin(record);
  WorkPtr work;
  try {
    work = call();
  } catch (const std::exception&) {
    Refused(recorder, number);
  }
  watchdog_->CountMessage(op == Op::kSend, peer);
  if (!work || !wraps_work_) {
    recorder.End(number);
    return work;
  }
  return c10::make_intrusive<WatchedWork>(rank_, type, std::move(work), watchdog_, recorder, number,
                                          waiting_);
}

void WatchedBackend::Refused(Recorder& recorder, uint64_t number) {
  const bool is_message = &recorder == &watchdog_->messages();
  const std::string name = recorder.Name(number);
  try {
    throw;
  } catch (const std::exception& error) {
    if (IsAboutArguments(error) && !watchdog_->condemned()) {
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
  return Watched(OpType::BROADCAST, Describe(Op::kBroadcast, tensors, kNoReduceOp, opts.rootRank),
                 [&] { return inner_->broadcast(tensors, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::allreduce(Tensors& tensors,
                                                  const c10d::AllreduceOptions& opts) {
  return Watched(OpType::ALLREDUCE, Describe(Op::kAllReduce, tensors, Number(opts.reduceOp)),
                 [&] { return inner_->allreduce(tensors, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::allreduce_sparse(Tensors& tensors,
                                                         const c10d::AllreduceOptions& opts) {
  return Watched(OpType::_ALLREDUCE_SPARSE,
                 Describe(Op::kAllReduceSparse, tensors, Number(opts.reduceOp)),
                 [&] { return inner_->allreduce_sparse(tensors, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return Watched(OpType::ALLREDUCE_COALESCED,
                 Describe(Op::kAllReduceCoalesced, tensors, Number(opts.reduceOp)),
                 [&] { return inner_->allreduce_coalesced(tensors, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return Watched(OpType::REDUCE,
                 Describe(Op::kReduce, tensors, Number(opts.reduceOp), opts.rootRank),
                 [&] { return inner_->reduce(tensors, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& opts) {
  return Watched(OpType::ALLGATHER, Describe(Op::kAllGather, outputs),
                 [&] { return inner_->allgather(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                        const c10d::AllgatherOptions& opts) {
  return Watched(OpType::_ALLGATHER_BASE, Describe(Op::kAllGatherIntoTensor, output),
                 [&] { return inner_->_allgather_base(output, input, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& opts) {
  return Watched(OpType::ALLGATHER_COALESCED, Describe(Op::kAllGatherCoalesced, outputs),
                 [&] { return inner_->allgather_coalesced(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return Watched(OpType::COALESCED, Describe(Op::kAllGatherIntoTensorCoalesced, outputs),
                 [&] { return inner_->allgather_into_tensor_coalesced(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::gather(TensorLists& outputs, Tensors& inputs,
                                               const c10d::GatherOptions& opts) {
  return Watched(OpType::GATHER, DescribeParts(Op::kGather, inputs, outputs, opts.rootRank),
                 [&] { return inner_->gather(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                                const c10d::ScatterOptions& opts) {
  return Watched(OpType::SCATTER, DescribeParts(Op::kScatter, outputs, inputs, opts.rootRank),
                 [&] { return inner_->scatter(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                       const c10d::ReduceScatterOptions& opts) {
  return Watched(OpType::REDUCE_SCATTER,
                 Describe(Op::kReduceScatter, inputs, Number(opts.reduceOp)),
                 [&] { return inner_->reduce_scatter(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  return Watched(OpType::_REDUCE_SCATTER_BASE,
                 Describe(Op::kReduceScatterTensor, input, Number(opts.reduceOp)),
                 [&] { return inner_->_reduce_scatter_base(output, input, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return Watched(OpType::COALESCED,
                 Describe(Op::kReduceScatterTensorCoalesced, inputs, Number(opts.reduceOp)),
                 [&] { return inner_->reduce_scatter_tensor_coalesced(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                      std::vector<int64_t>& output_splits,
                                                      std::vector<int64_t>& input_splits,
                                                      const c10d::AllToAllOptions& opts) {
  Record record = Describe(Op::kAllToAllBase, input);
  record.same_numel = output_splits.empty() && input_splits.empty();
  return Watched(OpType::ALLTOALL_BASE, record, [&] {
    return inner_->alltoall_base(output, input, output_splits, input_splits, opts);
  });
}

WatchedBackend::WorkPtr WatchedBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllToAllOptions& opts) {
  Record record = Describe(Op::kAllToAll, inputs);
  record.same_numel = false;  // each rank may have its own parts for each other
  return Watched(OpType::ALLTOALL, record, [&] { return inner_->alltoall(outputs, inputs, opts); });
}

WatchedBackend::WorkPtr WatchedBackend::barrier(const c10d::BarrierOptions& opts) {
  HandOn();
  return Watched(OpType::BARRIER, Record{.op = Op::kBarrier},
                 [&] { return inner_->barrier(opts); });
}

void WatchedBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  Watched(OpType::BARRIER, Record{.op = Op::kMonitoredBarrier}, [&] {
    inner_->monitoredBarrier(opts, wait_all_ranks);
    return WorkPtr();
  });
}

WatchedBackend::WorkPtr WatchedBackend::send(Tensors& tensors, int dst, int tag) {
  return WatchedMessage(OpType::SEND, Op::kSend, tensors, dst,
                        [&] { return inner_->send(tensors, dst, tag); });
}

WatchedBackend::WorkPtr WatchedBackend::recv(Tensors& tensors, int src, int tag) {
  return WatchedMessage(OpType::RECV, Op::kRecv, tensors, src,
                        [&] { return inner_->recv(tensors, src, tag); });
}

WatchedBackend::WorkPtr WatchedBackend::recvAnysource(Tensors& tensors, int tag) {
  return WatchedMessage(OpType::RECVANYSOURCE, Op::kRecvAnySource, tensors, kNoRoot,
                        [&] { return inner_->recvAnysource(tensors, tag); });
}

void WatchedBackend::Progress(const std::function<bool()>& done) {
  if (auto* declares = dynamic_cast<DeclaresCapabilities*>(inner_.get())) declares->Progress(done);
}

void WatchedBackend::HandOn() {
  if (getBoundDeviceId() != inner_->getBoundDeviceId()) {
    inner_->setBoundDeviceId(getBoundDeviceId());
  }
  if (getGroupDesc() != inner_->getGroupDesc()) inner_->setGroupDesc(getGroupDesc());
}

void WatchedBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  auto copy = hook;
  inner_->registerOnCompletionHook(std::move(hook));
  onCompletionHook_ = std::move(copy);  // hasHooks() is not virtual, and looks here
}

void WatchedBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  inner_->setGroupUid(uid);
  HandOn();
}

void WatchedBackend::eagerConnectSingleDevice(at::Device device) {
  HandOn();
  inner_->eagerConnectSingleDevice(device);
}

WatchedBackend::BackendPtr WatchedBackend::Subgroup(BackendPtr inner,
                                                    const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::string& name) {
  if (!inner) return inner;  // this rank is not in it
  WatchOptions options = options_;
  options.name = absl::StrCat(options_.name.empty() ? getBackendName() : options_.name, "/", name);
  options.rank_0_serves_store = false;  // of the parent, that is
  return Watch(std::move(inner), c10::make_intrusive<c10d::PrefixStore>("watch", store), options);
}

WatchedBackend::BackendPtr WatchedBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& opts) {
  HandOn();
  // NCCL's split must be called by those as well who are not in the new group.
  const bool joins = std::find(ranks.begin(), ranks.end(), rank_) != ranks.end();
  c10::intrusive_ptr<c10d::Store> meeting = store;
  if (joins) meeting = c10::make_intrusive<c10d::PrefixStore>(splits_.Next(ranks), store);
  return Subgroup(inner_->split(meeting, ranks, opts), meeting,
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

c10::intrusive_ptr<c10d::Backend> Unwatched(const c10::intrusive_ptr<c10d::Backend>& backend) {
  const auto* watched = dynamic_cast<const WatchedBackend*>(backend.get());
  return watched ? watched->inner() : backend;
}

}  // namespace ddp::backends::watch
