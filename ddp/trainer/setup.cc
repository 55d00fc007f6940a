#include "ddp/trainer/setup.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <regex>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/environment.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/option_text.h"
#include "base/progress_board.h"
#include "base/same_options.h"
#include "base/status.h"
#include "ddp/collective_status.h"
#include "ddp/data/for_evaluation.h"
#include "ddp/data_parallel.h"
#include "ddp/sync_batch_norm.h"
#include "ddp/trainer/callbacks/early_stopping.h"
#include "ddp/trainer/callbacks/monitors.h"
#include "ddp/trainer/evaluator.h"
#include "ddp/trainer/init_from.h"
#include "ddp/trainer/keys.h"
#include "ddp/trainer/logging/recorded_steps.h"
#include "ddp/trainer/resume.h"
#include "ddp/trainer/saver.h"
#include "ddp/trainer/shared_generator.h"
#include "ddp/trainer/step_optimizer.h"
#include "ddp/trainer/training_state.h"
#include "torch/csrc/autograd/grad_mode.h"
#include "torch/utils.h"

namespace ddp::trainer {
namespace {

void UseChannelsLast(torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) {
    parameter.set_data(ChannelsLast(parameter));
  }
}

// This is checked now, and not after hours of training.
absl::Status CheckPredictionsPath(const std::string& path) {
  const std::string folder = DirectoryOf(path);
  std::error_code ignored;
  absl::Status writable = absl::EndsWith(path, "/") || std::filesystem::is_directory(path, ignored)
                              ? absl::InvalidArgumentError("it is a folder")
                              : MakeDirectories(folder);  // perhaps that of the logs, not made yet
  if (writable.ok()) writable = ProveWritable(folder);
  if (writable.ok()) return writable;
  return OptionError("predictions", path, absl::StrCat("cannot be written: ", writable.message()),
                     writable.code());
}

// The built-in ones, which options switch on, and the user's.
absl::Status AddCallbacks(Run& run) {
  const TrainerOptions& options = run.options;
  if (options.ema.decay > 0) {
    run.ema = std::make_shared<Ema>(options.ema);
    run.callbacks.Add(run.ema);
  }
  if (!options.early_stopping.metric.empty()) {
    run.callbacks.Add(std::make_shared<EarlyStopping>(options.early_stopping));
  }
  const MonitorOptions& monitor = options.monitor;
  if (monitor.learning_rates) run.callbacks.Add(std::make_shared<LearningRateMonitor>());
  if (monitor.throughput) run.callbacks.Add(std::make_shared<ThroughputMonitor>());
  if (monitor.memory) run.callbacks.Add(std::make_shared<MemoryMonitor>());
  for (const std::shared_ptr<Callback>& users : options.callbacks) {
    if (users == nullptr) {
      return absl::InvalidArgumentError("TrainerOptions::callbacks: one of them is null");
    }
    run.callbacks.Add(users);
  }
  return absl::OkStatus();
}

// The user's components, and the callbacks that have state.
std::vector<checkpoint::Component> FurtherComponents(const Run& run) {
  std::vector<checkpoint::Component> components = run.options.components;
  for (const std::shared_ptr<Callback>& callback : run.callbacks.all()) {
    checkpoint::Stateful* stateful = callback->stateful();
    if (stateful != nullptr) components.push_back({.name = callback->name(), .stateful = stateful});
  }
  return components;
}

absl::Status CheckComponents(const std::vector<checkpoint::Component>& components) {
  std::vector<checkpoint::Component> others;
  for (const checkpoint::Component& component : components) {
    DDP_RETURN_IF_ERROR(
        Annotate(CheckComponent(component, others), "TrainerOptions::components and callbacks"));
    others.push_back(component);
  }
  return absl::OkStatus();
}

// The wrapper's buckets have the device and the memory order of the parameters that it has wrapped.
absl::Status CheckWrappedModule(const Run& run) {
  for (const auto& item : run.task.module->named_parameters()) {
    const auto& [name, parameter] = item.pair();
    const bool is_there = parameter.device() == run.session.device();
    if (is_there && (!run.task.channels_last ||
                     parameter.strides() == ChannelsLast(parameter.detach()).strides())) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "the task's module is wrapped already, but its parameter '", name,
        is_there
            ? "' is not in channels-last order, which the task asks for; convert it"
            : absl::StrCat("' is on ", parameter.device().str(), ", and the session's device is ",
                           run.session.device().str(), "; move the module"),
        " before it is wrapped"));
  }
  return absl::OkStatus();
}

