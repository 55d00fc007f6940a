"""What third_party/cuda brings, from where, under which licence, and why."""

RUNTIME = struct(
    folder = "cuda",
    version = "13.2.86",
    kind = "pypi",
    what = ["nvidia-cuda-runtime==13.2.86"],
    sha256 = "3498247680dfddce31bad102af7e3e26fc795342a3cac64722bb0fa95e7f60f0",
    licence = "NVIDIA CUDA Toolkit EULA (redistributable part)",
    why = "CUDA headers for the CUDA build; libcudart.so.13, which even libtorch_cpu.so of this wheel needs to load.",
)

CUPTI = struct(
    folder = "cuda",
    version = "13.2.86",
    kind = "pypi",
    what = ["nvidia-cuda-cupti==13.2.86"],
    sha256 = "8fa29f15dd8336181f961764d9d95236fc6b931dd0c8fcf8cd70aab0c310b586",
    licence = "NVIDIA CUDA Toolkit EULA (redistributable part)",
    why = "libcupti.so.13, which libtorch_cpu.so of this wheel needs to load.",
)
