"""What third_party/nccl brings, from where, under which licence, and why."""

PIN = struct(
    folder = "nccl",
    version = "2.28.9",
    kind = "pypi",
    what = ["nvidia-nccl-cu13==2.28.9"],
    sha256 = "e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42",
    licence = "BSD-3-Clause",
    why = "Headers that c10d's ProcessGroupNCCL.hpp includes, and the library a CUDA build links.",
)
