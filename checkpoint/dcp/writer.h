// Writes a checkpoint that Python's torch.distributed.checkpoint loads, with optimizer state. For
// programs that convert checkpoints: runs save in other formats.
//
//   DDP_RETURN_IF_ERROR(ReplaceAtomically("out.dcp", [&](const std::string& temporary) {
//     return dcp::WriteCheckpoint(state, temporary);
//   }));
//
//   model.load_state_dict / dcp.load({"model": model.state_dict(),           # in Python
//                                     "optimizer": optimizer.state_dict()},
//                                     checkpoint_id="out.dcp")
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/file.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint::dcp {

// Makes the folder `path`, which must not exist (AlreadyExists), with the files __0_0.distcp and
// .metadata, as one process of Python does, and makes all durable. If it fails, the caller removes
// `path`. The same state gives the same bytes.
//
// The dict is flattened as Python flattens it: names are keys and indices joined by dots; empty
// dicts, and lists of nothing else, are left out, and their paths added to `left_out` if it is not
// null; lists without tensors and dicts, and all tuples, are one value. Tensors are stored as
// contiguous ones on the CPU.
//
// InvalidArgument, with the path in the state: parts of tensors and entries of single ranks
// (Consolidate first), tensors that are not dense, values or keys that have no plain equivalent in
// Python, empty dicts beside others in lists, which would have other places, and two values of
// one name. Otherwise errors of FileWriter. Thread-safe.
absl::Status WriteCheckpoint(const State& state, const std::string& path,
                             FileSystem* files = FileSystem::Default(),
                             std::vector<std::string>* left_out = nullptr);

}  // namespace ddp::checkpoint::dcp
