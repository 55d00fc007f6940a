#include "tools/ckpt_commands.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/json_number.h"
#include "base/option_error.h"
#include "base/option_list.h"
#include "base/status.h"
#include "base/stop_signals.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/folder.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "checkpoint/name.h"
#include "checkpoint/state.h"
#include "tools/ckpt_values.h"

namespace ddp::tools::ckpt {
namespace {

using checkpoint::AbandonedOf;
using checkpoint::BytesOnDisk;
using checkpoint::CreateFormat;
using checkpoint::DamagedOf;
using checkpoint::Folder;
using checkpoint::Format;
using checkpoint::FormatOptions;
using checkpoint::FormatRegistry;
using checkpoint::Manager;
using checkpoint::ReadRequest;
using checkpoint::State;
using checkpoint::WithoutSlashes;
using nlohmann::ordered_json;

std::vector<std::unique_ptr<Format>> Formats() {
  std::vector<std::unique_ptr<Format>> formats;
  for (const std::string& name : FormatRegistry::Names()) {
    absl::StatusOr<std::unique_ptr<Format>> format = CreateFormat(name);
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

// Whether a run has renamed it, so that it does not count any more.
bool IsSetAside(const std::string& file) {
  return !DamagedOf(file).empty() || !AbandonedOf(file).empty();
}

// "damaged" or "abandoned".
absl::string_view WhySetAside(const std::string& file) {
  return DamagedOf(file).empty() ? "abandoned" : "damaged";
}

// The name that a checkpoint had before a run renamed it; else its name.
std::string CleanName(const std::string& file) {
  const std::string before = absl::StrCat(DamagedOf(file), AbandonedOf(file));
  return before.empty() ? file : before;
}

// Whether a format tells by the names in it that a folder is one of its checkpoints, whatever its
// own name is.
bool IsRecognised(const std::string& path) {
  const auto& entries = FormatRegistry::All();
  return std::any_of(entries.begin(), entries.end(), [&](const auto& entry) {
    return entry.second.recognises != nullptr && entry.second.recognises(path);
  });
}

bool HasCheckpointsOfARun(const std::string& path) {
  if (!IsFolder(path)) return false;
  const auto names = Manager::FolderAt(path).List();
  return names.ok() && !names->empty();
}

// The format of the checkpoint at `given`: that of its suffix, which one that is set aside has had,
// else the first that can open it. Null: it is no checkpoint.
std::unique_ptr<Format> FormatOf(const std::string& given, const FormatOptions& options = {}) {
  const std::string path = WithoutSlashes(given);
  const std::string clean = CleanName(path);
  std::unique_ptr<Format> by_suffix = checkpoint::FormatBySuffix(clean, options);
  if (by_suffix != nullptr && !HasCheckpointsOfARun(path)) return by_suffix;
  auto format = checkpoint::CreateFormat(checkpoint::FormatByContent(path), options);
  return format.ok() ? *std::move(format) : nullptr;
}

absl::Status NoCheckpoint(const std::string& path) {
  return absl::NotFoundError(
      absl::StrCat(path, IsFolder(path) ? " is a folder without checkpoints" : " is no checkpoint",
                   "; formats: ", absl::StrJoin(FormatRegistry::Names(), ", ")));
}

absl::Status SavesThere(const std::string& directory) {
  return absl::UnavailableError(
      absl::StrCat("a process saves into ", directory,
                   ", or has replaced what was read, so that nothing is renamed there; try again "
                   "when it has ended"));
}

std::string SizeText(uint64_t bytes) {
  const auto number = static_cast<double>(bytes);
  if (number >= 1e9) return absl::StrFormat("%.2f GB", number / 1e9);
  if (number >= 1e6) return absl::StrFormat("%.2f MB", number / 1e6);
  if (number >= 1e3) return absl::StrFormat("%.2f kB", number / 1e3);
  return absl::StrCat(bytes, " B");
}

// Of the save, as its notes say, or of the last change; seconds since 1970, nullopt if unknown.
std::optional<int64_t> TimeOf(const std::string& path,
                              const std::optional<checkpoint::Notes>& notes) {
  if (notes.has_value()) return absl::ToUnixSeconds(notes->time);
  const absl::StatusOr<checkpoint::FileIdentity> identity = checkpoint::IdentityOf(path);
  if (!identity.ok()) return std::nullopt;
  return absl::ToUnixSeconds(identity->changed);
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

// Names of the checkpoints in a folder: those with a run's names, oldest first, then the others,
// with folders without a suffix.
absl::StatusOr<std::vector<std::string>> CheckpointsIn(const std::string& folder) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> files, ListDirectory(folder));
  std::vector<std::string> suffixes;
  for (const auto& format : Formats()) suffixes.emplace_back(format->suffix());
  std::vector<checkpoint::NamedFile> named;
  std::vector<std::string> others;
  for (const std::string& file : files) {
    if (absl::StartsWith(file, ".")) continue;
    const std::string clean = CleanName(file);
    if (auto parsed = checkpoint::ParseFileName(clean, suffixes)) {
      parsed->file = file;
      named.push_back(*std::move(parsed));
    } else if (std::any_of(
                   suffixes.begin(), suffixes.end(),
                   [&](const std::string& suffix) { return absl::EndsWith(clean, suffix); }) ||
               IsRecognised(absl::StrCat(folder, "/", file))) {
      others.push_back(file);
    }
  }
  std::stable_sort(named.begin(), named.end(),
                   [](const auto& a, const auto& b) { return a.name < b.name; });
  std::vector<std::string> names;
  for (const auto& file : named) names.push_back(file.file);
  names.insert(names.end(), others.begin(), others.end());
  return names;
}

absl::StatusOr<State> Load(const std::string& path, const ReadRequest& request = {}) {
  DDP_RETURN_IF_ERROR(CheckExists(path));
  const std::unique_ptr<Format> format = FormatOf(path);
  if (format != nullptr) return format->Read(path, request);
  if (IsFolder(path)) {
    DDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, CheckpointsIn(path));
    if (!names.empty()) {
      return absl::NotFoundError(
          absl::StrCat(path, " is a folder of checkpoints: name one of them, such as ",
                       Manager::FolderAt(WithoutSlashes(path)).PathOf(names.back())));
    }
  }
  return NoCheckpoint(path);
}

// Whether `path` is one checkpoint. Otherwise it is a folder that may have some.
bool IsCheckpoint(const std::string& path) {
  if (!IsFolder(path)) return true;
  return FormatOf(path) != nullptr;
}

// `text` without what would change the terminal or the lines: names may have any bytes.
std::string OneLine(absl::string_view text) {
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    line += byte < 0x20 || byte == 0x7f ? absl::StrFormat("\\x%02x", byte) : std::string(1, c);
  }
  return line;
}

// A table with columns as wide as their widest cell; the last column is not padded.
std::string Table(std::vector<std::vector<std::string>> rows) {
  std::vector<size_t> widths;
  for (auto& row : rows) {
    for (std::string& cell : row) cell = OneLine(cell);
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

absl::StatusOr<CommandOutput> ListTensors(const std::string& path) {
  std::vector<std::string> left_out;
  DDP_ASSIGN_OR_RETURN(State state, Load(path, {.left_out = &left_out, .meta = true}));
  MoveRanksIntoRoot(state);
  CommandOutput output;
  output.json["path"] = path;
  output.json["tensors"] = ordered_json::array();
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
    output.json["tensors"].push_back(std::move(row));
    bytes += size;
  });
  output.json["bytes"] = bytes;
  output.text = absl::StrCat(Table(rows), rows.size() - 1, " tensors, ",
                             SizeText(static_cast<uint64_t>(bytes)), "\n");
  if (!left_out.empty()) output.json["left_out"] = left_out;
  for (const std::string& what : left_out) absl::StrAppend(&output.text, "not read: ", what, "\n");
  return output;
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

// The format `name`; empty: that of the suffix of `path`.
absl::StatusOr<std::unique_ptr<Format>> FormatToWrite(const std::string& name,
                                                      const std::string& path) {
  if (!name.empty()) {
    absl::StatusOr<std::unique_ptr<Format>> format = CreateFormat(name);
    for (const std::unique_ptr<Format>& other : Formats()) {
      // Its suffix would say what it is not, and no command could read it.
      if (!format.ok() || other->name() == name || !absl::EndsWith(path, other->suffix())) continue;
      return OptionError("to", name,
                         absl::StrCat("is not the format of '", path, "', whose suffix is that of ",
                                      other->name(), "; leave one of them out"));
    }
    if (format.ok()) return format;
    return OptionError("to", name,
                       absl::StrCat("is none of ", absl::StrJoin(FormatRegistry::Names(), ", "),
                                    DidYouMean(name, FormatRegistry::Names())),
                       absl::StatusCode::kNotFound);
  }
  std::vector<std::string> suffixes;
  for (std::unique_ptr<Format>& format : Formats()) {
    if (absl::EndsWith(path, format->suffix())) return std::move(format);
    suffixes.emplace_back(format->suffix());
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "'", path, "' does not end in a format's suffix, which are ", absl::StrJoin(suffixes, ", ")));
}

// AlreadyExists: what is there is not replaced.
absl::Status CheckIsNew(const std::string& path) {
  std::error_code error;  // the write says so
  if (!std::filesystem::exists(DirectoryOf(path), error) && !error) {
    return absl::NotFoundError(
        absl::StrCat("there is no folder ", DirectoryOf(path), " in which to write ", path));
  }
  // A link that leads nowhere is there, too: to a disk that is not mounted, for example.
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, error))) {
    return absl::OkStatus();
  }
  return absl::AlreadyExistsError(absl::StrCat(path, " exists; remove it first"));
}

