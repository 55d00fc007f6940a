#include "base/runfiles.h"

#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/process.h"

namespace ddp {
namespace {

// What `path` may be called under `root`, the likeliest first.
std::vector<std::string> Names(absl::string_view path, const std::string& root,
                               absl::string_view source) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(path, absl::MaxSplits('/', 1));
  std::vector<std::string> of_source, of_main;
  std::ifstream mapping(absl::StrCat(root, "/_repo_mapping"));
  for (std::string line; std::getline(mapping, line);) {
    const std::vector<absl::string_view> row = absl::StrSplit(line, ',');
    if (row.size() != 3 || row[1] != parts.first) continue;
    std::string name = absl::StrCat(row[2], "/", parts.second);
    if (row[0] == source) of_source.push_back(name);
    if (row[0].empty()) of_main.push_back(std::move(name));
  }
  std::vector<std::string> names = std::move(of_source);
  names.insert(names.end(), of_main.begin(), of_main.end());
  names.emplace_back(path);
  return names;
}

}  // namespace

namespace internal {

std::vector<std::string> RunfilesRoots(const Environment& env, absl::string_view executable) {
  std::vector<std::string> roots;
  for (absl::string_view variable : {"RUNFILES_DIR", "TEST_SRCDIR"}) {
    if (std::optional<std::string> root = env.Get(variable)) roots.push_back(*std::move(root));
  }
  if (executable.empty()) return roots;
  constexpr absl::string_view kSuffix = ".runfiles";
  roots.push_back(absl::StrCat(executable, kSuffix));
  // A program that is data of another one: …/other.runfiles/WORKSPACE/program.
  const size_t at = executable.rfind(absl::StrCat(kSuffix, "/"));
  if (at != absl::string_view::npos) {
    roots.emplace_back(executable.substr(0, at + kSuffix.size()));
  }
  return roots;
}

absl::StatusOr<std::string> FindRunfile(absl::string_view path,
                                        const std::vector<std::string>& roots,
                                        absl::string_view source) {
  for (const std::string& root : roots) {
    for (const std::string& name : Names(path, root, source)) {
      std::string candidate = absl::StrCat(root, "/", name);
      std::error_code ignored;
      if (std::filesystem::exists(candidate, ignored)) return candidate;
    }
  }
  return absl::NotFoundError(absl::StrCat(
      "'", path, "' is not among this program's runfiles; searched: ", absl::StrJoin(roots, ", ")));
}

}  // namespace internal

absl::StatusOr<std::string> Runfile(absl::string_view path) {
  // The BUILD file says which repository this is: "@" or "@libtorch_ddp~…".
  constexpr absl::string_view kRepository = DDP_REPOSITORY;
  return internal::FindRunfile(
      path, internal::RunfilesRoots(Environment::FromProcess(), ExecutableOrigin()),
      absl::StripPrefix(absl::StripPrefix(kRepository, "@"), "@"));
}

}  // namespace ddp
