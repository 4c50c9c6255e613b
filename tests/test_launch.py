"""`gradwire run` starts workers, copies their output and ends them together."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.launch import environment

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


class Program:
    """Runs scripts with `gradwire run`, in a folder of the test."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {k: v for k, v in os.environ.items() if k != "GRADWIRE_TOKEN"}

    def write(self, text: str, name: str = "program.py") -> str:
        (self.folder / name).write_text(text)
        return name

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


def test_ctrl_c_ends_all_workers(program: Program) -> None:
    with program.start("-n", "2", program.write(STAY.format(before=""))) as launcher:
        assert launcher.stdout
        printed = launcher.stdout.readline() + launcher.stdout.readline()
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 128 + signal.SIGINT
    assert "gradwire: SIGINT; ending workers 0, 1" in err
    assert len(pids_in(printed)) == 2
    assert all(map(ended, pids_in(printed)))


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
