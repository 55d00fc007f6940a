// The options of one object, accessible by name at run time. base/options.h makes the list from a
// struct; flags, validation, help and logs use it.
//
//   OptionList list = ListOptions(options);
//   DDP_RETURN_IF_ERROR(list.Set("lr", "0.5"));       // optimizer.lr
//   DDP_RETURN_IF_ERROR(list.Validate());
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp {

enum class OptionKind { kBool, kNumber, kText, kList };

// What the ranks of a job may have as the value of an option (base/same_options.h).
enum class OptionAcrossRanks {
  kSame,            // one value on all ranks
  kAllRanksOrNone,  // set on all ranks or on none; values may differ, as of a path
  kMayDiffer,       // anything: it is the rank's or its machine's own, or only rank 0's counts
};

// One option of one object.
struct OptionRef {
  std::string path;                       // "schedule.gamma"
  std::string help = "";                  // what it is, without its bounds
  std::string bounds = "";                // "at least 0"; empty if there are none
  std::vector<std::string> aliases = {};  // additional full names
  OptionKind kind = OptionKind::kText;    // of an optional: of its value
  // True if the option does not change what a run computes: see OptionSpec::Incidental.
  bool incidental = false;
  OptionAcrossRanks across_ranks = OptionAcrossRanks::kSame;
  bool any_bytes = false;  // the value may have bytes that are not UTF-8: OptionSpec::AnyBytes
  // Sets the object's member. The error message is the problem alone: "is not a whole number".
  std::function<absl::Status(absl::string_view text)> set = nullptr;
  std::function<std::string()> get = nullptr;
  // Checks the current value. The message is the problem alone. NotFound if it is not an allowed
  // name.
  std::function<absl::Status()> check = nullptr;
};

// A nested struct, shown as a section of the help.
struct OptionGroup {
  std::string path;
  std::string help;
};

// Points into the object it was made from, which must outlive it. Thread-compatible.
//
// An option can be named by
// - its path: "group.shm.segment_mb", or with '_' for '.': "group_shm_segment_mb";
// - an alias;
// - its group, if it is the option "name" of that group: "optimizer" for "optimizer.name";
// - any unique suffix of the path that starts after a '.': "shm_segment_mb", "segment_mb".
// If several of these match, the first in this order wins.
class OptionList {
 public:
  void Add(OptionRef option);
  void AddGroup(OptionGroup group);
  // The options from number `begin` on (of options()) may differ between ranks.
  void LetDiffer(size_t begin);

  // NotFound, with similar names, for an unknown name. InvalidArgument, with the candidates, for an
  // ambiguous one. The result points into this list.
  absl::StatusOr<const OptionRef*> Find(absl::string_view name) const;

  // Parses and assigns. OptionError if `value` has the wrong type; errors of Find. Does not check
  // the range: see Validate.
  absl::Status Set(absl::string_view name, absl::string_view value) const;

  // OptionError for the first option whose value is out of range.
  absl::Status Validate() const;

  // Path and value of each option, in order of declaration.
  std::vector<std::pair<std::string, std::string>> Table() const;

  // The name shown to users, by path: the first alias of more than one letter, or the shortest
  // unique name.
  std::map<std::string, std::string> ShortNames() const;

  // The text for --help: options with values, help and bounds, by group. `prefix` ("--") precedes
  // each name.
  std::string Describe(absl::string_view prefix) const;

  // AlreadyExists if two options have the same path, or if an alias is the name of another option.
  absl::Status CheckNames() const;

  const std::vector<OptionRef>& options() const { return options_; }

 private:
  std::string ShortName(const OptionRef& option) const;
  std::vector<const OptionRef*> Matches(absl::string_view name) const;

  std::vector<OptionRef> options_;
  std::vector<OptionGroup> groups_;
};

// "; did you mean A, B?" with the nearest three of `candidates`, for messages about a misspelled
// name; empty if none is near. Thread-safe.
std::string DidYouMean(absl::string_view name, const std::vector<std::string>& candidates);

}  // namespace ddp
