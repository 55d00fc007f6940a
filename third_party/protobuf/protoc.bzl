"""@protoc//:protoc: the compiler of .proto files.

The machine's own if it has the pinned version (Debian 12 and 13: protobuf-compiler, which bazelw
installs); otherwise the one of @com_google_protobuf, which takes two minutes of two cores to build.
"""

def _protoc_repository(ctx):
    found = ctx.which("protoc")
    shown = ctx.execute([found, "--version"]) if found else None
    if shown and shown.return_code == 0 and shown.stdout.strip() == "libprotoc " + ctx.attr.version:
        ctx.symlink(found, "protoc")
        build = "exports_files([\"protoc\"])\n"
    else:
        build = "alias(\n    name = \"protoc\",\n    actual = \"%s\",\n    visibility = [\"//visibility:public\"],\n)\n" % ctx.attr.otherwise
    ctx.file("BUILD.bazel", build)
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)

protoc_repository = repository_rule(
    implementation = _protoc_repository,
    environ = ["PATH"],
    local = True,
    configure = True,
    attrs = {
        "version": attr.string(mandatory = True, doc = "without which the machine's is not used"),
        "otherwise": attr.string(mandatory = True, doc = "label of the compiler that is built"),
    },
)
