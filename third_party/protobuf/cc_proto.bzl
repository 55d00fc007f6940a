"""pinned_cc_proto_library: C++ of a .proto, by the compiler of the protobuf that it links.

Bazel's own cc_proto_library takes the compiler of a protobuf module where there are modules, whose
code the pinned runtime does not compile.
"""

def pinned_cc_proto_library(name, src, visibility = None):
    """A cc_library of NAME.pb.h and NAME.pb.cc, which are included by their path in the repository.

    Args:
      name: of the library.
      src: NAME.proto, in this package; imports nothing, and has `option optimize_for = LITE_RUNTIME`.
      visibility: as of any target.
    """
    stem = src[:-len(".proto")]
    outs = [stem + ".pb.h", stem + ".pb.cc"]
    to_root = "/".join([".." for _ in native.package_name().split("/")])
    native.genrule(
        name = name + "_sources",
        srcs = [src],
        outs = outs,
        # protoc compares paths as text: the source must begin with its --proto_path.
        cmd = ("proto=$<; $(execpath @protoc//:protoc) " +
               "--proto_path=\"./$${{proto%{path}}}\" --cpp_out=$(RULEDIR)/{to_root} ./$<").format(
            path = native.package_name() + "/" + src,
            to_root = to_root,
        ),
        tools = ["@protoc//:protoc"],
    )
    native.cc_library(
        name = name,
        srcs = [outs[1]],
        hdrs = [outs[0]],
        visibility = visibility,
        deps = ["@com_google_protobuf//:protobuf_lite"],
    )
