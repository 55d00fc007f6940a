// Numbers in JSON, which has no NaN and no infinities: they are the strings "NaN", "Infinity" and
// "-Infinity", as in protobuf's JSON format. Thread-safe.
#pragma once

#include <cmath>
#include <limits>
#include <optional>

#include "nlohmann/json.hpp"

namespace ddp {

inline nlohmann::ordered_json ToJson(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

// The reverse of ToJson; nullopt if `value` is something else than a number.
inline std::optional<double> NumberFromJson(const nlohmann::json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (value == "Infinity") return std::numeric_limits<double>::infinity();
  if (value == "-Infinity") return -std::numeric_limits<double>::infinity();
  return std::nullopt;
}

}  // namespace ddp
