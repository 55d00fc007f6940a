#include "ddp/data/loader.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "absl/log/log_entry.h"
#include "absl/log/log_sink.h"
#include "absl/log/log_sink_registry.h"
#include "absl/time/time.h"
#include "ddp/data/example_dataset.h"
#include "gtest/gtest.h"

namespace ddp::data {

// A user's examples and batches.
enum class Side : int16_t { kLeft, kRight };
struct Camera {
  at::Tensor rotation;
  std::string name;
  std::optional<at::Tensor> mask;
};
constexpr auto FieldsOf(const Camera&) {
  return Fields(Field("rotation", &Camera::rotation), Field("name", &Camera::name),
                Field("mask", &Camera::mask));
}
struct Pose {
  at::Tensor rotation;
  std::optional<at::Tensor> mask;
};
constexpr auto FieldsOf(const Pose&) {
  return Fields(Field("rotation", &Pose::rotation), Field("mask", &Pose::mask));
}
// Counts by itself.
struct Words {
  at::Tensor tokens;
  int64_t words = 0;
  int64_t size() const { return words; }
};
constexpr auto FieldsOf(const Words&) {
  return Fields(Field("tokens", &Words::tokens), Field("words", &Words::words));
}

namespace {

// Example i is the number i. A test may add something that Get does.
class Numbers : public Dataset {
 public:
  explicit Numbers(int64_t size, std::function<void(absl::Span<const int64_t>)> on_get = {})
      : size_(size), on_get_(std::move(on_get)) {}

  int64_t size() const override { return size_; }

  Batch Get(absl::Span<const int64_t> indices) const override {
    if (on_get_) on_get_(indices);
    const int64_t n = static_cast<int64_t>(indices.size());
    Batch batch{at::empty({n}, at::kFloat), at::empty({n}, at::kLong)};
    for (int64_t i = 0; i < n; ++i) {
      batch.input.mutable_data_ptr<float>()[i] = static_cast<float>(indices[i]);
      batch.target.mutable_data_ptr<int64_t>()[i] = indices[i];
    }
    return batch;
  }

