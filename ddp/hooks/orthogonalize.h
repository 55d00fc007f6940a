// Orthonormal columns, as PowerSGD needs them.
#pragma once

#include "ATen/core/Tensor.h"

namespace ddp::hooks {

// What becomes of a column that is zero, once the columns before it are subtracted.
enum class ZeroColumn {
  kKeep,     // it stays zero: where the column's share of the result is zero anyway
  kReplace,  // by a constant one of norm 1: a factor that is used again next time
};

// Makes the columns of matrices [batch, rows, columns], with columns <= rows, orthonormal, in
// place, with PyTorch's method: Gram-Schmidt for up to two columns and for 16-bit dtypes, and QR
// otherwise. `epsilon` is added to the norms that Gram-Schmidt divides by. Unlike PyTorch's,
// columns that depend on others become orthogonal, too, and columns of zeros do not become NaN with
// an epsilon of 0. Not collective.
void Orthogonalize(at::Tensor matrices, double epsilon, ZeroColumn zero);

}  // namespace ddp::hooks
