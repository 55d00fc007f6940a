#include "ddp/trainer/guard/guard.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

#include "ATen/ops/linalg_vector_norm.h"
#include "ATen/ops/maximum.h"
#include "ATen/ops/stack.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "checkpoint/module_state.h"
#include "ddp/all_gather.h"
#include "ddp/collective_status.h"
#include "ddp/gather/gather.h"
#include "ddp/zero/zero_redundancy_optimizer.h"
#include "optim/state_dict.h"

namespace ddp::trainer {
namespace {

using checkpoint::CheckpointName;
using checkpoint::Dict;
using checkpoint::LoadNotes;
using checkpoint::State;

// Keys of the state.
constexpr char kLosses[] = "losses";
constexpr char kNorms[] = "gradient_norms";
constexpr char kLeftOut[] = "left_out";
constexpr char kRollBacks[] = "rollbacks";
constexpr char kSkips[] = "skips";
constexpr char kLastSkip[] = "last_skip";

constexpr size_t kMostExamplesInAMessage = 16;
constexpr double kRounding = std::numeric_limits<float>::epsilon();

// What a rank tells of a step with an anomaly.
struct Details {
  std::vector<int64_t> examples;
  double largest = -1;     // norm of its gradients
  int64_t parameter = -1;  // whose it is, or of the first that is not finite; -1: there is none
};
constexpr auto FieldsOf(const Details&) {
  return Fields(Field("examples", &Details::examples), Field("largest", &Details::largest),
                Field("parameter", &Details::parameter));
}

// A row of what the ranks exchange in each step.
enum Column { kLoss, kCount, kNorm, kFirstBad, kColumns };

// Checkpoints up to this one were saved before the run came to `position`, or there.
CheckpointName NewestAt(const Position& position) {
  if (position.sample == 0) return {.epochs = position.epoch, .steps = std::nullopt};
  return {.epochs = position.epoch, .steps = position.step};
}

at::Tensor NormOf(const at::Tensor& gradient) {
  const c10::NoGradGuard no_grad;
  const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
  // A float16 would overflow.
  const bool is_short = at::isReducedFloatingType(values.scalar_type());
  return at::linalg_vector_norm(values, 2, at::OptionalIntArrayRef(), /*keepdim=*/false,
                                is_short ? std::optional(at::kFloat) : std::nullopt);
}

int64_t FirstBad(const std::vector<double>& norms) {
  const auto bad =
      std::find_if(norms.begin(), norms.end(), [](double norm) { return !std::isfinite(norm); });
  return bad == norms.end() ? -1 : bad - norms.begin();
}

// Has the parameters and the state that this rank's step changes.
torch::optim::Optimizer& Inner(DistributedOptimizer& optimizer) {
  auto* zero = dynamic_cast<zero::ZeroRedundancyOptimizer*>(&optimizer.optimizer());
  return zero != nullptr ? zero->inner() : optimizer.optimizer();
}

std::string Examples(const std::vector<int64_t>& examples) {
  if (examples.empty()) return "none";
  const size_t said = std::min(examples.size(), kMostExamplesInAMessage);
  return absl::StrCat(
      absl::StrJoin(examples.begin(), examples.begin() + static_cast<std::ptrdiff_t>(said), ", "),
      said < examples.size() ? absl::StrCat(" and ", examples.size() - said, " more") : "");
}

c10::List<double> ListOf(const std::deque<double>& values) {
  c10::List<double> list;
  for (const double value : values) list.push_back(value);
  return list;
}

// nullopt: it is not a list of numbers.
std::optional<std::deque<double>> NumbersIn(const c10::IValue& list) {
  if (!list.isList()) return std::nullopt;
  std::deque<double> values;
  for (const c10::IValue& element : list.toListRef()) {
    const std::optional<double> value = optim::AsNumber(element);
    if (!value) return std::nullopt;
    values.push_back(*value);
  }
  return values;
}

}  // namespace

std::optional<RecentValues::Spread> RecentValues::spread() const {
  if (values_.size() < std::max<size_t>(2, most_ / 2)) return std::nullopt;
  const auto n = static_cast<double>(values_.size());
  Spread spread;
  spread.mean = std::accumulate(values_.begin(), values_.end(), 0.0) / n;
  double squares = 0;
  for (const double value : values_) squares += (value - spread.mean) * (value - spread.mean);
  spread.deviation = std::sqrt(squares / (n - 1));
  return spread;
}

struct Guard::LocalNorms {
  std::vector<at::Tensor> norms;  // by parameter; undefined: it has got no gradient in this step
  std::vector<unsigned> hooks;

