#include "ddp/config/yaml_file.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/option_text.h"
#include "base/status.h"
#include "ddp/config/choices.h"
#include "ddp/config/references.h"
#include "yaml-cpp/eventhandler.h"
#include "yaml-cpp/yaml.h"

namespace ddp::config {
namespace {

constexpr absl::string_view kDefaults = "defaults";
constexpr absl::string_view kSelf = "_self_";  // in defaults: the values of the file itself
constexpr absl::string_view kSweep = "sweep";
constexpr absl::string_view kMerge = "<<";
constexpr absl::string_view kExtension = ".yaml";
// More levels than any option has. Anchors can make a document endless.
constexpr int kMostLevels = 32;
constexpr size_t kMostIncludes = 32;

std::string BaseName(const std::string& path) { return path.substr(path.rfind('/') + 1); }

bool IsThere(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  return std::filesystem::exists(status) && !std::filesystem::is_directory(status);
}

// A file is taken as it is named, whether it is a pipe or has no extension.
std::string WithExtension(const std::string& path) {
  const std::string extended = absl::StrCat(path, kExtension);
  if (IsThere(path)) return path;
  if (IsThere(extended)) return extended;
  std::error_code error;
  const bool is_whole = absl::StrContains(BaseName(path), '.') ||
                        std::filesystem::is_directory(path, error);  // that is what is wrong
  return is_whole ? path : extended;
}

// Whether `name` is a group of options, or the last levels of one.
bool IsGroup(absl::string_view name, const OptionList& list) {
  for (const OptionRef& option : list.options()) {
    const absl::string_view path = option.path;
    for (size_t dot = path.find('.'); dot != path.npos; dot = path.find('.', dot + 1)) {
      const absl::string_view group = path.substr(0, dot);
      if (group == name || absl::EndsWith(group, absl::StrCat(".", name))) return true;
    }
  }
  return false;
}

// The first line whose indentation has a tab; 0 if there is none.
int LineWithTab(absl::string_view text) {
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    const size_t begin = line.find_first_not_of(" \t");
    if (begin != line.npos && absl::StrContains(line.substr(0, begin), '\t')) return number;
  }
  return 0;
}

// Where documents begin.
class DocumentStarts final : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark& mark) override { marks.push_back(mark); }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t,
                const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}

  std::vector<YAML::Mark> marks;
};

// Where the second document begins; nullopt if there is one at most. YAML::LoadAll does not end if
// a text begins with a comma, which yaml-cpp takes for any number of empty documents.
std::optional<YAML::Mark> SecondDocument(const std::string& text) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  DocumentStarts starts;
  while (starts.marks.size() < 2 && parser.HandleNextDocument(starts)) {
  }
  if (starts.marks.size() < 2) return std::nullopt;
  return starts.marks[1];
}

using Items = std::vector<std::pair<YAML::Node, YAML::Node>>;

// Reads one file. Read calls itself for each file that it includes.
class Reader {
 public:
  Reader(const OptionList& list, const OptionList& own) : list_(list), own_(own) {}

