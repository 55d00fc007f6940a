#include "ddp/clip_grad.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_set>

#include "ATen/Dispatch.h"
#include "ATen/Parallel.h"
#include "ATen/ops/_foreach_clamp_max.h"
#include "ATen/ops/_foreach_clamp_min.h"
#include "ATen/ops/_foreach_mul.h"
#include "ATen/ops/_foreach_norm.h"
#include "ATen/ops/linalg_vector_norm.h"
#include "ATen/ops/stack.h"
#include "ATen/ops/zeros.h"
#include "c10/core/GradMode.h"
#include "ddp/gradient_hooks.h"
#include "ddp/memory_order.h"

namespace ddp {
namespace {

constexpr int64_t kUnitBytes = 64;
constexpr int kLanes = 8;
// A subtree of 64 units is computed at once, of 1024 units by one thread.
constexpr int kBaseLevel = 6;
constexpr int kTaskLevel = 10;

// In vectors of the compiler's, which become those of any processor; without fused multiply-add,
// as processors of one job may differ.
using Lanes = double __attribute__((vector_size(kLanes * sizeof(double))));

struct TwoNorm {
  void operator()(const Lanes& x, Lanes& out) const { out = x * x; }
};
struct OneNorm {
  void operator()(const Lanes& x, Lanes& out) const { out = x < 0 ? -x : x; }
};
struct ZeroNorm {
  void operator()(const Lanes& x, Lanes& out) const { out = x != 0 ? Lanes{} + 1 : Lanes{}; }
};
struct PNorm {
  double p;
  void operator()(const Lanes& x, Lanes& out) const {
    for (int i = 0; i < kLanes; ++i) out[i] = std::pow(std::fabs(x[i]), p);
  }
};

struct Add {
  void operator()(Lanes& sum, const Lanes& x) const { sum += x; }
};
struct Max {
  // A NaN stays.
  void operator()(Lanes& most, const Lanes& x) const { most = (x > most) | (x != x) ? x : most; }
};

template <typename T>
void Load(const T* from, Lanes& to) {
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<double>(static_cast<float>(from[i]));
}
void Load(const double* from, Lanes& to) { std::memcpy(&to, from, sizeof(to)); }
void Load(const float* from, Lanes& to) {
  using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
  Floats floats;
  std::memcpy(&floats, from, sizeof(floats));
  to = __builtin_convertvector(floats, Lanes);
}

// Subtrees over the elements of one segment, whose first unit is number `first_unit`.
template <typename T, typename Term, typename Combine>
class Tree {
 public:
  Tree(const T* values, int64_t count, int64_t first_unit, Term term)
      : values_(values), count_(count), first_unit_(first_unit), term_(term) {}

  // Over units [number << level, (number + 1) << level), of which those that the tensor has are in
  // the segment.
  void Node(int level, int64_t number, Lanes& out) const {
    const int64_t begin = (number << level) - first_unit_;
    if (level <= kTaskLevel) return Small(level, begin, out);
    const int64_t tasks = int64_t{1} << (level - kTaskLevel);
    // Those beyond the end count 0, and a sum of zeros is 0.
    const int64_t there =
        std::clamp<int64_t>((Units() - begin + (1 << kTaskLevel) - 1) >> kTaskLevel, 0, tasks);
    std::vector<Lanes> nodes(there);
    at::parallel_for(0, there, /*grain_size=*/4, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) Small(kTaskLevel, begin + (i << kTaskLevel), nodes[i]);
    });
    Pairwise(nodes.data(), there, out);
  }

 private:
  static constexpr int64_t kUnit = kUnitBytes / sizeof(T);

  int64_t Units() const { return (count_ + kUnit - 1) / kUnit; }

  // `nodes` are the first of a power of two, the rest of which are 0.
  static void Pairwise(Lanes* nodes, int64_t count, Lanes& out) {
    if (count == 0) {
      out = Lanes{};
      return;
    }
    for (; count > 1; count = (count + 1) / 2) {
      for (int64_t i = 0; i < count / 2; ++i) {
        nodes[i] = nodes[2 * i];
        Combine()(nodes[i], nodes[2 * i + 1]);
      }
      if (count % 2 != 0) nodes[count / 2] = nodes[count - 1];
    }
    out = nodes[0];
  }

  // At most a task's units, from unit `begin` of the segment on.
  void Small(int level, int64_t begin, Lanes& out) const {
    Lanes bases[1 << (kTaskLevel - kBaseLevel)];
    int64_t filled = 0;
    const int64_t end = std::min(begin + (int64_t{1} << level), Units());
    for (int64_t at = begin; at < end; at += 1 << kBaseLevel) {
      Base(at, std::min<int64_t>(end - at, 1 << kBaseLevel), bases[filled++]);
    }
    Pairwise(bases, filled, out);
  }

