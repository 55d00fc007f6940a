#include "checkpoint/staging.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/ops/empty.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/populate_pages.h"
#include "base/status.h"

namespace ddp::checkpoint {
namespace {

// All bytes of the memory that a tensor is in.
at::Tensor BytesOf(const c10::Storage& storage) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(storage.device());
  return at::empty({0}, options).set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
}

// Whether a tensor is a view of memory that holds its values.
bool HasMemory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta() &&
         !tensor.is_quantized() && !tensor._is_zerotensor();
}

// Compares a state with its copy.
class Comparison {
 public:
  absl::Status Values(const c10::IValue& value, const c10::IValue& copy, const std::string& path) {
    if (value.isTensor() && copy.isTensor()) {
      return Tensors(value.toTensor(), copy.toTensor(), path);
    }
    if (value.isGenericDict() && copy.isGenericDict()) {
      const auto dict = value.toGenericDict(), other = copy.toGenericDict();
      if (dict.size() != other.size()) return Differs(path);
      auto theirs = other.begin();
      for (auto mine = dict.begin(); mine != dict.end(); ++mine, ++theirs) {
        const std::string below = absl::StrCat(path, "/", KeyText(mine->key()));
        DDP_RETURN_IF_ERROR(Values(mine->key(), theirs->key(), below));
        DDP_RETURN_IF_ERROR(Values(mine->value(), theirs->value(), below));
      }
      return absl::OkStatus();
    }
    if (value.isList() && copy.isList()) return Items(value.toListRef(), copy.toListRef(), path);
    if (value.isTuple() && copy.isTuple()) {
      return Items(value.toTupleRef().elements(), copy.toTupleRef().elements(), path);
    }
    const bool same =
        value.isDouble() && copy.isDouble()
            ? std::bit_cast<uint64_t>(value.toDouble()) == std::bit_cast<uint64_t>(copy.toDouble())
            : value == copy;
    return same ? absl::OkStatus() : Differs(path);
  }

  absl::Status Tensors(const at::Tensor& tensor, const at::Tensor& copy, const std::string& path) {
    if (!HasMemory(tensor) || !HasMemory(copy)) {
      return HasMemory(tensor) == HasMemory(copy) ? absl::OkStatus() : Differs(path);
    }
    if (tensor.dtype() != copy.dtype() || tensor.sizes() != copy.sizes() ||
        tensor.strides() != copy.strides() || tensor.storage_offset() != copy.storage_offset() ||
        tensor.is_conj() != copy.is_conj() || tensor.is_neg() != copy.is_neg()) {
      return Differs(path);
    }
    const c10::Storage& memory = tensor.storage();
    const c10::Storage& copied = copy.storage();
    const auto [known, fresh] =
        copies_.emplace(memory.unsafeGetStorageImpl(), copied.unsafeGetStorageImpl());
    if (!fresh) {
      return known->second == copied.unsafeGetStorageImpl() ? absl::OkStatus() : Differs(path);
    }
    const size_t bytes = memory.nbytes();
    if (copied.nbytes() != bytes) return Differs(path);
    const at::Tensor mine = BytesOf(memory).cpu(), theirs = BytesOf(copied).cpu();
    const bool same =
        bytes == 0 || std::memcmp(mine.const_data_ptr(), theirs.const_data_ptr(), bytes) == 0;
    return same ? absl::OkStatus() : Differs(path);
  }

 private:
  static absl::Status Differs(const std::string& path) {
    return absl::DataLossError(absl::StrCat("the copy of '", path,
                                            "' is not what the state has: something has changed it "
                                            "meanwhile, or memory is faulty"));
  }

  template <typename Sequence>
  absl::Status Items(const Sequence& values, const Sequence& copies, const std::string& path) {
    if (values.size() != copies.size()) return Differs(path);
    for (size_t i = 0; i < values.size(); ++i) {
      DDP_RETURN_IF_ERROR(Values(values[i], copies[i], absl::StrCat(path, "/", i)));
    }
    return absl::OkStatus();
  }

  std::map<const c10::StorageImpl*, const c10::StorageImpl*> copies_;
};

}  // namespace

absl::StatusOr<State> Staging::Copy(const State& state, TensorSource* source) {
  source_ = source;
  given_ = absl::OkStatus();
  const absl::Cleanup forget = [this] { source_ = nullptr; };
  buffers_.resize(used_);  // what the copy before did not need: its state was smaller
  used_ = 0;
  copied_.clear();
  State copy;
  const absl::Status copied = CatchStatus("copying the state", [&] {
    copy.root = CopyValue(state.root).toGenericDict();
    for (const auto& [path, tensor] : state.sharded) {
      ShardedTensor parts = tensor;
      for (TensorPart& part : parts.parts) part.tensor = CopyTensor(part.tensor);
      copy.sharded.emplace(path, std::move(parts));
    }
    for (const auto& [rank, entries] : state.per_rank) {
      copy.per_rank.emplace(rank, CopyValue(entries).toGenericDict());
    }
  });
  DDP_RETURN_IF_ERROR(copied);
  DDP_RETURN_IF_ERROR(given_);
  return copy;
}