// Those that a killed conversion to `path` has left. Others are not of this program, or in use.
void RemoveTemporariesOf(const std::string& path) {
  const std::string parent = DirectoryOf(path);
  const std::string name = absl::StrCat(".", std::filesystem::path(path).filename().string(), ".");
  const absl::StatusOr<DirectoryLock> alone = DirectoryLock::TryExclusive(parent);
  const absl::StatusOr<std::vector<std::string>> files = ListDirectory(parent);
  if (!alone.ok() || !files.ok()) return;
  std::error_code ignored;  // then it stays
  for (const std::string& file : *files) {
    if (!absl::StartsWith(file, name) || !IsTemporaryName(file)) continue;
    if (file.find('.', name.size()) != std::string::npos) continue;  // of a longer name
    std::filesystem::remove_all(absl::StrCat(parent, "/", file), ignored);
  }
}

// While one exists, SIGINT, SIGTERM and SIGHUP remove what is at this path before they end the
// process: nothing else would remove the temporary of a conversion that was interrupted.
class RemovedIfStopped {
 public:
  explicit RemovedIfStopped(const std::string& path)
      : signals_({SIGINT, SIGTERM}), watcher_([this, path] { Watch(path); }) {}
  ~RemovedIfStopped() {
    done_.Notify();
    watcher_.join();
  }

