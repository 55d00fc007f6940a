"""What third_party/python_torch brings, from where, under which licence, and why."""

PIN = struct(
    folder = "python_torch",
    version = "torch 2.15.0, numpy 2.4.6, tensorboard 2.21.0, safetensors 0.8.0, and what they need",
    kind = "pypi-requirements",
    # One line a wheel, each with its sha256.
    what = ["requirements.txt"],
    sha256 = "",
    licence = "BSD-3-Clause (torch, numpy), Apache-2.0 (tensorboard, safetensors), NVIDIA's EULAs (CUDA libraries), MIT and BSD others",
    why = "The other side of interoperability tests and of benchmarks. 2.5 GB, fetched only when one of those is built.",
)
