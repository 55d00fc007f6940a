// The options of one object, found by name at run time. base/options.h makes the list from a
// struct's declaration; flags, files, validation, help and logs work on it.
//
//   OptionList list = ListOptions(options);
//   DDP_RETURN_IF_ERROR(list.Set("lr", "0.5"));       // optimizer.lr
//   DDP_RETURN_IF_ERROR(list.Validate());
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp {

// One option of one object.
struct OptionRef {
  std::string path;                       // "schedule.gamma"
  std::string help = "";                  // what it is, without its bounds
  std::string bounds = "";                // "at least 0"; empty if there are none
  std::vector<std::string> aliases = {};  // further names, as a whole
  bool is_bool = false;
  // Sets the object's member; the error has the problem alone: "is not a whole number".
  std::function<absl::Status(absl::string_view text)> set = nullptr;
  std::function<std::string()> get = nullptr;
  // What is wrong with the value it has now, without its name. NotFound: it is no allowed name.
  std::function<absl::Status()> check = nullptr;
};

// A nested struct, for help.
struct OptionGroup {
  std::string path;
  std::string help;
};

// References the object it was made of, which must outlive it. Thread-compatible.
//
// An option has many names: its path ("group.shm.segment_mb"), the path with '_' for '.'
// ("group_shm_segment_mb"), any tail of these that begins at a level ("shm_segment_mb",
// "segment_mb") and belongs to no other option, its aliases; and the option "name" of a group has
// the names of the group ("optimizer" for "optimizer.name"). A whole path comes before an alias, an
// alias before a group, a group before a tail.
class OptionList {
 public:
  void Add(OptionRef option);
  void AddGroup(OptionGroup group);

  // NotFound names the nearest names; InvalidArgument lists the options that an ambiguous name may
  // mean.
  absl::StatusOr<const OptionRef*> Find(absl::string_view name) const;

  // OptionError with the option's path if it has no such value. The value's range is Validate's to
  // check, when all values are known.
  absl::Status Set(absl::string_view name, absl::string_view value) const;

  // OptionError for the first option whose value is out of range.
  absl::Status Validate() const;

  // Path and value of each option, in order of declaration.
  std::vector<std::pair<std::string, std::string>> Table() const;

  // The name of each option that users are shown, by path: its alias, or the shortest that means
  // it and no other.
  std::map<std::string, std::string> ShortNames() const;

  // For --help: a line an option, by group, with `prefix` ("--") before each name.
  std::string Describe(absl::string_view prefix) const;

  // What makes the list unusable: two options of one path, or an alias that is another's name.
  absl::Status CheckNames() const;

  const std::vector<OptionRef>& options() const { return options_; }

 private:
  std::string ShortName(const OptionRef& option) const;
  std::vector<const OptionRef*> Matches(absl::string_view name) const;

  std::vector<OptionRef> options_;
  std::vector<OptionGroup> groups_;
};

}  // namespace ddp
