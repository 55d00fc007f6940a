#include "checkpoint/folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>

#include "absl/log/absl_log.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/json_number.h"
#include "base/status.h"
#include "nlohmann/json.hpp"

namespace ddp::checkpoint {
namespace {

constexpr absl::string_view kNotes = ".json";
constexpr absl::string_view kPinned = ".pinned";
constexpr absl::string_view kDamaged = ".damaged";
constexpr absl::string_view kAbandoned = ".abandoned";
constexpr uint64_t kMostNotes = uint64_t{1} << 20;  // bytes
constexpr absl::Duration kLongestDryRun = absl::Hours(24);

// "epoch_3.pt" of ".epoch_3.pt.json" and ".epoch_3.pt.pinned"; "" of any other name.
std::string CheckpointOf(absl::string_view beside) {
  if (!absl::ConsumePrefix(&beside, ".")) return "";
  if (!absl::ConsumeSuffix(&beside, kNotes) && !absl::ConsumeSuffix(&beside, kPinned)) return "";
  return std::string(beside);
}

// "epoch_3.pt" of "epoch_3.pt.damaged" and "epoch_3.pt.damaged.2", if that is the suffix; "" of any
// other name.
std::string NameBefore(absl::string_view file, absl::string_view suffix) {
  const size_t mark = file.rfind(suffix);
  if (mark == absl::string_view::npos) return "";
  absl::string_view rest = file.substr(mark + suffix.size());
  int64_t number = 0;
  if (!rest.empty() && (!absl::ConsumePrefix(&rest, ".") || !absl::SimpleAtoi(rest, &number))) {
    return "";
  }
  return std::string(file.substr(0, mark));
}

bool Exists(const std::string& path) {
  struct stat info;
  return ::lstat(path.c_str(), &info) == 0 || errno != ENOENT;
}

// The regular file `path`, or those below it.
std::vector<std::string> FilesOf(const std::string& path) {
  std::vector<std::string> files;
  std::error_code error;
  if (std::filesystem::is_regular_file(path, error)) return {path};
  for (std::filesystem::recursive_directory_iterator it(path, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code unreadable;
    if (it->is_regular_file(unreadable)) files.push_back(it->path().string());
  }
  return files;
}

std::string Mebibytes(uint64_t bytes) {
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

// Whether `path` is the folder of a dry run that has ended without removing it. One that goes on
// holds it, but another machine may not see that.
bool IsDeadDryRun(const std::string& path) {
  const absl::string_view name = absl::string_view(path).substr(path.rfind('/') + 1);
  // What mkdtemp leaves of the template.
  const absl::string_view prefix = kDryRunFolder.substr(0, kDryRunFolder.find('X'));
  if (!absl::StartsWith(name, prefix) || name.size() != kDryRunFolder.size()) return false;
  const absl::StatusOr<FileIdentity> identity = IdentityOf(path);
  if (!identity.ok() || absl::Now() - identity->changed < kLongestDryRun) return false;
  return DirectoryLock::TryExclusive(path).ok();
}

}  // namespace

std::string ToText(const Notes& notes) {
  nlohmann::ordered_json json;
  json["time"] = absl::FormatTime(absl::RFC3339_full, notes.time, absl::UTCTimeZone());
  json["metrics"] = nlohmann::ordered_json::object();
  for (const auto& [name, value] : notes.metrics) json["metrics"][name] = ToJson(value);
  json["verified"] = notes.verified;
  // Names of metrics may be any bytes.
  return json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::optional<Notes> ParseNotes(absl::string_view text) {
  const nlohmann::json json =
      nlohmann::json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::nullopt;
  Notes notes;
  const auto time = json.find("time");
  std::string ignored;
  if (time == json.end() || !time->is_string() ||
      !absl::ParseTime(absl::RFC3339_full, time->get_ref<const std::string&>(), &notes.time,
                       &ignored)) {
    return std::nullopt;
  }
  const auto metrics = json.find("metrics");
  if (metrics == json.end() || !metrics->is_object()) return std::nullopt;
  for (const auto& [name, value] : metrics->items()) {
    const std::optional<double> number = NumberFromJson(value);
    if (!number.has_value()) return std::nullopt;
    notes.metrics.emplace(name, *number);
  }
  const auto verified = json.find("verified");
  notes.verified = verified != json.end() && verified->is_boolean() && verified->get<bool>();
  return notes;
}

std::string DamagedOf(absl::string_view file) { return NameBefore(file, kDamaged); }
std::string AbandonedOf(absl::string_view file) { return NameBefore(file, kAbandoned); }

absl::StatusOr<FileIdentity> IdentityOf(const std::string& path) {
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0) return FileError(errno, "reading", path);
  return FileIdentity{
      .device = info.st_dev, .inode = info.st_ino, .changed = absl::TimeFromTimespec(info.st_mtim)};
}

bool HasChanged(const std::string& path, const absl::StatusOr<FileIdentity>& seen) {
  const absl::StatusOr<FileIdentity> now = IdentityOf(path);
  return now.ok() ? !seen.ok() || *now != *seen : absl::IsNotFound(now.status());
}

uint64_t BytesOnDisk(const std::string& path) {
  uint64_t bytes = 0;
  for (const std::string& file : FilesOf(path)) {
    std::error_code unreadable;
    const uintmax_t size = std::filesystem::file_size(file, unreadable);
    if (!unreadable) bytes += size;
  }
  return bytes;
}

void DropFromCache(const std::string& path) {
  for (const std::string& file : FilesOf(path)) {
    const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) continue;
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }
}

absl::Status MakeDurableDirectories(const std::string& path, FileSystem* files) {
  std::vector<std::string> missing;
  for (std::string folder = path; !folder.empty() && !Exists(folder);
       folder = DirectoryOf(folder)) {
    missing.push_back(folder);
    if (folder.find('/') == std::string::npos) break;
  }
  DDP_RETURN_IF_ERROR(MakeDirectories(path, files));
  // The outermost first: an entry is worth nothing in a folder that is lost.
  for (auto folder = missing.rbegin(); folder != missing.rend(); ++folder) {
    const absl::Status synced = SyncDirectory(DirectoryOf(*folder), files);
    // A folder in which one may make others, but not list them, cannot be opened.
    if (!synced.ok() && !absl::IsPermissionDenied(synced)) return synced;
  }
  return absl::OkStatus();
}

std::string Folder::PathOf(absl::string_view file) const {
  return absl::StrCat(directory_, "/", file);
}

std::string Folder::NotesPathOf(absl::string_view file) const {
  return PathOf(absl::StrCat(".", file, kNotes));
}

std::string Folder::PinPathOf(absl::string_view file) const {
  return PathOf(absl::StrCat(".", file, kPinned));
}

absl::StatusOr<std::vector<NamedFile>> Folder::List() const {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> files, ListDirectory(directory_));
  std::vector<NamedFile> found;
  for (const std::string& file : files) {
    if (std::optional<NamedFile> named = ParseFileName(file, suffixes_)) {
      found.push_back(*std::move(named));
    }
  }
  DDP_RETURN_IF_ERROR(Annotate(SortByAge(found), directory_));
  const auto time_of = [&](const std::string& file) -> absl::Time {
    if (const std::optional<Notes> notes = NotesOf(file)) return notes->time;
    const absl::StatusOr<FileIdentity> identity = IdentityOf(PathOf(file));
    return identity.ok() ? identity->changed : absl::InfinitePast();
  };
  // Where several formats have one name, the newer is what was saved later.
  for (auto begin = found.begin(); begin != found.end();) {
    const auto end = std::find_if(
        begin, found.end(), [&](const NamedFile& other) { return !(other.name == begin->name); });
    std::map<std::string, absl::Time> times;
    for (auto named = begin; end - begin > 1 && named != end; ++named) {
      times[named->file] = time_of(named->file);
    }
    if (!times.empty()) {
      std::stable_sort(begin, end, [&](const NamedFile& a, const NamedFile& b) {
        return times.at(a.file) < times.at(b.file);
      });
    }
    begin = end;
  }
  return found;
}

absl::StatusOr<std::vector<Candidate>> Folder::Candidates() const {
  DDP_ASSIGN_OR_RETURN(std::vector<NamedFile> found, List());
  std::vector<Candidate> candidates;
  for (NamedFile& named : found) {
    const absl::StatusOr<FileIdentity> identity = IdentityOf(PathOf(named.file));
    if (!identity.ok()) continue;  // another process has removed it
    Candidate candidate{.name = named.name, .file = std::move(named.file)};
    candidate.time = identity->changed;
    candidate.pinned = IsPinned(candidate.file);
    if (std::optional<Notes> notes = NotesOf(candidate.file)) {
      candidate.time = notes->time;
      candidate.metrics = std::move(notes->metrics);
      candidate.verified = notes->verified;
    }
    candidates.push_back(std::move(candidate));
  }
  return candidates;
}

absl::StatusOr<std::vector<std::string>> Folder::Damaged() const { return SetAsideAs(kDamaged); }

absl::StatusOr<std::vector<std::string>> Folder::Abandoned() const {
  return SetAsideAs(kAbandoned);
}

absl::StatusOr<std::vector<std::string>> Folder::SetAsideAs(absl::string_view suffix) const {
  DDP_ASSIGN_OR_RETURN(std::vector<std::string> files, ListDirectory(directory_));
  std::erase_if(files, [&](const std::string& file) {
    return !ParseFileName(NameBefore(file, suffix), suffixes_).has_value();
  });
  return files;
}

std::optional<Notes> Folder::NotesOf(absl::string_view file) const {
  const absl::StatusOr<FileReader> reader = FileReader::Open(NotesPathOf(file));
  if (!reader.ok() || reader->size() > kMostNotes) return std::nullopt;
  std::string text(reader->size(), '\0');
  if (!reader->ReadAt(0, text.data(), text.size()).ok()) return std::nullopt;
  std::optional<Notes> notes = ParseNotes(text);
  if (!notes) {
    ABSL_LOG_FIRST_N(WARNING, 1) << reader->path() << " is damaged: the time and the metrics of "
                                 << file << " are not known";
  }
  return notes;
}

absl::Status Folder::Pin(absl::string_view file) const {
  DDP_RETURN_IF_ERROR(IdentityOf(PathOf(file)).status());
  const std::string path = PinPathOf(file);
  const int fd = files_->Open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) return FileError(errno, "creating", path);
  files_->Close(fd);
  return SyncDirectory(directory_, files_);
}

