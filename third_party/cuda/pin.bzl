"""What third_party/cuda brings, from where, under which licence, and why."""

RUNTIME = struct(
    folder = "cuda",
    version = "13.0.96",
    kind = "pypi",
    what = ["nvidia-cuda-runtime==13.0.96"],
    sha256 = "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    licence = "NVIDIA CUDA Toolkit EULA (redistributable part)",
    why = "CUDA headers for the CUDA build; libcudart.so.13, which even libtorch_cpu.so of this wheel needs to load.",
)

CUPTI = struct(
    folder = "cuda",
    version = "13.0.85",
    kind = "pypi",
    what = ["nvidia-cuda-cupti==13.0.85"],
    sha256 = "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
    licence = "NVIDIA CUDA Toolkit EULA (redistributable part)",
    why = "libcupti.so.13, which libtorch_cpu.so of this wheel needs to load.",
)
