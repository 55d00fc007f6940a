"""Tests whose ranks are processes of a real mpirun."""

load("@mpi//:defs.bzl", "FOUND")

def mpirun_test(name, program, ranks, args = [], **kwargs):
    """One test for each number of ranks: NAME_2_ranks, and so on.

    Where no MPI was found, one test NAME, which is skipped and says so.

    Args:
      name: of the tests.
      program: the label of an executable; every rank runs it. It passes if all exit with 0.
      ranks: list of numbers of ranks.
      args: of the program.
      **kwargs: of the sh_tests.
    """
    if not FOUND:
        native.sh_test(name = name, size = "small", srcs = ["//backends/mpi:not_found_test"])
    for count in ranks if FOUND else []:
        native.sh_test(
            name = "%s_%d_ranks" % (name, count),
            srcs = ["//backends/mpi:run_under_mpirun.sh"],
            args = [str(count), "$(location %s)" % program] + args,
            data = [program],
            **kwargs
        )
