"""Tests that run over each backend whose ranks can be threads of one process."""

load("//base:cc.bzl", "ddp_cc_library", "ddp_cc_test")

def backend_tests(name, srcs, deps, hier = "hier_in_turns", env = {}, **kwargs):
    """Tests NAME_BACKEND of the same cases, compiled once.

    mpi is left out, since each of its ranks is a process: see //tests/ddp_over_mpi and
    //backends/conformance.
    The cases make groups with //backends/conformance:rank_threads, of the backend that
    DDP_TEST_BACKEND names. `hier`: one of //backends/hier:testing_layouts.
    """
    ddp_cc_library(
        name = name + "_cases",
        testonly = True,
        srcs = srcs,
        visibility = ["//tests:__subpackages__"],
        deps = deps + ["@com_google_googletest//:gtest"],
        alwayslink = True,
    )
    for backend in ["gloo", hier, "shm"]:
        ddp_cc_test(
            name = name + "_" + backend,
            env = dict(env, DDP_TEST_BACKEND = backend),
            deps = [
                ":" + name + "_cases",
                "//backends/gloo",
                "//backends/hier:testing_layouts",
                "//backends/shm",
                "@com_google_googletest//:gtest_main",
            ],
            **kwargs
        )
