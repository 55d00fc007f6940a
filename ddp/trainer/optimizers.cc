#include "ddp/trainer/optimizers.h"

#include <algorithm>
#include <map>
#include <regex>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/option_error.h"
#include "base/option_text.h"
#include "base/status.h"
#include "checkpoint/name_map.h"
#include "ddp/trainer/taken_options.h"
#include "optim/fused.h"
#include "torch/optim/adagrad.h"
#include "torch/optim/lbfgs.h"
#include "torch/optim/rmsprop.h"

namespace ddp::trainer {
namespace {

using torch::optim::OptimizerParamGroup;

constexpr double kMomentumOfSgd = 0.9;

absl::StatusOr<optim::OptimizerFactory> MakeSgd(const OptimizerOptions& options) {
  const double momentum = options.momentum.value_or(kMomentumOfSgd);
  if (options.nesterov && (momentum == 0 || options.dampening != 0)) {
    return OptionError("nesterov", "true", "needs a momentum above 0, and dampening 0");
  }
  return optim::FactoryOf<optim::FusedSGD>(torch::optim::SGDOptions(options.lr)
                                               .momentum(momentum)
                                               .dampening(options.dampening)
                                               .weight_decay(options.weight_decay)
                                               .nesterov(options.nesterov));
}

template <typename Optimizer, typename Options>
absl::StatusOr<optim::OptimizerFactory> MakeAdam(const OptimizerOptions& options) {
  const std::vector<double>& betas = options.betas;
  if (betas.size() != 2 || betas[0] >= 1 || betas[1] >= 1) {
    return OptionError("betas", FormatOption(betas),
                       "must be two numbers below 1, as in 0.9,0.999");
  }
  return optim::FactoryOf<Optimizer>(Options(options.lr)
                                         .betas(std::make_tuple(betas[0], betas[1]))
                                         .eps(options.eps.value_or(1e-8))
                                         .weight_decay(options.weight_decay)
                                         .amsgrad(options.amsgrad));
}

absl::StatusOr<optim::OptimizerFactory> MakeAdagrad(const OptimizerOptions& options) {
  return optim::FactoryOf<torch::optim::Adagrad>(
      torch::optim::AdagradOptions(options.lr)
          .lr_decay(options.lr_decay)
          .weight_decay(options.weight_decay)
          .initial_accumulator_value(options.initial_accumulator_value)
          .eps(options.eps.value_or(1e-10)));
}

absl::StatusOr<optim::OptimizerFactory> MakeRmsProp(const OptimizerOptions& options) {
  return optim::FactoryOf<torch::optim::RMSprop>(torch::optim::RMSpropOptions(options.lr)
                                                     .alpha(options.alpha)
                                                     .eps(options.eps.value_or(1e-8))
                                                     .weight_decay(options.weight_decay)
                                                     .momentum(options.momentum.value_or(0))
                                                     .centered(options.centered));
}

const Registration<OptimizerRegistry> kSgd("sgd",
                                           OptimizerEntry{.make = &MakeSgd,
                                                          .takes = {"momentum", "weight_decay",
                                                                    "dampening", "nesterov"}});
const Registration<OptimizerRegistry> kAdam(
    "adam", OptimizerEntry{.make = &MakeAdam<optim::FusedAdam, torch::optim::AdamOptions>,
                           .takes = {"weight_decay", "betas", "eps", "amsgrad"}});
const Registration<OptimizerRegistry> kAdamW(
    "adamw", OptimizerEntry{.make = &MakeAdam<optim::FusedAdamW, torch::optim::AdamWOptions>,
                            .takes = {"weight_decay", "betas", "eps", "amsgrad"}});
const Registration<OptimizerRegistry> kAdagrad(
    "adagrad",
    OptimizerEntry{.make = &MakeAdagrad,
                   .takes = {"weight_decay", "eps", "lr_decay", "initial_accumulator_value"}});
const Registration<OptimizerRegistry> kRmsProp(
    "rmsprop", OptimizerEntry{.make = &MakeRmsProp,
                              .takes = {"momentum", "weight_decay", "eps", "alpha", "centered"}});

bool Contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Refuses what has been given and has no effect.
absl::Status CheckOptions(const OptimizerOptions& given, const OptimizerEntry& entry) {
  OptimizerOptions options = given, defaults;
  // Once the default of all optimizers, which configurations of runs have.
  if (options.momentum == kMomentumOfSgd) options.momentum.reset();
  TakenOptions taken = {.name = given.name, .takes = {"lr"}, .of_all = {"name", "groups"}};
  taken.takes.insert(taken.takes.end(), entry.takes.begin(), entry.takes.end());
  if (Contains(entry.takes, "weight_decay")) taken.of_all.push_back("no_decay");
  return CheckTaken(ListOptions(options), ListOptions(defaults), taken);
}

// A group of OptimizerOptions::groups.
struct GroupRule {
  std::string pattern;
  std::regex regex = {};
  std::optional<double> lr = {}, lr_mult = {}, weight_decay = {};
};

absl::Status GroupsError(const OptimizerOptions& options, absl::string_view problem) {
  return OptionError("groups", options.groups, problem);
}

// Takes ":KEY=VALUE" from the end of `text`, if it has one there.
std::optional<std::pair<std::string, std::string>> TakeSetting(std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return std::nullopt;
  const std::string setting = text.substr(colon + 1);
  const size_t equals = setting.find('=');
  if (equals == 0 || equals == std::string::npos) return std::nullopt;
  const std::string key = setting.substr(0, equals);
  const bool is_word = std::all_of(key.begin(), key.end(),
                                   [](char c) { return (c >= 'a' && c <= 'z') || c == '_'; });
  if (!is_word) return std::nullopt;
  text.resize(colon);
  return std::make_pair(key, setting.substr(equals + 1));
}

absl::StatusOr<GroupRule> ParseGroup(const OptimizerOptions& options, const std::string& text) {
  GroupRule rule{.pattern = text};
  const std::map<std::string, std::optional<double>*> keys = {
      {"lr", &rule.lr}, {"lr_mult", &rule.lr_mult}, {"weight_decay", &rule.weight_decay}};
  bool has_any = false;
  while (const auto setting = TakeSetting(rule.pattern)) {
    const auto& [key, value] = *setting;
    const auto known = keys.find(key);
    if (known == keys.end()) {
      return GroupsError(options, absl::StrCat("has the unknown key '", key, "' in '", text,
                                               "'; the keys are lr, lr_mult, weight_decay"));
    }
    double number = 0;
    const absl::Status parsed = ParseOption(value, number);
    if (!parsed.ok() || number < 0) {
      return GroupsError(options, absl::StrCat("has '", text, "', whose ", key, " ",
                                               parsed.ok() ? "must be at least 0"
                                                           : std::string(parsed.message())));
    }
    if (known->second->has_value()) {
      return GroupsError(options, absl::StrCat("has '", text, "', which gives ", key, " twice"));
    }
    *known->second = number;
    has_any = true;
  }
  if (!has_any || rule.pattern.empty()) {
    return GroupsError(options, absl::StrCat("has '", text,
                                             "', which is not of the form PATTERN:KEY=VALUE, as in "
                                             "bias|norm:weight_decay=0"));
  }
  if (rule.lr && rule.lr_mult) {
    return GroupsError(options, absl::StrCat("has '", text, "', which gives lr and lr_mult"));
  }
  try {
    rule.regex = std::regex(rule.pattern, std::regex::ECMAScript);
  } catch (const std::regex_error& error) {
    return GroupsError(options, absl::StrCat("has no valid regular expression '", rule.pattern,
                                             "' (ECMAScript): ", error.what()));
  }
  return rule;
}

absl::StatusOr<std::vector<GroupRule>> ParseGroups(const OptimizerOptions& options) {
  std::vector<GroupRule> rules;
  if (options.groups.empty()) return rules;
  for (const std::string& text : checkpoint::SplitRules(options.groups)) {
    DDP_ASSIGN_OR_RETURN(GroupRule rule, ParseGroup(options, text));
    rules.push_back(std::move(rule));
  }
  return rules;
}

absl::StatusOr<OptimizerEntry> EntryOf(const OptimizerOptions& options) {
  absl::StatusOr<OptimizerEntry> entry = OptimizerRegistry::Find(options.name);
  if (entry.ok()) return entry;
  const bool is_lbfgs = options.name == "lbfgs";
  return OptionError(
      "name", options.name,
      absl::StrCat(is_lbfgs ? "computes the loss several times per step, by a closure, which a "
                              "training step does not have; it "
                            : "",
                   "is none of ", absl::StrJoin(OptimizerRegistry::Names(), ", ")),
      is_lbfgs ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kNotFound);
}

// What makes an optimizer of these options, once they have been checked.
absl::StatusOr<OptimizerMaker> MakerOf(const OptimizerOptions& options,
                                       const OptimizerMaker& maker) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  DDP_ASSIGN_OR_RETURN(const std::vector<GroupRule> rules, ParseGroups(options));
  if (maker != nullptr) return maker;
  DDP_ASSIGN_OR_RETURN(const OptimizerEntry entry, EntryOf(options));
  DDP_RETURN_IF_ERROR(CheckOptions(options, entry));
  const bool has_decay = Contains(entry.takes, "weight_decay");
  for (const GroupRule& rule : rules) {
    if (!rule.weight_decay || has_decay) continue;
    return GroupsError(
        options, absl::StrCat("has '", rule.pattern, "' with weight_decay, which is no option of ",
                              options.name));
  }
  return entry.make;
}

// Options of torch's for one group: those that an optimizer of no parameters has as its defaults.
absl::StatusOr<std::unique_ptr<torch::optim::OptimizerOptions>> DefaultsOf(
    const OptimizerMaker& maker, const OptimizerOptions& options) {
  DDP_ASSIGN_OR_RETURN(const optim::OptimizerFactory make, maker(options));
  std::unique_ptr<torch::optim::OptimizerOptions> defaults;
  DDP_RETURN_IF_ERROR(CatchStatus("the optimizer", [&]() -> absl::Status {
    const std::unique_ptr<torch::optim::Optimizer> optimizer =
        make({OptimizerParamGroup(std::vector<at::Tensor>())});
    if (dynamic_cast<const torch::optim::LBFGS*>(optimizer.get()) != nullptr) {
      return absl::InvalidArgumentError(
          "LBFGS computes the loss several times per step, by a closure, which a training step "
          "does not have");
    }
    defaults = optimizer->defaults().clone();
    return absl::OkStatus();
  }));
  return defaults;
}

// LibTorch takes an option of a group that has its class's default, as weight_decay=0, for one that
// was not given, and replaces it by the optimizer's.
optim::OptimizerFactory KeepingOptions(optim::OptimizerFactory make) {
  return [make = std::move(make)](std::vector<OptimizerParamGroup> groups) {
    std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> own;
    for (const OptimizerParamGroup& group : groups) {
      own.push_back(group.has_options() ? group.options().clone() : nullptr);
    }
    std::unique_ptr<torch::optim::Optimizer> optimizer = make(std::move(groups));
    for (size_t g = 0; g < own.size(); ++g) {
      if (own[g] != nullptr) optimizer->param_groups()[g].set_options(std::move(own[g]));
    }
    return optimizer;
  };
}

// Some of LibTorch's square complex gradients. Python's, and those of optim/fused.h, take them as
// pairs of real numbers.
absl::Status CheckComplex(const OptimizerOptions& options, bool is_named,
                          const optim::OptimizerFactory& make,
                          const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  const auto complex = std::find_if(parameters.begin(), parameters.end(),
                                    [](const auto& named) { return named.second.is_complex(); });
  if (complex == parameters.end()) return absl::OkStatus();
  const std::unique_ptr<torch::optim::Optimizer> it =
      make({OptimizerParamGroup(std::vector<at::Tensor>())});
  const torch::optim::Optimizer* optimizer = it.get();
  const bool is_adam = dynamic_cast<const torch::optim::Adam*>(optimizer) != nullptr &&
                       dynamic_cast<const optim::FusedAdam*>(optimizer) == nullptr;
  const bool is_adamw = dynamic_cast<const torch::optim::AdamW*>(optimizer) != nullptr &&
                        dynamic_cast<const optim::FusedAdamW*>(optimizer) == nullptr;
  if (!is_adam && !is_adamw && dynamic_cast<const torch::optim::Adagrad*>(optimizer) == nullptr &&
      dynamic_cast<const torch::optim::RMSprop*>(optimizer) == nullptr) {
    return absl::OkStatus();
  }
  const std::string problem =
      absl::StrCat("squares the gradients of complex parameters, as '", complex->first,
                   "' is one, where Python's takes them as pairs of real numbers; choose sgd, adam "
                   "or adamw");
  if (is_named) return OptionError("name", options.name, problem);
  return absl::InvalidArgumentError(absl::StrCat("the optimizer ", problem));
}

// The number of the rule that `name` belongs to, from 1; 0: none matches.
absl::StatusOr<size_t> RuleOf(const OptimizerOptions& options, const std::vector<GroupRule>& rules,
                              const std::string& name, std::vector<bool>& matches) {
  size_t found = 0;
  for (size_t i = rules.size(); i > 0; --i) {
    try {
      if (name.size() > checkpoint::kMostMatched || !std::regex_search(name, rules[i - 1].regex)) {
        continue;
      }
    } catch (const std::regex_error& error) {
      return GroupsError(options, absl::StrCat("has '", rules[i - 1].pattern,
                                               "', which cannot be matched: ", error.what()));
    }
    matches[i - 1] = true;
    found = i;
  }
  return found;
}

}  // namespace

