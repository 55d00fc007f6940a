"""What third_party/gloo brings, from where, under which licence, and why."""

PIN = struct(
    folder = "gloo",
    version = "0.0~git20231202.5354032",
    kind = "debian-source",
    what = ["gloo", "trixie"],
    sha256 = "66d6fadb7b07cfcff08f74ae2acfab504e780d6b7536ee74d2011718cda25030",
    licence = "BSD-3-Clause",
    why = "Headers only: c10d's ProcessGroupGloo.hpp includes them; the code is inside libtorch_cpu.so.",
)
