#include "backends/common/sparse.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "ATen/core/grad_mode.h"
#include "ATen/core/ivalue.h"
#include "ATen/ops/_sparse_coo_tensor_unsafe.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"
#include "c10/util/Exception.h"

namespace ddp::backends {
namespace {

constexpr int kMostDims = 12;
// The number of elements, then the properties that must be equal on all ranks: dtype, sparse
// dimensions, dimensions and their sizes.
using Header = std::array<int64_t, 4 + kMostDims>;

class DoneWork final : public c10d::Work {
 public:
  DoneWork(int rank, std::vector<at::Tensor> outputs)
      : Work(rank, c10d::OpType::ALLREDUCE),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(outputs_));
    finish();
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

std::vector<at::Tensor> AllGather(c10d::Backend& backend, const at::Tensor& mine,
                                  std::chrono::milliseconds timeout) {
  std::vector<at::Tensor> inputs = {mine};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int i = 0; i < backend.getSize(); ++i) {
    outputs[0].push_back(at::empty(mine.sizes(), mine.options()));
  }
  c10d::AllgatherOptions options;
  options.timeout = timeout;
  backend.allgather(outputs, inputs, options)->wait();
  return outputs[0];
}

Header Describe(const at::Tensor& tensor) {
  Header header = {tensor._nnz(), static_cast<int64_t>(tensor.scalar_type()), tensor.sparse_dim(),
                   tensor.dim()};
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), header.begin() + 4);
  return header;
}

std::string ToString(const Header& header) {
  return c10::str(static_cast<at::ScalarType>(header[1]), " ",
                  at::IntArrayRef(header.data() + 4, header[3]), ", ", header[2],
                  " of its dimensions sparse");
}

// Bytes of the indices and the values of a coalesced tensor of `count` elements.
std::array<int64_t, 2> Sizes(const at::Tensor& like, int64_t count) {
  int64_t per_element = like.element_size();
  for (int64_t dim = like.sparse_dim(); dim < like.dim(); ++dim) per_element *= like.size(dim);
  return {like.sparse_dim() * count * static_cast<int64_t>(sizeof(int64_t)), per_element * count};
}

at::Tensor Pack(const at::Tensor& tensor, int64_t bytes) {
  at::Tensor packed = at::empty({bytes}, at::kByte);
  const auto [indices, values] = Sizes(tensor, tensor._nnz());
  auto* to = static_cast<char*>(packed.data_ptr());
  if (indices != 0) std::memcpy(to, tensor._indices().contiguous().data_ptr(), indices);
  if (values != 0) std::memcpy(to + indices, tensor._values().contiguous().data_ptr(), values);
  return packed;
}

at::Tensor Unpack(const at::Tensor& packed, const at::Tensor& like, int64_t count) {
  const auto [index_bytes, value_bytes] = Sizes(like, count);
  std::vector<int64_t> shape = {count};
  for (int64_t dim = like.sparse_dim(); dim < like.dim(); ++dim) shape.push_back(like.size(dim));
  at::Tensor indices = at::empty({like.sparse_dim(), count}, at::kLong);
  at::Tensor values = at::empty(shape, like._values().options());
  const auto* from = static_cast<const char*>(packed.data_ptr());
  if (index_bytes != 0) std::memcpy(indices.data_ptr(), from, index_bytes);
  if (value_bytes != 0) std::memcpy(values.data_ptr(), from + index_bytes, value_bytes);
  at::Tensor tensor = at::_sparse_coo_tensor_unsafe(indices, values, like.sizes());
  tensor._coalesced_(true);
  return tensor;
}

bool IsShort(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

}  // namespace

bool IsSparse(const std::vector<at::Tensor>& tensors) {
  return !tensors.empty() && tensors[0].defined() && tensors[0].layout() == at::kSparse;
}

c10::intrusive_ptr<c10d::Work> SparseAllReduce(c10d::Backend& backend,
                                               std::vector<at::Tensor>& tensors,
                                               const c10d::AllreduceOptions& options) {
  const std::string where = c10::str(backend.getBackendName(), ": allreduce of a sparse tensor on ",
                                     "rank ", backend.getRank(), ": ");
  TORCH_CHECK(tensors.size() == 1, where, "takes one tensor, not ", tensors.size());
  TORCH_CHECK(tensors[0].device().is_cpu(), where, "takes CPU tensors, not ", tensors[0].device());
  TORCH_CHECK(tensors[0].dim() <= kMostDims, where, "takes at most ", kMostDims, " dimensions");
  const bool average = options.reduceOp == c10d::ReduceOp::AVG;
  TORCH_CHECK(average || options.reduceOp == c10d::ReduceOp::SUM, where,
              "the reduce operation must be SUM or AVG");

  const at::NoGradGuard no_grad;
  const at::Tensor mine = tensors[0].coalesce();
  at::Tensor header = at::empty({static_cast<int64_t>(Header().size())}, at::kLong);
  const Header own = Describe(mine);
  std::copy(own.begin(), own.end(), header.data_ptr<int64_t>());
  std::vector<int64_t> counts;
  Header first = {};
  for (const at::Tensor& gathered : AllGather(backend, header, options.timeout)) {
    Header theirs;
    std::copy_n(gathered.data_ptr<int64_t>(), theirs.size(), theirs.begin());
    if (counts.empty()) first = theirs;
    TORCH_CHECK(std::equal(theirs.begin() + 1, theirs.end(), first.begin() + 1), where,
                "the ranks' tensors differ: rank 0 has ", ToString(first), "; rank ", counts.size(),
                " has ", ToString(theirs));
    counts.push_back(theirs[0]);
  }

  const auto [indices, values] = Sizes(mine, *std::max_element(counts.begin(), counts.end()));
  at::Tensor sum;
  if (indices + values != 0) {
    const std::vector<at::Tensor> packed =
        AllGather(backend, Pack(mine, indices + values), options.timeout);
    for (size_t rank = 0; rank < packed.size(); ++rank) {
      at::Tensor theirs = Unpack(packed[rank], mine, counts[rank]);
      if (IsShort(mine.scalar_type())) theirs = theirs.to(at::kFloat);
      sum = sum.defined() ? sum.add(theirs).coalesce() : theirs;
    }
    if (average) {
      at::Tensor sums = sum._values();
      if (at::isIntegralType(sums.scalar_type(), /*includeBool=*/true)) {
        sums.div_(backend.getSize(), "trunc");
      } else {
        sums.div_(backend.getSize());
      }
    }
    tensors[0].copy_(sum.to(mine.scalar_type()));
  }
  return c10::make_intrusive<DoneWork>(backend.getRank(), tensors);
}

}  // namespace ddp::backends
