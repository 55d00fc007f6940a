"""What third_party/protobuf brings, from where, under which licence, and why."""

PIN = struct(
    folder = "protobuf",
    version = "3.21.12",
    kind = "debian-source",
    what = ["protobuf", "trixie"],
    sha256 = "930c2c3b5ecc6c9c12615cf5ad93f1cd6e12d0aba862b572e076259970ac3a53",
    licence = "BSD-3-Clause",
    why = "TensorBoard's event files are protobuf records. Only the lite runtime and a compiler for C++ are built.",
)
