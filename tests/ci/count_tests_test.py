#!/usr/bin/env python3
"""CI's last line counts test cases correctly: no failure is lost, nothing is counted twice."""

import contextlib
import io
import json
import os
import sys
import tempfile
import unittest

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")

import source_tree  # noqa: E402
import xml_unittest  # noqa: E402

sys.dont_write_bytecode = True
sys.path.insert(0, source_tree.root() + "/.ci")

import count_tests  # noqa: E402

GTEST = """<testsuites><testsuite name="S">
<testcase name="a" classname="S" status="run" result="completed"/>
<testcase name="b" classname="S" status="run" result="skipped"><skipped message="no GPU"/></testcase>
%s</testsuite></testsuites>"""
FAILED = '<testcase name="c" classname="S" status="run"><failure message="1 != 2"/></testcase>'


class CountTestsTest(unittest.TestCase):
    def count(self, *tests):
        """Each test: (label, status, text of its test.xml or None)."""
        with tempfile.TemporaryDirectory(dir=os.environ["TEST_TMPDIR"]) as folder:
            events = os.path.join(folder, "events.json")
            with open(events, "w") as f:
                f.write(json.dumps({"id": {"started": {}}, "started": {}}) + "\n")
                for number, (label, status, xml) in enumerate(tests):
                    outputs = []
                    if xml is not None:
                        path = os.path.join(folder, "test %d.xml" % number)
                        with open(path, "w") as g:
                            g.write(xml)
                        outputs = [{"name": "test.xml", "uri": "file://" + path.replace(" ", "%20")}]
                    event = {
                        "id": {"testResult": {"label": label, "run": 1, "attempt": 1}},
                        "testResult": {"status": status, "testActionOutput": outputs},
                    }
                    f.write(json.dumps(event) + "\n")
            named = io.StringIO()
            with contextlib.redirect_stderr(named):
                counted = count_tests.count(events)
            return counted, named.getvalue()

    def assert_counted(self, tests, passed, failed, skipped, *named):
        counted, text = self.count(*tests)
        self.assertEqual(counted, {"passed": passed, "failed": failed, "skipped": skipped})
        for name in named:
            self.assertIn(name, text)

    def test_cases_of_a_report(self):
        self.assert_counted([("//a:t", "PASSED", GTEST % "")], 1, 0, 1, "skipped //a:t S.b: no GPU\n")

    def test_failure(self):
        self.assert_counted([("//a:t", "FAILED", GTEST % FAILED)], 1, 1, 1, "//a:t S.c")

    def test_no_report(self):
        self.assert_counted([("//a:t", "PASSED", None)], 1, 0, 0)
        self.assert_counted([("//a:t", "FAILED", None)], 0, 1, 0, "//a:t")

    def test_crash_after_cases_that_passed(self):
        self.assert_counted([("//a:t", "TIMEOUT", GTEST % "")], 1, 1, 1, "as a whole")

    def test_broken_report(self):
        self.assert_counted([("//a:t", "FAILED", "<testsuites>")], 0, 1, 0)

    def test_several(self):
        tests = [("//a:t", "PASSED", GTEST % ""), ("//b:t", "PASSED", GTEST % "")]
        self.assert_counted(tests, 2, 0, 2)

    def test_nothing(self):
        self.assert_counted([], 0, 0, 0)


if __name__ == "__main__":
    xml_unittest.main()
