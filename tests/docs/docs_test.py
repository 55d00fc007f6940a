#!/usr/bin/env python3
"""Runs what pages of docs/ show.

    docs_test.py PAGE.md…        # TOOLS=bazel-bin/tools

In a new folder per page, in the order of the page: a block "```yaml FILE" (or
"```json FILE") becomes that file; of a block "```console", each line that
starts with "$ " is run by bash, with the programs of PROGRAMS in PATH, and must
print the lines below it. A line "…" there stands for any lines, "…" in a line for any
text, and "# exit code N" behind a command for its exit code, else 0. A page whose runs take long
says with which further options the tests run a program: "<!-- In tests, train has: --lr=1 -->".
A block "```bash FILE", a batch script, becomes that file and is run, with an srun that runs the
program once, with --print_config: so the program knows its options. A yaml block with an apiVersion, a
manifest of Kubernetes, is YAML, and so is each command line in it run.

Nothing that looks like a command is passed over: a block with a line "$ " that is no
console block, a block of a kind that is not known here, a page with console blocks
that no test runs, and indented lines or blocks without a kind that begin with a program of PROGRAMS,
srun, sbatch or "#!" are errors. Of Bazel's commands there the targets must exist.
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest

RUNFILES = os.path.join(os.environ.get("TEST_SRCDIR", ""), os.environ.get("TEST_WORKSPACE", ""))
sys.path.insert(0, RUNFILES + "/tests/support")

PROGRAMS = ("train", "ckpt", "generate", "plan", "plot")
FURTHER = re.compile(r"^<!-- In tests, (\w+) has: (.*) -->$", re.MULTILINE)
FENCE = re.compile(r"^```([\w+]*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Those whose blocks are not run here are compiled or illustrate; "" is a picture or a table.
KINDS = {"bash", "console", "yaml", "json", "cpp", "c++", "python", ""}
INDENTED = re.compile(r"^(?: {4}|\t).*", re.MULTILINE)
# A command, after variables that are set for it.
COMMAND = re.compile(
    r"^\s*(?:\w+=\S* +)*(?:\$ .*|(?:%s|srun|sbatch)(?: .*)?|#!.*|#SBATCH .*)$"
    % "|".join(PROGRAMS),
    re.MULTILINE)  # fmt: skip
BAZEL = re.compile(r"\bbazelw? (?:build|run|test) .*")
LABEL = re.compile(r"//([\w/-]*):([\w.-]+)")
# Runs the program of a batch script once.
SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
exec "$@" --print_config
"""
PAGES = ["checkpoint.md", "configuration.md", "data.md", "kubernetes.md", "language_model.md", "launching.md",
         "logging.md", "metrics.md", "options.md", "sweeps.md", "training.md", "training_guard.md",
         "training_optimizers.md"]  # fmt: skip
# Pages that another test runs.
ELSEWHERE = {"slurm.md": "tests/e2e/sbatch.sh"}


def pattern(expected):
    """A regular expression for the output that `expected` shows."""
    parts = []
    for line in expected:
        if line == "…":
            parts.append(r"(?:.*\n)*?")
        else:
            parts.append(".*".join(re.escape(part) for part in line.split("…")) + r"\n")
    return "".join(parts)


def commands(block):
    """(command, lines that it prints)"""
    found = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            if not found:
                raise AssertionError("a console block begins with output: %s" % line)
            found[-1][1].append(line)
    return found


def not_read(text):
    """The lines of a page that are set like commands, but that no test reads."""
    blocks = [block for kind, _, block in FENCE.findall(text) if kind == ""]
    return "".join(blocks) + "\n".join(INDENTED.findall(FENCE.sub("", text)))


def check_targets(text, root):
    """Raises AssertionError if a command for Bazel that is not run names a target that is not there."""
    for command in BAZEL.findall(not_read(text)):
        for package, target in LABEL.findall(command):
            build = os.path.join(root, package, "BUILD")
            found = ""
            if os.path.exists(build):
                with open(build) as f:
                    found = f.read()
            if '"%s"' % target not in found:
                raise AssertionError("there is no //%s:%s: %s" % (package, target, command))


def check_blocks(text):
    """Raises AssertionError if commands of a page could be passed over."""
    blocks = FENCE.findall(text)
    for kind, name, block in blocks:
        if kind not in KINDS:
            raise AssertionError("blocks of kind '%s' are not known" % kind)
        if kind in ("bash", "yaml") and not name:
            raise AssertionError("a block of kind %s has no file name:\n%s" % (kind, block))
        if kind != "console" and re.search(r"^\$ ", block, re.MULTILINE):
            raise AssertionError("a block with commands is no console block:\n%s" % block)
    passed_over = COMMAND.search(not_read(text))
    if passed_over:
        raise AssertionError("a command is not run: %s" % passed_over.group(0))


