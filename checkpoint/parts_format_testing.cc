#include "checkpoint/parts_format_testing.h"

#include <ATen/Functions.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <filesystem>
#include <memory>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status.h"
#include "checkpoint/format.h"
#include "checkpoint/parts.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint {
namespace {

std::string FileOf(const std::string& path, int64_t rank) {
  return absl::StrCat(path, "/rank_", rank, ".pt");
}

// A file's "root" is the rank's tree. "shards" has by path the begin of its range and the shape of
// the whole.
class PartsFormat : public Format {
 public:
  explicit PartsFormat(const FormatOptions& options)
      : rank_(options.ranks == nullptr ? 0 : options.ranks->rank()),
        size_(options.ranks == nullptr ? 1 : options.ranks->size()),
        pt_(CreateFormat("pt", {.files = options.files}).value()) {}

  absl::string_view name() const override { return "parts"; }
  absl::string_view suffix() const override { return ".parts"; }
  bool all_ranks_write() const override { return true; }

  absl::Status Write(const State& state, const std::string& path, TensorSource*) override {
    c10::impl::GenericDict root = state.root.copy();
    c10::impl::GenericDict shards = NewTree();
    for (const auto& [name, tensor] : state.sharded) {
      if (tensor.parts.size() != 1) return absl::InvalidArgumentError("one part per rank only");
      const auto* range = std::get_if<FlatRange>(&tensor.parts[0].part);
      if (range == nullptr) return absl::InvalidArgumentError("ranges of elements only");
      root.insert(name, tensor.parts[0].tensor);
      shards.insert(name, c10::ivalue::Tuple::create(
                              {c10::IValue(range->begin), c10::IValue(tensor.global_shape)}));
    }
    State file;
    file.root.insert("root", root);
    file.root.insert("shards", shards);
    file.root.insert("size", int64_t{size_});
    return pt_->Write(file, FileOf(path, rank_));
  }

  absl::StatusOr<State> Read(const std::string& path, const ReadRequest& request) override {
    if (BeforeReadOfThisThread()) DDP_RETURN_IF_ERROR(BeforeReadOfThisThread()(path));
    if (!request.parts.empty()) return absl::UnimplementedError("parts of parts");
    DDP_ASSIGN_OR_RETURN(const int64_t size, SizeOf(path));
    State state;
    for (int64_t rank = 0; rank < size; ++rank) {
      const absl::StatusOr<State> read = pt_->Read(FileOf(path, rank));
      DDP_RETURN_IF_ERROR(OfFile(read.status(), path));
      const State& file = *read;
      const c10::impl::GenericDict shards = file.root.at("shards").toGenericDict();
      for (const auto& entry : file.root.at("root").toGenericDict()) {
        if (!shards.contains(entry.key())) {
          state.root.insert(entry.key(), entry.value());
          continue;
        }
        const at::Tensor part = entry.value().toTensor();
        const auto place = shards.at(entry.key()).toTupleRef().elements().vec();
        if (!state.root.contains(entry.key())) {
          std::vector<int64_t> shape;
          for (const c10::IValue& size : place[1].toListRef()) shape.push_back(size.toInt());
          state.root.insert(entry.key(), at::zeros(shape, part.options()));
        }
        const at::Tensor whole = state.root.at(entry.key()).toTensor();
        whole.view({-1}).narrow(0, place[0].toInt(), part.numel()).copy_(part);
      }
    }
    return state;
  }

  absl::Status CheckComplete(const std::string& path) override {
    DDP_ASSIGN_OR_RETURN(const int64_t size, SizeOf(path));
    for (int64_t rank = 0; rank < size; ++rank) {
      DDP_RETURN_IF_ERROR(OfFile(pt_->CheckComplete(FileOf(path, rank)), path));
    }
    return absl::OkStatus();
  }

 private:
  // Ranks that wrote.
  absl::StatusOr<int64_t> SizeOf(const std::string& path) {
    const absl::StatusOr<State> first = pt_->Read(FileOf(path, 0), {.parts = {{"size", Whole{}}}});
    DDP_RETURN_IF_ERROR(OfFile(first.status(), path));
    return first->root.at("size").toInt();
  }

  // A folder that lacks a file is damaged; only without a folder there is no checkpoint.
  static absl::Status OfFile(const absl::Status& status, const std::string& path) {
    if (!absl::IsNotFound(status) || !std::filesystem::exists(path)) return status;
    return absl::DataLossError(status.message());
  }

  int rank_;
  int size_;
  std::unique_ptr<Format> pt_;
};

std::unique_ptr<Format> Create(const FormatOptions& options) {
  return std::make_unique<PartsFormat>(options);
}

const Registration<FormatRegistry> kParts("parts", FormatEntry{.create = &Create});

}  // namespace

std::function<absl::Status(const std::string& path)>& BeforeReadOfThisThread() {
  thread_local std::function<absl::Status(const std::string& path)> before_read;
  return before_read;
}

}  // namespace ddp::checkpoint
