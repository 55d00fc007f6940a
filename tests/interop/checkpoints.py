"""What the tests that exchange checkpoints with Python have in common: a model, its training, and
comparison of states, bit for bit."""

import os
import subprocess
import tempfile
import unittest

import torch
from torch.distributed.tensor import DTensor


def program(path):
    """A C++ program in the data of the test."""
    return os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"], path)


def make_model(seed=7):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


def train(model, optimizer, steps=2):
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.arange(24.0).reshape(4, 6).sin() + step
        model(inputs).pow(2).sum().backward()
        optimizer.step()


def whole(value):
    """The same value with each tensor in one piece. Collective where tensors are distributed."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(below) for key, below in value.items()}
    if isinstance(value, list):
        return [whole(below) for below in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def same_bits(a, b):
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous().view(-1) for t in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class CheckpointTest(unittest.TestCase):
    """With a folder for each test, and programs that are run in it."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
        torch.manual_seed(3)

    def path(self, name):
        return os.path.join(self.folder, name)

    def run_program(self, *words):
        """What it writes to stdout."""
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        return done.stdout

    def refused(self, *words):
        """What it writes to stderr; it must fail."""
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1, done.stderr)
        return done.stderr

    def assert_same(self, a, b, where=""):
        """Types, the order of dicts, and the bits of tensors."""
        if isinstance(a, torch.Tensor):
            self.assertIsInstance(b, torch.Tensor, where)
            self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape), where)
            self.assertTrue(same_bits(a, b), where)
        elif isinstance(a, dict):
            self.assertEqual(list(a), list(b), where)
            for key in a:
                self.assert_same(a[key], b[key], f"{where}/{key}")
        elif isinstance(a, (list, tuple)):
            self.assertEqual(isinstance(a, tuple), isinstance(b, tuple), where)
            self.assertEqual(len(a), len(b), where)
            for i, (x, y) in enumerate(zip(a, b)):
                self.assert_same(x, y, f"{where}/{i}")
        else:
            self.assertEqual((type(a), a), (type(b), b), where)
