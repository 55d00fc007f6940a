#include "ddp/trainer/resume.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/status.h"
#include "checkpoint/module_state.h"
#include "checkpoint/name_map.h"
#include "ddp/trainer/keys.h"
#include "ddp/trainer/setup.h"
#include "ddp/trainer/training_state.h"
#include "torch/csrc/autograd/grad_mode.h"

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
                               checkpoint::LoadNotes& notes) {
  DDP_RETURN_IF_ERROR(run.components.Restore(state, run.session, notes, run.unclaimed));
  const int64_t remaining = run.RemainingSteps();
  for (RunPhase& phase : run.phases) phase.scheduler->GoOn(run.position.step, remaining);
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
    }
    say();
    return absl::OkStatus();
  }
  // Newer ones than the newest are damaged on some rank and may be overwritten.
  if (!is_newest) DDP_RETURN_IF_ERROR(RefuseToOverwrite(run, path));
  DDP_RETURN_IF_ERROR(RestoreComponents(run, state, notes));
  say();
  const int64_t remaining = run.RemainingSteps();
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
  Origin origin;
  if (resume == "auto" || (run.is_restarted() && run.manager != nullptr)) {
    DDP_ASSIGN_OR_RETURN(std::optional<checkpoint::Loaded> newest,
                         run.manager->LoadNewest(request));
    origin.is_newest = newest.has_value();
    origin.Take(std::move(newest));
    if (origin.is_newest || resume == "auto") return origin;
  }
  if (resume == "best") {
    DDP_ASSIGN_OR_RETURN(std::optional<checkpoint::Loaded> best,
                         run.manager->LoadBest("", request));
    origin.Take(std::move(best));
  } else if (!resume.empty()) {
    origin.is_own = false;
    origin.path = resume;
    origin.state = ReadCheckpoint(run.session, resume, request,
                                  run.options.checkpoint.manager.implementations);
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
    restored = Annotate(restored, absl::StrCat("cannot resume from ", path));
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
  NoteProgress(run, path);
  for (RunPhase& phase : run.phases) {
    const absl::StatusOr<bool> restored =
        RestoreBucketOrder(run.session, *phase.parallel, *phase.bucket_order);
    DDP_RETURN_IF_ERROR(run.session.ShareFailure(restored.status()));
    if (!*restored) run.log->Print(kOtherBuckets);
  }
  return run.session.Agree(run.log->ResumedAt(position.step));
}

absl::StatusOr<std::string> RollBack(Run& run, const checkpoint::CheckpointName& newest) {
  DDP_RETURN_IF_ERROR(run.manager->AbandonNewerThan(newest));
  DDP_ASSIGN_OR_RETURN(std::optional<checkpoint::Loaded> loaded,
                       run.manager->LoadNewest(RequestOf(run)));
  if (!loaded) return "";
  run.WaitForParameters();
  checkpoint::LoadNotes ignored;  // the run itself has saved it
  const auto restore = [&] { return RestoreComponents(run, loaded->state, ignored); };
  DDP_RETURN_IF_ERROR(run.session.Agree(
      Annotate(CatchStatus("", restore), absl::StrCat("cannot roll back to ", loaded->path))));
  DDP_RETURN_IF_ERROR(run.session.ShareFailure(CheckSameState(
      run.session, run.position, run.task.module->named_parameters(), loaded->path)));
  DDP_RETURN_IF_ERROR(run.session.Agree(run.log->ResumedAt(run.position.step)));
  return loaded->path;
}

