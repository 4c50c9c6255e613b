"""The benchmarks run. These tests measure nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradwire.bench import (
    autograd,
    cases,
    competitors,
    plots,
    process_groups,
    programs,
    rpc,
    scale,
    side_by_side,
    versions,
)
from gradwire.bench.tables import table
from gradwire.bench.timing import microseconds, milliseconds

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "torch"
SMALL = [
    case
    for case in rpc.SUITE.cases
    if " MB" not in case.name and " at a time" not in case.name and case.contestants != rpc.TCP
]


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


#: In a process of its own, which must not import torch. The contestants import these functions.
TRIAL = """
import json, os, sys, threading
from dataclasses import replace
from pathlib import Path
import gradwire
from gradwire.bench import cases, rpc, side_by_side

def fail(tools, count):
    raise ValueError("on purpose")

def die(tools, count):
    os._exit(1)

def hang(tools, count):
    threading.Event().wait()

def work(tools, count):
    assert "RANK" not in os.environ, "its workers would take over its rank and share of the cores"
    return [1.0] * count

def cannot_start(rank):
    os._exit(1)

def main():
    names = sys.argv[1:]
    small = replace(rpc.SUITE, cases=tuple(c for c in rpc.SUITE.cases if c.name in names))
    outcome = side_by_side.run(small, rounds=2, quick=True)
    assert not any(outcome.failures.values()), outcome.failures
    print(json.dumps(outcome.samples))

    faulty = [
        cases.Case(f.__name__, f, 1, str, contestants=("machine",), time_limit=limit)
        for f, limit in [(fail, 60), (die, 60), (hang, 0.1), (work, 60)]
    ]
    [machine] = [c for c in rpc.SUITE.contestants if c.name == "machine"]
    outcome = side_by_side.run(cases.Suite("", (machine,), tuple(faulty)), 2, False)
    print(json.dumps([outcome.samples, outcome.failures]))

    restarted = replace(machine, name="restarted", restart_each_turn=True)
    both = restarted, replace(restarted, name="faulty", join=cannot_start)
    case = replace(faulty[-1], contestants=("restarted", "faulty"))
    suite = cases.Suite("", both, (case, replace(case, name="more")))
    outcome = side_by_side.run(suite, 2, False)
    print(json.dumps([outcome.samples, outcome.failures]))
    assert "torch" not in sys.modules
"""


def test_contestants_take_turns_and_one_that_fails_does_not_stop_the_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "trial.py").write_text(TRIAL)
    names = [case.name for case in SMALL]
    done = run("-c", "import trial; trial.main()", *names, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    samples, (faulty, failures), (restarted, failed_to_start) = map(
        json.loads, done.stdout.splitlines()
    )
    for case in SMALL:
        assert list(samples[case.name]) == list(case.contestants)
        for rounds in samples[case.name].values():
            assert [len(samples) for samples in rounds] == [case.quick_count] * 2
    assert "ValueError: on purpose" in failures["fail"]["machine"]
    assert failures["die"] == {"machine": "machine, die: its process died; see above"}
    assert failures["hang"] == {"machine": "machine, hang: no answer after 0.1 s"}
    assert faulty["work"] == {"machine": [[1.0], [1.0]]}
    assert restarted["work"] == restarted["more"] == {"restarted": [[1.0], [1.0]], "faulty": []}
    reason = {"faulty": "faulty, process 0, starting: its process died; see above"}
    assert failed_to_start["work"] == failed_to_start["more"] == reason


#: Reports which gradwire and which benchmarks the workers have imported.
SOURCES = """
import json
from dataclasses import replace
import gradwire
from gradwire.bench import rpc, side_by_side, versions

def paths():
    import gradwire.worker, gradwire.bench.rpc
    return [gradwire.__file__, gradwire.worker.__file__, gradwire.bench.rpc.__file__]

def ask(caller, count):
    return [paths(), caller.call(paths)]

def main():
    suite = versions.compare_versions(rpc.SUITE, "checkout")
    suite = replace(suite, cases=(replace(suite.cases[0], measure=ask),))
    outcome = side_by_side.run(suite, 1, True)
    [samples] = outcome.samples.values()
    print(json.dumps([paths(), samples, outcome.failures]))
