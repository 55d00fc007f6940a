#include "base/error_file.h"

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/json.h"
#include "nlohmann/json.hpp"

namespace ddp {
namespace {

constexpr char kVariable[] = "TORCHELASTIC_ERROR_FILE";
// Ours, beside those of Python's handler.
constexpr char kExitCode[] = "exit_code";

// Null if `value` is null or no object, or lacks it.
const nlohmann::json* Member(const nlohmann::json* value, const char* name) {
  if (value == nullptr || !value->is_object()) return nullptr;
  const auto found = value->find(name);
  return found == value->end() ? nullptr : &*found;
}

constexpr char kAttempt[] = "/attempt_";

std::string Attempt(int number) { return absl::StrCat(kAttempt, number, "/"); }

}  // namespace

void WriteErrorFile(const Environment& env, const RankError& error) {
  const std::optional<std::string> path = env.Get(kVariable);
  if (!path) return;
  const std::string now = absl::StrCat(absl::ToUnixSeconds(absl::Now()));
  // The report shows py_callstack.
  const nlohmann::json file = {
      {"message",
       {{"message", error.message},
        {"extraInfo",
         {{"py_callstack", error.message}, {"timestamp", now}, {kExitCode, error.exit_code}}}}}};
  const std::string text = file.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  WriteFileAtomically(*path, text).IgnoreError();
}

std::optional<RankError> PreviousError(const Environment& env, int restart_count) {
  std::optional<std::string> path = env.Get(kVariable);
  const std::string mine = Attempt(restart_count);
  const size_t at = path ? path->rfind(mine) : std::string::npos;
  if (restart_count < 1 || at == std::string::npos) return std::nullopt;
  path->replace(at, mine.size(), Attempt(restart_count - 1));
  const absl::StatusOr<std::string> text = ReadFile(*path);
  const absl::StatusOr<nlohmann::json> file =
      text.ok() ? ParseJson(*text) : absl::StatusOr<nlohmann::json>(text.status());
  if (!file.ok()) return std::nullopt;
  // Python's handler writes no exit code, and a message that is a text alone is an older form.
  const nlohmann::json* message = Member(&*file, "message");
  const nlohmann::json* code = Member(Member(message, "extraInfo"), kExitCode);
  const nlohmann::json* text_of = Member(message, "message");
  if (code == nullptr || !code->is_number_integer()) return std::nullopt;
  if (text_of == nullptr || !text_of->is_string()) return std::nullopt;
  return RankError{text_of->get<std::string>(), code->get<int>()};
}

std::string RunFolderOf(const Environment& env) {
  const std::string path = env.Get(kVariable).value_or("");
  const size_t end = path.rfind(kAttempt);
  if (end == std::string::npos) return "";
  const std::string folder = path.substr(0, end);
  return folder.substr(folder.rfind('/') + 1);  // of a relative path: npos + 1 is 0
}

}  // namespace ddp
