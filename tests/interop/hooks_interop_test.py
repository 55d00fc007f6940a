"""Our communication hooks and Python's of the same names, on the same gradients of two ranks."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import unittest

import torch
import torch.distributed as dist
import xml_unittest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

PEER = os.path.join(
    os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"], "tests/interop/hooks_peer"
)
RANKS = 2
# Matrices and a convolution's weight, which are compressed, and what is not.
SHAPES = [[20, 30], [7], [2, 2], [16, 4, 5], [64, 64], [300]]
ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES)
ONE_BUCKET, MANY_BUCKETS = 25.0, 1e-3


class Given(torch.nn.Module):
    """The gradient of parameter i is what forward is given for it."""

    def __init__(self):
        super().__init__()
        self.values = torch.nn.ParameterList([torch.zeros(shape) for shape in SHAPES])

    def forward(self, gradients):
        total = torch.zeros(())
        for value, gradient in zip(self.values, gradients):
            total = total + (value * gradient).sum()
        return total


def as_tensors(flat):
    parts = flat.split([torch.Size(shape).numel() for shape in SHAPES])
    return [part.view(shape) for part, shape in zip(parts, SHAPES)]


def python_rank(folder, rank):
    """One of Python's ranks; rank 0 saves the gradients of each step."""
    test, gradients = torch.load(os.path.join(folder, "case.pt"))
    dist.init_process_group(
        "gloo", init_method="file://%s/store" % folder, rank=rank, world_size=RANKS
    )
    model = DistributedDataParallel(Given(), bucket_cap_mb=test["bucket_cap_mb"])
    if test["hook"] == "powersgd":
        own = {k.replace("powersgd.", ""): v for k, v in test["python_options"].items()}
        own["start_powerSGD_iter"] = own.pop("start_iter")
        model.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, **own), powerSGD_hook.powerSGD_hook
        )
    else:
        model.register_comm_hook(None, getattr(default_hooks, test["hook"] + "_hook"))
    results = []
    for step in gradients:
        model.zero_grad()
        model(as_tensors(step[rank])).backward()
        results.append(torch.cat([p.grad.flatten() for p in model.module.values]))
    if rank == 0:
        torch.save(torch.stack(results), os.path.join(folder, "theirs.pt"))
    dist.destroy_process_group()


class HooksInteropTest(unittest.TestCase):
    def run_both(self, hook, gradients, bucket_cap_mb, backends=("gloo",), **options):
        """Results of Python's hook and of ours over each backend, and bytes that ours sent."""
        test = {
            "hook": hook,
            "python_options": options,
            "options": {"powersgd." + k: str(v).lower() for k, v in options.items()},
            "shapes": SHAPES,
            "steps": gradients.shape[0],
            "ranks": RANKS,
            "bucket_cap_mb": bucket_cap_mb,
        }
        ours, sent = [], []
        with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as folder:
            path = lambda name: os.path.join(folder, name)
            torch.save((test, gradients), path("case.pt"))
            gradients.numpy().tofile(path("gradients"))
            ranks = [
                subprocess.Popen([sys.executable, "-s", os.path.abspath(__file__), folder, str(r)])
                for r in range(RANKS)
            ]
            self.assertEqual([rank.wait() for rank in ranks], [0] * RANKS)
            theirs = torch.load(path("theirs.pt"))
            for backend in backends:
                with open(path("case.json"), "w") as f:
                    json.dump(dict(test, backend=backend), f)
                done = subprocess.run(
                    [PEER, path("case.json"), path("gradients"), path("ours")],
                    capture_output=True, text=True,
                )  # fmt: skip
                self.assertEqual(done.returncode, 0, done.stderr)
                sent.append([int(line) for line in done.stdout.split()])
                flat = torch.frombuffer(bytearray(open(path("ours"), "rb").read()), dtype=torch.float32)
                ours.append(flat.view(theirs.shape))
        return theirs, ours, sent

    def random(self, steps, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(steps, RANKS, ELEMENTS, generator=generator)

    def test_16_bits_are_the_same_bits(self):
        for hook, cap in itertools.product(
            ("fp16_compress", "bf16_compress"), (ONE_BUCKET, MANY_BUCKETS)
        ):
            # No subnormal fp16, which lose a bit where they are halved before the sum: by Python and
            # over gloo, and not over shm.
            gradients = self.random(4) * 10.0 ** torch.arange(-1, 3).view(4, 1, 1)
            gradients = gradients.sign() * gradients.abs().clamp(min=2e-4)
            theirs, ours, sent = self.run_both(hook, gradients, cap, ("gloo", "shm"))
            for backend, result in zip(("gloo", "shm"), ours):
                self.assertTrue(torch.equal(result, theirs), (hook, cap, backend))
            self.assertEqual(sent, [[2 * ELEMENTS] * 4] * 2)

    def test_16_bits_at_the_ends_of_the_range(self):
        """Overflow to infinity and subnormal numbers: gloo's sums, in 16 bits on both sides."""
        for hook in ("fp16_compress", "bf16_compress"):
            gradients = self.random(4) * torch.tensor([1e-7, 1e-5, 5e4, 1e38]).view(4, 1, 1)
            theirs, ours, _ = self.run_both(hook, gradients, ONE_BUCKET)
            self.assertTrue(torch.equal(ours[0].nan_to_num(7.5), theirs.nan_to_num(7.5)), hook)
            if hook == "fp16_compress":
                self.assertTrue(torch.isinf(theirs).any())

    def compare_powersgd(self, steps=20, **options):
        """In one bucket: with several, Python's hook waits over gloo for rounds that cannot start."""
        theirs, ours, sent = self.run_both("powersgd", self.random(steps), ONE_BUCKET, **options)
        difference = (ours[0] - theirs).abs().max().item()
        print(options, "largest difference %.1e" % difference)
        self.assertLess(difference, 1e-4, options)
        # Not the mean, which both have in the first steps only.
        mean = self.random(steps).mean(1)
        start = options["start_iter"]
        self.assertLess((theirs[:start] - mean[:start]).abs().max(), 1e-5)
        self.assertGreater((theirs[start:] - mean[start:]).abs().max(), 0.1)
        rank = options.get("matrix_approximation_rank", 1)
        compressed = elements = 0
        for shape in SHAPES:
            n, m = shape[0], torch.Size(shape).numel() // shape[0]
            r = min(n, m, rank)
            small = (n + m) * r * options.get("min_compression_rate", 2) < n * m
            compressed += (n + m) * r if small else n * m
            elements += n * m
        self.assertEqual(sent[0], [4 * elements] * start + [4 * compressed] * (steps - start))

    def test_powersgd(self):
        for rank, feedback, warm in itertools.product((1, 2, 4), (True, False), (True, False)):
            self.compare_powersgd(
                matrix_approximation_rank=rank, start_iter=3, use_error_feedback=feedback,
                warm_start=warm,
            )  # fmt: skip

    def test_other_options_of_powersgd(self):
        self.compare_powersgd(start_iter=2, random_seed=1234)
        self.compare_powersgd(start_iter=10, orthogonalization_epsilon=1e-6)
        self.compare_powersgd(start_iter=2, matrix_approximation_rank=3, min_compression_rate=0.5)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].isdigit():
        python_rank(sys.argv[1], int(sys.argv[2]))
    else:
        xml_unittest.main()
