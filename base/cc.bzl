"""cc_binary and cc_test for all programs of this repository.

Binaries link mimalloc: glibc's malloc maps and unmaps each large tensor at every step. Sanitizer
builds keep the sanitizer's allocator. Tests keep glibc's, whose checks make an abort with a message
of a double free: in mimalloc 2.0.9 it is an endless loop, when the thread that allocated ends.
"""

_MALLOC = select({
    "//base:sanitizer": "@bazel_tools//tools/cpp:malloc",
    "//conditions:default": "@mimalloc",
})

def ddp_cc_binary(name, **kwargs):
    native.cc_binary(name = name, malloc = _MALLOC, **kwargs)

def ddp_cc_test(name, size = "small", **kwargs):
    native.cc_test(name = name, size = size, linkstatic = True, **kwargs)
