#!/usr/bin/env python3
"""The Python counterpart of //tools:train, with torchrun + DDP + Gloo.

    torchrun --standalone --nproc_per_node=2 train_peer.py --data_dir=DIR --model=cnn

The same models, data, batch size, optimizer and number of steps. Rank 0 prints
one JSON line at the end: step times include data loading. compare_train.py runs
it beside ours.

--loader=dataloader is the usual DataLoader over a TensorDataset.
--loader=tensor indexes one tensor for each batch: the fastest in Python for a
data set in memory.
"""

import argparse
import gzip
import json
import os
import statistics
import struct
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WARMUP_STEPS = 10  # buckets are rebuilt after the first; allocators settle over the next few


def read_idx(path):
    """An original idx file (.gz or not) as a uint8 tensor."""
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rb") as f:
        _, _, kind, dimensions = struct.unpack(">BBBB", f.read(4))
        assert kind == 8, "%s does not hold bytes" % path
        shape = struct.unpack(">%dI" % dimensions, f.read(4 * dimensions))
        return torch.frombuffer(bytearray(f.read()), dtype=torch.uint8).reshape(shape)


def find(folder, name):
    for candidate in (name, name + ".gz"):
        if os.path.exists(os.path.join(folder, candidate)):
            return os.path.join(folder, candidate)
    raise SystemExit("%s has neither %s nor %s.gz" % (folder, name, name))


def load_training_data(folder):
    """Images as float32 [N, 1, 28, 28], normalised as //tools/datasets does, labels as int64 [N]."""
    images = read_idx(find(folder, "train-images-idx3-ubyte"))
    labels = read_idx(find(folder, "train-labels-idx1-ubyte"))
    return images.unsqueeze(1).float().div_(255).sub_(0.2860).div_(0.3530), labels.long()


def make_model(name):
    if name == "mlp":
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 512), nn.ReLU(),
            nn.Linear(512, 512), nn.ReLU(),
            nn.Linear(512, 10),
        )  # fmt: skip

    def block(inputs, outputs):
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 16), nn.MaxPool2d(2),
        *block(16, 32), nn.MaxPool2d(2),
        *block(32, 64), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 3 * 3, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def batches(images, labels, options):
    """Endless batches of this rank, epoch after epoch."""
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, shuffle=True, seed=options.seed, drop_last=True)
    loader = DataLoader(
        data,
        batch_size=options.batch_size,
        sampler=sampler,
        num_workers=options.num_workers,
        drop_last=True,
        persistent_workers=options.num_workers > 0,
    )
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        if options.loader == "dataloader":
            yield from loader
        else:
            order = torch.tensor(list(sampler))
            for indices in order.split(options.batch_size):
                if len(indices) == options.batch_size:
                    yield images.index_select(0, indices), labels.index_select(0, indices)
        epoch += 1


def pss_kib():
    """Proportional set size of this process: shared pages count by their share."""
    with open("/proc/self/smaps_rollup") as f:
        for line in f:
            if line.startswith("Pss:"):
                return int(line.split()[1])
    raise RuntimeError("no Pss in /proc/self/smaps_rollup")


def mean_over_ranks(value):
    tensor = torch.tensor([float(value)], dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item() / dist.get_world_size()


def report_and_exit(losses, ends, first_step_end, pss, more):
    """Prints the report on rank 0. `ends`: of the steps, by perf_counter; `more`: further values."""
    steps = [1e3 * (b - a) for a, b in zip(ends[WARMUP_STEPS:], ends[WARMUP_STEPS + 1 :])]
    tail = losses[-20:]
    report = {
        "ranks": dist.get_world_size(),
        "steps": len(ends),
        "first_loss": mean_over_ranks(losses[0]),
        "last_loss": mean_over_ranks(sum(tail) / len(tail)),
        "first_step_unix_s": first_step_end,
        "step_ms_median": statistics.median(steps) if steps else None,
        "step_ms_mean": statistics.fmean(steps) if steps else None,
        "pss_mib_per_rank": mean_over_ranks(pss) / 1024,
        **more,
    }
    if dist.get_rank() == 0:
        print(json.dumps(report), flush=True)
    dist.barrier()
    # Not destroy_process_group: DDP keeps the group, and a Gloo thread that still runs while the
    # interpreter is finalized can end the process with an abort.
    os._exit(0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--model", choices=["mlp", "cnn"], default="cnn")
    parser.add_argument("--batch_size", type=int, default=64, help="per rank")
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loader", choices=["dataloader", "tensor"], default="dataloader")
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--channels_last", action="store_true")
    parser.add_argument("--t0", type=float, default=0.0, help="time of the start, in epoch seconds")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    layout = torch.channels_last if options.channels_last else torch.contiguous_format
    model = make_model(options.model)
    if options.channels_last:
        model = model.to(memory_format=layout)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    criterion = nn.CrossEntropyLoss()
    images, labels = load_training_data(options.data_dir)

    losses, ends = [], []
    for inputs, targets in batches(images, labels, options):
        inputs = inputs.contiguous(memory_format=layout)
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        ends.append(time.perf_counter())
        if len(ends) == 1:
            first_step_end = time.time()
        if len(ends) == min(WARMUP_STEPS, options.max_steps):
            pss = pss_kib()
        if len(ends) == options.max_steps:
            break

    start_to_first_step = first_step_end - options.t0 if options.t0 else None
    report_and_exit(losses, ends, first_step_end, pss,
                    {"start_to_first_step_s": start_to_first_step})  # fmt: skip


if __name__ == "__main__":
    main()
