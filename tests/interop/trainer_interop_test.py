"""Python continues from the files of //tools:train: checkpoint, optimizer state, event files."""

import argparse
import glob
import gzip
import os
import re
import subprocess
import tempfile
import unittest

import torch
import xml_unittest
from tensorboard.backend.event_processing import event_accumulator
from torch import nn

RUNFILES = os.environ["TEST_SRCDIR"]
TRAIN = os.path.join(RUNFILES, os.environ["TEST_WORKSPACE"], "tools/train")
DATA = os.path.abspath(os.path.dirname(os.environ["FASHION_MNIST"].split()[0]))
FLAGS = [
    "--model=cnn", "--nproc_per_node=2", "--train_size=4096", "--epochs=2", "--batch_size=64",
    "--lr=0.02", "--schedule=constant", "--momentum=0.9",
]  # fmt: skip


class Cnn(nn.Module):
    """tools/models/cnn.cc, as a Python user would write it."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1, bias=False)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm2d(16), nn.BatchNorm2d(32), nn.BatchNorm2d(64)
        self.fc1 = nn.Linear(64 * 3 * 3, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.bn1(self.conv1(x)).relu(), 2)
        x = nn.functional.max_pool2d(self.bn2(self.conv2(x)).relu(), 2)
        x = nn.functional.max_pool2d(self.bn3(self.conv3(x)).relu(), 2)
        return self.fc2(self.fc1(x.flatten(1)).relu())


def read_idx(name, offset):
    with gzip.open(os.path.join(DATA, name + ".gz")) as f:
        return torch.frombuffer(bytearray(f.read()), dtype=torch.uint8, offset=offset)


def test_set():
    images = read_idx("t10k-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28)
    labels = read_idx("t10k-labels-idx1-ubyte", 8)
    return (images.float() / 255 - 0.2860) / 0.3530, labels.long()


class TrainerInteropTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        cls.accuracy, cls.loss = cls.train(
            *FLAGS, "--log_dir=%s/log" % folder.name,
            "--checkpoint_dir=%s/checkpoint" % folder.name, "--checkpoint_every_steps=63",
        )  # fmt: skip
        checkpoints = os.path.join(folder.name, "checkpoint")
        path = os.path.join(checkpoints, "epoch_2.pt")
        cls.state = torch.load(path, weights_only=True)
        path = os.path.join(checkpoints, "epoch_1_step_63.pt")  # the last step but one
        cls.before_last_step = torch.load(path, weights_only=True)

    @classmethod
    def train(cls, *flags):
        """Runs //tools:train; returns test accuracy and loss from its last line."""
        done = subprocess.run([TRAIN, *flags], capture_output=True, text=True)
        last = (done.stdout.strip().splitlines() or [""])[-1]
        match = re.fullmatch(r"test accuracy ([\d.]+) loss ([\d.]+) epochs \d+ wall .*", last)
        if done.returncode != 0 or not match:
            raise AssertionError(done.stdout + done.stderr)
        return float(match.group(1)), float(match.group(2))

    def test_the_model_gives_the_same_answers_in_python(self):
        net = Cnn()
        net.load_state_dict(self.state["model"])
        net.eval()
        images, labels = test_set()
        with torch.no_grad():
            output = torch.cat([net(part) for part in images.split(500)])
        accuracy = (output.argmax(1) == labels).double().mean().item()
        loss = nn.functional.cross_entropy(output, labels).item()
        self.assertGreater(accuracy, 0.6)
        # Four digits are printed; two examples may fall on the other side by rounding.
        self.assertAlmostEqual(accuracy, self.accuracy, delta=0.00026)
        self.assertAlmostEqual(loss, self.loss, delta=0.0002)

    def test_the_optimizer_goes_on_in_python(self):
        net = Cnn()
        net.load_state_dict(self.state["model"])
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.1)
        optimizer.load_state_dict(self.state["optimizer"])
        group = optimizer.param_groups[0]
        self.assertEqual((group["lr"], group["momentum"]), (0.02, 0.9))
        buffers = [optimizer.state[p]["momentum_buffer"] for p in net.parameters()]
        self.assertTrue(all(b.shape == p.shape for b, p in zip(buffers, net.parameters())))
        # The run's last step was by these buffers.
        for (name, p), b in zip(net.named_parameters(), buffers):
            self.assertGreater(b.abs().sum().item(), 0, name)
            before = self.before_last_step["model"][name]
            self.assert_close(p, before - 0.02 * b, name)
        images, labels = test_set()
        nn.functional.cross_entropy(net(images[:64]), labels[:64]).backward()
        decay = group["weight_decay"]
        expected = [
            p.detach() - 0.02 * (0.9 * b + p.grad + decay * p.detach())
            for p, b in zip(net.parameters(), buffers)
        ]
        optimizer.step()
        for (name, p), e in zip(net.named_parameters(), expected):
            self.assert_close(p, e, name)

    def assert_close(self, a, b, name):
        torch.testing.assert_close(
            a.detach(), b, rtol=1e-6, atol=1e-7, msg=lambda text: f"{name}: {text}"
        )

    def test_what_python_saves_goes_on_here(self):
        path = os.path.join(self.folder, "theirs.pt")
        torch.save(self.state, path)
        again = self.train(*FLAGS, "--eval_only", "--resume=" + path)
        self.assertEqual(again, (self.accuracy, self.loss))

    def test_a_run_begins_with_weights_of_python(self):
        # As scripts save them: below a key, beside an optimizer's state and objects of the script.
        net = Cnn()
        net.load_state_dict(self.state["model"])
        optimizer = torch.optim.Adam(net.parameters())
        path = os.path.join(self.folder, "script.pth.tar")
        torch.save(
            {"epoch": 7, "arch": "cnn", "args": argparse.Namespace(lr=0.1),
             "state_dict": nn.DataParallel(net).state_dict(), "optimizer": optimizer.state_dict()},
            path,
        )  # fmt: skip
        again = self.train(*FLAGS, "--eval_only", "--init_from=" + path)
        self.assertEqual(again, (self.accuracy, self.loss))

    def test_tensorboard_shows_the_run(self):
        self.assertEqual(len(glob.glob(self.folder + "/log/*tfevents*")), 1)
        events = event_accumulator.EventAccumulator(
            self.folder + "/log", size_guidance={event_accumulator.TENSORS: 0}
        )
        events.Reload()
        tags = events.Tags()
        names = set(tags["tensors"]) | set(tags["scalars"])
        for name in ("train/loss", "train/lr", "test/accuracy", "test/loss"):
            self.assertIn(name, names)


if __name__ == "__main__":
    xml_unittest.main()
