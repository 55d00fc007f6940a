#!/usr/bin/env python3
"""Bad input to //tools:train: one clear message, a prompt non-zero exit, nothing left running,
nothing overwritten.

Every run here resumes from the checkpoint of an earlier run. However it ends,
the files of the earlier run must be unchanged, and every other file with the
name of a checkpoint must be complete.
"""

import contextlib
import glob
import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import uuid
import zipfile

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")

import xml_unittest  # noqa: E402

TRAIN = os.path.join(RUNFILES, "tools/train")
DATA = os.path.abspath(os.path.dirname(os.environ["FASHION_MNIST"].split()[0]))
# What is promised on an idle machine.
SECONDS = float(os.environ.get("DDP_BAD_INPUT_SECONDS", "10"))
# Prints how many times its CPU time a computation takes. See measured_load().
SPIN = """
import time
wall, cpu = time.monotonic(), time.process_time()
while time.process_time() - cpu < 0.25:
    pass
print((time.monotonic() - wall) / 0.25)
"""
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
    """Every file of a tree with its bytes, but the owner's name, which each run replaces."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            if name == ".job":
                continue
            with open(os.path.join(parent, name), "rb") as f:
                found[os.path.relpath(os.path.join(parent, name), folder)] = f.read()
    return found


def command(folder, *flags):
    """A run that goes on from what is in `folder`, and would take long; later flags win."""
    return [
        TRAIN, "--model=mlp", "--dataset=synthetic", "--train_size=256", "--test_size=64",
        "--nproc_per_node=2", "--epochs=1000000", "--checkpoint_every=1000000",
        "--log_dir=%s/log" % folder, "--checkpoint_dir=%s/checkpoint" % folder, "--resume=auto",
        *flags,
    ]  # fmt: skip


def clean_environment():
    return {k: v for k, v in os.environ.items() if not k.startswith(("TEST_", "RUNFILES_"))}


def run_of_good_input(folder):
    """One epoch of two ranks; returns its seconds."""
    began = time.monotonic()
    done = subprocess.run(
        command(folder, "--epochs=1"), env=clean_environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError("good input fails:\n" + done.stdout)
    return time.monotonic() - began


def measured_load():
    """How many times longer than on an idle machine two processes compute now; 1 on an idle one."""
    count = min(2, len(os.sched_getaffinity(0)))
    spins = [
        subprocess.Popen([sys.executable, "-I", "-c", SPIN], stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    load = max(float(spin.communicate()[0]) for spin in spins)
    return load if load > 1.2 else 1.0  # less is noise


class BadInputTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        earlier = tempfile.TemporaryDirectory(dir=os.environ["TEST_TMPDIR"])
        cls.addClassCleanup(earlier.cleanup)
        cls.earlier = earlier.name
        seconds = run_of_good_input(cls.earlier)
        cls.load = measured_load()
        print("  good input: %.1f s; load: %.1f" % (seconds, cls.load))

    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ["TEST_TMPDIR"])
        self.addCleanup(scratch.cleanup)
        self.scratch = scratch.name
        self.kept = os.path.join(self.scratch, "kept")
        self.log = os.path.join(self.kept, "log")
        self.checkpoints = os.path.join(self.kept, "checkpoint")
        self.start_from_the_earlier_run()
        self.assertIn("checkpoint/epoch_1.pt", self.before)
        self.assertIn("log/metrics.jsonl", self.before)
        self.mark = uuid.uuid4().hex

    def start_from_the_earlier_run(self):
        shutil.rmtree(self.kept, ignore_errors=True)
        shutil.copytree(self.earlier, self.kept)
        self.before = contents(self.kept)

    def environment(self, **variables):
        return {**clean_environment(), MARK: self.mark, **variables}

    def command(self, *flags):
        return command(self.kept, *flags)

    def limit(self):
        """Seconds that the run of bad input may take: SECONDS, and on a machine that other
        processes load as many times that. How long good input takes does not matter."""
        return SECONDS * self.load

    def assert_prompt(self, elapsed, output):
        if elapsed >= self.limit():
            # The load may have come only now.
            type(self).load = max(self.load, measured_load())
        self.assertLess(elapsed, self.limit(), output)

    def assert_nothing_lost(self):
        after = contents(self.kept)
        for path, data in self.before.items():
            if path == "log/run.yaml":
                # It is of the last process of the run.
                self.assertIn(path, after)
            elif path.startswith("log/"):
                # A run adds to the logs of the one before it.
                self.assertTrue(after.get(path, b"").startswith(data), path + " was overwritten")
            else:
                self.assertEqual(after.get(path), data, path + " was overwritten")
        self.assert_complete(self.checkpoints)

    def assert_complete(self, folder):
        """Returns the checkpoints of a folder, each of which can be read from end to end."""
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
        for name in names:
            self.assertRegex(name, r"^epoch_\d+(_step_\d+)?\.pt$")
            with zipfile.ZipFile(os.path.join(folder, name)) as archive:
                self.assertIsNone(archive.testzip(), name)  # every CRC
        return sorted(names)

    def start(self, *flags, limit="true", **variables):
        """`limit`: a command of the shell that starts the run."""
        return subprocess.Popen(
            ["sh", "-c", limit + '; exec "$@"', "sh", *self.command(*flags)],
            env=self.environment(**variables), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def finish(self, process, began):
        """Waits for the end of a run that must fail; returns its exit status and output."""
        longest = 6 * self.limit()
        try:
            output, _ = process.communicate(timeout=longest)
        except subprocess.TimeoutExpired:
            for pid in running(self.mark):
                os.kill(pid, signal.SIGKILL)
            output, _ = process.communicate()
            self.fail("did not end within %.0f s:\n%s" % (longest, output))
        elapsed = time.monotonic() - began
        print("  %.1f s: %s" % (elapsed, (output.strip().splitlines() or ["(nothing)"])[-1][:160]))
        self.assertNotEqual(process.returncode, 0, output)
        self.assertEqual(running(self.mark), [], "left running")
        self.assert_nothing_lost()
        self.assert_prompt(elapsed, output)
        return process.returncode, output

    def assert_refused(self, flags, words, **variables):
        """The run fails, and one line has all the words. Returns its exit status."""
        began = time.monotonic()
        status, output = self.finish(self.start(*flags, **variables), began)
        matching = [line for line in output.splitlines() if all(w in line for w in words)]
        self.assertEqual(len(matching), 1, "want one line with %s in:\n%s" % (words, output))
        for crash in CRASH:
            self.assertNotIn(crash, output)
        return status

    def test_unknown_names_list_what_exists(self):
        for flag, known in (
            ("--model=transformr", ["cnn", "mlp"]),
            ("--dataset=imagenet", ["fashion_mnist", "synthetic"]),
            ("--backend=infiniband", ["gloo", "nccl"]),
            ("--backend=nccl", ["CPU build", "--config=cuda"]),
            ("--backend=cpu:nccl", ["nccl serves cuda tensors, not cpu"]),
            ("--device=gpu", ["auto, cpu, cuda, cuda:N"]),
            ("--device=cuda:x", ["auto, cpu, cuda, cuda:N"]),
            ("--device=cuda:-1", ["auto, cpu, cuda, cuda:N"]),
            ("--launcher=yarn", ["local", "mpi", "slurm", "torchrun"]),
            ("--checkpoint_format=hdf5", ["pt"]),
            ("--checkpoint_format=dcp", ["only one to read", "ckpt convert"]),
            ("--optimizer=lion", ["adam", "adamw", "sgd"]),
            ("--schedule=sometimes", ["constant", "cosine", "step"]),
        ):
            with self.subTest(flag=flag):
                self.assertEqual(self.assert_refused([flag], ["error: %s is no" % flag, *known]), 2)

    def test_numbers_that_cannot_be(self):
        for flag in (
            "--nproc_per_node=0", "--nproc_per_node=-1", "--nproc_per_node=abc", "--batch_size=0",
            "--batch_size=-4", "--epochs=-1", "--step_epochs=0", "--bucket_cap_mb=-1", "--accumulate=0", "--timeout_s=0", "--stall_s=-1", "--lr=-1",
            "--shm_segment_mb=0",
        ):  # fmt: skip
            with self.subTest(flag=flag):
                problem = "is not a whole number" if flag.endswith("abc") else "must be "
                self.assertEqual(self.assert_refused([flag], ["error: %s %s" % (flag, problem)]), 2)

    def test_an_option_is_named_as_it_was_written(self):
        for flag in ("--lr=-1", "--optimizer.lr=-1", "--optimizer_lr=-1", "optimizer.lr=-1"):
            with self.subTest(flag=flag):
                self.assertEqual(self.assert_refused([flag], ["error: %s must be at least 0" % flag]), 2)

    def test_options_that_would_have_no_effect_or_exclude_each_other(self):
        for flags, refused, words in (
            (["--optimizer=lbfgs"], "--optimizer=lbfgs", ["by a closure", "adamw"]),
            (["--optimizer=adam", "--momentum=0.5"], "--momentum=0.5", ["no option of adam", "betas"]),
            (["--betas=0.5,0.9"], "--betas=[0.5, 0.9]", ["no option of sgd", "momentum"]),
            (["--groups=bias"], "--groups=bias", ["PATTERN:KEY=VALUE"]),
            (["--groups=bias:decay=0"], "--groups=bias:decay=0", ["'decay'", "weight_decay"]),
            (["--clip_norm=1", "--clip_value=2"], "--clip_value=2", ["clip_norm=1"]),
            (["--clip_norm=1", "--clip_norm_type=l2"], "--clip_norm_type=l2", ["inf"]),
            (["--warmup_steps=1", "--warmup_epochs=2"], "--warmup_epochs=2", ["warmup_steps"]),
            (["--schedule=multistep"], "--milestones=[]", ["epochs"]),
            (["--power=2"], "--power=2", ["no option of cosine", "min_factor"]),
            (["--plateau_patience=3"], "--plateau_patience=3", ["no option of cosine"]),
        ):
            with self.subTest(flags=flags):
                self.assertEqual(self.assert_refused(flags, ["error: " + refused, *words]), 2)

    def test_unknown_flag_suggests(self):
        self.assertEqual(self.assert_refused(["--batchsize=64"], ["batchsize", "batch_size"]), 2)

    def test_word_that_is_no_flag(self):
        self.assertEqual(self.assert_refused(["resume"], ["resume"]), 2)

    def test_missing_data(self):
        empty = os.path.join(self.scratch, "empty")
        os.makedirs(empty)
        self.assert_refused(
            ["--dataset=fashion_mnist", "--data_dir=" + empty],
            ["--data_dir=" + empty, "-images-idx3-ubyte"],
        )
        self.assert_refused(
            ["--dataset=fashion_mnist", "--data_dir=" + DATA, "--test_size=10001"],
            ["--test_size=10001 must be from 0 (all) to 10000"],
        )
        nowhere = os.path.join(self.scratch, "nowhere")
        for dataset in ("fashion_mnist", "csv", "images", "tensors", "text"):
            with self.subTest(dataset):
                flags = ["--dataset=" + dataset, "--data_dir=" + nowhere]
                status = self.assert_refused(flags, ["--data_dir=" + nowhere])
                self.assertEqual(status, 2)

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
        path = os.path.join(self.log, "metrics.jsonl")
        for option in ("--log_dir", "--checkpoint_dir", "--predictions"):
            flag = "%s=%s/folder" % (option, path)
            self.assert_refused([flag], [flag + " cannot be ", "Not a directory"])
        flags = ["--local_log_dir=%s/folder" % path]
        self.assertEqual(self.assert_refused(flags, [*flags, "Not a directory"]), 2)
        # Nor is there another line about it, of the ranks' agreement.
        self.assert_refused(["--checkpoint_dir=%s/folder" % path], ["Not a directory"])

    @contextlib.contextmanager
    def full_disk(self, size):
        """Yields a folder and a function that runs a command where that folder is a real file
        system with the earlier run's logs and `size` bytes more, and afterwards prints the digests
        of its checkpoints, and which logs still begin as they were."""
        pages = sum(-(-len(data) // 4096) for path, data in self.before.items() if path.startswith("log/"))
        size += 4096 * pages
        full = os.path.join(self.scratch, "full")
        os.makedirs(full)
        inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
        mount = 'mount -t tmpfs -o size=%s none "$0"' % size
        if subprocess.run(inside + [mount, full], capture_output=True).returncode != 0:
            self.skipTest("this system lets no user mount a tmpfs in a namespace of his own")
        script = mount + """ || exit
            cp -r "$1/checkpoint" "$1/log" "$0" || exit
            earlier=$1
            shift
            "$@"
            status=$?
            cd "$0/checkpoint" && ls -A --ignore=.job | xargs sha256sum
            for log in "$earlier"/log/*; do
              head -c "$(stat -c %s "$log")" "$0/log/${log##*/}" | cmp - "$log" && echo "kept log/${log##*/}"
            done
            exit $status"""

        def start(*flags):
            return subprocess.Popen(
                inside + [script, full, self.earlier] + command(full, *flags),
                env=self.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip

        yield full, start

    def assert_only_what_was_there(self, output):
        listed = re.findall(r"^[0-9a-f]{64}  .*$", output, re.MULTILINE)
        expected = [
            "%s  %s" % (hashlib.sha256(data).hexdigest(), os.path.basename(path))
            for path, data in self.before.items()
            if path.startswith("checkpoint/")
        ]
        self.assertEqual(sorted(listed), sorted(expected), output)
        kept = re.findall(r"^kept (log/.*)$", output, re.MULTILINE)
        self.assertEqual(kept, sorted(path for path in self.before if path.startswith("log/")), output)

    def test_disk_full_of_checkpoints(self):
        size = int(1.5 * len(self.before["checkpoint/epoch_1.pt"]))
        with self.full_disk(size) as (full, start):
            began = time.monotonic()
            process = start("--checkpoint_every=1", "--log_dir=" + self.log)
            _, output = self.finish(process, began)
            self.assertIn("No space left on device", output)
            self.assertIn(full + "/checkpoint", output)
            self.assert_only_what_was_there(output)

    def test_disk_full_of_logs(self):
        size = 28 * 1024 + len(self.before["checkpoint/epoch_1.pt"])
        with self.full_disk(size) as (full, start):
            began = time.monotonic()
            process = start("--log_every=1")
            _, output = self.finish(process, began)
            self.assertIn("No space left on device", output)
            self.assertIn(full + "/log", output)
            self.assert_only_what_was_there(output)

    def wait_for(self, what, process, found):
        """What `found` returns once it is true; the run must not end before."""
        deadline = time.monotonic() + 6 * self.limit()
        while time.monotonic() < deadline and process.poll() is None:
            value = found()
            if value:
                return value
        process.kill()
        self.fail("%s: never\n%s" % (what, process.communicate()[0]))

    def wait_for_ranks(self, process, count):
        """Process ids of the ranks, in order, once rank 0 adds to the logs."""

        def working():
            # Reading /proc in a loop is work enough to slow the ranks down.
            time.sleep(0.02)
            ranks = sorted(running(self.mark, with_variable=b"RANK="))
            with open(os.path.join(self.log, "metrics.jsonl"), "rb") as f:
                added = f.read() != self.before["log/metrics.jsonl"]
            return ranks if added and len(ranks) == count else None

        return self.wait_for("training", process, working)

    def wait_for_save(self, process):
        """Returns while rank 0 writes a checkpoint, having written some."""

        def saving():
            names = os.listdir(self.checkpoints)
            complete = [name for name in names if re.fullmatch(r"epoch_\d+\.pt", name)]
            return len(complete) >= 3 and any(".tmp" in name for name in names)

        self.wait_for("saving a checkpoint", process, saving)

    def test_a_rank_throws(self):
        began = time.monotonic()
        process = subprocess.Popen(
            [os.path.join(RUNFILES, "tests/bad_input/throwing_rank"), self.log, self.checkpoints],
            env=self.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        _, output = self.finish(process, began)
        said = [line for line in output.splitlines() if "the simulator exploded" in line]
        self.assertEqual(len(said), 1, output)
        self.assertIn("rank 1", output)
        self.assertNotIn("terminate called", output)
        # It threw in the epoch after this one.
        self.assertEqual(self.assert_complete(self.checkpoints), ["epoch_1.pt", "epoch_2.pt"])

    def test_a_rank_is_killed(self):
        for victim in (0, 1):
            with self.subTest(rank=victim):
                self.start_from_the_earlier_run()
                process = self.start("--checkpoint_every=1")
                ranks = self.wait_for_ranks(process, 2)
                self.wait_for_save(process)
                began = time.monotonic()
                os.kill(ranks[victim], signal.SIGKILL)
                status, output = self.finish(process, began)
                self.assertEqual(status, 128 + signal.SIGKILL, output)
                self.assertRegex(output, r"rank %d .*signal 9" % victim)

    def test_signals_to_the_parent(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=number):
                self.start_from_the_earlier_run()
                process = self.start("--checkpoint_every=1")
                self.wait_for_ranks(process, 2)
                self.wait_for_save(process)
                began = time.monotonic()
                process.send_signal(number)
                status, output = self.finish(process, began)
                self.assertIn(status, (128 + number, -number), output)

    def test_signals_to_process_1_of_a_container(self):
        container = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
        if subprocess.run(container + ["true"], capture_output=True).returncode != 0:
            self.skipTest("this system lets no user make a process id namespace")

        def first():
            for pid in running(self.mark):
                with open("/proc/%d/status" % pid) as f:
                    if re.search(r"^NSpid:.*\t1$", f.read(), re.MULTILINE):
                        return pid
            return None

        alone = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        for flags, variables, number in (
            (["--nproc_per_node=1"], {}, signal.SIGTERM),
            (["--nproc_per_node=1"], {}, signal.SIGINT),
            (["--nproc_per_node=auto"], alone, signal.SIGTERM),
            (["--nproc_per_node=auto"], alone, signal.SIGINT),
        ):
            with self.subTest(variables=variables, signal=number):
                self.start_from_the_earlier_run()
                process = subprocess.Popen(
                    container + self.command(*flags), env=self.environment(**variables),
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    text=True,
                )  # fmt: skip

                def working():
                    time.sleep(0.02)
                    with open(os.path.join(self.log, "metrics.jsonl"), "rb") as f:
                        return f.read() != self.before["log/metrics.jsonl"]

                self.wait_for("training", process, working)
                began = time.monotonic()
                os.kill(first(), number)
                status, output = self.finish(process, began)
                self.assertEqual(status, 128 + number, output)

    def test_closed_standard_streams(self):
        """Descriptors 0 to 2 are not those of the files that a rank writes."""
        alone = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        for variables, closed in (({}, "2>&-"), (alone, ">&-"), (alone, "2>&-"), (alone, "<&- >&- 2>&-")):
            with self.subTest(variables=variables, closed=closed):
                folder = tempfile.mkdtemp(dir=self.scratch)
                nproc = "auto" if variables else 1
                flags = ["--epochs=1", "--log_every=1", "--nproc_per_node=%s" % nproc]
                done = subprocess.run(
                    ["sh", "-c", 'exec "$@" ' + closed, "sh", *command(folder, *flags)],
                    env=self.environment(**variables), stdin=subprocess.DEVNULL, capture_output=True,
                    text=True,
                )  # fmt: skip
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                files = contents(folder)
                for line in files["log/metrics.jsonl"].decode().splitlines():
                    json.loads(line)
                for name, data in files.items():
                    for printed in (b"epoch 1/1 step", b"launcher local: ", b"test accuracy"):
                        self.assertNotIn(printed, data, name)

    def test_a_run_outlives_the_reader_of_its_output(self):
        """As behind `| head -n 1`: also before the first step, and when the last line is printed."""
        for nproc, merged in ((1, "2>&1"), (2, "2>&1"), (2, "")):
            with self.subTest(nproc=nproc, merged=merged):
                folder = tempfile.mkdtemp(dir=self.scratch)
                flags = ["--epochs=1", "--nproc_per_node=%d" % nproc]
                script = '{ "$@" %s; echo $? >"$0"; } | true' % merged
                code = os.path.join(self.scratch, "code")
                done = subprocess.run(
                    ["sh", "-c", script, code, *command(folder, *flags)], env=self.environment(),
                    stdin=subprocess.DEVNULL, capture_output=True, text=True,
                )  # fmt: skip
                with open(code) as f:
                    self.assertEqual(f.read(), "0\n", done.stdout + done.stderr)
                self.assertTrue(os.path.exists(folder + "/checkpoint/epoch_1.pt"), os.listdir(folder))

    def test_limits_of_the_shell(self):
        """Where the program may open too few files, or write too large ones, it says so at once."""
        for limit, flags, words in (
            ("ulimit -n 22", [], ["error: rank 0: ", "`ulimit -n`", "as rank 0 of 2", "raise the limit"]),
            ("ulimit -n 8", [], ["Too many open files"]),
            ("ulimit -f 64", ["--backend=gloo", "--checkpoint_every=1"],
             ["error: ", "checkpoint", "`ulimit -f`", "File too large"]),
        ):  # fmt: skip
            with self.subTest(limit=limit):
                self.assert_refused(flags, words, limit=limit)

    def test_files_in_folders_that_the_run_makes(self):
        folder = os.path.join(self.scratch, "new")
        written = [folder + "/log/predictions.jsonl", folder + "/bench/steps.json"]
        done = subprocess.run(
            command(folder, "--epochs=1", "--predictions=" + written[0], "--bench_json=" + written[1]),
            env=self.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout)
        for path in written:
            self.assertTrue(os.path.isfile(path), path)
        self.assert_refused(["--predictions=" + self.log + "/p/"], ["cannot be written: it is a folder"])
        self.assert_refused(
            ["--bench_json=" + self.log + "/metrics.jsonl/b.json"],
            ["--bench_json=", " cannot be written: ", "Not a directory"],
        )

    def test_parent_is_killed(self):
        process = self.start("--checkpoint_every=1")
        self.wait_for_ranks(process, 2)
        self.wait_for_save(process)
        began = time.monotonic()
        process.kill()
        process.wait()
        while running(self.mark) and time.monotonic() < began + 6 * self.limit():
            time.sleep(0.05)
        self.assertEqual(running(self.mark), [], "left running")
        self.assert_prompt(time.monotonic() - began, "")
        self.assert_nothing_lost()
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

    def test_master_address_that_is_none(self):
        for name, value, problem in (
            ("MASTER_ADDR", "[::1]", "has brackets"),
            ("MASTER_ADDR", "tcp://127.0.0.1", "has a scheme"),
            ("MASTER_ADDR", "127.0.0.1:29400", "has a port"),
            ("MASTER_ADDR", " 127.0.0.1", "has white space"),
            ("MASTER_ADDR", "127.0.0.1.1", "is no IPv4 address"),
            ("MASTER_ADDR", "127.0.0.1.", "has a dot behind its last number"),
            ("MASTER_ADDR", "10.0.0", "has fewer than four numbers, and is read as 10.0.0.0"),
            ("MASTER_ADDR", "fe80::1%nosuch0", "names interface nosuch0, which this machine lacks"),
            ("MASTER_PORT", "29400x", "is not an integer in [0, 65535]"),
            ("MASTER_PORT", "70000", "is not an integer in [0, 65535]"),
            ("MASTER_PORT", "-1", "is not an integer in [0, 65535]"),
        ):  # fmt: skip
            with self.subTest(name + "=" + value):
                status = self.assert_refused(
                    [], ["%s='%s' %s" % (name, value, problem)], **self.rank_variables(**{name: value})
                )
                self.assertEqual(status, 2)
        status = self.assert_refused(["--local_master_addr=[::1]"], ["--local_master_addr=[::1] has brackets"])
        self.assertEqual(status, 2)

    def test_master_address_that_does_not_resolve(self):
        began = time.monotonic()
        process = self.start("--join_timeout_s=3", "--nproc_per_node=auto", **self.rank_variables(
            RANK="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="no-such-host.invalid"))  # fmt: skip
        _, output = self.finish(process, began)
        self.assertRegex(output, r"(?m)^rank 1: MASTER_ADDR=no-such-host.invalid does not resolve yet \(")
        self.assertRegex(output, r"(?m)^error: rank 1: Timed out after 3s: rank 1 could not reach rank 0's "
                         r"rendezvous store at no-such-host.invalid:29400: the name ")  # fmt: skip
        for words in CRASH + ("c10d",):
            self.assertNotIn(words, output)

    def test_taken_port(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            self.assert_refused([], ["error:", port], **self.rank_variables(MASTER_PORT=port))

    def test_resume_from_what_is_no_checkpoint(self):
        path = os.path.join(self.log, "metrics.jsonl")
        for flag in ("--resume=" + path, "--resume=" + path + ".gone"):
            self.assertEqual(self.assert_refused([flag], [flag + " cannot be resumed from: "]), 2)

    def test_weights_from_what_is_no_checkpoint(self):
        path = os.path.join(self.log, "metrics.jsonl")
        new = ["--resume=", "--checkpoint_dir=", "--checkpoint_every=1", "--log_dir="]
        for place in (path, path + ".gone", self.log):
            flag = "--init_from=" + place
            with self.subTest(flag=flag):
                self.assert_refused([*new, flag], [flag + " cannot be taken: "])
        self.assert_refused([*new, "--init_from=" + path], ["metrics.jsonl is text, perhaps JSON"])
        self.assert_refused(
            [*new, "--init_from=" + self.checkpoints],
            ["is a folder", "name a checkpoint in it, such as " + os.path.join(self.checkpoints, "epoch_")],
        )

    def test_another_data_set_within_an_epoch(self):
        own = ["--checkpoint_dir=" + os.path.join(self.scratch, "own"), "--log_dir=", "--train_size=640",
               "--test_size=64"]  # fmt: skip
        run = lambda *flags: subprocess.run(  # noqa: E731
            self.command(*own, *flags), env=self.environment(), capture_output=True, text=True)
        images = ["--dataset=fashion_mnist", "--data_dir=" + DATA]
        done = run(*images, "--stop_at_step=2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assert_refused([*own, "--dataset=synthetic"],
                            ["the training set has other contents", "its fingerprint is none, not "])  # fmt: skip
        # What may be another way is said.
        done = run(*images, "--stop_at_step=4", "--batch_size=16", "--precision=bf16")
        self.assertEqual(done.returncode, 0, done.stderr)
        for words in ("resumed with batch_size 16, saved ", "resumed with precision bf16, saved fp32"):
            self.assertEqual(done.stderr.count(words), 1, done.stderr)

    def test_saves_without_a_folder(self):
        for flag in (
            "--checkpoint_every=5", "--checkpoint_every_steps=2", "--checkpoint_every_minutes=0.5",
            "--checkpoint_continuous", "--keep_last=2", "--checkpoint_verify=saved",
        ):  # fmt: skip
            with self.subTest(flag=flag):
                self.assert_refused(
                    ["--resume=", "--checkpoint_dir=", "--checkpoint_every=1", flag],
                    [flag, "has no effect without a folder"],
                )

    def test_evaluation_without_a_checkpoint(self):
        empty = os.path.join(self.scratch, "empty")
        flags = ["--eval_only", "--checkpoint_dir=" + empty]
        self.assert_refused(flags, ["eval_only", "finds no checkpoint to evaluate in " + empty])

    def test_a_new_run_in_the_folder_of_an_earlier_one(self):
        refused = self.assert_refused(["--resume="], [self.checkpoints, "epoch_1.pt", "resume=auto"])
        self.assertEqual(refused, 2)

    def test_resume_from_a_checkpoint_that_is_not_the_newest(self):
        later = os.path.join(self.checkpoints, "epoch_2.pt")
        shutil.copy(os.path.join(self.checkpoints, "epoch_1.pt"), later)
        self.before = contents(self.kept)
        earlier = os.path.join(self.checkpoints, "epoch_1.pt")
        self.assert_refused(["--resume=" + earlier], [self.checkpoints, "epoch_2.pt"])


if __name__ == "__main__":
    xml_unittest.main()