def command_lines(value):
    """The [command, arguments] of containers, anywhere in a manifest."""
    if isinstance(value, dict):
        if "command" in value:
            yield [value["command"], value.get("args", [])]
        value = list(value.values())
    if isinstance(value, list):
        for element in value:
            yield from command_lines(element)


def check_manifest(text, tools):
    """Raises AssertionError if `text` is no manifest, or if it starts a program that refuses its options."""
    import yaml

    try:
        manifests = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise AssertionError("no YAML: %s\n%s" % (error, text))
    for manifest in manifests:
        named = isinstance(manifest, dict) and manifest.get("kind") and manifest.get("metadata")
        if not isinstance(named, dict) or not named.get("name"):
            raise AssertionError("a manifest has a kind and metadata.name:\n%s" % text)
    lines = list(command_lines(manifests))
    if not lines:
        raise AssertionError("a manifest has no command:\n%s" % text)
    for command, arguments in lines:
        if not (isinstance(command, list) and isinstance(arguments, list)):
            raise AssertionError("command and args are lists:\n%s" % text)
        line = command + arguments
        if not all(isinstance(word, str) for word in line):
            raise AssertionError("words of a command are strings: %s" % line)
        if line[0] not in PROGRAMS:
            raise AssertionError("%s is none of %s" % (line[0], ", ".join(PROGRAMS)))
        done = subprocess.run([os.path.join(tools, line[0])] + line[1:] + ["--print_config"], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)  # fmt: skip
        if done.returncode != 0:
            raise AssertionError("%s: exit code %d\n%s" % (line, done.returncode, done.stdout))


