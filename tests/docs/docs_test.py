#!/usr/bin/env python3
"""Runs what pages of docs/ show.

    docs_test.py PAGE.md…        # TOOLS=bazel-bin/tools

In a new folder per page, in the order of the page: a block "```yaml FILE" (or
"```json FILE") becomes that file; of a block "```console", each line that
starts with "$ " is run by bash, with the programs `train`, `ckpt` and `plot` in PATH, and must
print the lines below it. A line "…" there stands for any lines, "…" in a line for any
text, and "# exit code N" behind a command for its exit code, else 0.
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest

RUNFILES = os.path.join(os.environ.get("TEST_SRCDIR", ""), os.environ.get("TEST_WORKSPACE", ""))
sys.path.insert(0, RUNFILES + "/tests/support")

FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
            found[-1][1].append(line)
    return found


def run_page(path, tools):
    """Returns the number of commands; raises AssertionError for the first that does something else."""
    with open(path) as f:
        blocks = FENCE.findall(f.read())
    count = 0
    with tempfile.TemporaryDirectory(prefix="docs.") as folder:
        programs = os.path.join(folder, ".programs")
        os.mkdir(programs)
        for program in ("train", "ckpt", "plot"):
            os.symlink(os.path.abspath(os.path.join(tools, program)), os.path.join(programs, program))
        environment = dict(os.environ, PATH=programs + ":" + os.environ["PATH"])
        for kind, name, text in blocks:
            if name:
                full = os.path.join(folder, name)
                os.makedirs(os.path.dirname(full), exist_ok=True)
                with open(full, "w") as f:
                    f.write(text)
            if kind != "console":
                continue
            for command, expected in commands(text):
                done = subprocess.run(
                    ["bash", "-c", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    timeout=300)  # fmt: skip
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
        self.assertGreater(run_page(os.path.join(source_tree.root(), "docs", name), tools), 2)

    def test_checkpoint(self):
        self.run_page("checkpoint.md")

    def test_configuration(self):
        self.run_page("configuration.md")

    def test_logging(self):
        self.run_page("logging.md")

    def test_sweeps(self):
        self.run_page("sweeps.md")

    def test_training_optimizers(self):
        self.run_page("training_optimizers.md")

    def test_other_output_is_noticed(self):
        expected = ["a …", "…", "end"]
        self.assertTrue(re.fullmatch(pattern(expected), "a b\nc\nd\nend\n"))
        self.assertFalse(re.fullmatch(pattern(expected), "a b\nc\nd\n"))
        self.assertFalse(re.fullmatch(pattern(["a"]), "a\nb\n"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for page in sys.argv[1:]:
            print("%s: %d commands" % (page, run_page(page, os.environ["TOOLS"])))
    else:
        import xml_unittest

        xml_unittest.main()
