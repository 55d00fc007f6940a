#!/usr/bin/env python3
"""compare_train.py on programs that only say how fast they were: what --check finds."""

import json
import os
import subprocess
import sys
import unittest

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, os.path.join(RUNFILES, "tests/support"))

import xml_unittest  # noqa: E402

# What a side reports, from its command line and the environment.
REPORT = """#!{python}
import json, os, re, sys, time
given = dict(re.findall(r"--(\\w+)=(\\S+)", " ".join(sys.argv)))
is_gpt = given.get("model", "gpt") == "gpt"
report = {{
    "steps": int(given["max_steps"]), "first_loss": 5.5 if is_gpt else 2.3, "last_loss": 1.0,
    "first_step_unix_s": time.time() + {slower}, "step_ms_median": 1.0 + {slower},
    "pss_mib_per_rank": {pss},
    "test/bits_per_byte": {bits} + 0.01 * int(given["seed"]),
}}
"""
OURS = REPORT + 'with open(given["bench_json"], "w") as f:\n    json.dump(report, f)\n'
PYTHON = REPORT + "print(json.dumps(report))\n"


class CompareTrainTest(unittest.TestCase):
    def run_benchmark(self, *arguments, bits=2.0, pss=10):
        """The exit status, and the rows by what they are of."""
        scratch = os.environ["TEST_TMPDIR"]
        one_rank = '16 if given["nproc_per_node"] == "1" else %g' % pss
        for name, text, values in (
            ("train", OURS, {"slower": 0, "pss": one_rank, "bits": bits}),
            ("python", PYTHON, {"slower": 100, "pss": 100, "bits": 2.0}),
        ):
            path = os.path.join(scratch, name)
            with open(path, "w") as f:
                f.write(text.format(python=sys.executable, **values))
            os.chmod(path, 0o755)
        done = subprocess.run(
            [sys.executable, os.path.join(RUNFILES, "tools/bench/compare_train.py"),
             "--train=" + scratch + "/train", "--python=" + scratch + "/python",
             "--data_dir=" + scratch, "--text=" + scratch, "--steps=40", *arguments],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode > 1:
            return done.returncode, done.stderr
        rows = json.loads(done.stdout.splitlines()[-1])["rows"]
        return done.returncode, {row["what"]: row for row in rows}

    def test_targets_are_met(self):
        status, rows = self.run_benchmark("--models=mlp,gpt", "--rounds=2", "--check")
        self.assertEqual(status, 0, rows)
        self.assertEqual(rows["PSS per rank, mlp, MiB"]["target"], 0.2)
        for model in ("mlp", "gpt"):
            self.assertEqual(rows["PSS of 2 ranks / 1 rank, %s, MiB" % model]["ratio"], 20 / 16)
        self.assertAlmostEqual(rows["bits per byte held out, gpt"]["target"], 0.01)

    def test_memory_of_two_ranks_is_checked(self):
        arguments = ("--models=mlp", "--rounds=1")
        self.assertEqual(self.run_benchmark(*arguments, "--check", pss=12)[0], 1)
        self.assertEqual(self.run_benchmark(*arguments, pss=12)[0], 0)

    def test_bits_per_byte_outside_the_spread_are_noticed(self):
        arguments = ("--models=gpt", "--rounds=2")
        self.assertEqual(self.run_benchmark(*arguments, "--check", bits=2.009)[0], 0)
        for other in (1.98, 2.02):
            self.assertEqual(self.run_benchmark(*arguments, "--check", bits=other)[0], 1)
            self.assertEqual(self.run_benchmark(*arguments, bits=other)[0], 0)
        status, error = self.run_benchmark("--models=gpt", "--rounds=1", "--check")
        self.assertEqual(status, 2)
        self.assertIn("--rounds=2", error)


if __name__ == "__main__":
    xml_unittest.main()
