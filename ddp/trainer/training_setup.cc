// Set-up of a run: what happens before the first step.
#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "ATen/ops/tensor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/status.h"
#include "ddp/all_gather.h"
#include "ddp/collective_status.h"
#include "ddp/gather/all_agree.h"
#include "ddp/gather/gather.h"
#include "ddp/sync_batch_norm.h"
#include "ddp/trainer/channels_last.h"
#include "ddp/trainer/training_run.h"
#include "ddp/trainer/training_state.h"
#include "torch/csrc/autograd/grad_mode.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/utils.h"

namespace ddp::trainer {
namespace {

void UseChannelsLast(torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) {
    parameter.set_data(ChannelsLast(parameter));
  }
}

int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

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

}  // namespace

// Does not communicate.
absl::Status TrainingRun::Prepare() {
  DDP_RETURN_IF_ERROR(Validate(options_));
  if (is_main() && !options_.predictions.empty()) {
    DDP_RETURN_IF_ERROR(CheckPredictionsPath(options_.predictions));
  }
  position_.seed = options_.seed;
  position_.dataset_size = train_.size();
  torch::manual_seed(static_cast<uint64_t>(options_.seed) + static_cast<uint64_t>(rank()));
  if (task_.parallel != nullptr) {
    DDP_RETURN_IF_ERROR(CheckWrappedModule());
  } else {
    task_.module->to(session_.device());
    if (task_.channels_last) UseChannelsLast(*task_.module);
  }
  if (task_.module->is_training()) modes_.emplace(*task_.module);
  for (const auto& [name, parameter] : TrainableParameters(*task_.module)) {
    parameters_.push_back(parameter);
  }
  DDP_ASSIGN_OR_RETURN(
      data::DistributedSampler sampler,
      data::DistributedSampler::Create(train_.size(), {.num_replicas = world_size(),
                                                       .rank = rank(),
                                                       .seed = options_.seed,
                                                       .pad = options_.even_batches}));
  sampler_ = sampler;
  if (options_.drop_last && !options_.eval_only && BatchesFrom(0) == 0) {
    return OptionError("drop_last", "true",
                       absl::StrCat("leaves nothing of ", train_.size(), " examples: a batch of ",
                                    options_.batch_size, " on each of ", world_size(),
                                    " ranks is not full; choose a smaller batch_size"));
  }
  DDP_ASSIGN_OR_RETURN(schedule_,
                       Schedule::Create(options_.schedule, {.epochs = options_.epochs,
                                                            .steps_per_epoch = StepsFrom(0),
                                                            .max_steps = options_.max_steps}));
  if (options_.zero.stage > 0) return OptimizerOf(options_.optimizer).status();
  DDP_ASSIGN_OR_RETURN(optimizer_, MakeOptimizer(options_.optimizer, parameters_));
  return absl::OkStatus();
}

// The wrapper's buckets have the device and the memory order of the parameters that it has wrapped.
absl::Status TrainingRun::CheckWrappedModule() const {
  for (const auto& item : task_.module->named_parameters()) {
    const auto& [name, parameter] = item.pair();
    const bool is_there = parameter.device() == session_.device();
    if (is_there && (!task_.channels_last ||
                     parameter.strides() == ChannelsLast(parameter.detach()).strides())) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "the task's module is wrapped already, but its parameter '", name,
        is_there
            ? "' is not in channels-last order, which the task asks for; convert it"
            : absl::StrCat("' is on ", parameter.device().str(), ", and the session's device is ",
                           session_.device().str(), "; move the module"),
        " before it is wrapped"));
  }
  return absl::OkStatus();
}

// Collective. The manager returns the same errors on all ranks.
absl::Status TrainingRun::OpenManager() {
  // Evaluating one file does not need a folder to save in.
  const bool needs_manager = !options_.eval_only || options_.checkpoint.resume == "auto";
  if (options_.checkpoint.manager.directory.empty() || !needs_manager) return absl::OkStatus();
  auto manager = checkpoint::Manager::Create(options_.checkpoint.manager, session_);
  if (!manager.ok()) return InGroup("checkpoint", manager.status());
  manager_ = *std::move(manager);
  if (!options_.checkpoint.resume.empty()) return absl::OkStatus();
  return session_.Agree(RefuseToOverwrite(""));
}

