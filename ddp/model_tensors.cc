#include "ddp/model_tensors.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/xxh3.h"
#include "ddp/all_gather.h"
#include "ddp/collective_status.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/embedding.h"

namespace ddp {
namespace {

using Identities = std::set<const void*>;

const void* Identity(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }

Identities SparseWeights(const torch::nn::Module& module) {
  Identities weights;
  for (const auto& child : module.modules()) {
    if (const auto* one = dynamic_cast<const torch::nn::EmbeddingImpl*>(child.get())) {
      if (one->options.sparse()) weights.insert(Identity(one->weight));
    } else if (const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(child.get())) {
      if (bag->options.sparse()) weights.insert(Identity(bag->weight));
    }
  }
  return weights;
}

// The strides of a dense tensor that is not row-major, else "": gradients of others are row-major.
std::string DescribeStrides(const at::Tensor& tensor) {
  if (!tensor.requires_grad() || tensor.layout() != at::kStrided || tensor.is_contiguous() ||
      !tensor.is_non_overlapping_and_dense()) {
    return "";
  }
  std::vector<std::string> strides;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    // That of a dimension of size 1 means nothing.
    strides.push_back(tensor.size(i) == 1 ? "-" : absl::StrCat(tensor.stride(i)));
  }
  return absl::StrCat(" strides [", absl::StrJoin(strides, ", "), "]");
}

bool IsExpanded(const at::Tensor& tensor, int64_t dimension) {
  return tensor.size(dimension) > 1 && tensor.stride(dimension) == 0;
}

std::string DescribeExpansion(const at::Tensor& tensor) {
  std::vector<int64_t> dimensions;
  for (int64_t i = 0; tensor.layout() == at::kStrided && i < tensor.dim(); ++i) {
    if (IsExpanded(tensor, i)) dimensions.push_back(i);
  }
  if (dimensions.empty()) return "";
  return absl::StrCat(" expanded in dimensions [", absl::StrJoin(dimensions, ", "), "]");
}

// One line per tensor: what has to agree.
std::string Describe(const NamedTensors& tensors) {
  std::string text;
  for (const auto& [name, tensor] : tensors) {
    absl::StrAppend(&text, name, ": ", c10::toString(tensor.scalar_type()), " [",
                    absl::StrJoin(tensor.sizes(), ", "), "]", DescribeStrides(tensor),
                    DescribeExpansion(tensor),
                    tensor.requires_grad() ? "" : " (requires no gradient)", "\n");
  }
  return text;
}

std::string FirstDifference(absl::string_view ours, absl::string_view theirs, int rank) {
  const std::vector<absl::string_view> a = absl::StrSplit(ours, '\n', absl::SkipEmpty());
  const std::vector<absl::string_view> b = absl::StrSplit(theirs, '\n', absl::SkipEmpty());
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    const absl::string_view left = i < a.size() ? a[i] : "nothing";
    const absl::string_view right = i < b.size() ? b[i] : "nothing";
    if (left != right) {
      return absl::StrCat("the model differs between ranks: tensor ", i, " is '", left,
                          "' on rank 0, but '", right, "' on rank ", rank,
                          "; build the same module on every rank");
    }
  }
  return "";
}

// What each rank gathers first. Of int64_t only, so that it is the same as a tensor.
struct Header {
  int64_t code = 0;  // of its status
  int64_t fingerprint = 0;
  int64_t length = 0;
  bool operator==(const Header&) const = default;
};
constexpr int64_t kHeaderNumbers = sizeof(Header) / sizeof(int64_t);

