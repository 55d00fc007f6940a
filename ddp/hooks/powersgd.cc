#include "ddp/hooks/powersgd.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/ops/bmm.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/isfinite.h"
#include "ATen/ops/linalg_qr.h"
#include "ATen/ops/linalg_vector_norm.h"
#include "ATen/ops/mul.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/sum.h"
#include "ATen/ops/where.h"
#include "ATen/ops/zeros.h"
#include "absl/log/absl_log.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/option_error.h"
#include "base/status.h"
#include "ddp/collective_memory.h"
#include "ddp/hooks/comm_hook.h"

namespace ddp::hooks {
namespace {

// Above this, QR is faster.
constexpr int64_t kMostGramSchmidt = 2;

// The share of a column's length that must be left after subtraction for it to be independent.
constexpr double kDependent = 1e-3;

at::Tensor Norms(const at::Tensor& columns) {
  return at::linalg_vector_norm(columns, 2, at::IntArrayRef{1}, /*keepdim=*/true);
}

void GramSchmidt(at::Tensor& matrices, double epsilon, ZeroColumn zero) {
  const int64_t rows = matrices.size(1), columns = matrices.size(2);
  at::Tensor lengths;
  if (columns > 1) lengths = Norms(matrices);
  for (int64_t i = 0; i < columns; ++i) {
    at::Tensor column = matrices.narrow(2, i, 1);
    at::Tensor norm = Norms(column);
    if (i > 0) {
      // Of a column that depends on those before it, rounding errors are left, which point
      // anywhere: subtract once more. Others keep PyTorch's bits.
      const at::Tensor before = matrices.narrow(2, 0, i);
      const at::Tensor depends = norm.lt(lengths.narrow(2, i, 1).mul(kDependent));
      column.sub_(at::bmm(before, at::bmm(before.transpose(1, 2), column))
                      .masked_fill_(depends.logical_not(), 0));
      norm = Norms(column);
    }
    const at::Tensor is_zero = norm.eq(0);
    if (epsilon == 0) {
      norm.masked_fill_(is_zero, 1);
    } else {
      norm.add_(epsilon);
    }
    column.div_(norm);
    if (zero == ZeroColumn::kReplace) {
      column.masked_fill_(is_zero, 1 / std::sqrt(static_cast<double>(rows)));
    }
    if (i + 1 == columns) break;
    at::Tensor rest = matrices.narrow(2, i + 1, columns - i - 1);
    rest.sub_(
        at::sum(at::mul(column, rest), /*dim=*/at::IntArrayRef{1}, /*keepdim=*/true).mul(column));
  }
}

constexpr int64_t kLeastStart = 2;
constexpr const char* kStartProblem =
    "must be at least 2 with use_error_feedback or warm_start: buckets are rebuilt before the "
    "second backward";

// Elements of the tensors of a bucket with gradients of these sizes.
struct Sizes {
  int64_t first = 0, qs = 0, errors = 0;
};

Sizes SizesFor(const std::vector<std::vector<int64_t>>& shapes, const PowerSgdOptions& options) {
  Sizes sizes;
  for (const std::vector<int64_t>& one : shapes) {
    const PowerSgdShape shape = ShapeFor(one, options);
    sizes.first += shape.rank > 0 ? shape.rows * shape.rank : shape.rows * shape.columns;
    sizes.qs += shape.columns * shape.rank;
    if (shape.rank > 0) sizes.errors += shape.rows * shape.columns;
  }
  return sizes;
}

bool StartsTooEarly(const PowerSgdOptions& options) {
  return (options.use_error_feedback || options.warm_start) && options.start_iter < kLeastStart;
}

}  // namespace

void Orthogonalize(at::Tensor matrices, double epsilon, ZeroColumn zero) {
  const at::ScalarType dtype = matrices.scalar_type();
  if (matrices.size(2) <= kMostGramSchmidt || dtype == at::kHalf || dtype == at::kBFloat16) {
    GramSchmidt(matrices, epsilon, zero);
  } else {
    // Orthonormal for zeros, too.
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
  }
}

PowerSgdShape ShapeFor(at::IntArrayRef sizes, const PowerSgdOptions& options) {
  PowerSgdShape shape = {.rows = 1, .columns = 1};
  for (size_t i = 0; i < sizes.size(); ++i) (i == 0 ? shape.rows : shape.columns) *= sizes[i];
  const int64_t rank = std::min({shape.rows, shape.columns, options.matrix_approximation_rank});
  const auto compressed = static_cast<double>((shape.rows + shape.columns) * rank);
  const auto whole = static_cast<double>(shape.rows * shape.columns);
  if (!sizes.empty() && compressed * options.min_compression_rate < whole) shape.rank = rank;
  return shape;
}

uint64_t NextSeed(std::mt19937& random) {
  constexpr uint32_t kMask = (1u << 30) - 1;
  constexpr uint32_t kMost = 999'999'999;
  uint32_t seed = 0;
  do {
    seed = static_cast<uint32_t>(random()) & kMask;
  } while (seed > kMost);
  return seed;
}

// One bucket in one backward.
class PowerSgdHook::Bucket final : public BucketRounds {
 public:
  Bucket(PowerSgdHook* hook, Memory* memory, const std::vector<at::Tensor>& gradients)
      : hook_(hook), memory_(*memory) {
    int64_t at_p = 0, at_q = 0, at_error = 0;
    for (const at::Tensor& gradient : gradients) {
      const PowerSgdShape shape = ShapeFor(gradient.sizes(), hook_->options_);
      if (shape.rank == 0) {
        at_p += gradient.numel();  // the part before the Ps
        plain_.push_back(gradient);
      }
    }
    for (const at::Tensor& gradient : gradients) {
      const PowerSgdShape shape = ShapeFor(gradient.sizes(), hook_->options_);
      if (shape.rank == 0) continue;
      const int64_t p_size = shape.rows * shape.rank, q_size = shape.columns * shape.rank;
      Matrix matrix = {
          .gradient = gradient.view({1, shape.rows, shape.columns}),
          .p = memory_.first.narrow(0, at_p, p_size).view({1, shape.rows, shape.rank}),
          .q = memory_.qs.narrow(0, at_q, q_size).view({1, shape.columns, shape.rank})};
      if (hook_->options_.use_error_feedback) {
        matrix.error = memory_.errors.narrow(0, at_error, gradient.numel())
                           .view({1, shape.rows, shape.columns});
      }
      at_p += p_size;
      at_q += q_size;
      at_error += gradient.numel();
      matrices_.push_back(std::move(matrix));
    }
  }

