"""`gradwire run` starts workers, shows their output and ends them together."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

import pytest

from gradwire.launch import environment
from gradwire.launch.output import InterruptShortener
from tests.processes import until

SECONDS = 60
JOIN = """
import os, torch
from gradwire import rpc
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
if rank == 0:
    print("sum", rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist())
rpc.shutdown()
"""
#: Prints its pid, so that the tests can check that it has ended, and waits for a signal.
STAY = """
import os, signal, sys
print("pid", os.getpid(), flush=True)
{before}
signal.pause()
"""
#: Functions for programs that show unfinished lines, in an order that the test decides: a test
#: allows a step by making a file.
STEPS = """
import os, sys, time
rank = os.environ["RANK"]
def show(text): sys.stdout.write(text); sys.stdout.flush()
def step(name):
    while not os.path.exists(name): time.sleep(0.005)
"""


FIRST = "Traceback (most recent call last):"
FRAME = '  File "a.py", line 3, in f'
LIBRARY_FRAME = f'  File "{os.__file__}", line 7, in g'
CHAIN = (
    f"{FIRST}\n{FRAME}\nEmpty\n"
    f"\nDuring handling of the above exception, another exception occurred:\n\n{FIRST}"
)


class Program:
    """Runs scripts with `gradwire run`, in a folder of the test."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {k: v for k, v in os.environ.items() if k != "GRADWIRE_TOKEN"}

    def write(self, text: str, name: str = "program.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def allow(self, step: str) -> None:
        (self.folder / step).touch()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start_python("-m", "gradwire", "run", *arguments)

    def start_python(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        with self.start(*arguments) as launcher:
            out, err = launcher.communicate(timeout=SECONDS)
        return launcher.returncode, out, err


class Terminal:
    """A pseudo-terminal in which `gradwire run` runs. It keeps what it shows in `lines`."""

    def __init__(self, program: Program, *arguments: str):
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 60)) if hasattr(termios, "tcsetwinsize") else None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gradwire", "run", *arguments],
            cwd=program.folder,
            env={**program.environment, "TERM": "xterm"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # Ctrl-C goes to the processes that this terminal controls.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        os.close(slave)
        self.lines = [""]
        self._row = self._column = 0

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, condition: Callable[[list[str]], bool]) -> None:
        """Read until what the terminal shows meets `condition`."""
        end = time.monotonic() + SECONDS
        while not condition(self.lines):
            assert select.select([self._master], [], [], max(0, end - time.monotonic()))[0], (
                self.lines
            )
            if not self._read():
                assert condition(self.lines), self.lines
                return

    def finish(self) -> int:
        """Read until the launcher has ended, and return its exit code."""
        while self._read():
            pass
        return self.process.wait(SECONDS)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self) -> bool:
        try:
            data = os.read(self._master, 1 << 16).decode()
        except OSError:  # On Linux, this is the end of a terminal.
            return False
        for part in re.findall(r"\x1b\[[0-9]*[A-Z]|.", data, re.DOTALL):
            self._show(part)
        return bool(data)

    def _show(self, part: str) -> None:
        if part == "\r":
            self._column = 0
        elif part == "\n":
            self._row += 1
            self.lines += [""] * (self._row + 1 - len(self.lines))
        elif part.endswith("A") and len(part) > 1:
            self._row -= int(part[2:-1])
        elif part == "\x1b[J":
            self.lines[self._row :] = [self.lines[self._row][: self._column]]
        else:
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + part + line[self._column + 1 :]
            self._column += 1


def is_full(pipe: IO[str] | None) -> bool:
    """Return whether a pipe is so full that its writer soon has to wait."""
    assert pipe
    unread = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, unread)
    return unread[0] > 32768  # A pipe of Linux holds 65536 bytes.


@contextlib.contextmanager
def terminal(program: Program, *arguments: str) -> Iterator[Terminal]:
    opened = Terminal(program, *arguments)
    try:
        yield opened
    finally:
        opened.close()