namespace {

// What is under CheckpointOptions::init_key, completed from the model's weights in `root`. Not
// collective.
absl::StatusOr<checkpoint::Dict> WeightsUnderKey(const CheckpointOptions& options,
                                                 const checkpoint::Dict& root) {
  const auto found = root.find(options.init_key);
  if (found == root.end() || !found->value().isGenericDict()) {
    std::vector<std::string> keys, left_out;
    const checkpoint::ReadRequest request{
        .per_rank = checkpoint::PerRank::kNone, .left_out = &left_out, .meta = true};
    const auto all = checkpoint::Manager::Load(
        options.init_from, request, {.implementations = options.manager.implementations});
    if (all.ok()) {
      for (const auto& entry : all->root) {
        if (entry.key().isString() && entry.value().isGenericDict()) {
          keys.push_back(entry.key().toStringRef());
        }
      }
    }
    return OptionError(
        "init_key", options.init_key,
        absl::StrCat("is no dict of weights in ", options.init_from,
                     keys.empty() ? "" : "; dicts in it: ", absl::StrJoin(keys, ", ")),
        absl::StatusCode::kNotFound);
  }
  checkpoint::Dict weights = checkpoint::NewTree();
  if (const auto models = checkpoint::WeightsIn(root); models.ok()) weights = models->copy();
  checkpoint::Dict own = found->value().toGenericDict();
  if (own.contains("weights") && own.at("weights").isGenericDict()) {
    own = own.at("weights").toGenericDict();  // of Ema
  }
  for (const auto& entry : own) weights.insert_or_assign(entry.key(), entry.value());
  return weights;
}

// The dict of weights of init_from. Adds to `left_out` what cannot be read. Not collective.
absl::StatusOr<checkpoint::Dict> ReadWeights(const CheckpointOptions& options,
                                             std::vector<std::string>& left_out) {
  checkpoint::ReadRequest request{.per_rank = checkpoint::PerRank::kNone, .left_out = &left_out};
  for (const char* key : checkpoint::kWeightKeys) request.parts[key].optional = true;
  const bool has_key = !options.init_key.empty();
  if (has_key) request.parts[options.init_key].optional = true;
  const auto read = [&] {
    left_out.clear();
    return checkpoint::Manager::Load(options.init_from, request,
                                     {.implementations = options.manager.implementations});
  };
  absl::StatusOr<checkpoint::State> state = read();
  const auto is_dict = [](const auto& entry) { return entry.value().isGenericDict(); };
  const bool has_dict = state.ok() && std::any_of(state->root.begin(), state->root.end(), is_dict);
  if (!has_dict && (state.ok() || absl::IsInvalidArgument(state.status()))) {
    request.parts.clear();  // a bare state_dict
    state = read();
  }
  if (!state.ok()) return state.status();
  return has_key ? WeightsUnderKey(options, state->root) : checkpoint::WeightsIn(state->root);
}

// Reads weights into this rank's model, and returns how many tensors. Not collective.
absl::StatusOr<int64_t> ReadModel(Run& run, std::vector<std::string>& notes) {
  const CheckpointOptions& options = run.options.checkpoint;
  std::vector<std::string> left_out;
  const absl::StatusOr<checkpoint::Dict> weights = ReadWeights(options, left_out);
  if (!weights.ok() && !left_out.empty()) {
    return absl::Status(weights.status().code(),
                        absl::StrCat(weights.status().message(),
                                     "; what cannot be read: ", checkpoint::FirstNames(left_out)));
  }
  DDP_RETURN_IF_ERROR(weights.status());
  checkpoint::InitOptions init{.strict = options.init_strict};
  DDP_ASSIGN_OR_RETURN(init.map, checkpoint::NameMap::Parse(options.init_map));
  DDP_ASSIGN_OR_RETURN(const int64_t tensors,
                       checkpoint::InitModule(*run.task.module, *weights, init, notes));
  if (!left_out.empty()) {
    notes.push_back(absl::StrCat(
        left_out.size(), " that cannot be read were left out: ", checkpoint::FirstNames(left_out)));
  }
  return tensors;
}

// Collective: rank 0's parameters and buffers on all ranks, those that the wrapper ignores, too.
absl::Status ShareWeights(Run& run) {
  if (run.world_size() == 1) return absl::OkStatus();
  const checkpoint::BroadcastBytes broadcast = BroadcastOver(run.session);
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors = run.task.module->parameters();
  const std::vector<at::Tensor> buffers = run.task.module->buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.numel() == 0) continue;
    const at::Tensor bytes = tensor.detach().cpu().contiguous();
    DDP_RETURN_IF_ERROR(broadcast(bytes.mutable_data_ptr(), bytes.nbytes(), /*from=*/0));
    if (!run.is_main() && !bytes.is_alias_of(tensor)) tensor.copy_(bytes);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status InitFromCheckpoint(Run& run) {
  const CheckpointOptions& options = run.options.checkpoint;
  if (options.init_from.empty()) return absl::OkStatus();
  if (options.resume == "auto" || (run.is_restarted() && run.manager != nullptr)) {
    const auto own = [&]() -> absl::StatusOr<std::string> {
      if (!run.is_main()) return "";
      // An error is one that Resume will return.
      const absl::StatusOr<std::optional<std::string>> newest = run.manager->Newest();
      return newest.ok() ? newest->value_or("") : options.manager.directory;
    };
    DDP_ASSIGN_OR_RETURN(const std::string path, run.session.Broadcast(CatchStatus("", own)));
    if (!path.empty()) {
      run.log->Print(absl::StrCat("init_from ", options.init_from,
                                  " is not read: this run goes on from its own ", path));
      return absl::OkStatus();
    }
  }
  std::vector<std::string> notes;
  absl::StatusOr<int64_t> tensors = int64_t{0};
  if (run.is_main()) tensors = CatchStatus("", [&] { return ReadModel(run, notes); });
  absl::Status read = InGroup("checkpoint", tensors.status());
  if (!read.ok() && !ProblemOf(read)) {
    const bool is_strict = absl::IsInvalidArgument(read) && options.init_strict;
    read = OptionError(
        "checkpoint.init_from", options.init_from,
        absl::StrCat(
            "cannot be taken: ", read.message(),
            is_strict ? "; init_strict=false takes what fits, init_map replaces names" : ""),
        read.code());
  }
  DDP_RETURN_IF_ERROR(run.session.Agree(read));
  DDP_RETURN_IF_ERROR(ShareWeights(run));
  run.is_initialised = true;
  run.log->Print(absl::StrCat("initialised from ", options.init_from,
                              options.init_key.empty() ? "" : absl::StrCat(", ", options.init_key),
                              ": ", *tensors, " tensors"));
  if (!run.is_main()) return absl::OkStatus();
  for (const std::string& note : notes) run.log->Warn(absl::StrCat("initialised: ", note));
  return absl::OkStatus();
}

}  // namespace ddp::trainer
