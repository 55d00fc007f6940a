#include "launchers/local/lines.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "base/unique_fd.h"
#include "gtest/gtest.h"

namespace ddp::launchers {
namespace {

// The output of a pipe after `fill` has written to a sink.
template <typename Fill>
std::string Through(Fill fill) {
  int fds[2];
  EXPECT_EQ(pipe2(fds, O_CLOEXEC), 0);
  UniqueFd reader(fds[0]), writer(fds[1]);
  std::string text;
  std::thread read_all([&] {
    char buffer[4096];
    for (ssize_t n; (n = read(reader.get(), buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
  });
  LineSink sink(writer.get());
  fill(sink);
  while (!sink.empty()) sink.WriteSome();
  writer.Close();
  read_all.join();
  return text;
}

TEST(LinesTest, MarksEachLineHoweverItArrives) {
  EXPECT_EQ(Through([](LineSink& sink) {
              LinePrefixer lines("[rank 1] ", &sink);
              for (const char* piece : {"a", "b\n\nc", "d\ne", "\n"}) lines.Add(piece);
              lines.Finish();
            }),
            "[rank 1] ab\n[rank 1] \n[rank 1] cd\n[rank 1] e\n");
}

TEST(LinesTest, StreamsMeetOnlyBetweenLines) {
  EXPECT_EQ(Through([](LineSink& sink) {
              LinePrefixer one("1 ", &sink), two("2 ", &sink);
              one.Add("a");
              two.Add("x\ny");
              one.Add("b\n");
              two.Add("z\n");
            }),
            "2 x\n1 ab\n2 yz\n");
}

TEST(LinesTest, LastLineWithoutNewlineIsKept) {
  EXPECT_EQ(Through([](LineSink& sink) {
              LinePrefixer lines("> ", &sink);
              lines.Add("tail");
              lines.Finish();
              lines.Finish();
            }),
            "> tail\n");
}

TEST(LinesTest, LongLineStaysOne) {
  const std::string line(10 << 20, 'x');
  EXPECT_EQ(Through([&](LineSink& sink) {
              LinePrefixer lines("> ", &sink);
              for (size_t i = 0; i < line.size(); i += 65536) lines.Add(line.substr(i, 65536));
              lines.Add("\nnext\n");
            }),
            "> " + line + "\n> next\n");
}

TEST(LinesTest, EndlessLineIsCut) {
  EXPECT_EQ(Through([](LineSink& sink) {
              LinePrefixer lines("> ", &sink, /*max_line=*/4);
              lines.Add("abcdefghij");
              lines.Finish();
            }),
            "> abcd\n> efgh\n> ij\n");
}

TEST(LinesTest, NobodyReadingIsNoReasonToKeepText) {
  int fds[2];
  ASSERT_EQ(pipe2(fds, O_CLOEXEC), 0);
  close(fds[0]);
  UniqueFd writer(fds[1]);
  signal(SIGPIPE, SIG_IGN);
  LineSink sink(writer.get());
  sink.Append("lost\n");
  sink.WriteSome();
  EXPECT_TRUE(sink.empty());
}

}  // namespace
}  // namespace ddp::launchers
