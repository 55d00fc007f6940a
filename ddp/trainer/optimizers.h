// Optimizers by name, those of torch::optim with fused steps where there are some, and their
// parameter groups.
//
//   OptimizerOptions options{.name = "adamw", .lr = 1e-3, .groups = R"(bias|norm:weight_decay=0)"};
//   DDP_ASSIGN_OR_RETURN(ParameterGroups all, GroupParameters(options, nullptr, parameters));
//   std::unique_ptr<torch::optim::Optimizer> optimizer = all.make(std::move(all.groups));
//
// A program may link its own, in a target with alwayslink = True, and then say --optimizer=lion:
//
//   struct LionOptions { double beta = 0.9; };  // and its OptionsOf: optimizer.lion.beta
//   absl::StatusOr<optim::OptimizerFactory> MakeLion(const OptimizerOptions& options) {
//     const auto own = options.implementations.Get<LionOptions>("lion");
//     return optim::FactoryOf<Lion>(torch_options(options.lr, options.weight_decay, own.beta));
//   }
//   const Registration<OptimizerRegistry> kLion(
//       "lion", OptimizerEntry{.make = &MakeLion,
//                              .takes = {"weight_decay"},
//                              .options = &AnyOptions::Of<LionOptions>});
//
// Checkpoints and ZeRO need to know its state, too: optim/kind.h.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/implementation_options.h"
#include "base/options.h"
#include "base/registry.h"
#include "optim/kind.h"
#include "optim/state_dict.h"
#include "torch/optim/optimizer.h"

namespace ddp::trainer {

struct OptimizerOptions;

// Makes the factory of an optimizer whose defaults are these options. It is called once for each
// parameter group, with the group's lr and weight_decay. Does not communicate, and gives the same
// on all ranks.
using OptimizerMaker =
    std::function<absl::StatusOr<optim::OptimizerFactory>(const OptimizerOptions& options)>;

struct OptimizerEntry {
  OptimizerMaker make;
  // Names of the members of OptimizerOptions, besides lr, that it uses. Others may not be given.
  std::vector<std::string> takes;
  AnyOptions (*options)() = nullptr;  // its own, optimizer.NAME.…; null: none
};

struct OptimizerTag {
  static constexpr absl::string_view kWhat = "optimizer";
};
using OptimizerRegistry = Registry<OptimizerEntry, OptimizerTag>;

struct OptimizerOptions {
  std::string name = "sgd";
  double lr = 0.1;                                // before the schedule
  std::optional<double> momentum = std::nullopt;  // of sgd: 0.9; of rmsprop: 0
  double weight_decay = 0.0;
  // Parameter groups with values of their own: "PATTERN:KEY=VALUE:KEY=VALUE,…". PATTERN is a
  // regular expression of ECMAScript that is searched for in the parameters' names. A parameter
  // belongs to the first group whose pattern matches; those that no pattern matches are the group
  // that has the options below. Keys: lr; lr_mult, which multiplies the lr above; weight_decay. The
  // schedule scales each group's own rate.
  std::string groups = "";
  // No weight decay for parameters of less than two dimensions, which are biases and the weights of
  // norms, unless their group has a weight_decay of its own.
  bool no_decay = false;

  // Only some optimizers have each of these.
  double dampening = 0;                      // sgd
  bool nesterov = false;                     // sgd
  std::vector<double> betas = {0.9, 0.999};  // adam, adamw
  std::optional<double> eps = std::nullopt;  // adagrad: 1e-10; adam, adamw, rmsprop: 1e-8
  bool amsgrad = false;                      // adam, adamw
  double alpha = 0.99;                       // rmsprop
  bool centered = false;                     // rmsprop
  double lr_decay = 0;                       // adagrad
  double initial_accumulator_value = 0;      // adagrad

