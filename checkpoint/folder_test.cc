#include "checkpoint/folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/file_faults.h"
#include "checkpoint/name.h"

namespace ddp::checkpoint {
namespace {

using Files = std::vector<std::string>;

class FolderTest : public testing::Test {
 protected:
  FolderTest() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ = absl::StrCat(testing::TempDir(), "/folder_test_", info->name());
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
  }
  Folder Make(FileSystem* files = FileSystem::Default()) const {
    return Folder(directory_, {".pt", ".parts"}, files);
  }
  std::string Path(absl::string_view name) const { return absl::StrCat(directory_, "/", name); }
  void Write(absl::string_view name, absl::string_view text = "x") const {
    ASSERT_TRUE(WriteFileAtomically(Path(name), text).ok());
  }
  void WriteParts(absl::string_view name) const {
    std::filesystem::create_directories(Path(name));
    Write(absl::StrCat(name, "/rank_0"), "abc");
    Write(absl::StrCat(name, "/rank_1"), "de");
  }
  Files Names() const { return ListDirectory(directory_).value(); }
  FileIdentity Seen(absl::string_view name) const { return IdentityOf(Path(name)).value(); }

  std::string directory_;
};

TEST_F(FolderTest, ListsCheckpointsOldestFirst) {
  for (const char* name : {"epoch_10.pt", "epoch_9.pt", "best.pt", "epoch_3.pt.damaged",
                           ".epoch_9.pt.json", ".epoch_9.pt.pinned", "epoch_4.txt"}) {
    Write(name);
  }
  WriteParts("epoch_9_step_3.parts");
  Files files;
  const std::vector<NamedFile> listed = Make().List().value();
  for (const NamedFile& named : listed) files.push_back(named.file);
  EXPECT_EQ(files, (Files{"epoch_9.pt", "epoch_9_step_3.parts", "epoch_10.pt"}));
  Write("step_4.pt");
  EXPECT_EQ(Make().List().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Folder(Path("none"), {".pt"}).List().status().code(), absl::StatusCode::kNotFound);
}

// After a run has changed its format, and gone on from an older checkpoint.
TEST_F(FolderTest, OfOneNameInTwoFormatsTheOneSavedLaterIsTheNewer) {
  Write("step_9.pt");
  Write("step_10.pt");
  WriteParts("step_10.parts");
  Write("step_11.pt");
  const auto listed = [&] {
    Files files;
    const std::vector<NamedFile> found = Make().List().value();
    for (const NamedFile& named : found) files.push_back(named.file);
    return files;
  };
  const auto note = [&](absl::string_view name, int64_t seconds) {
    Write(absl::StrCat(".", name, ".json"), ToText({.time = absl::FromUnixSeconds(seconds)}));
  };
  const Files parts_last = {"step_9.pt", "step_10.pt", "step_10.parts", "step_11.pt"};
  const Files pt_last = {"step_9.pt", "step_10.parts", "step_10.pt", "step_11.pt"};
  note("step_10.pt", 1'000);
  note("step_10.parts", 2'000);
  EXPECT_EQ(listed(), parts_last);
  note("step_10.pt", 3'000);
  EXPECT_EQ(listed(), pt_last);
  // Without notes by the files.
  std::filesystem::remove(Path(".step_10.pt.json"));
  std::filesystem::remove(Path(".step_10.parts.json"));
  const auto now = std::filesystem::file_time_type::clock::now();
  std::filesystem::last_write_time(Path("step_10.parts"), now);
  std::filesystem::last_write_time(Path("step_10.pt"), now - std::chrono::hours(1));
  EXPECT_EQ(listed(), parts_last);
  std::filesystem::last_write_time(Path("step_10.pt"), now + std::chrono::hours(1));
  EXPECT_EQ(listed(), pt_last);
}

TEST_F(FolderTest, NotesComeBackAsTheyWere) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Notes notes{
      .time = absl::FromUnixNanos(1'700'000'000'123'456'789),
      .metrics = {{"test/accuracy", 0.1}, {"\"odd\"\n", -infinity}, {"", 1e308}, {"max", infinity}},
      .verified = true};
  EXPECT_EQ(ParseNotes(ToText(notes)), notes);
  const std::optional<Notes> nan =
      ParseNotes(ToText({.time = absl::UnixEpoch(), .metrics = {{"m", std::nan("")}}}));
  ASSERT_TRUE(nan.has_value());
  EXPECT_TRUE(std::isnan(nan->metrics.at("m")));
  EXPECT_FALSE(nan->verified);
  // Bytes that are no UTF-8 are no reason to lose the rest.
  EXPECT_EQ(ParseNotes(ToText({.time = absl::UnixEpoch(), .metrics = {{"\xff", 1}, {"m", 2}}}))
                ->metrics.at("m"),
            2);
}

TEST_F(FolderTest, TornNotesCountAsLost) {
  const std::string whole = ToText({.time = absl::Now(), .metrics = {{"m", 1}}, .verified = true});
  // Without the brace at the end.
  for (size_t size = 0; size + 2 <= whole.size(); ++size) {
    EXPECT_EQ(ParseNotes(whole.substr(0, size)), std::nullopt) << size;
  }
  for (const char* text :
       {"[]", "3", "{}", R"({"time": 3, "metrics": {}})", R"({"time": "yesterday", "metrics": {}})",
        R"({"time": "2026-01-31T12:00:00+00:00"})",
        R"({"time": "2026-01-31T12:00:00+00:00", "metrics": {"m": "x"}})"}) {
    EXPECT_EQ(ParseNotes(text), std::nullopt) << text;
  }
  EXPECT_TRUE(
      ParseNotes(R"({"time": "2026-01-31T12:00:00+00:00", "metrics": {}, "new": 1})").has_value());
  Write("epoch_1.pt");
  EXPECT_EQ(Make().NotesOf("epoch_1.pt"), std::nullopt);
  Write(".epoch_1.pt.json", std::string(2 << 20, ' '));
  EXPECT_EQ(Make().NotesOf("epoch_1.pt"), std::nullopt);
}

TEST_F(FolderTest, WhatIsKnownOfACheckpoint) {
  Write("epoch_1.pt");
  Write("epoch_2.pt");
  const absl::Time time = absl::FromUnixSeconds(1'000'000'000);
  Write(".epoch_2.pt.json", ToText({.time = time, .metrics = {{"m", 3}}, .verified = true}));
  ASSERT_TRUE(Make().Pin("epoch_2.pt").ok());
  const std::vector<Candidate> candidates = Make().Candidates().value();
  ASSERT_EQ(candidates.size(), 2u);
  // Notes that are lost.
  EXPECT_EQ(candidates[0].time, Seen("epoch_1.pt").changed);
  EXPECT_EQ(candidates[0].metrics, std::nullopt);
  EXPECT_FALSE(candidates[0].pinned);
  EXPECT_FALSE(candidates[0].verified);
  EXPECT_EQ(candidates[1].time, time);
  EXPECT_EQ(candidates[1].metrics->at("m"), 3);
  EXPECT_TRUE(candidates[1].pinned);
  EXPECT_TRUE(candidates[1].verified);
}

TEST_F(FolderTest, PinsOnceOrTwice) {
  const Folder folder = Make();
  Write("epoch_1.pt");
  EXPECT_FALSE(folder.IsPinned("epoch_1.pt"));
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(folder.Pin("epoch_1.pt").ok());
    EXPECT_TRUE(folder.IsPinned("epoch_1.pt"));
  }
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(folder.Unpin("epoch_1.pt").ok());
    EXPECT_FALSE(folder.IsPinned("epoch_1.pt"));
  }
  EXPECT_EQ(folder.Pin("epoch_2.pt").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Names(), Files{"epoch_1.pt"});
}

TEST_F(FolderTest, RemovesWithWhatIsBeside) {
  const Folder folder = Make();
  Write("epoch_1.pt");
  WriteParts("epoch_2.parts");
  for (const char* name : {"epoch_1.pt", "epoch_2.parts"}) {
    Write(absl::StrCat(".", name, ".json"));
    ASSERT_TRUE(folder.Pin(name).ok());
    EXPECT_TRUE(folder.Remove(name).ok());
    EXPECT_TRUE(folder.Remove(name).ok());
  }
  EXPECT_EQ(Names(), Files());
}

// A checkpoint whose notes went first would have lost its metrics, and would be kept for ever.
TEST_F(FolderTest, AFailedRemovalLeavesWhatIsBeside) {
  for (const std::string call : {"unlink", "rename", "fsync"}) {
    const std::string name = call == "unlink" ? "epoch_1.pt" : "epoch_1.parts";
    call == "unlink" ? Write(name) : WriteParts(name);
    Write(absl::StrCat(".", name, ".json"));
    FaultyFileSystem files({.call = call, .nth = 1, .error = EIO});
    EXPECT_FALSE(Make(&files).Remove(name).ok()) << call;
    EXPECT_TRUE(std::filesystem::exists(Path(absl::StrCat(".", name, ".json")))) << call;
    ASSERT_TRUE(Make().Remove(name).ok());
    Make().RemoveLeftovers();
    EXPECT_EQ(Names(), Files()) << call;
  }
}

TEST_F(FolderTest, QuarantineRenames) {
  const Folder folder = Make();
  for (const std::string expected :
       {"epoch_3.pt.damaged", "epoch_3.pt.damaged.2", "epoch_3.pt.damaged.3"}) {
    Write("epoch_3.pt", expected);
    Write(".epoch_3.pt.json");
    ASSERT_TRUE(folder.Pin("epoch_3.pt").ok());
    EXPECT_EQ(folder.Quarantine("epoch_3.pt", Seen("epoch_3.pt")).value(), expected);
    EXPECT_EQ(ReadFile(Path(expected)).value(), expected);
  }
  WriteParts("epoch_4.parts");
  EXPECT_EQ(folder.Quarantine("epoch_4.parts", Seen("epoch_4.parts")).value(),
            "epoch_4.parts.damaged");
  Write("epoch_5.txt.damaged");
  Write("epoch_5.pt.damaged.x");
  EXPECT_EQ(folder.Damaged().value(), (Files{"epoch_3.pt.damaged", "epoch_3.pt.damaged.2",
                                             "epoch_3.pt.damaged.3", "epoch_4.parts.damaged"}));
  EXPECT_TRUE(folder.List().value().empty());
}

// A user gives a checkpoint of any name to ckpt verify --quarantine.
TEST_F(FolderTest, QuarantineOfANameWithoutASuffix) {
  const Folder folder = Make();
  WriteParts("best.damaged");
  WriteParts("best");
  Write(".best.json", "somebody's own");
  EXPECT_EQ(folder.Quarantine("best", Seen("best")).value(), "best.damaged.2");
  EXPECT_EQ(Names(), (Files{".best.json", "best.damaged", "best.damaged.2"}));
  EXPECT_EQ(ReadFile(Path("best.damaged.2/rank_0")).value(), "abc");
  // The new name would be longer than file systems take.
  const std::string longest = std::string(252, 'x') + ".pt";
  std::ofstream(Path(longest)) << "x";
  const absl::Status status = folder.Quarantine(longest, Seen(longest)).status();
  EXPECT_FALSE(status.ok());
  EXPECT_TRUE(absl::StrContains(status.message(), Path(longest))) << status;
  EXPECT_TRUE(std::filesystem::exists(Path(longest)));
}

TEST_F(FolderTest, QuarantineOfALinkRenamesTheLink) {
  const Folder folder = Make();
  Write("elsewhere", "cut");
  std::filesystem::create_symlink("elsewhere", Path("epoch_3.pt"));
  std::filesystem::create_symlink("none", Path("epoch_3.pt.damaged"));  // a name that is taken
  EXPECT_EQ(folder.Quarantine("epoch_3.pt", Seen("epoch_3.pt")).value(), "epoch_3.pt.damaged.2");
  EXPECT_EQ(Names(), (Files{"elsewhere", "epoch_3.pt.damaged", "epoch_3.pt.damaged.2"}));
  EXPECT_EQ(ReadFile(Path("epoch_3.pt.damaged.2")).value(), "cut");
}

TEST_F(FolderTest, AbandonedCheckpointsDoNotCount) {
  const Folder folder = Make();
  for (const std::string expected : {"epoch_3.pt.abandoned", "epoch_3.pt.abandoned.2"}) {
    Write("epoch_3.pt");
    EXPECT_EQ(folder.Abandon("epoch_3.pt").value(), expected);
    EXPECT_TRUE(folder.List()->empty());
  }
  EXPECT_EQ(folder.Abandon("epoch_3.pt").value(), "");
  Write("epoch_4.pt.damaged");
  Write("epoch_4.pt.abandoned.x");
  EXPECT_EQ(folder.Abandoned().value(), (Files{"epoch_3.pt.abandoned", "epoch_3.pt.abandoned.2"}));
}

TEST_F(FolderTest, QuarantineLeavesWhatAnotherJobHasChanged) {
  const Folder folder = Make();
  Write("epoch_3.pt", "damaged");
  const FileIdentity seen = Seen("epoch_3.pt");
  {
    // Another job has found it, too, and was faster.
    std::filesystem::rename(Path("epoch_3.pt"), Path("epoch_3.pt.damaged"));
    EXPECT_EQ(folder.Quarantine("epoch_3.pt", seen).value(), "");
  }
  // Then it has saved a good one.
  Write("epoch_3.pt", "whole");
  EXPECT_EQ(folder.Quarantine("epoch_3.pt", seen).value(), "");
  EXPECT_EQ(ReadFile(Path("epoch_3.pt")).value(), "whole");
  {
    const auto saving = DirectoryLock::Shared(directory_);
    ASSERT_TRUE(saving.ok());
    EXPECT_EQ(folder.Quarantine("epoch_3.pt", Seen("epoch_3.pt")).value(), "");
  }
  FaultyFileSystem files({.call = "rename", .nth = 1, .error = EROFS});
  const absl::Status status = Make(&files).Quarantine("epoch_3.pt", Seen("epoch_3.pt")).status();
  EXPECT_TRUE(absl::StrContains(status.message(), Path("epoch_3.pt"))) << status;
  EXPECT_EQ(Names(), (Files{"epoch_3.pt", "epoch_3.pt.damaged"}));
}

TEST_F(FolderTest, LeftoversGoAndTheRestStays) {
  const Files stay = {".epoch_1.pt.json", ".mine.json", ".mine.pinned", "epoch_1.pt",
                      "epoch_2.pt.damaged"};
  for (const std::string& name : stay) Write(name);
  for (const char* name : {".epoch_3.pt.tmp-0123456789abcdef", ".epoch_9.pt.json",
                           ".epoch_9.pt.pinned", "..epoch_1.pt.json.tmp-0123456789abcdef"}) {
    Write(name);
  }
  WriteParts(".epoch_3.parts.tmp-0123456789abcdef");
  Make().RemoveLeftovers();
  EXPECT_EQ(Names(), stay);
}

TEST_F(FolderTest, FoldersOfDryRunsThatWereKilledGo) {
  for (const std::string name : {"dead00", "held00", "longer7", "new000"}) {
    const std::string folder = absl::StrCat(".dry_run.", name);
    WriteParts(folder);
    if (name == "new000") continue;
    std::filesystem::last_write_time(
        Path(folder), std::filesystem::file_time_type::clock::now() - std::chrono::hours(25));
  }
  const auto held = DirectoryLock::Shared(Path(".dry_run.held00"));
  ASSERT_TRUE(held.ok()) << held.status();
  Make().RemoveLeftovers();
  EXPECT_EQ(Names(), (Files{".dry_run.held00", ".dry_run.longer7", ".dry_run.new000"}));
}

TEST_F(FolderTest, BytesOnDisk) {
  Write("epoch_1.pt", "1234567");
  WriteParts("epoch_1.parts");
  EXPECT_EQ(BytesOnDisk(Path("epoch_1.pt")), 7u);
  EXPECT_EQ(BytesOnDisk(Path("epoch_1.parts")), 5u);
  EXPECT_EQ(BytesOnDisk(Path("none")), 0u);
  DropFromCache(Path("epoch_1.pt"));
  DropFromCache(Path("none"));
}

class Small : public FileSystem {
 public:
  int Statvfs(const char*, struct statvfs* info) override {
    *info = {};
    info->f_blocks = blocks;
    info->f_frsize = 1 << 20;
    info->f_bfree = 3;  // for root
    info->f_bavail = 2;
    return 0;
  }
  fsblkcnt_t blocks = 4;
};

TEST_F(FolderTest, RoomForTheNext) {
  Small files;
  const Folder folder = Make(&files);
  EXPECT_TRUE(folder.CheckRoom(2 << 20).ok());
  const absl::Status status = folder.CheckRoom((2 << 20) + (1 << 19));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  for (const std::string& part : {std::string("2.5 MiB"), std::string("2.0 MiB"), directory_}) {
    EXPECT_TRUE(absl::StrContains(status.message(), part)) << status;
  }
  // Some network file systems do not say.
  files.blocks = 0;
  EXPECT_TRUE(folder.CheckRoom(uint64_t{1} << 60).ok());
}

TEST_F(FolderTest, NewFoldersAreDurable) {
  FaultyFileSystem files;
  ASSERT_TRUE(MakeDurableDirectories(Path("a/b/c"), &files).ok());
  EXPECT_TRUE(std::filesystem::is_directory(Path("a/b/c")));
  EXPECT_EQ(std::count(files.calls().begin(), files.calls().end(), "fsync"), 3);
  FaultyFileSystem again;
  ASSERT_TRUE(MakeDurableDirectories(Path("a/b/c"), &again).ok());
  EXPECT_EQ(std::count(again.calls().begin(), again.calls().end(), "fsync"), 0);
  FaultyFileSystem failing({.call = "fsync", .nth = 1, .error = EIO});
  EXPECT_FALSE(MakeDurableDirectories(Path("d"), &failing).ok());
}

}  // namespace
}  // namespace ddp::checkpoint
