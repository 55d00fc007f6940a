// Options that one implementation behind a seam has and the others have not: shm's segment, SLURM's
// partition. The struct and its list stand in the implementation's folder; its registry entry hands
// out the default, and the seam's own options hold one of each, by id.
//
//   // backends/shm: struct ShmOptions, its OptionsOf, and in the registry entry
//   {.create = &Create, .options = &AnyOptions::Of<ShmOptions>}
//   // the seam's struct: group.shm.segment_mb and the like
//   ImplementationOptions implementations = ImplementationOptions::From<BackendRegistry>();
//   // in the list: Inline(&GroupOptions::implementations)
//   // the user:    options.implementations.Mutable<ShmOptions>("shm").segment_mb = 64;
//   // shm:         const auto shm = options.implementations.Get<ShmOptions>("shm");
#pragma once

#include <map>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>

#include "absl/log/absl_check.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/options.h"

namespace ddp {

// A struct with a list of options, whatever its type. A value: copies are independent.
class AnyOptions {
 public:
  AnyOptions() = default;  // no options
  AnyOptions(const AnyOptions& other)
      : held_(other.held_ == nullptr ? nullptr : other.held_->Copy()) {}
  AnyOptions(AnyOptions&&) = default;
  AnyOptions& operator=(AnyOptions other) {
    held_ = std::move(other.held_);
    return *this;
  }

  // `S` with its defaults.
  template <typename S>
  static AnyOptions Of() {
    AnyOptions options;
    options.held_ = std::make_unique<Held<S>>();
    return options;
  }

  // Null if it holds another type.
  template <typename S>
  S* As() {
    auto* held = dynamic_cast<Held<S>*>(held_.get());
    return held == nullptr ? nullptr : &held->options;
  }

  void AppendOptions(const std::string& prefix, OptionList& list) {
    if (held_ != nullptr) held_->AppendOptions(prefix, list);
  }

 private:
  struct Holder {
    virtual ~Holder() = default;
    virtual std::unique_ptr<Holder> Copy() const = 0;
    virtual void AppendOptions(const std::string& prefix, OptionList& list) = 0;
  };

  template <typename S>
  struct Held final : Holder {
    std::unique_ptr<Holder> Copy() const override { return std::make_unique<Held>(*this); }
    void AppendOptions(const std::string& prefix, OptionList& list) override {
      option_internal::Append(options, prefix, list);
    }
    S options = {};
  };

  std::unique_ptr<Holder> held_;
};

// One AnyOptions for each implementation of a seam that has options. A value.
class ImplementationOptions {
 public:
  ImplementationOptions() = default;

  // The defaults of everything that is linked in and has options.
  template <typename Registry>
  static ImplementationOptions From() {
    ImplementationOptions options;
    for (const auto& [id, entry] : Registry::All()) {
      if (entry.options != nullptr) options.by_id_.emplace(id, entry.options());
    }
    return options;
  }

  // The options of implementation `id`; its defaults where it is not linked in.
  template <typename S>
  S Get(absl::string_view id) const {
    const auto it = by_id_.find(id);
    if (it == by_id_.end()) return S{};
    AnyOptions copy = it->second;
    const S* options = copy.As<S>();
    ABSL_CHECK(options != nullptr) << "options of " << id << " are no " << typeid(S).name();
    return *options;
  }

  // The same, to change; added where it is not linked in.
  template <typename S>
  S& Mutable(absl::string_view id) {
    AnyOptions& any = by_id_.try_emplace(std::string(id), AnyOptions::Of<S>()).first->second;
    S* options = any.As<S>();
    ABSL_CHECK(options != nullptr) << "options of " << id << " are no " << typeid(S).name();
    return *options;
  }

  // base/options.h calls it: "shm.segment_mb" and the like after `prefix`.
  void AppendOptions(const std::string& prefix, OptionList& list) {
    for (auto& [id, options] : by_id_) {
      list.AddGroup({absl::StrCat(prefix, id), absl::StrCat("of ", id, " alone")});
      options.AppendOptions(absl::StrCat(prefix, id, "."), list);
    }
  }

 private:
  std::map<std::string, AnyOptions, std::less<>> by_id_;
};

}  // namespace ddp