absl::Status TrainingRun::OpenLog() {
  absl::StatusOr<std::unique_ptr<RunLog>> log =
      RunLog::Create(is_main() ? options_.log.dir : "", options_.log.progress && is_main());
  if (!log.ok()) {
    return OptionError("log.dir", options_.log.dir,
                       absl::StrCat("cannot be used: ", log.status().message()),
                       log.status().code());
  }
  log_ = *std::move(log);
  return log_->Text("hyper_parameters", options_.hyper_parameters);
}

// A run from scratch, or from a checkpoint that is not the newest in its folder, would overwrite
// checkpoints of another run, or later ones of this run.
absl::Status TrainingRun::RefuseToOverwrite(const std::string& resumed) const {
  if (!is_main() || manager_ == nullptr) return absl::OkStatus();
  absl::StatusOr<std::optional<std::string>> newest = manager_->Newest();
  if (newest.ok() && !newest->has_value()) return absl::OkStatus();
  std::error_code ignored;  // then they are not the same
  if (newest.ok() && std::filesystem::equivalent(**newest, resumed, ignored)) {
    return absl::OkStatus();
  }
  return OptionError(
      "checkpoint.dir", options_.checkpoint.manager.directory,
      absl::StrCat("holds a run's checkpoints (",
                   newest.ok() ? **newest : newest.status().message(),
                   newest.ok() ? "); continue it with resume=auto, or choose " : "); choose ",
                   "another folder"),
      absl::StatusCode::kAlreadyExists);
}

absl::Status TrainingRun::Wrap() {
  if (options_.sync_bn != "none") {
    DDP_ASSIGN_OR_RETURN(const int layers, ConvertSyncBatchNorm(*task_.module, options_.sync_bn,
                                                                session_.process_group()));
    log_->Print(absl::StrCat("sync_bn ", options_.sync_bn, ": ", layers, " layers"));
  }
  if (task_.parallel != nullptr) {
    DDP_RETURN_IF_ERROR(UseWrapper());
  } else {
    DataParallelOptions wrapper = options_.data_parallel;
    wrapper.reduce_gradients = options_.zero.stage < 2;
    DDP_ASSIGN_OR_RETURN(const ModelWrapperFactory wrap,
                         ModelWrapperRegistry::Find(options_.model_wrapper));
    DDP_ASSIGN_OR_RETURN(parallel_, wrap(task_.module, session_.process_group(), wrapper));
  }
  DDP_RETURN_IF_ERROR(CheckWhoReduces());
  DDP_RETURN_IF_ERROR(CheckIgnored());
  if (!options_.even_batches && dynamic_cast<Joinable*>(parallel_.get()) == nullptr) {
    return OptionError("even_batches", "false",
                       absl::StrCat("needs a model wrapper that can be joined, which ",
                                    options_.model_wrapper, " is not (ddp/join.h)"));
  }
  if (options_.precision == "fp16") {
    DDP_ASSIGN_OR_RETURN(scaler_, GradScaler::Create(options_.grad_scaler, session_.device(),
                                                     session_.process_group()));
  }
  if (options_.zero.stage == 2) return ShardOptimizer();  // which reduces gradients itself
  DDP_RETURN_IF_ERROR(InGroup(
      "comm_hook", hooks::Register(options_.comm_hook, session_.process_group(), *parallel_)));
  return options_.zero.stage > 0 ? ShardOptimizer() : absl::OkStatus();
}

