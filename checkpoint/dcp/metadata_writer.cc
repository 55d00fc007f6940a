#include "checkpoint/dcp/metadata_writer.h"

#include <cstdint>
#include <map>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "checkpoint/dcp/class_names.h"
#include "checkpoint/pt/pickle_ops.h"

namespace ddp::checkpoint::dcp {
namespace {

using pt::Opcode;

// The version of the layout that torch 2.11 to 2.15 write.
constexpr absl::string_view kVersion = "1.0.0";

class Writer {
 public:
  std::string Run(const Metadata& metadata) {
    Emit(Opcode::kProtocol);
    Byte(2);
    Object(kMetadataClass);
    BeginState();
    Text("state_dict_metadata");
    BeginDict();
    for (const Entry& entry : metadata.entries) {
      Text(entry.name);
      Value(entry);
    }
    EndDict();
    Text("planner_data");
    BeginDict();
    for (const Entry& entry : metadata.entries) {
      Text(entry.name);
      Path(entry.path);
    }
    EndDict();
    Text("storage_data");
    BeginDict();
    for (const Entry& entry : metadata.entries) {
      if (const auto* item = std::get_if<Item>(&entry.value)) {
        Index(entry.name, nullptr, 0);
        Storage(*item);
        continue;
      }
      const auto& tensor = std::get<TensorInfo>(entry.value);
      for (size_t i = 0; i < tensor.chunks.size(); ++i) {
        Index(entry.name, &tensor.chunks[i].box.offset, static_cast<int64_t>(i));
        Storage(tensor.chunks[i].item);
      }
    }
    EndDict();
    // Neither the folder's name nor a random id: the same state gives the same bytes.
    Text("storage_meta");
    Emit(Opcode::kNone);
    Text("version");
    Text(kVersion);
    EndState();
    Emit(Opcode::kStop);
    return std::move(bytes_);
  }

 private:
  void Value(const Entry& entry) {
    const auto* tensor = std::get_if<TensorInfo>(&entry.value);
    if (tensor == nullptr) {
      Object(kBytesStorage);
      return;
    }
    Object(kTensorStorage);
    BeginState();
    Text("properties");
    Properties(*tensor);
    Text("size");
    Size(tensor->shape);
    Text("chunks");
    Emit(Opcode::kEmptyList);
    Emit(Opcode::kMark);
    for (const Chunk& chunk : tensor->chunks) {
      Object(kChunkStorage);
      BeginState();
      Text("offsets");
      Size(chunk.box.offset);
      Text("sizes");
      Size(chunk.box.sizes);
      EndState();
    }
    Emit(Opcode::kAppends);
    EndState();
  }

  // (dtype, layout, requires_grad, memory format, pin_memory); later versions add the strides.
  // Python makes its tensors by dtype and size alone.
  void Properties(const TensorInfo& tensor) {
    constexpr int kContiguous = 0;  // _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    Object(kTensorProperties);
    Emit(Opcode::kMark);
    Global(absl::StrCat("torch.", pt::FindDtype(tensor.dtype)->name));
    Global(kGetLayout);
    Text("torch.strided");
    Emit(Opcode::kTuple1);
    Emit(Opcode::kReduce);
    Emit(Opcode::kNewFalse);
    Global(kMemoryFormat);
    Int(kContiguous);
    Emit(Opcode::kTuple1);
    Emit(Opcode::kReduce);
    Emit(Opcode::kNewFalse);
    Emit(Opcode::kTuple);
    Emit(Opcode::kBuild);
  }

  void Path(const std::vector<Key>& path) {
    Emit(Opcode::kMark);
    for (const Key& key : path) {
      if (const auto* name = std::get_if<std::string>(&key)) {
        Text(*name);
      } else {
        Int(std::get<int64_t>(key));
      }
    }
    Emit(Opcode::kTuple);
  }

  // `offset` is null for bytes.
  void Index(const std::string& name, const std::vector<int64_t>* offset, int64_t index) {
    Object(kMetadataIndex);
    BeginState();
    Text("fqn");
    Text(name);
    Text("index");
    if (offset == nullptr) {
      Emit(Opcode::kNone);
    } else {
      Int(index);
      Text("offset");
      Size(*offset);
    }
    EndState();
  }

  void Storage(const Item& item) {
    Object(kStorageInfo);
    BeginState();
    Text("relative_path");
    Text(item.file);
    Text("offset");
    Int(static_cast<int64_t>(item.offset));
    Text("length");
    Int(static_cast<int64_t>(item.size));
    EndState();
  }

  void Size(const std::vector<int64_t>& sizes) {
    Global("torch.Size");
    Emit(Opcode::kMark);
    for (int64_t size : sizes) Int(size);
    Emit(Opcode::kTuple);
    Emit(Opcode::kTuple1);
    Emit(Opcode::kReduce);
  }

  // A new object of a dataclass. BeginState, its fields as keys and values, and EndState follow.
  void Object(absl::string_view name) {
    Global(name);
    Emit(Opcode::kEmptyTuple);
    Emit(Opcode::kNewObject);
  }
  void BeginState() { BeginDict(); }
  void EndState() {
    EndDict();
    Emit(Opcode::kBuild);
  }
  void BeginDict() {
    Emit(Opcode::kEmptyDict);
    Emit(Opcode::kMark);
  }
  void EndDict() { Emit(Opcode::kSetItems); }

  // "module.name", spelled out where it stands for the first time.
  void Global(absl::string_view global) {
    const auto [known, fresh] = globals_.emplace(global, globals_.size());
    const auto number = static_cast<uint8_t>(known->second);  // fewer than 50 globals
    if (fresh) {
      const size_t dot = global.rfind('.');
      Emit(Opcode::kGlobal);
      absl::StrAppend(&bytes_, global.substr(0, dot), "\n", global.substr(dot + 1), "\n");
    }
    Emit(fresh ? Opcode::kBinPut : Opcode::kBinGet);
    Byte(number);
  }

  void Text(absl::string_view text) {
    Emit(Opcode::kBinUnicode);
    for (int i = 0; i < 4; ++i) Byte(static_cast<uint8_t>(text.size() >> (8 * i)));
    bytes_.append(text);
  }

  void Int(int64_t value) {
    const bool is_int32 = value == static_cast<int32_t>(value);
    Emit(is_int32 ? Opcode::kBinInt : Opcode::kLong1);
    if (!is_int32) Byte(8);
    for (int i = 0; i < (is_int32 ? 4 : 8); ++i) Byte(static_cast<uint8_t>(value >> (8 * i)));
  }

  void Emit(Opcode op) { Byte(static_cast<uint8_t>(op)); }
  void Byte(uint8_t byte) { bytes_.push_back(static_cast<char>(byte)); }

  std::string bytes_;
  std::map<std::string, size_t, std::less<>> globals_;
};

}  // namespace

std::string WriteMetadata(const Metadata& metadata) { return Writer().Run(metadata); }

}  // namespace ddp::checkpoint::dcp
