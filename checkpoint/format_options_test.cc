// The format's own options, in a program that does not link the default format.
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/coordinator.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/options.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint {
namespace {

struct LockedOptions {
  int64_t key = 0;
};
constexpr auto OptionsOf(const LockedOptions&) {
  return Options(Option("key", &LockedOptions::key, "what reads need"));
}

// A file has its key. Whatever reads it without this key finds it damaged.
class LockedFormat : public Format {
 public:
  explicit LockedFormat(const FormatOptions& options) : options_(options) {}

  absl::string_view name() const override { return "locked"; }
  absl::string_view suffix() const override { return ".locked"; }
  bool all_ranks_write() const override { return false; }

  absl::Status Write(const State&, const std::string& path, TensorSource*) override {
    return WriteFileAtomically(path, absl::StrCat(Key()));
  }
  absl::StatusOr<State> Read(const std::string& path, const ReadRequest&) override {
    if (absl::Status complete = CheckComplete(path); !complete.ok()) return complete;
    State state;
    state.root.insert("reader", int64_t{options_.ranks == nullptr ? -1 : options_.ranks->rank()});
    return state;
  }
  absl::Status CheckComplete(const std::string& path) override {
    const absl::StatusOr<std::string> text = ReadFile(path);
    if (!text.ok()) return text.status();
    if (*text == absl::StrCat(Key())) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(path, " has another key than ", Key()));
  }

 private:
  int64_t Key() const { return options_.implementations.Get<LockedOptions>("locked").key; }

  const FormatOptions options_;
};

const Registration<FormatRegistry> kLocked(
    "locked", FormatEntry{.create = +[](const FormatOptions& options) -> std::unique_ptr<Format> {
                            return std::make_unique<LockedFormat>(options);
                          },
                          .options = &AnyOptions::Of<LockedOptions>});

ManagerOptions WithKey(int64_t key) {
  ManagerOptions options;
  options.directory = absl::StrCat(testing::TempDir(), "/format_options_test");
  options.format = "locked";
  options.implementations.Mutable<LockedOptions>("locked").key = key;
  return options;
}

TEST(FormatOptionsTest, ReachWritingAndReading) {
  const SingleRank alone;
  const ManagerOptions options = WithKey(7);
  std::filesystem::remove_all(options.directory);
  auto manager = Manager::Create(options, alone).value();
  const std::string path = manager->Save("epoch_1", State()).value();
  EXPECT_EQ(manager->Newest().value(), path);
  const absl::StatusOr<std::optional<Loaded>> loaded = manager->LoadNewest();
  ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
  EXPECT_EQ((*loaded)->state.root.at("reader").toInt(), 0);

  EXPECT_TRUE(Manager::Load(path, {}, {.implementations = options.implementations}).ok());
  EXPECT_EQ(Manager::Load(path).status().code(), absl::StatusCode::kDataLoss);
  auto other = Manager::Create(WithKey(8), alone).value();
  EXPECT_EQ(other->Newest().status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(other->LoadNewest().status().code(), absl::StatusCode::kDataLoss);
}

TEST(FormatOptionsTest, TheDefaultFormatIsNeededOnlyWithAFolder) {
  ManagerOptions options;
  EXPECT_EQ(ValidateOptions(options), absl::OkStatus());
  EXPECT_EQ(Validate(options), absl::OkStatus());
  options.directory = absl::StrCat(testing::TempDir(), "/no_format");
  EXPECT_EQ(Validate(options).message(), "format=pt is none of locked");
  EXPECT_EQ(Validate(options).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(ProblemOf(Validate(options)).has_value());
  const SingleRank alone;
  const absl::Status created = Manager::Create(options, alone).status();
  EXPECT_TRUE(ProblemOf(created).has_value()) << created;
  EXPECT_FALSE(std::filesystem::exists(options.directory));
  // An unknown format is an error, although without a directory it is not used.
  EXPECT_EQ(Validate({.directory = "", .format = "hdf5"}).message(),
            "format=hdf5 is none of locked");
}

}  // namespace
}  // namespace ddp::checkpoint
