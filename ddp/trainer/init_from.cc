#include "ddp/trainer/init_from.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/option_error.h"
#include "base/status.h"
#include "checkpoint/module_state.h"
#include "checkpoint/name_map.h"
#include "ddp/trainer/training_state.h"
#include "torch/csrc/autograd/grad_mode.h"
#include "torch/utils.h"

namespace ddp::trainer {
namespace {

// The weights in `value`, what is under a key of a checkpoint; nullopt if it is no dict of weights.
std::optional<checkpoint::Dict> WeightsOf(const c10::IValue& value) {
  if (!value.isGenericDict()) return std::nullopt;
  checkpoint::Dict own = value.toGenericDict();
  if (own.contains("weights") && own.at("weights").isGenericDict()) {
    own = own.at("weights").toGenericDict();  // of Ema
  }
  const bool has_tensor = std::any_of(own.begin(), own.end(),
                                      [](const auto& entry) { return entry.value().isTensor(); });
  return has_tensor ? std::optional(own) : std::nullopt;
}

struct Weights {
  checkpoint::Dict all;
  std::optional<checkpoint::Dict> under_key;  // those of `all` that init_key names
};

// What is under CheckpointOptions::init_key, completed from the model's weights in `root`. Not
// collective.
absl::StatusOr<Weights> WeightsUnderKey(const CheckpointOptions& options,
                                        const checkpoint::Dict& root) {
  const auto found = root.find(options.init_key);
  const std::optional<checkpoint::Dict> own =
      found == root.end() ? std::nullopt : WeightsOf(found->value());
  if (!own) {
    std::vector<std::string> keys, left_out;
    const checkpoint::ReadRequest request{
        .per_rank = checkpoint::PerRank::kNone, .left_out = &left_out, .meta = true};
    const auto all = checkpoint::Manager::Load(
        options.init_from, request, {.implementations = options.manager.implementations});
    if (all.ok()) {
      for (const auto& entry : all->root) {
        if (entry.key().isString() && WeightsOf(entry.value())) {
          keys.push_back(entry.key().toStringRef());
        }
      }
    }
    return OptionError(
        "init_key", options.init_key,
        absl::StrCat("is no dict of weights in ", options.init_from,
                     keys.empty() ? "" : "; those in it: ", absl::StrJoin(keys, ", ")),
        absl::StatusCode::kNotFound);
  }
  checkpoint::Dict weights = checkpoint::NewTree();
  if (const auto models = checkpoint::WeightsIn(root); models.ok()) weights = models->copy();
  for (const auto& entry : *own) weights.insert_or_assign(entry.key(), entry.value());
  return Weights{weights, own};
}

// The weights of init_from. Adds to `left_out` what cannot be read. Not collective.
absl::StatusOr<Weights> ReadWeights(const CheckpointOptions& options,
                                    std::vector<std::string>& left_out) {
  checkpoint::ReadRequest request{.per_rank = checkpoint::PerRank::kNone, .left_out = &left_out};
  for (const char* key : checkpoint::kWeightKeys) request.parts[key].optional = true;
  const bool has_key = !options.init_key.empty();
  if (has_key) request.parts[options.init_key].optional = true;
  const auto read = [&] {
    left_out.clear();
    return checkpoint::Manager::Load(options.init_from, request,
                                     {.implementations = options.manager.implementations},
                                     options.load);
  };
  absl::StatusOr<checkpoint::State> state = read();
  const auto is_dict = [](const auto& entry) { return entry.value().isGenericDict(); };
  const bool has_dict = state.ok() && std::any_of(state->root.begin(), state->root.end(), is_dict);
  if (!has_dict && (state.ok() || absl::IsInvalidArgument(state.status()))) {
    request.parts.clear();  // a bare state_dict
    state = read();
  }
  if (!state.ok()) return state.status();
  if (has_key) return WeightsUnderKey(options, state->root);
  DDP_ASSIGN_OR_RETURN(const checkpoint::Dict weights, checkpoint::WeightsIn(state->root));
  return Weights{weights, std::nullopt};
}

// Reads weights into this rank's model, and returns how many tensors. Not collective.
absl::StatusOr<int64_t> ReadModel(const CheckpointOptions& options, torch::nn::Module& module,
                                  std::vector<std::string>& notes) {
  std::vector<std::string> left_out;
  const absl::StatusOr<Weights> weights = ReadWeights(options, left_out);
  if (!weights.ok() && !left_out.empty()) {
    return absl::Status(weights.status().code(),
                        absl::StrCat(weights.status().message(),
                                     "; what cannot be read: ", checkpoint::FirstNames(left_out)));
  }
  DDP_RETURN_IF_ERROR(weights.status());
  checkpoint::InitOptions init{.strict = options.init_strict};
  DDP_ASSIGN_OR_RETURN(init.map, checkpoint::NameMap::Parse(options.init_map));
  DDP_ASSIGN_OR_RETURN(const int64_t tensors,
                       checkpoint::InitModule(module, weights->all, init, notes));
  if (weights->under_key && !init.strict) {
    // The model's own weights, which complete them, would fit alone. What fits is copied again.
    std::vector<std::string> again;
    const absl::Status fits =
        checkpoint::InitModule(module, *weights->under_key, init, again).status();
    if (!fits.ok()) {
      return OptionError(
          "init_key", options.init_key,
          absl::StrCat("cannot be taken from ", options.init_from, ": ", fits.message()),
          fits.code());
    }
  }
  if (!left_out.empty()) {
    notes.push_back(absl::StrCat(
        left_out.size(), " that cannot be read were left out: ", checkpoint::FirstNames(left_out)));
  }
  return tensors;
}

// Collective: rank 0's parameters and buffers on all ranks, those that the wrapper ignores, too.
absl::Status ShareWeights(const session::Session& session, torch::nn::Module& module) {
  if (session.size() == 1) return absl::OkStatus();
  const checkpoint::BroadcastBytes broadcast = BroadcastOver(session);
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors = module.parameters();
  const std::vector<at::Tensor> buffers = module.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.numel() == 0) continue;
    const at::Tensor bytes = tensor.detach().cpu().contiguous();
    DDP_RETURN_IF_ERROR(broadcast(bytes.mutable_data_ptr(), bytes.nbytes(), /*from=*/0));
    if (!session.is_main() && !bytes.is_alias_of(tensor)) checkpoint::CopyValues(tensor, bytes);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<bool> InitFromCheckpoint(const session::Session& session,
                                        const CheckpointOptions& options,
                                        const checkpoint::Manager* own, torch::nn::Module& module,
                                        RunLog& log) {
  if (options.init_from.empty()) return false;
  if (own != nullptr) {
    const auto newest_of = [&]() -> absl::StatusOr<std::string> {
      if (!session.is_main()) return "";
      // An error is one that the load will return.
      const absl::StatusOr<std::optional<std::string>> newest = own->Newest();
      return newest.ok() ? newest->value_or("") : options.manager.directory;
    };
    DDP_ASSIGN_OR_RETURN(const std::string path, session.Broadcast(CatchStatus("", newest_of)));
    if (!path.empty()) {
      log.Print(absl::StrCat("init_from ", options.init_from,
                             " is not read: this run goes on from its own ", path));
      return false;
    }
  }
  std::vector<std::string> notes;
  absl::StatusOr<int64_t> tensors = int64_t{0};
  if (session.is_main()) {
    tensors = CatchStatus("", [&] { return ReadModel(options, module, notes); });
  }
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
  DDP_RETURN_IF_ERROR(session.Agree(read));
  DDP_RETURN_IF_ERROR(ShareWeights(session, module));
  log.Print(absl::StrCat("initialised from ", options.init_from,
                         options.init_key.empty() ? "" : absl::StrCat(", ", options.init_key), ": ",
                         *tensors, " tensors"));
  for (const std::string& note : notes) log.Warn(absl::StrCat("initialised: ", note));
  return true;
}

}  // namespace ddp::trainer
