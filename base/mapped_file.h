// A file in memory, as it is on disk: the processes that map it share one copy of it per host, in
// the kernel's cache, and nothing is left behind when they end, however they end.
//
//   DDP_ASSIGN_OR_RETURN(auto text, MappedFile::Open("corpus.txt"));
//   Use(text->bytes().subspan(17, 100));
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ddp {

// Immutable; thread-safe. Whoever has the pointer may read the bytes. The file must not be cut
// short meanwhile: reading behind its end kills the process (SIGBUS); replace it by a rename.
class MappedFile {
 public:
  // Maps a regular file, which may be empty. Errors: those of FileReader::Open (base/file.h), and
  // ResourceExhausted if there are no addresses for it.
  static absl::StatusOr<std::shared_ptr<const MappedFile>> Open(const std::string& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  absl::Span<const uint8_t> bytes() const { return bytes_; }
  const std::string& path() const { return path_; }

 private:
  MappedFile(std::string path, absl::Span<const uint8_t> bytes)
      : path_(std::move(path)), bytes_(bytes) {}

  const std::string path_;
  const absl::Span<const uint8_t> bytes_;
};

}  // namespace ddp