def read_until(launcher: subprocess.Popen[str], text: str) -> str:
    """Read the launcher's output until `text` has come, and return it with its carriage returns."""
    assert launcher.stdout
    seen, end = b"", time.monotonic() + SECONDS
    while text.encode() not in seen:
        left = max(0, end - time.monotonic())
        assert select.select([launcher.stdout], [], [], left)[0], seen
        data = os.read(launcher.stdout.fileno(), 1 << 16)
        assert data, seen
        seen += data
    return seen.decode()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    yield Program(tmp_path)
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    remaining = [pid for pid in pids if works_in(pid, tmp_path)]
    assert all(map(ended, remaining)), "processes were left behind"


def works_in(pid: int, folder: Path) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/cwd") == str(folder)
    except OSError:
        return False  # it has ended, or belongs to another user


def ended(pid: int) -> bool:
    """Return whether a process has ended. One that was just killed has a few seconds to end."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 5)[0])
    finally:
        os.close(descriptor)


def pids_in(output: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+)$", output, re.MULTILINE)]


def test_every_line_names_its_worker_and_stays_whole(program: Program) -> None:
    script = program.write(
        "import os, sys\n"
        "letter = 'abc'[int(os.environ['RANK'])]\n"
        "for _ in range(300): print(letter * 200)\n"
        "print('warning', file=sys.stderr)\n"
        "print('no newline', end='')\n"
    )
    code, out, err = program.run("-n", "3", script)
    assert code == 0
    lines = out.splitlines()
    for rank, letter in enumerate("abc"):
        assert lines.count(f"[worker {rank}] {letter * 200}") == 300
        assert lines.count(f"[worker {rank}] no newline") == 1
    assert len(lines) == 903
    assert sorted(err.splitlines()) == [f"[worker {rank}] warning" for rank in range(3)]


def test_output_appears_while_the_worker_runs(program: Program) -> None:
    script = program.write(STAY.format(before=""))
    with program.start("-n", "1", script) as launcher:
        assert launcher.stdout
        assert launcher.stdout.readline().startswith("[worker 0] pid ")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(SECONDS) == 128 + signal.SIGTERM


def test_a_progress_bar_appears_while_it_moves(program: Program) -> None:
    script = program.write(
        STEPS + "for i in range(3): show(f'\\r{i} of 3'); step(f'go{i}')\nshow('\\ndone\\n')\n"
    )
    with program.start("-n", "1", script) as launcher:
        seen = ""
        for i in range(3):
            seen += read_until(launcher, f"{i} of 3")
            program.allow(f"go{i}")
        seen += read_until(launcher, "done\n")
    assert seen == "".join(
        ["[worker 0] 0 of 3", "\r[worker 0] 1 of 3", "\r[worker 0] 2 of 3", "\n[worker 0] done\n"]
    )


#: Two workers with a progress bar each. Worker 1 writes a finished line in between, and the bar of
#: worker 0 gets shorter at the end.
BARS = (
    STEPS
    + r"""
if rank == "0":
    show("\rfirst bar 1"); step("a")
    show("\rfirst bar 2"); step("b")
    show("\rfirst\n")
else:
    step("1")
    show("\rsecond bar 1"); step("2")
    show("\rsecond bar 1\na whole line\nthe be"); step("3")
    show("ginning\n")
