#!/usr/bin/env python3
"""Measures our backends' collectives and those of other libraries, in turns, on this machine.

    ./bazelw run //tools/bench:collectives -- --backends=shm,gloo,mpi --op=allreduce \\
        --world_sizes=2,4 --sizes=4,1K,16K,1M,64M [--through=process_group,backend,raw] \\
        [--arena=0,1] [--dtype=float32,bfloat16] [--json=FILE] [--plot=FILE.svg] [--check]

For each number of ranks every backend and every peer (other library) starts its
ranks once; they sleep until it is their turn. First each result is verified
against a reference, element by element, on several data. Then come the rounds:
in each, every contender makes a burst of at least three calls that lasts some
milliseconds, in alternating order, so that other load affects all alike. A
burst's time per call is that of the slowest rank, measured from a barrier. The
output has the median and the minimum over rounds.

`bytes` is the larger of a rank's two buffers, GB/s is bytes / median time (the
algorithm's bandwidth, in 10^9 bytes), and a ratio is one median over another:
below 1 is faster. Of several --dtype, sizes are in the first, and the others
have as many elements.

Peers are C++ programs that use another library directly: openmpi makes blocking
MPI calls under mpirun, in place or not, and bound to cores or not, whichever is
faster (pilot runs decide, and the output says which; likewise for our own
all-gather, in place or not); intelmpi and oneccl are in
//tools/bench:collectives_with_oneccl, which fetches them. Our ranks are
processes of this machine, started as by --launcher=local of //tools:train,
those of mpi by mpirun. They are not bound to cores; --pin binds all but mpi's.
On one host hier is shm.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys

import collectives_bars
import collectives_plot
import runfiles
from collectives_ranks import (
    RankError,
    RankSet,
    cores,
    start_local,
    start_mpiexec,
    start_mpirun,
    under_mpirun,
)

OPS = ("allreduce", "reduce_scatter", "allgather", "broadcast")
# Each rank has a share of the larger buffer; input and output are two buffers.
SHARING_OPS = ("reduce_scatter", "allgather")
ELEMENT_SIZE = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8,
}  # fmt: skip
THROUGH = ("process_group", "backend", "raw")
PEERS = ("openmpi", "intelmpi", "oneccl")
SIZES = "4,1K,4K,16K,64K,256K,1M,4M,16M,64M,256M"
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
FEWEST_CALLS = 3
MOST_CALLS = 200000
PILOT_BYTES = (4, 16 << 10, 1 << 20)
PILOT_ROUNDS = 5
SEED = 7
# Data of a size that all contenders hold at once may take so much of what is available.
MEMORY_SHARE = 0.7
# Programs by their options, where Bazel puts those that it has built.
PROGRAMS = {
    "rank_program": "libtorch_ddp/tools/bench/collectives_rank",
    "mpi_peer": "libtorch_ddp/tools/bench/mpi_peer",
    "intelmpi_peer": "libtorch_ddp/tools/bench/intelmpi_peer",
    "oneccl_peer": "libtorch_ddp/tools/bench/oneccl_peer",
    "mpiexec": "oneccl/bin/mpiexec.hydra",
}


class Contender:
    """One way to make a collective: a set of ranks, and what to tell it."""

    def __init__(self, ranks, backend, through, dtype, arena=0, variant=""):
        self.ranks = ranks
        self.backend = backend
        self.through = through
        self.dtype = dtype
        self.arena = arena
        self.variant = variant
        self.calls = FEWEST_CALLS

    def name(self):
        words = [self.backend, "" if self.backend in PEERS else self.through]
        words += ["arena" if self.arena else "", self.variant]
        return " ".join(word for word in words if word)

    def variants(self, op):
        """Of one of ours: all-gather may find its input where the output wants it."""
        if op != "allgather":
            return [self]
        in_place = Contender(
            self.ranks, self.backend, self.through, self.dtype, self.arena, "in_place"
        )
        return [self, in_place]

    def _task(self, do, op, size, calls):
        return "do=%s op=%s dtype=%s bytes=%d iterations=%d through=%s variant=%s arena=%d" % (
            do, op, self.dtype, size, calls, self.through, self.variant, self.arena)  # fmt: skip

    def verify(self, op, size, wrong):
        calls = 4 if size <= 1 << 20 else 2
        task = self._task("verify", op, size, calls)
        self.ranks.ask("%s seed=%d expected_seed=%d" % (task, SEED, SEED + wrong))

    def time(self, op, size):
        """Seconds per call of one burst."""
        return self.ranks.ask(self._task("time", op, size, self.calls)) / self.calls

    def calibrate(self, op, size, burst):
        """Finds how many calls last `burst` seconds."""
        self.calls = FEWEST_CALLS
        for _ in range(4):
            before = self.calls
            wanted = math.ceil(burst / max(self.time(op, size), 1e-9))
            self.calls = min(MOST_CALLS, max(FEWEST_CALLS, wanted))
            if before / 2 <= self.calls <= 1.5 * before:
                return


def in_turns(contenders, op, size, rounds, burst):
    """For each contender, the seconds per call of its burst in each round."""
    for contender in contenders:
        contender.calibrate(op, size, burst)
    times = [[] for _ in contenders]
    for turn in range(rounds):
        order = range(len(contenders))
        for index in order if turn % 2 == 0 else reversed(order):
            times[index].append(contenders[index].time(op, size))
    return times


def fastest(contenders, op, size, burst):
    """That one of the contenders that a pilot run found the fastest."""
    if len(contenders) == 1:
        return contenders[0]
    times = in_turns(contenders, op, size, PILOT_ROUNDS, burst)
    return min(zip(contenders, times), key=lambda pair: statistics.median(pair[1]))[0]


class Bench:
    def __init__(self, options, out):
        self.options = options
        self.out = out
        self.results = []

    def say(self, line):
        print(line, file=self.out, flush=True)

    # What there is to be measured.

    def our_ranks(self, backend, world_size):
        options = self.options
        command = [options.rank_program, "--backend=" + backend]
        command.append("--timeout_s=%g" % options.timeout_s)
        if backend == "mpi":
            # Its progress thread and its caller want a core each.
            start = start_mpirun(command, world_size, options.mpirun, "none")
        else:
            start = start_local(command, world_size, options.pin)
        return RankSet(backend, world_size, start, 2 * options.timeout_s)

    def our_contenders(self, ranks):
        asked = {"through": self.options.through, "arena": self.options.arena}
        for what, values in asked.items():
            there = [value for value in values if value in ranks.abilities[what]]
            for value in set(values) - set(there):
                self.say("# %s: no %s=%s" % (ranks.name, what, value))
            if not there:
                sys.exit("error: %s has no %s=%s, only %s" % (
                    ranks.name, what, ",".join(values), ",".join(ranks.abilities[what])))  # fmt: skip
            asked[what] = there
        combinations = itertools.product(asked["through"], asked["arena"], self.options.dtype)
        return [
            Contender(ranks, ranks.name, through, dtype, int(arena))
            for through, arena, dtype in combinations
            if (through, arena) != ("raw", "1")  # the arena is the backend's
        ]

    def peer_variants(self, name, ranks):
        """For each type that the peer has, its variants."""
        return [
            [
                Contender(ranks, name, "raw", dtype, variant=variant)
                for variant in ranks.abilities["variant"]
            ]
            for dtype in self.options.dtype
            if dtype in ranks.abilities["dtype"]
        ]

    def peer_starts(self, name, world_size):
        """By what the user reads about it, the ways to start a peer: bound to cores or not."""
        options = self.options
        if name == "openmpi":
            bindings = ("none", "core" if world_size <= cores() else "core:overload-allowed")
            return {
                "mpirun --bind-to " + binding: start_mpirun(
                    [options.mpi_peer], world_size, options.mpirun, binding)
                for binding in bindings
            }  # fmt: skip
        command = [getattr(options, name + "_peer")]
        return {
            "I_MPI_PIN=%d" % pin: start_mpiexec(command, world_size, options.mpiexec, pin)
            for pin in (0, 1)
        }

    def peer_ranks(self, name, world_size, stack):
        """A peer's ranks, started in the way that a pilot run found the faster."""
        sets = {}
        for how, start in self.peer_starts(name, world_size).items():
            sets[how] = RankSet(name, world_size, start, 2 * self.options.timeout_s)
            stack.callback(sets[how].close)
        contenders = [Contender(r, name, "raw", "float32", variant="in_place") for r in sets.values()]
        scores = dict.fromkeys(sets, 0.0)
        for size in PILOT_BYTES:
            times = in_turns(contenders, "allreduce", size, PILOT_ROUNDS, self.options.burst_ms / 1e3)
            for how, rounds in zip(sets, times):
                scores[how] += math.log(statistics.median(rounds)) / len(PILOT_BYTES)
        best, *others = sorted(sets, key=scores.get)
        self.say("# %s, %d ranks: %s (%s)" % (
            name, world_size, best,
            ", ".join("%s: %.2f times the time" % (how, math.exp(scores[how] - scores[best]))
                      for how in others)))  # fmt: skip
        for how in others:
            sets[how].close()
        return sets[best]

    # Measuring.

    def fits(self, op, size, contenders, world_size):
        """Whether everybody's data of this size find room at the same time."""
        ways = {(c.ranks, c.arena) for c in contenders}
        buffers = sum(1 + (ranks.name in PEERS or op in SHARING_OPS) for ranks, _ in ways)
        need = buffers * size * world_size
        with open("/proc/meminfo") as f:
            available = 1024 * int(next(x for x in f if x.startswith("MemAvailable")).split()[1])
        if need <= MEMORY_SHARE * available:
            return True
        self.say("# %s of %s, %d ranks: left out, its data need %.1f GiB and %.1f are available" % (
            op, pretty(size), world_size, need / 2**30, available / 2**30))  # fmt: skip
        return False

    def measure(self, op, size, contenders, world_size):
        options = self.options
        burst = options.burst_ms / 1e3
        rows = []
        for contender, times in zip(
            contenders, in_turns(contenders, op, size, options.rounds, burst)
        ):
            median = statistics.median(times)
            rows.append({
                "backend": contender.backend, "op": op, "world_size": world_size, "bytes": size,
                "us_median": round(1e6 * median, 4), "us_min": round(1e6 * min(times), 4),
                "gb_per_s": float("%.4g" % (size / median / 1e9)), "dtype": contender.dtype,
                "through": contender.through, "arena": bool(contender.arena),
                "variant": contender.variant,
                "elements": size // ELEMENT_SIZE[contender.dtype], "rounds": options.rounds, "calls": contender.calls,
                "name": contender.name(),
            })  # fmt: skip
        for row in rows:
            row["ratio"] = {
                peer["name"].split()[0]: float("%.3g" % (row["us_median"] / peer["us_median"]))
                for peer in rows
                if is_reference(peer) and peer is not row and row["backend"] not in PEERS
            }
        return rows

    def run_world(self, world_size):
        options = self.options
        with contextlib.ExitStack() as stack:
            ours = []
            for backend in options.backends:
                ranks = self.our_ranks(backend, world_size)
                stack.callback(ranks.close)
                ours += self.our_contenders(ranks)
            peers = []
            for name in options.peers:
                peers += self.peer_variants(name, self.peer_ranks(name, world_size, stack))
            for op in options.op:
                print_head(self, op, world_size)
                for dtype, size in itertools.product(options.dtype, options.sizes):
                    size = size * ELEMENT_SIZE[dtype] // ELEMENT_SIZE[options.dtype[0]]
                    size = whole(size, op, dtype, world_size)
                    mine = [c.variants(op) for c in ours if c.dtype == dtype]
                    others = [v for v in peers if v[0].dtype == dtype]
                    if not self.fits(op, size, [v[0] for v in mine + others], world_size):
                        continue
                    # Broadcast has one buffer, so only one variant.
                    others = [v[:1] if op == "broadcast" else v for v in others]
                    for contender in itertools.chain(*mine, *others):
                        contender.verify(op, size, options.wrong_reference)
                    chosen = [fastest(v, op, size, options.burst_ms / 1e3) for v in mine + others]
                    rows = self.measure(op, size, chosen, world_size)
                    print_rows(self, rows)
                    self.results += rows
                    for ranks in {c.ranks for c in chosen}:
                        ranks.ask("do=free")


