// One rank of //tools/bench:collectives, over one of our backends.
//
//   collectives_rank --backend=gloo --validate      # checks that build and machine support it
//   collectives_rank --backend=gloo --control=NAME  # one rank; RANK etc. are in the environment

#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "absl/algorithm/container.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/log/globals.h"
#include "absl/log/initialize.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "backends/process_group.h"
#include "base/environment.h"
#include "base/status.h"
#include "launchers/launcher.h"
#include "third_party/libtorch/compat.h"
#include "tools/bench/collective_server.h"
#include "tools/bench/collective_task.h"
#include "tools/bench/raw_collectives.h"

ABSL_FLAG(std::string, backend, "gloo",
          "the backend, by a name that --backend of //tools:train knows");
ABSL_FLAG(std::string, control, "", "abstract Unix socket that the tasks come from");
ABSL_FLAG(bool, validate, false, "say whether the backend is there, and do nothing");
ABSL_FLAG(double, timeout_s, 120, "longest that one collective may take, in seconds");

namespace ddp::tools::bench {
namespace {

using backends::Group;

constexpr absl::string_view kProcessGroup = "process_group";
constexpr absl::string_view kBackend = "backend";
constexpr absl::string_view kRaw = "raw";

c10::ScalarType ScalarType(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return at::kFloat;
    case Dtype::kFloat64:
      return at::kDouble;
    case Dtype::kFloat16:
      return at::kHalf;
    case Dtype::kBFloat16:
      return at::kBFloat16;
    case Dtype::kInt32:
      return at::kInt;
    case Dtype::kInt64:
      return at::kLong;
  }
  return at::kFloat;
}

// Makes the calls that DDP and ZeRO make. `Target` is a c10d::ProcessGroup, which uses c10's
// dispatcher, or the c10d::Backend itself; both have the same methods.
template <typename Target>
void RunC10d(Target& target, CollectiveOp op, std::vector<at::Tensor>& inputs, at::Tensor& output) {
  switch (op) {
    case CollectiveOp::kAllReduce:
      target.allreduce(inputs)->wait();
      return;
    case CollectiveOp::kBroadcast:
      target.broadcast(inputs)->wait();
      return;
    case CollectiveOp::kReduceScatter:
      target.reduce_scatter_single(output, inputs[0])->wait();
      return;
    case CollectiveOp::kAllGather:
      target.all_gather_single(output, inputs[0])->wait();
      return;
  }
}

class C10dCollectives : public Collectives {
 public:
  C10dCollectives(Group group, std::unique_ptr<RawCollectives> raw, int world_size)
      : group_(std::move(group)),
        backend_(group_.process_group->getBackend(c10::kCPU)),
        raw_(std::move(raw)),
        world_size_(world_size) {}

  bool HasArena() const { return backend_->supportsTensorAlloc(c10::Device(c10::kCPU).index()); }

  absl::StatusOr<Buffers> Prepare(const CollectiveTask& task) override {
    if (task.through != kProcessGroup && task.through != kBackend &&
        (task.through != kRaw || raw_ == nullptr)) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is no way through '", task.through, "'"));
    }
    if (!task.variant.empty() &&
        (task.variant != kInPlace || task.op != CollectiveOp::kAllGather)) {
      return absl::InvalidArgumentError(
          absl::StrCat("this collective has no variant '", task.variant, "'"));
    }
    if (task.arena && (!HasArena() || task.through == kRaw)) {
      return absl::InvalidArgumentError("there is no arena this way");
    }
    task_ = task;
    const auto key = std::make_tuple(task.arena, task.op, task.dtype, task.bytes, task.variant);
    auto it = tensors_.find(key);
    if (it == tensors_.end()) it = tensors_.emplace(key, Allocate(task)).first;
    tensors_now_ = &it->second;
    return Buffers{tensors_now_->inputs[0].data_ptr(), tensors_now_->output.data_ptr()};
  }

