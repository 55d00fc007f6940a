#include "tools/datasets/tensors.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "base/file.h"
#include "base/mapped_file.h"
#include "base/option_error.h"
#include "base/status.h"
#include "checkpoint/safetensors/header.h"
#include "checkpoint/safetensors/torch_dtype.h"
#include "ddp/data/contents_digest.h"

namespace ddp::tools::datasets {
namespace {

namespace format = checkpoint::safetensors;

// The file has something else than classes.
constexpr int64_t kMostClasses = int64_t{1} << 30;

const Registration<DatasetRegistry> kTensors("tensors", DatasetEntry{.load = &LoadTensors});

// One tensor of a file, row by row.
struct Rows {
  std::vector<int64_t> shape;  // of a row
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  int64_t count = 0;
  int64_t row_bytes = 0;
  const uint8_t* bytes = nullptr;  // in the mapped file

  bool SameForm(const Rows& other) const { return shape == other.shape && dtype == other.dtype; }
  std::string Describe() const {
    return absl::StrCat(c10::toString(dtype), " [n", shape.empty() ? "" : ", ",
                        absl::StrJoin(shape, ", "), "]");
  }
};

struct File {
  std::shared_ptr<const MappedFile> mapped;
  Rows input, target;
  int64_t end = 0;  // of its examples in the split
};

absl::StatusOr<Rows> FindRows(const format::Header& header, const MappedFile& file,
                              const std::string& name) {
  for (const format::TensorEntry& entry : header.tensors) {
    if (entry.name != name) continue;
    const std::optional<c10::ScalarType> dtype = format::ScalarTypeOf(entry.dtype);
    if (!dtype || entry.shape.empty() || entry.shape[0] == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          file.path(), ": the tensor '", name, "' is ", format::DtypeName(entry.dtype), " [",
          absl::StrJoin(entry.shape, ", "), "], which has no examples that can be read"));
    }
    return Rows{.shape = {entry.shape.begin() + 1, entry.shape.end()},
                .dtype = *dtype,
                .count = entry.shape[0],
                .row_bytes = static_cast<int64_t>(entry.size()) / entry.shape[0],
                .bytes = file.bytes().data() + header.data_begin + entry.begin};
  }
  std::vector<absl::string_view> names;
  for (const format::TensorEntry& entry : header.tensors) names.push_back(entry.name);
  return absl::InvalidArgumentError(absl::StrCat(file.path(), ": there is no tensor '", name,
                                                 "'; each file of a split has "
                                                 "input [n, …] and target [n], but this one has: ",
                                                 absl::StrJoin(names, ", ")));
}

absl::StatusOr<File> OpenFile(const std::string& path) {
  File file;
  DDP_ASSIGN_OR_RETURN(const FileReader reader, FileReader::Open(path));
  absl::StatusOr<format::Header> header = format::ReadHeader(reader);
  if (!header.ok()) {
    return absl::StrContains(header.status().message(), path) ? header.status()
                                                              : Annotate(header.status(), path);
  }
  DDP_ASSIGN_OR_RETURN(file.mapped, MappedFile::Open(path));
  if (file.mapped->bytes().size() < reader.size()) {
    return absl::DataLossError(absl::StrCat(path, ": has been cut short while it was opened"));
  }
  DDP_ASSIGN_OR_RETURN(file.input, FindRows(*header, *file.mapped, "input"));
  DDP_ASSIGN_OR_RETURN(file.target, FindRows(*header, *file.mapped, "target"));
  const bool is_input = c10::isFloatingType(file.input.dtype) || file.input.dtype == at::kByte;
  if (!is_input || file.input.shape.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": the tensor 'input' is ", file.input.Describe(),
                     "; it must be of floats or bytes, with more than one dimension"));
  }
  if (!c10::isIntegralType(file.target.dtype, /*includeBool=*/false) ||
      !file.target.shape.empty() || file.target.count != file.input.count) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": the tensor 'target' is ", file.target.Describe(), " with n = ", file.target.count,
        "; it must be of integers [n], n = ", file.input.count, " as that of 'input'"));
  }
  return file;
}

// Rows of one dtype, copied: the file's may not be aligned.
at::Tensor Gather(const std::vector<std::pair<const Rows*, int64_t>>& rows) {
  const Rows& first = *rows[0].first;
  std::vector<int64_t> sizes = {static_cast<int64_t>(rows.size())};
  sizes.insert(sizes.end(), first.shape.begin(), first.shape.end());
  at::Tensor made = at::empty(sizes, first.dtype);
  auto* to = static_cast<uint8_t*>(made.mutable_data_ptr());
  for (const auto& [of, row] : rows) {
    std::memcpy(to, of->bytes + row * of->row_bytes, of->row_bytes);
    to += of->row_bytes;
  }
  return made;
}

class TensorExamples : public data::Dataset {
 public:
  TensorExamples(std::vector<File> files, int64_t size) : files_(std::move(files)), size_(size) {}

  int64_t size() const override { return size_; }

