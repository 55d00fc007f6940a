#!/usr/bin/env python3
"""./bazelw finds the right Bazel and passes on all arguments, from any folder."""

import os
import stat
import subprocess
import sys
import tempfile
import unittest

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")

import source_tree  # noqa: E402
import xml_unittest  # noqa: E402

ROOT = source_tree.root()
DEBIAN_BAZEL = "/usr/bin/bazel"


class BazelwTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ["TEST_TMPDIR"])
        self.addCleanup(scratch.cleanup)
        self.outside = os.path.join(os.path.realpath(scratch.name), "a b")
        os.makedirs(self.outside)
        # Prints where it was started and each argument, one a line.
        self.stub = self.program("stub", 'pwd; for a in "$@"; do echo "$a"; done')

    def program(self, name, body):
        path = os.path.join(self.outside, name)
        with open(path, "w") as f:
            f.write("#!/bin/sh\n%s\n" % body)
        os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
        return path

    def bazelw(self, *arguments, cwd=ROOT, **variables):
        environment = {**os.environ, "CC": "cc", **variables}
        return subprocess.run(
            [ROOT + "/bazelw", *arguments], cwd=cwd, env=environment, capture_output=True, text=True
        )

    def test_hands_all_arguments_on(self):
        arguments = ["test", "//...", "--test_arg=a b", "*", "", "$HOME"]
        done = self.bazelw(*arguments, BAZEL=self.stub)
        self.assertEqual(done.stdout.split("\n")[:-1], [ROOT] + arguments, done.stderr)

    def test_inside_the_workspace_stays_where_it_is(self):
        done = self.bazelw("run", "//x", cwd=ROOT + "/base", BAZEL=self.stub)
        self.assertEqual(done.stdout.splitlines(), [ROOT + "/base", "run", "//x"])

    def test_run_from_outside_tells_the_program_the_callers_folder(self):
        done = self.bazelw("--batch", "run", "//x", "--", "run", cwd=self.outside, BAZEL=self.stub)
        folder = self.outside.replace(" ", "\\ ")
        self.assertEqual(
            done.stdout.splitlines(),
            [ROOT, "--batch", "run", "--run_under=env BUILD_WORKING_DIRECTORY=" + folder, "//x", "--", "run"],
        )

    def test_build_from_outside(self):
        done = self.bazelw("build", "//x", "--", "run", cwd=self.outside, BAZEL=self.stub)
        self.assertEqual(done.stdout.splitlines(), [ROOT, "build", "//x", "--", "run"])

    def test_bazel_that_is_no_program(self):
        done = self.bazelw("info", BAZEL="/no/such/bazel")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("BAZEL=/no/such/bazel", done.stderr)

    def test_another_version_is_left_alone(self):
        self.program("bazel", "echo bazel 8.0.1")
        if not os.path.exists(DEBIAN_BAZEL):
            self.skipTest("only where Debian's Bazel is installed: otherwise it would install it")
        done = self.bazelw("--print_bazel", PATH=self.outside + ":" + os.environ["PATH"])
        self.assertTrue(os.path.samefile(done.stdout.strip(), DEBIAN_BAZEL), done.stdout)
        self.assertIn("8.0.1", done.stderr)

    def test_upstream_4_2_and_7_are_used(self):
        for version in ("4.2.1", "7.0.0", "7.7.1"):
            with self.subTest(version):
                bazel = self.program("bazel", "echo bazel " + version)
                done = self.bazelw("--print_bazel", PATH=self.outside + ":" + os.environ["PATH"])
                self.assertEqual(done.stdout.strip(), bazel)


if __name__ == "__main__":
    xml_unittest.main()
