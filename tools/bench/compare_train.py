#!/usr/bin/env python3
"""Compares //tools:train with Python's torchrun + DDP + Gloo, run alternately on this machine.

    bazelw run //tools/bench:train_vs_python          # or bazel-bin/tools/bench/train_vs_python
    python3 tools/bench/compare_train.py --train=bazel-bin/tools/train --data_dir=DIR \\
        --python=PYTHON_WITH_TORCH [--rounds=5] [--steps=200] [--check]

First checks that both sides compute the same: the first loss is that of random
guessing among ten classes, and the last one falls to the same value within a
tolerance. Then prints the median over rounds of each run's median step
(including data loading), the time from the start of the command to the end of
the first step, and memory (PSS) per rank. A ratio is ours / Python's.

Python uses the fastest of its loaders, found in pilot runs. Each round also
runs ours with one rank: the memory of all ranks beside its own is what a further
rank costs. And with four times as many ranks, which share the cores, and then as
many processes of one rank each at the same time, which do not communicate: the
ratio of their steps is what communication costs ranks that share cores.
--models=gpt compares the language model instead, with gpt_peer.py: 5 layers of
128, 4 heads, context 128, batch 8 per rank, AdamW 3e-3, cosine. A round is a
seed; after equal steps the bits per byte of both sides, with their spreads over
the seeds, are printed, too.
With --check the exit status is 1 if a ratio misses its target, or if the means of
bits per byte differ by more than the larger spread.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

import runfiles

RANKS = 2
# Ranks that share cores, compared with as many processes that do not communicate.
MANY = 4 * RANKS
MANY_TARGET = 1.1
# PSS of all ranks / of a single one.
MEMORY_TARGET = 1.4
LOADERS = ("dataloader --num_workers=0", "dataloader --num_workers=2", "tensor")
# Of the last losses' means. Both sides draw the same weights from a seed and see the same examples
# in the same order: what is left is the order of floating-point sums, which training amplifies.
LOSS_TOLERANCE = 0.05
# (label with unit, our run, Python's run, measured value, target of the ratio)
RATIOS = (
    ("step, mlp, ms", "mlp", "mlp", "step_ms_median", 0.35),
    ("step, cnn, ms", "cnn", "cnn", "step_ms_median", 0.5),
    ("step, cnn, Python channels-last, ms", "cnn", "cnn_channels_last", "step_ms_median", 0.75),
    ("start to end of first step, mlp, s", "mlp", "mlp", "start_to_first_step_s", 1 / 3),
    ("start to end of first step, cnn, s", "cnn", "cnn", "start_to_first_step_s", 1 / 3),
    ("PSS per rank, mlp, MiB", "mlp", "mlp", "pss_mib_per_rank", 0.2),
    ("PSS per rank, cnn, MiB", "cnn", "cnn", "pss_mib_per_rank", 0.2),
    ("step, gpt, ms", "gpt", "gpt", "step_ms_median", 0.85),
    ("start to end of first step, gpt, s", "gpt", "gpt", "start_to_first_step_s", 1 / 3),
    ("PSS per rank, gpt, MiB", "gpt", "gpt", "pss_mib_per_rank", 0.4),
)
# How //tools:train is run; {report} is the JSON file it writes.
OURS = (
    "{train} --model={model} --dataset=fashion_mnist --data_dir={data_dir} --launcher=local "
    "--nproc_per_node={ranks} --backend=auto --batch_size={batch_size} --max_steps={steps} "
    "--optimizer=sgd --lr={lr} --momentum=0.9 --weight_decay=0 --schedule=constant "
    "--warmup_steps=0 --seed={seed} --log_dir={scratch}/log --checkpoint_dir={scratch}/checkpoint "
    "--checkpoint_every=0 --bench_json={report}"
)

# The same of the language model, whose sizes and options are those of gpt_peer.py.
OURS_GPT = (
    "{train} --model=gpt --files={text} --layers=5 --width=128 --heads=4 --context=128 "
    "--launcher=local --nproc_per_node={ranks} --backend=auto --batch_size=8 --max_steps={steps} "
    "--lr=0.003 --clip_norm=0 --drop_last --seed={seed} --log_dir={scratch}/log "
    "--checkpoint_dir={scratch}/checkpoint --checkpoint_every=0 --bench_json={report}"
)
# That of random guessing among so many, and how near the first loss is; else of ten classes.
FIRST_LOSS = {"gpt": (math.log(256), 1.5)}


def run(command, environment=None):
    """Runs a command to its end; returns (time it was started, standard output)."""
    started = time.time()
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        sys.exit("%s\nfailed with exit status %d:\n%s" % (shlex.join(command), done.returncode, tail))
    return started, done.stdout


def our_command(options, model, seed, ranks, steps, scratch):
    """The command, and the file to which it writes what it has measured."""
    report = os.path.join(scratch, "report.json")
    template = OURS_GPT if model == "gpt" else options.ours
    command = shlex.split(template.format(
        train=shlex.quote(os.path.abspath(options.train)), model=model, ranks=ranks,
        data_dir=shlex.quote(os.path.abspath(options.data_dir)), batch_size=options.batch_size,
        text=shlex.quote(os.path.abspath(options.text)),
        steps=steps, lr=options.lr, seed=seed, scratch=scratch, report=report,
    ))  # fmt: skip
    return command, report


def run_ours(options, model, seed, ranks=RANKS):
    with tempfile.TemporaryDirectory(prefix="train_vs_python.") as scratch:
        steps = options.steps * RANKS // ranks
        command, report = our_command(options, model, seed, ranks, steps, scratch)
        started, _ = run(command)
        with open(report) as f:
            measured = json.load(f)
    measured["start_to_first_step_s"] = measured["first_step_unix_s"] - started
    return measured


def run_without_communication(options, model, seed):
    """Median step of MANY processes of one rank each, which run at the same time."""
    threads = max(1, len(os.sched_getaffinity(0)) // MANY)  # as the launcher gives to MANY ranks
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
    with tempfile.TemporaryDirectory(prefix="train_vs_python.") as scratch:
        steps = options.steps * RANKS // MANY
        started = []
        for number in range(MANY):
            folder = os.path.join(scratch, str(number))
            os.mkdir(folder)
            command, report = our_command(options, model, seed, 1, steps, folder)
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            started.append((process, command, report))
        medians = []
        for process, command, report in started:
            _, error = process.communicate()
            if process.returncode != 0:
                sys.exit("%s\nfailed with exit status %d:\n%s" % (shlex.join(command), process.returncode, error))
            with open(report) as f:
                medians.append(json.load(f)["step_ms_median"])
    return statistics.median(medians)


def run_python(options, model, seed, loader, steps=None):
    command = [os.path.abspath(options.python), "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=%d" % RANKS]
    if model == "gpt":
        peer = os.path.join(os.path.dirname(os.path.abspath(options.peer)), "gpt_peer.py")
        command += [peer, "--text=" + os.path.abspath(options.text)]
    else:
        command += [os.path.abspath(options.peer)]
        command += ["--model=" + model.replace("_channels_last", "")]
        command += ["--data_dir=" + options.data_dir, "--batch_size=%d" % options.batch_size]
        command += ["--lr=%g" % options.lr, "--momentum=0.9"]
        command += ("--loader=" + loader).split()
    if model.endswith("_channels_last"):
        command.append("--channels_last")
    command += ["--max_steps=%d" % (steps or options.steps), "--seed=%d" % seed]
    # torchrun chooses the number of threads, as by default.
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    started, output = run(command, environment)
    measured = json.loads(output.strip().splitlines()[-1])
    measured["start_to_first_step_s"] = measured["first_step_unix_s"] - started
    return measured


def check_loss(name, side, measured, steps):
    if measured["steps"] != steps:
        sys.exit("%s of %s made %d steps, not %d" % (name, side, measured["steps"], steps))
    guessing, tolerance = FIRST_LOSS.get(name, (math.log(10), 0.3))
    if abs(measured["first_loss"] - guessing) > tolerance:
        sys.exit("%s of %s starts at loss %.3f, not near %.3f" % (
            name, side, measured["first_loss"], guessing))
    if not measured["last_loss"] < 0.6 * measured["first_loss"]:
        sys.exit("%s of %s does not learn: loss %.3f" % (name, side, measured["last_loss"]))


def check_same(ours, theirs):
    for name, rounds in theirs.items():
        mine = statistics.fmean(m["last_loss"] for m in ours[name.replace("_channels_last", "")])
        other = statistics.fmean(m["last_loss"] for m in rounds)
        if abs(mine - other) > LOSS_TOLERANCE:
            sys.exit("%s does not train the same: loss %.3f, Python's %.3f" % (name, mine, other))
        print("# same work: %s, last loss %.3f, Python's %.3f" % (name, mine, other))


def compare_bits(ours, theirs):
    """Bits per byte of text that was held out, of each seed: a row of their means, whose difference
    is to be within the larger of the sides' spreads over the seeds."""
    means, spreads = [], []
    for side, rounds in (("ours", ours), ("Python", theirs)):
        bits = [m["test/bits_per_byte"] for m in rounds]
        means.append(statistics.fmean(bits))
        spreads.append(max(bits) - min(bits))
        print("# gpt, bits per byte held out, %s: %.4f (%s), spread %.4f" % (
            side, means[-1], " ".join("%.4f" % b for b in bits), spreads[-1]))
    return {"what": "bits per byte held out, gpt", "ours": means[0], "python": means[1],
            "difference": abs(means[0] - means[1]), "target": max(spreads)}  # fmt: skip


