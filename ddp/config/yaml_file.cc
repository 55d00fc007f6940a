#include "ddp/config/yaml_file.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/status.h"
#include "ddp/config/choices.h"
#include "yaml-cpp/yaml.h"

namespace ddp::config {
namespace {

constexpr absl::string_view kDefaults = "defaults";
constexpr absl::string_view kSweep = "sweep";
constexpr absl::string_view kExtension = ".yaml";
// More levels than any option has. Anchors can make a document endless.
constexpr int kMostLevels = 32;

std::string BaseName(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::string WithExtension(const std::string& path) {
  return BaseName(path).find('.') == std::string::npos ? absl::StrCat(path, kExtension) : path;
}

// Reads one file. Read calls itself for each file that it includes.
class Reader {
 public:
  explicit Reader(const OptionList& list) : list_(list) {}

  // `from` is the place that includes the file, "FILE:LINE: ", or empty.
  absl::Status Read(const std::string& path, const std::string& from) {
    if (std::find(open_.begin(), open_.end(), path) != open_.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          from, "the file includes itself: ", absl::StrJoin(open_, " -> "), " -> ", path));
    }
    DDP_ASSIGN_OR_RETURN(const std::string text, Contents(path, from));
    open_.push_back(path);
    absl::Status status;
    try {
      status = Document(text);
    } catch (const YAML::Exception& error) {
      status = absl::InvalidArgumentError(absl::StrCat(At(error.mark), error.msg));
    }
    open_.pop_back();
    return status;
  }

  ConfigFile Take() { return std::move(file_); }

 private:
  // The line of each option that one file has set, by path, to find duplicates.
  using Seen = std::map<std::string, int>;

  std::string At(const YAML::Mark& mark) const {
    const std::string line = mark.is_null() ? "" : absl::StrCat(":", mark.line + 1);
    return absl::StrCat(open_.back(), line, ": ");
  }

  absl::Status Error(const YAML::Node& node, absl::string_view problem) const {
    return absl::InvalidArgumentError(absl::StrCat(At(node.Mark()), problem));
  }

  absl::StatusOr<std::string> Contents(const std::string& path, const std::string& from) const {
    absl::StatusOr<std::string> text = ReadFile(path);
    if (text.ok()) return text;
    std::string advice;
    const absl::StatusOr<std::vector<std::string>> names = ListDirectory(DirectoryOf(path));
    if (absl::IsNotFound(text.status()) && names.ok()) advice = DidYouMean(BaseName(path), *names);
    return absl::Status(
        text.status().code(),
        absl::StrCat(from, "configuration file: ", text.status().message(), advice));
  }

  absl::Status Document(const std::string& text) {
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    if (documents.empty() || documents[0].IsNull()) return absl::OkStatus();
    const YAML::Node& root = documents[0];
    if (documents.size() > 1) return Error(documents[1], "a second document in one file");
    if (!root.IsMap()) return Error(root, "a configuration is a map: 'optimizer: {lr: 0.1}'");
    DDP_RETURN_IF_ERROR(CheckKeys(root));
    // The order in the file does not matter: what is included comes first.
    for (const auto& item : root) {
      if (item.first.Scalar() == kDefaults) DDP_RETURN_IF_ERROR(Includes(item.second));
    }
    Seen seen, swept;
    for (const auto& item : root) {
      const std::string& key = item.first.Scalar();
      if (key == kDefaults) continue;
      if (key == kSweep && !item.second.IsMap()) {
        return Error(item.first, "sweep is a map of options: 'sweep: {seed: range(0, 3)}'");
      }
      const bool is_sweep = key == kSweep;
      DDP_RETURN_IF_ERROR(Value(item.first, item.second, is_sweep ? "" : key, is_sweep,
                                is_sweep ? swept : seen, 1));
    }
    return absl::OkStatus();
  }

