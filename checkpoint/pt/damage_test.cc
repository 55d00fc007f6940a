// Damage to files of format pt, and random damage to those of each format: never loaded silently,
// and the message names the file, and the tensor that is hit.
//
// DDP_FLIPS=10000 is the long form of the random flips.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "checkpoint/format.h"
#include "checkpoint/state.h"
#include "checkpoint/state_testing.h"

namespace ddp::checkpoint::pt {
namespace {

constexpr const char* kNames[] = {"first", "second", "third"};

// Tensors that each have a byte of their own, by which they are found in a file. They are parts of
// one storage, as a model's are with ZeRO.
State StateOf(int64_t bytes_each) {
  State state;
  c10::impl::GenericDict model = NewTree();
  const at::Tensor flat = at::empty({bytes_each * std::ssize(kNames)}, at::kByte);
  for (int64_t i = 0; i < std::ssize(kNames); ++i) {
    const at::Tensor tensor = flat.narrow(0, i * bytes_each, bytes_each);
    model.insert(kNames[i], tensor.fill_(int{kNames[i][0]}));
  }
  state.root.insert("epoch", int64_t{3});
  state.root.insert("model", model);
  return state;
}

// Overwrites bytes of a file. In place: a file system may sync one that is truncated first.
void PutAt(const std::string& path, size_t at, absl::string_view bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(at)),
            static_cast<ssize_t>(bytes.size()));
  close(fd);
}

class DamageTest : public testing::Test {
 protected:
  void Write(int64_t bytes_each) {
    state_ = StateOf(bytes_each);
    path_ = absl::StrCat(testing::TempDir(), "/damage_test.pt");
    ASSERT_TRUE(RemoveTree(path_).ok());
    ASSERT_TRUE(format_->Write(state_, path_).ok());
    whole_ = ReadFile(path_).value();
    for (const char* name : kNames) {
      const size_t at = whole_.find(std::string(static_cast<size_t>(bytes_each), name[0]));
      ASSERT_NE(at, std::string::npos);
      begins_[at] = absl::StrCat("'model/", name, "'");
    }
    bytes_each_ = static_cast<size_t>(bytes_each);
  }

  // The quoted path of the tensor that byte `at` of the file is in; empty for other bytes.
  std::string TensorAt(size_t at) const {
    auto it = begins_.upper_bound(at);
    if (it == begins_.begin()) return "";
    --it;
    return at < it->first + bytes_each_ ? it->second : "";
  }

  // Reads the file of which byte `at` is damaged. Returns whether it was refused.
  bool IsRefused(size_t at) {
    const absl::StatusOr<State> read = format_->Read(path_);
    if (read.ok()) {
      EXPECT_EQ(Difference(state_.root, read->root), "") << "byte " << at;
      EXPECT_EQ(TensorAt(at), "") << "byte " << at;
      return false;
    }
    EXPECT_EQ(read.status().code(), absl::StatusCode::kDataLoss) << at << ": " << read.status();
    EXPECT_TRUE(absl::StrContains(read.status().message(), path_)) << read.status();
    EXPECT_TRUE(absl::StrContains(read.status().message(), TensorAt(at)))
        << at << " is in " << TensorAt(at) << ": " << read.status();
    return true;
  }

  void Put(size_t at, absl::string_view bytes) { PutAt(path_, at, bytes); }

  // Puts the original bytes back.
  void Restore(size_t at, size_t size) { Put(at, absl::string_view(whole_).substr(at, size)); }

  const std::unique_ptr<Format> format_ = CreateFormat("pt").value();
  State state_;
  std::string path_;
  std::string whole_;
  std::map<size_t, std::string> begins_;
  size_t bytes_each_ = 0;
};

TEST_F(DamageTest, EveryFlippedByteIsNamedOrHarmless) {
  Write(70);
  size_t refused = 0;
  for (size_t at = 0; at < whole_.size(); ++at) {
    for (int mask : {0x01, 0x10, 0x80, 0xff}) {
      Put(at, std::string(1, static_cast<char>(whole_[at] ^ mask)));
      refused += IsRefused(at);
      if (HasFailure()) return;
    }
    Restore(at, 1);
  }
  // Some bytes mean nothing (padding, dates); most do.
  EXPECT_GT(refused, 2 * whole_.size());
}