  void Base(int64_t begin, int64_t units, Lanes& out) const {
    Lanes leaves[1 << kBaseLevel];
    for (int64_t i = 0; i < units; ++i) {
      const int64_t at = (begin + i) * kUnit;
      if (at + kUnit <= count_) {
        Leaf(values_ + at, leaves[i]);
      } else {
        T padded[kUnit] = {};
        std::memcpy(padded, values_ + at, (count_ - at) * sizeof(T));
        Leaf(padded, leaves[i]);
      }
    }
    Pairwise(leaves, units, out);
  }

  void Leaf(const T* unit, Lanes& out) const {
    out = Lanes{};
    for (int64_t i = 0; i < kUnit; i += kLanes) {
      Lanes x, term;
      Load(unit + i, x);
      term_(x, term);
      Combine()(out, term);
    }
  }

  const T* const values_;
  const int64_t count_;
  const int64_t first_unit_;
  const Term term_;
};

struct NodeId {
  int level;
  int64_t number;
};

int64_t UnitsOf(int64_t numel, int64_t element_bytes) {
  const int64_t unit = kUnitBytes / element_bytes;
  return (numel + unit - 1) / unit;
}

int RootLevel(int64_t units) {
  int level = 0;
  while ((int64_t{1} << level) < units) ++level;
  return level;
}

// The largest subtrees that lie in units [begin, end), in ascending order.
void Decompose(const NodeId& node, int64_t begin, int64_t end, std::vector<NodeId>& out) {
  const int64_t first = node.number << node.level, last = first + (int64_t{1} << node.level);
  if (last <= begin || end <= first) return;
  if (begin <= first && last <= end) {
    out.push_back(node);
    return;
  }
  Decompose({node.level - 1, node.number * 2}, begin, end, out);
  Decompose({node.level - 1, node.number * 2 + 1}, begin, end, out);
}

std::vector<NodeId> NodesOf(const NormSegment& segment) {
  const int64_t unit = kUnitBytes / segment.element_bytes;
  const int level = RootLevel(UnitsOf(segment.numel, segment.element_bytes));
  const int64_t end = segment.end == segment.numel ? int64_t{1} << level : segment.end / unit;
  std::vector<NodeId> nodes;
  if (segment.begin < segment.end) Decompose({level, 0}, segment.begin / unit, end, nodes);
  return nodes;
}

// The tree of one tensor above the nodes that its segments have brought, in ascending order.
template <typename Combine>
struct Finish {
  const std::vector<NodeId>& nodes;
  const Lanes* values;
  size_t next = 0;

  void Root(int level, int64_t number, Lanes& out) {
    if (nodes[next].level == level && nodes[next].number == number) {
      std::memcpy(&out, values + next++, sizeof(out));
      return;
    }
    Root(level - 1, number * 2, out);
    Lanes right;
    Root(level - 1, number * 2 + 1, right);
    Combine()(out, right);
  }
};

template <typename Term, typename Combine>
double Norm(const std::vector<NormSegment>& segments, Term term,
            const std::function<void(at::Tensor&)>& combine) {
  std::vector<std::vector<NodeId>> nodes;
  int64_t total_nodes = 0;
  for (const NormSegment& segment : segments) {
    nodes.push_back(NodesOf(segment));
    total_nodes += static_cast<int64_t>(nodes.back().size());
  }
  at::Tensor partial = at::zeros({total_nodes * kLanes}, at::kDouble);
  auto* out = partial.mutable_data_ptr<double>();
  for (size_t i = 0; i < segments.size(); ++i) {
    const NormSegment& segment = segments[i];
    if (segment.values.defined() && !nodes[i].empty()) {
      AT_DISPATCH_FLOATING_TYPES_AND2(
          at::kHalf, at::kBFloat16, segment.values.scalar_type(), "BlockedNorm", [&] {
            const Tree<scalar_t, Term, Combine> tree(
                segment.values.const_data_ptr<scalar_t>(), segment.end - segment.begin,
                segment.begin / (kUnitBytes / segment.element_bytes), term);
            for (size_t n = 0; n < nodes[i].size(); ++n) {
              Lanes node;
              tree.Node(nodes[i][n].level, nodes[i][n].number, node);
              std::memcpy(out + n * kLanes, &node, sizeof(node));
            }
          });
    }
    out += nodes[i].size() * kLanes;
  }
  if (combine != nullptr) combine(partial);

  const double* in = partial.const_data_ptr<double>();
  Lanes total = {};
  for (size_t i = 0; i < segments.size();) {
    std::vector<NodeId> of_tensor;
    const size_t first = i;
    for (; i < segments.size() && segments[i].tensor == segments[first].tensor; ++i) {
      of_tensor.insert(of_tensor.end(), nodes[i].begin(), nodes[i].end());
    }
    if (of_tensor.empty()) continue;
    std::vector<Lanes> values(of_tensor.size());
    std::memcpy(values.data(), in, values.size() * sizeof(Lanes));
    in += values.size() * kLanes;
    Lanes root;
    Finish<Combine>{of_tensor, values.data()}.Root(
        RootLevel(UnitsOf(segments[first].numel, segments[first].element_bytes)), 0, root);
    for (int width = kLanes / 2; width > 0; width /= 2) {
      Lanes right = {};
      for (int lane = 0; lane < width; ++lane) right[lane] = root[lane + width];
      Combine()(root, right);
    }
    Lanes one = {};
    one[0] = root[0];
    Combine()(total, one);
  }
  return total[0];
}

