#include "ddp/trainer/accelerator.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <deque>
#include <filesystem>
#include <system_error>

#include "ATen/ops/full.h"
#include "ATen/ops/stack.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/option_error.h"
#include "base/same_options.h"
#include "checkpoint/module_state.h"
#include "checkpoint/name.h"
#include "ddp/collective_status.h"
#include "ddp/data/loader.h"
#include "ddp/data/sampler.h"
#include "ddp/sync_batch_norm.h"
#include "ddp/trainer/async_save.h"
#include "ddp/trainer/held_folders.h"
#include "ddp/trainer/init_from.h"
#include "ddp/trainer/keys.h"
#include "ddp/trainer/logging/recorded_steps.h"
#include "ddp/trainer/run_log.h"
#include "ddp/trainer/saving_ranks.h"
#include "ddp/trainer/shared_generator.h"
#include "ddp/trainer/step_optimizer.h"
#include "ddp/trainer/stop_requests.h"
#include "ddp/trainer/training_state.h"
#include "torch/csrc/autograd/grad_mode.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/utils.h"

namespace ddp::trainer {
namespace {

int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

}  // namespace

struct Accelerator::Model {
  std::string name;
  std::string suffix;  // of its keys
  std::shared_ptr<torch::nn::Module> module;
  std::shared_ptr<DataParallel> parallel;
  ModelState state;
  BucketOrder buckets;
  RankBuffers rank_buffers;
};

// What needs headers that are private to this folder.
struct Accelerator::Internals {
  Internals(const session::Session& session, const TrainerOptions& options)
      : session(session), options(options) {}

  // All that has state, in the order in which it is loaded.
  Components All() {
    Components all;
    all.Add(RunState::As(*run));
    for (Model& model : models) {
      all.Add({.name = keys::kModel + model.suffix, .stateful = &model.state, .required = true});
      if (!options.data_parallel.broadcast_buffers && session.size() > 1) {
        all.Add({.name = keys::kBuffers + model.suffix, .stateful = &model.rank_buffers});
      }
    }
    for (const auto& each : optimizers) {
      const auto named = [&](const char* name) { return name + each->suffix_; };
      if (HasSavedState(*each->optimizer_, options)) {
        all.Add({.name = named(keys::kOptimizer), .stateful = each->optimizer_.get()});
      }
      checkpoint::Component scheduler = {.name = named(keys::kScheduler),
                                         .stateful = each->scheduler_.get()};
      if (each->suffix_.empty()) scheduler.top_level = {keys::kProgress};
      all.Add(std::move(scheduler));
      if (each->optimizer_->scaler().is_enabled()) {
        all.Add({.name = named(keys::kScaler), .stateful = each->scaler_.get()});
      }
      if (each->hook_ != nullptr) {
        all.Add({.name = named(keys::kCommHook), .stateful = each->hook_});
      }
    }
    for (Model& model : models) all.Add(BucketOrder::As(model.buckets));
    for (const checkpoint::Component& component : components) all.Add(component);
    all.Add(Generators::As(*generators));
    return all;
  }

  bool all_ranks_write() const { return manager != nullptr && manager->all_ranks_write(); }
  bool IsSaved(const std::string& name) const { return manager && saved == manager->PathOf(name); }

