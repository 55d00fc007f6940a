#include "ddp/trainer/training_loop.h"

#include <memory>
#include <utility>
#include <vector>

#include "ATen/ops/tensor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/status.h"
#include "checkpoint/name.h"
#include "checkpoint/retention.h"
#include "ddp/all_gather.h"
#include "ddp/collective_status.h"
#include "ddp/trainer/resume.h"
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

TrainingLoop::TrainingLoop(Run& run) : run_(run), evaluator_(run), saver_(run) {}

absl::StatusOr<Report> TrainingLoop::Execute() {
  DDP_RETURN_IF_ERROR(run_.session.Agree(WriteConfiguration(run_)));
  // No Agree after each step: a failed rank interrupts the others.
  const absl::Status trained = CatchCollective("", [&] { return Train(); });
  DDP_RETURN_IF_ERROR(run_.session.ShareFailure(trained));
  Close();
  Report report{.test = evaluator_.test().value_or(Evaluation{}),
                .epochs = run_.position.epoch,
                .steps = run_.position.step,
                .unclaimed = run_.unclaimed,
                .end = end_,
                .validation = evaluator_.validation().value_or(Evaluation{})};
  for (const auto& [option, metric] : MetricsInOptions(run_)) {
    const bool has_own_line = option == "checkpoint.keep_best";
    if (has_own_line || run_.options.eval_only || !absl::StartsWith(metric, kTest)) continue;
    report.by_test_data.push_back(absl::StrCat(option, " ", metric));
  }
  DDP_RETURN_IF_ERROR(FindCheckpoints(report));
  if (end_.reason == EndReason::kSignal) run_.session.NoteStop(end_.signal);
  return report;
}

// Ends the threads that listen for requests of other ranks.
void TrainingLoop::Close() {
  if (stops_) stops_->Close();
  evaluator_.Close();
  saver_.Close();
}

absl::Status TrainingLoop::Train() {
  if (run_.options.eval_only) {
    DDP_RETURN_IF_ERROR(Call(&Callback::OnStart));
    DDP_RETURN_IF_ERROR(evaluator_.TryMetrics());
  } else {
    DDP_RETURN_IF_ERROR(TakeSteps());
  }
  // Of a run that had come to its end before.
  if (!end_.early()) DDP_RETURN_IF_ERROR(EvaluateRest(/*record=*/run_.options.eval_only));
  DDP_RETURN_IF_ERROR(saver_.Finish());
  DDP_RETURN_IF_ERROR(Call(&Callback::OnEnd));
  if (end_.early()) end_.saved = saver_.PathOf(saved_);
  if (run_.options.eval_only) return run_.session.Agree(run_.log->Flush());
  return run_.session.Agree(run_.log->Ended(run_.position.step, end_.Name(), end_.saved));
}

absl::Status TrainingLoop::TakeSteps() {
  DDP_ASSIGN_OR_RETURN(const StepPlan plan, AgreeOnSteps());
  TrainingStep step(run_, plan, *stops_, evaluator_, saver_);
  if (run_.guard != nullptr) run_.guard->Start(run_.position);
  DDP_RETURN_IF_ERROR(Call(&Callback::OnStart));
  DDP_RETURN_IF_ERROR(evaluator_.TryMetrics());
  bool rolled_back = false;
  do {
    DDP_ASSIGN_OR_RETURN(rolled_back, TakeStepsFromHere(step, rolled_back));
  } while (rolled_back);
  return absl::OkStatus();
}

