#include "tools/ckpt_commands.h"

#include <ATen/Functions.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <fnmatch.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/json_number.h"
#include "base/option_error.h"
#include "base/option_list.h"
#include "base/status.h"
#include "checkpoint/consolidate.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/format.h"
#include "checkpoint/name.h"
#include "checkpoint/parts.h"
#include "checkpoint/state.h"

namespace ddp::tools::ckpt {
namespace {

using checkpoint::CreateFormat;
using checkpoint::Format;
using checkpoint::FormatOptions;
using checkpoint::FormatRegistry;
using checkpoint::State;
using nlohmann::ordered_json;

constexpr absl::string_view kDamagedSuffix = ".damaged";

std::vector<std::unique_ptr<Format>> Formats(const FormatOptions& options = {}) {
  std::vector<std::unique_ptr<Format>> formats;
  for (const std::string& name : FormatRegistry::Names()) {
    absl::StatusOr<std::unique_ptr<Format>> format = CreateFormat(name, options);
    if (format.ok()) formats.push_back(*std::move(format));
  }
  return formats;
}

bool IsFolder(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored);
}

absl::Status CheckExists(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0 ? absl::OkStatus() : FileError(errno, "opening", path);
}

// The format of the checkpoint at `path`: that of its suffix, else the first that can open it.
// Null: it is no checkpoint.
std::unique_ptr<Format> FormatOf(const std::string& path, const FormatOptions& options = {}) {
  std::vector<std::unique_ptr<Format>> formats = Formats(options);
  for (std::unique_ptr<Format>& format : formats) {
    if (absl::EndsWith(path, format->suffix())) return std::move(format);
  }
  // One that cannot be read is then still named for what it is.
  for (const auto& [name, entry] : FormatRegistry::All()) {
    if (entry.recognises != nullptr && entry.recognises(path)) return entry.create(options);
  }
  for (std::unique_ptr<Format>& format : formats) {
    const absl::Status complete = format->CheckComplete(path);
    // FailedPrecondition: not accepted, but of this format.
    if (complete.ok() || absl::IsFailedPrecondition(complete)) return std::move(format);
  }
  return nullptr;
}

absl::Status NoCheckpoint(const std::string& path) {
  return absl::NotFoundError(
      absl::StrCat(path, IsFolder(path) ? " is a folder without checkpoints" : " is no checkpoint",
                   "; formats: ", absl::StrJoin(FormatRegistry::Names(), ", ")));
}

absl::StatusOr<State> Load(const std::string& path) {
  DDP_RETURN_IF_ERROR(CheckExists(path));
  const std::unique_ptr<Format> format = FormatOf(path);
  if (format == nullptr) return NoCheckpoint(path);
  return format->Read(path);
}

uint64_t BytesAt(const std::string& path) {
  std::error_code ignored;
  if (!IsFolder(path)) {
    const auto size = std::filesystem::file_size(path, ignored);
    return ignored ? 0 : size;
  }
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path, ignored)) {
    if (entry.is_regular_file(ignored)) bytes += entry.file_size(ignored);
  }
  return bytes;
}

std::string SizeText(uint64_t bytes) {
  const auto number = static_cast<double>(bytes);
  if (number >= 1e9) return absl::StrFormat("%.2f GB", number / 1e9);
  if (number >= 1e6) return absl::StrFormat("%.2f MB", number / 1e6);
  if (number >= 1e3) return absl::StrFormat("%.2f kB", number / 1e3);
  return absl::StrCat(bytes, " B");
}

// Seconds since 1970 of the last change; nullopt if unknown.
std::optional<int64_t> ChangedAt(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return std::nullopt;
  return info.st_mtim.tv_sec;
}

std::string TimeText(std::optional<int64_t> seconds) {
  if (!seconds.has_value()) return "-";
  return absl::FormatTime("%Y-%m-%d %H:%M:%S", absl::FromUnixSeconds(*seconds),
                          absl::LocalTimeZone());
}

// "ok", "unverified", "damaged" or "unreadable".
absl::string_view StateOf(const absl::Status& status) {
  if (status.ok()) return "ok";
  if (absl::IsFailedPrecondition(status)) return "unverified";
  return absl::IsDataLoss(status) ? "damaged" : "unreadable";
}

