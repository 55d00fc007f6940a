#include "tools/datasets/text.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "base/option_error.h"
#include "base/runfiles.h"
#include "base/status.h"
#include "c10/util/Exception.h"
#include "ddp/data/contents_digest.h"

namespace ddp::tools::datasets {
namespace {

constexpr int64_t kBytes = 256;
constexpr int64_t kNoTarget = -100;
// Text is divided into stretches of so many tokens, of which each n-th is held out.
constexpr int64_t kStretch = 4096;
// Of an epoch by weights, whose order each rank holds in memory: 8 GiB.
constexpr int64_t kMostWeighted = int64_t{1} << 30;
// The end of an entry of the Jargon File.
constexpr int64_t kBuiltInSeparator = 31;

// A part of a source, in one split; examples begin at its begin, one after the other.
struct Segment {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t first = 0;  // number of its first example in the source's split
};

// What one split has of a source.
struct Part {
  std::vector<Segment> segments;
  int64_t examples = 0;

  // Appends tokens [begin, end).
  void Add(int64_t begin, int64_t end, int64_t length) {
    if (end - begin < 2) return;
    segments.push_back({begin, end, examples});
    examples += (end - begin - 1 + length - 1) / length;
  }
};

// A source, with its two splits.
struct Source {
  TokenFiles files;
  std::vector<int64_t> documents;  // where they begin; the last element is the size
  Part train, test;
  double weight = 0;
};

// The documents of a source, each whole or, if it is longer than a stretch, in stretches; every
// n-th stretch of the source is held out, with what begins in it.
void Divide(Source& source, int64_t length, double held_out, bool cross_documents) {
  const auto every = std::max<int64_t>(2, std::llround(1 / held_out));
  const int64_t size = source.files.size();
  // A small source has its end held out.
  const bool is_small = size < every * kStretch;
  const auto small_end =
      size - std::max<int64_t>(2, std::llround(static_cast<double>(size) * held_out));
  const auto is_test = [&](int64_t place) {
    return is_small ? place >= small_end : place / kStretch % every == every - 1;
  };
  int64_t begin = 0, end = 0;  // of the run that is not added yet
  const auto add = [&] {
    (is_test(begin) ? source.test : source.train).Add(begin, end, length);
    begin = end;
  };
  for (size_t i = 0; i + 1 < source.documents.size(); ++i) {
    const int64_t document = source.documents[i], next = source.documents[i + 1];
    for (int64_t piece = document; piece < next;) {
      int64_t stop = next;
      if (is_small && piece < small_end && next > small_end) {
        stop = small_end;
      } else if (next - document > kStretch) {
        stop = std::min(next, (piece / kStretch + 1) * kStretch);
      }
      const bool goes_on =
          end > begin && is_test(piece) == is_test(begin) && (cross_documents || piece > document);
      if (!goes_on) add();
      end = piece = stop;
    }
    if (!cross_documents) add();
  }
  add();
}

// Of one split, the examples of all sources; those of a source are consecutive numbers, and are
// used again where it has a greater share than its length. `vocabulary`: ids must be below it; 0:
// bytes, which are.
class Sequences : public data::Dataset {
 public:
  Sequences(std::shared_ptr<const std::vector<Source>> sources, Part Source::*part,
            std::vector<int64_t> counts, int64_t length, int64_t vocabulary)
      : sources_(std::move(sources)),
        part_(part),
        ends_(std::move(counts)),
        length_(length),
        vocabulary_(vocabulary) {
    std::partial_sum(ends_.begin(), ends_.end(), ends_.begin());
  }

  int64_t size() const override { return ends_.back(); }

  data::Batch Get(absl::Span<const int64_t> indices) const override {
    const auto n = static_cast<int64_t>(indices.size());
    data::Batch batch{at::zeros({n, length_}, at::kLong),
                      at::full({n, length_}, kNoTarget, at::kLong)};
    auto* input = batch.input.mutable_data_ptr<int64_t>();
    auto* target = batch.target.mutable_data_ptr<int64_t>();
    for (const int64_t index : indices) {
      const auto at = std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin();
      const Source& source = (*sources_)[at];
      const Part& part = source.*part_;
      Fill(source, part, (index - (at == 0 ? 0 : ends_[at - 1])) % part.examples, input, target);
      input += length_;
      target += length_;
    }
    return batch;
  }

  std::string Fingerprint() const override {
    data::ContentsDigest digest;
    digest.Add(length_);
    for (size_t i = 0; i < sources_->size(); ++i) {
      const Source& source = (*sources_)[i];
      source.files.AddTo(digest);
      digest.AddSamples(absl::MakeConstSpan((source.*part_).segments));
      digest.Add(ends_[i]);
    }
    return digest.Text();
  }