  WorkPtr Next() override {
    switch (round_++) {
      case 0:
        return SendPs();
      case 1:
        return SendQs();
      default:
        Decompress();
        return nullptr;
    }
  }

 private:
  struct Matrix {
    at::Tensor gradient, p, q;  // [1, rows, columns], [1, rows, rank], [1, columns, rank]
    at::Tensor error = {};
  };

  WorkPtr SendPs() {
    if (memory_.first.numel() == 0) return nullptr;  // empty gradients
    int64_t at = 0;
    for (const at::Tensor& gradient : plain_) {
      memory_.first.narrow(0, at, gradient.numel()).view(gradient.sizes()).copy_(gradient);
      at += gradient.numel();
    }
    PrepareQs();
    if (memory_.last_qs.defined()) memory_.last_qs.copy_(memory_.qs);
    for (Matrix& matrix : matrices_) {
      if (matrix.error.defined()) matrix.gradient.add_(matrix.error);
      at::bmm_out(matrix.p, matrix.gradient, matrix.q);
    }
    return hook_->Sum(memory_.first);
  }

  void PrepareQs() {
    const bool reuse = hook_->options_.warm_start && std::exchange(memory_.has_qs, true);
    if (reuse) {
      for (Matrix& matrix : matrices_) MakeOrthonormal(matrix.q, ZeroColumn::kReplace);
      return;
    }
    // A generator of its own for each bucket and backward, whose seed is the same on all ranks.
    const at::Generator generator = at::detail::createCPUGenerator(NextSeed(hook_->random_));
    for (Matrix& matrix : matrices_) {
      matrix.q.copy_(at::randn(matrix.q.sizes(), generator,
                               at::TensorOptions(at::kCPU).dtype(matrix.q.dtype())));
      MakeOrthonormal(matrix.q, ZeroColumn::kReplace);
    }
  }

