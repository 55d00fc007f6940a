#include "tools/datasets/synthetic.h"

#include <ATen/ops/empty.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/option_error.h"

namespace ddp::tools::datasets {
namespace {

constexpr int64_t kTrainSize = 10'000;
constexpr int64_t kTestSize = 2'000;
constexpr float kNoise = 3.0f;

const Registration<DatasetRegistry> kSynthetic("synthetic", DatasetEntry{.load = &MakeSynthetic});

// Counter-based random numbers: value `counter` of stream `stream`, without state. The mixing
// function is SplitMix64's (Steele, Lea, Flood, 2014).
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}
uint64_t Random(uint64_t stream, uint64_t counter) {
  return Mix(stream + (counter + 1) * 0x9e3779b97f4a7c15);
}

// Uniform in [-1, 1), from the upper 24 bits: exact in a float, hence equal on all machines.
float Uniform(uint64_t stream, uint64_t counter) {
  return static_cast<float>(Random(stream, counter) >> 40) * 0x1p-23f - 1.0f;
}

// Streams of one seed. An example's own stream starts from Random(split, index).
enum Stream : uint64_t { kPrototypes, kTrain, kTest };
uint64_t StreamOf(int64_t seed, Stream stream) {
  return Random(Mix(static_cast<uint64_t>(seed)), stream);
}

// Both splits share it.
struct ClassificationProblem {
  std::vector<int64_t> shape;  // of one input
  int64_t values = 1;          // in one input
  int64_t num_classes = 0;
  std::vector<float> prototypes;  // [num_classes, values]
};

class Synthetic : public data::Dataset {
 public:
  Synthetic(std::shared_ptr<const ClassificationProblem> problem, int64_t size, uint64_t stream)
      : problem_(std::move(problem)), size_(size), stream_(stream) {}

  int64_t size() const override { return size_; }

  data::Batch Get(absl::Span<const int64_t> indices) const override {
    const int64_t n = static_cast<int64_t>(indices.size());
    std::vector<int64_t> sizes = {n};
    sizes.insert(sizes.end(), problem_->shape.begin(), problem_->shape.end());
    data::Batch batch{at::empty(sizes, at::kFloat), at::empty({n}, at::kLong)};
    float* input = batch.input.mutable_data_ptr<float>();
    int64_t* target = batch.target.mutable_data_ptr<int64_t>();
    for (int64_t index : indices) {
      const uint64_t example = Random(stream_, static_cast<uint64_t>(index));
      const int64_t label =
          static_cast<int64_t>(Mix(example) % static_cast<uint64_t>(problem_->num_classes));
      const float* prototype = problem_->prototypes.data() + label * problem_->values;
      for (int64_t i = 0; i < problem_->values; ++i) {
        *input++ = prototype[i] + kNoise * Uniform(example, static_cast<uint64_t>(i));
      }
      *target++ = label;
    }
    return batch;
  }

 private:
  const std::shared_ptr<const ClassificationProblem> problem_;
  const int64_t size_;
  const uint64_t stream_;
};

absl::Status TooSmall(absl::string_view option, int64_t value) {
  return absl::InvalidArgumentError(
      absl::StrCat("dataset synthetic: ", option, " is ", value, "; it must be at least 1"));
}

}  // namespace

absl::StatusOr<Splits> MakeSynthetic(const DatasetOptions& options) {
  if (!options.data_dir.empty()) {
    return OptionError("dataset.data_dir", options.data_dir,
                       "has no effect: data set synthetic reads no files");
  }
  const int64_t train_size = options.train_size != 0 ? options.train_size : kTrainSize;
  const int64_t test_size = options.test_size != 0 ? options.test_size : kTestSize;
  if (train_size < 1) return TooSmall("train_size", train_size);
  if (test_size < 1) return TooSmall("test_size", test_size);
  if (options.num_classes < 1) return TooSmall("num_classes", options.num_classes);

  auto problem = std::make_shared<ClassificationProblem>();
  problem->shape = options.input_shape;
  problem->num_classes = options.num_classes;
  for (int64_t size : problem->shape) {
    if (size < 1) return TooSmall("a dimension of input_shape", size);
    problem->values *= size;
  }
  problem->prototypes.resize(problem->num_classes * problem->values);
  const uint64_t stream = StreamOf(options.seed, kPrototypes);
  for (size_t i = 0; i < problem->prototypes.size(); ++i)
    problem->prototypes[i] = Uniform(stream, i);

  Splits splits;
  splits.train = std::make_shared<Synthetic>(problem, train_size, StreamOf(options.seed, kTrain));
  splits.test = std::make_shared<Synthetic>(problem, test_size, StreamOf(options.seed, kTest));
  splits.num_classes = problem->num_classes;
  splits.input_shape = problem->shape;
  return splits;
}

}  // namespace ddp::tools::datasets
