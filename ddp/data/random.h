// Random numbers of one example, which depend on nothing but its place in the training: they are
// the same for any number of workers and ranks, and after a resume. Needs no torch.
//
//   Random random(/*seed=*/1, /*epoch=*/3, /*position=*/17);
//   const int64_t shift = random.Below(9);   // 0 … 8
//   if (random.Bernoulli(0.5)) Flip(image);
//   std::shuffle(words.begin(), words.end(), random);
//
// Tensors of random numbers: random_tensors.h.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>

namespace ddp::data {

// A counter-based generator: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers:
// as easy as 1, 2, 3", 2011), the one of torch's GPU generators. The key is the seed, and the
// counter is (block, epoch, position): no two examples of a training share numbers. Takes 40 bytes;
// to make one costs nothing. A uniform random bit generator of 32 bits, for std::shuffle and the
// distributions of <random>, whose algorithms are each library's own.
//
// A value; thread-compatible.
class Random {
 public:
  // `position`: of the example in the epoch's order over all ranks. `stream`: of further sequences
  // with the same place; 0 is that of the examples. Of the epoch, the low 32 bits count.
  Random(int64_t seed, int64_t epoch, int64_t position, uint64_t stream = 0)
      : key_(static_cast<uint64_t>(seed) + stream * 0x9e3779b97f4a7c15),
        epoch_(static_cast<uint32_t>(epoch)),
        position_(static_cast<uint64_t>(position)) {}

  using result_type = uint32_t;
  static constexpr uint32_t min() { return 0; }
  static constexpr uint32_t max() { return std::numeric_limits<uint32_t>::max(); }

  // The next 32 bits; 2^34 of these until they repeat.
  uint32_t operator()() {
    if (used_ == words_.size()) {
      words_ = Philox({block_++, epoch_, static_cast<uint32_t>(position_),
                       static_cast<uint32_t>(position_ >> 32)},
                      key_);
      used_ = 0;
    }
    return words_[used_++];
  }
  uint64_t Bits64() {
    const uint64_t high = (*this)();
    return high << 32 | (*this)();
  }

  // Returns a number in [0, 1), a multiple of 2^-53.
  double Uniform() { return static_cast<double>(Bits64() >> 11) * 0x1p-53; }
  // Returns a number in [low, high).
  double Uniform(double low, double high) { return low + (high - low) * Uniform(); }
  // Returns an integer in 0 … n-1; n >= 1. Takes 64 bits, whatever n is.
  int64_t Below(int64_t n) {
    return static_cast<int64_t>(
        (static_cast<unsigned __int128>(Bits64()) * static_cast<uint64_t>(n)) >> 64);
  }
  // True with probability `p`.
  bool Bernoulli(double p) { return Uniform() < p; }
  // Returns a number of mean 0 and standard deviation 1 (Box and Muller, 1958).
  double Normal() {
    const double radius = std::sqrt(-2 * std::log(1 - Uniform()));
    return radius * std::cos(2 * std::numbers::pi * Uniform());
  }

  // The 128 random bits of a counter and a key.
  static constexpr std::array<uint32_t, 4> Philox(std::array<uint32_t, 4> counter, uint64_t key) {
    auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = uint64_t{0xd2511f53} * counter[0], b = uint64_t{0xcd9e8d57} * counter[2];
      counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ k0, static_cast<uint32_t>(b),
                 static_cast<uint32_t>(a >> 32) ^ counter[3] ^ k1, static_cast<uint32_t>(a)};
      k0 += 0x9e3779b9;
      k1 += 0xbb67ae85;
    }
    return counter;
  }

 private:
  uint64_t key_;
  uint32_t epoch_;
  uint32_t block_ = 0;
  uint64_t position_;
  std::array<uint32_t, 4> words_ = {};
  size_t used_ = 4;
};

}  // namespace ddp::data