// This comes after wrapping, which gives all ranks the same parameters.
absl::Status TrainingRun::ShardOptimizer() {
  zero::ZeroOptions zero = options_.zero;
  zero.bucket_cap_mb = options_.data_parallel.bucket_cap_mb.value_or(zero.bucket_cap_mb);
  zero.find_unused_parameters = options_.data_parallel.find_unused_parameters;
  if (zero.stage == 2) {
    DDP_ASSIGN_OR_RETURN(zero.gradient_dtype, hooks::WireDtypeOf(options_.comm_hook));
  }
  DDP_ASSIGN_OR_RETURN(optim::OptimizerFactory make, OptimizerOf(options_.optimizer));
  DDP_ASSIGN_OR_RETURN(auto sharded,
                       zero::ZeroRedundancyOptimizer::Create(parameters_, session_.process_group(),
                                                             std::move(make), zero));
  zero_ = sharded.get();
  optimizer_ = std::move(sharded);
  log_->Print(zero_->Describe());
  return absl::OkStatus();
}

// Uses the caller's wrapper and its options.
absl::Status TrainingRun::UseWrapper() {
  if (task_.parallel->world_size() != world_size()) {
    return absl::InvalidArgumentError(absl::StrCat("the task's module is wrapped for ",
                                                   task_.parallel->world_size(),
                                                   " ranks, but the session has ", world_size(),
                                                   "; wrap it with the session's process group"));
  }
  const torch::nn::Module* wrapped = task_.parallel->module();
  if (wrapped != nullptr && wrapped != task_.module.get()) {
    return absl::InvalidArgumentError(
        "the task's model wrapper is of another module than the task's: gradients of task.module "
        "would not be averaged; wrap task.module");
  }
  parallel_ = task_.parallel;
  return absl::OkStatus();
}

// Gradients that nobody reduces, or that are reduced twice, would train wrong models in silence.
absl::Status TrainingRun::CheckWhoReduces() const {
  const bool sharded = options_.zero.stage == 2;
  if (world_size() == 1 || parallel_->reduces_gradients() != sharded) return absl::OkStatus();
  const std::string wrapper = task_.parallel != nullptr
                                  ? "the task's own model wrapper"
                                  : absl::StrCat("model_wrapper=", options_.model_wrapper);
  return OptionError(
      "zero.stage", absl::StrCat(options_.zero.stage),
      sharded ? absl::StrCat("reduces gradients itself, but so does ", wrapper,
                             "; wrap the module with reduce_gradients=false")
              : absl::StrCat("leaves it to the model wrapper to reduce gradients, but ", wrapper,
                             " does not; wrap the module with reduce_gradients=true"));
}

// An ignored parameter's gradient is each rank's own; so the norm of all gradients is, too, and a
// sharded optimizer would put one parameter together from several ranks.
absl::Status TrainingRun::CheckIgnored() const {
  const std::string shared = options_.clip_norm > 0               ? "clip_norm"
                             : options_.zero.stage > 0            ? "zero.stage"
                             : options_.check_agreement_every > 0 ? "check_agreement_every"
                                                                  : "";
  if (world_size() == 1 || shared.empty()) return absl::OkStatus();
  const auto* wrapped = dynamic_cast<const DataParallel*>(parallel_.get());
  const std::vector<std::string>& ignored =
      wrapped != nullptr ? wrapped->options().ignored : options_.data_parallel.ignored;
  for (const auto& [name, parameter] : TrainableParameters(*task_.module)) {
    if (std::find(ignored.begin(), ignored.end(), name) == ignored.end()) continue;
    return OptionError(
        "data_parallel.ignored", name,
        absl::StrCat("is a parameter that each rank would train by itself, but ", shared,
                     " needs the same parameters and gradients on all "
                     "ranks; use one of the two, or freeze the parameter"));
  }
  return absl::OkStatus();
}

