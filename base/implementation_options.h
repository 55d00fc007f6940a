// Options of one implementation of an interface, such as the segment size of backend shm. The
// struct and its option list are in the implementation's folder, and its registry entry returns the
// defaults. The options of the interface hold the options of every linked implementation, by id.
//
//   // backends/shm: struct ShmOptions, its OptionsOf, and in the registry entry
//   {.create = &Create, .options = &AnyOptions::Of<ShmOptions>}
//   // backends/backend.h, struct GroupOptions: makes group.shm.segment_mb and so on
//   ImplementationOptions implementations = ImplementationOptions::From<BackendRegistry>();
//   // in its option list: Inline(&GroupOptions::implementations)
//   // to set:  options.implementations.Mutable<ShmOptions>("shm").segment_mb = 64;
//   // to read: const auto shm = options.implementations.Get<ShmOptions>("shm");
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

// Any struct that has an option list. A value: copies are independent. Thread-compatible.
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

// One AnyOptions per implementation that has options. A value. Thread-compatible.
class ImplementationOptions {
 public:
  ImplementationOptions() = default;

  // The defaults of every linked implementation in `Registry` that has options.
  template <typename Registry>
  static ImplementationOptions From() {
    ImplementationOptions options;
    for (const auto& [id, entry] : Registry::All()) {
      if (entry.options != nullptr) options.by_id_.emplace(id, entry.options());
    }
    return options;
  }

  // The options of implementation `id`; S's defaults if it is not linked. CHECK-fails if its
  // options have another type than S.
  template <typename S>
  S Get(absl::string_view id) const {
    const auto it = by_id_.find(id);
    if (it == by_id_.end()) return S{};
    AnyOptions copy = it->second;
    const S* options = copy.As<S>();
    ABSL_CHECK(options != nullptr)
        << "options of " << id << " are not of type " << typeid(S).name();
    return *options;
  }

  // Like Get, but returns a reference through which the caller changes the options. Adds the
  // options if `id` is not linked.
  template <typename S>
  S& Mutable(absl::string_view id) {
    AnyOptions& any = by_id_.try_emplace(std::string(id), AnyOptions::Of<S>()).first->second;
    S* options = any.As<S>();
    ABSL_CHECK(options != nullptr)
        << "options of " << id << " are not of type " << typeid(S).name();
    return *options;
  }

  // Called by base/options.h: appends `prefix` + "shm.segment_mb" and so on.
  void AppendOptions(const std::string& prefix, OptionList& list) {
    for (auto& [id, options] : by_id_) {
      list.AddGroup({absl::StrCat(prefix, id), absl::StrCat("options of ", id)});
      options.AppendOptions(absl::StrCat(prefix, id, "."), list);
    }
  }

 private:
  std::map<std::string, AnyOptions, std::less<>> by_id_;
};

}  // namespace ddp
