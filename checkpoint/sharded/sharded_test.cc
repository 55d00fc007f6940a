// What the format `sharded` does beyond the conformance suite: several ranks, as threads, and
// hostile manifests.
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
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/coordinator.h"
#include "base/coordinator_testing.h"
#include "base/file.h"
#include "base/runfiles.h"
#include "base/threads_testing.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "checkpoint/safetensors/header.h"
#include "checkpoint/sharded/manifest.h"
#include "checkpoint/sharded/part_reader.h"
#include "checkpoint/sharded/sharded_testing.h"
#include "checkpoint/state.h"
#include "checkpoint/state_testing.h"

namespace ddp::checkpoint::sharded {
namespace {

using nlohmann::json;

// What all of these parts make up.
c10::impl::GenericDict Joined() {
  State state = StateOf(0, 1);
  for (const auto& [path, tensor] : state.sharded) {
    const at::Tensor whole = at::empty(tensor.global_shape, at::TensorOptions(tensor.dtype));
    for (const auto& [part, values] : tensor.parts) {
      CopyPart(values, part, tensor.memory_order, whole);
    }
    EXPECT_TRUE(InsertAt(state.root, path, whole).ok());
  }
  return state.root;
}

TEST_F(ShardedTest, AnyWorldReadsWhatAnyOtherWrote) {
  const c10::impl::GenericDict joined = Joined();
  for (const int from : {1, 2, 3, 4}) {
    ASSERT_TRUE(Save(from).ok()) << Save(from);
    const absl::StatusOr<State> whole = Read();
    ASSERT_TRUE(whole.ok()) << whole.status();
    EXPECT_EQ(Difference(joined, whole->root), "") << from;
    for (const int to : {1, 2, 3, 4}) {
      RunCoordinatedRanks(to, [&](const Coordinator& ranks) {
        const State expected = StateOf(ranks.rank(), to);
        ReadRequest request{.per_rank = PerRank::kOwn};
        for (const auto& [path, tensor] : expected.sharded) {
          std::vector<Part> parts;
          for (const TensorPart& part : tensor.parts) parts.push_back(part.part);
          request.parts[path] = Wanted(parts, tensor.memory_order);
        }
        request.parts["epoch"] = Whole{};
        const auto manager = Manager::Create({.directory = directory_, .format = "sharded"}, ranks);
        ASSERT_TRUE(manager.ok()) << manager.status();
        const auto loaded = (*manager)->LoadNewest(request);
        ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
        const State& state = (*loaded)->state;
        EXPECT_EQ(state.root.at("epoch").toInt(), 3);
        ASSERT_EQ(state.sharded.size(), expected.sharded.size());
        for (const auto& [path, tensor] : expected.sharded) {
          const ShardedTensor& given = state.sharded.at(path);
          EXPECT_EQ(given.dtype, tensor.dtype);
          EXPECT_EQ(given.global_shape, tensor.global_shape);
          ASSERT_EQ(given.parts.size(), tensor.parts.size()) << path;
          for (size_t i = 0; i < tensor.parts.size(); ++i) {
            EXPECT_TRUE(at::equal(given.parts[i].tensor, tensor.parts[i].tensor))
                << path << " of " << from << " ranks, rank " << ranks.rank() << " of " << to;
          }
        }
        // The same world: its own entry; else all that were saved.
        EXPECT_EQ(state.per_rank.size(), from == to ? 1u : static_cast<size_t>(from));
        for (const auto& [of, entries] : state.per_rank) {
          EXPECT_EQ(entries.at("seen").toInt(), 100 + of);
          EXPECT_TRUE(at::equal(entries.at("rng").toTensor(), at::full({16}, of, at::kByte)));
        }
        if (from == to) {
          EXPECT_EQ(state.per_rank.begin()->first, ranks.rank());
        }
      });
    }
  }
}

TEST_F(ShardedTest, EachByteIsWrittenOnceAndRanksWriteAsMuch) {
  ASSERT_TRUE(Save(4).ok());
  uint64_t unique = 0;
  for (const at::Tensor& tensor : {Embedding(), Embedding(), Convolution(), Convolution()}) {
    unique += tensor.nbytes();
  }
  std::map<std::string, uint64_t> by_rank;
  uint64_t all = 0;
  for (const std::string& name : Names()) {
    const uint64_t bytes = std::filesystem::file_size(File(name));
    all += bytes;
    if (absl::StartsWith(name, "rank_")) by_rank[name.substr(0, 10)] += bytes;
  }
  EXPECT_GT(all, unique);
  EXPECT_LT(all, unique + unique / 50);
  ASSERT_EQ(by_rank.size(), 4u);
  // Three have a third of the optimizer's state each. The embedding is cut for four.
  for (const auto& [rank, bytes] : by_rank) EXPECT_LT(bytes, unique * 3 / 10) << rank;
}

TEST_F(ShardedTest, OnlyTheBlocksThatAreNeededAreRead) {
  ASSERT_TRUE(Save(2).ok());
  const Manifest manifest = DecodeManifest(ReadFile(File("manifest.json")).value()).value();
  std::vector<float> values(1 << 20);
  const std::string name = "optimizer.state.embedding.weight.exp_avg";
  PartReader reader(Folder(), manifest);
  ASSERT_TRUE(reader.Read(name, FlatRange{10, 20}, {}, values.data()).ok());
  EXPECT_EQ(values[0], 20);
  EXPECT_EQ(reader.bytes_read(), kBlockBytes);
  ASSERT_TRUE(reader.Read(name, FlatRange{20, 1000}, {}, values.data()).ok());
  EXPECT_EQ(reader.bytes_read(), kBlockBytes) << "the block is kept";
  // In rows of a box, in ascending order: no block twice.
  PartReader rows(Folder(), manifest);
  ASSERT_TRUE(rows.Read(name, Box{{0, 5}, {500, 3}}, {}, values.data()).ok());
  EXPECT_EQ(values[3], 2 * (1501 + 5));
  EXPECT_LE(rows.bytes_read(), 500 * 1501 * 4 + 4 * kBlockBytes);
}

TEST_F(ShardedTest, DamageNamesFileAndTensor) {
  ASSERT_TRUE(Save(3).ok());
  const Manifest manifest = DecodeManifest(ReadFile(File("manifest.json")).value()).value();
  std::mt19937 random(3);
  for (const auto& [name, tensor] : manifest.tensors) {
    for (const StoredPart& part : tensor.parts) {
      const uint64_t bytes = tensor.BytesOf(part.part);
      if (bytes == 0) continue;
      const std::string file = File(manifest.files[part.file].name);
      const auto flip = [&, at = part.offset + random() % bytes] {
        std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
        stream.seekg(static_cast<std::streamoff>(at));
        const char byte = static_cast<char>(stream.get() ^ (1 << at % 8));
        stream.seekp(static_cast<std::streamoff>(at));
        stream.put(byte);
      };
      flip();
      const absl::Status status = Read().status();
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), file)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("'", name, "'"))) << status;
      EXPECT_TRUE(Manager::Load(Folder(), {.parts = {{"epoch", Whole{}}}}).ok() ||
                  absl::StrContains(name, "per_rank"));
      flip();
    }
  }
  EXPECT_TRUE(Read().ok());
}

