// Environment variables as a value: a snapshot that tests can construct and that cannot race with
// setenv.
//
//   Environment env = Environment::FromProcess();
//   DDP_ASSIGN_OR_RETURN(int rank, env.GetInt("RANK", 0, 1 << 20));
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp {

// An immutable set of variables. Thread-compatible; copies are independent.
class Environment {
 public:
  Environment() = default;
  Environment(std::initializer_list<std::pair<const std::string, std::string>> variables);
  explicit Environment(std::map<std::string, std::string> variables);

  // Snapshot of this process's environment.
  static Environment FromProcess();

  // A variable that is set to the empty string counts as absent.
  std::optional<std::string> Get(absl::string_view name) const;
  bool Has(absl::string_view name) const { return Get(name).has_value(); }

  // NotFound if absent. InvalidArgument, naming variable and value, if it is not a decimal integer
  // in [min, max].
  absl::StatusOr<int64_t> GetInt(absl::string_view name, int64_t min, int64_t max) const;

  // Returns, for messages, "NAME=value NAME=value" for the `names` that are set; "none" if none is.
  std::string Describe(const std::vector<std::string>& names) const;

  const std::map<std::string, std::string>& variables() const { return variables_; }

  // For tests: Get, Has and GetInt of this object and of its copies add each requested name to
  // `*names`, which must outlive them. Describe does not record: it only prints.
  void RecordReads(std::set<std::string>* names) { reads_ = names; }

 private:
  std::optional<std::string> Find(absl::string_view name) const;

  std::map<std::string, std::string> variables_;
  std::set<std::string>* reads_ = nullptr;
};

}  // namespace ddp