absl::StatusOr<c10::IValue> Staging::Add(const c10::IValue& value) {
  return CatchStatus("copying what is saved beside the state",
                     [&]() -> absl::StatusOr<c10::IValue> { return CopyValue(value); });
}

uint64_t Staging::bytes() const {
  uint64_t bytes = 0;
  for (size_t i = 0; i < used_; ++i) bytes += buffers_[i].nbytes();
  return bytes;
}

c10::IValue Staging::CopyValue(const c10::IValue& value) {
  if (value.isTensor()) return CopyTensor(value.toTensor());
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    c10::impl::GenericDict copy(dict.keyType(), dict.valueType());
    for (const auto& entry : dict) copy.insert(entry.key(), CopyValue(entry.value()));
    return copy;
  }
  if (value.isList()) {
    const auto list = value.toList();
    c10::impl::GenericList copy(list.elementType());
    for (const c10::IValue& element : value.toListRef()) copy.push_back(CopyValue(element));
    return copy;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      elements.push_back(CopyValue(element));
    }
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  return value;
}

at::Tensor Staging::CopyTensor(const at::Tensor& tensor) {
  const bool comes_later = source_ != nullptr && tensor.defined() && tensor.has_storage() &&
                           source_->Has(tensor.storage());
  // Formats refuse others, or write what `clone` keeps.
  if (!HasMemory(tensor) && !comes_later) {
    return tensor.defined() ? tensor.detach().clone() : tensor;
  }
  const c10::Storage& storage = tensor.storage();
  const auto [known, fresh] = copied_.try_emplace(storage.unsafeGetStorageImpl());
  if (fresh) {
    if (comes_later) {
      const absl::StatusOr<at::Tensor> values =
          given_.ok() ? source_->Get(storage) : absl::StatusOr<at::Tensor>(given_);
      given_ = values.status();
      if (!given_.ok()) {
        copied_.erase(known);
        return tensor;
      }
      known->second = CopyBytes(BytesOf(values->storage()));
    } else {
      known->second = CopyBytes(BytesOf(storage));
    }
  }
  at::Tensor copy =
      at::empty({0}, tensor.options().device(at::kCPU).requires_grad(false))
          .set_(known->second.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) copy._set_conj(true);
  if (tensor.is_neg()) copy._set_neg(true);
  return copy;
}

// The next buffer, with these bytes.
at::Tensor Staging::CopyBytes(const at::Tensor& bytes) {
  if (used_ == buffers_.size()) buffers_.emplace_back();
  at::Tensor& buffer = buffers_[used_++];
  if (!buffer.defined() || buffer.numel() != bytes.numel()) {
    buffer = at::empty(bytes.sizes(), at::kByte);
    PopulatePages(buffer.mutable_data_ptr(), buffer.nbytes());
  }
  if (bytes.is_cpu() && bytes.numel() > 0) {
    // Where all cores have a rank, threads of copy_ wait for each other longer than this takes.
    std::memcpy(buffer.mutable_data_ptr(), bytes.const_data_ptr(), bytes.nbytes());
  } else {
    buffer.copy_(bytes);
  }
  return buffer;
}

absl::Status CheckCopy(const State& state, const State& copy) {
  Comparison comparison;
  DDP_RETURN_IF_ERROR(comparison.Values(state.root, copy.root, ""));
  for (const auto& [path, tensor] : state.sharded) {
    const auto theirs = copy.sharded.find(path);
    if (theirs == copy.sharded.end() || theirs->second.parts.size() != tensor.parts.size()) {
      return absl::DataLossError(absl::StrCat("the copy has not the parts of '", path, "'"));
    }
    for (size_t i = 0; i < tensor.parts.size(); ++i) {
      DDP_RETURN_IF_ERROR(comparison.Tensors(tensor.parts[i].tensor, theirs->second.parts[i].tensor,
                                             absl::StrCat(path, " (part ", i, ")")));
    }
  }
  for (const auto& [rank, entries] : state.per_rank) {
    const auto theirs = copy.per_rank.find(rank);
    if (theirs == copy.per_rank.end()) {
      return absl::DataLossError(absl::StrCat("the copy has no entries of rank ", rank));
    }
    DDP_RETURN_IF_ERROR(
        comparison.Values(entries, theirs->second, absl::StrCat("per_rank/", rank)));
  }
  return absl::OkStatus();
}

}  // namespace ddp::checkpoint
