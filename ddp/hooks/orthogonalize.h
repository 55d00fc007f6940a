// Orthonormalises the columns of matrices, for PowerSGD.
#pragma once

#include "ATen/core/Tensor.h"

namespace ddp::hooks {

// What to do with a column that is zero after its projections on earlier columns have been
// subtracted.
enum class ZeroColumn {
  kKeep,     // stays zero: for a factor whose zero columns do not contribute to the result
  kReplace,  // a constant column of norm 1: for a factor from which the next step starts
};

// Makes the columns of matrices [batch, rows, columns], with columns <= rows, orthonormal, in
// place, with PyTorch's method: Gram-Schmidt for up to two columns and for 16-bit dtypes, and QR
// otherwise. `epsilon` is added to the norms that Gram-Schmidt divides by. Unlike PyTorch's,
// columns that depend on others become orthogonal, too, and columns of zeros do not become NaN with
// an epsilon of 0. Not collective.
void Orthogonalize(at::Tensor matrices, double epsilon, ZeroColumn zero);

}  // namespace ddp::hooks
