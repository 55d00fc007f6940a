"""Finds the Bazel runfiles of a script: the `data` of its target.

    program = runfiles.find("libtorch_ddp/tools/train")   # None if it is not there

Works under `bazel run` and `bazel test`, and for a script started by its path in
bazel-bin, from any folder and through symlinks.
"""

import os
import sys


def _steps(script):
    """The script's path, and where it leads, link by link: bazel-bin's is a link to the source."""
    path = os.path.abspath(script)
    for _ in range(40):  # as many as Linux follows
        yield path
        if not os.path.islink(path):
            return
        path = os.path.join(os.path.dirname(path), os.readlink(path))


def _roots(script, environment):
    for variable in ("RUNFILES_DIR", "TEST_SRCDIR"):
        if environment.get(variable):
            yield environment[variable]
    for path in _steps(script):
        yield path + ".runfiles"
        # A script that is data of another one: …/other.runfiles/WORKSPACE/script.
        before, mark, _ = path.rpartition(".runfiles/")
        if mark:
            yield before + ".runfiles"


def _manifests(script, environment):
    if environment.get("RUNFILES_MANIFEST_FILE"):
        yield environment["RUNFILES_MANIFEST_FILE"]
    for path in _steps(script):
        yield path + ".runfiles_manifest"
        yield path + ".runfiles/MANIFEST"


def _names(path, mapping):
    """What `path` may be called, the likeliest first. With Bazel modules the file `mapping` has
    lines SOURCE,NAME,FOLDER: for what BUILD files of repository SOURCE ("": the main one) call NAME.
    """
    repository, _, rest = path.partition("/")
    if mapping and os.path.isfile(mapping):
        with open(mapping, encoding="utf-8") as f:
            rows = [line.rstrip("\n").split(",") for line in f]
        for row in sorted(rows):
            if len(row) == 3 and row[1] == repository:
                yield row[2] + "/" + rest
    yield path


def find(path, script=None, environment=None):
    """Absolute path of a runfile; `path` begins with the name of its repository, as BUILD files of
    this one call it. None if there is no such file. `script` and `environment` are this process's
    unless given."""
    script = sys.argv[0] if script is None else script
    environment = os.environ if environment is None else environment
    for root in _roots(script, environment):
        for name in _names(path, os.path.join(root, "_repo_mapping")):
            candidate = os.path.join(os.path.abspath(root), name)
            if os.path.exists(candidate):
                return candidate
    # Built with --nobuild_runfile_links there are no links, only a list of them.
    for manifest in _manifests(script, environment):
        if not os.path.isfile(manifest):
            continue
        with open(manifest, encoding="utf-8") as f:
            targets = dict(line.rstrip("\n").partition(" ")[::2] for line in f)
        for name in _names(path, targets.get("_repo_mapping")):
            if os.path.exists(targets.get(name, "")):
                return targets[name]
    return None
