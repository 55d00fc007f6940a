// Two ranks, of which rank 1 asks for more memory than its device has: out_of_memory [DEVICE]
//
// All ranks must end with rank 1's error, in seconds.
#include <string>

#include "absl/status/status.h"
#include "ddp/session/session.h"
#include "torch/torch.h"

int main(int argc, char** argv) {
  ddp::session::SessionOptions options = {.launcher = {.nproc_per_node = 2},
                                          .device = argc > 1 ? argv[1] : "cpu"};
  options.group.backend = "gloo";
  return ddp::session::Run(options, argc, argv, [](const ddp::session::Session& ranks) {
    const at::TensorOptions on_device(ranks.device());
    if (ranks.rank() == 1) at::empty({int64_t{1} << 50}, on_device).zero_();
    std::vector<at::Tensor> tensors = {at::ones({1}, on_device)};
    ranks.process_group()->allreduce(tensors)->wait();
    return absl::OkStatus();
  });
}
