"""Limits for the results of //tools/bench:collectives -- --check.

A bar bounds the ratio of two medians of one run, or one median in microseconds,
at each size from `low` to `high` bytes and each number of ranks it names.

    ./bazelw run //tools/bench:collectives -- --backends=shm,gloo --world_sizes=2,4 \\
        --op=allreduce,reduce_scatter,allgather,broadcast --dtype=float32,bfloat16 \\
        --through=process_group,backend,raw --arena=0,1 --check
"""

import collections

K, M, G = 1 << 10, 1 << 20, 1 << 30
ANY = (1, 64 * G)

Bar = collections.namedtuple("Bar", "what ours other limit low high world_sizes")


def way(backend="shm", op="allreduce", dtype="float32", through="process_group", arena=False):
    return {"backend": backend, "op": op, "dtype": dtype, "through": through, "arena": arena}


def open_mpi(op="allreduce"):
    return way("openmpi", op, through="raw")


# `other` is None where `limit` is in microseconds.
BARS = (
    Bar("shm / Open MPI", way(), open_mpi(), 0.9, 16 * K, 256 * M, (2,)),
    Bar("shm / gloo", way(), way("gloo"), 0.2, *ANY, (2,)),
    Bar("shm, us", way(), None, 10, K, K, (2,)),
    Bar("shm through Backend, us", way(through="backend"), None, 4, K, K, (2,)),
    Bar("shm below c10d / Open MPI", way(through="raw"), open_mpi(), 0.9, *ANY, (2,)),
    Bar("shm / Open MPI", way(), open_mpi(), 1.0, 16 * K, 256 * M, (4,)),
    Bar("shm, bfloat16 / float32", way(dtype="bfloat16"), way(), 1.0, *ANY, (2,)),
    Bar("shm, arena / private tensors", way(arena=True), way(), 0.6, 4 * M, 64 * M, (2,)),
) + tuple(
    Bar("shm / Open MPI", way(op=op), open_mpi(op), 1.0, 16 * K, 256 * M, (2,))
    for op in ("reduce_scatter", "allgather", "broadcast")
)


def _find(results, selector):
    for result in results:
        if all(result[key] == value for key, value in selector.items()):
            return result
    return None


def judge(results, bars=BARS):
    """(bar, result, value) of each result that a bar covers, and the bars that cover none."""
    judged, silent = [], []
    for bar in bars:
        found = []
        for result in results:
            if any(result[key] != value for key, value in bar.ours.items()):
                continue
            if result["world_size"] not in bar.world_sizes:
                continue
            if not bar.low <= result["bytes"] <= bar.high:
                continue
            value = result["us_median"]
            if bar.other is not None:
                # As many elements, also of another type.
                same = {key: result[key] for key in ("world_size", "elements")}
                other = _find(results, dict(bar.other, **same))
                if other is None:
                    continue
                value /= other["us_median"]
            found.append((bar, result, value))
        judged += found
        if not found:
            silent.append(bar)
    return judged, silent


def check(results, say, bars=BARS):
    """Prints the bars that were missed; returns whether some were measured and all of them met."""
    judged, silent = judge(results, bars)
    missed = [entry for entry in judged if entry[2] > entry[0].limit]
    say("\n%d of %d bars' sizes met; %d bars not measured" % (
        len(judged) - len(missed), len(judged), len(silent)))  # fmt: skip
    for bar in silent:
        say("not measured: %s, %s, %s ranks" % (
            bar.what, bar.ours["op"], ",".join(map(str, bar.world_sizes))))  # fmt: skip
    if missed:
        say("%-32s %-15s %5s %11s %9s %9s" % ("missed", "op", "ranks", "bytes", "value", "bar"))
    for bar, result, value in missed:
        say("%-32s %-15s %5d %11d %9.3g %9.3g" % (
            bar.what, result["op"], result["world_size"], result["bytes"], value, bar.limit))  # fmt: skip
    return bool(judged) and not missed
