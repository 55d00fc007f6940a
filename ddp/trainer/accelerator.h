// The parts of a training loop of one's own: the counterpart of Accelerate's Accelerator. Each part
// can be used without the others.
//
//   TrainerOptions options;  // those of Train, with the same meanings: precision, zero, comm_hook
//   … DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "my_net", options));
//   DDP_ASSIGN_OR_RETURN(auto train, accelerator->PrepareLoader<data::Batch>(dataset));
//   DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(net));
//   DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer* optimizer, accelerator->PrepareOptimizer(model));
//   DDP_RETURN_IF_ERROR(accelerator->LoadState());
//   while (accelerator->position().epoch < options.epochs) {
//     while (true) {
//       DDP_ASSIGN_OR_RETURN(std::optional<data::Batch> batch, train->Next());
//       if (!batch) break;  // the end of the epoch
//       const auto scope = accelerator->Accumulate();
//       at::Tensor losses = Losses(model->forward(batch->input), batch->target);
//       optimizer->backward({losses.sum(), losses.numel()});
//       optimizer->clip_grad_norm_(1.0);
//       optimizer->step();
//       optimizer->zero_grad();
//       DDP_ASSIGN_OR_RETURN(const bool more, accelerator->GoOn());
//       if (!more) return accelerator->SaveAndEnd();  // exit code 128 + the signal
//     }
//     DDP_RETURN_IF_ERROR(accelerator->SaveState());
//   }
//   return accelerator->End();
//
// tools/examples/own_loop.cc is a complete program; docs/own_loop.md says more. What needs no
// Accelerator: MoveToDevice(value, session.device()) (ddp/tree/tree.h); ReduceDict (ddp/gather/)
// and metrics::ReduceMetrics (ddp/metrics/) over session.process_group().
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "checkpoint/manager.h"
#include "checkpoint/stateful.h"
#include "ddp/amp/autocast.h"
#include "ddp/data/batch.h"
#include "ddp/data/dataset.h"
#include "ddp/data/loader.h"
#include "ddp/ddp.h"
#include "ddp/distributed_optimizer.h"
#include "ddp/gather/gather_for_metrics.h"
#include "ddp/session/session.h"
#include "ddp/trainer/options.h"
#include "ddp/trainer/position.h"
#include "ddp/trainer/run_end.h"
#include "ddp/trainer/schedule.h"
#include "ddp/trainer/task.h"
#include "torch/csrc/distributed/c10d/Work.hpp"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"

namespace ddp::trainer {

class Accelerator;

// An optimizer with its learning-rate schedule, whose gradient is that of (sum of the losses' sums)
// / (sum of their counts), over the batches and ranks of a step. All ranks make the same calls, in
// a scope of Accumulate. Functions throw as PyTorch's do: c10::Error, also of a failed collective.
// Thread-compatible; belongs to its Accelerator.
class AcceleratedOptimizer {
 public:
  ~AcceleratedOptimizer();
  AcceleratedOptimizer(const AcceleratedOptimizer&) = delete;
  AcceleratedOptimizer& operator=(const AcceleratedOptimizer&) = delete;

  // Call it once per batch. Collective if it synchronises gradients. Adds to the gradients of this
  // optimizer's parameters; those of the accelerator's other optimizers stay what they are, also if
  // the loss reads their models, as a generator's does. (With several and zero.stage=2 no other
  // tensor gets a gradient.) What one loss trains together is one module with one optimizer. Throws
  // if `loss` is not one number with a gradient, or its count is negative or not finite.
  void backward(const SumAndCount& loss);

  // These, and step(), do nothing unless Accelerator::sync_gradients(), and return 0 then. See
  // DistributedOptimizer, and ddp/clip_grad.h for `norm_type`. The norm is that of all gradients
  // before they are clipped.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);
  void clip_grad_value_(double clip_value);
  // Sets the learning rates and takes a step. If all losses count 0, it takes none, and a warning
  // says so.
  void step();
  // It may be called at any time, but does nothing amid an accumulation.
  void zero_grad();

  // The mean loss of the last step over its batches and the ranks, the same on all; NaN if it
  // counted 0, and before the first step of this process.
  double mean_loss() const { return mean_loss_; }
  // The rate of the first parameter group in that step.
  double lr() const { return lr_; }

  LRScheduler& scheduler() { return *scheduler_; }
  DistributedOptimizer& optimizer() { return *optimizer_; }