// Paths of the checkpoints in a folder: those with a run's names, oldest first, then the others.
absl::StatusOr<std::vector<std::string>> CheckpointsIn(const std::string& folder) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> files, ListDirectory(folder));
  std::vector<std::string> suffixes;
  for (const auto& format : Formats()) suffixes.emplace_back(format->suffix());
  std::vector<checkpoint::NamedFile> named;
  std::vector<std::string> others;
  for (const std::string& file : files) {
    if (absl::StartsWith(file, ".")) continue;
    const std::string clean(absl::StripSuffix(file, kDamagedSuffix));
    if (auto parsed = checkpoint::ParseFileName(clean, suffixes)) {
      parsed->file = file;
      named.push_back(*std::move(parsed));
    } else if (std::any_of(suffixes.begin(), suffixes.end(), [&](const std::string& suffix) {
                 return absl::EndsWith(clean, suffix);
               })) {
      others.push_back(file);
    }
  }
  std::stable_sort(named.begin(), named.end(),
                   [](const auto& a, const auto& b) { return a.name < b.name; });
  std::vector<std::string> paths;
  for (const auto& file : named) paths.push_back(absl::StrCat(folder, "/", file.file));
  for (const auto& file : others) paths.push_back(absl::StrCat(folder, "/", file));
  return paths;
}

// Whether `path` is one checkpoint. Otherwise it is a folder that may have some.
bool IsCheckpoint(const std::string& path) {
  if (!IsFolder(path)) return true;
  return FormatOf(path) != nullptr;
}

// A table with columns as wide as their widest cell; the last column is not padded.
std::string Table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      text += row[i];
      if (i + 1 < row.size()) text.append(widths[i] - row[i].size() + 2, ' ');
    }
    text += "\n";
  }
  return text;
}

std::string KeyName(const c10::IValue& key) {
  if (key.isString()) return key.toStringRef();
  if (key.isInt()) return absl::StrCat(key.toInt());
  if (key.isBool()) return key.toBool() ? "True" : "False";
  return key.isDouble() ? absl::StrCat(key.toDouble()) : key.tagKind();
}

std::string Join(const std::string& path, absl::string_view name) {
  return path.empty() ? std::string(name) : absl::StrCat(path, "/", name);
}

std::vector<c10::IValue> ItemsOf(const c10::IValue& value) {
  return value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec();
}

// Calls `visit` for each tensor, with its path.
void VisitTensors(const c10::IValue& value, const std::string& path,
                  const std::function<void(const std::string&, const at::Tensor&)>& visit) {
  if (value.isTensor()) {
    visit(path, value.toTensor());
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      VisitTensors(entry.value(), Join(path, KeyName(entry.key())), visit);
    }
  } else if (value.isTuple() || value.isList()) {
    size_t index = 0;
    for (const c10::IValue& item : ItemsOf(value)) {
      VisitTensors(item, Join(path, absl::StrCat(index++)), visit);
    }
  }
}

// Moves what belongs to single ranks to where a checkpoint that one rank writes has it: by key, a
// list over ranks (consolidate.h).
void MoveRanksIntoRoot(State& state) {
  if (state.per_rank.empty()) return;
  c10::impl::GenericDict by_key = checkpoint::NewTree();
  for (const auto& [first, entries] : state.per_rank) {
    for (const auto& entry : entries) {
      if (by_key.contains(entry.key())) continue;
      c10::impl::GenericList values(c10::AnyType::get());
      for (const auto& [rank, of_rank] : state.per_rank) {
        values.push_back(of_rank.contains(entry.key()) ? of_rank.at(entry.key()) : c10::IValue());
      }
      by_key.insert(entry.key(), values);
    }
  }
  state.root.insert_or_assign(checkpoint::kPerRankEntries, by_key);
  state.per_rank.clear();
}

std::string DtypeText(const at::Tensor& tensor) {
  const std::string name = checkpoint::DtypeName(tensor.scalar_type());
  return name.empty() ? c10::toString(tensor.scalar_type()) : name;
}

std::string ShapeOf(const at::Tensor& tensor) {
  const c10::IntArrayRef sizes = tensor.sizes();
  return checkpoint::ShapeText({sizes.data(), sizes.size()});
}

