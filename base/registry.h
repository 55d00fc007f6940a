// Registries map a string id to an implementation that is linked into the program.
//
//   struct FormatTag { static constexpr absl::string_view kWhat = "format"; };
//   using FormatRegistry = ddp::Registry<FormatEntry, FormatTag>;  // interface's header
//   const ddp::Registration<FormatRegistry> kPt(                   // implementation's .cc
//       "pt", FormatEntry{.create = &Create});
//   DDP_ASSIGN_OR_RETURN(const FormatEntry entry, FormatRegistry::Find("pt"));
//
// Put the registration object into the implementation's .cc and set `alwayslink = True` on its
// target; otherwise the linker drops it.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/log/absl_check.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace ddp {

// Maps ids to factories of one interface. `Factory` is copyable: a function pointer, a struct of
// them. `Tag` has `static constexpr absl::string_view kWhat` (such as "backend") for messages.
// Thread safety: filled before main() by Registration objects, read-only afterwards.
template <typename Factory, typename Tag>
class Registry {
 public:
  // NotFound names the unknown id and lists the linked ones.
  static absl::StatusOr<Factory> Find(absl::string_view id) {
    const auto& entries = Entries();
    auto it = entries.find(std::string(id));
    if (it == entries.end()) {
      return absl::NotFoundError(
          absl::StrCat("unknown ", Tag::kWhat, " '", id,
                       "'; linked into this program: ", absl::StrJoin(Names(), ", ")));
    }
    return it->second;
  }

  // The linked ids, sorted.
  static std::vector<std::string> Names() {
    std::vector<std::string> names;
    for (const auto& [name, factory] : Entries()) names.push_back(name);
    return names;
  }

  // All entries by id.
  static const std::map<std::string, Factory>& All() { return Entries(); }

  // CHECK-fails if `id` is registered already.
  static void Add(absl::string_view id, Factory factory) {
    const bool fresh = Entries().emplace(std::string(id), std::move(factory)).second;
    ABSL_CHECK(fresh) << Tag::kWhat << " '" << id << "' is registered twice";
  }

 private:
  static std::map<std::string, Factory>& Entries() {
    static auto* entries = new std::map<std::string, Factory>();
    return *entries;
  }
};

// Adds one entry during static initialisation.
template <typename R>
class Registration {
 public:
  template <typename Factory>
  Registration(absl::string_view id, Factory factory) {
    R::Add(id, std::move(factory));
  }
};

}  // namespace ddp
