#include "tools/models/gpt.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/option_error.h"
#include "base/status.h"
#include "ddp/data/batch.h"
#include "ddp/gather/gather.h"
#include "ddp/trainer/callback.h"
#include "ddp/trainer/task.h"
#include "tools/models/registry.h"
#include "torch/csrc/autograd/grad_mode.h"
#include "torch/nn/init.h"

namespace ddp::tools::models {
namespace {

constexpr int64_t kHeadWidth = 32;
constexpr int64_t kWidthPerLayer = 64;
constexpr char kUnit[] = "bits_per_";

// Sines and cosines of positions (Vaswani et al., 2017): neighbours are alike, which attention then
// need not learn. [positions, width]
at::Tensor Sinusoids(int64_t positions, int64_t width) {
  const at::Tensor frequencies =
      (at::arange(0, width, 2, at::kFloat) * (-std::log(10000.0) / static_cast<double>(width)))
          .exp();
  const at::Tensor angles = at::arange(positions, at::kFloat).unsqueeze(1) * frequencies;
  return at::cat({angles.sin(), angles.cos()}, 1).narrow(1, 0, width);
}

at::Tensor Dropped(const at::Tensor& x, double share, bool training) {
  return share > 0 && training ? at::dropout(x, share, true) : x;
}

}  // namespace

absl::StatusOr<GptSizes> SizesOf(const GptOptions& options, int64_t vocabulary) {
  GptSizes sizes = {.vocabulary = vocabulary,
                    .context = options.context,
                    .layers = options.layers.value_or(options.depth),
                    .dropout = options.dropout};
  sizes.width = options.width.value_or(kWidthPerLayer * sizes.layers);
  sizes.heads = options.heads.value_or(std::max<int64_t>(1, sizes.width / kHeadWidth));
  if (sizes.width % sizes.heads != 0) {
    return OptionError(options.heads ? "heads" : "width",
                       absl::StrCat(options.heads ? sizes.heads : sizes.width),
                       absl::StrCat("does not fit: a width of ", sizes.width,
                                    " cannot be divided into ", sizes.heads, " heads"));
  }
  return sizes;
}

struct GptBlock::Pair : torch::nn::Module {
  Pair(const char* first_name, int64_t in, int64_t between, const char* second_name, int64_t inner,
       int64_t out)
      : first(register_module(first_name, torch::nn::Linear(in, between))),
        second(register_module(second_name, torch::nn::Linear(inner, out))) {}
  torch::nn::Linear first, second;
};

GptBlock::GptBlock(const GptSizes& sizes) : heads_(sizes.heads), dropout_(sizes.dropout) {
  const int64_t width = sizes.width;
  const auto norm = [&] { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})); };
  ln_1_ = register_module("ln_1", norm());
  attn_ = register_module(
      "attn", std::make_shared<Pair>("c_attn", width, 3 * width, "c_proj", width, width));
  ln_2_ = register_module("ln_2", norm());
  mlp_ = register_module(
      "mlp", std::make_shared<Pair>("c_fc", width, 4 * width, "c_proj", 4 * width, width));
}

at::Tensor GptBlock::forward(const at::Tensor& x) {
  const int64_t n = x.size(0), t = x.size(1), width = x.size(2);
  // [n, t, 3 width] -> 3 of [n, heads, t, width / heads], which are views.
  std::vector<at::Tensor> qkv = attn_->first->forward(ln_1_->forward(x)).split(width, 2);
  for (at::Tensor& part : qkv) part = part.view({n, t, heads_, width / heads_}).transpose(1, 2);
  const at::Tensor attended =
      at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{},
                                       is_training() ? dropout_ : 0, /*is_causal=*/true)
          .transpose(1, 2)
          .reshape({n, t, width});
  const at::Tensor middle = x + Dropped(attn_->second->forward(attended), dropout_, is_training());
  const at::Tensor hidden = at::gelu(mlp_->first->forward(ln_2_->forward(middle)), "tanh");
  return middle + Dropped(mlp_->second->forward(hidden), dropout_, is_training());
}

