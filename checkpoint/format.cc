#include "checkpoint/format.h"

#include "base/status.h"

namespace ddp::checkpoint {

absl::StatusOr<std::unique_ptr<Format>> CreateFormat(absl::string_view name,
                                                     const FormatOptions& options) {
  DDP_ASSIGN_OR_RETURN(const FormatEntry entry, FormatRegistry::Find(name));
  return entry.create(options);
}

}  // namespace ddp::checkpoint
