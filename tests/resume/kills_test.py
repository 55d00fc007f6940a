#!/usr/bin/env python3
"""//tools:train of two ranks, killed with SIGKILL at random times while it saves after each step,
with and without --checkpoint_async. Each format has another stage of ZeRO.

After each kill all checkpoints that are listed are intact, none is lost, no
process is left, and `--resume=auto` goes on from the newest. The run's end has
the bytes of the run that nobody killed, and nothing else is left in the folder.

DDP_KILLS is the number of kills, of all formats together, and DDP_KILLS_SEED
their seed. The times are random all the same: the machine is.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import time

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path[:0] = [RUNFILES + "/tests/support", RUNFILES + "/tests/resume"]

import xml_unittest  # noqa: E402
from jobs import (  # noqa: E402
    KEPT, PATIENCE_S, Job, JobsTest, contents, is_locked, kill, remove, running,
)  # fmt: skip

CKPT = os.path.join(RUNFILES, "tools/ckpt")
KILLS = int(os.environ.get("DDP_KILLS", "10"))
SEED = int(os.environ.get("DDP_KILLS_SEED", "1"))
FORMATS = ("pt", "safetensors", "sharded")
# Whom a kill hits: the launcher, whose death its ranks must not survive; all processes of the job,
# one after the other; or one rank, which the others must notice.
VICTIMS = ("launcher", "all", "rank 0", "rank 1")
STEPS_PER_EPOCH = 2
EPOCHS = 12
END = EPOCHS * STEPS_PER_EPOCH


class KillsTest(JobsTest):
    def start(self, *more):
        flags = [
            "--train_size=64", "--test_size=16", "--epochs=%d" % EPOCHS, "--checkpoint_every_steps=1",
            "--checkpoint_format=" + self.form, "--optimizer=adamw", "--lr=0.01",
            "--zero_stage=%d" % FORMATS.index(self.form), *more,
        ]  # fmt: skip
        self.jobs.append(Job(self.folder, self.output, *flags))
        return self.jobs[-1]

    def path(self, step):
        """The checkpoint after so many steps."""
        epochs, more = divmod(step, STEPS_PER_EPOCH)
        name = "epoch_%d_step_%d" % (epochs, step) if more else "epoch_%d" % epochs
        return os.path.join(self.folder, "%s.%s" % (name, self.form))

    def saved_steps(self):
        """After which steps there is a checkpoint, in order."""
        names = set(self.names())
        return [s for s in range(1, END + 1) if os.path.basename(self.path(s)) in names]

    def names(self):
        return sorted(os.listdir(self.folder)) if os.path.isdir(self.folder) else []

    def newest(self):
        """The step of the newest checkpoint; 0: there is none."""
        return max(self.saved_steps(), default=0)

    def temporaries(self):
        return {name for name in self.names() if re.search(r"\.tmp-[0-9a-f]{16}$", name)}

    def wait_until(self, condition, what):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.assertLess(time.monotonic(), deadline, what + "\n" + self.jobs[-1].text())
            time.sleep(0.001)

    def whole_run(self):
        """The bytes of the last checkpoint of a run that nobody kills, and its times: seconds to the
        first checkpoint, and between two."""
        began = time.monotonic()
        job = self.start()
        self.wait_until(lambda: self.newest() > 0 or job.ended(), "no checkpoint")
        first = time.monotonic()
        self.wait_until(lambda: self.newest() == END or job.ended(), "no last checkpoint")
        last = time.monotonic()
        self.assertEqual(job.process.wait(), 0, job.text())
        self.assert_is_whole_folder()
        found = contents(self.path(END))
        shutil.rmtree(self.folder)
        return found, first - began, (last - first) / (END - 1)

    def assert_is_whole_folder(self):
        """Checkpoints, their notes and the owner's name, and nothing that a save or a kill has left
        behind. A kill between the two may lose notes."""
        kept = sorted(os.path.basename(self.path(s)) for s in range(END - KEPT + 1, END + 1))
        notes = [".%s.json" % name for name in kept]
        self.assertEqual([name for name in self.names() if name not in [*notes, ".job"]], kept)

    def assert_all_are_intact(self):
        visible = [name for name in self.names() if not name.startswith(".")]
        self.assertEqual(visible, sorted(os.path.basename(self.path(s)) for s in self.saved_steps()))
        if not visible:
            return
        done = subprocess.run(
            [CKPT, "verify", self.folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout)
        for name in visible:
            self.assertIn("/%s: ok" % name, done.stdout)

    def assert_went_on(self, job, before):
        """The job that has saved has gone on from checkpoint `before`."""
        said = "resumed from %s: " % self.path(before) if before else "starting anew"
        self.assertIn(said, job.text())

    def run_and_kill(self, victim, startup_s, period_s):
        """Whether the kill came before the run's end."""
        before, left_before = self.newest(), self.temporaries()
        saves = self.rng.choice((0, 1, 1, 2, 3))
        # A save is the end of a period. Where its temporary is waited for, its beginning is known.
        within_save = self.rng.random() < 0.5
        pause = startup_s if saves == 0 else period_s / 8 if within_save else period_s
        pause *= self.rng.random() ** 0.5
        more = ["--checkpoint_async"] if self.rng.random() < 0.5 else []
        job = self.start(*more)
        target = min(before + saves, END)
        self.wait_until(lambda: self.newest() >= target or job.ended(), "no checkpoint")
        pids = job.pids_of(victim, self.rng)  # now: it takes longer than a save
        if saves and within_save:
            self.wait_until(
                lambda: self.temporaries() - left_before or self.newest() > target or job.ended(),
                "no save",
            )
        time.sleep(pause)  # the kill's random time; nothing depends on it
        seen = self.newest()
        for pid in pids if saves else job.pids_of(victim, self.rng):
            kill(pid)
        code = job.process.wait(timeout=PATIENCE_S)
        self.wait_until(lambda: not running(job.mark), "processes are left")
        self.wait_until(lambda: not is_locked(self.folder), "a process holds the folder")
        what = " ".join([victim, "after %d saves and %.3f s" % (saves, pause), *more])
        print("  killed %s, at step %d: %s" % (what, seen, sorted(self.temporaries())))
        self.assertGreaterEqual(self.newest(), seen, what)
        self.assert_all_are_intact()
        if self.newest() > before:
            self.assert_went_on(job, before)
            self.assertEqual(left_before & self.temporaries(), set(), what)
        if code == 0:
            self.assertEqual(self.newest(), END, job.text())
        return code != 0

    def end_run(self, whole):
        """Goes on to the run's end, which must be that of the run that nobody killed."""
        before = self.newest()
        job = self.start()
        self.assertEqual(job.process.wait(timeout=PATIENCE_S), 0, job.text())
        self.assert_went_on(job, before)
        self.assertEqual(running(job.mark), [])
        found = contents(self.path(END))
        self.assertEqual(sorted(found), sorted(whole))
        for name, data in whole.items():
            self.assertTrue(found[name] == data, "%s differs in %s" % (self.path(END), name))
        self.assert_is_whole_folder()
        shutil.rmtree(self.folder)

    def killed_again_and_again(self, form):
        self.form = form
        index = FORMATS.index(form)
        kills = KILLS // len(FORMATS) + (index < KILLS % len(FORMATS))
        self.rng = random.Random("%d %s" % (SEED, form))
        whole, startup_s, period_s = self.whole_run()
        print(
            "  %s: %d kills, seed %d; first checkpoint after %.2f s, then every %.3f s"
            % (form, kills, SEED, startup_s, period_s)
        )
        killed = 0
        while killed < kills:
            # Each format begins with another victim, so that few kills hit all.
            victim = VICTIMS[(killed + index) % len(VICTIMS)]
            killed += self.run_and_kill(victim, startup_s, period_s)
            if self.newest() == END:
                # Of a run with other options, which the checkpoint has.
                remove(self.path(END))
                self.end_run(whole)
        if os.path.isdir(self.folder):
            self.end_run(whole)

    def test_pt(self):
        self.killed_again_and_again("pt")

    def test_safetensors(self):
        self.killed_again_and_again("safetensors")

    def test_sharded(self):
        self.killed_again_and_again("sharded")


if __name__ == "__main__":
    xml_unittest.main()
