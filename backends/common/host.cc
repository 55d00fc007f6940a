#include "backends/common/host.h"

#include <unistd.h>

#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/host_name.h"

namespace ddp::backends {
namespace {

constexpr absl::string_view kUnknown = "-";

std::string FirstWord(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return std::string(kUnknown);
  absl::StripAsciiWhitespace(&*text);
  return text->empty() ? std::string(kUnknown) : text->substr(0, text->find_first_of(" \n\t"));
}

// "net:[4026531840]": the target of a link, which names the namespace by its inode.
std::string Namespace(absl::string_view proc, absl::string_view kind) {
  char target[64] = {};
  const std::string path = absl::StrCat(proc, "/self/ns/", kind);
  if (::readlink(path.c_str(), target, sizeof(target) - 1) <= 0) {
    return absl::StrCat(kind, ":", kUnknown);
  }
  return target;
}

}  // namespace

std::string HostId() { return internal::HostIdFrom("/proc", "/etc"); }

bool ShareNetwork(absl::string_view host_a, absl::string_view host_b) {
  const auto network = [](absl::string_view host) {
    const std::vector<absl::string_view> parts = absl::StrSplit(host, '/');
    return std::pair(parts[0], parts.size() > 1 ? parts[1] : "");
  };
  return network(host_a) == network(host_b);
}

namespace internal {

std::string HostIdFrom(absl::string_view proc, absl::string_view etc) {
  std::string boot = FirstWord(absl::StrCat(proc, "/sys/kernel/random/boot_id"));
  if (boot == kUnknown) {
    boot = absl::StrCat(FirstWord(absl::StrCat(etc, "/machine-id")), "@", HostName());
  }
  return absl::StrCat(boot, "/", Namespace(proc, "net"), "/", Namespace(proc, "pid"), "/",
                      Namespace(proc, "time"), "/uid:", ::geteuid());
}

}  // namespace internal
}  // namespace ddp::backends
