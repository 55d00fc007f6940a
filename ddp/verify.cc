#include "ddp/verify.h"

#include <cstring>

#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "ddp/all_gather.h"

namespace ddp {
namespace {

// One line per tensor: what has to agree.
std::string Describe(const NamedTensors& tensors) {
  std::string text;
  for (const auto& [name, tensor] : tensors) {
    absl::StrAppend(&text, name, ": ", c10::toString(tensor.scalar_type()), " [",
                    absl::StrJoin(tensor.sizes(), ", "), "]",
                    tensor.requires_grad() ? "" : " (requires no gradient)", "\n");
  }
  return text;
}

// FNV-1a: stable across processes, builds and machines, unlike absl::Hash.
uint64_t Fingerprint(absl::string_view text) {
  uint64_t hash = 14695981039346656037ull;
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211ull;
  return hash;
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

absl::Status Compare(c10d::ProcessGroup& group, const std::string& text, c10::Device device) {
  at::Tensor summary = at::empty({2}, at::kLong);
  summary.data_ptr<int64_t>()[0] = static_cast<int64_t>(Fingerprint(text));
  summary.data_ptr<int64_t>()[1] = static_cast<int64_t>(text.size());
  bool same = true;
  int64_t longest = 0;
  std::vector<int64_t> lengths;
  for (const at::Tensor& gathered : AllGather(group, summary.to(device))) {
    at::Tensor theirs = gathered.cpu();
    same = same && std::memcmp(theirs.data_ptr(), summary.data_ptr(), 16) == 0;
    lengths.push_back(theirs.data_ptr<int64_t>()[1]);
    longest = std::max(longest, lengths.back());
  }
  // Every rank has all fingerprints, so all ranks take the same branch.
  if (same) return absl::OkStatus();

  at::Tensor padded = at::zeros({longest}, at::kByte);
  std::memcpy(padded.data_ptr(), text.data(), text.size());
  std::string first;
  int rank = 0;
  for (const at::Tensor& gathered : AllGather(group, padded.to(device))) {
    at::Tensor bytes = gathered.cpu();
    std::string theirs(static_cast<const char*>(bytes.data_ptr()), lengths[rank]);
    if (rank == 0) {
      first = theirs;
    } else if (theirs != first) {
      return absl::FailedPreconditionError(FirstDifference(first, theirs, rank));
    }
    ++rank;
  }
  return absl::InternalError("fingerprints of equal models differ");
}

}  // namespace

absl::Status VerifySameModel(c10d::ProcessGroup& group, const NamedTensors& tensors) {
  const c10::Device device = tensors.empty() ? c10::Device(c10::kCPU) : tensors[0].second.device();
  return CatchStatus("comparing the model across ranks",
                     [&] { return Compare(group, Describe(tensors), device); });
}

}  // namespace ddp