// From the beginning or a checkpoint, to the run's end. True: the run has rolled back instead, and
// goes on from there.
absl::StatusOr<bool> TrainingLoop::TakeStepsFromHere(TrainingStep& step, bool rolled_back) {
  const Position& position = run_.position;
  // The logs of a run that has rolled back have it from the time when it went on from there before.
  DDP_ASSIGN_OR_RETURN(const bool caught_up, evaluator_.CatchUp(/*record=*/!rolled_back));
  if (!caught_up) {
    end_ = stops_->end();
    return false;
  }
  if (!run_.callbacks.empty()) DDP_RETURN_IF_ERROR(step.GoOn());
  // Whether the run before was stopped in the evaluation of its epoch, which is to be made.
  bool evaluates = position.sample > 0 && run_.BatchesFrom(position.sample) == 0;
  if (step.stopped() && position.epoch < run_.options.epochs && !evaluates) {
    const std::string limit = step.ReachedLimit();
    run_.log->Print(absl::StrCat(limit.empty() ? "a stop" : limit, " is reached, at step ",
                                 position.step, ": nothing is trained",
                                 rolled_back ? " after it" : ""));
    end_ = step.end();
    if (!end_.urgent()) DDP_RETURN_IF_ERROR(EvaluateRest(/*record=*/false));
    return false;
  }
  while (position.epoch < run_.options.epochs && (evaluates || !step.stopped()) && !end_.early()) {
    DDP_RETURN_IF_ERROR(TrainEpoch(step));
    if (run_.guard != nullptr && run_.guard->interruption()) {
      DDP_RETURN_IF_ERROR(HandleAnomaly());
      return true;
    }
    if (position.sample > 0 && run_.rank_buffers != nullptr) run_.rank_buffers->TakeDown();
    // Each rank has updated its running statistics since the last broadcast.
    DDP_RETURN_IF_ERROR(CatchCollective("sharing rank 0's buffers", [&] {
      run_.SyncBuffers();
      return absl::OkStatus();
    }));
    if (position.sample > 0) {
      DDP_RETURN_IF_ERROR(StopWithinEpoch(step));
      return false;
    }
    if (step.batches_left() > 0) {  // it has not begun
      DDP_RETURN_IF_ERROR(StopBetweenEpochs(step, step.has_trained()));
      return false;
    }
    DDP_RETURN_IF_ERROR(EndEpoch(step, step.has_trained() || std::exchange(evaluates, false)));
  }
  return false;
}

// All ranks have found the same. They go on from an older checkpoint, or end with one error.
absl::Status TrainingLoop::HandleAnomaly() {
  const Anomaly anomaly = *run_.guard->interruption();
  const int64_t step = run_.position.step;
  DDP_RETURN_IF_ERROR(saver_.Finish());
  std::string what = anomaly.what;
  if (anomaly.action == Anomaly::Action::kRollBack) {
    DDP_ASSIGN_OR_RETURN(const std::string path, RollBack(run_, anomaly.newest_good));
    if (!path.empty()) {
      run_.guard->Start(run_.position);
      run_.guard->GoOn();
      saver_.Resumed();
      saved_ = run_.resumed_from;
      if (!run_.is_main()) return absl::OkStatus();
      run_.log->Warn(absl::StrCat(what, "; rolled back to ", path));
      return run_.log->Event(run_.position.step, "anomaly", anomaly.fields);
    }
    absl::StrAppend(&what, "; there is no checkpoint before it to roll back to");
  }
  // A log that fails has its say, but not on one rank only.
  absl::Status ended = run_.log->Event(step, "anomaly", anomaly.fields);
  if (ended.ok()) ended = run_.log->Ended(step, "anomaly", /*saved=*/"");
  DDP_RETURN_IF_ERROR(run_.session.Agree(ended));
  // Before rank 0 ends, and its store with it: c10d prints a stack trace if a thread waits there.
  Close();
  return WithExitCode(run_.session.Agree(absl::AbortedError(what)), kAnomalyExitCode);
}

// A run that is to go on saves before the evaluation, which an uninterrupted one does not make
// here. The last checkpoint of one that has come to its end has the values of its evaluation.
absl::Status TrainingLoop::StopWithinEpoch(TrainingStep& step) {
  end_ = step.end();
  const bool is_end = !end_.early();
  if (is_end) DDP_RETURN_IF_ERROR(EvaluateRest(step.has_trained()));
  DDP_RETURN_IF_ERROR(Save(checkpoint::EpochStepName(run_.position.epoch, run_.position.step),
                           /*is_last=*/true));
  return is_end || end_.urgent() ? absl::OkStatus() : EvaluateRest(step.has_trained());
}

