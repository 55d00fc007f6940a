#!/usr/bin/env python3
"""//tools:train of two ranks under --max_restarts, with a random rank killed again and again.

After each kill the launcher says which rank was killed, and never another one,
and the ranks go on from their newest checkpoint, without --resume. The run ends
with exit code 0 and with the bytes of the run that nobody killed; each step is
in the log once.

DDP_RESTARTS is the number of kills and DDP_RESTARTS_SEED their seed. The times
are random all the same: the machine is. With DDP_RESTARTS, which is for a machine
that does nothing else, training must go on within seconds of each kill.
"""

import json
import os
import random
import re
import shutil
import sys
import time

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path[:0] = [RUNFILES + "/tests/support", RUNFILES + "/tests/resume"]

import xml_unittest  # noqa: E402
from jobs import PATIENCE_S, Job, JobsTest, contents, kill, running  # noqa: E402

RESTARTS = int(os.environ.get("DDP_RESTARTS", "3"))
SEED = int(os.environ.get("DDP_RESTARTS_SEED", "1"))
STEPS_PER_EPOCH = 8
# Some steps after each kill, whatever the machine does meanwhile.
EPOCHS = 5 * (RESTARTS + 1)
END = EPOCHS * STEPS_PER_EPOCH
# From a kill to the next step that is recorded.
MOST_S = 2


class RestartsTest(JobsTest):
    def start(self, *more):
        job = Job(
            None, self.output, "--train_size=%d" % (32 * STEPS_PER_EPOCH), "--test_size=16",
            "--epochs=%d" % EPOCHS, "--checkpoint_dir=" + self.folder, "--checkpoint_every_steps=1",
            "--keep_last=2", "--log_dir=" + self.log, "--log_every=1", "--sinks=jsonl",
            "--max_restarts=%d" % RESTARTS, *more,
        )  # fmt: skip
        self.jobs.append(job)
        return job

    def steps(self):
        """Of each record of a step, in the order of the file, and when it was written."""
        path = os.path.join(self.log, "metrics.jsonl")
        if not os.path.exists(path):
            return []
        with open(path) as f:
            records = [json.loads(line) for line in f if line.endswith("\n")]
        return [(r["step"], r["time"]) for r in records if "train/loss" in r]

    def last_step(self):
        return max((step for step, _ in self.steps()), default=0)

    def wait_for_step(self, job, step):
        deadline = time.monotonic() + PATIENCE_S
        while self.last_step() < step and not job.ended():
            self.assertLess(time.monotonic(), deadline, job.text())
            time.sleep(0.002)

    def result(self):
        return contents(os.path.join(self.folder, "epoch_%d.pt" % EPOCHS))

    def test_a_folder_that_is_gone_is_not_begun_anew(self):
        job = self.start("--epochs=100000")
        self.wait_for_step(job, 2)
        os.rename(self.folder, self.folder + "_gone")
        self.assertEqual(job.process.wait(timeout=PATIENCE_S), 2, job.text())
        self.assertIn("not restarted", job.text())
        self.assertFalse(os.path.exists(self.folder))
        shutil.rmtree(self.folder + "_gone")

    def test_killed_ranks_come_back(self):
        rng = random.Random(SEED)
        began = time.monotonic()
        job = self.start()
        self.wait_for_step(job, 1)
        start_s = time.monotonic() - began
        self.assertEqual(job.process.wait(timeout=PATIENCE_S), 0, job.text())
        whole = self.result()
        shutil.rmtree(self.folder)
        shutil.rmtree(self.log)

        job = self.start()
        longest = 0
        for number in range(1, RESTARTS + 1):
            # At least one step further than the last attempt, or it would have made no progress.
            self.wait_for_step(job, self.last_step() + 1 + rng.randrange(STEPS_PER_EPOCH))
            rank = rng.randrange(2)
            (pid,) = running(job.mark, b"RANK=%d" % rank)
            began = time.time()
            kill(pid)
            said = "rank %d (pid %d) was killed by signal 9 (Killed); restart %d of %d\n" % (
                rank, pid, number, RESTARTS)  # fmt: skip
            deadline = time.monotonic() + PATIENCE_S
            while said not in job.text() and not job.ended():
                self.assertLess(time.monotonic(), deadline, job.text())
                time.sleep(0.002)
            self.assertIn(said, job.text())
            while not any(when > began + 0.05 and said in job.text() for _, when in self.steps()[-1:]):
                self.assertFalse(job.ended(), job.text())
                self.assertLess(time.monotonic(), deadline, job.text())
                time.sleep(0.002)
            longest = max(longest, time.time() - began)
        self.assertEqual(job.process.wait(timeout=PATIENCE_S), 0, job.text())
        print("  %d kills, seed %d: training again within %.2f s, for the first time after %.2f s"
              % (RESTARTS, SEED, longest, start_s))  # fmt: skip
        if "DDP_RESTARTS" in os.environ:
            self.assertLess(longest, MOST_S, job.text())
        self.assertEqual(len(re.findall(r"; restart \d+ of", job.text())), RESTARTS, job.text())
        self.assertEqual(running(job.mark), [])
        found = self.result()
        self.assertEqual(sorted(found), sorted(whole))
        for name, data in whole.items():
            self.assertTrue(found[name] == data, "%s differs" % name)
        self.assertEqual([step for step, _ in self.steps()], list(range(1, END + 1)))

    def test_an_error_that_comes_again_ends_it(self):
        """A folder that is another run's: if it were repeated, it would go on with that run."""
        os.makedirs(self.folder)
        with open(os.path.join(self.folder, "epoch_1.pt"), "wb") as f:
            f.write(b"of another run")
        job = self.start()
        self.assertEqual(job.process.wait(timeout=PATIENCE_S), 2, job.text())
        self.assertNotIn("; restart 1 of", job.text())


if __name__ == "__main__":
    xml_unittest.main()