 private:
  void Watch(const std::string& path) const {
    bool is_done = false;
    while (!is_done) {
      is_done = done_.WaitForNotificationWithTimeout(absl::Milliseconds(20));
      if (signals_.received() != 0) End(path, signals_.received());
    }
  }

  [[noreturn]] static void End(const std::string& path, int signal) {
    // Another thread may be making files in it.
    std::error_code error;
    for (int tries = 0; tries < 100; ++tries) {
      std::filesystem::remove_all(path, error);
      if (!error) break;
    }
    std::signal(signal, SIG_DFL);
    std::raise(signal);
    std::_Exit(128 + signal);  // process 1 of a container
  }

  const StopSignals signals_;
  absl::Notification done_;
  std::thread watcher_;  // last: it uses the others
};

// Writes a checkpoint, atomically, and says so.
absl::StatusOr<CommandOutput> WriteCheckpoint(Format& format, const State& state,
                                              const std::string& path) {
  std::vector<std::string> empty;
  // A run that starts in this folder leaves the temporary alone then. Not every file system has
  // locks, nor every user the right to open the folder.
  const std::string parent = DirectoryOf(path);
  RemoveTemporariesOf(path);
  const absl::StatusOr<DirectoryLock> saving = DirectoryLock::Shared(parent);
  DDP_RETURN_IF_ERROR(ReplaceAtomically(path, [&](const std::string& temporary) {
    const RemovedIfStopped removed_if_stopped(temporary);
    return CatchStatus(absl::StrCat("writing ", path), [&]() -> absl::Status {
      if (format.name() == "dcp") {
        return checkpoint::dcp::WriteCheckpoint(state, temporary, FileSystem::Default(), &empty);
      }
      if (format.all_ranks_write() && ::mkdir(temporary.c_str(), 0777) != 0) {
        return FileError(errno, "making folder", temporary);
      }
      DDP_RETURN_IF_ERROR(format.Write(state, temporary));
      return IsFolder(temporary) ? SyncDirectory(temporary) : absl::OkStatus();
    });
  }));
  size_t tensors = 0;
  VisitTensors(state.root, "", [&](const std::string&, const at::Tensor&) { ++tensors; });
  CommandOutput output;
  output.json["path"] = path;
  output.json["format"] = format.name();
  output.json["tensors"] = tensors;
  output.json["bytes"] = BytesOnDisk(path);
  output.text =
      absl::StrCat("wrote ", path, ": ", tensors, tensors == 1 ? " tensor, " : " tensors, ",
                   SizeText(BytesOnDisk(path)), "\n");
  if (!empty.empty()) {
    output.json["empty"] = empty;
    absl::StrAppend(&output.text, "without empty dicts, which the format does not have: ",
                    OneLine(absl::StrJoin(empty, ", ")), "\n");
  }
  return output;
}

