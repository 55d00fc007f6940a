// The name of this machine.
#pragma once

#include <limits.h>
#include <unistd.h>

#include <string>

namespace ddp {

// Returns what gethostname gives, or "localhost", for messages and files that people read.
// Thread-safe. Two hosts may have one name: HostId of backends/common tells them apart.
inline std::string HostName() {
  char name[HOST_NAME_MAX + 1] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 && name[0] != '\0' ? name : "localhost";
}

}  // namespace ddp
