#include "backends/conformance/fuzz.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <utility>

#include "absl/numeric/bits.h"
#include "absl/strings/str_cat.h"
#include "backends/conformance/start.h"
#include "base/status.h"

namespace ddp::backends::conformance {
namespace {

// Salts differ by step and by seed; the low bits make tags, which only need to differ among what
// is in flight.
uint64_t Salt(uint64_t seed, int64_t step) { return (seed << 32) + step * 13; }

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}

  int64_t Below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  template <typename T>
  T Of(absl::Span<const T> values) {
    return values[Below(values.size())];
  }
  // As many sizes are from 1 to 2 as from 64 to 128, and some are 0.
  int64_t Size(int64_t max) {
    if (Below(16) == 0) return 0;
    const int64_t bound = int64_t{1} << Below(absl::bit_width(static_cast<uint64_t>(max)));
    return std::min(max, bound + Below(bound));
  }

 private:
  std::mt19937_64 random_;
};

struct Step {
  int64_t number;
  Case c;
  std::unique_ptr<Running> running;
};

}  // namespace

Case FuzzCase(const Traits& traits, int world_size, uint64_t seed, int64_t step,
              int64_t max_count) {
  Draw draw(Salt(seed, step) * 0x9e3779b97f4a7c15 + 1);
  Case c;
  do {
    c.op = draw.Of(AllOps());
    c.reduction = draw.Of(AllReductions());
    c.dtype = draw.Of(AllDtypes());
    c.count = draw.Size(max_count);
    c.layout = draw.Of(AllLayouts());
    c.mode = draw.Below(3) == 0 ? Mode::kSync : Mode::kAsync;
    c.scope = draw.Of(AllScopes());
    c.world_size = world_size;
  } while (!IsMeaningful(c) || FindGap(traits, c) != nullptr);
  return c;
}

absl::Status Fuzz(Groups& groups, const FuzzOptions& options) {
  const int rank = groups.world().getRank(), size = groups.world().getSize();
  Draw own(Salt(options.seed, rank));
  std::deque<Step> in_flight;
  const auto annotate = [&](const absl::Status& status, int64_t step, const Case& c) {
    return Annotate(status, absl::StrCat("seed ", options.seed, ", step ", step, " (", CaseName(c),
                                         "), rank ", rank));
  };
  const auto finish = [&](int64_t index) {
    Step step = std::move(in_flight[index]);
    in_flight.erase(in_flight.begin() + index);
    return annotate(step.running->Finish(), step.number, step.c);
  };

  for (int64_t number = 0; number < options.steps; ++number) {
    const Case c = FuzzCase(groups.traits(), size, options.seed, number, options.max_count);
    c10d::Backend& backend = groups.group(c.scope);
    Step step{number, c, nullptr};
    DDP_RETURN_IF_ERROR(annotate(CatchStatus("",
                                             [&] {
                                               step.running = std::make_unique<Running>(
                                                   backend, groups.traits(), c,
                                                   Salt(options.seed, number));
                                             }),
                                 number, c));
    in_flight.push_back(std::move(step));
    if (c.mode == Mode::kSync) DDP_RETURN_IF_ERROR(finish(in_flight.size() - 1));
    while (static_cast<int>(in_flight.size()) > own.Below(options.max_in_flight) + 1) {
      DDP_RETURN_IF_ERROR(finish(own.Below(in_flight.size())));
    }
  }
  while (!in_flight.empty()) DDP_RETURN_IF_ERROR(finish(own.Below(in_flight.size())));
  return absl::OkStatus();
}

}  // namespace ddp::backends::conformance
