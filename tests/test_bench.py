"""The benchmarks run; how fast is for them to say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradwire.bench import autograd, contest, groups, peers, plots, programs, rpc, scale
from gradwire.bench.tables import table
from gradwire.bench.timing import microseconds, milliseconds

EXAMPLES = Path(__file__).parent.parent / "examples" / "torch"
SMALL = [
    case
    for case in rpc.SUITE.cases
    if " MB" not in case.name and " at a time" not in case.name and case.contestants != rpc.TCP
]


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Python, in a process of its own."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


#: In a process of its own: multiprocessing keeps helpers until the process that used it ends.
TRIAL = """
import json, multiprocessing, os, sys, threading
from dataclasses import replace
from gradwire.bench import contest, rpc

def fail(tools, count):
    raise ValueError("no luck")

def die(tools, count):
    os._exit(1)

def hang(tools, count):
    threading.Event().wait()

def work(tools, count):
    assert "RANK" not in os.environ, "what it starts would take its place and share of the cores"
    return [1.0] * count

def absent(rank):
    os._exit(1)

if __name__ == "__main__":
    names = sys.argv[1:]
    small = replace(rpc.SUITE, cases=tuple(c for c in rpc.SUITE.cases if c.name in names))
    outcome = contest.hold(small, rounds=2, quick=True)
    assert not any(outcome.failures.values()), outcome.failures
    print(json.dumps(outcome.samples))

    cases = [
        contest.Case(f.__name__, f, 1, str, contestants=("machine",), limit=limit)
        for f, limit in [(fail, 60), (die, 60), (hang, 0.1), (work, 60)]
    ]
    [machine] = [c for c in rpc.SUITE.contestants if c.name == "machine"]
    outcome = contest.hold(contest.Suite("", (machine,), tuple(cases)), 2, False)
    print(json.dumps([outcome.samples, outcome.failures]))

    guest = replace(machine, name="guest", lasting=False)
    others = guest, replace(guest, name="absent", join=absent)
    case = replace(cases[-1], contestants=("guest", "absent"))
    outcome = contest.hold(contest.Suite("", others, (case, replace(case, name="more"))), 2, False)
    print(json.dumps([outcome.samples, outcome.failures]))
    assert not multiprocessing.active_children()
    assert "torch" not in sys.modules
"""


def test_contestants_take_turns_and_one_that_fails_or_is_absent_does_not_stop_the_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "trial.py").write_text(TRIAL)
    done = run("trial.py", *[case.name for case in SMALL], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    samples, (others, failures), (guests, absences) = map(json.loads, done.stdout.splitlines())
    for case in SMALL:
        assert list(samples[case.name]) == list(case.contestants)
        for rounds in samples[case.name].values():
            assert [len(samples) for samples in rounds] == [case.quick_count] * 2
    assert "ValueError: no luck" in failures["fail"]["machine"]
    assert failures["die"] == {"machine": "machine, die: its process died; see above"}
    assert failures["hang"] == {"machine": "machine, hang: no answer after 0.1 s"}
    assert others["work"] == {"machine": [[1.0], [1.0]]}
    assert guests["work"] == guests["more"] == {"guest": [[1.0], [1.0]], "absent": []}
    why = {"absent": "absent, process 0, starting: its process died; see above"}
    assert absences["work"] == absences["more"] == why


def test_gradients_are_measured_in_every_case(tmp_path: Path) -> None:
    file = tmp_path / "samples.json"
    options = ["autograd", "--quick", "--rounds", "1", "--json", str(file)]
    done = run("-m", "gradwire", "bench", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1,000 chained calls, backward alone" in done.stdout
    for case in autograd.SUITE.cases:
        samples = json.loads(file.read_text())["samples"][case.name]
        assert list(samples) == list(case.contestants)
        assert all(len(of_round) == case.quick_count for [of_round] in samples.values())


def test_wrong_gradients_are_not_measured() -> None:
    halved = SimpleNamespace(
        context=lambda: nullcontext(1),
        backward=lambda context_id, roots, keep: roots[0].backward(retain_graph=keep),
        get_gradients=lambda context_id: {leaf: leaf.grad / 2 for leaf in program.leaves},
    )
    program = autograd.chain(3)
    with pytest.raises(AssertionError, match="in one process"):
        autograd.check(program, autograd.Library(halved, autograd.locally))


def test_a_group_gives_what_its_processes_return_or_the_first_failure() -> None:
    def fail(rank: int, meet: groups.Meet) -> None:
        if rank == 1:
            raise ValueError("no luck")
        meet()

    def die(rank: int, meet: groups.Meet) -> None:
        if rank == 1:
            os._exit(1)
        meet()

    assert groups.in_group(3, lambda rank, meet: (rank, meet())) == [
        (0, None),
        (1, None),
        (2, None),
    ]
    with pytest.raises(RuntimeError, match="ValueError: no luck"):
        groups.in_group(2, fail)
    with pytest.raises(RuntimeError, match="died"):
        groups.in_group(2, die)


#: In a process of its own too: torch's RPC must not be forked from one that has threads.
GROUPS = """
from functools import partial
from gradwire.bench import groups, memory, rpc, scale