// All ranks read one checkpoint: rank 0 decides which.
absl::Status TrainingRun::Resume() {
  if (options_.checkpoint.resume.empty()) return absl::OkStatus();
  std::string path = options_.checkpoint.resume;
  if (path == "auto") {
    DDP_ASSIGN_OR_RETURN(newest_, manager_->LoadNewest());
    path = newest_ ? newest_->path : "";
  }
  if (path.empty() && options_.eval_only) {
    return session_.Agree(OptionError(
        "eval_only", "true",
        absl::StrCat("finds no checkpoint to evaluate in ", options_.checkpoint.manager.directory),
        absl::StatusCode::kNotFound));
  }
  if (path.empty()) {
    log_->Print(absl::StrCat("no checkpoint in ", options_.checkpoint.manager.directory,
                             ": starting anew"));
    return absl::OkStatus();
  }
  std::vector<int64_t> bucket_order;
  absl::Status restored = CatchStatus("", [&] { return Restore(path, bucket_order); });
  if (!restored.ok() && !ProblemOf(restored) && path == options_.checkpoint.resume) {
    restored =
        OptionError("checkpoint.resume", path,
                    absl::StrCat("cannot be resumed from: ", restored.message()), restored.code());
  } else {
    restored = Annotate(restored, absl::StrCat("cannot resume from ", path));
  }
  DDP_RETURN_IF_ERROR(session_.Agree(restored));
  // Other ranks wait for a rank that fails here in a collective, or already in Agree.
  DDP_RETURN_IF_ERROR(session_.ShareFailure(CheckSameState(path)));
  log_->Print(absl::StrCat("resumed from ", path, ": epoch ", position_.epoch,
                           position_.sample > 0 ? absl::StrCat(", example ", position_.sample) : "",
                           ", step ", position_.step));
  if (options_.eval_only) return absl::OkStatus();
  DDP_RETURN_IF_ERROR(session_.ShareFailure(RestoreBucketOrder(bucket_order)));
  return session_.Agree(log_->ResumedAt(position_.step));
}

// Collective. `path` may be another file on each machine; nothing later would tell that the ranks
// train different models.
absl::Status TrainingRun::CheckSameState(const std::string& path) const {
  const at::Tensor position =
      torch::tensor({position_.epoch, position_.sample, position_.step}).to(session_.device());
  NamedTensors state = {{"position", position}};
  for (const auto& parameter : task_.module->named_parameters()) {
    state.emplace_back(parameter.key(), parameter.value());
  }
  const absl::Status same = AllAgree(session_.process_group(), state);
  if (!absl::IsFailedPrecondition(same)) return same;
  return Annotate(same, absl::StrCat("the ranks have read different checkpoints from ", path,
                                     "; put it in a folder that all machines share, or the same "
                                     "file on each machine"));
}

// Collective: rank 0's order counts, since files of one name may differ between machines.
absl::Status TrainingRun::RestoreBucketOrder(const std::vector<int64_t>& saved) {
  if (world_size() == 1) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(const std::vector<int64_t> order,
                       BroadcastObject(session_.process_group(), saved, /*src=*/0));
  if (order.empty()) return absl::OkStatus();
  bool restored = false;
  DDP_RETURN_IF_ERROR(CatchCollective("rebuilding the buckets of gradients", [&] {
    restored = parallel_->RestoreBucketOrder(order);
    return absl::OkStatus();
  }));
  if (!restored && parallel_->reduces_gradients()) {
    log_->Print(
        "the buckets of gradients are not those it was saved with: sums may round otherwise");
  }
  return absl::OkStatus();
}

// Writes on the main rank. A resumed run keeps the file of the run that it goes on with; if it is
// configured differently, it has a file of its own.
absl::Status TrainingRun::WriteConfiguration() const {
  if (!is_main() || options_.log.dir.empty() || options_.configuration.empty()) {
    return absl::OkStatus();
  }
  std::string path = absl::StrCat(options_.log.dir, "/config.yaml");
  if (position_.step > 0 || options_.eval_only) {
    const absl::StatusOr<std::string> before = ReadFile(path);
    if (before.ok() && (*before == options_.configuration || options_.eval_only)) {
      return absl::OkStatus();
    }
    if (before.ok())
      path = absl::StrCat(options_.log.dir, "/config_step_", position_.step, ".yaml");
  }
  return WriteFileAtomically(path, options_.configuration);
}

