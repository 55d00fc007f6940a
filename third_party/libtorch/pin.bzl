"""What third_party/libtorch brings, from where, under which licence, and why."""

PIN = struct(
    folder = "libtorch",
    version = "2.11.0",
    kind = "pypi",
    what = ["torch==2.11.0"],
    sha256 = "7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a",
    licence = "BSD-3-Clause",
    why = "Tensors, autograd, modules, optimizers and c10d: what this project completes.",
)
