"""What third_party/mpi brings: nothing. An MPI is a site's own, found through its compiler wrapper."""

PIN = struct(
    folder = "mpi",
    version = "the site's own (tested: Open MPI 4.1.4)",
    kind = "system",
    what = ["mpicc --showme"],
    sha256 = "",
    licence = "the site's own (Open MPI: BSD-3-Clause)",
    why = "For //backends/mpi, over an MPI that a site brings itself; an error that says so where none is found.",
)
