// Continues a text with a language model out of a checkpoint of //tools:train.
//
//   bazel run //tools:generate -- --checkpoint=runs/a/epoch_4.pt --prompt="The " --length=200
//
// docs/language_model.md says more.

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/CPUGeneratorImpl.h"
#include "absl/base/log_severity.h"
#include "absl/log/globals.h"
#include "absl/log/initialize.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/option_error.h"
#include "base/option_flags.h"
#include "base/options.h"
#include "base/status.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "checkpoint/module_state.h"
#include "ddp/trainer/callbacks/ema.h"
#include "tools/datasets/text.h"
#include "tools/models/gpt.h"
#include "torch/csrc/autograd/grad_mode.h"
#include "yaml-cpp/yaml.h"

namespace ddp::tools {
namespace {

constexpr int kFailure = 1;
constexpr int kUsageError = 2;

struct GenerateOptions {
  std::string checkpoint = "";
  std::string prompt = "";
  int64_t length = 80;
  double temperature = 0.8;
  int64_t top_k = 0;
  int64_t seed = 0;
  bool ema = false;
};

constexpr auto OptionsOf(const GenerateOptions&) {
  return Options(
      Option("checkpoint", &GenerateOptions::checkpoint, "checkpoint of train --model=gpt"),
      Option("prompt", &GenerateOptions::prompt,
             "text to go on from; of a model of a tokenizer's tokens their ids, as 12 7 300")
          .AnyBytes(),
      Option("length", &GenerateOptions::length, "tokens to add").AtLeast(1).AtMost(1e9),
      Option("temperature", &GenerateOptions::temperature,
             "divides the logits: below 1 likely tokens become likelier; 0: the likeliest always")
          .AtLeast(0)
          .AtMost(1e6),
      Option("top_k", &GenerateOptions::top_k, "choose among so many likeliest tokens; 0: all")
          .AtLeast(0)
          .AtMost(1 << 30),
      Option("seed", &GenerateOptions::seed, "seed of the choices"),
      Option(
          "ema", &GenerateOptions::ema,
          "take the average of the weights, of a run with ema.decay, in place of the last ones"));
}

// A model, and what its tokens are.
struct Model {
  std::shared_ptr<models::Gpt> gpt;
  datasets::TokenType tokens = datasets::TokenType::kBytes;
};

// What the configuration of a run has of a group of options: "model.gpt", into `options`.
template <typename S>
absl::Status TakeGroup(YAML::Node node, absl::string_view group, S& options) {
  for (const absl::string_view level : absl::StrSplit(group, '.')) {
    if (!node.IsMap() || !node[std::string(level)]) return absl::OkStatus();
    node.reset(node[std::string(level)]);
  }
  const OptionList list = ListOptions(options);
  for (const OptionRef& option : list.options()) {
    const YAML::Node value = node.IsMap() ? node[option.path] : YAML::Node();
    if (value && value.IsScalar()) DDP_RETURN_IF_ERROR(option.set(value.Scalar()));
  }
  return absl::OkStatus();
}

// Refuses what lies around a checkpoint or within one, by the path to give instead.
absl::Status CheckNamesACheckpoint(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    const auto names = checkpoint::Manager::FolderAt(path).List();
    if (!names.ok() || names->empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "is a folder of checkpoints; give one of them, such as ", path, "/", names->back().file));
  }
  if (!std::filesystem::is_regular_file(path, ignored)) return absl::OkStatus();
  const std::string parent = std::filesystem::path(path).parent_path();
  const std::string folder = parent.empty() ? "." : parent;
  const auto& formats = checkpoint::FormatRegistry::All();
  if (std::none_of(formats.begin(), formats.end(), [&](const auto& format) {
        return format.second.recognises != nullptr && format.second.recognises(folder);
      })) {
    return absl::OkStatus();
  }
  // A checkpoint that is one file may lie beside the files of another.
  const auto pt = checkpoint::CreateFormat("pt");
  if (pt.ok() && (*pt)->CheckComplete(path).ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("is one of the files of a checkpoint, which is their folder; give ", folder));
}

// Of a checkpoint with a model. With `ema` those that the run has averaged are the average; the
// others, such as frozen ones, are the model's own.
absl::StatusOr<c10::impl::GenericDict> WeightsOf(const checkpoint::State& state, bool ema) {
  const c10::impl::GenericDict weights = state.root.at("model").toGenericDict();
  if (!ema) return weights;
  const auto found = state.root.find(trainer::Ema::kName);
  if (found == state.root.end()) {
    return absl::NotFoundError(
        "has no average of the weights: its run had ema.decay=0; leave out --ema");
  }
  std::optional<c10::impl::GenericDict> average;
  if (found->value().isGenericDict()) {
    const c10::impl::GenericDict own = found->value().toGenericDict();
    const auto inner = own.find("weights");
    if (inner != own.end() && inner->value().isGenericDict()) {
      average = inner->value().toGenericDict();
    }
  }
  if (!average) {
    return absl::DataLossError("has no weights in its average; leave out --ema");
  }
  c10::impl::GenericDict averaged = weights.copy();
  for (const auto& entry : *average) averaged.insert_or_assign(entry.key(), entry.value());
  return averaged;
}

