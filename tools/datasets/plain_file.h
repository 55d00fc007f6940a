// Tells files whose bytes are no text or tokens, though they were given as such: a model would
// learn from the bytes of a compressed file without complaint. Free of torch.
//
//   if (const absl::string_view problem = NoPlainFile(path, bytes, /*is_text=*/true);
//       !problem.empty()) {
//     return absl::InvalidArgumentError(absl::StrCat(path, ": ", problem));
//   }
#pragma once

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace ddp::tools::datasets {

// "is compressed by gzip: …", by the first bytes of a file; empty if they tell nothing. Numbers may
// begin with any bytes: unless `is_text`, the name must tell the same. Thread-safe.
inline absl::string_view NoPlainFile(absl::string_view path, absl::string_view bytes,
                                     bool is_text) {
  struct Form {
    absl::string_view begin, end_of_name, problem;
  };
  static constexpr Form kForms[] = {
      {"\x1f\x8b\x08", ".gz", "is compressed by gzip: decompress it first, with gunzip"},
      {"\x28\xb5\x2f\xfd", ".zst", "is compressed by zstd: decompress it first, with unzstd"},
      {"\xfd"
       "7zXZ",
       ".xz", "is compressed by xz: decompress it first, with unxz"},
      {"BZh91AY&SY", ".bz2", "is compressed by bzip2: decompress it first, with bunzip2"},
      {"PK\x03\x04", ".zip",
       "is a zip archive, as spreadsheets are: unpack it, or export its text"},
      {"PK\x03\x04", ".npz", "is an archive of NumPy: write the values alone, with array.tofile"},
      {"\x93NUMPY", ".npy",
       "is a NumPy file, which has a header: write the values alone, with array.tofile"},
  };
  for (const Form& form : kForms) {
    if (absl::StartsWith(bytes, form.begin) &&
        (is_text || absl::EndsWithIgnoreCase(path, form.end_of_name))) {
      return form.problem;
    }
  }
  return "";
}

}  // namespace ddp::tools::datasets
