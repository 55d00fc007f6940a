#!/usr/bin/env python3
"""config::Program as its user sees it: files, overrides, and what it says of mistakes."""

import os
import re
import subprocess
import sys

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path[:0] = [RUNFILES + "/tests/support", RUNFILES + "/ddp/config"]

import xml_unittest  # noqa: E402
from testing_case import PROGRAM, Case  # noqa: E402


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

    def test_the_place_of_the_file_itself_among_its_defaults(self):
        self.write("first.yaml", "lr: 1\nseed: 1\ntext: first\n")
        self.write("last.yaml", "text: last\n")
        for defaults, seed, text in (
            ("[first, last, _self_]", 2, "own"), ("[first, last]", 2, "own"),
            ("[first, _self_, last]", 2, "last"), ("[_self_, first]", 1, "first"),
        ):  # fmt: skip
            with self.subTest(defaults):
                self.write("run.yaml", "seed: 2\ntext: own\ndefaults: %s\n" % defaults)
                effective = self.effective("--config=run.yaml")
                for line in ("lr: 1", "seed: %d" % seed, "text: " + text):
                    self.assertIn(line + "\n", effective)

    def test_several_files_and_files_of_groups(self):
        self.write("a.yaml", "lr: 1\nseed: 1\ntext: a\n")
        self.write("b.yaml", "seed: 2\ntext: b\n")
        self.write("conf/run.yaml", "lr: 4\n")
        self.write("conf/model/cnn.yaml", "model: {name: cnn}\nlr: 5\nseed: 5\n")
        text = self.effective("--config=a.yaml", "text=c", "--config=b.yaml")
        for line in ("lr: 1", "seed: 2", "text: c"):
            self.assertIn(line + "\n", text)
        for arguments in (["-cp", "conf", "-cn", "run"], ["--config=conf/run.yaml"], ["-cp=conf"]):
            text = self.effective("seed=7", "model@=cnn", *arguments)
            for line in ("lr: 5", "seed: 7", "  name: cnn"):
                self.assertIn(line + "\n", text)
        # Without the @ it is a value.
        text = self.effective("model=cnn", "-cp=conf", "-cn=run")
        self.assertIn("lr: 4\n", text)
        self.assertIn("  name: cnn\n", text)

    def test_the_choices_of_an_included_file_are_replaced(self):
        self.write("base.yaml", "sweep: {seed: [1, 2], lr: [3, 4]}\n")
        self.write("run.yaml", "defaults: [base]\nlog_dir: out\nlr: 5\nsweep: {seed: [6, 7]}\n")
        jobs = lambda *arguments: re.findall(  # noqa: E731
            r"^# (.*)", self.effective("--multirun", "--config=run.yaml", *arguments), re.MULTILINE)
        self.assertEqual(jobs(), ["seed=6", "seed=7"])
        self.assertEqual(jobs("lr=8,9", "seed=1"), ["lr=8", "lr=9"])
        self.assertEqual(jobs("seed=1,2", "--config=base.yaml"),
                         ["%s %s" % (s, r) for s in ("seed=1", "seed=2") for r in ("lr=3", "lr=4")])  # fmt: skip

    def test_a_file_may_say_that_it_is_a_sweep(self):
        self.write("run.yaml", "multirun: true\nsweep_metric: test/accuracy:min\nlog_dir: out\n"
                   "sweep_jobs: 2\nsweep: {seed: [2, 1]}\n")  # fmt: skip
        done = self.run_program("--config=run.yaml")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([line.split()[0] for line in done.stdout.splitlines()],
                         ["test/accuracy", "1.5", "2.5"])  # fmt: skip
        self.assertIn("seed: 0\n", self.effective("--config=run.yaml", "--nomultirun"))

    def test_references(self):
        self.write("run.yaml", "text: ${oc.env:A_NAME,${model}}-${lr}\nmodel.config: ${text}/x\n"
                   "milestones:\n- ${seed}\n- 9\nfile: '${lr}'\nlr: 0.25\n")  # fmt: skip
        text = self.effective("--config=run.yaml", "seed=3", "lr=0.5")
        for line in ("text: mlp-0.5", "  config: mlp-0.5/x", "milestones: [3, 9]",
                     'file: "${lr}"'):  # fmt: skip
            self.assertIn(line + "\n", text)
        done = self.run_program("--config=run.yaml", "--print_config",
                                env=dict(os.environ, A_NAME="me"))  # fmt: skip
        self.assertIn("text: me-0.25\n", done.stdout)
        # A value on the command line takes the place of the reference.
        self.assertIn("text: b\n", self.effective("--config=run.yaml", "text=b"))
        # Or is one; in quotes it is text there, too, also for a job in a queue.
        text = self.effective("text=${oc.env:A_NAME,${model}}-${lr}", "file='${lr}'", "lr=0.25")
        for line in ("text: mlp-0.25", 'file: "${lr}"'):
            self.assertIn(line + "\n", text)
        done = self.run_program("text=${lr}", "file='${lr}'", "--launcher=slurm", "--dry_run")
        self.assertRegex(done.stdout, r"text=0\.5 'file=[^ ]*\$\{lr\}[^ ]+'")
        self.expect_error(["text=${oc.env:NONE_OF_ALL}"],
                          "text=${oc.env:NONE_OF_ALL} has '${oc.env:NONE_OF_ALL}', but the environment "
                          "has no NONE_OF_ALL; a default: ${oc.env:NONE_OF_ALL,VALUE}")  # fmt: skip
        self.expect_error(["--multirun", "--log_dir=out", "text=${lr},b"],
                          "text=${lr},b has a reference, which choices cannot have")  # fmt: skip
        # Of the program's own options, none is replaced.
        for option in ("--run_dir=${seed}", "--config=${oc.env:A_NAME}.yaml", "--sweep_metric=${seed}:max"):
            self.expect_error([option], option + " has a reference, and they are replaced in values of the "
                              "run's options only; in quotes it is text")  # fmt: skip
        self.assertIn("log_dir: \"${seed}/x\"\n", self.effective("--run_dir='${seed}/x'"))

    def test_a_path_with_commas_is_not_taken_for_choices(self):
        self.write("out/lr=1,seed=2/a.pt", "")
        path = "out/lr=1,seed=2/a.pt"
        self.expect_error(["--multirun", "--log_dir=out", "seed=1,2", "--resume=" + path],
                          "--resume=" + path + " is the path of a file, and its commas separate choices: "
                          "for the file put the value in quotes, for choices give choice(…)")  # fmt: skip
        text = self.effective("--multirun", "--log_dir=out", "seed=1,2", "--resume='%s'" % path)
        self.assertEqual(text.count("resume: %s\n" % path) + text.count('resume: "%s"\n' % path), 2, text)

    def test_the_folder_of_a_sweep_is_no_choice(self):
        self.expect_error(["--multirun", "log_dir=a,b", "seed=1,2"],
                          "log_dir=a,b are choices, but it is the folder of the whole sweep")  # fmt: skip

    def test_maps_are_merged(self):
        self.write("run.yaml", "model: &m {name: cnn, config: a}\nlauncher.slurm: {<<: [], "
                   "partition: x}\n")  # fmt: skip
        self.assertIn("  name: cnn\n", self.effective("--config=run.yaml"))
        self.write("merged.yaml", "sweep: {<<: [&a {seed: [1, 2]}, {seed: [3], lr: [4]}], "
                   "milestones: [[5]]}\nlog_dir: out\n")  # fmt: skip
        text = self.effective("--config=merged.yaml", "--multirun")
        self.assertEqual(re.findall("^# (.*)", text, re.MULTILINE),
                         ["milestones=[5] seed=1 lr=4", "milestones=[5] seed=2 lr=4"])  # fmt: skip

    def test_quotes_around_a_value_go(self):
        for multirun in ([], ["--multirun", "seed=1,2", "log_dir=out"]):
            for value, line in (("'a,b'", "text: a,b"), ('"it\'s"', 'text: "it\'s"'),
                                ("it's", 'text: "it\'s"'), ("'it''s'", 'text: "it\'s"'),
                                ("", 'text: ""')):  # fmt: skip
                with self.subTest((multirun, value)):
                    self.assertIn(line + "\n", self.effective("text=" + value, *multirun))

    def test_a_list_and_a_device_map_are_no_choices(self):
        text = self.effective("--multirun", "log_dir=out", "milestones=1,2", "seed=1,2",
                              "backend=cpu:gloo,cuda:nccl")  # fmt: skip
        self.assertEqual(re.findall("^# (.*)", text, re.MULTILINE), ["seed=1", "seed=2"])
        self.assertEqual(text.count("milestones: [1, 2]\n"), 2)
        self.assertEqual(text.count("backend: cpu:gloo,cuda:nccl\n"), 2)
        text = self.effective("--multirun", "log_dir=out", "milestones=choice(1,2)", "backend=gloo,shm")
        self.assertEqual(len(re.findall("^# (.*)", text, re.MULTILINE)), 4)
        text = self.effective("--multirun", "log_dir=out", "seed=1,2",
                              "backend=choice('cpu:gloo,cuda:nccl', shm)")  # fmt: skip
        self.assertEqual(text.count("backend: cpu:gloo,cuda:nccl\n"), 2)

    def test_references_to_what_other_options_imply(self):
        for text in ("implies", "${oc.env:NONE_OF_ALL,implies}"):
            self.assertRegex(self.effective("text=" + text, "file=${lr}-${model}"), 'file: "?0.25-cnn"?\n')
        self.assertRegex(self.effective("--run_dir=rd", "file=${log_dir}/f"), 'file: "?rd/f"?\n')
        there = self.effective("--run_dir=rd", "file=${log_dir}/f", "log_dir=there")
        self.assertRegex(there, 'file: "?there/f"?\n')
        self.assertRegex(self.effective("--run_dir=auto", "file=${checkpoint_dir}/f"),
                         r"file: \"?runs/[-_0-9]+-[^/]*/checkpoints/f\"?\n")  # fmt: skip
        jobs = self.effective("--multirun", "log_dir=out", "text=implies,none", "model.config=${lr}")
        rates = re.findall('config: "?(.*?)"?\n', jobs)
        self.assertEqual(rates[0], "0.25")
        self.assertNotEqual(rates[1], "0.25")

    def test_what_cannot_be_printed_is_an_error(self):
        for flag in ("--print_config", "--help"):
            with open("/dev/full", "w") as full:
                done = subprocess.run([PROGRAM, flag], stdout=full, stderr=subprocess.PIPE, text=True)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("error: disk full writing standard output: No space left on device", done.stderr)

    def test_a_file_from_a_pipe_or_without_an_extension(self):
        self.write("plain", "text: of a file\n")
        self.assertIn('text: "of a file"\n', self.effective("--config=plain"))
        os.mkdir(self.folder + "/dots.d")
        fifo = os.path.join(self.folder, "dots.d/pi.pe")
        os.mkfifo(fifo)
        for arguments in (["--config=" + fifo], ["--config=/dev/fd/0"]):
            # Two ranks read nothing that the launcher has read.
            parent = subprocess.Popen([PROGRAM, *arguments, "--launcher=local", "--nproc_per_node=2"],
                                      cwd=self.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, text=True)  # fmt: skip
            config = "text: \"'of' a \\\"pipe\\\"'\"\nmilestones: [1, 2]\n"
            if "/dev" in arguments[0]:
                out, err = parent.communicate(config, timeout=60)
            else:
                with open(fifo, "w") as f:
                    f.write(config)
                out, err = parent.communicate(timeout=60)
            self.assertEqual(parent.returncode, 0, err)
            self.assertEqual(out.count("text ''of' a \"pipe\"''\n"), 2, out)

    def test_a_file_that_changes_before_a_restart(self):
        self.write("run.yaml", "text: one\nseconds: 1\nfail: later\n")
        parent = subprocess.Popen(
            [PROGRAM, "--config=run.yaml", "--launcher=local", "--nproc_per_node=2", "--max_restarts=1"],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip
        lines = [parent.stdout.readline()]
        self.write("run.yaml", "text: two\nseconds: 0\nfail: later\n")
        lines += parent.stdout.readlines()
        self.assertEqual(parent.wait(60), 3)
        self.assertGreater(len([line for line in lines if "text 'one'" in line]), 2, lines)
        self.assertNotIn("text 'two'", "".join(lines))

    def test_a_folder_for_the_run(self):
        self.write("exp.yaml", "lr: 2\n")
        done = self.run_program("--config=exp.yaml", "--run_dir=auto", "--launcher=local",
                                "--nproc_per_node=2", "file=x")  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        (run,) = os.listdir(self.folder + "/runs")
        self.assertRegex(run, r"^\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-exp$")
        self.assertEqual(os.listdir(self.folder + "/runs/" + run), ["metrics.jsonl"])
        text = self.effective("--run_dir=here", "checkpoint_dir=there")
        self.assertIn("log_dir: here\ncheckpoint_dir: there\n", text)
        self.assertEqual(os.listdir(self.folder + "/runs"), [run])
        self.assertIn('log_dir: ""\n', self.effective())
        # What needs a folder has one; what is not valid makes none.
        self.expect_error(["--needs_folder"], "--needs_folder=true needs a folder: checkpoint_dir")
        self.assertIn("checkpoint_dir: here/checkpoints\n",
                      self.effective("--run_dir=here", "--needs_folder"))
        self.assertRegex(self.effective("--run_dir=auto", "--needs_folder"),
                         r"checkpoint_dir: runs/\S+/checkpoints\n")
        self.assertEqual(self.run_program("--run_dir=auto", "lr=-1").returncode, 2)
        # Where each has a folder of its own, there is nothing to choose, also for the ranks.
        self.write("l/x", "")
        done = self.run_program("--run_dir=auto", "--log_dir=l", "--checkpoint_dir=c", "--launcher=local",
                                "--nproc_per_node=2")  # fmt: skip
        self.assertEqual((done.returncode, len(re.findall("pid ", done.stdout))), (0, 2), done)
        self.assertEqual(os.listdir(self.folder + "/runs"), [run])
        self.expect_error(["--run_dir=auto", "--nnodes=2", "--launcher=local"],
                          "--run_dir=auto is chosen on each node, whose launchers do not meet; give a folder")  # fmt: skip
        self.expect_error(["--run_dir=auto", "--multirun", "--sweep_report", "seed=1,2"],
                          "--run_dir=auto is a new folder; give that of the sweep to report of")  # fmt: skip
        # Nor does what is only shown, or a sweep that cannot be.
        for code, arguments in ((0, ["--launcher=slurm", "--dry_run"]),
                                (0, ["--launcher=slurm", "--dry_run", "--multirun", "seed=1,2"]),
                                (0, ["--print_config", "--multirun", "seed=1,2"]),
                                (2, ["--multirun", "lr=-1,1"])):  # fmt: skip
            done = self.run_program("--run_dir=auto", *arguments)
            self.assertEqual(done.returncode, code, done)
            self.assertEqual(os.listdir(self.folder + "/runs"), [run])
        done = self.run_program("--run_dir=auto", "--multirun", "seed=1,2")
        self.assertEqual((done.returncode, len(os.listdir(self.folder + "/runs"))), (0, 2), done)
        rank = dict(os.environ, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2",
                    GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # fmt: skip
        done = self.run_program("--run_dir=auto", env=rank)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--run_dir=auto is chosen by the process that starts the ranks", done.stderr)

    def test_a_number_of_nodes_that_is_given_counts_for_more_than_the_environment(self):
        nodes = dict(os.environ, PET_NNODES="2")
        done = self.run_program("--launcher=local", env=nodes)
        self.assertEqual(done.returncode, 1, done)
        self.assertIn("nnodes=2 with launcher 'local' is for machines that each run this command", done.stderr)
        self.assertEqual(self.run_program("--run_dir=auto", env=nodes).returncode, 2)
        for ranks in ("1", "2"):
            done = self.run_program("--nnodes=1", "--nproc_per_node=" + ranks, "--run_dir=auto", env=nodes)
            self.assertEqual(done.returncode, 0, done)
            self.assertEqual(len(re.findall("pid ", done.stdout)), int(ranks))
        self.assertEqual(len(os.listdir(self.folder + "/runs")), 2)
        # Not given, it is written as that.
        text = self.effective()
        self.assertIn("nnodes: auto\n", text)
        self.write("config.yaml", text)
        self.assertEqual(self.run_program("--config=config.yaml", "--launcher=local", env=nodes).returncode, 1)

    def test_the_size_of_a_run_that_is_repeated(self):
        self.write("runs/a/config.yaml", self.effective("lr=2"))
        self.write("runs/a/run.yaml", "world_size: 3\nnnodes: 1\nprogram: x\nbuild: y\nhost: z\n")
        size = lambda *arguments, **options: re.findall(  # noqa: E731
            r"nproc_per_node: (\d+)",
            self.run_program("--config=runs/a/config.yaml", "--print_config", *arguments,
                             **options).stdout)  # fmt: skip
        self.assertEqual(size(), ["3"])
        self.assertEqual(size("--nproc_per_node=2"), ["2"])
        rank = dict(os.environ, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
                    GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # fmt: skip
        self.assertEqual(size(env=rank), [])
        self.assertEqual(size(env=dict(os.environ, PET_NPROC_PER_NODE="1")), [])
        nodes = dict(os.environ, PET_NNODES="2")
        self.assertEqual((size(env=nodes), size("--nnodes=1", env=nodes)), ([], ["3"]))
        self.write("more.yaml", "seed: 4\n")
        self.assertEqual(size("--config=more.yaml"), ["3"])
        for named in ("--config=runs/a/config", "--config_path=runs/a --config_name=config"):
            done = self.run_program(*named.split(), "--print_config")
            self.assertIn("nproc_per_node: 3\n", done.stdout, named)
        self.write("mine/config.yaml", "lr: 2\n")
        self.write("mine/run.yaml", "lr: 3\n")
        self.assertIn("lr: 2\n", self.effective("--config=mine/config.yaml"))
        done = self.run_program("--config=runs/a/config.yaml")
        self.assertIn("world size 3, as runs/a/run.yaml says\n", done.stderr)
        self.assertEqual(len(re.findall("pid ", done.stdout)), 3)
        self.write("runs/a/run.yaml", "world_size: many\n")
        self.expect_error(["--config=runs/a/config.yaml"],
                          "runs/a/run.yaml:1: world_size=many is not a whole number")  # fmt: skip

    def test_what_is_printed_is_what_pyyaml_reads(self):
        try:
            import yaml
        except ImportError:
            self.skipTest("no PyYAML here; effective_test has what it would read")
        for text in ("", "it's", "1e-05", "yes", "~", "a: b", "- x", "#", "\\", '"', "\t", "\n", "\u0085",
                     "\u2028", "\ufeff", "${lr}", "=", "<<", "12:30", "0x1F", "gr\u00fcn", "\U0001f600"):
            # Quotes of the command line's own.
            quoted = "'%s'" % text.replace("'", "''")
            printed = yaml.safe_load(self.effective("text=" + quoted, "lr=1e-05", "milestones=1,2"))
            self.assertEqual((printed["text"], printed["lr"], printed["milestones"]),
                             (text, 1e-05, [1, 2]))  # fmt: skip
        printed = self.effective("--launcher=slurm",
                                 "--slurm_extra=[--exclude=node[03-05], --exclusive]")  # fmt: skip
        self.assertEqual(yaml.safe_load(printed)["launcher"]["slurm"]["extra"],
                         ["--exclude=node[03-05]", "--exclusive"])  # fmt: skip
        self.write("printed.yaml", printed)
        self.assertEqual(self.effective("--config=printed.yaml"), printed)

    def test_what_is_printed_configures_the_same_run(self):
        text = self.effective("lr=0.001", "text='a: ${lr}'", "milestones=[3, 4]", "model=cnn")
        self.write("printed.yaml", text)
        self.assertEqual(self.effective("--config=printed.yaml"), text)

    def test_an_option_may_imply_others_that_are_not_set(self):
        text = self.effective("text=implies")
        for line in ("lr: 0.25", "  name: cnn", "  config: c.yaml"):
            self.assertIn(line + "\n", text)
        self.write("printed.yaml", text)
        self.assertEqual(self.effective("--config=printed.yaml"), text)
        # Set to its default is set, also in a file.
        self.assertIn("lr: 0.5\n", self.effective("text=implies", "lr=0.5"))
        self.write("run.yaml", "lr: 0.5\n")
        self.assertIn("lr: 0.5\n", self.effective("text=implies", "--config=run.yaml"))
        # Another name has other options.
        text = self.effective("text=implies", "model=mlp")
        self.assertIn("  name: mlp\n", text)
        self.assertIn('  config: ""\n', text)
        # In a sweep each job has its own.
        text = self.effective("-m", "text=implies,other", "log_dir=runs")
        self.assertEqual((text.count("lr: 0.25\n"), text.count("lr: 0.5\n")), (1, 1))

    def test_what_one_job_sets_is_not_set_in_another(self):
        self.write("conf/model/a.yaml", "text: implies\nlr: 0.5\nmodel: mlp\n")
        self.write("conf/model/b.yaml", "text: implies\n")
        jobs = {}
        for order in ("a,b", "b,a"):
            text = self.effective("-m", "-cp=conf", "model@=" + order, "log_dir=out")
            jobs[order] = dict(re.findall(r"^# model=(\w)\n(.*?)^\n", text, re.MULTILINE | re.DOTALL))
        self.assertEqual(jobs["a,b"], jobs["b,a"])
        for job, lines in (("a", ("lr: 0.5", "  name: mlp", '  config: ""')),
                           ("b", ("lr: 0.25", "  name: cnn", "  config: c.yaml"))):  # fmt: skip
            for line in lines:
                self.assertIn(line + "\n", jobs["a,b"][job])

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
            "twofold": ("defaults: [_self_, _self_]\n", "twofold.yaml:1: defaults has _self_ for the "
                        "second time"),
            "missing": ("defaults:\n  - unknwn\n", "missing.yaml:2: configuration file: opening "
                        "unknwn.yaml: No such file or directory; did you mean unknown.yaml?"),
            "spelt/self": ("defaults: [./../spelt/self]\n", "spelt/self.yaml:1: the file includes "
                           "itself: spelt/self.yaml -> spelt/self.yaml"),
            "reference": ("text: ${none}\n", "reference.yaml:1: text=${none} has '${none}', but "
                          "there is no option 'none'"),
            "circle": ("text: ${model.config}\nmodel.config: ${text}\n", "circle.yaml:1: "
                       "text=${model.config} has references in a circle: model.config -> text -> "
                       "model.config"),
            "variable": ("text: ${oc.env:NONE_OF_ALL}\n", "variable.yaml:1: "
                         "text=${oc.env:NONE_OF_ALL} has '${oc.env:NONE_OF_ALL}', but the environment "
                         "has no NONE_OF_ALL; a default: ${oc.env:NONE_OF_ALL,VALUE}"),
            "empty_group": ("lr: 1\nmodul: {}\n", "empty_group.yaml:2: there is no option 'modul'; "
                            "did you mean model?"),
            "merge": ("model: {<<: 1}\n", "merge.yaml:1: '<<' merges a map, or a list of maps, of "
                      "this file: '<<: *anchor'"),
            "tab": ("model:\n\tname: cnn\n", "tab.yaml:2: a tab in the indentation; YAML takes blanks "
                    "only"),
            "own": ("print_config: true\n", "own.yaml:1: print_config is for the command line, not "
                    "for a file"),
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
            (["seeed=1"], "seeed: there is no option 'seeed'; did you mean seed?"),
            (["--model.depth_of_layers=4"], "--model.depth_of_layers: there is no option "
                                            "'model.depth_of_layers'; model has name, config"),
            ([b"--text=caf\xe9"], "--text=caf\\xe9 is not UTF-8, as text in logs and checkpoints "
                                 "must be"),
            ([b"--log_dir=\xff\xc3\xa9"], "--log_dir=\\xff\u00e9 is not UTF-8, as text in logs and "
                                          "checkpoints must be"),
            ([b"lr=\xff"], "lr=\\xff is not UTF-8, as text in logs and checkpoints must be"),
            ([b"--\xff=1"], "'--\\xff=1' is no option with its value, as in epochs=2"),
            (["seed"], "'seed' has no value: seed=…"),
            (["--config="], "--config= names no file: is a variable of the shell not set?"),
            (["--config=/dev"], "configuration file: reading /dev: Is a directory"),
            (["--seed"], "--seed needs a value: --seed=…"),
            (["--log_dir", "--seed=2"], "--log_dir needs a value: --log_dir=…; if it is the next "
                                        "argument: --log_dir=--seed=2"),
            (["--log_dir", "-seed", "2"], "--log_dir needs a value: --log_dir=…; if it is the next "
                                          "argument: --log_dir=-seed"),
            (["model@=cnn"], "model@=cnn is a file in a folder of configurations; name that by "
                             "config_path"),
            (["model@=cnn", "-cp=conf"], "configuration file: opening conf/model/cnn.yaml: No such "
                                         "file or directory"),
            (["model@=cnn,mlp", "-cp=conf"], "configuration file: opening conf/model/cnn,mlp.yaml: No "
                                             "such file or directory; to run each of the choices add "
                                             "multirun=true"),
            (["--milestones=1,x"], "--milestones=1,x has element 'x', which is not a whole number"),
            (["--sweep_report"], "--sweep_report=true is for sweeps only; add multirun=true"),
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

    def test_options_of_a_launcher_that_is_not_used(self):
        for option in ("--slurm_partition=gpu", "launcher.slurm.time=30", "--dry_run"):
            written = option + ("=true" if "=" not in option else "")
            with self.subTest(option):
                self.expect_error([option], "%s is for launcher slurm, but the launcher is local; "
                                  "add launcher=slurm" % written)  # fmt: skip
        local = "launcher.local.log_dir=logs"
        self.expect_error([local, "--launcher=slurm", "--dry_run"],
                          local + " is for launcher local, but the launcher is slurm; add "
                          "launcher=local")  # fmt: skip
        ranks = dict(os.environ, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
                     MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # fmt: skip
        done = self.run_program(local, env=ranks)
        self.assertEqual(done.returncode, 2, done)
        self.assertIn(local + " is for launcher local, but the launcher is torchrun; leave it out: "
                      "ranks are started already", done.stderr)  # fmt: skip
        # A pod, or mpirun -np 1: there, too, launcher=local starts jobs.
        sweep = ["--multirun", "--log_dir=out", "seed=1,2", "--print_config"]
        done = self.run_program(*sweep, env=ranks)
        self.assertEqual(done.returncode, 2, done)
        self.assertIn("; start the program without a launcher, or, since this rank is alone, add "
                      "launcher=local\n", done.stderr)  # fmt: skip
        done = self.run_program(*sweep, "--launcher=local", env=ranks)
        self.assertEqual(done.returncode, 0, done)
        # In a file they wait for the day when it is.
        self.write("run.yaml", "launcher:\n  slurm: {partition: gpu}\n")
        self.assertIn('partition: gpu\n', self.effective("--config=run.yaml"))

    def test_a_job_has_the_configuration_of_its_submission(self):
        self.write("run.yaml", "lr: 0.25\nmilestones: [1, 2]\ntext: it's $HOME\n")
        done = self.run_program("--config=run.yaml", "--launcher=slurm", "--dry_run")
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stderr)
        line = next(x for x in done.stdout.splitlines() if x.startswith("ddp_command=("))
        self.assertNotIn("run.yaml", line)
        words = subprocess.run(
            ["bash", "-c", line + "; printf '%s\\n' \"${ddp_command[@]}\""], capture_output=True,
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
        self.assertEqual(len(re.findall(r"--config=\S*/out/lr=[123]-\w+/job.yaml", done.stdout)), 3)
        self.assertEqual(os.listdir(self.folder), [])

    def test_gpus_that_nothing_would_use(self):
        self.expect_error(["--launcher=slurm", "--dry_run", "--slurm_gpus_per_node=4", "device=cpu"],
                          "--slurm_gpus_per_node=4 asks for GPUs that nothing would use: the option "
                          "device is cpu")  # fmt: skip

    def test_mistakes_of_sweeps(self):
        self.write("sweep.yaml", "log_dir: out\nlr: 1\nsweep:\n  seed: range(4)\n")
        self.write("empty.yaml", "sweep:\n  seed: []\n")
        self.write("flat.yaml", "sweep: [1]\n")
        dir_ = "--log_dir=out"
        for arguments, message in (
            ([dir_], "--multirun=true has no choices; give some, as in lr=0.1,0.01 "
                     "'seed=range(0,3)' 'lr=choice(1)', or a file with sweep:"),
            ([dir_, "lr=0.5"], "--multirun=true has no choices: lr=0.5 is one value; give some, as in "
                               "lr=0.1,0.01 'seed=range(0,3)' 'lr=choice(1)', or a file with sweep:"),
            ([dir_, "seed=1,2", "lr=interval(0,1)"],
             "lr=interval(0,1) calls interval(), which sweeps do not have here: give choice(a, b) or "
             "range(start, stop, step), or quotes around a text"),
            ([dir_, "seed=1,2", "milestones=1,x"],
             "milestones=1,x has element 'x', which is not a whole number; its commas are no choices, "
             "but belong to one list; for choices give choice(…)"),
            ([dir_, "model@=cnn,mlp", "-cp=conf"], "configuration file: opening conf/model/cnn.yaml: "
                                                   "No such file or directory"),
            ([dir_, "seed=1,2", "resume=a", "sweep_rerun=all"],
             "sweep_rerun=all is none of failed, changed"),
            (["seed=1,2"], "--log_dir= is needed by multirun: the folder of the sweep"),
            ([dir_, "seed=choice()"], "seed=choice() has no choices"),
            ([dir_, "seed=range(0,3,0)"], "seed=range(0,3,0) is a range without end: its step is 0"),
            ([dir_, "seed=range(0,3"], "seed=range(0,3 has a bracket without an end"),
            ([dir_, "seed=1,2", "text=it's,b"], "text=it's,b has a quote without an end; a text with "
                                                "a quote in it stands in quotes of the other kind"),
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


if __name__ == "__main__":
    xml_unittest.main()