 private:
  friend class Accelerator;
  AcceleratedOptimizer(Accelerator& accelerator, size_t number);
  bool FinishGradients(const char* call);
  void CheckScope(const char* call) const;
  double ExpectedCount(double count);

  Accelerator& accelerator_;
  const size_t number_;  // of the accelerator's optimizers
  std::string suffix_;
  std::unique_ptr<DistributedOptimizer> optimizer_;
  std::unique_ptr<LRScheduler> scheduler_;
  checkpoint::Stateful* hook_ = nullptr;
  std::unique_ptr<checkpoint::Stateful> scaler_;
  // The following are of the present step.
  int64_t last_scope_ = 0;  // of the last backward
  at::Tensor sums_;         // double [2]: of the losses, of the counts
  c10::intrusive_ptr<c10d::Work> adding_;
  double divisor_ = 1;             // of the sums, before backward
  std::optional<double> counted_;  // by all ranks, once the gradients are final
  bool awaits_zero_grad_ = false;
  int64_t unused_batches_ = 0;  // whose gradients have come into no step yet
  int64_t steps_without_count_ = 0;
  double mean_loss_ = std::numeric_limits<double>::quiet_NaN();
  double lr_ = 0;
};

// The batches of this rank. Thread-compatible; its accelerator and data set outlive it.
class ShardedLoader {
 public:
  ~ShardedLoader();
  ShardedLoader(const ShardedLoader&) = delete;
  ShardedLoader& operator=(const ShardedLoader&) = delete;

  // See ShardedLoaderOf.
  absl::StatusOr<std::optional<data::AnyBatch>> NextAny();
  // See ShardedLoaderOf.
  void Restart() { restarts_ = !trains_; }
  // Whether this evaluation is left early, for a stop.
  absl::StatusOr<bool> GivesUp();
  // See ShardedLoaderOf.
  absl::StatusOr<bool> IsComplete();
  // The data set's indices of the examples of the last batch.
  const std::vector<int64_t>& indices() const;

 private:
  friend class Accelerator;
  struct Pass;
  ShardedLoader(Accelerator& accelerator, const data::AnyDataset& dataset, bool trains);
  absl::Status BeginPass();
  bool has_more() const;

  Accelerator& accelerator_;
  const data::AnyDataset& dataset_;
  const bool trains_;
  std::unique_ptr<data::AnyLoader> loader_;
  std::unique_ptr<Pass> pass_;  // null: none has begun
  bool restarts_ = false;       // with the next batch
  bool gave_up_ = false;        // the last evaluation, on this rank
};

// The same for batches of type B.
template <Tree B>
class ShardedLoaderOf {
 public:
  explicit ShardedLoaderOf(std::shared_ptr<ShardedLoader> loader) : loader_(std::move(loader)) {}

  // The next batch, on the session's device; nullopt at the end of an epoch, or of an evaluation;
  // the call after that begins the next one. Errors of AnyLoader, and one that names both types if
  // the data set's batches are of another. Not collective, but for the call that begins an
  // evaluation.
  absl::StatusOr<std::optional<B>> Next() {
    DDP_ASSIGN_OR_RETURN(std::optional<data::AnyBatch> batch, loader_->NextAny());
    if (!batch) return std::nullopt;
    return CatchStatus("", [&]() -> absl::StatusOr<std::optional<B>> {
      return std::optional<B>(std::move(batch->Get<B>()));
    });
  }
  // The same, but nullopt also if a signal or max_time has asked for a stop within an evaluation,
  // on this rank or, as far as it knows, another one: after different batches. So nothing in the
  // loop may communicate; after the nullopt all ranks call IsComplete. For a training loader it is
  // Next.
  absl::StatusOr<std::optional<B>> NextUnlessStopped() {
    DDP_ASSIGN_OR_RETURN(const bool gives_up, loader_->GivesUp());
    if (gives_up) return std::nullopt;
    return Next();
  }
  // Collective. Whether all ranks have had all batches of the evaluation. If not, all stop: what
  // they have computed is incomplete, GoOn is false from now on, and the program is to save and
  // end. At the end of an epoch of which nothing was saved yet, position() goes back to after its
  // last step: the run that goes on from there comes to the end of the epoch, and makes the
  // evaluation.
  absl::StatusOr<bool> IsComplete() { return loader_->IsComplete(); }
  // The next call of Next begins an evaluation, also if the one before was left early: otherwise
  // that one would go on. All ranks call it. It changes nothing for a training loader, whose
  // position is the run's.
  void Restart() { loader_->Restart(); }
  // The data set's indices of the examples of the last batch, for GatherForMetrics.
  const std::vector<int64_t>& indices() const { return loader_->indices(); }

