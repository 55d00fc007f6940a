#include "base/options.h"

#include <algorithm>
#include <cmath>

namespace ddp {

std::vector<std::string> OptionBounds::Names() const {
  if (names_from != nullptr) return names_from();
  return {names.begin(), names.begin() + num_names};
}

std::string OptionBounds::Describe() const {
  std::vector<std::string> parts;
  if (least) parts.push_back(absl::StrCat("at least ", FormatOption(*least)));
  if (above) parts.push_back(absl::StrCat("more than ", FormatOption(*above)));
  // Larger bounds only prevent arithmetic overflow: not shown.
  constexpr double kMostShown = 1e6;
  if (most && *most < kMostShown) parts.push_back(absl::StrCat("at most ", FormatOption(*most)));
  if (num_names > 0 || names_from != nullptr) parts.push_back(absl::StrJoin(Names(), ", "));
  return absl::StrJoin(parts, ", ");
}

std::string OptionBounds::Problem(double value) const {
  if (std::isnan(value)) return "must be a number";
  if (least && !(value >= *least)) return absl::StrCat("must be at least ", FormatOption(*least));
  if (above && !(value > *above)) return absl::StrCat("must be more than ", FormatOption(*above));
  if (most && !(value <= *most)) return absl::StrCat("must be at most ", FormatOption(*most));
  return std::isinf(value) ? "must be finite" : "";
}

std::string OptionBounds::Problem(absl::string_view value) const {
  if (!names_are_checked || (num_names == 0 && names_from == nullptr)) return "";
  const std::vector<std::string> allowed = Names();
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return "";
  return absl::StrCat("is none of ", absl::StrJoin(allowed, ", "));
}

}  // namespace ddp
