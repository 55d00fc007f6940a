#include "backends/nccl/advice.h"

#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ddp::backends::nccl {
namespace {

struct Entry {
  std::vector<absl::string_view> signs;  // texts to look for, ignoring case; one is enough
  absl::string_view advice;
  bool debug_helps = false;  // whether NCCL's own log can tell more
};

// The first matching entry is used. So specific causes come before the classes of errors of c10d
// ("ncclSystemError: …"), which appear in the same text.
const std::vector<Entry>& Entries() {
  static const auto* entries = new std::vector<Entry>{
      {{"Duplicate GPU detected"},
       "two ranks use one GPU. Start at most as many ranks on a machine as it has GPUs "
       "(nproc_per_node), and have CUDA_VISIBLE_DEVICES name all of them in every rank."},
      {{"driver version is insufficient", "unsupported display driver",
        "forward compatibility was attempted", "no kernel image is available"},
       "the NVIDIA driver, or the GPU, is too old for the CUDA that this program was built for. "
       "nvidia-smi shows the driver and the newest CUDA it serves; update it, or build against an "
       "older LibTorch (LIBTORCH_PATH)."},
      {{"no CUDA-capable device", "no CUDA GPUs are available", "invalid device ordinal"},
       "this rank has no GPU. nvidia-smi lists the machine's, CUDA_VISIBLE_DEVICES the ones that "
       "this process may use; rank N of a machine takes the Nth of them."},
      {{"no socket interface found", "neither AF_INET", "no NCCL_SOCKET_IFNAME"},
       "NCCL found no network interface. NCCL_SOCKET_IFNAME must be the beginning of the name of "
       "one that is up on every machine (`ip addr`), or be unset.",
       true},
      {{"shared memory segment", "posix_fallocate", "/dev/shm"},
       "/dev/shm is full or small. In a container, raise it (docker --shm-size=1g, or --ipc=host); "
       "otherwise remove what old runs left there."},
      {{"Mismatched NCCL version"},
       "the ranks run different builds of NCCL. Start the same program with the same libraries "
       "(LD_LIBRARY_PATH) on every machine."},
      {{"out of memory"},
       "a GPU's memory is full. nvidia-smi shows what else uses it; a smaller batch_size needs "
       "less."},
      {{"illegal memory access", "device-side assert", "misaligned address", "launch failure",
        "Xid"},
       "a kernel failed, perhaps one before this call, and CUDA tells only now. "
       "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer finds it; `dmesg | grep Xid` shows broken "
       "hardware."},
      {{"collective operation timeout", "Timeout waiting for", "timed out in"},
       "some rank did not come to this collective within timeout_s, or calls another one. The "
       "ranks' first errors tell why; if one is only slow, raise timeout_s. "
       "TORCH_NCCL_DUMP_ON_TIMEOUT=1 writes what each rank did last. With "
       "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 a rank would wait for ever instead of ending."},
      {{"NET/IB", "ibv_", "libibverbs"},
       "InfiniBand or RoCE failed. ibstat shows the ports; NCCL_IB_HCA chooses among them. Set "
       "NCCL_IB_DISABLE=1 to test over TCP.",
       true},
      {{"Connection refused", "No route to host", "Network is unreachable", "Connection timed out"},
       "the machines do not reach each other on the interface that NCCL chose. Set "
       "NCCL_SOCKET_IFNAME to the one they share, and open its ports to each other.",
       true},
      {{"peer access", "nvmlInit", "P2P"},
       "the GPUs cannot reach each other's memory. `nvidia-smi topo -p2p r` shows which can; "
       "NCCL_P2P_DISABLE=1 goes through the host.",
       true},
      {{"ncclRemoteError", "remote process exit", "Connection closed by", "Connection reset by",
        "Broken pipe"},
       "another rank has ended, or the network between has failed. The error of the rank that "
       "ended "
       "first is the cause."},
      {{"ncclInvalidUsage", "ncclInvalidArgument", "invalid usage"},
       "the ranks' calls do not fit together, or a tensor lies on another GPU than its rank's.",
       true},
      {{"ncclUnhandledCudaError", "unhandled cuda error"},
       "a CUDA call inside NCCL failed; nvidia-smi shows whether the GPUs are healthy.",
       true},
      {{"ncclSystemError", "unhandled system error"},
       "a system call inside NCCL failed: the network (NCCL_SOCKET_IFNAME), /dev/shm, or a limit "
       "(ulimit -a).",
       true},
      {{"ncclInternalError", "NCCL"}, "what NCCL was doing.", true},
      {{"CUDA error", "cudaError"},
       "nvidia-smi, whether the GPU is healthy and free. CUDA_LAUNCH_BLOCKING=1 shows which call "
       "failed."},
  };
  return *entries;
}

}  // namespace

std::string Advice(absl::string_view error) {
  const bool is_ours =
      absl::StrContainsIgnoreCase(error, "nccl") || absl::StrContainsIgnoreCase(error, "cuda");
  if (!is_ours) return "";
  for (const Entry& entry : Entries()) {
    for (absl::string_view sign : entry.signs) {
      if (!absl::StrContainsIgnoreCase(error, sign)) continue;
      return absl::StrCat(entry.advice, entry.debug_helps
                                            ? " NCCL_DEBUG=INFO in the environment makes NCCL say "
                                              "what it does."
                                            : "");
    }
  }
  return "";
}

absl::Status WithAdvice(const absl::Status& status) {
  if (status.ok()) return status;
  const std::string advice = Advice(status.message());
  if (advice.empty()) return status;
  absl::Status advised(status.code(), absl::StrCat(status.message(), "; check: ", advice));
  status.ForEachPayload([&advised](absl::string_view type, const absl::Cord& payload) {
    advised.SetPayload(type, payload);
  });
  return advised;
}

}  // namespace ddp::backends::nccl
