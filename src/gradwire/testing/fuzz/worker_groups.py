"""Run random programs in forked groups of workers, and report the programs that hang.

A group is either one process with all workers in it, or one process per worker. Its first process
runs the programs. Over a pipe, it reports which program it starts and how the program ended. The
process that forked the groups watches them. This process has no threads and no workers, so nothing
in a program can block it. When a program exceeds its timeout, the watching process asks all
processes of the group for the stacks of their threads. Then it kills the processes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

import torch

from gradwire import launch
from gradwire._core import current
from gradwire.options import Options
from gradwire.testing.cluster import cluster, transports_named
from gradwire.testing.fuzz.comparing import run_both_ways, shrink
from gradwire.testing.fuzz.generator import make_program
from gradwire.testing.fuzz.programs import Program
from gradwire.testing.inspection import runtime_of
from gradwire.worker import Worker

#: The signal that makes a process write the stacks of its threads to a file.
_SHOW_STACKS = getattr(signal, "SIGUSR1", signal.SIGTERM)
_STACKS_SECONDS = 5.0


@dataclass(frozen=True)
class Task:
    """The programs that a group of workers runs, given by their seeds, and the kind of the group.
    With `processes`, each worker has a process of its own."""

    seeds: Sequence[int]
    workers: int = 3
    processes: bool = False
    transport: str = "in_process"
    #: Seconds that one program may take.
    timeout: float = 60.0


@dataclass
class Summary:
    """The results of all programs so far."""

    verdicts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def programs(self) -> int:
        return self.verdicts.total()


# -- watching


def run_groups(
    tasks: Sequence[Task], on_progress: Callable[[Summary], None] | None = None
) -> Summary:
    """Run a group per task, all at the same time, until all are done. `on_progress` is called after
    every report of a group."""
    summary = Summary()
    with contextlib.ExitStack() as cleanup:
        groups = [cleanup.enter_context(_started(task)) for task in tasks]
        while groups:
            deadline = min(group.deadline for group in groups)
            timeout = max(0.0, deadline - time.monotonic())
            ready = wait([group.reports for group in groups], timeout)
            for group in list(groups):
                if group.reports in ready:
                    done = group.read_report(summary)
                    if on_progress is not None:
                        on_progress(summary)
                else:
                    done = time.monotonic() > group.deadline
                    if done:
                        summary.failures.append(group.describe_hang())
                if done:
                    groups.remove(group)
    return summary


@contextlib.contextmanager
def _started(task: Task) -> Iterator[_Group]:
    with tempfile.TemporaryDirectory() as folder:
        group = _Group(task, Path(folder))
        try:
            yield group
        finally:
            group.kill()


class _Group:
    """The processes of one group, as the watching process sees them."""

    def __init__(self, task: Task, folder: Path):
        self._task = task
        self._folder = folder
        self._seed: int | None = None
        self.reports, theirs = multiprocessing.Pipe(duplex=False)
        self._pids: list[int] = []
        for rank in range(task.workers if task.processes else 1):
            pid = os.fork()
            if pid == 0:
                _run_process(task, rank, folder, theirs)
            self._pids.append(pid)
        theirs.close()
        self._set_deadline()

    def _set_deadline(self) -> None:
        self.deadline = time.monotonic() + self._task.timeout

    def read_report(self, summary: Summary) -> bool:
        """Receive one report of the group and add it to the summary. Return True if the group is
        done."""
        self._set_deadline()
        try:
            event, seed, text = self.reports.recv()
        except EOFError:
            summary.failures.append(self._describe("the process that runs the programs has died"))
            return True
        if event == "begin":
            self._seed = seed
        elif event == "failure":
            summary.failures.append(f"{self._describe(text)}\n{self._program()}")
        elif event == "shrunk":
            summary.failures[-1] += f"\n\nshrunk to\n{text}"
        elif event == "end":
            summary.verdicts[text] += 1
        return bool(event == "done")

    def describe_hang(self) -> str:
        """Return a report with the stacks of all threads of the group."""
        text = self._describe(f"it hangs: not done after {self._task.timeout:g} s")
        for pid in self._pids:
            os.kill(pid, _SHOW_STACKS)
        for rank in range(len(self._pids)):
            stacks = _read_when_written(_stacks_file(self._folder, rank))
            text += f"\n\nprocess {rank}:\n{stacks}"
        return f"{text}\n{self._program()}"

    def _describe(self, text: str) -> str:
        task = self._task
        if self._seed is None:
            return f"while starting: {text}"
        command = f"--seed {self._seed} --programs 1 --workers {task.workers}"
        command += f" --transport {task.transport}" + " --processes" * task.processes
        return f"seed {self._seed}: {text}\n(again: python -m gradwire.testing.fuzz {command})"

    def _program(self) -> str:
        if self._seed is None:
            return ""
        return str(make_program(self._seed, self._task.workers))

    def kill(self) -> None:
        """Kill all processes of the group that are still running."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.reports.close()