 private:
  int64_t size_;
  std::function<void(absl::Span<const int64_t>)> on_get_;
};

std::vector<int64_t> Range(int64_t n) {
  std::vector<int64_t> indices(n);
  std::iota(indices.begin(), indices.end(), int64_t{0});
  return indices;
}

std::unique_ptr<Loader> MakeLoader(const Dataset& dataset, std::vector<int64_t> indices,
                                   const LoaderOptions& options) {
  auto loader = Loader::Create(dataset, std::move(indices), options);
  EXPECT_TRUE(loader.ok()) << loader.status();
  return *std::move(loader);
}

// The targets of each batch, until the end.
std::vector<std::vector<int64_t>> ReadAll(Loader& loader) {
  std::vector<std::vector<int64_t>> batches;
  while (true) {
    auto batch = loader.Next();
    EXPECT_TRUE(batch.ok()) << batch.status();
    if (!batch.ok() || !batch->has_value()) return batches;
    const at::Tensor& target = (*batch)->target;
    batches.emplace_back(target.const_data_ptr<int64_t>(),
                         target.const_data_ptr<int64_t>() + target.numel());
  }
}

// Lets threads wait for one another, without sleeping.
class Event {
 public:
  void Set() {
    std::lock_guard lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

class LoaderTest : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Workers, LoaderTest, testing::Values(0, 1, 2, 3, 8));

TEST_P(LoaderTest, BatchesComeInOrder) {
  Numbers numbers(1000);
  for (int repeat = 0; repeat < 20; ++repeat) {
    auto loader = MakeLoader(numbers, Range(1000), {.batch_size = 7, .num_workers = GetParam()});
    EXPECT_EQ(loader->num_batches(), 143);
    const auto batches = ReadAll(*loader);
    ASSERT_EQ(batches.size(), 143);
    int64_t expected = 0;
    for (const auto& batch : batches) {
      for (int64_t index : batch) ASSERT_EQ(index, expected++);
    }
    EXPECT_EQ(expected, 1000);
    EXPECT_FALSE(loader->Next()->has_value());  // the end stays the end
  }
}

TEST_P(LoaderTest, TakesIndicesInTheirOrder) {
  Numbers numbers(10);
  auto loader = MakeLoader(numbers, {9, 2, 2, 5}, {.batch_size = 3, .num_workers = GetParam()});
  EXPECT_EQ(ReadAll(*loader), (std::vector<std::vector<int64_t>>{{9, 2, 2}, {5}}));
}

TEST_P(LoaderTest, ShortLastBatchIsKeptOrDropped) {
  Numbers numbers(10);
  for (int64_t size = 0; size <= 10; ++size) {
    LoaderOptions options = {.batch_size = 4, .num_workers = GetParam()};
    auto kept = MakeLoader(numbers, Range(size), options);
    EXPECT_EQ(kept->num_batches(), (size + 3) / 4);
    EXPECT_EQ(ReadAll(*kept).size(), (size + 3) / 4);
    options.drop_last = true;
    auto dropped = MakeLoader(numbers, Range(size), options);
    EXPECT_EQ(dropped->num_batches(), size / 4);
    EXPECT_EQ(ReadAll(*dropped).size(), size / 4);
  }
}

TEST_P(LoaderTest, ExceptionsSurfaceInTheirBatchsPlace) {
  Numbers numbers(100, [](absl::Span<const int64_t> indices) {
    if (indices[0] == 60) throw std::runtime_error("bad sector");
  });
  auto loader = MakeLoader(numbers, Range(100), {.batch_size = 20, .num_workers = GetParam()});
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(loader->Next().ok());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(loader->Next().status().message(),
              "loading batch 4 of 5, example 60 at position 60 of the epoch: bad sector");
  }
}

TEST_P(LoaderTest, APassAfterAFailureBeginsAnew) {
  std::atomic<bool> fails = true;
  Numbers numbers(100, [&](absl::Span<const int64_t> indices) {
    if (fails && indices[0] == 20) throw std::runtime_error("bad sector");
  });
  auto loader = MakeLoader(numbers, Range(100), {.batch_size = 20, .num_workers = GetParam()});
  while (loader->Next().ok()) {
  }
  fails = false;
  ASSERT_TRUE(loader->Begin(ShareOf(Range(100))).ok());
  EXPECT_EQ(ReadAll(*loader).size(), 5u);
}

TEST_P(LoaderTest, AnErrorOfExamplesTogetherNamesTheFirst) {
  Numbers numbers(100, [](absl::Span<const int64_t> indices) {
    if (indices.size() > 1 && indices[0] == 60) throw std::runtime_error("too many");
  });
  auto loader = MakeLoader(numbers, Range(100), {.batch_size = 20, .num_workers = GetParam()});
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(loader->Next().ok());
  EXPECT_EQ(loader->Next().status().message(),
            "loading batch 4 of 5 (20 examples, the first is number 60): too many");
}

TEST_P(LoaderTest, PassesFollowEachOtherWithTheSameWorkers) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  Numbers numbers(100, [&](absl::Span<const int64_t> indices) {
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
    if (indices[0] == 99) throw std::runtime_error("the last");
  });
  auto loader = Loader::Create(numbers, {.batch_size = 4, .num_workers = GetParam()}).value();
  EXPECT_FALSE(loader->Next()->has_value());
  for (int pass = 0; pass < 30; ++pass) {
    const int64_t size = pass % 3 == 0 ? 2 : 40;
    ASSERT_TRUE(loader->Begin(ShareOf(Range(size))).ok());
    EXPECT_EQ(loader->num_batches(), (size + 3) / 4);
    // Every other pass is left in its middle.
    if (pass % 2 == 0) {
      EXPECT_EQ(ReadAll(*loader).size(), (size + 3) / 4);
    } else {
      EXPECT_EQ((*loader->Next())->target[0].item<int64_t>(), 0);
    }
    if (pass % 5 == 0) {  // one that fails ends with the next Begin
      ASSERT_TRUE(loader->Begin(ShareOf({99})).ok());
      EXPECT_FALSE(loader->Next().ok());
    }
  }
  EXPECT_LE(threads.size(), std::max(1, GetParam()));
}

TEST_P(LoaderTest, AnIndexOutsideTheDatasetIsAnErrorOfItsBatch) {
  Numbers numbers(10);
  auto loader = Loader::Create(numbers, {.batch_size = 2, .num_workers = GetParam()}).value();
  ASSERT_TRUE(loader->Begin(ShareOf({0, 1, 2, 10})).ok());
  EXPECT_TRUE(loader->Next().ok());
  EXPECT_EQ(loader->Next().status().message(),
            "loading batch 2 of 2, example 10 at position 3 of the epoch: index 10 is outside a "
            "dataset of 10 examples");
}

TEST(LoaderStallTest, AWaitIsReported) {
  Event reported;
  class Sink : public absl::LogSink {
   public:
    explicit Sink(Event& event) : event_(event) {}
    void Send(const absl::LogEntry& entry) override {
      const std::string text(entry.text_message());
      if (text.find("for batch 2 of 2, which a worker still reads") != std::string::npos) {
        event_.Set();
      }
    }

   private:
    Event& event_;
  } sink(reported);
  absl::AddLogSink(&sink);
  Numbers numbers(2, [&](absl::Span<const int64_t> indices) {
    if (indices[0] == 1) reported.Wait();  // hangs if nothing is said
  });
  auto loader = MakeLoader(numbers, Range(2), {.batch_size = 1, .stall = absl::Milliseconds(10)});
  EXPECT_EQ(ReadAll(*loader).size(), 2);
  absl::RemoveLogSink(&sink);
}

TEST_P(LoaderTest, CanBeDestroyedAtAnyPoint) {
  Numbers numbers(64);
  for (int taken = 0; taken <= 16; ++taken) {
    auto loader = MakeLoader(numbers, Range(64), {.batch_size = 4, .num_workers = GetParam()});
    for (int i = 0; i < taken; ++i) ASSERT_TRUE(loader->Next()->has_value());
  }
}

TEST_P(LoaderTest, RunsAheadByNoMoreThanThePrefetchFactor) {
  if (GetParam() == 0) GTEST_SKIP() << "nothing is prefetched without workers";
  std::atomic<int> begun = 0;
  Numbers numbers(1000, [&](absl::Span<const int64_t>) { ++begun; });
  auto loader = MakeLoader(numbers, Range(1000),
                           {.batch_size = 1, .num_workers = GetParam(), .prefetch_factor = 3});
  for (int taken = 1; taken <= 1000; ++taken) {
    ASSERT_TRUE(loader->Next()->has_value());
    ASSERT_LE(begun, taken + 3 * GetParam());
  }
}

TEST(LoaderPrefetchTest, GathersBeforeItIsAsked) {
  Event second_begun;
  Numbers numbers(4, [&](absl::Span<const int64_t> indices) {
    if (indices[0] == 1) second_begun.Set();
  });
  auto loader = MakeLoader(numbers, Range(4), {.batch_size = 1});
  second_begun.Wait();  // hangs if nothing is prefetched: Next was not called yet
  EXPECT_EQ(ReadAll(*loader).size(), 4);
}

TEST(LoaderPrefetchTest, WorkersRunSideBySide) {
  Event first, second;
  Numbers numbers(2, [&](absl::Span<const int64_t> indices) {
    (indices[0] == 0 ? first : second).Set();
    (indices[0] == 0 ? second : first).Wait();  // hangs if one thread does all
  });
  auto loader = MakeLoader(numbers, Range(2), {.batch_size = 1, .num_workers = 2});
  EXPECT_EQ(ReadAll(*loader).size(), 2);
}

TEST(LoaderThreadsTest, OnlyTheWorkerIsHeldToOneTorchThread) {
  std::thread::id caller = std::this_thread::get_id();
  const auto threads_in_a_new_thread = [] {
    int threads = 0;
    std::thread([&threads] { threads = at::get_num_threads(); }).join();
    return threads;
  };
  at::set_num_threads(3);
  std::atomic<int> in_worker = 0;
  Numbers numbers(1, [&](absl::Span<const int64_t>) {
    EXPECT_NE(std::this_thread::get_id(), caller);
    in_worker = at::get_num_threads();
  });
  auto loader = MakeLoader(numbers, Range(1), {.batch_size = 1});
  EXPECT_EQ(ReadAll(*loader).size(), 1);
  EXPECT_EQ(in_worker, 1);
  EXPECT_EQ(at::get_num_threads(), 3);
  EXPECT_EQ(threads_in_a_new_thread(), 3);
}

TEST(LoaderOptionsTest, AreValidated) {
  Numbers numbers(10);
  EXPECT_EQ(Loader::Create(numbers, {1}, {.batch_size = 0}).status().message(),
            "loader option batch_size is 0; it must be at least 1");
  EXPECT_EQ(Loader::Create(numbers, {1}, {.num_workers = -1}).status().message(),
            "loader option num_workers is -1; it must be at least 0");
  EXPECT_EQ(Loader::Create(numbers, {1}, {.prefetch_factor = 0}).status().message(),
            "loader option prefetch_factor is 0; it must be at least 1");
  EXPECT_EQ(Loader::Create(numbers, {1, 10}, {}).status().message(),
            "index 10 is outside a dataset of 10 examples");
  EXPECT_EQ(Loader::Create(numbers, {-1}, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

template <typename F>
std::string Thrown(F&& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return ExceptionMessage(error);
  }
  return "nothing was thrown";
}

TEST(AnyBatchTest, HoldsOneType) {
  AnyBatch batch(Batch{at::ones({3, 2}), {}});
  EXPECT_TRUE(batch.Is<Batch>());
  EXPECT_EQ(batch.size(), 3);
  EXPECT_EQ(batch.Get<Batch>().input.size(1), 2);
  const std::string message = Thrown([&] { batch.Get<Words>(); });
  EXPECT_NE(message.find("ddp::data::Batch"), std::string::npos) << message;
  EXPECT_NE(message.find("ddp::data::Words"), std::string::npos) << message;
  EXPECT_NE(Thrown([] { AnyBatch().Get<Batch>(); }).find("are of type none"), std::string::npos);
  batch.To(c10::Device(c10::kMeta));
  EXPECT_TRUE(batch.Get<Batch>().input.is_meta());
}

TEST(AnyBatchTest, CountsExamples) {
  EXPECT_EQ(AnyBatch(Words{at::ones({3, 2}), 17}).size(), 17);
  // The size of a vector is not a number of examples.
  EXPECT_EQ(AnyBatch(std::vector<at::Tensor>{at::ones({5}), at::ones({4})}).size(), 5);
  AnyBatch loaded(std::vector<at::Tensor>{at::ones({2, 5})});
  loaded.set_indices({7, 8, 9});
  EXPECT_EQ(loaded.size(), 3);
}

TEST(CollateTest, EachTypeOfTree) {
  using Example = std::tuple<at::Tensor, std::pair<int64_t, float>, std::string, Side, bool,
                             std::array<double, 2>, std::map<std::string, std::vector<at::Tensor>>,
                             std::optional<at::Tensor>, std::vector<uint8_t>, Pose>;
  const auto example = [](int64_t i) {
    const at::Tensor value = at::full({2}, i, at::kLong);
    return Example(value, {i, 0.5f * static_cast<float>(i)}, "name " + std::to_string(i),
                   i == 0 ? Side::kLeft : Side::kRight, i == 1, {1.0 * i, 2.0 * i},
                   {{"a", {value, value + 1}}}, value, {static_cast<uint8_t>(i)}, Pose{value, {}});
  };
  const auto [tensor, numbers, name, side, flag, pair, map, optional, bytes, pose] =
      Collate(std::vector<Example>{example(0), example(1), example(2)});
  const at::Tensor rows = at::arange(3).unsqueeze(1).expand({3, 2});
  EXPECT_TRUE(tensor.equal(rows));
  EXPECT_TRUE(numbers.first.equal(at::arange(3)));
  EXPECT_TRUE(numbers.second.equal(at::arange(3, at::kFloat) / 2));
  EXPECT_EQ(name, (std::vector<std::string>{"name 0", "name 1", "name 2"}));
  EXPECT_EQ(side.scalar_type(), at::kShort);
  EXPECT_EQ(side.sum().item<int64_t>(), 2);
  EXPECT_EQ(flag.scalar_type(), at::kBool);
  EXPECT_EQ(flag.sum().item<int64_t>(), 1);
  EXPECT_TRUE(pair[1].equal(at::arange(3, at::kDouble) * 2));
  EXPECT_TRUE(map.at("a")[1].equal(rows + 1));
  EXPECT_TRUE(optional->equal(rows));
  EXPECT_EQ(bytes[2], std::vector<uint8_t>{2});
  EXPECT_TRUE(pose.rotation.equal(rows));
  EXPECT_FALSE(pose.mask.has_value());
}

TEST(CollateTest, ErrorsNameThePartAndTheExamples) {
  const std::vector<int64_t> indices = {40, 7, 12};
  const auto message = [&](auto examples) {
    return Thrown([&] { Collate(std::move(examples), indices); });
  };
  const at::Tensor a = at::ones({2}), b = at::ones({3});
  EXPECT_NE(message(std::vector<Pose>{{a, {}}, {a, {}}, {b, {}}})
                .find("'example.rotation' has shape [2] in example 40, but [3] in example 12"),
            std::string::npos);
  EXPECT_NE(message(std::vector<Pose>{{a, {}}, {a, a}, {a, {}}})
                .find("'example.mask' has no value in example 40, but has one in example 7"),
            std::string::npos);
  EXPECT_NE(message(std::vector<at::Tensor>{a, a.to(at::kDouble), a})
                .find("has dtype Float in example 40, but Double in example 7"),
            std::string::npos);
  using Map = std::map<std::string, at::Tensor>;
  EXPECT_NE(message(std::vector<Map>{{{"a", a}}, {{"a", a}}, {{"b", a}}})
                .find("'example[\"a\"]' is set in example 40, but is not set in example 12"),
            std::string::npos);
  using List = std::vector<at::Tensor>;
  EXPECT_NE(message(std::vector<List>{{a}, {a, a}, {a}}).find("has 1 elements in example 40"),
            std::string::npos);
}

// What has no default batch is known when it is compiled.
static_assert(std::is_void_v<CollatedType<Camera>>);
static_assert(std::is_same_v<CollatedType<Pose>, Pose>);

class Ragged : public ExampleDatasetOf<at::Tensor> {
 public:
  int64_t size() const override { return 10; }
  at::Tensor Get(int64_t index) const override { return at::ones({index / 5 + 1}); }
};

// Pads.
class Padded : public ExampleDatasetOf<at::Tensor, std::vector<at::Tensor>> {
 public:
  int64_t size() const override { return 10; }
  at::Tensor Get(int64_t index) const override { return at::ones({index + 1}); }
  std::vector<at::Tensor> Collate(std::vector<at::Tensor> examples,
                                  absl::Span<const int64_t> indices) const override {
    EXPECT_EQ(examples.back().size(0), indices.back() + 1);
    return examples;
  }
};

TEST(LoaderTest, LoadsExamplesOfAnyType) {
  const Padded padded;
  auto loader = LoaderOf<std::vector<at::Tensor>>::Create(padded, Range(10), {.batch_size = 4});
  ASSERT_TRUE(loader.ok()) << loader.status();
  EXPECT_EQ((*loader)->num_batches(), 3);
  (void)(*loader)->Next();
  const auto batch = (*loader)->Next();
  ASSERT_TRUE(batch.ok()) << batch.status();
  EXPECT_EQ((**batch)[3].size(0), 8);
  auto wrong = Loader::Create(padded, Range(10), {.batch_size = 4});
  ASSERT_TRUE(wrong.ok()) << wrong.status();
  EXPECT_NE((*wrong)->Next().status().message().find("ddp::data::Batch"), std::string::npos);
}

TEST(LoaderTest, UnequalShapesAreAnErrorOfTheBatch) {
  const Ragged ragged;
  auto loader = AnyLoader::Create(ragged, {1, 2, 3, 9, 4, 5}, {.batch_size = 2});
  ASSERT_TRUE(loader.ok()) << loader.status();
  auto batch = (*loader)->Next();
  ASSERT_TRUE(batch.ok()) << batch.status();
  EXPECT_EQ((*batch)->indices(), (std::vector<int64_t>{1, 2}));
  const absl::Status status = (*loader)->Next().status();
  EXPECT_NE(status.message().find("has shape [1] in example 3, but [2] in example 9"),
            std::string::npos)
      << status;
}

}  // namespace
}  // namespace ddp::data
