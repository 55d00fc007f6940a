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
    "ddp/session": {"base", "launchers", "backends", "ddp"},
    "ddp/config": {"base", "launchers"},
    "ddp/trainer": {"base", "checkpoint", "optim", "ddp", "ddp/session"},
}
# Single files and targets of other layers that a layer may use.
EXCEPTIONS = {
    "backends": {
        # What a process group is created from: this rank's number, the world size and the address
        # of the rendezvous. A struct without a launcher; a copy in base/ would be the same type.
        "launchers/rank.h",
        "//launchers:rank",
    },
    "ddp": {
        # The interface by which optimizers and communication hooks give their state to a checkpoint
        # and take it back, and what a sharded optimizer asks of one: values and requests, no file.
        "checkpoint/format.h",
        "checkpoint/parts.h",
        "checkpoint/state.h",
        "checkpoint/stateful.h",
        "//checkpoint:format",
        "//checkpoint:parts",
        "//checkpoint:state",
        "//checkpoint:stateful",
    },
}
TOP = {"tools", "tests"}
TORCH_FREE = {"base", "launchers", "ddp/config"}
# Implementations of interfaces: only programs, tests and the interface's :all list may use them.
IMPLEMENTATIONS = {
    "launchers": {"local", "torchrun", "slurm", "mpi"},
    "backends": {"gloo", "hier", "mpi", "nccl", "shm"},
    "checkpoint": {"dcp", "pt", "safetensors", "sharded"},
}
# Implementations that use other implementations. hier creates its parts by their registered names; it
# links the default ones, so that they exist in a program that links hier only. The files of sharded
# have the encoding of safetensors; each item of dcp is a file of torch.save, which pt reads and writes.
COMPOSED_OF = {
    "backends/hier": {"backends/gloo", "backends/shm"},
    "checkpoint/dcp": {"checkpoint/pt"},
    "checkpoint/sharded": {"checkpoint/safetensors"},
}
# Folders of tests: suites and the programs that run them.
TEST_FOLDERS = {"testing", "conformance"}
# Libraries of programs, whose messages name options as libraries do.
TOOL_LIBRARIES = ("tools/datasets/", "tools/models/")
# Files that write command lines of other programs, or of a child process, and no messages.
COMMAND_LINES = {
    "ddp/config/sweep.cc",
    "launchers/slurm/queue.cc",
    "launchers/slurm/script.cc",
}
MAX_LINES = 900

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
_TORCH_INCLUDE = re.compile(r"^(torch|ATen|c10|caffe2)/")
_TORCH_LABEL = re.compile(r"^@(libtorch|libtorch_cuda)//")
# Comments, character and string literals. Group 1: adjacent string literals, which the compiler joins.
_TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|'(?:\\.|[^'\\\n])+'"
    r'|((?:R"\(.*?\)"|"(?:\\.|[^"\\\n])*")(?:\s*(?:R"\(.*?\)"|"(?:\\.|[^"\\\n])*"))*)',
    re.DOTALL,
)
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# A message that names one of these before a flag means a flag of that tool.
_TOOL = re.compile(r"\b(bazel|buil[dt]|docker|mpirun|nvidia-smi|sbatch|squeue|srun|torchrun|SLURM)\b")
# Calls that are not what they seem.
_TRAPS = {
    "dynamic_intrusive_pointer_cast<":
        "keeps a reference for ever where it fails: dynamic_cast the pointer itself",
}
_RANGE_FOR = re.compile(r"\bfor \(")
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


def flags_in_messages(path, text):
    """Flags of our programs in string literals of a library.

    Only a program knows how its user wrote an option: libraries name it without "--", or return an
    OptionError.
    """
    is_library = layer_of(path) in LAYERS or path.startswith(TOOL_LIBRARIES)
    is_library = is_library and path not in COMMAND_LINES
    if not is_library or is_test(path) or os.path.basename(path).startswith("testing_"):
        return
    for token in _TOKEN.finditer(text):
        literal = re.sub(r'"\s*"', "", token.group(1) or "")
        for flag in _FLAG.finditer(literal):
            if not _TOOL.search(literal, 0, flag.start()):
                yield flag.group()


def dangling_ranges(text):
    """Ranges of loops over what is in a temporary StatusOr or optional, which ends before the loop begins."""
    for loop in _RANGE_FOR.finditer(text):
        depth, end = 1, loop.end()
        while depth > 0 and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        head = text[loop.end() : end - 1]
        _, colon, in_range = head.partition(" : ")
        if not colon or ";" in head:
            continue
        if in_range.endswith(").value()") or (in_range.startswith("*") and in_range.endswith(")")):
            yield in_range


def check_source(path, text):
    """Problems of one C++ file; `path` is relative to the root."""
    layer = layer_of(path)
    for trap, why in _TRAPS.items():
        if trap in text:
            yield "calls %s…>, which %s" % (trap, why)
    for in_range in dangling_ranges(text):
        yield "loops over %s, which ends before the loop begins: give it a name first" % in_range
    for flag in flags_in_messages(path, text):
        yield "writes %s: libraries name options without --" % flag
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


def check_bazelrc(text):
    """Folders whose warnings are not errors."""
    flag = re.search(r"^build --per_file_copt=\^\(([\w|]+)\)/\.\*@.*-Werror", text, re.MULTILINE)
    strict = set(flag.group(1).split("|")) if flag else set()
    for folder in sorted({layer.split("/")[0] for layer in LAYERS} | TOP):
        if folder not in strict:
            yield "warnings are not errors in %s/: add it to --per_file_copt" % folder


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
    bazelrc = os.path.join(root, ".bazelrc")
    if os.path.exists(bazelrc):
        with open(bazelrc, encoding="utf-8") as f:
            problems += [".bazelrc: %s" % problem for problem in check_bazelrc(f.read())]
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