// As after a power failure: a block that was never written, or that has what another should have.
TEST_F(DamageTest, LostAndSwappedBlocksAreSeen) {
  Write(3000);
  constexpr size_t kBlock = 512;
  for (size_t at = 0; at + kBlock <= whole_.size(); at += kBlock) {
    const std::string zeros(kBlock, '\0');
    for (const std::string& other : {zeros, whole_.substr(whole_.size() - at - kBlock, kBlock)}) {
      if (other == whole_.substr(at, kBlock)) continue;
      Put(at, other);
      EXPECT_EQ(format_->Read(path_).status().code(), absl::StatusCode::kDataLoss) << at;
    }
    Restore(at, kBlock);
  }
  EXPECT_TRUE(format_->Read(path_).ok());
}

TEST_F(DamageTest, EveryTruncationNamesTheFile) {
  Write(70);
  for (size_t size = whole_.size(); size-- > 0;) {
    ASSERT_EQ(truncate(path_.c_str(), static_cast<off_t>(size)), 0);
    const absl::Status status = format_->Read(path_).status();
    ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << size << ": " << status;
    ASSERT_TRUE(absl::StrContains(status.message(), path_)) << status;
  }
}

// A checkpoint of a format is one file or several, of which each bit may flip.
class FlipsTest : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Formats, FlipsTest, testing::Values("pt", "safetensors", "sharded"),
                         [](const auto& info) { return info.param; });

TEST_P(FlipsTest, RandomFlipsInEightMebibytes) {
  const char* given = std::getenv("DDP_FLIPS");
  int flips = 100;
  if (given != nullptr) {
    ASSERT_TRUE(absl::SimpleAtoi(given, &flips)) << "DDP_FLIPS=" << given;
  }
  const std::unique_ptr<Format> format = CreateFormat(GetParam()).value();
  const std::string path = absl::StrCat(testing::TempDir(), "/flips_test.", GetParam());
  constexpr int64_t kBytesEach = (int64_t{8} << 20) / 3;
  const State state = StateOf(kBytesEach);
  ASSERT_TRUE(RemoveTree(path).ok());
  if (format->all_ranks_write()) {
    ASSERT_TRUE(MakeDirectories(path).ok());
  }
  ASSERT_TRUE(format->Write(state, path).ok());
  std::vector<std::string> files = {path};
  if (std::filesystem::is_directory(path)) {
    files = ListDirectory(path).value();
    for (std::string& file : files) file = absl::StrCat(path, "/", file);
  }
  constexpr auto kEach = static_cast<size_t>(kBytesEach);
  struct Place {
    size_t file;
    size_t begin;
    const char* name;
  };
  std::vector<Place> places;
  std::vector<std::string> whole;
  size_t size = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    whole.push_back(ReadFile(files[i]).value());
    size += whole[i].size();
    for (const char* name : kNames) {
      const size_t begin = whole[i].find(std::string(kEach, name[0]));
      if (begin != std::string::npos) places.push_back({i, begin, name});
    }
  }
  ASSERT_EQ(places.size(), 3u);
  std::mt19937_64 random(7);
  for (int i = 0; i < flips && !HasFailure(); ++i) {
    size_t at = static_cast<size_t>(random() % size), file = 0;
    while (at >= whole[file].size()) at -= whole[file++].size();
    const char byte = whole[file][at];
    SCOPED_TRACE(absl::StrCat("byte ", at, " of ", files[file]));
    PutAt(files[file], at, std::string(1, static_cast<char>(byte ^ 1 << random() % 8)));
    const absl::StatusOr<State> read = format->Read(path);
    PutAt(files[file], at, std::string(1, byte));
    std::string hit;  // the tensor that it is in
    for (const Place& place : places) {
      if (place.file == file && place.begin <= at && at < place.begin + kEach) hit = place.name;
    }
    if (read.ok()) {
      EXPECT_EQ(hit, "");
      EXPECT_EQ(Difference(state.root, read->root), "");
      continue;
    }
    EXPECT_EQ(read.status().code(), absl::StatusCode::kDataLoss) << read.status();
    EXPECT_TRUE(absl::StrContains(read.status().message(), path)) << read.status();
    EXPECT_TRUE(absl::StrContains(read.status().message(), hit)) << hit << ": " << read.status();
  }
  EXPECT_TRUE(format->Read(path).ok());
}

}  // namespace
}  // namespace ddp::checkpoint::pt