absl::StatusOr<Report> ListTensors(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(State state, Load(path));
  MoveRanksIntoRoot(state);
  Report report;
  report.json["path"] = path;
  report.json["tensors"] = ordered_json::array();
  std::vector<std::vector<std::string>> rows = {{"NAME", "DTYPE", "SHAPE", "BYTES"}};
  int64_t bytes = 0;
  VisitTensors(state.root, "", [&](const std::string& name, const at::Tensor& tensor) {
    const auto size = static_cast<int64_t>(tensor.nbytes());
    rows.push_back({name, DtypeText(tensor), ShapeOf(tensor), absl::StrCat(size)});
    ordered_json row;
    row["name"] = name;
    row["dtype"] = DtypeText(tensor);
    row["shape"] = tensor.sizes().vec();
    row["bytes"] = size;
    report.json["tensors"].push_back(std::move(row));
    bytes += size;
  });
  report.json["bytes"] = bytes;
  report.text = absl::StrCat(Table(rows), rows.size() - 1, " tensors, ",
                             SizeText(static_cast<uint64_t>(bytes)), "\n");
  return report;
}

// The integer `key` at the top of a checkpoint; nullopt if it has none.
std::optional<int64_t> IntegerOf(Format& format, const std::string& path, const char* key) {
  checkpoint::ReadRequest request;
  request.parts[key].optional = true;
  request.per_rank = checkpoint::PerRank::kNone;
  const absl::StatusOr<State> state = format.Read(path, request);
  if (!state.ok() || !state->root.contains(key) || !state->root.at(key).isInt()) {
    return std::nullopt;
  }
  return state->root.at(key).toInt();
}

// Without the sign that some machines give NaN.
std::string NumberText(double number) {
  return std::isnan(number) ? "nan" : absl::StrFormat("%.6g", number);
}

// Of two differing values: what, and the largest difference where both are tensors.
struct Difference {
  std::string path;
  std::string what;
  std::optional<double> max_abs;
};

class Comparison {
 public:
  void Compare(const c10::IValue& a, const c10::IValue& b, const std::string& path) {
    if (a.isGenericDict() && b.isGenericDict()) return CompareDicts(a, b, path);
    if ((a.isList() && b.isList()) || (a.isTuple() && b.isTuple())) {
      const std::vector<c10::IValue> x = ItemsOf(a), y = ItemsOf(b);
      if (x.size() != y.size()) {
        return Add({path, absl::StrCat(x.size(), " and ", y.size(), " items"), {}});
      }
      for (size_t i = 0; i < x.size(); ++i) Compare(x[i], y[i], Join(path, absl::StrCat(i)));
      return;
    }
    if (a.isTensor() && b.isTensor()) return CompareTensors(a.toTensor(), b.toTensor(), path);
    if (a.tagKind() != b.tagKind()) {
      return Add({path, absl::StrCat(a.tagKind(), " and ", b.tagKind()), {}});
    }
    const bool both_nan = a.isDouble() && std::isnan(a.toDouble()) && std::isnan(b.toDouble());
    if (a == b || both_nan) return;
    Add({path, absl::StrCat(ValueText(a), " and ", ValueText(b)), {}});
  }

  const std::optional<Difference>& first() const { return first_; }
  size_t count() const { return count_; }
  std::optional<double> max_abs() const { return max_abs_; }
  const std::string& largest() const { return largest_; }

 private:
  void Add(Difference difference) {
    ++count_;
    const std::optional<double> found = difference.max_abs;
    // NaN counts as the largest.
    if (found.has_value() && (!max_abs_.has_value() || std::isnan(*found) || *found > *max_abs_) &&
        !(max_abs_.has_value() && std::isnan(*max_abs_))) {
      max_abs_ = found;
      largest_ = difference.path;
    }
    if (!first_.has_value()) first_ = std::move(difference);
  }

  static std::string ValueText(const c10::IValue& value) {
    if (value.isInt()) return absl::StrCat(value.toInt());
    if (value.isDouble()) return absl::StrFormat("%.17g", value.toDouble());
    if (value.isBool()) return value.toBool() ? "True" : "False";
    if (value.isString()) {
      const std::string& text = value.toStringRef();
      return absl::StrCat("'", text.substr(0, 60), text.size() > 60 ? "…'" : "'");
    }
    return value.tagKind();
  }

