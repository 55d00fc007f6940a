#include "backends/common/tensor_checks.h"

#include <string>

#include "absl/status/statusor.h"
#include "backends/common/reduction.h"

namespace ddp::backends {

std::ostream& operator<<(std::ostream& out, const CallName& call) {
  return out << call.operation << " on rank " << call.rank << " of " << call.world_size;
}

void CheckTensor(const CallName& call, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), call,
              ": an undefined tensor given; a dense CPU tensor is required");
  TORCH_CHECK(
      tensor.layout() == at::kStrided && tensor.device().is_cpu(), call, ": a tensor of layout ",
      tensor.layout(), " on ", tensor.device(),
      " given; a dense CPU tensor is required (bind another backend to other devices, as in "
      "cpu:shm,cuda:nccl)");
}

void CheckTensors(const CallName& call, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) CheckTensor(call, tensor);
}

const at::Tensor& CheckSingleTensor(const CallName& call, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(tensors.size() == 1, call, ": ", tensors.size(),
              " tensors given; one tensor is required");
  CheckTensor(call, tensors[0]);
  return tensors[0];
}

void CheckSameDtype(const CallName& call, const at::Tensor& input, const at::Tensor& output) {
  CheckTensor(call, input);
  CheckTensor(call, output);
  TORCH_CHECK(input.scalar_type() == output.scalar_type(), call, ": an input of ",
              input.scalar_type(), " and an output of ", output.scalar_type(),
              " given; the same dtype is required");
}

void CheckSameSize(const CallName& call, const at::Tensor& input, const at::Tensor& output) {
  CheckSameDtype(call, input, output);
  TORCH_CHECK(input.numel() == output.numel(), call, ": an input of ", input.numel(),
              " elements and an output of ", output.numel(), " given; the same number is required");
}

void CheckWholeOfParts(const CallName& call, const at::Tensor& whole, const at::Tensor& part) {
  CheckTensor(call, whole);
  CheckTensor(call, part);
  TORCH_CHECK(whole.scalar_type() == part.scalar_type(), call, ": a tensor of ",
              whole.scalar_type(), " and one of ", part.scalar_type(),
              " given; the same dtype is required");
  TORCH_CHECK(whole.numel() == part.numel() * call.world_size, call, ": a tensor of ",
              whole.numel(), " elements for all ranks and one of ", part.numel(),
              " for each rank given; ", call.world_size, " x ", part.numel(), " are required");
}

void CheckOnePerRank(const CallName& call, const char* what, size_t given) {
  TORCH_CHECK(given == static_cast<size_t>(call.world_size), call, ": ", given, " ", what,
              " given; one per rank, ", call.world_size, ", is required");
}

const std::vector<at::Tensor>& CheckSingleList(const CallName& call, const char* what,
                                               const std::vector<std::vector<at::Tensor>>& lists) {
  TORCH_CHECK(lists.size() == 1, call, ": ", lists.size(), " lists of ", what,
              " given; one list is required");
  CheckOnePerRank(call, what, lists[0].size());
  return lists[0];
}

void CheckListOfRoot(const CallName& call, const char* what,
                     const std::vector<std::vector<at::Tensor>>& lists, int64_t root) {
  if (call.rank == root) {
    CheckSingleList(call, what, lists);
  } else {
    TORCH_CHECK(lists.empty(), call, ": ", lists.size(), " lists of ", what,
                " given; none is required: only the root, rank ", root, ", has ", what);
  }
}

void CheckSameCount(const CallName& call, size_t inputs, size_t outputs) {
  TORCH_CHECK(inputs == outputs, call, ": ", inputs, " inputs and ", outputs,
              " outputs given; one output per input is required");
}

void CheckOwnPart(const CallName& call, size_t sent_bytes, size_t received_bytes) {
  TORCH_CHECK(sent_bytes == received_bytes, call, ": an input of ", sent_bytes,
              " bytes and an output of ", received_bytes,
              " bytes given for this rank itself; the same size is required");
}

void CheckRank(const CallName& call, const char* what, int64_t rank) {
  TORCH_CHECK(rank >= 0 && rank < call.world_size, call, ": ", what, " rank ", rank,
              " given; a rank from 0 to ", call.world_size - 1, " is required");
}

Reduction CheckReduction(const CallName& call, const c10d::ReduceOp& op, at::ScalarType dtype) {
  const absl::StatusOr<Reduction> reduction = ToReduction(op, dtype, call.world_size);
  TORCH_CHECK(reduction.ok(), call, ": ", std::string(reduction.status().message()));
  return *reduction;
}

}  // namespace ddp::backends
