#!/usr/bin/env python3
"""One rank of Python's torch.save or torch.distributed.checkpoint, with checkpoint_rank.cc's tensors.

    torchrun --standalone --nproc_per_node=2 checkpoint_peer.py --task=save --kind=dcp --dir=/tmp/x

torch: rank 0 saves all and fsyncs it, each rank loads all. dcp: the model is on each rank, the moments
are DTensors in rows. Prints on rank 0 one JSON line, with the names that checkpoint_rank.cc uses.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor

SIDE = 1024
MOMENTS = ("exp_avg", "exp_avg_sq")


def values(index, kind):
    return (torch.arange(SIDE * SIDE, dtype=torch.float32) + 3 * index + kind).reshape(SIDE, SIDE)


def state_of(count, mesh, make):
    """`make(index, kind)` gives a whole tensor; with a mesh moments are divided among the ranks."""
    moment = lambda t: t if mesh is None else distribute_tensor(t, mesh, [Shard(0)])
    names = ["layers.%d.weight" % i for i in range(count)]
    return {
        "model": {name: make(i, 0) for i, name in enumerate(names)},
        "optimizer": {
            "state": {
                name: {key: moment(make(i, k + 1)) for k, key in enumerate(MOMENTS)}
                for i, name in enumerate(names)
            }
        },
        "epoch": 1,
    }


def proc(file, name):
    with open("/proc/self/" + file) as f:
        for line in f:
            if line.startswith(name + ":"):
                return int(line.split()[1])
    return 0


def take_peak():
    peak = proc("status", "VmHWM") * 1024
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
    except OSError:
        pass
    return peak


def save(options, mesh, state):
    if options.kind == "dcp":
        dcp.save(state, checkpoint_id=os.path.join(options.dir, "epoch_1"))
    elif dist.get_rank() == 0:
        temporary = os.path.join(options.dir, ".epoch_1.pt")
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, os.path.join(options.dir, "epoch_1.pt"))


def load(options, mesh, state):
    if options.kind == "dcp":
        dcp.load(state, checkpoint_id=os.path.join(options.dir, "epoch_1"))
        return state
    return torch.load(os.path.join(options.dir, "epoch_1.pt"), weights_only=True)


def check(state, count):
    for i, name in enumerate("layers.%d.weight" % i for i in range(count)):
        tensors = [state["model"][name]]
        tensors += [state["optimizer"]["state"][name][key] for key in MOMENTS]
        for kind, tensor in enumerate(tensors):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if not torch.equal(whole, values(i, kind)):
                raise SystemExit(name + " was read wrongly")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=("save", "load"), required=True)
    parser.add_argument("--kind", choices=("torch", "dcp"), required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    count = (options.mib + 11) // 12
    mesh = None
    if options.kind == "dcp":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    state = None
    if options.task == "save" or options.kind == "dcp":
        zeros = lambda index, kind: torch.zeros(SIDE, SIDE)
        state = state_of(count, mesh, values if options.task == "save" else zeros)
    work = save if options.task == "save" else load
    dist.barrier()
    take_peak()
    resident, read, begin = proc("status", "VmRSS") * 1024, proc("io", "rchar"), time.perf_counter()
    result = work(options, mesh, state)
    dist.barrier()
    row = {
        "seconds": time.perf_counter() - begin,
        "read_bytes": proc("io", "rchar") - read,
        "peak_bytes": take_peak() - resident,
    }
    if options.check:
        check(result, count)
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        total = {key: max(r[key] for r in rows) for key in row}
        total["read_bytes"] = sum(r["read_bytes"] for r in rows)
        print(json.dumps(total), flush=True)
    dist.barrier()
    # As in zero_peer.py: a Gloo thread that still runs can abort the end of the interpreter.
    os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
