#include "checkpoint/safetensors/plan.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "base/utf8.h"
#include "checkpoint/safetensors/tensor_file.h"
#include "checkpoint/safetensors/torch_dtype.h"
#include "checkpoint/tree_json.h"

namespace ddp::checkpoint::safetensors {
namespace {

// A tensor of the state.
struct Item {
  at::Tensor tensor;
  bool in_model = false;
  std::string name;  // in its file
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;  // in the file
};

absl::Status Refuse(const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("cannot write '", Printable(path), "': ", what));
}

class Planner {
 public:
  explicit Planner(const TensorSource* source) : source_(source) {}

  absl::StatusOr<Plan> Run(const c10::IValue& root) {
    const auto collect = [this](const std::string& path, const at::Tensor& tensor) {
      return Collect(path, tensor);
    };
    NoteSlashes(root);
    DDP_RETURN_IF_ERROR(TreeToJson(root, collect).status());
    Share();
    Plan plan;
    size_t next = 0;
    const auto name_of = [&](const std::string&, const at::Tensor&) -> absl::StatusOr<std::string> {
      const Item& item = items_[next++];
      return absl::StrCat(item.in_model ? kModelFile : kTrainingFile, "/", item.name);
    };
    DDP_ASSIGN_OR_RETURN(plan.tree, TreeToJson(root, name_of));
    for (Item& item : items_) {
      PlannedFile& file = item.in_model ? plan.model : plan.training;
      if (!file.tensors.emplace(item.name, item.tensor).second) continue;
      file.entries.push_back({.name = item.name, .dtype = item.dtype, .shape = item.shape});
    }
    plan.model.aliases = std::move(aliases_);
    return plan;
  }

 private:
  absl::StatusOr<std::string> Collect(const std::string& path, const at::Tensor& given) {
    if (!given.defined()) return Refuse(path, "an undefined tensor");
    const bool is_strided = given.layout() == at::kStrided && !given.is_quantized();
    const bool comes_later = is_strided && source_ != nullptr && source_->Has(given.storage());
    if (!is_strided || (given.is_meta() && !comes_later)) {
      return Refuse(path, "only dense tensors that have their values in memory can be written");
    }
    Item item;
    item.tensor = given.detach().resolve_conj().resolve_neg();
    const std::optional<Dtype> dtype = DtypeOf(given.scalar_type());
    if (!dtype.has_value()) {
      return Refuse(path, absl::StrCat("element type ", c10::toString(given.scalar_type()),
                                       ", which the format safetensors lacks"));
    }
    item.dtype = *dtype;
    const c10::IntArrayRef sizes = item.tensor.sizes();
    const auto shape = FileShape(*dtype, {sizes.data(), sizes.size()});
    if (!shape.has_value()) return Refuse(path, "pairs of 4-bit numbers without a dimension");
    item.shape = *shape;
    if (absl::StatusOr<uint64_t> size = SizeOf(*dtype, item.shape); !size.ok()) {
      return Refuse(path, size.status().message());
    }
    item.in_model = path == "model" || absl::StartsWith(path, "model/");
    item.name = NameOf(path, item.in_model);
    items_.push_back(std::move(item));
    return "";
  }

  // Other programs' weights may have slashes in their names, which stay: others look for these.
  void NoteSlashes(const c10::IValue& root) {
    if (!root.isGenericDict() || !root.toGenericDict().contains("model")) return;
    const c10::IValue model = root.toGenericDict().at("model");
    if (!model.isGenericDict()) return;
    for (const auto& entry : model.toGenericDict()) {
      if (!entry.key().isString() || !entry.value().isTensor()) continue;
      const std::string& key = entry.key().toStringRef();
      if (absl::StrContains(key, '/')) with_slashes_.insert(key);
    }
  }

  // A name that is new in its file.
  std::string NameOf(const std::string& path, bool in_model) {
    const std::string key(in_model ? absl::StripPrefix(path, "model/") : absl::string_view(path));
    const bool is_own = in_model && with_slashes_.contains(key);
    const std::string name = is_own ? key : absl::StrReplaceAll(key, {{"/", "."}});
    auto& taken = in_model ? model_names_ : training_names_;
    int& count = taken[name];
    if (++count == 1 && name != "__metadata__") return name;
    for (;; ++count) {
      std::string numbered = absl::StrCat(name, "#", std::max(count, 2));
      if (taken.emplace(numbered, 1).second) return numbered;
    }
  }

  // Gives tensors of one file that are the same one name.
  void Share() {
    using Place = std::tuple<bool, const c10::StorageImpl*, c10::ScalarType, int64_t,
                             std::vector<int64_t>, std::vector<int64_t>>;
    std::map<Place, std::vector<Item*>> places;
    for (Item& item : items_) {
      if (item.tensor.numel() == 0 || !CanBeAlias(item)) continue;
      places[{item.in_model, item.tensor.storage().unsafeGetStorageImpl(),
              item.tensor.scalar_type(), item.tensor.storage_offset(), item.tensor.sizes().vec(),
              item.tensor.strides().vec()}]
          .push_back(&item);
    }
    for (const auto& [place, same] : places) {
      const std::string first =
          (*std::min_element(same.begin(), same.end(), [](const Item* a, const Item* b) {
            return a->name < b->name;
          }))->name;
      for (Item* item : same) {
        if (item->in_model && item->name != first) aliases_[item->name] = first;
        item->name = first;
      }
    }
  }

  // The alias's name becomes a key of the metadata, which has other keys, too.
  static bool CanBeAlias(const Item& item) {
    return !item.in_model || (item.name != "format" && !absl::StartsWith(item.name, kOwnPrefix));
  }

  const TensorSource* const source_;
  std::vector<Item> items_;
  std::set<std::string> with_slashes_;  // keys of the model's tensors
  std::map<std::string, int> model_names_;
  std::map<std::string, int> training_names_;
  Metadata aliases_;
};

}  // namespace

absl::StatusOr<Plan> PlanOf(const c10::IValue& root, const TensorSource* source) {
  return Planner(source).Run(root);
}

at::Tensor RowMajor(const at::Tensor& tensor) {
  const at::Tensor here = tensor.to(at::kCPU);
  if (here.is_contiguous()) return here;
  return here.view(BitsTypeOf(here.scalar_type())).contiguous();
}

}  // namespace ddp::checkpoint::safetensors