// What other programs find tensors by.
TEST_F(ShardedTest, DamageInAHeaderIsFound) {
  ASSERT_TRUE(Save(2).ok());
  for (const std::string& name : Names()) {
    if (!absl::StartsWith(name, "rank_")) continue;
    const auto flip = [&] {
      std::fstream stream(File(name), std::ios::in | std::ios::out | std::ios::binary);
      stream.seekg(20);
      const char byte = static_cast<char>(stream.get() ^ 1);
      stream.seekp(20);
      stream.put(byte);
    };
    flip();
    const absl::Status status = Read().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), File(name))) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "its header does not match its checksum"))
        << status;
    flip();
  }
  EXPECT_TRUE(Read().ok()) << Read().status();
}

// Headers are those that Python's HuggingFaceStorageReader needs.
TEST_F(ShardedTest, OtherProgramsFindTensorsAndTheirOffsets) {
  ASSERT_TRUE(Save(2).ok());
  std::map<std::string, std::vector<RankShard>> boxes;
  for (const int rank : {0, 1}) {
    const auto file = FileReader::Open(File(FileName(rank, false)));
    ASSERT_TRUE(file.ok()) << file.status();
    const auto header = safetensors::ReadHeader(*file);
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_EQ(header->metadata.at("format"), "pt");
    const json info = json::parse(header->metadata.at("DCP_SHARDING_INFO"));
    EXPECT_EQ(info.size(), header->tensors.size());
    for (const safetensors::TensorEntry& tensor : header->tensors) {
      boxes[tensor.name].push_back(
          {rank,
           {{},
            Box{info.at(tensor.name).at("saved_offsets").get<std::vector<int64_t>>(),
                tensor.shape}}});
    }
  }
  const std::map<std::string, std::vector<int64_t>> shapes = {
      {"model.embedding.weight", {1500, 1501}},
      {"model.conv.weight", {8, 5, 9, 7}},
      {"model.conv.bias", {8}},
      {"model.steps", {}},
      {"table", {100, 30}}};
  EXPECT_EQ(boxes.size(), shapes.size());
  for (const auto& [name, shape] : shapes) {
    for (RankShard& box : boxes[name]) box.shard.global_shape = shape;
    EXPECT_TRUE(CheckCover(boxes[name]).ok()) << name << ": " << CheckCover(boxes[name]);
  }
}

