"""Tests of one program: a folder for each case, and running the program in it.

    class PlotTest(program_case.ProgramCase):
        PROGRAM = "tools/plot"  # a runfile

        def test_one_run(self):
            self.write("runs/a/metrics.jsonl", "")
            self.expect_error(["runs/a"], "runs/a: no values in metrics.jsonl yet", code=1)
"""

import os
import shutil
import subprocess
import tempfile
import unittest

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])


class ProgramCase(unittest.TestCase):
    PROGRAM = ""

    def setUp(self):
        self.folder = tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"])
        self.addCleanup(shutil.rmtree, self.folder)

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            f.write(text)

    def run_program(self, *arguments, **options):
        return subprocess.run(
            [os.path.join(RUNFILES, self.PROGRAM), *arguments], cwd=self.folder,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, **options)  # fmt: skip

    def expect_error(self, arguments, expected, code=2):
        """One line, nothing started."""
        before = sorted(os.listdir(self.folder))
        done = self.run_program(*arguments)
        self.assertEqual(done.returncode, code, done)
        self.assertEqual(done.stdout, "")
        self.assertEqual(done.stderr, "error: %s\n" % expected)
        self.assertEqual(sorted(os.listdir(self.folder)), before)