Gpt::Gpt(const GptSizes& sizes)
    : sizes_(sizes),
      wte_(register_module("wte", torch::nn::Embedding(sizes.vocabulary, sizes.width))),
      wpe_(register_module("wpe", torch::nn::Embedding(sizes.context, sizes.width))) {
  const auto layers = register_module("h", std::make_shared<torch::nn::Module>("layers"));
  for (int64_t i = 0; i < sizes.layers; ++i) {
    blocks_.push_back(layers->register_module(absl::StrCat(i), std::make_shared<GptBlock>(sizes)));
  }
  ln_f_ = register_module("ln_f", torch::nn::LayerNorm(torch::nn::LayerNormOptions({sizes.width})));
  const torch::NoGradGuard no_grad;
  // GPT-2's 0.02 is of a width of 768. With it, what a narrow model adds to a token's embedding in
  // its first steps hides the token, and the loss stays at that of the tokens' frequencies for
  // hundreds of steps. Each block adds two outputs to the sum that runs through all of them.
  const double spread = 1 / std::sqrt(static_cast<double>(sizes.width));
  const double residual_spread = spread / std::sqrt(2.0 * static_cast<double>(sizes.layers));
  for (auto& item : named_parameters()) {
    const std::string& name = item.key();
    if (absl::EndsWith(name, ".bias")) {
      item.value().zero_();
    } else if (!absl::StrContains(name, "ln_")) {
      torch::nn::init::normal_(item.value(), 0,
                               absl::EndsWith(name, "c_proj.weight") ? residual_spread : spread);
    }
  }
  wpe_->weight.copy_(Sinusoids(sizes.context, sizes.width) * spread);
}

at::Tensor Gpt::forward(const at::Tensor& tokens) {
  TORCH_CHECK(tokens.dim() == 2 && tokens.size(1) <= sizes_.context,
              "model 'gpt' takes tokens [n, ", sizes_.context, " or fewer], not ", tokens.sizes());
  at::Tensor x = wte_->forward(tokens) + wpe_->weight.narrow(0, 0, tokens.size(1));
  x = Dropped(x, sizes_.dropout, is_training());
  for (const std::shared_ptr<GptBlock>& block : blocks_) x = block->forward(x);
  return at::linear(ln_f_->forward(x), wte_->weight);
}

void Gpt::AdaptWeights(std::map<std::string, at::Tensor>& weights,
                       std::vector<std::string>& notes) const {
  std::map<std::string, at::Tensor> own;
  std::vector<std::string> left_out;
  for (const auto& [name, tensor] : weights) {
    absl::string_view shorter = name;
    absl::ConsumePrefix(&shorter, "transformer.");
    const bool is_mask = absl::EndsWith(name, ".attn.masked_bias") ||
                         (absl::EndsWith(name, ".attn.bias") && tensor.dim() == 4);
    if (is_mask) {
      left_out.push_back(name);
    } else {
      own.emplace(std::string(shorter), tensor);
    }
  }
  const auto last = own.find("lm_head.weight"), embedding = own.find("wte.weight");
  if (last != own.end() && embedding != own.end() &&
      last->second.sizes() == embedding->second.sizes() &&
      at::equal(last->second, embedding->second.to(last->second.scalar_type()))) {
    own.erase(last);  // the same parameter
  }
  int64_t transposed = 0;
  for (int64_t i = 0; i < sizes_.layers; ++i) {
    const std::string block = absl::StrCat("h.", i, ".");
    // A square matrix does not show its order: that of its neighbour counts.
    const auto shows = own.find(absl::StrCat(block, "attn.c_attn.weight"));
    if (shows == own.end() ||
        shows->second.sizes() != at::IntArrayRef({sizes_.width, 3 * sizes_.width})) {
      continue;
    }
    for (const char* layer : {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}) {
      const auto found = own.find(absl::StrCat(block, layer, ".weight"));
      if (found == own.end() || found->second.dim() != 2) continue;
      found->second = found->second.t();
      ++transposed;
    }
  }
  const auto positions = own.find("wpe.weight");
  if (positions != own.end() && positions->second.dim() == 2 &&
      positions->second.size(0) > sizes_.context) {
    notes.push_back(absl::StrCat("wpe.weight: the first ", sizes_.context, " of ",
                                 positions->second.size(0), " positions"));
    positions->second = positions->second.narrow(0, 0, sizes_.context);
  }
  if (transposed > 0) {
    notes.push_back(absl::StrCat(transposed, " weights [in, out], as of GPT-2, were transposed"));
  }
  if (!left_out.empty()) {
    notes.push_back(absl::StrCat(left_out.size(), " masks of attention were left out"));
  }
  weights = std::move(own);
}

namespace {

// Prints, at the end of a run, how well the model predicts what it was trained on and what it was
// not.
class BitsReport final : public trainer::Callback {
 public:
  explicit BitsReport(std::string token) : token_(std::move(token)) {}

  std::string name() const override { return "bits_report"; }

  absl::Status OnStepEnd(trainer::CallbackContext& run, const at::Tensor& loss) override {
    last_.push_back({loss.detach().clone(), run.loss_count()});
    if (last_.size() > kLast) last_.pop_front();
    return absl::OkStatus();
  }