  const session::Session& session;
  const TrainerOptions& options;
  std::unique_ptr<RunLog> log;
  std::unique_ptr<SavingRanks> saving_ranks;     // the manager's; null: the session
  std::unique_ptr<checkpoint::Manager> manager;  // null: no checkpoints
  std::optional<AsyncSave> async;                // with checkpoint.async
  std::optional<StopRequests> stops;
  std::optional<RunState> run;
  std::optional<Generators> generators;
  std::deque<Model> models;
  std::vector<std::unique_ptr<AcceleratedOptimizer>> optimizers;
  std::vector<checkpoint::Component> components;
  std::optional<data::DistributedSampler> sampler;
  int64_t examples = 0;                   // of an epoch, without padding
  std::shared_ptr<ShardedLoader> loader;  // of training; null: none was prepared
  int64_t stop_at_step = 0;               // the smallest of all ranks; 0: none
  bool stopped = false;
  bool has_new_epoch = false;  // of which nothing was saved
  HeldFolders folders{session};
  std::string loaded;     // path of the checkpoint of the last LoadState
  bool may_save = false;  // the folder's newest checkpoint is the one that was loaded, or ours
  // On the main rank, at the begin: the file with steps of whatever run in the folder of logs.
  std::optional<std::string> recorded_steps;
  absl::Duration longest_save;
  std::string saved;                            // path of the last save
  std::map<std::string, double> saved_metrics;  // of that name
};

// One epoch of a loader, or what is left of it.
struct ShardedLoader::Pass {
  int64_t batches = 0;
  int64_t given = 0;
  int64_t first_sample = 0;  // Position::sample at its begin
  bool ends_with_padding = false;
  std::vector<int64_t> indices;
};

ShardedLoader::ShardedLoader(Accelerator& accelerator, const data::AnyDataset& dataset, bool trains)
    : accelerator_(accelerator), dataset_(dataset), trains_(trains) {}
ShardedLoader::~ShardedLoader() = default;

bool ShardedLoader::has_more() const { return pass_ != nullptr && pass_->given < pass_->batches; }

const std::vector<int64_t>& ShardedLoader::indices() const {
  static const std::vector<int64_t> none;
  return pass_ == nullptr ? none : pass_->indices;
}

absl::Status ShardedLoader::BeginPass() {
  const TrainerOptions& options = accelerator_.options_;
  const session::Session& session = accelerator_.session_;
  auto pass = std::make_unique<Pass>();
  if (loader_ == nullptr) {
    const bool pins = options.pin_memory && session.device().is_cuda();
    DDP_ASSIGN_OR_RETURN(
        loader_,
        data::AnyLoader::Create(
            dataset_, {.batch_size = trains_ ? options.batch_size : options.eval_batch_size,
                       .num_workers = options.num_workers,
                       .prefetch_factor = options.prefetch_factor,
                       .pin_memory_device = pins ? session.device() : c10::Device(c10::kCPU),
                       .stall = session.stall()}));
  }
  data::Share share;
  if (trains_) {
    Position& position = accelerator_.position_;
    data::DistributedSampler& sampler = *accelerator_.internals_->sampler;
    sampler.set_epoch(position.epoch);
    pass->first_sample = position.sample;
    pass->batches = accelerator_.BatchesFrom(position.sample);
    DDP_RETURN_IF_ERROR(CatchStatus("", [&] {
      share = sampler.ShareFrom(position.sample);
      return BeginInOrder(share.Fingerprint(), position);
    }));
    if (options.drop_last) {
      share.size = std::min(share.size, pass->batches * options.batch_size);
    } else if (CeilDivide(share.size, options.batch_size) < pass->batches) {
      pass->ends_with_padding = true;
      ++share.size;
    }
  } else {
    DDP_ASSIGN_OR_RETURN(const auto sampler, data::EvaluationSampler::Create(
                                                 dataset_.size(), {.num_replicas = session.size(),
                                                                   .rank = session.rank(),
                                                                   .seed = options.seed}));
    share = sampler.AsShare();
    DDP_RETURN_IF_ERROR(accelerator_.BeginEvaluation());
    pass->batches = CeilDivide(sampler.num_samples(), options.eval_batch_size);
  }
  DDP_RETURN_IF_ERROR(loader_->Begin(std::move(share)));
  pass_ = std::move(pass);
  return absl::OkStatus();
}

absl::StatusOr<std::optional<data::AnyBatch>> ShardedLoader::NextAny() {
  if (std::exchange(restarts_, false) || pass_ == nullptr) DDP_RETURN_IF_ERROR(BeginPass());
  if (!has_more()) {
    pass_.reset();
    if (trains_) {
      ++accelerator_.position_.epoch;
      accelerator_.position_.sample = 0;
      accelerator_.internals_->has_new_epoch = true;
    }
    return std::nullopt;
  }
  DDP_ASSIGN_OR_RETURN(std::optional<data::AnyBatch> batch, loader_->Next());
  if (!batch) return absl::InternalError("the loader has fewer batches than it said");
  ++pass_->given;
  pass_->indices = batch->indices();
  if (trains_) accelerator_.is_padding_ = pass_->ends_with_padding && !has_more();
  DDP_RETURN_IF_ERROR(CatchStatus("", [&] {
    batch->To(accelerator_.session_.device());
    return absl::OkStatus();
  }));
  return batch;
}

// Not before an evaluation has begun, which is collective.
absl::StatusOr<bool> ShardedLoader::GivesUp() {
  if (trains_ || restarts_ || !has_more()) return false;
  DDP_ASSIGN_OR_RETURN(gave_up_, accelerator_.internals_->stops->GivesUp());
  if (gave_up_) pass_.reset();
  return gave_up_;
}

absl::StatusOr<bool> ShardedLoader::IsComplete() {
  Accelerator::Internals& all = *accelerator_.internals_;
  DDP_ASSIGN_OR_RETURN(const bool complete,
                       all.stops->AreComplete(all.session, !std::exchange(gave_up_, false)));
  if (complete) return true;
  all.stopped = true;
  accelerator_.end_ = all.stops->end();
  DDP_RETURN_IF_ERROR(accelerator_.FinishSave());
  Position& position = accelerator_.position_;
  if (std::exchange(all.has_new_epoch, false) && position.sample == 0) {
    --position.epoch;
    position.sample = all.examples;
  }
  return false;
}

AcceleratedOptimizer::AcceleratedOptimizer(Accelerator& accelerator, size_t number)
    : accelerator_(accelerator), number_(number) {}
AcceleratedOptimizer::~AcceleratedOptimizer() = default;

void AcceleratedOptimizer::CheckScope(const char* call) const {
  TORCH_CHECK(accelerator_.is_in_scope_, call,
              " of a prepared optimizer belongs into a scope: const auto scope = "
              "accelerator->Accumulate();");
}

// What the sum of a step's counts over all ranks is about: the greatest so far. Sums are scaled by
// it before backward, so that gradients stay in the range of means. Collective in the first step.
double AcceleratedOptimizer::ExpectedCount(double count) {
  std::vector<double>& known = accelerator_.position_.loss_counts;
  if (known.size() <= number_) known.resize(number_ + 1);
  if (known[number_] > 0) return known[number_];
  const session::Session& session = accelerator_.session_;
  const auto accumulate = static_cast<double>(accelerator_.options_.accumulate);
  at::Tensor sum =
      at::full({1}, count * accumulate, at::TensorOptions(session.device()).dtype(at::kDouble));
  if (session.process_group()) {
    std::vector<at::Tensor> sums = {sum};
    session.process_group()->allreduce(sums)->wait();
    sum = sums[0];
  }
  const auto expected = sum.item<double>();
  known[number_] = expected > 0 ? expected : accumulate * session.size();
  return known[number_];
}

void AcceleratedOptimizer::backward(const SumAndCount& loss) {
  CheckScope("backward");
  TORCH_CHECK(last_scope_ != accelerator_.scope_,
              "backward of a prepared optimizer was called twice for one batch: add up the losses");
  TORCH_CHECK(!awaits_zero_grad_,
              "the gradients of the last step are still there: call zero_grad() of the prepared "
              "optimizer after its step()");
  TORCH_CHECK(loss.defined() && loss.value().numel() == 1 && loss.value().requires_grad(),
              "a loss is one number with a gradient: a sum over the batch, or Mean()");
  TORCH_CHECK(std::isfinite(loss.count()) && loss.count() >= 0, "a loss counts ", loss.count());
  last_scope_ = accelerator_.scope_;
  ++unused_batches_;
  const session::Session& session = accelerator_.session_;
  const double weight = accelerator_.is_padding_ ? 0 : 1;
  const double count = weight * loss.count();
  const auto as_double = at::TensorOptions(session.device()).dtype(at::kDouble);
  const at::Tensor sum =
      count > 0 ? loss.double_sum().reshape({}).to(session.device()) : at::zeros({}, as_double);
  const at::Tensor sums = at::stack({sum, at::full({}, count, as_double)});
  sums_ = sums_.defined() ? sums_ + sums : sums;
  // Sums of integers stay exact in the gradients by a power of two; unscale_ corrects the
  // difference.
  divisor_ = std::ldexp(1.0, std::ilogb(ExpectedCount(count)));
  if (accelerator_.sync_gradients_ && session.process_group()) {
    std::vector<at::Tensor> message = {sums_};
    adding_ = session.process_group()->allreduce(message);
  }
  std::vector<DistributedOptimizer*> others;
  for (const auto& each : accelerator_.internals_->optimizers) {
    if (each.get() != this) others.push_back(each->optimizer_.get());
  }
  // The wrapper's mean over the ranks makes it a sum.
  BackwardOf(*optimizer_, optimizer_->scale(loss.Scaled(weight * session.size(), divisor_)), others,
             accelerator_.options_);
}

// Makes the gradients of the step final, once. False: the losses of all ranks count 0.
bool AcceleratedOptimizer::FinishGradients(const char* call) {
  CheckScope(call);
  TORCH_CHECK(last_scope_ == accelerator_.scope_, call,
              " of a prepared optimizer comes after its backward of the same batch");
  if (!counted_) {
    if (const auto adding = std::exchange(adding_, nullptr)) adding->wait();
    const at::Tensor sums = std::exchange(sums_, at::Tensor()).cpu();
    counted_ = sums[1].item<double>();
    mean_loss_ = sums[0].item<double>() / *counted_;
    if (*counted_ > 0) optimizer_->unscale_(divisor_ / *counted_);
    double& known = accelerator_.position_.loss_counts[number_];
    known = std::max(known, *counted_);
  }
  return *counted_ > 0;
}

double AcceleratedOptimizer::clip_grad_norm_(double max_norm, double norm_type) {
  if (!accelerator_.sync_gradients_ || !FinishGradients("clip_grad_norm_")) return 0;
  return optimizer_->clip_grad_norm_(max_norm, norm_type);
}

void AcceleratedOptimizer::clip_grad_value_(double clip_value) {
  if (!accelerator_.sync_gradients_ || !FinishGradients("clip_grad_value_")) return;
  optimizer_->clip_grad_value_(clip_value);
}

void AcceleratedOptimizer::step() {
  if (!accelerator_.sync_gradients_) return;
  const bool counts = FinishGradients("step");
  lr_ = scheduler_->step();
  if (counts) {
    optimizer_->step();
  } else if (std::has_single_bit(static_cast<uint64_t>(++steps_without_count_)) &&
             accelerator_.session_.is_main()) {
    accelerator_.internals_->log->Warn(absl::StrCat(
        "step ", accelerator_.position_.step + 1,
        " changes nothing: the losses of all ranks count 0 (are all labels masked?); such steps so "
        "far: ",
        steps_without_count_));
  }
  awaits_zero_grad_ = true;
  unused_batches_ = 0;
  // Another optimizer's loss may read the parameters in this scope.
  if (accelerator_.internals_->optimizers.size() > 1) optimizer_->WaitForParameters();
}

// Not where gradients have been accumulated that are not complete: before the last backward. At any
// other time those of a backward that no prepared optimizer has made are no part of what is
// accumulated next.
void AcceleratedOptimizer::zero_grad() {
  const bool is_complete = accelerator_.sync_gradients_ && last_scope_ == accelerator_.scope_;
  if (sums_.defined() && !is_complete) return;
  optimizer_->zero_grad();
  counted_.reset();
  sums_ = at::Tensor();
  awaits_zero_grad_ = false;
  unused_batches_ = 0;
}

Accelerator::Accelerator(const session::Session& session, const std::string& name,
                         const TrainerOptions& options)
    : session_(session),
      name_(name),
      options_(options),
      internals_(std::make_unique<Internals>(session, options_)) {}
Accelerator::~Accelerator() = default;

absl::Status Accelerator::SetUp() {
  TrainerOptions options = options_;
  absl::Status valid = ValidateForOwnLoop(options_);
  valid.Update(CheckName("task", name_));
  DDP_RETURN_IF_ERROR(RequireSameOptions(session_, ListOptions(options), valid));
  Internals& all = *internals_;
  DDP_RETURN_IF_ERROR(
      session_.Agree(all.folders.Hold("checkpoint.dir", options_.checkpoint.manager.directory)));
  DDP_RETURN_IF_ERROR(session_.Agree(all.folders.Hold("log.dir", options_.log.dir)));
  position_.seed = options_.seed;
  torch::manual_seed(static_cast<uint64_t>(options_.seed) + static_cast<uint64_t>(session_.rank()));
  if (!options_.checkpoint.manager.directory.empty()) {
    checkpoint::ManagerOptions manager = options_.checkpoint.manager;
    manager.group = "checkpoint";
    manager.broadcast = BroadcastOver(session_);
    manager.move = MoveOver(session_);
    const Coordinator* ranks = &session_;
    if (options_.checkpoint.async) {
      DDP_ASSIGN_OR_RETURN(all.saving_ranks, SavingRanks::Create(session_));
      ranks = all.saving_ranks.get();
    }
    DDP_ASSIGN_OR_RETURN(all.manager, checkpoint::Manager::Create(std::move(manager), *ranks));
    if (all.saving_ranks) {
      all.async.emplace(session_, *all.manager, *all.saving_ranks,
                        options_.checkpoint.check_staging);
    }
  }
  const LogOptions& log = options_.log;
  if (session_.is_main() && !log.dir.empty() && !log.sinks.empty()) {
    // A folder that cannot be read cannot be used either, which the sinks will tell.
    all.recorded_steps = logging::FindRecordedSteps(log.dir).value_or(std::nullopt);
  }
  absl::StatusOr<std::unique_ptr<RunLog>> opened = RunLog::Create(
      session_.is_main() ? log.dir : "", log.sinks, log.progress && session_.is_main());
  absl::Status status = opened.status();
  if (opened.ok()) {
    internals_->log = *std::move(opened);
    status = internals_->log->HyperParameters(options_.hyper_parameters);
  }
  DDP_RETURN_IF_ERROR(session_.Agree(Annotate(status, absl::StrCat("log.dir=", log.dir))));
  internals_->run.emplace(name_, options_, session_.size(), position_);
  internals_->generators.emplace(session_, position_);
  for (const checkpoint::Component& component : options_.components) {
    DDP_RETURN_IF_ERROR(RegisterForCheckpointing(component));
  }
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> limits,
                       session_.AllGather(absl::StrCat(options_.stop_at_step)));
  for (const std::string& text : limits) {
    int64_t limit = 0;
    if (!absl::SimpleAtoi(text, &limit) || limit == 0) continue;
    int64_t& least = internals_->stop_at_step;
    least = least == 0 ? limit : std::min(least, limit);
  }
  return CatchCollective("beginning to listen for stops", [&] {
    c10::intrusive_ptr<c10d::Store> store = StoreOfRun(session_);
    if (store) store = c10::make_intrusive<c10d::PrefixStore>("stop", store);
    internals_->stops.emplace(std::move(store), session_.rank(), session_.size(), options_,
                              absl::Now(), [this] { return internals_->longest_save; });
    return absl::OkStatus();
  });
}

