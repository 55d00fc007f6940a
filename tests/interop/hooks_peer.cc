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
#include <memory>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/log/absl_check.h"
#include "absl/strings/str_cat.h"
#include "backends/rank_threads.h"
#include "base/options.h"
#include "ddp/ddp.h"
#include "ddp/hooks/comm_hook.h"
#include "nlohmann/json.hpp"

namespace ddp {
namespace {

struct Given : torch::nn::Module {
  explicit Given(const std::vector<std::vector<int64_t>>& shapes) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      values.push_back(register_parameter(absl::StrCat("p", i), at::zeros(shapes[i])));
    }
  }
  at::Tensor forward(const std::vector<at::Tensor>& gradients) {
    at::Tensor sum = at::zeros({});
    for (size_t i = 0; i < values.size(); ++i) sum = sum + (values[i] * gradients[i]).sum();
    return sum;
  }
  std::vector<at::Tensor> values;
};

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
        auto model = *Wrap(std::make_shared<Given>(shapes), group.process_group,
                           {.bucket_cap_mb = test["bucket_cap_mb"].get<double>()});
        const absl::Status registered =
            hooks::Register(options, group.process_group, model->parallel());
        ABSL_CHECK(registered.ok()) << registered;
        int64_t sent = 0;
        for (int64_t step = 0; step < steps; ++step) {
          std::vector<at::Tensor> mine;
          int64_t at = 0;
          for (const auto& shape : shapes) {
            const int64_t numel = c10::multiply_integers(shape);
            mine.push_back(all[step][rank.rank].narrow(0, at, numel).view(shape));
            at += numel;
          }
          model->zero_grad();
          model->forward(mine).backward();
          if (rank.rank != 0) continue;
          for (const at::Tensor& value : model->module()->values) {
            const at::Tensor gradient = value.grad().contiguous();
            results.write(static_cast<const char*>(gradient.const_data_ptr()),
                          static_cast<std::streamsize>(gradient.nbytes()));
          }
          const int64_t total = model->parallel().comm_bytes().value();
          std::printf("%ld\n", static_cast<long>(total - sent));
          sent = total;
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