// Evaluates and saves. A run that is stopped before it has evaluated saves what it was before: the
// one that goes on does so with the evaluation, at the end of the same epoch.
absl::Status TrainingLoop::EndEpoch(TrainingStep& step, bool record) {
  Position& position = run_.position;
  if (step.stopped()) end_ = step.end();
  if (evaluator_.IsDueAtEpochEnd()) {
    bool evaluated = false;
    if (!end_.urgent()) {
      RenewStops();
      DDP_ASSIGN_OR_RETURN(evaluated, evaluator_.AtEpochEnd(record));
      if (!evaluated) end_ = stops_->end();
    }
    if (!evaluated) {
      --position.epoch;
      position.sample = end_of_epoch_;
      return Save(checkpoint::EpochStepName(position.epoch, position.step), /*is_last=*/true);
    }
  }
  const std::string name = checkpoint::EpochName(position.epoch);
  const bool is_last = position.epoch == run_.options.epochs;
  if (is_last) end_ = {};
  // By max_steps, at the end of an epoch after which no evaluation, or not all of it, was due.
  if (step.stopped() && !end_.early()) DDP_RETURN_IF_ERROR(EvaluateRest(record));
  if (SavesNow(step.stopped())) DDP_RETURN_IF_ERROR(Save(name, is_last || step.stopped()));
  if (!is_last && !step.stopped()) {
    DDP_RETURN_IF_ERROR(step.GoOn());
    return step.stopped() ? StopBetweenEpochs(step, record) : absl::OkStatus();
  }
  return end_.urgent() ? absl::OkStatus() : EvaluateRest(record);
}

// What was due after the epoch before has been done. Of a run that has none, there is nothing.
absl::Status TrainingLoop::StopBetweenEpochs(TrainingStep& step, bool record) {
  end_ = step.end();
  const int64_t epoch = run_.position.epoch;
  if (epoch > 0) DDP_RETURN_IF_ERROR(Save(checkpoint::EpochName(epoch), /*is_last=*/true));
  return end_.urgent() ? absl::OkStatus() : EvaluateRest(record);
}

// What is left to evaluate at the run's end.
absl::Status TrainingLoop::EvaluateRest(bool record) {
  RenewStops();
  DDP_ASSIGN_OR_RETURN(const bool evaluated, evaluator_.Rest(record));
  if (!evaluated) end_ = stops_->end();
  return absl::OkStatus();
}

// Before an evaluation of a run that a callback has stopped, so that a signal interrupts it.
void TrainingLoop::RenewStops() {
  if (end_.reason == EndReason::kCallback && !std::exchange(stops_are_renewed_, true)) {
    stops_->Renew();
  }
}

absl::Status TrainingLoop::Save(const std::string& name, bool is_last) {
  saved_ = name;
  return saver_.Save(name, is_last);
}

// Trains to the epoch's end, or to the run's last step.
absl::Status TrainingLoop::TrainEpoch(TrainingStep& step) {
  const TrainerOptions& options = run_.options;
  Position& position = run_.position;
  run_.sampler->set_epoch(position.epoch);
  if (loader_ == nullptr) {
    const c10::Device device = run_.session.device();
    const bool pins = options.pin_memory && device.is_cuda();
    DDP_ASSIGN_OR_RETURN(
        loader_, data::AnyLoader::Create(
                     *run_.train, {.batch_size = options.batch_size,
                                   .drop_last = options.drop_last,
                                   .num_workers = options.num_workers,
                                   .prefetch_factor = options.prefetch_factor,
                                   .pin_memory_device = pins ? device : c10::Device(c10::kCPU),
                                   .stall = run_.session.stall()}));
  }
  data::Share share = run_.sampler->ShareFrom(position.sample);
  DDP_RETURN_IF_ERROR(BeginInOrder(share.Fingerprint(), position));
  DDP_RETURN_IF_ERROR(loader_->Begin(std::move(share)));
  EnterTraining();
  step.BeginEpoch();
  const bool is_endless = options.sampler != nullptr && options.sampler->size() >= data::kEndless;
  run_.log->BeginEpoch(
      position.epoch, options.epochs, is_endless ? options.max_steps : run_.StepsFrom(0),
      options.batch_size * options.accumulate * run_.world_size(), step.step_in_epoch());
  DDP_RETURN_IF_ERROR(Call(&Callback::OnEpochBegin));
  if (!run_.callbacks.empty()) DDP_RETURN_IF_ERROR(step.GoOn());
  const auto train = [&]() -> absl::Status {
    bool more = step.batches_left() > 0 && !step.stopped();
    while (more) {
      DDP_ASSIGN_OR_RETURN(more, step.Take(*loader_));
    }
    return absl::OkStatus();
  };
  if (options.even_batches) {
    DDP_RETURN_IF_ERROR(train());
  } else {
    // There is one phase (Prepare).
    std::vector<Joinable*> joinables = {run_.phases[0].parallel->joinable(), &step};
    if (Joinable* optimizer = run_.phases[0].optimizer->joinable()) joinables.push_back(optimizer);
    JoinOptions join = options.join;
    join.divide_by_initial_world_size = true;  // TrainingStep divides by what the losses count
    const absl::Status joined = Join(joinables, join, train);
    // A shadow's, of which `joined` has only the message.
    DDP_RETURN_IF_ERROR(step.shadow_status());
    DDP_RETURN_IF_ERROR(joined);
  }
  run_.log->EndEpoch();
  run_.WaitForParameters();
  if (step.batches_left() == 0) {
    ++position.epoch;
    end_of_epoch_ = std::exchange(position.sample, 0);
  }
  return Call(&Callback::OnEpochEnd);
}

