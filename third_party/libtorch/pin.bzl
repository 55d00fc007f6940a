"""What third_party/libtorch brings, from where, under which licence, and why."""

PIN = struct(
    folder = "libtorch",
    version = "2.15.0",
    kind = "pypi",
    what = ["torch==2.15.0"],
    sha256 = "48c2d861134c0b5697c7602cb5ffa68f62a2989fdcd1717e593356f67996ca1e",
    licence = "BSD-3-Clause",
    why = "Tensors, autograd, modules, optimizers and c10d: what this project completes.",
)