absl::Status Accelerator::BeforeWrap(torch::nn::Module& module, const std::string& name) {
  DDP_RETURN_IF_ERROR(CheckName("model", name));
  for (const Model& model : internals_->models) {
    if (model.name != name) continue;
    return absl::AlreadyExistsError(absl::StrCat(
        "a model named '", name, "' is prepared already: give each a name of its own"));
  }
  const std::string& init_from = options_.checkpoint.init_from;
  if (!init_from.empty() && !name.empty()) {
    return OptionError("checkpoint.init_from", init_from,
                       absl::StrCat("has the weights of one model, but '", name,
                                    "' is one of several: load them in the program"));
  }
  return CatchStatus("", [&]() -> absl::Status {
    module.to(session_.device());
    if (options_.sync_bn == "none") return absl::OkStatus();
    return ConvertSyncBatchNorm(module, options_.sync_bn, session_.process_group()).status();
  });
}

absl::Status Accelerator::AddModel(const std::string& name,
                                   std::shared_ptr<torch::nn::Module> module,
                                   std::shared_ptr<DataParallel> parallel) {
  const std::string suffix = name.empty() ? "" : absl::StrCat(".", name);
  torch::nn::Module& it = *module;
  ModelWrapper& wrapper = *parallel;
  internals_->models.push_back(Model{.name = name,
                                     .suffix = suffix,
                                     .module = std::move(module),
                                     .parallel = std::move(parallel),
                                     .state = ModelState(it),
                                     .buckets = BucketOrder(wrapper, suffix),
                                     .rank_buffers = RankBuffers(it, session_.rank())});
  return InitFromCheckpoint(session_, options_.checkpoint, internals_->manager.get(), it,
                            *internals_->log)
      .status();
}

