#include "ddp/trainer/resume.h"

#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/status.h"
#include "ddp/trainer/keys.h"
#include "ddp/trainer/setup.h"
#include "ddp/trainer/training_state.h"

namespace ddp::trainer {
namespace {

// What this rank needs of a checkpoint.
checkpoint::ReadRequest RequestOf(const Run& run) {
  if (run.options.eval_only) {
    checkpoint::ReadRequest request = RequestModel();
    if (run.options.ema.eval) request.parts[Ema::kName].optional = true;
    return request;
  }
  checkpoint::ReadRequest request{.all_else = true, .per_rank = run.components.per_rank()};
  for (const RunPhase& phase : run.phases) {
    phase.optimizer->RequestState(keys::kOptimizer + phase.suffix, request);
  }
  return request;
}

// For evaluation. Not collective.
absl::Status RestoreEma(const Run& run, const checkpoint::State& state,
                        checkpoint::LoadNotes& notes) {
  checkpoint::State rest = checkpoint::DetachedCopy(state);
  DDP_ASSIGN_OR_RETURN(
      const std::optional<checkpoint::State> ema,
      checkpoint::TakeComponent({.name = Ema::kName, .stateful = run.ema.get()}, 1, rest));
  if (!ema) {
    return OptionError("ema.eval", "true",
                       "finds no average of the weights in the checkpoint: the run that saved it "
                       "had ema.decay=0",
                       absl::StatusCode::kNotFound);
  }
  DDP_RETURN_IF_ERROR(Annotate(run.ema->CheckStateDict(*ema), Ema::kName));
  return run.ema->load_state_dict(*ema, notes);
}

// Not collective.
absl::Status RestoreComponents(Run& run, const checkpoint::State& state,
                               checkpoint::LoadNotes& notes,
                               MissingComponent missing = MissingComponent::kBeginsAnew) {
  DDP_RETURN_IF_ERROR(run.components.Restore(state, run.session, notes, run.unclaimed, missing));
  const StepsLeft left = run.RemainingSteps();
  for (RunPhase& phase : run.phases) phase.scheduler->GoOn(run.position.step, left);
  return absl::OkStatus();
}

// Not collective. `is_newest`: of the run's own checkpoints.
absl::Status Restore(Run& run, const std::string& path, const checkpoint::State& state,
                     bool is_newest) {
  const TrainerOptions& options = run.options;
  checkpoint::LoadNotes notes;
  const auto say = [&] {
    if (!run.is_main()) return;
    for (const std::string& note : notes.lines()) run.log->Warn(absl::StrCat("resumed ", note));
  };
  if (options.eval_only) {
    DDP_ASSIGN_OR_RETURN(run.position, RestoreModel(state, run.task.name, *run.task.module, notes));
    if (options.ema.eval) {
      DDP_RETURN_IF_ERROR(RestoreEma(run, state, notes));
    } else if (run.is_main() && state.root.contains(keys::kEvaluated)) {
      run.log->Warn(absl::StrCat("the metrics of ", path,
                                 " are of its average of the weights, as the run that saved it had "
                                 "ema.eval=true; this evaluates the weights themselves: for the "
                                 "average set ema.eval"));
    }
    say();
    return absl::OkStatus();
  }
  // Newer ones than the newest are damaged on some rank and may be overwritten.
  if (!is_newest) DDP_RETURN_IF_ERROR(RefuseToOverwrite(run, path));
  DDP_RETURN_IF_ERROR(RestoreComponents(run, state, notes));
  say();
  const int64_t remaining = run.RemainingSteps().in_run;
  if (run.is_main() && run.phases[0].scheduler->has_ended() && remaining > 0) {
    run.log->Warn(absl::StrCat(
        "schedule ", run.phases[0].scheduler->schedule().options().name,
        " had come to its end: the learning rate stays 0 for the ", remaining,
        " steps that are left. To train longer, start a new run from these weights with init_from; "
        "to stop a run and go on later, use stop_at_step"));
  }
  return absl::OkStatus();
}

// The run begins at its first step. Steps in its log are of an attempt that had saved nothing.
absl::Status StartAnew(Run& run) {
  return run.session.Agree(run.log_has_steps ? run.log->ResumedAt(0) : absl::OkStatus());
}

// On the main rank: the name under which the run would save what it has loaded from `path`, if it
// would save it there; else empty.
std::string OwnNameOf(const Run& run, const std::string& path) {
  if (!run.is_main()) return "";
  const Position& position = run.position;
  const std::string name = position.sample > 0
                               ? checkpoint::EpochStepName(position.epoch, position.step)
                               : checkpoint::EpochName(position.epoch);
  std::error_code ignored;  // then they are not the same
  return std::filesystem::equivalent(run.manager->PathOf(name), path, ignored) ? name : "";
}

// What the run goes on from.
struct Origin {
  std::string path;        // empty: nothing
  bool is_own = false;     // found in the run's own folder
  bool is_newest = false;  // and the newest there
  absl::StatusOr<checkpoint::State> state = checkpoint::State();

