"""The rates of ddp/trainer/testdata/schedules.txt, which //ddp/trainer:schedule_test expects, are Python's."""

import os
import subprocess
import sys
import unittest

import xml_unittest

FOLDER = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"], "ddp/trainer/testdata")


class ScheduleInteropTest(unittest.TestCase):
    def test_the_golden_file_is_what_python_gives(self):
        with open(os.path.join(FOLDER, "schedules.txt")) as file:
            golden = file.read().splitlines()
        script = os.path.join(FOLDER, "schedules.py")
        printed = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout
        now = printed.splitlines()
        self.assertEqual(len(golden), len(now))
        for expected, found in zip(golden[1:], now[1:]):  # without torch's version
            options, factors = expected.split(" | ")
            self.assertEqual(options, found.split(" | ")[0])
            for one, other in zip(factors.split(), found.split(" | ")[1].split(), strict=True):
                self.assertAlmostEqual(float(one), float(other), delta=1e-11, msg=options)


if __name__ == "__main__":
    xml_unittest.main()
