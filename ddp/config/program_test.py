#!/usr/bin/env python3
"""config::Program as its user sees it: files, overrides, sweeps, and what it says of mistakes."""

import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")

import xml_unittest  # noqa: E402

PROGRAM = os.path.join(RUNFILES, "ddp/config/testing_program")


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"])
        self.addCleanup(shutil.rmtree, self.folder)

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            f.write(text)

    def run_program(self, *arguments, **options):
        return subprocess.run(
            [PROGRAM, *arguments], cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=120, **options)  # fmt: skip

    def effective(self, *arguments):
        done = self.run_program(*arguments, "--print_config")
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stderr)
        return done.stdout

    def expect_error(self, arguments, expected, code=2):
        """One line, nothing started."""
        before = sorted(os.listdir(self.folder))
        done = self.run_program(*arguments)
        self.assertEqual(done.returncode, code, done)
        self.assertEqual(done.stdout, "")
        self.assertEqual(done.stderr, "error: %s\n" % expected)
        self.assertEqual(sorted(os.listdir(self.folder)), before)


class ConfigurationTest(Case):
    def test_included_files_then_the_file_then_the_command_line(self):
        self.write("configs/base.yaml", "lr: 1\nseed: 1\ntext: base\nmodel: cnn\n")
        self.write("configs/model/small.yaml", "milestones: [1, 2]\nseed: 2\n")
        self.write("configs/run.yaml", "seed: 3\ndefaults: [base, model/small]\n")
        text = self.effective("--config_path=configs", "--config_name=run", "text=a", "--text=b")
        for line in ("lr: 1", "seed: 3", "text: b", "milestones: [1, 2]", "  name: cnn"):
            self.assertIn(line + "\n", text)
        self.assertEqual(self.effective("lr=2", "--config=configs/run.yaml"),
                         self.effective("--config=configs/run.yaml", "--lr", "2"))  # fmt: skip
        self.assertEqual(self.effective("--config-path", "configs", "--config-name", "run.yaml"),
                         self.effective("--config=configs/run"))  # fmt: skip

    def test_what_is_printed_configures_the_same_run(self):
        text = self.effective("lr=0.001", "text=a: ${lr}", "milestones=[3, 4]", "model=cnn")
        self.write("printed.yaml", text)
        self.assertEqual(self.effective("--config=printed.yaml"), text)

    def test_json_is_yaml(self):
        self.write("run.json", '{"lr": 0.25, "model": {"name": "cnn"}, "milestones": [7]}')
        text = self.effective("--config=run.json")
        self.assertIn("lr: 0.25\n", text)
        self.assertIn("milestones: [7]\n", text)

    def test_an_option_of_the_users_may_be_named_as_one_of_the_programs(self):
        self.write("run.yaml", "lr: 0.25\n")
        text = self.effective("--config=run.yaml", "model.config=own")
        self.assertIn("lr: 0.25\n", text)
        self.assertIn("  config: own\n", text)

    def test_relative_paths_are_of_the_folder_of_bazel_runs_caller(self):
        self.write("below/run.yaml", "lr: 0.75\n")
        environment = dict(os.environ, BUILD_WORKING_DIRECTORY=self.folder + "/below")
        done = self.run_program("--config=run.yaml", "--print_config", env=environment)
        self.assertIn("lr: 0.75\n", done.stdout)

    def test_mistakes_in_files(self):
        files = {
            "unknown": ("lr: 1\nmodle:\n  name: cnn\n", "unknown.yaml:3: there is no option "
                        "'modle.name'; did you mean model?"),
            "kind": ("\nlr: fast\n", "kind.yaml:2: lr=fast is not a finite number"),
            "group": ("lr: 1\nmodel:\n  depth_of_layers: 4\n", "group.yaml:3: there is no option "
                      "'model.depth_of_layers'; model has name, config"),
            "zero": ('text: "a\\0b"\n', "zero.yaml:1: text=a\\x00b has a zero byte"),
            "range": ("lr: 1\nseed: -1\n", "range.yaml:2: seed=-1 must be at least 0"),
            "name": ("model: cmn\n", "name.yaml:1: model=cmn is none of mlp, cnn"),
            "twice": ("lr: 1\nseed: 2\nlr: 3\n", "twice.yaml:3: 'lr' stands here for the second "
                      "time; first in line 1"),
            "alias": ("model: cnn\nmodel.name: mlp\n", "alias.yaml:2: model.name is set for the "
                      "second time; first in line 1"),
            "list": ("lr: [1, 2]\n", "list.yaml:1: lr is a list, but the option takes one value; "
                     "several are choices under sweep: only"),
            "self": ("lr: 1\ndefaults: [self]\n", "self.yaml:2: the file includes itself: "
                     "self.yaml -> self.yaml"),
            "missing": ("defaults:\n  - unknwn\n", "missing.yaml:2: configuration file: opening "
                        "unknwn.yaml: No such file or directory; did you mean unknown.yaml?"),
            "spelt/self": ("defaults: [./../spelt/self]\n", "spelt/self.yaml:1: the file includes "
                           "itself: spelt/self.yaml -> spelt/self.yaml"),
            "reference": ("text: ${lr}\n", "reference.yaml:1: '${lr}': references are not replaced "
                          "here; in quotes it is text"),
            "root": ("- lr\n", "root.yaml:1: a configuration is a map: 'optimizer: {lr: 0.1}'"),
            "package": ("defaults: [{model: cnn}]\n", "package.yaml:1: defaults has names of files, "
                        "merged at the root: model/cnn"),
        }  # fmt: skip
        for name, (text, _) in files.items():
            self.write(name + ".yaml", text)
        for name, (_, message) in files.items():
            with self.subTest(name):
                self.expect_error(["--config=%s.yaml" % name], message)

    def test_a_byte_in_a_file_that_is_not_utf8(self):
        with open(os.path.join(self.folder, "latin1.yaml"), "wb") as f:
            f.write(b"lr: 1\ntext: caf\xe9\n")
        self.expect_error(["--config=latin1.yaml"], "latin1.yaml:2: text=caf\\xe9 is not UTF-8, as "
                          "text in logs and checkpoints must be")  # fmt: skip

    def test_what_is_no_yaml_is_said_with_its_line(self):
        self.write("broken.yaml", "lr: 1\nmodel: {name: cnn\n")
        done = self.run_program("--config=broken.yaml")
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, r"^error: broken\.yaml:\d: .*\n$")

    def test_two_files_that_include_each_other(self):
        self.write("a.yaml", "defaults: [b]\n")
        self.write("b.yaml", "defaults: [a]\n")
        self.expect_error(["--config=a.yaml"],
                          "b.yaml:1: the file includes itself: a.yaml -> b.yaml -> a.yaml")  # fmt: skip

    def test_mistakes_on_the_command_line(self):
        for arguments, message in (
            (["sed=1"], "sed: there is no option 'sed'; did you mean seed?"),
            (["--model.depth_of_layers=4"], "--model.depth_of_layers: there is no option "
                                            "'model.depth_of_layers'; model has name, config"),
            ([b"--text=caf\xe9"], "--text=caf\\xe9 is not UTF-8, as text in logs and checkpoints "
                                 "must be"),
            ([b"--log_dir=\xff\xc3\xa9"], "--log_dir=\\xff\u00e9 is not UTF-8, as text in logs and "
                                          "checkpoints must be"),
            ([b"lr=\xff"], "lr=\\xff is not UTF-8, as text in logs and checkpoints must be"),
            ([b"--\xff=1"], "'--\\xff=1' is no option with its value, as in epochs=2"),
            (["seed"], "'seed' has no value: seed=…"),
            (["--seed"], "--seed needs a value: --seed=…"),
            (["word"], "'word' is no option with its value, as in epochs=2"),
            (["lr="], "lr= is not a finite number"),
            (["--lr=0.1,0.2"], "--lr=0.1,0.2 is not a finite number; to run each of the choices add "
                               "multirun=true"),
            (["model=mlp,cnn"], "model=mlp,cnn is none of mlp, cnn; to run each of the choices add "
                                "multirun=true"),
            (["--config=nowhere"], "configuration file: opening nowhere.yaml: No such file or "
                                   "directory"),
            (["--config=a", "--config_name=b"], "--config_name=b and config are given; give one"),
            (["--config_path=x"], "--config_path=x needs a file: add config_name"),
            (["--sweep_jobs=2"], "--sweep_jobs=2 is for sweeps only; add multirun=true"),
            (["--sweep_metric=loss:most"], "--sweep_metric=loss:most is no metric: give NAME:max or "
                                           "NAME:min"),
        ):  # fmt: skip
            with self.subTest(arguments):
                self.expect_error(arguments, message)

    def test_options_of_a_queue_that_is_not_used(self):
        for option in ("--slurm_partition=gpu", "launcher.slurm.time=30", "--dry_run"):
            written = option + ("=true" if "=" not in option else "")
            with self.subTest(option):
                self.expect_error([option], "%s is for launcher slurm, but the launcher is local; "
                                  "add launcher=slurm" % written)  # fmt: skip
        # In a file they wait for the day when it is.
        self.write("run.yaml", "launcher:\n  slurm: {partition: gpu}\n")
        self.assertIn('partition: gpu\n', self.effective("--config=run.yaml"))

    def test_a_job_has_the_configuration_of_its_submission(self):
        self.write("run.yaml", "lr: 0.25\nmilestones: [1, 2]\ntext: it's $HOME\n")
        done = self.run_program("--config=run.yaml", "--launcher=slurm", "--dry_run")
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stderr)
        line = next(x for x in done.stdout.splitlines() if x.startswith("command=("))
        self.assertNotIn("run.yaml", line)
        words = subprocess.run(
            ["bash", "-c", line + "; printf '%s\\n' \"${command[@]}\""], capture_output=True,
            text=True).stdout.splitlines()  # fmt: skip
        self.assertIn("lr=0.25", words)
        self.assertIn("text=it's $HOME", words)
        self.assertIn("milestones=[1, 2]", words)

    def test_no_sbatch(self):
        environment = {k: v for k, v in os.environ.items() if k != "PATH"}
        environment["PATH"] = self.folder
        done = self.run_program("--launcher=slurm", env=environment)
        self.assertEqual(done.returncode, 1, done)
        self.assertEqual(done.stderr, "error: --launcher=slurm finds no sbatch in PATH: submit on a "
                         "machine of the cluster, where SLURM's commands are installed\n")  # fmt: skip

    def test_jobs_of_an_array(self):
        done = self.run_program("--launcher=slurm", "--dry_run", "--multirun", "lr=1,2,3",
                                "--log_dir=out", "--sweep_jobs=2", "--slurm_time=5",
                                "--slurm_gpus_per_node=4")  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("#SBATCH --array=0-2%2\n", done.stdout)
        self.assertIn("#SBATCH --time=5\n", done.stdout)
        self.assertIn("#SBATCH --ntasks-per-node=4\n", done.stdout)  # a rank per GPU of the nodes
        self.assertEqual(len(re.findall(r"--config=\S*/out/lr=[123]-\w+/config.yaml", done.stdout)), 3)
        self.assertEqual(os.listdir(self.folder), [])

    def with_queue(self):
        """An environment whose sbatch takes every job as number 7, and whose queue is empty."""
        for name, line in (("sbatch", "echo 7"), ("squeue", "exit 0")):
            self.write("bin/" + name, "#!/bin/sh\n%s\n" % line)
            os.chmod(os.path.join(self.folder, "bin", name), 0o755)
        return dict(os.environ, PATH=self.folder + "/bin:" + os.environ["PATH"])

    def test_cancelled_jobs_share_one_wait_for_their_exit_codes(self):
        environment = self.with_queue()
        command = ["--launcher=slurm", "--slurm_stage_dir=stage", "--multirun", "seed=range(0,8)",
                   "--log_dir=out"]  # fmt: skip
        done = self.run_program(*command, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("queued"), 8)
        # One wait is 10 s. The call submits the jobs again afterwards.
        began = time.monotonic()
        done = self.run_program(*command, env=environment)
        self.assertLess(time.monotonic() - began, 40)
        self.assertEqual(done.stderr.count("failed: job 7_"), 8, done.stderr)
        self.assertEqual(done.stdout.count("queued"), 8)
        # What sbatch refuses counts neither as submitted nor as ended.
        self.run_program(*command, env=environment)
        self.write("bin/sbatch", "#!/bin/sh\necho no >&2; exit 1\n")
        for _ in range(2):
            done = self.run_program(*command, env=environment)
            self.assertEqual(done.stderr.splitlines()[-1], "error: sbatch refuses the job: no")
        self.assertNotIn("failed", done.stderr)

    def test_the_reason_of_a_second_attempt_is_not_that_of_the_first(self):
        environment = self.with_queue()
        command = ["--launcher=slurm", "--slurm_stage_dir=stage", "--multirun", "seed=1,2",
                   "--log_dir=out"]  # fmt: skip
        self.run_program(*command, env=environment)
        jobs = ["out/" + name for name in os.listdir(self.folder + "/out") if "seed" in name]
        for log, code, reason in (("error: disk on fire\n", 1, "disk on fire"),
                                  ("warm-up\n", 137, "killed by signal 9 (Killed)")):  # fmt: skip
            for job in jobs:
                # SLURM appends, for the sake of requeued jobs.
                with open(os.path.join(self.folder, job, "job.log"), "a") as f:
                    f.write(log)
                self.write(job + "/exit_code", "%d\n" % code)
            done = self.run_program(*command, env=environment)
            self.assertEqual(done.stderr.count(": failed: " + reason + "\n"), 2, done.stderr)
        with open(os.path.join(self.folder, jobs[0], "job.log.previous")) as f:
            self.assertEqual(f.read(), "warm-up\n")

    def test_mistakes_of_sweeps(self):
        self.write("sweep.yaml", "log_dir: out\nlr: 1\nsweep:\n  seed: range(4)\n")
        self.write("empty.yaml", "sweep:\n  seed: []\n")
        self.write("flat.yaml", "sweep: [1]\n")
        dir_ = "--log_dir=out"
        for arguments, message in (
            ([dir_], "--multirun=true has no choices: give some, as in lr=0.1,0.01 "
                     "'seed=range(0,3)', or a file with sweep:"),
            (["seed=1,2"], "--log_dir= is needed by multirun: the folder of the sweep"),
            ([dir_, "seed=choice()"], "seed=choice() has no choices"),
            ([dir_, "seed=range(0,3,0)"], "seed=range(0,3,0) is a range without end: its step is 0"),
            ([dir_, "seed=range(0,3"], "seed=range(0,3 has a bracket without an end"),
            ([dir_, "seed=1,-2"], "seed=-2 must be at least 0"),
            ([dir_, "seed=1,x"], "seed=x is not a whole number"),
            ([dir_, b"text=a,\xff"], "text=\\xff is not UTF-8, as text in logs and checkpoints must "
                                    "be"),
            ([dir_, "seed=1,1"], "two jobs of the sweep are the same: seed=1 and seed=1"),
            ([dir_, "lr=-1", "seed=1,2"], "lr=-1 must be more than 0"),
            (["--config=sweep.yaml"], "sweep.yaml:4: seed=range(4) is a range without a start and "
                "an end: give range(start,stop) or range(start,stop,step)"),
            (["--config=empty.yaml", dir_], "empty.yaml:2: seed has no choices"),
            (["--config=flat.yaml", dir_], "flat.yaml:1: sweep is a map of options: 'sweep: {seed: "
                "range(0, 3)}'"),
        ):  # fmt: skip
            with self.subTest(arguments):
                self.expect_error(["--multirun", *arguments], message)


