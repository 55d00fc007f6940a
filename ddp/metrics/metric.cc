#include "ddp/metrics/metric.h"

#include <utility>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "ddp/collective_status.h"
#include "ddp/gather/gather.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp::metrics {
namespace {

// An int64 as the sum of two doubles, so that one all-reduce of doubles adds both dtypes up,
// exactly for up to 2^20 ranks.
constexpr int64_t kLowBits = 32;

void AppendDoubles(const at::Tensor& sums, std::vector<at::Tensor>& doubles) {
  const at::Tensor flat = sums.reshape({-1});
  if (sums.scalar_type() == at::kDouble) {
    doubles.push_back(flat);
    return;
  }
  const at::Tensor high = flat.bitwise_right_shift(kLowBits);
  doubles.push_back(high.to(at::kDouble));
  doubles.push_back(flat.sub(high.bitwise_left_shift(kLowBits)).to(at::kDouble));
}

// Sets `sums` to its part of the totals, which begins at `offset`.
void TakeDoubles(const at::Tensor& totals, int64_t& offset, at::Tensor& sums) {
  const auto next = [&] {
    const at::Tensor part = totals.narrow(0, offset, sums.numel());
    offset += sums.numel();
    return part;
  };
  at::Tensor total = next();
  if (sums.scalar_type() == at::kLong) {
    const at::Tensor high = total.to(at::kLong).bitwise_left_shift(kLowBits);
    total = high.add(next().to(at::kLong));
  }
  sums = total.reshape(sums.sizes()).clone();
}

}  // namespace

std::string ShapeOf(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  return absl::StrCat(c10::toString(tensor.scalar_type()), " [",
                      absl::StrJoin(tensor.sizes(), ", "), "]");
}

void Rows::Append(const at::Tensor& rows) {
  if (rows.size(0) == 0) return;
  // A copy also on the CPU, where the rows may be a view of a large tensor.
  parts_.push_back(rows.detach().cpu().clone(at::MemoryFormat::Contiguous));
  all_ = at::Tensor();
}

const at::Tensor& Rows::All() const {
  if (all_.defined()) return all_;
  all_ = parts_.empty() ? at::empty({0}) : parts_.size() == 1 ? parts_[0] : at::cat(parts_);
  if (!parts_.empty()) parts_ = {all_};
  return all_;
}

at::Tensor& Metric::AddSums(const at::Tensor& zeros) {
  TORCH_CHECK(zeros.device().is_cpu() &&
                  (zeros.scalar_type() == at::kDouble || zeros.scalar_type() == at::kLong),
              "sums of metric '", name_, "' must be double or int64, on the CPU, not ",
              zeros.toString());
  zeros_.push_back(zeros.clone());
  return *sums_.emplace_back(std::make_unique<at::Tensor>(zeros.clone()));
}

Rows& Metric::AddRows() { return *rows_.emplace_back(std::make_unique<Rows>()); }

absl::Status Metric::CheckNotReduced() const {
  if (!is_reduced_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      name_,
      ": its state is that of all ranks since ReduceMetrics: call Reset before it is used "
      "again"));
}

absl::Status Metric::Update(const at::Tensor& output, const at::Tensor& target) {
  DDP_RETURN_IF_ERROR(CheckNotReduced());
  const c10::NoGradGuard no_grad;
  return Annotate(CatchStatus("", [&] { return Accumulate(output, target); }), name_);
}

void Metric::Reset() {
  for (size_t i = 0; i < sums_.size(); ++i) *sums_[i] = zeros_[i].clone();
  for (const std::unique_ptr<Rows>& rows : rows_) *rows = Rows();
  is_reduced_ = false;
}

// The states of several metrics, with access to them.
class Reduction {
 public:
  explicit Reduction(absl::Span<Metric* const> metrics) : metrics_(metrics) {}

  // Collective.
  absl::Status Over(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    absl::StatusOr<EncodedTree> encoded = Encode(DirectDevice(group));
    DDP_ASSIGN_OR_RETURN(std::vector<EncodedTree> received,
                         AllGatherEncoded(group, std::move(encoded)));
    for (Metric* metric : metrics_) metric->is_reduced_ = true;
    if (received.size() == 1) return absl::OkStatus();
    DDP_ASSIGN_OR_RETURN(const std::vector<Part> parts,
                         gather_internal::DecodeAll<Part>(std::move(received)));
    for (size_t r = 1; r < parts.size(); ++r) {
      if (parts[r].first == parts[0].first) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("the ranks must have the same metrics, but rank 0 has ", parts[0].first,
                       ", and rank ", r, " ", parts[r].first));
    }
    DDP_RETURN_IF_ERROR(MergeRows(parts));
    return AddUp(group);
  }

 private:
  // What a rank has: a description of its metrics' states, and the rows of all of them.
  using Part = std::pair<std::string, std::vector<at::Tensor>>;

  absl::StatusOr<EncodedTree> Encode(c10::DeviceType direct) const {
    Part mine;
    for (const Metric* metric : metrics_) {
      DDP_RETURN_IF_ERROR(metric->CheckNotReduced());
      std::vector<std::string> states;
      for (const auto& sums : metric->sums_) states.push_back(ShapeOf(*sums));
      for (const auto& rows : metric->rows_) {
        states.push_back("rows");
        mine.second.push_back(rows->All());
      }
      absl::StrAppend(&mine.first, mine.first.empty() ? "" : ", ", metric->name(), " (",
                      absl::StrJoin(states, ", "), ")");
    }
    return EncodeTree(mine, direct);
  }

  absl::Status MergeRows(const std::vector<Part>& parts) {
    size_t i = 0;
    for (Metric* metric : metrics_) {
      for (const auto& rows : metric->rows_) {
        Rows merged;
        for (const Part& part : parts) merged.Append(part.second[i]);
        const absl::Status fit = CatchTorch("rows of all ranks", [&] {
          merged.All();
          return absl::OkStatus();
        });
        if (!fit.ok())
          return absl::InvalidArgumentError(absl::StrCat(metric->name(), ": ", fit.message()));
        *rows = std::move(merged);
        ++i;
      }
    }
    return absl::OkStatus();
  }

  absl::Status AddUp(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    std::vector<at::Tensor> doubles;
    for (const Metric* metric : metrics_) {
      for (const auto& sums : metric->sums_) AppendDoubles(*sums, doubles);
    }
    if (doubles.empty()) return absl::OkStatus();
    return CatchCollective("adding up metrics", [&] {
      std::vector<at::Tensor> tensors = {at::cat(doubles).to(at::Device(DirectDevice(group)))};
      group->allreduce(tensors)->wait();
      const at::Tensor totals = tensors[0].cpu();
      int64_t offset = 0;
      for (Metric* metric : metrics_) {
        for (const auto& sums : metric->sums_) TakeDoubles(totals, offset, *sums);
      }
    });
  }

  const absl::Span<Metric* const> metrics_;
};

absl::StatusOr<std::map<std::string, double>> ReduceMetrics(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, absl::Span<Metric* const> metrics) {
  DDP_RETURN_IF_ERROR(Reduction(metrics).Over(group));
  std::map<std::string, double> all;
  for (const Metric* metric : metrics) {
    for (const auto& [name, value] : metric->Values()) {
      if (all.emplace(name, value).second) continue;
      return absl::InvalidArgumentError(absl::StrCat("two of the metrics have a value '", name,
                                                     "': give one of them another name"));
    }
  }
  return all;
}

}  // namespace ddp::metrics
