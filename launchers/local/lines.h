// Merges the output of several processes line by line, each line with a prefix.
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

// Buffers text for a file descriptor, which it does not own. Thread-compatible.
class LineSink {
 public:
  explicit LineSink(int fd) : fd_(fd) {}

  int fd() const { return fd_; }
  bool empty() const { return begin_ == pending_.size(); }
  // Bytes not written yet.
  size_t size() const { return pending_.size() - begin_; }

  void Append(absl::string_view text) { pending_.append(text.data(), text.size()); }

  // Makes one write call: as many whole lines as fit in PIPE_BUF, which is atomic on a pipe, or a
  // piece of a longer line. Does not block after poll() reported POLLOUT. Drops all pending text if
  // the write fails, as when the reader has closed the pipe.
  void WriteSome();

 private:
  int fd_;
  std::string pending_;
  size_t begin_ = 0;
};

// Splits one stream into lines and prefixes them. Thread-compatible. `sink` must outlive it.
class LinePrefixer {
 public:
  // Splits lines longer than `max_line` bytes into several.
  LinePrefixer(std::string prefix, LineSink* sink, size_t max_line = size_t{64} << 20);

  // Passes complete lines to the sink and keeps the rest.
  void Add(absl::string_view text);

  // Call it at the end of the stream: passes on an unterminated last line, with a newline.
  void Finish();

 private:
  void EmitLine(absl::string_view end);

  std::string prefix_;
  LineSink* sink_;
  size_t max_line_;
  std::string partial_;
};

}  // namespace ddp::launchers
