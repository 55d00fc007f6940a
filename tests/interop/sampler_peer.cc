// Prints the indices of a rank's share of an epoch, one a line, for sampler_interop_test.py:
//   sampler_peer SIZE REPLICAS RANK SHUFFLE DROP_LAST SEED EPOCH
#include <cstdint>
#include <cstdio>
#include <vector>

#include "absl/strings/numbers.h"
#include "ddp/data/sampler.h"

int main(int argc, char** argv) {
  int64_t value[7];
  if (argc != 8) return 2;
  for (int i = 0; i < 7; ++i) {
    if (!absl::SimpleAtoi(argv[i + 1], &value[i])) return 2;
  }
  auto sampler =
      ddp::data::DistributedSampler::Create(value[0], {.num_replicas = static_cast<int>(value[1]),
                                                       .rank = static_cast<int>(value[2]),
                                                       .shuffle = value[3] != 0,
                                                       .seed = value[5],
                                                       .drop_last = value[4] != 0});
  if (!sampler.ok()) {
    std::fprintf(stderr, "%s\n", sampler.status().ToString().c_str());
    return 1;
  }
  sampler->set_epoch(value[6]);
  for (int64_t index : sampler->Indices()) std::printf("%lld\n", static_cast<long long>(index));
}