  void MakeOrthonormal(const at::Tensor& factor, ZeroColumn zero) const {
    Orthogonalize(factor, hook_->options_.orthogonalization_epsilon, zero);
  }

  WorkPtr SendQs() {
    int64_t at = 0;
    for (at::Tensor& gradient : plain_) {
      const at::Tensor sum = memory_.first.narrow(0, at, gradient.numel());
      gradient.copy_(sum.div_(hook_->group().getSize()).view(gradient.sizes()));
      at += gradient.numel();
    }
    if (matrices_.empty()) return nullptr;
    for (Matrix& matrix : matrices_) {
      MakeOrthonormal(matrix.p, ZeroColumn::kKeep);
      at::bmm_out(matrix.q, matrix.gradient.transpose(1, 2), matrix.p);
    }
    return hook_->Sum(memory_.qs);
  }

  void Decompress() {
    memory_.qs.div_(hook_->group().getSize());
    for (Matrix& matrix : matrices_) {
      if (matrix.error.defined()) matrix.error.copy_(matrix.gradient);
      at::bmm_out(matrix.gradient, matrix.p, matrix.q.transpose(1, 2));
      if (matrix.error.defined()) matrix.error.sub_(matrix.gradient);
    }
    ForgetOverflow();
  }

  // A gradient that is not finite, as after an overflow under a loss scale, makes the result so on
  // all ranks, and the step is skipped. Residuals and factors would carry it into all later steps.
  void ForgetOverflow() {
    const at::Tensor overflow = at::isfinite(memory_.qs).all().logical_not();
    if (overflow.is_cpu() && !overflow.item<bool>()) return;  // on a GPU it would wait
    if (memory_.errors.defined()) memory_.errors.masked_fill_(overflow, 0);
    if (memory_.last_qs.defined()) {
      memory_.qs.copy_(at::where(overflow, memory_.last_qs, memory_.qs));
    }
  }

