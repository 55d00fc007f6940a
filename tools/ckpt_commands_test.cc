#include "tools/ckpt_commands.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "checkpoint/format.h"
#include "checkpoint/state.h"

namespace ddp::tools::ckpt {
namespace {

using checkpoint::CreateFormat;
using checkpoint::NewTree;
using checkpoint::State;

class CkptTest : public testing::Test {
 protected:
  CkptTest() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ = absl::StrCat(testing::TempDir(), "/ckpt_", info->name());
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
  }
  std::string Path(absl::string_view name) const { return absl::StrCat(directory_, "/", name); }

  std::string Save(const State& state, absl::string_view name, absl::string_view format = "pt") {
    const absl::Status status = CreateFormat(format).value()->Write(state, Path(name));
    EXPECT_TRUE(status.ok()) << status;
    return Path(name);
  }

  std::string directory_;
};

State SampleState(int64_t step) {
  State state;
  c10::impl::GenericDict model = NewTree();
  model.insert("fc.weight", at::arange(6, at::kFloat).reshape({2, 3}));
  model.insert("count", at::arange(2, at::kLong));
  state.root.insert("model", model);
  c10::impl::GenericDict optimizer = NewTree();
  optimizer.insert("lr", 0.1);
  optimizer.insert("moments", c10::ivalue::Tuple::create({c10::IValue(at::ones({3})), 7}));
  state.root.insert("optimizer", optimizer);
  state.root.insert("epoch", step / 10);
  state.root.insert("step", step);
  return state;
}

void FlipByte(const std::string& path, absl::string_view where) {
  std::string bytes = ReadFile(path).value();
  const size_t at = bytes.find(where);
  ASSERT_NE(at, std::string::npos);
  bytes[at] = static_cast<char>(bytes[at] ^ 1);
  ASSERT_TRUE(WriteFileAtomically(path, bytes).ok());
}

// The bytes of `tensor`, of which a part stands in a file.
std::string BytesOf(const at::Tensor& tensor) {
  return std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
}

TEST_F(CkptTest, ListsAFolderOldestFirst) {
  Save(SampleState(100), "epoch_10.pt");
  Save(SampleState(25), "epoch_2_step_25.safetensors", "safetensors");
  Save(SampleState(20), "epoch_2.pt");
  Save(SampleState(25), "best.pt");
  ASSERT_TRUE(WriteFileAtomically(Path("epoch_3.pt"), "cut").ok());
  ASSERT_TRUE(WriteFileAtomically(Path("epoch_1.pt.damaged"), "cut").ok());
  ASSERT_TRUE(WriteFileAtomically(Path("metrics.jsonl"), "{}").ok());
  const Report report = List(directory_).value();
  EXPECT_EQ(report.exit_code, 0);
  std::vector<std::string> rows;
  for (const auto& row : report.json["checkpoints"]) {
    rows.push_back(absl::StrCat(row["name"].get<std::string>(), " ", row["step"].dump(), " ",
                                row["format"].get<std::string>(), " ",
                                row["state"].get<std::string>()));
    EXPECT_GT(row["bytes"].get<int64_t>(), 0);
    EXPECT_GT(row["time"].get<int64_t>(), 1'600'000'000);
  }
  const std::vector<std::string> expected = {"epoch_1.pt.damaged null pt damaged",
                                             "epoch_2.pt 20 pt complete",
                                             "epoch_2_step_25.safetensors 25 safetensors complete",
                                             "epoch_3.pt null pt damaged",
                                             "epoch_10.pt 100 pt complete",
                                             "best.pt 25 pt complete"};
  EXPECT_EQ(rows, expected);
  for (const std::string& row : expected) {
    EXPECT_TRUE(absl::StrContains(report.text, row.substr(0, row.find(' ')))) << report.text;
  }
  EXPECT_EQ(report.json["checkpoints"][1]["epoch"].get<int64_t>(), 2);
}

TEST_F(CkptTest, ListsTensors) {
  for (const char* format : {"pt", "safetensors"}) {
    const std::string path = Save(SampleState(3), absl::StrCat("a.", format), format);
    const Report report = List(path).value();
    ASSERT_EQ(report.json["tensors"].size(), 3u) << report.text;
    EXPECT_EQ(report.json["tensors"][0]["name"].get<std::string>(), "model/fc.weight");
    EXPECT_EQ(report.json["tensors"][0]["dtype"].get<std::string>(), "float32");
    EXPECT_EQ(report.json["tensors"][0]["shape"].dump(), "[2,3]");
    EXPECT_EQ(report.json["tensors"][0]["bytes"].get<int64_t>(), 24);
    EXPECT_EQ(report.json["tensors"][2]["name"].get<std::string>(), "optimizer/moments/0");
    EXPECT_EQ(report.json["bytes"].get<int64_t>(), 24 + 16 + 12);
    EXPECT_TRUE(absl::StrContains(report.text, "3 tensors, 52 B\n")) << report.text;
  }
}

TEST_F(CkptTest, WhatIsNotThereIsNamed) {
  for (const auto& report :
       {List(Path("none")), Verify(Path("none.pt")), Diff(Path("none.pt"), Path("none.pt")),
        Convert({.from = Path("none.pt"), .to = Path("b.pt")}), List(directory_),
        Verify(directory_)}) {
    EXPECT_EQ(report.status().code(), absl::StatusCode::kNotFound) << report.status();
    EXPECT_TRUE(absl::StrContains(report.status().message(), directory_)) << report.status();
    EXPECT_FALSE(absl::StrContains(report.status().message(), "\n")) << report.status();
  }
}

TEST_F(CkptTest, VerifyReadsAll) {
  Save(SampleState(1), "epoch_1.pt");
  const std::string flipped = Save(SampleState(2), "epoch_2.pt");
  FlipByte(flipped, BytesOf(at::arange(6, at::kFloat)));
  const std::string folder = Save(SampleState(3), "epoch_3.safetensors", "safetensors");
  FlipByte(folder + "/model.safetensors", BytesOf(at::arange(6, at::kFloat)));
  Save(SampleState(4), "epoch_4.safetensors", "safetensors");
  const Report all = Verify(directory_).value();
  EXPECT_EQ(all.exit_code, 1);
  std::vector<std::string> states;
  for (const auto& row : all.json["checkpoints"]) states.push_back(row["state"].get<std::string>());
  EXPECT_EQ(states, (std::vector<std::string>{"ok", "damaged", "damaged", "ok"})) << all.text;
  EXPECT_TRUE(absl::StrContains(all.text, "tensor 'fc.weight' does not match")) << all.text;
  EXPECT_EQ(Verify(Path("epoch_1.pt"))->exit_code, 0);
  EXPECT_EQ(Verify(flipped)->exit_code, 1);
}

TEST_F(CkptTest, EqualCheckpointsOfTwoFormats) {
  const std::string a = Save(SampleState(3), "a.pt");
  const std::string b = Save(SampleState(3), "b.safetensors", "safetensors");
  for (const auto& [x, y] : {std::pair(a, a), std::pair(a, b), std::pair(b, a)}) {
    const Report report = Diff(x, y).value();
    EXPECT_EQ(report.exit_code, 0) << report.text;
    EXPECT_EQ(report.text, "equal\n");
    EXPECT_TRUE(report.json["equal"].get<bool>());
  }
}

TEST_F(CkptTest, TheFirstAndTheLargestDifference) {
  const std::string a = Save(SampleState(3), "a.pt");
  int number = 0;
  const auto differs = [&](const State& state, absl::string_view text) {
    const Report report = Diff(a, Save(state, absl::StrCat("b", number++, ".pt"))).value();
    EXPECT_EQ(report.exit_code, 1);
    EXPECT_EQ(report.text, text);
    EXPECT_FALSE(report.json["equal"].get<bool>());
    return report.json;
  };
  State state = SampleState(3);
  c10::impl::GenericDict model = state.root.at("model").toGenericDict();
  model.at("fc.weight").toTensor()[0][1] = 1.5;
  model.at("count").toTensor()[1] = -9;
  const auto json = differs(state,
                            "model/fc.weight: 1 of 6 elements differ, by at most 0.5\n"
                            "2 values differ, tensors by at most 10 (model/count)\n");
  EXPECT_EQ(json["first"]["path"].get<std::string>(), "model/fc.weight");
  EXPECT_EQ(json["max_abs"].get<double>(), 10.0);
  model.at("fc.weight").toTensor()[0][0] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(differs(state,
                    "model/fc.weight: 2 of 6 elements differ, by at most nan\n"
                    "2 values differ, tensors by at most nan (model/fc.weight)\n")["max_abs"]
                .get<std::string>(),
            "NaN");
  state = SampleState(3);
  state.root.at("model").toGenericDict().insert_or_assign("fc.weight", at::zeros({3, 2}));
  differs(state, "model/fc.weight: shapes [2, 3] and [3, 2]\n1 value differs\n");
  state.root.at("model").toGenericDict().insert_or_assign("fc.weight",
                                                          at::zeros({2, 3}, at::kHalf));
  differs(state, "model/fc.weight: dtypes float32 and float16\n1 value differs\n");
  (void)state.root.at("model").toGenericDict().erase("fc.weight");
  differs(state, "model/fc.weight: only in the first\n1 value differs\n");
  state = SampleState(3);
  state.root.insert("more", 1);
  differs(state, "more: only in the second\n1 value differs\n");
  state = SampleState(4);
  differs(state, "step: 3 and 4\n1 value differs\n");
}

TEST_F(CkptTest, ConvertsBothWays) {
  const std::string a = Save(SampleState(3), "a.pt");
  const Report report = Convert({.from = a, .to = Path("b.safetensors")}).value();
  EXPECT_TRUE(absl::StrContains(report.text, "3 tensors")) << report.text;
  EXPECT_EQ(report.json["format"].get<std::string>(), "safetensors");
  ASSERT_TRUE(Convert({.from = Path("b.safetensors"), .to = Path("c"), .format = "pt"}).ok());
  EXPECT_EQ(ReadFile(a).value(), ReadFile(Path("c")).value());
  // For Python's torch.distributed.checkpoint, and from there.
  ASSERT_TRUE(Convert({.from = a, .to = Path("for_python"), .format = "dcp"}).ok());
  ASSERT_TRUE(Convert({.from = Path("for_python"), .to = Path("from_python.pt")}).ok());
  EXPECT_EQ(Diff(a, Path("from_python.pt")).value().text, "equal\n");
  // Nothing is replaced.
  EXPECT_EQ(Convert({.from = a, .to = Path("b.safetensors")}).status().code(),
            absl::StatusCode::kAlreadyExists);
  const absl::Status unknown =
      Convert({.from = a, .to = Path("d"), .format = "safetensor"}).status();
  EXPECT_TRUE(absl::StrContains(unknown.message(), "did you mean safetensors")) << unknown;
  const absl::Status unsaid = Convert({.from = a, .to = Path("d.npz")}).status();
  EXPECT_EQ(unsaid.code(), absl::StatusCode::kInvalidArgument) << unsaid;
  EXPECT_FALSE(std::filesystem::exists(Path("d")));
}

TEST_F(CkptTest, ConvertsAPart) {
  const std::string a = Save(SampleState(3), "a.pt");
  ASSERT_TRUE(
      Convert({.from = a, .to = Path("b.safetensors"), .only = "model/*", .dtype = "bfloat16"})
          .ok());
  const State state =
      CreateFormat("safetensors").value()->Read(Path("b.safetensors/model.safetensors")).value();
  const c10::impl::GenericDict model = state.root.at("model").toGenericDict();
  EXPECT_EQ(model.at("fc.weight").toTensor().scalar_type(), at::kBFloat16);
  EXPECT_EQ(model.at("count").toTensor().scalar_type(), at::kLong);
  EXPECT_EQ(List(Path("b.safetensors"))->json["tensors"].size(), 2u);
  for (const ConvertOptions& options :
       {ConvertOptions{.from = a, .to = Path("x.pt"), .only = "nothing*"},
        ConvertOptions{.from = a, .to = Path("x.pt"), .dtype = "int32"},
        ConvertOptions{.from = a, .to = Path("x.pt"), .dtype = "float33"}}) {
    const absl::Status status = Convert(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_FALSE(std::filesystem::exists(Path("x.pt")));
  }
}

TEST_F(CkptTest, WhatCannotBeConvertedLeavesNothing) {
  State state = SampleState(3);
  state.root.insert("wide", at::ones({2}, at::kComplexDouble));
  const std::string a = Save(state, "a.pt");
  const absl::Status status = Convert({.from = a, .to = Path("b.safetensors")}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "'wide'")) << status;
  EXPECT_EQ(ListDirectory(directory_).value(), std::vector<std::string>{"a.pt"});
}

TEST_F(CkptTest, FoldersOfOtherProgramsAreCheckpoints) {
  const std::string own = Save(SampleState(3), "a.safetensors", "safetensors");
  // As if another program had written the weights: without checksums.
  const std::string folder = Path("llm");
  ASSERT_TRUE(MakeDirectories(folder).ok());
  const std::string json = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}     )";
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(json.size());
  ASSERT_TRUE(
      WriteFileAtomically(folder + "/model.safetensors", bytes + json + std::string(8, '\0')).ok());
  EXPECT_EQ(List(folder)->json["tensors"][0]["name"], "model/w");
  const Report report = Verify(folder).value();
  EXPECT_EQ(report.json["checkpoints"][0]["state"].get<std::string>(), "unverified") << report.text;
  EXPECT_EQ(report.exit_code, 0);
  EXPECT_EQ(Diff(folder, own)->exit_code, 1);
}

}  // namespace
}  // namespace ddp::tools::ckpt
