// MPI itself, for //tools/bench:collectives to compare our backends with: the blocking calls on the
// caller's buffers, and nothing in between. Started by the site's own mpirun.

#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "tools/bench/collective_server.h"
#include "tools/bench/collective_task.h"

namespace ddp::tools::bench {
namespace {

constexpr absl::string_view kInPlace = "in_place";
constexpr absl::string_view kSeparate = "separate";

absl::StatusOr<MPI_Datatype> MpiType(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return MPI_FLOAT;
    case Dtype::kFloat64:
      return MPI_DOUBLE;
    case Dtype::kInt32:
      return MPI_INT32_T;
    case Dtype::kInt64:
      return MPI_INT64_T;
    default:
      return absl::InvalidArgumentError("MPI has no such type");
  }
}

struct Freed {
  void operator()(void* memory) const { free(memory); }
};
using Memory = std::unique_ptr<void, Freed>;

class MpiCollectives : public Collectives {
 public:
  explicit MpiCollectives(Place place) : place_(place) {}

  absl::StatusOr<Buffers> Prepare(const Task& task) override {
    if (task.variant != kInPlace && task.variant != kSeparate) {
      return absl::InvalidArgumentError(absl::StrCat("no variant '", task.variant, "'"));
    }
    DDP_ASSIGN_OR_RETURN(type_, MpiType(task.dtype));
    if (task.bytes / ElementSize(task.dtype) > std::numeric_limits<int>::max()) {
      return absl::InvalidArgumentError("MPI counts elements in an int");
    }
    op_ = task.op;
    input_count_ = static_cast<int>(InputElements(task, place_.world_size));
    output_count_ = static_cast<int>(OutputElements(task, place_.world_size));
    const int64_t size = ElementSize(task.dtype);
    if (bytes_ != task.bytes) Free();
    bytes_ = task.bytes;
    // Either buffer serves either variant, and as the larger of the two.
    if (first_ == nullptr) first_ = Allocate(bytes_);
    in_place_ = task.variant == kInPlace || op_ == CollectiveOp::kBroadcast;
    input_ = first_.get();
    output_ = first_.get();
    if (in_place_ && op_ == CollectiveOp::kAllGather) {
      input_ = static_cast<char*>(input_) + place_.rank * input_count_ * size;
    } else if (!in_place_) {
      if (second_ == nullptr) second_ = Allocate(bytes_);
      output_ = second_.get();
    }
    return Buffers{input_, output_};
  }

  void Run() override {
    const void* from = in_place_ ? MPI_IN_PLACE : input_;
    switch (op_) {
      case CollectiveOp::kAllReduce:
        MPI_Allreduce(from, output_, output_count_, type_, MPI_SUM, MPI_COMM_WORLD);
        return;
      case CollectiveOp::kReduceScatter:
        MPI_Reduce_scatter_block(from, output_, output_count_, type_, MPI_SUM, MPI_COMM_WORLD);
        return;
      case CollectiveOp::kAllGather:
        MPI_Allgather(from, input_count_, type_, output_, input_count_, type_, MPI_COMM_WORLD);
        return;
      case CollectiveOp::kBroadcast:
        MPI_Bcast(output_, output_count_, type_, 0, MPI_COMM_WORLD);
        return;
    }
  }

  void Barrier() override { MPI_Barrier(MPI_COMM_WORLD); }

  void Free() override {
    first_.reset();
    second_.reset();
  }

 private:
  static Memory Allocate(int64_t bytes) {
    constexpr int64_t kPage = 4096;
    return Memory(aligned_alloc(kPage, static_cast<size_t>((bytes + kPage - 1) / kPage * kPage)));
  }

  const Place place_;
  CollectiveOp op_ = CollectiveOp::kAllReduce;
  MPI_Datatype type_ = MPI_FLOAT;
  int64_t bytes_ = 0;
  int input_count_ = 0;
  int output_count_ = 0;
  bool in_place_ = true;
  Memory first_;
  Memory second_;
  void* input_ = nullptr;
  void* output_ = nullptr;
};

absl::Status RunPeer(absl::string_view control) {
  Place place;
  MPI_Comm_rank(MPI_COMM_WORLD, &place.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &place.world_size);
  MpiCollectives collectives(place);
  return ServeTasks(control, place,
                    absl::StrCat("through=raw arena=0 dtype=float32,float64,int32,int64 variant=",
                                 kInPlace, ",", kSeparate),
                    collectives);
}

}  // namespace
}  // namespace ddp::tools::bench

int main(int argc, char** argv) {
  constexpr absl::string_view kControl = "--control=";
  const absl::string_view argument = argc == 2 ? argv[1] : "";
  if (argument.substr(0, kControl.size()) != kControl) {
    fprintf(stderr, "usage: mpirun -n N mpi_peer --control=SOCKET\n");
    return 2;
  }
  // Failures of MPI end the job: its default error handler.
  MPI_Init(&argc, &argv);
  const absl::Status status = ddp::tools::bench::RunPeer(argument.substr(kControl.size()));
  if (!status.ok()) fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  MPI_Finalize();
  return status.ok() ? 0 : 1;
}
