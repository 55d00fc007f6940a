// What the commands of //tools:ckpt do with the values of checkpoints in memory: walks over trees,
// their first difference, their mean. Functions are thread-safe, classes thread-compatible.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/state.h"

namespace ddp::tools::ckpt {

// "float32"; C++'s name where Python has none.
std::string DtypeText(const at::Tensor& tensor);
// "[2, 3]"
std::string ShapeOf(const at::Tensor& tensor);
// Six digits, and "nan" without the sign that some machines give it.
std::string NumberText(double number);

// Calls `visit` for each tensor in `value`, with its path ("model/fc.weight"), which begins with
// `path`.
void VisitTensors(const c10::IValue& value, const std::string& path,
                  const std::function<void(const std::string&, const at::Tensor&)>& visit);

// Moves what belongs to single ranks to where a checkpoint that one rank writes has it: by key, a
// list over ranks (checkpoint/consolidate.h).
void MoveRanksIntoRoot(checkpoint::State& state);

// Makes the roots of two checkpoints comparable, after MoveRanksIntoRoot, which runs have saved in
// different formats: lists over ranks move to the top level if the other checkpoint has them there,
// and an optimizer's state gets names for the numbers of parameters if the other's has names.
void Align(checkpoint::State& a, checkpoint::State& b);

// The parts of `value` at paths that match the pattern of fnmatch; nullopt if there are none.
std::optional<c10::IValue> Matching(const c10::IValue& value, const std::string& pattern);

// `value` with its floating-point tensors in `dtype`, but for an optimizer's counts of steps and
// the state of a gradient scaler, which other types may not hold. Tensors that were one stay one.
// Adds to `overflows` the paths of those that have finite values that are too large for `dtype`.
c10::IValue Cast(const c10::IValue& value, at::ScalarType dtype,
                 std::vector<std::string>& overflows);

// Says what differs between two values, and the largest difference where both are tensors.
struct Difference {
  std::string path;
  std::string what;
  std::optional<double> max_abs;
};

// Compares values, and keeps the first difference, the paths of a few others, and the largest one
// of tensors.
class Comparison {
 public:
  static constexpr size_t kMostOthers = 5;

  void Compare(const c10::IValue& a, const c10::IValue& b, const std::string& path);

  const std::optional<Difference>& first() const { return first_; }
  size_t count() const { return count_; }
  // Paths of the next kMostOthers differences.
  const std::vector<std::string>& others() const { return others_; }
  // NaN counts as the largest; nullopt if no tensors of one dtype and shape differ.
  std::optional<double> max_abs() const { return max_abs_; }
  const std::string& largest() const { return largest_; }

 private:
  void Add(Difference difference);
  void CompareDicts(const c10::IValue& a, const c10::IValue& b, const std::string& path);
  void CompareTensors(const at::Tensor& a, const at::Tensor& b, const std::string& path);

  std::optional<Difference> first_;
  std::vector<std::string> others_;
  size_t count_ = 0;
  std::optional<double> max_abs_;
  std::string largest_;
};

// The element-wise mean of the floating-point and complex tensors of several models, summed in
// float64 (complex128). What else a model has is taken from the last one.
class Mean {
 public:
  // `where` names the checkpoint in errors. InvalidArgument, naming the first path: a tensor that
  // only one of this and the first model has, or of another dtype or shape, or one without
  // arithmetic (sparse, 4-bit numbers).
  absl::Status Add(const c10::IValue& model, const std::string& where);

  // Requires that a model was added. Tensors that were one in the last model stay one.
  c10::IValue Result() const;

  // Paths of values that were not averaged, and differ.
  const std::set<std::string>& taken_from_last() const { return taken_from_last_; }

 private:
  absl::Status AddValue(const std::string& path, const c10::IValue& value,
                        const c10::IValue& before, const std::string& where);

  std::string first_;                      // where the first one was
  std::map<std::string, at::Tensor> sum_;  // by path
  int count_ = 0;
  c10::IValue last_;
  std::set<std::string> taken_from_last_;
};

}  // namespace ddp::tools::ckpt