"""


def test_each_version_imports_its_own_modules(tmp_path: Path) -> None:
    """The measuring code is the same for both."""
    (tmp_path / "trial.py").write_text(SOURCES)
    shutil.copytree(ROOT / "src" / "gradwire", tmp_path / "checkout" / "src" / "gradwire")
    done = run("-c", "import trial; trial.main()", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    [package, worker, bench], samples, failures = json.loads(done.stdout)
    assert not any(failures.values())
    before = [
        str(tmp_path / "checkout" / "src" / Path(path).relative_to(ROOT / "src"))
        for path in (package, worker)
    ]
    assert samples == {"before": [[[*before, bench]] * 2], "now": [[[package, worker, bench]] * 2]}


def test_a_version_can_be_compared_with_itself() -> None:
    options = ["--quick", "--rounds", "1", "--against", str(ROOT)]
    for suite, case in (("rpc", "64 KB"), ("autograd", "calls back")):
        done = run("-m", "gradwire", "bench", suite, *options, "--only", case)
        assert (done.returncode, done.stderr) == (0, "")
        header = next(line for line in done.stdout.splitlines() if "now" in line)
        assert header.split("  ")[-1].strip() == "before / now"
        assert "slower by more than 5%" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["rpc", "--against", "nowhere"], "nowhere is no checkout of gradwire"),
        (["scale", "--against", str(ROOT)], "--against measures autograd and rpc, not scale"),
        (["rpc", "--against", str(ROOT), "--competitors"], "no --competitors"),
    ],
    ids=["no checkout", "another suite", "competitors"],
)
def test_a_wrong_comparison_is_refused(arguments: list[str], reason: str) -> None:
    done = run("-m", "gradwire", "bench", *arguments)
    assert done.returncode == 2
    assert reason in done.stderr


def test_slower_cases_are_named() -> None:
    suite = versions.compare_versions(rpc.SUITE, str(ROOT))
    slower, faster, failed = (
        replace(suite.cases[0], name=name) for name in ("slower", "faster", "failed")
    )
    before, now = [[1e-3], [1e-3], [1e-3]], [[1.02e-3], [1.06e-3], [1.2e-3]]
    samples = {
        "slower": {"before": before, "now": now},
        "faster": {"before": now, "now": before},
        "failed": {"before": [], "now": now},
    }
    failures = {"slower": {}, "faster": {}, "failed": {"before": "on purpose"}}
    outcome = side_by_side.Outcome(samples, failures)
    shown = versions.slower_rows(replace(suite, cases=(slower, faster, failed)), outcome)
    assert shown.splitlines() == ["slower by more than 5%:", "  slower: +6% (+2% .. +20%)"]
    shown = versions.slower_rows(replace(suite, cases=(faster,)), outcome)
    assert shown == "no case is slower by more than 5%"


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


def test_a_group_returns_the_results_of_its_processes_or_raises_the_first_failure() -> None:
    def fail(rank: int, barrier: process_groups.Barrier) -> None:
        if rank == 1:
            raise ValueError("on purpose")
        barrier()

    def die(rank: int, barrier: process_groups.Barrier) -> None:
        if rank == 1:
            os._exit(1)
        barrier()

    assert process_groups.run_in_group(3, lambda rank, barrier: (rank, barrier())) == [
        (0, None),
        (1, None),
        (2, None),
    ]
    with pytest.raises(RuntimeError, match="ValueError: on purpose"):
        process_groups.run_in_group(2, fail)
    with pytest.raises(RuntimeError, match="died"):
        process_groups.run_in_group(2, die)


#: In a process of its own: torch's RPC must not be forked from a process that has threads.
GROUPS = """
from functools import partial
from gradwire.bench import memory_use, process_groups, rpc, scale

scale.BATCH, scale.WINDOW, memory_use.OPEN, memory_use.OPEN_BEFORE = 5, 20, 20, 5

def call(contestant, rank, barrier):
    with contestant.join(rank) as caller:
        return rpc.noop_calls(caller, 3) if rank == 0 else []

if __name__ == "__main__":
    for package in ("gradwire", "torch.distributed"):
        with scale.ready_to_fork(package, 0) as tools:
            for measure, count in (
                (scale.caller_cpu, 2),
                (scale.callee_cpu, 2),
                (partial(scale.start_up, 2), 2),
                (partial(scale.calls_of_many, 2), 1),
                (partial(scale.slowest_calls_of_many, 2), 1),
                (partial(scale.calls_to_many, 2), 2),
                (partial(scale.backward, 2), 2),
                (memory_use.memory_of_contexts, 1),
                (memory_use.memory_of_calls, 1),
            ):
                samples = measure(tools, count)
                assert len(samples) == count, (package, measure, samples)
    for contestant in rpc.SUITE.contestants:
        if contestant.name in rpc.TCP:
            results = process_groups.run_in_group(2, partial(call, contestant))
            assert [len(samples) for samples in results] == [3, 0]
            print(contestant.name)
