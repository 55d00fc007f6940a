// Text, or the ids of a tokenizer's tokens, in files that are mapped into memory: the ranks of a
// host share one copy of them.
//
//   DDP_ASSIGN_OR_RETURN(TokenFiles files, TokenFiles::Open({"a.txt", "b.txt"},
//   TokenType::kBytes)); files.size();                            // tokens of all files, one after
//   the other files.Read(/*begin=*/17, /*n=*/128, to);  // to[128]
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/mapped_file.h"
#include "ddp/data/contents_digest.h"

namespace ddp::tools::datasets {

enum class TokenType {
  kBytes,   // each byte is a token: text of any encoding
  kUint16,  // little-endian, without a header, as tokenizers' scripts write them
  kUint32,
};

// Immutable; thread-safe. A file must not become shorter while it is open.
class TokenFiles {
 public:
  // `paths`, in order; of a folder all files in it, at any depth, in the order of their paths,
  // without those whose names begin with a dot. Empty files are left out. NotFound: no such file,
  // or a folder without files. InvalidArgument, with the path: no regular file, one that is
  // compressed or has a header (plain_file.h), or a size that is no whole number of tokens.
  static absl::StatusOr<TokenFiles> Open(const std::vector<std::string>& paths, TokenType type);

  int64_t size() const { return starts_.back(); }
  // The places at which files begin, and size(): ascending.
  const std::vector<int64_t>& starts() const { return starts_; }

  // Copies tokens `begin` to `begin + n` of all files; 0 <= begin, begin + n <= size().
  void Read(int64_t begin, int64_t n, int64_t* to) const;

  // The largest token; reads all files. 0 if there are none.
  int64_t Largest() const;

  // Appends the places after each token `separator`; reads all files.
  void FindAfter(int64_t separator, std::vector<int64_t>& places) const;

  // Adds what the tokens are, the sizes of the files in their order, and samples of them.
  void AddTo(data::ContentsDigest& digest) const;

  // The file that has place `place`, and where in it: "a.bin, token 17".
  std::string Describe(int64_t place) const;

 private:
  // Calls visit(values, n, place of the first) for each file's part of a range.
  template <typename Visit>
  void ForEachPart(int64_t begin, int64_t end, const Visit& visit) const;

  TokenType type_ = TokenType::kBytes;
  std::vector<std::shared_ptr<const MappedFile>> files_;
  std::vector<int64_t> starts_ = {0};
};

}  // namespace ddp::tools::datasets
