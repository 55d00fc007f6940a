#include "tools/datasets/image_resize.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace ddp::tools::datasets {
namespace {

// Bits behind the point of a weight.
constexpr int kPrecision = 32 - 8 - 2;

// The pixels of a line that one pixel of the result is made of.
struct Window {
  int64_t begin = 0;
  std::vector<int32_t> weights;  // of begin, begin + 1, …
};

// Of the pixels [first, first + count) of a line of `size` that is scaled to `scaled`.
std::vector<Window> Windows(int64_t size, int64_t scaled, int64_t first, int64_t count) {
  const double scale = static_cast<double>(size) / static_cast<double>(scaled);
  const double support = std::max(scale, 1.0);  // half the width of the triangle
  std::vector<Window> windows;
  for (int64_t i = first; i < first + count; ++i) {
    const double center = (static_cast<double>(i) + 0.5) * scale;
    const int64_t begin = std::max<int64_t>(0, static_cast<int64_t>(center - support + 0.5));
    const int64_t end = std::min(size, static_cast<int64_t>(center + support + 0.5));
    std::vector<double> weights;
    double sum = 0;
    for (int64_t x = begin; x < end; ++x) {
      const double distance = std::abs((static_cast<double>(x) - center + 0.5) * (1.0 / support));
      weights.push_back(distance < 1 ? 1 - distance : 0);
      sum += weights.back();
    }
    Window& window = windows.emplace_back();
    window.begin = begin;
    for (const double weight : weights) {
      const double share = sum != 0 ? weight / sum : weight;
      window.weights.push_back(static_cast<int32_t>(0.5 + share * (1 << kPrecision)));
    }
  }
  return windows;
}

uint8_t Rounded(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kPrecision, 0, 255)); }

// One pixel: the weighted sum of pixels `stride` bytes apart.
void Blend(const Window& window, const uint8_t* from, int64_t stride, uint8_t* to) {
  int32_t red = 1 << (kPrecision - 1), green = red, blue = red;
  from += window.begin * stride;
  for (const int32_t weight : window.weights) {
    red += weight * from[0];
    green += weight * from[1];
    blue += weight * from[2];
    from += stride;
  }
  to[0] = Rounded(red);
  to[1] = Rounded(green);
  to[2] = Rounded(blue);
}

// Where a side of `scaled` pixels is cut; Python rounds halves to the even number.
int64_t CropBegin(int64_t scaled, int64_t size) {
  return std::llrint(std::nearbyint(static_cast<double>(scaled - size) / 2));
}

}  // namespace

Image ResizeAndCrop(const Image& image, int64_t size) {
  const int64_t shorter = std::min(image.width, image.height);
  const auto scaled = [&](int64_t side) {
    return side == shorter ? size
                           : static_cast<int64_t>(static_cast<double>(size * side) /
                                                  static_cast<double>(shorter));
  };
  const int64_t width = scaled(image.width), height = scaled(image.height);
  const std::vector<Window> columns = Windows(image.width, width, CropBegin(width, size), size);
  std::vector<Window> rows = Windows(image.height, height, CropBegin(height, size), size);
  // Only the rows that are needed are scaled, first across.
  const int64_t first = rows.front().begin;
  const int64_t last = rows.back().begin + static_cast<int64_t>(rows.back().weights.size());
  const int64_t line = size * 3;
  std::vector<uint8_t> across((last - first) * line);
  for (int64_t y = first; y < last; ++y) {
    for (int64_t x = 0; x < size; ++x) {
      Blend(columns[x], image.rgb.data() + y * image.width * 3, 3,
            across.data() + (y - first) * line + x * 3);
    }
  }
  for (Window& row : rows) row.begin -= first;
  Image made = {.width = size, .height = size};
  made.rgb.resize(size * line);
  for (int64_t y = 0; y < size; ++y) {
    for (int64_t x = 0; x < size; ++x) {
      Blend(rows[y], across.data() + x * 3, line, made.rgb.data() + y * line + x * 3);
    }
  }
  return made;
}

}  // namespace ddp::tools::datasets