// What is to be converted. Where another entry has a value that cannot be read, as the arguments of
// a Python program, the one that the pattern begins with is read alone.
absl::StatusOr<State> LoadFor(const ConvertOptions& options) {
  absl::StatusOr<State> all = Load(options.from);
  if (options.only.empty()) return all;
  const std::string entry = options.only.substr(0, options.only.find('/'));
  if (!absl::IsUnimplemented(all.status()) || entry.find_first_of("*?[\\") != std::string::npos) {
    return all;
  }
  absl::StatusOr<State> one = Load(options.from, {.parts = {{entry, checkpoint::Whole{}}},
                                                  .per_rank = checkpoint::PerRank::kNone});
  return one.ok() ? std::move(one) : std::move(all);
}

// "test/accuracy=0.91 test/loss=0.3"
std::string MetricsText(const std::map<std::string, double>& metrics) {
  if (metrics.empty()) return "-";
  return absl::StrJoin(metrics, " ", [](std::string* out, const auto& metric) {
    absl::StrAppend(out, metric.first, "=", NumberText(metric.second));
  });
}

// Reads a checkpoint: its state, as Verify gives it; `format`, and `reason` if it is not "ok".
absl::StatusOr<absl::string_view> Verified(const std::string& path, std::string& format,
                                           std::string& reason) {
  const std::unique_ptr<Format> strict = FormatOf(path, {.accept_unverified = false});
  if (strict == nullptr) return NoCheckpoint(path);
  format = strict->name();
  absl::Status status = strict->Read(path, {.only_check = true}).status();
  reason = status.message();
  if (absl::IsFailedPrecondition(status)) {
    const absl::Status lenient =
        CreateFormat(format).value()->Read(path, {.only_check = true}).status();
    if (!lenient.ok()) {
      status =
          lenient.code() == status.code() ? absl::UnimplementedError(lenient.message()) : lenient;
      reason = status.message();
    }
  }
  return StateOf(status);
}

// Renames the damaged checkpoint `name` of a folder, and says so in the line that is returned.
absl::StatusOr<std::string> SetAside(const Folder& folder, const std::string& name,
                                     const checkpoint::FileIdentity& seen, ordered_json& row) {
  std::error_code ignored;  // then it is no link
  const std::filesystem::path target = std::filesystem::read_symlink(folder.PathOf(name), ignored);
  DDP_ASSIGN_OR_RETURN(const std::string renamed, folder.Quarantine(name, seen));
  if (renamed.empty()) return SavesThere(folder.directory());
  row["renamed"] = renamed;
  if (target.empty()) return absl::StrCat("renamed to ", renamed, "\n");
  return absl::StrCat("renamed the link to ", renamed, "; what it leads to keeps its name, ",
                      target.string(), "\n");
}

// The checkpoint `name` of a folder, whose suffix may be left out.
absl::StatusOr<std::string> FindIn(const std::string& directory, const std::string& given) {
  const std::string name = WithoutSlashes(given);
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, CheckpointsIn(directory));
  const auto is_meant = [&](const std::string& file) {
    return file == name || absl::StartsWith(file, absl::StrCat(name, "."));
  };
  std::vector<std::string> found, set_aside, known;
  for (const std::string& file : names) {
    if (file == name) return file;
    if (IsSetAside(file)) {
      if (is_meant(CleanName(file))) set_aside.push_back(file);
      continue;
    }
    known.insert(known.end(), {file, file.substr(0, file.find('.'))});
    if (is_meant(file)) found.push_back(file);
  }
  if (found.size() == 1) return found[0];
  if (found.empty()) {
    const std::string why =
        set_aside.empty() ? DidYouMean(name, known)
                          : absl::StrCat("; ", set_aside.back(), " is set aside as ",
                                         WhySetAside(set_aside.back()), ", and is not pinned");
    return absl::NotFoundError(absl::StrCat(directory, " has no checkpoint '", name, "'", why));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", name, "' may be ", absl::StrJoin(found, " or "), ": say which"));
}

}  // namespace

