#include "ddp/trainer/resume.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "ATen/ops/tensor.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/status.h"
#include "checkpoint/module_state.h"
#include "checkpoint/name_map.h"
#include "ddp/collective_status.h"
#include "ddp/gather/all_agree.h"
#include "ddp/gather/gather.h"
#include "ddp/trainer/keys.h"
#include "ddp/trainer/setup.h"
#include "ddp/trainer/training_state.h"
#include "torch/csrc/autograd/grad_mode.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

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

// Collective, but where the ranks read files of different names.
absl::StatusOr<checkpoint::State> Read(const Run& run, const std::string& path,
                                       const checkpoint::ReadRequest& request) {
  checkpoint::FormatOptions formats{
      .implementations = run.options.checkpoint.manager.implementations, .ranks = &run.session};
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> paths, run.session.AllGather(path));
  const bool same = std::all_of(paths.begin(), paths.end(),
                                [&](const std::string& other) { return other == path; });
  if (same) formats.broadcast = BroadcastOver(run.session);
  return CatchStatus("", [&] { return checkpoint::Manager::Load(path, request, formats); });
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
absl::Status Restore(Run& run, const std::string& path, const checkpoint::State& state) {
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
  // With auto, newer checkpoints are damaged on some rank and may be overwritten.
  if (options.checkpoint.resume != "auto") DDP_RETURN_IF_ERROR(RefuseToOverwrite(run, path));
  DDP_RETURN_IF_ERROR(run.components.Restore(state, run.session, notes, run.unclaimed));
  const int64_t remaining = run.RemainingSteps();
  for (RunPhase& phase : run.phases) phase.scheduler->GoOn(run.position.step, remaining);
  say();
  if (run.is_main() && run.phases[0].scheduler->has_ended() && remaining > 0) {
    run.log->Warn(absl::StrCat(
        "schedule ", run.phases[0].scheduler->schedule().options().name,
        " had come to its end: the learning rate stays 0 for the ", remaining,
        " steps that are left. To train longer, start a new run from these weights with init_from; "
        "to stop a run and go on later, use stop_at_step"));
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
absl::Status RestoreBucketOrder(Run& run, RunPhase& phase) {
  if (run.world_size() == 1) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(
      const std::vector<int64_t> order,
      BroadcastObject(run.session.process_group(), phase.bucket_order->loaded(), /*src=*/0));
  if (order.empty()) return absl::OkStatus();
  bool restored = false;
  DDP_RETURN_IF_ERROR(CatchCollective("rebuilding the buckets of gradients", [&] {
    restored = phase.parallel->RestoreBucketOrder(order);
    return absl::OkStatus();
  }));
  if (!restored && phase.parallel->reduces_gradients()) {
    run.log->Print(
        "the buckets of gradients are not those it was saved with: sums may round otherwise");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Resume(Run& run) {
  const TrainerOptions& options = run.options;
  if (options.checkpoint.resume.empty()) return absl::OkStatus();
  const checkpoint::ReadRequest request = RequestOf(run);
  std::string path = options.checkpoint.resume;
  const bool is_own = path == "auto" || path == "best";
  absl::StatusOr<checkpoint::State> state = checkpoint::State();
  if (is_own) {
    DDP_ASSIGN_OR_RETURN(
        std::optional<checkpoint::Loaded> loaded,
        path == "best" ? run.manager->LoadBest("", request) : run.manager->LoadNewest(request));
    path = loaded ? loaded->path : "";
    if (loaded) state = std::move(loaded->state);
  } else {
    state = Read(run, path, request);
  }
  if (path.empty() && run.is_initialised) return absl::OkStatus();
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
        absl::StrCat("no checkpoint in ", options.checkpoint.manager.directory, ": starting anew"));
    return absl::OkStatus();
  }
  absl::Status restored = state.status();
  if (restored.ok()) restored = CatchStatus("", [&] { return Restore(run, path, *state); });
  state = checkpoint::State();  // its memory
  if (!restored.ok() && !ProblemOf(restored) && !is_own) {
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
  for (RunPhase& phase : run.phases) {
    DDP_RETURN_IF_ERROR(run.session.ShareFailure(RestoreBucketOrder(run, phase)));
  }
  return run.session.Agree(run.log->ResumedAt(position.step));
}

namespace {

// The dict of weights of init_from. Adds to `left_out` what cannot be read. Not collective.
absl::StatusOr<checkpoint::Dict> ReadWeights(const CheckpointOptions& options,
                                             std::vector<std::string>& left_out) {
  checkpoint::ReadRequest request{.per_rank = checkpoint::PerRank::kNone, .left_out = &left_out};
  for (const char* key : checkpoint::kWeightKeys) request.parts[key].optional = true;
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
  return checkpoint::WeightsIn(state->root);
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
  if (options.resume == "auto") {
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
  run.log->Print(absl::StrCat("initialised from ", options.init_from, ": ", *tensors, " tensors"));
  if (!run.is_main()) return absl::OkStatus();
  for (const std::string& note : notes) run.log->Warn(absl::StrCat("initialised: ", note));
  return absl::OkStatus();
}

checkpoint::BroadcastBytes BroadcastOver(const session::Session& session) {
  if (session.size() == 1) return nullptr;
  return [&session](void* data, size_t size, int from) {
    return CatchCollective("sharing a checkpoint", [&] {
      const at::Tensor bytes = at::from_blob(data, {static_cast<int64_t>(size)}, at::kByte);
      // Where no backend is on the CPU, bytes go through the device.
      const bool direct = DirectDevice(session.process_group()) == c10::DeviceType::CPU;
      at::Tensor message = direct ? bytes : bytes.to(session.device());
      std::vector<at::Tensor> messages = {message};
      c10d::BroadcastOptions options;
      options.rootRank = from;
      session.process_group()->broadcast(messages, options)->wait();
      if (!direct && session.rank() != from) bytes.copy_(message);
      return absl::OkStatus();
    });
  };
}

checkpoint::MoveToRank0 MoveOver(const session::Session& session) {
  if (session.size() == 1) return nullptr;
  return [&session](int from, const at::Tensor& bytes) {
    if (session.rank() != 0 && session.rank() != from) return absl::OkStatus();
    return CatchCollective("gathering a checkpoint", [&] {
      const bool direct = DirectDevice(session.process_group()) == c10::DeviceType::CPU;
      at::Tensor message = direct ? bytes : bytes.to(session.device());
      std::vector<at::Tensor> messages = {message};
      if (session.rank() == from) {
        session.process_group()->send(messages, /*dstRank=*/0, /*tag=*/0)->wait();
      } else {
        session.process_group()->recv(messages, from, /*tag=*/0)->wait();
        if (!direct) at::Tensor(bytes).copy_(message);
      }
      return absl::OkStatus();
    });
  };
}

}  // namespace ddp::trainer
