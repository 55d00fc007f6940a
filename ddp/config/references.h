// References in the values of a configuration file and of a command line, as OmegaConf has them: to
// other options and to the environment.
//
//   ReplaceReferences("${log_dir}/${oc.env:USER,me}", lookup)   // "runs/a/me"
//   ReplaceReferences("\\${lr}", lookup)                         // "${lr}": a text
#pragma once

#include <functional>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/option_flags.h"
#include "base/options.h"

namespace ddp::config {

// Whether `text` has "${", which begins a reference or, behind a backslash, is text.
bool HasReferences(absl::string_view text);

// Replaces "${oc.env:NAME}" by a variable of this process's environment, "${oc.env:NAME,DEFAULT}"
// by DEFAULT if there is none, and "${NAME}" by lookup(NAME). DEFAULT may have references.
// InvalidArgument, whose message is the problem alone: a brace without its end, a variable that is
// not set, another resolver ("${now:…}"); errors of `lookup`. Thread-safe.
absl::StatusOr<std::string> ReplaceReferences(
    absl::string_view text,
    const std::function<absl::StatusOr<std::string>(absl::string_view name)>& lookup);

// Sets each option whose value has references, after the options of `assignments` (by path) that
// the value refers to. A reference to any other option gives the value that this has now: when that
// changes, call the function again. Errors name the option as it was written: those of
// ReplaceReferences and OptionSetter::Set; InvalidArgument for a name that no option has, and for
// references in a circle. Thread-compatible.
absl::Status SetReferences(const std::map<std::string, OptionAssignment>& assignments,
                           const OptionList& list, OptionSetter& setter);

}  // namespace ddp::config
