#!/usr/bin/env python3
"""//tools:train and a GAN, of two ranks, asked to stop by signals at random times: while they take
steps, save, roll back, evaluate or start. And some by stop_at_step, max_time or a callback.

Each stop is in good order, that is, ends with 128 + the signal, leaves no
process, and names its checkpoint; or the process was not ready for it, and ends
by the signal. `--resume=auto` goes on. The run's end has the bytes of the run
that nobody stopped.

DDP_STOPS is the number of stops, of all cases together, and DDP_STOPS_SEED
their seed. The times are random all the same: the machine is. In what the
signals fell is counted, by the times in the log, and printed.
"""

import collections
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path[:0] = [RUNFILES + "/tests/support", RUNFILES + "/tests/resume"]

import xml_unittest  # noqa: E402
from jobs import GAN, PATIENCE_S, TRAIN, Job, JobsTest, contents, running  # noqa: E402

STOPS = int(os.environ.get("DDP_STOPS", "10"))
SEED = int(os.environ.get("DDP_STOPS_SEED", "1"))
# The time in which a stop must end beside the write, which takes milliseconds here.
STOP_S = 60
Program = collections.namedtuple("Program", "command epochs flags")
# Many evaluations, each as long as some steps.
CLASSIFIER = Program(TRAIN, 6, ["--train_size=256", "--test_size=4096", "--eval_batch_size=64", "--epochs=6"])
# Rolls back once per epoch.
ADVERSARIES = Program(
    GAN, 3,
    ["--epochs=3", "--eval_batch_size=64", "--on_anomaly=rollback", "--anomaly_deviations=0",
     "--checkpoint_every_steps=5"],
)  # fmt: skip
# What its checkpoints must have, so that equal bytes say something.
KEPT = (b"discriminator.0.weight", b"generator.0.weight", b"optimizer.generator", b"witness", b"left_out")
CASES = (
    ("shm", CLASSIFIER, ["--backend=shm", "--checkpoint_every_steps=5"]),
    (
        "gloo, zero 1, validation, average", CLASSIFIER,
        ["--backend=gloo", "--zero_stage=1", "--optimizer=adamw", "--lr=0.01", "--validation_size=0.5",
         "--validate_every_steps=2", "--early_stopping=val/loss:min", "--early_stopping_patience=999",
         "--ema_decay=0.9"],
    ),
    (
        "gloo, zero 2, sharded, average, guard", CLASSIFIER,
        ["--backend=gloo", "--zero_stage=2", "--checkpoint_format=sharded", "--ema_decay=0.9", "--ema_eval",
         "--on_anomaly=skip", "--precision=fp16"],
    ),
    (
        "shm, async, average", CLASSIFIER,
        ["--backend=shm", "--checkpoint_continuous", "--keep_last=2", "--ema_decay=0.9"],
    ),
    (
        "gloo, rollback", CLASSIFIER,
        ["--backend=gloo", "--on_anomaly=rollback", "--checkpoint_every_steps=5"],
    ),
    (
        "gan, shm, async, average", ADVERSARIES,
        ["--backend=shm", "--checkpoint_async", "--ema_decay=0.9"],
    ),
    (
        "gan, gloo, zero 2, sharded", ADVERSARIES,
        ["--backend=gloo", "--zero_stage=2", "--checkpoint_format=sharded"],
    ),
    (
        "shm, zero 1, sharded", CLASSIFIER,
        ["--backend=shm", "--zero_stage=1", "--optimizer=adamw", "--lr=0.01", "--checkpoint_format=sharded",
         "--checkpoint_every_steps=3"],
    ),
    (
        "shm, zero 2, async, rollback", CLASSIFIER,
        ["--backend=shm", "--zero_stage=2", "--on_anomaly=rollback", "--checkpoint_async",
         "--checkpoint_every_steps=5"],
    ),
    (
        "gan, shm, zero 1", ADVERSARIES,
        ["--backend=shm", "--zero_stage=1"],
    ),
)  # fmt: skip
# What a signal falls into.
START, STEP, EVALUATION, SAVE, ROLLBACK, END = "start", "step", "evaluation", "save", "rollback", "end"
# So many stops fall into each of these in any case.
MANY = 200
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# To whom: the launcher passes it on; a terminal and a scheduler give it to all; or to one rank.
VICTIMS = ("launcher", "all", "rank 0", "rank 1")


