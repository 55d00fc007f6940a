#include "checkpoint/dcp/item_reader.h"

#include <ATen/Functions.h>
#include <ATen/core/ivalue_inl.h>

#include <unordered_map>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "checkpoint/pt/pickle_reader.h"
#include "checkpoint/pt/tensor_reader.h"

namespace ddp::checkpoint::dcp {
namespace {

constexpr absl::string_view kPickle = "/data.pkl";

}  // namespace

absl::StatusOr<ItemReader> ItemReader::Open(const std::string& folder, const Item& item) {
  const std::string path = absl::StrCat(folder, "/", item.file);
  absl::StatusOr<pt::ZipReader> zip = pt::ZipReader::Open(path, item.offset, item.size);
  const std::string where = absl::StrCat("item at byte ", item.offset);
  DDP_RETURN_IF_ERROR(Annotate(zip.status(), where));
  ItemReader reader(*std::move(zip), absl::StrCat(path, ", ", where));
  DDP_RETURN_IF_ERROR(reader.Named(reader.FindPrefix()));
  return reader;
}

absl::Status ItemReader::Named(const absl::Status& status) const {
  return Annotate(status, where_);
}

absl::Status ItemReader::FindPrefix() {
  for (const std::string& name : zip_.Names()) {
    if (!absl::EndsWith(name, kPickle)) continue;
    if (!prefix_.empty()) return absl::DataLossError("has two records data.pkl");
    prefix_ = std::string(absl::StripSuffix(name, kPickle));
  }
  if (prefix_.empty()) return absl::DataLossError("has no record data.pkl");
  const std::string order_record = absl::StrCat(prefix_, "/byteorder");
  if (!zip_.Has(order_record)) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(const std::string order, zip_.Read(order_record));
  if (order != "little") return absl::DataLossError("was written by a big-endian machine");
  return absl::OkStatus();
}

absl::StatusOr<std::string> ItemReader::Pickle() const {
  return zip_.Read(absl::StrCat(prefix_, kPickle));
}

std::string ItemReader::RecordOf(const std::string& storage) const {
  return absl::StrCat(prefix_, "/data/", storage);
}

absl::Status ItemReader::CheckStorage(const std::string& key, uint64_t bytes) const {
  const std::string name = RecordOf(key);
  const absl::StatusOr<uint64_t> size = zip_.Size(name);
  if (!size.ok()) return absl::DataLossError(absl::StrCat("lacks record ", name));
  if (*size != bytes) {
    return absl::DataLossError(
        absl::StrCat("has ", *size, " bytes in record ", name, " where a tensor needs ", bytes));
  }
  return zip_.ReadRange(name, 0, nullptr, 0);  // an error if it cannot be read
}

absl::StatusOr<c10::Storage> ItemReader::Storage(const std::string& key, uint64_t bytes) const {
  DDP_RETURN_IF_ERROR(CheckStorage(key, bytes));
  const at::Tensor data = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  DDP_RETURN_IF_ERROR(zip_.Read(RecordOf(key), data.data_ptr()));
  return data.storage();
}

absl::StatusOr<std::optional<c10::IValue>> ItemReader::Value(
    const std::string& path, std::vector<std::string>* left_out) const {
  std::unordered_map<std::string, c10::Storage> storages;
  const auto load = [&](const pt::TensorSpec& tensor, const Part&,
                        const std::string&) -> absl::StatusOr<c10::IValue> {
    auto known = storages.find(tensor.key);
    if (known == storages.end()) {
      DDP_ASSIGN_OR_RETURN(c10::Storage storage, Storage(tensor.key, tensor.storage_bytes));
      known = storages.emplace(tensor.key, std::move(storage)).first;
    }
    if (known->second.nbytes() != tensor.storage_bytes) {
      return absl::DataLossError(absl::StrCat("gives storage ", tensor.key, " two sizes"));
    }
    return pt::ViewOf(known->second, tensor);
  };
  const absl::StatusOr<std::string> pickle = Pickle();
  if (!pickle.ok()) return Named(pickle.status());
  std::vector<std::string> reasons;  // "'0/x' is a set", "'/' is a set"
  absl::StatusOr<pt::Selection> read =
      pt::ReadPickle(*pickle, {.left_out = left_out == nullptr ? nullptr : &reasons}, load);
  if (!read.ok()) return Named(read.status());
  bool is_there = true;
  for (absl::string_view reason : reasons) {
    absl::ConsumePrefix(&reason, "'");
    const bool is_all = absl::ConsumePrefix(&reason, "/'");
    if (is_all) is_there = false;
    constexpr size_t kMost = 1000;  // as ReadRequest says
    if (left_out->size() >= kMost) continue;
    left_out->push_back(is_all ? absl::StrCat("'", path, "'", reason)
                               : absl::StrCat("'", path, "/", reason));
  }
  if (!is_there) return std::nullopt;
  return std::optional<c10::IValue>(std::move(read->value));
}

absl::Status ItemReader::CheckValue() const {
  const absl::StatusOr<std::string> pickle = Pickle();
  if (!pickle.ok()) return Named(pickle.status());
  return Named(pt::CheckPickle(*pickle, [this](const pt::TensorSpec& tensor, const std::string&) {
                 return CheckStorage(tensor.key, tensor.storage_bytes);
               }).status());
}

absl::StatusOr<pt::TensorSpec> ItemReader::Spec(c10::ScalarType dtype,
                                                const std::vector<int64_t>& shape) const {
  DDP_ASSIGN_OR_RETURN(const std::string pickle, Pickle());
  DDP_ASSIGN_OR_RETURN(const pt::PickleGraph graph, pt::ParsePickle(pickle));
  const pt::Node& root = graph.nodes[graph.root];
  if (root.kind == pt::Kind::kUnsupported) return absl::UnimplementedError(root.text);
  if (root.kind != pt::Kind::kTensor) return absl::DataLossError("holds no tensor");
  DDP_ASSIGN_OR_RETURN(pt::TensorSpec spec, pt::TensorSpecOf(graph.nodes, root));
  if (spec.dtype != dtype || spec.sizes != shape) {
    return absl::DataLossError(absl::StrCat(
        "holds a tensor of type ", c10::toString(spec.dtype), " and shape ", ShapeText(spec.sizes),
        ", and ", kMetadataFile, " says ", c10::toString(dtype), " and ", ShapeText(shape)));
  }
  DDP_RETURN_IF_ERROR(CheckStorage(spec.key, spec.storage_bytes));
  return spec;
}

absl::StatusOr<at::Tensor> ItemReader::Tensor(c10::ScalarType dtype,
                                              const std::vector<int64_t>& shape,
                                              const Part& part) const {
  const auto read = [&]() -> absl::StatusOr<at::Tensor> {
    DDP_ASSIGN_OR_RETURN(const pt::TensorSpec spec, Spec(dtype, shape));
    if (!std::holds_alternative<Whole>(part)) {
      return pt::ReadTensorPart(zip_, RecordOf(spec.key), spec, part);
    }
    DDP_ASSIGN_OR_RETURN(c10::Storage storage, Storage(spec.key, spec.storage_bytes));
    return pt::ViewOf(std::move(storage), spec).toTensor();
  };
  absl::StatusOr<at::Tensor> tensor = read();
  if (!tensor.ok()) return Named(tensor.status());
  return tensor;
}

absl::Status ItemReader::CheckTensor(c10::ScalarType dtype,
                                     const std::vector<int64_t>& shape) const {
  return Named(Spec(dtype, shape).status());
}

}  // namespace ddp::checkpoint::dcp
