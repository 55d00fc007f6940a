"""Trains with uneven inputs under Join, in C++ and in Python: the same gradients."""

import os
import subprocess
import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import xml_unittest
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

PEER = os.path.join(
    os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"], "tests/interop/join_peer"
)
BATCHES = (5, 2, 0)


def make_net():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def train(rank, folder, divide):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(BATCHES)
    )
    given = torch.load(f"{folder}/in.pt")
    net = make_net()
    with torch.no_grad():
        for mine, theirs in zip(net.parameters(), given["parameters"]):
            mine.copy_(theirs)
    model = DistributedDataParallel(net)
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    result = {}
    with Join([model], divide_by_initial_world_size=divide):
        for step, batch in enumerate(given["inputs"][rank]):
            sgd.zero_grad()
            model(batch).pow(2).mean().backward()
            result[f"step_{step}"] = [p.grad.clone() for p in net.parameters()]
            sgd.step()
    result["parameters"] = [p.detach().clone() for p in net.parameters()]
    torch.save(result, f"{folder}/theirs_{rank}.pt")
    dist.barrier()
    # Not destroy_process_group: autograd and futures keep the group, so its Gloo threads live until
    # the interpreter is finalized. One that takes the GIL then is ended by pthread_exit, which
    # unwinds through noexcept code: std::terminate ends the process, now and then.
    os._exit(0)


class JoinInteropTest(unittest.TestCase):
    def check(self, divide):
        torch.manual_seed(5)
        with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as folder:
            net = make_net()
            inputs = [[torch.randn(3, 4) for _ in range(batches)] for batches in BATCHES]
            torch.save(
                {"parameters": [p.detach() for p in net.parameters()], "inputs": inputs},
                f"{folder}/in.pt",
            )
            mp.spawn(train, (folder, divide), nprocs=len(BATCHES))
            command = [PEER, str(int(divide)), f"{folder}/in.pt", f"{folder}/ours.pt"]
            done = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            ours = torch.load(f"{folder}/ours.pt", weights_only=True)
            for rank, batches in enumerate(BATCHES):
                theirs = torch.load(f"{folder}/theirs_{rank}.pt")
                self.assertEqual(len(theirs), batches + 1)
                self.assertEqual(sorted(ours[f"rank_{rank}"]), sorted(theirs))
                for key in theirs:
                    for a, b in zip(ours[f"rank_{rank}"][key], theirs[key], strict=True):
                        difference = (a - b).abs().max().item()
                        self.assertLess(difference, 1e-6, f"rank {rank}, {key}")

    def test_averaged_over_all_ranks(self):
        self.check(divide=True)

    def test_averaged_over_ranks_with_inputs(self):
        self.check(divide=False)


if __name__ == "__main__":
    xml_unittest.main()
