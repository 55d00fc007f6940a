#include "backends/spec.h"

#include <algorithm>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "backends/backend.h"
#include "base/option_error.h"
#include "base/status.h"

namespace ddp::backends {
namespace {

absl::Status Malformed(absl::string_view text, absl::string_view why) {
  return OptionError("backend", text,
                     absl::StrCat("is no backend: ", why,
                                  "; write a name (gloo), device:name pairs (cpu:gloo,cuda:nccl) "
                                  "or auto"));
}

// The entry of backend `name`, which the option's value `text` contains.
absl::StatusOr<BackendEntry> FindIn(absl::string_view text, absl::string_view name) {
  absl::StatusOr<BackendEntry> entry = BackendRegistry::Find(name);
  if (entry.ok()) return entry;
  const std::string names = absl::StrJoin(BackendRegistry::Names(), ", ");
  return OptionError("backend", text,
                     text == name ? absl::StrCat("is none of ", kAuto, ", ", names)
                                  : absl::StrCat("is no backend: ", name, " is none of ", names),
                     entry.status().code());
}

}  // namespace

absl::StatusOr<BackendSpec> ParseBackendSpec(absl::string_view text,
                                             absl::string_view device_type) {
  if (text.empty()) return Malformed(text, "it is empty");
  if (text == kAuto) {
    BackendSpec spec = {{"cpu", std::string(kAuto)}};
    if (device_type == "cuda") spec.emplace_back("cuda", "nccl");
    return spec;
  }
  if (text.find(':') == absl::string_view::npos && text.find(',') == absl::string_view::npos) {
    DDP_ASSIGN_OR_RETURN(BackendEntry entry, FindIn(text, text));
    BackendSpec spec;
    for (const std::string& device : entry.device_types) {
      if (device == "cpu" || device == device_type) spec.emplace_back(device, text);
    }
    // Of a backend for another device than the program's, so that its name can be in an error.
    if (spec.empty()) spec.emplace_back(entry.device_types[0], text);
    return spec;
  }
  BackendSpec spec;
  std::set<std::string> devices;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    const std::pair<std::string, std::string> pair = absl::StrSplit(part, absl::MaxSplits(':', 1));
    const auto& [device, name] = pair;
    if (device != "cpu" && device != "cuda") {
      return Malformed(text, absl::StrCat("'", part, "' names no device type (cpu, cuda)"));
    }
    if (name.empty()) return Malformed(text, absl::StrCat("'", part, "' names no backend"));
    if (!devices.insert(device).second) {
      return Malformed(text, absl::StrCat("device type ", device, " is bound twice"));
    }
    DDP_ASSIGN_OR_RETURN(BackendEntry entry, FindIn(text, name));
    const std::vector<std::string>& served = entry.device_types;
    if (std::find(served.begin(), served.end(), device) == served.end()) {
      return Malformed(text,
                       absl::StrCat("backend ", name, " serves ", absl::StrJoin(served, " and "),
                                    " tensors, not ", device));
    }
    spec.push_back(pair);
  }
  return spec;
}

absl::Status CheckAvailable(absl::string_view text) {
  if (text == kAuto) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(BackendSpec spec, ParseBackendSpec(text, "cpu"));
  for (const auto& [device, name] : spec) {
    DDP_ASSIGN_OR_RETURN(BackendEntry entry, BackendRegistry::Find(name));
    if (entry.available == nullptr) continue;
    if (const absl::Status why = entry.available(); !why.ok()) {
      return OptionError("backend", text, absl::StrCat("is not available: ", why.message()),
                         why.code());
    }
  }
  return absl::OkStatus();
}

}  // namespace ddp::backends