  PowerSgdHook* const hook_;
  Memory& memory_;
  std::vector<at::Tensor> plain_;
  std::vector<Matrix> matrices_;
  int round_ = 0;
};

PowerSgdHook::PowerSgdHook(c10::intrusive_ptr<c10d::ProcessGroup> group,
                           const PowerSgdOptions& options)
    : RoundsHook(std::move(group)),
      options_(options),
      random_(static_cast<uint32_t>(options.random_seed)) {
  TORCH_CHECK(!StartsTooEarly(options), "PowerSgdOptions: start_iter=", options.start_iter, " ",
              kStartProblem);
}

std::unique_ptr<BucketRounds> PowerSgdHook::Begin(c10d::GradBucket& bucket) {
  // Of a bucket of complex gradients, the buffer has pairs of real numbers, but getGradients()
  // counts complex ones (LibTorch 2.15.0).
  if (iteration_ < options_.start_iter || bucket.getParameters()[0].is_complex()) return nullptr;
  const size_t index = bucket.getIndex();
  // The Reducer has the same buckets as long as the hook has state of them: see start_iter. Without
  // feedback and warm start it may compress before buckets are rebuilt.
  if (index >= memory_.size()) memory_.resize(index + 1);
  Memory& memory = memory_[index];
  const std::vector<at::Tensor> gradients = bucket.getGradients();
  std::vector<std::vector<int64_t>> shapes;
  for (const at::Tensor& gradient : gradients) shapes.push_back(gradient.sizes().vec());
  if (!memory.first.defined() || memory.shapes != shapes) {
    const Sizes sizes = SizesFor(shapes, options_);
    const at::TensorOptions options = bucket.getBuffer().options();
    memory = {.shapes = std::move(shapes),
              .first = AllocateForCollectives(&group(), sizes.first, options),
              .qs = AllocateForCollectives(&group(), sizes.qs, options)};
    if (options_.use_error_feedback) memory.errors = at::zeros({sizes.errors}, options);
    if (options_.warm_start) memory.last_qs = at::empty({sizes.qs}, options);
    TakeSaved(index, memory);
  }
  return std::make_unique<Bucket>(this, &memory, gradients);
}

void PowerSgdHook::TakeSaved(size_t index, Memory& memory) {
  const auto found = to_take_.find(index);
  if (found == to_take_.end()) return;
  const Saved saved = std::move(found->second);
  to_take_.erase(found);
  if (saved.shapes != memory.shapes) {
    if (group().getRank() == 0 && !std::exchange(said_other_buckets_, true)) {
      ABSL_LOG(WARNING)
          << "powersgd's factors and errors in the checkpoint are of buckets of other "
             "gradients (bucket_cap_mb, the order of parameters): bucket "
          << index << ", and others like it, begin without them";
    }
    return;
  }
  if (options_.warm_start && saved.qs.defined() && saved.qs.sizes() == memory.qs.sizes()) {
    memory.qs.copy_(saved.qs);
    memory.has_qs = true;
  }
  if (memory.errors.defined() && saved.errors.defined() &&
      saved.errors.sizes() == memory.errors.sizes()) {
    memory.errors.copy_(saved.errors);
  }
}

absl::StatusOr<checkpoint::State> PowerSgdHook::state_dict() {
  // Of a bucket that has had no compressed backward since it was loaded, it is what was loaded.
  std::map<size_t, Saved> saved = to_take_;
  for (size_t i = 0; i < memory_.size(); ++i) {
    const Memory& memory = memory_[i];
    if (!memory.first.defined()) continue;
    saved[i] = {.shapes = memory.shapes,
                .qs = memory.has_qs ? memory.qs : at::Tensor(),
                .errors = memory.errors};
  }
  checkpoint::Dict buckets = checkpoint::NewTree(), errors = checkpoint::NewTree();
  for (const auto& [index, bucket] : saved) {
    const std::string key = absl::StrCat(index);
    checkpoint::Dict entries = checkpoint::NewTree();
    c10::impl::GenericList shapes(c10::AnyType::get());
    for (const auto& sizes : bucket.shapes) shapes.push_back(c10::List<int64_t>(sizes));
    entries.insert("shapes", std::move(shapes));
    if (bucket.qs.defined()) entries.insert("qs", bucket.qs);
    buckets.insert(key, std::move(entries));
    if (bucket.errors.defined()) errors.insert(key, bucket.errors);
  }
  std::ostringstream random;
  random << random_;
  checkpoint::State state;
  state.root.insert("iteration", iteration_);
  state.root.insert("random_state", random.str());
  state.root.insert("buckets", std::move(buckets));
  state.per_rank.emplace(group().getRank(), std::move(errors));
  return state;
}

namespace {

absl::Status HookStateError(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("powersgd: ", what, " is missing or no such"));
}

std::optional<c10::IValue> Find(const checkpoint::Dict& dict, const std::string& key) {
  const auto found = dict.find(key);
  if (found == dict.end()) return std::nullopt;
  return found->value();
}

// Of a gradient whose sizes a damaged file may have: products of them are integers.
constexpr int64_t kMostElements = int64_t{1} << 48;

absl::StatusOr<std::vector<std::vector<int64_t>>> ShapesIn(const std::optional<c10::IValue>& list) {
  if (!list || !list->isList()) return HookStateError("a bucket's list of shapes");
  std::vector<std::vector<int64_t>> shapes;
  for (const c10::IValue& sizes : list->toListRef()) {
    if (!sizes.isList()) return HookStateError("a bucket's list of shapes");
    shapes.emplace_back();
    int64_t room = kMostElements;
    for (const c10::IValue& size : sizes.toListRef()) {
      if (!size.isInt() || size.toInt() < 0 || size.toInt() > room) {
        return HookStateError("a bucket's list of shapes");
      }
      shapes.back().push_back(size.toInt());
      room /= std::max<int64_t>(1, size.toInt());
    }
  }
  return shapes;
}

}  // namespace

