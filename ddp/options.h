// Options of DistributedDataParallel, with PyTorch's names and defaults.
#pragma once

#include "base/options.h"

namespace ddp {

struct DataParallelOptions {
  // Size of a gradient bucket in MiB. Buckets are reduced while backward still runs. The first is
  // of 1 MiB at most, to start early; over shm where no core is to spare, it is like the others.
  double bucket_cap_mb = 25;
  // Walk the autograd graph from the outputs after each forward, to find parameters that will get
  // no gradient. Costs time; needed where some parameters take no part in some iterations.
  bool find_unused_parameters = false;
  // Let the parameters' gradients be views of the buckets: saves a copy and the memory of one set
  // of gradients. Gradients must then be reset with DistributedDataParallel::zero_grad:
  // torch::optim::Optimizer::zero_grad detaches first, which views refuse.
  bool gradient_as_bucket_view = false;
  // The caller promises that the graph and the set of used parameters never change.
  bool static_graph = false;
  // Broadcast the buffers (BatchNorm's running statistics) from rank 0 before each forward.
  bool broadcast_buffers = true;
};

constexpr auto OptionsOf(const DataParallelOptions&) {
  return Options(Option("bucket_cap_mb", &DataParallelOptions::bucket_cap_mb,
                        "size of a gradient bucket in MiB")
                     .Above(0)
                     .AtMost(1 << 20),
                 Option("find_unused_parameters", &DataParallelOptions::find_unused_parameters,
                        "allow parameters that get no gradient"),
                 Option("gradient_as_bucket_view", &DataParallelOptions::gradient_as_bucket_view,
                        "gradients are views of the buckets"),
                 Option("static_graph", &DataParallelOptions::static_graph,
                        "promise that the graph never changes"),
                 Option("broadcast_buffers", &DataParallelOptions::broadcast_buffers,
                        "buffers from rank 0 before each forward"));
}

}  // namespace ddp