absl::StatusOr<CommandOutput> List(const std::string& path) {
  DDP_RETURN_IF_ERROR(CheckExists(path));
  if (IsCheckpoint(path)) return ListTensors(path);
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, CheckpointsIn(path));
  if (names.empty()) return NoCheckpoint(path);
  const Folder folder = Manager::FolderAt(WithoutSlashes(path));
  CommandOutput output;
  output.json["path"] = path;
  output.json["checkpoints"] = ordered_json::array();
  std::vector<std::vector<std::string>> rows = {
      {"NAME", "EPOCH", "STEP", "TIME", "SIZE", "FORMAT", "STATE", "PINNED", "METRICS"}};
  for (const std::string& name : names) {
    const std::string file = folder.PathOf(name);
    const std::unique_ptr<Format> format = FormatOf(file, {.accept_unverified = false});
    if (format == nullptr) continue;  // removed meanwhile
    const absl::Status complete =
        DamagedOf(name).empty() ? format->CheckComplete(file)
                                : absl::DataLossError("renamed because it was found to be damaged");
    // What is found by names and sizes; Verify reads the rest.
    const bool is_abandoned = !AbandonedOf(name).empty();
    const absl::string_view state = !complete.ok() ? StateOf(complete)
                                    : is_abandoned ? "abandoned"
                                                   : "complete";
    std::optional<int64_t> epoch, step;
    if (complete.ok()) {
      epoch = IntegerOf(*format, file, "epoch");
      step = IntegerOf(*format, file, "step");
    }
    const std::optional<checkpoint::Notes> notes = folder.NotesOf(name);
    const std::optional<int64_t> time = TimeOf(file, notes);
    const uint64_t bytes = BytesOnDisk(file);
    const bool pinned = folder.IsPinned(name);
    const auto text = [](std::optional<int64_t> number) {
      return number.has_value() ? absl::StrCat(*number) : std::string("-");
    };
    rows.push_back({name, text(epoch), text(step), TimeText(time), SizeText(bytes),
                    std::string(format->name()), std::string(state), pinned ? "pinned" : "-",
                    notes.has_value() ? MetricsText(notes->metrics) : "-"});
    ordered_json row;
    row["name"] = name;
    row["path"] = file;
    row["epoch"] = epoch.has_value() ? ordered_json(*epoch) : ordered_json();
    row["step"] = step.has_value() ? ordered_json(*step) : ordered_json();
    row["time"] = time.has_value() ? ordered_json(*time) : ordered_json();
    row["bytes"] = bytes;
    row["format"] = format->name();
    row["state"] = state;
    row["pinned"] = pinned;
    row["metrics"] = ordered_json();  // null: not known
    if (notes.has_value()) {
      row["metrics"] = ordered_json::object();
      for (const auto& [metric, value] : notes->metrics) row["metrics"][metric] = ToJson(value);
    }
    if (!complete.ok()) {
      row["reason"] = complete.message();
    } else if (is_abandoned) {
      row["reason"] = "renamed because a run has rolled back past it";
    }
    output.json["checkpoints"].push_back(std::move(row));
  }
  output.text = Table(rows);
  return output;
}