absl::StatusOr<AcceleratedOptimizer*> Accelerator::AddOptimizer(
    const DataParallel& parallel, const std::optional<OptimizerOptions>& own) {
  Internals& all = *internals_;
  const auto model = std::find_if(all.models.begin(), all.models.end(), [&](const Model& each) {
    return each.parallel.get() == &parallel;
  });
  if (model == all.models.end()) {
    return absl::InvalidArgumentError("the optimizer's model was not prepared: call Prepare first");
  }
  for (const auto& other : all.optimizers) {
    if (other->suffix_ != model->suffix) continue;
    return absl::AlreadyExistsError(
        absl::StrCat("model '", model->name, "' has an optimizer already"));
  }
  if (IsEndless()) {
    DDP_RETURN_IF_ERROR(InGroup("schedule", CheckWithoutEpochs(options_.schedule)));
  }
  const bool has_length = options_.max_steps > 0 || (all.loader != nullptr && !IsEndless());
  if (!has_length) {
    const char* why = IsEndless() ? ", whose sampler has no end: set max_steps"
                                  : ": prepare the loader before the optimizer, or set max_steps";
    DDP_RETURN_IF_ERROR(InGroup("schedule", CheckWithoutLength(options_.schedule, why)));
  }
  if (!options_.data_parallel.ignored.empty() && options_.zero.stage > 0) {
    return OptionError("data_parallel.ignored", options_.data_parallel.ignored[0],
                       "is a parameter that each rank would train by itself, but zero.stage needs "
                       "the same parameters on all ranks; use one of the two");
  }
  const OptimizerOptions& given = own ? *own : options_.optimizer;
  const OptimizerMaker maker = own ? nullptr : options_.make_optimizer;
  if (all.manager != nullptr && options_.checkpoint.save.save_optimizer) {
    DDP_RETURN_IF_ERROR(InGroup("optimizer", CheckStateIsKnown(given, maker, kSavedState)));
  }
  DDP_ASSIGN_OR_RETURN(StepOptimizer made,
                       MakeStepOptimizer(session_, options_, given, maker, parallel.parameters(),
                                         model->parallel, all.all_ranks_write()));
  absl::StatusOr<Schedule> schedule = Schedule::Create(
      options_.schedule,
      {.epochs = Epochs(),
       .steps_per_epoch = std::max<int64_t>(1, all.loader ? StepsFrom(0) : options_.max_steps),
       .max_steps = options_.max_steps,
       .samples_per_step = options_.batch_size * options_.accumulate * session_.size(),
       .is_known = has_length},
      options_.lr_lambda);
  DDP_RETURN_IF_ERROR(InGroup("schedule", schedule.status()));
  auto optimizer =
      std::unique_ptr<AcceleratedOptimizer>(new AcceleratedOptimizer(*this, all.optimizers.size()));
  optimizer->suffix_ = model->suffix;
  optimizer->optimizer_ = std::move(made.optimizer);
  model->buckets.set_optimizer(*optimizer->optimizer_);
  optimizer->hook_ = made.hook;
  optimizer->scheduler_ =
      std::make_unique<LRScheduler>(optimizer->optimizer_->optimizer(), *std::move(schedule));
  optimizer->scaler_ = std::make_unique<ScalerState>(optimizer->optimizer_->scaler());
  OptionList list;
  const absl::Status listed = CatchStatus("", [&] {
    ListStepOptions(model->name, optimizer->optimizer_->optimizer(),
                    optimizer->scheduler_->schedule(), list);
  });
  DDP_RETURN_IF_ERROR(RequireSameOptions(session_, list, listed));
  for (const std::string& group : made.groups) {
    Print(absl::StrCat("optimizer", model->suffix, " group ", group));
  }
  all.optimizers.push_back(std::move(optimizer));
  return all.optimizers.back().get();
}

