// Options of DistributedDataParallel, with PyTorch's names and defaults.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/options.h"

namespace ddp {

struct DataParallelOptions {
  // Size of a gradient bucket in MiB. Buckets are reduced while backward still runs. Unset: 25,
  // and the first is of 1 MiB, to start early (over a backend that computes on the ranks' own
  // cores, where no core is idle, it is like the others). A value holds for the first bucket too.
  std::optional<double> bucket_cap_mb = std::nullopt;
  // Walk the autograd graph from the outputs after each forward, to find parameters that will get
  // no gradient. Costs time; needed where some parameters, or some outputs, take no part in the
  // loss in some iterations. With static_graph it has no effect.
  bool find_unused_parameters = false;
  // Let the parameters' gradients be views of the buckets: saves a copy and the memory of one set
  // of gradients. Gradients must then be reset with DistributedDataParallel::zero_grad:
  // torch::optim::Optimizer::zero_grad detaches first, which views refuse.
  bool gradient_as_bucket_view = false;
  // The caller promises that the graph and the set of used parameters never change.
  bool static_graph = false;
  // Broadcast the buffers (BatchNorm's running statistics) from rank 0, at construction and before
  // each forward.
  bool broadcast_buffers = true;
  // At construction, verify that all ranks hold the same model, and give all ranks rank 0's. False:
  // the caller has seen to both, and construction sends nothing.
  bool init_sync = true;
  // Empty, or the index of the one device that the module is on, for a module on an accelerator:
  // forward then moves its arguments there.
  std::vector<int> device_ids = {};
  // False: backward leaves each rank its own gradients, for a ZeroRedundancyOptimizer of stage 2,
  // which averages them itself. All else stays. From the program, not from its user.
  bool reduce_gradients = true;
  // Names of parameters and buffers that are each rank's own: never broadcast, verified or reduced
  // (PyTorch: _ddp_params_and_buffers_to_ignore). Buffers and frozen parameters too.
  std::vector<std::string> ignored = {};
};

constexpr auto OptionsOf(const DataParallelOptions&) {
  return Options(Option("bucket_cap_mb", &DataParallelOptions::bucket_cap_mb,
                        "size of a gradient bucket in MiB; auto: 25, and 1 for the first")
                     .Above(0)
                     .AtMost(1 << 20),
                 Option("find_unused_parameters", &DataParallelOptions::find_unused_parameters,
                        "allow parameters that get no gradient"),
                 Option("gradient_as_bucket_view", &DataParallelOptions::gradient_as_bucket_view,
                        "gradients are views of the buckets"),
                 Option("static_graph", &DataParallelOptions::static_graph,
                        "promise that the graph never changes"),
                 Option("broadcast_buffers", &DataParallelOptions::broadcast_buffers,
                        "buffers from rank 0 before each forward"),
                 Option("init_sync", &DataParallelOptions::init_sync,
                        "verify and broadcast the model at construction"),
                 Option("ignored", &DataParallelOptions::ignored,
                        "names of parameters and buffers that are each rank's own"));
}

}  // namespace ddp
