#!/usr/bin/env python3
"""Sweeps in a queue, as their user sees them."""

import glob
import json
import os
import re
import shutil
import signal
import sys
import time

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path[:0] = [RUNFILES + "/tests/support", RUNFILES + "/ddp/config"]

import xml_unittest  # noqa: E402
from testing_case import Case  # noqa: E402


class QueueTest(Case):
    def with_queue(self):
        """An environment with a queue: `bin/sbatch` takes jobs, number 7 and so on, and `squeue` shows
        the lines "ID STATE" of the file `queue`."""
        self.write("queue", "")
        self.write("number", "6\n")
        self.write("bin/squeue", "#!/bin/sh\necho asked >>%(f)s/asked\ncat %(f)s/queue\n"
                   % {"f": self.folder})
        self.write("bin/sbatch", "#!/bin/sh\nn=$(($(cat %(f)s/number) + 1))\necho $n >%(f)s/number\n"
                   "echo $n\n" % {"f": self.folder})  # fmt: skip
        self.write("bin/scontrol", "#!/bin/sh\necho MaxArraySize = 1001\n")
        for name in ("sbatch", "squeue", "scontrol"):
            os.chmod(os.path.join(self.folder, "bin", name), 0o755)
        return dict(os.environ, PATH=self.folder + "/bin:" + os.environ["PATH"])

    QUEUED = ["--launcher=slurm", "--slurm_stage_dir=stage", "--multirun", "--log_dir=out"]

    def job_folders(self):
        return {re.match(r"seed=(\d+)-", name).group(1): "out/" + name
                for name in os.listdir(self.folder + "/out") if name.startswith("seed=")}  # fmt: skip

    def states(self, stdout):
        """By seed."""
        lines = [line.split() for line in stdout.splitlines()]
        seed = lines[0].index("seed")
        status = lines[0].index("status")
        return {line[seed]: line[status] for line in lines[1:]}

    def submissions(self):
        with open(os.path.join(self.folder, "number")) as f:
            return int(f.read()) - 6

    def test_a_job_is_never_twice_in_a_queue(self):
        environment = self.with_queue()
        command = [*self.QUEUED, "seed=range(0,6)"]
        done = self.run_program(*command, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("sweep: 6 jobs, 0 have finished, 6 to run (6 missing), in out\n", done.stderr)
        self.assertEqual(set(self.states(done.stdout).values()), {"queued"})
        jobs = self.job_folders()
        # 0 has finished, 1 has failed, 2 was cancelled, 3 was requeued and has the exit code of its
        # first life, 4 runs, 5 waits.
        self.write("queue", "7_3 PD\n7_4 R\n7_5 PD\n")
        for seed, code in (("0", 0), ("1", 1), ("2", 143), ("3", 143)):
            self.write(jobs[seed] + "/exit_code", "%d\n" % code)
        self.write(jobs["1"] + "/job.log", "error: disk on fire\n")
        self.write(jobs["4"] + "/job.log", "epoch 2/3 step 4/10 loss 1 eta 6s\n")
        self.write(jobs["4"] + "/metrics.jsonl", '{"step": 10, "time": 100, "test/accuracy": 0.5}\n'
                   '{"step": 14, "time": 108, "train/loss": 1}\n')  # fmt: skip
        expected = {"0": "finished", "1": "failed", "2": "cancelled", "3": "queued", "4": "running",
                    "5": "queued"}  # fmt: skip
        before = sorted(glob.glob(self.folder + "/out/**", recursive=True))
        for _ in range(2):
            report = self.run_program(*command, "--sweep_report", env=environment)
            self.assertEqual((report.returncode, report.stderr), (0, ""))
            self.assertEqual(self.states(report.stdout), expected, report.stdout)
            self.assertRegex(report.stdout, r"^test/accuracy +status +epoch +eta +train/loss +seed\n")
            self.assertRegex(report.stdout, r"(?m)^0.5 +running +2/3 +32s +1 +4$")
            self.assertIn("disk on fire", report.stdout)
        self.assertEqual(self.submissions(), 1)
        self.assertEqual(sorted(glob.glob(self.folder + "/out/**", recursive=True)), before)
        # The same command runs the two again, and no other.
        done = self.run_program(*command, env=environment)
        self.assertIn("sweep: 6 jobs, 1 have finished, 2 queued, 1 running, 2 to run (1 failed, 1 "
                      "cancelled), in out\n", done.stderr)  # fmt: skip
        self.assertIn("seed=1: failed: disk on fire\n", done.stderr)
        self.assertEqual(self.submissions(), 2)
        expected.update({"1": "queued", "2": "queued"})
        self.assertEqual(self.states(done.stdout), expected)
        self.assertNotIn("disk on fire", done.stdout)
        # While all wait, a third does nothing.
        self.write("queue", "7_3 PD\n7_4 R\n7_5 PD\n8_0 PD\n8_1 R\n")
        done = self.run_program(*command, env=environment)
        self.assertIn(" 0 to run", done.stderr)
        self.assertEqual(self.submissions(), 2)
        # What has finished meanwhile stays finished, though another call has submitted it since.
        self.write("queue", "")
        for seed in "12345":
            self.write(jobs[seed] + "/exit_code", "0\n")
        done = self.run_program(*command, env=environment)
        self.assertEqual(done.returncode, 0)
        self.assertEqual(set(self.states(done.stdout).values()), {"finished"})
        self.assertEqual(self.submissions(), 2)

    def test_a_submission_without_an_answer_is_not_made_again(self):
        environment = self.with_queue()
        command = [*self.QUEUED, "seed=1,2"]
        sbatch = open(self.folder + "/bin/sbatch").read()
        # The queue takes the jobs, and the call dies before it knows their ids.
        self.write("bin/sbatch", "#!/bin/sh\necho $2 >%s/script\nkill -9 $PPID\n" % self.folder)
        self.assertEqual(self.run_program(*command, env=environment).returncode, -signal.SIGKILL)
        self.write("bin/sbatch", sbatch)
        script = open(self.folder + "/script").read().strip()
        folders = [folder for _, folder in sorted(self.job_folders().items())]
        files = [os.path.join(self.folder, folder, "job_id") for folder in folders]
        for index, file in enumerate(files):
            with open(file) as f:
                line = r"^submitting \S+Z \S+ \d+ %d - %s\n$" % (index, re.escape(script))
                self.assertRegex(f.read(), line)
        # They may come yet.
        for arguments in (command, ["--multirun", "--log_dir=out", "seed=1,2"]):
            done = self.run_program(*arguments, env=environment)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("2 jobs, 0 have finished, 2 unknown, 0 to run", done.stderr)
            self.assertEqual(done.stderr.count(": unknown: it may come into the queue yet: submitting "), 2)
            self.assertEqual(self.states(done.stdout), {"1": "unknown", "2": "unknown"})
        # They have come: squeue is asked for scripts, and for states.
        self.write("queue", "7 %s\n7_0 PD\n7_1 R\n" % script)
        done = self.run_program(*command, env=environment)
        self.assertIn("1 queued, 1 running, 0 to run", done.stderr)
        self.assertEqual(self.states(done.stdout), {"1": "queued", "2": "running"})
        self.assertEqual(self.submissions(), 0)
        # They never came.
        self.write("queue", "")
        for file in files:
            with open(file, "r+") as f:
                text = re.sub(r"submitting \S+", "submitting 2020-01-01T00:00:00Z", f.read())
                f.seek(0)
                f.truncate(f.write(text))
        done = self.run_program(*command, env=environment)
        self.assertIn("2 to run (2 cancelled)", done.stderr)
        self.assertEqual(self.submissions(), 1)
        for index, file in enumerate(files):
            with open(file) as f:
                self.assertEqual(f.read(), "7_%d\n" % index)

    def test_a_signal_waits_for_the_ids_of_what_is_being_submitted(self):
        environment = self.with_queue()
        sbatch = open(self.folder + "/bin/sbatch").read()
        self.write("bin/sbatch", sbatch.replace("#!/bin/sh\n", "#!/bin/sh\nkill -INT $PPID\nsleep 0.2\n"))
        done = self.run_program(*self.QUEUED, "seed=1,2", env=environment)
        self.assertEqual(done.returncode, 128 + signal.SIGINT, done.stderr)
        self.assertIn("left in the queue: 7_0 7_1\n", done.stderr)
        self.assertEqual(self.states(done.stdout), {"1": "queued", "2": "queued"})
        for seed, folder in self.job_folders().items():
            with open(os.path.join(self.folder, folder, "job_id")) as f:
                self.assertEqual(f.read(), "7_%d\n" % (int(seed) - 1))

    def interrupted(self, environment, asked_before):
        """A call that waits for its jobs, and is interrupted when it asks squeue again."""
        self.write("asked", "")
        self.write("bin/squeue", "#!/bin/sh\necho asked >>%(f)s/asked\ncat %(f)s/queue\n"
                   "[ $(wc -l <%(f)s/asked) -le %(n)d ] || kill -INT $PPID\n"
                   % {"f": self.folder, "n": asked_before})  # fmt: skip
        done = self.run_program(*self.QUEUED, "--slurm_wait", "--on_interrupt=cancel", "seed=1,2",
                                env=environment)  # fmt: skip
        self.assertEqual(done.returncode, 128 + signal.SIGINT, done.stderr)
        with open(self.folder + "/out/sweep.jsonl") as f:
            written = [json.loads(line) for line in f]
        states = self.states(done.stdout)
        self.assertEqual([job["status"] for job in written],
                         [states[str(job["overrides"]["seed"])] for job in written])  # fmt: skip
        return done.stderr, states

    def test_an_interrupt_cancels_what_it_can(self):
        environment = self.with_queue()
        self.write("bin/scancel", "#!/bin/sh\necho $* >>%s/cancelled\n" % self.folder)
        os.chmod(self.folder + "/bin/scancel", 0o755)
        self.write("queue", "7_0 PD\n7_1 R\n")
        stderr, states = self.interrupted(environment, asked_before=0)
        self.assertIn("\ncancelled: 7_0 7_1\n", stderr)
        self.assertEqual(states, {"1": "queued", "2": "running"})
        with open(self.folder + "/cancelled") as f:
            self.assertEqual(f.read(), "7_0 7_1\n")
        # scancel fails for one of them.
        self.write("bin/scancel", "#!/bin/sh\necho 'scancel: error: Kill job error on job id 7_1: "
                   "Access denied' >&2; exit 1\n")  # fmt: skip
        stderr, states = self.interrupted(environment, asked_before=1)
        self.assertIn("\ncancelled: 7_0\n", stderr)
        self.assertIn("\nerror: scancel: Kill job error on job id 7_1: Access denied\n", stderr)
        self.assertEqual(states, {"1": "queued", "2": "running"})
        # One may come into the queue yet: squeue is asked for scripts, and for states.
        submitting = "submitting %s login 1 1 - /stage/job.sh" % time.strftime("%FT%TZ", time.gmtime())
        self.write(self.job_folders()["2"] + "/job_id", submitting + "\n")
        self.write("bin/scancel", "#!/bin/sh\n")
        self.write("queue", "7_0 PD\n")
        stderr, states = self.interrupted(environment, asked_before=2)
        self.assertIn("\ncancelled: 7_0\n", stderr)
        self.assertIn("\nerror: the queue does not have it yet: %s\n" % submitting, stderr)
        self.assertEqual(states, {"1": "queued", "2": "unknown"})
        self.assertEqual(self.submissions(), 1)

    def test_jobs_without_an_end_share_one_wait(self):
        environment = self.with_queue()
        command = [*self.QUEUED, "seed=range(0,8)"]
        self.run_program(*command, env=environment)
        # One wait is 10 s. The call submits the jobs again afterwards.
        began = time.monotonic()
        done = self.run_program(*command, env=environment)
        self.assertLess(time.monotonic() - began, 40)
        self.assertEqual(done.stderr.count("cancelled: job 7_"), 8, done.stderr)
        self.assertIn("8 to run (8 cancelled)", done.stderr)
        self.assertEqual(set(self.states(done.stdout).values()), {"queued"})
        self.assertEqual(self.submissions(), 2)

    def test_jobs_that_the_queue_refuses(self):
        environment = self.with_queue()
        self.write("bin/sbatch", "#!/bin/sh\necho no >&2; exit 1\n")
        for _ in range(2):
            done = self.run_program(*self.QUEUED, "seed=1,2", env=environment)
            self.assertEqual(done.stderr.splitlines()[-1], "error: sbatch refuses the job: no")
            self.assertNotIn("failed", done.stderr)
        # It takes one of two arrays: that one is watched, and shown, all the same.
        self.with_queue()
        sbatch = open(self.folder + "/bin/sbatch").read()
        self.write("bin/sbatch", sbatch.replace(
            "#!/bin/sh\n", "#!/bin/sh\n! grep -q time=6 $2 || { echo no >&2; exit 1; }\n"))  # fmt: skip
        done = self.run_program(*self.QUEUED, "seed=1,2", "--slurm_time=5,6", env=environment)
        self.assertEqual(done.returncode, 1, done)
        self.assertIn("error: sbatch refuses the job: no\n", done.stderr)
        table = [line.split()[1] for line in done.stdout.splitlines()]
        self.assertEqual(table.count("queued"), 2, done.stdout)
        with open(self.folder + "/out/sweep.jsonl") as f:
            self.assertEqual([json.loads(line)["status"] for line in f].count("queued"), 2)
        shutil.rmtree(self.folder + "/out")
        # A queue that does not answer could take a job twice.
        self.write("bin/sbatch", "#!/bin/sh\necho 7\n")
        self.run_program(*self.QUEUED, "seed=1,2", env=environment)
        self.write("bin/squeue", "#!/bin/sh\necho down >&2; exit 1\n")
        done = self.run_program(*self.QUEUED, "seed=1,2", env=environment)
        self.assertEqual(done.returncode, 1)
        self.assertIn("error: the queue does not answer", done.stderr)

    def test_results_stay_if_the_queue_refuses_to_run_changed_jobs_again(self):
        environment = self.with_queue()
        command = [*self.QUEUED, "seed=1,2", "--sweep_rerun=changed"]
        self.run_program(*command, env=environment)
        for job in self.job_folders().values():
            self.write(job + "/exit_code", "0\n")
            self.write(job + "/build", "of another program\n")
        before = sorted(glob.glob(self.folder + "/out/**", recursive=True))
        with open(self.folder + "/bin/sbatch") as f:
            sbatch = f.read()
        self.write("bin/sbatch", "#!/bin/sh\necho no >&2; exit 1\n")
        done = self.run_program(*command, env=environment)
        self.assertIn("2 to run (2 changed)", done.stderr)
        self.assertEqual(done.stderr.splitlines()[-1], "error: sbatch refuses the job: no")
        self.assertEqual(sorted(glob.glob(self.folder + "/out/**", recursive=True)), before)
        report = self.run_program(*command, "--sweep_report", env=environment)
        self.assertEqual(self.states(report.stdout), {"1": "finished", "2": "finished"})
        self.write("bin/sbatch", sbatch)
        done = self.run_program(*command, env=environment)
        self.assertEqual(self.states(done.stdout), {"1": "queued", "2": "queued"}, done.stderr)
        self.assertEqual(len(os.listdir(self.folder + "/out/previous")), 2)

    def test_the_limit_holds_with_jobs_of_earlier_calls(self):
        environment = self.with_queue()
        command = [*self.QUEUED, "seed=0,1,2", "--sweep_jobs=2"]
        self.run_program(*command, env=environment)
        jobs = self.job_folders()
        self.write("queue", "7_0 R\n7_2 PD\n")
        self.write(jobs["1"] + "/exit_code", "1\n")
        done = self.run_program(*command, env=environment)
        self.assertIn(" 1 to run (1 failed)", done.stderr)
        with open(os.path.join(self.folder, jobs["1"], "job.sh")) as f:
            self.assertIn("\n#SBATCH --dependency=afterany:7\n", f.read())

    def test_a_report_without_an_answer_of_the_queue_says_so(self):
        environment = self.with_queue()
        command = [*self.QUEUED, "seed=range(0,4)"]
        self.run_program(*command, env=environment)
        # 2 may have been queued again.
        jobs = self.job_folders()
        for seed, code in (("0", 0), ("1", 1), ("2", 143)):
            self.write(jobs[seed] + "/exit_code", "%d\n" % code)
        self.write("bin/squeue", "#!/bin/sh\necho down >&2; exit 1\n")
        for arguments in (command, ["--multirun", "--log_dir=out", "seed=range(0,4)"]):
            report = self.run_program(*arguments, "--sweep_report", env=environment)
            self.assertEqual(report.returncode, 0)
            self.assertRegex(report.stderr, r"^warning: jobs may be in a queue, .*: down\n$")
            self.assertEqual(self.states(report.stdout),
                             {"0": "finished", "1": "failed", "2": "unknown", "3": "unknown"})  # fmt: skip
        # The report needs no answer of the queue once each job has a result.
        for seed in "23":
            self.write(jobs[seed] + "/exit_code", "0\n")
        report = self.run_program(*command, "--sweep_report", env=environment)
        self.assertEqual((report.returncode, report.stderr), (0, ""))

    def test_queued_jobs_stay_in_the_queue_though_none_is_named(self):
        environment = self.with_queue()
        self.run_program(*self.QUEUED, "seed=range(0,4)", env=environment)
        here = ["--multirun", "--log_dir=out", "seed=range(0,4)"]
        jobs = self.job_folders()
        self.write("queue", "7_0 PD\n7_1 R\n")
        self.write(jobs["1"] + "/job.log", "epoch 1\n")
        self.write(jobs["2"] + "/exit_code", "1\n")
        self.write(jobs["3"] + "/exit_code", "0\n")
        expected = {"0": "queued", "1": "running", "2": "failed", "3": "finished"}
        report = self.run_program(*here, "--sweep_report", env=environment)
        self.assertEqual((report.returncode, report.stderr), (0, ""))
        self.assertEqual(self.states(report.stdout), expected)
        done = self.run_program(*here, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("1 have finished, 1 queued, 1 running, 1 to run (1 failed)", done.stderr)
        self.assertEqual(self.states(done.stdout), {**expected, "2": "finished"})
        self.assertEqual([os.path.exists(os.path.join(self.folder, jobs[seed], "exit_code"))
                          for seed in "01"], [False, False])  # fmt: skip
        with open(os.path.join(self.folder, jobs["1"], "job.log")) as f:
            self.assertEqual(f.read(), "epoch 1\n")
        # Without an answer they may be there.
        self.write("bin/squeue", "#!/bin/sh\necho down >&2; exit 1\n")
        for path, why in ((environment["PATH"], ": down; "), ("/nowhere", "finds no squeue in PATH")):
            done = self.run_program(*here, env=dict(environment, PATH=path))
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, r"^error: jobs may be in a queue \(7_0, 7_1\), .*"
                             + re.escape(why) + ".*launcher=slurm .*job_id in their folders\n$")  # fmt: skip
        self.assertEqual(self.submissions(), 1)

    def test_the_reason_of_a_second_attempt_is_not_that_of_the_first(self):
        environment = self.with_queue()
        command = [*self.QUEUED, "seed=1,2"]
        self.run_program(*command, env=environment)
        jobs = list(self.job_folders().values())
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

    def test_a_job_with_an_exit_code_is_about_to_leave_the_queue(self):
        environment = self.with_queue()
        command = [*self.QUEUED, "seed=1,2"]
        self.run_program(*command, env=environment)
        self.write("queue", "7_0 R\n7_1 R\n")
        self.write(self.job_folders()["1"] + "/exit_code", "0\n")
        report = self.run_program(*command, "--sweep_report", env=environment)
        self.assertEqual(report.returncode, 0, report.stderr)
        self.assertEqual(self.states(report.stdout), {"1": "finished", "2": "running"})

    def test_jobs_ask_for_what_their_own_options_say(self):
        done = self.run_program("--launcher=slurm", "--dry_run", "--multirun", "nnodes=1,2,4",
                                "--log_dir=out")  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(re.findall(r"#SBATCH --nodes=(\d+)", done.stdout), ["1", "2", "4"])


if __name__ == "__main__":
    xml_unittest.main()