absl::StatusOr<Model> Load(const std::string& path, bool ema) {
  DDP_RETURN_IF_ERROR(CheckNamesACheckpoint(path));
  checkpoint::ReadRequest request{.per_rank = checkpoint::PerRank::kNone};
  for (const char* key : {"task", "config", "model"}) request.parts[key].optional = true;
  if (ema) request.parts[trainer::Ema::kName].optional = true;
  absl::StatusOr<checkpoint::State> read = checkpoint::Manager::Load(path, request);
  if (!read.ok()) {
    return absl::Status(read.status().code(),
                        absl::StrCat("cannot be read: ", read.status().message()));
  }
  const checkpoint::State& state = *read;
  const auto text = [&](const char* key) -> std::optional<std::string> {
    const auto found = state.root.find(key);
    if (found == state.root.end() || !found->value().isString()) return std::nullopt;
    return found->value().toStringRef();
  };
  const std::optional<std::string> task = text("task"), config = text("config");
  if (task.value_or("gpt") != "gpt") {
    return absl::InvalidArgumentError(
        absl::StrCat("is one of model '", *task, "', which is no language model"));
  }
  if (!task || !config || !state.root.contains("model")) {
    return absl::InvalidArgumentError(
        "was not saved by train --model=gpt: it lacks the task, the model or the configuration; "
        "train can begin with the weights of other programs, by init_from");
  }
  models::GptOptions own;
  datasets::TextOptions data;
  const YAML::Node yaml = YAML::Load(*config);
  DDP_RETURN_IF_ERROR(TakeGroup(yaml, "model.gpt", own));
  DDP_RETURN_IF_ERROR(TakeGroup(yaml, "dataset.text", data));
  DDP_ASSIGN_OR_RETURN(const c10::impl::GenericDict weights, WeightsOf(state, ema));
  const auto embedding = weights.find("wte.weight");
  if (embedding == weights.end() || !embedding->value().isTensor()) {
    return absl::DataLossError("has a model without wte.weight");
  }
  DDP_ASSIGN_OR_RETURN(const models::GptSizes sizes,
                       models::SizesOf(own, embedding->value().toTensor().size(0)));
  // Of a program's own data set, of which the options of text say nothing.
  constexpr int64_t kBytes = 256;
  if (data.tokens == datasets::TokenType::kBytes && sizes.vocabulary != kBytes) {
    data.tokens = datasets::TokenType::kUint32;
  }
  Model model = {.gpt = std::make_shared<models::Gpt>(sizes), .tokens = data.tokens};
  std::vector<std::string> notes;
  DDP_RETURN_IF_ERROR(checkpoint::LoadModuleState(*model.gpt, weights, &notes));
  model.gpt->eval();
  return model;
}

// For a message; not cut within a letter of UTF-8.
std::string Beginning(const std::string& text) {
  size_t end = 20;
  if (text.size() <= end) return text;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return absl::StrCat(text.substr(0, end), "…");
}

absl::StatusOr<std::vector<int64_t>> TokensOf(const std::string& prompt, const Model& model) {
  std::vector<int64_t> tokens;
  if (model.tokens == datasets::TokenType::kBytes) {
    for (const char byte : prompt) tokens.push_back(static_cast<unsigned char>(byte));
  } else {
    for (const absl::string_view word :
         absl::StrSplit(prompt, absl::ByAnyChar(" \t\r\n"), absl::SkipEmpty())) {
      int64_t id = -1;
      const int64_t largest = model.gpt->sizes().vocabulary - 1;
      if (!absl::SimpleAtoi(word, &id) || id < 0 || id > largest) {
        return OptionError("prompt", prompt,
                           absl::StrCat("has '", word, "', which is no token from 0 to ", largest,
                                        ": this model has a tokenizer's ids"));
      }
      tokens.push_back(id);
    }
  }
  if (tokens.empty()) return OptionError("prompt", prompt, "is empty: give a text to go on from");
  const int64_t context = model.gpt->sizes().context;
  if (static_cast<int64_t>(tokens.size()) > context) {
    return OptionError("prompt", Beginning(prompt),
                       absl::StrCat("has ", tokens.size(), " tokens, and the model sees ", context,
                                    " at most: give the last ones"));
  }
  return tokens;
}