  void CompareDicts(const c10::IValue& a, const c10::IValue& b, const std::string& path) {
    const c10::impl::GenericDict x = a.toGenericDict(), y = b.toGenericDict();
    for (const auto& entry : x) {
      const std::string below = Join(path, KeyName(entry.key()));
      const auto other = y.find(entry.key());
      if (other == y.end()) {
        Add({below, "only in the first", {}});
      } else {
        Compare(entry.value(), other->value(), below);
      }
    }
    for (const auto& entry : y) {
      if (!x.contains(entry.key())) {
        Add({Join(path, KeyName(entry.key())), "only in the second", {}});
      }
    }
  }

  void CompareTensors(const at::Tensor& a, const at::Tensor& b, const std::string& path) {
    if (a.scalar_type() != b.scalar_type()) {
      return Add({path, absl::StrCat("dtypes ", DtypeText(a), " and ", DtypeText(b)), {}});
    }
    if (a.sizes() != b.sizes()) {
      return Add({path, absl::StrCat("shapes ", ShapeOf(a), " and ", ShapeOf(b)), {}});
    }
    if (a.layout() != at::kStrided || b.layout() != at::kStrided) {
      if (!at::equal(a.to_dense(), b.to_dense())) Add({path, "values", {}});
      return;
    }
    const at::Tensor x = a.resolve_conj().resolve_neg().contiguous();
    const at::Tensor y = b.resolve_conj().resolve_neg().contiguous();
    if (x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0) {
      return;
    }
    const at::Tensor x_bytes = x.view(-1).view(at::kByte).view({x.numel(), -1});
    const at::Tensor y_bytes = y.view(-1).view(at::kByte).view({y.numel(), -1});
    const int64_t differ = at::ne(x_bytes, y_bytes).any(1).sum().item<int64_t>();
    std::string what = absl::StrCat(differ, " of ", x.numel(), " elements differ");
    std::optional<double> largest;
    try {
      const auto wide = c10::isComplexType(x.scalar_type()) ? at::kComplexDouble : at::kDouble;
      largest = (x.to(wide) - y.to(wide)).abs().max().item<double>();
      absl::StrAppend(&what, ", by at most ", NumberText(*largest));
    } catch (const std::exception&) {
      // A type without arithmetic: the number of elements is all that can be said.
    }
    Add({path, std::move(what), largest});
  }

  std::optional<Difference> first_;
  size_t count_ = 0;
  std::optional<double> max_abs_;
  std::string largest_;
};

// The parts of `value` at paths that match; nullopt if there are none.
std::optional<c10::IValue> Matching(const c10::IValue& value, const std::string& path,
                                    const std::string& pattern) {
  if (!path.empty() && ::fnmatch(pattern.c_str(), path.c_str(), 0) == 0) return value;
  if (!value.isGenericDict()) return std::nullopt;
  c10::impl::GenericDict kept(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& entry : value.toGenericDict()) {
    if (auto below = Matching(entry.value(), Join(path, KeyName(entry.key())), pattern)) {
      kept.insert(entry.key(), *below);
    }
  }
  if (kept.empty()) return std::nullopt;
  return c10::IValue(kept);
}

// `value` with its floating-point tensors in `dtype`. Tensors that were one stay one.
class Caster {
 public:
  explicit Caster(at::ScalarType dtype) : dtype_(dtype) {}

  c10::IValue Cast(const c10::IValue& value) {
    if (value.isTensor()) {
      const at::Tensor tensor = value.toTensor();
      if (!tensor.is_floating_point() || tensor.layout() != at::kStrided) return value;
      at::Tensor& cast = cast_[tensor.unsafeGetTensorImpl()];
      if (!cast.defined()) cast = tensor.to(dtype_);
      return cast;
    }
    if (value.isGenericDict()) {
      c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
      for (const auto& entry : value.toGenericDict()) dict.insert(entry.key(), Cast(entry.value()));
      return dict;
    }
    if (value.isTuple()) {
      std::vector<c10::IValue> items;
      for (const c10::IValue& item : ItemsOf(value)) items.push_back(Cast(item));
      return c10::ivalue::Tuple::create(std::move(items));
    }
    if (value.isList()) {
      c10::impl::GenericList list(c10::AnyType::get());
      for (const c10::IValue& item : ItemsOf(value)) list.push_back(Cast(item));
      return list;
    }
    return value;
  }

 private:
  at::ScalarType dtype_;
  std::map<const c10::TensorImpl*, at::Tensor> cast_;
};

