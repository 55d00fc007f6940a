// One rank of the programs that hier.sh and measure.sh run on simulated hosts; torchrun's variables
// give rank and world size.
//
//   collectives_ranks --mode=compare         checks that backend hier gives gloo's results
//   collectives_ranks --mode=measure --mb=25 both, in turns; rank 0 prints medians and their ratio
//   collectives_ranks --mode=until_failure --backend=gloo
//                                            watched; all-reduces until it fails; prints "ready",
//                                            then why

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "backends/backend.h"
#include "backends/hier/hier.h"
#include "backends/rendezvous.h"
#include "backends/watch/watch.h"
#include "base/environment.h"
#include "base/status.h"
#include "launchers/variables.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

ABSL_FLAG(std::string, mode, "compare", "compare, measure, until_failure");
ABSL_FLAG(std::string, backend, "hier", "until_failure: hier or gloo");
ABSL_FLAG(std::string, local, "shm", "backend of hier inside a host");
ABSL_FLAG(double, mb, 25, "measure: size in 1e6 bytes");
ABSL_FLAG(int, rounds, 15, "measure: how often");
ABSL_FLAG(std::vector<std::string>, chunk_kb, {"2048"},
          "measure: chunks of hier, each its own row");
ABSL_FLAG(std::vector<std::string>, packing, {"auto"}, "measure: auto, never, always; likewise");
ABSL_FLAG(std::vector<std::string>, windows, {"4"}, "measure: windows of hier, likewise");

