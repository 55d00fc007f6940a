#!/usr/bin/env python3
"""Checks the layers in the source tree.

    layering_check.py [ROOT]

Reads every source and BUILD file under ROOT (default: the tree that this test
was built from) and prints what breaks the rules below; exit status 1 if
anything does. ARCHITECTURE.md describes the layers.
"""

import ast
import os
import re
import sys

# Layer -> the layers it may use besides itself. "tools" and "tests" may use everything.
LAYERS = {
    "base": set(),
    "launchers": {"base"},
    "backends": {"base"},
    "checkpoint": {"base"},
    "optim": {"base"},
    "ddp": {"base", "optim"},
    "ddp/session": {"base", "launchers", "backends"},
    "ddp/config": {"base", "launchers"},
    "ddp/trainer": {"base", "checkpoint", "optim", "ddp", "ddp/session"},
}
# Single files and targets of other layers that a layer may use.
EXCEPTIONS = {
    "backends": {
        "launchers/rank.h",
        "//launchers:rank",
    },
}
TOP = {"tools", "tests"}
TORCH_FREE = {"base", "launchers", "ddp/config"}
# Implementations of interfaces: only programs, tests and the interface's :all list may use them.
IMPLEMENTATIONS = {
    "launchers": {"local", "torchrun", "slurm", "mpi"},
    "backends": {"gloo", "hier", "mpi", "nccl", "shm"},
    "checkpoint": {"pt"},
}
# Implementations that use other implementations.
COMPOSED_OF = {"backends/hier": {"backends/gloo", "backends/shm"}}
# Folders of tests: suites and the programs that run them.
TEST_FOLDERS = {"testing", "conformance"}
MAX_LINES = 500

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
_TORCH_INCLUDE = re.compile(r"^(torch|ATen|c10|caffe2)/")
_TORCH_LABEL = re.compile(r"^@(libtorch|libtorch_cuda)//")
_CPP = (".h", ".cc", ".cpp", ".hpp", ".cu")
_COUNTED = _CPP + (".py", ".bzl", ".sh", ".proto")


def layer_of(path):
    """Layer of a file or folder: the longest layer name its path lies in; None for the rest."""
    parts = path.split("/")
    for length in (2, 1):
        name = "/".join(parts[:length])
        if name in LAYERS or name in TOP:
            return name
    return None


def is_test(path):
    """Tests stand beside what they test, and may use whatever they need to test it."""
    stem = os.path.splitext(os.path.basename(path))[0]
    return bool(TEST_FOLDERS & set(path.split("/")[:-1])) or bool(
        re.search(r"(_test|_test_peer|_test_main|_testing|_conformance)$", stem)
    )


def implementation_of(path):
    """("backends", "gloo") for a path in an implementation's folder, else None."""
    parts = path.split("/")
    if len(parts) > 1 and parts[1] in IMPLEMENTATIONS.get(parts[0], ()):
        return parts[0], parts[1]
    return None


def forbidden(user, used, spelled):
    """Why code in folder `user` must not use folder `used` (`spelled` as in the source), or None."""
    mine, theirs = layer_of(user), layer_of(used)
    if theirs is None or mine is None or mine in TOP:
        return None
    if spelled in EXCEPTIONS.get(mine, ()):
        return None
    if theirs != mine and theirs not in LAYERS[mine]:
        return "%s must not use %s" % (mine, theirs)
    if used in COMPOSED_OF.get(user, ()):
        return None
    implementation = implementation_of(used)
    if implementation and implementation_of(user) != implementation:
        return "only programs and tests name an implementation (%s/%s)" % implementation
    return None


def check_source(path, text):
    """Problems of one C++ file; `path` is relative to the root."""
    layer = layer_of(path)
    for included in _INCLUDE.findall(text):
        if layer in TORCH_FREE and _TORCH_INCLUDE.match(included):
            yield "includes %s, but %s/ is free of torch" % (included, layer)
        if not is_test(path):
            why = forbidden(os.path.dirname(path), os.path.dirname(included), included)
            if why:
                yield "includes %s: %s" % (included, why)
    if path.endswith((".h", ".hpp")):
        if not re.search(r"^#pragma once$", text, re.MULTILINE):
            yield "has no #pragma once"
        if layer and not re.search(r"\bnamespace ddp\b", text):
            yield "declares nothing in namespace ddp"


def _labels(node, variables):
    """Every string in an expression: covers lists, select(), concatenations, and names of lists."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
        elif isinstance(part, ast.Name) and part.id in variables:
            yield from _labels(variables[part.id], {})


def check_build(path, text):
    """Problems of one BUILD file: the same order, for the labels in deps."""
    package = os.path.dirname(path)
    layer = layer_of(path)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield "cannot be read: %s" % error
        return
    variables = {
        statement.targets[0].id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        attributes = {k.arg: k.value for k in call.keywords}
        if "deps" not in attributes:
            continue
        name = ast.literal_eval(attributes["name"]) if isinstance(
            attributes.get("name"), ast.Constant) else "?"
        test = call.func.id.endswith("_test") or "testonly" in attributes
        for label in _labels(attributes["deps"], variables):
            if layer in TORCH_FREE and _TORCH_LABEL.match(label):
                yield ":%s depends on %s, but %s/ is free of torch" % (name, label, layer)
            if not label.startswith("//") or test:
                continue
            used = label[2:].split(":")[0]
            # The :all list of implementations is what programs link.
            if name == "all" and implementation_of(used) and package == used.split("/")[0]:
                continue
            why = forbidden(package, used, label)
            if why:
                yield ":%s depends on %s: %s" % (name, label, why)


def source_files(root):
    for folder, folders, files in os.walk(root):
        relative = os.path.relpath(folder, root)
        folders[:] = sorted(
            f for f in folders
            if not f.startswith(".") and f != "__pycache__" and not f.startswith("bazel-")
        )
        for name in sorted(files):
            path = os.path.join(relative, name) if relative != "." else name
            if os.path.isfile(os.path.join(root, path)):
                yield path


def check(root):
    """Returns (number of files read, list of "path: problem")."""
    count, problems = 0, []
    for path in source_files(root):
        is_build = os.path.basename(path) in ("BUILD", "BUILD.bazel")
        if not is_build and not path.endswith(_COUNTED):
            continue
        count += 1
        with open(os.path.join(root, path), encoding="utf-8") as f:
            text = f.read()
        lines = text.count("\n")
        if lines > MAX_LINES:
            problems.append("%s: %d lines, more than %d: probably two files" % (path, lines, MAX_LINES))
        if path.startswith("third_party/"):
            continue
        found = check_build(path, text) if is_build else (
            check_source(path, text) if path.endswith(_CPP) else ())
        problems += ["%s: %s" % (path, problem) for problem in found]
    return count, problems


def main():
    if len(sys.argv) > 1:
        root = sys.argv[1]
    else:
        runfiles = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
        sys.path.insert(0, os.path.join(runfiles, "tests", "support"))
        import source_tree

        root = source_tree.root()
    count, problems = check(root)
    for problem in problems:
        print(problem)
    print("%d files read under %s, %d problems" % (count, root, len(problems)))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
