// The zip archives that torch.save writes: every entry stored uncompressed, its data aligned to
// 64 bytes so that it can be mapped, sizes and offsets of 64 bits (ZIP64), one CRC-32 each.
//
//   ZipWriter zip(&file);                                  ZipReader: Open(path)
//   DDP_RETURN_IF_ERROR(zip.Add("archive/data.pkl", …));   zip.Size("archive/data.pkl")
//   DDP_RETURN_IF_ERROR(zip.Finish());                     zip.Read("archive/data.pkl", buffer)
//
// Layout: PKWARE's APPNOTE.TXT, sections 4.3 and 4.5.3.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file.h"

namespace ddp::checkpoint::pt {

// Writes entries straight to `file`, with no second copy of their data. Does not own the file.
// Thread-compatible.
class ZipWriter {
 public:
  explicit ZipWriter(FileWriter* file) : file_(file) {}

  // `name` is new in this archive.
  absl::Status Add(absl::string_view name, const void* data, uint64_t size);

  // The directory at the end. Finishing the file is the caller's.
  absl::Status Finish();

 private:
  struct Entry {
    std::string name;
    uint32_t crc;
    uint64_t size;
    uint64_t header_offset;
  };

  FileWriter* file_;
  std::vector<Entry> entries_;
};

// Reads archives with all their checks. Thread-compatible.
class ZipReader {
 public:
  // Reads and checks the directory and each entry's header; data is read by Read. DataLoss says
  // what is wrong.
  static absl::StatusOr<ZipReader> Open(const std::string& path);

  // Sorted.
  std::vector<std::string> Names() const;
  bool Has(absl::string_view name) const { return entries_.contains(name); }

  // Bytes of the entry. NotFound if there is none.
  absl::StatusOr<uint64_t> Size(absl::string_view name) const;

  // Reads the whole entry to `buffer` (Size bytes). DataLoss if its CRC-32 does not match, or if
  // it is compressed.
  absl::Status Read(absl::string_view name, void* buffer) const;
  absl::StatusOr<std::string> Read(absl::string_view name) const;

  // Reads [offset, offset + size) of the entry, and no other bytes. The CRC-32, which is of the
  // whole entry, is not checked: damage passes unseen. OutOfRange beyond the entry's end; otherwise
  // as Read.
  absl::Status ReadRange(absl::string_view name, uint64_t offset, void* buffer,
                         uint64_t size) const;

 private:
  struct Entry {
    uint32_t crc = 0;
    uint64_t size = 0;  // as it lies in the file
    uint64_t data_offset = 0;
    bool stored = false;  // else compressed or encrypted
  };

  explicit ZipReader(FileReader file) : file_(std::move(file)) {}
  absl::Status ReadDirectory();
  absl::Status CheckLocalHeader(absl::string_view name, uint64_t header_offset,
                                uint64_t directory_offset, Entry& entry) const;
  absl::Status Damaged(absl::string_view what) const;
  // The entry, if its bytes can be read as they lie there.
  absl::StatusOr<Entry> Stored(absl::string_view name) const;

  FileReader file_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace ddp::checkpoint::pt
