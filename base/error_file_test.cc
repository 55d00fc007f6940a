#include "base/error_file.h"

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/json.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

std::string Folder(int attempt) {
  const std::string folder = absl::StrCat(testing::TempDir(), "/none_x/attempt_", attempt, "/0");
  EXPECT_TRUE(MakeDirectories(folder).ok());
  return folder;
}

Environment Of(int attempt) {
  return {{"TORCHELASTIC_ERROR_FILE", absl::StrCat(Folder(attempt), "/error.json")}};
}

TEST(ErrorFileTest, IsWhatTorchrunReads) {
  WriteErrorFile(Of(0), {.message = "rank 1: \"no\" data\xff", .exit_code = 70});
  const nlohmann::json file = *ParseJson(*ReadFile(Folder(0) + "/error.json"));
  const nlohmann::json& message = file.at("message");
  EXPECT_EQ(message.at("message"), "rank 1: \"no\" data\xEF\xBF\xBD");
  EXPECT_EQ(message.at("extraInfo").at("py_callstack"), message.at("message"));
  // As text, of whole seconds.
  EXPECT_GT(std::stoll(message.at("extraInfo").at("timestamp").get<std::string>()), 1'000'000'000);
}

TEST(ErrorFileTest, OfTheAttemptBeforeIsFound) {
  WriteErrorFile(Of(1), {.message = "wrong", .exit_code = 2});
  const std::optional<RankError> found = PreviousError(Of(2), 2);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->message, "wrong");
  EXPECT_EQ(found->exit_code, 2);
  EXPECT_FALSE(PreviousError(Of(4), 4));
  EXPECT_FALSE(PreviousError({}, 2));
  EXPECT_FALSE(PreviousError(Of(0), 0));
}

TEST(ErrorFileTest, TheFolderOfARunIsThatOfAllAttempts) {
  for (const int attempt : {0, 12}) EXPECT_EQ(RunFolderOf(Of(attempt)), "none_x");
  EXPECT_EQ(RunFolderOf({{"TORCHELASTIC_ERROR_FILE", "logs/attempt_0/1/error.json"}}), "logs");
  EXPECT_EQ(RunFolderOf({{"TORCHELASTIC_ERROR_FILE", "/tmp/error.json"}}), "");
  EXPECT_EQ(RunFolderOf({}), "");
}

TEST(ErrorFileTest, OfAnotherProgramSaysNothing) {
  for (const char* text : {"", "{}", "[]", "{\"message\": \"a\", \"timestamp\": 5}",
                           "{\"message\": {\"message\": \"a\", \"extraInfo\": {}}}"}) {
    ASSERT_TRUE(WriteFileAtomically(Folder(6) + "/error.json", text).ok());
    EXPECT_FALSE(PreviousError(Of(7), 7)) << text;
  }
}

}  // namespace
}  // namespace ddp