def is_reference(row):
    """What ratios are taken to: the peers, and gloo as everybody calls it."""
    plain_gloo = row["through"] == "process_group" and not row["arena"]
    return row["backend"] in PEERS or (row["backend"] == "gloo" and plain_gloo)


def whole(size, op, dtype, world_size):
    """`size`, made up to a whole number of elements for each rank."""
    unit = ELEMENT_SIZE[dtype] * (world_size if op in SHARING_OPS else 1)
    return (max(size, 1) + unit - 1) // unit * unit


def pretty(size):
    for unit, factor in reversed(UNITS.items()):
        if size % factor == 0:
            return "%d%s" % (size // factor, unit)
    return str(size)


def print_head(bench, op, world_size):
    bench.say("\n%s, %d ranks on %d cores; us per call" % (op, world_size, cores()))
    bench.say("%6s %-9s %-28s %11s %11s %8s  %s" % (
        "bytes", "dtype", "", "median", "min", "GB/s", "ratio of medians to"))  # fmt: skip


def print_rows(bench, rows):
    for row in rows:
        ratios = ", ".join("%s %.3g" % item for item in row["ratio"].items())
        bench.say("%6s %-9s %-28s %11.2f %11.2f %8.3f  %s" % (
            pretty(row["bytes"]), row["dtype"], row["name"], row["us_median"], row["us_min"],
            row["gb_per_s"], ratios))  # fmt: skip


def parse_size(text):
    unit = UNITS.get(text[-1:].upper(), 0)
    number = text[:-1] if unit else text
    if not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError("'%s' is no size such as 4, 16K, 1M, 1G" % text)
    return int(number) * (unit or 1)


def list_of(kind, allowed=None):
    def parse(text):
        values = [kind(word) for word in text.split(",") if word]
        for value in values:
            if allowed and value not in allowed:
                raise argparse.ArgumentTypeError(
                    "'%s' is none of %s" % (value, ", ".join(map(str, allowed)))
                )
        if not values:
            raise argparse.ArgumentTypeError("'%s' names nothing" % text)
        return list(dict.fromkeys(values))

    return parse


def world_size(text):
    if not text.isdigit() or not 2 <= int(text) <= 128:
        raise argparse.ArgumentTypeError("'%s' is not a number of ranks from 2 to 128" % text)
    return int(text)


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backends", type=list_of(str), default=["gloo"], help="as --backend of //tools:train")
    add("--op", type=list_of(str, OPS), default=["allreduce"], help=", ".join(OPS))
    add("--world_sizes", type=list_of(world_size), default=[2])
    add("--sizes", type=list_of(parse_size), default=list_of(parse_size)(SIZES), help="bytes")
    add("--dtype", type=list_of(str, ELEMENT_SIZE), default=["float32"])
    add("--through", type=list_of(str, THROUGH), default=["process_group"],
        help="process_group, as DDP calls; backend, past c10's dispatcher; raw, below c10d")  # fmt: skip
    add("--arena", type=list_of(str, ("0", "1")), nargs="?", default=["0"], const=["1"],
        help="1: tensors in the backend's shared memory; 0,1: both")  # fmt: skip
    add("--peers", type=list_of(str, PEERS + ("none",)), help="default: those that are there")
    add("--rounds", type=int, default=9)
    add("--burst_ms", type=float, default=5, help="of one contender in one round, at least")
    add("--pin", action="store_true",
        help="bind rank r of ours, mpi's apart, to processor r, modulo their number")  # fmt: skip
    add("--timeout_s", type=float, default=120, help="longest that one collective may take")
    add("--json", default="", help="file of one line per result, or - (the table: standard error)")
    add("--plot", default="", help="SVG of latency and bandwidth")
    add("--check", action="store_true", help="exit status 1 if a bar is missed or none is measured")
    add("--replay", default="", help="take the results of such a JSON file; measure nothing")
    add("--rank_program", help="the program //tools/bench:collectives_rank; this and the next "
        "four: what Bazel has put beside this script")  # fmt: skip
    add("--mpi_peer", help="the program //tools/bench:mpi_peer")
    add("--intelmpi_peer", help="the program //tools/bench:intelmpi_peer")
    add("--oneccl_peer", help="the program //tools/bench:oneccl_peer")
    add("--mpiexec", help="Intel MPI's mpiexec.hydra")
    add("--mpirun", default="mpirun", help="Open MPI's")
    add("--wrong_reference", action="store_true", help="to see the verification fail")
    options = parser.parse_args()
    if options.rounds < 1 or options.burst_ms <= 0 or options.timeout_s <= 0:
        parser.error("--rounds, --burst_ms and --timeout_s must be positive")
    return options


def open_mpi_missing(options):
    """Why the peer openmpi cannot be had; empty if it can."""
    if not options.mpi_peer:
        return "no mpicc was found when this was built"
    if not shutil.which(options.mpirun):
        return "there is no %s" % options.mpirun
    shown = subprocess.run([options.mpirun, "--version"], capture_output=True, text=True).stdout
    return "" if "Open MPI" in shown else "%s is another MPI's" % options.mpirun


def check_what_there_is(options, say):
    for name, runfile in PROGRAMS.items():
        given = getattr(options, name)
        setattr(options, name, os.path.abspath(given) if given else runfiles.find(runfile))
    if not options.rank_program:
        sys.exit(
            "error: no %s beside this script: start it with `bazel run //tools/bench:collectives` "
            "or from bazel-bin, or give --rank_program" % PROGRAMS["rank_program"]
        )
    for backend in options.backends:
        command = [options.rank_program, "--validate", "--backend=" + backend]
        # Backend mpi is available to processes of mpirun.
        if backend == "mpi" and shutil.which(options.mpirun):
            command = under_mpirun(command, 1, options.mpirun, "none")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr.strip())
    missing = {"openmpi": open_mpi_missing(options)}
    for peer in ("intelmpi", "oneccl"):
        there = getattr(options, peer + "_peer")
        missing[peer] = "" if there else "only in //tools/bench:collectives_with_oneccl"
    for peer, why in missing.items():
        if why and options.peers and peer in options.peers:
            sys.exit("error: --peers=%s: %s" % (peer, why))
        if why and options.peers is None:
            say("# peer %s is left out: %s" % (peer, why))
    if options.peers is None:
        options.peers = [peer for peer in PEERS if not missing[peer]]
    if "none" in options.peers:
        options.peers = []


def main():
    options = parse_options()
    # `bazel run` starts programs in a folder of its own.
    here = os.environ.get("BUILD_WORKING_DIRECTORY", "")
    failure = None
    bench = Bench(options, sys.stderr if options.json == "-" else sys.stdout)
    if options.replay:
        with open(os.path.join(here, options.replay)) as f:
            bench.results = [json.loads(line) for line in f]
    else:
        check_what_there_is(options, bench.say)
        try:
            for ranks in options.world_sizes:
                bench.run_world(ranks)
        except RankError as error:
            failure = "error: %s" % error
    # What was measured before a failure is kept.
    if failure and not bench.results:
        sys.exit(failure)
    lines = "".join(json.dumps(result) + "\n" for result in bench.results)
    if options.json == "-":
        sys.stdout.write(lines)
    elif options.json:
        with open(os.path.join(here, options.json), "w") as f:
            f.write(lines)
    if options.plot and bench.results:
        with open(os.path.join(here, options.plot), "w", encoding="utf-8") as f:
            f.write(collectives_plot.svg(bench.results))
    if options.check and not collectives_bars.check(bench.results, bench.say):
        failure = failure or 1
    sys.exit(failure)


if __name__ == "__main__":
    main()
