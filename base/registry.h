// Registries: a string id names an implementation that some linked target brought.
//
//   struct FormatTag { static constexpr absl::string_view kWhat = "format"; };
//   using FormatRegistry = ddp::Registry<FormatFactory, FormatTag>;  // interface's header
//   const ddp::Registration<FormatRegistry> kPt("pt", &Create);      // implementation's .cc
//   DDP_ASSIGN_OR_RETURN(FormatFactory create, FormatRegistry::Find("pt"));
//
// The registration object stands in the implementation's .cc, in a target with `alwayslink = True`
// (the linker drops it otherwise).
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

// Id -> factory, for one seam. `Factory` is copyable: a function pointer or a std::function.
// `Tag` has `static constexpr absl::string_view kWhat` (such as "backend") for messages.
// Thread safety: filled before main() by Registration objects, read-only afterwards.
template <typename Factory, typename Tag>
class Registry {
 public:
  // NotFound names the unknown id and lists, sorted, what this program links.
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

  // Ids of what is linked in, sorted.
  static std::vector<std::string> Names() {
    std::vector<std::string> names;
    for (const auto& [name, factory] : Entries()) names.push_back(name);
    return names;
  }

  // What is linked in, by id.
  static const std::map<std::string, Factory>& All() { return Entries(); }

  // Two of one id is a broken build: fatal.
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