"""
)


def test_the_bars_of_several_workers_stay_apart_in_a_pipe(program: Program) -> None:
    with program.start("-n", "2", program.write(BARS)) as launcher:
        seen = read_until(launcher, "first bar 1")
        program.allow("1")
        seen += read_until(launcher, "second bar 1")
        program.allow("a")
        seen += read_until(launcher, "first bar 2")
        program.allow("2")
        seen += read_until(launcher, "the be")
        program.allow("b")
        seen += read_until(launcher, "[worker 0] first\n")
        program.allow("3")
        seen += read_until(launcher, "beginning\n")
    assert seen.splitlines() == [
        "[worker 0] first bar 1",
        "[worker 1] second bar 1",
        "[worker 0] first bar 2",
        "[worker 1] a whole line",
        "[worker 1] the be",
        "[worker 0] first",
        "[worker 1] the beginning",
    ]


def test_the_bars_of_several_workers_stay_at_the_bottom_of_a_terminal(program: Program) -> None:
    with terminal(program, "-n", "2", program.write(BARS)) as shown:
        shown.wait_for(lambda lines: lines == ["[worker 0] first bar 1"])
        program.allow("1")
        shown.wait_for(lambda lines: lines == ["[worker 0] first bar 1", "[worker 1] second bar 1"])
        program.allow("a")
        shown.wait_for(lambda lines: lines == ["[worker 0] first bar 2", "[worker 1] second bar 1"])
        program.allow("2")
        above = ["[worker 1] second bar 1", "[worker 1] a whole line"]
        shown.wait_for(
            lambda lines: lines == [*above, "[worker 0] first bar 2", "[worker 1] the be"]
        )
        program.allow("b")
        shown.wait_for(lambda lines: lines == [*above, "[worker 0] first", "[worker 1] the be"])
        program.allow("3")
        assert shown.finish() == 0
    assert shown.lines == [*above, "[worker 0] first", "[worker 1] the beginning", ""]


def test_an_unfinished_line_fits_into_one_line_of_the_terminal(program: Program) -> None:
    script = program.write(
        STEPS + "show('\\r\\x1b[32m進' + 'long ' * 40); step('a'); show('\\rx\\n')\n"
    )
    with terminal(program, "-n", "1", script) as shown:
        shown.wait_for(lambda lines: "long" in lines[0])
        program.allow("a")
        assert shown.finish() == 0
    assert shown.lines == ["[worker 0] x", ""]


def test_what_moves_the_cursor_is_left_out_and_colors_stay(program: Program) -> None:
    # Bars below each other, as tqdm draws them.
    script = program.write(
        STEPS
        + "show('outer\\n\\r\\x1b[31minner\\x1b[0m\\x1b[A'); step('a'); show('\\n\\x1b[2K\\n')\n"
    )
    with program.start("-n", "1", script) as launcher:
        seen = read_until(launcher, "inner")
        program.allow("a")
        seen += launcher.communicate(timeout=SECONDS)[0]
    assert seen == "[worker 0] outer\n[worker 0] \x1b[31minner\x1b[0m\n[worker 0] \n"


def test_workers_end_when_nobody_reads_the_output(program: Program) -> None:
    script = program.write("print('pid', __import__('os').getpid())\nwhile True: print('again')\n")
    with program.start("-n", "2", script) as launcher:
        assert launcher.stdout
        printed = read_until(launcher, "again")
        launcher.stdout.close()
        assert launcher.stderr
        assert "BrokenPipeError" in launcher.stderr.read()
        assert launcher.wait(SECONDS) == 1
    assert all(map(ended, pids_in(printed)))


def test_ctrl_c_ends_the_launcher_when_the_last_output_is_blocked(program: Program) -> None:
    script = program.write("print('pid', __import__('os').getpid())\nprint('last ' * 100000)\n")
    with program.start("-n", "1", script) as launcher:
        printed = read_until(launcher, "last")
        assert all(map(ended, pids_in(printed)))
        launcher.send_signal(signal.SIGINT)
        launcher.wait(SECONDS)


def test_the_launcher_ends_although_its_output_is_blocked(program: Program) -> None:
    """Somebody holds the other end of the pipe and does not read it. So nothing can be written, but
    signals still have their effect."""
    script = program.write(
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('pid', os.getpid())\n"
        "while True: print('again' * 1000)\n"
    )
    with program.start("-n", "2", "--grace", "600", script) as launcher:
        printed = read_until(launcher, "again")
        until(partial(is_full, launcher.stdout), "the pipe is full")
        assert launcher.stderr
        launcher.send_signal(signal.SIGINT)
        assert launcher.stderr.readline().startswith("gradwire: SIGINT")
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(SECONDS) == 128 + signal.SIGINT
    assert all(map(ended, pids_in(printed)))


def test_workers_get_the_variables_of_torchrun_and_a_token(program: Program) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GRADWIRE_TOKEN"
    script = program.write(f"import os\nprint(*[os.environ[n] for n in {names.split()}])\n")
    _, out, _ = program.run("-n", "2", script)
    printed = sorted(line.split()[2:] for line in out.splitlines())
    port, token = printed[0][5:]
    assert int(port) > 1024
    assert len(token) >= 32
    assert printed == [[rank, rank, "2", "2", "127.0.0.1", port, token] for rank in "01"]

    program.environment["GRADWIRE_TOKEN"] = "my-own-token-of-sufficient-length"
    _, out, _ = program.run("-n", "1", script)
    assert out.split()[-1] == "my-own-token-of-sufficient-length"


def test_a_token_that_is_easy_to_guess_is_refused_before_workers_start(program: Program) -> None:
    program.environment["GRADWIRE_TOKEN"] = "easy"
    code, out, err = program.run("-n", "1", program.write("print('started')\n"))
    assert (code, out) == (2, "")
    assert "at least 16 characters" in err
    assert "easy" not in err.replace("easy to", "")


@pytest.mark.parametrize("before_program", [[], ["--"]], ids=["plain", "--"])
def test_arguments_reach_the_program(program: Program, before_program: list[str]) -> None:
    script = program.write("import sys\nprint(sys.argv)\n")
    code, out, _ = program.run("-n", "1", *before_program, script, "-n", "7", "--", "--grace")
    assert (code, out) == (0, "[worker 0] ['program.py', '-n', '7', '--', '--grace']\n")


@pytest.mark.parametrize("before_program", [[], ["--"]], ids=["plain", "--"])
def test_modules_run(program: Program, before_program: list[str]) -> None:
    program.write("import sys\nprint(__name__, sys.argv[1:])\n", "chosen.py")
    code, out, _ = program.run("-n", "1", *before_program, "-m", "chosen", "--x")
    assert (code, out) == (0, "[worker 0] __main__ ['--x']\n")


def test_a_failing_worker_ends_all_and_is_named(program: Program) -> None:
    failing = "if os.environ['RANK'] == '1': sys.exit(3)"
    code, out, err = program.run("-n", "3", program.write(STAY.format(before=failing)))
    assert code == 3
    assert re.search(r"worker 1 \(pid \d+\) failed with exit code 3", err)
    assert all(map(ended, pids_in(out)))


def test_a_signal_is_named_and_explained(program: Program) -> None:
    dying = "if os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)"
    code, out, err = program.run("-n", "2", program.write(STAY.format(before=dying)))
    assert code == 128 + signal.SIGKILL
    assert re.search(r"worker 0 \(pid \d+\) was ended by SIGKILL.*memory", err)
    assert all(map(ended, pids_in(out)))


def test_the_last_words_of_the_other_workers_are_shown(program: Program) -> None:
    # Worker 0 fails because worker 1 has failed, but is slow to say so.
    script = program.write(
        STEPS + "import time\n"
        "if rank == '1': open('failed', 'w'); sys.exit('the cause')\n"
        "step('failed'); time.sleep(0.2)\n"
        "print('last ' * 50000)\n"
        "sys.exit('a consequence')\n"
    )
    code, out, err = program.run("-n", "2", script)
    assert (code, out) == (1, f"[worker 0] {'last ' * 50000}\n")
    assert "[worker 1] the cause\n" in err
    assert "[worker 0] a consequence\n" in err


@pytest.mark.parametrize("death", ["os.kill(os.getpid(), signal.SIGSEGV)", "os._exit(3)"])
def test_a_worker_says_which_other_worker_it_has_lost(program: Program, death: str) -> None:
    script = program.write(
        "import os, signal, time\n"
        "from gradwire import rpc\n"
        "rpc.init_rpc('worker' + os.environ['RANK'])\n"
        f"if os.environ['RANK'] == '1': {death}\n"
        "rpc.rpc_sync('worker1', time.sleep, args=(600,))\n"
    )
    code, _, err = program.run("-n", "2", script)
    assert code in (3, 128 + signal.SIGSEGV)
    assert re.search(r"^\[worker 0\] gradwire.errors.WorkerLost: worker 'worker1'", err, re.M), err


def test_a_summary_says_how_all_workers_ended(program: Program) -> None:
    # Worker 1 succeeds and worker 2 fails, so worker 0 is ended.
    script = program.write(
        STEPS + "import signal\n"
        "if rank == '1': open('one', 'w'); sys.exit()\n"
        "if rank == '2': step('one'); step('up'); os.kill(os.getpid(), signal.SIGABRT)\n"
        "open('up', 'w'); signal.pause()\n"
    )
    code, _, err = program.run("-n", "3", script)
    assert code == 128 + signal.SIGABRT
    *ended_by_themselves, last = [line for line in err.splitlines() if "(pid" not in line]
    assert sorted(ended_by_themselves) == [
        "gradwire: worker 1: succeeded",
        "gradwire: worker 2: ended by SIGABRT",
    ]
    assert last == "gradwire: worker 0: ended by gradwire (SIGTERM)"


def test_with_keep_going_the_other_workers_go_on(program: Program) -> None:
    # Worker 0 goes on when the launcher has said that worker 1 has failed.
    script = program.write(
        STEPS + "if rank == '1': sys.exit(3)\nstep('go on')\nprint('worked to the end')\n"
    )
    with program.start("-n", "2", "--keep-going", script) as launcher:
        assert launcher.stderr
        said = launcher.stderr.readline()
        program.allow("go on")
        out, err = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 3
    assert re.search(r"worker 1 .*failed with exit code 3.*; worker 0 may go on", said)
    assert out == "[worker 0] worked to the end\n"
    assert err.splitlines() == [
        "gradwire: worker 1: failed with exit code 3",
        "gradwire: worker 0: succeeded",
    ]


def test_a_worker_that_ignores_sigterm_is_killed_with_its_children(program: Program) -> None:
    # Worker 0 and its child ignore SIGTERM. Worker 1 fails once the child is running.
    script = program.write(
        STAY.format(
            before="signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "if os.environ['RANK'] == '0':\n"
            "    if os.fork() == 0: print('pid', os.getpid(), flush=True)\n"
            "    open('ready', 'a').close()\n"
            "else:\n"
            "    while not os.path.exists('ready'): pass\n"
            "    sys.exit('on purpose')\n"
        )
    )
    code, out, err = program.run("-n", "2", "--grace", "0.2", script)
    assert code == 1
    assert "[worker 1] on purpose" in err
    assert "worker 0 did not end within 0.2 s: killing" in err
    assert all(map(ended, pids_in(out)))


def test_the_processes_started_by_a_worker_end_with_it(program: Program) -> None:
    script = program.write(
        "import os, signal\nif os.fork() == 0:\n    print('pid', os.getpid())\n    signal.pause()\n"
    )
    code, out, _ = program.run("-n", "1", script)
    assert code == 0
    assert all(map(ended, pids_in(out)))


@pytest.mark.parametrize(
    ("waitid", "exit_code", "message"),
    [("del os.waitid", 0, ""), ("os.waitid = None", 1, "TypeError")],
)
def test_the_launcher_returns_without_waitid_and_after_an_error_while_waiting(
    program: Program, waitid: str, exit_code: int, message: str
) -> None:
    """macOS has no waitid before Python 3.13. And the main thread must not wait forever if a thread
    that waits for a worker fails."""
    script = program.write(
        "import os, signal\nif os.fork() == 0:\n    print('pid', os.getpid())\n    signal.pause()\n"
    )
    command = f"import os, sys\n{waitid}\nimport gradwire.cli\nsys.exit(gradwire.cli.main())"
    with program.start_python("-c", command, "run", "-n", "2", script) as launcher:
        try:
            out, err = launcher.communicate(timeout=SECONDS)
        finally:
            launcher.kill()
    assert launcher.returncode == exit_code
    assert message in err
    assert all(map(ended, pids_in(out)))


def test_a_process_that_has_left_its_worker_does_not_hold_up_the_launcher(
    program: Program,
) -> None:
    script = program.write(
        "import os\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    os.write(write, b'.')\n"
        "    while True: print('still there\\n', end='')\n"
        "os.read(read, 1)\n"
        "print('last\\n', end='')\n"
    )
    code, out, _ = program.run("-n", "1", script)
    assert code == 0
    assert "[worker 0] last\n" in out
    assert "[worker 0] still there\n" in out


def test_a_worker_may_finish_before_the_others(program: Program) -> None:
    # Rank 1 runs until the end of rank 0 closes the pipe between them.
    script = program.write(
        "import os\n"
        "rank = os.environ['RANK']\n"
        "os.mkfifo('fifo') if rank == '0' else None\n"
        "while not os.path.exists('fifo'): pass\n"
        "if rank == '0': pipe = os.open('fifo', os.O_WRONLY)\n"
        "else: print('pipe closed:', open('fifo').read() == '')\n"
    )
    code, out, err = program.run("-n", "2", script)
    assert (code, out, err) == (0, "[worker 1] pipe closed: True\n", "")


def test_ctrl_c_ends_all_workers_with_one_line_each(program: Program) -> None:
    # Worker 0 waits for a call, worker 1 runs its function, worker 2 waits in `shutdown`. The
    # futures of worker 0 are never looked at.
    script = program.write(
        "import os, time\n"
        "from gradwire import rpc\n"
        "def stay():\n"
        "    open('running', 'w')\n"
        "    time.sleep(600)\n"
        "rpc.init_rpc('worker' + os.environ['RANK'])\n"
        "if os.environ['RANK'] == '0':\n"
        "    futures = [rpc.rpc_async('worker1', stay) for _ in range(3)]\n"
        "    futures[0].wait()\n"
        "rpc.shutdown()\n"
    )
    with terminal(program, "-n", "3", "--grace", "60", script) as shown:
        until((program.folder / "running").exists, "worker 1 runs the function")
        shown.type("\x03")
        assert shown.finish() == 128 + signal.SIGINT
    assert shown.lines[0] == (
        "gradwire: SIGINT; ending workers 0, 1, 2. Ctrl-C once more kills them at once"
    )
    for rank, line in enumerate(sorted(shown.lines[1:4])):
        assert re.fullmatch(rf"\[worker {rank}\] interrupted at .*/program.py:\d+", line)
    assert shown.lines[4:] == ["gradwire: workers 0, 1, 2: interrupted", ""]


def test_after_ctrl_c_a_program_can_save_its_state(program: Program) -> None:
    # Worker 0 saves, worker 1 fails to. That error is no consequence of Ctrl-C and is shown.
    script = program.write(
        STEPS + "import signal\n"
        "try:\n"
        "    show('up\\n'); signal.pause()\n"
        "except KeyboardInterrupt:\n"
        "    print('saving'); step('saved')\n"
        "    if rank == '1': raise RuntimeError('the disk is full')\n"
        "    print('saved')\n"
    )
    with program.start("-n", "2", "--grace", "60", script) as launcher:
        assert launcher.stdout
        assert "up" in launcher.stdout.readline() + launcher.stdout.readline()
        launcher.send_signal(signal.SIGINT)
        assert "saving" in launcher.stdout.readline() + launcher.stdout.readline()
        program.allow("saved")
        out, err = launcher.communicate(timeout=SECONDS)
    assert (launcher.returncode, out) == (128 + signal.SIGINT, "[worker 0] saved\n")
    assert f"[worker 1] interrupted at {program.folder}/program.py:" in err
    assert "[worker 1] RuntimeError: the disk is full\n" in err
    assert "worker 0: succeeded" in err
    assert "worker 1: failed with exit code 1" in err


IGNORES_CTRL_C = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("pid", os.getpid(), flush=True)
signal.pause()
"""


