// Checkpoints that earlier versions wrote resume, and end with the model that the uninterrupted run
// of that version had: testdata/version_N_SETTING.pt and SETTING_end.pt.
//
//   version 1  at the end of an epoch
//           2  a position within an epoch: "sample"
//           3  the order of gradients in buckets, with several ranks: "bucket_order"; "config"
//           4  the size of the data set, and schedules that go on in another world: "dataset_size",
//              "progress", more entries in "scheduler"
//           5  in format sharded, names of parameters in the optimizer's state, not numbers
//           6  "order" of the examples, "data_fingerprint"; format safetensors; within an epoch
//              (step_4) and at its end (epoch_1), and version_6_end.pt
//
// Those of versions 4, 5 and 6 were written by them. Those before were made of them: Python's torch
// left out what that version did not write. version_4_adamw.sharded was written by version 5, with
// numbers in the place of names. What a later version writes is added, and none is removed:
//
//   export DDP_WRITE_GOLDEN=$PWD/ddp/trainer/testdata
//   ./bazelw run //ddp/trainer:golden_test -- --gtest_filter='All/NewestTest*'
//
// writes the files of kNewest there.
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/runfiles.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

constexpr int kNewest = 6;

struct Golden {
  int version;
  const char* setting;
  int world_size = 1;
  double dropout = 0;
  std::string optimizer = "sgd";
  std::string precision = "fp32";
  std::string format = "pt";  // sharded: with stage 1 of ZeRO, whose runs end as those without it
};

std::string NameOf(const Golden& golden) {
  return absl::StrCat("version_", golden.version, "_", golden.setting, ".", golden.format);
}

std::string EndOfNewest() { return absl::StrCat("version_", kNewest, "_end.pt"); }

std::string InTestdata(const std::string& name) {
  return Runfile("libtorch_ddp/ddp/trainer/testdata/" + name).value();
}

checkpoint::State Load(const std::string& path) {
  absl::StatusOr<checkpoint::State> state = checkpoint::Manager::Load(path);
  EXPECT_TRUE(state.ok()) << state.status();
  return state.ok() ? *std::move(state) : checkpoint::State();
}

// A copy: Bazel's own files are links, and in a folder of format sharded those are refused.
std::string CopyOf(const std::string& path) {
  if (!std::filesystem::is_directory(path)) return path;
  const std::string copy =
      absl::StrCat(testing::TempDir(), "/golden_test_", path.substr(path.rfind('/') + 1));
  std::filesystem::remove_all(copy);
  std::filesystem::create_directories(copy);
  for (const auto& file : std::filesystem::directory_iterator(path)) {
    std::filesystem::copy_file(file.path(), std::filesystem::path(copy) / file.path().filename());
  }
  return copy;
}

// That can be told from others of their number.
class NamedHalves : public Halves {
 public:
  using Halves::Halves;
  std::string Fingerprint() const override { return absl::StrCat("halves", size()); }
};

TrainerOptions OptionsOf(const Golden& golden) {
  TrainerOptions options = Quiet();
  options.optimizer = {.name = golden.optimizer, .lr = 0.05};
  options.schedule.name = "cosine";
  options.clip_norm = 0.5;
  options.precision = golden.precision;
  options.grad_scaler = {.init_scale = 1e9, .backoff_factor = 1e-4, .growth_interval = 4};
  options.zero.stage = golden.format == "sharded";
  options.configuration = "optimizer.lr: 0.05\n";
  return options;
}

constexpr int64_t kExamples = 330;

// Trains on all ranks, and returns the parameters and buffers at the end. `batches`: of one rank.
c10::impl::GenericDict Trained(const Golden& golden, const TrainerOptions& options,
                               int64_t& batches) {
  c10::impl::GenericDict model = checkpoint::NewTree();
  RunRanks(golden.world_size, [&](const session::Session& session) {
    Task task = NetTask(golden.dropout);
    if (session.is_main()) CountTrainedBatches(task, batches);
    const auto report = Train(session, task, NamedHalves(kExamples), NamedHalves(60), options);
    ASSERT_TRUE(report.ok()) << report.status();
    if (options.stop_at_step == 0) {
      EXPECT_EQ(report->epochs, 2);
    }
    if (session.rank() != 0) return;
    for (const auto& tensor : task.module->named_parameters()) {
      model.insert(tensor.key(), tensor.value().detach().clone());
    }
    for (const auto& tensor : task.module->named_buffers()) {
      model.insert(tensor.key(), tensor.value().clone());
    }
  });
  return model;
}

class GoldenTest : public testing::TestWithParam<Golden> {};

TEST_P(GoldenTest, ResumesAndEndsWithTheSameModel) {
  const Golden& golden = GetParam();
  TrainerOptions options = OptionsOf(golden);
  options.checkpoint.resume = CopyOf(InTestdata(NameOf(golden)));
  int64_t batches = 0;
  const c10::impl::GenericDict got = Trained(golden, options, batches);
  // A run from scratch ends with the same model.
  const int64_t per_step = options.batch_size * golden.world_size;
  const int64_t whole = options.epochs * ((kExamples + per_step - 1) / per_step);
  const int64_t saved = Load(options.checkpoint.resume).root.at("step").toInt();
  ASSERT_GT(saved, 0);
  EXPECT_EQ(batches, whole - saved);
  const c10::impl::GenericDict expected =
      Load(InTestdata(golden.version == kNewest ? EndOfNewest()
                                                : absl::StrCat(golden.setting, "_end.pt")))
          .root.at("model")
          .toGenericDict();
  ASSERT_EQ(got.size(), expected.size());
  // The files were written on another processor, which may round otherwise.
  const double tolerance = golden.precision == "fp32" ? 1e-4 : 1e-2;
  for (const auto& entry : expected) {
    // The gradient of a bias before a BatchNorm is nothing but rounding, of which AdamW makes steps
    // of full size; the mean goes with it.
    const std::string& name = entry.key().toStringRef();
    if (golden.optimizer == "adamw" && (name == "in.bias" || name == "norm.running_mean")) continue;
    const at::Tensor a = entry.value().toTensor().to(at::kDouble);
    const at::Tensor b = got.at(name).toTensor().to(at::kDouble);
    EXPECT_TRUE(at::allclose(a, b, tolerance, tolerance)) << name;
  }
}

