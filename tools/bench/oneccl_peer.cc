// Plain oneCCL, for comparison in //tools/bench:collectives. Communicates via Intel MPI; started by
// its mpiexec.

#include <mpi.h>

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "oneapi/ccl.hpp"
#include "tools/bench/collective_task.h"
#include "tools/bench/peer_collectives.h"

namespace ddp::tools::bench {
namespace {

class OneCclCollectives : public PeerCollectives {
 public:
  OneCclCollectives(Place place, ccl::communicator communicator)
      : PeerCollectives(place), communicator_(std::move(communicator)) {}

  absl::Status SetType(Dtype dtype) override {
    switch (dtype) {
      case Dtype::kFloat32:
        type_ = ccl::datatype::float32;
        break;
      case Dtype::kFloat64:
        type_ = ccl::datatype::float64;
        break;
      case Dtype::kFloat16:
        type_ = ccl::datatype::float16;
        break;
      case Dtype::kBFloat16:
        type_ = ccl::datatype::bfloat16;
        break;
      case Dtype::kInt32:
        type_ = ccl::datatype::int32;
        break;
      case Dtype::kInt64:
        type_ = ccl::datatype::int64;
        break;
    }
    return absl::OkStatus();
  }

  // In place, the output of reduce-scatter must be at this rank's share of the input.
  bool MayBeInPlace(CollectiveOp op) const override { return op != CollectiveOp::kReduceScatter; }

  void Run() override {
    const auto inputs = static_cast<size_t>(input_count());
    const auto outputs = static_cast<size_t>(output_count());
    switch (op()) {
      case CollectiveOp::kAllReduce:
        ccl::allreduce(input(), output(), outputs, type_, ccl::reduction::sum, communicator_)
            .wait();
        return;
      case CollectiveOp::kReduceScatter:
        ccl::reduce_scatter(input(), output(), outputs, type_, ccl::reduction::sum, communicator_)
            .wait();
        return;
      case CollectiveOp::kAllGather:
        counts_.assign(static_cast<size_t>(place().world_size), inputs);
        ccl::allgatherv(input(), inputs, output(), counts_, type_, communicator_).wait();
        return;
      case CollectiveOp::kBroadcast:
        ccl::broadcast(output(), outputs, type_, 0, communicator_).wait();
        return;
    }
  }

  void Barrier() override { ccl::barrier(communicator_); }

 private:
  ccl::communicator communicator_;
  ccl::datatype type_ = ccl::datatype::float32;
  std::vector<size_t> counts_;
};

ccl::communicator Connect(const Place& place) {
  ccl::init();
  ccl::kvs::address_type address;
  ccl::shared_ptr_class<ccl::kvs> store;
  if (place.rank == 0) {
    store = ccl::create_main_kvs();
    address = store->get_address();
  }
  MPI_Bcast(address.data(), static_cast<int>(address.size()), MPI_BYTE, 0, MPI_COMM_WORLD);
  if (place.rank != 0) store = ccl::create_kvs(address);
  return ccl::create_communicator(place.world_size, place.rank, store);
}

int RunPeer(int argc, char** argv) {
  Place place;
  MPI_Comm_rank(MPI_COMM_WORLD, &place.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &place.world_size);
  OneCclCollectives collectives(place, Connect(place));
  return ServePeer(argc, argv, "float32,float64,float16,bfloat16,int32,int64", place, collectives);
}

}  // namespace
}  // namespace ddp::tools::bench

int main(int argc, char** argv) {
  // The thread level that oneCCL requests when it initialises MPI itself.
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  const int code = ddp::tools::bench::RunPeer(argc, argv);
  MPI_Finalize();
  return code;
}