absl::Status CheckTask(const Run& run) {
  const Task& task = run.task;
  DDP_RETURN_IF_ERROR(CheckName("task", task.name));
  const auto refuse = [&](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat("task '", task.name, "' ", what...));
  };
  bool has_all = task.module != nullptr && task.eval_step != nullptr;
  for (const Phase& phase : task.phases) has_all = has_all && phase.train_step != nullptr;
  if (run.has_mean_loss) has_all = has_all && task.forward != nullptr && task.loss != nullptr;
  if (!has_all) {
    return refuse(
        "needs a module, and either a train_step, of each phase, or both forward and loss "
        "(ddp/trainer/task.h)");
  }
  if (task.phases.size() == 1) return absl::OkStatus();
  if (task.parallel != nullptr) {
    return refuse("has phases, each of which needs a wrapper of its own; do not wrap its module");
  }
  if (!run.options.even_batches) {
    return OptionError("even_batches", "false",
                       "does not go with a task of several phases: no rank could shadow them");
  }
  return absl::OkStatus();
}

// Of an optimizer of the phase's own, or of the run's.
const OptimizerMaker& MakerOf(const Phase& phase, const TrainerOptions& options) {
  return phase.optimizer || phase.make_optimizer ? phase.make_optimizer : options.make_optimizer;
}

// What needs to know the state of a phase's optimizer; empty: nothing.
std::string UserOfState(const TrainerOptions& options, bool is_last_phase) {
  const CheckpointOptions& checkpoint = options.checkpoint;
  if (options.eval_only) return "";
  if (options.guard.on_anomaly == "rollback") return "guard.on_anomaly=rollback";
  if (options.guard.on_anomaly == "skip" && !is_last_phase) {
    return "guard.on_anomaly=skip in a phase before the last";
  }
  const bool saves = !checkpoint.manager.directory.empty() && AsksForSaves(checkpoint);
  return saves && checkpoint.save.save_optimizer ? kSavedState : "";
}

// Those of the run have been checked.
absl::Status CheckPhase(const Phase& phase, const TrainerOptions& options, bool is_last) {
  const OptimizerOptions& optimizer = phase.optimizer ? *phase.optimizer : options.optimizer;
  const OptimizerMaker& maker = MakerOf(phase, options);
  DDP_RETURN_IF_ERROR(InGroup("optimizer", OptimizerOf(optimizer, maker).status()));
  if (const std::string user = UserOfState(options, is_last); !user.empty()) {
    DDP_RETURN_IF_ERROR(InGroup("optimizer", CheckStateIsKnown(optimizer, maker, user)));
  }
  if (!phase.schedule) return absl::OkStatus();
  return InGroup("schedule", Schedule::Create(*phase.schedule, RunLength()).status());
}

// Gives each trainable parameter to one phase.
absl::Status MakePhases(Run& run) {
  for (const Phase& phase : run.task.phases) {
    for (const char c : phase.name) {
      if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '_') {
        return absl::InvalidArgumentError(
            absl::StrCat("task '", run.task.name, "': the name of phase '", phase.name,
                         "' has another character than letters, digits and '_'"));
      }
    }
    RunPhase& made = run.phases.emplace_back();
    made.phase = &phase;
    if (run.phases.size() > 1) made.suffix = absl::StrCat(".", phase.name);
    for (const RunPhase& other : run.phases) {
      if (&other == &made || other.phase->name != phase.name) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("task '", run.task.name, "' has two phases named '", phase.name, "'"));
    }
  }
  const NamedTensors all = TrainableParameters(*run.task.module);
  if (run.phases.size() == 1) {
    run.phases[0].parameters = all;
    return absl::OkStatus();
  }
  std::vector<std::regex> patterns;
  for (const Phase& phase : run.task.phases) {
    try {
      patterns.emplace_back(phase.parameters);
    } catch (const std::regex_error& error) {
      return absl::InvalidArgumentError(
          absl::StrCat("phase '", phase.name, "': its parameters '", phase.parameters,
                       "' are no regular expression: ", error.what()));
    }
  }
  for (const auto& [name, parameter] : all) {
    std::vector<std::string> of;
    for (size_t i = 0; i < patterns.size(); ++i) {
      if (!std::regex_match(name, patterns[i])) continue;
      run.phases[i].parameters.emplace_back(name, parameter);
      of.push_back(run.task.phases[i].name);
    }
    if (of.size() == 1) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "task '", run.task.name, "': parameter '", name, "' is in ",
        of.empty()
            ? "no phase; freeze it, or let the parameters of one match its name"
            : absl::StrCat("the phases ", absl::StrJoin(of, " and "), ", but must be in one")));
  }
  for (const RunPhase& phase : run.phases) {
    if (!phase.parameters.empty()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("task '", run.task.name, "': phase '", phase.phase->name,
                     "' has no parameters: none matches '", phase.phase->parameters, "'"));
  }
  return absl::OkStatus();
}