 private:
  void Fill(const Source& source, const Part& part, int64_t number, int64_t* input,
            int64_t* target) const {
    const auto after = std::upper_bound(
        part.segments.begin(), part.segments.end(), number,
        [](int64_t value, const Segment& segment) { return value < segment.first; });
    const Segment& segment = *(after - 1);
    const int64_t begin = segment.begin + (number - segment.first) * length_;
    const int64_t n = std::min(length_, segment.end - begin - 1);
    source.files.Read(begin, n, input);
    source.files.Read(begin + 1, n, target);
    // No document says how the next one begins.
    auto document = std::upper_bound(source.documents.begin(), source.documents.end(), begin);
    for (; *document <= begin + n && *document < source.files.size(); ++document) {
      target[*document - begin - 1] = kNoTarget;
    }
    if (vocabulary_ == 0) return;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t largest = std::max(input[i], target[i]);
      TORCH_CHECK(largest < vocabulary_, source.files.Describe(begin + i), " or the next is ",
                  largest, ", but vocab_size is ", vocabulary_);
    }
  }

  const std::shared_ptr<const std::vector<Source>> sources_;
  Part Source::*const part_;
  std::vector<int64_t> ends_;  // of each source's examples
  const int64_t length_;
  const int64_t vocabulary_;
};

absl::Status TextError(absl::string_view option, const std::string& value,
                       const std::string& problem,
                       absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
  return OptionError(absl::StrCat("dataset.text.", option), value, problem, code);
}

absl::StatusOr<std::vector<std::string>> PathsOf(const DatasetOptions& options, TextOptions& own) {
  if (!own.files.empty() && !options.data_dir.empty()) {
    return OptionError(
        "dataset.data_dir", options.data_dir,
        "is given beside dataset.text.files: give one of them, files may be folders");
  }
  if (!own.files.empty()) return own.files;
  if (!options.data_dir.empty()) return std::vector<std::string>{options.data_dir};
  const absl::StatusOr<std::string> built_in = Runfile("jargon/jargon.txt");
  if (!built_in.ok()) {
    return Annotate(built_in.status(),
                    "text: start the program with bazel run or from bazel-bin, or set "
                    "dataset.text.files");
  }
  if (own.tokens != TokenType::kBytes) {
    return TextError("tokens", FormatOption(own.tokens),
                     "needs dataset.text.files: the built-in corpus has bytes");
  }
  if (!own.separator) own.separator = kBuiltInSeparator;
  return std::vector<std::string>{*built_in};
}

// Tokens are below it.
int64_t LimitOf(const TextOptions& own) {
  if (own.tokens == TokenType::kBytes) return kBytes;
  if (own.vocab_size) return *own.vocab_size;
  return own.tokens == TokenType::kUint16 ? int64_t{1} << 16 : int64_t{1} << 32;
}

double SumOfWeights(const std::vector<Source>& sources) {
  double sum = 0;
  for (const Source& source : sources) sum += source.weight;
  return sum;
}

// The least number of examples that has the shares by weights, and of each source all examples.
double WeightedSize(const std::vector<Source>& sources, Part Source::*part) {
  const double weights = SumOfWeights(sources);
  double all = 0;
  for (const Source& source : sources) {
    const auto examples = static_cast<double>((source.*part).examples);
    all = std::max(all, examples * weights / source.weight);
  }
  return all;
}

// Examples of each source in an epoch. With weights, those of WeightedSize; or `most` in all, if
// that is not 0.
std::vector<int64_t> Counts(const std::vector<Source>& sources, Part Source::*part, bool weighted,
                            int64_t most) {
  std::vector<int64_t> counts;
  const double weights = SumOfWeights(sources);
  double all = WeightedSize(sources, part);
  if (most > 0) all = std::min(all, static_cast<double>(most));
  int64_t left = most > 0 ? most : std::numeric_limits<int64_t>::max();
  double before = 0;  // weights, so that rounded shares make up the whole
  for (const Source& source : sources) {
    const int64_t examples = (source.*part).examples;
    int64_t count = examples;
    if (weighted) {
      count = std::llround(all * (before + source.weight) / weights) -
              std::llround(all * before / weights);
      before += source.weight;
    }
    if (weighted && most == 0) count = std::max(count, examples);
    counts.push_back(examples == 0 ? 0 : std::min(count, left));
    left -= counts.back();
  }
  return counts;
}

const Registration<DatasetRegistry> kText("text",
                                          DatasetEntry{.load = &LoadText,
                                                       .options = &AnyOptions::Of<TextOptions>});

}  // namespace

