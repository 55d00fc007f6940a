// Options of DistributedDataParallel, with PyTorch's names and defaults.
//
//   DDP_ASSIGN_OR_RETURN(auto model, Wrap(net, group, {.find_unused_parameters = true}));
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/options.h"

namespace ddp {

struct DataParallelOptions {
  // Size of a gradient bucket in MiB. Buckets are reduced while backward still runs. Unset: 25, and
  // 1 for the first bucket, to start early. (25 for the first bucket, too, if the backend's
  // collectives run on the ranks' own cores, no core is idle, and find_unused_parameters is false.)
  // A value applies to all buckets.
  std::optional<double> bucket_cap_mb = std::nullopt;
  // Walk the autograd graph from the outputs after each forward to find parameters that get no
  // gradient. Needed if some parameters or outputs do not contribute to the loss in some
  // iterations; costs time. No effect with static_graph.
  bool find_unused_parameters = false;
  // Gradients are views of the buckets: saves a copy and the memory of one set of gradients. Reset
  // gradients with DistributedDataParallel::zero_grad then; torch::optim::Optimizer::zero_grad
  // calls detach_(), which fails on views.
  bool gradient_as_bucket_view = false;
  // Promise that the graph and the set of used parameters never change.
  bool static_graph = false;
  // Broadcast the buffers (BatchNorm's running statistics) from rank 0, at construction and before
  // each forward.
  bool broadcast_buffers = true;
  // At construction, verify that all ranks have the same model, and broadcast rank 0's. False: the
  // caller guarantees equal models, and construction does not communicate.
  bool init_sync = true;
  // Empty, or the index of the accelerator that the module is on: forward then moves its arguments
  // there.
  std::vector<int> device_ids = {};
  // False: backward leaves each rank its own gradients, for a ZeroRedundancyOptimizer of stage 2,
  // which averages them itself. Set by programs, not by their users.
  bool reduce_gradients = true;
  // Names of parameters, also frozen ones, and buffers that are never verified, broadcast or
  // reduced (PyTorch: _ddp_params_and_buffers_to_ignore).
  std::vector<std::string> ignored = {};
};

constexpr auto OptionsOf(const DataParallelOptions&) {
  return Options(Option("bucket_cap_mb", &DataParallelOptions::bucket_cap_mb,
                        "size of a gradient bucket in MiB; auto: 25, and 1 for the first")
                     .Above(0)
                     .AtMost(1 << 20),
                 Option("find_unused_parameters", &DataParallelOptions::find_unused_parameters,
                        "allow parameters that get no gradient in a backward"),
                 Option("gradient_as_bucket_view", &DataParallelOptions::gradient_as_bucket_view,
                        "make gradients views of the buckets, which saves memory and a copy"),
                 Option("static_graph", &DataParallelOptions::static_graph,
                        "assume that the autograd graph is the same in every iteration"),
                 Option("broadcast_buffers", &DataParallelOptions::broadcast_buffers,
                        "broadcast rank 0's buffers before each forward"),
                 Option("init_sync", &DataParallelOptions::init_sync,
                        "verify and broadcast the model at construction"),
                 Option("ignored", &DataParallelOptions::ignored,
                        "names of parameters and buffers that are not synchronised"));
}

}  // namespace ddp
