"""The benchmarks run; how fast is for them to say."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from gradwire.bench import contest, rpc

SMALL = [c for c in rpc.SUITE.cases if " MB" not in c.name and " at a time" not in c.name]

#: In a process of its own: multiprocessing keeps helpers until the process that used it ends.
TRIAL = """
import json, multiprocessing, sys
from dataclasses import replace
from gradwire.bench import contest, rpc

def fail(tools, count):
    raise ValueError("no luck")

if __name__ == "__main__":
    names = sys.argv[1:]
    small = replace(rpc.SUITE, cases=tuple(c for c in rpc.SUITE.cases if c.name in names))
    print(json.dumps(contest.hold(small, rounds=2, quick=True)))

    failing = contest.Case("failing", fail, 1, str, contestants=("machine",))
    try:
        contest.hold(contest.Suite("", rpc.SUITE.contestants[2:], (failing,)), 1, False)
    except contest.BenchError as error:
        print(json.dumps(str(error)))
    assert not multiprocessing.active_children()
    assert "torch" not in sys.modules
"""


def test_contestants_take_turns_fail_aloud_and_leave_no_process(tmp_path: Path) -> None:
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
    samples, failure = map(json.loads, done.stdout.splitlines())
    for case in SMALL:
        assert list(samples[case.name]) == list(case.contestants)
        for rounds in samples[case.name].values():
            assert [len(samples) for samples in rounds] == [case.quick_count] * 2
    assert "machine, failing:" in failure
    assert "ValueError: no luck" in failure


def test_a_table_compares_the_contestants_round_by_round() -> None:
    cases = (SMALL[0], replace(SMALL[-1], name="floor"))
    samples = {
        SMALL[0].name: {"torch": [[8e-6], [6e-6], [9e-6]], "gradwire": [[2e-6], [3e-6], [3e-6]]},
        "floor": {"machine": [[1e-6], [1e-6], [1e-6]]},
    }
    _, compared, _, alone = contest.table(replace(rpc.SUITE, cases=cases), samples).splitlines()
    assert compared.split("nothing")[1].split("  ")[1:] == [
        "8 µs (6 .. 9)",
        "3 µs (2 .. 3)",
        "3.00 (2.00 .. 4.00)",
    ]
    assert alone == "floor  1 µs (1 .. 1)"


def test_an_unknown_suite_is_refused() -> None:
    command = [sys.executable, "-m", "gradwire", "bench", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'nothing'" in done.stderr
