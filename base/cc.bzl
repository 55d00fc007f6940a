"""cc_library, cc_binary and cc_test for all programs of this repository.

Binaries link mimalloc: glibc's malloc maps and unmaps each large tensor at every step. Sanitizer
builds keep the sanitizer's allocator. Tests keep glibc's, whose checks make an abort with a message
of a double free: in mimalloc 2.0.9 it is an endless loop, when the thread that allocated ends.
Binaries also link //base:program_start, for closed standard streams and for signals to process 1.

Tests, and libraries for tests alone, are compiled with -O1 in an optimised build: a quarter of the time
of a source less than with -O2, and what they measure is in other libraries.

Targets that name @libtorch//:torch in their deps are compiled with its precompiled headers
(//third_party/libtorch:precompiled_header.bzl) where that is on. Each source includes what it uses all
the same: other projects compile it without.
"""

_MALLOC = select({
    "//base:sanitizer": "@bazel_tools//tools/cpp:malloc",
    "//conditions:default": "@mimalloc",
})

_PROGRAM_START = "//base:program_start"

_TEST_COPTS = select({
    "//base:optimized": ["-O1"],
    "//conditions:default": [],
})

_TORCH = "@libtorch//:torch"
_PRECOMPILES = "//third_party/libtorch:precompiles"

def _with_precompiled_header(deps, copts):
    """The deps and copts of a target that has these."""
    if type(deps) != "list" or _TORCH not in deps:
        return {"deps": deps, "copts": copts}
    header = "third_party/libtorch/precompiled/precompiled.hpp"
    return {
        "deps": deps + select({
            _PRECOMPILES: ["//third_party/libtorch:precompiled"],
            "//conditions:default": [],
        }),
        "copts": copts + select({
            _PRECOMPILES: ["-include", header],
            "//conditions:default": [],
        }),
    }

def ddp_cc_library(name, deps = [], copts = [], **kwargs):
    if kwargs.get("testonly"):
        copts = copts + _TEST_COPTS
    native.cc_library(name = name, **dict(kwargs, **_with_precompiled_header(deps, copts)))

def ddp_cc_binary(name, deps = [], copts = [], **kwargs):
    native.cc_binary(
        name = name,
        malloc = _MALLOC,
        **dict(kwargs, **_with_precompiled_header(deps + [_PROGRAM_START], copts))
    )

def ddp_cc_test(name, size = "small", deps = [], copts = [], **kwargs):
    native.cc_test(
        name = name,
        size = size,
        linkstatic = True,
        **dict(kwargs, **_with_precompiled_header(deps, copts + _TEST_COPTS))
    )
