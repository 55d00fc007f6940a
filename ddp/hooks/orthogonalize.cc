#include "ddp/hooks/orthogonalize.h"

#include <cmath>

#include "ATen/ops/bmm.h"
#include "ATen/ops/linalg_qr.h"
#include "ATen/ops/linalg_vector_norm.h"
#include "ATen/ops/mul.h"
#include "ATen/ops/sum.h"

namespace ddp::hooks {
namespace {

// Above this, QR is faster.
constexpr int64_t kMostGramSchmidt = 2;

// The share of a column's length that must be left after subtraction for it to be independent.
constexpr double kDependent = 1e-3;

at::Tensor Norms(const at::Tensor& columns) {
  return at::linalg_vector_norm(columns, 2, at::IntArrayRef{1}, /*keepdim=*/true);
}

void GramSchmidt(at::Tensor& matrices, double epsilon, ZeroColumn zero) {
  const int64_t rows = matrices.size(1), columns = matrices.size(2);
  at::Tensor lengths;
  if (columns > 1) lengths = Norms(matrices);
  for (int64_t i = 0; i < columns; ++i) {
    at::Tensor column = matrices.narrow(2, i, 1);
    at::Tensor norm = Norms(column);
    if (i > 0) {
      // Of a column that depends on those before it, rounding errors are left, which point
      // anywhere: subtract once more. Others keep PyTorch's bits.
      const at::Tensor before = matrices.narrow(2, 0, i);
      const at::Tensor depends = norm.lt(lengths.narrow(2, i, 1).mul(kDependent));
      column.sub_(at::bmm(before, at::bmm(before.transpose(1, 2), column))
                      .masked_fill_(depends.logical_not(), 0));
      norm = Norms(column);
    }
    const at::Tensor is_zero = norm.eq(0);
    if (epsilon == 0) {
      norm.masked_fill_(is_zero, 1);
    } else {
      norm.add_(epsilon);
    }
    column.div_(norm);
    if (zero == ZeroColumn::kReplace) {
      column.masked_fill_(is_zero, 1 / std::sqrt(static_cast<double>(rows)));
    }
    if (i + 1 == columns) break;
    at::Tensor rest = matrices.narrow(2, i + 1, columns - i - 1);
    rest.sub_(
        at::sum(at::mul(column, rest), /*dim=*/at::IntArrayRef{1}, /*keepdim=*/true).mul(column));
  }
}

}  // namespace

void Orthogonalize(at::Tensor matrices, double epsilon, ZeroColumn zero) {
  const at::ScalarType dtype = matrices.scalar_type();
  if (matrices.size(2) <= kMostGramSchmidt || dtype == at::kHalf || dtype == at::kBFloat16) {
    GramSchmidt(matrices, epsilon, zero);
  } else {
    // Orthonormal for zeros, too.
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
  }
}

}  // namespace ddp::hooks