def _stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks{rank}"


def _read_when_written(file: Path) -> str:
    """Wait until a process has written the stacks of its threads to the file, and return them. A
    process that is suspended, or blocked in a C function, may not write them."""
    deadline = time.monotonic() + _STACKS_SECONDS
    text = ""
    while time.monotonic() < deadline:
        before, text = text, file.read_text() if file.exists() else ""
        if text and text == before:
            break
        time.sleep(0.1)
    return text or "(the process does not react to the signal)"


# -- in the forked processes


def _run_process(task: Task, rank: int, folder: Path, reports: Connection) -> NoReturn:
    try:
        launch.die_with_parent()
        stacks = _stacks_file(folder, rank).open("w")
        if hasattr(faulthandler, "register"):
            faulthandler.register(_SHOW_STACKS, stacks, all_threads=True)
        torch.set_num_threads(1)
        try:
            if task.processes:
                _run_worker(task, rank, f"file://{folder}/store", reports)
            else:
                with in_this_process(task.workers, task.transport, _call_timeout(task)):
                    _run_programs(task, reports)
        except BaseException:
            reports.send(("failure", None, traceback.format_exc()))
        if rank == 0:
            reports.send(("done", None, ""))
    finally:
        os._exit(0)


@contextlib.contextmanager
def in_this_process(workers: int, transport: str, timeout: float = 60.0) -> Iterator[list[Worker]]:
    """Start workers in this process, and make the first one the current worker."""
    options = Options(rpc_timeout=timeout)
    with cluster(workers, transports=transports_named(transport), options=options) as started:
        token = current.enter(runtime_of(started[0]))
        try:
            yield started
        finally:
            current.leave(token)


def _call_timeout(task: Task) -> float:
    """Return the timeout of a single call. It is longer than the timeout of a program, so that a
    call that hangs is still open when the stacks of the threads are written."""
    return task.timeout + 30


def _run_worker(task: Task, rank: int, init_method: str, reports: Connection) -> None:
    transports = ("unix", "tcp") if task.transport == "in_process" else (task.transport,)
    options = Options(
        init_method=init_method, rpc_timeout=_call_timeout(task), transports=transports
    )
    with Worker(f"worker{rank}", rank, task.workers, options):
        if rank == 0:
            _run_programs(task, reports)


def _run_programs(task: Task, reports: Connection) -> None:
    for seed in task.seeds:
        reports.send(("begin", seed, ""))
        program = make_program(seed, task.workers)
        difference, verdict = run_both_ways(program)
        if difference:
            reports.send(("failure", seed, difference))

            def fails(candidate: Program) -> bool:
                reports.send(("begin", candidate.seed, ""))
                return bool(run_both_ways(candidate)[0])

            smaller = shrink(program, fails)
            reports.send(("shrunk", seed, f"{run_both_ways(smaller)[0]}\n{smaller}"))
        reports.send(("end", seed, "failed" if difference else verdict))
