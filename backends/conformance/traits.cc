#include "backends/conformance/traits.h"

#include "backends/backend.h"

namespace ddp::backends::conformance {
namespace {

bool IsScattered(TensorLayout layout) {
  return layout == TensorLayout::kPermuted || layout == TensorLayout::kStrided;
}

constexpr Gap kGlooGaps[] = {
    {"messages of tensors that are not contiguous",
     [](const Case& c) { return NeedsPeer(c.op) && IsScattered(c.layout); }},
    {"all_to_all_single of tensors that are not contiguous",
     [](const Case& c) {
       return (c.op == Op::kAlltoallBase || c.op == Op::kAlltoallBaseUnequal) &&
              IsScattered(c.layout);
     }},
    // Gloo asserts "offset < this->size", or does not see the message, if it comes before its
    // receiver.
    {"messages of no elements", [](const Case& c) { return NeedsPeer(c.op) && c.count == 0; },
     /*always=*/false},
};

// What goes through a gloo group of all ranks; groups that a layout leaves on one host are shm's,
// which lacks nothing.
constexpr Gap kHierGaps[] = {
    {"messages of tensors that are not contiguous",
     [](const Case& c) { return NeedsPeer(c.op) && IsScattered(c.layout); }, /*always=*/false},
    {"all_to_all_single of tensors that are not contiguous, where each rank is a host",
     [](const Case& c) {
       return (c.op == Op::kAlltoallBase || c.op == Op::kAlltoallBaseUnequal) &&
              IsScattered(c.layout);
     },
     /*always=*/false},
    {"messages of no elements", [](const Case& c) { return NeedsPeer(c.op) && c.count == 0; },
     /*always=*/false},
};

constexpr Gap kNcclGaps[] = {
    {"reductions of int16",
     [](const Case& c) { return HasReduction(c.op) && c.dtype == c10::ScalarType::Short; }},
};

const Traits kTraits[] = {
    {.backend = "gloo",
     .exactness = Exactness::kRounding,
     .ends_when_destroyed = false,
     .closes_at_once = false,
     .survives_wrong_sizes = false,  // Gloo throws in a thread of its own
     .gaps = kGlooGaps},
    {.backend = "hier_pairs",
     .exactness = Exactness::kRounding,
     .closes_at_once = false,
     .survives_wrong_sizes = false,
     .gaps = kHierGaps},
    // Two ranks of it are a host each: plain gloo.
    {.backend = "hier_in_turns",
     .exactness = Exactness::kRounding,
     .ends_when_destroyed = false,
     .closes_at_once = false,
     .survives_wrong_sizes = false,
     .gaps = kHierGaps},
    {.backend = "hier_pairs_over_mpi",
     .threads_as_ranks = false,
     .exactness = Exactness::kRounding},
    {.backend = "mpi", .threads_as_ranks = false},
    {.backend = "nccl",
     .device = "cuda",
     .threads_as_ranks = false,
     .exactness = Exactness::kRounding,
     .gaps = kNcclGaps},
};

}  // namespace

const Traits& TraitsOf(absl::string_view backend) {
  static const Traits kEverything;
  for (const Traits& traits : kTraits) {
    if (traits.backend == backend) return traits;
  }
  return kEverything;
}

std::vector<std::string> ThreadBackends() {
  std::vector<std::string> names = BackendRegistry::Names();
  std::erase_if(names, [](const std::string& name) { return !TraitsOf(name).threads_as_ranks; });
  return names;
}

const Gap* FindGap(const Traits& traits, const Case& c) {
  for (const Gap& gap : traits.gaps) {
    if (gap.applies(c)) return &gap;
  }
  return nullptr;
}

}  // namespace ddp::backends::conformance
