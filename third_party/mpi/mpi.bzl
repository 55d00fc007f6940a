"""@mpi: the MPI of this machine, if there is one.

`@mpi//:defs.bzl` has FOUND = True or False; `@mpi//:mpi` is the library.
"""

def _mpi_repository(ctx):
    mpicc = ctx.which("mpicc")
    found = False
    compile_flags = []
    link_flags = []
    if mpicc:
        shown = ctx.execute([mpicc, "--showme:compile"])
        linked = ctx.execute([mpicc, "--showme:link"])
        found = shown.return_code == 0 and linked.return_code == 0
        compile_flags = [flag for flag in shown.stdout.strip().split(" ") if flag]
        link_flags = [flag for flag in linked.stdout.strip().split(" ") if flag]
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)
    ctx.file("defs.bzl", "\"\"\"Whether this machine has an MPI.\"\"\"\n\nFOUND = %s\n" % found)
    build = "package(default_visibility = [\"//visibility:public\"])\n\n"
    if found:
        for index, flag in enumerate([f for f in compile_flags if f.startswith("-I")]):
            ctx.symlink(flag[2:], "include%d" % index)
        build += (
            "cc_library(\n    name = \"mpi\",\n    hdrs = glob([\"include*/**/*.h\"]),\n" +
            "    includes = glob([\"include*\"], exclude_directories = 0),\n" +
            # Without the C++ bindings, removed in MPI 3.0, which would need another library.
            "    defines = [\"OMPI_SKIP_MPICXX\", \"MPICH_SKIP_MPICXX\"],\n" +
            "    linkopts = %r,\n)\n" % [f for f in link_flags if not f.startswith("-I")]
        )
    ctx.file("BUILD.bazel", build)

mpi_repository = repository_rule(
    implementation = _mpi_repository,
    environ = ["PATH"],
    local = True,
    configure = True,
)