  void Take(std::optional<checkpoint::Loaded> loaded) {
    is_own = true;
    path = loaded ? loaded->path : "";
    if (loaded) state = std::move(loaded->state);
  }
};

// Collective.
absl::StatusOr<Origin> FindOrigin(Run& run) {
  const checkpoint::ReadRequest request = RequestOf(run);
  const std::string& resume = run.options.checkpoint.resume;
  const checkpoint::LoadOptions& load = run.options.checkpoint.load;
  Origin origin;
  if (resume == "auto" || run.has_own_checkpoints) {
    DDP_ASSIGN_OR_RETURN(std::optional<checkpoint::Loaded> newest,
                         LoadOwn(run.session, *run.manager, "auto", request, load));
    origin.is_newest = newest.has_value();
    origin.Take(std::move(newest));
    if (origin.is_newest || resume == "auto") return origin;
  }
  if (resume == "best") {
    DDP_ASSIGN_OR_RETURN(std::optional<checkpoint::Loaded> best,
                         LoadOwn(run.session, *run.manager, "best", request, load));
    origin.Take(std::move(best));
  } else if (!resume.empty()) {
    origin.is_own = false;
    origin.path = resume;
    origin.state =
        ReadCheckpoint(run.session, resume, request, run.options.checkpoint.manager, load);
  }
  return origin;
}

// Tells a launcher that may start the ranks again where this attempt begins, and from what it could
// go on if nothing comes of this one. On the main rank.
void NoteProgress(Run& run, const std::string& resumed) {
  if (!run.progress) return;
  std::string earlier;
  if (run.manager != nullptr && !resumed.empty()) {
    const std::string& directory = run.options.checkpoint.manager.directory;
    const auto all = checkpoint::Manager::FolderAt(directory).List();
    for (size_t i = 1; all.ok() && i < all->size(); ++i) {
      if (absl::StrCat(directory, "/", (*all)[i].file) == resumed) {
        earlier = absl::StrCat(directory, "/", (*all)[i - 1].file);
      }
    }
  }
  run.progress->Begin(run.position.step, earlier);
}

}  // namespace

absl::Status Resume(Run& run) {
  const TrainerOptions& options = run.options;
  if (options.checkpoint.resume.empty() && !run.is_restarted()) {
    NoteProgress(run, "");
    return absl::OkStatus();
  }
  DDP_ASSIGN_OR_RETURN(Origin origin, FindOrigin(run));
  const std::string& path = origin.path;
  if (path.empty() && !options.eval_only) NoteProgress(run, "");
  if (path.empty() && run.is_initialised) return StartAnew(run);
  if (path.empty() && !options.checkpoint.init_from.empty()) {
    return run.session.Agree(absl::AbortedError(
        absl::StrCat("the checkpoint in ", options.checkpoint.manager.directory,
                     " from which this run would have gone on was removed meanwhile; start the run "
                     "again, and it begins with init_from")));
  }
  if (path.empty() && options.eval_only) {
    return run.session.Agree(OptionError(
        "eval_only", "true",
        absl::StrCat("finds no checkpoint to evaluate in ", options.checkpoint.manager.directory),
        absl::StatusCode::kNotFound));
  }
  if (path.empty()) {
    run.log->Print(
        absl::StrCat(run.manager == nullptr
                         ? "no checkpoints"
                         : absl::StrCat("no checkpoint in ", options.checkpoint.manager.directory),
                     ": starting anew"));
    return StartAnew(run);
  }
  absl::Status restored = origin.state.status();
  if (restored.ok()) {
    restored = CatchStatus("", [&] { return Restore(run, path, *origin.state, origin.is_newest); });
  }
  origin.state = checkpoint::State();  // its memory
  if (!restored.ok() && !ProblemOf(restored) && !origin.is_own) {
    restored =
        OptionError("checkpoint.resume", path,
                    absl::StrCat("cannot be resumed from: ", restored.message()), restored.code());
  } else {
    restored = CannotResumeFrom(path, restored);
  }
  DDP_RETURN_IF_ERROR(run.session.Agree(restored));
  // Other ranks wait for a rank that fails here in a collective, or already in Agree.
  DDP_RETURN_IF_ERROR(run.session.ShareFailure(
      CheckSameState(run.session, run.position, run.task.module->named_parameters(), path)));
  const Position& position = run.position;
  run.log->Print(
      absl::StrCat("resumed from ", path, ": epoch ", position.epoch,
                   position.sample > 0 ? absl::StrCat(", example ", position.sample) : "",
                   ", step ", position.step));
  if (options.eval_only) return absl::OkStatus();
  if (run.manager != nullptr) {
    DDP_ASSIGN_OR_RETURN(run.resumed_from, run.session.Broadcast(OwnNameOf(run, path)));
  }
  NoteProgress(run, path);
  for (RunPhase& phase : run.phases) {
    const absl::StatusOr<bool> restored = phase.bucket_order->Restore(run.session);
    DDP_RETURN_IF_ERROR(run.session.ShareFailure(restored.status()));
    if (!*restored) run.log->Print(kOtherBuckets);
  }
  return run.session.Agree(run.log->ResumedAt(position.step));
}

absl::StatusOr<std::string> RollBack(Run& run, const checkpoint::CheckpointName& newest) {
  DDP_ASSIGN_OR_RETURN(const bool found, run.manager->AbandonNewerThan(newest));
  if (!found) return "";
  DDP_ASSIGN_OR_RETURN(std::optional<checkpoint::Loaded> loaded,
                       run.manager->LoadNewest(RequestOf(run), run.options.checkpoint.load));
  if (!loaded) return "";
  run.WaitForParameters();
  checkpoint::LoadNotes notes;  // none, unless an earlier run has saved it
  const auto restore = [&] {
    return RestoreComponents(run, loaded->state, notes, MissingComponent::kRefused);
  };
  const absl::Status restored = run.session.Agree(
      Annotate(CatchStatus("", restore), absl::StrCat("cannot roll back to ", loaded->path)));
  // Another attempt would come to the same anomaly, and to this checkpoint.
  if (!restored.ok()) return WithExitCode(restored, kAnomalyExitCode);
  if (!loaded->state.root.contains(keys::kGuard)) run.guard->ForgetValues();
  if (run.is_main()) {
    for (const std::string& note : notes.lines()) run.log->Warn(absl::StrCat("rolled back ", note));
  }
  DDP_RETURN_IF_ERROR(run.session.ShareFailure(CheckSameState(
      run.session, run.position, run.task.module->named_parameters(), loaded->path)));
  DDP_ASSIGN_OR_RETURN(run.resumed_from, run.session.Broadcast(OwnNameOf(run, loaded->path)));
  DDP_RETURN_IF_ERROR(run.session.Agree(run.log->ResumedAt(run.position.step)));
  return loaded->path;
}

}  // namespace ddp::trainer
