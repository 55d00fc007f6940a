"""@libtorch: the pinned wheel's headers and libraries, or an unpacked torch at $LIBTORCH_PATH."""

load("//third_party:fetch.bzl", "SCRIPTS", "fetch_and_unpack")

def _libtorch_repository(ctx):
    unpacked = ctx.os.environ.get("LIBTORCH_PATH", "")
    if unpacked:
        if not unpacked.startswith("/"):
            fail("LIBTORCH_PATH=%s must be an absolute path" % unpacked)
        for folder in ["include", "lib"]:
            source = ctx.path(unpacked).get_child(folder)
            if not source.exists:
                fail(("LIBTORCH_PATH=%s has no folder '%s'. It must name an unpacked LibTorch, or " +
                      "the 'torch' folder of a Python installation; unset it to use the pinned " +
                      "wheel.") % (unpacked, folder))
            ctx.symlink(source, "torch/" + folder)
    else:
        fetch_and_unpack(
            ctx,
            ctx.attr.dependency,
            "pypi",
            ctx.attr.what,
            ctx.attr.sha256,
            0,
            ctx.attr.members,
        )
    ctx.symlink(ctx.path(ctx.attr.build_file), "BUILD.bazel")
    ctx.symlink(ctx.path(ctx.attr.link_only), "link_only.bzl")
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)

libtorch_repository = repository_rule(
    implementation = _libtorch_repository,
    environ = ["LIBTORCH_PATH"],
    attrs = dict(
        SCRIPTS,
        dependency = attr.string(mandatory = True),
        what = attr.string_list(mandatory = True),
        sha256 = attr.string(mandatory = True),
        members = attr.string_list(mandatory = True),
        build_file = attr.label(mandatory = True, allow_single_file = True),
        link_only = attr.label(
            default = "//third_party/libtorch:link_only.bzl",
            allow_single_file = True,
        ),
    ),
)
