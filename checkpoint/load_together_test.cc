// Loads of files that rank 0 has written, by several ranks: each byte is read once.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/coordinator.h"
#include "base/coordinator_testing.h"
#include "base/file.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "checkpoint/parts.h"
#include "checkpoint/state_testing.h"

namespace ddp::checkpoint {
namespace {

constexpr int kRanks = 3;

class LoadTogetherTest : public testing::Test {
 protected:
  LoadTogetherTest() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ = absl::StrCat(testing::TempDir(), "/load_together_test_", info->name());
    std::filesystem::remove_all(directory_);
  }
  std::string Path(absl::string_view name) const { return absl::StrCat(directory_, "/", name); }

  std::string directory_;
};

// Other ranks have no such file: they get what rank 0 has read.
TEST_F(LoadTogetherTest, Rank0ReadsForAll) {
  State state;
  c10::impl::GenericDict model = NewTree(), optimizer = NewTree();
  const at::Tensor tied = at::arange(12, at::kBFloat16).reshape({3, 4}).t();
  model.insert("embed", tied);
  model.insert("head", tied);
  optimizer.insert("exp_avg", at::arange(24, at::kFloat).reshape({4, 6}));
  optimizer.insert("step", 3.5);
  state.root.insert("model", model);
  state.root.insert("optimizer", optimizer);
  state.root.insert("rates", c10::List<double>({0.1, 0.2}));
  ASSERT_TRUE(MakeDirectories(directory_).ok());
  const auto pt = CreateFormat("pt").value();
  ASSERT_TRUE(pt->Write(state, Path("all.pt")).ok());
  state.root.insert("phase", at::arange(2, at::kFloat).to(at::kComplexFloat));
  state.root.insert("number", c10::complex<double>(1, 2));
  ASSERT_TRUE(pt->Write(state, Path("unsendable.pt")).ok());
  RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
    const FormatOptions formats{.ranks = &ranks, .broadcast = BroadcastOver(ranks)};
    const auto path = [&](const std::string& name) {
      return Path(ranks.rank() == 0 ? name : absl::StrCat("nowhere/", name));
    };
    const auto all = Manager::Load(path("all.pt"), {}, formats);
    ASSERT_TRUE(all.ok()) << all.status();
    const State expected = pt->Read(Path("all.pt")).value();
    EXPECT_EQ(Difference(expected.root, all->root), "");

    ReadRequest request{.all_else = true};
    const int64_t begin = 8 * ranks.rank();
    request.parts["optimizer/exp_avg"] = FlatRange{begin, begin + 8};
    const auto cut = Manager::Load(path("all.pt"), request, formats);
    ASSERT_TRUE(cut.ok()) << cut.status();
    EXPECT_EQ(cut->root.at("optimizer").toGenericDict().size(), 1u);
    EXPECT_TRUE(at::equal(cut->sharded.at("optimizer/exp_avg").parts[0].tensor,
                          at::arange(begin, begin + 8, at::kFloat)));

    const auto some = Manager::Load(path("all.pt"), {.parts = {{"rates", Whole{}}}}, formats);
    ASSERT_TRUE(some.ok()) << some.status();
    EXPECT_EQ(some->root.size(), 1u);

    // What cannot be sent, and what they do not all want, each reads.
    const auto unsendable = Manager::Load(path("unsendable.pt"), {}, formats);
    EXPECT_EQ(unsendable.status().code(),
              ranks.rank() == 0 ? absl::StatusCode::kOk : absl::StatusCode::kNotFound);
    ReadRequest own;
    own.parts[ranks.rank() == 0 ? "rates" : "model"] = Whole{};
    EXPECT_TRUE(Manager::Load(Path("all.pt"), own, formats).ok());
    const absl::Status missing = Manager::Load(Path("missing.pt"), {}, formats).status();
    EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound) << missing;
  });
}

