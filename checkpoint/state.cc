#include "checkpoint/state.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status.h"

namespace ddp::checkpoint {
namespace {

// The tensor at `path`; undefined if there is none. Keys may contain slashes.
at::Tensor FindTensor(const c10::impl::GenericDict& tree, absl::string_view path) {
  for (const auto& entry : tree) {
    absl::string_view rest = path;
    const std::string key =
        entry.key().isString() ? entry.key().toStringRef() : absl::StrCat(entry.key().toInt());
    if (!absl::ConsumePrefix(&rest, key)) continue;
    if (rest.empty() && entry.value().isTensor()) return entry.value().toTensor();
    if (!absl::ConsumePrefix(&rest, "/") || !entry.value().isGenericDict()) continue;
    at::Tensor found = FindTensor(entry.value().toGenericDict(), rest);
    if (found.defined()) return found;
  }
  return {};
}

}  // namespace

absl::Status CheckShards(const State& state) {
  for (const auto& [path, shard] : state.shards) {
    const std::string where = absl::StrCat("shard '", path, "'");
    const at::Tensor tensor = FindTensor(state.root, path);
    if (!tensor.defined()) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": the state has no such tensor"));
    }
    const c10::IntArrayRef sizes = tensor.sizes();
    DDP_RETURN_IF_ERROR(Annotate(CheckLocal(shard, {sizes.data(), sizes.size()}), where));
  }
  return absl::OkStatus();
}

}  // namespace ddp::checkpoint
