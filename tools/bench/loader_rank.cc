// Our loader, or LibTorch's own DataLoader, over Fashion-MNIST with random crop and flip: prints
// examples per second as one JSON line. loader.py runs both beside Python's.
//
//   loader_rank --loader=ours --num_workers=1 --batch_size=64

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/option_flags.h"
#include "base/options.h"
#include "base/status.h"
#include "ddp/data/augment.h"
#include "ddp/data/loader.h"
#include "ddp/data/sampler.h"
#include "nlohmann/json.hpp"
#include "tools/datasets/fashion_mnist.h"
#include "torch/data.h"

namespace ddp::tools {
namespace {

struct ProgramOptions {
  std::string loader = "ours";
  std::string data_dir = "";
  int num_workers = 1;
  int64_t batch_size = 64;
  int64_t examples = 60'000;
  int64_t passes = 3;
};

constexpr auto OptionsOf(const ProgramOptions&) {
  return Options(
      Option("loader", &ProgramOptions::loader, "whose").OneOf("ours", "libtorch"),
      Option("data_dir", &ProgramOptions::data_dir, "folder of the data set; empty: Bazel's"),
      Option("num_workers", &ProgramOptions::num_workers, "threads").AtLeast(0),
      Option("batch_size", &ProgramOptions::batch_size, "examples per batch").AtLeast(1),
      Option("examples", &ProgramOptions::examples, "of the data set").AtLeast(1).AtMost(60'000),
      Option("passes", &ProgramOptions::passes, "over the data set; the fastest counts")
          .AtLeast(1));
}

// What a pass has read.
struct Count {
  int64_t examples = 0;
  int64_t labels = 0;  // their sum
  void Add(const at::Tensor& target) {
    examples += target.size(0);
    labels += target.sum().item<int64_t>();
  }
};

// The same transforms image by image, as LibTorch's data sets are written, with random numbers of
// the thread.
class TorchImages : public torch::data::Dataset<TorchImages> {
 public:
  explicit TorchImages(std::shared_ptr<const data::Dataset> images) : images_(std::move(images)) {}

  torch::data::Example<> get(size_t index) override {
    thread_local data::Random random(/*seed=*/1, /*epoch=*/0,
                                     static_cast<int64_t>(absl::GetCurrentTimeNanos()));
    const int64_t one = static_cast<int64_t>(index);
    data::Batch example = images_->Get({&one, 1});
    return {data::Augment(example.input, {}, {&random, 1})[0], example.target[0]};
  }
  std::optional<size_t> size() const override { return static_cast<size_t>(images_->size()); }

 private:
  std::shared_ptr<const data::Dataset> images_;
};

// Calls `read` for each pass; returns the best rate.
template <typename Read>
double Measure(int64_t passes, Count& count, Read&& read) {
  double best = 0;
  for (int64_t pass = 0; pass < passes; ++pass) {
    count = {};
    const absl::Time began = absl::Now();
    read(pass);
    best = std::max(
        best, static_cast<double>(count.examples) / absl::ToDoubleSeconds(absl::Now() - began));
  }
  return best;
}

absl::Status Run(const ProgramOptions& options) {
  at::set_num_threads(1);
  DDP_ASSIGN_OR_RETURN(
      const datasets::Splits splits,
      datasets::LoadFashionMnist({.data_dir = options.data_dir, .train_size = options.examples}));
  Count count;
  double rate = 0;
  if (options.loader == "ours") {
    DDP_ASSIGN_OR_RETURN(const auto augmented, data::AugmentedDataset::Create(splits.train, {}));
    DDP_ASSIGN_OR_RETURN(const auto loader,
                         data::Loader::Create(*augmented, {.batch_size = options.batch_size,
                                                           .num_workers = options.num_workers}));
    DDP_ASSIGN_OR_RETURN(auto sampler,
                         data::DistributedSampler::Create(augmented->size(), {.seed = 1}));
    absl::Status status;
    rate = Measure(options.passes, count, [&](int64_t pass) {
      sampler.set_epoch(pass);
      status = loader->Begin(sampler.ShareFrom(0));
      while (status.ok()) {
        auto batch = loader->Next();
        status = batch.status();
        if (!batch.ok() || !*batch) break;
        count.Add((*batch)->target);
      }
    });
    DDP_RETURN_IF_ERROR(status);
  } else {
    const auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
        TorchImages(splits.train).map(torch::data::transforms::Stack<>()),
        torch::data::DataLoaderOptions()
            .batch_size(static_cast<size_t>(options.batch_size))
            .workers(static_cast<size_t>(options.num_workers)));
    rate = Measure(options.passes, count, [&](int64_t) {
      for (const auto& batch : *loader) count.Add(batch.target);
    });
  }
  const nlohmann::json report = {
      {"examples_per_s", rate}, {"examples", count.examples}, {"labels", count.labels}};
  std::printf("%s\n", report.dump().c_str());
  return absl::OkStatus();
}

}  // namespace
}  // namespace ddp::tools

int main(int argc, char** argv) {
  using namespace ddp;
  tools::ProgramOptions options;
  const OptionList list = ListOptions(options);
  const absl::StatusOr<OptionFlags> flags = OptionFlags::Parse(argc, argv, list);
  absl::Status status = flags.status();
  if (status.ok()) status = list.Validate();
  if (status.ok()) status = CatchStatus("", [&] { return tools::Run(options); });
  if (status.ok()) return 0;
  std::fprintf(
      stderr, "error: %s\n",
      flags.ok() ? flags->Explain(status, list).c_str() : std::string(status.message()).c_str());
  return 1;
}
