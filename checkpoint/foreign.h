// What stands in the place of a checkpoint's file: another program's, by its first bytes, since
// people pass the wrong file more often than a damaged one; or a link.
//
//   return absl::DataLossError(absl::StrCat(path, " ", DescribeForeign(head, size)));
//   return OfNoSuchFormat(absl::StrCat(path, " is no safetensors file"));
//   DDP_RETURN_IF_ERROR(RefuseLink(path));
//   DDP_RETURN_IF_ERROR(RefusePointer(file));
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/file.h"

namespace ddp::checkpoint {

// The longest head that DescribeForeign looks at, in bytes.
inline constexpr uint64_t kForeignHead = 512;

// What DescribeForeign says of a file of that format.
inline constexpr absl::string_view kInSafetensors = "is in the format safetensors";

// Says what a file of `size` bytes that starts with `head` is, as the rest of a sentence: "is an
// HTML page, …", with what to do. Empty if it is nothing that this function knows. Thread-safe.
std::string DescribeForeign(absl::string_view head, uint64_t size);

// Whether `head` is the beginning of a file of another kind, which damage cannot make of a
// checkpoint: somebody has put it there. Thread-safe.
bool IsOtherFile(absl::string_view head);

// DataLoss of a format that does not know what the file is, and says only that it is not its own.
// The reasons of another format may be better. Thread-safe.
absl::Status OfNoSuchFormat(absl::string_view message);
bool IsOfNoSuchFormat(const absl::Status& status);

// OK if `path`, a file of a checkpoint's folder, is no symbolic link, which may lead out of the
// folder; else FailedPrecondition: whoever put it there has the file. Thread-safe.
absl::Status RefuseLink(const std::string& path);

// OK if `file` is no pointer of git LFS or git-annex; else Unimplemented, and not DataLoss: nothing
// is damaged, and `git lfs pull` must find the pointer under its name. Thread-safe.
absl::Status RefusePointer(const FileReader& file);

}  // namespace ddp::checkpoint
