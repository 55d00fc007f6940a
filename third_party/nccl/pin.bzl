"""What third_party/nccl brings, from where, under which licence, and why."""

PIN = struct(
    folder = "nccl",
    version = "2.30.7",
    kind = "pypi",
    what = ["nvidia-nccl-cu13==2.30.7"],
    sha256 = "cefa7fdb9710efd0f39c5f1be1d61ff6fc9a996c451265bd7fbdcf9455ed4b50",
    licence = "BSD-3-Clause",
    why = "Headers that c10d's ProcessGroupNCCL.hpp includes, and the library a CUDA build links.",
)
