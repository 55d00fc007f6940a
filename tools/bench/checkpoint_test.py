#!/usr/bin/env python3
"""checkpoint.py runs on a small state, without Python's sides, and counts what is read."""

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import unittest

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, os.path.join(RUNFILES, "tests/support"))
sys.path.insert(0, os.path.join(RUNFILES, "tools/bench"))

import checkpoint  # noqa: E402
import xml_unittest  # noqa: E402


class CheckpointBenchmarkTest(unittest.TestCase):
    def test_small(self):
        done = subprocess.run(
            [sys.executable, os.path.join(RUNFILES, "tools/bench/checkpoint.py"), "--mib=24",
             "--rounds=1", "--python=", "--backend=shm", "--scratch=" + os.environ["TEST_TMPDIR"],
             "--ours=" + os.path.join(RUNFILES, "tools/bench/checkpoint_rank")],
            capture_output=True, text=True,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        row = json.loads(done.stdout.splitlines()[-1])
        # No byte is read twice, whatever the format and the number of ranks.
        size = row["rows"]["ours, sharded"]["save"][0]["disk_bytes"]
        self.assertGreaterEqual(size, 24 << 20)
        loads = [row["rows"]["ours, " + f]["load"] for f in ("sharded", "pt", "safetensors")]
        for rows in [*loads, *row["more"].values()]:
            self.assertGreater(rows[0]["read_bytes"], 0.99 * size)
            self.assertLess(rows[0]["read_bytes"], 1.05 * size)
        self.assertIn("bytes read / size, 4 ranks", done.stdout)
        for memory in ("save, sharded", "save, pt", "asynchronous save"):
            begin = "memory, " + memory
            rows = [line for line in done.stdout.splitlines() if line.startswith(begin)]
            self.assertEqual(len(rows), 1, done.stdout)
            self.assertNotIn("missed", rows[0])

    def test_memory_has_goals(self):
        mib = 1 << 20

        def missed(sharded, pt, asynchronous):
            results = checkpoint.Results(["ours, sharded", "ours, pt"])
            of_pt = {"seconds": 1, "peak_bytes": pt * mib, "largest_tensor_bytes": 4 * mib}
            results.rows["ours, pt"]["save"] = [of_pt]
            of_sharded = {"seconds": 1, "disk_bytes": 1, "peak_bytes": sharded * mib}
            results.rows["ours, sharded"]["save"] = [of_sharded]
            results.asynchronous = [{"seconds": 1, "stall_seconds": 0, "step_ms": 1,
                                     "step_ms_during": 1,
                                     "beside_copy_bytes": asynchronous * mib}]  # fmt: skip
            with contextlib.redirect_stdout(io.StringIO()):
                return checkpoint.report(argparse.Namespace(mib=1), results)

        self.assertEqual(missed(63, 67, 63), 0)
        self.assertEqual(missed(65, 67, 63), 1)
        self.assertEqual(missed(63, 69, 63), 1)
        self.assertEqual(missed(63, 67, 65), 1)

    def test_interrupted(self):
        running = subprocess.Popen(
            [sys.executable, os.path.join(RUNFILES, "tools/bench/checkpoint.py"), "--mib=24",
             "--rounds=1000000", "--python=", "--backend=shm",
             "--scratch=" + os.environ["TEST_TMPDIR"],
             "--ours=" + os.path.join(RUNFILES, "tools/bench/checkpoint_rank")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        lines = []
        for line in running.stdout:
            lines.append(line)
            if "save, ours, pt" in line:  # each row is there when it is measured
                running.send_signal(signal.SIGINT)
                break
        lines += running.communicate(timeout=60)[0].splitlines()
        self.assertEqual(running.returncode, 130, lines)
        row = json.loads(lines[-1])
        self.assertEqual(len(row["rows"]["ours, pt"]["save"]), 1)
        self.assertEqual(row["rows"]["ours, pt"]["load"], [])
        self.assertEqual([n for n in os.listdir(os.environ["TEST_TMPDIR"]) if "tmp" in n], [])


if __name__ == "__main__":
    xml_unittest.main()
