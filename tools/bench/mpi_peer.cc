// Plain MPI, for comparison in //tools/bench:collectives: blocking calls on the caller's buffers.
// Started by mpirun.

#include <mpi.h>

#include <cstdint>
#include <limits>
#include <stdexcept>

#include "absl/status/status.h"
#include "tools/bench/collective_task.h"
#include "tools/bench/peer_collectives.h"

namespace ddp::tools::bench {
namespace {

class MpiCollectives : public PeerCollectives {
 public:
  using PeerCollectives::PeerCollectives;

  absl::Status SetType(Dtype dtype) override {
    switch (dtype) {
      case Dtype::kFloat32:
        type_ = MPI_FLOAT;
        return absl::OkStatus();
      case Dtype::kFloat64:
        type_ = MPI_DOUBLE;
        return absl::OkStatus();
      case Dtype::kInt32:
        type_ = MPI_INT32_T;
        return absl::OkStatus();
      case Dtype::kInt64:
        type_ = MPI_INT64_T;
        return absl::OkStatus();
      default:
        return absl::InvalidArgumentError("MPI has no such type");
    }
  }

  // MPI's default error handler ends the job on failure.
  void Run() override {
    const void* from = in_place() ? MPI_IN_PLACE : input();
    switch (op()) {
      case CollectiveOp::kAllReduce:
        MPI_Allreduce(from, output(), Count(output_count()), type_, MPI_SUM, MPI_COMM_WORLD);
        return;
      case CollectiveOp::kReduceScatter:
        MPI_Reduce_scatter_block(from, output(), Count(output_count()), type_, MPI_SUM,
                                 MPI_COMM_WORLD);
        return;
      case CollectiveOp::kAllGather:
        MPI_Allgather(from, Count(input_count()), type_, output(), Count(input_count()), type_,
                      MPI_COMM_WORLD);
        return;
      case CollectiveOp::kBroadcast:
        MPI_Bcast(output(), Count(output_count()), type_, 0, MPI_COMM_WORLD);
        return;
    }
  }

  void Barrier() override { MPI_Barrier(MPI_COMM_WORLD); }

 private:
  static int Count(int64_t elements) {
    if (elements > std::numeric_limits<int>::max()) {
      throw std::length_error("MPI counts elements in an int");
    }
    return static_cast<int>(elements);
  }

  MPI_Datatype type_ = MPI_FLOAT;
};

}  // namespace
}  // namespace ddp::tools::bench

int main(int argc, char** argv) {
  namespace bench = ddp::tools::bench;
  MPI_Init(nullptr, nullptr);
  bench::Place place;
  MPI_Comm_rank(MPI_COMM_WORLD, &place.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &place.world_size);
  bench::MpiCollectives collectives(place);
  const int code = bench::ServePeer(argc, argv, "float32,float64,int32,int64", place, collectives);
  MPI_Finalize();
  return code;
}
