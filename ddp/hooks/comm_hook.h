// Communication hooks by name: what DistributedDataParallel does with each bucket of gradients.
//
//   hooks::CommHookOptions options = {.name = "bf16_compress"};
//   DDP_RETURN_IF_ERROR(hooks::Register(options, group, model->parallel()));
//   loss.backward();                  // sends half of the bytes
//   model->parallel().comm_bytes();   // how many
//
// "allreduce" (what DistributedDataParallel does without a hook) and noop (each rank keeps its own
// gradients) are in this target. The others are in targets of their own, and :all links them:
// fp16_compress, bf16_compress (compress.h), powersgd (powersgd.h).
//
// A hook of your own is one more registration, in a target with alwayslink = True that the program
// links; then --comm_hook=mine reaches it. If it needs several rounds of communication per bucket,
// derive it from RoundsHook (rounds.h).
//
//   absl::StatusOr<HookPtr> Create(const CommHookOptions& options, const GroupPtr& group) {
//     return std::make_unique<MyHook>(group, options.implementations.Get<MyOptions>("mine").width);
//   }
//   const ddp::Registration<HookRegistry> kMine(
//       "mine", HookEntry{.create = &Create, .options = &AnyOptions::Of<MyOptions>});
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/implementation_options.h"
#include "base/options.h"
#include "base/registry.h"
#include "c10/core/ScalarType.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/comm.hpp"

namespace ddp {
class ModelWrapper;
}

namespace ddp::checkpoint {
class Stateful;
}

namespace ddp::hooks {

struct CommHookOptions;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using HookPtr = std::unique_ptr<c10d::CommHookInterface>;

struct HookEntry {
  // Called on all ranks of a group of two or more; not collective. Null: no hook is registered.
  absl::StatusOr<HookPtr> (*create)(const CommHookOptions& options,
                                    const GroupPtr& group) = nullptr;
  // &AnyOptions::Of<…> for the hook's own options, "comm_hook.NAME.…"; null: it has none.
  AnyOptions (*options)() = nullptr;
  // OptionError (paths relative to CommHookOptions) for options that make no sense together. Null:
  // there are none. Not collective; called before ranks are started.
  absl::Status (*validate)(const CommHookOptions& options) = nullptr;
  // Set if the hook only reduces gradients in this dtype; zero.stage=2 then supports it.
  std::optional<c10::ScalarType> wire_dtype = std::nullopt;
};

struct HookTag {
  static constexpr absl::string_view kWhat = "communication hook";
};
using HookRegistry = Registry<HookEntry, HookTag>;

struct CommHookOptions {
  std::string name = "allreduce";
  ImplementationOptions implementations = ImplementationOptions::From<HookRegistry>();
};

constexpr auto OptionsOf(const CommHookOptions&) {
  return Options(Option("name", &CommHookOptions::name,
                        "communication hook: how buckets of gradients are reduced")
                     .OneOfThese(&HookRegistry::Names),
                 Inline(&CommHookOptions::implementations));
}

// Thread-safe. OptionError, with paths relative to CommHookOptions: an unknown name, which lists
// the linked ones; values out of range, of the chosen hook and others.
absl::Status Validate(const CommHookOptions& options);

// Not collective; call it on all ranks, once, before the first backward. Registers the hook with
// `parallel`, which was made with `group`; it does nothing for "allreduce" and with a world size of
// 1. A hook that has state, a checkpoint::Stateful, is also put into `state`, if that is given; it
// lives as long as `parallel`. Errors of Validate; OptionError if `parallel` has a hook already and
// this is not "allreduce".
absl::Status Register(const CommHookOptions& options, const GroupPtr& group, ModelWrapper& parallel,
                      checkpoint::Stateful** state = nullptr);

// The dtype that zero.stage=2 (zero::ZeroOptions::gradient_dtype) reduces in to do what the hook
// does; nullopt for "allreduce": the gradients' own. OptionError that lists the hooks which stage 2
// takes.
absl::StatusOr<std::optional<c10::ScalarType>> WireDtypeOf(const CommHookOptions& options);

}  // namespace ddp::hooks
