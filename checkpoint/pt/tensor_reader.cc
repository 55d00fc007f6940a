#include "checkpoint/pt/tensor_reader.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"

namespace ddp::checkpoint::pt {
namespace {

// How much unneeded data may be read with a piece whose elements are not contiguous: one read is
// cheaper than many.
constexpr int64_t kMostReadPerNeeded = 2;
constexpr int64_t kSmallRead = 64 << 10;  // bytes

// A type as wide as `dtype` that every operation knows. Only bits are moved.
c10::ScalarType BitsOf(c10::ScalarType dtype) {
  switch (c10::elementSize(dtype)) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    case 8:
      return at::kLong;
    default:
      return at::kComplexDouble;
  }
}

class PieceReader {
 public:
  PieceReader(const ZipReader& zip, const std::string& record, c10::ScalarType bits)
      : zip_(zip),
        record_(record),
        bits_(bits),
        item_size_(static_cast<int64_t>(c10::elementSize(bits))) {}

  // Fills `to` with the elements at `offset` of the storage, with these strides.
  absl::Status Fill(const at::Tensor& to, int64_t offset, std::vector<int64_t> strides) const {
    if (to.numel() == 0) return absl::OkStatus();
    int64_t span = 1;
    size_t widest = 0;
    for (size_t i = 0; i < strides.size(); ++i) {
      if (to.size(static_cast<int64_t>(i)) == 1) strides[i] = 0;
      span += (to.size(static_cast<int64_t>(i)) - 1) * strides[i];
      if (strides[i] > strides[widest]) widest = i;
    }
    if (span == to.numel() && to.is_contiguous() && IsContiguous(to.sizes(), strides)) {
      return Read(offset, span, to);
    }
    if (span <= kMostReadPerNeeded * to.numel() || span * item_size_ <= kSmallRead) {
      const at::Tensor around = at::empty({span}, bits_);
      DDP_RETURN_IF_ERROR(Read(offset, span, around));
      to.copy_(around.as_strided(to.sizes(), strides));
      return absl::OkStatus();
    }
    const int64_t stride = strides[widest];
    strides.erase(strides.begin() + static_cast<ptrdiff_t>(widest));
    const int64_t dimension = static_cast<int64_t>(widest);
    for (int64_t i = 0; i < to.size(dimension); ++i) {
      DDP_RETURN_IF_ERROR(Fill(to.select(dimension, i), offset + i * stride, strides));
    }
    return absl::OkStatus();
  }

 private:
  // Row-major; strides of dimensions of size one do not count.
  static bool IsContiguous(c10::IntArrayRef sizes, const std::vector<int64_t>& strides) {
    int64_t expected = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      if (sizes[i] != 1 && strides[i] != expected) return false;
      expected *= sizes[i];
    }
    return true;
  }

  absl::Status Read(int64_t offset, int64_t elements, const at::Tensor& to) const {
    return zip_.ReadRange(record_, static_cast<uint64_t>(offset * item_size_), to.data_ptr(),
                          static_cast<uint64_t>(elements * item_size_));
  }

  const ZipReader& zip_;
  const std::string& record_;
  c10::ScalarType bits_;
  int64_t item_size_;
};

// Position in the storage of a box's first element.
int64_t OffsetOf(const TensorSpec& spec, const Box& box) {
  return std::inner_product(box.offset.begin(), box.offset.end(), spec.strides.begin(),
                            spec.offset);
}

}  // namespace

absl::StatusOr<at::Tensor> ReadTensorPart(const ZipReader& zip, const std::string& record,
                                          const TensorSpec& spec, const Part& part) {
  const c10::ScalarType bits = BitsOf(spec.dtype);
  const PieceReader pieces(zip, record, bits);
  const std::vector<int64_t> shape = LocalShape({.global_shape = spec.sizes, .part = part});
  const at::Tensor to = at::empty(shape, bits);
  if (const auto* range = std::get_if<FlatRange>(&part)) {
    int64_t done = 0;
    for (const Box& box : BoxesOf(spec.sizes, *range)) {
      const int64_t elements =
          std::accumulate(box.sizes.begin(), box.sizes.end(), int64_t{1}, std::multiplies<>());
      DDP_RETURN_IF_ERROR(pieces.Fill(to.narrow(0, done, elements).view(box.sizes),
                                      OffsetOf(spec, box), spec.strides));
      done += elements;
    }
  } else if (const auto* box = std::get_if<Box>(&part)) {
    DDP_RETURN_IF_ERROR(pieces.Fill(to, OffsetOf(spec, *box), spec.strides));
  }
  at::Tensor read = at::empty({0}, at::TensorOptions().dtype(spec.dtype))
                        .set_(to.storage(), 0, to.sizes(), to.strides());
  if (spec.conj) read._set_conj(true);
  if (spec.neg) read._set_neg(true);
  return read.resolve_conj().resolve_neg();
}

}  // namespace ddp::checkpoint::pt
