#!/usr/bin/env python3
"""Sweeps on this machine, as their user sees them."""

import fcntl
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path[:0] = [RUNFILES + "/tests/support", RUNFILES + "/ddp/config"]

import xml_unittest  # noqa: E402
from testing_case import PROGRAM, Case  # noqa: E402


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
        done = self.sweep("seed=1,2", "file=of the user")
        self.assertEqual(done.returncode, 0, done.stderr)
        for record in self.records():
            self.assertIn("of the user", os.listdir(os.path.join(self.folder, record["folder"])))

    def test_folders_that_no_job_would_have_are_refused(self):
        sweep = ["--multirun", "--log_dir=out", "seed=1,2"]
        single = "is for a single run: each job of a sweep has its own, out/JOB/"
        for arguments, message in (
            (["--checkpoint_dir=ck"],
             "--checkpoint_dir=ck " + single + "checkpoints; leave it out, or empty"),
            (["checkpoint_dir=a,b"],
             "--checkpoint_dir=a " + single + "checkpoints; leave it out, or empty"),
            (["file=/elsewhere/x"], "file=/elsewhere/x " + single + "x; give a name without folders: x"),
            (["file=x/"], "file=x/ " + single + "; give a name without folders"),
            (["--run_dir=here"],
             "--run_dir=here is no folder of this sweep, which log_dir=out names; give one of the two"),
        ):  # fmt: skip
            with self.subTest(arguments):
                self.expect_error([*sweep, *arguments], message)
        # What is the same for each job, or is not given after all.
        for arguments in (["checkpoint_dir=${log_dir}/checkpoints", "file=${log_dir}/x", "--run_dir=out"],
                          ["--checkpoint_dir=ck", "--checkpoint_dir="]):  # fmt: skip
            done = self.run_program(*sweep, "--print_config", *arguments)
            self.assertEqual((done.returncode, done.stderr), (0, ""), done)

    def test_the_folder_of_a_sweep_depends_on_no_choice(self):
        self.write("run.yaml", "log_dir: runs/${model}\n")
        self.write("far.yaml", "log_dir: runs/${text}\ntext: ${oc.env:NONE_OF_ALL,${lr}}\n")
        self.write("conf/lr/low.yaml", "lr: 0.1\n")
        self.write("conf/lr/high.yaml", "lr: 0.2\nseed: 5\n")
        groups = ["-cp=conf", "lr@=low,high"]
        for arguments, value, name in (
            (["--config=run.yaml", "model=mlp,cnn"], "run.yaml:1: log_dir=runs/${model}", "model"),
            (["log_dir=runs/${model}", "model=mlp,cnn"], "log_dir=runs/${model}", "model"),
            (["--config=far.yaml", "lr=1,2"], "far.yaml:1: log_dir=runs/${text}", "lr"),
            (["--config=far.yaml", *groups], "far.yaml:1: log_dir=runs/${text}", "lr"),
        ):  # fmt: skip
            with self.subTest(arguments):
                self.expect_error(["--multirun", *arguments],
                                  value + " depends on " + name + ", which the choices set, but it is the "
                                  "folder of the whole sweep; name one without that reference: each job "
                                  "has its own in there")  # fmt: skip
        # What is the same for all jobs.
        for arguments in (["--config=run.yaml", "seed=1,2"],
                          ["--config=run.yaml", "model=mlp,cnn", "log_dir=runs/mlp"],
                          ["--config=far.yaml", *groups, "lr=3", "log_dir=runs/${lr}"]):  # fmt: skip
            done = self.run_program("--multirun", "--print_config", *arguments)
            self.assertEqual((done.returncode, done.stderr), (0, ""), done)
            folder = "runs/3" if "lr=3" in arguments else "runs/mlp"
            self.assertEqual(len(re.findall(r"^log_dir: %s/" % folder, done.stdout, re.MULTILINE)), 2)
        # A file that is a choice has it for single runs.
        self.write("conf/lr/low.yaml", "lr: 0.1\nlog_dir: low\n")
        done = self.run_program("--multirun", "--print_config", "log_dir=out", *groups)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done)
        self.write("out.yaml", "log_dir: out\n")
        done = self.run_program("--multirun", "--print_config", "--config=out.yaml", *groups)
        self.assertEqual(done.returncode, 0, done)
        self.assertEqual(done.stderr, "warning: conf/lr/low.yaml:2: log_dir=low is for single runs; a sweep "
                         "has one folder\n")  # fmt: skip

    def test_folders_in_a_file_are_for_single_runs(self):
        self.write("run.yaml", "checkpoint_dir: ck\nfile: f/x\nrun_dir: r\n")
        done = self.sweep("seed=1,2", "--config=run.yaml", "--print_config")
        self.assertEqual(done.returncode, 0, done)
        own = "is for a single run: each job of a sweep has its own, out/JOB/"
        self.assertEqual(done.stderr.splitlines(), [
            "warning: run_dir=r is for single runs; the sweep is in out",
            "warning: run.yaml:1: checkpoint_dir=ck " + own + "checkpoints",
            "warning: run.yaml:2: file=f/x " + own + "x"])  # fmt: skip
        self.assertEqual(len(re.findall(r"^checkpoint_dir: out/seed=\d-\w+/checkpoints$", done.stdout,
                                        re.MULTILINE)), 2)  # fmt: skip

    def test_a_metric_that_is_nan_at_the_end_is_nan(self):
        done = self.sweep("seed=1,2", "text=diverges,fine", "--sweep_metric=test/accuracy:min")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([r["metrics"]["test/accuracy"] for r in self.records()],
                         ["NaN", 1.5, "NaN", 2.5])  # fmt: skip
        self.assertEqual([line.split()[0] for line in done.stdout.splitlines()],
                         ["test/accuracy", "1.5", "2.5", "nan", "nan"])  # fmt: skip

    def test_the_metric_may_be_implied_by_other_options_but_the_command_line_counts(self):
        for flags, values in ([], ["1.5", "2.5"]), (["--sweep_metric=test/accuracy:max"], ["2.5", "1.5"]):
            done = self.sweep("seed=1,2", "text=implies_metric", *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            column = [line.split()[0] for line in done.stdout.splitlines()]
            self.assertEqual(column, ["test/accuracy", *values])

    def test_a_metric_that_no_job_has_is_named(self):
        done = self.sweep("seed=1,2", "--sweep_metric=test/acuracy")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("\nwarning: no job has the metric test/acuracy; there are: step, test/accuracy\n",
                      done.stderr)  # fmt: skip

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
        # Under a quota it is a part of them.
        self.assertLessEqual(shares[0] | shares[1], cores)
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
        self.assertIn("sweep: 12 jobs, 10 have finished, 2 to run (2 failed), in out\n", again.stderr)
        after = {f: os.stat(os.path.join(self.folder, f, "job.log")).st_mtime_ns for f in folders}
        self.assertEqual(sorted(f for f in folders if logs[f] != after[f]), sorted(failed))
        # A third call runs nothing.
        self.assertIn(" 0 to run", self.sweep(*arguments).stderr)

    def test_attempts_are_counted(self):
        # Each fails, and is started again by its launcher.
        done = self.sweep("seed=1,2", "--max_restarts=1", "fail=early")
        self.assertEqual(done.returncode, 1, done.stderr)
        done = self.sweep("seed=1,2,3")
        self.assertEqual(done.returncode, 0, done.stderr)
        report = self.run_program("--multirun", "--log_dir=out", "seed=1,2,3", "--sweep_report")
        for table in (done.stdout, report.stdout):
            self.assertEqual([line.split()[2:] for line in table.splitlines()],
                             [["seed", "attempt"], ["3", "1"], ["2", "3"], ["1", "3"]])  # fmt: skip
        lines = self.log(self.records()[0], "attempts").splitlines()
        self.assertEqual([line.split(",")[0] for line in lines if "pid" not in line], ["2: restart 1"])
        self.assertEqual([line.split()[0] for line in lines], ["1:", "2:", "3:"])

    def test_files_of_groups_as_choices(self):
        self.write("conf/model/small.yaml", "model: mlp\nlr: 1\nmilestones: [1]\n")
        self.write("conf/model/large.yaml", "model: cnn\nlr: 2\n")
        done = self.sweep("-cp=conf", "model@=small,large", "seed=5,6")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([(r["overrides"], r["metrics"]["test/accuracy"]) for r in self.records()],
                         [({"model": m, "seed": s}, lr + float(s))
                          for m, lr in (("small", 1), ("large", 2)) for s in ("5", "6")])  # fmt: skip
        # The files are not asked again.
        shutil.rmtree(self.folder + "/conf/model")
        again = self.run_program("--config=%s/config.yaml" % self.records()[0]["folder"],
                                 "--print_config")  # fmt: skip
        self.assertIn("milestones: [1]\n", again.stdout)

    def test_jobs_have_their_folders_whatever_these_are_named(self):
        self.assertEqual(self.sweep("seed=1,2").returncode, 0)
        first = {r["overrides"]["seed"]: r["folder"] for r in self.records()}
        # As by a version with other hashes. What is incidental, or a default, is no part of it.
        os.rename(os.path.join(self.folder, first["1"]), self.folder + "/out/seed=1-0123")
        os.remove(self.folder + "/out/seed=1-0123/job.yaml")  # it wrote only config.yaml
        done = self.sweep("seed=1,2", "lr=0.5", "--noagain", "device=cpu", "--launcher=local",
                          "--grace_s=4")  # fmt: skip
        self.assertIn("2 have finished, 0 to run", done.stderr)
        self.assertEqual([r["folder"] for r in self.records()], ["out/seed=1-0123", first["2"]])
        # One that has the name of a job, but another configuration, is not its folder.
        job = os.path.join(self.folder, first["2"], "job.yaml")
        with open(job) as f:
            text = f.read()
        with open(job, "w") as f:
            f.write(text.replace("lr: 0.5", "lr: 0.25"))
        done = self.sweep("seed=1,2")
        self.assertIn("1 have finished, 1 to run (1 missing)", done.stderr)
        self.assertEqual(self.records()[1]["folder"], first["2"] + "-2")

    def test_what_a_run_writes_changes_no_job(self):
        self.assertEqual(self.sweep("seed=1,2", "fail=early").returncode, 1)
        folders = [r["folder"] for r in self.records()]
        config = "seed: 7\nlauncher:\n  nproc_per_node: 3\n"
        for folder in folders:
            self.write(folder + "/run.yaml", "world_size: 3\nnnodes: 1\nprogram: x\nbuild: y\nhost: z\n")
            self.write(folder + "/config.yaml", config)
        # Each runs again as the sweep asks, and not as its former life did.
        done = self.sweep("seed=1,2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("2 to run (2 failed)", done.stderr)
        self.assertEqual([self.log(r).count("pid ") for r in self.records()], [1, 1])
        self.assertEqual([self.log(r, "config.yaml") for r in self.records()], [config] * 2)
        self.assertIn("2 have finished, 0 to run", self.sweep("seed=1,2").stderr)
        self.assertEqual([r["folder"] for r in self.records()], folders)

    def test_one_node_is_what_a_job_has_that_says_nothing_of_nodes(self):
        self.assertEqual(self.sweep("seed=1,2").returncode, 0)
        # As of a version in which it was the default.
        os.remove(os.path.join(self.folder, self.records()[0]["folder"], "job.yaml"))
        config = os.path.join(self.folder, self.records()[0]["folder"], "config.yaml")
        with open(config) as f:
            text = f.read()
        self.assertIn("nnodes: auto\n", text)
        with open(config, "w") as f:
            f.write(text.replace("nnodes: auto\n", "nnodes: 1\n"))
        for arguments in ([], ["--nnodes=1"], ["nnodes=choice(1)"]):
            done = self.sweep("seed=1,2", *arguments)
            self.assertIn("2 have finished, 0 to run", done.stderr)

    def test_of_two_folders_of_a_job_the_one_with_a_result_counts(self):
        self.assertEqual(self.sweep("seed=1,2").returncode, 0)
        folder = self.records()[0]["folder"]
        # As a user's copy of one that has not ended; it comes first.
        copy = os.path.join(self.folder, "out/a copy")
        shutil.copytree(os.path.join(self.folder, folder), copy)
        os.remove(copy + "/exit_code")
        self.assertIn("2 have finished, 0 to run", self.sweep("seed=1,2").stderr)
        self.assertEqual(self.records()[0]["folder"], folder)

    def test_jobs_begin_from_a_checkpoint_and_go_on_from_their_own(self):
        arguments = ["seed=1,2", "resume=a.pt"]
        self.assertEqual(self.sweep(*arguments, "fail=early").returncode, 1)
        logs = lambda name: [self.log(r, name) for r in self.records()]  # noqa: E731
        for log in logs("job.log"):
            self.assertIn("resume 'a.pt'", log)
        # Without a checkpoint of its own it begins there again.
        self.sweep(*arguments, "--save", "fail=late")
        for log in logs("job.log"):
            self.assertIn("resume 'a.pt'", log)
        folders = [r["folder"] for r in self.records()]
        self.assertEqual(self.sweep(*arguments).returncode, 0)
        for log in logs("job.log"):
            self.assertIn("resume 'auto'", log)
        self.assertEqual([r["folder"] for r in self.records()], folders)
        # Another beginning is another job.
        self.assertIn(" 2 to run (2 missing)", self.sweep("seed=1,2", "resume=b.pt").stderr)
        self.assertIn(" 2 to run (2 missing)", self.sweep("seed=1,2").stderr)
        self.assertIn(" 0 to run", self.sweep("seed=1,2", "resume=auto").stderr)

    def test_jobs_have_the_size_of_the_run_whose_configuration_they_use(self):
        first = self.run_program("--print_config")
        self.assertEqual(first.returncode, 0, first.stderr)
        self.write("first/config.yaml", first.stdout)
        arguments = ["--config=first/config.yaml", "seed=1,2"]
        ranks = lambda: [self.log(r).count("pid ") for r in self.records()]  # noqa: E731
        self.assertEqual(self.sweep(*arguments).returncode, 0)
        self.assertEqual(ranks(), [1, 1])
        self.write("first/run.yaml", "world_size: 3\nnnodes: 1\nprogram: x\nbuild: y\nhost: z\n")
        done = self.sweep(*arguments)
        # A run of another size is another run.
        self.assertIn("2 to run (2 missing)", done.stderr)
        self.assertEqual(done.stderr.count("world size 3, as first/run.yaml says\n"), 1, done.stderr)
        self.assertEqual(ranks(), [3, 3])
        self.assertIn("2 have finished, 0 to run", self.sweep(*arguments).stderr)
        # What is given or swept counts for more.
        for size in ("--nproc_per_node=2", "nproc_per_node=2,4"):
            done = self.sweep(*arguments, size, "--print_config")
            self.assertEqual((done.returncode, done.stderr), (0, ""), done.stderr)
            self.assertNotIn("nproc_per_node: 3\n", done.stdout)

    def log(self, record, name="job.log"):
        with open(os.path.join(self.folder, record["folder"], name)) as f:
            return f.read()

    def copy_program(self, extra=b""):
        """A copy that bytes behind its end make another build; replaced as a build does it."""
        copy = os.path.join(self.folder, "bin/program")
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        with open(PROGRAM, "rb") as source, open(copy + ".new", "wb") as to:
            shutil.copyfileobj(source, to)
            to.write(extra)
        os.chmod(copy + ".new", 0o755)
        os.rename(copy + ".new", copy)
        return copy

    def sweep_by(self, program, *arguments):
        return subprocess.run([program, "--multirun", "--log_dir=out", *arguments], cwd=self.folder,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=120)  # fmt: skip

    def test_the_build_is_known_and_may_count(self):
        program = self.copy_program()
        self.assertEqual(self.sweep_by(program, "seed=1").returncode, 2)  # one value is no sweep
        self.assertEqual(self.sweep_by(program, "seed=choice(1)").returncode, 0)
        (old,) = {r["build"] for r in self.records()}
        self.assertRegex(old, "^[0-9a-f]{16}$")
        self.copy_program(b"x")
        done = self.sweep_by(program, "seed=1,2")
        self.assertIn("1 have finished, 1 to run (1 missing)", done.stderr)
        new = self.records()[1]["build"]
        self.assertNotEqual(new, old)
        self.assertEqual([line.split()[2:] for line in done.stdout.splitlines()],
                         [["seed", "build"], ["2", new[:8]], ["1", old[:8]]])  # fmt: skip
        done = self.sweep_by(program, "seed=1,2", "--sweep_rerun=changed")
        self.assertIn("2 have finished, 1 to run (1 changed)", done.stderr)
        self.assertEqual([r["build"] for r in self.records()], [new, new])
        # The former results are kept, and no longer asked.
        (kept,) = os.listdir(self.folder + "/out/previous")
        self.assertIn("metrics.jsonl", os.listdir(self.folder + "/out/previous/" + kept))
        done = self.sweep_by(program, "seed=1,2", "--sweep_rerun=changed")
        self.assertIn(" 0 to run", done.stderr)
        self.assertNotIn("build", done.stdout)

    def test_results_stay_if_a_signal_comes_before_changed_jobs_run_again(self):
        self.assertEqual(self.sweep("seed=1,2").returncode, 0)
        for record in self.records():
            self.write(record["folder"] + "/build", "of another program\n")
        parent = subprocess.Popen([PROGRAM, "--multirun", "--log_dir=out", "seed=1,2",
                                   "--sweep_rerun=changed", "--seconds=600"],
                                  cwd=self.folder, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)  # fmt: skip
        self.wait_for_pids(1)
        parent.send_signal(signal.SIGINT)
        self.assertEqual(parent.wait(60), 128 + signal.SIGINT)
        second = self.records()[1]
        self.assertEqual((second["status"], second["build"]), ("finished", "of another program"))
        self.assertEqual(len(os.listdir(self.folder + "/out/previous")), 1)

    def test_a_build_meanwhile_does_not_change_later_jobs(self):
        program = self.copy_program()
        parent = subprocess.Popen(
            [program, "--multirun", "--log_dir=out", "seed=0,1,2", "--again", "seconds=1"],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
        self.wait_for_pids(1)
        # What a build would put there instead.
        shutil.copy("/bin/false", self.folder + "/bin/other")
        os.rename(self.folder + "/bin/other", program)
        out, err = parent.communicate(timeout=120)
        self.assertEqual(parent.returncode, 0, err)
        self.assertEqual(len({r["build"] for r in self.records()}), 1)
        # Each has started itself once more: it is still the same program.
        for record in self.records():
            self.assertIn("text 'again'", self.log(record))

    def test_a_report_changes_nothing(self):
        arguments = ["--multirun", "--log_dir=out", "seed=range(0,3)"]
        report = self.run_program(*arguments, "--sweep_report")
        self.assertEqual((report.returncode, report.stderr), (0, ""))
        self.assertEqual([line.split()[1] for line in report.stdout.splitlines()[1:]], ["missing"] * 3)
        self.assertEqual(os.listdir(self.folder), [])
        parent = subprocess.Popen([PROGRAM, *arguments, "--seconds=600", "--slow_from=1"],
                                  cwd=self.folder, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)  # fmt: skip
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            states = self.run_program(*arguments, "--sweep_report").stdout
            states = [line.split()[1] for line in states.splitlines()[1:]]
            if states == ["finished", "running", "missing"]:
                break
            time.sleep(0.05)
        self.assertEqual(states, ["finished", "running", "missing"])
        (pid,) = self.wait_for_pids(1)
        parent.send_signal(signal.SIGINT)
        self.assertEqual(parent.wait(30), 128 + signal.SIGINT)
        report = self.run_program(*arguments, "--sweep_report")
        self.assertEqual([line.split()[1] for line in report.stdout.splitlines()[1:]],
                         ["finished", "missing", "missing"])  # fmt: skip

    def test_a_sweep_of_dry_runs_leaves_nothing(self):
        self.write("tmp/of_others", "")
        environment = dict(os.environ, TMPDIR=self.folder + "/tmp")

        def sweep(*arguments):
            done = self.run_program("--multirun", "--log_dir=out", "seed=1,2", *arguments,
                                    env=environment)  # fmt: skip
            self.assertEqual(os.listdir(self.folder), ["tmp"])
            self.assertEqual(os.listdir(self.folder + "/tmp"), ["of_others"])
            return done

        done = sweep("--leaves_nothing")
        self.assertEqual(done.returncode, 0, done)
        self.assertTrue(done.stderr.startswith(
            "sweep: dry run of 2 jobs, of which nothing stays in out\n"), done.stderr)  # fmt: skip
        self.assertRegex(done.stdout, r"(?s)^# seed=1\n.*pid \d+ .*\n# seed=2\n.*pid \d+ ")
        self.assertEqual(re.findall(r"finished +(\d)", done.stdout), ["1", "2"])
        done = sweep("--leaves_nothing", "fail=disk on fire")
        self.assertEqual(done.returncode, 1, done)
        self.assertEqual(len(re.findall(r"failed +\d +disk on fire", done.stdout)), 2, done.stdout)
        self.assertIn("# seed=2\n", done.stdout)
        # What contradicts it is refused.
        for arguments, problem in (
            (["--leaves_nothing", "--sweep_report"], "--sweep_report=true has nothing to show: "),
            (["leaves_nothing=true,false"], "2 of the 4 jobs leave nothing on disk"),
            (["--leaves_nothing", "--launcher=slurm"],
             "--multirun=true would queue its jobs with launcher slurm, "),
        ):  # fmt: skip
            done = sweep(*arguments)
            self.assertEqual((done.returncode, done.stdout), (2, ""), done)
            self.assertIn("error: " + problem, done.stderr)
        done = sweep("--leaves_nothing", "--launcher=slurm", "--dry_run")
        self.assertEqual(done.returncode, 0, done)
        self.assertIn("#SBATCH", done.stdout)

    def test_a_folder_that_cannot_be_made(self):
        self.write("out", "")
        done = self.sweep("seed=1,2")
        self.assertEqual((done.returncode, done.stderr), (2, "error: --log_dir=out cannot be written: "
                         "making folder out: Not a directory\n"))  # fmt: skip

    def test_a_job_that_cannot_start_is_alone(self):
        self.assertEqual(self.sweep("seed=1,2,3", "fail=first").returncode, 1)
        bad = os.path.join(self.folder, self.records()[0]["folder"])
        os.makedirs(bad + "/job.log.previous/full")
        done = self.sweep("seed=1,2,3", "--sweep_jobs=2")
        self.assertEqual(done.returncode, 1)
        self.assertEqual([r["status"] for r in self.records()], ["failed", "finished", "finished"])
        self.assertIn("the job cannot be started: ", self.records()[0]["reason"])

    def test_a_job_that_is_asked_to_stop_is_cancelled(self):
        parent = subprocess.Popen(
            [PROGRAM, "--multirun", "--log_dir=out", "seed=1,2", "--seconds=600", "--slow_from=2"],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
        deadline = time.monotonic() + 60
        while not glob.glob(self.folder + "/out/seed=2*/job.log") and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(self.wait_for_pids(1)[0], signal.SIGTERM)
        parent.communicate(timeout=60)
        self.assertEqual(parent.returncode, 1)
        self.assertEqual([r["status"] for r in self.records()], ["finished", "cancelled"])
        self.assertIn("1 to run (1 cancelled)", self.sweep("seed=1,2").stderr)

    def test_each_signal_that_stops_a_run_stops_a_sweep_in_good_order(self):
        parent = subprocess.Popen(
            [PROGRAM, "--multirun", "--log_dir=out", "seed=1,2", "--seconds=600"],
            cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        pids = self.wait_for_pids(1)
        parent.send_signal(signal.SIGUSR1)
        self.assertEqual(parent.wait(60), 128 + signal.SIGUSR1)
        self.assertEqual([self.alive(pid) for pid in pids], [False] * len(pids))
        report = self.sweep("seed=1,2", "--seconds=600", "--sweep_report")
        self.assertEqual([line.split()[1] for line in report.stdout.splitlines()[1:]], ["missing"] * 2)

    def test_what_needs_a_folder_has_the_job_s(self):
        done = self.sweep("lr=1,2", "--needs_folder")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([r["status"] for r in self.records()], ["finished"] * 2)

    def test_what_is_tried_makes_jobs_though_it_changes_no_result(self):
        done = self.sweep("slow_from=1,2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(self.records()), 2)
        self.assertIn("2 jobs, 2 have finished, 0 to run", self.sweep("slow_from=1,2").stderr)

    def test_jobs_with_long_names_have_folders_of_their_own(self):
        done = self.sweep("text=choice(%s)" % ("a" * 140), "seed=range(0,20)")
        self.assertEqual(done.returncode, 0, done.stderr)
        records = self.records()
        self.assertEqual(len({r["folder"] for r in records}), 20)
        for record in records:
            with open(os.path.join(self.folder, record["folder"], "config.yaml")) as f:
                self.assertIn("seed: %s\n" % record["overrides"]["seed"], f.read())

    def test_what_starts_the_ranks_may_be_tried(self):
        done = self.sweep("grace_s=1,2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(self.records()), 2)
        self.assertIn("2 jobs, 2 have finished, 0 to run", self.sweep("grace_s=1,2").stderr)

    def test_gpus_are_shared_out(self):
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES="0,1,2,3")
        done = self.run_program("--multirun", "--log_dir=out", "seed=1,2", "--sweep_jobs=2",
                                env=environment)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([re.search("gpus '(.*?)'", self.log(r)).group(1) for r in self.records()],
                         ["0,1", "2,3"])  # fmt: skip

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
        self.assertIn("sweep: 5 jobs, 2 have finished, 3 to run (3 missing), in out\n", done.stderr)

    def test_results_are_read_under_the_lock(self):
        self.assertEqual(self.sweep("seed=1,2").returncode, 0)
        metrics = os.path.join(self.folder, self.records()[0]["folder"], "metrics.jsonl")
        # Who opens it waits for the other end.
        os.remove(metrics)
        os.mkfifo(metrics)
        sweep = subprocess.Popen([PROGRAM, "--multirun", "--log_dir=out", "seed=1,2"],
                                 cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 text=True)  # fmt: skip
        self.addCleanup(sweep.kill)
        result = None
        deadline = time.monotonic() + 60
        while result is None and time.monotonic() < deadline:
            try:
                result = os.open(metrics, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads it yet
                time.sleep(0.02)
        self.assertIsNotNone(result)
        folder = os.open(self.folder + "/out", os.O_RDONLY)
        try:
            with self.assertRaises(BlockingIOError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(result, b'{"step": 3, "test/accuracy": 7}\n')
        finally:
            os.close(folder)
            os.close(result)
        out, err = sweep.communicate(timeout=60)
        self.assertIn("2 jobs, 2 have finished, 0 to run", err)
        self.assertEqual(out.splitlines()[1].split()[0], "7")

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
