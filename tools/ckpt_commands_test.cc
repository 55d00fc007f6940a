#include "tools/ckpt_commands.h"

#include <ATen/Functions.h>
#include <ATen/core/List.h>
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
#include "base/coordinator.h"
#include "base/file.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/folder.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "checkpoint/state.h"
#include "tools/ckpt_values.h"

namespace ddp::tools::ckpt {
namespace {

using checkpoint::CreateFormat;
using checkpoint::Folder;
using checkpoint::Manager;
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

TEST_F(CkptTest, AFolderOfCheckpointsMayHaveTheNameOfOne) {
  for (const std::string name : {"runs.pt", "runs.safetensors", "runs.sharded"}) {
    std::filesystem::create_directories(Path(name));
    Save(SampleState(30), name + "/epoch_3.pt");
    const absl::StatusOr<CommandOutput> listed = List(Path(name));
    ASSERT_TRUE(listed.ok()) << listed.status();
    EXPECT_EQ(listed->json["checkpoints"][0]["name"].get<std::string>(), "epoch_3.pt");
    EXPECT_EQ(Verify(Path(name), {})->exit_code, 0);
  }
}

TEST_F(CkptTest, ListsAFolderOldestFirst) {
  Save(SampleState(100), "epoch_10.pt");
  Save(SampleState(25), "epoch_2_step_25.safetensors", "safetensors");
  Save(SampleState(20), "epoch_2.pt");
  Save(SampleState(25), "best.pt");
  ASSERT_TRUE(WriteFileAtomically(Path("epoch_3.pt"), "cut").ok());
  ASSERT_TRUE(WriteFileAtomically(Path("epoch_1.pt.damaged"), "cut").ok());
  Save(SampleState(120), "epoch_12.safetensors", "safetensors");
  Save(SampleState(130), "epoch_13.pt");
  ASSERT_TRUE(WriteFileAtomically(Path("epoch_14.pt"), "cut").ok());
  for (const char* name : {"epoch_14.pt", "epoch_13.pt", "epoch_12.safetensors"}) {
    ASSERT_TRUE(checkpoint::Manager::FolderAt(directory_).Abandon(name).ok());
  }
  ASSERT_TRUE(WriteFileAtomically(Path("metrics.jsonl"), "{}").ok());
  const CommandOutput output = List(directory_).value();
  EXPECT_EQ(output.exit_code, 0);
  std::vector<std::string> rows;
  for (const auto& row : output.json["checkpoints"]) {
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
                                             "epoch_12.safetensors.abandoned 120 safetensors "
                                             "abandoned",
                                             "epoch_13.pt.abandoned 130 pt abandoned",
                                             "epoch_14.pt.abandoned null pt damaged",
                                             "best.pt 25 pt complete"};
  EXPECT_EQ(rows, expected);
  for (const std::string& row : expected) {
    EXPECT_TRUE(absl::StrContains(output.text, row.substr(0, row.find(' ')))) << output.text;
  }
  EXPECT_EQ(output.json["checkpoints"][1]["epoch"].get<int64_t>(), 2);
  EXPECT_TRUE(absl::StrContains(output.json["checkpoints"][6]["reason"].get<std::string>(),
                                "rolled back past it"));
  // They can be read, and are no longer what a run resumes from, nor renamed again.
  EXPECT_EQ(Verify(Path("epoch_13.pt.abandoned"))->exit_code, 0);
  EXPECT_EQ(List(Path("epoch_12.safetensors.abandoned"))->json["tensors"].size(), 3u);
  const absl::Status pinned = SetPinned(directory_, "epoch_13.pt.abandoned", true).status();
  EXPECT_TRUE(absl::StrContains(pinned.message(), "is abandoned")) << pinned;
  EXPECT_EQ(SetPinned(directory_, "epoch_13", true).status().code(), absl::StatusCode::kNotFound);
  const CommandOutput renamed = Verify(Path("epoch_14.pt.abandoned"), {.quarantine = true}).value();
  EXPECT_FALSE(absl::StrContains(renamed.text, "renamed to")) << renamed.text;
}

TEST_F(CkptTest, ListsTensors) {
  for (const char* format : {"pt", "safetensors"}) {
    const std::string path = Save(SampleState(3), absl::StrCat("a.", format), format);
    const CommandOutput output = List(path).value();
    ASSERT_EQ(output.json["tensors"].size(), 3u) << output.text;
    EXPECT_EQ(output.json["tensors"][0]["name"].get<std::string>(), "model/fc.weight");
    EXPECT_EQ(output.json["tensors"][0]["dtype"].get<std::string>(), "float32");
    EXPECT_EQ(output.json["tensors"][0]["shape"].dump(), "[2,3]");
    EXPECT_EQ(output.json["tensors"][0]["bytes"].get<int64_t>(), 24);
    EXPECT_EQ(output.json["tensors"][2]["name"].get<std::string>(), "optimizer/moments/0");
    EXPECT_EQ(output.json["bytes"].get<int64_t>(), 24 + 16 + 12);
    EXPECT_TRUE(absl::StrContains(output.text, "3 tensors, 52 B\n")) << output.text;
  }
}

// As files of Python's may be: 80 GB, of which the disk has a header and a hole.
TEST_F(CkptTest, TensorsOfAHugeFileAreListed) {
  constexpr uint64_t kBytes = uint64_t{80} << 30;
  std::string json = absl::StrCat(R"({"w":{"dtype":"F32","shape":[)", kBytes / 4,
                                  R"(],"data_offsets":[0,)", kBytes, "]}}");
  json.resize((json.size() + 7) / 8 * 8, ' ');
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(json.size());
  ASSERT_TRUE(WriteFileAtomically(Path("huge.safetensors"), bytes + json).ok());
  std::filesystem::resize_file(Path("huge.safetensors"), 8 + json.size() + kBytes);
  const absl::StatusOr<CommandOutput> output = List(Path("huge.safetensors"));
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_EQ(output->json["tensors"][0]["name"].get<std::string>(), "model/w");
  EXPECT_EQ(output->json["bytes"].get<uint64_t>(), kBytes);
}

TEST_F(CkptTest, DamageInTensorsDoesNotHideThem) {
  for (const std::string format : {"pt", "safetensors", "sharded", "dcp"}) {
    const std::string path = Path(absl::StrCat("a.", format));
    const State state = SampleState(3);
    if (format == "sharded") std::filesystem::create_directories(path);
    const absl::Status written = format == "dcp" ? checkpoint::dcp::WriteCheckpoint(state, path)
                                                 : CreateFormat(format).value()->Write(state, path);
    ASSERT_TRUE(written.ok()) << written;
    const CommandOutput intact = List(path).value();
    ASSERT_EQ(intact.json["tensors"].size(), 3u) << intact.text;
    std::vector<std::string> files = {path};
    if (format != "pt") {
      files = ListDirectory(path).value();
      for (std::string& file : files) file = absl::StrCat(path, "/", file);
    }
    const std::string where = BytesOf(at::arange(6, at::kFloat));
    for (const std::string& file : files) {
      if (absl::StrContains(ReadFile(file).value(), where)) FlipByte(file, where);
    }
    EXPECT_EQ(Verify(path)->exit_code, 1) << format;
    EXPECT_EQ(List(path)->text, intact.text);
  }
}

TEST_F(CkptTest, PinsAndMetricsAreShown) {
  const SingleRank alone;
  auto manager = Manager::Create({.directory = directory_, .keep_last = 1}, alone).value();
  ASSERT_TRUE(manager
                  ->Save("epoch_1", SampleState(10),
                         {.metrics = {{"test/accuracy", 0.91}, {"test/loss", 0.5}}})
                  .ok());
  EXPECT_EQ(SetPinned(directory_, "epoch_1.pt", true)->text, Path("epoch_1.pt is pinned\n"));
  EXPECT_TRUE(SetPinned(directory_ + "/", "epoch_1", true).ok());  // again
  ASSERT_TRUE(manager->Save("epoch_2", SampleState(20)).ok());
  ASSERT_TRUE(manager->Save("epoch_3", SampleState(30)).ok());
  std::filesystem::remove(Path(".epoch_3.pt.json"));
  const CommandOutput output = List(directory_).value();
  const auto& rows = output.json["checkpoints"];
  ASSERT_EQ(rows.size(), 2u) << output.text;  // the run has kept what is pinned
  EXPECT_TRUE(rows[0]["pinned"].get<bool>());
  EXPECT_EQ(rows[0]["metrics"].dump(), R"({"test/accuracy":0.91,"test/loss":0.5})");
  EXPECT_EQ(rows[0]["step"].get<int64_t>(), 10);
  EXPECT_FALSE(rows[1]["pinned"].get<bool>());
  EXPECT_TRUE(rows[1]["metrics"].is_null());
  EXPECT_TRUE(absl::StrContains(output.text, "pinned  test/accuracy=0.91 test/loss=0.5\n"))
      << output.text;
  EXPECT_EQ(SetPinned(directory_, "epoch_1", false)->json["pinned"].get<bool>(), false);
  EXPECT_FALSE(Manager::FolderAt(directory_).IsPinned("epoch_1.pt"));

  const absl::Status unknown = SetPinned(directory_, "epoch_4.pt", true).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(unknown.message(), "did you mean epoch_1.pt")) << unknown;
  const absl::Status no_suffix = SetPinned(directory_, "epoch_4", true).status();
  EXPECT_TRUE(absl::StrContains(no_suffix.message(), "did you mean epoch_1, ")) << no_suffix;
  Save(SampleState(30), "epoch_3.safetensors", "safetensors");
  const absl::Status either = SetPinned(directory_, "epoch_3", true).status();
  EXPECT_TRUE(absl::StrContains(either.message(), "epoch_3.pt or epoch_3.safetensors")) << either;
  EXPECT_TRUE(SetPinned(directory_, "epoch_3.safetensors/", true).ok());
  EXPECT_FALSE(SetPinned(directory_, "../ckpt_PinsAndMetricsAreShown/epoch_3.pt", true).ok());
  EXPECT_EQ(SetPinned(Path("none"), "epoch_3", true).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(WriteFileAtomically(Path("epoch_9.pt.damaged.2"), "cut").ok());
  EXPECT_FALSE(SetPinned(directory_, "epoch_9.pt.damaged.2", true).ok());
  // What cannot be pinned is not suggested either.
  for (const char* name : {"epoch_9", "epoch_9.pt"}) {
    const absl::Status damaged = SetPinned(directory_, name, true).status();
    EXPECT_EQ(damaged.message(), absl::StrCat(directory_, " has no checkpoint '", name,
                                              "'; epoch_9.pt.damaged.2 is set aside as damaged, "
                                              "and is not pinned"));
  }
  const absl::Status near = SetPinned(directory_, "epoch_8", true).status();
  EXPECT_TRUE(absl::StrContains(near.message(), "did you mean epoch_")) << near;
  EXPECT_FALSE(absl::StrContains(near.message(), "epoch_9")) << near;
  EXPECT_EQ(List(directory_)->json["checkpoints"][3]["state"].get<std::string>(), "damaged");
}

TEST_F(CkptTest, QuarantineRenamesWhatIsProvenToBeDamaged) {
  Save(SampleState(1), "epoch_1.pt");
  FlipByte(Save(SampleState(2), "epoch_2.pt"), BytesOf(at::arange(6, at::kFloat)));
  const std::string folder = Save(SampleState(3), "epoch_3.safetensors", "safetensors");
  std::filesystem::resize_file(folder + "/training_state", 9);
  ASSERT_TRUE(WriteFileAtomically(Path("epoch_4.pt.damaged"), "cut").ok());
  std::filesystem::create_symlink(Path("loop.pt"), Path("loop.pt"));  // an error of the system
  const CommandOutput plain = Verify(directory_).value();
  EXPECT_EQ(plain.exit_code, 1);
  EXPECT_TRUE(std::filesystem::exists(Path("epoch_2.pt"))) << plain.text;
  {
    const auto saving = DirectoryLock::Shared(directory_);
    const absl::Status refused = Verify(directory_, {.quarantine = true}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << refused;
    EXPECT_TRUE(std::filesystem::exists(Path("epoch_2.pt")));
  }
  const CommandOutput output = Verify(directory_ + "/", {.quarantine = true}).value();
  EXPECT_EQ(output.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(output.text, "renamed to epoch_2.pt.damaged\n")) << output.text;
  EXPECT_EQ(
      ListDirectory(directory_).value(),
      (std::vector<std::string>{"epoch_1.pt", "epoch_2.pt.damaged", "epoch_3.safetensors.damaged",
                                "epoch_4.pt.damaged", "loop.pt"}));
  // Once more: there is nothing to rename. One alone, and a second of its name.
  EXPECT_FALSE(absl::StrContains(Verify(directory_, {.quarantine = true})->text, "renamed to"));
  ASSERT_TRUE(WriteFileAtomically(Path("epoch_2.pt"), "cut").ok());
  EXPECT_EQ(Verify(Path("epoch_2.pt"), {.quarantine = true})
                ->json["checkpoints"][0]["renamed"]
                .get<std::string>(),
            "epoch_2.pt.damaged.2");
  EXPECT_EQ(Verify(Path("epoch_1.pt"), {.quarantine = true})->exit_code, 0);
}

// Its name says nothing, and is not one that a run looks for.
TEST_F(CkptTest, AFolderOfAnyNameIsQuarantined) {
  const std::string a = Save(SampleState(3), "epoch_1.pt");
  const std::string best = Path("best");
  const auto make = [&](const std::string& format) {
    ASSERT_TRUE(Convert({.from = a, .to = best, .format = format}).ok());
  };
  make("safetensors");
  // Also in a folder of checkpoints, where others have suffixes.
  EXPECT_EQ(List(directory_)->json["checkpoints"][1]["name"].get<std::string>(), "best");
  EXPECT_EQ(Verify(directory_)->json["checkpoints"].size(), 2u);
  std::filesystem::resize_file(best + "/training_state", 9);
  EXPECT_EQ(Verify(directory_)->exit_code, 1);
  const CommandOutput renamed = Verify(best + "/.", {.quarantine = true}).value();
  EXPECT_EQ(renamed.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(renamed.text, "renamed to best.damaged\n")) << renamed.text;
  // It is still what it was, also beside another of its name.
  for (const bool beside : {false, true}) {
    if (beside) make("sharded");
    const absl::StatusOr<CommandOutput> again = Verify(Path("best.damaged"), {.quarantine = true});
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->exit_code, 1);
    EXPECT_EQ(again->json["checkpoints"][0]["format"].get<std::string>(), "safetensors");
    EXPECT_FALSE(again->json["checkpoints"][0].contains("renamed")) << again->text;
  }
  const CommandOutput listed = List(directory_).value();
  ASSERT_EQ(listed.json["checkpoints"].size(), 3u) << listed.text;
  EXPECT_EQ(listed.json["checkpoints"][2]["name"].get<std::string>(), "best.damaged");
  EXPECT_EQ(listed.json["checkpoints"][2]["state"].get<std::string>(), "damaged");
}

TEST_F(CkptTest, QuarantineOfALinkSaysWhatItLeadsTo) {
  ASSERT_TRUE(WriteFileAtomically(Path("epoch_1.pt"), "cut").ok());
  std::filesystem::create_symlink("epoch_1.pt", Path("latest.pt"));
  const CommandOutput output = Verify(Path("latest.pt"), {.quarantine = true}).value();
  EXPECT_TRUE(absl::StrContains(
      output.text,
      "renamed the link to latest.pt.damaged; what it leads to keeps its name, epoch_1.pt\n"))
      << output.text;
  EXPECT_EQ(ReadFile(Path("epoch_1.pt")).value(), "cut");
  EXPECT_TRUE(std::filesystem::is_symlink(Path("latest.pt.damaged")));
}

// The others' states are reported, too. A name that is too long fails for root as well.
TEST_F(CkptTest, WhatCannotBeRenamedDoesNotHideTheRest) {
  Save(SampleState(1), "epoch_1.pt");
  const std::string longest = std::string(252, 'x') + ".pt";
  std::filesystem::copy_file(Path("epoch_1.pt"), Path(longest));
  std::filesystem::resize_file(Path(longest), 9);
  ASSERT_TRUE(WriteFileAtomically(Path("z.pt"), "cut").ok());
  const absl::StatusOr<CommandOutput> output = Verify(directory_, {.quarantine = true});
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_EQ(output->exit_code, 2);
  const auto& rows = output->json["checkpoints"];
  ASSERT_EQ(rows.size(), 3u) << output->text;
  EXPECT_EQ(rows[0]["state"].get<std::string>(), "ok");
  EXPECT_TRUE(rows[1].contains("not_renamed")) << output->text;
  EXPECT_TRUE(absl::StrContains(output->text, "not renamed: renaming ")) << output->text;
  EXPECT_EQ(rows[2]["renamed"].get<std::string>(), "z.pt.damaged");
  EXPECT_TRUE(std::filesystem::exists(Path(longest)));
}

State ModelState(const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  State state;
  c10::impl::GenericDict model = NewTree();
  for (const auto& [name, tensor] : tensors) model.insert(name, tensor);
  state.root.insert("model", model);
  state.root.insert("step", 3);
  return state;
}

TEST_F(CkptTest, AverageIsTheMeanOfEachElement) {
  const auto half = [](double value) { return at::full({2}, value, at::kHalf); };
  const auto save = [&](const char* name, const char* format, float x, double y, int64_t seen) {
    const at::Tensor tied = at::tensor({x, 2 * x});
    return Save(ModelState({{"a", tied},
                            {"b", tied},
                            {"half", half(y)},
                            {"seen", at::tensor({seen})},
                            {"same", at::arange(3)}}),
                name, format);
  };
  // A sum of these in float16 would be infinite.
  const std::vector<std::string> from = {save("1.pt", "pt", 1, 60000, 7),
                                         save("2.safetensors", "safetensors", 2, 60000, 8),
                                         save("3.pt", "pt", 6, 30000, 9)};
  const CommandOutput output = Average(from, Path("mean.safetensors/")).value();
  EXPECT_TRUE(absl::StrContains(output.text, "the mean of 3 checkpoints; from the last one"))
      << output.text;
  EXPECT_EQ(output.json["taken_from_last"].dump(), R"(["model/seen"])");
  const State read = CreateFormat("safetensors").value()->Read(Path("mean.safetensors")).value();
  EXPECT_EQ(read.root.size(), 1u);
  const c10::impl::GenericDict model = read.root.at("model").toGenericDict();
  EXPECT_TRUE(at::equal(model.at("a").toTensor(), at::tensor({3.f, 6.f})));
  EXPECT_TRUE(model.at("a").toTensor().is_alias_of(model.at("b").toTensor()));  // still tied
  EXPECT_TRUE(at::equal(model.at("half").toTensor(), half(50000)));
  EXPECT_TRUE(at::equal(model.at("seen").toTensor(), at::tensor({int64_t{9}})));
  EXPECT_TRUE(at::equal(model.at("same").toTensor(), at::arange(3)));
  EXPECT_EQ(Average(from, Path("mean.safetensors")).status().code(),
            absl::StatusCode::kAlreadyExists);
}

TEST_F(CkptTest, AverageOfWhatDoesNotFitIsRefusedByName) {
  const std::string a = Save(ModelState({{"w", at::ones({2})}, {"n", at::ones({})}}), "a.pt");
  const std::string again = Save(ModelState({{"w", at::ones({2})}, {"n", at::ones({})}}), "g.pt");
  const auto refused = [&](const std::string& other, absl::string_view what) {
    for (const auto& from : {std::vector{a, other}, std::vector{a, again, other}}) {
      const absl::Status status = Average(from, Path("out.pt")).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), other)) << status;
    }
    EXPECT_FALSE(std::filesystem::exists(Path("out.pt")));
  };
  refused(Save(ModelState({{"w", at::ones({2})}}), "b.pt"), "'model/n', which");
  refused(
      Save(ModelState({{"w", at::ones({2})}, {"n", at::ones({})}, {"x", at::ones({})}}), "c.pt"),
      "'model/x', which");
  refused(Save(ModelState({{"w", at::ones({3})}, {"n", at::ones({})}}), "d.pt"),
          "'model/w' is float32 [2] in");
  refused(Save(ModelState({{"w", at::ones({2}, at::kHalf)}, {"n", at::ones({})}}), "e.pt"),
          "'model/w' is float32 [2] in");
  State none;
  none.root.insert("step", 3);
  refused(Save(none, "f.pt"), "has no model");
  EXPECT_FALSE(Average({a}, Path("out.pt")).ok());
  EXPECT_TRUE(absl::StrContains(Average({a, a}, Path("out")).status().message(), ".safetensors"));
}

