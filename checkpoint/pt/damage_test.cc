// Damage to files of format pt: never loaded silently, and the message names the file, and the
// tensor that is hit.
//
// DDP_FLIPS=10000 is the long form of the random flips.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "checkpoint/format.h"
#include "checkpoint/state.h"
#include "checkpoint/state_testing.h"

namespace ddp::checkpoint::pt {
namespace {

// A file whose tensors each have a byte of their own, by which they are found in it.
class DamageTest : public testing::Test {
 protected:
  void Write(int64_t bytes_each) {
    c10::impl::GenericDict model = NewTree();
    for (const char* name : {"first", "second", "third"}) {
      const int byte = name[0];
      model.insert(name, at::full({bytes_each}, byte, at::kByte));
    }
    state_.root.insert("epoch", int64_t{3});
    state_.root.insert("model", model);
    path_ = absl::StrCat(testing::TempDir(), "/damage_test.pt");
    ASSERT_TRUE(RemoveTree(path_).ok());
    ASSERT_TRUE(format_->Write(state_, path_).ok());
    whole_ = ReadFile(path_).value();
    for (const char* name : {"first", "second", "third"}) {
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

  // Overwrites bytes of the file. In place: a file system may sync one that is truncated first.
  void Put(size_t at, absl::string_view bytes) {
    const int fd = open(path_.c_str(), O_WRONLY | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    ASSERT_EQ(pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(at)),
              static_cast<ssize_t>(bytes.size()));
    close(fd);
  }

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

TEST_F(DamageTest, RandomFlipsInEightMebibytes) {
  const char* given = std::getenv("DDP_FLIPS");
  int flips = 100;
  if (given != nullptr) {
    ASSERT_TRUE(absl::SimpleAtoi(given, &flips)) << "DDP_FLIPS=" << given;
  }
  Write((int64_t{8} << 20) / 3);
  std::mt19937_64 random(7);
  for (int i = 0; i < flips && !HasFailure(); ++i) {
    const auto at = static_cast<size_t>(random() % whole_.size());
    Put(at, std::string(1, static_cast<char>(whole_[at] ^ 1 << random() % 8)));
    IsRefused(at);
    Restore(at, 1);
  }
  EXPECT_TRUE(format_->Read(path_).ok());
}

}  // namespace
}  // namespace ddp::checkpoint::pt