  void Run() override {
    auto& [inputs, output] = *tensors_now_;
    if (task_.through == kProcessGroup) {
      RunC10d(*group_.process_group, task_.op, inputs, output);
    } else if (task_.through == kBackend) {
      RunC10d(*backend_, task_.op, inputs, output);
    } else {
      raw_->Run(task_.op, task_.dtype, inputs[0].const_data_ptr(), output.data_ptr(),
                task_.bytes / ElementSize(task_.dtype));
    }
  }

  void Barrier() override { backend_->barrier()->wait(); }

  void Free() override {
    tensors_now_ = nullptr;
    tensors_.clear();
  }

 private:
  struct Tensors {
    std::vector<at::Tensor> inputs;  // one
    at::Tensor output;               // the same one where the collective is in place
  };

  at::Tensor Allocate(int64_t elements, bool arena) const {
    const at::TensorOptions options(ScalarType(task_.dtype));
    return arena ? backend_->allocateTensor(elements, options) : at::empty({elements}, options);
  }

  Tensors Allocate(const CollectiveTask& task) const {
    if (task.op == CollectiveOp::kAllGather && task.variant == kInPlace) {
      const at::Tensor output = Allocate(OutputElements(task, world_size_), task.arena);
      const int64_t each = InputElements(task, world_size_);
      return {{output.narrow(0, group_.process_group->getRank() * each, each)}, output};
    }
    const at::Tensor input = Allocate(InputElements(task, world_size_), task.arena);
    const bool in_place =
        task.op == CollectiveOp::kAllReduce || task.op == CollectiveOp::kBroadcast;
    return {{input}, in_place ? input : Allocate(OutputElements(task, world_size_), task.arena)};
  }

  const Group group_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::unique_ptr<RawCollectives> raw_;
  const int world_size_;
  CollectiveTask task_;
  std::map<std::tuple<bool, CollectiveOp, Dtype, int64_t, std::string>, Tensors> tensors_;
  Tensors* tensors_now_ = nullptr;
};

absl::StatusOr<launchers::Rank> WhoAmI() {
  DDP_ASSIGN_OR_RETURN(launchers::Choice choice, launchers::Choose({}, Environment::FromProcess()));
  if (!choice.rank || choice.rank->world_size < 2) {
    return absl::InvalidArgumentError(
        "this is one rank of at least two: start //tools/bench:collectives, which starts them");
  }
  return *choice.rank;
}

absl::Status RunRank() {
  backends::GroupOptions options;
  options.backend = absl::GetFlag(FLAGS_backend);
  options.timeout = absl::Seconds(absl::GetFlag(FLAGS_timeout_s));
  DDP_RETURN_IF_ERROR(backends::Validate(options));
  if (absl::GetFlag(FLAGS_validate)) return absl::OkStatus();

  DDP_ASSIGN_OR_RETURN(const launchers::Rank rank, WhoAmI());
  DDP_ASSIGN_OR_RETURN(Group group, backends::CreateProcessGroup(rank, options));
  std::unique_ptr<RawCollectives> raw;
  if (absl::c_linear_search(RawRegistry::Names(), options.backend)) {
    DDP_ASSIGN_OR_RETURN(CreateRaw create, RawRegistry::Find(options.backend));
    DDP_ASSIGN_OR_RETURN(raw, create({.rank = rank, .group = group}));
  }
  const bool has_raw = raw != nullptr;
  C10dCollectives collectives(std::move(group), std::move(raw), rank.world_size);
  const std::string abilities =
      absl::StrCat("through=", kProcessGroup, ",", kBackend, has_raw ? absl::StrCat(",", kRaw) : "",
                   " arena=", collectives.HasArena() ? "0,1" : "0",
                   " dtype=float32,float64,float16,bfloat16,int32,int64 variant=");
  return ServeTasks(absl::GetFlag(FLAGS_control), {rank.rank, rank.world_size}, abilities,
                    collectives);
}

}  // namespace
}  // namespace ddp::tools::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("one rank of //tools/bench:collectives");
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kWarning);
  absl::InitializeLog();
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = ddp::CatchStatus("benchmark", &ddp::tools::bench::RunRank);
  if (status.ok()) return 0;
  absl::FPrintF(stderr, "error: %s\n", status.message());
  return 1;
}