  std::vector<double> Take(c10::Device device) {
    std::vector<at::Tensor> all;
    for (at::Tensor& norm : norms) {
      const auto options = at::TensorOptions(device).dtype(at::kDouble);
      all.push_back(norm.defined() ? norm.to(options) : at::zeros({}, options));
      norm.reset();
    }
    const at::Tensor values = at::stack(all).cpu();
    const auto* begin = values.const_data_ptr<double>();
    return {begin, begin + values.numel()};
  }
};

struct Guard::Finding {
  std::string what;
  int rank = -1;  // -1: that of the largest gradient
  bool is_of_gradients = false;
  double value = 0;
  std::optional<RecentValues::Spread> spread = std::nullopt;
};

Guard::Guard(const GuardOptions& options, const session::Session& session,
             torch::nn::Module& module, std::vector<GuardedPhase> phases)
    : options_(options),
      session_(session),
      module_(module),
      phases_(std::move(phases)),
      losses_(phases_.size(), RecentValues(options.anomaly_window)),
      norms_(phases_.size(), RecentValues(options.anomaly_window)) {
  local_norms_.resize(phases_.size());
  for (size_t phase = 0; phase < phases_.size(); ++phase) {
    LocalNorms& local = local_norms_[phase];
    local.norms.resize(phases_[phase].parameters.size());
    for (size_t i = 0; i < local.norms.size(); ++i) {
      // Once per backward, before the gradient is added to those of other batches or reduced.
      local.hooks.push_back(phases_[phase].parameters[i].second.register_hook(
          [&norm = local.norms[i]](const at::TensorBase& gradient) {
            if (!gradient.defined()) return;
            const at::Tensor now = NormOf(at::Tensor(gradient));
            norm = norm.defined() ? at::maximum(norm, now) : now;
          }));
    }
  }
}

Guard::~Guard() {
  for (size_t phase = 0; phase < phases_.size(); ++phase) {
    for (size_t i = 0; i < local_norms_[phase].hooks.size(); ++i) {
      phases_[phase].parameters[i].second.remove_hook(local_norms_[phase].hooks[i]);
    }
  }
}

void Guard::Start(const Position& position) { agreed_ = NewestAt(position); }

void Guard::ForgetValues() {
  losses_.assign(phases_.size(), RecentValues(options_.anomaly_window));
  norms_ = losses_;
}

absl::Status Guard::BeginStep(const Position& position, int64_t samples) {
  position_ = position;
  range_ = {position.epoch, position.sample, position.sample + samples};
  examples_.clear();
  skipped_.reset();
  for (LocalNorms& local : local_norms_) {
    for (at::Tensor& norm : local.norms) norm.reset();
  }
  abandons_step_ = std::any_of(left_out_.begin(), left_out_.end(), [&](const Range& range) {
    return range.epoch == range_.epoch && range.begin < range_.end && range_.begin < range.end;
  });
  if (abandons_step_ || options_.on_anomaly != "skip") return absl::OkStatus();
  return TakeSnapshot();
}

void Guard::AddExamples(const std::vector<int64_t>& indices) {
  examples_.insert(examples_.end(), indices.begin(), indices.end());
}

absl::Status Guard::Check(size_t phase, const Measured& measured) {
  std::vector<double> norms;
  at::Tensor rows;
  DDP_RETURN_IF_ERROR(CatchCollective("comparing losses and gradients across ranks", [&] {
    norms = local_norms_[phase].Take(session_.device());
    const at::Tensor mine = at::tensor({measured.loss, measured.count, measured.norm,
                                        static_cast<double>(FirstBad(norms))},
                                       at::kDouble)
                                .to(session_.device());
    rows = at::stack(session_.size() > 1 ? AllGather(*session_.process_group(), mine)
                                         : std::vector<at::Tensor>{mine})
               .cpu();
    return absl::OkStatus();
  }));
  std::optional<Finding> finding = Judge(phase, rows, measured);
  if (!finding) return absl::OkStatus();
  abandons_step_ = true;
  Anomaly anomaly;
  DDP_RETURN_IF_ERROR(Describe(phase, norms, *finding, anomaly));
  anomaly.newest_good = NewestAt(position_);
  Act(std::move(anomaly), /*leaves_out=*/true);
  return skipped_ ? Restore() : absl::OkStatus();
}

// All ranks have the same `rows`.
std::optional<Guard::Finding> Guard::Judge(size_t phase, const at::Tensor& rows,
                                           const Measured& measured) {
  const auto* values = rows.const_data_ptr<double>();
  const auto at = [&](int rank, Column column) { return values[rank * kColumns + column]; };
  int worst = 0;  // the rank with the largest mean loss
  int broken = -1, bad = -1;
  double loss = 0, largest = -std::numeric_limits<double>::infinity(), norm = 0;
  for (int rank = 0; rank < session_.size(); ++rank) {
    if (!std::isfinite(at(rank, kLoss))) {
      return Finding{.what = absl::StrCat("the loss is ", at(rank, kLoss)),
                     .rank = rank,
                     .value = at(rank, kLoss)};
    }
    loss += at(rank, kLoss);
    if (at(rank, kCount) > 0 && at(rank, kLoss) / at(rank, kCount) > largest) {
      largest = at(rank, kLoss) / at(rank, kCount);
      worst = rank;
    }
    if (broken < 0 && !std::isfinite(at(rank, kNorm))) broken = rank;
    if (bad < 0 && at(rank, kFirstBad) >= 0) bad = rank;
    norm = std::max(norm, at(rank, kNorm));
  }
  loss /= measured.all_counts;
  const auto is_spike = [&](RecentValues& recent, double value, const char* what, int rank,
                            bool is_of_gradients) -> std::optional<Finding> {
    const std::optional<RecentValues::Spread> spread = recent.spread();
    // A spike is one of the next mean's values: a loss that stays higher becomes a usual one.
    recent.Add(value);
    if (options_.anomaly_deviations == 0 || !spread) return std::nullopt;
    // Equal values may deviate by the rounding of float32. A 0 after zeros gives NaN, no spike.
    const double deviations =
        (value - spread->mean) / std::max(spread->deviation, kRounding * std::abs(spread->mean));
    if (!(deviations > options_.anomaly_deviations)) return std::nullopt;
    return Finding{
        .what = absl::StrCat(what, value, ", ", deviations, " standard deviations above the mean ",
                             spread->mean, " of the last ", recent.values().size() - 1, " steps"),
        .rank = rank,
        .is_of_gradients = is_of_gradients,
        .value = value,
        .spread = spread};
  };
  std::optional<Finding> finding =
      is_spike(losses_[phase], loss, "the loss is ", worst, /*is_of_gradients=*/false);
  if (finding) return finding;
  if (broken < 0) {
    return is_spike(norms_[phase], norm, "the norm of the gradients is ", /*rank=*/-1,
                    /*is_of_gradients=*/true);
  }
  if (measured.has_scaler) return std::nullopt;
  const double value = at(broken, kNorm);
  return Finding{.what = bad >= 0 ? "a gradient is not finite"
                                  : absl::StrCat("the norm of the gradients is ", value,
                                                 ", though those of each rank are finite before "
                                                 "they are reduced"),
                 .rank = bad >= 0 ? bad : broken,
                 .is_of_gradients = true,
                 .value = value};
}

// Collective. `norms`: of this rank's gradients, as it has computed them.
absl::Status Guard::Describe(size_t phase, const std::vector<double>& norms, Finding& finding,
                             Anomaly& anomaly) {
  Details mine = {.examples = examples_, .parameter = FirstBad(norms)};
  if (mine.parameter >= 0) {
    mine.largest = std::numeric_limits<double>::infinity();
  } else if (const auto most = std::max_element(norms.begin(), norms.end()); *most > 0) {
    mine.largest = *most;
    mine.parameter = most - norms.begin();
  }
  DDP_ASSIGN_OR_RETURN(const std::vector<Details> all, AllGather(session_.process_group(), mine));
  if (finding.rank < 0) {
    const auto most =
        std::max_element(all.begin(), all.end(),
                         [](const Details& a, const Details& b) { return a.largest < b.largest; });
    finding.rank = static_cast<int>(most - all.begin());
  }
  const Details& there = all[finding.rank];
  const std::string parameter =
      there.parameter >= 0 ? phases_[phase].parameters[there.parameter].first : "";
  const std::string& name = phases_[phase].name;
  const bool names_parameter = finding.is_of_gradients && !parameter.empty();
  const std::string of_parameter = !names_parameter ? ""
                                   : std::isfinite(there.largest)
                                       ? absl::StrCat("; its largest is that of '", parameter, "'")
                                       : absl::StrCat(": that of '", parameter, "'");
  anomaly.what = absl::StrCat("rank ", finding.rank, ": step ", position_.step + 1,
                              name.empty() ? "" : absl::StrCat(", phase '", name, "'"), ": ",
                              finding.what, of_parameter, "; examples ", Examples(there.examples));
  std::vector<std::string> examples;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    examples.push_back(absl::StrCat("rank ", rank, ": ", absl::StrJoin(all[rank].examples, ", ")));
  }
  anomaly.fields = {{"kind", finding.is_of_gradients ? "gradient" : "loss"},
                    {"in_step", absl::StrCat(position_.step + 1)},
                    {"rank", absl::StrCat(finding.rank)},
                    {"parameter", parameter},
                    {"value", absl::StrCat(finding.value)}};
  if (!name.empty()) anomaly.fields.emplace_back("phase", name);
  if (finding.spread) {
    anomaly.fields.emplace_back("mean", absl::StrCat(finding.spread->mean));
    anomaly.fields.emplace_back("deviation", absl::StrCat(finding.spread->deviation));
  }
  anomaly.fields.emplace_back("examples", absl::StrJoin(examples, "; "));
  return absl::OkStatus();
}