// Those that have a gradient, each once.
std::vector<at::Tensor> WithGradient(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const void*> seen;
  std::vector<at::Tensor> with;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.grad().defined()) {
      TORCH_CHECK(!HasGradientHook<ShardedGradientHook>(parameter),
                  "the gradients belong to a ZeroRedundancyOptimizer of stage 2, each rank's part "
                  "on that rank: call the optimizer's clip_grad_norm_ or clip_grad_value_");
    } else if (seen.insert(parameter.unsafeGetTensorImpl()).second) {
      with.push_back(parameter);
    }
  }
  return with;
}

std::vector<at::Tensor> GradientsOf(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
  return gradients;
}

}  // namespace

double BlockedNorm(const std::vector<NormSegment>& segments, double norm_type,
                   const std::function<void(at::Tensor& partial)>& combine) {
  if (norm_type == 2) return std::sqrt(Norm<TwoNorm, Add>(segments, {}, combine));
  if (std::isinf(norm_type)) return Norm<OneNorm, Max>(segments, {}, combine);
  if (norm_type == 1) return Norm<OneNorm, Add>(segments, {}, combine);
  if (norm_type == 0) return Norm<ZeroNorm, Add>(segments, {}, combine);
  return std::pow(Norm<PNorm, Add>(segments, {norm_type}, combine), 1 / norm_type);
}

double DeviceNorm(const std::vector<at::Tensor>& gradients, double norm_type, c10::Device device,
                  const std::function<void(at::Tensor& partial)>& combine) {
  const bool is_max = std::isinf(norm_type);
  at::Tensor partial = at::zeros({1}, at::TensorOptions(device).dtype(at::kDouble));
  if (!gradients.empty()) {
    std::vector<at::Tensor> norms = at::_foreach_norm(gradients, norm_type);
    for (at::Tensor& norm : norms) norm = norm.to(device, at::kDouble);
    const at::Tensor all = at::stack(norms);
    // Of norm_type 0 each is a number of elements.
    partial.fill_(norm_type == 0 ? all.sum() : at::linalg_vector_norm(all, norm_type));
  }
  if (norm_type == 0 || is_max || combine == nullptr) {
    if (combine != nullptr) combine(partial);
    return partial.item<double>();
  }
  partial.pow_(norm_type);
  combine(partial);
  return std::pow(partial.item<double>(), 1 / norm_type);
}

double ClipFactor(double norm, double max_norm) {
  // By the formula, an infinite norm would make all gradients NaN.
  if (max_norm == std::numeric_limits<double>::infinity()) return 1.0;
  // The order of arguments keeps a NaN, as PyTorch's clamp does.
  return std::min(max_norm / (norm + 1e-6), 1.0);
}

double clip_grad_norm_(const std::vector<at::Tensor>& given, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  c10::NoGradGuard no_grad;
  TORCH_CHECK(norm_type >= 0, "clip_grad_norm_: norm_type ", norm_type, " is not 0 or more");
  const std::vector<at::Tensor> parameters = WithGradient(given);
  const std::vector<at::Tensor> gradients = GradientsOf(parameters);
  if (gradients.empty()) return 0.0;
  std::vector<NormSegment> segments;
  bool on_cpu = true;
  for (const at::Tensor& gradient : gradients) {
    TORCH_CHECK(!gradient.is_sparse(), "clip_grad_norm_: sparse gradients are not supported");
    on_cpu &= gradient.device().is_cpu() && gradient.is_floating_point();
  }
  for (const at::Tensor& parameter : parameters) {
    if (!on_cpu) break;
    const at::Tensor values = FlatInMemoryOrder(parameter, parameter.grad());
    segments.push_back({.tensor = static_cast<int>(segments.size()),
                        .numel = values.numel(),
                        .end = values.numel(),
                        .values = values,
                        .element_bytes = static_cast<int64_t>(values.element_size())});
  }
  const double total = on_cpu ? BlockedNorm(segments, norm_type)
                              : DeviceNorm(gradients, norm_type, gradients[0].device());
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(total), "the norm of the gradients is ", total,
              "; a step with them would destroy the parameters");
  // Multiply also by a factor of 1, so that the cost does not depend on the data.
  at::_foreach_mul_(gradients, ClipFactor(total, max_norm));
  return total;
}

void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> gradients = GradientsOf(WithGradient(parameters));
  if (gradients.empty()) return;
  for (const at::Tensor& gradient : gradients) {
    TORCH_CHECK(!gradient.is_complex(),
                "clip_grad_value_: a gradient is complex, and complex numbers have no order by "
                "which to limit them; use clip_grad_norm_");
  }
  at::_foreach_clamp_min_(gradients, -clip_value);
  at::_foreach_clamp_max_(gradients, clip_value);
}

}  // namespace ddp
