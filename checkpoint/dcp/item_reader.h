// Reads one item of a checkpoint of torch.distributed.checkpoint: what torch.save wrote of a
// tensor, or of any other value, within a larger file.
//
//   DDP_ASSIGN_OR_RETURN(ItemReader reader, ItemReader::Open(folder, item));
//   DDP_ASSIGN_OR_RETURN(at::Tensor chunk, reader.Tensor(at::kFloat, {3, 4}, Whole{}));
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/parts.h"
#include "checkpoint/pt/pickle_graph.h"
#include "checkpoint/pt/tensor_spec.h"
#include "checkpoint/pt/zip.h"

namespace ddp::checkpoint::dcp {

// Movable; owns a descriptor. Thread-compatible. Errors are DataLoss, with the file and where in
// it, for what is damaged; and those of FileReader.
class ItemReader {
 public:
  // Reads the item's directory and checks it, but no data.
  static absl::StatusOr<ItemReader> Open(const std::string& folder, const Item& item);

  // False if the item has no CRC-32s.
  bool has_checksums() const { return zip_.has_checksums(); }

  // Any value, as checkpoint/pt/pickle_reader.h gives it. All CRC-32s are checked. What cannot be
  // read is an error, Unimplemented; or, with `left_out`, is added there by `path`, and the value
  // lacks it: nullopt if it is all of it.
  absl::StatusOr<std::optional<c10::IValue>> Value(const std::string& path,
                                                   std::vector<std::string>* left_out) const;

  // A part of the item's tensor, which must have this type and shape. Whole: with its CRC-32
  // checked, if the item has one. Otherwise only what is needed is read, unverified.
  absl::StatusOr<at::Tensor> Tensor(c10::ScalarType dtype, const std::vector<int64_t>& shape,
                                    const Part& part) const;

  // OK if Value, or Tensor of this type and shape, would find all that it needs.
  absl::Status CheckValue() const;
  absl::Status CheckTensor(c10::ScalarType dtype, const std::vector<int64_t>& shape) const;

 private:
  ItemReader(pt::ZipReader zip, std::string where)
      : zip_(std::move(zip)), where_(std::move(where)) {}
  absl::Status FindPrefix();
  absl::Status Named(const absl::Status& status) const;
  absl::StatusOr<std::string> Pickle() const;
  std::string RecordOf(const std::string& storage) const;
  absl::Status CheckStorage(const std::string& key, uint64_t bytes) const;
  absl::StatusOr<c10::Storage> Storage(const std::string& key, uint64_t bytes) const;
  absl::StatusOr<pt::TensorSpec> Spec(c10::ScalarType dtype,
                                      const std::vector<int64_t>& shape) const;

  pt::ZipReader zip_;
  std::string where_;   // for messages
  std::string prefix_;  // of the archive's records
};

}  // namespace ddp::checkpoint::dcp
