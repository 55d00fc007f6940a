#!/usr/bin/env python3
"""Saving and loading checkpoints: our formats, Python's torch.save and DCP, and dd, alternately.

    bazelw run //tools/bench:checkpoint -- --mib=1024 --rounds=5 --check

A model with the state of Adam, in real processes. Before anything is timed, each
side loads what it has saved and compares every element. Each save ends with an
fsync. Before each load the files are dropped from the page cache, which the
kernel does where it can: the row `dd` shows what a plain read takes then. Times
are medians over rounds, of the slowest rank; memory is what the fullest rank's
resident size grew by; bytes read are what the ranks got from read and pread, over
the size of the checkpoint. With --check the exit status is 1 if a ratio or memory
misses its goal. Each measurement is printed when it is made; SIGINT ends the benchmark
with the medians of those that there are.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import runfiles

MIB = 1024.0 * 1024.0
RANKS = 2
OTHER_RANKS = 4  # another world, that saved what RANKS load, or that loads what they saved
MEMORY_GOAL = 64.0  # MiB that a save takes of a rank


def run(command, environment=None):
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate()
    except KeyboardInterrupt:
        process.terminate()  # and not SIGKILL: a launcher ends its ranks
        process.communicate()
        raise
    if process.returncode != 0:
        tail = "\n".join((out + errors).splitlines()[-15:])
        sys.exit("%s\nfailed with exit status %d:\n%s" % (
            shlex.join(command), process.returncode, tail))  # fmt: skip
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def files_below(path):
    if os.path.isfile(path):
        return [path]
    return [os.path.join(at, name) for at, _, names in os.walk(path) for name in names]


def drop_from_cache(path):
    for file in files_below(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def saved(side, save=None):
    """What a save takes, into an empty folder, when the disk has nothing else to write."""
    shutil.rmtree(side.dir, ignore_errors=True)
    os.makedirs(side.dir)
    os.sync()
    return (save or side.save)()


def loaded(side, **options):
    """What a load takes, from the disk."""
    drop_from_cache(side.dir)
    return side.load(**options)


class Ours:
    def __init__(self, options, form, ranks=RANKS, name=""):
        self.options, self.form, self.ranks = options, form, ranks
        self.dir = os.path.join(options.scratch, "%s_by_%d%s" % (form, ranks, name))

    def run(self, task, ranks, *extra):
        return run([os.path.abspath(self.options.ours), "--task=" + task, "--format=" + self.form,
                    "--dir=" + self.dir, "--mib=%d" % self.options.mib, "--launcher=local",
                    "--nproc_per_node=%d" % ranks, "--backend=" + self.options.backend,
                    *extra])  # fmt: skip

    def save(self):
        return self.run("save", self.ranks)

    def save_async(self):
        return self.run("async", self.ranks)

    def load(self, check=False, ranks=RANKS):
        return self.run("load", ranks, *(["--check"] if check else []))


class Python:
    def __init__(self, options, kind):
        self.options, self.kind = options, kind
        self.dir = os.path.join(options.scratch, "python_" + kind)

    def run(self, task, *extra):
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        return run([os.path.abspath(self.options.python), "-m", "torch.distributed.run",
                    "--standalone", "--nproc_per_node=%d" % RANKS,
                    os.path.abspath(self.options.peer), "--task=" + task, "--kind=" + self.kind,
                    "--dir=" + self.dir, "--mib=%d" % self.options.mib, *extra],
                   environment)  # fmt: skip

    def save(self):
        return self.run("save")

    def load(self, check=False):
        return self.run("load", *(["--check"] if check else []))


class Dd:
    """The bytes of another side's checkpoint, one file, by one process."""

    def __init__(self, options, source):
        self.source = source
        self.dir = os.path.join(options.scratch, "dd")
        self.file = os.path.join(self.dir, "copy")

    def dd(self, *words):
        begin = time.perf_counter()
        subprocess.run(["dd", *words, "bs=1M"], check=True, capture_output=True)
        return {"seconds": time.perf_counter() - begin}

    def save(self):
        (source,) = (f for f in files_below(self.source) if not os.path.basename(f).startswith("."))
        with open(source, "rb") as file:  # into the cache, so that only writing is timed
            while file.read(1 << 24):
                pass
        return self.dd("if=" + source, "of=" + self.file, "conv=fsync")

    def load(self, check=False):
        return self.dd("if=" + self.file, "of=/dev/null")


