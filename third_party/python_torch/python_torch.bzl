"""@python_torch//:python: an interpreter that has Python's torch, numpy and tensorboard."""

load("//third_party:fetch.bzl", "SCRIPTS", "fetch_and_unpack")

# The wheels are for CPython 3.11, Debian 12's version.
_INTERPRETERS = ["/usr/bin/python3", "python3.11", "python3"]
_IS_311 = "import sys; sys.exit(sys.version_info[:2] != (3, 11))"

def _interpreter(ctx):
    for candidate in _INTERPRETERS:
        path = ctx.which(candidate) if not candidate.startswith("/") else ctx.path(candidate)
        if path and path.exists and ctx.execute([path, "-c", _IS_311]).return_code == 0:
            return path
    fail("@python_torch needs CPython 3.11 (Debian 12's python3); found none of: " +
         ", ".join(_INTERPRETERS))

# A launcher script instead of 30,000 runtime files, which each test's sandbox would have to link.
# It works only on the machine where it was fetched, not on remote executors.
_LAUNCHER = """#!/bin/sh
# Content: {digests}
PYTHONPATH='{site}'${{PYTHONPATH:+:$PYTHONPATH}} PYTHONDONTWRITEBYTECODE=1 exec {python} -s "$@"
"""

def _python_torch_repository(ctx):
    python = _interpreter(ctx)
    digests = []
    for line in ctx.read(ctx.attr.requirements).splitlines():
        if not line or line.startswith("#"):
            continue
        requirement, hash_option = line.split(" ")
        sha256 = hash_option[len("--hash=sha256:"):]
        ctx.report_progress("fetching " + requirement)
        fetch_and_unpack(
            ctx,
            "python_torch (%s)" % requirement,
            "pypi",
            [requirement],
            sha256,
            0,
            [],
            folder = "site",
        )
        digests.append(sha256[:12])
    ctx.execute([python, "-m", "compileall", "-q", "-j0", "site"], timeout = 1800)
    ctx.file(
        "python",
        _LAUNCHER.format(digests = " ".join(digests), site = ctx.path("site"), python = python),
        executable = True,
    )
    ctx.file("BUILD.bazel", """exports_files(["python"])\n""")
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)

python_torch_repository = repository_rule(
    implementation = _python_torch_repository,
    attrs = dict(
        SCRIPTS,
        requirements = attr.label(mandatory = True, allow_single_file = True),
    ),
)
