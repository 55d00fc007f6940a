// Fuzz target: values of options on the command line, which may be choices of a sweep, lists, maps
// or quoted.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/fuzz_testing.h"
#include "base/option_text.h"
#include "ddp/config/choices.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ddp::config;  // NOLINT
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto choices = ParseChoices(text);
  if (choices.ok() && choices->empty()) std::abort();
  (void)LooksLikeChoices(text, ddp::OptionKind::kList);
  (void)CommasAreOfTheValue(text, ddp::OptionKind::kText);
  (void)UnknownSweepFunction(text);
  if (Unquoted(Quoted(text)) != text) std::abort();
  // The elements of a list make that list.
  const auto elements = ddp::SplitOptionList(text);
  if (elements.ok() &&
      ddp::SplitOptionList(ddp::FormatOption(*elements)).value_or(std::vector<std::string>()) !=
          *elements) {
    std::abort();
  }
  return 0;
}