absl::Status Folder::Unpin(absl::string_view file) const {
  const std::string path = PinPathOf(file);
  if (files_->Unlink(path.c_str()) != 0 && errno != ENOENT) {
    return FileError(errno, "removing", path);
  }
  return absl::OkStatus();
}

bool Folder::IsPinned(absl::string_view file) const { return Exists(PinPathOf(file)); }

void Folder::RemoveBeside(absl::string_view file) const {
  for (const std::string& path : {NotesPathOf(file), PinPathOf(file)}) {
    if (files_->Unlink(path.c_str()) != 0 && errno != ENOENT) {
      ABSL_LOG(WARNING) << FileError(errno, "removing", path).message();
    }
  }
}

absl::Status Folder::Remove(absl::string_view file) const {
  const std::string path = PathOf(file);
  std::error_code ignored;  // Unlink reports it
  if (!std::filesystem::is_directory(path, ignored)) {
    DDP_RETURN_IF_ERROR(RemoveTree(path, files_));
  } else {
    const std::string hidden = TemporaryName(path);
    if (files_->Rename(path.c_str(), hidden.c_str()) != 0) {
      return errno == ENOENT ? absl::OkStatus() : FileError(errno, "removing", path);
    }
    // After a power failure the folder might have its name still and some of its files no more.
    DDP_RETURN_IF_ERROR(SyncDirectory(directory_, files_));
    DDP_RETURN_IF_ERROR(RemoveTree(hidden, files_));
  }
  // Not before: a checkpoint without its notes may be kept for ever.
  RemoveBeside(file);
  return absl::OkStatus();
}

