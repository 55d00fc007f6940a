"""What third_party/fashion_mnist brings, from where, under which licence, and why."""

PIN = struct(
    folder = "fashion_mnist",
    version = "0.0~git20200523.55506a9",
    kind = "debian-source",
    what = ["dataset-fashion-mnist", "trixie"],
    sha256 = "094d3928be84192f9bb88f33ff2cfeef692db8ff1da67763f52318fbda5a2fd4",
    licence = "MIT",
    why = "The real data that the README's training command and the tests use.",
)