// Compares `text`: the description of the model, or, with another `code` than 0, an error's
// message.
absl::Status Compare(c10d::ProcessGroup& group, absl::StatusCode code, const std::string& text,
                     c10::Device device) {
  const Header mine = {static_cast<int64_t>(code), static_cast<int64_t>(Xxh3(text)),
                       static_cast<int64_t>(text.size())};
  at::Tensor summary = at::empty({kHeaderNumbers}, at::kLong);
  std::memcpy(summary.data_ptr(), &mine, sizeof(mine));
  std::vector<Header> headers;
  int64_t longest = 0;
  std::optional<size_t> failed;  // the lowest rank with an error
  for (const at::Tensor& gathered : AllGather(group, summary.to(device))) {
    const at::Tensor theirs = gathered.cpu();
    std::memcpy(&headers.emplace_back(), theirs.data_ptr(), sizeof(Header));
    longest = std::max(longest, headers.back().length);
    if (headers.back().code != 0 && !failed) failed = headers.size() - 1;
  }
  // Every rank has all headers, so all ranks take the same branch.
  const bool same = std::all_of(headers.begin(), headers.end(),
                                [&](const Header& header) { return header == headers[0]; });
  if (same && !failed) return absl::OkStatus();

  at::Tensor padded = at::zeros({std::max<int64_t>(longest, 1)}, at::kByte);
  std::memcpy(padded.data_ptr(), text.data(), text.size());
  std::vector<std::string> texts;
  for (const at::Tensor& gathered : AllGather(group, padded.to(device))) {
    const at::Tensor bytes = gathered.cpu();
    const auto* begin = static_cast<const char*>(bytes.data_ptr());
    texts.emplace_back(begin, headers[texts.size()].length);
  }
  if (failed) {
    return absl::Status(static_cast<absl::StatusCode>(headers[*failed].code),
                        absl::StrCat("rank ", *failed, ": ", texts[*failed]));
  }
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] != texts[0]) {
      return absl::FailedPreconditionError(
          FirstDifference(texts[0], texts[rank], static_cast<int>(rank)));
    }
  }
  return absl::InternalError("fingerprints of equal models differ");
}

// Where messages are, which must not depend on what this rank's model is like if that can be
// helped.
c10::Device MessageDevice(const c10d::ProcessGroup& group, const NamedTensors& tensors) {
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  const auto has = [&](c10::DeviceType type) {
    return std::any_of(devices.begin(), devices.end(),
                       [type](c10::Device device) { return device.type() == type; });
  };
  if (has(c10::kCPU) || devices.empty()) return c10::kCPU;
  for (const auto& [name, tensor] : tensors) {
    if (has(tensor.device().type())) return tensor.device();
  }
  return devices[0];
}

}  // namespace

absl::StatusOr<ModelTensors> CollectModelTensors(const torch::nn::Module& module,
                                                 const std::vector<std::string>& ignored) {
  const auto parameters = module.named_parameters();
  const auto buffers = module.named_buffers();
  Identities left_out;
  for (const std::string& name : ignored) {
    const at::Tensor* tensor = parameters.find(name);
    if (tensor == nullptr) tensor = buffers.find(name);
    if (tensor == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("ignored: the module has no parameter or buffer '", name,
                       "'; give full names, as in named_parameters()"));
    }
    left_out.insert(Identity(*tensor));
  }
  ModelTensors tensors;
  const Identities sparse = SparseWeights(module);
  Identities seen;
  for (const auto& item : parameters) {
    const auto& [name, parameter] = item.pair();
    const bool is_ignored = left_out.count(Identity(parameter)) != 0;
    if (!is_ignored) tensors.parameters.emplace_back(name, parameter);
    if (!parameter.requires_grad() || !seen.insert(Identity(parameter)).second) continue;
    tensors.trainable.emplace_back(name, parameter);
    if (is_ignored) continue;
    tensors.reduced.emplace_back(name, parameter);
    tensors.sparse.push_back(sparse.count(Identity(parameter)) != 0);
  }
  for (const auto& item : buffers) {
    if (left_out.count(Identity(item.value())) == 0) {
      tensors.buffers.emplace_back(item.key(), item.value());
    }
  }
  return tensors;
}

at::Tensor Stored(const at::Tensor& tensor) {
  at::Tensor stored = tensor;
  for (int64_t i = 0; tensor.layout() == at::kStrided && i < tensor.dim(); ++i) {
    if (IsExpanded(tensor, i)) stored = stored.narrow(i, 0, 1);
  }
  return stored;
}

absl::Status VerifySameModel(c10d::ProcessGroup& group, const NamedTensors& tensors,
                             const absl::Status& mine) {
  const c10::Device device = MessageDevice(group, tensors);
  const std::string text = mine.ok() ? Describe(tensors) : std::string(mine.message());
  const absl::Status compared = CatchCollective("comparing the model across ranks", [&] {
    return Compare(group, mine.code(), text, device);
  });
  return mine.ok() ? compared : mine;
}

}  // namespace ddp
