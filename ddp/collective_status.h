// Statuses of code with collectives. They distinguish this rank's own failure from a collective
// that failed because of another rank.
//
//   absl::Status status = CatchCollective("summing", [&] { group->allreduce(sums)->wait(); });
//   if (IsFromCollective(status)) …  // another rank has failed, or the network
#pragma once

#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "c10/util/Exception.h"

namespace ddp {

namespace collective_internal {

inline constexpr absl::string_view kFromCollective = "libtorch_ddp/from_collective";

inline absl::Status Marked(absl::Status status) {
  status.SetPayload(kFromCollective, absl::Cord(""));
  return status;
}

}  // namespace collective_internal

// Whether a collective failed (c10::DistError), as CatchCollective has marked it. Annotate keeps
// the mark.
inline bool IsFromCollective(const absl::Status& status) {
  return status.GetPayload(collective_internal::kFromCollective).has_value();
}

// CatchStatus (base/status.h) that marks the statuses of c10d's exceptions.
template <typename F>
auto CatchCollective(absl::string_view context, F&& f) {
  bool from_collective = false;
  auto result = CatchStatus(context, [&]() -> std::invoke_result_t<F> {
    try {
      return std::forward<F>(f)();
    } catch (const c10::DistError&) {
      from_collective = true;
      throw;
    }
  });
  if (!from_collective) return result;
  if constexpr (std::is_same_v<decltype(result), absl::Status>) {
    return collective_internal::Marked(std::move(result));
  } else {
    return decltype(result)(collective_internal::Marked(std::move(result).status()));
  }
}

}  // namespace ddp