def test_a_worker_that_ignores_ctrl_c_is_killed(program: Program) -> None:
    with program.start("-n", "2", program.write(IGNORES_CTRL_C)) as launcher:
        assert launcher.stdout
        printed = launcher.stdout.readline() + launcher.stdout.readline()
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 128 + signal.SIGINT
    assert "workers 0, 1 did not end within 2.5 s: killing" in err
    assert "workers 0, 1: ended by gradwire (SIGKILL)" in err
    assert len(pids_in(printed)) == 2
    assert all(map(ended, pids_in(printed)))


def test_a_second_ctrl_c_kills_at_once(program: Program) -> None:
    with program.start("-n", "2", "--grace", "600", program.write(IGNORES_CTRL_C)) as launcher:
        assert launcher.stdout
        assert launcher.stderr
        printed = launcher.stdout.readline() + launcher.stdout.readline()
        launcher.send_signal(signal.SIGINT)
        assert "SIGINT" in launcher.stderr.readline()
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(SECONDS) == 128 + signal.SIGINT
    assert all(map(ended, pids_in(printed)))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"{FIRST}\n{FRAME}\n    f()\nKeyboardInterrupt\nbye", "interrupted at a.py:3\nbye"),
        (f"{FIRST}\n{FRAME}\n{LIBRARY_FRAME}\nKeyboardInterrupt", "interrupted at a.py:3"),
        (f"{CHAIN}\n{FRAME}\nKeyboardInterrupt", "interrupted at a.py:3"),
        (f"{CHAIN}\n{FRAME}\nValueError: a", None),
        (f"{FIRST}\n{FRAME}\nValueError: a\nb", None),
        (f"{FIRST}\n{FRAME}", None),
        ("KeyboardInterrupt", None),
    ],
)
def test_only_tracebacks_of_keyboard_interrupts_are_shortened(text: str, shown: str | None) -> None:
    shortener = InterruptShortener()
    lines = [line for given in text.encode().split(b"\n") for line in shortener.feed(given)]
    assert b"\n".join([*lines, *shortener.end()]).decode() == (shown or text)


