// For the tests of the format `sharded`: a state that several ranks share, and a folder that they
// save it in.
#pragma once

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/coordinator.h"
#include "base/coordinator_testing.h"
#include "base/file.h"
#include "base/xxh3.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "checkpoint/sharded/manifest.h"
#include "checkpoint/state.h"
#include "checkpoint/state_testing.h"

namespace ddp::checkpoint::sharded {

// Larger than kCutFrom: written in rows by all ranks.
inline at::Tensor Embedding() { return at::arange(1500 * 1501, at::kFloat).reshape({1500, 1501}); }

inline at::Tensor Convolution() {
  return at::arange(8 * 5 * 9 * 7, at::kFloat)
      .reshape({8, 5, 9, 7})
      .contiguous(at::MemoryFormat::ChannelsLast);
}

// As ZeRO cuts: several blocks, of which each rank has one consecutive part; the last rank of three
// or more has nothing of the tensor.
inline std::vector<Part> RangesOf(int64_t elements, int rank, int size) {
  const int owners = size > 2 ? size - 1 : size;
  std::vector<Part> ranges;
  const int64_t block = (elements + 2) / 3;
  for (int64_t begin = 0; begin < elements && rank < owners; begin += block) {
    const int64_t end = std::min(elements, begin + block), part = (end - begin) / owners;
    ranges.push_back(
        FlatRange{begin + rank * part, rank + 1 == owners ? end : begin + (rank + 1) * part});
  }
  return ranges;
}

inline ShardedTensor SharesOf(const at::Tensor& whole, const std::vector<int64_t>& order, int rank,
                              int size) {
  ShardedTensor tensor{whole.sizes().vec(), whole.scalar_type(), order, {}};
  for (const Part& part : RangesOf(whole.numel(), rank, size)) {
    tensor.parts.push_back({part, PartOf(whole, part, order)});
  }
  return tensor;
}

// What rank `rank` of `size` has of a state that all of them save.
inline State StateOf(int rank, int size) {
  State state;
  c10::impl::GenericDict model = NewTree(), optimizer = NewTree(), own = NewTree();
  model.insert("embedding.weight", Embedding());
  model.insert("conv.weight", Convolution());
  model.insert("conv.bias", at::arange(8, at::kBFloat16));
  model.insert("steps", at::scalar_tensor(int64_t{17}, at::kLong));
  model.insert("spectrum", at::arange(6, at::kFloat).to(at::kComplexFloat));
  optimizer.insert("param_groups", "…");
  state.root.insert("model", model);
  state.root.insert("optimizer", optimizer);
  state.root.insert("epoch", int64_t{3});
  state.sharded["optimizer/state/embedding.weight/exp_avg"] =
      SharesOf(Embedding() * 2, {}, rank, size);
  state.sharded["optimizer/state/conv.weight/exp_avg"] =
      SharesOf(Convolution() * 2, {0, 2, 3, 1}, rank, size);
  state.sharded["optimizer/state/empty/exp_avg"] = {.global_shape = {0, 3}};
  const int64_t rows = 100 / size;
  const Box box{{rank * rows, 0}, {rank + 1 == size ? 100 - rank * rows : rows, 30}};
  const at::Tensor table = at::arange(3000, at::kInt).reshape({100, 30});
  state.sharded["table"] = {
      .global_shape = {100, 30}, .dtype = at::kInt, .parts = {{box, PartOf(table, box, {})}}};
  own.insert("rng", at::full({16}, rank, at::kByte));
  own.insert("seen", int64_t{100 + rank});
  state.per_rank.emplace(rank, own);
  return state;
}

class ShardedTest : public testing::Test {
 protected:
  ShardedTest() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ = absl::StrCat(testing::TempDir(), "/sharded_test_", info->name());
    std::filesystem::remove_all(directory_);
  }
  std::string Folder() const { return directory_ + "/epoch_1.sharded"; }
  std::vector<std::string> Names() const { return ListDirectory(Folder()).value(); }
  std::string File(absl::string_view name) const { return absl::StrCat(Folder(), "/", name); }

  absl::Status Save(int size, const std::function<void(int rank, State&)>& change = nullptr) {
    std::vector<absl::Status> results(static_cast<size_t>(size));
    RunCoordinatedRanks(size, [&](const Coordinator& ranks) {
      State state = StateOf(ranks.rank(), size);
      if (change) change(ranks.rank(), state);
      const auto manager = Manager::Create({.directory = directory_, .format = "sharded"}, ranks);
      results[static_cast<size_t>(ranks.rank())] =
          manager.ok() ? (*manager)->Save("epoch_1", state).status() : manager.status();
    });
    for (const absl::Status& result : results) EXPECT_EQ(result, results[0]);
    return results[0];
  }

  absl::StatusOr<State> Read(const ReadRequest& request = {}) const {
    return Manager::Load(Folder(), request);
  }

  // Puts a manifest in place, changed, with a checksum that is right.
  void ChangeManifest(const std::function<void(nlohmann::json&)>& change) const {
    nlohmann::json whole = nlohmann::json::parse(ReadFile(File("manifest.json")).value());
    change(whole["manifest"]);
    const std::string text = absl::StrCat("{\"manifest\": ", whole["manifest"].dump());
    std::ofstream(File("manifest.json"), std::ios::trunc)
        << text << ",\n\"xxh3\": \"" << HexOf(Xxh3(text)) << "\"}\n";
  }

  std::string directory_;
};

}  // namespace ddp::checkpoint::sharded