  data::Batch Get(absl::Span<const int64_t> indices) const override {
    std::vector<std::pair<const Rows*, int64_t>> inputs, targets;
    for (const int64_t index : indices) {
      const auto file =
          std::upper_bound(files_.begin(), files_.end(), index,
                           [](int64_t value, const File& each) { return value < each.end; });
      const int64_t row = index - (file->end - file->input.count);
      inputs.emplace_back(&file->input, row);
      targets.emplace_back(&file->target, row);
    }
    at::Tensor input = Gather(inputs);
    const bool is_bytes = input.scalar_type() == at::kByte;
    input = input.to(at::kFloat);
    if (is_bytes) input.div_(255);
    return {input, Gather(targets).to(at::kLong)};
  }

  std::string Fingerprint() const override {
    data::ContentsDigest digest;
    const auto files = static_cast<int64_t>(files_.size());
    for (int64_t i = 0; i < files; ++i) {
      for (const Rows* rows : {&files_[i].input, &files_[i].target}) {
        digest.Add(rows->Describe());
        digest.AddSamples(absl::MakeConstSpan(rows->bytes, rows->count * rows->row_bytes),
                          data::ContentsDigest::PlacesOf(i, files));
      }
    }
    return digest.Text();
  }

 private:
  const std::vector<File> files_;
  const int64_t size_;
};

struct Split {
  std::vector<File> files;
  int64_t size = 0;
  int64_t max_target = 0;
};

// `wanted`: examples, 0 for all; of the option `option`.
absl::StatusOr<Split> OpenSplit(const std::string& folder, const std::string& prefix,
                                const std::string& option, int64_t wanted) {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(folder);
  if (!names.ok()) {
    return OptionError("data_dir", folder,
                       absl::StrCat("cannot be read: ", names.status().message()),
                       names.status().code());
  }
  Split split;
  for (const std::string& name : *names) {
    if (!absl::StartsWith(name, prefix) || !absl::EndsWith(name, ".safetensors")) continue;
    DDP_ASSIGN_OR_RETURN(File file, OpenFile(absl::StrCat(folder, "/", name)));
    file.end = split.size += file.input.count;
    std::vector<std::pair<const Rows*, int64_t>> all;
    for (int64_t row = 0; row < file.target.count; ++row) all.emplace_back(&file.target, row);
    const at::Tensor targets = Gather(all).to(at::kLong);
    if (const int64_t least = targets.min().item<int64_t>(); least < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          file.mapped->path(), ": the tensor 'target' has the class ", least, ", below 0"));
    }
    const int64_t most = targets.max().item<int64_t>();
    if (most >= kMostClasses) {
      return OptionError("data_dir", folder,
                         absl::StrCat("has the class ", most, " in the tensor 'target' of ", name,
                                      "; are its values classes, from 0 on?"));
    }
    split.max_target = std::max(split.max_target, most);
    split.files.push_back(std::move(file));
    const Rows& first = split.files[0].input;
    if (const Rows& last = split.files.back().input; !last.SameForm(first)) {
      return absl::InvalidArgumentError(absl::StrCat(
          split.files.back().mapped->path(), ": the tensor 'input' is ", last.Describe(), ", but ",
          first.Describe(), " in ", split.files[0].mapped->path()));
    }
    // Another dtype of targets in another file is of no use to anyone.
    if (!split.files.back().target.SameForm(split.files[0].target)) {
      return absl::InvalidArgumentError(
          absl::StrCat(split.files.back().mapped->path(), ": the tensor 'target' is ",
                       split.files.back().target.Describe(), ", but ",
                       split.files[0].target.Describe(), " in ", split.files[0].mapped->path()));
    }
  }
  if (split.files.empty()) {
    return OptionError("data_dir", folder,
                       absl::StrCat("has no file ", prefix,
                                    "*.safetensors; data set tensors reads train*.safetensors and "
                                    "test*.safetensors, with the tensors input and target"),
                       absl::StatusCode::kNotFound);
  }
  DDP_ASSIGN_OR_RETURN(split.size, SizeOfSplit(option, wanted, split.size,
                                               absl::StrCat("the examples of ", folder, "/", prefix,
                                                            "*.safetensors")));
  return split;
}

}  // namespace

absl::StatusOr<Splits> LoadTensors(const DatasetOptions& options) {
  if (options.data_dir.empty()) {
    return OptionError("data_dir", "", "must name the folder of data set tensors");
  }
  DDP_ASSIGN_OR_RETURN(Split test,
                       OpenSplit(options.data_dir, "test", "test_size", options.test_size));
  DDP_ASSIGN_OR_RETURN(Split train,
                       OpenSplit(options.data_dir, "train", "train_size", options.train_size));
  if (!train.files[0].input.SameForm(test.files[0].input)) {
    return absl::InvalidArgumentError(absl::StrCat(
        train.files[0].mapped->path(), ": the tensor 'input' is ", train.files[0].input.Describe(),
        ", but ", test.files[0].input.Describe(), " in ", test.files[0].mapped->path()));
  }
  Splits splits;
  splits.num_classes = std::max(train.max_target, test.max_target) + 1;
  splits.input_shape = train.files[0].input.shape;
  splits.train = std::make_shared<TensorExamples>(std::move(train.files), train.size);
  splits.test = std::make_shared<TensorExamples>(std::move(test.files), test.size);
  return splits;
}

}  // namespace ddp::tools::datasets
