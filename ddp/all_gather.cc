#include "ddp/all_gather.h"

#include "ATen/ops/empty_like.h"

namespace ddp {

std::vector<at::Tensor> AllGather(c10d::ProcessGroup& group, const at::Tensor& mine) {
  std::vector<at::Tensor> inputs = {mine};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int i = 0; i < group.getSize(); ++i) outputs[0].push_back(at::empty_like(mine));
  group.allgather(outputs, inputs)->wait();
  return outputs[0];
}

}  // namespace ddp
