"""Start the workers of a group on this machine, and end them together.

Each worker is a process that gets its rank and the address of the others from torchrun's
environment variables. Except on Windows, each worker has a process group of its own (one of the
operating system, not of `torch.distributed`). When a worker ends, its process group is killed, so
that the processes that the worker has started end too. When a worker fails, all others are ended.

For each worker, two threads copy its output line by line, and one thread waits for its end. These
threads report the end of each worker to the main thread through a queue. Signals go through the
same queue. The main thread makes all decisions.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, Any

from gradwire._core.token import TOKEN_VARIABLE, token_from_environment

#: A worker that was asked to end and still runs after this many seconds is killed.
GRACE_SECONDS = 10.0
#: The time in seconds to wait for the last output of a worker that has ended.
_LAST_OUTPUT_SECONDS = 2.0
#: The main thread waits at most this long at a time. The time is short on Windows, because Ctrl-C
#: does not interrupt a waiting thread there.
_LONGEST_WAIT = 0.5 if sys.platform == "win32" else threading.TIMEOUT_MAX
#: These signals end the whole group. SIGHUP is left out on Windows, which does not have it.
_ENDING_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
_PR_SET_PDEATHSIG = 1

_HINTS = {
    "SIGKILL": "killed from outside; often the machine has run out of memory",
    "SIGSEGV": "a crash in native code; PYTHONFAULTHANDLER=1 shows where",
    "SIGABRT": "native code aborted; its message is above",
    "SIGTERM": "asked to end from outside",
}


def run(command: Sequence[str], workers: int, grace: float = GRACE_SECONDS) -> int:
    """Start `workers` processes of a Python program, wait for them and return the exit code.

    `command` holds the arguments of ``python``. Every line of output is prefixed with
    ``[worker RANK]``. The exit code is 0 if all workers succeeded, else that of the first worker
    that failed: 128 + N if signal N ended it. Call this on the main thread, because it handles
    Ctrl-C.

        >>> run(["train.py", "--epochs", "3"], workers=2)     # doctest: +SKIP
        [worker 0] epoch 0 ...
    """
    events: SimpleQueue[_Worker | int] = SimpleQueue()
    group: list[_Worker] = []
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(_signals_into(events))
        port = cleanup.enter_context(free_port())
        cleanup.callback(_end, group, _KILL)
        token = token_from_environment() or secrets.token_hex(32)
        for rank in range(workers):
            group.append(_Worker(rank, command, environment(rank, workers, port, token)))
        # The threads start after the last fork, because a fork in a process with threads is not
        # safe.
        for worker in group:
            worker.watch(events)
        return _supervise(group, events, grace)


def environment(rank: int, size: int, port: int, token: str) -> dict[str, str]:
    """Return the environment variables of a worker on this machine. They are torchrun's variables,
    the group's token, and OMP_NUM_THREADS. If OMP_NUM_THREADS is not set already, it is the
    worker's share of the cores.

        >>> environment(1, 2, 29500, "secret")["RANK"]
        '1'
    """
    share = max(1, _count_cores() // size)
    return {
        # Each worker gets a share of the cores. With more threads than cores in total, the workers
        # would slow each other down.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share)),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        TOKEN_VARIABLE: token,
        # Torchrun sets TORCHELASTIC_USE_AGENT_STORE to "True" for its workers, because torchrun
        # itself hosts their store. The workers of this program need "False", because their rank 0
        # hosts the store. They need it even if torchrun has started this program.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """Reserve a port for the rendezvous of a group.

    Within the block, a socket that does not listen is bound to the port. So the system gives the
    port to no other process, but the worker of rank 0 can listen on the port.

        >>> with free_port() as port:
        ...     1024 < port < 65536
        True
    """
    with socket.socket() as holder:
        if sys.platform != "win32":
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform == "win32":
            # On Windows, rank 0 could not listen on the port while this socket is bound to it. So
            # the socket is closed early, although another process could then get the port.
            holder.close()
        yield port


def die_with_parent() -> None:
    """Make the system kill this process when its parent dies. This works on Linux only. On other
    systems, the children of a killed process keep running."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# The C library is loaded now, because loading a library between fork and exec is not safe.
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


