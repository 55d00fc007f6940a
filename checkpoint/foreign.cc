#include "checkpoint/foreign.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status.h"

namespace ddp::checkpoint {
namespace {

using std::string_view_literals::operator""sv;

struct Known {
  absl::string_view start;
  absl::string_view what;
};

// The first number that torch.save wrote before version 1.6, in pickle's protocols 2 and later.
constexpr absl::string_view kOldTorch = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."sv;

// Payload of OfNoSuchFormat.
constexpr absl::string_view kOfNoSuchFormat = "ddp.checkpoint/of_no_such_format";

constexpr absl::string_view kIsPointer =
    "is a pointer of git LFS and not the file itself: `git lfs pull` fetches that";

// The first are pointers.
constexpr size_t kPointers = 3;
constexpr Known kKnown[] = {
    {"version https://git-lfs"sv, kIsPointer},
    {"version https://hawser.github.com"sv, kIsPointer},
    {"/annex/objects/"sv,
     "is a pointer of git-annex and not the file itself: `git annex get` fetches that"},
    {"\x1f\x8b\x08"sv, "is compressed with gzip: unpack it first"},
    {"\x28\xb5\x2f\xfd"sv, "is compressed with zstd: unpack it first"},
    {"\xfd"
     "7zXZ\0"sv,
     "is compressed with xz: unpack it first"},
    {"BZh"sv, "is compressed with bzip2: unpack it first"},
    {"\x93NUMPY"sv, "is an array of numpy (.npy), no checkpoint"},
    {"\x89HDF\r\n\x1a\n"sv, "is an HDF5 file, as Keras writes, no checkpoint of PyTorch"},
    {"GGUF"sv, "is a GGUF file, as llama.cpp reads, no checkpoint"},
    {"\x7f"
     "ELF"sv,
     "is a program or shared library, no checkpoint"},
};

// The header of safetensors: its length in 8 bytes, and JSON.
bool IsSafetensors(absl::string_view head, uint64_t size) {
  if (head.size() < 9 || head[8] != '{') return false;
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) length |= uint64_t{static_cast<uint8_t>(head[i])} << (8 * i);
  return length >= 2 && length <= size - 8;
}

bool IsKnown(absl::string_view head, const Known& known) {
  return absl::StartsWith(head, known.start);
}

bool IsTar(absl::string_view head) {
  return head.size() > 257 + 5 && head.substr(257, 5) == "ustar";
}

// Of torch's format of before 1.6, without the start of a pickle.
bool IsOldTorch(absl::string_view head) {
  if (head.size() <= 2 || head[0] != '\x80' || head[1] < 2 || head[1] > 5) return false;
  absl::string_view rest = head.substr(2);
  if (head[1] >= 4 && rest.size() > 9 && rest[0] == '\x95') rest.remove_prefix(9);  // a frame
  return absl::StartsWith(rest, kOldTorch);
}

bool IsHtml(absl::string_view head) {
  const absl::string_view text = absl::StripLeadingAsciiWhitespace(head);
  return absl::StartsWithIgnoreCase(text, "<!doctype html") ||
         absl::StartsWithIgnoreCase(text, "<html");
}

}  // namespace

bool IsOtherFile(absl::string_view head) {
  return IsTar(head) || IsOldTorch(head) || IsHtml(head) ||
         std::any_of(std::begin(kKnown), std::end(kKnown),
                     [&](const Known& known) { return IsKnown(head, known); });
}

std::string DescribeForeign(absl::string_view head, uint64_t size) {
  if (size == 0) return "is empty";
  for (const Known& known : kKnown) {
    if (IsKnown(head, known)) return std::string(known.what);
  }
  if (IsSafetensors(head, size)) return std::string(kInSafetensors);
  if (IsTar(head)) return "is a tar archive: unpack it first";
  if (IsOldTorch(head)) {
    return "is in torch's format of before version 1.6 (or of "
           "_use_new_zipfile_serialization=False): load it in Python and save it again with "
           "torch.save";
  }
  if (head.size() > 2 && head[0] == '\x80' && head[1] >= 2 && head[1] <= 5) {
    return "is a bare pickle, as pickle.dump writes: save it with torch.save";
  }
  if (IsHtml(head)) return "is an HTML page: the download gave an error, or asked for a login";
  const absl::string_view text = absl::StripLeadingAsciiWhitespace(head);
  if (absl::StartsWith(text, "{") || absl::StartsWith(text, "[")) return "is text, perhaps JSON";
  return "";
}

absl::Status OfNoSuchFormat(absl::string_view message) {
  absl::Status status = absl::DataLossError(message);
  status.SetPayload(kOfNoSuchFormat, absl::Cord());
  return status;
}

bool IsOfNoSuchFormat(const absl::Status& status) {
  return status.GetPayload(kOfNoSuchFormat).has_value();
}

absl::Status RefuseLink(const std::string& path) {
  std::error_code ignored;  // opening the file reports it
  if (!std::filesystem::is_symlink(std::filesystem::symlink_status(path, ignored))) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      path, " is a symbolic link, which may lead out of the checkpoint; put the file there"));
}

absl::Status RefusePointer(const FileReader& file) {
  // Longer files are none, by the specification of git LFS; those of git-annex are a path.
  if (file.size() >= 1024) return absl::OkStatus();
  std::string head(std::min<uint64_t>(file.size(), kForeignHead), '\0');
  DDP_RETURN_IF_ERROR(file.ReadAt(0, head.data(), head.size()));
  for (const Known& known : absl::MakeConstSpan(kKnown).first(kPointers)) {
    if (!IsKnown(head, known)) continue;
    return absl::UnimplementedError(absl::StrCat(file.path(), " ", known.what));
  }
  return absl::OkStatus();
}

}  // namespace ddp::checkpoint
