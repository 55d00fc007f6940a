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


def case(hook, gradients, bucket_cap_mb=ONE_BUCKET, **options):
    """`options`: of PowerSGD, by our names. `gradients`: [steps, ranks, elements]."""
    return {"hook": hook, "gradients": gradients, "bucket_cap_mb": bucket_cap_mb, "options": options}


def python_rank(folder, rank):
    """One of Python's ranks, for all cases; rank 0 saves the gradients of each step."""
    dist.init_process_group(
        "gloo", init_method="file://%s/store" % folder, rank=rank, world_size=RANKS
    )
    results = []
    for test in torch.load(os.path.join(folder, "cases.pt")):
        model = DistributedDataParallel(Given(), bucket_cap_mb=test["bucket_cap_mb"])
        if test["hook"] == "powersgd":
            own = dict(test["options"])
            own["start_powerSGD_iter"] = own.pop("start_iter")
            model.register_comm_hook(
                powerSGD_hook.PowerSGDState(None, **own), powerSGD_hook.powerSGD_hook
            )
        else:
            model.register_comm_hook(None, getattr(default_hooks, test["hook"] + "_hook"))
        steps = []
        for step in test["gradients"]:
            model.zero_grad()
            model(as_tensors(step[rank])).backward()
            steps.append(torch.cat([p.grad.flatten() for p in model.module.values]))
        results.append(torch.stack(steps))
    if rank == 0:
        torch.save(results, os.path.join(folder, "theirs.pt"))
    dist.barrier()
    # Not destroy_process_group: futures keep the group, whose Gloo threads then run until the
    # interpreter is finalized, where std::terminate ends the process now and then (as in
    # join_interop_test.py).
    os._exit(0)


def run_ours(test, backend, folder):
    """The gradients that each step leaves, and the bytes that it sends."""
    path = lambda name: os.path.join(folder, name)
    described = {
        "hook": test["hook"],
        "options": {"powersgd." + k: str(v).lower() for k, v in test["options"].items()},
        "shapes": SHAPES,
        "steps": test["gradients"].shape[0],
        "ranks": RANKS,
        "bucket_cap_mb": test["bucket_cap_mb"],
        "backend": backend,
    }
    with open(path("case.json"), "w") as f:
        json.dump(described, f)
    test["gradients"].numpy().tofile(path("gradients"))
    command = [PEER, path("case.json"), path("gradients"), path("ours")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    with open(path("ours"), "rb") as f:
        flat = torch.frombuffer(bytearray(f.read()), dtype=torch.float32)
    return flat.view(described["steps"], -1), [int(line) for line in done.stdout.split()]


def random(steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, RANKS, ELEMENTS, generator=generator)


class HooksInteropTest(unittest.TestCase):
    def run_both(self, cases, backends=("gloo",)):
        """For each case: it, Python's result, and ours as {backend: (result, bytes)}."""
        with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as folder:
            torch.save(cases, os.path.join(folder, "cases.pt"))
            ranks = [
                subprocess.Popen([sys.executable, "-s", os.path.abspath(__file__), folder, str(r)])
                for r in range(RANKS)
            ]
            self.assertEqual([rank.wait() for rank in ranks], [0] * RANKS)
            theirs = torch.load(os.path.join(folder, "theirs.pt"))
            return [
                (test, result, {backend: run_ours(test, backend, folder) for backend in backends})
                for test, result in zip(cases, theirs)
            ]

    def test_16_bits_are_the_same_bits(self):
        # No subnormal fp16, which lose a bit where they are halved before the sum: by Python and
        # over gloo, and not over shm.
        gradients = random(4) * 10.0 ** torch.arange(-1, 3).view(4, 1, 1)
        gradients = gradients.sign() * gradients.abs().clamp(min=2e-4)
        cases = [
            case(hook, gradients, cap)
            for hook in ("fp16_compress", "bf16_compress")
            for cap in (ONE_BUCKET, MANY_BUCKETS)
        ]
        for test, theirs, ours in self.run_both(cases, ("gloo", "shm")):
            for backend, (result, sent) in ours.items():
                what = (test["hook"], test["bucket_cap_mb"], backend)
                self.assertTrue(torch.equal(result, theirs), what)
                self.assertEqual(sent, [2 * ELEMENTS] * 4, what)

    def test_16_bits_at_the_ends_of_the_range(self):
        """Overflow to infinity and subnormal numbers: gloo's sums, in 16 bits on both sides."""
        gradients = random(4) * torch.tensor([1e-7, 1e-5, 5e4, 1e38]).view(4, 1, 1)
        cases = [case(hook, gradients) for hook in ("fp16_compress", "bf16_compress")]
        for test, theirs, ours in self.run_both(cases):
            result, _ = ours["gloo"]
            self.assertTrue(torch.equal(result.nan_to_num(7.5), theirs.nan_to_num(7.5)), test["hook"])
            if test["hook"] == "fp16_compress":
                self.assertTrue(torch.isinf(theirs).any())

    def test_powersgd(self):
        """In one bucket: with several, Python's hook waits over gloo for rounds that cannot start."""
        steps = 20
        several = [
            dict(matrix_approximation_rank=r, start_iter=3, use_error_feedback=e, warm_start=w)
            for r, e, w in itertools.product((1, 2, 4), (True, False), (True, False))
        ] + [
            dict(start_iter=2, random_seed=1234),
            dict(start_iter=10, orthogonalization_epsilon=1e-6),
            dict(start_iter=2, matrix_approximation_rank=3, min_compression_rate=0.5),
        ]
        mean = random(steps).mean(1)
        cases = [case("powersgd", random(steps), **options) for options in several]
        for test, theirs, ours in self.run_both(cases):
            options = test["options"]
            result, sent = ours["gloo"]
            difference = (result - theirs).abs().max().item()
            print(options, "largest difference %.1e" % difference)
            self.assertLess(difference, 1e-4, options)
            # Not the mean, but in the first steps.
            start = options["start_iter"]
            self.assertLess((theirs[:start] - mean[:start]).abs().max(), 1e-5)
            self.assertGreater((theirs[start:] - mean[start:]).abs().max(), 0.1)
            compressed = 0
            for shape in SHAPES:
                n, m = shape[0], torch.Size(shape).numel() // shape[0]
                r = min(n, m, options.get("matrix_approximation_rank", 1))
                small = (n + m) * r * options.get("min_compression_rate", 2) < n * m
                compressed += (n + m) * r if small else n * m
            self.assertEqual(sent, [4 * ELEMENTS] * start + [4 * compressed] * (steps - start))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].isdigit():
        python_rank(sys.argv[1], int(sys.argv[2]))
    else:
        xml_unittest.main()
