#include "checkpoint/pt/pickle_writer.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <cstring>
#include <limits>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/utf8.h"
#include "checkpoint/pt/pickle_ops.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint::pt {
namespace {

class Writer {
 public:
  explicit Writer(std::function<bool(const c10::Storage&)> comes_later)
      : comes_later_(std::move(comes_later)) {}

  absl::StatusOr<Pickled> Run(const c10::IValue& value) {
    Emit(Opcode::kProtocol);
    Byte(2);
    DDP_RETURN_IF_ERROR(Value(value, "", 0));
    Emit(Opcode::kStop);
    if (pickled_.bytes.size() > kMaxPickle) {
      return Refuse("", "more than 256 MiB besides tensors; put long lists of numbers in a tensor");
    }
    return std::move(pickled_);
  }

 private:
  static absl::Status Refuse(const std::string& path, absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot write '", path.empty() ? "/" : path, "': ", what));
  }

  absl::Status Value(const c10::IValue& value, const std::string& path, int depth) {
    if (depth > kMaxDepth) return Refuse(path, "nested too deeply, or a container in itself");
    if (value.isNone()) {
      Emit(Opcode::kNone);
    } else if (value.isBool()) {
      Emit(value.toBool() ? Opcode::kNewTrue : Opcode::kNewFalse);
    } else if (value.isInt()) {
      Int(value.toInt());
    } else if (value.isDouble()) {
      Double(value.toDouble());
    } else if (value.isComplexDouble()) {
      Global("__builtin__", "complex");
      Emit(Opcode::kMark);
      Double(value.toComplexDouble().real());
      Double(value.toComplexDouble().imag());
      Emit(Opcode::kTuple);
      Emit(Opcode::kReduce);
    } else if (value.isString()) {
      return String(value.toStringRef(), path);
    } else if (value.isTensor()) {
      return Tensor(value.toTensor(), path);
    } else if (value.isTuple()) {
      Emit(Opcode::kMark);
      size_t index = 0;
      for (const c10::IValue& item : value.toTupleRef().elements()) {
        DDP_RETURN_IF_ERROR(Value(item, Join(path, absl::StrCat(index++)), depth + 1));
      }
      Emit(Opcode::kTuple);
    } else if (value.isList()) {
      Emit(Opcode::kEmptyList);
      Emit(Opcode::kMark);
      const c10::ArrayRef<c10::IValue> items = value.toListRef();
      for (size_t i = 0; i < items.size(); ++i) {
        DDP_RETURN_IF_ERROR(Value(items[i], Join(path, absl::StrCat(i)), depth + 1));
      }
      Emit(Opcode::kAppends);
    } else if (value.isGenericDict()) {
      Emit(Opcode::kEmptyDict);
      Emit(Opcode::kMark);
      for (const auto& entry : value.toGenericDict()) {
        const c10::IValue& key = entry.key();
        if (!key.isString() && !key.isInt() && !key.isDouble() && !key.isBool()) {
          return Refuse(path, absl::StrCat("a dict key of type ", key.tagKind(),
                                           "; keys are str, int, double or bool"));
        }
        const std::string below = Join(path, KeyText(key));
        DDP_RETURN_IF_ERROR(Value(key, below, depth + 1));
        DDP_RETURN_IF_ERROR(Value(entry.value(), below, depth + 1));
      }
      Emit(Opcode::kSetItems);
    } else {
      return Refuse(path, absl::StrCat("values of type ", value.tagKind(),
                                       " have no plain equivalent in Python"));
    }
    return absl::OkStatus();
  }

