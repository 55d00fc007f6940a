#!/usr/bin/env python3
"""Our sharded optimizer beside Python's ZeroRedundancyOptimizer, run alternately on this machine.

    bazelw run //tools/bench:zero_vs_python -- --rounds=3 --check

The recipe of PyTorch's tutorial: 20 x Linear(2000, 2000), Adam, 2 ranks. Adam is
fused (one kernel call) or plain (an operation per term), as each side has it;
the target of 0.5 is for the recipe as it stands, ours fused, Python's plain. Each
side's first loss and the last after the same number of steps must be alike
before anything is printed. Times are medians over rounds of each run's median;
memory is that of the largest rank. A ratio is ours / the other's. With --check
the exit status is 1 if a ratio misses its target.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys

import runfiles

RANKS = 2
STAGES = (0, 1, 2)
MIB = 1024.0 * 1024.0


def run(command, environment=None):
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        sys.exit("%s\nfailed with exit status %d:\n%s" % (shlex.join(command), done.returncode, tail))
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


def run_ours(options, stage, extra=()):
    return run([os.path.abspath(options.ours), "--zero_stage=%d" % stage, "--launcher=local",
                "--nproc_per_node=%d" % RANKS, "--backend=%s" % options.backend,
                "--layers=%d" % options.layers, "--width=%d" % options.width,
                "--steps=%d" % options.steps, *extra])  # fmt: skip


def run_python(options, zero, extra=()):
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return run([os.path.abspath(options.python), "-m", "torch.distributed.run", "--standalone",
                "--nproc_per_node=%d" % RANKS, os.path.abspath(options.peer), "--zero=%d" % zero,
                "--layers=%d" % options.layers, "--width=%d" % options.width,
                "--steps=%d" % options.steps, *extra], environment)  # fmt: skip


def median(rows, key):
    return statistics.median(row[key] for row in rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ours", default=runfiles.find("libtorch_ddp/tools/bench/zero_rank"))
    parser.add_argument("--peer", default=runfiles.find("libtorch_ddp/tools/bench/zero_peer.py"))
    parser.add_argument("--python", default=runfiles.find("python_torch/python"))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2000)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()

    ours = {stage: [] for stage in STAGES}
    theirs = {0: [], 1: []}
    plain, fused = [], []  # stage 1, as the other side has it by default
    for _ in range(options.rounds):
        for stage in STAGES:
            ours[stage].append(run_ours(options, stage))
        for zero in theirs:
            theirs[zero].append(run_python(options, zero))
        plain.append(run_ours(options, 1, ("--nofused",)))
        fused.append(run_python(options, 1, ("--fused",)))
    # Bytes of the allocator: buckets outside of shared memory, where it does not see them.
    counted = {stage: run_ours(options, stage, ("--noarena",)) for stage in STAGES}
    for rows in [*ours.values(), *theirs.values(), plain, fused]:
        if abs(rows[0]["loss"] - theirs[0][0]["loss"]) > 0.02 * theirs[0][0]["loss"]:
            sys.exit("not the same work: loss %g, Python's %g" % (
                rows[0]["loss"], theirs[0][0]["loss"]))

    print("%28s %10s %10s %12s %12s" % (
        "", "step, ms", "train, ms", "state, MiB", "PSS +MiB"))
    for stage in STAGES:
        print("%28s %10.1f %10.1f %12.1f %12.1f" % (
            "ours, stage %d, fused" % stage, median(ours[stage], "optimizer_step_ms"),
            median(ours[stage], "train_step_ms"), counted[stage]["state_bytes"] / MIB,
            median(ours[stage], "pss_growth_bytes") / MIB))  # fmt: skip
    for rows, name in (
        (plain, "ours, stage 1, plain"),
        (theirs[0], "Python, Adam"),
        (theirs[1], "Python, ZeroRedundancy"),
        (fused, "the same, fused"),
    ):
        print("%28s %10.1f %10.1f %12s %12.1f" % (
            name, median(rows, "optimizer_step_ms"), median(rows, "train_step_ms"), "",
            median(rows, "pss_growth_bytes") / MIB))  # fmt: skip

    parameters = options.layers * (options.width * options.width + options.width)
    step = lambda rows: median(rows, "optimizer_step_ms")
    pss = lambda rows: median(rows, "pss_growth_bytes")
    ratios = (
        ("state, stage 1 / (8 P / N)", counted[1]["state_bytes"] / (8 * parameters / RANKS), 1.01),
        ("state, stage 2 / (8 P / N)", counted[2]["state_bytes"] / (8 * parameters / RANKS), 1.01),
        ("peak of gradients, buckets, state: stage 2 / 0",
         counted[2]["peak_bytes"] / counted[0]["peak_bytes"], 0.57),
        ("PSS growth, stage 1 / Python's", pss(ours[1]) / pss(theirs[1]), 1.0),
        ("optimizer step, stage 1 / 0", step(ours[1]) / step(ours[0]), 1.0),
        ("optimizer step, stage 1 / Python's plain", step(ours[1]) / step(theirs[1]), 0.5),
        ("the same, both fused", step(ours[1]) / step(fused), 1.0),
        ("the same, both plain", step(plain) / step(theirs[1]), None),
        ("allocations in a step, stage 1 - stage 0",
         ours[1][0]["step_allocations"] - ours[0][0]["step_allocations"], 0),
        ("allocations in a step, stage 2 - stage 0",
         ours[2][0]["step_allocations"] - ours[0][0]["step_allocations"], 0),
    )
    print("\n%-50s %8s %8s" % ("", "ratio", "target"))
    missed = 0
    for name, ratio, target in ratios:
        if target is None:
            print("%-50s %8.3f" % (name, ratio))
            continue
        missed += ratio > target
        print("%-50s %8.3f %8.2f%s" % (name, ratio, target, "  missed" if ratio > target else ""))
    print(json.dumps({"benchmark": "zero_vs_python", "ours": ours, "counted": counted,
                      "plain": plain, "python": theirs, "python_fused": fused}))  # fmt: skip
    sys.exit(1 if options.check and missed else 0)


if __name__ == "__main__":
    main()
