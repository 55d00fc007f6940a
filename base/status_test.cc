#include "base/status.h"

#include <stdexcept>
#include <utility>

#include "gtest/gtest.h"

namespace ddp {
namespace {

absl::StatusOr<int> Half(int n) {
  if (n % 2 != 0) return absl::InvalidArgumentError("odd");
  return n / 2;
}

absl::StatusOr<int> Quarter(int n) {
  DDP_ASSIGN_OR_RETURN(int half, Half(n));
  DDP_ASSIGN_OR_RETURN(int quarter, Half(half));
  return quarter;
}

TEST(StatusTest, AssignOrReturnPassesValuesAndErrors) {
  EXPECT_EQ(*Quarter(8), 2);
  EXPECT_EQ(Quarter(6).status().message(), "odd");
}

TEST(StatusTest, AnnotateKeepsTheCode) {
  absl::Status status = Annotate(absl::NotFoundError("x"), "reading y");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "reading y: x");
  EXPECT_TRUE(Annotate(absl::OkStatus(), "reading y").ok());
  EXPECT_EQ(Annotate(absl::NotFoundError("x"), "").message(), "x");
}

TEST(StatusTest, AnnotateKeepsPayloads) {
  absl::Status status = absl::NotFoundError("x");
  status.SetPayload("url", absl::Cord("payload"));
  EXPECT_EQ(Annotate(status, "reading y").GetPayload("url"), absl::Cord("payload"));
}

TEST(StatusTest, CatchStatusHandlesEveryKindOfResult) {
  EXPECT_TRUE(CatchStatus("c", [] {}).ok());
  EXPECT_EQ(CatchStatus("c", []() -> void { throw std::runtime_error("boom"); }).message(),
            "c: boom");
  EXPECT_EQ(*CatchStatus("c", [] { return 3; }), 3);
  EXPECT_EQ(CatchStatus("c", []() -> int { throw std::runtime_error("boom"); }).status().message(),
            "c: boom");
  EXPECT_EQ(*CatchStatus("c", [] { return Half(4); }), 2);
  EXPECT_EQ(CatchStatus("c", [] { return Half(3); }).status().message(), "odd");
  EXPECT_EQ(CatchStatus("c", [] { return absl::NotFoundError("n"); }).message(), "n");
}

TEST(StatusTest, ExceptionsLoseTheirBacktraceAndGetACode) {
  std::runtime_error error(
      "Timed out waiting for clients\nException raised from wait at x.cpp:1 (most recent …)");
  absl::Status status = StatusFromException("joining", error);
  EXPECT_EQ(status.message(), "joining: Timed out waiting for clients");
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(StatusTest, WordsOfAnExceptionGiveTheCode) {
  for (const auto& [text, code] : {std::pair("Timeout of 3 s", absl::StatusCode::kDeadlineExceeded),
                                   std::pair("Connection reset", absl::StatusCode::kUnavailable),
                                   std::pair("Broken pipe", absl::StatusCode::kUnavailable),
                                   std::pair("bad shape", absl::StatusCode::kInternal)}) {
    EXPECT_EQ(StatusFromException("", std::runtime_error(text)).code(), code) << text;
  }
  EXPECT_EQ(ExceptionMessage(std::runtime_error(" a b \n")), "a b");
  EXPECT_EQ(ExceptionMessage(std::runtime_error("[enforce fail at /gloo/tcp/device.cc:84] ifa != "
                                                "nullptr. Unable to find address for: eth7")),
            "Unable to find address for: eth7");
  EXPECT_EQ(ExceptionMessage(std::runtime_error("[enforce fail at x.cc:1] a > b. ")),
            "[enforce fail at x.cc:1] a > b.");
}

}  // namespace
}  // namespace ddp