absl::StatusOr<std::unique_ptr<Format>> FormatToWrite(const ConvertOptions& options) {
  if (!options.format.empty()) {
    absl::StatusOr<std::unique_ptr<Format>> format = CreateFormat(options.format);
    if (format.ok()) return format;
    return OptionError("to", options.format,
                       absl::StrCat("is none of ", absl::StrJoin(FormatRegistry::Names(), ", "),
                                    DidYouMean(options.format, FormatRegistry::Names())),
                       absl::StatusCode::kNotFound);
  }
  for (std::unique_ptr<Format>& format : Formats()) {
    if (absl::EndsWith(options.to, format->suffix())) return std::move(format);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(options.to, " has no format's suffix: say which of ",
                   absl::StrJoin(FormatRegistry::Names(), ", "), " it is to have"));
}

}  // namespace

absl::StatusOr<Report> List(const std::string& path) {
  DDP_RETURN_IF_ERROR(CheckExists(path));
  if (IsCheckpoint(path)) return ListTensors(path);
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> paths, CheckpointsIn(path));
  if (paths.empty()) return NoCheckpoint(path);
  Report report;
  report.json["path"] = path;
  report.json["checkpoints"] = ordered_json::array();
  std::vector<std::vector<std::string>> rows = {
      {"NAME", "EPOCH", "STEP", "TIME", "SIZE", "FORMAT", "STATE"}};
  for (const std::string& file : paths) {
    const bool marked = absl::EndsWith(file, kDamagedSuffix);
    const std::string name = file.substr(path.size() + 1);
    const std::unique_ptr<Format> format = FormatOf(
        std::string(absl::StripSuffix(file, kDamagedSuffix)), {.accept_unverified = false});
    const absl::Status complete =
        marked ? absl::DataLossError("renamed by a run that found it damaged")
               : format->CheckComplete(file);
    // What is found by names and sizes; Verify reads the rest.
    const absl::string_view state = complete.ok() ? "complete" : StateOf(complete);
    std::optional<int64_t> epoch, step;
    if (complete.ok()) {
      epoch = IntegerOf(*format, file, "epoch");
      step = IntegerOf(*format, file, "step");
    }
    const uint64_t bytes = BytesAt(file);
    const std::optional<int64_t> time = ChangedAt(file);
    const auto text = [](std::optional<int64_t> number) {
      return number.has_value() ? absl::StrCat(*number) : std::string("-");
    };
    rows.push_back({name, text(epoch), text(step), TimeText(time), SizeText(bytes),
                    std::string(format->name()), std::string(state)});
    ordered_json row;
    row["name"] = name;
    row["path"] = file;
    row["epoch"] = epoch.has_value() ? ordered_json(*epoch) : ordered_json();
    row["step"] = step.has_value() ? ordered_json(*step) : ordered_json();
    row["time"] = time.has_value() ? ordered_json(*time) : ordered_json();
    row["bytes"] = bytes;
    row["format"] = format->name();
    row["state"] = state;
    if (!complete.ok()) row["reason"] = complete.message();
    report.json["checkpoints"].push_back(std::move(row));
  }
  report.text = Table(rows);
  return report;
}

absl::StatusOr<Report> Verify(const std::string& path) {
  DDP_RETURN_IF_ERROR(CheckExists(path));
  std::vector<std::string> paths = {path};
  if (!IsCheckpoint(path)) {
    DDP_ASSIGN_OR_RETURN(paths, CheckpointsIn(path));
    if (paths.empty()) return NoCheckpoint(path);
  }
  Report report;
  report.json["path"] = path;
  report.json["checkpoints"] = ordered_json::array();
  for (const std::string& file : paths) {
    const std::string named(absl::StripSuffix(file, kDamagedSuffix));
    const std::unique_ptr<Format> strict = FormatOf(named, {.accept_unverified = false});
    if (strict == nullptr) return NoCheckpoint(file);
    absl::Status status = strict->Read(file).status();
    std::string reason(status.message());
    if (absl::IsFailedPrecondition(status)) {
      const absl::Status lenient = CreateFormat(strict->name()).value()->Read(file).status();
      if (!lenient.ok()) {
        status =
            lenient.code() == status.code() ? absl::UnimplementedError(lenient.message()) : lenient;
        reason = std::string(status.message());
      }
    }
    const absl::string_view state = StateOf(status);
    if (state == "damaged" || state == "unreadable") report.exit_code = 1;
    absl::StrAppend(&report.text, file, ": ", state, reason.empty() ? "" : ": ", reason, "\n");
    ordered_json row;
    row["path"] = file;
    row["format"] = strict->name();
    row["state"] = state;
    if (!reason.empty()) row["reason"] = reason;
    report.json["checkpoints"].push_back(std::move(row));
  }
  return report;
}

