"""Training jobs of two ranks for the tests of this folder, and the processes of each."""

import fcntl
import glob
import os
import shutil
import signal
import subprocess
import tempfile
import unittest
import uuid

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
TRAIN = (os.path.join(RUNFILES, "tools/train"), "--model=mlp", "--dataset=synthetic")
GAN = (os.path.join(RUNFILES, "tests/resume/gan"),)
MARK = "DDP_JOB_MARK"
KEPT = 2  # checkpoints
# Far beyond what anything here takes.
PATIENCE_S = 120
# A shell starts what it runs in the background with SIGINT ignored, which jobs would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


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


def is_locked(folder):
    """Whether a process saves into this folder, or has been killed and has not closed its files
    yet: then it has no environment any more, and `running` misses it. A job that starts now leaves
    what looks like a save alone (docs/checkpoint.md, Guarantees)."""
    if not os.path.isdir(folder):
        return False
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


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
    """One process that launches two ranks, with its output in a file. `folder`: None, or that of its
    checkpoints, from the newest of which it goes on."""

    def __init__(self, folder, output, *flags, program=TRAIN):
        self.mark = uuid.uuid4().hex
        self.output = output
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("TEST_", "RUNFILES_"))
        }
        command = [
            *program, "--batch_size=16", "--nproc_per_node=2", "--launcher=local", *flags,
        ]  # fmt: skip
        if folder:
            command += ["--checkpoint_dir=" + folder, "--keep_last=%d" % KEPT, "--resume=auto"]
        with open(output, "wb") as out:
            self.process = subprocess.Popen(
                command, env={**environment, MARK: self.mark}, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def kill_all(self):
        for pid in running(self.mark):
            kill(pid)
        self.process.wait()

    def ended(self):
        return self.process.poll() is not None

    def text(self):
        with open(self.output, errors="replace") as f:
            return f.read()

    def pids_of(self, victim, rng):
        """`victim`: "all", "launcher" or "rank N"; a rank that is not there yet is the launcher."""
        if victim == "all":
            pids = running(self.mark)
            rng.shuffle(pids)
        elif victim == "launcher":
            pids = []
        else:
            pids = running(self.mark, victim.replace("rank ", "RANK=").encode())
        return pids or [self.process.pid]


class JobsTest(unittest.TestCase):
    """A folder for checkpoints and a file for output, anew for each test, and an end of its jobs."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ["TEST_TMPDIR"])
        self.addCleanup(scratch.cleanup)
        self.folder = os.path.join(scratch.name, "run")
        self.log = os.path.join(scratch.name, "log")
        self.output = os.path.join(scratch.name, "output.txt")
        self.jobs = []
        self.addCleanup(self.end_jobs)

    def end_jobs(self):
        for job in self.jobs:
            job.kill_all()