// As ckpt convert writes it: one process, what several ranks have.
TEST_F(ShardedTest, EntriesOfRanksInTheRootAreTheRanks) {
  ASSERT_TRUE(Save(1, [](int, State& state) {
                state.per_rank.clear();
                c10::impl::GenericList rng(c10::AnyType::get());
                for (const int rank : {0, 1}) rng.push_back(at::full({16}, rank, at::kByte));
                c10::impl::GenericDict entries = NewTree();
                entries.insert("rng", rng);
                state.root.insert("per_rank", entries);
              }).ok());
  EXPECT_EQ(Read()->per_rank.size(), 2u);
  EXPECT_TRUE(Read({.per_rank = PerRank::kNone})->per_rank.empty());
  RunCoordinatedRanks(2, [&](const Coordinator& ranks) {
    const int rank = ranks.rank();
    for (const ReadRequest& request :
         {ReadRequest{.per_rank = PerRank::kOwn},
          ReadRequest{.parts = {{"epoch", Whole{}}}, .per_rank = PerRank::kOwn}}) {
      const FormatOptions formats{.ranks = &ranks, .broadcast = BroadcastOver(ranks)};
      const absl::StatusOr<State> read = Manager::Load(Folder(), request, formats);
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_FALSE(read->root.contains("per_rank"));
      ASSERT_EQ(read->per_rank.size(), 1u);
      EXPECT_TRUE(
          at::equal(read->per_rank.at(rank).at("rng").toTensor(), at::full({16}, rank, at::kByte)));
    }
  });
}

