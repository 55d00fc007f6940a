#!/usr/bin/env python3
"""The command line of //tools:train, as far as it needs little training."""

import glob
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")

import program_case  # noqa: E402
import xml_unittest  # noqa: E402


class TrainTest(program_case.ProgramCase):
    PROGRAM = "tools/train"

    def test_jobs_of_a_sweep_share_no_file_that_they_write(self):
        done = self.run_program("--multirun", "--print_config", "--log_dir=out", "seed=1,2",
                                "--launcher=local", "--local_log_dir=ranks", "--predictions=p.csv",
                                "--bench_json=b.json")  # fmt: skip
        self.assertEqual((done.returncode, done.stderr), (0, ""), done)
        for name, pattern in (
            ("dir", r"out/seed=\d-\w+"),
            ("dir", r"out/seed=\d-\w+/checkpoints"),
            ("log_dir", r"out/seed=\d-\w+/ranks"),
            ("predictions", r"out/seed=\d-\w+/p.csv"),
            ("bench_json", r"out/seed=\d-\w+/b.json"),
        ):
            found = re.findall(r"^ *%s: (%s)$" % (name, pattern), done.stdout, re.MULTILINE)
            self.assertEqual(len(set(found)), 2, (name, pattern, done.stdout))
        self.assertEqual(os.listdir(self.folder), [])

    def test_a_dry_run_leaves_nothing(self):
        run = ["--model=mlp", "--dataset=synthetic", "--train_size=64", "--test_size=16",
               "--nproc_per_node=1", "--run_dir=auto"]  # fmt: skip
        files = ["--launcher=local", "--local_log_dir=ranks", "launcher.local.redirects=3",
                 "--bench_json=steps/b.json"]  # fmt: skip
        for arguments in (["--dry_run"], ["--dry_run", *files], ["--launcher=slurm", "--slurm_dry_run"]):
            done = self.run_program(*run, *arguments)
            self.assertEqual(done.returncode, 0, done)
            self.assertEqual(os.listdir(self.folder), [])
        sweep = [*run, "--multirun", "--dry_run", "seed=1,2"]
        done = self.run_program(*sweep, "--launcher=local", "--local_log_dir=ranks",
                                "--bench_json=b.json")  # fmt: skip
        self.assertEqual(done.returncode, 0, done)
        self.assertEqual(len(re.findall(r"(?m)^dry run: \d steps?, ", done.stdout)), 2, done.stdout)
        self.assertEqual(os.listdir(self.folder), [])
        done = self.run_program(*sweep, "--launcher=slurm")
        self.assertEqual(done.returncode, 2, done)
        self.assertIn("leave nothing on disk", done.stderr)
        self.assertEqual(os.listdir(self.folder), [])

    SMALL = ["--model=mlp", "--dataset=synthetic", "--train_size=64", "--test_size=16"]

    def test_a_job_that_is_killed_before_its_first_save_stays_the_same_job(self):
        # Its number of ranks is the launcher's default.
        sweep = ["--multirun", "--log_dir=out", *self.SMALL, "--epochs=100000", "seed=1,2"]
        parent = subprocess.Popen(
            [os.path.join(program_case.RUNFILES, self.PROGRAM), *sweep, "checkpoint.every=100000"],
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)  # fmt: skip
        deadline = time.monotonic() + 120
        while not glob.glob(self.folder + "/out/seed=1-*/run.yaml") and time.monotonic() < deadline:
            time.sleep(0.05)
        parent.kill()
        parent.wait()
        (first,) = glob.glob(self.folder + "/out/seed=1-*")
        self.assertIn("run.yaml", os.listdir(first))
        self.assertEqual(glob.glob(first + "/checkpoints/*.pt"), [])
        sweep.append("--stop_at_step=2")
        for message in ("2 to run (2 missing)", "2 have finished, 0 to run"):
            done = self.run_program(*sweep)
            self.assertEqual(done.returncode, 0, done)
            self.assertIn(message, done.stderr)
            self.assertEqual(len(glob.glob(self.folder + "/out/seed=*")), 2)
        done = self.run_program(*sweep, "--sweep_report")
        self.assertEqual(len(re.findall(r"\bfinished\b", done.stdout)), 2, done)

    def test_where_a_process_stops_may_be_tried(self):
        sweep = ["--multirun", "--log_dir=out", *self.SMALL, "--nproc_per_node=1", "--epochs=9",
                 "stop_at_step=1,2"]  # fmt: skip
        for message in ("2 to run (2 missing)", "2 have finished, 0 to run"):
            done = self.run_program(*sweep)
            self.assertEqual(done.returncode, 0, done)
            self.assertIn(message, done.stderr)
        # The configuration of a run has no such option.
        for config in glob.glob(self.folder + "/out/*/config.yaml"):
            with open(config) as f:
                self.assertIn("stop_at_step: 0\n", f.read())

    def test_the_folder_of_an_evaluation(self):
        run = ["--model=mlp", "--dataset=synthetic", "--train_size=64", "--test_size=16",
               "--nproc_per_node=1"]  # fmt: skip
        # There is no checkpoint in a new folder.
        for resume in (["--resume=auto"], ["--resume=best", "--keep_best=test/loss:min"]):
            for arguments in ([], ["--multirun", "seed=1,2"]):
                self.expect_error(
                    [*run, "--eval_only", *resume, "--run_dir=auto", *arguments],
                    "--run_dir=auto is a new folder, and the run needs a checkpoint in its folder; "
                    "give the run_dir of the run that has saved it, or checkpoint_dir, or in resume "
                    "the path of a checkpoint")  # fmt: skip
        done = self.run_program(*run, "--max_steps=1", "--checkpoint_dir=saved")
        self.assertEqual(done.returncode, 0, done)
        (checkpoint,) = glob.glob(self.folder + "/saved/*.pt")
        for where in ("--resume=" + checkpoint, "--resume=auto --checkpoint_dir=saved"):
            done = self.run_program(*run, "--eval_only", "--run_dir=auto", *where.split())
            self.assertEqual(done.returncode, 0, done)
            (folder,) = os.listdir(self.folder + "/runs")
            written = os.listdir(self.folder + "/runs/" + folder)
            self.assertIn("config.yaml", written)
            with open("%s/runs/%s/metrics.jsonl" % (self.folder, folder)) as f:
                self.assertIn("test/accuracy", f.read())
            shutil.rmtree(self.folder + "/runs")

    def values(self, folder):
        """The last of each tag in metrics.jsonl."""
        found = {}
        with open(os.path.join(self.folder, folder, "metrics.jsonl")) as f:
            for line in f:
                found.update(json.loads(line))
        return found

    def test_each_metric_that_has_a_name(self):
        names = "perplexity,f1,confusion,top1,top5,top10"
        done = self.run_program(*self.SMALL, "--nproc_per_node=2", "--epochs=1", "--log_dir=out",
                                "--metrics=" + names)  # fmt: skip
        self.assertEqual(done.returncode, 0, done)
        values = self.values("out")
        self.assertAlmostEqual(values["test/perplexity"] / math.exp(values["test/loss"]), 1, places=4)
        accuracy = values["test/accuracy"]
        self.assertEqual(values["test/accuracy_top1"], accuracy)
        self.assertLessEqual(accuracy, values["test/accuracy_top5"])
        self.assertEqual(values["test/accuracy_top10"], 1)  # of 10 classes
        self.assertAlmostEqual(values["test/f1_micro"], accuracy)
        table = {line[:13].strip(): line[13:].split() for line in done.stdout.splitlines()}
        self.assertEqual(table["accuracy"], ["%.4f" % accuracy, "16"])
        for row, tag in (("mean", "test/f1_macro"), ("weighted mean", "test/f1_weighted")):
            self.assertEqual(table[row][2:], ["%.4f" % values[tag], "16"])
        self.assertEqual(sum(int(table[str(digit)][-1]) for digit in range(10)), 16)
        # Of two classes. The score grows with x: of the 8 pairs of an example of class 1 and one of
        # class 0, class 1 has the greater score in 6.
        self.write("train.csv", "x,target\n" + "-1.0,0\n0.0,0\n0.0,1\n1.0,1\n" * 32)
        self.write("test.csv", "x,target\n-1.0,1\n0.0,0\n0.0,0\n1.0,1\n1.0,1\n1.0,1\n")
        done = self.run_program("--model=mlp", "--dataset=csv", "--data_dir=.", "--nproc_per_node=2",
                                "--batch_size=16", "--lr=0.1", "--epochs=20", "--log_dir=auc",
                                "--metrics=auc")  # fmt: skip
        self.assertEqual(done.returncode, 0, done)
        self.assertEqual(self.values("auc")["test/auc"], 0.75)

    def test_size_program_and_host_are_in_run_yaml_and_in_no_checkpoint(self):
        def run(folder, program, arguments, **variables):
            os.mkdir(folder)
            done = subprocess.run([program, *arguments], cwd=folder, stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, timeout=120,
                                  env={**os.environ, **variables})  # fmt: skip
            self.assertEqual(done.returncode, 0, done)
            return done

        def saved(folder):
            """The bytes of each file; notes beside a checkpoint have its time."""
            found = {}
            for path in glob.glob(folder + "/saved/**", recursive=True):
                if os.path.isfile(path):
                    with open(path, "rb") as f:
                        found[os.path.relpath(path, folder)] = f.read()
            self.assertGreater(len(found), 0)
            return found

        def text(path):
            with open(path) as f:
                return f.read()

        program = os.path.realpath(os.path.join(RUNFILES, self.PROGRAM))
        # A copy does not find its libraries beside it. Bytes behind its end make it another build.
        other = self.folder + "/other_program"
        shutil.copy(program, other)
        os.chmod(other, 0o755)
        with open(other, "ab") as f:
            f.write(b"x")
        listed = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
        libraries = {os.path.dirname(path) for path in re.findall(r"=> (/\S+)", listed)}
        for form, size in (("pt", "1"), ("sharded", "2")):
            with self.subTest(form):
                first, second, third = ("%s/%s_%s" % (self.folder, form, name)
                                        for name in ("first", "second", "repeated"))  # fmt: skip
                # The size is none of the options.
                arguments = [*self.SMALL, "--max_steps=2", "--log_dir=log", "--checkpoint_dir=saved",
                             "--checkpoint_format=" + form]  # fmt: skip
                run(first, program, arguments, PET_NPROC_PER_NODE=size)
                run(second, other, arguments, PET_NPROC_PER_NODE=size,
                    LD_LIBRARY_PATH=":".join(sorted(libraries)))  # fmt: skip
                done = run(third, program, ["--config=%s/log/config.yaml" % first])
                self.assertIn("world size %s, as %s/log/run.yaml says\n" % (size, first), done.stderr)
                record = text(first + "/log/run.yaml")
                self.assertIn("world_size: %s\n" % size, record)
                self.assertIn(program, record)
                self.assertIn(other, text(second + "/log/run.yaml"))
                checkpoints = saved(first)
                self.assertEqual(sorted(saved(second)), sorted(checkpoints))
                for name, contents in checkpoints.items():
                    self.assertTrue(saved(second)[name] == contents, name)
                    self.assertTrue(saved(third)[name] == contents, name)
                    for line in record.splitlines():
                        if not line.startswith("nnodes: "):  # an option, too
                            self.assertFalse(line.encode() in contents, (name, line))
                    self.assertFalse(program.encode() in contents, name)
                self.assertEqual(text(third + "/log/config.yaml"), text(first + "/log/config.yaml"))


if __name__ == "__main__":
    xml_unittest.main()
