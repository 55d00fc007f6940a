#include "backends/hier/hier_reduction.h"

#include "ATen/ops/add.h"
#include "ATen/ops/bitwise_and.h"
#include "ATen/ops/bitwise_or.h"
#include "ATen/ops/bitwise_xor.h"
#include "ATen/ops/maximum.h"
#include "ATen/ops/minimum.h"
#include "ATen/ops/mul.h"
#include "ATen/ops/view_as_real.h"
#include "third_party/libtorch/compat.h"

namespace ddp::backends::hier {

using c10d::ReduceOp;

HierReduction::HierReduction(const CallName& call, const ReduceOp& op,
                             const std::vector<at::Tensor>& tensors)
    : op_(op.op_) {
  if (op_ == ReduceOp::AVG) {
    op_ = ReduceOp::SUM;
    divisor_ = call.world_size;
  } else if (op_ == ReduceOp::PREMUL_SUM) {
    op_ = ReduceOp::SUM;
    TORCH_CHECK(op.supplement_, call,
                ": PREMUL_SUM without a factor given; c10d::makePreMulSum is required");
    factor_ = c10::static_intrusive_pointer_cast<c10d::PreMulSumSupplement>(op.supplement_);
  }
  TORCH_CHECK(op_ < ReduceOp::UNUSED, call, ": reduce operation ", static_cast<int>(op_),
              " given; one of c10d::ReduceOp is required");
  const bool is_bitwise = op_ == ReduceOp::BAND || op_ == ReduceOp::BOR || op_ == ReduceOp::BXOR;
  for (const at::Tensor& tensor : tensors) {
    const c10::ScalarType dtype = tensor.scalar_type();
    TORCH_CHECK(!is_bitwise || at::isIntegralType(dtype, /*includeBool=*/true), call,
                ": a bitwise reduction of ", dtype, " given; integers or bools are required");
    TORCH_CHECK(!at::isComplexType(dtype) || op_ == ReduceOp::SUM, call, ": a reduction of ", dtype,
                " other than a sum or an average given");
  }
}

at::Tensor HierReduction::View(const at::Tensor& tensor) const {
  if (!tensor.is_complex()) return tensor;
  return at::view_as_real(tensor).view(-1);
}

void HierReduction::Prepare(at::Tensor& data) const {
  if (!factor_) return;
  if (factor_->tensor_factor.defined()) {
    data.mul_(factor_->tensor_factor.item());
  } else {
    data.mul_(factor_->double_factor);
  }
}

void HierReduction::Combine(absl::Span<const at::Tensor> parts, at::Tensor& out) const {
  const c10::ScalarType dtype = out.scalar_type();
  const bool low_precision = dtype == at::kHalf || dtype == at::kBFloat16;
  at::Tensor sum = low_precision ? parts[0].to(at::kFloat) : parts[0];
  for (size_t i = 1; i < parts.size(); ++i) {
    // The last step writes to `out`, which may be a part that has been read by then.
    at::Tensor target = !low_precision && i + 1 == parts.size() ? out : sum;
    Apply(target, sum, parts[i]);
  }
  at::Tensor result = low_precision ? sum : out;
  if (divisor_.has_value()) {
    if (at::isIntegralType(dtype, /*includeBool=*/true)) {
      result.div_(*divisor_, "trunc");
    } else {
      result.div_(*divisor_);
    }
  }
  if (low_precision) out.copy_(sum);
}

void HierReduction::Apply(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) const {
  switch (op_) {
    case ReduceOp::SUM:
      at::add_out(out, a, b);
      break;
    case ReduceOp::PRODUCT:
      at::mul_out(out, a, b);
      break;
    case ReduceOp::MIN:
      at::minimum_out(out, a, b);
      break;
    case ReduceOp::MAX:
      at::maximum_out(out, a, b);
      break;
    case ReduceOp::BAND:
      at::bitwise_and_out(out, a, b);
      break;
    case ReduceOp::BOR:
      at::bitwise_or_out(out, a, b);
      break;
    case ReduceOp::BXOR:
      at::bitwise_xor_out(out, a, b);
      break;
    default:
      TORCH_CHECK(false, "hier: unknown reduction ", static_cast<int>(op_));
  }
}

}  // namespace ddp::backends::hier
