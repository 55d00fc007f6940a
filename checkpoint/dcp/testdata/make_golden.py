"""Makes the folders beside it: checkpoints that Python's torch.distributed.checkpoint writes.

    python make_golden.py FOLDER

Run with the torch that third_party/python_torch pins. Each folder is a checkpoint; expected.pt in it
has the same values in one piece, as torch.save writes them.

one_rank:   an MLP with Adam after two steps, with parameter numbers, and values of other kinds.
two_ranks:  the MLP in parts of two processes (fully_shard), with parameter names.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../tests/interop"))
from checkpoints import make_model, train, whole


def save(state, path):
    dcp.save(state, checkpoint_id=path)
    expected = whole(state)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(expected, os.path.join(path, "expected.pt"))


def one_rank(path):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    save(
        {
            "model": dict(model.state_dict()),
            "optimizer": optimizer.state_dict(),
            "epoch": 3,
            "rate": 0.5,
            "text": "Grüße",
            "none": None,
            "flags": [True, False],
            "pair": (1, torch.ones(2)),
            "tensors": [torch.arange(3), torch.arange(4.0).to(torch.bfloat16)],
            "scalar": torch.tensor(1.5, dtype=torch.float64),
            "empty": torch.empty(0, 4),
            "bool": torch.tensor([True, False]),
            "transposed": torch.arange(6.0).reshape(2, 3).t(),
        },
        path,
    )


def rank_of_two(rank, folder, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = make_model()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    table = torch.arange(35.0).reshape(5, 7)
    save(
        {
            "model": model_state,
            "optimizer": optimizer_state,
            "epoch": 3,
            "columns": distribute_tensor(table, mesh, [Shard(1)]),
            "replicated": distribute_tensor(table, mesh, [Replicate()]),
            # The second rank has no element of it.
            "single": distribute_tensor(torch.tensor([[1.5, 2.5]]), mesh, [Shard(0)]),
        },
        os.path.join(folder, "two_ranks"),
    )
    dist.destroy_process_group()


def main():
    folder = sys.argv[1]
    one_rank(os.path.join(folder, "one_rank"))
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(rank_of_two, args=(folder, os.path.join(scratch, "store")), nprocs=2)


if __name__ == "__main__":
    main()