absl::StatusOr<PowerSgdHook::Loaded> PowerSgdHook::Read(const checkpoint::State& state) const {
  Loaded loaded;
  const std::optional<c10::IValue> iteration = Find(state.root, "iteration");
  if (!iteration || !iteration->isInt()) return HookStateError("the integer 'iteration'");
  loaded.iteration = iteration->toInt();
  const std::optional<c10::IValue> text = Find(state.root, "random_state");
  if (!text || !text->isString()) return HookStateError("the text 'random_state'");
  std::istringstream random(text->toStringRef());
  if (!(random >> loaded.random)) return HookStateError("the text 'random_state'");
  const std::optional<c10::IValue> buckets = Find(state.root, "buckets");
  if (!buckets || !buckets->isGenericDict()) return HookStateError("the dict 'buckets'");
  // There are none in another world.
  const auto own = state.per_rank.find(group().getRank());
  const checkpoint::Dict errors = own != state.per_rank.end() ? own->second : checkpoint::NewTree();
  for (const auto& entry : buckets->toGenericDict()) {
    const c10::IValue key = entry.key();
    size_t index = 0;
    if (!key.isString() || !absl::SimpleAtoi(key.toStringRef(), &index) ||
        !entry.value().isGenericDict()) {
      return HookStateError("the number of a bucket");
    }
    const checkpoint::Dict bucket = entry.value().toGenericDict();
    Saved& saved = loaded.buckets[index];
    DDP_ASSIGN_OR_RETURN(saved.shapes, ShapesIn(Find(bucket, "shapes")));
    const std::optional<c10::IValue> qs = Find(bucket, "qs");
    if (qs && !qs->isTensor()) return HookStateError("a bucket's tensor 'qs'");
    if (qs) saved.qs = qs->toTensor();
    const std::optional<c10::IValue> mine = Find(errors, key.toStringRef());
    if (mine && !mine->isTensor()) return HookStateError("a bucket's tensor of errors");
    if (mine) saved.errors = mine->toTensor();
  }
  return loaded;
}

// What this run's options have no use for: the line of a note, or empty.
std::string PowerSgdHook::LeftOut(const Loaded& loaded) const {
  std::string factors, errors;  // why they are left out
  constexpr const char* kOtherShapes =
      "saved with another matrix_approximation_rank or min_compression_rate";
  for (const auto& [index, saved] : loaded.buckets) {
    const Sizes sizes = SizesFor(saved.shapes, options_);
    if (saved.qs.defined() && saved.qs.numel() > 0) {
      if (!options_.warm_start) {
        factors = "warm_start=false";
      } else if (saved.qs.numel() != sizes.qs) {
        factors = kOtherShapes;
      }
    }
    if (saved.errors.defined() && saved.errors.numel() > 0) {
      if (!options_.use_error_feedback) {
        errors = "use_error_feedback=false";
      } else if (saved.errors.numel() != sizes.errors) {
        errors = kOtherShapes;
      }
    }
  }
  if (factors.empty() && errors.empty()) return "";
  if (!factors.empty()) factors = absl::StrCat("factors (", factors, ")");
  if (!errors.empty()) errors = absl::StrCat("errors (", errors, ")");
  const char* both = factors.empty() || errors.empty() ? "" : " and ";
  return absl::StrCat("without powersgd's ", factors, both, errors);
}

absl::Status PowerSgdHook::CheckStateDict(const checkpoint::State& state) const {
  return Read(state).status();
}

absl::Status PowerSgdHook::load_state_dict(const checkpoint::State& state,
                                           checkpoint::LoadNotes& notes) {
  DDP_ASSIGN_OR_RETURN(Loaded loaded, Read(state));
  if (const std::string left_out = LeftOut(loaded); !left_out.empty()) notes.Add(left_out);
  iteration_ = loaded.iteration;
  random_ = loaded.random;
  memory_.clear();
  to_take_ = std::move(loaded.buckets);
  return absl::OkStatus();
}

namespace {

absl::StatusOr<HookPtr> Create(const CommHookOptions& options, const GroupPtr& group) {
  return std::make_unique<PowerSgdHook>(group,
                                        options.implementations.Get<PowerSgdOptions>("powersgd"));
}

absl::Status ValidateStart(const CommHookOptions& options) {
  const auto own = options.implementations.Get<PowerSgdOptions>("powersgd");
  if (!StartsTooEarly(own)) return absl::OkStatus();
  return OptionError("powersgd.start_iter", absl::StrCat(own.start_iter), kStartProblem);
}

const Registration<HookRegistry> kPowerSgd("powersgd",
                                           HookEntry{.create = &Create,
                                                     .options = &AnyOptions::Of<PowerSgdOptions>,
                                                     .validate = &ValidateStart});

}  // namespace
}  // namespace ddp::hooks
