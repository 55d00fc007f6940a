// Conversion between the exceptions of c10d and their messages.
#pragma once

#include <exception>
#include <string>

#include "base/status.h"
#include "c10/util/Exception.h"

namespace ddp::backends::watch {

inline std::string Message(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return ExceptionMessage(e);
  } catch (...) {
    return "unknown error";
  }
}

inline bool IsC10Error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error&) {
    return true;
  } catch (...) {
    return false;
  }
}

inline std::exception_ptr MakeError(const std::string& text) {
  return std::make_exception_ptr(c10::DistBackendError(text));
}

}  // namespace ddp::backends::watch
