// Tells the contents of data sets apart without reading all of them: for AnyDataset::Fingerprint of
// data in files or in memory. Needs no torch.
//
//   std::string Fingerprint() const override {
//     ContentsDigest digest;
//     digest.Add(features_);
//     digest.AddSamples(absl::MakeConstSpan(values_));  // a vector of floats
//     return digest.Text();
//   }
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/digest.h"

namespace ddp::data {

// A value. Thread-compatible.
class ContentsDigest {
 public:
  static constexpr int64_t kPlaces = 64;       // that are read of one part
  static constexpr int64_t kMostPlaces = 256;  // of all parts

  // How many places to read of part `number` of `parts`, as of one of several files; 0: of so many
  // its size must do.
  static int64_t PlacesOf(int64_t number, int64_t parts) {
    const int64_t every = (parts + kMostPlaces - 1) / kMostPlaces;
    return number % every == 0 ? std::clamp<int64_t>(kMostPlaces / parts, 1, kPlaces) : 0;
  }

  void Add(absl::string_view field) { digester_.AddField(field); }
  void Add(int64_t number) { digester_.AddField(absl::StrCat(number)); }

  // The number of `values` and, of their bytes in this machine's order, those at `places` places of
  // 4 KiB, which are spread over all of them, the first and the last among them; all bytes, if they
  // are no more. Takes some 10 us per place.
  template <typename T>
  void AddSamples(absl::Span<const T> values, int64_t places = kPlaces) {
    static_assert(std::is_trivially_copyable_v<T>);
    constexpr int64_t kPlace = 4096;
    const absl::string_view bytes(reinterpret_cast<const char*>(values.data()),
                                  values.size() * sizeof(T));
    Add(static_cast<int64_t>(values.size()));
    if (places == 0) return;
    const int64_t last = static_cast<int64_t>(bytes.size()) - kPlace;
    if (last <= (places - 1) * kPlace) return digester_.Add(bytes);
    for (int64_t i = 0; i < places; ++i) {
      const int64_t begin = i + 1 == places ? last : last / (places - 1) * i;
      digester_.Add(bytes.substr(static_cast<size_t>(begin), static_cast<size_t>(kPlace)));
    }
  }

  // 16 hexadecimal digits; the same in every release, since checkpoints have them.
  std::string Text() const { return digester_.Hex().substr(0, 16); }

 private:
  Digester digester_;
};

}  // namespace ddp::data