"""


def test_groups_measure_how_costs_grow_and_calls_over_tcp(tmp_path: Path) -> None:
    (tmp_path / "trial.py").write_text(GROUPS)
    done = run("-W", "ignore", "trial.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == list(rpc.TCP)


def test_competitors_are_measured_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(competitors, "find_spec", lambda module: module == "ray")
    suite, missing = competitors.add_competitors(rpc.SUITE)
    assert missing == ["Monarch is not installed: pip install torchmonarch"]
    assert [c.name for c in suite.contestants if c.restart_each_turn] == ["Ray"]
    for case in suite.cases:
        assert ("Ray" in case.contestants) == case.open_to_competitors


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs gradwire[plots]")
def test_samples_are_drawn(tmp_path: Path) -> None:
    drawn = [case for case in scale.SUITE.cases if case.point]
    measured = {
        "cases": {c.name: {"plot": c.point.plot, "x": c.point.x} for c in drawn if c.point},
        "samples": {c.name: {"torch": [[2.0], [3.0]], "gradwire": [[1.0], [1.0]]} for c in drawn},
        "failures": {c.name: {} for c in drawn},
    }
    (tmp_path / "scale.json").write_text(json.dumps(measured))
    done = run("-m", "gradwire", "plot", "scale.json", "--into", "plots", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {p.file for p in plots.PLOTS}
    assert ">gradwire</text>" in (tmp_path / "plots" / "latency.svg").read_text()


def test_a_table_compares_the_contestants_round_by_round() -> None:
    case = cases.Case("", rpc.noop_calls, 1, milliseconds, steps=cases.Steps(10, microseconds))
    compared = (
        replace(case, name="both", aim=2.5, floor=cases.Floor("floor", 2)),
        replace(case, name="one", aim=3),
        replace(case, name="more", aim=3, contestants=("torch", "gradwire", "Ray")),
        replace(case, name="floor", contestants=("machine",)),
    )
    torch, gradwire = [[8e-3], [6e-3], [9e-3]], [[2e-3], [3e-3], [3e-3]]
    samples = {
        "both": {"torch": torch, "gradwire": gradwire},
        "one": {"torch": [[8e-3]], "gradwire": gradwire},
        "more": {"torch": torch, "gradwire": torch, "Ray": gradwire},
        "floor": {"machine": [[1e-3], [1e-3], [1e-3]]},
    }
    failures = {"both": {}, "one": {"torch": "on purpose"}, "more": {}, "floor": {}}
    shown = table(replace(rpc.SUITE, cases=compared), side_by_side.Outcome(samples, failures))
    eight, three = "8.00 ms (6.00 .. 9.00)", "3.00 ms (2.00 .. 3.00)"
    assert [re.split("  +", line) for line in shown.splitlines()] == [
        ["", "torch", "gradwire", "torch / gradwire", "aim", "gradwire / floor", "Ray"],
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


def test_cases_are_chosen_by_name_together_with_their_floors() -> None:
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


#: In a process of its own: it starts processes that die with it.
PROGRAMS = """
import json
from dataclasses import replace
from gradwire.bench import programs, side_by_side

if __name__ == "__main__":
    both = (
        programs.case("some", programs.Program("first_steps", 2, 3)),
        programs.case("none", programs.Program("none", 1, 1)),
    )
    outcome = side_by_side.run(replace(programs.SUITE, cases=both), rounds=1, quick=True)
    print(json.dumps([outcome.samples, outcome.failures]))
"""


def test_the_example_programs_are_measured_unchanged(tmp_path: Path) -> None:
    (tmp_path / "trial.py").write_text(PROGRAMS)
    done = run("trial.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    samples, failures = json.loads(done.stdout)
    assert all(0 < seconds < 10 for [[seconds]] in samples["some"].values())
    assert "there is no script" in failures["none"]["gradwire"]
    in_suite = [case.measure.args[0].name for case in programs.SUITE.cases]
    assert sorted(in_suite) == sorted(path.stem for path in EXAMPLES.glob("*.py"))
