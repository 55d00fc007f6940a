// Status macros, and conversion of exceptions of torch, c10d and gloo to absl::Status.
//
//   absl::StatusOr<int> Parse(absl::string_view text);
//   absl::Status Use() {
//     DDP_ASSIGN_OR_RETURN(int n, Parse("3"));
//     return CatchStatus("allreduce on rank 0", [&] { group->allreduce(tensors)->wait(); });
//   }
#pragma once

#include <exception>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#define DDP_STATUS_CONCAT_INNER(a, b) a##b
#define DDP_STATUS_CONCAT(a, b) DDP_STATUS_CONCAT_INNER(a, b)

// Returns from the enclosing function if `expression` is not OK.
#define DDP_RETURN_IF_ERROR(expression)                             \
  do {                                                              \
    if (absl::Status ddp_status = (expression); !ddp_status.ok()) { \
      return ddp_status;                                            \
    }                                                               \
  } while (false)

// Declares or assigns `target` from a StatusOr, or returns its status. Expands to several
// statements: do not use it as the body of an `if` without braces.
#define DDP_ASSIGN_OR_RETURN(target, expression) \
  DDP_ASSIGN_OR_RETURN_IMPL(DDP_STATUS_CONCAT(ddp_status_or_, __LINE__), target, expression)
#define DDP_ASSIGN_OR_RETURN_IMPL(holder, target, expression) \
  auto holder = (expression);                                 \
  if (!holder.ok()) return std::move(holder).status();        \
  target = *std::move(holder)

namespace ddp {

// Prefixes the message: "context: message". Keeps code and payloads. OK stays OK.
absl::Status Annotate(const absl::Status& status, absl::string_view context);

// The message of an exception, without the C++ backtrace that c10::Error appends.
std::string ExceptionMessage(const std::exception& error);

// Status for an exception, by its text: DeadlineExceeded for a timeout, Unavailable for a lost
// connection, otherwise Internal.
absl::Status StatusFromException(absl::string_view context, const std::exception& error);

// Calls `f` and converts a std::exception to a status (StatusFromException) that starts with
// `context`. If `f` returns void or absl::Status, the result is a Status; if it returns a value or
// a StatusOr, the result is a StatusOr. Statuses that `f` returns are not changed.
template <typename F>
auto CatchStatus(absl::string_view context, F&& f) {
  using Result = std::invoke_result_t<F>;
  if constexpr (std::is_void_v<Result>) {
    try {
      std::forward<F>(f)();
      return absl::OkStatus();
    } catch (const std::exception& error) {
      return StatusFromException(context, error);
    }
  } else if constexpr (std::is_same_v<Result, absl::Status>) {
    try {
      return std::forward<F>(f)();
    } catch (const std::exception& error) {
      return StatusFromException(context, error);
    }
  } else if constexpr (std::is_constructible_v<Result, absl::Status> &&
                       !std::is_constructible_v<absl::Status, Result>) {
    // Result is a StatusOr already.
    try {
      return std::forward<F>(f)();
    } catch (const std::exception& error) {
      return Result(StatusFromException(context, error));
    }
  } else {
    using Or = absl::StatusOr<Result>;
    try {
      return Or(std::forward<F>(f)());
    } catch (const std::exception& error) {
      return Or(StatusFromException(context, error));
    }
  }
}

}  // namespace ddp
