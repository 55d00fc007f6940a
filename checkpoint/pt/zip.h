// The zip archives that torch.save writes: entries are uncompressed, with data aligned to 64 bytes
// for mmap, 64-bit sizes and offsets (ZIP64), and a CRC-32 each.
//
//   ZipWriter zip(&file);                                  ZipReader: Open(path)
//   DDP_RETURN_IF_ERROR(zip.Add("archive/data.pkl", …));   zip.Size("archive/data.pkl")
//   DDP_RETURN_IF_ERROR(zip.Finish());                     zip.Read("archive/data.pkl", buffer)
//
// Source of the layout: PKWARE's APPNOTE.TXT, sections 4.3 and 4.5.3.
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

// Writes entries to `file` without copying their data. Does not own the file. Errors are those of
// FileWriter. Thread-compatible.
class ZipWriter {
 public:
  explicit ZipWriter(FileWriter* file) : file_(file) {}

  // `name` must be new in this archive.
  absl::Status Add(absl::string_view name, const void* data, uint64_t size);

  // Writes the directory. The caller finishes the file.
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

// Reads archives. Const methods are thread-safe.
class ZipReader {
 public:
  // Reads and checks the directory and each entry's header, but not the data. DataLoss, with the
  // reason, for a damaged archive; errors of FileReader::Open.
  static absl::StatusOr<ZipReader> Open(const std::string& path);

  // Names of all entries, sorted.
  std::vector<std::string> Names() const;
  bool Has(absl::string_view name) const { return entries_.contains(name); }

  // Size of the entry in bytes. NotFound if there is no such entry.
  absl::StatusOr<uint64_t> Size(absl::string_view name) const;

  // Reads the whole entry into `buffer` (Size bytes). DataLoss if its CRC-32 does not match or if
  // it is compressed.
  absl::Status Read(absl::string_view name, void* buffer) const;
  absl::StatusOr<std::string> Read(absl::string_view name) const;

  // Reads bytes [offset, offset + size) of the entry. Does not check the CRC-32, which covers the
  // whole entry, so damage goes undetected. OutOfRange beyond the entry's end; otherwise as Read.
  absl::Status ReadRange(absl::string_view name, uint64_t offset, void* buffer,
                         uint64_t size) const;

 private:
  struct Entry {
    uint32_t crc = 0;
    uint64_t size = 0;  // in the file
    uint64_t data_offset = 0;
    bool stored = false;  // else compressed or encrypted
  };

  explicit ZipReader(FileReader file) : file_(std::move(file)) {}
  absl::Status ReadDirectory();
  absl::Status CheckLocalHeader(absl::string_view name, uint64_t header_offset,
                                uint64_t directory_offset, Entry& entry) const;
  absl::Status Damaged(absl::string_view what) const;
  // The entry, if it is neither compressed nor encrypted.
  absl::StatusOr<Entry> Stored(absl::string_view name) const;

  FileReader file_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace ddp::checkpoint::pt