absl::StatusOr<std::string> Folder::Quarantine(absl::string_view file,
                                               const FileIdentity& seen) const {
  // Without such locks (NFS) the comparison below has to do.
  const absl::StatusOr<DirectoryLock> alone = DirectoryLock::TryExclusive(directory_);
  if (absl::IsUnavailable(alone.status())) return "";
  const std::string path = PathOf(file);
  const absl::StatusOr<FileIdentity> now = IdentityOf(path);
  if (absl::IsNotFound(now.status())) return "";
  DDP_RETURN_IF_ERROR(now.status());
  if (*now != seen) return "";
  return SetAside(file, kDamaged);
}

absl::StatusOr<std::string> Folder::Abandon(absl::string_view file) const {
  return SetAside(file, kAbandoned);
}

absl::StatusOr<std::string> Folder::SetAside(absl::string_view file,
                                             absl::string_view suffix) const {
  const std::string path = PathOf(file);
  const std::string first = absl::StrCat(file, suffix);
  std::string name = first;
  // Other errors than that it is not there, as for a name that is too long, the rename reports.
  struct stat info;
  for (int64_t number = 2; ::lstat(PathOf(name).c_str(), &info) == 0; ++number) {
    name = absl::StrCat(first, ".", number);
  }
  if (files_->Rename(path.c_str(), PathOf(name).c_str()) != 0) {
    if (errno == ENOENT) return "";
    return FileError(errno, absl::StrCat("renaming ", path, " to"), name);
  }
  // What is known of it must not be taken for that of a later checkpoint of the same name. Nothing
  // is noted of one without a suffix: such a file is somebody else's.
  const bool has_suffix =
      std::any_of(suffixes_.begin(), suffixes_.end(),
                  [&](const std::string& ending) { return absl::EndsWith(file, ending); });
  if (has_suffix) RemoveBeside(file);
  DDP_RETURN_IF_ERROR(SyncDirectory(directory_, files_));
  return name;
}

