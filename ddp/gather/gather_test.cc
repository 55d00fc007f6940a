// Gather, broadcast, reduction and comparison of nested values that differ by rank.

#include "ddp/gather/gather.h"

#include <barrier>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "ddp/data/sampler.h"
#include "ddp/gather/all_agree.h"
#include "ddp/gather/gather_for_metrics.h"
#include "ddp/nets_testing.h"
#include "ddp/tree/random_tree_testing.h"

namespace ddp {
namespace {

using absl::StrContains;
using testing_trees::Fingerprint;
using testing_trees::MakeRandomTree;
using testing_trees::RandomTree;

constexpr int kRanks = 3;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(GatherTest, RandomValuesThatDifferByRankArriveEverywhere) {
  RunRanks(kRanks, [](int rank, const GroupPtr& group) {
    for (uint64_t seed = 0; seed < 60; ++seed) {
      const auto of_rank = [&](int r) { return MakeRandomTree(1000 * seed + r); };
      const RandomTree mine = of_rank(rank);
      const absl::StatusOr<std::vector<RandomTree>> all = AllGather(group, mine);
      ASSERT_TRUE(all.ok()) << all.status();
      ASSERT_EQ(all->size(), kRanks);
      const int root = static_cast<int>(seed % kRanks);
      const absl::StatusOr<std::vector<RandomTree>> here = Gather(group, mine, root);
      ASSERT_TRUE(here.ok()) << here.status();
      ASSERT_EQ(here->size(), rank == root ? kRanks : 0);
      for (int r = 0; r < kRanks; ++r) {
        const std::string expected = Fingerprint(of_rank(r));
        EXPECT_EQ(Fingerprint((*all)[r]), expected) << "seed " << seed;
        if (rank == root) {
          EXPECT_EQ(Fingerprint((*here)[r]), expected) << "seed " << seed;
        }
      }
      const absl::StatusOr<RandomTree> roots = BroadcastObject(group, mine, root);
      ASSERT_TRUE(roots.ok()) << roots.status();
      EXPECT_EQ(Fingerprint(*roots), Fingerprint(of_rank(root))) << "seed " << seed;
    }
  });
}

// Sizes for each way to send: padded, one broadcast per rank, point to point.
TEST(GatherTest, SizesMayDifferMuch) {
  RunRanks(kRanks, [](int rank, const GroupPtr& group) {
    const std::vector<std::vector<int64_t>> cases = {{0, 0, 0},      {1, 0, 0},
                                                     {0, 300000, 0}, {300000, 0, 300001},
                                                     {0, 7, 900000}, {200000, 200000, 200000}};
    for (const std::vector<int64_t>& sizes : cases) {
      const auto value = [&](int r) { return at::arange(sizes[r], at::kInt) + r; };
      const auto all = AllGather(group, value(rank));
      ASSERT_TRUE(all.ok()) << all.status();
      for (int r = 0; r < kRanks; ++r) EXPECT_TRUE(at::equal((*all)[r], value(r)));
      for (int dst = 0; dst < kRanks; ++dst) {
        const auto here = Gather(group, value(rank), dst);
        ASSERT_TRUE(here.ok()) << here.status();
        for (size_t r = 0; r < here->size(); ++r) EXPECT_TRUE(at::equal((*here)[r], value(r)));
        EXPECT_EQ(here->size(), rank == dst ? kRanks : 0);
      }
    }
  });
}

struct Cameras {
  at::Tensor rotation;  // [n, 3, 3]
  at::Tensor visible;   // [n] bool
  std::vector<std::string> names;
  std::map<std::string, std::pair<at::Tensor, std::vector<std::optional<double>>>> more;
  c10::IValue extra;  // a tensor [n, 2], and a list of n
};
constexpr auto FieldsOf(const Cameras&) {
  return Fields(Field("rotation", &Cameras::rotation), Field("visible", &Cameras::visible),
                Field("names", &Cameras::names), Field("more", &Cameras::more),
                Field("extra", &Cameras::extra));
}

Cameras CamerasOf(const std::vector<int64_t>& indices) {
  Cameras cameras;
  const auto n = static_cast<int64_t>(indices.size());
  const at::Tensor index = at::tensor(at::IntArrayRef(indices), at::kLong);
  cameras.rotation = index.to(at::kBFloat16).view({n, 1, 1}).expand({n, 3, 3});
  cameras.visible = index.remainder(2).eq(0);
  auto& [tensor, numbers] = cameras.more["depth"];
  tensor = index.to(at::kDouble) / 3;
  c10::List<std::string> list;
  for (const int64_t i : indices) {
    cameras.names.push_back(absl::StrCat("camera ", i));
    numbers.push_back(i % 3 == 0 ? std::nullopt : std::optional(0.5 * static_cast<double>(i)));
    list.push_back(std::string(i, 'x'));
  }
  cameras.extra = c10::ivalue::Tuple::create({at::stack({index, -index}, 1), list});
  return cameras;
}

std::vector<int64_t> UpTo(int64_t n) {
  std::vector<int64_t> indices(n);
  for (int64_t i = 0; i < n; ++i) indices[i] = i;
  return indices;
}

TEST(GatherForMetricsTest, EachExampleOnceInDatasetOrder) {
  RunRanks(kRanks, [](int rank, const GroupPtr& group) {
    for (const int64_t size : {1, 2, 3, 10, 11}) {
      const std::string expected = Fingerprint(CamerasOf(UpTo(size)));
      // Blocks; with fewer examples than ranks, some ranks have none.
      const auto blocks =
          *data::EvaluationSampler::Create(size, {.num_replicas = kRanks, .rank = rank});
      auto all = GatherForMetrics(group, blocks.Indices(), CamerasOf(blocks.Indices()));
      ASSERT_TRUE(all.ok()) << all.status();
      EXPECT_EQ(Fingerprint(*all), expected) << size;
      // Shuffled, and padded with examples of other ranks.
      auto shuffled = *data::DistributedSampler::Create(
          size, {.num_replicas = kRanks, .rank = rank, .seed = 5});
      all = GatherForMetrics(group, shuffled.Indices(), CamerasOf(shuffled.Indices()));
      ASSERT_TRUE(all.ok()) << all.status();
      EXPECT_EQ(Fingerprint(*all), expected) << size;
      // Without the examples of rank 1, whose value is an empty one.
      const std::vector<int64_t> mine = rank == 1 ? std::vector<int64_t>() : blocks.Indices();
      all = GatherForMetrics(group, mine, rank == 1 ? Cameras() : CamerasOf(mine));
      ASSERT_TRUE(all.ok()) << all.status();
      const auto of_rank_1 =
          *data::EvaluationSampler::Create(size, {.num_replicas = kRanks, .rank = 1});
      std::vector<int64_t> others;
      for (const int64_t i : UpTo(size)) {
        const std::vector<int64_t> missing = of_rank_1.Indices();
        if (std::find(missing.begin(), missing.end(), i) == missing.end()) others.push_back(i);
      }
      EXPECT_EQ(Fingerprint(*all), Fingerprint(CamerasOf(others))) << size;
    }
  });
}

// In batches, of which the ranks have different numbers, or none.
TEST(GatherForMetricsTest, BatchAfterBatch) {
  RunRanks(kRanks, [](int rank, const GroupPtr& group) {
    for (const int64_t size : {0, 1, 2, 10, 11}) {
      std::vector<std::pair<std::vector<int64_t>, Cameras>> batches;
      for (int64_t i = 0; i < size; i += 3) {
        if (i / 3 % 2 + 1 != rank) continue;  // rank 0 has none
        std::vector<int64_t> indices;
        for (int64_t k = i; k < std::min(i + 3, size); ++k) indices.push_back(k);
        batches.emplace_back(indices, CamerasOf(indices));
      }
      const auto all = GatherForMetrics(group, batches);
      ASSERT_TRUE(all.ok()) << all.status();
      EXPECT_EQ(Fingerprint(*all), Fingerprint(size > 0 ? CamerasOf(UpTo(size)) : Cameras()));
    }
  });
}

TEST(GatherForMetricsTest, NoExamplesAtAll) {
  RunRanks(kRanks, [](int, const GroupPtr& group) {
    const auto none = GatherForMetrics(group, {}, std::vector<std::string>());
    ASSERT_TRUE(none.ok()) << none.status();
    EXPECT_TRUE(none->empty());
    // Examples of no elements.
    const auto rows = GatherForMetrics(group, {group->getRank()}, at::ones({1, 0, 2}, at::kHalf));
    ASSERT_TRUE(rows.ok()) << rows.status();
    EXPECT_EQ(rows->sizes(), at::IntArrayRef({kRanks, 0, 2}));
  });
}

TEST(GatherForMetricsTest, ErrorsNameThePartAndTheRankOnAllRanks) {
  RunRanks(kRanks, [](int rank, const GroupPtr& group) {
    const auto problem = [&](auto value) {
      const absl::Status status = GatherForMetrics(group, {rank, rank + 3}, value).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      return Message(status);
    };
    using Map = std::map<std::string, at::Tensor>;
    EXPECT_EQ(problem(Map{{"y", at::ones({rank == 2 ? 3 : 2})}}),
              "value[\"y\"] has 3 rows on rank 2 for 2 indices");
    EXPECT_EQ(problem(Map{{"y", at::ones({2, rank == 1 ? 5 : 4})}}),
              "value[\"y\"] differs: Float rows of [4] on rank 0, Float rows of [5] on rank 1");
    EXPECT_EQ(problem(Map{{"y", at::ones({2}, rank == 1 ? at::kLong : at::kInt)}}),
              "value[\"y\"] differs: Int rows of [] on rank 0, Long rows of [] on rank 1");
    EXPECT_EQ(problem(Map{{rank == 1 ? "y" : "z", at::ones({2})}}),
              "value[\"z\"] differs: rank 1 has no such key, unlike rank 0");
    EXPECT_EQ(problem(std::vector<int>(rank + 1)), "value has 1 elements on rank 0 for 2 indices");
    EXPECT_TRUE(StrContains(problem(std::pair(at::ones({2}), 3.0)), "value[1] has no examples"));
    EXPECT_TRUE(StrContains(problem(at::ones({})), "value has no examples"));
    EXPECT_EQ(problem(rank == 2 ? std::optional<std::vector<int>>() : std::vector<int>(2)),
              "value differs: rank 2 has no value, unlike rank 0");
    EXPECT_EQ(problem(rank == 0 ? c10::IValue(1) : c10::IValue("a")),
              "value differs: rank 1 has another type, unlike rank 0");
    EXPECT_EQ(Message(GatherForMetrics(group, {rank - 1}, std::vector<int>(1)).status()),
              "rank 0: index -1 is negative");
  });
}

TEST(GatherTest, OneRanksValueThatCannotTravelIsAnErrorOnAll) {
  RunRanks(kRanks, [](int rank, const GroupPtr& group) {
    std::vector<std::map<std::string, at::Tensor>> value = {{}, {{"x", at::ones({2})}}};
    if (rank == 1) value[1]["x"] = at::eye(2).to_sparse();
    const char* expected = "rank 1: value[1][\"x\"] cannot be sent: it is a Sparse tensor";
    for (const absl::Status& status :
         {AllGather(group, value).status(), Gather(group, value, 2).status(),
          BroadcastObject(group, value, 1).status(),
          GatherForMetrics(group, {rank}, value).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_TRUE(StrContains(absl::StrReplaceAll(status.message(), {{".second", ""}}),
                              "cannot be sent: it is a Sparse tensor"))
          << status;
    }
    EXPECT_EQ(Message(AllGather(group, value).status()), expected);
    // Rank 1's value is not looked at here. And the group still works.
    const auto zeros = BroadcastObject(group, value, 0);
    ASSERT_TRUE(zeros.ok()) << zeros.status();
    EXPECT_TRUE(at::equal((*zeros)[1].at("x"), at::ones({2})));
    EXPECT_EQ(AllGather(group, rank)->at(2), 2);
  });
}

TEST(GatherTest, WrongCallsAreErrors) {
  RunRanks(kRanks, [](int rank, const GroupPtr& group) {
    EXPECT_EQ(Message(Gather(group, 1, 3).status()),
              "rank 0: dst=3 is not a rank: the group has 3");
    const absl::Status wrong = Gather(group, 1, rank == 1 ? 99 : 0).status();
    EXPECT_EQ(wrong.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(Message(wrong), "rank 1: dst=99 is not a rank: the group has 3");
    EXPECT_EQ(Message(BroadcastObject(group, 1, -1).status()),
              "src=-1 is not a rank: the group has 3");
    const absl::Status to = Gather(group, 1, rank == 2 ? 1 : 0).status();
    EXPECT_EQ(to.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(Message(to), "rank 0 gathers to rank 0, but rank 2 to rank 1");
    // Different types.
    const absl::Status type = rank == 1 ? AllGather(group, std::string("text")).status()
                                        : AllGather(group, at::ones({2})).status();
    EXPECT_EQ(type.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(StrContains(type.message(), rank == 1 ? "from rank 0" : "from rank 1")) << type;
  });
}

TEST(GatherTest, AFailureOfCommunicationIsAStatus) {
  std::barrier gathered(kRanks);
  RunRanks(kRanks, [&](int rank, const GroupPtr& group) {
    EXPECT_TRUE(AllGather(group, rank).ok());
    gathered.arrive_and_wait();  // of a group of groups, another rank may still be in it
    group->abort();
    EXPECT_FALSE(AllGather(group, rank).ok());
    EXPECT_FALSE(BroadcastObject(group, rank, 0).ok());
    EXPECT_FALSE(AllAgree(group, {{"x", at::ones({2})}}).ok());
  });
}

TEST(GatherTest, AWorldOfOneNeedsNoGroup) {
  const at::Tensor tensor = at::ones({2}).requires_grad_();
  const auto all = AllGather(nullptr, tensor);
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->size(), 1);
  EXPECT_TRUE(at::equal(all->at(0), tensor));
  EXPECT_FALSE(all->at(0).is_alias_of(tensor));
  EXPECT_EQ(Gather(nullptr, 5, 0)->at(0), 5);
  EXPECT_EQ(*BroadcastObject(nullptr, std::string("x"), 0), "x");
  EXPECT_EQ(Message(AllGather(nullptr, at::eye(2).to_sparse()).status()),
            "value cannot be sent: it is a Sparse tensor");
  EXPECT_EQ(*GatherForMetrics(nullptr, {2, 0, 2}, std::vector<int>{20, 0, 21}),
            (std::vector<int>{0, 20}));
  EXPECT_TRUE(AllAgree(nullptr, {{"x", tensor}}).ok());
  EXPECT_EQ(ReduceDict(nullptr, {{"a", 2.0}}, DictReduction::kMean)->at("a"), 2.0);
}

TEST(ReduceDictTest, MeanAndSumAreTheSameBitsOnAllRanks) {
  RunRanks(kRanks, [](int rank, const GroupPtr& group) {
    const std::map<std::string, double> mine = {{"acc", 0.1 * rank}, {"loss", rank + 1.0}};
    const auto sum = ReduceDict(group, mine, DictReduction::kSum);
    ASSERT_TRUE(sum.ok()) << sum.status();
    EXPECT_EQ(*sum, (std::map<std::string, double>{{"acc", 0.0 + 0.1 + 0.2}, {"loss", 6}}));
    EXPECT_EQ(ReduceDict(group, mine, DictReduction::kMean)->at("loss"), 2);
    EXPECT_TRUE(ReduceDict(group, {}, DictReduction::kMean)->empty());

    std::map<std::string, double> other = mine;
    if (rank == 1) other.erase("acc");
    absl::Status status = ReduceDict(group, other, DictReduction::kSum).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(Message(status), "'acc' is on rank 0, but not on rank 1");
    other = mine;
    if (rank == 2) other["zoom"] = 1;
    EXPECT_EQ(Message(ReduceDict(group, other, DictReduction::kSum).status()),
              "'zoom' is on rank 2, but not on rank 0");
  });
}

NamedTensors SomeTensors() {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  NamedTensors tensors = {{"weight", at::arange(12, at::kFloat).view({3, 4}).t()},
                          {"nan", at::full({3}, nan, at::kDouble)},
                          {"half", at::zeros({5}, at::kHalf)},
                          {"flags", at::ones({7}, at::kBool)},
                          {"undefined", at::Tensor()},
                          {"scalar", at::zeros({}, at::kBFloat16)},
                          {"empty", at::zeros({0, 3})},
                          // Longer than one message.
                          {"large", at::zeros({(17 << 20) / 8}, at::kLong)},
                          {"sparse", at::eye(3).to_sparse()}};
  return tensors;
}

TEST(AllAgreeTest, OneFlippedBitIsFoundAndNamed) {
  RunRanks(kRanks, [](int rank, const GroupPtr& group) {
    const absl::Status equal = AllAgree(group, SomeTensors());
    EXPECT_TRUE(equal.ok()) << equal;
    std::mt19937_64 random(7);
    for (const auto& [name, original] : SomeTensors()) {
      if (!original.defined() || original.numel() == 0) continue;
      for (uint64_t bit = 0; bit < 8; ++bit) {
        NamedTensors tensors = SomeTensors();
        if (name == "large") {
          bit += 3;
        } else {
          tensors.erase(tensors.begin() + 7);
        }
        const uint64_t place = random(), where = random() % 7 + 1;
        for (auto& [other, tensor] : tensors) {
          if (other != name || (where >> rank & 1) == 0) continue;
          at::Tensor memory = tensor.is_sparse() ? tensor._values() : tensor;
          auto* bytes = static_cast<uint8_t*>(memory.data_ptr());
          bytes[place % memory.nbytes()] ^= 1u << bit;
        }
        const absl::Status status = AllAgree(group, tensors);
        if (where == 7) {  // the same bit on all ranks
          EXPECT_TRUE(status.ok()) << status;
          continue;
        }
        EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
        EXPECT_TRUE(absl::StartsWith(status.message(), absl::StrCat("tensor '", name, "' (")))
            << status;
        std::vector<int> ranks;  // unlike rank 0
        for (int r = 0; r < kRanks; ++r) {
          if ((where >> r & 1) != (where & 1)) ranks.push_back(r);
        }
        const std::string expected =
            ranks.size() == 1 ? absl::StrCat("rank ", ranks[0], " does") : "ranks 1, 2 do";
        EXPECT_TRUE(StrContains(status.message(), expected + " not have rank 0's bits")) << status;
        EXPECT_EQ(StrContains(status.message(), "rank 0 alone has others"), ranks.size() == 2)
            << status;
      }
    }
  });
}

TEST(AllAgreeTest, BitsAreComparedAndNotNumbers) {
  RunRanks(kRanks, [](int rank, const GroupPtr& group) {
    const at::Tensor zero = rank == 1 ? at::full({2}, -0.0) : at::full({2}, 0.0);
    EXPECT_EQ(
        Message(AllAgree(group, {{"zero", zero}})),
        "tensor 'zero' (Float [2]) differs between ranks: rank 1 does not have rank 0's bits");
    at::Tensor nan = at::full({2}, std::nan("1"), at::kDouble);
    EXPECT_TRUE(AllAgree(group, {{"nan", nan}}).ok());
    if (rank == 2) nan = at::full({2}, std::nan("2"), at::kDouble);
    EXPECT_TRUE(StrContains(AllAgree(group, {{"nan", nan}}).message(), "'nan'"));
    // Views of the same numbers in another order of memory.
    const at::Tensor a = at::arange(6).view({2, 3});
    EXPECT_TRUE(AllAgree(group, {{"a", rank == 0 ? a : a.t().contiguous().t()}}).ok());
  });
}

TEST(AllAgreeTest, NamesShapesDtypesAndLayoutsCount) {
  RunRanks(kRanks, [](int rank, const GroupPtr& group) {
    const auto problem = [&](NamedTensors others) {
      NamedTensors tensors = {{"same", at::ones({2})}, {"x", at::ones({3, 3})}};
      const absl::Status status = AllAgree(group, rank == 2 ? others : tensors);
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      return Message(status);
    };
    const at::Tensor same = at::ones({2});
    EXPECT_EQ(
        problem({{"same", same}, {"x", at::ones({9})}}),
        "tensor 1 differs between ranks: 'x' (Float [3, 3]) on rank 0, but 'x' (Float [9]) on "
        "rank 2");
    EXPECT_TRUE(StrContains(problem({{"same", same}, {"x", at::ones({3, 3}, at::kInt)}}), "(Int"));
    EXPECT_TRUE(StrContains(problem({{"same", same}, {"x", at::ones({3, 3}).to_sparse()}}),
                            "Float [3, 3], Sparse with values [9]"));
    EXPECT_TRUE(StrContains(problem({{"same", same}, {"y", at::ones({3, 3})}}), "but 'y'"));
    EXPECT_TRUE(StrContains(problem({{"same", same}}), "but nothing on rank 2"));
    EXPECT_TRUE(StrContains(
        problem({{"same", same}, {"x", at::ones({3, 3})}, {"z", at::ones({1})}}),
        "tensor 2 differs between ranks: nothing on rank 0, but 'z' (Float [1]) on rank 2"));
    // The bits of a tensor before it differ: that is the first.
    EXPECT_TRUE(StrContains(problem({{"same", at::zeros({2})}, {"x", at::ones({9})}}), "'same'"));
    const absl::Status meta =
        AllAgree(group, {{"m", at::empty({1}, at::TensorOptions(at::kMeta))}});
    EXPECT_EQ(meta.code(), absl::StatusCode::kInvalidArgument) << meta;
    const at::Tensor nested = at::_nested_tensor_from_tensor_list({at::ones({2}), at::ones({3})});
    EXPECT_TRUE(StrContains(problem({{"same", same}, {"x", nested}}), "'x' (nested, which cannot"));
    EXPECT_EQ(Message(AllAgree(group, {{"n", nested}})),
              "tensor 'n' is nested, which cannot be compared");
  });
}

}  // namespace
}  // namespace ddp