absl::Status TrainingRun::Restore(const std::string& path, std::vector<int64_t>& bucket_order) {
  checkpoint::State state;
  if (newest_) {
    state = std::exchange(newest_, std::nullopt)->state;
  } else {
    DDP_ASSIGN_OR_RETURN(
        state, checkpoint::Manager::Load(
                   path, {}, {.implementations = options_.checkpoint.manager.implementations}));
  }
  if (options_.eval_only) {
    DDP_ASSIGN_OR_RETURN(position_, RestoreModel(state, task_));
    return absl::OkStatus();
  }
  // With auto, newer checkpoints are damaged on some rank and may be overwritten.
  if (options_.checkpoint.resume != "auto") DDP_RETURN_IF_ERROR(RefuseToOverwrite(path));
  std::vector<std::string> differences;
  DDP_RETURN_IF_ERROR(CheckOrder(state, position_, differences));
  CompareSchedule(state, options_.optimizer.lr, *schedule_, differences);
  DDP_ASSIGN_OR_RETURN(Position position, RestoreState(state, session_, task_, *optimizer_,
                                                       scaler_.get(), differences));
  DDP_ASSIGN_OR_RETURN(const SavedProgress progress, ProgressOf(state, *schedule_, position));
  DDP_ASSIGN_OR_RETURN(bucket_order, BucketOrder(state));
  position.seed = position_.seed;
  position.dataset_size = position_.dataset_size;
  position_ = position;
  const int64_t remaining = RemainingSteps();
  schedule_ = schedule_->Resumed(progress, position_.step, remaining);
  if (!is_main()) return absl::OkStatus();
  for (const std::string& difference : differences) {
    log_->Warn(absl::StrCat("resumed with ", difference));
  }
  if (progress.progress > 1 - 1e-9 && remaining > 0 && options_.schedule.name == "cosine") {
    log_->Warn(absl::StrCat(
        "schedule cosine had come to its end: the learning rate stays 0 for the ", remaining,
        " steps that are left. To train longer, start a new run from these "
        "weights; to stop a run and go on later, use stop_at_step"));
  }
  return absl::OkStatus();
}

int64_t TrainingRun::BatchesFrom(int64_t sample) const {
  const int64_t samples = sampler_->max_num_samples(sample);
  return options_.drop_last ? samples / options_.batch_size
                            : CeilDivide(samples, options_.batch_size);
}

int64_t TrainingRun::StepsFrom(int64_t sample) const {
  return CeilDivide(BatchesFrom(sample), options_.accumulate);
}

int64_t TrainingRun::RemainingSteps() const {
  if (position_.epoch >= options_.epochs) return 0;
  const int64_t in_epochs =
      StepsFrom(position_.sample) + (options_.epochs - position_.epoch - 1) * StepsFrom(0);
  if (options_.max_steps == 0) return in_epochs;
  return std::clamp<int64_t>(options_.max_steps - position_.step, 0, in_epochs);
}

// Collective. Only some ranks may have an on_step, but all must listen for requests to stop; only
// rank 0 has logs, but all add to the losses in them.
absl::Status TrainingRun::AgreeOnSteps() {
  bool asks = options_.on_step != nullptr;
  stop_at_step_ = options_.stop_at_step;
  log_every_ = log_->active() ? options_.log.every : 0;
  c10::intrusive_ptr<c10d::Store> store;
  if (world_size() > 1) {
    DDP_RETURN_IF_ERROR(CatchCollective("", [&] {
      const at::Tensor mine =
          at::tensor({int64_t{asks}, stop_at_step_, log_every_}, at::kLong).to(session_.device());
      const std::vector<at::Tensor> all = AllGather(*session_.process_group(), mine);
      for (const at::Tensor& theirs : all) {
        const at::Tensor row = theirs.cpu();
        const auto* values = row.const_data_ptr<int64_t>();
        asks |= values[0] != 0;
        if (values[1] > 0 && (stop_at_step_ == 0 || values[1] < stop_at_step_)) {
          stop_at_step_ = values[1];
        }
      }
      log_every_ = all[0][2].item<int64_t>();
      // Each run of a session gets its own prefix; each rank counts the runs to the same number.
      const int64_t run = session_.store()->add(absl::StrCat("trainer/runs/", rank()), 1);
      store = c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("trainer/run/", run),
                                                     session_.store());
      return absl::OkStatus();
    }));
  }
  if (asks) stop_.emplace(std::move(store), rank(), world_size(), position_.step + 1);
  return absl::OkStatus();
}

}  // namespace ddp::trainer
