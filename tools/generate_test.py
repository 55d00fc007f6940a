#!/usr/bin/env python3
"""From text to text on the command line: train --model=gpt, then generate."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")

import xml_unittest  # noqa: E402

TRAIN, GENERATE, CKPT = (RUNFILES + "/tools/" + name for name in ("train", "generate", "ckpt"))
# 55 bytes, so that the windows of 32 begin at each of them.
TEXT = "zero one two three four five six seven eight nine ten. " * 400
TINY = ["--nproc_per_node=1", "--context=32", "--layers=2", "--width=64", "--heads=2", "--test_size=8"]  # fmt: skip


class GenerateTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"])
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        with open(cls.folder + "/text.txt", "w") as f:
            f.write(TEXT)
        cls.said = cls.train("runs/a", "--model=gpt", "--files=text.txt", "--epochs=6",
                             "--batch_size=8", "--log_every=1", *TINY)  # fmt: skip
        cls.checkpoint = "runs/a/" + cls.checkpoints("runs/a")[-1]

    @classmethod
    def run_in_folder(cls, *command):
        return subprocess.run(command, cwd=cls.folder, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, errors="surrogateescape", timeout=250)  # fmt: skip

    @classmethod
    def train(cls, folder, *arguments):
        done = cls.run_in_folder(
            TRAIN, *arguments, "--checkpoint_dir=" + folder, "--log_dir=" + folder,
            "--keep_checkpoints=1"
        )
        if done.returncode != 0:
            raise AssertionError(done.stdout + done.stderr)
        return done.stdout

    @classmethod
    def checkpoints(cls, folder):
        names = os.listdir(os.path.join(cls.folder, folder))
        return sorted(n for n in names if n.startswith("epoch"))

    def generate(self, *arguments):
        done = self.run_in_folder(GENERATE, "--checkpoint=" + self.checkpoint, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return done.stdout

    def expect_error(self, arguments, *expected):
        done = self.run_in_folder(GENERATE, *arguments)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done)
        self.assertRegex(done.stderr, r"\Aerror: .*\n\Z")
        for part in expected:
            self.assertIn(part, done.stderr)

    def test_the_run_says_how_well_it_predicts(self):
        last = [line for line in self.said.splitlines() if "checkpoint" not in line][-3:]
        self.assertRegex(last[0], r"^bits per byte \d\.\d{4} train, last 20 steps$")
        self.assertRegex(last[1], r"^bits per byte \d\.\d{4} held out$")
        self.assertIn("test bits_per_byte ", last[2])
        with open(self.folder + "/runs/a/metrics.jsonl") as f:
            logged = [r["train/bits_per_byte"] for r in map(json.loads, f) if "train/bits_per_byte" in r]
        said = float(re.search(r"[\d.]+", last[0]).group())
        self.assertAlmostEqual(said, sum(logged[-20:]) / 20, places=2)
        self.assertLess(float(re.search(r"[\d.]+", last[1]).group()), 2.0)

    def test_learnt_text_comes_back(self):
        text = self.generate("--prompt=one two three", "--length=40", "--temperature=0")
        self.assertEqual(text, "one two three four five six seven eight nine ten. zero"[:53] + "\n")

    def test_a_prompt_may_have_any_bytes(self):
        # Part of a letter of UTF-8, as a text that is cut at a number of bytes ends with.
        text = self.generate("--prompt=one \udcc3", "--length=5", "--temperature=0")
        self.assertTrue(text.encode(errors="surrogateescape").startswith(b"one \xc3"), text)

    def test_the_seed_decides(self):
        arguments = ["--prompt=seven", "--length=100", "--temperature=2"]
        first = self.generate(*arguments, "--seed=1")
        self.assertEqual(len(first.encode(errors="surrogateescape")), 5 + 100 + 1)
        self.assertEqual(self.generate(*arguments, "--seed=1"), first)
        self.assertNotEqual(self.generate(*arguments, "--seed=2"), first)
        # One candidate leaves no choice, and neither does a low temperature.
        likeliest = self.generate("--prompt=seven", "--length=100", "--temperature=0")
        self.assertEqual(self.generate(*arguments, "--top_k=1"), likeliest)
        # More candidates than there are tokens are all of them.
        self.assertEqual(self.generate(*arguments, "--seed=1", "--top_k=100000"), first)
        for low in ("0.01", "1e-300"):
            self.assertEqual(self.generate(*arguments, "--temperature=" + low), likeliest)
        # A high one makes all of the candidates equally likely: two, or any bytes.
        two = self.generate(*arguments, "--temperature=1000", "--top_k=2")
        self.assertNotEqual(two, likeliest)
        self.assertTrue(set(two) <= set(TEXT + "\n"), two)
        self.assertFalse(set(self.generate(*arguments, "--temperature=1000")) <= set(TEXT + "\n"))

    def test_the_average_of_the_weights(self):
        # It stays at the weights that have learnt the text, while those of the last step are spoilt.
        self.train("runs/ema", "--model=gpt", "--files=text.txt", "--max_steps=3", "--lr=1", "--ema_decay=1",
                   "--init_from=" + self.checkpoint, *TINY)  # fmt: skip
        checkpoint = "--checkpoint=runs/ema/" + self.checkpoints("runs/ema")[-1]
        arguments = [GENERATE, checkpoint, "--prompt=one two three", "--length=40", "--temperature=0"]
        learnt = self.generate(*arguments[2:])
        averaged = self.run_in_folder(*arguments, "--ema")
        self.assertEqual((averaged.returncode, averaged.stdout), (0, learnt), averaged.stderr)
        last = self.run_in_folder(*arguments)
        self.assertEqual(last.returncode, 0, last.stderr)
        self.assertNotEqual(last.stdout, learnt)
        self.expect_error(["--checkpoint=" + self.checkpoint, "--prompt=a", "--ema"], self.checkpoint,
                          "has no average of the weights", "leave out --ema")  # fmt: skip

    def test_checkpoints_of_other_formats(self):
        arguments = ["--prompt=one two three", "--length=40", "--temperature=0"]
        learnt = self.generate(*arguments)
        # As two ranks write it, each a part. The weights hardly change.
        self.train("runs/sharded", "--model=gpt", "--files=text.txt", "--max_steps=2", "--lr=1e-9",
                   "--init_from=" + self.checkpoint, "--checkpoint_format=sharded", "--zero_stage=1",
                   "--nproc_per_node=2", *TINY[1:])  # fmt: skip
        sharded = "runs/sharded/" + self.checkpoints("runs/sharded")[-1]
        self.assertTrue(sharded.endswith(".sharded"), sharded)
        self.expect_error(["--prompt=a", "--checkpoint=runs/sharded"], "is a folder of checkpoints", sharded)
        for name in ("for_python", "a.safetensors"):
            to = "safetensors" if name.endswith("safetensors") else "dcp"
            done = self.run_in_folder(CKPT, "convert", self.checkpoint, name, "--to=" + to)
            self.assertEqual(done.returncode, 0, done)
        for folder in (sharded, "for_python", "a.safetensors"):
            with self.subTest(folder):
                done = self.run_in_folder(GENERATE, "--checkpoint=" + folder, *arguments)
                self.assertEqual((done.returncode, done.stdout), (0, learnt), done)
                # Python's format may be said to have no checksums.
                self.assertRegex(done.stderr, r"\A(.*items without checksums.*\n)?\Z")
                # None of its files is a checkpoint.
                files = sorted(os.listdir(os.path.join(self.folder, folder)))
                self.assertGreater(len(files), 1)
                for file in files:
                    self.expect_error(["--prompt=a", "--checkpoint=%s/%s" % (folder, file)],
                                      "is one of the files of a checkpoint", "give " + folder)  # fmt: skip
        # But another checkpoint may lie there.
        shutil.copy(os.path.join(self.folder, self.checkpoint), self.folder + "/for_python/another.pt")
        done = self.run_in_folder(GENERATE, "--checkpoint=for_python/another.pt", *arguments)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, learnt, ""), done)

    def test_mistakes_are_named(self):
        given = "--checkpoint=" + self.checkpoint
        self.expect_error(["--prompt=a"], "--checkpoint", "is needed")
        self.expect_error(["--prompt=a", "--checkpoint=none.pt"], "--checkpoint=none.pt", "No such file")
        self.expect_error(["--prompt=a", "--checkpoint=runs/a"], "is a folder of checkpoints", self.checkpoint)
        os.makedirs(self.folder + "/empty", exist_ok=True)
        self.expect_error(["--prompt=a", "--checkpoint=empty"], "--checkpoint=empty")
        self.expect_error(["--prompt=a", "--checkpoint=text.txt"], "--checkpoint=text.txt")
        for empty in ([], ["--prompt="]):
            self.expect_error([given, *empty], "--prompt", "is empty")
        self.expect_error([given, "--prompt=a", "--length=0"], "--length=0")
        self.expect_error([given, "--prompt=" + "a" * 33], "--prompt=aaaa", "has 33 tokens", "sees 32 at most")
        # What is shown of it ends with a whole letter.
        self.expect_error([given, "--prompt=" + "a" * 19 + "ä" * 20], "--prompt=" + "a" * 19 + "… has 59 tokens")
        self.expect_error([given, "--prompt=a", "--temperature=-1"], "--temperature=-1")
        for model in ("mlp", "cnn"):
            self.train("runs/" + model, "--model=" + model, "--dataset=synthetic", "--train_size=64",
                       "--test_size=8", "--epochs=1", "--nproc_per_node=1")  # fmt: skip
            self.expect_error(["--prompt=a", "--checkpoint=runs/%s/epoch_1.pt" % model],
                              "model '%s'" % model, "no language model")  # fmt: skip

    def test_a_model_that_has_diverged_is_named(self):
        self.train("runs/nan", "--model=gpt", "--files=text.txt", "--max_steps=3", "--lr=1e30",
                   "--clip_norm=0", *TINY)  # fmt: skip
        checkpoint = "runs/nan/" + self.checkpoints("runs/nan")[-1]
        for temperature in ("0", "1"):
            done = self.run_in_folder(GENERATE, "--checkpoint=" + checkpoint, "--prompt=a",
                                      "--temperature=" + temperature)  # fmt: skip
            self.assertEqual(done.returncode, 2, done)
            self.assertEqual(done.stderr, "error: --checkpoint=%s has a model whose outputs are not finite: its "
                                          "training has diverged; take an earlier checkpoint\n" % checkpoint)  # fmt: skip

    def test_output_that_cannot_be_written_is_an_error(self):
        arguments = [GENERATE, "--checkpoint=" + self.checkpoint, "--prompt=a", "--length=5"]
        done = self.run_in_folder("bash", "-c", '"$@" >/dev/full', "bash", *arguments)
        self.assertEqual(done.returncode, 1, done)
        self.assertEqual(done.stderr, "error: cannot write the output: No space left on device\n")
        # A reader that has enough ends it, without a word.
        arguments[-1] = "--length=2000"
        done = self.run_in_folder("bash", "-c", '"$@" | head -c 3', "bash", *arguments)
        written = done.stdout.encode(errors="surrogateescape")
        self.assertEqual((done.returncode, len(written), done.stderr), (0, 3, ""), done)

    def test_ids_of_a_tokenizer(self):
        with open(self.folder + "/ids.bin", "wb") as f:
            for i in range(8000):
                f.write((i % 7 * 50).to_bytes(2, "little"))
        said = self.train("runs/ids", "--model=gpt", "--files=ids.bin", "--tokens=uint16",
                          "--max_steps=80", "--batch_size=8", "--checkpoint_format=safetensors", *TINY)  # fmt: skip
        self.assertIn("bits per token ", said)
        checkpoint = "--checkpoint=runs/ids/" + self.checkpoints("runs/ids")[0]
        done = self.run_in_folder(GENERATE, checkpoint, "--prompt=100 150", "--length=4", "--temperature=0")
        self.assertEqual(done.stdout.split(), "100 150 200 250 300 0".split(), done)
        # As a file has them.
        lines = self.run_in_folder(GENERATE, checkpoint, "--prompt=100\n150\n", "--length=4", "--temperature=0")
        self.assertEqual(lines.stdout, done.stdout, lines)
        self.expect_error([checkpoint, "--prompt=100 x"], "'x'", "no token from 0 to 300")

    def test_other_models_take_no_text(self):
        for arguments, expected in (
            (["--model=mlp", "--dataset=text", "--files=text.txt"], "model=gpt"),
            (["--model=gpt", "--dataset=synthetic"], "dataset=text"),
            (["--model=gpt", "--files=none.txt"], "--files=none.txt"),
            (["--model=gpt", "--files=text.txt", "--heads=3", "--width=64"], "--heads=3"),
        ):
            done = self.run_in_folder(TRAIN, "--nproc_per_node=2", *arguments)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(expected, done.stderr)


if __name__ == "__main__":
    xml_unittest.main()
