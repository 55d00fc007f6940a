#include "launchers/slurm/stage.h"

#include <errno.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status.h"

namespace ddp::launchers::slurm {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kRunfiles = ".runfiles";
constexpr absl::string_view kKnown = "known";
constexpr size_t kMostKnown = 256;

// A file that was written less than this before it was read may be written again without a change
// of its time stamp.
constexpr absl::Duration kTimeStampGrain = absl::Seconds(2);

// No copy takes this long.
constexpr absl::Duration kRemainderAge = absl::Hours(24);

// A file of a build.
struct Source {
  std::string name;  // in the staged build
  std::string path;
  uint64_t size = 0;
  int64_t mtime_ns = 0;
  uint64_t inode = 0;
  bool executable = false;
};

struct Build {
  std::string program;  // its name in the staged build
  std::vector<Source> files;
};

absl::Status Add(const std::string& name, const std::string& path, std::vector<Source>& files) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) {
    return Annotate(FileError(errno, "reading", path), "build the program again");
  }
  if (!S_ISREG(info.st_mode)) return absl::OkStatus();
  files.push_back({.name = name,
                   .path = path,
                   .size = static_cast<uint64_t>(info.st_size),
                   .mtime_ns = info.st_mtim.tv_sec * int64_t{1'000'000'000} + info.st_mtim.tv_nsec,
                   .inode = info.st_ino,
                   .executable = (info.st_mode & S_IXUSR) != 0});
  return absl::OkStatus();
}

// Adds the files below `folder`, following links.
absl::Status AddTree(const std::string& folder, const std::string& name,
                     std::vector<Source>& files) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> entries, ListDirectory(folder));
  for (const std::string& entry : entries) {
    const std::string path = absl::StrCat(folder, "/", entry);
    const std::string staged = absl::StrCat(name, "/", entry);
    std::error_code error;
    if (fs::is_directory(path, error)) {
      DDP_RETURN_IF_ERROR(AddTree(path, staged, files));
    } else {
      DDP_RETURN_IF_ERROR(Add(staged, path, files));
    }
  }
  return absl::OkStatus();
}

// The runfiles of `program`: beside it, or the tree that contains it.
std::optional<std::string> RunfilesOf(const std::string& program) {
  std::error_code ignored;
  std::string beside = absl::StrCat(program, kRunfiles);
  if (fs::is_directory(beside, ignored)) return beside;
  const size_t at = program.rfind(absl::StrCat(kRunfiles, "/"));
  if (at == std::string::npos) return std::nullopt;
  return program.substr(0, at + kRunfiles.size());
}

absl::StatusOr<Build> ListBuild(const std::string& program) {
  Build build;
  const std::string name = fs::path(program).filename().string();
  if (const std::optional<std::string> tree = RunfilesOf(program)) {
    const std::string staged_tree = fs::path(*tree).filename().string();
    DDP_RETURN_IF_ERROR(AddTree(*tree, staged_tree, build.files));
    // Bazel's list of the tree is left out: it has paths of this machine.
    std::erase_if(build.files, [&](const Source& file) {
      return file.name == absl::StrCat(staged_tree, "/MANIFEST");
    });
    for (const Source& file : build.files) {
      std::error_code ignored;
      if (!build.program.empty() || !absl::EndsWith(file.name, absl::StrCat("/", name))) continue;
      if (fs::equivalent(file.path, program, ignored)) build.program = file.name;
    }
  }
  if (build.program.empty()) {
    build.program = name;
    DDP_RETURN_IF_ERROR(Add(name, program, build.files));
  }
  std::sort(build.files.begin(), build.files.end(),
            [](const Source& a, const Source& b) { return a.name < b.name; });
  return build;
}

// Adds the contents of a file to `digester`, and copies it to `copy` if that is not empty.
absl::Status ReadSource(const Source& file, const std::string& copy, Digester& digester) {
  DDP_ASSIGN_OR_RETURN(const FileReader reader, FileReader::Open(file.path));
  if (reader.size() != file.size) return absl::AbortedError(absl::StrCat(file.path, " changes"));
  std::optional<FileWriter> writer;
  if (!copy.empty()) {
    DDP_RETURN_IF_ERROR(MakeDirectories(DirectoryOf(copy)));
    const mode_t mode = file.executable ? 0777 : 0666;
    DDP_ASSIGN_OR_RETURN(FileWriter created, FileWriter::Create(copy, FileSystem::Default(), mode));
    writer.emplace(std::move(created));
  }
  std::string piece(size_t{1} << 20, '\0');
  for (uint64_t at = 0; at < file.size; at += piece.size()) {
    piece.resize(std::min<uint64_t>(piece.size(), file.size - at));
    DDP_RETURN_IF_ERROR(reader.ReadAt(at, piece.data(), piece.size()));
    digester.Add(piece);
    if (writer) {
      DDP_RETURN_IF_ERROR(writer->Append(piece));
    }
  }
  return writer ? writer->Finish() : absl::OkStatus();
}

// The hash of a build. Copies it to folder `copy` if that is not empty.
absl::StatusOr<std::string> ReadBuild(const Build& build, const std::string& copy) {
  Digester digester;
  for (const Source& file : build.files) {
    digester.AddField(file.name);
    digester.AddField(absl::StrCat(file.size, file.executable ? "x" : "-"));
    const std::string path = copy.empty() ? "" : absl::StrCat(copy, "/", file.name);
    DDP_RETURN_IF_ERROR(ReadSource(file, path, digester));
  }
  return digester.Hex();
}

