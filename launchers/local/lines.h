// Output of several processes as one text: whole lines, each marked with who wrote it.
//
//   LineSink sink(STDOUT_FILENO);
//   LinePrefixer lines("[rank 1] ", &sink);
//   lines.Add("loss 0.5\nlo");     // the sink gets "[rank 1] loss 0.5\n"
//   while (!sink.empty()) sink.WriteSome();
#pragma once

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace ddp::launchers {

// Text on its way to a descriptor, which it does not own. Thread-compatible.
class LineSink {
 public:
  explicit LineSink(int fd) : fd_(fd) {}

  int fd() const { return fd_; }
  bool empty() const { return begin_ == pending_.size(); }
  // Bytes not written yet.
  size_t size() const { return pending_.size() - begin_; }

  void Append(absl::string_view text) { pending_.append(text.data(), text.size()); }

  // Writes once: as many whole lines as a pipe takes at one go (which keeps them apart from what
  // others write there), or a piece of a longer line. Does not block once poll() has said POLLOUT.
  // Drops everything if nobody reads any more.
  void WriteSome();

 private:
  int fd_;
  std::string pending_;
  size_t begin_ = 0;
};

// Cuts one stream into lines. Thread-compatible. `sink` must outlive it.
class LinePrefixer {
 public:
  // A line longer than `max_line` bytes goes out in pieces of that length, each as a line.
  LinePrefixer(std::string prefix, LineSink* sink, size_t max_line = size_t{64} << 20);

  // Passes complete lines on, and keeps the rest.
  void Add(absl::string_view text);

  // End of stream: passes on a last line that lacks its newline, with one.
  void Finish();

 private:
  void EmitLine(absl::string_view end);

  std::string prefix_;
  LineSink* sink_;
  size_t max_line_;
  std::string partial_;
};

}  // namespace ddp::launchers
