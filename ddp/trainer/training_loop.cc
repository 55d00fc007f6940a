#include "ddp/trainer/training_loop.h"

#include <memory>
#include <utility>
#include <vector>

#include "ATen/ops/tensor.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status.h"
#include "checkpoint/name.h"
#include "ddp/all_gather.h"
#include "ddp/collective_status.h"
#include "ddp/data/loader.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::trainer {
namespace {

// Writes on the main rank. A resumed run keeps the file of the run that it goes on with; if it is
// configured differently, it has a file of its own.
absl::Status WriteConfiguration(const Run& run) {
  const TrainerOptions& options = run.options;
  if (!run.is_main() || options.log.dir.empty() || options.configuration.empty()) {
    return absl::OkStatus();
  }
  std::string path = absl::StrCat(options.log.dir, "/config.yaml");
  if (run.position.step > 0 || options.eval_only) {
    const absl::StatusOr<std::string> before = ReadFile(path);
    if (before.ok() && (*before == options.configuration || options.eval_only)) {
      return absl::OkStatus();
    }
    if (before.ok()) {
      path = absl::StrCat(options.log.dir, "/config_step_", run.position.step, ".yaml");
    }
  }
  return WriteFileAtomically(path, options.configuration);
}

}  // namespace

TrainingLoop::TrainingLoop(Run& run) : run_(run), saver_(run) {
  if (run_.task.module->is_training()) modes_.emplace(*run_.task.module);
}

absl::StatusOr<Report> TrainingLoop::Execute() {
  DDP_RETURN_IF_ERROR(run_.session.Agree(WriteConfiguration(run_)));
  // No Agree after each step: a failed rank interrupts the others.
  const absl::Status trained = CatchCollective("", [&] { return Train(); });
  DDP_RETURN_IF_ERROR(run_.session.ShareFailure(trained));
  if (stop_) stop_->Close();
  saver_.Close();
  return Report{*evaluation_, run_.position.epoch, run_.position.step, run_.unclaimed};
}

absl::Status TrainingLoop::Train() {
  const TrainerOptions& options = run_.options;
  const Position& position = run_.position;
  if (!options.eval_only) {
    DDP_ASSIGN_OR_RETURN(const StepPlan plan, AgreeOnSteps());
    TrainingStep step(run_, plan, stop_ ? &*stop_ : nullptr, saver_);
    if (step.stopped() && position.epoch < options.epochs) {
      run_.log->Print(absl::StrCat(step.ReachedLimit(), " is reached, at step ", position.step,
                                   ": nothing is trained"));
    }
    while (position.epoch < options.epochs && !step.stopped()) {
      DDP_RETURN_IF_ERROR(TrainEpoch(step));
      if (position.sample > 0 && run_.rank_buffers != nullptr) run_.rank_buffers->TakeDown();
      // Each rank has updated its running statistics since the last broadcast.
      DDP_RETURN_IF_ERROR(CatchCollective("sharing rank 0's buffers", [&] {
        run_.parallel->SyncBuffers();
        return absl::OkStatus();
      }));
      if (position.sample > 0) {
        // Save before the evaluation, which an uninterrupted run does not do here and which may use
        // random numbers.
        DDP_RETURN_IF_ERROR(
            saver_.Save(checkpoint::EpochStepName(position.epoch, position.step), /*metrics=*/{}));
        DDP_RETURN_IF_ERROR(Evaluate(step.has_trained()));
      } else {
        DDP_RETURN_IF_ERROR(Evaluate(step.has_trained()));
        if (SavesNow(step.stopped())) {
          DDP_RETURN_IF_ERROR(
              saver_.Save(checkpoint::EpochName(position.epoch), Metrics(*evaluation_)));
        }
      }
    }
  }
  if (!evaluation_) DDP_RETURN_IF_ERROR(Evaluate(/*record=*/options.eval_only));
  DDP_RETURN_IF_ERROR(saver_.Finish());
  return run_.session.Agree(run_.log->Flush());
}

