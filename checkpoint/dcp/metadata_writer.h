// Writes the index of a checkpoint (metadata.h) as Python's torch.distributed.checkpoint reads it.
//
//   DDP_RETURN_IF_ERROR(file.Append(WriteMetadata(metadata)));
#pragma once

#include <string>

#include "checkpoint/dcp/metadata.h"

namespace ddp::checkpoint::dcp {

// The pickle of the Metadata, of protocol 2. It has other opcodes than Python's own, for the same
// objects. The same metadata gives the same bytes. Thread-safe.
std::string WriteMetadata(const Metadata& metadata);

}  // namespace ddp::checkpoint::dcp
