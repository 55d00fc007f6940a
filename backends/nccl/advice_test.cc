#include "backends/nccl/advice.h"

#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace ddp::backends::nccl {
namespace {

// Errors that users have met, in the form that c10d throws.
constexpr std::pair<absl::string_view, absl::string_view> kErrors[] = {
    {"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run "
     "with "
     "NCCL_DEBUG=WARN for details), NCCL version 2.28.9\nncclInvalidUsage: This usually reflects "
     "invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both "
     "on CUDA device 2000",
     "nproc_per_node"},
    {"NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2588, internal "
     "error "
     "- please report this issue to the NCCL developers, NCCL version 2.21.5\nncclInternalError: "
     "Internal check failed.\nLast error:\nBootstrap : no socket interface found",
     "NCCL_SOCKET_IFNAME"},
    {"ncclInternalError: Internal check failed.\nLast error:\nncclSocketInit: connecting to "
     "address "
     " with family 59936 is neither AF_INET(2) nor AF_INET6(10)",
     "NCCL_SOCKET_IFNAME"},
    {"NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for "
     "details), "
     "NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\nLast "
     "error:\nCuda "
     "failure 35 'CUDA driver version is insufficient for CUDA runtime version'",
     "update it"},
    {"ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
     "error. \nLast error:\nError while creating shared memory segment /dev/shm/nccl-WU88OE (size "
     "9637888), error: No space left on device (28)",
     "--shm-size"},
    {"[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, "
     "OpType=ALLREDUCE, "
     "NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600004 milliseconds "
     "before "
     "timing out.",
     "timeout_s"},
    {"NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited or there was a network "
     "error, "
     "NCCL version 2.28.9\nncclRemoteError: A call failed possibly due to a network error or a "
     "remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by "
     "remote "
     "peer node2<42830>",
     "another rank has ended"},
    {"ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
     "error. \nLast error:\nsocketStartConnect: Connect to 192.168.1.161<45763> failed : "
     "Connection "
     "refused",
     "NCCL_SOCKET_IFNAME"},
    {"NCCL error: ncclRemoteError … Last error:\nNET/IB : Got completion from peer "
     "10.0.35.1<49189> "
     "with error 4, opcode 5327, len 5327, vendor err 81 (Send)",
     "NCCL_IB_HCA"},
    {"CUDA error: out of memory", "batch_size"},
    {"CUDA error: an illegal memory access was encountered", "compute-sanitizer"},
    {"CUDA error: invalid device ordinal", "CUDA_VISIBLE_DEVICES"},
    {"ncclUnhandledCudaError: Call to CUDA function failed.", "NCCL_DEBUG=INFO"},
    {"NCCL error in: x.cpp:1, unhandled system error, NCCL version 2.7.8", "ulimit"},
};

TEST(AdviceTest, KnownErrorsSayWhatToCheck) {
  for (const auto& [error, word] : kErrors) {
    EXPECT_TRUE(absl::StrContains(Advice(error), word)) << error << "\n-> " << Advice(error);
  }
}

TEST(AdviceTest, TheCauseCountsAndNotTheClassOfTheError) {
  for (const auto& [error, word] : kErrors) {
    if (!absl::StrContains(error, "Last error:") || absl::StrContains(error, "ncclRemoteError")) {
      continue;
    }
    const absl::string_view classified = error.substr(0, error.find("Last error:"));
    EXPECT_NE(Advice(error), Advice(classified)) << error;
  }
}

TEST(AdviceTest, OtherErrorsAreLeftAlone) {
  EXPECT_EQ(Advice("connection closed by peer [127.0.0.1]:29500"), "");
  EXPECT_EQ(Advice(""), "");
  const absl::Status status = absl::UnavailableError("gloo: out of memory");
  EXPECT_EQ(WithAdvice(status), status);
  EXPECT_TRUE(WithAdvice(absl::OkStatus()).ok());
}

TEST(AdviceTest, CodeMessageAndPayloadsStay) {
  absl::Status status = absl::DeadlineExceededError("CUDA error: out of memory");
  status.SetPayload("type", absl::Cord("payload"));
  const absl::Status advised = WithAdvice(status);
  EXPECT_EQ(advised.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(absl::StartsWith(advised.message(), "CUDA error: out of memory; check: "));
  EXPECT_EQ(advised.GetPayload("type"), absl::Cord("payload"));
}

}  // namespace
}  // namespace ddp::backends::nccl
