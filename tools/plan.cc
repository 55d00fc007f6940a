// Says how much memory a run will need on each rank, for every ZeRO stage, without running it.
//
//   bazel run //tools:plan -- --model=mlp --optimizer=adamw --world_size=8 --memory=16GiB
//   bazel run //tools:plan -- --config=runs/a/config.yaml
//   bazel run //tools:plan -- --model=gpt --depth=12

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/option_error.h"
#include "base/options.h"
#include "base/status.h"
#include "ddp/config/program.h"
#include "ddp/data_parallel.h"
#include "ddp/trainer/optimizers.h"
#include "ddp/trainer/options.h"
#include "ddp/zero/memory_plan.h"
#include "optim/kind.h"
#include "tools/datasets/registry.h"
#include "tools/datasets/text.h"
#include "tools/models/registry.h"
#include "tools/train_options.h"

namespace ddp::tools {
namespace {

constexpr int kUsageError = 2;
constexpr int kMostRanks = 65536;

// All options of //tools:train, so that its configurations are read and its flags are known. What a
// plan does not depend on changes nothing.
struct PlanOptions {
  TrainOptions train = {};
  std::optional<int> world_size = std::nullopt;
  std::string parameter_dtype = "fp32";
  std::string memory = "";
};

constexpr auto OptionsOf(const PlanOptions&) {
  return Options(
      Inline(&PlanOptions::train),
      Option("world_size", &PlanOptions::world_size,
             "ranks; auto: nnodes times nproc_per_node, or those of the run.yaml beside the "
             "configuration")
          .AtLeast(1)
          .AtMost(kMostRanks),
      Option(
          "parameter_dtype", &PlanOptions::parameter_dtype,
          "of parameters and gradients, in a program of yours; with ZeRO fp16 and bf16 have fp32 "
          "copies in the state")
          .OneOf("bf16", "fp16", "fp32"),
      Option("memory", &PlanOptions::memory,
             "of a rank, as 16GiB, 80GB or 512MB: what fits in it; empty: not said"));
}

// "16GiB" -> bytes.
absl::StatusOr<double> ParseMemory(const std::string& text) {
  const std::vector<std::pair<std::string, double>> units = {
      {"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0}, {"TiB", 1099511627776.0},
      {"KB", 1e3},     {"MB", 1e6},        {"GB", 1e9},           {"TB", 1e12}};
  for (const auto& [unit, bytes] : units) {
    double number = 0;
    if (absl::EndsWith(text, unit) &&
        absl::SimpleAtod(text.substr(0, text.size() - unit.size()), &number) && number > 0) {
      return number * bytes;
    }
  }
  return OptionError("memory", text,
                     "must be a positive number and one of KB, MB, GB, TB, KiB, MiB, GiB, TiB");
}

std::string Bytes(double bytes) {
  if (bytes >= 1e9) return absl::StrFormat("%.2f GB", bytes / 1e9);
  return absl::StrFormat("%.2f MB", bytes / 1e6);
}

void PrintRow(const char* title, const std::vector<std::string>& cells, const char* remark = "") {
  std::printf("%-12s", title);
  for (const std::string& cell : cells) std::printf("%14s", cell.c_str());
  std::printf("   %s\n", remark);
}

// Sets what the model is made for, as the data set has it, and returns that in words. Reads the
// data set where only its files tell, as ranks do when they begin.
absl::StatusOr<std::string> SetShape(TrainOptions& options) {
  constexpr int64_t kBytes = 256;
  models::ModelOptions& model = options.model;
  datasets::DatasetOptions& dataset = options.dataset;
  dataset.context = models::ContextOf(model);
  // Those of Fashion-MNIST, too.
  model.input_shape = dataset.input_shape;
  model.num_classes = dataset.num_classes;
  bool is_known = dataset.name == "fashion_mnist" || dataset.name == "synthetic";
  if (dataset.name == "text") {
    const auto text = dataset.implementations.Get<datasets::TextOptions>("text");
    const bool is_bytes = text.tokens == datasets::TokenType::kBytes;
    model.token = is_bytes ? "byte" : "token";
    model.input_shape = {text.sequence_length.value_or(std::max<int64_t>(1, dataset.context))};
    model.num_classes = text.vocab_size.value_or(kBytes);
    is_known = is_bytes ? model.num_classes == kBytes : text.vocab_size.has_value();
  }
  std::string assumed;
  if (!is_known) {
    const absl::StatusOr<datasets::Splits> data = datasets::Load(dataset);
    if (data.ok()) {
      model.input_shape = data->input_shape;
      model.num_classes = data->num_classes;
      model.token = data->token;
    } else if (!model.token.empty()) {
      return data.status();
    } else {
      assumed = absl::StrCat(", which are assumed: data set ", dataset.name,
                             " cannot be read here: ", data.status().message());
    }
  }
  if (!model.token.empty()) {
    return absl::StrCat("for sequences of ", absl::StrJoin(model.input_shape, " x "),
                        " tokens and a vocabulary of ", model.num_classes);
  }
  return absl::StrCat("for examples of ", absl::StrJoin(model.input_shape, " x "), " and ",
                      model.num_classes, " classes", assumed);
}

absl::Status Plan(PlanOptions options) {
  DDP_ASSIGN_OR_RETURN(const std::string shape, SetShape(options.train));
  const trainer::TrainerOptions& run = options.train.trainer;
  const launchers::LaunchOptions& launch = options.train.session.launcher;
  DDP_ASSIGN_OR_RETURN(const trainer::Task task, models::Make(options.train.model));
  DDP_ASSIGN_OR_RETURN(const optim::OptimizerFactory make, trainer::OptimizerOf(run.optimizer));
  const auto optimizer = make({torch::optim::OptimizerParamGroup(std::vector<at::Tensor>())});
  DDP_ASSIGN_OR_RETURN(const optim::OptimizerKind* kind, optim::KindOf(*optimizer));
  const auto entries = static_cast<int64_t>(kind->PerElement(optimizer->defaults()).size());

  const bool reduced = options.parameter_dtype != "fp32";
  const bool masters = reduced && run.zero.master_weights;
  zero::PlannedRange range;
  range.element_bytes = reduced ? 2 : 4;
  // Without fp32 copies, which only sharded optimizers keep, the state has the parameters' dtype.
  const int64_t unsharded_state_bytes = entries * range.element_bytes;
  const int64_t sharded_state_bytes = masters ? entries * 4 + 4 : unsharded_state_bytes;
  int64_t elements = 0;
  for (const auto& [name, parameter] : TrainableParameters(*task.module)) {
    range.numels.push_back(parameter.numel());
    elements += parameter.numel();
  }
  // Gradients are taken to arrive from the last parameter to the first. Then none waits for its
  // bucket, unless buckets are of whole tensors.
  const auto plan = [&](int stage, int world_size) {
    range.state_bytes = stage == 0 ? unsharded_state_bytes : sharded_state_bytes;
    return zero::PlanMemory({range},
                            {.world_size = world_size,
                             .stage = stage,
                             .partition = run.zero.partition,
                             .bucket_cap_mb = run.data_parallel.bucket_cap_mb.value_or(25)});
  };
  const int ranks = options.world_size.value_or(launch.Nnodes() * launch.NprocPerNode());
  std::printf("%s: %lld parameters, %s, %s, %d rank%s; per rank, without activations\n",
              task.name.c_str(), static_cast<long long>(elements), run.optimizer.name.c_str(),
              options.parameter_dtype.c_str(), ranks, ranks == 1 ? "" : "s");
  std::printf("%s\n", shape.c_str());
  std::vector<std::string> titles, parameters, gradients, state, buckets, held, total;
  bool holds = false;
  for (int stage = 0; stage <= 2; ++stage) {
    const zero::MemoryPlan memory = plan(stage, ranks);
    titles.push_back(absl::StrCat(stage == run.zero.stage ? "*" : "", "stage ", stage));
    parameters.push_back(Bytes(static_cast<double>(memory.parameters)));
    gradients.push_back(Bytes(static_cast<double>(memory.gradients)));
    state.push_back(Bytes(static_cast<double>(memory.state)));
    buckets.push_back(Bytes(static_cast<double>(memory.buckets)));
    held.push_back(Bytes(static_cast<double>(memory.held)));
    holds |= memory.held > 0;
    total.push_back(Bytes(static_cast<double>(memory.total())));
  }
  PrintRow("", titles);
  PrintRow("parameters", parameters, "w P");
  PrintRow("gradients", gradients, "w P, w P, w P / N");
  PrintRow("state", state, "k P, k P / N, k P / N");
  PrintRow("buckets", buckets, "0, 0, two of bucket_cap_mb at most");
  if (holds) PrintRow("held", held, "0, 0, gradients that wait for their buckets");
  PrintRow("total", total);
  std::printf("w = %lld, k = %lld bytes", static_cast<long long>(range.element_bytes),
              static_cast<long long>(sharded_state_bytes));
  if (unsharded_state_bytes != sharded_state_bytes) {
    std::printf(" (stage 0, without fp32 copies: %lld)",
                static_cast<long long>(unsharded_state_bytes));
  }
  std::printf("; formulas: ZeRO, arXiv:1910.02054, section 3\n");
  if (options.memory.empty()) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(const double memory, ParseMemory(options.memory));
  for (int stage = 0; stage <= 2; ++stage) {
    const double needs = static_cast<double>(plan(stage, ranks).total());
    std::printf("stage %d %s %s", stage, needs <= memory ? "fits in" : "does not fit in",
                options.memory.c_str());
    int least = 1;
    while (least <= kMostRanks && static_cast<double>(plan(stage, least).total()) > memory) {
      least *= 2;
    }
    if (needs > memory) {
      std::printf(least <= kMostRanks ? "; it does with %d ranks" : ", with any number of ranks",
                  least);
    }
    std::printf("\n");
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  PlanOptions options;
  config::Program program(
      ListOptions(options),
      {.about = "Plans the memory of a run.\nExample: bazel run //tools:plan -- --model=mlp "
                "--optimizer=adamw --world_size=8\n         bazel run //tools:plan -- "
                "--config=runs/a/config.yaml",
       .launch = &options.train.session.launcher,
       .validate = [&]() -> absl::Status {
         DDP_RETURN_IF_ERROR(Validate(options.train));
         return options.memory.empty() ? absl::OkStatus() : ParseMemory(options.memory).status();
       },
       .implied = [&] { return models::DefaultsOf(options.train.model); },
       .job_options = {{"log.dir", "{folder}"}},
       .leaves_nothing = [] { return true; },
       .gives_size = [&] { return options.world_size.has_value(); }});
  if (const std::optional<int> code = program.Start(argc, argv)) return *code;
  const absl::Status status = CatchStatus("", [&] { return Plan(options); });
  if (status.ok()) return 0;
  std::fprintf(stderr, "error: %s\n", program.Explain(status).c_str());
  return kUsageError;
}

}  // namespace
}  // namespace ddp::tools

int main(int argc, char** argv) { return ddp::tools::Main(argc, argv); }
