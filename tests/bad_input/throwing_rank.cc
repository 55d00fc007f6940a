// Rank 1 throws while rank 0 waits for it in a collective.
#include <stdexcept>
#include <vector>

#include "ATen/ops/ones.h"
#include "absl/status/status.h"
#include "base/status.h"
#include "ddp/session/session.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

int main(int argc, char** argv) {
  return ddp::session::Run({.launcher = {.nproc_per_node = 2}}, argc, argv,
                           [](const ddp::session::Session& session) -> absl::Status {
                             if (session.rank() == 1)
                               throw std::runtime_error("the simulator exploded");
                             return ddp::CatchStatus("waiting for rank 1", [&] {
                               std::vector<at::Tensor> tensors = {at::ones({1})};
                               session.process_group()->allreduce(tensors)->wait();
                             });
                           });
}