absl::StatusOr<std::shared_ptr<ShardedLoader>> Accelerator::AddLoader(
    const data::AnyDataset& dataset) {
  Internals& all = *internals_;
  if (all.loader != nullptr) {
    return absl::FailedPreconditionError(
        "a training loader is prepared already, whose position is the run's: use one, of a data "
        "set that has all examples");
  }
  const ScheduleOptions& schedule = options_.schedule;
  if (!all.optimizers.empty() && (schedule.name != "constant" || schedule.warmup_epochs > 0)) {
    return absl::FailedPreconditionError(
        "prepare the loader before the optimizer, whose schedule counts its epochs");
  }
  OptionList list;
  const auto add = [&](const char* what, std::string value) {
    list.Add({.path = what, .get = [value = std::move(value)] { return value; }});
  };
  const absl::Status made = CatchStatus("", [&]() -> absl::Status {
    const data::DistributedSamplerOptions share = {.num_replicas = session_.size(),
                                                   .rank = session_.rank(),
                                                   .shuffle = options_.shuffle,
                                                   .seed = options_.seed,
                                                   .pad = options_.even_batches};
    DDP_ASSIGN_OR_RETURN(all.sampler,
                         options_.sampler == nullptr
                             ? data::DistributedSampler::Create(dataset.size(), share)
                             : data::DistributedSampler::Create(options_.sampler, share));
    all.examples = options_.sampler == nullptr ? dataset.size() : options_.sampler->size();
    if (BatchesFrom(0) == 0) {
      return OptionError(
          "drop_last", "true",
          absl::StrCat("leaves nothing of ", dataset.size(), " examples: a batch of ",
                       options_.batch_size, " on each of ", session_.size(),
                       " ranks is not full; choose a smaller batch_size"));
    }
    position_.dataset_size = dataset.size();
    position_.data_fingerprint = dataset.Fingerprint();
    add("training data", DataText(dataset.size(), *position_.data_fingerprint));
    if (options_.sampler != nullptr) {
      add("sampler", absl::StrCat("of fingerprint ", all.sampler->ShareFrom(0).Fingerprint()));
    }
    return absl::OkStatus();
  });
  // From here to the end of Agree no rank draws random numbers: where ranks are threads, they share
  // the generator.
  DDP_RETURN_IF_ERROR(RequireSameOptions(session_, list, made));
  DDP_RETURN_IF_ERROR(session_.Agree(
      session_.is_main() ? RefuseSharedGenerator(dataset, *all.sampler) : absl::OkStatus()));
  const std::string text = CannotSeekText(dataset);
  if (session_.is_main() && !text.empty()) all.log->Warn(text);
  all.loader = std::shared_ptr<ShardedLoader>(new ShardedLoader(*this, dataset, /*trains=*/true));
  return all.loader;
}

