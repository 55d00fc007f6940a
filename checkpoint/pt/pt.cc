// The format `pt`: that of Python's torch.save and torch.load(weights_only=True).
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>

#include "absl/log/absl_log.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/status.h"
#include "checkpoint/consolidate.h"
#include "checkpoint/format.h"
#include "checkpoint/pt/pickle_reader.h"
#include "checkpoint/pt/pickle_writer.h"
#include "checkpoint/pt/tensor_reader.h"
#include "checkpoint/pt/tensor_spec.h"
#include "checkpoint/pt/zip.h"

namespace ddp::checkpoint::pt {
namespace {

constexpr absl::string_view kPickle = "/data.pkl";
// Storages of fewer bytes are read even where the caller would do it.
constexpr uint64_t kLeastUnread = 64 << 10;

// Reads one archive. Tensors that share a storage share it after reading, too.
class Archive {
 public:
  explicit Archive(ZipReader zip) : zip_(std::move(zip)) {}

  bool has_checksums() const { return zip_.has_checksums(); }

  absl::StatusOr<State> Read(const ReadRequest& request) {
    if (zip_.has_checksums()) unread_ = request.unread;
    DDP_ASSIGN_OR_RETURN(const std::string pickle, Pickle());
    const auto load = [&](const TensorSpec& tensor, const Part& part,
                          const std::string& path) -> absl::StatusOr<c10::IValue> {
      if (!std::holds_alternative<Whole>(part)) return Tensor(tensor, part, path);
      if (request.only_check) DDP_RETURN_IF_ERROR(CheckData(tensor, path));
      return request.meta || request.only_check ? MetaTensor(tensor) : Tensor(tensor, part, path);
    };
    DDP_ASSIGN_OR_RETURN(Selection selected, ReadPickle(pickle, request, load));
    if ((request.parts.empty() || request.all_else) && !request.meta) {
      // Check the CRC-32 of the remaining records, too.
      for (const std::string& name : zip_.Names()) {
        if (!read_.contains(name)) DDP_RETURN_IF_ERROR(Record(name).status());
      }
    }
    return StateOf(std::move(selected.value), std::move(selected.sharded));
  }

  absl::Status CheckComplete() {
    DDP_ASSIGN_OR_RETURN(const std::string pickle, Pickle());
    DDP_ASSIGN_OR_RETURN(c10::IValue value,
                         CheckPickle(pickle, [this](const TensorSpec& tensor, const std::string&) {
                           return CheckStorage(tensor.key, tensor.storage_bytes);
                         }));
    return StateOf(std::move(value), {}).status();
  }

 private:
  absl::Status FindPrefix() {
    for (const std::string& name : zip_.Names()) {
      if (absl::EndsWith(name, "/constants.pkl")) {
        return absl::UnimplementedError("is a TorchScript archive (torch.jit.save), no checkpoint");
      }
      if (absl::EndsWith(name, ".npy")) {
        return absl::UnimplementedError(
            "is an archive of numpy arrays (numpy.savez), no checkpoint");
      }
      if (absl::EndsWith(name, kPickle)) {
        if (!prefix_.empty()) return absl::DataLossError("has two records data.pkl");
        prefix_ = std::string(absl::StripSuffix(name, kPickle));
      }
    }
    if (prefix_.empty()) {
      return absl::DataLossError("has no record data.pkl: torch.save did not write it");
    }
    return absl::OkStatus();
  }

