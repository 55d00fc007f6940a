"""unittest for Bazel's sh_test: runs the calling module's tests and reports each case to Bazel.

    import xml_unittest
    if __name__ == "__main__":
        xml_unittest.main()

Bazel 4.2's py_test needs a Python toolchain. An sh_test whose source is a
Python script does not, but must write $XML_OUTPUT_FILE itself; otherwise all
cases count as one. Skipped cases are printed with their reason.
"""

import os
import sys
import unittest
import xml.etree.ElementTree as ElementTree


class _Result(unittest.TextTestResult):
    """Remembers every case with its outcome; a case with failing subtests fails once."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.outcomes = {}

    def startTest(self, test):
        super().startTest(test)
        self.outcomes[test.id()] = (None, "")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.outcomes[test.id()] = ("failure", self.failures[-1][1])

    def addError(self, test, error):
        super().addError(test, error)
        self.outcomes[test.id()] = ("error", self.errors[-1][1])

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.outcomes[test.id()] = ("skipped", reason)

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.outcomes[test.id()] = ("failure", str(error[1]))


def _write(path, outcomes):
    suite = ElementTree.Element("testsuite", name="unittest", tests=str(len(outcomes)))
    for name, (kind, text) in outcomes.items():
        class_name, _, case_name = name.rpartition(".")
        case = ElementTree.SubElement(suite, "testcase", classname=class_name, name=case_name)
        if kind:
            ElementTree.SubElement(case, kind, message=text[-2000:])
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.ElementTree(suites).write(path, encoding="utf-8", xml_declaration=True)


def main(module="__main__"):
    tests = unittest.defaultTestLoader.loadTestsFromName(module)
    result = unittest.TextTestRunner(
        stream=sys.stdout, verbosity=2, resultclass=_Result
    ).run(tests)
    if os.environ.get("XML_OUTPUT_FILE"):
        _write(os.environ["XML_OUTPUT_FILE"], result.outcomes)
    if not result.outcomes:
        sys.exit("no test was found in %s" % module)
    sys.exit(0 if result.wasSuccessful() else 1)
