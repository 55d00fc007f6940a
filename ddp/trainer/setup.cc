#include "ddp/trainer/setup.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/same_options.h"
#include "base/status.h"
#include "ddp/collective_status.h"
#include "ddp/data_parallel.h"
#include "ddp/sync_batch_norm.h"
#include "ddp/trainer/batch.h"
#include "ddp/trainer/keys.h"
#include "ddp/trainer/resume.h"
#include "ddp/trainer/saver.h"
#include "ddp/zero/sharded_optimizer.h"
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

absl::Status CheckUsersComponents(const std::vector<checkpoint::Component>& components) {
  std::vector<std::string> names;
  for (const checkpoint::Component& component : components) {
    const char* problem = component.name.empty()          ? "has no name"
                          : component.stateful == nullptr ? "is null"
                          : keys::IsTaken(component.name) ? "has the name of one of the trainer's"
                          : absl::StrContains(component.name, '/') ? "has a name with a slash"
                          : std::find(names.begin(), names.end(), component.name) != names.end()
                              ? "has the name of another one"
                              : nullptr;
    if (problem != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("TrainerOptions::components: '", component.name, "' ", problem));
    }
    names.push_back(component.name);
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

// Does not communicate.
absl::Status Prepare(Run& run) {
  const TrainerOptions& options = run.options;
  DDP_RETURN_IF_ERROR(Validate(options));
  DDP_RETURN_IF_ERROR(CheckUsersComponents(options.components));
  if (run.is_main() && !options.predictions.empty()) {
    DDP_RETURN_IF_ERROR(CheckPredictionsPath(options.predictions));
  }
  run.position.seed = options.seed;
  run.position.dataset_size = run.train.size();
  torch::manual_seed(static_cast<uint64_t>(options.seed) + static_cast<uint64_t>(run.rank()));
  if (run.task.parallel != nullptr) {
    DDP_RETURN_IF_ERROR(CheckWrappedModule(run));
  } else {
    run.task.module->to(run.session.device());
    if (run.task.channels_last) UseChannelsLast(*run.task.module);
  }
  DDP_ASSIGN_OR_RETURN(run.sampler, data::DistributedSampler::Create(
                                        run.train.size(), {.num_replicas = run.world_size(),
                                                           .rank = run.rank(),
                                                           .seed = options.seed,
                                                           .pad = options.even_batches}));
  if (options.drop_last && !options.eval_only && run.BatchesFrom(0) == 0) {
    return OptionError(
        "drop_last", "true",
        absl::StrCat("leaves nothing of ", run.train.size(), " examples: a batch of ",
                     options.batch_size, " on each of ", run.world_size(),
                     " ranks is not full; choose a smaller batch_size"));
  }
  return OptimizerOf(options.optimizer).status();
}

// Collective. The manager returns the same errors on all ranks.
absl::Status OpenManager(Run& run) {
  const CheckpointOptions& options = run.options.checkpoint;
  // Evaluating one file does not need a folder to save in.
  const bool needs_manager =
      !run.options.eval_only || options.resume == "auto" || options.resume == "best";
  if (options.manager.directory.empty() || !needs_manager) return absl::OkStatus();
  checkpoint::ManagerOptions manager_options = options.manager;
  manager_options.read_only = run.options.eval_only;
  manager_options.broadcast = BroadcastOver(run.session);
  const Coordinator* ranks = &run.session;
  if (SavesAsync(options) && !run.options.eval_only) {
    absl::StatusOr<std::unique_ptr<SavingRanks>> saving = SavingRanks::Create(run.session);
    DDP_RETURN_IF_ERROR(run.session.Agree(saving.status()));
    run.saving_ranks = *std::move(saving);
    ranks = run.saving_ranks.get();
  }
  auto manager = checkpoint::Manager::Create(std::move(manager_options), *ranks);
  if (!manager.ok()) return InGroup("checkpoint", manager.status());
  run.manager = *std::move(manager);
  if (!options.resume.empty()) return absl::OkStatus();
  return run.session.Agree(RefuseToOverwrite(run, ""));
}

absl::Status OpenLog(Run& run) {
  const LogOptions& options = run.options.log;
  absl::StatusOr<std::unique_ptr<RunLog>> log =
      RunLog::Create(run.is_main() ? options.dir : "", options.progress && run.is_main());
  if (!log.ok()) {
    return OptionError("log.dir", options.dir,
                       absl::StrCat("cannot be used: ", log.status().message()),
                       log.status().code());
  }
  run.log = *std::move(log);
  return run.log->Text("hyper_parameters", run.options.hyper_parameters);
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
  run.parallel = given;
  return absl::OkStatus();
}

// Gradients that nobody reduces, or that are reduced twice, would train wrong models in silence.
absl::Status CheckWhoReduces(const Run& run) {
  const bool sharded = run.options.zero.stage == 2;
  if (run.world_size() == 1 || run.parallel->reduces_gradients() != sharded) {
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
  const std::vector<std::string>* wrapped = run.parallel->ignored();
  const std::vector<std::string>& ignored =
      wrapped != nullptr ? *wrapped : options.data_parallel.ignored;
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
    DDP_ASSIGN_OR_RETURN(run.parallel, wrap(run.task.module, run.session.process_group(), wrapper));
  }
  DDP_RETURN_IF_ERROR(CheckWhoReduces(run));
  DDP_RETURN_IF_ERROR(CheckIgnored(run));
  if (!options.even_batches && run.parallel->joinable() == nullptr) {
    return OptionError("even_batches", "false",
                       absl::StrCat("needs a model wrapper that can be joined, which ",
                                    options.model_wrapper, " is not (ModelWrapper::joinable)"));
  }
  return absl::OkStatus();
}

// This comes after wrapping, which gives all ranks the same parameters.
absl::Status MakeDistributedOptimizer(Run& run, checkpoint::Stateful*& hook) {
  const TrainerOptions& options = run.options;
  const c10::intrusive_ptr<c10d::ProcessGroup>& group = run.session.process_group();
  std::unique_ptr<GradScaler> scaler = GradScaler::Disabled();
  if (options.precision == "fp16") {
    DDP_ASSIGN_OR_RETURN(scaler,
                         GradScaler::Create(options.grad_scaler, run.session.device(), group));
  }
  std::vector<at::Tensor> parameters;
  optim::ParameterNames names;
  for (const auto& [name, parameter] : TrainableParameters(*run.task.module)) {
    parameters.push_back(parameter);
    names.push_back(name);
  }
  const bool all_ranks_write = run.manager != nullptr && run.manager->all_ranks_write();
  if (options.zero.stage < 2) {  // stage 2 reduces gradients itself
    DDP_RETURN_IF_ERROR(
        InGroup("comm_hook", hooks::Register(options.comm_hook, group, *run.parallel, &hook)));
  }
  if (options.zero.stage == 0) {
    DDP_ASSIGN_OR_RETURN(auto optimizer, MakeOptimizer(options.optimizer, parameters));
    run.optimizer = MakeReplicated(std::move(optimizer), run.parallel, std::move(scaler));
    run.optimizer->NameParameters(std::move(names), all_ranks_write);
    return absl::OkStatus();
  }
  zero::ZeroOptions zero = options.zero;
  zero.bucket_cap_mb = options.data_parallel.bucket_cap_mb.value_or(zero.bucket_cap_mb);
  zero.find_unused_parameters = options.data_parallel.find_unused_parameters;
  if (zero.stage == 2) {
    DDP_ASSIGN_OR_RETURN(zero.gradient_dtype, hooks::WireDtypeOf(options.comm_hook));
  }
  DDP_ASSIGN_OR_RETURN(optim::OptimizerFactory make, OptimizerOf(options.optimizer));
  DDP_ASSIGN_OR_RETURN(auto sharded, zero::ZeroRedundancyOptimizer::Create(parameters, group,
                                                                           std::move(make), zero));
  run.optimizer = zero::MakeSharded(std::move(sharded), std::move(scaler),
                                    all_ranks_write ? &run.session : nullptr);
  run.optimizer->NameParameters(std::move(names), all_ranks_write);
  run.log->Print(run.optimizer->Describe());
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
absl::Status AddComponents(Run& run, checkpoint::Stateful* hook) {
  DDP_ASSIGN_OR_RETURN(Schedule schedule, Schedule::Create(run.options.schedule,
                                                           {.epochs = run.options.epochs,
                                                            .steps_per_epoch = run.StepsFrom(0),
                                                            .max_steps = run.options.max_steps}));
  run.scheduler = std::make_unique<LRScheduler>(run.optimizer->optimizer(), std::move(schedule));
  Components& all = run.components;
  all.Add(RunState::As(Adapter<RunState>(run, run.task.name, run.options.configuration,
                                         run.world_size(), run.position)));
  all.Add(ModelState::As(Adapter<ModelState>(run, *run.task.module)));
  // A wrapper of the caller's does not say whether it shares them.
  if (run.world_size() > 1 && run.task.parallel == nullptr &&
      !run.options.data_parallel.broadcast_buffers) {
    run.rank_buffers = &Adapter<RankBuffers>(run, *run.task.module, run.rank());
    all.Add({.name = keys::kBuffers, .stateful = run.rank_buffers});
  }
  all.Add({.name = keys::kOptimizer, .stateful = run.optimizer.get()});
  all.Add(
      {.name = keys::kScheduler, .stateful = run.scheduler.get(), .top_level = {keys::kProgress}});
  if (run.optimizer->scaler().is_enabled()) {
    all.Add(
        {.name = keys::kScaler, .stateful = &Adapter<ScalerState>(run, run.optimizer->scaler())});
  }
  BucketOrder& buckets = Adapter<BucketOrder>(run, *run.parallel);
  all.Add(BucketOrder::As(buckets));
  run.bucket_order = &buckets;
  if (hook != nullptr) all.Add({.name = keys::kCommHook, .stateful = hook});
  for (const checkpoint::Component& users : run.options.components) all.Add(users);
  all.Add(Generators::As(Adapter<Generators>(run, run.session, run.position)));
  return absl::OkStatus();
}

// The ranks' options, and the names of the user's components, must be the same.
absl::Status RequireSame(const Run& run, const absl::Status& mine) {
  TrainerOptions options = run.options;
  OptionList list = ListOptions(options);
  const std::string names = absl::StrJoin(
      options.components, ",",
      [](std::string* out, const auto& component) { absl::StrAppend(out, component.name); });
  list.Add({.path = "components", .get = [names] { return names; }});
  return RequireSameOptions(run.session, list, mine);
}

}  // namespace

// Each of these may fail on a single rank; Agree keeps the others from waiting for it.
absl::Status SetUp(Run& run) {
  DDP_RETURN_IF_ERROR(RequireSame(run, CatchStatus("", [&] { return Prepare(run); })));
  DDP_RETURN_IF_ERROR(OpenManager(run));
  DDP_RETURN_IF_ERROR(run.session.Agree(CatchStatus("", [&] { return OpenLog(run); })));
  // Collective: a rank that fails by itself must interrupt the others.
  const absl::Status made = CatchCollective("", [&]() -> absl::Status {
    checkpoint::Stateful* hook = nullptr;
    DDP_RETURN_IF_ERROR(Wrap(run));
    DDP_RETURN_IF_ERROR(InitFromCheckpoint(run));
    DDP_RETURN_IF_ERROR(MakeDistributedOptimizer(run, hook));
    return AddComponents(run, hook);
  });
  return made.ok() ? run.session.Agree(made) : run.session.ShareFailure(made);
}

absl::Status RefuseToOverwrite(const Run& run, const std::string& resumed) {
  if (!run.is_main() || run.manager == nullptr) return absl::OkStatus();
  absl::StatusOr<std::optional<std::string>> newest = run.manager->Newest();
  if (newest.ok() && !newest->has_value()) return absl::OkStatus();
  std::error_code ignored;  // then they are not the same
  if (newest.ok() && std::filesystem::equivalent(**newest, resumed, ignored)) {
    return absl::OkStatus();
  }
  return OptionError(
      "checkpoint.dir", run.options.checkpoint.manager.directory,
      absl::StrCat("holds a run's checkpoints (",
                   newest.ok() ? **newest : newest.status().message(),
                   newest.ok() ? "); continue it with resume=auto, or choose " : "); choose ",
                   "another folder"),
      absl::StatusCode::kAlreadyExists);
}

}  // namespace ddp::trainer