TEST_F(ShardedTest, WhatTheRanksDisagreeOnIsRefused) {
  const auto refused = [&](const std::function<void(int, State&)>& change, absl::string_view what) {
    const absl::Status status = Save(3, change);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
    EXPECT_FALSE(std::filesystem::exists(Folder()));
  };
  refused(
      [](int rank, State& state) {
        if (rank != 1) return;
        state.root.at("model").toGenericDict().insert_or_assign("conv.bias", at::zeros({9}));
      },
      "'model.conv.bias' is not the same on all ranks");
  refused(
      [](int rank, State& state) {
        if (rank == 2) state.per_rank.clear();
      },
      "entries of its own");
  refused(
      [](int rank, State& state) {
        if (rank == 1) state.sharded["more"] = {.global_shape = {0}};
      },
      "rank 1 has other sharded tensors");
  refused(
      [](int rank, State& state) {
        if (rank == 1) state.per_rank.emplace(0, NewTree());
      },
      "must be those of the rank itself");
  refused([](int, State& state) { state.sharded.at("table").parts.clear(); }, "'table'");
  // What rank 0 lacks is not saved; what only rank 0 has, is.
  EXPECT_TRUE(Save(3, [](int rank, State& state) {
                state.root.insert(rank == 0 ? "ours" : "theirs", at::ones({2}));
              }).ok());
  EXPECT_TRUE(Read()->root.contains("ours"));
  EXPECT_FALSE(Read()->root.contains("theirs"));
}

TEST_F(ShardedTest, NamesThatWouldBeEqualDiffer) {
  const SingleRank alone;
  State state;
  c10::impl::GenericDict a = NewTree();
  a.insert("b", at::ones({2}));
  state.root.insert("a", a);
  state.root.insert("a.b", at::zeros({3}));
  state.root.insert("a/b", at::zeros({4}));
  const auto manager = Manager::Create({.directory = directory_, .format = "sharded"}, alone);
  ASSERT_TRUE((*manager)->Save("epoch_1", state).ok());
  EXPECT_EQ(Difference(state.root, Read()->root), "");
}

TEST_F(ShardedTest, BitsOfLazyViewsAreWritten) {
  const SingleRank alone;
  State state;
  const at::Tensor values =
      at::arange(4, at::kFloat).to(at::kComplexDouble) * c10::complex<double>(1, 2);
  state.root.insert("conjugated", values.conj());
  state.root.insert("negative", at::imag(values.conj()));
  const auto manager = Manager::Create({.directory = directory_, .format = "sharded"}, alone);
  const auto saved = (*manager)->Save("epoch_1", state);
  ASSERT_TRUE(saved.ok()) << saved.status();
  const State read = Read().value();
  EXPECT_TRUE(at::equal(read.root.at("conjugated").toTensor(), values.conj().resolve_conj()));
  EXPECT_TRUE(at::equal(read.root.at("negative").toTensor(), -at::imag(values)));
}

// Bytes that this process has read so far.
uint64_t BytesRead() {
  std::ifstream io("/proc/self/io");
  std::string name;
  uint64_t bytes = 0;
  io >> name >> bytes;
  EXPECT_EQ(name, "rchar:");
  return bytes;
}

TEST_F(ShardedTest, RanksReadEachByteOnce) {
  for (const int from : {2, 3}) {
    ASSERT_TRUE(Save(from).ok());
    uint64_t unique = 0;
    for (const std::string& name : Names()) {
      unique += std::filesystem::file_size(File(name));
    }
    for (const int to : {2, 4}) {
      const uint64_t before = BytesRead();
      RunCoordinatedRanks(to, [&](const Coordinator& ranks) {
        const auto manager = Manager::Create(
            {.directory = directory_, .format = "sharded", .broadcast = BroadcastOver(ranks)},
            ranks);
        ReadRequest request{.per_rank = PerRank::kOwn};
        request.parts["model"] = Whole{};
        request.parts["epoch"] = Whole{};
        for (const auto& [path, tensor] : StateOf(ranks.rank(), to).sharded) {
          Wanted& wanted = request.parts[path];
          wanted.parts.clear();
          for (const TensorPart& part : tensor.parts) wanted.parts.push_back(part.part);
          wanted.memory_order = tensor.memory_order;
        }
        const auto loaded = (*manager)->LoadNewest(request);
        ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
        const State& state = (*loaded)->state;
        EXPECT_EQ(Difference(Joined().at("model"), state.root.at("model")), "");
        EXPECT_EQ(state.sharded.size(), 4u);
      });
      // A third of these 18 MB is cut elsewhere at another world size: ranks share blocks.
      EXPECT_LT(BytesRead() - before, unique * 105 / 100) << from << to;
      const uint64_t middle = BytesRead();
      RunCoordinatedRanks(to, [&](const Coordinator& ranks) {
        const auto manager = Manager::Create(
            {.directory = directory_, .format = "sharded", .broadcast = BroadcastOver(ranks)},
            ranks);
        const auto loaded = (*manager)->LoadNewest();
        ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
        EXPECT_EQ(Difference(Joined(), (*loaded)->state.root), "");
      });
      EXPECT_LT(BytesRead() - middle, unique * 105 / 100) << from << to;
    }
  }
}