def run_page(path, tools):
    """Returns the number of commands; raises AssertionError for the first that does something else."""
    with open(path) as f:
        page = f.read()
    check_blocks(page)
    blocks = FENCE.findall(page)
    further = dict(FURTHER.findall(page))
    count = 0
    with tempfile.TemporaryDirectory(prefix="docs.") as folder:
        programs = os.path.join(folder, ".programs")
        os.mkdir(programs)
        for program in PROGRAMS:
            real, entry = os.path.abspath(os.path.join(tools, program)), os.path.join(programs, program)
            if program in further:
                with open(entry, "w") as f:
                    f.write('#!/bin/sh\nexec "%s" "$@" %s\n' % (real, further[program]))
                os.chmod(entry, 0o755)
            else:
                os.symlink(real, entry)
        environment = dict(os.environ, PATH=programs + ":" + os.environ["PATH"])

        def run(command):
            return subprocess.run(
                ["bash", "-c", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)  # fmt: skip

        for kind, name, text in blocks:
            if name:
                full = os.path.join(folder, name)
                os.makedirs(os.path.dirname(full), exist_ok=True)
                with open(full, "w") as f:
                    f.write(text)
            if kind == "bash":
                srun = os.path.join(programs, "srun")
                with open(srun, "w") as f:
                    f.write(SRUN)
                os.chmod(srun, 0o755)
                done = run("bash -e '%s'" % name)
                os.remove(srun)  # Commands of console blocks have a real one, or none.
                if done.returncode != 0:
                    raise AssertionError("%s: exit code %d\n%s" % (name, done.returncode, done.stdout))
                count += 1
            if kind != "console":
                continue
            for command, expected in commands(text):
                done = run(command)
                code = re.search(r"# exit code (\d+)", command)
                wanted = int(code.group(1)) if code else 0
                said = "%s: $ %s\nexit code %d\n%s" % (
                    os.path.basename(path), command, done.returncode, done.stdout)  # fmt: skip
                if done.returncode != wanted:
                    raise AssertionError("expected exit code %d\n%s" % (wanted, said))
                if expected and not re.fullmatch(pattern(expected), done.stdout):
                    raise AssertionError("expected\n%s\n%s" % ("\n".join(expected), said))
                count += 1
    return count


class DocsTest(unittest.TestCase):
    def run_page(self, name):
        import source_tree

        tools = os.path.join(RUNFILES, "tools")
        self.assertGreater(run_page(os.path.join(source_tree.root(), "docs", name), tools), 0)

    def test_every_page_is_run(self):
        import source_tree

        docs = os.path.join(source_tree.root(), "docs")
        with_commands = set()
        for page in os.listdir(docs):
            if page.endswith(".md"):
                with open(os.path.join(docs, page)) as f:
                    text = f.read()
                check_blocks(text)
                check_targets(text, source_tree.root())
                if any(kind == "console" for kind, _, _ in FENCE.findall(text)):
                    with_commands.add(page)
        self.assertEqual(with_commands, set(PAGES) | set(ELSEWHERE))
        for page, script in ELSEWHERE.items():
            with open(os.path.join(source_tree.root(), script)) as f:
                self.assertIn("docs/" + page, f.read())

    def test_what_would_be_passed_over_is_noticed(self):
        for text in ("```sh\n$ train\n```\n", "```\n$ train\n```\n", "Thus:\n\n    $ train --lr=1\n",
                     "```yaml\nlr: 1\n```\n", "```bash\nsrun train\n```\n", "```\ntrain --lr=1\n```\n",
                     "Thus:\n\n    train --lr=1\n", "\n    A=1 B= generate --length=1\n", "\n\tckpt list\n",
                     "\n    srun -n2 bazel-bin/tools/train\n", "\n    #!/bin/bash\n",
                     "\n    #SBATCH --nodes=2\n"):  # fmt: skip
            with self.assertRaises(AssertionError, msg=text):
                check_blocks(text)
        check_blocks("```console\n$ train\n```\n\n    the $ of old\n    trained: no\n    # of srun\n")

    def test_targets_of_commands_that_are_not_run_exist(self):
        import source_tree

        check_targets("\n    ./bazelw run //tools:train -- --lr=1\n", source_tree.root())
        for command in ("./bazelw build //tools:train //tools:gone", "bazel run //nowhere:train -- --lr=1"):
            for text in ("\n    %s\n", "```\n%s\n```\n"):
                with self.assertRaises(AssertionError, msg=command):
                    check_targets(text % command, source_tree.root())

    def test_a_batch_script_is_run(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(folder + "/page.md", "w") as f:
                f.write("```bash a/job.sh\n#!/bin/bash\n#SBATCH --nodes=2\nsrun -n2 --label train --lr=LR\n```\n")
            # In place of the program: it takes a number for --lr.
            for program in PROGRAMS:
                with open("%s/%s" % (folder, program), "w") as f:
                    f.write('#!/bin/sh\n[ "$*" = "--lr=1 --print_config" ]\n')
                os.chmod("%s/%s" % (folder, program), 0o755)
            with self.assertRaises(AssertionError):
                run_page(folder + "/page.md", folder)
            with open(folder + "/page.md") as f:
                page = f.read()
            with open(folder + "/page.md", "w") as f:
                f.write(page.replace("LR", "1"))
            self.assertEqual(run_page(folder + "/page.md", folder), 1)

    def test_manifests_start_what_the_programs_know(self):
        import source_tree

        try:
            import yaml  # noqa: F401
        except ImportError:
            self.skipTest("no PyYAML here; install Debian's python3-yaml")
        docs = os.path.join(source_tree.root(), "docs")
        found = set()
        for page in os.listdir(docs):
            if page.endswith(".md"):
                with open(os.path.join(docs, page)) as f:
                    blocks = FENCE.findall(f.read())
                for kind, _, block in blocks:
                    if kind == "yaml" and re.search(r"^apiVersion:", block, re.MULTILINE):
                        check_manifest(block, os.path.join(RUNFILES, "tools"))
                        found.add(page)
        self.assertEqual(found, {"kubernetes.md"})

    def test_bad_manifests_are_noticed(self):
        try:
            import yaml  # noqa: F401
        except ImportError:
            self.skipTest("no PyYAML here; install Debian's python3-yaml")
        good = "apiVersion: v1\nkind: Job\nmetadata: {name: a}\nspec:\n  command: [train, --lr=1]\n  args: [--a=b]\n"
        with tempfile.TemporaryDirectory() as folder:
            with open(folder + "/train", "w") as f:
                f.write('#!/bin/sh\n[ "$*" = "--lr=1 --a=b --print_config" ]\n')
            os.chmod(folder + "/train", 0o755)
            check_manifest(good, folder)
            for old, new in (("--lr", "--learn"), ("[train", "[trian"), ("[train", "train"), ("name: a", ""),
                             ("kind: Job\n", ""), ("command", "comand"), ("--lr=1", "1"), ("v1", "\tv1")):
                with self.assertRaises(AssertionError, msg=new):
                    check_manifest(good.replace(old, new), folder)

    def test_other_output_is_noticed(self):
        expected = ["a …", "…", "end"]
        self.assertTrue(re.fullmatch(pattern(expected), "a b\nc\nd\nend\n"))
        self.assertFalse(re.fullmatch(pattern(expected), "a b\nc\nd\n"))
        self.assertFalse(re.fullmatch(pattern(["a"]), "a\nb\n"))


for _page in PAGES:
    setattr(DocsTest, "test_" + _page[: -len(".md")], lambda self, page=_page: self.run_page(page))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for page in sys.argv[1:]:
            print("%s: %d commands" % (page, run_page(page, os.environ["TOOLS"])))
    else:
        import xml_unittest

        xml_unittest.main()