absl::StatusOr<std::shared_ptr<ShardedLoader>> Accelerator::MakeEvaluationLoader(
    const data::AnyDataset& dataset) {
  DDP_RETURN_IF_ERROR(BeginEvaluation());
  return std::shared_ptr<ShardedLoader>(new ShardedLoader(*this, dataset, /*trains=*/false));
}

absl::Status Accelerator::BeginEvaluation() {
  return CatchCollective("sharing rank 0's buffers", [&] {
    const torch::NoGradGuard no_grad;
    WaitForParameters();
    for (Model& model : internals_->models) {
      model.parallel->SyncBuffers();
      // As after a forward without gradients: the next one, which a rank without batches does not
      // make, would broadcast them again if the last one has trained.
      model.parallel->PostForward({});
    }
    return absl::OkStatus();
  });
}

// Of each rank.
int64_t Accelerator::BatchesFrom(int64_t sample) const {
  const data::DistributedSampler& sampler = *internals_->sampler;
  if (options_.drop_last) {
    return sampler.num_samples_of(session_.size() - 1, sample) / options_.batch_size;
  }
  return CeilDivide(sampler.max_num_samples(sample), options_.batch_size);
}

// Whether there is a loader, of a sampler that never ends.
bool Accelerator::IsEndless() const {
  return internals_->loader != nullptr && internals_->examples >= data::kEndless;
}

StepsLeft Accelerator::RemainingSteps() const {
  const int64_t limit = std::max<int64_t>(0, options_.max_steps - position_.step);
  if (internals_->loader == nullptr) return {limit, std::nullopt};
  const int64_t in_epochs =
      StepsFrom(position_.sample) + (Epochs() - position_.epoch - 1) * StepsFrom(0);
  // A loop may go on after them.
  const int64_t most = std::max<int64_t>(0, in_epochs);
  return {options_.max_steps == 0 ? most : std::min(limit, most), in_epochs};
}

void Accelerator::BeginBatch(bool is_last) {
  const auto reached = [&](int64_t limit) { return limit > 0 && position_.step >= limit; };
  TORCH_CHECK(batches_ > 0 || (!reached(options_.max_steps) && !reached(options_.stop_at_step)),
              "the run has come to its last step, ", position_.step,
              " (max_steps, stop_at_step): call GoOn after LoadState and after each step, and End "
              "once it returns false");
  is_in_scope_ = true;
  ++scope_;
  ++batches_;
  const ShardedLoader* loader = internals_->loader.get();
  const bool ends_epoch = loader != nullptr && loader->pass_ != nullptr && !loader->has_more();
  sync_gradients_ = batches_ == options_.accumulate || ends_epoch || is_last;
  WaitForParameters();
  for (Model& model : internals_->models) {
    model.parallel->set_require_backward_grad_sync(sync_gradients_);
  }
}

void Accelerator::EndBatch() {
  if (!std::exchange(is_in_scope_, false) || !sync_gradients_) return;
  batches_ = 0;
  ++position_.step;
  const ShardedLoader* loader = internals_->loader.get();
  if (loader == nullptr || loader->pass_ == nullptr) return;
  const ShardedLoader::Pass& pass = *loader->pass_;
  position_.sample = loader->has_more()
                         ? pass.first_sample + pass.given * options_.batch_size * session_.size()
                         : internals_->examples;
}

void Accelerator::WaitForParameters() {
  for (const auto& each : internals_->optimizers) each->optimizer_->WaitForParameters();
}

absl::Status Accelerator::RegisterForCheckpointing(checkpoint::Component component) {
  DDP_RETURN_IF_ERROR(CheckComponent(component, internals_->components));
  internals_->components.push_back(std::move(component));
  return absl::OkStatus();
}

std::string Accelerator::CheckpointName() const {
  if (internals_->loader == nullptr) return checkpoint::StepName(position_.step);
  if (position_.sample == 0) return checkpoint::EpochName(position_.epoch);
  return checkpoint::EpochStepName(position_.epoch, position_.step);
}