absl::StatusOr<optim::OptimizerFactory> OptimizerOf(const OptimizerOptions& options,
                                                    const OptimizerMaker& maker) {
  DDP_ASSIGN_OR_RETURN(const OptimizerMaker make, MakerOf(options, maker));
  DDP_RETURN_IF_ERROR(DefaultsOf(make, options).status());
  return make(options);
}

absl::Status CheckStateIsKnown(const OptimizerOptions& options, const OptimizerMaker& maker,
                               absl::string_view user) {
  DDP_ASSIGN_OR_RETURN(const optim::OptimizerFactory make, OptimizerOf(options, maker));
  absl::Status known;
  DDP_RETURN_IF_ERROR(CatchStatus("the optimizer", [&] {
    known = optim::KindOf(*make({OptimizerParamGroup(std::vector<at::Tensor>())})).status();
  }));
  if (known.ok()) return absl::OkStatus();
  const std::string problem = absl::StrCat("does not go with ", user, ": ",
                                           absl::StripPrefix(known.message(), "optimizer state: "));
  if (maker == nullptr) return OptionError("name", options.name, problem);
  return absl::InvalidArgumentError(absl::StrCat("the optimizer of make_optimizer ", problem));
}

absl::StatusOr<ParameterGroups> GroupParameters(
    const OptimizerOptions& options, const OptimizerMaker& given,
    const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  DDP_ASSIGN_OR_RETURN(const OptimizerMaker maker, MakerOf(options, given));
  DDP_RETURN_IF_ERROR(DefaultsOf(maker, options).status());
  DDP_ASSIGN_OR_RETURN(const std::vector<GroupRule> rules, ParseGroups(options));
  // By rule, and whether they are not decayed.
  std::map<std::pair<size_t, bool>, std::vector<size_t>> members;
  std::vector<bool> matches(rules.size(), false);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i];
    DDP_ASSIGN_OR_RETURN(const size_t rule, RuleOf(options, rules, name, matches));
    const bool has_decay = rule > 0 && rules[rule - 1].weight_decay.has_value();
    members[{rule, options.no_decay && !has_decay && parameter.dim() < 2}].push_back(i);
  }
  for (size_t i = 0; i < rules.size(); ++i) {
    if (members.contains({i + 1, false}) || members.contains({i + 1, true})) continue;
    std::vector<std::string> names;
    for (const auto& [name, parameter] : parameters) names.push_back(name);
    const std::string near = DidYouMean(rules[i].pattern, names);
    return GroupsError(
        options,
        absl::StrCat("has the pattern '", rules[i].pattern,
                     matches[i] ? "', but a pattern before it has taken all that it matches"
                                : "', which matches no trainable parameter",
                     matches[i]     ? ""
                     : near.empty() ? absl::StrCat("; there are ", checkpoint::FirstNames(names))
                                    : near));
  }
  ParameterGroups all;
  DDP_ASSIGN_OR_RETURN(optim::OptimizerFactory make, maker(options));
  all.make = KeepingOptions(std::move(make));
  DDP_RETURN_IF_ERROR(CheckComplex(options, /*is_named=*/given == nullptr, all.make, parameters));
  if (members.empty()) members[{0, false}] = {};
  for (const auto& [key, numbers] : members) {
    const auto& [rule, no_decay] = key;
    OptimizerOptions own = options;
    if (rule > 0) {
      const GroupRule& values = rules[rule - 1];
      own.lr = values.lr.value_or(options.lr * values.lr_mult.value_or(1));
      own.weight_decay = values.weight_decay.value_or(options.weight_decay);
    }
    if (no_decay) own.weight_decay = 0;
    std::vector<at::Tensor> tensors;
    for (const size_t number : numbers) {
      tensors.push_back(parameters[number].second);
      all.names.push_back(parameters[number].first);
    }
    all.descriptions.push_back(absl::StrCat(
        rule > 0 ? rules[rule - 1].pattern : "all others", no_decay ? ", no_decay: " : ": ",
        numbers.size(), " parameters, lr ", own.lr, ", weight_decay ", own.weight_decay));
    all.groups.emplace_back(std::move(tensors));
    if (rule == 0 && !no_decay && members.size() == 1) break;
    DDP_ASSIGN_OR_RETURN(auto defaults, DefaultsOf(maker, own));
    all.groups.back().set_options(std::move(defaults));
  }
  return all;
}

}  // namespace ddp::trainer
