#include "tools/datasets/idx.h"

#include <zlib.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/mapped_file.h"
#include "base/status.h"

namespace ddp::tools::datasets {
namespace {

absl::Status Damaged(const std::string& path, absl::string_view reason) {
  return absl::DataLossError(absl::StrCat(path, ": ", reason, "; fetch the original file again"));
}

// The content of a file from start to end, inflated if it is gzip.
class Source {
 public:
  static absl::StatusOr<std::unique_ptr<Source>> Open(const std::string& path);
  ~Source() {
    if (inflater_) inflateEnd(&*inflater_);
  }

  // Fills `out` unless the content ends before; returns the number of bytes. Reading to the end
  // includes checking gzip's checksums, and that nothing follows them but further members, as
  // bgzip and `cat a.gz b.gz` write them.
  absl::StatusOr<size_t> Read(uint8_t* out, size_t size);

  bool is_compressed() const { return inflater_.has_value(); }

  // Upper bound of the content's size: deflate expands a byte to at most 1032.
  uint64_t max_size() const { return inflater_ ? file_.size() * 1032 : file_.size(); }

 private:
  explicit Source(FileReader file) : file_(std::move(file)) {}

  absl::StatusOr<size_t> ReadFile(uint8_t* out, size_t size);

  FileReader file_;
  uint64_t offset_ = 0;
  std::optional<z_stream> inflater_;
  bool has_member_ = false;  // one of gzip's has ended
  bool ended_ = false;       // the compressed stream
  std::vector<uint8_t> input_;
};

absl::StatusOr<std::unique_ptr<Source>> Source::Open(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(FileReader file, FileReader::Open(path));
  std::unique_ptr<Source> source(new Source(std::move(file)));
  uint8_t magic[2];
  DDP_ASSIGN_OR_RETURN(size_t read, source->ReadFile(magic, sizeof(magic)));
  source->offset_ = 0;
  if (read == sizeof(magic) && magic[0] == 0x1f && magic[1] == 0x8b) {
    source->input_.resize(1 << 16);
    source->inflater_ = z_stream{};
    constexpr int kGzipOnly = 16;
    if (inflateInit2(&*source->inflater_, MAX_WBITS + kGzipOnly) != Z_OK) {
      source->inflater_.reset();
      return absl::ResourceExhaustedError("no memory to inflate " + path);
    }
  }
  return source;
}

absl::StatusOr<size_t> Source::ReadFile(uint8_t* out, size_t size) {
  size = std::min<uint64_t>(size, file_.size() - offset_);
  DDP_RETURN_IF_ERROR(file_.ReadAt(offset_, out, size));
  offset_ += size;
  return size;
}

absl::StatusOr<size_t> Source::Read(uint8_t* out, size_t size) {
  if (!inflater_) return ReadFile(out, size);
  z_stream& z = *inflater_;
  size_t done = 0;
  const auto damaged = [&](absl::string_view reason) {
    // What does not become data is no further member.
    const bool is_behind = has_member_ && z.total_out == 0;
    return Damaged(file_.path(),
                   is_behind ? "there are bytes after the end of the compressed data" : reason);
  };
  while (done < size && !ended_) {
    if (z.avail_in == 0) {
      DDP_ASSIGN_OR_RETURN(size_t read, ReadFile(input_.data(), input_.size()));
      if (read == 0) return damaged("the compressed data is truncated");
      z.next_in = input_.data();
      z.avail_in = static_cast<uInt>(read);
    }
    const size_t piece =
        std::min<size_t>(size - done, 1 << 30);  // uInt may be narrower than size_t
    z.next_out = out + done;
    z.avail_out = static_cast<uInt>(piece);
    const int result = inflate(&z, Z_NO_FLUSH);
    done += piece - z.avail_out;
    if (result == Z_STREAM_END) {
      has_member_ = true;
      ended_ = z.avail_in == 0 && offset_ == file_.size();
      if (!ended_ && inflateReset(&z) != Z_OK) return damaged("the compressed data is corrupted");
    } else if (result != Z_OK && result != Z_BUF_ERROR) {
      return damaged(
          absl::StrCat("the compressed data is corrupted (", z.msg ? z.msg : zError(result), ")"));
    }
  }
  return done;
}

}  // namespace

absl::StatusOr<IdxArray> ReadIdx(const std::string& path, int dimensions) {
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<Source> source, Source::Open(path));

  std::vector<uint8_t> header(4 + 4 * dimensions);
  DDP_ASSIGN_OR_RETURN(size_t read, source->Read(header.data(), header.size()));
  constexpr int kUnsignedByte = 8;
  if (read < 4 || header[0] != 0 || header[1] != 0 || header[2] != kUnsignedByte ||
      header[3] != dimensions) {
    header.resize(std::min<size_t>(read, 4));
    return Damaged(path, absl::StrFormat("not an idx file of unsigned bytes in %d dimensions: "
                                         "begins with [%s], not [0 0 8 %d]",
                                         dimensions, absl::StrJoin(header, " "), dimensions));
  }
  if (read < header.size()) return Damaged(path, "truncated in the header");

  IdxArray array;
  uint64_t count = 1;
  for (int i = 0; i < dimensions; ++i) {
    const uint8_t* bytes = &header[4 + 4 * i];
    const uint64_t size = uint64_t{bytes[0]} << 24 | bytes[1] << 16 | bytes[2] << 8 | bytes[3];
    array.sizes.push_back(static_cast<int64_t>(size));
    // Saturates, so that an overflowing product of sizes is not taken for a small one.
    if (__builtin_mul_overflow(count, size, &count)) count = UINT64_MAX;
  }
  const std::string shape = absl::StrJoin(array.sizes, "x");
  if (count > source->max_size()) {
    return Damaged(path, absl::StrCat("truncated: too short for the ", shape,
                                      " values that its header announces"));
  }

  const auto truncated = [&](size_t values) {
    return Damaged(path, absl::StrCat("truncated: ", values, " values of the ", shape,
                                      " that its header announces"));
  };
  const auto too_long = [&] {
    return Damaged(path, absl::StrCat("there are bytes after the ", shape,
                                      " values that its header announces"));
  };
  if (!source->is_compressed()) {
    DDP_ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> file, MappedFile::Open(path));
    array.values = file->bytes();
    array.values.remove_prefix(std::min(header.size(), array.values.size()));
    array.owner = file;
    if (array.values.size() < count) return truncated(array.values.size());
    if (array.values.size() > count) return too_long();
    return array;
  }
  auto inflated = std::make_shared<std::vector<uint8_t>>(count);
  DDP_ASSIGN_OR_RETURN(read, source->Read(inflated->data(), count));
  if (read < count) return truncated(read);
  uint8_t beyond;
  DDP_ASSIGN_OR_RETURN(read, source->Read(&beyond, 1));
  if (read > 0) return too_long();
  array.values = *inflated;
  array.owner = std::move(inflated);
  return array;
}

}  // namespace ddp::tools::datasets