// The examples that are held out of the training data, and of a dry run what it evaluates.
absl::Status TakeParts(Run& run) {
  const TrainerOptions& options = run.options;
  const auto add = [&](data::Subset part) {
    return run.parts.emplace_back(std::make_unique<data::Subset>(std::move(part))).get();
  };
  if (options.validation_size > 0) {
    const auto refuse = [&](const auto&... why) {
      return OptionError("validation_size", FormatOption(options.validation_size),
                         absl::StrCat(why...));
    };
    if (run.validation != nullptr) return refuse("is given, but so are validation data");
    if (options.sampler != nullptr) {
      return refuse(
          "does not go with the program's own sampler, which orders the whole training "
          "set; divide the set before (ddp/data/subset.h)");
    }
    const int64_t size = run.train->size();
    const auto held_out = static_cast<int64_t>(
        options.validation_size < 1
            ? std::max(1.0, std::floor(options.validation_size * static_cast<double>(size)))
            : options.validation_size);
    if (held_out >= size) return refuse("leaves nothing of ", size, " examples to train on");
    if (!run.train->random_access()) {
      return refuse("holds out examples from all of ", run.train->dataset_name(),
                    ", which can only be read in its order: give Train validation data");
    }
    auto [rest, last] =
        data::RandomSplit(*run.train, held_out, static_cast<uint64_t>(options.seed));
    run.validation = add(data::Subset(data::ForEvaluation(*run.train), last.indices()));
    run.train = add(std::move(rest));
    run.position.validation_size = held_out;
  }
  if (!options.dry_run) return absl::OkStatus();
  for (const data::AnyDataset** dataset : {&run.validation, &run.test}) {
    const int64_t most = 2 * options.eval_batch_size * run.world_size();
    if (*dataset == nullptr || (*dataset)->size() <= most) continue;
    std::vector<int64_t> first(static_cast<size_t>(most));
    std::iota(first.begin(), first.end(), 0);
    *dataset = add(data::Subset(**dataset, std::move(first)));
  }
  return absl::OkStatus();
}

// Whether there are validation data for the options that are about them, and values by which to
// choose, stop or slow down.
absl::Status CheckEvaluated(const Run& run) {
  const TrainerOptions& options = run.options;
  const ValidationOptions& validate = options.validate;
  if (run.validation != nullptr && run.validation->size() == 0) {
    return absl::InvalidArgumentError("the validation data have no examples");
  }
  constexpr char kHowTo[] = "give Train a data set for it, or set validation_size";
  if (run.test->size() == 0 && run.validation == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the test data have no examples, and there are no validation data in their place: ",
        kHowTo));
  }
  if (run.test->size() == 0 && !options.predictions.empty()) {
    return OptionError("predictions", options.predictions,
                       "is of the test data, which have no examples");
  }
  if (run.validation == nullptr && (validate.every != ValidationOptions().every ||
                                    validate.every_steps > 0 || validate.every_minutes > 0)) {
    const auto [option, value] =
        validate.every_steps > 0 ? std::pair("every_steps", absl::StrCat(validate.every_steps))
        : validate.every_minutes > 0
            ? std::pair("every_minutes", FormatOption(validate.every_minutes))
            : std::pair("every", absl::StrCat(validate.every));
    return OptionError(absl::StrCat("validate.", option), value,
                       absl::StrCat("has no effect without validation data: ", kHowTo));
  }
  for (const auto& [option, metric] : MetricsInOptions(run)) {
    const bool of_validation = absl::StartsWith(metric, kValidation);
    if (of_validation && run.validation == nullptr) {
      return OptionError(option, metric,
                         absl::StrCat("is of validation data, of which there are none: ", kHowTo));
    }
    if (absl::StartsWith(metric, kTest) && run.validation != nullptr && !options.eval_only) {
      return OptionError(option, metric,
                         absl::StrCat("is of the test data, which are evaluated at the run's end "
                                      "alone, since there are validation data: use ",
                                      kValidation, metric.substr(std::strlen(kTest))));
    }
    if (!of_validation && !absl::StartsWith(metric, kTest)) {
      return OptionError(option, metric,
                         absl::StrCat("is no value of an evaluation: these begin with ", kTest,
                                      " or ", kValidation));
    }
  }
  return absl::OkStatus();
}

// Does not communicate.
absl::Status MakeSampler(Run& run) {
  const TrainerOptions& options = run.options;
  const data::DistributedSamplerOptions share = {.num_replicas = run.world_size(),
                                                 .rank = run.rank(),
                                                 .shuffle = options.shuffle,
                                                 .seed = options.seed,
                                                 .pad = options.even_batches};
  if (options.sampler == nullptr) {
    DDP_ASSIGN_OR_RETURN(run.sampler, data::DistributedSampler::Create(run.train->size(), share));
    return absl::OkStatus();
  }
  if (!options.shuffle) {
    return OptionError("shuffle", "false",
                       "has no effect beside the program's own sampler, which gives the order");
  }
  if (options.sampler->size() >= data::kEndless && !options.eval_only) {
    if (options.max_steps == 0) {
      return OptionError("max_steps", "0",
                         "must be given: the sampler of the training set has no end");
    }
    if (options.epochs != 1) {
      return OptionError("epochs", absl::StrCat(options.epochs),
                         "must be 1: the sampler of the training set has no end");
    }
    for (const Phase& phase : run.task.phases) {
      DDP_RETURN_IF_ERROR(
          InGroup("schedule", CheckWithoutEpochs(phase.schedule.value_or(options.schedule))));
    }
  }
  DDP_ASSIGN_OR_RETURN(run.sampler, data::DistributedSampler::Create(options.sampler, share));
  return absl::OkStatus();
}