// One reads them, and the others get what it has read.
TEST_F(ShardedTest, RanksThatShareBlocksGetTheirValues) {
  ASSERT_TRUE(Save(2).ok());
  RunCoordinatedRanks(4, [&](const Coordinator& ranks) {
    const State expected = StateOf(ranks.rank(), 4);
    ReadRequest request{.per_rank = PerRank::kOwn};
    for (const auto& [path, tensor] : expected.sharded) {
      std::vector<Part> parts;
      for (const TensorPart& part : tensor.parts) parts.push_back(part.part);
      request.parts[path] = Wanted(parts, tensor.memory_order);
    }
    const auto manager = Manager::Create(
        {.directory = directory_, .format = "sharded", .broadcast = BroadcastOver(ranks)}, ranks);
    ASSERT_TRUE(manager.ok()) << manager.status();
    const auto loaded = (*manager)->LoadNewest(request);
    ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
    for (const auto& [path, tensor] : expected.sharded) {
      const ShardedTensor& given = (*loaded)->state.sharded.at(path);
      ASSERT_EQ(given.parts.size(), tensor.parts.size()) << path;
      for (size_t i = 0; i < tensor.parts.size(); ++i) {
        EXPECT_TRUE(at::equal(given.parts[i].tensor, tensor.parts[i].tensor))
            << path << ", rank " << ranks.rank();
      }
    }
  });
}

TEST_F(ShardedTest, DamageThatOneRankReadsIsEveryRanks) {
  ASSERT_TRUE(Save(2).ok());
  const Manifest manifest = DecodeManifest(ReadFile(File("manifest.json")).value()).value();
  const StoredPart& part = manifest.tensors.at("model.conv.bias").parts[0];
  std::fstream(File(manifest.files[part.file].name), std::ios::in | std::ios::out)
      .seekp(static_cast<std::streamoff>(part.offset))
      .put('\x7f');
  RunCoordinatedRanks(3, [&](const Coordinator& ranks) {
    const FormatOptions options{.ranks = &ranks, .broadcast = BroadcastOver(ranks)};
    for (const ReadRequest& request : {ReadRequest(), ReadRequest{.parts = {{"model", Whole{}}}}}) {
      const absl::Status status = Manager::Load(Folder(), request, options).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "'model.conv.bias'")) << status;
    }
    // Ranks that do not ask for the same read for themselves.
    ReadRequest request;
    request.parts[ranks.rank() == 1 ? "epoch" : "optimizer"] = Whole{};
    EXPECT_TRUE(Manager::Load(Folder(), request, options).ok());
  });
}