namespace ddp::network {
namespace {

using backends::BackendOptions;
using backends::hier::HierOptions;
using backends::hier::Packing;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<at::Tensor>;

absl::StatusOr<BackendPtr> Gloo(BackendOptions options) {
  options.store = c10::make_intrusive<c10d::PrefixStore>("gloo", options.store);
  DDP_ASSIGN_OR_RETURN(backends::BackendEntry gloo, backends::BackendRegistry::Find("gloo"));
  return gloo.create(options);
}

absl::StatusOr<BackendPtr> Hier(BackendOptions options, const std::string& name = "hier",
                                HierOptions hier = {}) {
  options.store = c10::make_intrusive<c10d::PrefixStore>(name, options.store);
  hier.local = absl::GetFlag(FLAGS_local);
  return CreateHier(options, hier);
}

absl::StatusOr<Packing> ParsePacking(const std::string& text) {
  if (text == "auto") return Packing::kAuto;
  if (text == "never") return Packing::kNever;
  if (text == "always") return Packing::kAlways;
  return absl::InvalidArgumentError(absl::StrCat("--packing=", text));
}

// Whole numbers, whose sums are exact in any order.
at::Tensor Values(int rank, int64_t count, at::ScalarType dtype) {
  return at::arange(count, at::kLong).add_(rank).remainder_(7).to(dtype);
}

Tensors Collectives(c10d::Backend& backend, int64_t count, at::ScalarType dtype) {
  const int size = backend.getSize();
  const at::Tensor own = Values(backend.getRank(), count, dtype);
  Tensors allreduced = {own.clone()}, broadcast = {own.clone()};
  at::Tensor input = own.clone(), gathered = at::zeros({size * count}, own.options());
  at::Tensor wide = Values(backend.getRank(), size * count, dtype);
  at::Tensor scattered = at::zeros({count}, own.options());
  c10d::BroadcastOptions from_last;
  from_last.rootRank = size - 1;
  for (const auto& work :
       {backend.allreduce(allreduced, {}), backend.broadcast(broadcast, from_last),
        backend.all_gather_single(gathered, input, {}),
        backend.reduce_scatter_single(scattered, wide, {}), backend.barrier({})}) {
    work->wait();
  }
  return {allreduced[0], broadcast[0], gathered, scattered};
}

absl::Status Compare(const BackendOptions& options) {
  DDP_ASSIGN_OR_RETURN(BackendPtr gloo, Gloo(options));
  DDP_ASSIGN_OR_RETURN(BackendPtr hier, Hier(options));
  if (hier->getBackendName() != "hier") {
    return absl::FailedPreconditionError("the ranks are on one host, or each on its own");
  }
  int compared = 0;
  for (at::ScalarType dtype : {at::kFloat, at::kDouble, at::kInt}) {
    for (int64_t count : {1, 1001, 300'007, 1'000'000}) {
      const Tensors expected = Collectives(*gloo, count, dtype);
      const Tensors actual = Collectives(*hier, count, dtype);
      for (size_t i = 0; i < expected.size(); ++i, ++compared) {
        if (actual[i].equal(expected[i])) continue;
        return absl::DataLossError(absl::StrCat("rank ", options.rank.rank, ": collective ", i,
                                                " of ", count, " ", c10::toString(dtype),
                                                " differs from gloo's"));
      }
    }
  }
  absl::PrintF("rank %d: %d results are gloo's\n", options.rank.rank, compared);
  return absl::OkStatus();
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

absl::Status Measure(const BackendOptions& options) {
  const auto count = static_cast<int64_t>(absl::GetFlag(FLAGS_mb) * 1e6 / sizeof(float));
  std::vector<std::pair<std::string, BackendPtr>> rows;
  DDP_ASSIGN_OR_RETURN(BackendPtr gloo, Gloo(options));
  rows.emplace_back("gloo", gloo);
  for (const std::string& kb : absl::GetFlag(FLAGS_chunk_kb)) {
    for (const std::string& window : absl::GetFlag(FLAGS_windows)) {
      for (const std::string& packing : absl::GetFlag(FLAGS_packing)) {
        HierOptions hier;
        hier.chunk_bytes = std::stoll(kb) << 10;
        hier.window = std::stoi(window);
        DDP_ASSIGN_OR_RETURN(hier.packing, ParsePacking(packing));
        const std::string name = absl::StrCat("hier ", window, " x ", kb, " KiB, pack ", packing);
        DDP_ASSIGN_OR_RETURN(BackendPtr backend, Hier(options, name, hier));
        rows.emplace_back(name, backend);
      }
    }
  }
  const at::Tensor own = Values(options.rank.rank, count, at::kFloat);
  at::Tensor sum = at::zeros({count});
  for (int rank = 0; rank < options.rank.world_size; ++rank) {
    sum.add_(Values(rank, count, at::kFloat));
  }
  Tensors tensors = {at::empty({count})};
  std::vector<std::vector<double>> ms(rows.size());
  for (int round = -1; round < absl::GetFlag(FLAGS_rounds); ++round) {
    for (size_t i = 0; i < rows.size(); ++i) {
      tensors[0].copy_(own);
      gloo->barrier({})->wait();
      const absl::Time began = absl::Now();
      rows[i].second->allreduce(tensors, {})->wait();
      Tensors took = {at::full({1}, absl::ToDoubleMilliseconds(absl::Now() - began))};
      if (!tensors[0].equal(sum)) {
        return absl::DataLossError(absl::StrCat(rows[i].first, ": wrong sum"));
      }
      c10d::AllreduceOptions slowest;
      slowest.reduceOp = c10d::ReduceOp::MAX;
      gloo->allreduce(took, slowest)->wait();
      if (round >= 0) ms[i].push_back(took[0].item<float>());
    }
  }
  if (options.rank.rank != 0) return absl::OkStatus();
  for (size_t i = 0; i < rows.size(); ++i) {
    absl::PrintF("%-32s %9.3f MB  median %8.2f ms  min %8.2f ms  %5.3f of gloo\n", rows[i].first,
                 absl::GetFlag(FLAGS_mb), Median(ms[i]),
                 *std::min_element(ms[i].begin(), ms[i].end()), Median(ms[i]) / Median(ms[0]));
  }
  return absl::OkStatus();
}

absl::Status UntilFailure(const BackendOptions& options) {
  const bool hier = absl::GetFlag(FLAGS_backend) == "hier";
  DDP_ASSIGN_OR_RETURN(BackendPtr backend, hier ? Hier(options) : Gloo(options));
  return CatchStatus("", [&] {
    backend = backends::watch::Watch(std::move(backend),
                                     c10::make_intrusive<c10d::PrefixStore>("watch", options.store),
                                     {.rank_0_serves_store = true});
    // Wait until the watchdogs have connected.
    const absl::Time met = absl::Now() + absl::Seconds(3);
    bool said = false;
    while (true) {
      Tensors tensors = {Values(options.rank.rank, 300'000, at::kFloat)};
      backend->allreduce(tensors, {})->wait();
      if (said || absl::Now() < met) continue;
      said = true;
      std::puts("ready");
      std::fflush(stdout);
    }
  });
}

absl::Status Run() {
  DDP_ASSIGN_OR_RETURN(std::optional<launchers::Rank> rank,
                       launchers::RankFromVariables(Environment::FromProcess()));
  if (!rank.has_value()) return absl::FailedPreconditionError("torchrun's variables are not set");
  BackendOptions options;
  options.rank = *rank;
  options.group.timeout = absl::Seconds(60);
  DDP_ASSIGN_OR_RETURN(options.store, backends::Join(*rank, {.timeout = absl::Seconds(60)}));
  const std::string mode = absl::GetFlag(FLAGS_mode);
  if (mode == "compare") return Compare(options);
  if (mode == "measure") return Measure(options);
  if (mode == "until_failure") return UntilFailure(options);
  return absl::InvalidArgumentError(absl::StrCat("--mode=", mode));
}

}  // namespace
}  // namespace ddp::network

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = ddp::network::Run();
  if (status.ok()) return 0;
  absl::FPrintF(stderr, "error: %s\n", status.ToString());
  return 1;
}
