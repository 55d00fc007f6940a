// The headers of torch that nearly all of our sources include: see precompiled_header.bzl. Further
// ones, such as torch/nn/module.h, would cost each source more than they save the few that use
// them.
#pragma once

#include "ATen/core/Tensor.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
