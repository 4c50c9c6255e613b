"""Start the workers of a group on this machine, and end them together.

Each worker is a process that gets its rank and the address of the others from torchrun's
environment variables. Except on Windows, each worker has a process group of its own (one of the
operating system, not of `torch.distributed`). When a worker ends, its process group is killed, so
that the processes that the worker has started end too.

The group ends in steps. When a worker fails, the other workers first have some seconds to fail by
themselves, because the errors that they print help to find the cause. After that, the workers that
still run get SIGTERM. The workers that still run after a further time, the grace time, are killed.
When this process gets a signal, it passes the signal on to the workers at once. Then too, the
workers that still run after the grace time are killed.

For each worker, two threads read its output, and one thread waits for its end. These threads report
the end of each worker to the main thread through a queue. Signals go through the same queue. The
main thread makes all decisions. The module `output` shows what the workers write.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, Any

from gradwire._core.token import TOKEN_VARIABLE, token_from_environment
from gradwire.launch.output import Output, WorkerStream
from gradwire.options import LOG_LEVEL_VARIABLE

#: A worker that was asked to end and still runs after this many seconds is killed.
GRACE_SECONDS = 10.0
#: After Ctrl-C, a worker that still runs is killed after this many seconds. This time is shorter,
#: because a user is waiting for the group to end.
INTERRUPT_GRACE_SECONDS = 2.5
#: When a worker has failed, the others have this many seconds to fail by themselves.
_OWN_END_SECONDS = 2.0
#: When a worker has ended, its output is read to the end of the pipe. But a process that the worker
#: has started may still hold the pipe open, if it has left the worker's process group. So reading
#: also stops when nothing has come for this many seconds, or more has come than fits into a pipe.
_LAST_OUTPUT_SECONDS = 2.0
_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
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


def run(
    command: Sequence[str],
    workers: int,
    grace: float | None = None,
    keep_going: bool = False,
    log_level: str | None = None,
) -> int:
    """Start `workers` processes of a Python program, wait for them and return the exit code.

    `command` holds the arguments of ``python``. Every line of output is prefixed with
    ``[worker RANK]``. A worker that was asked to end is killed after `grace` seconds. If `grace` is
    None, `INTERRUPT_GRACE_SECONDS` is used after Ctrl-C, and `GRACE_SECONDS` otherwise. With
    `keep_going`, the other workers go on when one fails. `log_level` is the level of gradwire's log
    in the workers.

    The exit code is 0 if all workers succeeded, else that of the first worker that failed: 128 + N
    if signal N ended it. Call this on the main thread, because it handles Ctrl-C.

        >>> run(["train.py", "--epochs", "3"], workers=2)     # doctest: +SKIP
        [worker 0] epoch 0 ...
    """
    events: SimpleQueue[_Worker | int] = SimpleQueue()
    group: list[_Worker] = []
    output = Output()
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(_signals_into(events))
        port = cleanup.enter_context(free_port())
        cleanup.callback(output.close, lambda: not events.empty())
        cleanup.callback(_send, group, _KILL)
        token = token_from_environment() or secrets.token_hex(32)
        for rank in range(workers):
            variables = environment(rank, workers, port, token)
            if log_level is not None:
                variables[LOG_LEVEL_VARIABLE] = log_level
            group.append(_Worker(rank, command, variables))
        # The threads start after the last fork, because a fork in a process with threads is not
        # safe.
        output.start()
        for worker in group:
            worker.watch(events, output)
        return _Supervisor(group, output, grace, keep_going).supervise(events)


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
        #: When the worker ended, by the monotonic clock.
        self.ended_at = 0.0
        #: The last signal that the launcher has sent to end the worker.
        self.sent = 0
        self._lock = threading.Lock()
        self._reaped = False
        options: dict[str, Any] = {}
        if sys.platform != "win32":
            options = {"start_new_session": True, "preexec_fn": die_with_parent}
        self.process = subprocess.Popen(
            [sys.executable, "-u", *command],
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables},
            **options,
        )

    def watch(self, events: SimpleQueue[_Worker | int], output: Output) -> None:
        """Start the threads that read the worker's output, and the thread that waits until the
        worker has ended and its output is read. That thread then puts the worker (`self`) into the
        queue `events`."""
        assert self.process.stdout
        assert self.process.stderr
        readers = [
            _Reader(source, output.stream(f"[worker {self.rank}] ", descriptor))
            for source, descriptor in ((self.process.stdout, 1), (self.process.stderr, 2))
        ]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._await_end, args=(readers, events), daemon=True).start()

    def _await_end(self, readers: list[_Reader], events: SimpleQueue[_Worker | int]) -> None:
        try:
            if hasattr(os, "waitid"):
                # With WNOWAIT, the system keeps the pid of the ended process reserved. The pid is
                # also the id of the process group that is killed below. So no other group can have
                # this id by then.
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            else:  # `waitid` is missing on Windows, and on macOS before Python 3.13.
                self.process.wait()
            self.ended_at = time.monotonic()
            self._signal_group(_KILL)  # Kill the processes that the worker has started.
            with self._lock:
                self.process.wait()
                self._reaped = True
            for reader in readers:
                reader.drain()
        finally:
            # The main thread waits until this worker is in the queue. So the worker must be put
            # there even after an exception.
            events.put(self)

    def send(self, signum: int) -> None:
        """Ask the worker to end: send a signal to it and to the processes that it has started."""
        self.sent = signum
        self._signal_group(signum)

    def _signal_group(self, signum: int) -> None:
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
        hint = _HINTS.get(_signal_name(-code))
        return f"{name} was ended by {_signal_name(-code)}" + (f": {hint}" if hint else "")

    def ending(self) -> str:
        """Return a few words that say how the worker ended."""
        code = self.process.returncode
        if code == 0:
            return "succeeded"
        if code > 0:
            return f"failed with exit code {code}"
        if -code != self.sent:
            return f"ended by {_signal_name(-code)}"
        if self.sent == signal.SIGINT:
            return "interrupted"
        return f"ended by gradwire ({_signal_name(self.sent)})"


class _Reader(threading.Thread):
    """Reads what a worker writes, and shows it."""

    def __init__(self, source: IO[bytes], stream: WorkerStream):
        super().__init__(daemon=True)
        self._source, self._stream = source, stream
        self._is_reading = False
        self._received = 0

    def run(self) -> None:
        with self._source:
            while data := self._read():
                if not self._stream.feed(data):
                    # Leaving the with block closes the pipe. So the worker gets an error when it
                    # writes next.
                    return
            self._stream.feed(b"")

    def _read(self) -> bytes:
        self._is_reading = True
        data: bytes = self._source.read(_READ_BYTES)
        self._is_reading = False
        self._received += len(data)
        return data

    def drain(self) -> None:
        """Wait until all output of a worker that has ended is shown."""
        limit = self._received + _PIPE_BYTES
        before, deadline = -1, math.inf
        while self.is_alive() and self._received <= limit and time.monotonic() < deadline:
            if self._received != before or not self._is_reading:
                before, deadline = self._received, time.monotonic() + _LAST_OUTPUT_SECONDS
            self.join(0.1)


class _Supervisor:
    """Waits for the ends of the workers, and decides when the group has to end."""

    def __init__(self, group: list[_Worker], output: Output, grace: float | None, keep_going: bool):
        self._running = set(group)
        self._group = group
        self._output = output
        self._grace = grace
        self._keep_going = keep_going
        self._exit_code = 0
        #: Whether a signal has asked the launcher to end.
        self._signalled = False
        #: The steps in which the group ends. Each one is a time to wait in seconds, and the signal
        #: that the workers get then.
        self._steps: deque[tuple[float, int]] = deque()
        #: When the next step is due. None until the group has to end.
        self._deadline: float | None = None

    def supervise(self, events: SimpleQueue[_Worker | int]) -> int:
        """Return the exit code when all workers have ended."""
        while self._running:
            try:
                event = events.get(timeout=self._time_left())
            except Empty:
                if self._time_left() == 0:
                    self._take_step()
                continue
            if isinstance(event, _Worker):
                self._running.discard(event)
                if event.exit_code and self._deadline is None:
                    self._note_failure(event)
            else:
                self._note_signal(event)
        if self._exit_code:
            self._say_endings()
        if self._signalled:
            # A signal has asked the launcher to end. So the launcher must not wait until somebody
            # reads its output.
            self._output.give_up()
        return self._exit_code

    def _time_left(self) -> float:
        if self._deadline is None:
            return _LONGEST_WAIT
        return max(0.0, min(self._deadline - time.monotonic(), _LONGEST_WAIT))

    def _note_failure(self, worker: _Worker) -> None:
        self._exit_code = self._exit_code or worker.exit_code
        consequence = ""
        if self._running and self._keep_going:
            consequence = f"; {_names(self._running)} may go on"
        elif self._running:
            consequence = f"; ending {_names(self._running)}"
            grace = GRACE_SECONDS if self._grace is None else self._grace
            self._end_in_steps((_OWN_END_SECONDS, signal.SIGTERM), (grace, _KILL))
        self._output.say(worker.failure() + consequence)

    def _note_signal(self, signum: int) -> None:
        self._signalled = True
        self._exit_code = self._exit_code or 128 + signum
        if self._deadline is not None:
            # A signal while the group ends means that the user does not want to wait.
            self._kill()
            return
        again = ". Ctrl-C once more kills them at once" if signum == signal.SIGINT else ""
        self._output.say(f"{_signal_name(signum)}; ending {_names(self._running)}{again}")
        grace = self._grace
        if signum == signal.SIGINT:
            self._output.shorten_interrupts()
            if grace is None:
                grace = INTERRUPT_GRACE_SECONDS
        _send(self._running, signum)
        self._end_in_steps((GRACE_SECONDS if grace is None else grace, _KILL))

    def _end_in_steps(self, *steps: tuple[float, int]) -> None:
        self._steps.extend(steps)
        self._deadline = time.monotonic() + steps[0][0]

    def _take_step(self) -> None:
        seconds, signum = self._steps.popleft()
        self._deadline = time.monotonic() + (self._steps[0][0] if self._steps else math.inf)
        if signum == _KILL:
            self._output.say(
                f"{_names(self._running)} did not end within {seconds:g} s: killing. --grace "
                "SECONDS gives more time"
            )
            self._kill()
        else:
            _send(self._running, signum)

    def _kill(self) -> None:
        _send(self._running, _KILL)
        # The launcher must not wait long for its output: a user may have stopped the terminal, or a
        # process may keep the output pipe open without reading it.
        self._output.give_up()

    def _say_endings(self) -> None:
        """Show how all workers ended. Begin with the worker that ended first, because its failure
        is often the cause of the others."""
        ended: dict[str, list[_Worker]] = {}
        for worker in sorted(self._group, key=lambda worker: worker.ended_at):
            ended.setdefault(worker.ending(), []).append(worker)
        for ending, workers in ended.items():
            self._output.say(f"{_names(workers)}: {ending}")


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _send(workers: Collection[_Worker], signum: int) -> None:
    for worker in workers:
        worker.send(signum)


def _names(workers: Collection[_Worker]) -> str:
    ranks = sorted(worker.rank for worker in workers)
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


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