// Modules that the user changes between the epochs stay, too, unless all is in evaluation mode.
void TrainingLoop::EnterTraining() {
  torch::nn::Module& module = *run_.task.module;
  const ModuleModes now(module);
  if (std::exchange(trains_, true)) {
    if (now.any_training()) return;
  } else if (now.any_training()) {
    modes_ = now;
  }
  // A module may override it, to keep parts of itself in evaluation mode.
  module.train();
  if (modes_) modes_->RestoreEval();
}

// Whether the run saves at the end of this epoch.
bool TrainingLoop::SavesNow(bool stopped) const {
  const int64_t every = run_.options.checkpoint.every;
  return run_.position.epoch == run_.options.epochs || stopped || saver_.IsDue() ||
         (every > 0 && run_.position.epoch % every == 0);
}

// Collective. The paths are rank 0's.
absl::Status TrainingLoop::FindCheckpoints(Report& report) const {
  const checkpoint::Manager* manager = run_.manager.get();
  if (manager == nullptr) return absl::OkStatus();
  // None of them may have the metric: of runs before keep_best was set.
  const auto or_none = [](const absl::StatusOr<std::optional<std::string>>& path) {
    return path.ok() ? path->value_or("") : "";
  };
  // Rank 0 knows which ones a load has found damaged.
  absl::StatusOr<std::optional<std::string>> newest, best;
  if (run_.is_main()) newest = manager->Newest();
  DDP_ASSIGN_OR_RETURN(report.last_checkpoint, run_.session.Broadcast(or_none(newest)));
  if (run_.options.checkpoint.manager.keep_best.empty()) return absl::OkStatus();
  if (run_.is_main()) best = manager->Best();
  DDP_ASSIGN_OR_RETURN(report.best_checkpoint, run_.session.Broadcast(or_none(best)));
  report.best_by = checkpoint::ParseBestMetric(run_.options.checkpoint.manager.keep_best)->metric;
  const bool has_ended = !end_.early() && !run_.options.eval_only;
  if (has_ended && run_.is_main() && report.best_checkpoint.empty() &&
      !report.last_checkpoint.empty()) {
    run_.log->Warn(absl::StrCat(
        "keep_best=", run_.options.checkpoint.manager.keep_best,
        ": there is no best checkpoint: ", best.ok() ? "none is left" : best.status().message()));
  }
  return absl::OkStatus();
}

// Collective. Ranks may have different limits; only rank 0 has logs, but all add to the losses in
// them.
absl::StatusOr<StepPlan> TrainingLoop::AgreeOnSteps() {
  const session::Session& session = run_.session;
  StepPlan plan = {.stop_at_step = run_.options.stop_at_step,
                   .log_every = run_.log->active() ? run_.options.log.every : 0};
  c10::intrusive_ptr<c10d::Store> store;
  if (session.size() > 1) {
    DDP_RETURN_IF_ERROR(CatchCollective("", [&] {
      const at::Tensor mine =
          at::tensor({plan.stop_at_step, plan.log_every}, at::kLong).to(session.device());
      const std::vector<at::Tensor> all = AllGather(*session.process_group(), mine);
      for (const at::Tensor& theirs : all) {
        const at::Tensor row = theirs.cpu();
        const auto* values = row.const_data_ptr<int64_t>();
        if (values[0] > 0 && (plan.stop_at_step == 0 || values[0] < plan.stop_at_step)) {
          plan.stop_at_step = values[0];
        }
      }
      plan.log_every = all[0][1].item<int64_t>();
      store = StoreOfRun(session);
      return absl::OkStatus();
    }));
  }
  c10::intrusive_ptr<c10d::Store> own;
  if (store) own = c10::make_intrusive<c10d::PrefixStore>("stop", store);
  stops_.emplace(std::move(own), session.rank(), session.size(), run_.options, run_.began,
                 [this] { return saver_.longest(); });
  evaluator_.Begin(store, *stops_);
  saver_.Begin(store, *stops_);
  return plan;
}

}  // namespace ddp::trainer
