#!/usr/bin/env python3
"""Plans of memory: what a model is made for, and the number of ranks."""

import os
import sys

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")

import program_case  # noqa: E402
import xml_unittest  # noqa: E402


class PlanTest(program_case.ProgramCase):
    PROGRAM = "tools/plan"

    def plan(self, *arguments, stderr=""):
        """The first two lines."""
        done = self.run_program(*arguments)
        self.assertEqual((done.returncode, done.stderr), (0, stderr), done)
        return done.stdout.splitlines()[:2]

    def head(self, model, optimizer, ranks, parameters):
        return "%s: %d parameters, %s, fp32, %d ranks; per rank, without activations" % (
            model, parameters, optimizer, ranks)  # fmt: skip

    def test_images(self):
        self.assertEqual(self.plan("--model=mlp"), [self.head("mlp", "sgd", 2, 669706),
                                                    "for examples of 1 x 28 x 28 and 10 classes"])  # fmt: skip

    def test_a_language_model(self):
        expected = [self.head("gpt", "adamw", 2, 445952),
                    "for sequences of 128 tokens and a vocabulary of 256"]  # fmt: skip
        self.assertEqual(self.plan("--model=gpt"), expected)
        # Of a run, whose configuration is complete.
        printed = self.run_program("--model=gpt", "--print_config")
        self.assertEqual((printed.returncode, printed.stderr), (0, ""), printed)
        self.write("runs/gpt/config.yaml", printed.stdout)
        self.assertEqual(self.plan("--config=runs/gpt/config.yaml"), expected)
        # One embedding is longer by a context, the other by a vocabulary; nothing is read.
        self.assertEqual(
            self.plan("--model=gpt", "--context=256", "--tokens=uint16", "--vocab_size=1000",
                      "--files=elsewhere.bin", "--optimizer=sgd"),
            [self.head("gpt", "sgd", 2, 445952 + (128 + 744) * 128),
             "for sequences of 256 tokens and a vocabulary of 1000"])  # fmt: skip
        done = self.run_program("--model=gpt", "--tokens=uint16", "--files=elsewhere.bin")
        self.assertEqual((done.returncode, done.stdout), (2, ""), done)
        self.assertIn("elsewhere.bin", done.stderr)

    def test_a_data_set_whose_files_tell(self):
        self.write("iris.csv", "petal,colour,species\n1.4,white,setosa\n4.7,violet,virginica\n"
                   "5.1,violet,virginica\n1.3,white,setosa\n")  # fmt: skip
        arguments = ["--dataset=csv", "--csv_train=iris.csv", "--csv_test=iris.csv",
                     "--csv_columns=species:target", "--model=mlp"]  # fmt: skip
        self.assertEqual(self.plan(*arguments), [self.head("mlp", "sgd", 2, 265730),
                                                 "for examples of 3 and 2 classes"])  # fmt: skip
        os.remove(self.folder + "/iris.csv")
        first, second = self.plan(*arguments)
        self.assertEqual(first, self.head("mlp", "sgd", 2, 669706))
        self.assertRegex(second, r"^for examples of 1 x 28 x 28 and 10 classes, which are assumed: data set "
                         r"csv cannot be read here: .*iris\.csv")  # fmt: skip

    def test_the_rows_add_up(self):
        # Of whole tensors, buckets do not follow the order in which gradients arrive.
        for arguments, held in (([], []), (["--partition=tensor", "--bucket_cap_mb=1"], ["held"])):
            done = self.run_program("--model=mlp", "--optimizer=adamw", "--world_size=2", *arguments)
            self.assertEqual((done.returncode, done.stderr), (0, ""), done)
            rows = [line.split() for line in done.stdout.splitlines()[3:]]
            names = ["parameters", "gradients", "state", "buckets", *held, "total"]
            rows = rows[: len(names)]
            self.assertEqual([row[0] for row in rows], names)
            for stage in range(3):
                self.assertEqual({row[2 + 2 * stage] for row in rows}, {"MB"})
                column = [float(row[1 + 2 * stage]) for row in rows]
                self.assertAlmostEqual(sum(column[:-1]), column[-1], delta=0.03)
        self.assertEqual(rows[-2][5], "1.05")  # of stage 2

    def test_the_size_that_is_given_counts_and_no_other_is_said(self):
        self.write("runs/a/config.yaml", "model: mlp\n")
        self.write("runs/a/run.yaml", "world_size: 3\nnnodes: 1\nprogram: x\nbuild: y\nhost: z\n")
        config = "--config=runs/a/config.yaml"
        self.assertEqual(self.plan(config, stderr="world size 3, as runs/a/run.yaml says\n")[0],
                         self.head("mlp", "sgd", 3, 669706))  # fmt: skip
        self.assertEqual(self.plan(config, "--world_size=8")[0], self.head("mlp", "sgd", 8, 669706))


if __name__ == "__main__":
    xml_unittest.main()