class _Worker:
    """One worker process."""

    def __init__(self, rank: int, command: Sequence[str], variables: dict[str, str]):
        self.rank = rank
        self._lock = threading.Lock()
        self._reaped = False
        options: dict[str, Any] = {}
        if sys.platform != "win32":
            options = {"start_new_session": True, "preexec_fn": die_with_parent}
        self.process = subprocess.Popen(
            [sys.executable, "-u", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables},
            **options,
        )

    def watch(self, events: SimpleQueue[_Worker | int]) -> None:
        """Start the threads that copy the worker's output, and the thread that waits until the
        worker has ended. That thread then puts the worker (`self`) into the queue `events`."""
        assert self.process.stdout
        assert self.process.stderr
        prefix = f"[worker {self.rank}] ".encode()
        pumps = [
            threading.Thread(target=_copy_lines, args=(prefix, source, sink), daemon=True)
            for source, sink in (
                (self.process.stdout, sys.stdout.buffer),
                (self.process.stderr, sys.stderr.buffer),
            )
        ]
        for pump in pumps:
            pump.start()
        threading.Thread(target=self._await_end, args=(pumps, events), daemon=True).start()

    def _await_end(self, pumps: list[threading.Thread], events: SimpleQueue[_Worker | int]) -> None:
        try:
            if hasattr(os, "waitid"):
                # With WNOWAIT, the system keeps the pid of the ended process reserved. The pid is
                # also the id of the process group that is killed below. So no other group can have
                # this id by then.
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            else:  # `waitid` is missing on Windows, and on macOS before Python 3.13.
                self.process.wait()
            self.send(_KILL)  # Kill the processes that the worker has started.
            with self._lock:
                self.process.wait()
                self._reaped = True
            for pump in pumps:
                pump.join(_LAST_OUTPUT_SECONDS)
        finally:
            # The main thread waits until this worker is in the queue. So the worker must be put
            # there even after an exception.
            events.put(self)

    def send(self, signum: int) -> None:
        """Send a signal to the worker and the processes that it has started."""
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if self._reaped:
                return
            if sys.platform != "win32":
                os.killpg(self.process.pid, signum)
            else:
                self.process.terminate()

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it, which is 128 + N if signal N ended the worker."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def failure(self) -> str:
        """Return a sentence that says how the worker failed."""
        name, code = f"worker {self.rank} (pid {self.process.pid})", self.process.returncode
        if code >= 0:
            return f"{name} failed with exit code {code}: see its lines above, [worker {self.rank}]"
        try:
            ended_by = signal.Signals(-code).name
        except ValueError:
            ended_by = f"signal {-code}"
        hint = _HINTS.get(ended_by)
        return f"{name} was ended by {ended_by}" + (f": {hint}" if hint else "")


_output = threading.Lock()


def _copy_lines(prefix: bytes, source: IO[bytes], sink: IO[bytes]) -> None:
    with source:
        for line in source:
            try:
                with _output:
                    sink.write(prefix + line.rstrip(b"\r\n") + b"\n")
                    sink.flush()
            except BrokenPipeError:
                # The process that reads our output has ended. When this function returns, `source`
                # is closed, so the worker also gets a BrokenPipeError when it writes next. Our own
                # output goes to the null device from now on. Otherwise, Python would flush the
                # buffer at exit and fail again.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sink.fileno())
                return


def _supervise(group: list[_Worker], events: SimpleQueue[_Worker | int], grace: float) -> int:
    """Wait until all workers have ended. End the others when one fails or a signal arrives."""
    running, exit_code, deadline = set(group), 0, None
    while running:
        try:
            event = events.get(timeout=_time_left(deadline))
        except Empty:
            if deadline is not None and time.monotonic() >= deadline:
                _say(f"{_names(running)} did not end within {grace:g} s: killing")
                _end(running, _KILL)
                deadline = None
            continue
        if isinstance(event, _Worker):
            running.discard(event)
            reason, code, signum = event.failure(), event.exit_code, int(signal.SIGTERM)
        else:
            reason, code, signum = signal.Signals(event).name, 128 + event, event
            if exit_code:
                _end(running, _KILL)  # A second signal means that the user does not want to wait.
        if code and not exit_code:
            exit_code = code
            _say(reason + (f"; ending {_names(running)}" if running else ""))
            _end(running, signum)
            deadline = time.monotonic() + grace
    return exit_code


def _time_left(deadline: float | None) -> float:
    if deadline is None:
        return _LONGEST_WAIT
    return max(0.0, min(deadline - time.monotonic(), _LONGEST_WAIT))


def _end(workers: Sequence[_Worker] | set[_Worker], signum: int) -> None:
    for worker in workers:
        worker.send(signum)


def _names(workers: set[_Worker]) -> str:
    ranks = sorted(worker.rank for worker in workers)
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _say(text: str) -> None:
    with _output:
        print(f"gradwire: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals_into(events: SimpleQueue[_Worker | int]) -> Iterator[None]:
    """Within the block, put the signals that would end this process into a queue instead."""

    def handle(signum: int, _frame: FrameType | None) -> None:
        events.put(signum)  # SimpleQueue.put is reentrant, so a signal handler may call it.

    # A signal that is ignored stays ignored, because nohup relies on that.
    handled = [s for s in _ENDING_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    before = [(signum, signal.signal(signum, handle)) for signum in handled]
    try:
        yield
    finally:
        for signum, handler in before:
            signal.signal(signum, handler)