class SweepTest(Case):
    def sweep(self, *arguments):
        return self.run_program("--multirun", "--log_dir=out", *arguments)

    def records(self):
        with open(os.path.join(self.folder, "out/sweep.jsonl")) as f:
            return [json.loads(line) for line in f]

    def test_product_in_order_with_a_folder_each(self):
        done = self.sweep("lr=0.25,0.5", "seed=range(0,2)", "milestones=[1],[2,3]")
        self.assertEqual(done.returncode, 0, done.stderr)
        records = self.records()
        self.assertEqual(len(records), 8)
        self.assertEqual(records[1]["overrides"], {"lr": "0.25", "seed": "0", "milestones": "[2,3]"})
        self.assertEqual(records[4]["overrides"], {"lr": "0.5", "seed": "0", "milestones": "[1]"})
        self.assertEqual(len({r["id"] for r in records}), 8)
        for record in records:
            self.assertEqual(record["status"], "finished")
            lr, seed = float(record["overrides"]["lr"]), int(record["overrides"]["seed"])
            self.assertEqual(record["metrics"], {"step": 2, "test/accuracy": lr + seed})
            with open(os.path.join(self.folder, record["folder"], "config.yaml")) as f:
                self.assertIn("log_dir: %s\n" % record["folder"], f.read())
        table = done.stdout.splitlines()
        self.assertEqual(table[0].split(), ["test/accuracy", "status", "lr", "seed", "milestones"])
        scores = [float(line.split()[0]) for line in table[1:]]
        self.assertEqual(scores, sorted(scores, reverse=True))
        # Configurations of jobs are complete: one of them alone is the same run.
        again = self.run_program("--config=%s/config.yaml" % records[3]["folder"], "--print_config")
        self.assertIn("seed: 1\n", again.stdout)

    def test_a_job_writes_its_files_into_its_folder(self):
        done = self.sweep("seed=1,2", "file=/elsewhere/of the user")
        self.assertEqual(done.returncode, 0, done.stderr)
        for record in self.records():
            self.assertIn("of the user", os.listdir(os.path.join(self.folder, record["folder"])))

    def test_a_metric_that_is_nan_at_the_end_is_nan(self):
        done = self.sweep("seed=1,2", "text=diverges,fine", "--sweep_metric=test/accuracy:min")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([r["metrics"]["test/accuracy"] for r in self.records()],
                         ["NaN", 1.5, "NaN", 2.5])  # fmt: skip
        self.assertEqual([line.split()[0] for line in done.stdout.splitlines()],
                         ["test/accuracy", "1.5", "2.5", "nan", "nan"])  # fmt: skip

    def test_choices_of_a_file_and_of_the_command_line(self):
        self.write("run.yaml", "sweep:\n  seed: [1, 2]\n  model.name: choice(mlp, cnn)\n"
                   "  milestones: [[1], [2, 3]]\n")  # fmt: skip
        done = self.sweep("--config=run.yaml", "seed=5,6,7", "milestones=[9]")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([r["overrides"] for r in self.records()],
                         [{"seed": str(s), "model": m} for s in (5, 6, 7) for m in ("mlp", "cnn")])  # fmt: skip

    def test_a_quoted_value_is_one_value(self):
        done = self.sweep("text='a,b'", "seed=1,2")
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(self.folder, self.records()[0]["folder"], "config.yaml")) as f:
            self.assertIn("text: a,b\n", f.read())
        self.assertNotIn("text", self.records()[0]["overrides"])

    def test_jobs_at_the_same_time_have_cores_of_their_own(self):
        cores = os.sched_getaffinity(0)
        if len(cores) < 2:
            self.skipTest("one core")
        parent = subprocess.Popen(
            [PROGRAM, "--multirun", "--log_dir=out", "seed=1,2", "--sweep_jobs=2", "--seconds=60"],
            cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        pids = self.wait_for_pids(2)
        shares = [os.sched_getaffinity(pid) for pid in pids]
        parent.send_signal(signal.SIGINT)
        self.assertEqual(parent.wait(30), 128 + signal.SIGINT)
        self.assertEqual(shares[0] & shares[1], set())
        self.assertEqual(shares[0] | shares[1], cores)
        self.assertEqual([self.alive(pid) for pid in pids], [False, False])

    def alive(self, pid):
        try:
            with open("/proc/%d/stat" % pid) as f:
                return f.read().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def wait_for_pids(self, count):
        """Of the jobs that run, by their logs."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pids = []
            for name in os.listdir(self.folder + "/out") if os.path.isdir(self.folder + "/out") else ():
                log = os.path.join(self.folder, "out", name, "job.log")
                if os.path.isfile(log):
                    with open(log) as f:
                        pids += [int(p) for p in re.findall(r"^pid (\d+)", f.read(), re.MULTILINE)]
            pids = [pid for pid in pids if self.alive(pid)]
            if len(pids) >= count:
                return pids
            time.sleep(0.02)
        self.fail("no jobs run")

    def test_one_fails_one_is_killed_and_the_second_call_runs_these_two(self):
        # Of 12 jobs, seed 2 with lr 1 fails: its folder is a file. Seed 5 is killed while it sleeps.
        self.write("fails.yaml", "fail: no good seed\n")
        arguments = ["seed=range(0,6)", "lr=1,2", "--sweep_jobs=2", "--seconds=0.05"]
        # First run: make one job fail by a folder in the place of its metrics, and one be killed.
        plan = self.run_program("--multirun", "--log_dir=out", *arguments, "--print_config")
        folders = re.findall(r"^log_dir: \"?(out/[^\"\n]+)\"?$", plan.stdout, re.MULTILINE)
        self.assertEqual(len(folders), 12)
        bad = next(f for f in folders if "seed=2,lr=1-" in f)
        os.makedirs(os.path.join(self.folder, bad, "metrics.jsonl"))
        parent = subprocess.Popen(
            [PROGRAM, "--multirun", "--log_dir=out", *arguments[:-1], "--seconds=2"],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
        victim = self.wait_for_pids(1)[0]
        os.kill(victim, signal.SIGKILL)
        out, err = parent.communicate(timeout=120)
        self.assertEqual(parent.returncode, 1, err)
        table = out.splitlines()
        self.assertEqual(len(table), 13)
        self.assertEqual([line.split()[1] for line in table[1:]], ["finished"] * 10 + ["failed"] * 2)
        self.assertEqual(len(re.findall("killed by signal 9 .Killed.", out)), 1)
        self.assertEqual(len(re.findall("exit code 1; see " + re.escape(bad), out)), 1)
        failed = [r["folder"] for r in self.records() if r["status"] == "failed"]
        self.assertEqual(len(failed), 2)
        self.assertIn(bad, failed)

        os.rmdir(os.path.join(self.folder, bad, "metrics.jsonl"))
        logs = {f: os.stat(os.path.join(self.folder, f, "job.log")).st_mtime_ns for f in folders}
        again = self.sweep(*arguments)
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertIn("sweep: 12 jobs, 10 have finished, 2 to run, in out\n", again.stderr)
        after = {f: os.stat(os.path.join(self.folder, f, "job.log")).st_mtime_ns for f in folders}
        self.assertEqual(sorted(f for f in folders if logs[f] != after[f]), sorted(failed))
        # A third call runs nothing.
        self.assertIn(" 0 to run", self.sweep(*arguments).stderr)

    def test_an_error_of_the_program_is_the_reason(self):
        done = self.sweep("seed=1,2", "fail=disk on fire", "--sweep_jobs=2")
        self.assertEqual(done.returncode, 1)
        self.assertEqual([r["reason"] for r in self.records()], ["disk on fire"] * 2)
        self.assertRegex(done.stderr, r"\[2/2\] seed=2: failed after [0-9.]+ s: disk on fire\n")

    def test_sigkill_of_the_parent_leaves_no_process_and_the_next_call_goes_on(self):
        # Seeds 0 and 1 have ended by then, 2 and 3 run, 4 waits.
        arguments = ["seed=range(0,5)", "--sweep_jobs=2"]
        parent = subprocess.Popen([PROGRAM, "--multirun", "--log_dir=out", *arguments,
                                   "--seconds=600", "--slow_from=2"],
                                  cwd=self.folder, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)  # fmt: skip
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if len(glob.glob(os.path.join(self.folder, "out/*/exit_code"))) == 2:
                break
            time.sleep(0.02)
        pids = self.wait_for_pids(2)
        # Meanwhile a second sweep there is refused.
        second = self.sweep(*arguments)
        self.assertEqual((second.returncode, second.stderr),
                         (1, "error: another process runs a sweep in out\n"))  # fmt: skip
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 30
        while any(self.alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertEqual([self.alive(pid) for pid in pids], [False, False])
        done = self.sweep(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("sweep: 5 jobs, 2 have finished, 3 to run, in out\n", done.stderr)

    def test_a_rank_of_a_running_job_does_not_sweep(self):
        environment = dict(os.environ, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0",
                           LOCAL_WORLD_SIZE="2", GROUP_RANK="0", MASTER_ADDR="127.0.0.1",
                           MASTER_PORT="1")  # fmt: skip
        done = self.run_program("--multirun", "--log_dir=out", "seed=1,2", env=environment)
        self.assertEqual(done.returncode, 2)
        self.assertIn("start the program without a launcher", done.stderr)
        self.assertIn("error: --multirun=true starts the ranks of each job itself", done.stderr)


if __name__ == "__main__":
    xml_unittest.main()