def compare_memory(name, ours, alone):
    """A row of the PSS of all ranks and that of a single one."""
    a = RANKS * statistics.median(m["pss_mib_per_rank"] for m in ours)
    b = statistics.median(m["pss_mib_per_rank"] for m in alone)
    return {"what": "PSS of %d ranks / 1 rank, %s, MiB" % (RANKS, name), "ranks": a, "rank": b,
            "ratio": a / b, "target": MEMORY_TARGET}  # fmt: skip


def fastest_loader(options, model):
    pilot = {
        loader: run_python(options, model, 0, loader, steps=60)["step_ms_median"]
        for loader in LOADERS
    }
    best = min(pilot, key=pilot.get)
    print("# Python's loader for %s: %s (of %s)" % (
        model, best, ", ".join("%s %.2f ms" % item for item in pilot.items())))
    return best


def main():
    parser = argparse.ArgumentParser()
    # What Bazel has put beside this script, unless given.
    parser.add_argument("--train", default=runfiles.find("libtorch_ddp/tools/train"),
                        help="the program //tools:train")  # fmt: skip
    parser.add_argument("--python", default=runfiles.find("python_torch/python") or sys.executable,
                        help="an interpreter that has torch")  # fmt: skip
    parser.add_argument("--data_dir", default=runfiles.find("fashion_mnist/data/fashion"),
                        help="folder of Fashion-MNIST's idx files")  # fmt: skip
    beside = os.path.join(os.path.dirname(os.path.realpath(__file__)), "train_peer.py")
    parser.add_argument("--peer", default=beside, help="train_peer.py")
    parser.add_argument("--text", default=runfiles.find("jargon/jargon.txt"),
                        help="a file of text, for gpt")  # fmt: skip
    parser.add_argument("--models", default="mlp,cnn", help="some of mlp, cnn, gpt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--ours", default=OURS, help="template of the command for our side")
    parser.add_argument("--check", action="store_true", help="fail if a ratio misses its target")
    options = parser.parse_args()
    models = options.models.split(",")
    if not models or not set(models) <= {"mlp", "cnn", "gpt"}:
        parser.error("--models takes some of mlp, cnn, gpt, not %s" % options.models)
    for name in ("train", "data_dir", "text"):
        if not getattr(options, name):
            parser.error(
                "--%s is needed: this script was started neither with `bazel run "
                "//tools/bench:train_vs_python` nor from bazel-bin" % name
            )
    if options.check and "gpt" in models and options.rounds < 2:
        parser.error("--check of gpt needs --rounds=2 or more, for the spread over the seeds")
    options.data_dir = os.path.abspath(options.data_dir)

    # gpt_peer.py has one way to read its text.
    loaders = {name: None if name == "gpt" else fastest_loader(options, name) for name in models}
    if "cnn" in models:
        loaders["cnn_channels_last"] = loaders["cnn"]
    ours = {name: [] for name in models}
    alone = {name: [] for name in ours}
    many = {name: [] for name in ours}
    apart = {name: [] for name in ours}
    theirs = {name: [] for name in loaders}
    for seed in range(options.rounds):
        for name in theirs:
            if name in ours:
                ours[name].append(run_ours(options, name, seed))
                check_loss(name, "ours", ours[name][-1], options.steps)
                alone[name].append(run_ours(options, name, seed, ranks=1))
                if name != "gpt":
                    many[name].append(run_ours(options, name, seed, MANY)["step_ms_median"])
                    apart[name].append(run_without_communication(options, name, seed))
            theirs[name].append(run_python(options, name, seed, loaders[name]))
            check_loss(name, "Python", theirs[name][-1], options.steps)
    check_same(ours, theirs)

    rows, missed = [], 0
    bits = compare_bits(ours["gpt"], theirs["gpt"]) if "gpt" in models else None
    for label, mine, other, key, target in RATIOS:
        if other not in theirs:
            continue
        a = statistics.median(m[key] for m in ours[mine])
        b = statistics.median(m[key] for m in theirs[other])
        missed += a / b > target
        rows.append({"what": label, "ours": a, "python": b, "ratio": a / b, "target": target})
    print("%-36s %10s %10s %7s %7s" % ("", "ours", "Python", "ratio", "target"))
    for row in rows:
        print("%(what)-36s %(ours)10.2f %(python)10.2f %(ratio)7.2f %(target)7.2f" % row)
    for name in ours:
        rows.append(compare_memory(name, ours[name], alone[name]))
        missed += rows[-1]["ratio"] > rows[-1]["target"]
        print("%(what)-36s %(ranks)10.2f %(rank)10.2f %(ratio)7.2f %(target)7.2f" % rows[-1])
        if name == "gpt":
            continue
        a, b = statistics.median(many[name]), statistics.median(apart[name])
        missed += a / b > MANY_TARGET
        what = "%d ranks / %d processes, %s, ms" % (MANY, MANY, name)
        rows.append({"what": what, "ranks": a, "processes": b, "ratio": a / b, "target": MANY_TARGET})
        print("%(what)-36s %(ranks)10.2f %(processes)10.2f %(ratio)7.2f %(target)7.2f" % rows[-1])
    if bits:
        rows.append(bits)
        missed += bits["difference"] > bits["target"]
        print("%(what)-36s %(ours)10.4f %(python)10.4f, differ by %(difference).4f; target %(target).4f" % bits)
    print(json.dumps({"benchmark": "train_vs_python", "ranks": RANKS, "rounds": options.rounds,
                      "steps": options.steps, "batch_size": options.batch_size, "rows": rows}))  # fmt: skip
    sys.exit(1 if options.check and missed else 0)


if __name__ == "__main__":
    main()