absl::StatusOr<Report> Diff(const std::string& a, const std::string& b) {
  DDP_ASSIGN_OR_RETURN(State first, Load(a));
  DDP_ASSIGN_OR_RETURN(State second, Load(b));
  MoveRanksIntoRoot(first);
  MoveRanksIntoRoot(second);
  Comparison comparison;
  comparison.Compare(first.root, second.root, "");
  Report report;
  report.json["equal"] = !comparison.first().has_value();
  if (!comparison.first().has_value()) {
    report.text = "equal\n";
    return report;
  }
  report.exit_code = 1;
  const Difference& difference = *comparison.first();
  report.json["differences"] = comparison.count();
  report.json["first"]["path"] = difference.path;
  report.json["first"]["what"] = difference.what;
  report.text = absl::StrCat(difference.path, ": ", difference.what, "\n");
  if (comparison.max_abs().has_value()) {
    report.json["max_abs"] = ToJson(*comparison.max_abs());
    report.json["max_abs_path"] = comparison.largest();
  }
  absl::StrAppend(&report.text, comparison.count(),
                  comparison.count() == 1 ? " value differs" : " values differ");
  if (comparison.max_abs().has_value()) {
    absl::StrAppend(&report.text, ", tensors by at most ", NumberText(*comparison.max_abs()), " (",
                    comparison.largest(), ")");
  }
  report.text += "\n";
  return report;
}

absl::StatusOr<Report> Convert(const ConvertOptions& options) {
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Format> format, FormatToWrite(options));
  at::ScalarType dtype = at::ScalarType::Undefined;
  if (!options.dtype.empty()) {
    dtype = checkpoint::DtypeOfName(options.dtype);
    if (dtype == at::ScalarType::Undefined || !c10::isFloatingType(dtype)) {
      return OptionError("dtype", options.dtype,
                         "is no floating-point type, such as float32, bfloat16 or float16");
    }
  }
  if (CheckExists(options.to).ok()) {
    return absl::AlreadyExistsError(absl::StrCat(options.to, " exists; remove it first"));
  }
  DDP_ASSIGN_OR_RETURN(State state, Load(options.from));
  MoveRanksIntoRoot(state);
  if (!options.only.empty()) {
    const std::optional<c10::IValue> kept = Matching(state.root, "", options.only);
    if (!kept.has_value()) {
      return OptionError(
          "only", options.only,
          absl::StrCat("matches no path in ", options.from, "; paths look like model/fc.weight"));
    }
    state.root = kept->toGenericDict();
  }
  if (dtype != at::ScalarType::Undefined) {
    state.root = Caster(dtype).Cast(state.root).toGenericDict();
  }
  DDP_RETURN_IF_ERROR(ReplaceAtomically(options.to, [&](const std::string& temporary) {
    return CatchStatus(absl::StrCat("writing ", options.to), [&]() -> absl::Status {
      if (format->name() == "dcp") return checkpoint::dcp::WriteCheckpoint(state, temporary);
      if (format->all_ranks_write()) DDP_RETURN_IF_ERROR(MakeDirectories(temporary));
      DDP_RETURN_IF_ERROR(format->Write(state, temporary));
      return IsFolder(temporary) ? SyncDirectory(temporary) : absl::OkStatus();
    });
  }));
  size_t tensors = 0;
  VisitTensors(state.root, "", [&](const std::string&, const at::Tensor&) { ++tensors; });
  Report report;
  report.json["path"] = options.to;
  report.json["format"] = format->name();
  report.json["tensors"] = tensors;
  report.json["bytes"] = BytesAt(options.to);
  report.text = absl::StrCat("wrote ", options.to, ": ", tensors, " tensors, ",
                             SizeText(BytesAt(options.to)), "\n");
  return report;
}

}  // namespace ddp::tools::ckpt