// Decides what follows. `leaves_out`: the step's examples, after a rollback.
void Guard::Act(Anomaly anomaly, bool leaves_out) {
  const bool may_skip = options_.on_anomaly == "skip" && leaves_out;
  if (position_.step != last_skip_ + 1) skips_ = 0;
  // No example mends weights of which every loss is an anomaly.
  if (may_skip && skips_ < options_.anomaly_window) {
    ++skips_;
    last_skip_ = position_.step;
    anomaly.action = Anomaly::Action::kSkip;
    anomaly.fields.emplace_back("action", "skip");
    skipped_ = std::move(anomaly);
    return;
  }
  if (options_.on_anomaly == "rollback" && rollbacks_ < kMostRollBacks) {
    anomaly.action = Anomaly::Action::kRollBack;
    anomaly.fields.emplace_back("action", "rollback");
    ++rollbacks_;
    if (leaves_out) left_out_.push_back(range_);
  } else {
    anomaly.action = Anomaly::Action::kStop;
    anomaly.fields.emplace_back("action", "stop");
    if (may_skip) {
      absl::StrAppend(&anomaly.what, "; the ", skips_,
                      " steps before it were skipped as well, so that the weights may have "
                      "diverged: go on from an older checkpoint, with a lower learning rate");
    } else if (options_.on_anomaly == "rollback") {
      absl::StrAppend(&anomaly.what, "; the run has rolled back ", rollbacks_, " times before");
    }
  }
  interruption_ = std::move(anomaly);
}

