"""What third_party/oneccl brings, from where, under which licence, and why."""

PIN = struct(
    folder = "oneccl",
    version = "oneCCL 2021.13.1 with Intel MPI 2021.13.1",
    kind = "pypi-requirements",
    # One line a wheel, each with its sha256.
    what = ["requirements.txt"],
    sha256 = "",
    licence = "Intel Simplified Software License",
    why = "Peers of the benchmark of collectives. 170 MB, fetched only when //tools/bench:collectives_with_oneccl is built.",
)
