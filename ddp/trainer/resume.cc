#include "ddp/trainer/resume.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/tensor.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/status.h"
#include "ddp/collective_status.h"
#include "ddp/gather/all_agree.h"
#include "ddp/gather/gather.h"
#include "ddp/trainer/setup.h"
#include "ddp/trainer/training_state.h"

namespace ddp::trainer {
namespace {

// Not collective.
absl::Status Restore(Run& run, const std::string& path, std::optional<checkpoint::State> state) {
  const TrainerOptions& options = run.options;
  if (!state) {
    DDP_ASSIGN_OR_RETURN(
        state, checkpoint::Manager::Load(
                   path, {}, {.implementations = options.checkpoint.manager.implementations}));
  }
  if (options.eval_only) {
    DDP_ASSIGN_OR_RETURN(run.position, RestoreModel(*state, run.task.name, *run.task.module));
    return absl::OkStatus();
  }
  // With auto, newer checkpoints are damaged on some rank and may be overwritten.
  if (options.checkpoint.resume != "auto") DDP_RETURN_IF_ERROR(RefuseToOverwrite(run, path));
  checkpoint::LoadNotes notes;
  DDP_RETURN_IF_ERROR(run.components.Restore(*state, run.session, notes, run.unclaimed));
  const int64_t remaining = run.RemainingSteps();
  run.scheduler->GoOn(run.position.step, remaining);
  if (!run.is_main()) return absl::OkStatus();
  for (const std::string& note : notes.lines()) run.log->Warn(absl::StrCat("resumed ", note));
  if (run.scheduler->has_ended() && remaining > 0) {
    run.log->Warn(absl::StrCat(
        "schedule cosine had come to its end: the learning rate stays 0 for the ", remaining,
        " steps that are left. To train longer, start a new run from these "
        "weights; to stop a run and go on later, use stop_at_step"));
  }
  return absl::OkStatus();
}

// Collective. `path` may be another file on each machine; nothing later would tell that the ranks
// train different models.
absl::Status CheckSameState(const Run& run, const std::string& path) {
  const Position& position = run.position;
  NamedTensors state = {
      {"position", at::tensor({position.epoch, position.sample, position.step}, at::kLong)
                       .to(run.session.device())}};
  for (const auto& parameter : run.task.module->named_parameters()) {
    state.emplace_back(parameter.key(), parameter.value());
  }
  const absl::Status same = AllAgree(run.session.process_group(), state);
  if (!absl::IsFailedPrecondition(same)) return same;
  return Annotate(same, absl::StrCat("the ranks have read different checkpoints from ", path,
                                     "; put it in a folder that all machines share, or the same "
                                     "file on each machine"));
}

// Collective: rank 0's order counts, since files of one name may differ between machines.
absl::Status RestoreBucketOrder(Run& run) {
  if (run.world_size() == 1) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(
      const std::vector<int64_t> order,
      BroadcastObject(run.session.process_group(), run.bucket_order->loaded(), /*src=*/0));
  if (order.empty()) return absl::OkStatus();
  bool restored = false;
  DDP_RETURN_IF_ERROR(CatchCollective("rebuilding the buckets of gradients", [&] {
    restored = run.parallel->RestoreBucketOrder(order);
    return absl::OkStatus();
  }));
  if (!restored && run.parallel->reduces_gradients()) {
    run.log->Print(
        "the buckets of gradients are not those it was saved with: sums may round otherwise");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Resume(Run& run) {
  const TrainerOptions& options = run.options;
  if (options.checkpoint.resume.empty()) return absl::OkStatus();
  std::string path = options.checkpoint.resume;
  std::optional<checkpoint::State> state;
  if (path == "auto" || path == "best") {
    DDP_ASSIGN_OR_RETURN(std::optional<checkpoint::Loaded> loaded,
                         path == "best" ? run.manager->LoadBest() : run.manager->LoadNewest());
    path = loaded ? loaded->path : "";
    if (loaded) state = std::move(loaded->state);
  }
  if (path.empty() && options.eval_only) {
    return run.session.Agree(OptionError(
        "eval_only", "true",
        absl::StrCat("finds no checkpoint to evaluate in ", options.checkpoint.manager.directory),
        absl::StatusCode::kNotFound));
  }
  if (path.empty()) {
    run.log->Print(
        absl::StrCat("no checkpoint in ", options.checkpoint.manager.directory, ": starting anew"));
    return absl::OkStatus();
  }
  absl::Status restored =
      CatchStatus("", [&] { return Restore(run, path, std::exchange(state, std::nullopt)); });
  if (!restored.ok() && !ProblemOf(restored) && path == options.checkpoint.resume) {
    restored =
        OptionError("checkpoint.resume", path,
                    absl::StrCat("cannot be resumed from: ", restored.message()), restored.code());
  } else {
    restored = Annotate(restored, absl::StrCat("cannot resume from ", path));
  }
  DDP_RETURN_IF_ERROR(run.session.Agree(restored));
  // Other ranks wait for a rank that fails here in a collective, or already in Agree.
  DDP_RETURN_IF_ERROR(run.session.ShareFailure(CheckSameState(run, path)));
  const Position& position = run.position;
  run.log->Print(
      absl::StrCat("resumed from ", path, ": epoch ", position.epoch,
                   position.sample > 0 ? absl::StrCat(", example ", position.sample) : "",
                   ", step ", position.step));
  if (options.eval_only) return absl::OkStatus();
  DDP_RETURN_IF_ERROR(run.session.ShareFailure(RestoreBucketOrder(run)));
  return run.session.Agree(run.log->ResumedAt(position.step));
}

}  // namespace ddp::trainer
