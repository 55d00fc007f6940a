"""@oneccl: oneCCL for CPUs, the Intel MPI that it uses, and its mpiexec."""

load("//third_party:fetch.bzl", "SCRIPTS", "fetch_and_unpack")

_WANTED = [
    "*/data/include/*",
    "*/data/lib/libmpi.so.12",
    "*/data/lib/ccl/cpu/lib/libccl.so.1",
    "*/data/bin/hydra_*",
    "*/data/bin/mpiexec.hydra",
    "*/data/opt/mpi/etc/*",
]

def _oneccl_repository(ctx):
    for line in ctx.read(ctx.attr.requirements).splitlines():
        if not line or line.startswith("#"):
            continue
        requirement, hash_option = line.split(" ")
        ctx.report_progress("fetching " + requirement)
        fetch_and_unpack(
            ctx,
            "oneccl (%s)" % requirement,
            "pypi",
            [requirement],
            hash_option[len("--hash=sha256:"):],
            2,
            _WANTED,
        )
    done = ctx.execute(["chmod", "-R", "a+x", "bin"])
    if done.return_code != 0:
        fail(done.stderr)
    ctx.symlink(ctx.path(ctx.attr.build_file), "BUILD.bazel")
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)

oneccl_repository = repository_rule(
    implementation = _oneccl_repository,
    attrs = dict(
        SCRIPTS,
        requirements = attr.label(mandatory = True, allow_single_file = True),
        build_file = attr.label(mandatory = True, allow_single_file = True),
    ),
)