 private:
  std::shared_ptr<ShardedLoader> loader_;
};

// Each run has one, on all ranks, which make the same calls. Thread-compatible. A rank that fails
// returns its error from the body of session::Run, which ends all with one message.
class Accelerator {
 public:
  // Collective. `name`: of the task, saved in checkpoints. Seeds torch's generators with
  // options.seed + rank. From now on the first of options.stop_signals does not end the process:
  // the next GoOn sees it. One that comes a second later or more ends it at once
  // (base/stop_signals.h).
  //
  // Of `options` it uses accumulate, batch_size, eval_batch_size, drop_last, num_workers,
  // prefetch_factor, pin_memory, shuffle, even_batches, seed, precision, sync_bn, stop_signals,
  // max_time, max_steps, stop_at_step; the groups optimizer, schedule, data_parallel, comm_hook,
  // zero, grad_scaler, log; the folder and form of checkpoints (checkpoint.manager,
  // checkpoint.save, checkpoint.load), checkpoint.async, check_staging, init_from and what belongs
  // to it; `components`, `make_optimizer`, `lr_lambda`, `sampler`. `epochs` is the length of the
  // schedule. checkpoint.resume is for your loop, as the argument of LoadState. OptionError for a
  // value of another option, which is Train's, such as checkpoint.every_steps: your loop does that
  // itself. Errors of Validate; ranks with different options.
  static absl::StatusOr<std::unique_ptr<Accelerator>> Create(const session::Session& session,
                                                             const std::string& name,
                                                             const TrainerOptions& options = {}) {
    auto accelerator = std::unique_ptr<Accelerator>(new Accelerator(session, name, options));
    DDP_RETURN_IF_ERROR(accelerator->SetUp());
    return accelerator;
  }
  ~Accelerator();
  Accelerator(const Accelerator&) = delete;
  Accelerator& operator=(const Accelerator&) = delete;

  // Collective. Moves a module to the session's device and wraps it. Several need different names,
  // which their keys in checkpoints end with: "model.generator". With checkpoint.init_from, a run
  // whose folder has no checkpoint begins with its weights; there is one model then, without a
  // name. Errors of DataParallel::Create, and of that checkpoint.
  template <typename M>
  absl::StatusOr<std::shared_ptr<DistributedDataParallel<M>>> Prepare(
      std::shared_ptr<M> module, const std::string& name = "") {
    DDP_RETURN_IF_ERROR(BeforeWrap(*module, name));
    DDP_ASSIGN_OR_RETURN(auto wrapped, Wrap(module, session_.process_group(), wrapper_options()));
    DDP_RETURN_IF_ERROR(AddModel(name, module, wrapped->shared_parallel()));
    return wrapped;
  }
  template <typename M>
  absl::StatusOr<std::shared_ptr<DistributedDataParallel<M>>> Prepare(
      const torch::nn::ModuleHolder<M>& module, const std::string& name = "") {
    return Prepare(module.ptr(), name);
  }

  // Makes, on all ranks, the optimizer of a prepared model's trainable parameters, by
  // options.optimizer (or make_optimizer), or by `own`; with options.schedule, whose length is that
  // of the loader, which is prepared before, or of max_steps. Without either, and with a sampler
  // that has no end and without max_steps, the run has no length: the schedule is constant, or
  // lr_lambda, whose `progress` is 0. Belongs to this object. Collective: the ranks compare the
  // optimizers' options and the schedules' factors.
  template <typename M>
  absl::StatusOr<AcceleratedOptimizer*> PrepareOptimizer(
      const std::shared_ptr<DistributedDataParallel<M>>& model,
      const std::optional<OptimizerOptions>& own = std::nullopt) {
    return AddOptimizer(model->parallel(), own);
  }

