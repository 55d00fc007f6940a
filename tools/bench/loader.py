#!/usr/bin/env python3
"""Our loader beside LibTorch's DataLoader and Python's, run alternately on this machine.

    bazelw run //tools/bench:loader -- --rounds=3 --check

Fashion-MNIST with random crop and flip, batches of 64, 0 and 1 workers: examples
per second, the median over rounds. Each side must have read every example, with
all labels, before anything is printed. Then the part of a step of model cnn in
which a rank of //tools:train waits for a batch, with 1 worker. With --check the
exit status is 1 if a target is missed. --nopython leaves Python out.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile

import runfiles

WORKERS = (0, 1)
WAIT_TARGET = 0.02
TARGETS = {"libtorch": 1.0, "python": 3.0}


def run(command):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        sys.exit("%s\nfailed with exit status %d:\n%s" % (shlex.join(command), done.returncode, tail))
    return done.stdout


def measure(options, side, workers):
    common = ["--data_dir=" + options.data_dir, "--num_workers=%d" % workers,
              "--examples=%d" % options.examples, "--passes=%d" % options.passes]  # fmt: skip
    if side == "python":
        command = [options.python, options.peer] + common
    else:
        command = [options.ours, "--loader=" + side] + common
    return json.loads(run(command).splitlines()[-1])


def wait_share(options):
    """(time waiting / time of all steps, median step in ms) of one rank, model cnn."""
    with tempfile.TemporaryDirectory(prefix="loader.") as scratch:
        run([options.train, "--model=cnn", "--dataset=fashion_mnist", "--data_dir=" + options.data_dir,
             "--augment=crop,flip", "--num_workers=1", "--nproc_per_node=1", "--batch_size=64",
             "--max_steps=%d" % options.steps, "--test_size=100", "--monitor_throughput",
             "--log_every=10", "--log_dir=" + scratch, "--checkpoint_dir=",
             "--bench_json=%s/report.json" % scratch])  # fmt: skip
        with open(scratch + "/metrics.jsonl") as f:
            waits = [row["train/data_wait"] for row in map(json.loads, f) if "train/data_wait" in row]
        with open(scratch + "/report.json") as f:
            return statistics.median(waits[1:]), json.load(f)["step_ms_median"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ours", default=runfiles.find("libtorch_ddp/tools/bench/loader_rank"))
    parser.add_argument("--train", default=runfiles.find("libtorch_ddp/tools/train"))
    parser.add_argument("--peer", default=runfiles.find("libtorch_ddp/tools/bench/loader_peer.py"))
    parser.add_argument("--python", default=runfiles.find("python_torch/python"))
    parser.add_argument("--data_dir", default=runfiles.find("fashion_mnist/data/fashion"))
    parser.add_argument("--nopython", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--examples", type=int, default=60000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    for name in ("ours", "train", "peer", "python", "data_dir"):
        if getattr(options, name):
            setattr(options, name, os.path.abspath(getattr(options, name)))

    sides = ["ours", "libtorch"] + ([] if options.nopython else ["python"])
    rates = {(side, workers): [] for workers in WORKERS for side in sides}
    counts = set()
    for _ in range(options.rounds):
        for side, workers in rates:
            measured = measure(options, side, workers)
            rates[side, workers].append(measured["examples_per_s"])
            counts.add((measured["examples"], measured["labels"]))
    if len(counts) != 1:
        sys.exit("the loaders have not read the same examples: (number, sum of labels) %s" % counts)
    waits = [wait_share(options) for _ in range(options.rounds)]

    missed = 0
    print("%-10s %8s %16s %8s %8s" % ("loader", "workers", "examples/s", "ratio", "target"))
    for side, workers in rates:
        rate, ours = statistics.median(rates[side, workers]), statistics.median(rates["ours", workers])
        if side == "ours":
            print("%-10s %8d %16.0f" % (side, workers, rate))
            continue
        missed += ours < TARGETS[side] * rate
        print("%-10s %8d %16.0f %8.2f %8.1f%s" % (
            side, workers, rate, ours / rate, TARGETS[side],
            "  missed" if ours < TARGETS[side] * rate else ""))  # fmt: skip
    wait, step = (statistics.median(column) for column in zip(*waits))
    missed += wait > WAIT_TARGET
    print("waiting for batches, cnn, 1 worker: %.2f %% of a step of %.1f ms, target %.0f %%%s" % (
        100 * wait, step, 100 * WAIT_TARGET, "  missed" if wait > WAIT_TARGET else ""))  # fmt: skip
    sys.exit(1 if options.check and missed else 0)


if __name__ == "__main__":
    main()
