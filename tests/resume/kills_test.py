#!/usr/bin/env python3
"""//tools:train of two ranks, killed with SIGKILL at random times while it saves after each step,
with and without --checkpoint_async.

After each kill all checkpoints that are listed are intact, none is lost, no
process is left, and `--resume=auto` goes on from the newest. The run's end has
the bytes of the run that nobody killed, and nothing else is left in the folder.

DDP_KILLS is the number of kills, of all formats together, and DDP_KILLS_SEED
their seed. The times are random all the same: the machine is.
"""

import glob
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")

import xml_unittest  # noqa: E402

TRAIN = os.path.join(RUNFILES, "tools/train")
CKPT = os.path.join(RUNFILES, "tools/ckpt")
KILLS = int(os.environ.get("DDP_KILLS", "10"))
SEED = int(os.environ.get("DDP_KILLS_SEED", "1"))
FORMATS = ("pt", "safetensors", "sharded")
# Whom a kill hits: the launcher, whose death its ranks must not survive; all processes of the job,
# one after the other; or one rank, which the others must notice.
VICTIMS = ("launcher", "all", "rank 0", "rank 1")
MARK = "DDP_KILLS_MARK"
STEPS_PER_EPOCH = 2
EPOCHS = 12
END = EPOCHS * STEPS_PER_EPOCH
KEPT = 2
# Far beyond what anything here takes.
PATIENCE_S = 120


def running(mark, with_variable=b""):
    """Process ids of the processes that carry this mark in their environment."""
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as f:
                variables = f.read().split(b"\0")
        except OSError:
            continue  # it has ended meanwhile
        if ("%s=%s" % (MARK, mark)).encode() in variables and (
            not with_variable or with_variable in variables
        ):
            found.append(int(path.split("/")[2]))
    return found


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def contents(path):
    """The bytes of a file, or of each file of a folder."""
    if os.path.isfile(path):
        with open(path, "rb") as f:
            return {"": f.read()}
    found = {}
    for name in sorted(os.listdir(path)):
        with open(os.path.join(path, name), "rb") as f:
            found[name] = f.read()
    return found


def remove(path):
    shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


class Job:
    """One process that launches two ranks, with its output in a file."""

    def __init__(self, folder, output, *flags):
        self.mark = uuid.uuid4().hex
        self.output = output
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("TEST_", "RUNFILES_"))
        }
        command = [
            TRAIN, "--model=mlp", "--dataset=synthetic", "--train_size=64", "--test_size=16",
            "--batch_size=16", "--nproc_per_node=2", "--launcher=local", "--epochs=%d" % EPOCHS,
            "--checkpoint_dir=" + folder, "--keep_last=%d" % KEPT, "--resume=auto", *flags,
        ]  # fmt: skip
        with open(output, "wb") as out:
            self.process = subprocess.Popen(
                command, env={**environment, MARK: self.mark}, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def ended(self):
        return self.process.poll() is not None

    def text(self):
        with open(self.output, errors="replace") as f:
            return f.read()

    def pids_of(self, victim, rng):
        """`victim` is one of VICTIMS; a rank that is not there yet is the launcher."""
        if victim == "all":
            pids = running(self.mark)
            rng.shuffle(pids)
        elif victim == "launcher":
            pids = []
        else:
            pids = running(self.mark, victim.replace("rank ", "RANK=").encode())
        return pids or [self.process.pid]


class KillsTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ["TEST_TMPDIR"])
        self.addCleanup(scratch.cleanup)
        self.folder = os.path.join(scratch.name, "run")
        self.output = os.path.join(scratch.name, "output.txt")
        self.jobs = []
        self.addCleanup(self.end_jobs)

    def end_jobs(self):
        for job in self.jobs:
            for pid in running(job.mark):
                kill(pid)
            job.process.wait()

    def start(self, *more):
        flags = ["--checkpoint_format=" + self.form, "--checkpoint_every_steps=1", *more]
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
        """Checkpoints and their notes, and nothing that a save or a kill has left behind. A kill
        between the two may lose notes."""
        kept = sorted(os.path.basename(self.path(s)) for s in range(END - KEPT + 1, END + 1))
        notes = [".%s.json" % name for name in kept]
        self.assertEqual([name for name in self.names() if name not in notes], kept)

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
