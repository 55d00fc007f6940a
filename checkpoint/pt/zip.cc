#include "checkpoint/pt/zip.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/crc32.h"
#include "checkpoint/foreign.h"

namespace ddp::checkpoint::pt {
namespace {

constexpr uint32_t kLocalHeader = 0x04034b50;
constexpr uint32_t kCentralHeader = 0x02014b50;
constexpr uint32_t kZip64End = 0x06064b50;
constexpr uint32_t kZip64Locator = 0x07064b50;
constexpr uint32_t kEnd = 0x06054b50;
constexpr size_t kLocalHeaderSize = 30;
constexpr size_t kCentralHeaderSize = 46;
constexpr size_t kZip64EndSize = 56;
constexpr size_t kZip64LocatorSize = 20;
constexpr size_t kEndSize = 22;

constexpr uint16_t kZip64Extra = 0x0001;
constexpr uint16_t kPaddingExtra = 0x4246;  // "FB", as torch's own writer marks its padding
constexpr uint16_t kVersion = 45;           // of the format, with ZIP64
constexpr uint16_t kDosDate = 0x0021;       // 1980-01-01: equal states make equal files
constexpr uint32_t kIn64 = 0xffffffff;      // "see the ZIP64 field"
constexpr uint16_t kIn64Short = 0xffff;
constexpr uint64_t kAlignment = 64;
constexpr uint64_t kMostPerRead = 8 << 20;  // bytes

// Far above any real directory (a model of 100,000 tensors has 10 MB), far below memory.
constexpr uint64_t kMaxDirectory = uint64_t{1} << 30;

class Little {
 public:
  Little& U16(uint64_t v) { return Put(v, 2); }
  Little& U32(uint64_t v) { return Put(v, 4); }
  Little& U64(uint64_t v) { return Put(v, 8); }
  Little& Text(absl::string_view text) {
    bytes_.append(text);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  Little& Put(uint64_t v, int n) {
    for (int i = 0; i < n; ++i) bytes_.push_back(static_cast<char>(v >> (8 * i)));
    return *this;
  }
  std::string bytes_;
};

uint64_t Get(absl::string_view bytes, size_t at, int n) {
  uint64_t v = 0;
  for (int i = 0; i < n; ++i) v |= uint64_t{static_cast<uint8_t>(bytes[at + i])} << (8 * i);
  return v;
}

// Replaces those of `fields` that say kIn64 by the values of the ZIP64 extra field, in its order.
bool ResolveZip64(absl::string_view extra, std::initializer_list<uint64_t*> fields) {
  while (extra.size() >= 4) {
    const uint64_t id = Get(extra, 0, 2);
    const uint64_t size = Get(extra, 2, 2);
    if (extra.size() < 4 + size) return false;
    absl::string_view values = extra.substr(4, size);
    extra.remove_prefix(4 + size);
    if (id != kZip64Extra) continue;
    for (uint64_t* field : fields) {
      if (*field != kIn64) continue;
      if (values.size() < 8) return false;
      *field = Get(values, 0, 8);
      values.remove_prefix(8);
    }
    return true;
  }
  for (const uint64_t* field : fields) {
    if (*field == kIn64) return false;
  }
  return true;
}

}  // namespace

absl::Status ZipWriter::Add(absl::string_view name, const void* data, uint64_t size) {
  Entry entry{std::string(name), Crc32(data, size), size, file_->size() - start_};
  constexpr uint64_t kZip64FieldSize = 4 + 16;
  constexpr uint64_t kPaddingHeaderSize = 4;
  const uint64_t unpadded =
      entry.header_offset + kLocalHeaderSize + name.size() + kZip64FieldSize + kPaddingHeaderSize;
  const uint64_t padding = (kAlignment - unpadded % kAlignment) % kAlignment;

  Little header;
  header.U32(kLocalHeader).U16(kVersion).U16(0).U16(0).U16(0).U16(kDosDate);
  header.U32(entry.crc).U32(kIn64).U32(kIn64).U16(name.size());
  header.U16(kZip64FieldSize + kPaddingHeaderSize + padding).Text(name);
  header.U16(kZip64Extra).U16(16).U64(size).U64(size);
  header.U16(kPaddingExtra).U16(padding).Text(std::string(padding, 'Z'));
  DDP_RETURN_IF_ERROR(file_->Append(header.bytes()));
  DDP_RETURN_IF_ERROR(file_->Append(data, size));
  entries_.push_back(std::move(entry));
  return absl::OkStatus();
}

absl::Status ZipWriter::Finish() {
  const uint64_t start = file_->size() - start_;
  Little out;
  for (const Entry& entry : entries_) {
    out.U32(kCentralHeader).U16(kVersion).U16(kVersion).U16(0).U16(0).U16(0).U16(kDosDate);
    out.U32(entry.crc).U32(kIn64).U32(kIn64).U16(entry.name.size()).U16(4 + 24);
    out.U16(0).U16(0).U16(0).U32(0).U32(kIn64).Text(entry.name);
    out.U16(kZip64Extra).U16(24).U64(entry.size).U64(entry.size).U64(entry.header_offset);
  }
  const uint64_t size = out.bytes().size();
  out.U32(kZip64End).U64(kZip64EndSize - 12).U16(kVersion).U16(kVersion).U32(0).U32(0);
  out.U64(entries_.size()).U64(entries_.size()).U64(size).U64(start);
  out.U32(kZip64Locator).U32(0).U64(start + size).U32(1);
  out.U32(kEnd).U16(0).U16(0).U16(kIn64Short).U16(kIn64Short).U32(kIn64).U32(kIn64).U16(0);
  return file_->Append(out.bytes());
}

absl::StatusOr<ZipReader> ZipReader::Open(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(FileReader file, FileReader::Open(path));
  DDP_RETURN_IF_ERROR(RefusePointer(file));
  const uint64_t size = file.size();
  ZipReader zip(std::move(file), 0, size);
  DDP_RETURN_IF_ERROR(zip.ReadDirectory());
  return zip;
}

absl::StatusOr<ZipReader> ZipReader::Open(const std::string& path, uint64_t offset, uint64_t size) {
  DDP_ASSIGN_OR_RETURN(FileReader file, FileReader::Open(path));
  if (offset > file.size() || size > file.size() - offset) {
    return absl::OutOfRangeError(absl::StrCat(path, " has no ", size, " bytes at byte ", offset));
  }
  ZipReader zip(std::move(file), offset, size);
  DDP_RETURN_IF_ERROR(zip.ReadDirectory());
  return zip;
}

absl::Status ZipReader::Damaged(absl::string_view what) const {
  return absl::DataLossError(absl::StrCat(file_.path(), " ", what));
}

absl::Status ZipReader::CheckIsZip() const {
  std::string head(std::min<uint64_t>(size_, kForeignHead), '\0');
  DDP_RETURN_IF_ERROR(ReadAt(0, head.data(), head.size()));
  if (head.size() >= 4 && Get(head, 0, 4) == kLocalHeader) return absl::OkStatus();
  const std::string what = DescribeForeign(head, size_);
  if (what.empty()) {
    return OfNoSuchFormat(
        absl::StrCat(file_.path(), " is not a zip archive, as torch.save writes"));
  }
  // What is wrong with it, that format says.
  if (what == kInSafetensors) return OfNoSuchFormat(absl::StrCat(file_.path(), " ", what));
  if (IsOtherFile(head)) return absl::UnimplementedError(absl::StrCat(file_.path(), " ", what));
  return Damaged(what);
}

// How many bytes there are behind a whole archive at the start of the file; 0 if there is none, as
// in a file that is cut off. Looks at the last 64 KiB only.
absl::StatusOr<uint64_t> ZipReader::BytesBehindEnd() const {
  constexpr uint64_t kLooked = uint64_t{64} << 10;
  std::string tail(std::min<uint64_t>(size_, kLooked), '\0');
  const uint64_t start = size_ - tail.size();
  DDP_RETURN_IF_ERROR(ReadAt(start, tail.data(), tail.size()));
  for (size_t at = tail.size() < kEndSize ? 0 : tail.size() - kEndSize + 1; at-- > 0;) {
    if (Get(tail, at, 4) != kEnd) continue;
    uint64_t directory_end = Get(tail, at + 12, 4) + Get(tail, at + 16, 4);
    const bool has_locator =
        at >= kZip64LocatorSize && Get(tail, at - kZip64LocatorSize, 4) == kZip64Locator;
    const bool zip64 =
        has_locator && (Get(tail, at + 12, 4) == kIn64 || Get(tail, at + 16, 4) == kIn64);
    // torch writes both: the records of zip64, and the sizes in the older one.
    if (has_locator) directory_end += kZip64EndSize + kZip64LocatorSize;
    if (zip64 || directory_end == start + at) return size_ - (start + at + kEndSize);
  }
  return 0;
}

absl::Status ZipReader::ReadDirectory() {
  DDP_RETURN_IF_ERROR(CheckIsZip());
  // torch's writers put no comment after the end record: it is the last 22 bytes.
  const size_t tail_size = std::min<uint64_t>(size_, kZip64EndSize + kZip64LocatorSize + kEndSize);
  std::string tail(tail_size, '\0');
  DDP_RETURN_IF_ERROR(ReadAt(size_ - tail_size, tail.data(), tail_size));
  if (tail_size < kEndSize || Get(tail, tail_size - kEndSize, 4) != kEnd ||
      Get(tail, tail_size - 2, 2) != 0) {
    DDP_ASSIGN_OR_RETURN(const uint64_t behind, BytesBehindEnd());
    if (behind > 0) {
      return Damaged(absl::StrCat("has ", behind, " bytes behind the end of the zip archive"));
    }
    return Damaged("is cut off: the zip directory at its end is missing");
  }
  const absl::string_view end = absl::string_view(tail).substr(tail_size - kEndSize);
  uint64_t count = Get(end, 10, 2);
  uint64_t directory_size = Get(end, 12, 4);
  uint64_t directory_offset = Get(end, 16, 4);
  uint64_t directory_end = size_ - kEndSize;
  if (Get(end, 4, 4) != 0 || Get(end, 8, 2) != count) {
    return Damaged("has a damaged zip end record");
  }
  const bool zip64 = count == kIn64Short || directory_size == kIn64 || directory_offset == kIn64 ||
                     (tail_size == kZip64EndSize + kZip64LocatorSize + kEndSize &&
                      Get(tail, kZip64EndSize, 4) == kZip64Locator);
  if (zip64) {
    directory_end = size_ - tail_size;
    if (tail_size != kZip64EndSize + kZip64LocatorSize + kEndSize || Get(tail, 0, 4) != kZip64End ||
        Get(tail, 4, 8) != kZip64EndSize - 12 || Get(tail, kZip64EndSize, 4) != kZip64Locator ||
        Get(tail, kZip64EndSize + 8, 8) != directory_end || Get(tail, 24, 8) != Get(tail, 32, 8)) {
      return Damaged("has a damaged ZIP64 end record");
    }
    count = Get(tail, 32, 8);
    directory_size = Get(tail, 40, 8);
    directory_offset = Get(tail, 48, 8);
  }
  if (directory_offset > directory_end || directory_size != directory_end - directory_offset ||
      directory_size > kMaxDirectory) {
    return Damaged("has a zip directory that does not fit the file");
  }

  std::string directory(directory_size, '\0');
  DDP_RETURN_IF_ERROR(ReadAt(directory_offset, directory.data(), directory_size));
  size_t at = 0;
  uint64_t room = directory_offset;  // for entries that are still to come
  for (uint64_t i = 0; i < count; ++i) {
    if (directory_size - at < kCentralHeaderSize || Get(directory, at, 4) != kCentralHeader) {
      return Damaged(absl::StrCat("has a damaged zip directory at entry ", i));
    }
    const uint64_t flags = Get(directory, at + 8, 2);
    const uint64_t method = Get(directory, at + 10, 2);
    uint64_t stored_size = Get(directory, at + 20, 4);
    const uint64_t name_size = Get(directory, at + 28, 2);
    const uint64_t extra_size = Get(directory, at + 30, 2);
    const uint64_t comment_size = Get(directory, at + 32, 2);
    uint64_t header_offset = Get(directory, at + 42, 4);
    Entry entry;
    entry.crc = static_cast<uint32_t>(Get(directory, at + 16, 4));
    entry.size = Get(directory, at + 24, 4);
    at += kCentralHeaderSize;
    if (directory_size - at < name_size + extra_size + comment_size) {
      return Damaged(absl::StrCat("has a damaged zip directory at entry ", i));
    }
    const std::string name = directory.substr(at, name_size);
    const absl::string_view extra = absl::string_view(directory).substr(at + name_size, extra_size);
    at += name_size + extra_size + comment_size;
    if (!ResolveZip64(extra, {&entry.size, &stored_size, &header_offset})) {
      return Damaged(absl::StrCat("has a damaged ZIP64 field for record ", name));
    }
    constexpr uint64_t kEncrypted = 1;
    entry.stored = method == 0 && (flags & kEncrypted) == 0 && stored_size == entry.size;
    entry.size = stored_size;
    DDP_RETURN_IF_ERROR(CheckLocalHeader(name, header_offset, directory_offset, entry));
    // Many entries with the same bytes would make a small file large in memory.
    if (entry.size > room) return Damaged("has records that overlap");
    room -= entry.size;
    if (entry.size > 0 && entry.crc != 0) has_checksums_ = true;
    if (!entries_.emplace(name, entry).second) {
      return Damaged(absl::StrCat("has record ", name, " twice"));
    }
  }
  if (at != directory_size) return Damaged("has a zip directory longer than its entries");
  return absl::OkStatus();
}

absl::Status ZipReader::CheckLocalHeader(absl::string_view name, uint64_t header_offset,
                                         uint64_t directory_offset, Entry& entry) const {
  const auto damaged = [&] {
    return Damaged(absl::StrCat("has a damaged header of record ", name));
  };
  if (header_offset > directory_offset ||
      directory_offset - header_offset < kLocalHeaderSize + name.size()) {
    return damaged();
  }
  std::string header(kLocalHeaderSize + name.size(), '\0');
  DDP_RETURN_IF_ERROR(ReadAt(header_offset, header.data(), header.size()));
  if (Get(header, 0, 4) != kLocalHeader || Get(header, 26, 2) != name.size() ||
      !absl::EndsWith(header, name)) {
    return damaged();
  }
  const uint64_t before = header.size() + Get(header, 28, 2);
  const uint64_t room = directory_offset - header_offset;
  if (before > room || entry.size > room - before) return damaged();
  entry.data_offset = header_offset + before;
  return absl::OkStatus();
}

std::vector<std::string> ZipReader::Names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

absl::StatusOr<uint64_t> ZipReader::Size(absl::string_view name) const {
  const auto it = entries_.find(name);
  if (it == entries_.end()) {
    return absl::NotFoundError(absl::StrCat(file_.path(), " has no record ", name));
  }
  return it->second.size;
}

absl::StatusOr<ZipReader::Entry> ZipReader::Stored(absl::string_view name) const {
  DDP_RETURN_IF_ERROR(Size(name).status());
  const Entry& entry = entries_.find(name)->second;
  if (!entry.stored) {
    return Damaged(absl::StrCat("has a compressed record ", name, "; torch.save stores them"));
  }
  return entry;
}

absl::StatusOr<ZipReader::Place> ZipReader::Find(absl::string_view name) const {
  DDP_ASSIGN_OR_RETURN(const Entry entry, Stored(name));
  return Place{.offset = start_ + entry.data_offset, .crc = entry.crc};
}

std::string ZipReader::Mismatch(absl::string_view name) {
  return absl::StrCat("is damaged: record ", name, " does not match its CRC-32");
}

absl::Status ZipReader::Read(absl::string_view name, void* buffer) const {
  DDP_ASSIGN_OR_RETURN(const Entry entry, Stored(name));
  char* const bytes = static_cast<char*>(buffer);
  uint32_t crc = 0;
  uint64_t asked_for = 0;
  for (uint64_t at = 0; at < entry.size; at += kMostPerRead) {
    const uint64_t size = std::min(kMostPerRead, entry.size - at);
    // The next piece is read while this one is checked.
    const uint64_t ahead = std::min(entry.size, at + 2 * kMostPerRead);
    file_.ReadAhead(start_ + entry.data_offset + asked_for, ahead - asked_for);
    asked_for = ahead;
    DDP_RETURN_IF_ERROR(ReadAt(entry.data_offset + at, bytes + at, size));
    if (has_checksums_) crc = Crc32(bytes + at, size, crc);
  }
  if (has_checksums_ && crc != entry.crc) {
    return Damaged(Mismatch(name));
  }
  return absl::OkStatus();
}

absl::Status ZipReader::ReadRange(absl::string_view name, uint64_t offset, void* buffer,
                                  uint64_t size) const {
  DDP_ASSIGN_OR_RETURN(const Entry entry, Stored(name));
  if (offset > entry.size || size > entry.size - offset) {
    return absl::OutOfRangeError(absl::StrCat(file_.path(), ": bytes ", offset, " and ", size,
                                              " more are not within record ", name));
  }
  return ReadAt(entry.data_offset + offset, buffer, size);
}

absl::StatusOr<std::string> ZipReader::Read(absl::string_view name) const {
  DDP_ASSIGN_OR_RETURN(const uint64_t size, Size(name));
  std::string contents(size, '\0');
  DDP_RETURN_IF_ERROR(Read(name, contents.data()));
  return contents;
}

}  // namespace ddp::checkpoint::pt