class Results:
    """Rows by side, printed as they come."""

    def __init__(self, sides):
        self.rows = {name: {"save": [], "load": []} for name in sides}
        self.more = {"load of another world": [], "load by another world": []}
        self.asynchronous = []

    def add(self, rows, when, what, row):
        rows.append(row)
        extra = " (of which a run stands still for %.3f s)" % row["stall_seconds"] if (
            "stall_seconds" in row) else ""  # fmt: skip
        print("%-14s %-28s %8.3f s%s" % (when, what, row["seconds"], extra), flush=True)


def sides_of(options):
    """{name: side}, in the order of the table."""
    sides = {"ours, sharded": Ours(options, "sharded"), "ours, pt": Ours(options, "pt"),
             "ours, safetensors": Ours(options, "safetensors")}  # fmt: skip
    if options.python:
        sides["Python, torch.save"] = Python(options, "torch")
        sides["Python, DCP"] = Python(options, "dcp")
    sides["dd and fsync"] = Dd(options, sides["ours, pt"].dir)
    return sides


def measure(options, sides, results):
    other = Ours(options, "sharded", OTHER_RANKS)
    later = Ours(options, "sharded", name="_async")
    ours = sides["ours, sharded"]

    def check(name, save, *loads):
        begin = time.perf_counter()
        save()
        for load in loads:
            load(check=True)
        print("%-14s %-28s %8.3f s, with the program's start" % (
            "compared", name, time.perf_counter() - begin), flush=True)  # fmt: skip

    for name, side in sides.items():
        check(name, lambda: saved(side), side.load)
    check("of another world", lambda: saved(other), other.load,
          lambda check: ours.load(check=check, ranks=OTHER_RANKS))  # fmt: skip
    check("asynchronous", lambda: saved(later, later.save_async), later.load)

    for number in range(options.rounds):
        when = "round %d of %d" % (number + 1, options.rounds)
        order = list(sides.items())
        order = order[number % len(order) :] + order[: number % len(order)]
        for name, side in order:
            results.add(results.rows[name]["save"], when, "save, " + name, saved(side))
        results.add(results.asynchronous, when, "save, asynchronous",
                    saved(later, later.save_async))  # fmt: skip
        for name, side in order:
            results.add(results.rows[name]["load"], when, "load, " + name, loaded(side))
        for name, load in (("load of another world", lambda: loaded(other)),
                           ("load by another world",
                            lambda: loaded(ours, ranks=OTHER_RANKS))):  # fmt: skip
            results.add(results.more[name], when, name, load())


def median(rows, key="seconds"):
    return statistics.median(row[key] for row in rows)


def ratios_of(results):
    """(name, ratio, goal or None), of what has been measured.

    The median of the rounds' ratios: a disk whose speed changes from round to round
    changes both sides of one round alike.
    """
    found = []

    def ratio(name, of, to, goal=None, key="seconds", to_key="seconds"):
        if of and to:
            of_round = [a[key] / b[to_key] for a, b in zip(of, to)]
            found.append((name, statistics.median(of_round), goal))

    nothing = {"save": [], "load": []}
    save = lambda name: results.rows.get(name, nothing)["save"]
    load = lambda name: results.rows.get(name, nothing)["load"]
    ours, more = "ours, sharded", results.more
    ratio("save, sharded / dd and fsync", save(ours), save("dd and fsync"), 1.15)
    ratio("save, sharded / torch.save", save(ours), save("Python, torch.save"), 0.7)
    ratio("save, sharded / DCP", save(ours), save("Python, DCP"))
    ratio("save, pt / torch.save", save("ours, pt"), save("Python, torch.save"))
    ratio("load, sharded / DCP", load(ours), load("Python, DCP"), 0.6)
    ratio("load, pt / torch.load", load("ours, pt"), load("Python, torch.save"))
    ratio("load, sharded / dd", load(ours), load("dd and fsync"))
    for ranks, rows in ((RANKS, load(ours)), (OTHER_RANKS, more["load by another world"])):
        ratio("bytes read / size, %d ranks" % ranks, rows, save(ours), 1.05, "read_bytes",
              "disk_bytes")  # fmt: skip
    ratio("asynchronous, stall / save", results.asynchronous, save(ours), 0.05, "stall_seconds")
    ratio("step during the write / without", results.asynchronous, results.asynchronous, 1.1,
          "step_ms_during", "step_ms")  # fmt: skip
    ratio("load of what %d ranks saved / %d" % (OTHER_RANKS, RANKS),
          more["load of another world"], load(ours), 1.3)  # fmt: skip
    return found