def test_workers_die_with_a_killed_launcher(program: Program) -> None:
    with program.start("-n", "2", program.write(STAY.format(before=""))) as launcher:
        assert launcher.stdout
        printed = launcher.stdout.readline() + launcher.stdout.readline()
        launcher.kill()
    assert len(pids_in(printed)) == 2
    assert all(map(ended, pids_in(printed)))


def test_a_wrong_command_is_explained(program: Program) -> None:
    code, _, err = program.run("-n", "2", "nowhere.py")
    assert code == 2
    assert "there is no script 'nowhere.py'" in err
    assert "at least 1" in program.run("-n", "0", "nowhere.py")[2]


LOGS = """
import logging, os
from gradwire import rpc
rpc.init_rpc("trainer" + os.environ["RANK"])
logging.getLogger("gradwire.part").info("a detail")
logging.getLogger("gradwire").warning("careful")
rpc.shutdown()
"""


def test_the_level_of_the_log_can_be_chosen(program: Program) -> None:
    code, _, err = program.run("-n", "1", "--log-level", "info", program.write(LOGS))
    assert code == 0
    assert [re.sub(r"[-0-9]{10} [0-9:,]{12}", "TIME", line) for line in err.splitlines()] == [
        "[worker 0] TIME INFO trainer0: a detail",
        "[worker 0] TIME WARNING trainer0: careful",
    ]


