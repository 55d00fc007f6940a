#!/usr/bin/env python3
"""Bad input to //tools:train: one clear message, a prompt non-zero exit, nothing left running,
nothing overwritten."""

import glob
import gzip
import os
import shutil
import signal
import socket
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
DATA = os.path.join(os.environ["TEST_SRCDIR"], "fashion_mnist/data/fashion")
# What is promised is 10 s on an idle machine; twice that, since tests share theirs.
SECONDS = float(os.environ.get("DDP_BAD_INPUT_SECONDS", "20"))
MARK = "DDP_BAD_INPUT_MARK"
# What a crash prints, and an error that was reported does not.
CRASH = ("terminate called", "what():", "Exception raised from", "Check failed", "*** SIG", "frame #")


def running(mark, with_variable=b""):
    """Process ids of the processes that carry this mark in their environment."""
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as f:
                variables = f.read().split(b"\0")
            if ("%s=%s" % (MARK, mark)).encode() in variables:
                if any(v.startswith(with_variable) for v in variables):
                    found.append(int(path.split("/")[2]))
        except OSError:
            pass  # it has ended meanwhile
    return found


def contents(folder):
    """Every file of a tree with its bytes."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as f:
                found[os.path.relpath(os.path.join(parent, name), folder)] = f.read()
    return found


class BadInputTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ["TEST_TMPDIR"])
        self.addCleanup(scratch.cleanup)
        self.scratch = scratch.name
        self.kept = os.path.join(self.scratch, "kept")
        self.log = os.path.join(self.kept, "log")
        self.checkpoints = os.path.join(self.kept, "checkpoint")
        for folder in (self.log, self.checkpoints):
            os.makedirs(folder)
            with open(os.path.join(folder, "from_before"), "w") as f:
                f.write("precious")
        self.mark = uuid.uuid4().hex

    def environment(self, **variables):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TEST_", "RUNFILES_"))}
        return {**kept, MARK: self.mark, **variables}

    def command(self, *flags):
        """A run that would take long if nothing stopped it; later flags win."""
        return [
            TRAIN, "--model=mlp", "--dataset=synthetic", "--nproc_per_node=2", "--epochs=1000000",
            "--checkpoint_every=1000000", "--log_dir=" + self.log,
            "--checkpoint_dir=" + self.checkpoints, *flags,
        ]  # fmt: skip

    def start(self, *flags, **variables):
        return subprocess.Popen(
            self.command(*flags), env=self.environment(**variables), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def finish(self, process, began):
        """Waits for the end of a run that must fail; returns its exit status and output."""
        try:
            output, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            for pid in running(self.mark):
                os.kill(pid, signal.SIGKILL)
            output, _ = process.communicate()
            self.fail("did not end within 60 s:\n" + output)
        elapsed = time.monotonic() - began
        print("  %.1f s: %s" % (elapsed, (output.strip().splitlines() or ["(nothing)"])[-1][:160]))
        self.assertNotEqual(process.returncode, 0, output)
        self.assertLess(elapsed, SECONDS, output)
        self.assertEqual(running(self.mark), [], "left running")
        return process.returncode, output

    def assert_refused(self, flags, words, **variables):
        """The run fails; one line has all the words; nothing that was there is lost."""
        before = contents(self.kept)
        began = time.monotonic()
        _, output = self.finish(self.start(*flags, **variables), began)
        matching = [line for line in output.splitlines() if all(w in line for w in words)]
        self.assertEqual(len(matching), 1, "want one line with %s in:\n%s" % (words, output))
        for crash in CRASH:
            self.assertNotIn(crash, output)
        after = contents(self.kept)
        for path, text in before.items():
            # A run may have added to the logs of the one before it.
            self.assertTrue(after.get(path, b"").startswith(text), path + " was overwritten")

    def test_unknown_names_list_what_exists(self):
        for flag, known in (
            ("--model=transformr", ["transformr", "cnn", "mlp"]),
            ("--dataset=imagenet", ["imagenet", "fashion_mnist", "synthetic"]),
            ("--backend=infiniband", ["infiniband", "gloo", "nccl"]),
            ("--backend=nccl", ["nccl", "CPU build", "--config=cuda"]),
            ("--backend=cpu:nccl", ["cpu:nccl", "nccl serves cuda tensors, not cpu"]),
            ("--device=gpu", ["--device", "gpu", "cpu", "cuda"]),
            ("--launcher=yarn", ["yarn", "local", "mpi", "slurm", "torchrun"]),
            ("--checkpoint_format=hdf5", ["hdf5", "pt"]),
            ("--optimizer=lion", ["lion", "adam", "adamw", "sgd"]),
            ("--schedule=sometimes", ["sometimes", "constant", "cosine", "step"]),
        ):
            with self.subTest(flag=flag):
                self.assert_refused([flag], known)

    def test_numbers_that_cannot_be(self):
        for flag in (
            "--nproc_per_node=0", "--nproc_per_node=-1", "--nproc_per_node=abc", "--batch_size=0",
            "--batch_size=-4", "--epochs=-1", "--step_epochs=0", "--bucket_cap_mb=-1", "--accumulate=0", "--timeout_s=0", "--stall_s=-1", "--lr=-1",
            "--shm_segment_mb=0",
        ):  # fmt: skip
            with self.subTest(flag=flag):
                name, value = flag.lstrip("-").split("=")
                self.assert_refused([flag], [name, value])

    def test_unknown_flag_suggests(self):
        self.assert_refused(["--batchsize=64"], ["batchsize", "batch_size"])

    def test_word_that_is_no_flag(self):
        self.assert_refused(["resume"], ["resume"])

    def test_missing_data(self):
        empty = os.path.join(self.scratch, "empty")
        os.makedirs(empty)
        self.assert_refused(
            ["--dataset=fashion_mnist", "--data_dir=" + empty], [empty, "-images-idx3-ubyte"]
        )
        nowhere = os.path.join(self.scratch, "nowhere")
        self.assert_refused(["--dataset=fashion_mnist", "--data_dir=" + nowhere], [nowhere])

    def test_truncated_data(self):
        damaged = os.path.join(self.scratch, "damaged")
        os.makedirs(damaged)
        for path in glob.glob(DATA + "/*.gz"):
            shutil.copy(path, damaged)
        name = "train-images-idx3-ubyte"
        path = os.path.join(damaged, name + ".gz")
        flags = ["--dataset=fashion_mnist", "--data_dir=" + damaged]

        with open(path, "rb") as f:
            whole = f.read()
        with open(path, "wb") as f:
            f.write(whole[: len(whole) // 2])
        self.assert_refused(flags, [name])

        # A sound gzip file of an idx file that ends too early.
        with gzip.open(path, "wb", compresslevel=1) as f:
            f.write(gzip.decompress(whole)[:100000])
        self.assert_refused(flags, [name])

    def test_folder_that_cannot_be_written(self):
        # Below a file: the one place where root can't write either.
        path = os.path.join(self.log, "from_before")
        for flag in ("--log_dir", "--checkpoint_dir"):
            self.assert_refused(["%s=%s/folder" % (flag, path)], [path, "Not a directory"])

    def test_disk_full(self):
        """A real file system of 256 KiB, mounted in a namespace of its own."""
        full = os.path.join(self.scratch, "full")
        os.makedirs(full)
        inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
        mount = 'mount -t tmpfs -o size=256k none "$0"'
        if subprocess.run(inside + [mount, full], capture_output=True).returncode != 0:
            self.skipTest("this system lets no user mount a tmpfs in a namespace of his own")
        began = time.monotonic()
        # ls shows what is left in the small file system: nothing that looks complete.
        script = mount + ' && mkdir "$0/c" && { "$@"; status=$?; ls -A "$0/c"; exit $status; }'
        flags = ["--epochs=3", "--train_size=256", "--test_size=64", "--checkpoint_every=1"]
        flags.append("--checkpoint_dir=%s/c" % full)
        process = subprocess.Popen(
            inside + [script, full] + self.command(*flags), env=self.environment(),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        _, output = self.finish(process, began)
        self.assertIn("No space left on device", output)
        self.assertIn(full, output)
        self.assertNotRegex(output.splitlines()[-1], r"\.pt$")

    def wait_for_ranks(self, process, count):
        """Process ids of the ranks, in order, once rank 0 writes its logs."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            ranks = sorted(running(self.mark, with_variable=b"RANK="))
            if len(ranks) == count and contents(self.log).keys() - {"from_before"}:
                return ranks
            time.sleep(0.05)
        process.kill()
        self.fail("the ranks did not start:\n" + process.communicate()[0])

    def test_a_rank_throws(self):
        began = time.monotonic()
        process = subprocess.Popen(
            [os.path.join(RUNFILES, "tests/bad_input/throwing_rank")], env=self.environment(),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        _, output = self.finish(process, began)
        said = [line for line in output.splitlines() if "the simulator exploded" in line]
        self.assertEqual(len(said), 1, output)
        self.assertIn("rank 1", output)
        self.assertNotIn("terminate called", output)

    def test_a_rank_is_killed(self):
        process = self.start()
        ranks = self.wait_for_ranks(process, 2)
        began = time.monotonic()
        os.kill(ranks[-1], signal.SIGKILL)
        _, output = self.finish(process, began)
        self.assertRegex(output, r"rank \d .*signal 9")

    def test_signals_to_the_parent(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=number):
                shutil.rmtree(self.log)
                os.makedirs(self.log)
                process = self.start()
                self.wait_for_ranks(process, 2)
                began = time.monotonic()
                process.send_signal(number)
                status, output = self.finish(process, began)
                self.assertIn(status, (128 + number, -number), output)

    def test_parent_is_killed(self):
        process = self.start()
        self.wait_for_ranks(process, 2)
        process.kill()
        process.wait()
        deadline = time.monotonic() + SECONDS
        while running(self.mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual(running(self.mark), [], "left running")
        process.communicate()

    def rank_variables(self, **changes):
        variables = dict(
            RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1", MASTER_PORT="29400",
        )  # fmt: skip
        variables.update(changes)
        return {k: v for k, v in variables.items() if v is not None}

    def test_world_size_that_disagrees_with_the_environment(self):
        self.assert_refused(
            ["--nproc_per_node=3"], ["3", "LOCAL_WORLD_SIZE=2"], **self.rank_variables()
        )
        self.assert_refused([], ["RANK=2", "WORLD_SIZE=2"], **self.rank_variables(RANK="2"))

    def test_half_set_environment(self):
        self.assert_refused([], ["WORLD_SIZE"], **self.rank_variables(WORLD_SIZE=None))

    def test_taken_port(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            self.assert_refused([], ["error:", port], **self.rank_variables(MASTER_PORT=port))

    def test_resume_from_what_is_no_checkpoint(self):
        path = os.path.join(self.checkpoints, "from_before")
        self.assert_refused(["--resume=" + path], [path])
        self.assert_refused(["--resume=" + path + ".gone"], [path + ".gone"])


if __name__ == "__main__":
    xml_unittest.main()
