// Fuzz target: a configuration file. What it sets, and what can be set, is written and read back.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/fuzz_testing.h"
#include "base/options.h"
#include "ddp/config/effective.h"
#include "ddp/config/references.h"
#include "ddp/config/yaml_file.h"

namespace ddp::config {
namespace {

struct ModelOptions {
  std::string name = "mlp";
  std::vector<std::string> words = {};
};
constexpr auto OptionsOf(const ModelOptions&) {
  return Options(Option("name", &ModelOptions::name, ""),
                 Option("words", &ModelOptions::words, ""));
}

struct FuzzedOptions {
  double lr = 0.1;
  int64_t seed = 0;
  bool flag = false;
  std::vector<double> reals = {};
  ModelOptions model = {};
};
constexpr auto OptionsOf(const FuzzedOptions&) {
  return Options(Option("lr", &FuzzedOptions::lr, ""), Option("seed", &FuzzedOptions::seed, ""),
                 Option("flag", &FuzzedOptions::flag, ""),
                 Option("reals", &FuzzedOptions::reals, ""),
                 Nested("model", &FuzzedOptions::model, ""));
}

struct OwnOptions {
  bool multirun = false;
};
constexpr auto OptionsOf(const OwnOptions&) {
  return Options(Option("multirun", &OwnOptions::multirun, ""));
}

// Sets what the file says, as far as the options take it.
void Set(const ConfigFile& file, const OptionList& list) {
  OptionSetter setter;
  const auto lookup = [](absl::string_view name) { return std::string(name); };
  for (FileAssignment assignment : file.assignments) {
    if (assignment.has_references) {
      const auto value = ReplaceReferences(assignment.value, lookup);
      if (!value.ok()) continue;
      assignment.value = *value;
    }
    setter.Set(assignment, list).IgnoreError();
  }
}

}  // namespace
}  // namespace ddp::config

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ddp::config;  // NOLINT
  FuzzedOptions options;
  OwnOptions own;
  const ddp::OptionList list = ddp::ListOptions(options);
  const auto file = ReadConfigFile(ddp::FuzzedFile(data, size), list, ddp::ListOptions(own));
  if (!file.ok()) return 0;
  for (const Choices& choices : file->sweep) {
    if (choices.values.empty()) std::abort();
  }
  Set(*file, list);
  const std::string text = ToYaml(list);
  const auto before = list.Table();
  options = FuzzedOptions();
  const auto again = ReadConfigFile(
      ddp::FuzzedFile(reinterpret_cast<const uint8_t*>(text.data()), text.size()), list);
  if (!again.ok()) std::abort();
  Set(*again, list);
  if (list.Table() != before) std::abort();
  return 0;
}