TEST_F(ShardedTest, RanksThatCanStartNoThreadLoadAsWell) {
  ASSERT_TRUE(Save(2).ok());
  RunCoordinatedRanks(3, [&](const Coordinator& ranks) {
    // The threads of all ranks have started.
    ASSERT_TRUE(ranks.Agree(absl::OkStatus()).ok());
    // Made by one; the ranks are threads of one process, so that it holds for all.
    const auto none = ranks.rank() == 1 ? std::make_unique<NoThreads>() : nullptr;
    ASSERT_TRUE(ranks.Agree(absl::OkStatus()).ok());
    const auto loaded =
        Manager::Load(Folder(), {}, {.ranks = &ranks, .broadcast = BroadcastOver(ranks)});
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(Difference(Joined(), loaded->root), "");
    ASSERT_TRUE(ranks.Agree(absl::OkStatus()).ok());
  });
}

// A rank's own parts are read while others still wait for what all want.
TEST_F(ShardedTest, DamageInThePartOfOneRankIsEveryRanks) {
  ASSERT_TRUE(Save(2).ok());
  const std::string path = "optimizer/state/embedding.weight/exp_avg";
  const Manifest manifest = DecodeManifest(ReadFile(File("manifest.json")).value()).value();
  const StoredPart& part = manifest.tensors.at("optimizer.state.embedding.weight.exp_avg").parts[0];
  std::fstream(File(manifest.files[part.file].name), std::ios::in | std::ios::out)
      .seekp(static_cast<std::streamoff>(part.offset + kBlockBytes))
      .write("\x7f\x7f\x7f\x7f", 4);
  RunCoordinatedRanks(2, [&](const Coordinator& ranks) {
    const State own = StateOf(ranks.rank(), 2);
    std::vector<Part> parts;
    for (const TensorPart& part : own.sharded.at(path).parts) parts.push_back(part.part);
    const absl::Status status =
        Manager::Load(Folder(), {.parts = {{"model", Whole{}}, {path, Wanted(parts, {})}}},
                      {.ranks = &ranks, .broadcast = BroadcastOver(ranks)})
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "embedding.weight.exp_avg'")) << status;
  });
}

// The state of testdata/epoch_2.sharded, of rank `rank` of two.
State GoldenStateOf(int rank) {
  State state;
  c10::impl::GenericDict model = NewTree(), own = NewTree(),
                         by_number(c10::IntType::get(), c10::AnyType::get());
  model.insert("conv.weight", at::arange(2 * 3 * 2 * 2, at::kFloat)
                                  .reshape({2, 3, 2, 2})
                                  .contiguous(at::MemoryFormat::ChannelsLast));
  model.insert("conv.bias", at::arange(2, at::kBFloat16));
  by_number.insert(int64_t{0}, "zero");
  state.root.insert("model", model);
  state.root.insert("by number", by_number);
  state.root.insert("epoch", int64_t{2});
  state.root.insert("rate", 0.1);
  state.root.insert("worst", -std::numeric_limits<double>::infinity());
  state.root.insert("pair", c10::ivalue::Tuple::create({c10::IValue(true), c10::IValue()}));
  state.root.insert("phase", at::arange(2, at::kFloat).to(at::kComplexFloat));
  const std::vector<int64_t> order = {0, 2, 3, 1};
  const at::Tensor moment = at::arange(24, at::kFloat).reshape({2, 3, 2, 2}) / 8;
  ShardedTensor& shards = state.sharded["optimizer/state/conv.weight/exp_avg"];
  shards = {.global_shape = {2, 3, 2, 2}, .memory_order = order};
  const std::vector<std::vector<FlatRange>> ranges = {{{0, 5}, {16, 20}}, {{5, 16}, {20, 24}}};
  for (const FlatRange& range : ranges[static_cast<size_t>(rank)]) {
    shards.parts.push_back({range, PartOf(moment, range, order)});
  }
  own.insert("rng", at::full({3}, rank, at::kByte));
  state.per_rank.emplace(rank, own);
  return state;
}