std::vector<Golden> Newest() {
  std::vector<Golden> all;
  for (const char* setting : {"step_4", "epoch_1"}) {
    for (const char* format : {"pt", "safetensors", "sharded"}) {
      all.push_back({kNewest, setting, 2, 0, "adamw", "fp32", format});
    }
  }
  return all;
}

std::string TestName(const testing::TestParamInfo<Golden>& info) {
  return absl::StrCat("Version", info.param.version, "_", info.param.setting, "_",
                      info.param.format);
}

INSTANTIATE_TEST_SUITE_P(
    All, GoldenTest,
    testing::Values(Golden{1, "one_rank_dropout", 1, 0.3}, Golden{2, "one_rank_dropout", 1, 0.3},
                    Golden{3, "adamw", 2, 0, "adamw"}, Golden{4, "one_rank_dropout", 1, 0.3},
                    Golden{4, "adamw", 2, 0, "adamw"}, Golden{4, "fp16", 2, 0, "sgd", "fp16"},
                    Golden{4, "adamw", 2, 0, "adamw", "fp32", "sharded"},
                    Golden{5, "adamw", 2, 0, "adamw", "fp32", "sharded"}),
    TestName);
INSTANTIATE_TEST_SUITE_P(Newest, GoldenTest, testing::ValuesIn(Newest()), TestName);

// Adds a line for each value: its path, and the type, or dtype and shape.
void AddKeys(const std::string& path, const c10::IValue& value, std::vector<std::string>& keys) {
  if (value.isGenericDict()) {
    keys.push_back(absl::StrCat(path, " dict"));
    for (const auto& entry : value.toGenericDict()) {
      AddKeys(absl::StrCat(path, "/", checkpoint::KeyText(entry.key())), entry.value(), keys);
    }
  } else if (value.isList() || value.isTuple()) {
    const std::vector<c10::IValue> items =
        value.isList() ? value.toListRef().vec() : value.toTupleRef().elements().vec();
    keys.push_back(absl::StrCat(path, value.isList() ? " list" : " tuple"));
    for (size_t i = 0; i < items.size(); ++i) AddKeys(absl::StrCat(path, "/", i), items[i], keys);
  } else if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    keys.push_back(absl::StrCat(path, " ", checkpoint::DtypeName(tensor.scalar_type()), " [",
                                absl::StrJoin(tensor.sizes(), ", "), "]"));
  } else {
    keys.push_back(absl::StrCat(path, " ", value.tagKind()));
  }
}

std::string KeysIn(const std::string& path) {
  const checkpoint::State state = Load(path);
  std::vector<std::string> keys;
  AddKeys("", state.root, keys);
  for (const auto& [rank, own] : state.per_rank) {
    AddKeys(absl::StrCat("per_rank/", rank), own, keys);
  }
  return absl::StrJoin(keys, "\n");
}

// Has a run write this checkpoint, and returns its path.
std::string WriteNow(const Golden& golden) {
  TrainerOptions options = OptionsOf(golden);
  const std::string directory =
      absl::StrCat(testing::TempDir(), "/golden_test_now_", golden.setting, "_", golden.format);
  std::filesystem::remove_all(directory);
  options.checkpoint.manager.directory = directory;
  options.checkpoint.manager.format = golden.format;
  const bool at_end = absl::string_view(golden.setting) == "epoch_1";
  options.stop_at_step = at_end ? 11 : 4;
  int64_t ignored = 0;
  Trained(golden, options, ignored);
  const checkpoint::Folder folder = checkpoint::Manager::FolderAt(directory);
  const auto files = folder.List();
  if (!files.ok() || files->empty()) return directory;
  EXPECT_TRUE(absl::StartsWith(files->back().file, at_end ? "epoch_1." : "epoch_0_step_4."))
      << files->back().file;
  return folder.PathOf(files->back().file);
}

class NewestTest : public testing::TestWithParam<Golden> {};

INSTANTIATE_TEST_SUITE_P(All, NewestTest, testing::ValuesIn(Newest()), TestName);

TEST_P(NewestTest, HasTheKeysThatRunsWriteNow) {
  const Golden& golden = GetParam();
  const std::string now = WriteNow(golden);
  const char* to = std::getenv("DDP_WRITE_GOLDEN");
  if (to == nullptr) {
    EXPECT_EQ(KeysIn(now), KeysIn(CopyOf(InTestdata(NameOf(golden)))))
        << "a run writes other keys than those of version " << kNewest
        << ": make that the next version, and add its files, as said at the top of this file";
    return;
  }
  const std::filesystem::path place(absl::StrCat(to, "/", NameOf(golden)));
  std::filesystem::remove_all(place);
  std::filesystem::copy(now, place, std::filesystem::copy_options::recursive);
  if (absl::StrContains(now, "sharded")) return;
  // Runs with sharded state end with the same.
  checkpoint::State end;
  int64_t ignored = 0;
  end.root.insert("model", Trained(golden, OptionsOf(golden), ignored));
  const absl::Status written =
      checkpoint::CreateFormat("pt").value()->Write(end, absl::StrCat(to, "/", EndOfNewest()));
  EXPECT_TRUE(written.ok()) << written;
}

}  // namespace
}  // namespace ddp::trainer