  // `from` is the place that includes the file, "FILE:LINE: ", or empty.
  absl::StatusOr<ConfigFile> Read(const std::string& path, const std::string& from) {
    if (std::find(open_.begin(), open_.end(), path) != open_.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          from, "the file includes itself: ", absl::StrJoin(open_, " -> "), " -> ", path));
    }
    if (open_.size() >= kMostIncludes) {
      return absl::InvalidArgumentError(absl::StrCat(from, "too many files include each other"));
    }
    DDP_ASSIGN_OR_RETURN(const std::string text, Contents(path, from));
    open_.push_back(path);
    absl::StatusOr<ConfigFile> file;
    try {
      file = Document(text);
    } catch (const YAML::Exception& error) {
      const int tab = LineWithTab(text);
      file = absl::InvalidArgumentError(
          tab > 0
              ? absl::StrCat(path, ":", tab, ": a tab in the indentation; YAML takes blanks only")
              : absl::StrCat(At(error.mark), error.msg));
    }
    open_.pop_back();
    return file;
  }

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

  absl::StatusOr<ConfigFile> Document(const std::string& text) {
    ConfigFile file;
    if (const std::optional<YAML::Mark> second = SecondDocument(text)) {
      return absl::InvalidArgumentError(
          absl::StrCat(At(*second), "a second document in one file, or what is no YAML"));
    }
    const YAML::Node root = YAML::Load(text);
    if (root.IsNull()) return file;
    if (!root.IsMap()) return Error(root, "a configuration is a map: 'optimizer: {lr: 0.1}'");
    DDP_ASSIGN_OR_RETURN(const Items items, ItemsOf(root));
    Seen seen, swept;
    ConfigFile own;
    for (const auto& [key, value] : items) {
      const std::string& name = key.Scalar();
      if (name == kDefaults) continue;
      if (name == kSweep && !value.IsMap()) {
        return Error(key, "sweep is a map of options: 'sweep: {seed: range(0, 3)}'");
      }
      const bool is_sweep = name == kSweep;
      const auto& programs = own_.options();
      const auto program = std::find_if(programs.begin(), programs.end(),
                                        [&](const OptionRef& o) { return o.path == name; });
      if (program != programs.end()) {
        DDP_ASSIGN_OR_RETURN(std::string text, Text(value));
        own.own.push_back({name, std::move(text), absl::StrCat(At(key.Mark()), name)});
        continue;
      }
      DDP_RETURN_IF_ERROR(
          Value(key, value, is_sweep ? "" : name, is_sweep, own, is_sweep ? swept : seen, 1));
    }
    // The order in the file does not matter: what is included comes first, unless defaults says
    // where the file itself comes.
    bool has_own = false;
    for (const auto& [key, value] : items) {
      if (key.Scalar() == kDefaults) DDP_RETURN_IF_ERROR(Include(value, own, file, has_own));
    }
    if (!has_own) Append(file, std::move(own));
    return file;
  }

  // The keys and values of a map, with those that it merges. yaml-cpp keeps both of two equal keys,
  // and knows no merge key.
  absl::StatusOr<Items> ItemsOf(const YAML::Node& map, int level = 0) const {
    if (level > kMostLevels) return Error(map, "too many levels");
    Items items, merged;
    std::map<std::string, int> lines;
    for (const auto& item : map) {
      if (!item.first.IsScalar()) return Error(item.first, "a key must be the name of an option");
      const auto [at, is_new] = lines.emplace(item.first.Scalar(), item.first.Mark().line + 1);
      if (!is_new) {
        return Error(item.first, absl::StrCat("'", at->first, "' stands here for the second time; ",
                                              "first in line ", at->second));
      }
      if (item.first.Scalar() != kMerge) {
        items.emplace_back(item.first, item.second);
        continue;
      }
      std::vector<YAML::Node> sources;
      if (item.second.IsSequence()) {
        for (const YAML::Node& source : item.second) sources.push_back(source);
      } else {
        sources.push_back(item.second);
      }
      for (const YAML::Node& source : sources) {
        if (!source.IsMap()) {
          return Error(item.first,
                       "'<<' merges a map, or a list of maps, of this file: '<<: *anchor'");
        }
        DDP_ASSIGN_OR_RETURN(const Items more, ItemsOf(source, level + 1));
        merged.insert(merged.end(), more.begin(), more.end());
      }
    }
    // What the map itself says wins, then the maps that come first.
    for (const auto& item : merged) {
      if (lines.emplace(item.first.Scalar(), 0).second) items.push_back(item);
    }
    return items;
  }

  // Appends to `file` the files that are named, and `own` where it is: then sets has_own.
  absl::Status Include(const YAML::Node& names, const ConfigFile& own, ConfigFile& file,
                       bool& has_own) {
    if (!names.IsSequence()) return Error(names, "defaults is a list of files: [base, model/cnn]");
    for (const YAML::Node& name : names) {
      if (!name.IsScalar()) {
        return Error(name, "defaults has names of files, merged at the root: model/cnn");
      }
      const std::string& text = name.Scalar();
      if (text == kSelf) {
        if (has_own) return Error(name, "defaults has _self_ for the second time");
        has_own = true;
        Append(file, own);
        continue;
      }
      const bool absolute = absl::StartsWith(text, "/");
      const std::filesystem::path path =
          WithExtension(absolute ? text : absl::StrCat(DirectoryOf(open_.back()), "/", text));
      // One spelling for each file: "model/../base.yaml" is "base.yaml".
      DDP_ASSIGN_OR_RETURN(ConfigFile included, Read(path.lexically_normal(), At(name.Mark())));
      Append(file, std::move(included));
    }
    return absl::OkStatus();
  }

  // `name` is the option or group that `node` is the value of. If it is empty, `node` is a map of
  // options.
  absl::Status Value(const YAML::Node& key, const YAML::Node& node, const std::string& name,
                     bool is_sweep, ConfigFile& file, Seen& seen, int level) {
    if (level > kMostLevels) return Error(key, "too many levels");
    const bool is_group = !name.empty() && IsGroup(name, list_);
    if (node.IsNull() && is_group) return absl::OkStatus();  // all its lines are comments
    if (!node.IsMap()) return Set(key, node, name, is_sweep, file, seen);
    DDP_ASSIGN_OR_RETURN(const Items items, ItemsOf(node));
    if (items.empty() && !is_group && !name.empty()) {
      if (const absl::Status found = Find(key, name).status(); !found.ok()) return found;
    }
    for (const auto& [inner_key, value] : items) {
      const std::string& inner = inner_key.Scalar();
      DDP_RETURN_IF_ERROR(Value(inner_key, value,
                                name.empty() ? inner : absl::StrCat(name, ".", inner), is_sweep,
                                file, seen, level + 1));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<const OptionRef*> Find(const YAML::Node& key, const std::string& name) const {
    absl::StatusOr<const OptionRef*> found = list_.Find(name);
    if (found.ok()) return found;
    return absl::Status(found.status().code(),
                        absl::StrCat(At(key.Mark()), found.status().message()));
  }

  absl::Status Set(const YAML::Node& key, const YAML::Node& node, const std::string& name,
                   bool is_sweep, ConfigFile& file, Seen& seen) {
    DDP_ASSIGN_OR_RETURN(const OptionRef* const found, Find(key, name));
    const OptionRef& option = *found;
    const int line = key.Mark().line + 1;
    const auto [first, is_new] = seen.emplace(option.path, line);
    if (!is_new) {
      return Error(key, absl::StrCat(option.path, " is set for the second time; first in line ",
                                     first->second));
    }
    const std::string written = absl::StrCat(At(key.Mark()), name);
    if (is_sweep) {
      DDP_ASSIGN_OR_RETURN(std::vector<std::string> values,
                           SweptValues(node, written, option.kind));
      file.sweep.push_back({option.path, std::move(values), written});
      return absl::OkStatus();
    }
    if (node.IsSequence() && option.kind != OptionKind::kList) {
      return absl::InvalidArgumentError(
          absl::StrCat(written,
                       " is a list, but the option takes one value; several are choices "
                       "under sweep: only"));
    }
    bool has_references = false;
    DDP_ASSIGN_OR_RETURN(std::string value, Text(node, &has_references));
    file.assignments.push_back({{option.path, std::move(value), written}, has_references});
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<std::string>> SweptValues(const YAML::Node& node,
                                                       const std::string& written,
                                                       OptionKind kind) const {
    if (!node.IsSequence()) {
      DDP_ASSIGN_OR_RETURN(const std::string text, Text(node));
      const absl::string_view unknown = UnknownSweepFunction(text);
      absl::StatusOr<std::vector<std::string>> values = std::vector<std::string>{text};
      if (!unknown.empty()) {
        values = absl::InvalidArgumentError(NoSuchSweepFunction(unknown));
      } else if (!CommasAreOfTheValue(text, kind)) {
        values = ParseChoices(text);
      }
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

  // A scalar, or a list of scalars as "[a, b]". Sets *has_references if it has any; an error if
  // that is null.
  absl::StatusOr<std::string> Text(const YAML::Node& node, bool* has_references = nullptr) const {
    if (node.IsNull()) return "";
    if (node.IsScalar()) {
      const std::string& text = node.Scalar();
      if (!IsReference(node)) return text;
      if (has_references == nullptr) {
        return Error(node, absl::StrCat("'", text,
                                        "': references are replaced in values of options "
                                        "only; in quotes it is text"));
      }
      *has_references = true;
      return text;
    }
    if (!node.IsSequence()) return Error(node, "a value must be a scalar or a list of scalars");
    bool any = false;
    for (const YAML::Node& element : node)
      any = any || (element.IsScalar() && IsReference(element));
    if (any && has_references != nullptr) *has_references = true;
    std::vector<std::string> elements;
    for (const YAML::Node& element : node) {
      if (!element.IsScalar()) return Error(node, "an element of a list must be a scalar");
      const std::string& text = element.Scalar();
      elements.push_back(any && !IsReference(element) ? absl::StrReplaceAll(text, {{"${", "\\${"}})
                                                      : text);
      const auto alone = SplitOptionList(absl::StrCat("[", text, "]"));
      if (!alone.ok() || *alone != std::vector<std::string>{text}) {
        return Error(element,
                     absl::StrCat("'", text,
                                  "' cannot be an element of a list: it is empty, or has a "
                                  "comma outside of brackets or blanks at its ends"));
      }
    }
    std::string list = absl::StrCat("[", absl::StrJoin(elements, ", "), "]");
    const auto read = SplitOptionList(list);
    if (!read.ok() || *read != elements) {
      return Error(node, absl::StrCat("'", list, "' has brackets that are not in pairs"));
    }
    return list;
  }

  // A quoted scalar (tag "!" in yaml-cpp) is text, as ToYaml writes it.
  static bool IsReference(const YAML::Node& node) {
    return HasReferences(node.Scalar()) && node.Tag() != "!";
  }

  const OptionList& list_;
  const OptionList& own_;
  std::vector<std::string> open_;  // the file being read, after those that include it
};

}  // namespace

absl::StatusOr<ConfigFile> ReadConfigFile(const std::string& path, const OptionList& list,
                                          const OptionList& own) {
  Reader reader(list, own);
  const std::filesystem::path file = WithExtension(path);
  return reader.Read(file.lexically_normal(), "");
}

void Append(ConfigFile& file, ConfigFile later) {
  const auto swept = [&](const std::string& path) {
    return std::find_if(file.sweep.begin(), file.sweep.end(),
                        [&](const Choices& choices) { return choices.path == path; });
  };
  for (FileAssignment& assignment : later.assignments) {
    if (const auto before = swept(assignment.path); before != file.sweep.end()) {
      file.sweep.erase(before);
    }
    file.assignments.push_back(std::move(assignment));
  }
  for (Choices& choices : later.sweep) {
    // They keep the place, so that the order of the jobs does not change.
    if (const auto before = swept(choices.path); before != file.sweep.end()) {
      *before = std::move(choices);
    } else {
      file.sweep.push_back(std::move(choices));
    }
  }
  for (OptionAssignment& assignment : later.own) file.own.push_back(std::move(assignment));
}

}  // namespace ddp::config
