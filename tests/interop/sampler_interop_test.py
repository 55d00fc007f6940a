"""ddp::data::DistributedSampler gives the indices of torch.utils.data.DistributedSampler."""

import itertools
import os
import subprocess
import unittest

import xml_unittest
from torch.utils.data import DistributedSampler

PEER = os.path.join(
    os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"], "tests/interop/sampler_peer"
)


class SamplerInteropTest(unittest.TestCase):
    def ours(self, *arguments):
        command = [PEER] + [str(int(a)) for a in arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [int(line) for line in done.stdout.split()]

    def theirs(self, size, replicas, rank, shuffle, drop_last, seed, epoch):
        sampler = DistributedSampler(
            range(size), num_replicas=replicas, rank=rank, shuffle=shuffle, seed=seed,
            drop_last=drop_last,
        )  # fmt: skip
        sampler.set_epoch(epoch)
        return list(sampler)

    def test_same_indices(self):
        """Sizes that divide and that do not, fewer examples than ranks, later epochs, large seeds."""
        cases = 0
        for size, replicas, shuffle, drop_last, (seed, epoch) in itertools.product(
            (1, 3, 8, 1000, 10007), (1, 2, 5), (True, False), (True, False),
            ((0, 0), (0, 3), (1234, 1), (2**31, 7)),
        ):  # fmt: skip
            if drop_last and size < replicas:
                continue  # Python's sampler fails there; ours gives no example
            for rank in {0, replicas - 1}:
                case = (size, replicas, rank, shuffle, drop_last, seed, epoch)
                self.assertEqual(self.ours(*case), self.theirs(*case), case)
                cases += 1
        self.assertGreater(cases, 300)

    def test_fashion_mnist(self):
        for epoch in range(3):
            case = (60000, 2, 1, True, False, 42, epoch)
            self.assertEqual(self.ours(*case), self.theirs(*case))


if __name__ == "__main__":
    xml_unittest.main()
