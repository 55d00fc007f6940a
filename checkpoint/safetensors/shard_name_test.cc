#include "checkpoint/safetensors/shard_name.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"

namespace ddp::checkpoint::safetensors {
namespace {

using Files = std::vector<std::string>;

TEST(ShardNameTest, NumbersComeBack) {
  for (const char* file :
       {"model-00002-of-00003.safetensors", "model-00001-of-00001.safetensors",
        "diffusion_pytorch_model.fp16-00010-of-00012.safetensors", "a-b-1-of-2.safetensors"}) {
    const std::optional<ShardName> name = ParseShardName(file);
    ASSERT_TRUE(name.has_value()) << file;
    EXPECT_EQ(name->FileOf(name->number), file);
  }
  EXPECT_EQ(ParseShardName("model-00002-of-00003.safetensors")->FileOf(1),
            "model-00001-of-00003.safetensors");
}

TEST(ShardNameTest, OtherNames) {
  for (const char* file :
       {"", "model.safetensors", "model-00000-of-00002.safetensors",
        "model-00003-of-00002.safetensors", "model-1-of-00002.safetensors",
        "model-00001-of-00002.bin", "-00001-of-00002.safetensors", "00001-of-00002.safetensors",
        "model-00001-of-.safetensors", "model--of-00002.safetensors", "rank_00001.safetensors",
        "model-0000001-of-0000002.safetensors"}) {
    EXPECT_FALSE(ParseShardName(file).has_value()) << file;
  }
}

TEST(ShardNameTest, WhatIsMissingIsNamed) {
  const std::string folder = absl::StrCat(testing::TempDir(), "/shards");
  std::filesystem::remove_all(folder);
  EXPECT_EQ(AllShards(folder).value(), Files());
  std::filesystem::create_directories(folder);
  const auto write = [&](const std::string& file) {
    ASSERT_TRUE(WriteFileAtomically(absl::StrCat(folder, "/", file), "x").ok());
  };
  write("config.json");
  EXPECT_EQ(AllShards(folder).value(), Files());
  write("m-01-of-20.safetensors");
  const absl::Status many = AllShards(folder).status();
  EXPECT_EQ(many.code(), absl::StatusCode::kDataLoss) << many;
  EXPECT_TRUE(absl::StrContains(many.message(), "lacks 19 of the 20 files")) << many;
  EXPECT_TRUE(absl::StrContains(many.message(), "m-11-of-20.safetensors, …")) << many;
  std::filesystem::remove(folder + "/m-01-of-20.safetensors");
  write("m-1-of-3.safetensors");
  write("m-3-of-3.safetensors");
  // As in a cache of which a part was removed.
  std::filesystem::create_symlink("none", folder + "/m-2-of-3.safetensors");
  const absl::Status one = AllShards(folder).status();
  EXPECT_EQ(one.code(), absl::StatusCode::kDataLoss) << one;
  EXPECT_TRUE(absl::StrContains(one.message(), absl::StrCat(folder, " lacks 1 of the 3"))) << one;
  EXPECT_TRUE(absl::StrContains(one.message(), ": m-2-of-3.safetensors;")) << one;
  std::filesystem::remove(folder + "/m-2-of-3.safetensors");
  write("m-2-of-3.safetensors");
  EXPECT_EQ(AllShards(folder).value(),
            (Files{"m-1-of-3.safetensors", "m-2-of-3.safetensors", "m-3-of-3.safetensors"}));
  write("n-1-of-3.safetensors");
  const absl::Status mixed = AllShards(folder).status();
  EXPECT_EQ(mixed.code(), absl::StatusCode::kFailedPrecondition) << mixed;
  for (const char* file : {"m-1-of-3.safetensors", "n-1-of-3.safetensors"}) {
    EXPECT_TRUE(absl::StrContains(mixed.message(), file)) << mixed;
  }
}

}  // namespace
}  // namespace ddp::checkpoint::safetensors
