#!/usr/bin/env python3
""".ci/run repeats what failed, lands what then passes and names it, and repeats no defect.

Runs the real .ci/run in a folder of its own, where bazelw and a check are programs of this test that
fail as often as a case says.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")

import source_tree  # noqa: E402
import xml_unittest  # noqa: E402

# Like `bazel test`: one result per target in the build event file, exit status 3 if a test failed.
# targets.json: label -> logs of its first runs, which fail; all later runs pass. calls: arguments.
BAZELW = r"""#!/usr/bin/env python3
import json, os, sys
here = os.path.dirname(os.path.abspath(__file__))
with open(here + "/calls", "a") as f:
    f.write(" ".join(a for a in sys.argv[1:] if "event" not in a) + "\n")
with open(here + "/targets.json") as f:
    targets = json.load(f)
events = [a.split("=", 1)[1] for a in sys.argv if a.startswith("--build_event_json_file=")][0]
asked = [a for a in sys.argv[2:] if a.startswith("//")]
status = 0
with open(events, "w") as f:
    for label, logs in targets.items():
        if asked != ["//..."] and label not in asked:
            continue
        log = logs.pop(0) if logs else None
        path = here + "/" + label.strip("/").replace("/", "_") + ".log"
        with open(path, "w") as g:
            g.write(log or "ok")
        status = 3 if log else status
        print(json.dumps({"id": {"testResult": {"label": label, "run": 1, "attempt": 1}},
                          "testResult": {"status": "FAILED" if log else "PASSED", "testActionOutput": [
                              {"name": "test.log", "uri": "file://" + path}]}}), file=f)
with open(here + "/targets.json", "w") as f:
    json.dump(targets, f)