def memory_of(results):
    """(name, MiB of the fullest rank, goal), of what has been measured."""
    found = []

    def memory(name, rows, key="peak_bytes", more_key=None):
        if rows:
            more = rows[0][more_key] / MIB if more_key else 0
            found.append((name, median(rows, key) / MIB, MEMORY_GOAL + more))

    save = lambda name: results.rows.get(name, {"save": []})["save"]
    memory("memory, save, sharded", save("ours, sharded"))
    memory("memory, save, pt: the largest tensor more", save("ours, pt"), "peak_bytes",
           "largest_tensor_bytes")  # fmt: skip
    memory("memory, asynchronous save, beside the copy", results.asynchronous,
           "beside_copy_bytes")  # fmt: skip
    return found


def print_goals(what, rows, digits):
    """Prints (name, value, goal or None); returns how many goals were missed."""
    print("\n%-50s %8s %8s" % ("", what, "goal"))
    missed = 0
    for name, value, goal in rows:
        shown = "%-50s %8.*f" % (name, digits, value)
        if goal is not None:
            shown += " %8.2f%s" % (goal, "  missed" if value > goal else "")
            missed += value > goal
        print(shown)
    return missed


def report(options, results):
    """Prints the tables; returns how many goals were missed."""
    print("\n%22s %10s %10s %14s %14s" % ("", "save, s", "load, s", "save, +MiB", "load, +MiB"))
    seconds = lambda some: "%.3f" % median(some) if some else ""
    memory = lambda some: (
        "%.0f" % (median(some, "peak_bytes") / MIB) if some and "peak_bytes" in some[0] else ""
    )
    for name, of_name in results.rows.items():
        save, load = of_name["save"], of_name["load"]
        print("%22s %10s %10s %14s %14s" % (
            name, seconds(save), seconds(load), memory(save), memory(load)))  # fmt: skip
    for name, some in results.more.items():
        print("%22s %10s %10s %14s %14s" % (name, "", seconds(some), "", memory(some)))
    if results.asynchronous:
        print("%22s %10s %10s  a run stands still for %.3f s" % (
            "ours, asynchronous", seconds(results.asynchronous), "",
            median(results.asynchronous, "stall_seconds")))  # fmt: skip

    missed = print_goals("ratio", ratios_of(results), 3)
    missed += print_goals("MiB", memory_of(results), 1)
    print(json.dumps({"benchmark": "checkpoint", "mib": options.mib, "rows": results.rows,
                      "more": results.more, "async": results.asynchronous}), flush=True)  # fmt: skip
    return missed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--ours", default=runfiles.find("libtorch_ddp/tools/bench/checkpoint_rank")
    )
    parser.add_argument(
        "--peer", default=runfiles.find("libtorch_ddp/tools/bench/checkpoint_peer.py")
    )
    parser.add_argument("--python", default=runfiles.find("python_torch/python"),
                        help="interpreter with torch; empty: without Python's sides")  # fmt: skip
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="of model and optimizer, together")
    parser.add_argument("--scratch", default=None, help="folder on the disk to measure")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with tempfile.TemporaryDirectory(dir=options.scratch) as options.scratch:
        sides = sides_of(options)
        results = Results(sides)
        try:
            measure(options, sides, results)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            report(options, results)
            sys.exit(128 + signal.SIGINT)
    missed = report(options, results)
    sys.exit(1 if options.check and missed else 0)


if __name__ == "__main__":
    main()