// Does not communicate.
absl::Status Prepare(Run& run) {
  const TrainerOptions& options = run.options;
  DDP_RETURN_IF_ERROR(Validate(options));
  DDP_RETURN_IF_ERROR(AddCallbacks(run));
  DDP_RETURN_IF_ERROR(CheckComponents(FurtherComponents(run)));
  if (run.is_main() && !options.predictions.empty() && !options.dry_run) {
    DDP_RETURN_IF_ERROR(CheckPredictionsPath(options.predictions));
  }
  DDP_RETURN_IF_ERROR(CheckTask(run));
  DDP_RETURN_IF_ERROR(TakeParts(run));
  DDP_RETURN_IF_ERROR(CheckEvaluated(run));
  run.position.seed = options.seed;
  run.position.dataset_size = run.train->size();
  run.position.data_fingerprint = run.train->Fingerprint();
  torch::manual_seed(static_cast<uint64_t>(options.seed) + static_cast<uint64_t>(run.rank()));
  if (run.task.parallel != nullptr) {
    DDP_RETURN_IF_ERROR(CheckWrappedModule(run));
  } else {
    run.task.module->to(run.session.device());
    if (run.task.channels_last) UseChannelsLast(*run.task.module);
  }
  DDP_RETURN_IF_ERROR(MakePhases(run));
  DDP_RETURN_IF_ERROR(MakeSampler(run));
  if (options.drop_last && !options.eval_only && run.BatchesFrom(0) == 0) {
    return OptionError(
        "drop_last", "true",
        absl::StrCat("leaves nothing of ", run.train->size(), " examples: a batch of ",
                     options.batch_size, " on each of ", run.world_size(),
                     " ranks is not full; choose a smaller batch_size"));
  }
  for (const Phase& phase : run.task.phases) {
    const absl::Status checked = CheckPhase(phase, options, &phase == &run.task.phases.back());
    DDP_RETURN_IF_ERROR(
        phase.name.empty() ? checked : Annotate(checked, absl::StrCat("phase '", phase.name, "'")));
  }
  return absl::OkStatus();
}

// Collective: the same errors on all ranks.
absl::StatusOr<std::unique_ptr<checkpoint::Manager>> MakeManager(const Run& run,
                                                                 const std::string& directory,
                                                                 bool read_only) {
  checkpoint::ManagerOptions options = run.options.checkpoint.manager;
  options.directory = directory;
  options.read_only = read_only;
  options.group = "checkpoint";
  options.broadcast = BroadcastOver(run.session);
  options.move = MoveOver(run.session);
  const Coordinator* ranks = &run.session;
  if (run.saving_ranks != nullptr) ranks = run.saving_ranks.get();
  return checkpoint::Manager::Create(std::move(options), *ranks);
}

// Collective. The manager returns the same errors on all ranks.
absl::Status OpenManager(Run& run) {
  const CheckpointOptions& options = run.options.checkpoint;
  // Evaluating one file does not need a folder to save in.
  const bool needs_manager =
      !run.options.eval_only || options.resume == "auto" || options.resume == "best";
  if (options.manager.directory.empty() || !needs_manager) return absl::OkStatus();
  if (SavesAsync(options) && !run.options.eval_only) {
    DDP_ASSIGN_OR_RETURN(run.saving_ranks, SavingRanks::Create(run.session));
  }
  const bool read_only = run.options.eval_only || run.options.dry_run;
  DDP_ASSIGN_OR_RETURN(run.manager, MakeManager(run, options.manager.directory, read_only));
  const auto whose = [&]() -> absl::StatusOr<std::string> {
    if (!run.is_main()) return "";
    if (!read_only) {
      DDP_RETURN_IF_ERROR(run.folders.Hold("checkpoint.dir", options.manager.directory));
    }
    if (run.is_restarted() && run.folders.IsOwn(options.manager.directory)) return "own";
    if (options.resume.empty()) DDP_RETURN_IF_ERROR(RefuseToOverwrite(run, ""));
    return "";
  };
  DDP_ASSIGN_OR_RETURN(const std::string found, run.session.Broadcast(whose()));
  run.has_own_checkpoints = !found.empty();
  return absl::OkStatus();
}