  // yaml-cpp keeps both of two equal keys.
  absl::Status CheckKeys(const YAML::Node& map) const {
    std::map<std::string, int> lines;
    for (const auto& item : map) {
      if (!item.first.IsScalar()) return Error(item.first, "a key must be the name of an option");
      const auto [at, is_new] = lines.emplace(item.first.Scalar(), item.first.Mark().line + 1);
      if (!is_new) {
        return Error(item.first, absl::StrCat("'", at->first, "' stands here for the second time; ",
                                              "first in line ", at->second));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Includes(const YAML::Node& names) {
    if (!names.IsSequence()) return Error(names, "defaults is a list of files: [base, model/cnn]");
    for (const YAML::Node& name : names) {
      if (!name.IsScalar()) {
        return Error(name, "defaults has names of files, merged at the root: model/cnn");
      }
      const std::string& text = name.Scalar();
      const bool absolute = absl::StartsWith(text, "/");
      const std::filesystem::path path =
          WithExtension(absolute ? text : absl::StrCat(DirectoryOf(open_.back()), "/", text));
      // One spelling for each file: "model/../base.yaml" is "base.yaml".
      DDP_RETURN_IF_ERROR(Read(path.lexically_normal(), At(name.Mark())));
    }
    return absl::OkStatus();
  }

  // `name` is the option or group that `node` is the value of. If it is empty, `node` is a map of
  // options.
  absl::Status Value(const YAML::Node& key, const YAML::Node& node, const std::string& name,
                     bool is_sweep, Seen& seen, int level) {
    if (level > kMostLevels) return Error(key, "too many levels");
    if (!node.IsMap()) return Set(key, node, name, is_sweep, seen);
    DDP_RETURN_IF_ERROR(CheckKeys(node));
    for (const auto& item : node) {
      const std::string& inner = item.first.Scalar();
      DDP_RETURN_IF_ERROR(Value(item.first, item.second,
                                name.empty() ? inner : absl::StrCat(name, ".", inner), is_sweep,
                                seen, level + 1));
    }
    return absl::OkStatus();
  }

  absl::Status Set(const YAML::Node& key, const YAML::Node& node, const std::string& name,
                   bool is_sweep, Seen& seen) {
    const absl::StatusOr<const OptionRef*> found = list_.Find(name);
    if (!found.ok()) {
      return absl::Status(found.status().code(),
                          absl::StrCat(At(key.Mark()), found.status().message()));
    }
    const OptionRef& option = **found;
    const int line = key.Mark().line + 1;
    const auto [first, is_new] = seen.emplace(option.path, line);
    if (!is_new) {
      return Error(key, absl::StrCat(option.path, " is set for the second time; first in line ",
                                     first->second));
    }
    const std::string written = absl::StrCat(At(key.Mark()), name);
    if (is_sweep) {
      DDP_ASSIGN_OR_RETURN(std::vector<std::string> values, SweptValues(node, written));
      file_.sweep.push_back({option.path, std::move(values), written});
      return absl::OkStatus();
    }
    if (node.IsSequence() && option.kind != OptionKind::kList) {
      return absl::InvalidArgumentError(
          absl::StrCat(written,
                       " is a list, but the option takes one value; several are choices "
                       "under sweep: only"));
    }
    DDP_ASSIGN_OR_RETURN(std::string value, Text(node));
    file_.assignments.push_back({option.path, std::move(value), written});
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<std::string>> SweptValues(const YAML::Node& node,
                                                       const std::string& written) const {
    if (!node.IsSequence()) {
      DDP_ASSIGN_OR_RETURN(const std::string text, Text(node));
      absl::StatusOr<std::vector<std::string>> values = ParseChoices(text);
      if (values.ok()) return values;
      return absl::InvalidArgumentError(
          absl::StrCat(written, "=", text, " ", values.status().message()));
    }
    std::vector<std::string> values;
    for (const YAML::Node& element : node) {
      DDP_ASSIGN_OR_RETURN(std::string value, Text(element));
      values.push_back(std::move(value));
    }
    if (values.empty()) return absl::InvalidArgumentError(absl::StrCat(written, " has no choices"));
    return values;
  }

  // A scalar, or a list of scalars as "[a, b]".
  absl::StatusOr<std::string> Text(const YAML::Node& node) const {
    if (node.IsNull()) return "";
    if (node.IsScalar()) {
      const std::string& text = node.Scalar();
      // A quoted scalar (tag "!" in yaml-cpp) is text, as ToYaml writes it.
      if (absl::StrContains(text, "${") && node.Tag() != "!") {
        return Error(node,
                     absl::StrCat("'", text, "': references are not replaced here; in quotes ",
                                  "it is text"));
      }
      return text;
    }
    if (!node.IsSequence()) return Error(node, "a value must be a scalar or a list of scalars");
    std::vector<std::string> elements;
    for (const YAML::Node& element : node) {
      if (!element.IsScalar()) return Error(node, "an element of a list must be a scalar");
      const std::string& text = element.Scalar();
      if (text.empty() || text.find_first_of(",[]") != std::string::npos) {
        return Error(element, absl::StrCat("'", text,
                                           "' cannot be an element of a list: it is "
                                           "empty, or has a comma or bracket"));
      }
      elements.push_back(text);
    }
    return absl::StrCat("[", absl::StrJoin(elements, ", "), "]");
  }

  const OptionList& list_;
  ConfigFile file_;
  std::vector<std::string> open_;  // the file being read, after those that include it
};

}  // namespace

absl::StatusOr<ConfigFile> ReadConfigFile(const std::string& path, const OptionList& list) {
  Reader reader(list);
  const std::filesystem::path file = WithExtension(path);
  DDP_RETURN_IF_ERROR(reader.Read(file.lexically_normal(), ""));
  return reader.Take();
}

}  // namespace ddp::config
