// Sequences of tokens out of text files, for language models.
//
//   DatasetOptions options = {.context = 128};
//   options.implementations.Mutable<TextOptions>("text").files = {"books", "notes.txt"};
//   DDP_ASSIGN_OR_RETURN(Splits splits, LoadText(options));  // registered as "text"
//
// docs/language_model.md says how text is divided.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/options.h"
#include "tools/datasets/registry.h"
#include "tools/datasets/token_files.h"

namespace ddp::tools::datasets {

constexpr auto OptionNames(TokenType) {
  return std::to_array<std::pair<absl::string_view, TokenType>>({{"bytes", TokenType::kBytes},
                                                                 {"uint16", TokenType::kUint16},
                                                                 {"uint32", TokenType::kUint32}});
}

// A larger id is none of a tokenizer: the file has another form.
inline constexpr int64_t kMostVocabulary = int64_t{1} << 30;

struct TextOptions {
  // Sources: files, or folders with them. Empty: dataset.data_dir, or else the Jargon File.
  std::vector<std::string> files = {};
  // One per source: its share of the training examples. Empty: as long as each is.
  std::vector<double> weights = {};
  TokenType tokens = TokenType::kBytes;
  std::optional<int64_t> vocab_size = std::nullopt;
  std::optional<int64_t> separator = std::nullopt;
  bool cross_documents = false;
  std::optional<int64_t> sequence_length = std::nullopt;
  double held_out = 0.05;
};

constexpr auto OptionsOf(const TextOptions&) {
  return Options(
      Option("files", &TextOptions::files,
             "text files, or folders of them; empty: data_dir, or else the built-in corpus")
          .OnAllRanksOrNone(),
      Option("weights", &TextOptions::weights,
             "a number for each of files: its share of the examples; empty: by its length")
          .Above(0)
          .AtMost(1e9),
      Option("tokens", &TextOptions::tokens,
             "what the files have: bytes of text, or ids of tokens, of 16 or 32 bits"),
      Option("vocab_size", &TextOptions::vocab_size,
             "number of different tokens; auto: 256 bytes, or as many as the files need")
          .AtLeast(1)
          .AtMost(kMostVocabulary),
      Option("separator", &TextOptions::separator,
             "token that ends a document; auto: a document is a file")
          .AtLeast(0)
          .AtMost(1 << 30),
      Option("cross_documents", &TextOptions::cross_documents,
             "let an example go on in the next document"),
      Option("sequence_length", &TextOptions::sequence_length,
             "tokens of an example; auto: as many as the model sees at most")
          .AtLeast(1)
          .AtMost(1 << 20),
      Option("held_out", &TextOptions::held_out,
             "part of the text that is not trained on, but tested with")
          .AtLeast(0.001)
          .AtMost(0.5));
}

// Batches are data::Batch: input and target [n, sequence_length] int64, or less if all documents
// are shorter. A target is the token that follows, or -100 where no token of the document does.
// Sizes count examples. Errors: those of TokenFiles::Open, as OptionError of `files`; too little
// text for an example of each part; a token that is not below vocab_size, when it is read, with its
// place. Thread-safe.
absl::StatusOr<Splits> LoadText(const DatasetOptions& options);

}  // namespace ddp::tools::datasets
