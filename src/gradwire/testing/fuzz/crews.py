"""Crews: forked processes that run programs, watched by the process that forked them.

A crew is either one process with all workers in it, or one process per worker. Its first process
drives: it says which program it begins and what became of it, over a pipe. The watcher has no
threads, no workers and no part in the programs, so nothing that hangs can hang it: when a program
is over time it asks all processes of the crew for the stacks of their threads, and ends them.
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

from gradwire import current, launch
from gradwire.config import Options
from gradwire.testing.fuzz.comparing import judge, shrink
from gradwire.testing.fuzz.generator import make_program
from gradwire.testing.fuzz.programs import Program
from gradwire.testing.workers import cluster, transports_named
from gradwire.worker import Worker

#: What gets a hung process to write down the stacks of its threads.
_SHOW_STACKS = getattr(signal, "SIGUSR1", signal.SIGTERM)
_STACKS_SECONDS = 5.0


@dataclass(frozen=True)
class Task:
    """What a crew does."""

    seeds: Sequence[int]
    workers: int = 3
    processes: bool = False
    transport: str = "memory"
    #: How long a program may take.
    timeout: float = 60.0


@dataclass
class Summary:
    """What has come of all programs so far."""

    verdicts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def programs(self) -> int:
        return self.verdicts.total()


# -- watching


def run_crews(tasks: Sequence[Task], tell: Callable[[Summary], None] | None = None) -> Summary:
    """Run several crews side by side to their end. `tell` hears of every program."""
    summary = Summary()
    with contextlib.ExitStack() as cleanup:
        crews = [cleanup.enter_context(_crew(task)) for task in tasks]
        while crews:
            deadline = min(crew.deadline for crew in crews)
            ready = wait([crew.news for crew in crews], max(0.0, deadline - time.monotonic()))
            for crew in list(crews):
                if crew.news in ready:
                    over = crew.hear(summary)
                    if tell is not None:
                        tell(summary)
                else:
                    over = time.monotonic() > crew.deadline
                    if over:
                        summary.failures.append(crew.hang())
                if over:
                    crews.remove(crew)
    return summary


@contextlib.contextmanager
def _crew(task: Task) -> Iterator[_Crew]:
    with tempfile.TemporaryDirectory() as folder:
        crew = _Crew(task, Path(folder))
        try:
            yield crew
        finally:
            crew.end()


class _Crew:
    def __init__(self, task: Task, folder: Path):
        self._task = task
        self._folder = folder
        self._seed: int | None = None
        self.news, theirs = multiprocessing.Pipe(duplex=False)
        self._pids: list[int] = []
        for rank in range(task.workers if task.processes else 1):
            pid = os.fork()
            if pid == 0:
                _be_process(task, rank, folder, theirs)
            self._pids.append(pid)
        theirs.close()
        self._extend()

    def _extend(self) -> None:
        self.deadline = time.monotonic() + self._task.timeout

    def hear(self, summary: Summary) -> bool:
        """Take the driver's news; True when it is done."""
        self._extend()
        try:
            what, seed, text = self.news.recv()
        except EOFError:
            summary.failures.append(self._describe("the driving process has died"))
            return True
        if what == "begin":
            self._seed = seed
        elif what == "failure":
            summary.failures.append(f"{self._describe(text)}\n{self._program()}")
        elif what == "smaller":
            summary.failures[-1] += f"\n\ncut down to\n{text}"
        elif what == "end":
            summary.verdicts[text] += 1
        return bool(what == "done")

    def hang(self) -> str:
        """What all threads of the crew are doing."""
        text = self._describe(f"it hangs: not done after {self._task.timeout:g} s")
        for pid in self._pids:
            os.kill(pid, _SHOW_STACKS)
        for rank in range(len(self._pids)):
            stacks = _read_when_there(_stacks_file(self._folder, rank))
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

    def end(self) -> None:
        """End the processes, of which none should be left."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.news.close()


def _stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks{rank}"


def _read_when_there(file: Path) -> str:
    """What a process writes on our signal; it may be stopped, or busy in a C function."""
    deadline = time.monotonic() + _STACKS_SECONDS
    text = ""
    while time.monotonic() < deadline:
        before, text = text, file.read_text() if file.exists() else ""
        if text and text == before:
            break
        time.sleep(0.1)
    return text or "(it does not answer)"


# -- in the processes


def _be_process(task: Task, rank: int, folder: Path, news: Connection) -> NoReturn:
    try:
        launch.die_with_parent()
        stacks = _stacks_file(folder, rank).open("w")
        if hasattr(faulthandler, "register"):
            faulthandler.register(_SHOW_STACKS, stacks, all_threads=True)
        torch.set_num_threads(1)
        try:
            if task.processes:
                _be_worker(task, rank, f"file://{folder}/store", news)
            else:
                with in_this_process(task.workers, task.transport, _patience(task)):
                    _drive(task, news)
        except BaseException:
            news.send(("failure", None, traceback.format_exc()))
        if rank == 0:
            news.send(("done", None, ""))
    finally:
        os._exit(0)


@contextlib.contextmanager
def in_this_process(workers: int, transport: str, timeout: float = 60.0) -> Iterator[list[Worker]]:
    """Workers in this process, the first of them the current one."""
    options = Options(rpc_timeout=timeout)
    with cluster(workers, transports=transports_named(transport), options=options) as started:
        token = current.enter(started[0])
        try:
            yield started
        finally:
            current.exit(token)


def _patience(task: Task) -> float:
    """For single calls: long enough for the watcher to come and see where they hang."""
    return task.timeout + 30


def _be_worker(task: Task, rank: int, place: str, news: Connection) -> None:
    ways = ("unix", "tcp") if task.transport == "memory" else (task.transport,)
    options = Options(init_method=place, rpc_timeout=_patience(task), transports=ways)
    with Worker(f"worker{rank}", rank, task.workers, options):
        if rank == 0:
            _drive(task, news)


def _drive(task: Task, news: Connection) -> None:
    for seed in task.seeds:
        news.send(("begin", seed, ""))
        program = make_program(seed, task.workers)
        complaint, verdict = judge(program)
        if complaint:
            news.send(("failure", seed, complaint))

            def fails(candidate: Program) -> bool:
                news.send(("begin", candidate.seed, ""))
                return bool(judge(candidate)[0])

            smaller = shrink(program, fails)
            news.send(("smaller", seed, f"{judge(smaller)[0]}\n{smaller}"))
        news.send(("end", seed, "failed" if complaint else verdict))
