// The index alone: what Python wrote, what this repository writes, and what nobody should.
#include "checkpoint/dcp/metadata.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/file.h"
#include "base/runfiles.h"
#include "checkpoint/dcp/metadata_writer.h"

namespace ddp::checkpoint::dcp {
namespace {

constexpr absl::string_view kGolden[] = {"one_rank", "two_ranks"};

std::string Golden(absl::string_view folder) {
  return ReadFile(
             Runfile(absl::StrCat("libtorch_ddp/checkpoint/dcp/testdata/", folder, "/.metadata"))
                 .value())
      .value();
}

std::string Text(const Metadata& metadata) {
  std::string text;
  const auto add_item = [&](const Item& item) {
    absl::StrAppend(&text, " ", item.file, "@", item.offset, "+", item.size);
  };
  for (const Entry& entry : metadata.entries) {
    absl::StrAppend(&text, entry.name, " (");
    for (const Key& key : entry.path) {
      const auto* name = std::get_if<std::string>(&key);
      absl::StrAppend(&text, name != nullptr ? *name : absl::StrCat(std::get<int64_t>(key)), "|");
    }
    absl::StrAppend(&text, ")");
    if (const auto* item = std::get_if<Item>(&entry.value)) {
      add_item(*item);
    } else {
      const auto& tensor = std::get<TensorInfo>(entry.value);
      absl::StrAppend(&text, " ", c10::toString(tensor.dtype), ShapeText(tensor.shape));
      for (const Chunk& chunk : tensor.chunks) {
        absl::StrAppend(&text, " ", ToString({.global_shape = tensor.shape, .part = chunk.box}));
        add_item(chunk.item);
      }
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

Metadata Sample() {
  Metadata metadata;
  metadata.entries.push_back(
      {.name = "model.w",
       .path = {"model", "w"},
       .value = TensorInfo{.dtype = c10::ScalarType::BFloat16,
                           .shape = {3, 4},
                           .chunks = {Chunk{Box{{0, 0}, {2, 4}}, Item{"__0_0.distcp", 0, 1000}},
                                      Chunk{Box{{2, 0}, {1, 4}}, Item{"__1_0.distcp", 0, 900}}}}});
  metadata.entries.push_back({.name = "list.0.x",
                              .path = {"list", int64_t{0}, "x"},
                              .value = Item{"__0_0.distcp", 1000, 400}});
  metadata.entries.push_back(
      {.name = "scalar",
       .path = {"scalar"},
       .value =
           TensorInfo{.dtype = c10::ScalarType::Double,
                      .shape = {},
                      .chunks = {Chunk{Box{}, Item{"__0_0.distcp", uint64_t{1} << 40, 500}}}}});
  return metadata;
}

void ExpectRefused(absl::string_view pickle, absl::string_view what,
                   absl::StatusCode code = absl::StatusCode::kDataLoss) {
  const absl::Status status = ParseMetadata(pickle).status();
  EXPECT_EQ(status.code(), code) << what << ": " << status;
  EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
}

TEST(MetadataTest, WhatIsWrittenIsRead) {
  const absl::StatusOr<Metadata> read = ParseMetadata(WriteMetadata(Sample()));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Text(*read), Text(Sample()));
  EXPECT_EQ(WriteMetadata(Sample()), WriteMetadata(Sample()));
  const absl::StatusOr<Metadata> empty = ParseMetadata(WriteMetadata({}));
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_TRUE(empty->entries.empty());
}

TEST(MetadataTest, WhatPythonWroteIsReadAndWritten) {
  for (absl::string_view folder : kGolden) {
    const absl::StatusOr<Metadata> read = ParseMetadata(Golden(folder));
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_GT(read->entries.size(), 10u);
    const absl::StatusOr<Metadata> again = ParseMetadata(WriteMetadata(*read));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(Text(*read), Text(*again));
  }
}

TEST(MetadataTest, WhatIsCutOffIsRefused) {
  for (const std::string& whole : {Golden("two_ranks"), WriteMetadata(Sample())}) {
    for (size_t size = 0; size < whole.size(); ++size) {
      const absl::Status status = ParseMetadata(absl::string_view(whole).substr(0, size)).status();
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << "at " << size << ": " << status;
    }
    ExpectRefused(whole + "x", "goes on after");
  }
}

// Nothing but the pickle's own redundancy protects it: a flipped byte in a name may go unseen, but
// shapes, types and places always belong together.
TEST(MetadataTest, AFlippedByteChangesNamesAtMost) {
  const std::string whole = WriteMetadata(Sample());
  size_t seen = 0;
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int mask : {0x01, 0x20, 0x80, 0xff}) {
      std::string flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ mask);
      const absl::StatusOr<Metadata> read = ParseMetadata(flipped);
      if (!read.ok()) {
        ASSERT_TRUE(absl::IsDataLoss(read.status()) || absl::IsUnimplemented(read.status()))
            << read.status();
        ++seen;
        continue;
      }
      ASSERT_EQ(read->entries.size(), 3u) << "byte " << at;
    }
  }
  EXPECT_GT(seen, 3 * whole.size());
}

// Pickles that Python's pickle.load would run.
TEST(MetadataTest, NoCodeIsRun) {
  using namespace std::string_literals;
  const std::string proto = "\x80\x02", proto4 = "\x80\x04";
  const std::string module = "torch.distributed.checkpoint.metadata";
  ExpectRefused(proto + "cos\nsystem\nX\x02\0\0\0id\x85R."s, "'os.system'");
  ExpectRefused(proto + "cposix\nsystem\nX\x02\0\0\0id\x85R."s, "'posix.system'");
  ExpectRefused(proto + "cbuiltins\neval\nX\x01\0\0\0001\x85R."s, "'builtins.eval'");
  ExpectRefused(proto4 + "\x8c\x02os\x8c\x06system\x93.", "'os.system'");
  ExpectRefused(proto4 + "\x8c\x04runs\x8c\x03run\x93.", "'runs.run'");
  // Names that lead from a class that is known to one that is not.
  ExpectRefused(proto4 + "\x8c\x25" + module + "\x8c\x11Metadata.__init__\x93.",
                "metadata.Metadata.__init__'");
  ExpectRefused(proto + "c" + module + "\nMetadata.__init__\n.", "metadata.Metadata.__init__'");
  // A persistent id, an extension code, instances as protocol 0 makes them.
  ExpectRefused(proto + "X\x01\0\0\0aQ."s, "persistent id");
  ExpectRefused(proto + "\x82\x01.", "pickle, byte");
  ExpectRefused(proto + "(ios\nsystem\n.", "pickle, byte");
  ExpectRefused(proto + "(cos\nsystem\no.", "'os.system'");
  // getattr is how Python names a member of an enum; it is never called.
  ExpectRefused(proto + "cbuiltins\ngetattr\nc" + module + "\nMetadata\nX\x08\0\0\0__init__\x86R."s,
                "lacks a torch.distributed.checkpoint.metadata.Metadata");
}

TEST(MetadataTest, SmallPicklesStaySmall) {
  const std::string proto = "\x80\x04";
  ExpectRefused(proto + "\x8d\xff\xff\xff\xff\xff\xff\xff\x7f", "cut off");
  ExpectRefused(proto + "\x95\xff\xff\xff\xff\xff\xff\xff\xff", "cut off");
  ExpectRefused(proto + "X\xff\xff\xff\xff", "cut off");
  ExpectRefused(proto + std::string(100000, ']'), "ends without");
  ExpectRefused(proto + std::string(100000, '(') + ".", "middle of a value");
  // Each list holds the one before it twice: 2^64 elements, if anything followed them.
  std::string bomb = proto + "]q" + std::string(1, 0);
  for (int i = 1; i < 65; ++i) {
    absl::StrAppend(&bomb, "]q", std::string(1, static_cast<char>(i)), "(h",
                    std::string(1, static_cast<char>(i - 1)), "h",
                    std::string(1, static_cast<char>(i - 1)), "e");
  }
  ExpectRefused(bomb + ".", "pickle");
  // A path deeper than any dict is.
  Metadata deep;
  Entry entry{.name = "a", .path = {"a"}, .value = Item{"f", 0, 1}};
  for (int i = 0; i < 200; ++i) {
    absl::StrAppend(&entry.name, ".a");
    entry.path.emplace_back("a");
  }
  deep.entries.push_back(entry);
  ExpectRefused(WriteMetadata(deep), "too deeply");
}

// The pickle of the sample after a change to it.
std::string Changed(const std::function<void(Metadata&)>& change) {
  Metadata metadata = Sample();
  change(metadata);
  return WriteMetadata(metadata);
}

TensorInfo& Weight(Metadata& metadata) { return std::get<TensorInfo>(metadata.entries[0].value); }

TEST(MetadataTest, WhatDoesNotBelongTogetherIsRefused) {
  const auto refused = [](absl::string_view what, const std::function<void(Metadata&)>& change) {
    ExpectRefused(Changed(change), what);
  };
  for (const char* file :
       {"../secret", "/etc/passwd", "..", ".", "", "a/b", "__0_0.distcp/../../x"}) {
    refused("which is no file of the checkpoint's folder",
            [file](Metadata& metadata) { std::get<Item>(metadata.entries[1].value).file = file; });
  }
  refused("no file of", [](Metadata& metadata) {
    std::get<Item>(metadata.entries[1].value).file = std::string("a\0b", 3);
  });
  refused("4 of its 12 elements", [](Metadata& metadata) { Weight(metadata).chunks.pop_back(); });
  refused("'model.w'", [](Metadata& metadata) { Weight(metadata).chunks.pop_back(); });
  refused("overlap", [](Metadata& metadata) { Weight(metadata).chunks[1].box.offset = {1, 0}; });
  refused("reaches outside", [](Metadata& metadata) { Weight(metadata).shape = {2, 4}; });
  refused("has no chunk with 4 of its 16", [](Metadata& metadata) {
    Weight(metadata).shape = {4, 4};
  });
  refused("16 bytes of a chunk in 15",
          [](Metadata& metadata) { Weight(metadata).chunks[0].item.size = 15; });
  refused("in the same bytes",
          [](Metadata& metadata) { std::get<Item>(metadata.entries[1].value).offset = 999; });
  refused("in the same bytes", [](Metadata& metadata) {
    Weight(metadata).chunks[1].item = Weight(metadata).chunks[0].item;
  });
  refused("from byte", [](Metadata& metadata) {
    std::get<Item>(metadata.entries[1].value).offset = uint64_t{1} << 63;
  });
  refused("from byte",
          [](Metadata& metadata) { std::get<Item>(metadata.entries[1].value).size = 0; });
  refused("from byte", [](Metadata& metadata) {
    auto& item = std::get<Item>(metadata.entries[1].value);
    item.offset = (uint64_t{1} << 63) - 1;
    item.size = (uint64_t{1} << 63) - 1;
  });
  refused("twice", [](Metadata& metadata) { metadata.entries.push_back(metadata.entries[1]); });
  refused("path of another name",
          [](Metadata& metadata) { metadata.entries[1].name = "list.1.x"; });
  refused("bad index", [](Metadata& metadata) {
    metadata.entries[1].path = {"list", int64_t{-1}, "x"};
    metadata.entries[1].name = "list.-1.x";
  });
  refused("bad index", [](Metadata& metadata) {
    metadata.entries[1].path = {int64_t{7}};
    metadata.entries[1].name = "7";
  });
  refused("no tensor has shape", [](Metadata& metadata) {
    Weight(metadata).shape = {int64_t{1} << 32, int64_t{1} << 30};
    Weight(metadata).chunks.clear();
  });
  refused("has a shape that is none", [](Metadata& metadata) { Weight(metadata).shape = {-1}; });
  refused("more than 4 KiB", [](Metadata& metadata) {
    metadata.entries[2].name = std::string(5000, 'n');
    metadata.entries[2].path = {metadata.entries[2].name};
  });
}

TEST(MetadataTest, OfAnotherKindThanExpected) {
  const std::string whole = WriteMetadata(Sample());
  const auto replaced = [&](absl::string_view from, absl::string_view to) {
    const std::string changed = absl::StrReplaceAll(whole, {{from, to}});
    EXPECT_NE(changed, whole) << from;
    return changed;
  };
  ExpectRefused(replaced("BytesStorageMetadata", "TensorStorageMetadata"), "pickle");
  ExpectRefused(replaced("state_dict_metadata", "state_dict_Metadata"),
                "no field state_dict_metadata");
  ExpectRefused(replaced("storage_data", "storage_Data"), "no field storage_data");
  ExpectRefused(replaced("planner_data", "planner_Data"), "", absl::StatusCode::kOk);
  ExpectRefused(replaced("bfloat16", "bfloat17"), "'torch.bfloat17'");
  ExpectRefused(replaced("torch.strided", "torch.blocked"), "no dense tensor",
                absl::StatusCode::kUnimplemented);
  ExpectRefused(replaced("1.0.0", "2.0.0"), "version '2.0.0'", absl::StatusCode::kUnimplemented);
  ExpectRefused("\x80\x02}.", "lacks a torch.distributed.checkpoint.metadata.Metadata");
  ExpectRefused("\x80\x02K\x01.", "lacks a");
  ExpectRefused("", "ends without");
}

}  // namespace
}  // namespace ddp::checkpoint::dcp
