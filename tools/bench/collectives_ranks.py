"""Sets of long-lived rank processes that execute tasks, one set at a time.

    start = start_local([rank_program, "--backend=gloo"], world_size=2)
    with RankSet("gloo", 2, start, reply_seconds=60) as ranks:
        seconds = ranks.ask("do=time op=allreduce dtype=float32 bytes=4096 iterations=100 …")

Every rank connects to the socket of its set and sleeps in read() until it gets
a task, so idle sets use no CPU time. The socket is abstract and leaves no file.
A rank ends when its connection does, also if this process is killed.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
import time

START_SECONDS = 120
END_SECONDS = 20
LAST_WORDS_SECONDS = 0.5


class RankError(Exception):
    """A set could not be started, has died, or answered with an error."""


class RankSet:
    """The ranks of one program. Thread-compatible."""

    def __init__(self, name, world_size, start, reply_seconds):
        """`start(control, log)` starts the processes that connect to the socket `control`."""
        self.name = name
        self.world_size = world_size
        self.abilities = {}
        self._streams = [None] * world_size
        self._log = tempfile.TemporaryFile(mode="w+", errors="replace")
        self._processes = []
        control = "collectives-" + secrets.token_hex(8)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + control)
            listener.listen(world_size)
            self._processes = start(control, self._log)
            try:
                self._accept(listener, reply_seconds)
            except BaseException:
                self.close()
                raise

    def _accept(self, listener, reply_seconds):
        deadline = time.monotonic() + START_SECONDS
        listener.settimeout(0.2)
        while None in self._streams:
            try:
                connection, _ = listener.accept()
            except socket.timeout:
                ended = [p.returncode for p in self._processes if p.poll() is not None]
                if ended or time.monotonic() > deadline:
                    missing = [str(r) for r, s in enumerate(self._streams) if s is None]
                    why = "exit status %d" % ended[0] if ended else "%d s passed" % START_SECONDS
                    raise self._error("rank %s did not start: %s" % (", ".join(missing), why))
                continue
            connection.settimeout(reply_seconds)
            stream = connection.makefile("rw")
            connection.close()
            words = dict(word.split("=", 1) for word in stream.readline().split())
            rank = int(words.pop("rank"))
            if int(words.pop("world_size")) != self.world_size or self._streams[rank]:
                raise self._error("a rank %d that is none of %d" % (rank, self.world_size))
            self._streams[rank] = stream
            self.abilities = {key: value.split(",") for key, value in words.items()}

    def ask(self, line):
        """Every rank does `line`; returns the longest time that one of them measured, seconds."""
        try:
            for stream in self._streams:
                stream.write(line + "\n")
                stream.flush()
            replies = [stream.readline() for stream in self._streams]
        except socket.timeout:
            raise self._error("no reply to '%s'" % line) from None
        except OSError as error:
            raise self._error("%s, at '%s'" % (error, line)) from None
        wrong = [reply.strip() or "a rank has died" for reply in replies if reply[:3] != "ok "]
        if wrong:
            raise self._error("%s\nat '%s'" % ("\n".join(wrong), line))
        return max(float(reply[3:]) for reply in replies)

    def _error(self, what):
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_SECONDS)
        self._log.seek(0)
        tail = "".join(self._log.readlines()[-15:])
        return RankError("%s, %d ranks: %s\n%s" % (self.name, self.world_size, what, tail))

    def close(self):
        for stream in self._streams:
            if stream is not None:
                with contextlib.suppress(OSError):  # the rank may have gone first
                    stream.close()
        for end in (lambda process: None, subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in self._processes:
                if process.poll() is None:
                    end(process)
            deadline = time.monotonic() + END_SECONDS
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
        self._log.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# What launchers tell ranks. Left over from a job that this benchmark is run in, they would lie.
_LAUNCHERS = ("MPI_LOCAL", "OMPI_COMM_WORLD_", "PMI", "SLURM_", "TORCHELASTIC_")


def _environment(world_size):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    # As the local launcher does: ranks share the cores.
    clean["OMP_NUM_THREADS"] = str(max(1, cores() // world_size))
    return clean


def cores():
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def start_local(command, world_size, pin=False):
    """A `start` for RankSet: ranks as the local launcher starts them, with torchrun's variables."""

    def start(control, log):
        processors = sorted(os.sched_getaffinity(0))
        processes = []
        # Bound here and passed to rank 0, so that no other process can take the port.
        with socket.create_server(("127.0.0.1", 0)) as master:
            for rank in range(world_size):
                environment = dict(
                    _environment(world_size), RANK=str(rank), WORLD_SIZE=str(world_size),
                    LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size), GROUP_RANK="0",
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(master.getsockname()[1]),
                )  # fmt: skip
                descriptors = ()
                if rank == 0:
                    descriptors = (master.fileno(),)
                    environment["DDP_MASTER_LISTEN_FD"] = str(master.fileno())
                process = subprocess.Popen(
                    command + ["--control=" + control], env=environment, pass_fds=descriptors,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
                processes.append(process)
                if pin:
                    os.sched_setaffinity(process.pid, {processors[rank % len(processors)]})
        return processes

    return start


def under_mpirun(command, world_size, mpirun, bind_to):
    """`command` as ranks of Open MPI's mpirun."""
    line = [mpirun, "-n", str(world_size), "--bind-to", bind_to]
    if world_size > cores():
        line.append("--oversubscribe")
    if os.geteuid() == 0:
        line.append("--allow-run-as-root")
    return line + command


def start_mpirun(command, world_size, mpirun, bind_to):
    """A `start` for RankSet: ranks under Open MPI's mpirun."""

    def start(control, log):
        return [
            subprocess.Popen(
                under_mpirun(command + ["--control=" + control], world_size, mpirun, bind_to),
                env=_environment(world_size), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )
        ]  # fmt: skip

    return start


def start_mpiexec(command, world_size, mpiexec, pin):
    """A `start` for RankSet: ranks under Intel MPI's mpiexec.hydra, on this host's memory."""
    root = os.path.dirname(os.path.dirname(os.path.realpath(mpiexec)))

    def start(control, log):
        environment = dict(
            _environment(world_size), I_MPI_ROOT=root, I_MPI_FABRICS="shm", I_MPI_PIN=str(pin)
        )
        return [
            subprocess.Popen(
                [mpiexec, "-n", str(world_size)] + command + ["--control=" + control],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )
        ]  # fmt: skip

    return start