absl::Status Guard::Compared(const Position& position, bool ends_epoch,
                             const absl::Status& result) {
  if (result.ok()) {
    agreed_ = ends_epoch ? CheckpointName{.epochs = position.epoch + 1, .steps = std::nullopt}
                         : NewestAt(position);
    return absl::OkStatus();
  }
  if (!absl::IsFailedPrecondition(result)) return result;
  Anomaly anomaly = {.what = std::string(result.message()),
                     .fields = {{"kind", "parameters"},
                                {"in_step", absl::StrCat(position.step)},
                                {"difference", std::string(result.message())}},
                     .newest_good = agreed_};
  Act(std::move(anomaly), /*leaves_out=*/false);
  return absl::OkStatus();
}

absl::Status Guard::TakeSnapshot() {
  return CatchStatus("copying what a step changes", [&]() -> absl::Status {
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> live;
    for (const at::Tensor& buffer : module_.buffers()) {
      if (buffer.defined()) live.push_back(buffer);
    }
    size_t states = 0;
    const auto keep = [&](const State& state) -> absl::Status {
      if (states == states_.size()) {
        states_.emplace_back();
        staging_.emplace_back();
      }
      DDP_ASSIGN_OR_RETURN(states_[states], staging_[states].Copy(state));
      ++states;
      return absl::OkStatus();
    };
    for (const GuardedPhase& phase : phases_) {
      if (phase.hook == nullptr) continue;
      DDP_ASSIGN_OR_RETURN(const State state, phase.hook->state_dict());
      DDP_RETURN_IF_ERROR(keep(state));
    }
    // A phase's step is taken before the next one's loss is known.
    for (size_t i = 0; i + 1 < phases_.size(); ++i) {
      phases_[i].optimizer->WaitForParameters();
      for (const auto& [name, parameter] : phases_[i].parameters) live.push_back(parameter);
      torch::optim::Optimizer& inner = Inner(*phases_[i].optimizer);
      for (const auto& group : inner.param_groups()) {
        live.insert(live.end(), group.params().begin(), group.params().end());
      }
      State state;
      DDP_ASSIGN_OR_RETURN(state.root, optim::OptimizerState(inner));
      DDP_RETURN_IF_ERROR(keep(state));
    }
    tensors_.resize(live.size());
    for (size_t i = 0; i < live.size(); ++i) {
      auto& [tensor, copy] = tensors_[i];
      if (tensor.is_same(live[i]) && copy.sizes() == tensor.sizes()) {
        copy.copy_(tensor);
      } else {
        tensor = live[i];
        copy = tensor.detach().clone();
      }
    }
    return absl::OkStatus();
  });
}