TEST_F(CkptTest, AverageOfValuesOfOnePathIsRefused) {
  State state = ModelState({{"a/b", at::ones({2, 3})}});
  c10::impl::GenericDict below = NewTree();
  below.insert("b", at::ones({4}));
  state.root.at("model").toGenericDict().insert("a", below);
  const absl::Status status =
      Average({Save(state, "a.pt"), Save(state, "b.pt")}, Path("out.pt")).status();
  EXPECT_TRUE(absl::StrContains(status.message(), "two values of path 'model/a/b'")) << status;
}

TEST_F(CkptTest, LargeIntegersDifferByMoreThanNothing) {
  const int64_t large = int64_t{1} << 62;
  const std::string a = Save(ModelState({{"i", at::tensor({large, int64_t{0}})}}), "a.pt");
  const std::string b = Save(ModelState({{"i", at::tensor({large + 3, int64_t{0}})}}), "b.pt");
  const CommandOutput output = Diff(a, b).value();
  EXPECT_TRUE(absl::StrContains(output.text, "1 of 2 elements differ, by at most 3"))
      << output.text;
}

// Where patterns of a shell overlap, one checkpoint would count twice without a word.
TEST_F(CkptTest, AverageOfOneCheckpointTwiceIsRefused) {
  const std::string a = Save(ModelState({{"w", at::ones({2})}}), "a.pt");
  const std::string b = Save(ModelState({{"w", at::zeros({2})}}), "b.pt");
  std::filesystem::create_symlink(a, Path("link.pt"));
  const auto message = [&](const std::string& third) {
    const absl::Status status = Average({a, b, third}, Path("out.pt")).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_TRUE(absl::StrContains(message(a), a + " stands twice")) << message(a);
  for (const std::string& third : {Path("./b.pt"), Path("b.pt/")}) {
    EXPECT_TRUE(absl::StrContains(message(third), third + " is " + b)) << message(third);
  }
  EXPECT_TRUE(absl::StrContains(message(Path("link.pt")), a)) << message(Path("link.pt"));
  // A link that leads nowhere may lead to a disk that is not mounted.
  std::filesystem::create_symlink("nowhere.pt", Path("away.pt"));
  EXPECT_EQ(Average({a, b}, Path("away.pt")).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_FALSE(std::filesystem::exists(Path("out.pt")));
}

TEST_F(CkptTest, WhatIsNotThereIsNamed) {
  for (const auto& output :
       {List(Path("none")), Verify(Path("none.pt")), Diff(Path("none.pt"), Path("none.pt")),
        Convert({.from = Path("none.pt"), .to = Path("b.pt")}), List(directory_),
        Verify(directory_)}) {
    EXPECT_EQ(output.status().code(), absl::StatusCode::kNotFound) << output.status();
    EXPECT_TRUE(absl::StrContains(output.status().message(), directory_)) << output.status();
    EXPECT_FALSE(absl::StrContains(output.status().message(), "\n")) << output.status();
  }
}

TEST_F(CkptTest, AFolderOfCheckpointsIsToldFromOne) {
  const std::string a = Save(SampleState(1), "epoch_1.pt");
  const std::string b = Save(SampleState(2), "epoch_2.pt");
  for (const auto& output : {Diff(directory_ + "/", b), Diff(a, directory_),
                             Convert({.from = directory_, .to = Path("c.pt")})}) {
    EXPECT_EQ(output.status().code(), absl::StatusCode::kNotFound) << output.status();
    EXPECT_TRUE(
        absl::StrContains(output.status().message(), absl::StrCat("name one of them, such as ", b)))
        << output.status();
  }
}

TEST_F(CkptTest, VerifyReadsAll) {
  Save(SampleState(1), "epoch_1.pt");
  const std::string flipped = Save(SampleState(2), "epoch_2.pt");
  FlipByte(flipped, BytesOf(at::arange(6, at::kFloat)));
  const std::string folder = Save(SampleState(3), "epoch_3.safetensors", "safetensors");
  FlipByte(folder + "/model.safetensors", BytesOf(at::arange(6, at::kFloat)));
  Save(SampleState(4), "epoch_4.safetensors", "safetensors");
  const CommandOutput all = Verify(directory_).value();
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
    const CommandOutput output = Diff(x, y).value();
    EXPECT_EQ(output.exit_code, 0) << output.text;
    EXPECT_EQ(output.text, "equal\n");
    EXPECT_TRUE(output.json["equal"].get<bool>());
  }
}

TEST_F(CkptTest, TheFirstAndTheLargestDifference) {
  const std::string a = Save(SampleState(3), "a.pt");
  int number = 0;
  const auto differs = [&](const State& state, absl::string_view text) {
    const CommandOutput output = Diff(a, Save(state, absl::StrCat("b", number++, ".pt"))).value();
    EXPECT_EQ(output.exit_code, 1);
    EXPECT_EQ(output.text, text);
    EXPECT_FALSE(output.json["equal"].get<bool>());
    return output.json;
  };
  State state = SampleState(3);
  c10::impl::GenericDict model = state.root.at("model").toGenericDict();
  model.at("fc.weight").toTensor()[0][1] = 1.5;
  model.at("count").toTensor()[1] = -9;
  const auto json = differs(state,
                            "model/fc.weight: 1 of 6 elements differ, by at most 0.5\n"
                            "2 values differ, tensors by at most 10 (model/count)\n"
                            "the others: model/count\n");
  EXPECT_EQ(json["others"].dump(), R"(["model/count"])");
  EXPECT_EQ(json["first"]["path"].get<std::string>(), "model/fc.weight");
  EXPECT_EQ(json["max_abs"].get<double>(), 10.0);
  model.at("fc.weight").toTensor()[0][0] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(differs(state,
                    "model/fc.weight: 2 of 6 elements differ, by at most nan\n"
                    "2 values differ, tensors by at most nan (model/fc.weight)\n"
                    "the others: model/count\n")["max_abs"]
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

TEST_F(CkptTest, TextsAreShownWhereTheyDiffer) {
  int number = 0;
  const auto difference = [&](const std::string& a, const std::string& b) {
    State first, second;
    first.root.insert("config", a);
    second.root.insert("config", b);
    const std::string name = absl::StrCat(number++, ".pt");
    return Diff(Save(first, "a" + name), Save(second, "b" + name))
        ->json["first"]["what"]
        .get<std::string>();
  };
  EXPECT_EQ(difference("a", "b"), "'a' and 'b'");
  EXPECT_EQ(difference("model:\n  name: mlp\n  width: 8\n", "model:\n  name: mlp\n  width: 16\n"),
            "line 3: '  width: 8' and '  width: 16'");
  EXPECT_EQ(difference("a\n", "a"), "line 2: '' and no such line");
  const std::string same(70, 's');
  const std::string before(20, 's');
  EXPECT_EQ(difference(same + "a", same + "b"),
            absl::StrCat("'…", before, "a' and '…", before, "b'"));
  EXPECT_EQ(difference("a" + same, "b" + same),
            absl::StrCat("'a", same.substr(0, 59), "…' and 'b", same.substr(0, 59), "…'"));
  EXPECT_EQ(difference("x\n" + same, "x\n" + same + "b"),
            absl::StrCat("line 2: '…", before, "' and '…", before, "b'"));
  // Characters stay whole: "ö" and "ü" differ in their second byte.
  EXPECT_EQ(difference(same + "ö", same + "ü"),
            absl::StrCat("'…", before.substr(1), "ö' and '…", before.substr(1), "ü'"));
}

TEST_F(CkptTest, AFewOfTheOthersThatDifferAreNamed) {
  State first, second;
  for (int i = 0; i < 9; ++i) {
    first.root.insert(absl::StrCat("v", i), i);
    second.root.insert(absl::StrCat("v", i), -1);
  }
  const CommandOutput output = Diff(Save(first, "a.pt"), Save(second, "b.pt")).value();
  EXPECT_EQ(output.text,
            "v0: 0 and -1\n9 values differ\nthe others: v1, v2, v3, v4, v5 and 3 more\n");
  EXPECT_EQ(output.json["others"].size(), 5u);
}

TEST_F(CkptTest, ConvertsBothWays) {
  const std::string a = Save(SampleState(3), "a.pt");
  const CommandOutput output = Convert({.from = a, .to = Path("b.safetensors")}).value();
  EXPECT_TRUE(absl::StrContains(output.text, "3 tensors")) << output.text;
  EXPECT_EQ(output.json["format"].get<std::string>(), "safetensors");
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
  const absl::Status other =
      Convert({.from = a, .to = Path("d.safetensors"), .format = "pt"}).status();
  EXPECT_TRUE(absl::StrContains(other.message(), "whose suffix is that of safetensors")) << other;
  EXPECT_FALSE(std::filesystem::exists(Path("d.safetensors")));
  const absl::Status unsaid = Convert({.from = a, .to = Path("d.npz")}).status();
  EXPECT_EQ(unsaid.code(), absl::StatusCode::kInvalidArgument) << unsaid;
  EXPECT_FALSE(std::filesystem::exists(Path("d")));
}

// What single ranks have is theirs again, from each format to each.
TEST_F(CkptTest, EntriesOfRanksStayTheirs) {
  const auto rng_of = [](int rank) { return at::full({16}, rank, at::kByte); };
  int number = 0;
  const auto convert = [&](const std::string& from, const std::string& format, size_t ranks) {
    const std::string to = Path(absl::StrCat(number++, ".", format));
    const absl::Status converted = Convert({.from = from, .to = to}).status();
    EXPECT_TRUE(converted.ok()) << converted;
    const absl::StatusOr<State> read = CreateFormat(format).value()->Read(to);
    EXPECT_TRUE(read.ok()) << read.status();
    if (!read.ok()) return to;
    EXPECT_FALSE(read->root.contains("per_rank")) << to;
    EXPECT_EQ(read->per_rank.size(), ranks) << to;
    for (const auto& [rank, entries] : read->per_rank) {
      EXPECT_TRUE(at::equal(entries.at("rng").toTensor(), rng_of(rank))) << to;
    }
    EXPECT_EQ(Diff(from, to)->text, "equal\n");
    return to;
  };
  // As one writer has them, of two ranks.
  State state = SampleState(3);
  c10::impl::GenericDict entries = NewTree();
  c10::impl::GenericList rng(c10::AnyType::get());
  for (const int rank : {0, 1}) rng.push_back(rng_of(rank));
  entries.insert("rng", rng);
  state.root.insert("per_rank", entries);
  std::string path = Save(state, "a.pt");
  for (const char* format : {"sharded", "sharded", "safetensors", "sharded", "pt"}) {
    path = convert(path, format, 2);
  }
  // And as a rank that writes itself has its own.
  state = SampleState(3);
  c10::impl::GenericDict own = NewTree();
  own.insert("rng", rng_of(0));
  state.per_rank.emplace(0, own);
  std::filesystem::create_directories(Path("a.sharded"));
  path = Save(state, "a.sharded", "sharded");
  for (const char* format : {"sharded", "pt"}) path = convert(path, format, 1);
}

// A run's files have the same in other places and under other names, by their format.
TEST_F(CkptTest, FilesOfOneRunInTwoFormatsAreEqual) {
  const at::Tensor rng = at::full({16}, 3, at::kByte);
  const auto state_of = [&](bool named, double moment) {
    State state = SampleState(3);
    c10::impl::GenericDict states(c10::AnyType::get(), c10::AnyType::get());
    c10::impl::GenericList parameters(c10::AnyType::get());
    for (const int64_t i : {0, 1}) {
      const c10::IValue key =
          named ? c10::IValue(i == 0 ? "fc.weight" : "fc.bias") : c10::IValue(i);
      c10::impl::GenericDict entry = NewTree();
      entry.insert("exp_avg", at::full({3}, i == 0 ? moment : 1));
      states.insert(key, entry);
      parameters.push_back(key);
    }
    c10::impl::GenericDict group = NewTree(), optimizer = NewTree();
    group.insert("lr", 0.1);
    group.insert("params", parameters);
    c10::impl::GenericList groups(c10::AnyType::get());
    groups.push_back(group);
    optimizer.insert("state", states);
    optimizer.insert("param_groups", groups);
    state.root.insert_or_assign("optimizer", optimizer);
    if (named) {
      c10::impl::GenericDict own = NewTree();
      own.insert("rng", rng);
      state.per_rank.emplace(0, own);
    } else {
      c10::impl::GenericList all(c10::AnyType::get());
      all.push_back(rng);
      state.root.insert("rng", all);
    }
    return state;
  };
  const std::string pt = Save(state_of(false, 2), "epoch_3.pt");
  for (const double moment : {2.0, 2.5}) {
    const std::string name = absl::StrCat("epoch_3_", moment, ".sharded");
    std::filesystem::create_directories(Path(name));
    Save(state_of(true, moment), name, "sharded");
    const std::string text =
        moment == 2 ? "equal\n"
                    : "optimizer/state/fc.weight/exp_avg: 3 of 3 elements differ, by at most 0.5\n"
                      "1 value differs, tensors by at most 0.5 "
                      "(optimizer/state/fc.weight/exp_avg)\n";
    EXPECT_EQ(Diff(pt, Path(name))->text, text);
    EXPECT_EQ(Diff(Path(name), pt)->text, text);
  }
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

// Also where the file has it in one storage with others.
TEST_F(CkptTest, APartHasNoBytesOfOtherTensors) {
  State state = SampleState(3);
  const at::Tensor flat = at::arange(100'000, at::kFloat);
  state.root.insert("flat", flat);
  state.root.insert("view", flat.narrow(0, 70, 10));
  const std::string a = Save(state, "a.pt");
  ASSERT_TRUE(Convert({.from = a, .to = Path("b.pt"), .only = "view"}).ok());
  EXPECT_LT(std::filesystem::file_size(Path("b.pt")), 4000u);
  const State read = CreateFormat("pt").value()->Read(Path("b.pt")).value();
  EXPECT_TRUE(at::equal(read.root.at("view").toTensor(), at::arange(70, 80, at::kFloat)));
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
  EXPECT_TRUE(Manager::Load(folder).ok());
  const CommandOutput output = Verify(folder).value();
  EXPECT_EQ(output.json["checkpoints"][0]["state"].get<std::string>(), "unverified") << output.text;
  EXPECT_EQ(output.exit_code, 0);
  EXPECT_EQ(Diff(folder, own)->exit_code, 1);
}

// Also where a shell has completed the path, or files of it are cut.
TEST_F(CkptTest, AFolderWithoutItsSuffixIsStillOne) {
  const std::string a = Save(SampleState(3), "a.pt");
  for (const std::string format : {"safetensors", "sharded"}) {
    const std::string folder = Path(absl::StrCat("of_", format));
    ASSERT_TRUE(Convert({.from = a, .to = folder + "/", .format = format}).ok());
    const CommandOutput whole = Verify(folder + "/").value();
    EXPECT_EQ(whole.exit_code, 0) << whole.text;
    EXPECT_EQ(whole.json["checkpoints"][0]["format"].get<std::string>(), format);
    const absl::StatusOr<State> state = Manager::Load(folder + "/");
    ASSERT_TRUE(state.ok()) << state.status();
    EXPECT_EQ(state->root.at("step").toInt(), 3);
    const std::vector<std::string> files = ListDirectory(folder).value();
    for (const std::string& file : files) {
      const std::string path = absl::StrCat(folder, "/", file), bytes = ReadFile(path).value();
      ASSERT_TRUE(WriteFileAtomically(path, bytes.substr(0, bytes.size() / 2)).ok());
      const CommandOutput cut = Verify(folder + "/").value();
      EXPECT_EQ(cut.exit_code, 1) << file << cut.text;
      EXPECT_EQ(cut.json["checkpoints"].size(), 1u) << file << cut.text;
      ASSERT_TRUE(WriteFileAtomically(path, bytes).ok());
    }
  }
  // Of several ranks' files, those of rank 0 may be missing.
  std::filesystem::rename(Path("of_sharded/rank_00000.safetensors"),
                          Path("of_sharded/rank_00001.safetensors"));
  const CommandOutput lacking = Verify(Path("of_sharded")).value();
  EXPECT_EQ(lacking.exit_code, 1) << lacking.text;
  EXPECT_TRUE(absl::StrContains(lacking.text, "rank_00000.safetensors")) << lacking.text;
}

TEST_F(CkptTest, ACheckpointWithTheNameOfAFileOfOneIsOneInAFolder) {
  Save(SampleState(3), "model.safetensors", "safetensors");
  CommandOutput output = List(directory_).value();
  EXPECT_EQ(output.json["checkpoints"].size(), 1u) << output.text;
}

// As a download that was interrupted leaves them.
TEST_F(CkptTest, AFolderThatLacksAFileOfItsIndexIsDamaged) {
  ASSERT_TRUE(MakeDirectories(Path("llm")).ok());
  ASSERT_TRUE(WriteFileAtomically(Path("llm/model.safetensors.index.json"),
                                  R"({"weight_map":{"w":"model-00001-of-00002.safetensors",)"
                                  R"("v":"model-00002-of-00002.safetensors"}})")
                  .ok());
  const auto write = [&](char tensor, const char* file) {
    std::string json = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}     )";
    json[2] = tensor;
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(json.size());
    ASSERT_TRUE(
        WriteFileAtomically(absl::StrCat(Path("llm/"), file), bytes + json + std::string(8, '\0'))
            .ok());
  };
  write('w', "model-00001-of-00002.safetensors");
  const CommandOutput output = Verify(Path("llm")).value();
  EXPECT_EQ(output.exit_code, 1) << output.text;
  EXPECT_TRUE(absl::StrContains(output.text, "model-00002-of-00002.safetensors")) << output.text;
  EXPECT_FALSE(Convert({.from = Path("llm"), .to = Path("llm.pt")}).ok());
  write('v', "model-00002-of-00002.safetensors");
  const absl::StatusOr<State> whole = Manager::Load(Path("llm"));
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->root.at("model").toGenericDict().size(), 2u);
}

// As where only files of this suffix were fetched.
TEST_F(CkptTest, AModelInSeveralFilesNeedsNoIndex) {
  ASSERT_TRUE(MakeDirectories(Path("llm")).ok());
  const auto write = [&](char tensor, const char* file) {
    std::string json = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}     )";
    json[2] = tensor;
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(json.size());
    ASSERT_TRUE(
        WriteFileAtomically(absl::StrCat(Path("llm/"), file), bytes + json + std::string(8, '\0'))
            .ok());
  };
  write('w', "model-00001-of-00002.safetensors");
  const CommandOutput lacking = Verify(Path("llm")).value();
  EXPECT_EQ(lacking.exit_code, 1) << lacking.text;
  EXPECT_TRUE(absl::StrContains(lacking.text, "model-00002-of-00002.safetensors")) << lacking.text;
  for (const absl::Status& status : {Convert({.from = Path("llm"), .to = Path("a.pt")}).status(),
                                     Manager::Load(Path("llm")).status()}) {
    EXPECT_TRUE(absl::StrContains(status.message(), "lacks 1 of the 2 files")) << status;
  }
  write('v', "model-00002-of-00002.safetensors");
  const CommandOutput whole = Verify(Path("llm")).value();
  EXPECT_EQ(whole.exit_code, 0) << whole.text;
  EXPECT_EQ(whole.json["checkpoints"].size(), 1u) << whole.text;
  ASSERT_TRUE(Convert({.from = Path("llm/"), .to = Path("a.pt")}).ok());
  for (const std::string& path : {Path("a.pt"), Path("llm/")}) {
    EXPECT_EQ(Manager::Load(path)->root.at("model").toGenericDict().size(), 2u) << path;
  }
}

TEST_F(CkptTest, ANaNIsTheLargestDifferenceWhereverItIs) {
  const std::string a = Save(SampleState(3), "a.pt");
  const State state = SampleState(3);
  c10::impl::GenericDict model = state.root.at("model").toGenericDict();
  model.at("count").toTensor()[1] = -9;
  const at::Tensor nans = at::ones({3}).fill_(std::numeric_limits<double>::quiet_NaN());
  state.root.at("optimizer")
      .toGenericDict()
      .insert_or_assign("moments", c10::ivalue::Tuple::create({c10::IValue(nans), 7}));
  const CommandOutput output = Diff(a, Save(state, "b.pt")).value();
  EXPECT_EQ(output.json["first"]["path"].get<std::string>(), "model/count");
  EXPECT_EQ(output.json["max_abs"].get<std::string>(), "NaN");
  EXPECT_EQ(output.json["max_abs_path"].get<std::string>(), "optimizer/moments/0");
}

}  // namespace
}  // namespace ddp::tools::ckpt
