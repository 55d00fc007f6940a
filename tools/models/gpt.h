// A language model of GPT-2's form: pre-norm, causal attention, tied embeddings.
//
//   DDP_ASSIGN_OR_RETURN(const GptSizes sizes, SizesOf({.depth = 2}, /*vocabulary=*/256));
//   auto gpt = std::make_shared<Gpt>(sizes);
//   at::Tensor logits = gpt->forward(tokens);  // [n, t] int64 -> [n, t, vocabulary] float32
//
// Registered as "gpt", with options model.gpt.…
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "base/options.h"
#include "checkpoint/module_state.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"

namespace ddp::tools::models {

struct GptOptions {
  // The one dial: as many layers, with 64 channels and 2 heads of attention for each.
  int64_t depth = 2;
  std::optional<int64_t> layers = std::nullopt;
  std::optional<int64_t> width = std::nullopt;
  std::optional<int64_t> heads = std::nullopt;
  int64_t context = 128;
  double dropout = 0;
};

constexpr auto OptionsOf(const GptOptions&) {
  return Options(
      Option("depth", &GptOptions::depth,
             "the one dial of its size: layers, with 64 channels and 2 heads of attention for each")
          .AtLeast(1)
          .AtMost(1024),
      Option("layers", &GptOptions::layers, "blocks of attention and MLP; auto: depth")
          .AtLeast(1)
          .AtMost(1024),
      Option("width", &GptOptions::width, "channels between the blocks; auto: 64 for each layer")
          .AtLeast(1)
          .AtMost(1 << 16),
      Option("heads", &GptOptions::heads, "heads of attention; auto: one per 32 channels")
          .AtLeast(1)
          .AtMost(1 << 12),
      Option("context", &GptOptions::context, "tokens that the model sees at most")
          .AtLeast(1)
          .AtMost(1 << 20),
      Option("dropout", &GptOptions::dropout,
             "share of values dropped of embeddings, attention and the blocks' outputs")
          .AtLeast(0)
          .AtMost(0.99));
}

struct GptSizes {
  int64_t vocabulary = 256;
  int64_t context = 128;
  int64_t layers = 2;
  int64_t width = 128;
  int64_t heads = 4;
  double dropout = 0;
};

// OptionError, relative to GptOptions: heads do not divide the width.
absl::StatusOr<GptSizes> SizesOf(const GptOptions& options, int64_t vocabulary);

// One block of a Gpt.
class GptBlock : public torch::nn::Module {
 public:
  explicit GptBlock(const GptSizes& sizes);
  // [n, t, width] -> [n, t, width]
  at::Tensor forward(const at::Tensor& x);

 private:
  friend class Gpt;

  struct Pair;  // two Linear layers under one name

  const int64_t heads_;
  const double dropout_;
  torch::nn::LayerNorm ln_1_{nullptr}, ln_2_{nullptr};
  std::shared_ptr<Pair> attn_, mlp_;
};

// The names of its parameters are those of GPT-2 ("wte.weight", "h.0.attn.c_attn.weight"); its
// Linear layers have PyTorch's order [out, in]. Parameters are initialised with torch's default
// generator. The last layer is the embedding itself: it is one parameter, and reduced once.
// Thread-compatible.
class Gpt : public torch::nn::Module, public checkpoint::WeightAdapter {
 public:
  explicit Gpt(const GptSizes& sizes);

  // Logits of the next token at each place: [n, t] int64, t <= context, to [n, t, vocabulary].
  // Throws c10::Error for other shapes.
  at::Tensor forward(const at::Tensor& tokens);

  const GptSizes& sizes() const { return sizes_; }

  // Takes GPT-2's checkpoints: with "transformer." before the names, layers in the order [in, out]
  // of its Conv1D, the masks of attention, a last layer that equals the embedding, and more
  // positions than this model has.
  void AdaptWeights(std::map<std::string, at::Tensor>& weights,
                    std::vector<std::string>& notes) const override;

 private:
  const GptSizes sizes_;
  torch::nn::Embedding wte_, wpe_;
  std::vector<std::shared_ptr<GptBlock>> blocks_;
  torch::nn::LayerNorm ln_f_{nullptr};
};

}  // namespace ddp::tools::models
