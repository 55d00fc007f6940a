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

// Writes entries to `file` without copying their data, as an archive that begins where the file now
// ends. Does not own the file. Errors are those of FileWriter. Thread-compatible.
class ZipWriter {
 public:
  explicit ZipWriter(FileWriter* file) : file_(file), start_(file->size()) {}

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
  uint64_t start_;  // of the archive, from which its offsets count
  std::vector<Entry> entries_;
};

// Reads archives. Const methods are thread-safe.
class ZipReader {
 public:
  // Reads and checks the directory and each entry's header, but not the data. DataLoss, with the
  // reason, for a damaged archive, and for another file, with what it is; errors of
  // FileReader::Open.
  static absl::StatusOr<ZipReader> Open(const std::string& path);

  // An archive within a file: its bytes [offset, offset + size). OutOfRange if it lacks some.
  static absl::StatusOr<ZipReader> Open(const std::string& path, uint64_t offset, uint64_t size);

  // Names of all entries, sorted.
  std::vector<std::string> Names() const;
  bool Has(absl::string_view name) const { return entries_.contains(name); }

  // False if no entry has a CRC-32: torch.save writes zeros after set_crc32_options(False).
  bool has_checksums() const { return has_checksums_; }

  // Size of the entry in bytes. NotFound if there is no such entry.
  absl::StatusOr<uint64_t> Size(absl::string_view name) const;

  // Where the entry's bytes begin in the file, and their CRC-32. DataLoss if it is compressed.
  struct Place {
    uint64_t offset = 0;
    uint32_t crc = 0;
  };
  absl::StatusOr<Place> Find(absl::string_view name) const;

  // Says what is wrong with an entry that does not match its CRC-32, to follow the path.
  static std::string Mismatch(absl::string_view name);

  // Reads the whole entry into `buffer` (Size bytes). DataLoss if its CRC-32 does not match, unless
  // there are none in the archive, or if it is compressed.
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

  ZipReader(FileReader file, uint64_t start, uint64_t size)
      : file_(std::move(file)), start_(start), size_(size) {}
  absl::Status ReadAt(uint64_t offset, void* data, uint64_t size) const {
    return file_.ReadAt(start_ + offset, data, size);
  }
  absl::Status ReadDirectory();
  absl::Status CheckIsZip() const;
  absl::StatusOr<uint64_t> BytesBehindEnd() const;
  absl::Status CheckLocalHeader(absl::string_view name, uint64_t header_offset,
                                uint64_t directory_offset, Entry& entry) const;
  absl::Status Damaged(absl::string_view what) const;
  // The entry, if it is neither compressed nor encrypted.
  absl::StatusOr<Entry> Stored(absl::string_view name) const;

  FileReader file_;
  uint64_t start_;  // of the archive in the file
  uint64_t size_;   // of the archive
  std::map<std::string, Entry, std::less<>> entries_;
  bool has_checksums_ = false;
};

}  // namespace ddp::checkpoint::pt