// Trains to the epoch's end, or to the run's last step.
absl::Status TrainingLoop::TrainEpoch(TrainingStep& step) {
  const TrainerOptions& options = run_.options;
  Position& position = run_.position;
  run_.sampler->set_epoch(position.epoch);
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<data::Loader> loader,
                       data::Loader::Create(run_.train, run_.sampler->Indices(position.sample),
                                            {.batch_size = options.batch_size,
                                             .drop_last = options.drop_last,
                                             .num_workers = options.num_workers}));
  EnterTraining();
  step.BeginEpoch();
  run_.log->BeginEpoch(position.epoch, options.epochs, run_.StepsFrom(0),
                       options.batch_size * options.accumulate * run_.world_size(),
                       step.step_in_epoch());
  const auto train = [&]() -> absl::Status {
    bool more = step.batches_left() > 0 && !step.stopped();
    while (more) {
      DDP_ASSIGN_OR_RETURN(more, step.Take(*loader));
    }
    return absl::OkStatus();
  };
  if (options.even_batches) {
    DDP_RETURN_IF_ERROR(train());
  } else {
    std::vector<Joinable*> joinables = {run_.parallel->joinable(), &step};
    if (Joinable* optimizer = run_.optimizer->joinable()) joinables.push_back(optimizer);
    const absl::Status joined = Join(joinables, options.join, train);
    // A shadow's, of which `joined` has only the message.
    DDP_RETURN_IF_ERROR(step.shadow_status());
    DDP_RETURN_IF_ERROR(joined);
  }
  run_.log->EndEpoch();
  run_.optimizer->WaitForParameters();
  if (step.batches_left() == 0) {
    ++position.epoch;
    position.sample = 0;
  }
  return absl::OkStatus();
}

// Modules that the user changes between the epochs stay, too, unless all is in evaluation mode.
void TrainingLoop::EnterTraining() {
  torch::nn::Module& module = *run_.task.module;
  if (std::exchange(trains_, true) && module.is_training()) return;
  // A module may override it, to keep parts of itself in evaluation mode.
  module.train();
  if (modes_) modes_->RestoreEval();
}

// `record`: also in the logs' files, which have it already if nothing has been trained since.
absl::Status TrainingLoop::Evaluate(bool record) {
  const TrainerOptions& options = run_.options;
  Predictions predictions;
  const bool collect = !options.predictions.empty();
  DDP_ASSIGN_OR_RETURN(evaluation_, trainer::Evaluate(run_.session, run_.task, run_.test,
                                                      {.batch_size = options.eval_batch_size,
                                                       .num_workers = options.num_workers},
                                                      collect ? &predictions : nullptr));
  // Rank 0 writes alone, which may take long: the others wait here and not in a collective.
  absl::Status written;
  if (collect && run_.is_main()) written = WritePredictions(predictions, options.predictions);
  if (written.ok()) {
    written = run_.log->Evaluated(run_.position.epoch, run_.position.step, *evaluation_, record);
  }
  return run_.session.Agree(written);
}

// Whether the run saves at the end of this epoch.
bool TrainingLoop::SavesNow(bool stopped) const {
  const int64_t every = run_.options.checkpoint.every;
  return run_.position.epoch == run_.options.epochs || stopped || saver_.IsDue() ||
         (every > 0 && run_.position.epoch % every == 0);
}

// Collective. Only some ranks may have an on_step, but all must listen for requests to stop; only
// rank 0 has logs, but all add to the losses in them.
absl::StatusOr<StepPlan> TrainingLoop::AgreeOnSteps() {
  const session::Session& session = run_.session;
  bool asks = run_.options.on_step != nullptr;
  StepPlan plan = {.stop_at_step = run_.options.stop_at_step,
                   .log_every = run_.log->active() ? run_.options.log.every : 0};
  c10::intrusive_ptr<c10d::Store> store;
  if (session.size() > 1) {
    DDP_RETURN_IF_ERROR(CatchCollective("", [&] {
      const at::Tensor mine =
          at::tensor({int64_t{asks}, plan.stop_at_step, plan.log_every}, at::kLong)
              .to(session.device());
      const std::vector<at::Tensor> all = AllGather(*session.process_group(), mine);
      for (const at::Tensor& theirs : all) {
        const at::Tensor row = theirs.cpu();
        const auto* values = row.const_data_ptr<int64_t>();
        asks |= values[0] != 0;
        if (values[1] > 0 && (plan.stop_at_step == 0 || values[1] < plan.stop_at_step)) {
          plan.stop_at_step = values[1];
        }
      }
      plan.log_every = all[0][2].item<int64_t>();
      // Each run of a session gets its own prefix; each rank counts the runs to the same number.
      const int64_t run = session.store()->add(absl::StrCat("trainer/runs/", session.rank()), 1);
      store = c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("trainer/run/", run),
                                                     session.store());
      return absl::OkStatus();
    }));
  }
  if (asks) {
    c10::intrusive_ptr<c10d::Store> own;
    if (store) own = c10::make_intrusive<c10d::PrefixStore>("stop", store);
    stop_.emplace(std::move(own), session.rank(), session.size(), run_.position.step + 1);
  }
  saver_.Begin(store);
  return plan;
}

}  // namespace ddp::trainer