class StopsTest(JobsTest):
    program = CLASSIFIER
    fell = collections.Counter()
    cases = set()

    @classmethod
    def tearDownClass(cls):
        print("signals by what they fell into: %s" % dict(cls.fell))
        if STOPS >= MANY and len(cls.cases) == len(CASES):
            for each in (EVALUATION, SAVE):
                assert cls.fell[each] > 0, "no signal fell into: " + each

    def flag(self, name):
        """The number of the last flag of this name; 0: there is none."""
        found = [f.partition("=")[2] for f in self.program.flags + self.flags if f.startswith("--%s=" % name)]
        return int(found[-1]) if found else 0

    def start(self, *more):
        self.began = time.time()
        flags = [*self.program.flags, "--log_dir=" + self.log, "--log_every=1", *self.flags, *more]
        self.jobs.append(Job(self.folder, self.output, *flags, program=self.program.command))
        return self.jobs[-1]

    def last(self):
        form = "sharded" if "--checkpoint_format=sharded" in self.flags else "pt"
        return os.path.join(self.folder, "epoch_%d.%s" % (self.program.epochs, form))

    def records(self):
        path = os.path.join(self.log, "metrics.jsonl")
        if not os.path.exists(path):
            return []
        with open(path) as f:
            # The last line may be incomplete.
            return [json.loads(line) for line in f if line.endswith("\n")]

    def evaluations(self):
        return [(r["step"], tag, r[tag]) for r in self.records() for tag in ("val/loss", "test/loss") if tag in r]

    def wait_for_steps(self, job):
        """Until it has taken one, or has ended."""
        began = time.time()
        while not job.ended():
            if any("train/loss" in r and r["time"] > began for r in self.records()):
                return
            self.assertLess(time.time() - began, PATIENCE_S, job.text())
            time.sleep(0.001)

    def whole_run(self):
        began = time.monotonic()
        job = self.start()
        self.wait_for_steps(job)
        first = time.monotonic()
        self.assertEqual(job.process.wait(timeout=PATIENCE_S), 0, job.text())
        found = contents(self.last())
        if self.program is ADVERSARIES:
            self.assertEqual(job.text().count("rolled back to "), self.program.epochs, job.text())
            for kept in KEPT:
                self.assertTrue(any(kept in data for data in found.values()), kept)
        evaluations = self.evaluations()
        self.assertEqual(self.records()[-1]["reason"], "end")
        self.steps = self.last_step()
        shutil.rmtree(self.folder)
        shutil.rmtree(self.log)
        return found, evaluations, first - began, time.monotonic() - first

    def last_step(self):
        return max((r.get("step", 0) for r in self.records()), default=0)

    def of_this_job(self):
        return [r for r in self.records() if r["time"] > self.began]

    def fell_into(self, sent, step):
        """What the run was doing when a signal was sent, after which it stopped after `step`: a run
        acts on one before it begins anything else, so that what comes later had begun before."""
        records = self.of_this_job()
        if any(r.get("action") == "rollback" and r["time"] > sent for r in records):
            return ROLLBACK
        here = [r for r in records if r["step"] == step]
        trained = [r["time"] for r in here if "train/loss" in r]
        if not trained:
            return START
        if max(trained) > sent:
            return STEP
        ends_epoch = step % (self.steps // self.program.epochs) == 0
        every = self.flag("validate_every_steps")
        # An evaluation that was given up has left no record.
        evaluated = [r["time"] for r in here if "val/loss" in r or "test/loss" in r]
        if ends_epoch or (every and step % every == 0):
            if not evaluated or max(evaluated) > sent:
                return EVALUATION
        every = self.flag("checkpoint_every_steps")
        return SAVE if ends_epoch or (every and step % every == 0) else STEP

    def run_to_a_limit(self, steps, run_s):
        """Whether a stop of which the run knows from its start came before its end."""
        step = self.rng.randint(min(self.last_step() + 1, steps), steps)
        limits = {
            "stop_at_step": "--stop_at_step=%d" % step,
            "max_time": "--max_time=%.3f" % (0.05 + self.rng.random() * run_s / 2),
        }
        if self.program is ADVERSARIES:
            limits["callback"] = "--ask_at_step=%d" % step
        reason = self.rng.choice(sorted(limits))
        job = self.start(limits[reason])
        self.assertEqual(job.process.wait(timeout=PATIENCE_S), 0, job.text())
        stopped = re.search(r"^stopped by (\w+).* after step (\d+): saved (.*)$", job.text(), re.MULTILINE)
        print("  %s: %s" % (limits[reason], stopped.group(0) if stopped else "not before its end"))
        if not stopped:
            return False
        self.assertEqual(stopped.group(1), reason, job.text())
        self.assertTrue(os.path.exists(stopped.group(3)), job.text())
        last = self.records()[-1]
        self.assertEqual(
            (last["event"], last["reason"], last["saved"], last["step"]),
            ("run_end", reason, stopped.group(3), int(stopped.group(2))),
        )
        return True

    def run_and_stop(self, startup_s, run_s):
        """Whether the job was stopped before its end."""
        if self.rng.random() < 0.25:
            return self.run_to_a_limit(self.steps, run_s)
        number = self.rng.choice(SIGNALS)
        victim = self.rng.choice(VICTIMS)
        # Mostly within the run; sometimes while it starts.
        starts = self.rng.random() < 0.15
        job = self.start()
        if not starts:
            self.wait_for_steps(job)
        pids = job.pids_of(victim, self.rng)
        pause = self.rng.random() * (startup_s if starts else run_s / 3)
        time.sleep(pause)  # the signal's random time; nothing depends on it
        if starts:
            pids = job.pids_of(victim, self.rng)
        began, sent = time.monotonic(), time.time()
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        code = job.process.wait(timeout=PATIENCE_S)
        took = time.monotonic() - began
        what = "%s to %s after %.3f s%s" % (number.name, victim, pause, " of start" if starts else "")
        text = job.text()
        if code == 0:
            return False
        self.assertLess(took, STOP_S, what + "\n" + text)
        self.assertEqual(running(job.mark), [], what)
        stopped = re.search(r"^stopped by signal (\w+) after step (\d+): saved (.*)$", text, re.MULTILINE)
        self.assertIn(code, (128 + number, -number), what + "\n" + text)
        if not stopped:
            # Before the first step nothing is lost, and after the end nothing is left to save.
            records = self.of_this_job()
            is_over = any(r.get("reason") == "end" for r in records)
            if not is_over:
                self.assertEqual([r for r in records if "train/loss" in r], [], what + "\n" + text)
            into = END if is_over else START
        else:
            into = self.fell_into(sent, int(stopped.group(2)))
        self.fell[into] += 1
        print("  %s, %s: %s" % (what, into, stopped.group(0) if stopped else "by the signal"))
        if not stopped:
            return False
        self.assertEqual("SIG" + stopped.group(1), number.name, what)
        self.assertTrue(os.path.exists(stopped.group(3)), what + "\n" + text)
        self.assertNotIn("error", text, what)
        last = self.records()[-1]
        self.assertEqual(
            (last["event"], last["reason"], last["saved"], last["step"]),
            ("run_end", "signal " + stopped.group(1), stopped.group(3), int(stopped.group(2))),
        )
        return True

    def stopped_again_and_again(self, index):
        name, self.program, self.flags = CASES[index]
        self.cases.add(index)
        stops = STOPS // len(CASES) + (len(CASES) - index <= STOPS % len(CASES))
        self.rng = random.Random("%d %d" % (SEED, index))
        whole, evaluations, startup_s, run_s = self.whole_run()
        print("  %s: %d stops, seed %d" % (name, stops, SEED))
        stopped = 0
        while True:
            if stopped < stops:
                stopped += self.run_and_stop(startup_s, run_s)
            if stopped < stops and not os.path.exists(self.last()):
                continue
            job = self.start()
            self.assertEqual(job.process.wait(timeout=PATIENCE_S), 0, job.text())
            found = contents(self.last())
            self.assertEqual(sorted(found), sorted(whole))
            for file, data in whole.items():
                self.assertTrue(found[file] == data, "%s differs in %s" % (self.last(), file))
            # No evaluation was left out, or counted twice. A stop that is not urgent makes a further one.
            usual = {(step, tag) for step, tag, _ in evaluations}
            self.assertEqual([e for e in self.evaluations() if e[:2] in usual], evaluations)
            if stopped >= stops:
                return
            shutil.rmtree(self.folder)
            shutil.rmtree(self.log)

    def test_shm(self):
        self.stopped_again_and_again(0)

    def test_zero_1(self):
        self.stopped_again_and_again(1)

    def test_zero_2(self):
        self.stopped_again_and_again(2)

    def test_async(self):
        self.stopped_again_and_again(3)

    def test_rollback(self):
        self.stopped_again_and_again(4)

    def test_gan(self):
        self.stopped_again_and_again(5)

    def test_gan_zero_2(self):
        self.stopped_again_and_again(6)

    def test_shm_zero_1(self):
        self.stopped_again_and_again(7)

    def test_shm_zero_2(self):
        self.stopped_again_and_again(8)

    def test_gan_zero_1(self):
        self.stopped_again_and_again(9)

    def test_a_further_signal_ends_it_at_once(self):
        """And a relay of the first does not."""
        self.flags = ["--backend=gloo"]
        job = self.start()
        self.wait_for_steps(job)
        # So that its step takes long.
        for pid in job.pids_of("rank 1", random.Random(0)):
            os.kill(pid, signal.SIGSTOP)
        for _ in range(2):
            job.process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        time.sleep(1.1)
        self.assertFalse(job.ended(), job.text())
        began = time.monotonic()
        job.process.send_signal(signal.SIGTERM)
        self.assertEqual(job.process.wait(timeout=PATIENCE_S), 130, job.text())
        self.assertLess(time.monotonic() - began, STOP_S)
        self.assertIn("ranks 0, 1 got SIGKILL after a further signal 15", job.text())
        self.assertEqual(running(job.mark), [])

    def test_nothing_is_saved_without_a_folder(self):
        self.flags = []
        job = Job(None, self.output, *CLASSIFIER.flags, "--epochs=10000", "--log_dir=" + self.log)
        self.jobs.append(job)
        self.wait_for_steps(job)
        job.process.send_signal(signal.SIGINT)
        self.assertEqual(job.process.wait(timeout=PATIENCE_S), 130, job.text())
        self.assertRegex(job.text(), r"stopped by signal INT after step \d+: nothing was saved\n")


if __name__ == "__main__":
    xml_unittest.main()