absl::Status RefuseToMix(const Run& run, const std::string& directory, const std::string& file) {
  const TrainerOptions& options = run.options;
  if (options.eval_only || run.folders.IsOwn(directory) || !options.checkpoint.resume.empty()) {
    return absl::OkStatus();
  }
  return logging::HoldsAnotherLog(
      directory, absl::StrCat(file, run.folders.Whose(directory)),
      options.checkpoint.manager.directory.empty() ? "" : "go on with that run with resume=auto");
}

absl::Status OpenLog(Run& run) {
  LogOptions options = run.options.log;
  absl::Status unrecorded;
  if (run.options.eval_only) {
    // Beside a run that writes there. Evaluations do not exclude each other.
    unrecorded = HeldFolders(run.session).Hold("log.dir", options.dir);
    if (!unrecorded.ok()) options.dir.clear();
  } else if (!run.options.dry_run) {
    DDP_RETURN_IF_ERROR(run.folders.Hold("log.dir", options.dir));
  }
  if (run.is_main()) run.progress = ProgressBoard::FromEnvironment(Environment::FromProcess());
  if (run.is_main() && !options.dir.empty() && !options.sinks.empty()) {
    const absl::StatusOr<std::optional<std::string>> file = logging::FindRecordedSteps(options.dir);
    // A folder that cannot be read cannot be used either, which the sinks will tell.
    if (file.ok() && file->has_value()) DDP_RETURN_IF_ERROR(RefuseToMix(run, options.dir, **file));
    run.log_has_steps = file.ok() && file->has_value();
  }
  absl::StatusOr<std::unique_ptr<RunLog>> log = RunLog::Create(
      run.is_main() ? options.dir : "", options.sinks, options.progress && run.is_main());
  if (!log.ok()) {
    return OptionError("log.dir", options.dir,
                       absl::StrCat("cannot be used: ", log.status().message()),
                       log.status().code());
  }
  run.log = *std::move(log);
  if (!unrecorded.ok()) {
    run.log->Warn(absl::StrCat("this evaluation is not recorded: ", unrecorded.message()));
  }
  return run.log->HyperParameters(run.options.hyper_parameters);
}

absl::Status CheckDatasets(Run& run) {
  if (!run.is_main()) return absl::OkStatus();
  for (const data::AnyDataset* evaluated : {run.validation, run.test}) {
    if (evaluated == nullptr) continue;
    DDP_RETURN_IF_ERROR(RefuseSharedGenerator(*evaluated, run.options.seed));
  }
  if (run.options.eval_only) return absl::OkStatus();
  DDP_RETURN_IF_ERROR(RefuseSharedGenerator(*run.train, *run.sampler));
  const std::string text = CannotSeekText(*run.train);
  if (!text.empty()) run.log->Warn(text);
  return absl::OkStatus();
}

// Options that change nothing beside the others. No errors, since sweeps have such combinations.
void WarnOfIdleOptions(const Run& run) {
  const TrainerOptions& options = run.options;
  const auto warn = [&](auto group, const char* name, const char* why) {
    decltype(group) defaults;
    const auto given = ListOptions(group).Table(), standard = ListOptions(defaults).Table();
    for (size_t i = 0; i < given.size(); ++i) {
      if (given[i] == standard[i]) continue;
      run.log->Warn(
          absl::StrCat(name, ".", given[i].first, "=", given[i].second, " has no effect ", why));
    }
  };
  if (!run.is_main() || options.eval_only) return;
  if (options.zero.stage == 0) warn(options.zero, "zero", "with zero.stage=0");
  if (options.precision != "fp16") {
    warn(options.grad_scaler, "grad_scaler", "without precision=fp16");
  }
  if (options.even_batches) warn(options.join, "join", "with even_batches=true");
}

// Uses the caller's wrapper and its options.
absl::Status UseWrapper(Run& run) {
  const std::shared_ptr<ModelWrapper>& given = run.task.parallel;
  if (given->world_size() != run.world_size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the task's module is wrapped for ", given->world_size(), " ranks, but the session has ",
        run.world_size(), "; wrap it with the session's process group"));
  }
  const torch::nn::Module* wrapped = given->module();
  if (wrapped != nullptr && wrapped != run.task.module.get()) {
    return absl::InvalidArgumentError(
        "the task's model wrapper is of another module than the task's: gradients of task.module "
        "would not be averaged; wrap task.module");
  }
  run.phases[0].parallel = given;
  return absl::OkStatus();
}

// Gradients that nobody reduces, or that are reduced twice, would train wrong models in silence.
absl::Status CheckWhoReduces(const Run& run) {
  const bool sharded = run.options.zero.stage == 2;
  if (run.world_size() == 1 || run.phases[0].parallel->reduces_gradients() != sharded) {
    return absl::OkStatus();
  }
  const std::string wrapper = run.task.parallel != nullptr
                                  ? "the task's own model wrapper"
                                  : absl::StrCat("model_wrapper=", run.options.model_wrapper);
  return OptionError(
      "zero.stage", absl::StrCat(run.options.zero.stage),
      sharded ? absl::StrCat("reduces gradients itself, but so does ", wrapper,
                             "; wrap the module with reduce_gradients=false")
              : absl::StrCat("leaves it to the model wrapper to reduce gradients, but ", wrapper,
                             " does not; wrap the module with reduce_gradients=true"));
}