  absl::Status CheckByteOrder() {
    const std::string name = absl::StrCat(prefix_, "/byteorder");
    if (!zip_.Has(name)) return absl::OkStatus();  // torch before 2.1: little
    DDP_ASSIGN_OR_RETURN(const std::string order, Record(name));
    if (order != "little") return absl::DataLossError("was written by a big-endian machine");
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Record(const std::string& name) {
    read_.insert(name);
    return zip_.Read(name);
  }

  absl::StatusOr<std::string> Pickle() {
    DDP_RETURN_IF_ERROR(FindPrefix());
    DDP_RETURN_IF_ERROR(CheckByteOrder());
    return Record(absl::StrCat(prefix_, kPickle));
  }

  std::string StorageRecord(const std::string& key) const {
    return absl::StrCat(prefix_, "/data/", key);
  }

  // The archive must have a storage of this name and size.
  absl::Status CheckStorage(const std::string& key, uint64_t bytes) const {
    const std::string name = StorageRecord(key);
    absl::StatusOr<uint64_t> size = zip_.Size(name);
    if (!size.ok()) return absl::DataLossError(absl::StrCat("lacks record ", name));
    if (*size != bytes) {
      return absl::DataLossError(
          absl::StrCat("has ", *size, " bytes in record ", name, " where a tensor needs ", bytes));
    }
    return zip_.ReadRange(name, 0, nullptr, 0);  // an error if it cannot be read
  }

  // That of `tensor`, whose path is `path`.
  absl::StatusOr<c10::Storage> Storage(const TensorSpec& tensor, const std::string& path) {
    const std::string& key = tensor.key;
    const uint64_t bytes = tensor.storage_bytes;
    const auto known = storages_.find(key);
    if (known != storages_.end()) {
      if (known->second.nbytes() != bytes) {
        return absl::DataLossError(absl::StrCat("gives storage ", key, " two sizes"));
      }
      const bool is_unread = tensor.used_at_once && unread_ != nullptr &&
                             unread_->erase(known->second.unsafeGetStorageImpl()) > 0;
      if (is_unread) DDP_RETURN_IF_ERROR(Fill(known->second, key, path));
      return known->second;
    }
    DDP_RETURN_IF_ERROR(CheckStorage(key, bytes));
    const std::string name = StorageRecord(key);
    const c10::Storage data = at::empty({static_cast<int64_t>(bytes)}, at::kByte).storage();
    read_.insert(name);
    if (unread_ != nullptr && bytes >= kLeastUnread && !tensor.used_at_once) {
      DDP_ASSIGN_OR_RETURN(const ZipReader::Place place, zip_.Find(name));
      unread_->emplace(
          data.unsafeGetStorageImpl(),
          StoredBytes{place.offset, place.crc,
                      absl::StrCat(ZipReader::Mismatch(name), ": tensor '", path, "'")});
    } else {
      DDP_RETURN_IF_ERROR(Fill(data, key, path));
    }
    return storages_.emplace(key, data).first->second;
  }

  absl::Status Fill(const c10::Storage& storage, const std::string& key, const std::string& path) {
    const absl::Status status = zip_.Read(StorageRecord(key), storage.mutable_data());
    if (status.ok()) return status;
    return absl::Status(status.code(), absl::StrCat(status.message(), ": tensor '", path, "'"));
  }

  absl::StatusOr<c10::IValue> Tensor(const TensorSpec& tensor, const Part& part,
                                     const std::string& path) {
    if (std::holds_alternative<Whole>(part)) {
      DDP_ASSIGN_OR_RETURN(c10::Storage storage, Storage(tensor, path));
      return ViewOf(std::move(storage), tensor);
    }
    DDP_RETURN_IF_ERROR(CheckStorage(tensor.key, tensor.storage_bytes));
    return ReadTensorPart(zip_, StorageRecord(tensor.key), tensor, part);
  }

  // Reads the tensor's storage, unless it has been read, and drops it.
  absl::Status CheckData(const TensorSpec& tensor, const std::string& path) {
    if (read_.contains(StorageRecord(tensor.key))) return absl::OkStatus();
    DDP_RETURN_IF_ERROR(Storage(tensor, path).status());
    storages_.clear();
    return absl::OkStatus();
  }

  // A tensor on the device meta.
  absl::StatusOr<c10::IValue> MetaTensor(const TensorSpec& tensor) const {
    DDP_RETURN_IF_ERROR(CheckStorage(tensor.key, tensor.storage_bytes));
    return c10::IValue(at::empty_strided(
        tensor.sizes, tensor.strides, at::TensorOptions().dtype(tensor.dtype).device(at::kMeta)));
  }

  static absl::StatusOr<State> StateOf(c10::IValue root,
                                       std::map<std::string, ShardedTensor> sharded) {
    if (!root.isGenericDict()) {
      return absl::UnimplementedError(
          absl::StrCat("holds ", KindText(root), " at its top, where a dict is needed"));
    }
    return State{.root = root.toGenericDict(), .sharded = std::move(sharded)};
  }

  ZipReader zip_;
  std::string prefix_;
  std::set<std::string> read_;
  std::unordered_map<std::string, c10::Storage> storages_;
  StoredBytesOf* unread_ = nullptr;  // ReadRequest's
};

class PtFormat : public Format {
 public:
  explicit PtFormat(const FormatOptions& options) : options_(options) {}

