#include "ddp/collective_status.h"

#include "absl/strings/cord.h"

namespace ddp {
namespace {

constexpr absl::string_view kFromCollective = "libtorch_ddp/from_collective";

}  // namespace

bool IsFromCollective(const absl::Status& status) {
  return status.GetPayload(kFromCollective).has_value();
}

absl::Status collective_internal::Marked(absl::Status status) {
  status.SetPayload(kFromCollective, absl::Cord(""));
  return status;
}

}  // namespace ddp