absl::Status Guard::Restore() {
  return CatchStatus("undoing a step", [&]() -> absl::Status {
    const c10::NoGradGuard no_grad;
    for (const GuardedPhase& phase : phases_) phase.optimizer->WaitForParameters();
    for (auto& [tensor, copy] : tensors_) checkpoint::CopyValues(tensor, copy);
    size_t states = 0;
    LoadNotes ignored;
    for (const GuardedPhase& phase : phases_) {
      if (phase.hook == nullptr) continue;
      DDP_RETURN_IF_ERROR(phase.hook->load_state_dict(states_[states++], ignored));
    }
    for (size_t i = 0; i + 1 < phases_.size(); ++i) {
      DDP_RETURN_IF_ERROR(optim::LoadOptimizerState(Inner(*phases_[i].optimizer),
                                                    c10::IValue(states_[states++].root)));
    }
    // They have the copies' memory.
    states_.clear();
    staging_.clear();
    return absl::OkStatus();
  });
}

absl::StatusOr<State> Guard::state_dict() {
  State state;
  Dict losses = checkpoint::NewTree(), norms = checkpoint::NewTree();
  for (size_t phase = 0; phase < phases_.size(); ++phase) {
    losses.insert(absl::StrCat(phase), ListOf(losses_[phase].values()));
    norms.insert(absl::StrCat(phase), ListOf(norms_[phase].values()));
  }
  c10::List<int64_t> left_out;
  for (const Range& range : left_out_) {
    for (const int64_t value : {range.epoch, range.begin, range.end}) left_out.push_back(value);
  }
  state.root.insert(kLosses, std::move(losses));
  state.root.insert(kNorms, std::move(norms));
  state.root.insert(kLeftOut, std::move(left_out));
  state.root.insert(kRollBacks, rollbacks_);
  state.root.insert(kSkips, skips_);
  state.root.insert(kLastSkip, last_skip_);
  return state;
}

