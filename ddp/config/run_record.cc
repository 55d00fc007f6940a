#include "ddp/config/run_record.h"

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "base/file.h"
#include "base/option_flags.h"
#include "base/status.h"
#include "base/xxh3.h"
#include "ddp/config/yaml_file.h"

namespace ddp::config {

absl::StatusOr<std::optional<RunRecordOptions>> ReadRunRecord(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  if (absl::IsNotFound(text.status())) return std::nullopt;
  // A user's own configuration may have the name, too.
  if (text.ok() && !absl::StrContains("\n" + *text, "\nworld_size:")) return std::nullopt;
  RunRecordOptions record;
  const OptionList list = ListOptions(record);
  DDP_ASSIGN_OR_RETURN(const ConfigFile file, ReadConfigFile(path, list));
  OptionSetter setter;
  for (const OptionAssignment& assignment : file.assignments) {
    DDP_RETURN_IF_ERROR(setter.Set(assignment, list));
  }
  if (const absl::Status valid = list.Validate(); !valid.ok()) {
    return absl::InvalidArgumentError(setter.Explain(valid, list));
  }
  return record;
}

std::string BuildOf(const std::string& program) {
  const absl::StatusOr<std::string> bytes = ReadFile(program);
  return bytes.ok() ? HexOf(Xxh3(*bytes)) : "";
}

}  // namespace ddp::config
