// Runs a communication hook on given gradients, with ranks as threads.
//
//   hooks_peer CASE.json GRADIENTS RESULTS
//
// CASE has "hook", "options" (names and values of comm_hook's options), "shapes", "steps", "ranks",
// "backend" and "bucket_cap_mb". GRADIENTS: float32, by step, rank and parameter. Writes what step
// after step rank 0's gradients become to RESULTS, and prints the bytes that each step has sent.

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/log/absl_check.h"
#include "absl/strings/str_cat.h"
#include "backends/conformance/rank_threads.h"
#include "base/options.h"
#include "ddp/hooks/hooks_testing.h"
#include "nlohmann/json.hpp"

namespace ddp {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  ABSL_CHECK(file.good()) << path;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void Run(const nlohmann::json& test, std::string gradients, const std::string& results_path) {
  hooks::CommHookOptions options = {.name = test["hook"]};
  const OptionList list = ListOptions(options);
  for (const auto& [name, value] : test["options"].items()) {
    const absl::Status set = list.Set(name, value.get<std::string>());
    ABSL_CHECK(set.ok()) << set;
  }
  const std::vector<std::vector<int64_t>> shapes = test["shapes"];
  const int64_t steps = test["steps"], ranks = test["ranks"];
  const at::Tensor all =
      at::from_blob(gradients.data(), {static_cast<int64_t>(gradients.size() / sizeof(float))})
          .view({steps, ranks, -1});
  std::ofstream results(results_path, std::ios::binary);
  backends::RunRankThreads(
      static_cast<int>(ranks), test["backend"],
      [&](const launchers::Rank& rank, const backends::Group& group) {
        hooks::GivenGradients run(shapes, group.process_group, options,
                                  {.bucket_cap_mb = test["bucket_cap_mb"].get<double>()});
        ABSL_CHECK(!testing::Test::HasFailure());
        for (int64_t step = 0; step < steps; ++step) {
          std::vector<at::Tensor> mine;
          int64_t at = 0;
          for (const auto& shape : shapes) {
            const int64_t numel = c10::multiply_integers(shape);
            mine.push_back(all[step][rank.rank].narrow(0, at, numel).view(shape));
            at += numel;
          }
          const std::vector<at::Tensor> means = run.Step(mine);
          if (rank.rank != 0) continue;
          for (const at::Tensor& mean : means) {
            const at::Tensor gradient = mean.contiguous();
            results.write(static_cast<const char*>(gradient.const_data_ptr()),
                          static_cast<std::streamsize>(gradient.nbytes()));
          }
          std::printf("%ld\n", static_cast<long>(run.bytes));
        }
      });
  ABSL_CHECK(results.flush().good()) << results_path;
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) {
  ABSL_CHECK(argc == 4);
  ddp::Run(nlohmann::json::parse(ddp::ReadFile(argv[1])), ddp::ReadFile(argv[2]), argv[3]);
}