// A key by which an unchanged build is recognised without reading its files.
std::string KeyOf(const Build& build) {
  Digester digester;
  for (const Source& file : build.files) {
    digester.AddField(file.name);
    digester.AddField(file.path);
    digester.AddField(
        absl::StrCat(file.size, " ", file.mtime_ns, " ", file.inode, " ", file.executable));
  }
  return digester.Hex();
}

// Lines "KEY HASH" of BUILDS/known, oldest first; none if it cannot be read.
std::vector<std::string> KnownLines(const std::string& builds) {
  const absl::StatusOr<std::string> text = ReadFile(absl::StrCat(builds, "/", kKnown));
  if (!text.ok()) return {};
  return absl::StrSplit(*text, '\n', absl::SkipEmpty());
}

std::optional<std::string> KnownHash(const std::string& builds, const std::string& key) {
  for (const std::string& line : KnownLines(builds)) {
    const std::pair<std::string, std::string> fields = absl::StrSplit(line, ' ');
    if (fields.first == key && fields.second.size() == key.size()) return fields.second;
  }
  return std::nullopt;
}

absl::Status Remember(const std::string& builds, const std::string& key, const std::string& hash) {
  std::vector<std::string> lines = KnownLines(builds);
  lines.push_back(absl::StrCat(key, " ", hash));
  if (lines.size() > kMostKnown) lines.erase(lines.begin(), lines.end() - kMostKnown);
  return WriteFileAtomically(absl::StrCat(builds, "/", kKnown),
                             absl::StrCat(absl::StrJoin(lines, "\n"), "\n"));
}

bool WasWrittenBefore(const Build& build, absl::Time time) {
  return std::all_of(build.files.begin(), build.files.end(),
                     [&](const Source& file) { return absl::FromUnixNanos(file.mtime_ns) < time; });
}

// Removes what killed processes have left.
void RemoveRemainders(const std::string& builds) {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(builds);
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    const std::string path = absl::StrCat(builds, "/", name);
    struct stat info;
    if (!IsTemporaryName(name) || ::stat(path.c_str(), &info) != 0) continue;
    if (absl::Now() - absl::TimeFromTimespec(info.st_mtim) < kRemainderAge) continue;
    RemoveTree(path).IgnoreError();
  }
}

absl::Status Copy(const Build& build, const std::string& hash, const std::string& folder) {
  const absl::Status copied =
      ReplaceAtomically(folder, [&](const std::string& temporary) -> absl::Status {
        DDP_RETURN_IF_ERROR(MakeDirectories(temporary));
        DDP_ASSIGN_OR_RETURN(const std::string hash_of_copy, ReadBuild(build, temporary));
        if (hash_of_copy == hash) return absl::OkStatus();
        return absl::AbortedError(absl::StrCat(build.program, " changes"));
      });
  // Another process may have been faster.
  std::error_code ignored;
  return fs::is_directory(folder, ignored) ? absl::OkStatus() : copied;
}

StagedProgram Staged(const Build& build, const std::string& hash, const std::string& builds) {
  return {.hash = hash, .path = absl::StrCat(builds, "/", hash, "/", build.program)};
}

absl::Status ExplainChange(const absl::Status& status) {
  if (!absl::IsAborted(status)) return status;
  return Annotate(status, "the program is being built; submit when the build has ended");
}

}  // namespace

absl::StatusOr<StagedProgram> StageProgram(const std::string& program, const std::string& builds) {
  const absl::Time began = absl::Now();
  DDP_ASSIGN_OR_RETURN(const Build build, ListBuild(program));
  const std::string key = KeyOf(build);
  std::error_code ignored;
  if (const std::optional<std::string> known = KnownHash(builds, key)) {
    if (fs::is_directory(absl::StrCat(builds, "/", *known), ignored)) {
      return Staged(build, *known, builds);
    }
  }
  DDP_RETURN_IF_ERROR(MakeDirectories(builds));
  RemoveRemainders(builds);
  const absl::StatusOr<std::string> hash = ReadBuild(build, "");
  if (!hash.ok()) return ExplainChange(hash.status());
  const std::string folder = absl::StrCat(builds, "/", *hash);
  if (!fs::is_directory(folder, ignored)) {
    DDP_RETURN_IF_ERROR(ExplainChange(Copy(build, *hash, folder)));
  }
  DDP_ASSIGN_OR_RETURN(const Build now, ListBuild(program));
  if (KeyOf(now) != key)
    return ExplainChange(absl::AbortedError(absl::StrCat(program, " changed")));
  if (WasWrittenBefore(build, began - kTimeStampGrain)) {
    DDP_RETURN_IF_ERROR(Remember(builds, key, *hash));
  }
  return Staged(build, *hash, builds);
}

absl::StatusOr<StagedProgram> FindStaged(const std::string& program, const std::string& builds) {
  DDP_ASSIGN_OR_RETURN(const Build build, ListBuild(program));
  if (const std::optional<std::string> known = KnownHash(builds, KeyOf(build))) {
    return Staged(build, *known, builds);
  }
  const absl::StatusOr<std::string> hash = ReadBuild(build, "");
  if (!hash.ok()) return ExplainChange(hash.status());
  return Staged(build, *hash, builds);
}

}  // namespace ddp::launchers::slurm
