#!/usr/bin/env python3
"""Step time and volume per communication hook, run alternately on this machine.

    bazelw run //tools/bench:compare_hooks                       # or bazel-bin/tools/bench/compare_hooks
    bazelw run //tools/bench:compare_hooks -- --hooks=allreduce,powersgd --backend=gloo -- --model=cnn

Trains //tools:train with each hook in turn, several rounds; flags after a
second -- go to it. Prints medians over rounds: of each run's median step
(including data loading), and of what a rank hands to collectives for its
gradients per step. All runs start with the same loss and must get lower;
16-bit hooks must send half of what allreduce sends. PowerSGD compresses from
the third step on here. With --precisions and --sync_bn each hook is run with
each of these values of these flags.
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

HOOKS = ("allreduce", "fp16_compress", "bf16_compress", "powersgd", "noop")
# Where ranks share gradients; without, they drift apart.
SHARES = {"allreduce": 1, "fp16_compress": 0.5, "bf16_compress": 0.5, "noop": 0}


def volume_of(log_dir):
    """Bytes per step, by the last record."""
    value = None
    with open(os.path.join(log_dir, "metrics.jsonl")) as f:
        for line in f:
            value = json.loads(line).get("train/comm_bytes", value)
    return value


def run(options, hook, precision, sync_bn):
    with tempfile.TemporaryDirectory(prefix="compare_hooks.") as scratch:
        report, log = os.path.join(scratch, "report.json"), os.path.join(scratch, "log")
        command = [
            os.path.abspath(options.train), "--launcher=local", "--dataset=synthetic",
            "--nproc_per_node=%d" % options.ranks, "--backend=%s" % options.backend,
            "--model=%s" % options.model, "--batch_size=%d" % options.batch_size,
            "--max_steps=%d" % options.steps, "--epochs=1000", "--schedule=constant",
            "--comm_hook=%s" % hook, "--log_dir=%s" % log, "--bench_json=%s" % report,
        ]  # fmt: skip
        if hook == "powersgd":
            command += ["--matrix_approximation_rank=%d" % options.rank, "--start_iter=2"]
        if precision:
            command.append("--precision=%s" % precision)
        if sync_bn:
            command.append("--sync_bn=%s" % sync_bn)
        command += options.flags
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            sys.exit("%s\nfailed with exit status %d:\n%s" % (
                shlex.join(command), done.returncode, tail))  # fmt: skip
        with open(report) as f:
            measured = json.load(f)
        measured["bytes"] = volume_of(log)
        if measured["bytes"] is None:
            sys.exit("hook %s does not count its bytes (ddp/comm_bytes.h)" % hook)
        return measured


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", default=runfiles.find("libtorch_ddp/tools/train"))
    parser.add_argument("--hooks", default=",".join(HOOKS))
    parser.add_argument("--precisions", default="", help="values of --precision; empty: its default")
    parser.add_argument("--sync_bn", default="", help="values of --sync_bn; empty: its default")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--rank", type=int, default=1, help="matrix_approximation_rank of powersgd")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="for //tools:train")
    options = parser.parse_args()
    if options.steps < 20:
        parser.error("--steps=%d: the first 10 are not timed; give 20 or more" % options.steps)
    if options.ranks < 2:
        parser.error("--ranks=%d: one rank sends nothing; give 2 or more" % options.ranks)

    cases = [
        (hook, precision, sync_bn)
        for precision in options.precisions.split(",")
        for sync_bn in options.sync_bn.split(",")
        for hook in options.hooks.split(",")
    ]
    rows = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            rows[case].append(run(options, *case))
    median = lambda case, key: statistics.median(row[key] for row in rows[case])

    for case in cases:
        hook, precision, sync_bn = case
        base = ("allreduce", precision, sync_bn)
        first = (cases[0][0], precision, sync_bn)
        if abs(median(case, "first_loss") / median(first, "first_loss") - 1) > 0.01:
            sys.exit("%s %s: not the same work: first loss %g" % (
                hook, precision, median(case, "first_loss")))  # fmt: skip
        if hook != "noop" and not median(case, "last_loss") < median(case, "first_loss"):
            sys.exit("%s %s %s does not train" % case)
        share = SHARES.get(hook)
        if base in rows and share is not None:
            if median(case, "bytes") != share * median(base, "bytes"):
                sys.exit("%s %s sends %g bytes, allreduce %g" % (
                    hook, precision, median(case, "bytes"), median(base, "bytes")))  # fmt: skip

    print("%-16s %-10s %-8s %10s %8s %12s %8s %10s" % (
        "hook", "precision", "sync_bn", "step, ms", "ratio", "KB per step", "ratio", "last loss"))  # fmt: skip
    for case in cases:
        base = ("allreduce", *case[1:])
        ratio = lambda key: median(case, key) / median(base, key) if base in rows else float("nan")
        print("%-16s %-10s %-8s %10.2f %8.2f %12.1f %8.3f %10.4f" % (
            case[0], case[1] or "default", case[2] or "default", median(case, "step_ms_median"), ratio("step_ms_median"),
            median(case, "bytes") / 1e3, ratio("bytes"), median(case, "last_loss")))  # fmt: skip
    print(json.dumps({"benchmark": "compare_hooks", "ranks": options.ranks, "model": options.model,
                      "backend": options.backend,
                      "runs": {"%s %s %s" % case: rows[case] for case in cases}}))  # fmt: skip


if __name__ == "__main__":
    main()