  // The training loader: each epoch has the data set in an order of its own, by options.seed.
  // It goes on at position(), also within an epoch and in another world. All ranks get as many
  // batches: with even_batches some examples come twice; without, each once, and a rank whose
  // examples do not suffice for a last batch gets one of which it knows that it does not count.
  // FailedPrecondition for a second one, and after an optimizer whose schedule counts epochs.
  // `dataset` outlives it. Collective: the ranks must have the same data set and sampler, and one
  // that draws from torch's global generator is refused, for which rank 0 reads two examples (as
  // Train).
  template <Tree B>
  absl::StatusOr<std::unique_ptr<ShardedLoaderOf<B>>> PrepareLoader(
      const data::AnyDataset& dataset) {
    DDP_ASSIGN_OR_RETURN(std::shared_ptr<ShardedLoader> loader, AddLoader(dataset));
    return std::make_unique<ShardedLoaderOf<B>>(std::move(loader));
  }

  // Collective. Makes a loader for evaluations: each example is on one rank, in the data set's
  // order; ranks may have different numbers of batches, or none, so that the loop over them has no
  // collective but its first Next. Gives all ranks rank 0's buffers, as that does each time. In
  // between, a prepared model communicates nothing under torch::NoGradGuard; with gradients its
  // forward does what it does in training, also in mode eval(), so that a rank with fewer batches
  // keeps the others waiting. Errors of communication as CatchCollective.
  template <Tree B>
  absl::StatusOr<std::unique_ptr<ShardedLoaderOf<B>>> EvaluationLoader(
      const data::AnyDataset& dataset) {
    DDP_ASSIGN_OR_RETURN(std::shared_ptr<ShardedLoader> loader, MakeEvaluationLoader(dataset));
    return std::make_unique<ShardedLoaderOf<B>>(std::move(loader));
  }

  // Collective; costs one AllGather. `batches` are what this rank has computed of those of an
  // EvaluationLoader: their indices and values, as ddp::GatherForMetrics takes them (it says what
  // values may be). The result has each example once, in the data set's order, on all ranks.
  template <typename T>
  absl::StatusOr<T> GatherForMetrics(
      std::vector<std::pair<std::vector<int64_t>, T>> batches) const {
    return ddp::GatherForMetrics(session_.process_group(), std::move(batches));
  }

  // The scope of one batch: forward, backward, and the optimizers' steps. Gradients are accumulated
  // over options.accumulate batches; an epoch's last batch ends the step, too, and so does one that
  // `is_last`, on all ranks: a loop without a prepared loader says so of its last one, or the
  // batches of an incomplete step are lost. The scope's end, or GoOn in it, moves position() on, if
  // the batch was the step's last.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(Accelerator& accelerator, bool is_last = false) : accelerator_(accelerator) {
      accelerator_.BeginBatch(is_last);
    }
    ~Scope() { accelerator_.EndBatch(); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Accelerator& accelerator_;
  };
  Scope Accumulate(bool is_last = false) { return Scope(*this, is_last); }
  // Whether the scope that is open is the last one of a step.
  bool sync_gradients() const { return sync_gradients_; }
  // Applies options.precision to forward and loss; not for backward.
  Autocast autocast() const {
    return Autocast(session_.device().type(), options_.precision == "bf16"   ? at::kBFloat16
                                              : options_.precision == "fp16" ? at::kHalf
                                                                             : at::kFloat);
  }

  // Complete epochs and steps of the whole run, also of before LoadState. An epoch is complete once
  // the loader has given nullopt.
  const Position& position() const { return position_; }

  // Collective. Saves all that was prepared, and all components, as "epoch_3", "epoch_3_step_120"
  // within an epoch, or "step_120" without a loader. Saves nothing without checkpoint.dir. Call it
  // between two steps. `metrics` are for keep_best. Errors of Manager::Save; AlreadyExists if the
  // folder's newest checkpoint is not the one that was loaded, which would be another run's. With
  // checkpoint.async the state is copied, and written while the loop goes on: an error ends
  // GoOn, and is that of End, or of the next SaveState.
  absl::Status SaveState(const std::map<std::string, double>& metrics = {});

  // Collective. Goes on from a checkpoint: `from` is "auto", the newest in the folder, if any;
  // "best"; or a path, which a later life of the job (Rank::restart_count) leaves for the newest
  // that the job has saved itself. Call it after all was prepared, before the first forward. Says
  // on rank 0 where it goes on. InvalidArgument names what does not fit; nothing has changed then.
  absl::Status LoadState(const std::string& from = "auto");

  // Names of what the checkpoint of the last LoadState has, and nothing that was prepared or
  // registered has claimed.
  const std::vector<std::string>& unclaimed() const { return unclaimed_; }

