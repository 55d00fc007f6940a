#!/usr/bin/env python3
"""PyTorch's recipe for ZeroRedundancyOptimizer, one rank of it: torchrun + DDP + Gloo.

    torchrun --standalone --nproc_per_node=2 zero_peer.py --zero=1

Prints on rank 0 one JSON line, with the names that zero_rank.cc uses.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def pss_bytes():
    """Proportional set size of this process: shared pages count in part."""
    with open("/proc/self/smaps_rollup") as f:
        for line in f:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--zero", type=int, choices=(0, 1), default=1)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--fused", action="store_true", help="Adam by one kernel call")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(options.width, options.width) for _ in range(options.layers)])
    before = pss_bytes()
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if options.zero:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01, fused=options.fused
        )
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=options.fused)
    step_ms, whole_ms = [], []
    for step in range(-2, options.steps):
        torch.manual_seed(1000 * dist.get_rank() + step + 2)
        begin = time.perf_counter()
        inputs = torch.randn(20, options.width)
        target = torch.randn(20, options.width)
        loss = nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        last = loss.item()
        dist.barrier()
        at = time.perf_counter()
        optimizer.step()
        dist.barrier()
        end = time.perf_counter()
        optimizer.zero_grad()
        if step >= 0:
            step_ms.append(1e3 * (end - at))
            whole_ms.append(1e3 * (time.perf_counter() - begin))
    row = {
        "optimizer_step_ms": statistics.median(step_ms),
        "train_step_ms": statistics.median(whole_ms),
        "pss_growth_bytes": pss_bytes() - before,
    }
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        largest = {key: max(r[key] for r in rows) for key in row}
        largest["loss"] = last
        print(json.dumps(largest), flush=True)
    dist.barrier()
    # Not destroy_process_group: DDP keeps the group, and a Gloo thread that still runs while the
    # interpreter is finalized can end the process with an abort.
    os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