absl::StatusOr<Splits> LoadText(const DatasetOptions& options) {
  auto own = options.implementations.Get<TextOptions>("text");
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> paths, PathsOf(options, own));
  // Of the option that names the paths.
  const auto path_error = [&](const std::string& problem,
                              absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    return own.files.empty() ? OptionError("dataset.data_dir", options.data_dir, problem, code)
                             : TextError("files", absl::StrJoin(own.files, ","), problem, code);
  };
  const bool weighted = !own.weights.empty();
  if (weighted && own.weights.size() != own.files.size()) {
    return TextError("weights", FormatOption(own.weights),
                     absl::StrCat("must have a number for each of dataset.text.files, which are ",
                                  own.files.size()));
  }
  const int64_t length = own.sequence_length.value_or(std::max<int64_t>(1, options.context));
  if (own.separator.value_or(0) >= LimitOf(own)) {
    return TextError("separator", absl::StrCat(*own.separator),
                     absl::StrCat("is no token: these are from 0 to ", LimitOf(own) - 1));
  }
  auto sources = std::make_shared<std::vector<Source>>();
  int64_t largest = 0;
  bool has_separator = false;
  for (size_t i = 0; i < paths.size(); ++i) {
    absl::StatusOr<TokenFiles> files = TokenFiles::Open({paths[i]}, own.tokens);
    if (!files.ok()) {
      return path_error(absl::StrCat("cannot be read: ", files.status().message()),
                        files.status().code());
    }
    Source& source = sources->emplace_back();
    source.files = *std::move(files);
    source.weight = weighted ? own.weights[i] : 1;
    source.documents = source.files.starts();
    if (own.separator) {
      const size_t before = source.documents.size();
      source.files.FindAfter(*own.separator, source.documents);
      has_separator = has_separator || source.documents.size() > before;
      std::sort(source.documents.begin(), source.documents.end());
      source.documents.erase(std::unique(source.documents.begin(), source.documents.end()),
                             source.documents.end());
    }
    if (own.tokens != TokenType::kBytes && !own.vocab_size) {
      largest = std::max(largest, source.files.Largest());
      if (largest >= kMostVocabulary) {
        return TextError(
            "tokens", FormatOption(own.tokens),
            absl::StrCat("finds the id ", largest, " in ", paths[i], "; are its ids of 16 bits?"));
      }
    }
    Divide(source, length, own.held_out, own.cross_documents);
    if (source.train.examples == 0 || (weighted && source.test.examples == 0)) {
      return path_error(
          absl::StrCat("is too little text: ", paths[i], " has ", source.files.size(),
                       " tokens, too few for an example to train on and one to hold out"));
    }
  }
  if (own.separator && !has_separator) {
    return TextError(
        "separator", absl::StrCat(*own.separator),
        absl::StrCat("is no ", own.tokens == TokenType::kBytes ? "byte" : "token", " of ",
                     absl::StrJoin(paths, ", "), ": leave it out, if a document is a file"));
  }
  const double by_weights = weighted ? WeightedSize(*sources, &Source::train) : 0;
  if (options.train_size == 0 && by_weights > kMostWeighted) {
    return TextError("weights", FormatOption(own.weights),
                     absl::StrCat("make an epoch of ", by_weights,
                                  " examples, so that each source comes whole; set "
                                  "dataset.train_size, or weights that differ less"));
  }
  Splits splits;
  splits.token = own.tokens == TokenType::kBytes ? "byte" : "token";
  splits.num_classes =
      own.vocab_size.value_or(own.tokens == TokenType::kBytes ? kBytes : largest + 1);
  if (own.tokens == TokenType::kBytes && splits.num_classes != kBytes) {
    return TextError(
        "vocab_size", absl::StrCat(splits.num_classes),
        absl::StrCat("must be ", kBytes, ", or be left out, for bytes: text has no other tokens"));
  }
  // Where all documents are shorter, an example is not filled up to the full length.
  int64_t longest = 1;
  for (const Source& source : *sources) {
    for (const Part* part : {&source.train, &source.test}) {
      for (const Segment& each : part->segments) {
        longest = std::max(longest, each.end - each.begin - 1);
      }
    }
  }
  const int64_t width = std::min(length, longest);
  splits.input_shape = {width};
  const auto split = [&](Part Source::*part, bool by_weight, const std::string& option,
                         int64_t wanted) -> absl::StatusOr<std::shared_ptr<const Sequences>> {
    double all = 0;
    for (const Source& source : *sources) all += static_cast<double>((source.*part).examples);
    if (by_weight) all = std::min(by_weights, static_cast<double>(kMostWeighted));
    DDP_RETURN_IF_ERROR(
        SizeOfSplit(option, wanted, std::llround(all),
                    absl::StrCat("the examples of ", width, " tokens of ",
                                 absl::StrJoin(paths, ", "), by_weight ? " by weights" : ""))
            .status());
    return std::make_shared<Sequences>(sources, part, Counts(*sources, part, by_weight, wanted),
                                       width,
                                       own.tokens == TokenType::kBytes ? 0 : splits.num_classes);
  };
  DDP_ASSIGN_OR_RETURN(splits.train,
                       split(&Source::train, weighted, "train_size", options.train_size));
  DDP_ASSIGN_OR_RETURN(splits.test, split(&Source::test, false, "test_size", options.test_size));
  if (splits.test->size() == 0) {
    return TextError("held_out", absl::StrCat(own.held_out),
                     "leaves no example to test with; give more text, or a larger part");
  }
  return splits;
}

}  // namespace ddp::tools::datasets