  // torch._utils._rebuild_tensor_v2(storage, offset, sizes, strides, requires_grad, hooks), or
  // _v3 with an untyped storage and the dtype behind, for the element types that came later. The
  // last argument is there for lazy conjugates and negatives, whose storage is that of the
  // original.
  absl::Status Tensor(const at::Tensor& given, const std::string& path) {
    if (!given.defined()) return Refuse(path, "an undefined tensor");
    const bool is_strided = given.layout() == at::kStrided && !given.is_quantized();
    const bool comes_later = is_strided && comes_later_ && comes_later_(given.storage());
    if (!is_strided || (given.is_meta() && !comes_later)) {
      return Refuse(path, "only dense tensors that have their values in memory can be written");
    }
    if (given._is_zerotensor()) return Refuse(path, "a tensor without memory, of zeros");
    at::Tensor tensor = given.detach();
    // A storage is counted in elements; bytes seen through another type may not come out even.
    if (tensor.storage().nbytes() % tensor.element_size() != 0) tensor = tensor.clone();
    const DtypeName* dtype = FindDtype(tensor.scalar_type());
    if (dtype == nullptr) {
      return Refuse(path, absl::StrCat("element type ", c10::toString(tensor.scalar_type())));
    }
    const bool typed = !dtype->storage.empty();
    Global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    Emit(Opcode::kMark);
    Storage(tensor, *dtype);
    Int(tensor.storage_offset());
    Ints(tensor.sizes());
    Ints(tensor.strides());
    Emit(Opcode::kNewFalse);
    Global("collections", "OrderedDict");
    Emit(Opcode::kEmptyTuple);
    Emit(Opcode::kReduce);
    if (!typed) Global("torch", dtype->name);
    if (tensor.is_conj() || tensor.is_neg()) {
      Emit(Opcode::kEmptyDict);
      for (const auto& [name, is_set] :
           {std::pair("conj", tensor.is_conj()), std::pair("neg", tensor.is_neg())}) {
        if (!is_set) continue;
        Text(name);
        Emit(Opcode::kNewTrue);
        Emit(Opcode::kSetItem);
      }
    }
    Emit(Opcode::kTuple);
    Emit(Opcode::kReduce);
    return absl::OkStatus();
  }

  // The persistent id ("storage", class, key, location, elements). The location is always "cpu": a
  // file written by a GPU job opens on a machine without one.
  void Storage(const at::Tensor& tensor, const DtypeName& dtype) {
    const bool typed = !dtype.storage.empty();
    const c10::Storage& storage = tensor.storage();
    // The key depends on the element type as well: Python takes one type per key.
    auto [known, fresh] =
        keys_[storage.unsafeGetStorageImpl()].try_emplace(dtype.dtype, pickled_.storages.size());
    if (fresh) pickled_.storages.push_back(storage);
    Emit(Opcode::kMark);
    Text("storage");
    if (typed) {
      Global("torch", dtype.storage);
    } else {
      Global("torch.storage", "UntypedStorage");
    }
    Text(absl::StrCat(known->second));
    Text("cpu");
    Int(static_cast<int64_t>(storage.nbytes() / (typed ? tensor.element_size() : 1)));
    Emit(Opcode::kTuple);
    Emit(Opcode::kBinPersId);
  }

  absl::Status String(const std::string& text, const std::string& path) {
    if (text.size() > std::numeric_limits<uint32_t>::max()) return Refuse(path, "text over 4 GiB");
    if (!IsUtf8(text, Surrogates::kAccept)) return Refuse(path, "text that is not UTF-8");
    Text(text);
    return absl::OkStatus();
  }

  void Text(absl::string_view text) {
    Emit(Opcode::kBinUnicode);
    for (int i = 0; i < 4; ++i) Byte(static_cast<uint8_t>(text.size() >> (8 * i)));
    pickled_.bytes.append(text);
  }

  void Int(int64_t value) {
    const bool is_int32 = value == static_cast<int32_t>(value);
    if (value >= 0 && value < 256) {
      Emit(Opcode::kBinInt1);
      Byte(static_cast<uint8_t>(value));
      return;
    }
    Emit(is_int32 ? Opcode::kBinInt : Opcode::kLong1);
    if (!is_int32) Byte(8);
    for (int i = 0; i < (is_int32 ? 4 : 8); ++i) Byte(static_cast<uint8_t>(value >> (8 * i)));
  }

  void Ints(c10::IntArrayRef values) {
    Emit(Opcode::kMark);
    for (int64_t value : values) Int(value);
    Emit(Opcode::kTuple);
  }

  void Double(double value) {
    Emit(Opcode::kBinFloat);
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    for (int i = 7; i >= 0; --i) Byte(static_cast<uint8_t>(bits >> (8 * i)));
  }

  void Global(absl::string_view module, absl::string_view name) {
    Emit(Opcode::kGlobal);
    absl::StrAppend(&pickled_.bytes, module, "\n", name, "\n");
  }

  void Emit(Opcode op) { Byte(static_cast<uint8_t>(op)); }
  void Byte(uint8_t byte) { pickled_.bytes.push_back(static_cast<char>(byte)); }

  static std::string Join(const std::string& path, absl::string_view name) {
    return path.empty() ? std::string(name) : absl::StrCat(path, "/", name);
  }

  const std::function<bool(const c10::Storage&)> comes_later_;
  Pickled pickled_;
  std::unordered_map<const c10::StorageImpl*, std::unordered_map<c10::ScalarType, size_t>> keys_;
};

}  // namespace

absl::StatusOr<Pickled> WritePickle(const c10::IValue& value,
                                    const std::function<bool(const c10::Storage&)>& comes_later) {
  return Writer(comes_later).Run(value);
}

}  // namespace ddp::checkpoint::pt
