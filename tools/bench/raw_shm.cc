// shm below c10d: operations on pointers, submitted to the engine of a separate group.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "backends/backend.h"
#include "backends/shm/options.h"
#include "backends/shm/shm_group.h"
#include "base/status.h"
#include "tools/bench/raw_collectives.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::tools::bench {
namespace {

namespace shm = backends::shm;

constexpr int64_t kTimeoutNs = int64_t{120} * 1000 * 1000 * 1000;

backends::DType DType(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return backends::DType::kFloat;
    case Dtype::kFloat64:
      return backends::DType::kDouble;
    case Dtype::kFloat16:
      return backends::DType::kHalf;
    case Dtype::kBFloat16:
      return backends::DType::kBFloat16;
    case Dtype::kInt32:
      return backends::DType::kInt32;
    case Dtype::kInt64:
      return backends::DType::kInt64;
  }
  return backends::DType::kFloat;
}

class RawShm : public RawCollectives {
 public:
  explicit RawShm(std::shared_ptr<shm::ShmGroup> group) : group_(std::move(group)) {}
  ~RawShm() override { group_->Leave(); }

  void Run(CollectiveOp op, Dtype dtype, const void* input, void* output,
           int64_t elements) override {
    shm::EngineOp call;
    call.requests.push_back(Make(op, dtype, input, output, elements));
    call.timeout_ns = kTimeoutNs;
    group_->engine().Submit(&call);
    const absl::Status status =
        call.done() ? call.status() : group_->engine().Wait(&call, shm::NowNs() + kTimeoutNs);
    if (!status.ok()) throw std::runtime_error(std::string(status.message()));
  }

 private:
  shm::Request Make(CollectiveOp op, Dtype dtype, const void* input, void* output,
                    int64_t elements) const {
    // The engine takes std::byte* also for data that it only reads.
    auto* in = const_cast<std::byte*>(static_cast<const std::byte*>(input));
    auto* out = static_cast<std::byte*>(output);
    const auto count = static_cast<size_t>(elements);
    const auto bytes = count * static_cast<size_t>(ElementSize(dtype));
    const auto ranks = static_cast<size_t>(group_->world_size());
    shm::Request request;
    request.reduction.dtype = DType(dtype);
    request.tensor = out;
    switch (op) {
      case CollectiveOp::kAllReduce:
        request.kind = shm::Kind::kAllReduce;
        request.count = count;
        break;
      case CollectiveOp::kBroadcast:
        request.kind = shm::Kind::kBroadcast;
        request.count = bytes;
        break;
      case CollectiveOp::kReduceScatter:
        request.kind = shm::Kind::kReduceScatter;
        request.count = count / ranks;
        request.send = Parts(in, bytes / ranks);
        break;
      case CollectiveOp::kAllGather:
        request.kind = shm::Kind::kAllGather;
        request.send = {{in, bytes / ranks}};
        request.recv = Parts(out, bytes / ranks);
        break;
    }
    return request;
  }

  std::vector<backends::Buffer> Parts(std::byte* whole, size_t bytes) const {
    std::vector<backends::Buffer> parts;
    for (int rank = 0; rank < group_->world_size(); ++rank) {
      parts.push_back({whole + static_cast<size_t>(rank) * bytes, bytes});
    }
    return parts;
  }

  const std::shared_ptr<shm::ShmGroup> group_;
};

absl::StatusOr<std::unique_ptr<RawCollectives>> Create(const RawOptions& options) {
  c10d::PrefixStore store("raw_shm", options.group.store);
  shm::ShmJoinOptions join;
  join.rank = options.rank.rank;
  join.world_size = options.rank.world_size;
  const shm::ShmOptions limits;
  join.limits = {limits.segment_bytes(), limits.arena_bytes()};
  join.deadline = absl::Now() + absl::FromChrono(store.getTimeout());
  join.set = [&](const std::string& key, const std::string& value) {
    return CatchStatus(key, [&] { store.set(key, value); });
  };
  join.get = [&](const std::string& key) {
    return CatchStatus(key, [&] { return store.get_to_str(key); });
  };
  DDP_ASSIGN_OR_RETURN(std::shared_ptr<shm::ShmGroup> group, shm::ShmGroup::Join(join));
  return std::make_unique<RawShm>(std::move(group));
}

const Registration<RawRegistry> kShm("shm", &Create);

}  // namespace
}  // namespace ddp::tools::bench