  absl::string_view name() const override { return "pt"; }
  absl::string_view suffix() const override { return ".pt"; }
  bool all_ranks_write() const override { return false; }

  absl::Status Write(const State& state, const std::string& path, TensorSource* source) override {
    if (!state.sharded.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("format pt holds whole tensors only, and '",
                                                     state.sharded.begin()->first,
                                                     "' is in parts; gather it first"));
    }
    if (!state.per_rank.empty()) {
      return absl::InvalidArgumentError(
          "format pt is written by one rank, and the state has entries of single ranks; gather "
          "them first");
    }
    return CatchStatus(absl::StrCat("writing ", path),
                       [&] { return WriteRoot(state, path, source); });
  }

  absl::StatusOr<State> Read(const std::string& path, const ReadRequest& request) override {
    return CatchStatus(absl::StrCat("reading ", path), [&]() -> absl::StatusOr<State> {
      DDP_ASSIGN_OR_RETURN(Archive archive, Open(path));
      absl::StatusOr<State> state = archive.Read(WithPerRankEntries(request));
      if (!state.ok()) return Named(path, state.status());
      if (!archive.has_checksums()) {
        ABSL_LOG(WARNING) << path << " has no checksums: it is not known whether it is damaged";
      }
      TakePerRank(*state, request.per_rank, options_.ranks);
      return state;
    });
  }

  absl::Status CheckComplete(const std::string& path) override {
    return CatchStatus(absl::StrCat("reading ", path), [&]() -> absl::Status {
      DDP_ASSIGN_OR_RETURN(Archive archive, Open(path));
      return Named(path, archive.CheckComplete());
    });
  }

 private:
  absl::Status WriteRoot(const State& state, const std::string& path, TensorSource* source) {
    const auto comes_later = [source](const c10::Storage& storage) {
      return source != nullptr && source->Has(storage);
    };
    DDP_ASSIGN_OR_RETURN(const Pickled pickled, WritePickle(state.root, comes_later));
    DDP_ASSIGN_OR_RETURN(FileWriter file, FileWriter::Create(path, options_.files));
    ZipWriter zip(&file);
    const auto add = [&zip](absl::string_view name, absl::string_view text) {
      return zip.Add(absl::StrCat("archive", name), text.data(), text.size());
    };
    DDP_RETURN_IF_ERROR(add(kPickle, pickled.bytes));
    DDP_RETURN_IF_ERROR(add("/byteorder", "little"));
    for (size_t i = 0; i < pickled.records.size(); ++i) {
      Record record = pickled.records[i];
      if (comes_later(record.storage)) {
        DDP_ASSIGN_OR_RETURN(const at::Tensor values, source->Get(record.storage));
        record.storage = values.storage();
        if (record.storage.nbytes() < record.offset + record.size) {
          return absl::InternalError(absl::StrCat("record ", i, " has fewer values than its size"));
        }
      }
      const at::Tensor data = OnCpu(record);
      DDP_RETURN_IF_ERROR(
          zip.Add(absl::StrCat("archive/data/", i), data.const_data_ptr(), record.size));
    }
    DDP_RETURN_IF_ERROR(add("/version", "3\n"));
    DDP_RETURN_IF_ERROR(zip.Finish());
    return file.Finish();
  }

  absl::StatusOr<Archive> Open(const std::string& path) const {
    absl::StatusOr<ZipReader> zip = ZipReader::Open(path);
    if (absl::IsFailedPrecondition(zip.status())) {
      return absl::DataLossError(zip.status().message());  // a folder, a device
    }
    if (!zip.ok()) return zip.status();
    if (!zip->has_checksums() && !options_.accept_unverified) {
      return absl::FailedPreconditionError(absl::StrCat(
          path,
          " has no checksums (torch.serialization.set_crc32_options(False)), so that damage "
          "could not be found; a run's own folder takes none of these"));
    }
    return Archive(*std::move(zip));
  }

  // Prefixes the path, unless the message contains it.
  static absl::Status Named(const std::string& path, const absl::Status& status) {
    if (status.ok() || absl::StrContains(status.message(), path)) return status;
    return absl::Status(status.code(), absl::StrCat(path, " ", status.message()));
  }

  FormatOptions options_;
};

std::unique_ptr<Format> Create(const FormatOptions& options) {
  return std::make_unique<PtFormat>(options);
}

const Registration<FormatRegistry> kPt("pt", FormatEntry{.create = &Create});

}  // namespace
}  // namespace ddp::checkpoint::pt