  // Adds an object of one's own with state, beside options.components. The same rules hold.
  absl::Status RegisterForCheckpointing(checkpoint::Component component);

  // Whether the ranks take another step. Call it after each batch, on all ranks, also at the end of
  // its scope. It is false, on all after the same step, for a signal or max_time on any rank,
  // RequestStop, max_steps, stop_at_step, or an asynchronous save that has failed. Costs no
  // communication as long as nobody asks.
  absl::StatusOr<bool> GoOn();
  // Asks for the end, on one rank or several. `why` is for end().
  void RequestStop(absl::string_view why = "");
  // Says why GoOn has returned false.
  const RunEnd& end() const { return end_; }

  // Writes values to the logs (options.log), on ranks other than 0 nothing. They are of the step
  // that has begun last: in all of a step's scopes, before and after the optimizers' steps, and
  // from then on until the next one begins; 0 before the first. The values are rank 0's: reduce
  // them first. Not collective; errors of the sinks, and AlreadyExists if the folder has the log of
  // a run that was not loaded.
  absl::Status Log(const std::vector<std::pair<std::string, double>>& values);
  // Prints a line on standard error, on rank 0, if log.progress.
  void Print(absl::string_view line);

  // Collective. The last call: notes the end in the logs. Returns end().status(): after a signal
  // EndedBy, by which the program exits with 128 + the signal; else OK. Rank 0 warns of batches
  // whose gradients are lost, as no step has used them.
  absl::Status End();
  // The same after SaveState.
  absl::Status SaveAndEnd();

  // Call it before a parameter is read outside of Accumulate, with zero.overlap_gather.
  void WaitForParameters();

  const session::Session& session() const { return session_; }
  const TrainerOptions& options() const { return options_; }

 private:
  friend class AcceleratedOptimizer;
  friend class ShardedLoader;
  struct Model;
  struct Internals;

  Accelerator(const session::Session& session, const std::string& name,
              const TrainerOptions& options);
  absl::Status SetUp();
  absl::Status BeforeWrap(torch::nn::Module& module, const std::string& name);
  DataParallelOptions wrapper_options() const {
    DataParallelOptions options = options_.data_parallel;
    options.reduce_gradients = options_.zero.stage < 2;
    return options;
  }
  absl::Status AddModel(const std::string& name, std::shared_ptr<torch::nn::Module> module,
                        std::shared_ptr<DataParallel> parallel);
  absl::StatusOr<AcceleratedOptimizer*> AddOptimizer(const DataParallel& parallel,
                                                     const std::optional<OptimizerOptions>& own);
  absl::StatusOr<std::shared_ptr<ShardedLoader>> AddLoader(const data::AnyDataset& dataset);
  absl::StatusOr<std::shared_ptr<ShardedLoader>> MakeEvaluationLoader(
      const data::AnyDataset& dataset);
  absl::Status BeginEvaluation();
  void BeginBatch(bool is_last);
  void EndBatch();
  int64_t BatchesFrom(int64_t sample) const;
  int64_t StepsFrom(int64_t sample) const {
    return (BatchesFrom(sample) + options_.accumulate - 1) / options_.accumulate;
  }
  StepsLeft RemainingSteps() const;
  bool IsEndless() const;
  int64_t Epochs() const { return IsEndless() ? 1 : options_.epochs; }  // of the schedule
  std::string CheckpointName() const;
  // Wait for the save that is under way, if any. A rank may have failed to hear how it ended: then
  // JoinSave, which asks no other rank, fails on that rank alone. FinishSave is collective, and
  // does not wait for the thread of a rank that has failed before it began to save.
  absl::Status JoinSave();
  absl::Status FinishSave();
  void WarnOfLostBatches() const;
  absl::Status NoteSaved(const absl::StatusOr<std::string>& saved, absl::Duration took);
  absl::Status Restore(const checkpoint::State& state);

  const session::Session& session_;
  const std::string name_;
  const TrainerOptions options_;
  Position position_;
  std::vector<std::string> unclaimed_;
  RunEnd end_;
  bool sync_gradients_ = false;
  int64_t batches_ = 0;  // of the present step
  int64_t scope_ = 0;    // its number
  bool is_in_scope_ = false;
  bool is_padding_ = false;  // the last batch does not count
  std::unique_ptr<Internals> internals_;
};

}  // namespace ddp::trainer