absl::StatusOr<CommandOutput> Verify(const std::string& path, const VerifyOptions& options) {
  DDP_RETURN_IF_ERROR(CheckExists(path));
  std::string clean = WithoutSlashes(path);
  const bool is_one = IsCheckpoint(path);
  const std::string last = clean.substr(clean.rfind('/') + 1);
  if (is_one && options.quarantine && (last == "." || last == "..")) {
    // These names cannot be replaced.
    std::error_code error;
    clean = std::filesystem::canonical(clean, error).string();
    if (error) return FileError(error.value(), "finding the name of", path);
  }
  const std::string directory = is_one ? DirectoryOf(clean) : clean;
  std::vector<std::string> names;
  if (is_one) {
    names = {clean.substr(clean.rfind('/') + 1)};
  } else {
    DDP_ASSIGN_OR_RETURN(names, CheckpointsIn(path));
    if (names.empty()) return NoCheckpoint(path);
  }
  const Folder folder = Manager::FolderAt(directory);
  if (options.quarantine) {
    // Without such locks (NFS) Quarantine goes by the file itself.
    const absl::Status alone = DirectoryLock::TryExclusive(directory).status();
    if (absl::IsUnavailable(alone)) return SavesThere(directory);
  }
  CommandOutput output;
  output.json["path"] = path;
  output.json["checkpoints"] = ordered_json::array();
  for (const std::string& name : names) {
    const std::string file = is_one ? clean : folder.PathOf(name);
    absl::StatusOr<checkpoint::FileIdentity> seen = checkpoint::IdentityOf(file);
    std::string format, reason;
    absl::StatusOr<absl::string_view> verified = Verified(file, format, reason);
    // A run that saves there replaces and removes checkpoints.
    for (int tries = 100; tries > 0 && verified.ok() && *verified == "damaged"; --tries) {
      absl::SleepFor(absl::Milliseconds(10));
      if (!checkpoint::HasChanged(file, seen)) break;
      seen = checkpoint::IdentityOf(file);
      verified = Verified(file, format, reason);
    }
    if (!is_one && absl::IsNotFound(verified.status())) continue;  // removed meanwhile
    DDP_RETURN_IF_ERROR(verified.status());
    const absl::string_view state = *verified;
    if (state == "damaged" || state == "unreadable") {
      output.exit_code = std::max(output.exit_code, 1);
    }
    absl::StrAppend(&output.text, OneLine(file), ": ", state, reason.empty() ? "" : ": ",
                    OneLine(reason), "\n");
    ordered_json row;
    row["path"] = file;
    row["format"] = format;
    row["state"] = state;
    if (!reason.empty()) row["reason"] = reason;
    if (options.quarantine && state == "damaged" && seen.ok() && !IsSetAside(name)) {
      const absl::StatusOr<std::string> line = SetAside(folder, name, *seen, row);
      if (line.ok()) {
        output.text += *line;
      } else {
        // What was found out about the others is not lost.
        output.exit_code = 2;
        row["not_renamed"] = line.status().message();
        absl::StrAppend(&output.text, "not renamed: ", line.status().message(), "\n");
      }
    }
    output.json["checkpoints"].push_back(std::move(row));
  }
  return output;
}

absl::StatusOr<CommandOutput> SetPinned(const std::string& directory, const std::string& name,
                                        bool pinned) {
  DDP_ASSIGN_OR_RETURN(const std::string file, FindIn(directory, name));
  const Folder folder = Manager::FolderAt(WithoutSlashes(directory));
  if (pinned && IsSetAside(file)) {
    return absl::FailedPreconditionError(
        absl::StrCat(folder.PathOf(file), " is ", WhySetAside(file),
                     "; a pin is for what a run could be resumed from"));
  }
  DDP_RETURN_IF_ERROR(pinned ? folder.Pin(file) : folder.Unpin(file));
  CommandOutput output;
  output.json["path"] = folder.PathOf(file);
  output.json["pinned"] = pinned;
  output.text = absl::StrCat(folder.PathOf(file), pinned ? " is pinned\n" : " is not pinned\n");
  return output;
}

absl::StatusOr<CommandOutput> Diff(const std::string& a, const std::string& b) {
  DDP_ASSIGN_OR_RETURN(State first, Load(a));
  DDP_ASSIGN_OR_RETURN(State second, Load(b));
  MoveRanksIntoRoot(first);
  MoveRanksIntoRoot(second);
  Align(first, second);
  Comparison comparison;
  comparison.Compare(first.root, second.root, "");
  CommandOutput output;
  output.json["equal"] = !comparison.first().has_value();
  if (!comparison.first().has_value()) {
    output.text = "equal\n";
    return output;
  }
  output.exit_code = 1;
  const Difference& difference = *comparison.first();
  output.json["differences"] = comparison.count();
  output.json["first"]["path"] = difference.path;
  output.json["first"]["what"] = difference.what;
  output.text = absl::StrCat(difference.path, ": ", difference.what, "\n");
  if (comparison.max_abs().has_value()) {
    output.json["max_abs"] = ToJson(*comparison.max_abs());
    output.json["max_abs_path"] = comparison.largest();
  }
  absl::StrAppend(&output.text, comparison.count(),
                  comparison.count() == 1 ? " value differs" : " values differ");
  if (comparison.max_abs().has_value()) {
    absl::StrAppend(&output.text, ", tensors by at most ", NumberText(*comparison.max_abs()), " (",
                    comparison.largest(), ")");
  }
  output.text += "\n";
  // The first may be what any two runs differ in, as the configuration.
  if (!comparison.others().empty()) {
    output.json["others"] = comparison.others();
    const size_t more = comparison.count() - 1 - comparison.others().size();
    absl::StrAppend(&output.text, "the others: ", absl::StrJoin(comparison.others(), ", "),
                    more == 0 ? "" : absl::StrCat(" and ", more, " more"), "\n");
  }
  return output;
}

