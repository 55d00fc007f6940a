#include "backends/common/interfaces.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"

namespace ddp::backends {

std::vector<std::string> ChosenInterfaces(absl::string_view interface, absl::string_view hostname,
                                          const Environment& env) {
  std::string joined(interface);
  if (joined.empty() && hostname.empty()) joined = env.Get(kInterfaceVariable).value_or("");
  std::vector<std::string> names;
  if (joined.empty()) return names;
  for (absl::string_view name : absl::StrSplit(joined, ',')) {
    names.emplace_back(absl::StripAsciiWhitespace(name));
  }
  return names;
}

}  // namespace ddp::backends
