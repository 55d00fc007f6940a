"""cc_binary and cc_test as every program of this repository builds them.

They link mimalloc in: glibc's malloc maps and unmaps each large tensor, at every step. Under a
sanitizer the sanitizer's own allocator must stay.
"""

_MALLOC = select({
    "//base:sanitizer": "@bazel_tools//tools/cpp:malloc",
    "//conditions:default": "@mimalloc",
})

def ddp_cc_binary(name, **kwargs):
    native.cc_binary(name = name, malloc = _MALLOC, **kwargs)

def ddp_cc_test(name, size = "small", **kwargs):
    native.cc_test(name = name, size = size, malloc = _MALLOC, linkstatic = True, **kwargs)