// Each chunk of a file is read by one rank, here of copies of it that differ.
TEST_F(LoadTogetherTest, RanksReadAFileTogether) {
  State state;
  // 20 MiB, a chunk of each of three ranks; parts of one storage, as weights are with ZeRO.
  const at::Tensor flat = at::arange(6 << 20, at::kInt);
  const at::Tensor large = flat.narrow(0, 0, 5 << 20);
  const at::Tensor other = at::arange(100'000, at::kDouble);
  state.root.insert("large", large);
  state.root.insert("next", flat.narrow(0, 5 << 20, 100'000));
  state.root.insert("transposed", other.view({100, 1000}).t());
  state.root.insert("inside", other.narrow(0, 10, 80'000));
  state.root.insert("twice", other);
  state.root.insert("alone", at::arange(1'000'000, at::kFloat));
  state.root.insert("small", at::arange(10, at::kFloat));
  ASSERT_TRUE(MakeDirectories(directory_).ok());
  const auto pt = CreateFormat("pt").value();
  ASSERT_TRUE(pt->Write(state, Path("0.pt")).ok());
  const std::string bytes = ReadFile(Path("0.pt")).value();
  const auto place_of = [&](int64_t element) {  // of `large`
    const at::Tensor some = large.narrow(0, element, 8);
    return bytes.find(std::string(static_cast<const char*>(some.const_data_ptr()), some.nbytes()));
  };
  const int64_t chunk = 2 << 20;  // elements
  for (int damaged = -1; damaged < kRanks; ++damaged) {
    for (int rank = 0; rank < kRanks; ++rank) {
      std::string copy = bytes;
      for (int of = 0; of < kRanks; ++of) {
        if (of != rank || rank == damaged) copy[place_of(of * chunk + 5)] ^= 1;
      }
      ASSERT_TRUE(WriteFileAtomically(Path(absl::StrCat(rank, ".pt")), copy).ok());
    }
    RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
      const FormatOptions formats{.ranks = &ranks, .broadcast = BroadcastOver(ranks)};
      const std::string mine = Path(absl::StrCat(ranks.rank(), ".pt"));
      ReadRequest cut{.all_else = true};
      cut.parts["large"] = FlatRange{ranks.rank() * 1000, ranks.rank() * 1000 + 1000};
      for (const bool parts : {false, true}) {
        const auto read = Manager::Load(mine, parts ? cut : ReadRequest(), formats);
        if (damaged >= 0) {
          EXPECT_EQ(read.status().code(), absl::StatusCode::kDataLoss) << read.status();
          EXPECT_TRUE(absl::StrContains(read.status().message(), "CRC-32: tensor 'large'"))
              << read.status();
          continue;
        }
        ASSERT_TRUE(read.ok()) << read.status();
        State expected = state;
        if (parts) {
          expected.root = expected.root.copy();
          (void)expected.root.erase("large");
          EXPECT_TRUE(at::equal(read->sharded.at("large").parts[0].tensor,
                                large.narrow(0, ranks.rank() * 1000, 1000)));
        }
        EXPECT_EQ(Difference(expected.root, read->root), "");
      }
    });
  }
}

TEST_F(LoadTogetherTest, RanksThatAskForOtherThingsGetThem) {
  State state;
  state.root.insert("epoch", 1);
  state.root.insert("moment", at::arange(10, at::kFloat));
  ASSERT_TRUE(MakeDirectories(directory_).ok());
  ASSERT_TRUE(CreateFormat("pt").value()->Write(state, Path("all.pt")).ok());
  RunCoordinatedRanks(kRanks, [&](const Coordinator& ranks) {
    const std::string key = ranks.rank() == 1 ? "moment" : "epoch";
    ReadRequest request;
    request.parts[key] = Whole{};
    const FormatOptions formats{.ranks = &ranks, .broadcast = BroadcastOver(ranks)};
    const auto read = Manager::Load(Path("all.pt"), request, formats);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->root.size(), 1u);
    EXPECT_TRUE(read->root.contains(key)) << ranks.rank();
  });
}

}  // namespace
}  // namespace ddp::checkpoint
