#include "ddp/tree/codec.h"

#include "base/status.h"

namespace ddp {

absl::Status CatchTorch(const char* what, absl::FunctionRef<absl::Status()> call) {
  return CatchStatus(what, call);
}

}  // namespace ddp