absl::Status Accelerator::SaveState(const std::map<std::string, double>& metrics) {
  Internals& all = *internals_;
  if (all.manager == nullptr) return absl::OkStatus();
  if (is_in_scope_ || batches_ > 0) {
    return absl::FailedPreconditionError(
        "SaveState amid a step, whose accumulated gradients are in no checkpoint: call it after a "
        "scope of Accumulate in which sync_gradients() was true, as it is in Accumulate(true)");
  }
  if (!all.may_save) {
    absl::Status free;
    if (session_.is_main()) {
      const absl::StatusOr<std::optional<std::string>> newest = all.manager->Newest();
      free = newest.status();
      std::error_code ignored;  // then they are not the same
      if (newest.ok() && newest->has_value() &&
          !std::filesystem::equivalent(**newest, all.loaded, ignored)) {
        free = all.folders.HoldsCheckpoints(options_.checkpoint.manager.directory, **newest,
                                            "go on with them by LoadState");
      }
    }
    DDP_RETURN_IF_ERROR(session_.Agree(free));
    all.may_save = true;
  }
  all.folders.Claim(*all.log);
  DDP_RETURN_IF_ERROR(JoinSave());
  const absl::Time began = absl::Now();
  // The checkpoint has rank 0's buffers; the run goes on with what each rank has.
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers;
  DDP_RETURN_IF_ERROR(CatchCollective("sharing rank 0's buffers", [&] {
    WaitForParameters();
    for (Model& model : all.models) {
      if (!options_.data_parallel.broadcast_buffers) model.rank_buffers.TakeDown();
      for (const auto& buffer : model.module->named_buffers()) {
        buffers.emplace_back(buffer.value(), buffer.value().detach().clone());
      }
      model.parallel->SyncBuffers();
    }
    return absl::OkStatus();
  }));
  DDP_ASSIGN_OR_RETURN(checkpoint::State state, all.All().Capture(session_, all.all_ranks_write()));
  checkpoint::SaveOptions save = options_.checkpoint.save;
  // The same position saved again, as at a stop after the end of an epoch, keeps its metrics.
  if (!all.IsSaved(CheckpointName()) || !metrics.empty()) all.saved_metrics = metrics;
  save.metrics = all.saved_metrics;
  const auto write = [&] {
    if (all.async) return all.async->Start(CheckpointName(), std::move(state), std::move(save));
    const absl::StatusOr<std::string> saved =
        all.manager->Save(CheckpointName(), std::move(state), save);
    return NoteSaved(saved, absl::Now() - began);
  };
  const absl::Status written = write();
  const torch::NoGradGuard no_grad;
  for (auto& [buffer, mine] : buffers) checkpoint::CopyValues(buffer, mine);
  return written;
}

// Returns OK if the run goes on.
absl::Status Accelerator::NoteSaved(const absl::StatusOr<std::string>& saved, absl::Duration took) {
  Internals& all = *internals_;
  all.saved = saved.value_or("");
  if (all.IsSaved(CheckpointName())) all.has_new_epoch = false;
  all.longest_save = std::max(all.longest_save, took);
  return all.manager->GoesOnAfter(saved.status())
             ? absl::OkStatus()
             : OfSave(saved.status(), options_.checkpoint.manager.directory);
}

absl::Status Accelerator::JoinSave() {
  const auto ended = internals_->async ? internals_->async->Join() : std::nullopt;
  return ended ? AsOwnError(NoteSaved(ended->saved, ended->took)) : absl::OkStatus();
}
absl::Status Accelerator::FinishSave() {
  if (!internals_->async || !internals_->async->has_begun()) return absl::OkStatus();
  DDP_RETURN_IF_ERROR(session_.Agree(absl::OkStatus()));  // of a rank that has failed: its error
  return session_.Agree(JoinSave());
}

absl::Status Accelerator::Restore(const checkpoint::State& state) {
  checkpoint::LoadNotes notes;
  unclaimed_.clear();
  DDP_RETURN_IF_ERROR(internals_->All().Restore(state, session_, notes, unclaimed_));
  for (const auto& each : internals_->optimizers) {
    each->scheduler_->GoOn(position_.step, RemainingSteps());
  }
  if (!session_.is_main()) return absl::OkStatus();
  for (const std::string& note : notes.lines()) {
    internals_->log->Warn(absl::StrCat("resumed ", note));
  }
  return absl::OkStatus();
}