// Pins the bytes on disk: files of earlier versions must stay readable.
TEST_F(ShardedTest, TheBytesAreThoseOfTheGoldenFolder) {
  const absl::StatusOr<std::string> golden =
      Runfile("libtorch_ddp/checkpoint/sharded/testdata/epoch_2.sharded");
  ASSERT_TRUE(golden.ok()) << golden.status();
  RunCoordinatedRanks(2, [&](const Coordinator& ranks) {
    const auto manager = Manager::Create({.directory = directory_, .format = "sharded"}, ranks);
    ASSERT_TRUE(manager.ok()) << manager.status();
    EXPECT_TRUE((*manager)->Save("epoch_1", GoldenStateOf(ranks.rank())).ok());
  });
  ASSERT_EQ(ListDirectory(*golden).value(), ListDirectory(Folder()).value());
  for (const std::string& name : Names()) {
    EXPECT_EQ(ReadFile(absl::StrCat(*golden, "/", name)).value(), ReadFile(File(name)).value())
        << name;
  }
  // Bazel's own files are links.
  const std::string copy = absl::StrCat(directory_, "/golden.sharded");
  std::filesystem::create_directories(copy);
  for (const std::string& name : Names()) {
    std::filesystem::copy_file(absl::StrCat(*golden, "/", name), absl::StrCat(copy, "/", name));
  }
  const absl::StatusOr<State> read = Manager::Load(copy);
  ASSERT_TRUE(read.ok()) << read.status();
  const State expected = GoldenStateOf(0);
  ASSERT_TRUE(InsertAt(expected.root, "optimizer/state/conv.weight/exp_avg",
                       at::arange(24, at::kFloat).reshape({2, 3, 2, 2}) / 8)
                  .ok());
  EXPECT_EQ(Difference(expected.root, read->root), "");
  ASSERT_EQ(read->per_rank.size(), 2u);
  EXPECT_TRUE(at::equal(read->per_rank.at(1).at("rng").toTensor(), at::ones({3}, at::kByte)));
}

TEST_F(ShardedTest, NoLinkLeadsOutOfTheFolder) {
  ASSERT_TRUE(Save(2).ok());
  const std::string outside = absl::StrCat(directory_, "/outside");
  for (const char* name : {"manifest.json", "rank_00000.safetensors", "rank_00001.ranges"}) {
    std::filesystem::rename(File(name), outside);
    std::filesystem::create_symlink(outside, File(name));
    const absl::Status status = Read().status();
    // No damage, for which a run would set the checkpoint aside.
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(
        absl::StrContains(status.message(), absl::StrCat(File(name), " is a symbolic link")))
        << status;
    EXPECT_EQ(CreateFormat("sharded").value()->CheckComplete(Folder()), status);
    std::filesystem::rename(outside, File(name));
  }
  // The folder itself may be one.
  const std::string link = absl::StrCat(directory_, "/link.sharded");
  std::filesystem::create_directory_symlink(Folder(), link);
  EXPECT_TRUE(Manager::Load(link).ok()) << Manager::Load(link).status();
}