// An ignored parameter's gradient is each rank's own; so the norm of all gradients is, too, and a
// sharded optimizer would put one parameter together from several ranks.
absl::Status CheckIgnored(const Run& run) {
  const TrainerOptions& options = run.options;
  const std::string shared = options.clip_norm > 0               ? "clip_norm"
                             : options.zero.stage > 0            ? "zero.stage"
                             : options.check_agreement_every > 0 ? "check_agreement_every"
                                                                 : "";
  if (run.world_size() == 1 || shared.empty()) return absl::OkStatus();
  const std::vector<std::string>& ignored = run.Ignored();
  for (const auto& [name, parameter] : TrainableParameters(*run.task.module)) {
    if (std::find(ignored.begin(), ignored.end(), name) == ignored.end()) continue;
    return OptionError(
        "data_parallel.ignored", name,
        absl::StrCat("is a parameter that each rank would train by itself, but ", shared,
                     " needs the same parameters and gradients on all "
                     "ranks; use one of the two, or freeze the parameter"));
  }
  return absl::OkStatus();
}

absl::Status Wrap(Run& run) {
  const TrainerOptions& options = run.options;
  if (options.sync_bn != "none") {
    DDP_ASSIGN_OR_RETURN(const int layers, ConvertSyncBatchNorm(*run.task.module, options.sync_bn,
                                                                run.session.process_group()));
    run.log->Print(absl::StrCat("sync_bn ", options.sync_bn, ": ", layers, " layers"));
  }
  if (run.task.parallel != nullptr) {
    DDP_RETURN_IF_ERROR(UseWrapper(run));
  } else {
    DataParallelOptions wrapper = options.data_parallel;
    wrapper.reduce_gradients = options.zero.stage < 2;
    DDP_ASSIGN_OR_RETURN(const ModelWrapperFactory wrap,
                         ModelWrapperRegistry::Find(options.model_wrapper));
    for (RunPhase& phase : run.phases) {
      DataParallelOptions of_phase = wrapper;
      for (const RunPhase& other : run.phases) {
        if (&other == &phase) continue;
        for (const auto& [name, parameter] : other.parameters) of_phase.ignored.push_back(name);
      }
      DDP_ASSIGN_OR_RETURN(phase.parallel,
                           wrap(run.task.module, run.session.process_group(), of_phase));
    }
  }
  DDP_RETURN_IF_ERROR(CheckWhoReduces(run));
  DDP_RETURN_IF_ERROR(CheckIgnored(run));
  if (!options.even_batches && run.phases[0].parallel->joinable() == nullptr) {
    return OptionError("even_batches", "false",
                       absl::StrCat("needs a model wrapper that can be joined, which ",
                                    options.model_wrapper, " is not (ModelWrapper::joinable)"));
  }
  return absl::OkStatus();
}

// This comes after wrapping, which gives all ranks the same parameters.
absl::Status MakeDistributedOptimizer(Run& run, RunPhase& phase) {
  DDP_ASSIGN_OR_RETURN(
      StepOptimizer made,
      MakeStepOptimizer(run.session, run.options,
                        phase.phase->optimizer.value_or(run.options.optimizer),
                        MakerOf(*phase.phase, run.options), phase.parameters, phase.parallel,
                        run.manager != nullptr && run.manager->all_ranks_write()));
  phase.optimizer = std::move(made.optimizer);
  phase.hook = made.hook;
  for (const std::string& group : made.groups) {
    run.log->Print(absl::StrCat("optimizer", phase.suffix, " group ", group));
  }
  if (run.options.zero.stage > 0) run.log->Print(phase.optimizer->Describe());
  return absl::OkStatus();
}

// An object that gives and takes the state of another.
template <typename T, typename... Arguments>
T& Adapter(Run& run, Arguments&&... arguments) {
  auto adapter = std::make_unique<T>(std::forward<Arguments>(arguments)...);
  T& reference = *adapter;
  run.adapters.push_back(std::move(adapter));
  return reference;
}