void Folder::RemoveLeftovers() const {
  const absl::StatusOr<std::vector<std::string>> files = ListDirectory(directory_);
  if (!files.ok()) return;
  const std::set<std::string> present(files->begin(), files->end());
  for (const std::string& file : *files) {
    const std::string checkpoint = CheckpointOf(file);
    if (!checkpoint.empty() && present.count(checkpoint) == 0 &&
        ParseFileName(checkpoint, suffixes_).has_value()) {
      RemoveBeside(checkpoint);
      continue;
    }
    const bool is_of_save = IsTemporaryName(file);
    if (!is_of_save && !IsDeadDryRun(PathOf(file))) continue;
    const char* const whose = is_of_save ? "an interrupted save" : "a dry run that was killed";
    const absl::Status removed = RemoveTree(PathOf(file), files_);
    if (removed.ok()) {
      ABSL_LOG(INFO) << "removed " << PathOf(file) << ", which " << whose << " left behind";
    } else {
      ABSL_LOG(WARNING) << "cannot remove what " << whose << " left behind: " << removed.message();
    }
  }
}

absl::Status Folder::CheckRoom(uint64_t bytes) const {
  struct statvfs info;
  if (files_->Statvfs(directory_.c_str(), &info) != 0 || info.f_blocks == 0) {
    return absl::OkStatus();
  }
  const uint64_t free = static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
  if (free >= bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "disk full: the next checkpoint takes about ", Mebibytes(bytes), " in ", directory_,
      ", where ", Mebibytes(free),
      " are free, so that nothing was written (No space left on device); make room, or keep fewer "
      "checkpoints"));
}

}  // namespace ddp::checkpoint