def test_the_handlers_of_the_program_print_the_log_if_there_are_any(program: Program) -> None:
    program.environment["GRADWIRE_LOG_LEVEL"] = "warning"
    configured = "import logging\nlogging.basicConfig(format='mine: %(message)s')\n" + LOGS
    assert program.run("-n", "1", program.write(configured))[2] == "[worker 0] mine: careful\n"


def test_a_wrong_level_of_the_log_is_explained(program: Program) -> None:
    code, _, err = program.run("-n", "1", "--log-level", "loud", program.write(LOGS))
    assert code == 2
    assert "'DEBUG', 'INFO', 'WARNING'" in err
    program.environment["GRADWIRE_LOG_LEVEL"] = "loud"
    code, _, err = program.run("-n", "1", program.write(LOGS))
    assert code == 1
    assert "SetupError: the variable GRADWIRE_LOG_LEVEL must be one of DEBUG, INFO" in err


@pytest.mark.parametrize("grace", ["-1", "nan", "soon"])
def test_a_wrong_grace_is_explained(program: Program, grace: str) -> None:
    code, _, err = program.run("-n", "1", "--grace", grace, program.write(LOGS))
    assert code == 2
    assert "argument --grace" in err


def test_the_command_does_not_import_torch() -> None:
    script = "import sys, gradwire.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], timeout=SECONDS, check=True)


def test_a_program_for_torchrun_runs_unchanged(program: Program) -> None:
    script = program.write(JOIN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    with program.start_python(*torchrun, script) as launcher:
        try:
            out, err = launcher.communicate(timeout=SECONDS)
        finally:
            launcher.terminate()  # killing it would leave its workers
    assert (launcher.returncode, out) == (0, "sum [2.0, 2.0]\n"), err
    code, out, err = program.run("-n", "2", script)
    assert (code, out, err) == (0, "[worker 0] sum [2.0, 2.0]\n", "")


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment(0, 1000, 1, "")["OMP_NUM_THREADS"] == "1"
    assert environment(0, 1, 1, "")["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment(0, 2, 1, "")["OMP_NUM_THREADS"] == "7"