// The list of all that has state. The order is that of loading: the model's errors are more helpful
// than the optimizer's, and nothing must draw random numbers after the generators are loaded.
absl::Status AddComponents(Run& run) {
  const TrainerOptions& options = run.options;
  for (RunPhase& phase : run.phases) {
    const std::optional<ScheduleOptions>& own = phase.phase->schedule;
    DDP_ASSIGN_OR_RETURN(
        Schedule schedule,
        Schedule::Create(
            own.value_or(options.schedule),
            {.epochs = options.epochs,
             .steps_per_epoch = run.StepsFrom(0),
             .max_steps = options.max_steps,
             .samples_per_step = options.batch_size * options.accumulate * run.world_size()},
            own ? nullptr : options.lr_lambda));
    phase.scheduler =
        std::make_unique<LRScheduler>(phase.optimizer->optimizer(), std::move(schedule));
  }
  Components& all = run.components;
  all.Add(RunState::As(Adapter<RunState>(run, run.task.name, run.options, run.world_size(),
                                         run.position, run.options.ema.eval ? Ema::kName : "")));
  all.Add(ModelState::As(Adapter<ModelState>(run, *run.task.module)));
  // A wrapper of the caller's does not say whether it shares them.
  if (run.world_size() > 1 && run.task.parallel == nullptr &&
      !run.options.data_parallel.broadcast_buffers) {
    run.rank_buffers = &Adapter<RankBuffers>(run, *run.task.module, run.rank());
    all.Add({.name = keys::kBuffers, .stateful = run.rank_buffers});
  }
  for (RunPhase& phase : run.phases) {
    const auto named = [&](const char* name) { return name + phase.suffix; };
    if (HasSavedState(*phase.optimizer, options)) {
      all.Add({.name = named(keys::kOptimizer), .stateful = phase.optimizer.get()});
    }
    checkpoint::Component scheduler = {.name = named(keys::kScheduler),
                                       .stateful = phase.scheduler.get()};
    if (phase.suffix.empty()) scheduler.top_level = {keys::kProgress};
    all.Add(std::move(scheduler));
    if (phase.optimizer->scaler().is_enabled()) {
      all.Add({.name = named(keys::kScaler),
               .stateful = &Adapter<ScalerState>(run, phase.optimizer->scaler())});
    }
    BucketOrder& buckets = Adapter<BucketOrder>(run, *phase.parallel, phase.suffix);
    buckets.set_optimizer(*phase.optimizer);
    all.Add(BucketOrder::As(buckets));
    phase.bucket_order = &buckets;
    if (phase.hook != nullptr) all.Add({.name = named(keys::kCommHook), .stateful = phase.hook});
  }
  if (options.guard.on_anomaly != "none" && !options.eval_only) {
    std::vector<GuardedPhase> guarded;
    for (const RunPhase& phase : run.phases) {
      guarded.push_back({.name = phase.phase->name,
                         .parameters = phase.parameters,
                         .optimizer = phase.optimizer.get(),
                         .hook = phase.hook});
    }
    run.guard =
        std::make_unique<Guard>(options.guard, run.session, *run.task.module, std::move(guarded));
    all.Add({.name = keys::kGuard, .stateful = run.guard.get()});
  }
  for (const checkpoint::Component& further : FurtherComponents(run)) all.Add(further);
  all.Add(Generators::As(Adapter<Generators>(run, run.session, run.position)));
  return absl::OkStatus();
}

// The ranks' options, the sizes and fingerprints of their data sets, and the names of components
// and callbacks, must be the same.
absl::Status RequireSame(const Run& run, const absl::Status& mine) {
  TrainerOptions options = run.options;
  OptionList list = ListOptions(options);
  const std::string names = absl::StrJoin(
      options.components, ",",
      [](std::string* out, const auto& component) { absl::StrAppend(out, component.name); });
  list.Add({.path = "components", .get = [names] { return names; }});
  if (options.sampler != nullptr && run.sampler) {
    const absl::StatusOr<int64_t> order =
        CatchStatus("", [&] { return run.sampler->ShareFrom(0).Fingerprint(); });
    const std::string begin = order.ok() ? absl::StrCat("of fingerprint ", *order) : "";
    list.Add({.path = "sampler", .get = [begin] { return begin; }});
  }
  // Ranks with data sets of their own would take different numbers of steps, or other examples.
  const auto add_data = [&](const char* which, const data::AnyDataset* dataset,
                            const std::string& fingerprint) {
    const std::string text = DataText(dataset == nullptr ? 0 : dataset->size(), fingerprint);
    list.Add({.path = which, .get = [text] { return text; }});
  };
  const auto fingerprint_of = [](const data::AnyDataset* dataset) {
    const absl::StatusOr<std::string> fingerprint = CatchStatus(
        "", [&] { return dataset == nullptr ? std::string() : dataset->Fingerprint(); });
    return fingerprint.value_or("");
  };
  // Prepare has computed it: it may read samples.
  add_data("training data", run.train, *run.position.data_fingerprint);
  add_data("validation data", run.validation, fingerprint_of(run.validation));
  add_data("test data", run.test, fingerprint_of(run.test));
  const std::string callbacks = absl::StrJoin(
      run.callbacks.all(), ",",
      [](std::string* out, const auto& callback) { absl::StrAppend(out, callback->name()); });
  list.Add({.path = "callbacks", .get = [callbacks] { return callbacks; }});
  return RequireSameOptions(run.session, list, mine);
}

}  // namespace

