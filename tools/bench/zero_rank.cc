// One rank of PyTorch's recipe for ZeroRedundancyOptimizer: 20 x Linear(2000, 2000), Adam, batches
// of 20. Trains with the given stage, and prints on rank 0 what a step takes in time and memory, as
// one JSON line. compare_zero.py runs it beside Python's.
//
//   zero_rank --zero_stage=1 --nproc_per_node=2 --backend=shm

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/option_flags.h"
#include "base/options.h"
#include "base/status.h"
#include "ddp/counting_allocator_testing.h"
#include "ddp/ddp.h"
#include "ddp/session/session.h"
#include "ddp/zero/zero_redundancy_optimizer.h"
#include "nlohmann/json.hpp"
#include "optim/fused.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"
#include "torch/optim/adam.h"
#include "torch/utils.h"

namespace ddp::tools {
namespace {

struct ProgramOptions {
  zero::ZeroOptions zero = {};
  session::SessionOptions session = {.launcher = {.default_nproc_per_node = 2}};
  int64_t layers = 20;
  int64_t width = 2000;
  int64_t steps = 8;
  bool fused = true;
  double bucket_cap_mb = 25;
};

constexpr auto OptionsOf(const ProgramOptions&) {
  return Options(
      Nested("zero", &ProgramOptions::zero, "sharded optimizer (ZeRO)"),
      Inline(&ProgramOptions::session),
      Option("layers", &ProgramOptions::layers, "of the model").AtLeast(1),
      Option("width", &ProgramOptions::width, "of each layer").AtLeast(1),
      Option("steps", &ProgramOptions::steps, "that are timed").AtLeast(1),
      Option("fused", &ProgramOptions::fused, "Adam by one kernel call"),
      Option("bucket_cap_mb", &ProgramOptions::bucket_cap_mb, "size of a gradient bucket in MiB")
          .Above(0));
}

// Proportional set size of this process: shared pages count in part.
int64_t PssBytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string word;
  while (file >> word) {
    int64_t kib = 0;
    if (word == "Pss:" && file >> kib) return kib * 1024;
  }
  return 0;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

absl::Status Measure(const session::Session& session, const ProgramOptions& options) {
  CountingAllocator& allocator = CountingAllocator::Install();
  torch::manual_seed(0);
  torch::nn::Sequential net;
  for (int64_t i = 0; i < options.layers; ++i) {
    net->push_back(torch::nn::Linear(options.width, options.width));
  }
  const auto& group = session.process_group();
  const int64_t pss_before = PssBytes();
  const int64_t bytes_before = allocator.bytes();
  const bool sharded = options.zero.stage > 0;
  DDP_ASSIGN_OR_RETURN(auto model, Wrap(net, group,
                                        {.bucket_cap_mb = options.bucket_cap_mb,
                                         .gradient_as_bucket_view = true,
                                         .reduce_gradients = options.zero.stage < 2}));
  const auto adam = torch::optim::AdamOptions(0.01);
  const optim::OptimizerFactory make = options.fused ? optim::FactoryOf<optim::FusedAdam>(adam)
                                                     : optim::FactoryOf<torch::optim::Adam>(adam);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  zero::ZeroRedundancyOptimizer* zero = nullptr;
  if (sharded) {
    zero::ZeroOptions zero_options = options.zero;
    zero_options.bucket_cap_mb = options.bucket_cap_mb;
    DDP_ASSIGN_OR_RETURN(auto made, zero::ZeroRedundancyOptimizer::Create(net->parameters(), group,
                                                                          make, zero_options));
    zero = made.get();
    optimizer = std::move(made);
  } else {
    optimizer = make({torch::optim::OptimizerParamGroup(net->parameters())});
  }
  allocator.ResetPeak();

  nlohmann::json row;
  std::vector<double> step_ms, whole_ms;
  std::vector<int64_t> allocations;
  int64_t backward_peak = 0, state_bytes = 0;
  double loss_value = 0;
  for (int64_t step = -2; step < options.steps; ++step) {
    torch::manual_seed(1000 * session.rank() + step + 2);
    const absl::Time begin = absl::Now();
    at::Tensor input = at::randn({20, options.width}), target = at::randn({20, options.width});
    at::Tensor loss = at::mse_loss(model->forward(input), target);
    loss.backward();
    loss_value = loss.item<double>();
    input.reset();
    target.reset();
    loss.reset();
    backward_peak = std::max(backward_peak, allocator.peak_bytes() - bytes_before);
    if (group) group->barrier()->wait();
    const int64_t state_before = allocator.bytes();
    const int64_t before = allocator.allocations();
    const absl::Time at = absl::Now();
    optimizer->step();
    if (group) group->barrier()->wait();
    const absl::Time end = absl::Now();
    if (step == -2) state_bytes = allocator.bytes() - state_before;
    model->zero_grad();
    if (step < 0) continue;
    allocations.push_back(allocator.allocations() - before);
    step_ms.push_back(absl::ToDoubleMilliseconds(end - at));
    whole_ms.push_back(absl::ToDoubleMilliseconds(absl::Now() - begin));
  }
  row["stage"] = options.zero.stage;
  row["loss"] = loss_value;
  row["optimizer_step_ms"] = Median(step_ms);
  row["train_step_ms"] = Median(whole_ms);
  row["step_allocations"] = *std::max_element(allocations.begin(), allocations.end());
  row["state_bytes"] = state_bytes;
  row["peak_bytes"] = allocator.peak_bytes() - bytes_before;
  row["bucket_bytes"] = zero == nullptr ? 0 : zero->peak_bucket_bytes();
  row["pss_growth_bytes"] = PssBytes() - pss_before;
  // Each value is the largest of all ranks, since the slowest and the fullest rank count.
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> all, session.AllGather(row.dump()));
  if (!session.is_main()) return absl::OkStatus();
  for (const std::string& text : all) {
    const nlohmann::json other = nlohmann::json::parse(text);
    for (const char* key : {"optimizer_step_ms", "train_step_ms", "step_allocations", "state_bytes",
                            "peak_bytes", "bucket_bytes", "pss_growth_bytes"}) {
      if (other[key] > row[key]) row[key] = other[key];
    }
  }
  row["what"] = zero == nullptr ? "unsharded" : zero->Describe();
  std::printf("%s\n", row.dump().c_str());
  std::fflush(stdout);
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  ProgramOptions options;
  const OptionList list = ListOptions(options);
  const absl::StatusOr<OptionFlags> flags = OptionFlags::Parse(argc, argv, list);
  absl::Status status = flags.ok() ? list.Validate() : flags.status();
  if (!status.ok()) {
    std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
    return 2;
  }
  if (flags->help) {
    std::printf("%s", list.Describe("--").c_str());
    return 0;
  }
  return session::Run(
      options.session, argc, argv,
      [&](const session::Session& session) { return Measure(session, options); },
      [&](const absl::Status& error) { return flags->Explain(error, list); });
}

}  // namespace
}  // namespace ddp::tools

int main(int argc, char** argv) { return ddp::tools::Main(argc, argv); }
