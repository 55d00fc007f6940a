#!/usr/bin/env python3
"""own_loop.cc on 1 to 3 ranks: stopped by signals, killed, started again, also in another world."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")

import xml_unittest  # noqa: E402

PROGRAM = os.path.join(RUNFILES, "tools/examples/own_loop")
# Far beyond what anything here takes.
PATIENCE_S = 120


def ranks_of(pid):
    """Process ids of the ranks that a launcher has started; it has another child, which watches."""
    found = []
    for task in os.listdir("/proc/%d/task" % pid):
        with open("/proc/%d/task/%s/children" % (pid, task)) as f:
            for child in f.read().split():
                with open("/proc/%s/environ" % child, "rb") as environment:
                    if b"\0RANK=" in b"\0" + environment.read():
                        found.append(int(child))
    return found


class OwnLoopTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"])
        self.jobs = []

    def tearDown(self):
        for job in self.jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
            job.output.close()

    def start(self, name, epochs, ranks):
        """Starts the program in folder `name`."""
        output = tempfile.TemporaryFile(mode="w+", dir=self.folder)
        job = subprocess.Popen(
            [PROGRAM, os.path.join(self.folder, name), str(epochs), str(ranks)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=dict(os.environ, OMP_NUM_THREADS="1"))  # fmt: skip
        job.output = output
        self.jobs.append(job)
        return job

    def text(self, job):
        job.output.seek(0)
        return job.output.read()

    def end_of(self, job):
        """Its exit code and output."""
        code = job.wait(timeout=PATIENCE_S)
        return code, self.text(job)

    def run_to_end(self, name, epochs, ranks):
        code, text = self.end_of(self.start(name, epochs, ranks))
        self.assertEqual(code, 0, text)
        return text

    def records(self, name):
        path = os.path.join(self.folder, name, "metrics.jsonl")
        if not os.path.exists(path):
            return []
        with open(path) as f:
            return [json.loads(line) for line in f if line.endswith("\n")]

    def checkpoint(self, name, epochs):
        with open(os.path.join(self.folder, name, "epoch_%d.pt" % epochs), "rb") as f:
            return f.read()

    def wait_for_epochs(self, name, count, job):
        deadline = time.monotonic() + PATIENCE_S
        while len(self.records(name)) < count and job.poll() is None:
            self.assertLess(time.monotonic(), deadline, self.text(job))
            time.sleep(0.001)

    def test_a_stopped_run_goes_on_with_the_same_bits(self):
        epochs = 40
        for ranks in (1, 2, 3):
            self.run_to_end("whole%d" % ranks, epochs, ranks)
            name, seen = "stopped%d" % ranks, 0
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                job = self.start(name, epochs, ranks)
                self.wait_for_epochs(name, seen + 3, job)
                time.sleep(0.003 * number)  # within an epoch; nothing depends on where
                job.send_signal(number)
                code, text = self.end_of(job)
                self.assertIn(code, (128 + number, -number), text)
                saved = self.records(name)[-1]
                self.assertEqual(saved["reason"], "signal " + number.name[3:], text)
                self.assertTrue(os.path.exists(saved["saved"]), text)
                self.assertNotIn("rror", text)
                seen = len(self.records(name))
            text = self.run_to_end(name, epochs, ranks)
            self.assertIn("resumed from " + saved["saved"], text)
            self.assertEqual(self.checkpoint(name, epochs), self.checkpoint("whole%d" % ranks, epochs))
            # No evaluation was left out, or counted twice.
            self.assertEqual(
                [r["test/max_error"] for r in self.records(name) if "test/max_error" in r],
                [r["test/max_error"] for r in self.records("whole%d" % ranks) if "test/max_error" in r])

    def test_another_world_goes_on(self):
        for epochs, ranks in ((2, 2), (3, 3), (4, 1)):
            text = self.run_to_end("run", epochs, ranks)
            self.assertEqual("epoch_%d.pt" % (epochs - 1) in text, epochs > 2, text)
        losses = [r["train/loss"] for r in self.records("run") if "train/loss" in r]
        self.assertEqual(len(losses), 4)
        self.assertLess(losses[-1], losses[0])

    def test_a_killed_rank_ends_all_with_one_message(self):
        job = self.start("killed", 100000, 3)
        self.wait_for_epochs("killed", 3, job)
        ranks = ranks_of(job.pid)
        self.assertEqual(len(ranks), 3)
        os.kill(ranks[1], signal.SIGKILL)
        code, text = self.end_of(job)
        self.assertNotIn(code, (0, 143), text)
        self.assertIn("signal 9", text)
        for pid in ranks:
            self.assertFalse(os.path.exists("/proc/%d" % pid), pid)
        job = self.start("killed", 100000, 3)
        self.wait_for_epochs("killed", len(self.records("killed")) + 2, job)
        job.send_signal(signal.SIGTERM)
        self.assertEqual(self.end_of(job)[0], 143)

    def test_the_page_shows_the_program(self):
        with open(os.path.join(RUNFILES, "tools/examples/own_loop.cc")) as f:
            program = f.read()
        with open(os.path.join(RUNFILES, "docs/own_loop.md")) as f:
            self.assertIn("```cpp own_loop.cc\n%s```\n" % program, f.read())

    def test_mistakes(self):
        for numbers in ([], ["many", "2"], ["1", "two"], ["1", "0"]):
            done = subprocess.run([PROGRAM, self.folder, *numbers], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr), (2, "usage: own_loop FOLDER EPOCHS RANKS\n"))
        path = os.path.join(self.folder, "a file")
        with open(path, "w"):
            pass
        code, text = self.end_of(self.start("a file", 1, 2))
        self.assertIn(code, (1, 2), text)
        self.assertIn(path, text)
        self.assertLess(text.count(path), 4, text)


if __name__ == "__main__":
    xml_unittest.main()
