"""The benchmarks run; how fast is for them to say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradwire.bench import autograd, contest, programs, rpc
from gradwire.bench.timing import microseconds, milliseconds

EXAMPLES = Path(__file__).parent.parent / "examples" / "torch"
SMALL = [c for c in rpc.SUITE.cases if " MB" not in c.name and " at a time" not in c.name]

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
    return [1.0] * count

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
    outcome = contest.hold(contest.Suite("", rpc.SUITE.contestants[2:], tuple(cases)), 2, False)
    print(json.dumps([outcome.samples, outcome.failures]))
    assert not multiprocessing.active_children()
    assert "torch" not in sys.modules
"""


def test_contestants_take_turns_and_one_that_fails_at_a_case_goes_on_with_the_next(
    tmp_path: Path,
) -> None:
    (tmp_path / "trial.py").write_text(TRIAL)
    done = subprocess.run(
        [sys.executable, "trial.py", *[case.name for case in SMALL]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    samples, (others, failures) = map(json.loads, done.stdout.splitlines())
    for case in SMALL:
        assert list(samples[case.name]) == list(case.contestants)
        for rounds in samples[case.name].values():
            assert [len(samples) for samples in rounds] == [case.quick_count] * 2
    assert "ValueError: no luck" in failures["fail"]["machine"]
    assert failures["die"] == {"machine": "machine, die: its process died; see above"}
    assert failures["hang"] == {"machine": "machine, hang: no answer after 0.1 s"}
    assert others["work"] == {"machine": [[1.0], [1.0]]}


def test_gradients_are_measured_in_every_case(tmp_path: Path) -> None:
    file = tmp_path / "samples.json"
    options = ["autograd", "--quick", "--rounds", "1", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", "bench", *options],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
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


def test_a_table_compares_the_contestants_round_by_round() -> None:
    shown = {"show": milliseconds, "steps": contest.Steps(1000, microseconds)}
    cases = (
        replace(SMALL[0], name="both", **shown),
        replace(SMALL[0], name="one", **shown),
        replace(SMALL[-1], name="floor", **shown),
    )
    samples = {
        "both": {"torch": [[8e-3], [6e-3], [9e-3]], "gradwire": [[2e-3], [3e-3], [3e-3]]},
        "one": {"torch": [[8e-3]], "gradwire": [[2e-3], [3e-3], [3e-3]]},
        "floor": {"machine": [[1e-3], [1e-3], [1e-3]]},
    }
    failures = {"both": {}, "one": {"torch": "no luck"}, "floor": {}}
    table = contest.table(replace(rpc.SUITE, cases=cases), contest.Outcome(samples, failures))
    assert [re.split("  +", line) for line in table.splitlines()] == [
        ["", "torch", "gradwire", "torch / gradwire"],
        ["both", "8.00 ms (6.00 .. 9.00)", "3.00 ms (2.00 .. 3.00)", "3.00 (2.00 .. 4.00)"],
        ["one", "failed", "3.00 ms (2.00 .. 3.00)", "failed"],
        [""],
        ["each", "torch", "gradwire"],
        ["both", "8 µs (6 .. 9)", "3 µs (2 .. 3)"],
        ["one", "failed", "3 µs (2 .. 3)"],
        [""],
        ["floor", "1.00 ms (1.00 .. 1.00)", "1 µs (1 .. 1)"],
    ]


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
    done = subprocess.run(
        [sys.executable, "trial.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    samples, failures = json.loads(done.stdout)
    assert all(0 < seconds < 10 for [[seconds]] in samples["some"].values())
    assert "there is no script" in failures["none"]["gradwire"]
    in_suite = [case.measure.args[0].name for case in programs.SUITE.cases]
    assert sorted(in_suite) == sorted(path.stem for path in EXAMPLES.glob("*.py"))