scale.BATCH, scale.WINDOW, memory.OPEN, memory.OPEN_BEFORE = 5, 20, 20, 5

def call(over_tcp, rank, meet):
    with over_tcp.join(rank) as caller:
        return rpc.noop_calls(caller, 3) if rank == 0 else []

if __name__ == "__main__":
    for package in ("gradwire", "torch.distributed"):
        with scale.ready_to_fork(package, 0) as tools:
            for few, count in (
                (scale.caller_cpu, 2),
                (scale.callee_cpu, 2),
                (partial(scale.meetings, 2), 2),
                (partial(scale.hammering, 2), 1),
                (partial(scale.slowest_of_hammering, 2), 1),
                (partial(scale.spreading, 2), 2),
                (partial(scale.backward, 2), 2),
                (memory.memory_of_contexts, 1),
                (memory.memory_of_calls, 1),
            ):
                samples = few(tools, count)
                assert len(samples) == count, (package, few, samples)
    for over_tcp in rpc.SUITE.contestants:
        if over_tcp.name in rpc.TCP:
            assert [len(s) for s in groups.in_group(2, partial(call, over_tcp))] == [3, 0]
            print(over_tcp.name)
"""


def test_what_grows_is_measured_in_groups_and_calls_are_made_over_tcp(tmp_path: Path) -> None:
    (tmp_path / "trial.py").write_text(GROUPS)
    done = run("-W", "ignore", "trial.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == list(rpc.TCP)


def test_peers_take_part_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda module: module == "ray")
    suite, missing = peers.invite(rpc.SUITE)
    assert missing == ["Monarch is not installed: pip install torchmonarch"]
    assert [c.name for c in suite.contestants if not c.lasting] == ["Ray"]
    for case in suite.cases:
        assert ("Ray" in case.contestants) == case.peers


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs gradwire[plots]")
def test_what_was_measured_is_drawn(tmp_path: Path) -> None:
    cases = [case for case in scale.SUITE.cases if case.point]
    measured = {
        "cases": {c.name: {"plot": c.point.plot, "x": c.point.x} for c in cases if c.point},
        "samples": {c.name: {"torch": [[2.0], [3.0]], "gradwire": [[1.0], [1.0]]} for c in cases},
        "failures": {c.name: {} for c in cases},
    }
    (tmp_path / "scale.json").write_text(json.dumps(measured))
    done = run("-m", "gradwire", "plot", "scale.json", "--into", "plots", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {p.file for p in plots.PLOTS}
    assert ">gradwire</text>" in (tmp_path / "plots" / "latency.svg").read_text()


def test_a_table_compares_the_contestants_round_by_round() -> None:
    case = contest.Case("", rpc.noop_calls, 1, milliseconds, steps=contest.Steps(10, microseconds))
    cases = (
        replace(case, name="both", aim=2.5, floor=contest.Floor("floor", 2)),
        replace(case, name="one", aim=3),
        replace(case, name="more", aim=3, contestants=("torch", "gradwire", "peer")),
        replace(case, name="floor", contestants=("machine",)),
    )
    torch, gradwire = [[8e-3], [6e-3], [9e-3]], [[2e-3], [3e-3], [3e-3]]
    samples = {
        "both": {"torch": torch, "gradwire": gradwire},
        "one": {"torch": [[8e-3]], "gradwire": gradwire},
        "more": {"torch": torch, "gradwire": torch, "peer": gradwire},
        "floor": {"machine": [[1e-3], [1e-3], [1e-3]]},
    }
    failures = {"both": {}, "one": {"torch": "no luck"}, "more": {}, "floor": {}}
    shown = table(replace(rpc.SUITE, cases=cases), contest.Outcome(samples, failures))
    eight, three = "8.00 ms (6.00 .. 9.00)", "3.00 ms (2.00 .. 3.00)"
    assert [re.split("  +", line) for line in shown.splitlines()] == [
        ["", "torch", "gradwire", "torch / gradwire", "aim", "gradwire / floor", "peer"],
        ["both", eight, three, "3.00 (2.00 .. 4.00)", "2.5", "1.50 (1.00 .. 1.50)"],
        ["one", "failed", three, "failed", "3 missed"],
        ["more", eight, eight, "1.00 (1.00 .. 1.00)", "3 missed", three],
        [""],
        ["each", "torch", "gradwire"],
        ["both", "800 µs (600 .. 900)", "300 µs (200 .. 300)"],
        ["one", "failed", "300 µs (200 .. 300)"],
        ["more", "800 µs (600 .. 900)", "800 µs (600 .. 900)", "300 µs (200 .. 300)"],
        [""],
        ["floor", "1.00 ms (1.00 .. 1.00)", "100 µs (100 .. 100)"],
    ]


def test_some_cases_can_be_chosen_and_their_floors_come_along() -> None:
    names = [case.name for case in rpc.SUITE.only("16 MB").cases]
    assert [name for name in names if not name.startswith("echo")] == [
        "copy of 16 MB, once",
        "bare TCP socket, 16 MB there and back",
    ]
    assert rpc.SUITE.only("") == rpc.SUITE
    done = run("-m", "gradwire", "bench", "rpc", "--only", "no such words")
    assert done.returncode == 2
    assert "rpc has no case with 'no such words' in its name" in done.stderr
    assert all(case.name in done.stderr for case in rpc.SUITE.cases)


def test_an_unknown_suite_is_refused() -> None:
    command = [sys.executable, "-m", "gradwire", "bench", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'nothing'" in done.stderr


#: In a process of its own; see above.
PROGRAMS = """
import json
from dataclasses import replace
from gradwire.bench import contest, programs

if __name__ == "__main__":
    cases = (
        programs.case("some", programs.Program("first_steps", 2, 3)),
        programs.case("none", programs.Program("none", 1, 1)),
    )
    outcome = contest.hold(replace(programs.SUITE, cases=cases), rounds=1, quick=True)
    print(json.dumps([outcome.samples, outcome.failures]))
"""


def test_programs_are_measured_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "trial.py").write_text(PROGRAMS)
    done = run("trial.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    samples, failures = json.loads(done.stdout)
    assert all(0 < seconds < 10 for [[seconds]] in samples["some"].values())
    assert "there is no script" in failures["none"]["gradwire"]
    in_suite = [case.measure.args[0].name for case in programs.SUITE.cases]
    assert sorted(in_suite) == sorted(path.stem for path in EXAMPLES.glob("*.py"))