int64_t Choose(at::Tensor logits, const GenerateOptions& options, at::Generator& generator) {
  if (options.temperature == 0) return logits.argmax().item<int64_t>();
  if (options.top_k > 0 && options.top_k < logits.size(0)) {
    const at::Tensor least = std::get<0>(logits.topk(options.top_k)).min();
    logits = logits.masked_fill(logits.lt(least), -std::numeric_limits<double>::infinity());
  }
  // Below 0, where a small temperature makes them -infinity and not NaN.
  const at::Tensor below_best = logits.to(at::kDouble) - logits.max();
  const at::Tensor shares = (below_best / options.temperature).softmax(0);
  return shares.multinomial(1, /*replacement=*/false, generator).item<int64_t>();
}

// `result`: of a function that writes to stdout; negative: it could not.
absl::Status Flush(int result) {
  if (result >= 0 && std::fflush(stdout) == 0) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("cannot write the output: ", std::generic_category().message(errno)));
}

absl::Status Say(const Model& model, int64_t token) {
  return Flush(model.tokens == datasets::TokenType::kBytes
                   ? std::fputc(static_cast<int>(token), stdout)
                   : std::printf("%lld ", static_cast<long long>(token)));
}

absl::Status Generate(const GenerateOptions& options) {
  absl::StatusOr<Model> loaded = Load(options.checkpoint, options.ema);
  if (!loaded.ok()) {
    return OptionError("checkpoint", options.checkpoint, loaded.status().message(),
                       loaded.status().code());
  }
  const Model& model = *loaded;
  DDP_ASSIGN_OR_RETURN(std::vector<int64_t> tokens, TokensOf(options.prompt, model));
  const torch::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(options.seed));
  for (const int64_t token : tokens) DDP_RETURN_IF_ERROR(Say(model, token));
  for (int64_t i = 0; i < options.length; ++i) {
    const auto seen =
        std::min<int64_t>(static_cast<int64_t>(tokens.size()), model.gpt->sizes().context);
    const at::Tensor input =
        at::tensor(std::vector<int64_t>(tokens.end() - seen, tokens.end()), at::kLong);
    const at::Tensor logits = model.gpt->forward(input.unsqueeze(0)).select(0, 0).select(0, -1);
    if (!logits.isfinite().all().item<bool>()) {
      return OptionError("checkpoint", options.checkpoint,
                         "has a model whose outputs are not finite: its training has diverged; "
                         "take an earlier checkpoint");
    }
    tokens.push_back(Choose(logits, options, generator));
    DDP_RETURN_IF_ERROR(Say(model, tokens.back()));
  }
  return Flush(std::puts(""));
}

int Main(int argc, char** argv) {
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kWarning);
  absl::InitializeLog();
  GenerateOptions options;
  const OptionList list = ListOptions(options);
  const auto fail = [](absl::string_view message, int code) {
    std::fprintf(stderr, "error: %s\n", std::string(message).c_str());
    return code;
  };
  const absl::StatusOr<OptionFlags> flags = OptionFlags::Parse(argc, argv, list);
  if (!flags.ok()) return fail(flags.status().message(), kUsageError);
  if (flags->help) {
    std::printf("Continues a text with a language model of train --model=gpt.\n\n%s",
                list.Describe("--").c_str());
    return 0;
  }
  if (!flags->positional.empty()) {
    return fail(absl::StrCat("'", flags->positional[0], "' is no option with its value"),
                kUsageError);
  }
  absl::Status status = list.Validate();
  if (status.ok() && options.checkpoint.empty()) {
    status = OptionError("checkpoint", "", "is needed: a checkpoint of train --model=gpt");
  }
  if (status.ok() && options.prompt.empty()) {
    status = OptionError("prompt", "", "is empty: give a text to go on from");
  }
  // `bazel run` starts programs in their runfiles, but paths are meant from the user's folder.
  const char* folder = std::getenv("BUILD_WORKING_DIRECTORY");
  if (status.ok() && folder != nullptr && chdir(folder) != 0) {
    status =
        absl::NotFoundError(absl::StrCat("BUILD_WORKING_DIRECTORY=", folder, " cannot be entered"));
  }
  if (status.ok()) status = CatchStatus("", [&] { return Generate(options); });
  if (status.ok()) return 0;
  return fail(flags->Explain(status, list), ProblemOf(status) ? kUsageError : kFailure);
}

}  // namespace
}  // namespace ddp::tools

int main(int argc, char** argv) { return ddp::tools::Main(argc, argv); }
