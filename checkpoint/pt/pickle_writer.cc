#include "checkpoint/pt/pickle_writer.h"

#include <ATen/core/ivalue_inl.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/utf8.h"
#include "checkpoint/pt/pickle_ops.h"
#include "checkpoint/pt/tensor_spec.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint::pt {
namespace {

// Bytes [begin, end) of a storage.
struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// From a tensor's first element to its last one.
Range RangeOf(const at::Tensor& tensor) {
  const auto width = static_cast<uint64_t>(tensor.element_size());
  const uint64_t begin = static_cast<uint64_t>(tensor.storage_offset()) * width;
  if (tensor.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + static_cast<uint64_t>(last + 1) * width};
}

// What of each storage is a record: the ranges of the tensors in it, joined where they overlap, so
// that a record is damaged, read and kept with no other tensors than those that share its bytes.
class RecordPlan {
 public:
  struct Piece {
    uint64_t end = 0;
    std::optional<size_t> key = {};
  };
  using Pieces = std::map<uint64_t, Piece>;  // by begin; disjoint

  void Add(const at::Tensor& tensor) {
    Pieces& pieces = PiecesOf(tensor);
    Range range = RangeOf(tensor);
    auto next = pieces.upper_bound(range.begin);
    if (next != pieces.begin()) {
      const auto before = std::prev(next);
      if (before->first == range.begin || range.begin < before->second.end) {
        range = {before->first, std::max(range.end, before->second.end)};
        next = pieces.erase(before);
      }
    }
    while (next != pieces.end() && next->first < range.end) {
      range.end = std::max(range.end, next->second.end);
      next = pieces.erase(next);
    }
    pieces.emplace_hint(next, range.begin, Piece{range.end});
  }

  // The piece that a tensor is in, which has been added.
  Pieces::iterator Find(const at::Tensor& tensor) {
    return std::prev(PiecesOf(tensor).upper_bound(RangeOf(tensor).begin));
  }

 private:
  // Tensors of another element type have records of their own: Python takes one type per key.
  Pieces& PiecesOf(const at::Tensor& tensor) {
    return pieces_[tensor.storage().unsafeGetStorageImpl()][tensor.scalar_type()];
  }

  std::unordered_map<const c10::StorageImpl*, std::unordered_map<c10::ScalarType, Pieces>> pieces_;
};

class Writer {
 public:
  explicit Writer(std::function<bool(const c10::Storage&)> comes_later)
      : comes_later_(std::move(comes_later)) {}

  absl::StatusOr<Pickled> Run(const c10::IValue& value) {
    // Twice: what a tensor's record is depends on all other tensors.
    plans_ = true;
    DDP_RETURN_IF_ERROR(Value(value, "", 0));
    plans_ = false;
    pickled_.bytes.clear();
    repeated_bytes_ = 0;
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
        if (key.isString() && key.toStringRef().size() > kMaxKey) {
          return Refuse(path, "a dict key of more than 4096 bytes");
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
    if (!comes_later && tensor.numel() > 0 && RangeOf(tensor).end > tensor.storage().nbytes()) {
      return Refuse(path, "a tensor that reaches beyond its memory");
    }
    const DtypeName* dtype = FindDtype(tensor.scalar_type());
    if (dtype == nullptr) {
      return Refuse(path, absl::StrCat("element type ", c10::toString(tensor.scalar_type())));
    }
    if (!CountRepeated(tensor.sizes(), tensor.strides(), tensor.scalar_type(), repeated_bytes_)) {
      if (comes_later) return Refuse(path, "a tensor that repeats more than 1 GiB of elements");
      // The reader would refuse it.
      at::Tensor& whole = made_whole_[{
          tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset(), tensor.scalar_type(),
          tensor.sizes().vec(), tensor.strides().vec(), tensor.is_conj(), tensor.is_neg()}];
      if (!whole.defined()) whole = tensor.contiguous();
      tensor = whole;
    }
    if (plans_) {
      plan_.Add(tensor);
      return absl::OkStatus();
    }
    const auto piece = plan_.Find(tensor);
    const bool typed = !dtype->storage.empty();
    Global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    Emit(Opcode::kMark);
    Storage(tensor, *dtype, piece->first, piece->second);
    Int(tensor.storage_offset() -
        static_cast<int64_t>(piece->first / static_cast<uint64_t>(tensor.element_size())));
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
  void Storage(const at::Tensor& tensor, const DtypeName& dtype, uint64_t begin,
               RecordPlan::Piece& piece) {
    const bool typed = !dtype.storage.empty();
    const uint64_t size = piece.end - begin;
    if (!piece.key) {
      piece.key = pickled_.records.size();
      pickled_.records.push_back({tensor.storage(), begin, size});
    }
    Emit(Opcode::kMark);
    Text("storage");
    if (typed) {
      Global("torch", dtype.storage);
    } else {
      Global("torch.storage", "UntypedStorage");
    }
    Text(absl::StrCat(*piece.key));
    Text("cpu");
    Int(static_cast<int64_t>(size / (typed ? static_cast<uint64_t>(tensor.element_size()) : 1)));
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
  RecordPlan plan_;
  bool plans_ = false;
  uint64_t repeated_bytes_ = 0;
  // Tensors that repeat too much, by storage, offset, type, sizes, strides, conjugate and negative.
  std::map<std::tuple<const c10::StorageImpl*, int64_t, at::ScalarType, std::vector<int64_t>,
                      std::vector<int64_t>, bool, bool>,
           at::Tensor>
      made_whole_;
  Pickled pickled_;
};

}  // namespace

at::Tensor OnCpu(const Record& record) {
  const auto bytes = at::TensorOptions().dtype(at::kByte).device(record.storage.device());
  return at::empty({0}, bytes)
      .set_(record.storage, static_cast<int64_t>(record.offset),
            {static_cast<int64_t>(record.size)}, {1})
      .to(at::kCPU);
}

absl::StatusOr<Pickled> WritePickle(const c10::IValue& value,
                                    const std::function<bool(const c10::Storage&)>& comes_later) {
  return Writer(comes_later).Run(value);
}

}  // namespace ddp::checkpoint::pt