// With checksums that are right: a hostile writer's.
TEST_F(ShardedTest, HostileManifestsAreRefused) {
  ASSERT_TRUE(Save(2).ok());
  const std::string good = ReadFile(File("manifest.json")).value();
  const auto refused = [&](const std::function<void(json&)>& change, absl::string_view what,
                           absl::StatusCode code = absl::StatusCode::kDataLoss) {
    ChangeManifest(change);
    const absl::Status status = Read().status();
    EXPECT_EQ(status.code(), code) << what << ": " << status;
    EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), Folder())) << status;
    std::ofstream(File("manifest.json"), std::ios::trunc) << good;
  };
  ChangeManifest([](json&) {});
  ASSERT_TRUE(Read().ok()) << Read().status();
  const json unknown = json::array({json::array({"model", json{{"tensor", "nothing"}}})});
  const std::string bias = "model.conv.bias", table = "table";
  for (const char* name : {"../rank_00000.ranges", "/etc/passwd", "rank_00000.ranges/..", "",
                           "rank_0.ranges", "manifest.json"}) {
    refused([&](json& m) { m["files"][0]["name"] = name; }, "with a file named");
  }
  refused([&](json& m) { m["files"][1]["name"] = m["files"][0]["name"]; }, "a file twice");
  refused([&](json& m) { m["files"][0]["bytes"] = uint64_t{1} << 62; }, "do not fill");
  refused([&](json& m) { m["files"][0]["header_bytes"] = uint64_t{1} << 40; }, "a file without");
  refused([&](json& m) { m["files"].push_back(m["files"][0]); }, "a file twice");
  refused([&](json& m) { m["tensors"][bias]["shape"] = {int64_t{1} << 40}; }, bias);
  refused([&](json& m) { m["tensors"][bias]["shape"] = {int64_t{1} << 62, 4}; }, "no tensor has");
  refused([&](json& m) { m["tensors"][bias]["shape"] = {-8}; }, "has no shape");
  refused([&](json& m) { m["tensors"][bias]["shape"] = {8.0}; }, "has no shape");
  refused([&](json& m) { m["tensors"][bias]["dtype"] = "object"; }, "no known dtype");
  refused([&](json& m) { m["tensors"][bias]["parts"][0]["file"] = 99; }, "not listed");
  refused([&](json& m) { m["tensors"][bias]["parts"][0]["offset"] = 0; }, "lies outside");
  refused([&](json& m) { m["tensors"][bias]["parts"][0]["offset"] = uint64_t{1} << 62; },
          "lies outside");
  refused([&](json& m) { m["tensors"][bias]["parts"][0]["xxh3"] = ""; }, "too few checksums");
  refused([&](json& m) { m["tensors"][bias]["parts"] = json::array(); }, "no rank has any part");
  refused([&](json& m) { m["tensors"][bias]["memory_order"] = {1, 0}; }, "is no order");
  refused(
      [&](json& m) {
        m["tensors"][table]["parts"][0]["box"] = {{0, 0}, {100, 31}};
      },
      "reaches outside");
  refused([&](json& m) { m["tensors"][table]["parts"].erase(1); }, "no rank has");
  refused([&](json& m) { m["tensors"]["again"] = m["tensors"][bias]; }, "do not fill");
  refused([&](json& m) { m["tensors"].erase(bias); }, "do not fill");
  refused([&](json& m) { m["state"] = "x"; }, "no dict");
  refused([&](json& m) { m["state"] = {{"dict", unknown}}; }, "'nothing', which is not there");
  refused([&](json& m) { m["state"] = {{"dict", json::array()}}; }, "does not name");
  refused([&](json& m) { m["state"]["dict"].push_back(m["state"]["dict"][0]); }, "a key twice");
  refused([&](json& m) { m["state"]["dict"][0][1] = {{"set", {1}}}; }, "no known kind");
  refused([&](json& m) { m["per_rank"].push_back(m["per_rank"][0]); }, "entries of each rank");
  refused([&](json& m) { m["world_size"] = 0; }, "world size");
  refused([&](json& m) { m["version"] = 2; }, "a newer release",
          absl::StatusCode::kFailedPrecondition);
  refused([&](json& m) { m["format"] = "zarr"; }, "another format");
  json deep = 1;
  for (int i = 0; i < 150; ++i) deep = json{{"list", json::array({deep})}};
  refused([&](json& m) { m["state"]["dict"][0][1] = deep; }, "too deeply");
  // A part of another tensor that is as large.
  refused(
      [&](json& m) {
        std::swap(m["tensors"][table]["parts"][0]["offset"],
                  m["tensors"][table]["parts"][1]["offset"]);
        std::swap(m["tensors"][table]["parts"][0]["file"], m["tensors"][table]["parts"][1]["file"]);
      },
      "do not match their checksum");
  ASSERT_TRUE(Read().ok()) << Read().status();
}

}  // namespace
}  // namespace ddp::checkpoint::sharded