absl::Status Guard::CheckStateDict(const State& state) const {
  for (const char* key : {kLosses, kNorms}) {
    const std::optional<c10::IValue> dict = optim::Find(state.root, key);
    const auto is_list = [](const auto& entry) { return NumbersIn(entry.value()).has_value(); };
    if (!dict || !dict->isGenericDict() ||
        !std::all_of(dict->toGenericDict().begin(), dict->toGenericDict().end(), is_list)) {
      return absl::InvalidArgumentError(absl::StrCat("has no lists of numbers '", key, "'"));
    }
  }
  const std::optional<c10::IValue> left_out = optim::Find(state.root, kLeftOut);
  const auto ranges = left_out ? NumbersIn(*left_out) : std::nullopt;
  if (!ranges || ranges->size() % 3 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("has no list of ranges '", kLeftOut, "'"));
  }
  const std::optional<c10::IValue> rollbacks = optim::Find(state.root, kRollBacks);
  if (!rollbacks || !rollbacks->isInt()) {
    return absl::InvalidArgumentError(absl::StrCat("has no integer '", kRollBacks, "'"));
  }
  // Older checkpoints lack them.
  for (const char* key : {kSkips, kLastSkip}) {
    const std::optional<c10::IValue> value = optim::Find(state.root, key);
    if (value && !value->isInt()) {
      return absl::InvalidArgumentError(absl::StrCat("has a '", key, "' that is no integer"));
    }
  }
  return absl::OkStatus();
}

absl::Status Guard::load_state_dict(const State& state, LoadNotes&) {
  const auto load = [&](const char* key, std::vector<RecentValues>& recent) {
    const Dict dict = state.root.at(key).toGenericDict();
    for (size_t phase = 0; phase < recent.size(); ++phase) {
      const std::optional<c10::IValue> list = optim::Find(dict, absl::StrCat(phase).c_str());
      std::deque<double> values = list ? *NumbersIn(*list) : std::deque<double>();
      recent[phase] = RecentValues(options_.anomaly_window);
      for (const double value : values) recent[phase].Add(value);
    }
  };
  load(kLosses, losses_);
  load(kNorms, norms_);
  const std::deque<double> ranges = *NumbersIn(state.root.at(kLeftOut));
  for (size_t i = 0; i < ranges.size(); i += 3) {
    const Range range = {static_cast<int64_t>(ranges[i]), static_cast<int64_t>(ranges[i + 1]),
                         static_cast<int64_t>(ranges[i + 2])};
    if (std::find(left_out_.begin(), left_out_.end(), range) == left_out_.end()) {
      left_out_.push_back(range);
    }
  }
  rollbacks_ = std::max(rollbacks_, state.root.at(kRollBacks).toInt());
  const auto integer = [&](const char* key, int64_t otherwise) {
    const std::optional<c10::IValue> value = optim::Find(state.root, key);
    return value ? value->toInt() : otherwise;
  };
  skips_ = integer(kSkips, 0);
  last_skip_ = integer(kLastSkip, -1);
  return absl::OkStatus();
}

}  // namespace ddp::trainer