  absl::Status OnEvaluationEnd(trainer::CallbackContext&,
                               const std::map<std::string, double>& metrics) override {
    const auto found = metrics.find(absl::StrCat("test/", kUnit, token_));
    held_out_ = found == metrics.end() ? std::nullopt : std::optional<double>(found->second);
    return absl::OkStatus();
  }

  absl::Status OnEnd(trainer::CallbackContext& run) override {
    std::vector<std::string> parts;
    if (!last_.empty()) {
      double sum = 0, count = 0;
      for (const Step& step : last_) {
        if (step.count > 0) sum += step.loss.item<double>() * step.count;
        count += step.count;
      }
      DDP_ASSIGN_OR_RETURN(const auto all, AllGather(run.session().process_group(),
                                                     std::vector<double>{sum, count}));
      sum = count = 0;
      for (const std::vector<double>& theirs : all) {
        sum += theirs[0];
        count += theirs[1];
      }
      if (count > 0) {
        parts.push_back(absl::StrFormat("%.4f train, last %d steps", sum / count / std::log(2.0),
                                        static_cast<int>(last_.size())));
      }
    }
    if (held_out_) parts.push_back(absl::StrFormat("%.4f held out", *held_out_));
    if (!run.session().is_main()) return absl::OkStatus();
    for (const std::string& part : parts) {
      std::printf("bits per %s %s\n", token_.c_str(), part.c_str());
    }
    std::fflush(stdout);
    return absl::OkStatus();
  }

 private:
  static constexpr size_t kLast = 20;

  // Of this rank.
  struct Step {
    at::Tensor loss;   // a mean
    double count = 0;  // tokens; 0: the rank had no batch
  };

  const std::string token_;
  std::deque<Step> last_;
  std::optional<double> held_out_;
};

absl::StatusOr<trainer::Task> MakeGpt(const ModelOptions& options) {
  const auto own = options.implementations.Get<GptOptions>("gpt");
  if (options.input_shape.size() != 1 || options.input_shape[0] > own.context) {
    return OptionError("model.gpt.context", absl::StrCat(own.context),
                       absl::StrCat("is less than the ", options.input_shape[0],
                                    " tokens of an example of the data set"));
  }
  absl::StatusOr<GptSizes> sizes = SizesOf(own, options.num_classes);
  if (!sizes.ok()) return InGroup("model.gpt", sizes.status());
  auto gpt = std::make_shared<Gpt>(*sizes);
  const std::string metric = absl::StrCat(kUnit, options.token);
  return trainer::TaskOf<data::Batch>(
      "gpt", gpt, [gpt, metric](data::Batch& batch, const trainer::StepContext& context) {
        const at::Tensor scores = gpt->forward(batch.input);  // [n, t, vocabulary]
        const at::Tensor logits = scores.flatten(0, 1);
        const at::Tensor target = batch.target.flatten();
        const at::Tensor loss = at::cross_entropy_loss(logits.to(at::kFloat), target, /*weight=*/{},
                                                       at::Reduction::Sum, /*ignore_index=*/-100);
        const auto count = target.ge(0).sum().item<int64_t>();
        trainer::StepOutput output = {.loss = trainer::SumAndCount(loss, count)};
        output.metrics[metric] = trainer::SumAndCount(loss.detach() / std::log(2.0), count);
        if (!context.training) {
          output.predictions =
              data::AnyBatch(trainer::Outputs{scores.transpose(1, 2), batch.target});
        }
        return output;
      });
}

// Those of an optimizer are for the one that is named here.
std::vector<std::pair<std::string, std::string>> Defaults() {
  return {{"dataset.name", "text"},       {"batch_size", "32"},
          {"eval_batch_size", "32"},      {"optimizer.name", "adamw"},
          {"optimizer.lr", "0.003"},      {"optimizer.weight_decay", "0.1"},
          {"optimizer.no_decay", "true"}, {"clip_norm", "1"}};
}

const Registration<ModelRegistry> kGpt(
    "gpt", ModelEntry{
               .create = &MakeGpt,
               .options = &AnyOptions::Of<GptOptions>,
               .context =
                   [](const ModelOptions& options) {
                     return options.implementations.Get<GptOptions>("gpt").context;
                   },
               .defaults = &Defaults,
               .callbacks =
                   [](const ModelOptions& options) {
                     return std::vector<std::shared_ptr<trainer::Callback>>{
                         std::make_shared<BitsReport>(options.token)};
                   },
           });

}  // namespace
}  // namespace ddp::tools::models