absl::Status Accelerator::LoadState(const std::string& from) {
  Internals& all = *internals_;
  DDP_RETURN_IF_ERROR(FinishSave());
  checkpoint::ReadRequest request{.all_else = true, .per_rank = all.All().per_rank()};
  for (const auto& each : all.optimizers) {
    each->optimizer_->RequestState(keys::kOptimizer + each->suffix_, request);
  }
  const checkpoint::LoadOptions& load = options_.checkpoint.load;
  std::string path = from;
  absl::StatusOr<checkpoint::State> state = checkpoint::State();
  std::optional<checkpoint::Loaded> own;
  // A later life of a job goes on from what the first one has saved, as Train does.
  const bool is_path = from != "auto" && from != "best";
  if (is_path && all.manager != nullptr && all.loaded.empty() && all.saved.empty()) {
    const bool is_own = all.folders.IsOwn(options_.checkpoint.manager.directory);
    DDP_ASSIGN_OR_RETURN(const std::string whose, session_.Broadcast(is_own ? "own" : ""));
    if (!whose.empty()) {
      DDP_ASSIGN_OR_RETURN(own, LoadOwn(session_, *all.manager, "auto", request, load));
    }
  }
  if (own) {
    path = own->path;
    state = std::move(own->state);
  } else if (!is_path) {
    if (all.manager == nullptr) {
      return OptionError("checkpoint.dir", "", "is needed to go on with what is in it");
    }
    DDP_ASSIGN_OR_RETURN(std::optional<checkpoint::Loaded> loaded,
                         LoadOwn(session_, *all.manager, from, request, load));
    // Steps in the log are of an attempt that had saved nothing.
    if (!loaded) {
      all.may_save = true;
      return session_.Agree(all.recorded_steps ? all.log->ResumedAt(0) : absl::OkStatus());
    }
    path = loaded->path;
    state = std::move(loaded->state);
  } else {
    state = ReadCheckpoint(session_, path, request, options_.checkpoint.manager, load);
  }
  absl::Status restored = state.status();
  if (restored.ok()) restored = CatchStatus("", [&] { return Restore(*state); });
  state = checkpoint::State();  // its memory
  DDP_RETURN_IF_ERROR(session_.Agree(CannotResumeFrom(path, restored)));
  all.loaded = path;
  all.may_save = all.has_new_epoch = false;
  if (all.loader != nullptr) all.loader->pass_.reset();
  for (Model& model : all.models) {
    DDP_RETURN_IF_ERROR(
        CheckSameState(session_, position_, model.module->named_parameters(), path));
    DDP_ASSIGN_OR_RETURN(const bool same, model.buckets.Restore(session_));
    if (!same) Print(kOtherBuckets);
  }
  Print(absl::StrCat("resumed from ", path, ": epoch ", position_.epoch,
                     position_.sample > 0 ? absl::StrCat(", example ", position_.sample) : "",
                     ", step ", position_.step));
  return session_.Agree(all.log->ResumedAt(position_.step));
}

absl::StatusOr<bool> Accelerator::GoOn() {
  Internals& all = *internals_;
  EndBatch();
  if (all.stopped) return false;
  if (batches_ > 0) return true;  // amid a step
  const auto reached = [&](int64_t limit) { return limit > 0 && position_.step >= limit; };
  if (reached(options_.max_steps) || reached(all.stop_at_step)) {
    all.stopped = true;
    end_ = {.reason = reached(options_.max_steps) ? EndReason::kMaxSteps : EndReason::kStopAtStep};
    return false;
  }
  if (all.async && all.async->has_failed()) RequestStop("a checkpoint was not saved");
  DDP_ASSIGN_OR_RETURN(const bool more, all.stops->GoOn());
  if (more) return true;
  all.stopped = true;
  end_ = all.stops->end();
  if (end_.reason == EndReason::kCallback) all.stops->Renew();  // for a signal in an evaluation
  return false;
}

absl::Status Accelerator::Log(const std::vector<std::pair<std::string, double>>& values) {
  const Internals& all = *internals_;
  if (all.recorded_steps && !all.may_save && all.loaded.empty()) {
    return logging::HoldsAnotherLog(options_.log.dir, *all.recorded_steps,
                                    "go on with that run by LoadState");
  }
  std::vector<logging::Metric> metrics;
  for (const auto& [tag, value] : values) metrics.push_back({tag, value});
  return all.log->Record(position_.step + (batches_ > 0 ? 1 : 0), metrics);
}

void Accelerator::RequestStop(absl::string_view why) { internals_->stops->RequestByCallback(why); }
void Accelerator::Print(absl::string_view line) { internals_->log->Print(line); }

// All ranks have taken the same batches.
void Accelerator::WarnOfLostBatches() const {
  // A loop with an optimizer of its own steps where sync_gradients() is true.
  const bool is_amid = batches_ > 0 && !sync_gradients_ && !internals_->models.empty();
  int64_t lost = is_amid && internals_->optimizers.empty() ? batches_ : 0;
  for (const auto& each : internals_->optimizers) lost = std::max(lost, each->unused_batches_);
  if (lost == 0 || !session_.is_main()) return;
  internals_->log->Warn(
      absl::StrCat("End amid a step: the gradients of ", lost, lost == 1 ? " batch" : " batches",
                   " are lost, since no step has used them; end it by Accumulate(true) for the "
                   "last batch, and step()"));
}

absl::Status Accelerator::End() {
  WarnOfLostBatches();
  DDP_RETURN_IF_ERROR(FinishSave());
  if (end_.early()) end_.saved = internals_->saved;
  internals_->stops->Close();
  DDP_RETURN_IF_ERROR(
      session_.Agree(internals_->log->Ended(position_.step, end_.Name(), end_.saved)));
  return end_.status();
}

absl::Status Accelerator::SaveAndEnd() {
  DDP_RETURN_IF_ERROR(SaveState());
  DDP_RETURN_IF_ERROR(FinishSave());
  if (!internals_->saved.empty()) Print(absl::StrCat("saved ", internals_->saved));
  return End();
}

}  // namespace ddp::trainer