  ImplementationOptions implementations = ImplementationOptions::From<OptimizerRegistry>();
};

// `name` is checked by OptimizerOf: a program may have an optimizer of its own instead.
constexpr auto OptionsOf(const OptimizerOptions&) {
  return Options(
      Option("name", &OptimizerOptions::name, "optimizer").Lists(&OptimizerRegistry::Names),
      Option("lr", &OptimizerOptions::lr, "learning rate, which the schedule scales").AtLeast(0),
      Option("momentum", &OptimizerOptions::momentum,
             "momentum of sgd (auto: 0.9) and rmsprop (auto: 0)")
          .AtLeast(0),
      Option("weight_decay", &OptimizerOptions::weight_decay, "weight decay of the optimizer")
          .AtLeast(0),
      Option("groups", &OptimizerOptions::groups,
             "parameter groups: PATTERN:KEY=VALUE,…, PATTERN a regular expression for names of "
             "parameters; keys: lr, lr_mult, weight_decay"),
      Option("no_decay", &OptimizerOptions::no_decay,
             "no weight decay for parameters of less than two dimensions: biases, norms"),
      Option("dampening", &OptimizerOptions::dampening, "dampening of sgd's momentum")
          .AtLeast(0)
          .AtMost(1),
      Option("nesterov", &OptimizerOptions::nesterov, "Nesterov's momentum, of sgd"),
      Option("betas", &OptimizerOptions::betas, "decays of the two moments of adam and adamw")
          .AtLeast(0)
          .AtMost(1),
      Option("eps", &OptimizerOptions::eps,
             "added to denominators, of adam, adamw and rmsprop (auto: 1e-08) and adagrad (auto: "
             "1e-10)")
          .AtLeast(0),
      Option("amsgrad", &OptimizerOptions::amsgrad,
             "use the maximum of the second moment, of adam and adamw"),
      Option("alpha", &OptimizerOptions::alpha, "decay of the second moment, of rmsprop")
          .AtLeast(0)
          .AtMost(1),
      Option("centered", &OptimizerOptions::centered,
             "divide by the deviation from the mean gradient, of rmsprop"),
      Option("lr_decay", &OptimizerOptions::lr_decay, "decay of the learning rate, of adagrad")
          .AtLeast(0),
      Option("initial_accumulator_value", &OptimizerOptions::initial_accumulator_value,
             "first value of the sum of squares, of adagrad")
          .AtLeast(0),
      Inline(&OptimizerOptions::implementations));
}

// Makes this optimizer of any parameter groups, whole parameters or pieces of them. OptionError,
// relative to the options: values out of range, a name that is not linked, an option that is given
// and that this optimizer does not have, `groups` that cannot be read. `maker`, if it is not null,
// makes the optimizer instead of the one of `name`. Thread-safe.
absl::StatusOr<optim::OptimizerFactory> OptimizerOf(const OptimizerOptions& options,
                                                    const OptimizerMaker& maker = nullptr);

// Whether the state of this optimizer is known (optim/kind.h), as `user` needs it to be, such as
// "guard.on_anomaly=rollback". OptionError for `name`, relative to the options; InvalidArgument for
// one of `maker`; errors of OptimizerOf. Thread-safe.
absl::Status CheckStateIsKnown(const OptimizerOptions& options, const OptimizerMaker& maker,
                               absl::string_view user);
// The user in a run that saves the optimizer's state.
inline constexpr char kSavedState[] = "checkpoints that have its state (checkpoint.save_optimizer)";

// The parameters of a model in groups, for `make`.
struct ParameterGroups {
  optim::OptimizerFactory make;
  // None is empty, unless there are no parameters. The first has those that no pattern matches,
  // then comes a group for each pattern; with no_decay, after each group the part of it that is not
  // decayed. Within a group parameters keep their order. One group that has all has no options of
  // its own.
  std::vector<torch::optim::OptimizerParamGroup> groups;
  optim::ParameterNames names;  // by number through all groups
  // "bias|norm: 3 parameters, lr 0.1, weight_decay 0", by group.
  std::vector<std::string> descriptions;
};

// Errors of OptimizerOf; OptionError for a pattern that matches no parameter, or only such as
// belong to a group before it. Thread-safe.
absl::StatusOr<ParameterGroups> GroupParameters(
    const OptimizerOptions& options, const OptimizerMaker& maker,
    const std::vector<std::pair<std::string, at::Tensor>>& parameters);

}  // namespace ddp::trainer
