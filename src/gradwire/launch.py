"""Starting the workers of a group on this machine, and ending them together.

A worker is a process that learns its place from torchrun's environment variables. It leads a
process group of its own, is over when that first process is, and what it had started ends with it.
The first worker that fails ends all others.

One thread per worker and stream passes lines on, one per worker waits for its end; the main thread
hears of ends and signals through a queue, and decides.
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

from gradwire.config import TOKEN_VARIABLE

#: Seconds between asking a worker to end and killing it.
GRACE_SECONDS = 10.0
#: Seconds for output that is still on its way when a worker has ended.
_LAST_OUTPUT_SECONDS = 2.0
#: A blocked wait does not notice Ctrl-C on Windows, so it must look up from time to time.
_LONGEST_WAIT = 0.5 if sys.platform == "win32" else threading.TIMEOUT_MAX
#: The signals that end everything; Windows has no SIGHUP.
_ENDING_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
_PR_SET_PDEATHSIG = 1

_HINTS = {
    "SIGKILL": "killed from outside; often that means the machine ran out of memory",
    "SIGSEGV": "a crash in native code; PYTHONFAULTHANDLER=1 shows where",
    "SIGABRT": "native code gave up; its last words are above",
    "SIGTERM": "asked to end from outside",
}


def run(command: Sequence[str], workers: int, grace: float = GRACE_SECONDS) -> int:
    """Start `workers` processes of a Python program, wait for them and return the exit code.

    `command` is what follows ``python``. Every line they write appears behind ``[worker RANK]``.
    The exit code is 0 when all succeeded, else that of the first that failed, 128 + N when signal N
    ended it. Call this on the main thread: it takes over Ctrl-C.

        >>> run(["train.py", "--epochs", "3"], workers=2)     # doctest: +SKIP
        [worker 0] epoch 0 ...
    """
    events: SimpleQueue[_Worker | int] = SimpleQueue()
    group: list[_Worker] = []
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(_signals_into(events))
        port = cleanup.enter_context(free_port())
        cleanup.callback(_end, group, _KILL)
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)
        for rank in range(workers):
            group.append(_Worker(rank, command, environment(rank, workers, port, token)))
        # No thread before the last fork.
        for worker in group:
            worker.follow(events)
        return _supervise(group, events, grace)


def environment(rank: int, size: int, port: int, token: str) -> dict[str, str]:
    """What tells a worker on this machine its place: torchrun's variables and the group's token;
    and its share of the cores, unless somebody has said how many threads torch is to use.

        >>> environment(1, 2, 29500, "secret")["RANK"]
        '1'
    """
    share = max(1, _count_cores() // size)
    return {
        # Threads of several workers that wait for each other on the same cores are slow.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share)),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        TOKEN_VARIABLE: token,
        # A torchrun around us would have said that it hosts the store; here rank 0 does.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _count_cores() -> int:
    """Those this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port for the group to meet at.

    It stays bound here but nobody listens, so that rank 0 can listen there and, for as long as the
    block lasts, the system gives it to nobody else.

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
            holder.close()  # elsewhere nobody could listen there otherwise
        yield port


def die_with_parent() -> None:
    """Have the system kill this process when the one that started it dies. Linux only; elsewhere
    only an orderly end of the parent ends its children."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# Loaded here: little is safe between fork and exec.
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


class _Worker:
    """One process, its output and its end."""

    def __init__(self, rank: int, command: Sequence[str], place: dict[str, str]):
        self.rank = rank
        self._lock = threading.Lock()
        self._over = False
        options: dict[str, Any] = {}
        if sys.platform != "win32":
            options = {"start_new_session": True, "preexec_fn": die_with_parent}
        self.process = subprocess.Popen(
            [sys.executable, "-u", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **place},
            **options,
        )

    def follow(self, events: SimpleQueue[_Worker | int]) -> None:
        """Pass its output on; when it is over, say so in `events`."""
        assert self.process.stdout
        assert self.process.stderr
        prefix = f"[worker {self.rank}] ".encode()
        pumps = [
            threading.Thread(target=_pass_lines_on, args=(prefix, source, sink), daemon=True)
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
                # Not reaped yet: until then nobody else can get its number, which names its group.
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            else:  # on Windows, and on macOS before Python 3.13
                self.process.wait()
            self.send(_KILL)  # to what it had started
            with self._lock:
                self.process.wait()
                self._over = True
            for pump in pumps:
                pump.join(_LAST_OUTPUT_SECONDS)
        finally:
            events.put(self)  # whatever happens: the main thread waits for this

    def send(self, signum: int) -> None:
        """Send a signal to the worker and all it has started."""
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if self._over:
                return
            if sys.platform != "win32":
                os.killpg(self.process.pid, signum)
            else:
                self.process.terminate()

    @property
    def exit_code(self) -> int:
        """As a shell would say it."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def obituary(self) -> str:
        """Who failed and why, in a sentence."""
        who, code = f"worker {self.rank} (pid {self.process.pid})", self.process.returncode
        if code >= 0:
            return f"{who} failed with exit code {code}: see its lines above, [worker {self.rank}]"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = _HINTS.get(name)
        return f"{who} was ended by {name}" + (f": {hint}" if hint else "")


_output = threading.Lock()


def _pass_lines_on(prefix: bytes, source: IO[bytes], sink: IO[bytes]) -> None:
    with source:
        for line in source:
            try:
                with _output:
                    sink.write(prefix + line.rstrip(b"\r\n") + b"\n")
                    sink.flush()
            except BrokenPipeError:
                # Whoever read our output is gone. Closing the pipe tells the worker the same, and
                # what is left in the buffer must not fail once more when this process exits.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sink.fileno())
                return


def _supervise(group: list[_Worker], events: SimpleQueue[_Worker | int], grace: float) -> int:
    """Wait until all are over, ending the rest when one fails or a signal comes."""
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
            reason, code, signum = event.obituary(), event.exit_code, int(signal.SIGTERM)
        else:
            reason, code, signum = signal.Signals(event).name, 128 + event, event
            if exit_code:
                _end(running, _KILL)  # asked twice
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
    """Within the block, signals that would end this process go into the queue."""

    def take(signum: int, _frame: FrameType | None) -> None:
        events.put(signum)  # safe here: SimpleQueue.put may interrupt itself

    # One that is ignored stays so: nohup means it.
    taken = [s for s in _ENDING_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    before = [(signum, signal.signal(signum, take)) for signum in taken]
    try:
        yield
    finally:
        for signum, handler in before:
            signal.signal(signum, handler)