absl::StatusOr<CommandOutput> Convert(const ConvertOptions& options) {
  const std::string to = WithoutSlashes(options.to);
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Format> format, FormatToWrite(options.format, to));
  at::ScalarType dtype = at::ScalarType::Undefined;
  if (!options.dtype.empty()) {
    dtype = checkpoint::DtypeOfName(options.dtype);
    if (dtype == at::ScalarType::Undefined || !c10::isFloatingType(dtype)) {
      return OptionError("dtype", options.dtype,
                         "is no floating-point type, such as float32, bfloat16 or float16");
    }
  }
  DDP_RETURN_IF_ERROR(CheckIsNew(to));
  DDP_ASSIGN_OR_RETURN(State state, LoadFor(options));
  MoveRanksIntoRoot(state);
  if (!options.only.empty()) {
    const std::optional<c10::IValue> kept = Matching(state.root, options.only);
    if (!kept.has_value()) {
      return OptionError(
          "only", options.only,
          absl::StrCat("matches no path in ", options.from, "; paths look like model/fc.weight"));
    }
    state.root = kept->toGenericDict();
  }
  std::vector<std::string> overflows;
  if (dtype != at::ScalarType::Undefined) {
    state.root = Cast(state.root, dtype, overflows).toGenericDict();
  }
  DDP_ASSIGN_OR_RETURN(CommandOutput output, WriteCheckpoint(*format, state, to));
  if (overflows.empty()) return output;
  output.json["overflows"] = overflows;
  absl::StrAppend(&output.text, options.dtype, " is too small a type for values of ",
                  OneLine(absl::StrJoin(overflows, ", ")),
                  ": they are inf, nan or its largest number now\n");
  return output;
}

absl::StatusOr<CommandOutput> Average(const std::vector<std::string>& from,
                                      const std::string& given) {
  const std::string to = WithoutSlashes(given);
  if (from.size() < 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("a mean takes two or more checkpoints, not ", from.size()));
  }
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Format> format, FormatToWrite("", to));
  DDP_RETURN_IF_ERROR(CheckIsNew(to));
  std::map<std::filesystem::path, std::string> named;
  for (const std::string& path : from) {
    std::error_code error;  // of a path that is not there: Load says so
    const auto [known, is_new] =
        named.try_emplace(std::filesystem::weakly_canonical(WithoutSlashes(path), error), path);
    if (is_new || error) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(path, known->second == path ? " stands twice" : " is " + known->second,
                     " in the list: name each checkpoint of a mean once"));
  }
  const ReadRequest request = {.parts = {{"model", checkpoint::Whole{}}},
                               .per_rank = checkpoint::PerRank::kNone};
  Mean mean;
  for (const std::string& path : from) {
    absl::StatusOr<State> state = Load(path, request);
    if (absl::IsInvalidArgument(state.status())) {
      return absl::InvalidArgumentError(absl::StrCat(path, " has no model"));
    }
    DDP_RETURN_IF_ERROR(state.status());
    DDP_RETURN_IF_ERROR(mean.Add(state->root.at("model"), path));
  }
  State state;
  state.root.insert("model", mean.Result());
  DDP_ASSIGN_OR_RETURN(CommandOutput output, WriteCheckpoint(*format, state, to));
  output.json["from"] = from;
  output.json["taken_from_last"] = mean.taken_from_last();
  absl::StrAppend(&output.text, "the mean of ", from.size(), " checkpoints");
  if (!mean.taken_from_last().empty()) {
    absl::StrAppend(&output.text, "; from the last one, since it differs and has no mean: ",
                    absl::StrJoin(mean.taken_from_last(), ", "));
  }
  output.text += "\n";
  return output;
}

}  // namespace ddp::tools::ckpt