sys.exit(status)
"""
# Fails as often as there are lines in the file `failures`, and prints one of them each time.
CHECK = """#!/bin/bash
mapfile -t lines <failures
((${#lines[@]})) || exit 0
echo "${lines[0]}"
sed -i 1d failures
exit 1
"""
TIMEOUT = "a_test.cc:7: Failure\nValue of: status.ok()\n  Actual: false\nTimed out after 5 s"


class RunTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ["TEST_TMPDIR"])
        self.addCleanup(scratch.cleanup)
        self.root = scratch.name
        os.makedirs(self.root + "/.ci")
        for name in ("run", "count_tests.py"):
            shutil.copy(source_tree.root() + "/.ci/" + name, self.root + "/.ci/" + name)
        os.makedirs(self.root + "/tests/e2e")
        self.write("bazelw", BAZELW)
        self.write("tests/e2e/readme_train.sh", CHECK)
        self.write("failures", "")
        self.write("targets.json", "{}")

    def write(self, name, text):
        with open(os.path.join(self.root, name), "w") as f:
            f.write(text)
        os.chmod(os.path.join(self.root, name), 0o755)

    def run_ci(self, step, status):
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": self.root}
        done = subprocess.run(
            [self.root + "/.ci/run", step], env=environment, capture_output=True, text=True
        )
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout.splitlines()

    def run_tests(self, targets, status):
        self.write("targets.json", json.dumps(targets))
        return self.run_ci("test", status)

    def calls(self):
        with open(self.root + "/calls") as f:
            return f.read().splitlines()

    def test_a_test_that_fails_once_lands_and_is_named(self):
        lines = self.run_tests({"//a:t": [TIMEOUT], "//b:t": []}, 0)
        self.assertEqual(lines[-1], "2 passed, 0 failed")
        self.assertEqual(lines[-2], "FLAKY: //a:t: a_test.cc:7: Failure Value of: status.ok()")
        self.assertEqual(len(self.calls()), 2)
        self.assertIn("//a:t", self.calls()[1])
        self.assertNotIn("//...", self.calls()[1])

    def test_a_test_that_fails_three_times_fails(self):
        lines = self.run_tests({"//a:t": [TIMEOUT] * 3, "//b:t": []}, 1)
        self.assertEqual(lines[-1], "1 passed, 1 failed")
        self.assertEqual(len(self.calls()), 3)
        self.assertFalse([line for line in lines if line.startswith("FLAKY")])

    def test_more_than_three_flaky_tests_fail(self):
        targets = {"//%s:t" % name: [TIMEOUT] for name in "abc"}
        self.assertEqual(self.run_tests(dict(targets), 0)[-1], "3 passed, 0 failed")
        targets["//d:t"] = [TIMEOUT]
        lines = self.run_tests(targets, 1)
        self.assertEqual(lines[-1], "4 passed, 1 failed")
        self.assertIn("FAILED: 4 flaky", lines[-2])

    def test_defects_are_not_repeated(self):
        for log in (
            "==12==ERROR: AddressSanitizer: heap-use-after-free on address 0x1",
            "x.cc:3:5: runtime error: signed integer overflow",
            "WARNING: ThreadSanitizer: data race (pid=1)",
            "Fuzz: seed 12345 step 7",
            "external/bazel_tools/tools/test/test-setup.sh: line 330:    15 Segmentation fault      (core dumped)",
            "rank 1 was killed by signal 6",
            "terminate called after throwing an instance of 'std::runtime_error'",
            "malloc(): unaligned tcache chunk detected",
            "AssertionError: -6 != 0 : rank 1",
            "a.cc:1: Failure\nExpected equality of these values:\n  sum\n    Which is: 3.5\n  4",
            "a.cc:1: Failure\nValue of: at::equal(resumed, whole)\n  Actual: false",
            "The difference between a and b is 0.5, which exceeds 1e-6",
            "AssertionError: 0.25 != 0.5",
            "AssertionError: Tensor-likes are not close!",
            "Binary files a and b differ",
            "a_test.sh: exit status 139",
            "the program exited with status -11",
            "rank 0 ended with exit code: 134",
            "died with <Signals.SIGKILL: 9>",
            "run.sh: line 3: 12 Bus error",
            "a.cc:1: Failure\nExpected: (loss) == (other), actual: 3.5 vs 4",
            "The bits of the weights are not those of the run that was not stopped",
            "SUMMARY: libFuzzer: timeout",
            "[ RUN      ] A.c\nrank 1 was killed by signal 11\n" + TIMEOUT + "\n[  FAILED  ] A.c (5 ms)",
        ):
            with self.subTest(log):
                self.write("calls", "")
                lines = self.run_tests({"//a:t": [log]}, 1)
                self.assertEqual(lines[-1], "0 passed, 1 failed")
                self.assertEqual(len(self.calls()), 1)

    def test_a_defect_of_the_second_run_is_not_repeated(self):
        lines = self.run_tests({"//a:t": [TIMEOUT, "ERROR: AddressSanitizer: x"]}, 1)
        self.assertEqual(lines[-1], "0 passed, 1 failed")
        self.assertEqual(len(self.calls()), 2)

    def test_exit_statuses_and_waits_are_repeated(self):
        for log in (
            "AssertionError: 1 != 0 : no route to host",
            "a.cc:1: Failure\nExpected equality of these values:\n  exit_code\n    Which is: 1\n  0",
            "a.cc:1: Failure\nExpected: (elapsed) < (limit), actual: 3s vs 2s",
            "a.cc:1: Failure\nExpected: (exit_code) != (0), actual: 0 vs 0",
            "the program ended with exit status 143",
            "-- Test timed out at 2026-11-25 10:00:00 UTC --",
            # A case that passed may have tested a death.
            "[ RUN      ] A.b\nrank 1 was killed by signal 9\n[       OK ] A.b (1 ms)\n[ RUN      ] A.c\n"
            + TIMEOUT + "\n[  FAILED  ] A.c (5 ms)",
        ):
            with self.subTest(log):
                self.assertEqual(self.run_tests({"//a:t": [log]}, 0)[-1], "1 passed, 0 failed")

    def test_checks_are_repeated_too(self):
        self.write("failures", "port 12 is in use\nport 13 is in use\n")
        lines = self.run_ci("readme", 0)
        self.assertEqual(lines[-1], "1 passed, 0 failed")
        self.assertEqual(lines[-2], "FLAKY: README's training command: port 12 is in use")

    def test_a_check_that_fails_three_times_fails(self):
        self.write("failures", "no\n" * 3)
        self.assertEqual(self.run_ci("readme", 1)[-1], "0 passed, 1 failed")

    def test_a_defect_in_a_check_is_not_repeated(self):
        self.write("failures", "sums differ\n")
        self.assertEqual(self.run_ci("readme", 1)[-1], "0 passed, 1 failed")


if __name__ == "__main__":
    xml_unittest.main()
