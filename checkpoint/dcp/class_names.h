// The Python classes and functions in the pickle of a Metadata.
#pragma once

#include "absl/strings/string_view.h"

namespace ddp::checkpoint::dcp {

inline constexpr absl::string_view kMetadataClass =
    "torch.distributed.checkpoint.metadata.Metadata";
inline constexpr absl::string_view kTensorStorage =
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata";
inline constexpr absl::string_view kBytesStorage =
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata";
inline constexpr absl::string_view kChunkStorage =
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata";
inline constexpr absl::string_view kTensorProperties =
    "torch.distributed.checkpoint.metadata.TensorProperties";
inline constexpr absl::string_view kMemoryFormat =
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING";
inline constexpr absl::string_view kMetadataIndex =
    "torch.distributed.checkpoint.metadata.MetadataIndex";
inline constexpr absl::string_view kStorageMeta =
    "torch.distributed.checkpoint.metadata.StorageMeta";
inline constexpr absl::string_view kStorageInfo =
    "torch.distributed.checkpoint.filesystem._StorageInfo";
inline constexpr absl::string_view kGetLayout = "torch.serialization._get_layout";

}  // namespace ddp::checkpoint::dcp
