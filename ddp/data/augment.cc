#include "ddp/data/augment.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "c10/util/Exception.h"

namespace ddp::data {
namespace {

constexpr char kCrop[] = "crop", kFlip[] = "flip", kNormalise[] = "normalise";

bool Has(const AugmentOptions& options, absl::string_view transform) {
  return std::find(options.transforms.begin(), options.transforms.end(), transform) !=
         options.transforms.end();
}

// Sizes of a batch of images.
struct Geometry {
  int64_t n, channels, height, width;
};

Geometry GeometryOf(const at::Tensor& images) {
  TORCH_CHECK(images.dim() == 3 || images.dim() == 4,
              "images to augment must be [n, channels, height, width] or [n, height, width], not ",
              images.sizes());
  return {images.size(0), images.dim() == 4 ? images.size(1) : 1, images.size(-2), images.size(-1)};
}

// Where a new image comes from: row y, column x of it is (y + dy, x + dx) of the old one, zero
// outside; then flipped.
struct Move {
  int64_t dy = 0, dx = 0;
  bool flip = false;
};

std::vector<Move> DrawMoves(const AugmentOptions& options, absl::Span<Random> random) {
  std::vector<Move> moves(random.size());
  for (size_t i = 0; i < random.size(); ++i) {
    for (const std::string& transform : options.transforms) {
      if (transform == kCrop) {
        moves[i].dy = random[i].Below(2 * options.padding + 1) - options.padding;
        moves[i].dx = random[i].Below(2 * options.padding + 1) - options.padding;
      } else if (transform == kFlip) {
        moves[i].flip = random[i].Bernoulli(0.5);
      }
    }
  }
  return moves;
}

template <typename Pixel>
void MovePixels(const Pixel* from, Pixel* to, const Geometry& size,
                const std::vector<Move>& moves) {
  const auto [n, channels, height, width] = size;
  for (int64_t i = 0; i < n; ++i) {
    const Move& move = moves[i];
    // Columns [begin, end) of a new row are of the old one.
    const int64_t begin = std::clamp<int64_t>(-move.dx, 0, width);
    const int64_t end = std::clamp<int64_t>(width - move.dx, begin, width);
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t y = 0; y < height; ++y, to += width) {
        const int64_t row = y + move.dy;
        if (row < 0 || row >= height) {
          std::memset(to, 0, width * sizeof(Pixel));
          continue;
        }
        const Pixel* source = from + ((i * channels + c) * height + row) * width + move.dx;
        if (move.flip) {
          std::memset(to + (width - begin), 0, begin * sizeof(Pixel));
          std::reverse_copy(source + begin, source + end, to + (width - end));
          std::memset(to, 0, (width - end) * sizeof(Pixel));
        } else {
          std::memset(to, 0, begin * sizeof(Pixel));
          std::copy(source + begin, source + end, to + begin);
          std::memset(to + end, 0, (width - end) * sizeof(Pixel));
        }
      }
    }
  }
}

at::Tensor Moved(const at::Tensor& images, const std::vector<Move>& moves) {
  const Geometry size = GeometryOf(images);
  const at::Tensor from = images.contiguous();
  at::Tensor to = at::empty_like(from);
  const auto move = [&]<typename Pixel>(Pixel) {
    MovePixels(static_cast<const Pixel*>(from.const_data_ptr()),
               static_cast<Pixel*>(to.mutable_data_ptr()), size, moves);
  };
  switch (from.element_size()) {
    case 1:
      move(uint8_t{});
      break;
    case 2:
      move(uint16_t{});
      break;
    case 4:
      move(uint32_t{});
      break;
    case 8:
      move(uint64_t{});
      break;
    default:
      TORCH_CHECK(false, "images to augment are of dtype ", from.scalar_type());
  }
  return to;
}

template <typename Pixel>
void NormalisePixels(const Pixel* from, float* to, const Geometry& size, float scale,
                     const AugmentOptions& options) {
  const int64_t plane = size.height * size.width;
  for (int64_t i = 0; i < size.n * size.channels; ++i, from += plane, to += plane) {
    const int64_t channel = i % size.channels;
    const float mean = options.mean[options.mean.size() == 1 ? 0 : channel];
    const float std = options.std[options.std.size() == 1 ? 0 : channel];
    for (int64_t p = 0; p < plane; ++p) {
      to[p] = (static_cast<float>(from[p]) / scale - mean) / std;
    }
  }
}

at::Tensor Normalised(const at::Tensor& images, const AugmentOptions& options) {
  const Geometry size = GeometryOf(images);
  for (const auto* values : {&options.mean, &options.std}) {
    TORCH_CHECK(values->size() == 1 || static_cast<int64_t>(values->size()) == size.channels,
                "normalise has ", values->size(), " numbers for images of ", size.channels,
                " channels; give one for each, or one for all");
  }
  const at::Tensor from = images.contiguous();
  at::Tensor to = at::empty(from.sizes(), at::kFloat);
  float* out = to.mutable_data_ptr<float>();
  if (from.scalar_type() == at::kByte) {
    NormalisePixels(from.const_data_ptr<uint8_t>(), out, size, 255.0f, options);
  } else {
    TORCH_CHECK(from.scalar_type() == at::kFloat, "normalise takes float32 and bytes, not ",
                from.scalar_type());
    NormalisePixels(from.const_data_ptr<float>(), out, size, 1.0f, options);
  }
  return to;
}

}  // namespace

absl::Status Validate(const AugmentOptions& options) {
  const std::vector<std::string>& all = options.transforms;
  for (auto each = all.begin(); each != all.end(); ++each) {
    if (*each != kCrop && *each != kFlip && *each != kNormalise) {
      return absl::InvalidArgumentError(absl::StrCat("there is no transform '", *each,
                                                     "' of images: use crop, flip or normalise"));
    }
    if (std::find(all.begin(), each, *each) != each) {
      return absl::InvalidArgumentError(
          absl::StrCat("the transform '", *each, "' of images stands there twice"));
    }
  }
  if (options.padding < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("augment option padding is ", options.padding, "; it must be at least 0"));
  }
  const auto is_positive = [](float value) { return value > 0 && std::isfinite(value); };
  if (options.mean.empty() || options.std.empty() ||
      !std::all_of(options.std.begin(), options.std.end(), is_positive)) {
    return absl::InvalidArgumentError(
        "augment options mean and std: give each a number, and std one above 0");
  }
  return absl::OkStatus();
}

at::Tensor Augment(const at::Tensor& images, const AugmentOptions& options,
                   absl::Span<Random> random) {
  TORCH_CHECK(static_cast<int64_t>(random.size()) == GeometryOf(images).n,
              "Augment: ", images.sizes(), " images need as many Random, not ", random.size());
  at::Tensor result = images;
  if (Has(options, kCrop) || Has(options, kFlip)) {
    result = Moved(result, DrawMoves(options, random));
  }
  return Has(options, kNormalise) ? Normalised(result, options) : result;
}

absl::StatusOr<std::shared_ptr<const AugmentedDataset>> AugmentedDataset::Create(
    std::shared_ptr<const AnyDataset> images, const AugmentOptions& options) {
  DDP_RETURN_IF_ERROR(Validate(options));
  return std::shared_ptr<const AugmentedDataset>(new AugmentedDataset(std::move(images), options));
}

Batch AugmentedDataset::Get(absl::Span<const int64_t> indices, absl::Span<Random> random) const {
  AnyBatch read = images_->GetAny(indices, random);
  Batch batch = std::move(read.Get<Batch>());
  batch.input = Augment(batch.input, options_, random);
  return batch;
}

}  // namespace ddp::data
