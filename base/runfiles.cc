#include "base/runfiles.h"

#include <filesystem>
#include <optional>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/process.h"

namespace ddp {
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
                                        const std::vector<std::string>& roots) {
  for (const std::string& root : roots) {
    std::string candidate = absl::StrCat(root, "/", path);
    std::error_code ignored;
    if (std::filesystem::exists(candidate, ignored)) return candidate;
  }
  return absl::NotFoundError(absl::StrCat(
      "'", path, "' is not among this program's runfiles; searched: ", absl::StrJoin(roots, ", ")));
}

}  // namespace internal

absl::StatusOr<std::string> Runfile(absl::string_view path) {
  return internal::FindRunfile(
      path, internal::RunfilesRoots(Environment::FromProcess(), ExecutablePath()));
}

}  // namespace ddp