// Each of these may fail on a single rank; Agree keeps the others from waiting for it.
absl::Status SetUp(Run& run) {
  DDP_RETURN_IF_ERROR(RequireSame(run, CatchStatus("", [&] { return Prepare(run); })));
  DDP_RETURN_IF_ERROR(OpenManager(run));
  DDP_RETURN_IF_ERROR(run.session.Agree(CatchStatus("", [&]() -> absl::Status {
    DDP_RETURN_IF_ERROR(OpenLog(run));
    WarnOfIdleOptions(run);
    return CheckDatasets(run);
  })));
  const CheckpointOptions& options = run.options.checkpoint;
  OptionList list;
  // Collective: a rank that fails by itself must interrupt the others.
  const absl::Status made = CatchCollective("", [&]() -> absl::Status {
    DDP_RETURN_IF_ERROR(Wrap(run));
    const bool goes_on = options.resume == "auto" || run.has_own_checkpoints;
    DDP_ASSIGN_OR_RETURN(
        run.is_initialised,
        InitFromCheckpoint(run.session, options, goes_on ? run.manager.get() : nullptr,
                           *run.task.module, *run.log));
    for (RunPhase& phase : run.phases) DDP_RETURN_IF_ERROR(MakeDistributedOptimizer(run, phase));
    DDP_RETURN_IF_ERROR(AddComponents(run));
    std::vector<CallbackPhase> phases;
    for (RunPhase& phase : run.phases) {
      ListStepOptions(phase.phase->name, phase.optimizer->optimizer(), phase.scheduler->schedule(),
                      list);
      phases.push_back({phase.suffix, *phase.optimizer});
    }
    run.callbacks.Begin(CallbackContext(run.session, *run.task.module, std::move(phases),
                                        run.position,
                                        [&run](absl::string_view line) { run.log->Print(line); }));
    return run.callbacks.SetUp();
  });
  // The ranks compare what the options, phases and functions of the program have made.
  return made.ok() ? RequireSameOptions(run.session, list) : run.session.ShareFailure(made);
}

absl::Status UseTemporaryFolder(Run& run, const TrainerOptions& given, std::string& folder) {
  // Of those of `path`, the lowest folder that is there.
  const auto writable = [](const char* option, const std::string& path) {
    std::error_code ignored;
    std::filesystem::path there = path;
    while (!std::filesystem::exists(there, ignored)) {
      there = there.has_relative_path() ? there.parent_path() : "/";
      if (there.empty()) there = ".";
    }
    absl::StatusOr<std::string> found = there.string();
    if (const absl::Status proved = ProveWritable(*found); !proved.ok()) {
      found = OptionError(option, path, absl::StrCat("cannot be written to: ", proved.message()),
                          proved.code());
    }
    return found;
  };
  const auto make = [&]() -> absl::StatusOr<std::string> {
    if (!run.is_main()) return "";
    if (!given.log.dir.empty()) {
      const absl::StatusOr<std::optional<std::string>> file =
          logging::FindRecordedSteps(given.log.dir);
      if (file.ok() && file->has_value()) {
        DDP_RETURN_IF_ERROR(RefuseToMix(run, given.log.dir, **file));
      }
      DDP_RETURN_IF_ERROR(writable("log.dir", given.log.dir).status());
    }
    if (!given.predictions.empty()) {
      DDP_RETURN_IF_ERROR(writable("predictions", DirectoryOf(given.predictions)).status());
    }
    const std::string& checkpoints = given.checkpoint.manager.directory;
    if (run.manager == nullptr || given.eval_only) return "";
    DDP_ASSIGN_OR_RETURN(std::string path, writable("checkpoint.dir", checkpoints));
    absl::StrAppend(&path, "/", checkpoint::kDryRunFolder);
    if (::mkdtemp(path.data()) != nullptr) return path;
    return OptionError("checkpoint.dir", checkpoints,
                       absl::StrCat("cannot be tried out: no folder can be made in it: ",
                                    std::generic_category().message(errno)));
  };
  DDP_ASSIGN_OR_RETURN(folder, run.session.Broadcast(CatchStatus("", make)));
  if (folder.empty()) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(run.manager, MakeManager(run, folder, /*read_only=*/false));
  return absl::OkStatus();
}

absl::Status RefuseToOverwrite(const Run& run, const std::string& resumed) {
  if (!run.is_main() || run.manager == nullptr) return absl::OkStatus();
  absl::StatusOr<std::optional<std::string>> newest = run.manager->Newest();
  if (newest.ok() && !newest->has_value()) return absl::OkStatus();
  std::error_code ignored;  // then they are not the same
  if (newest.ok() && std::filesystem::equivalent(**newest, resumed, ignored)) {
    return absl::OkStatus();
  }
  return run.folders.HoldsCheckpoints(run.options.checkpoint.manager.directory,
                                      newest.ok() ? **newest : newest.status().message(),
                                      newest.ok() ? "continue it with resume=auto" : "");
}

}  // namespace ddp::trainer
