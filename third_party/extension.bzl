"""The repositories of ddp_dependencies() for Bazel modules: see MODULE.bazel and docs/using.md."""

load("//third_party:deps.bzl", "ddp_dependencies")

def _dependencies(_ctx):
    ddp_dependencies()

dependencies = module_extension(implementation = _dependencies)
