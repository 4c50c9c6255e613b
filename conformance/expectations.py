"""The tests that gradwire does not pass, with the reasons."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).with_name("expected_differences.toml")


@dataclass(frozen=True)
class Difference:
    #: "better": gradwire does more than the test allows. "impossible": torch offers no way to do
    #: it.
    kind: str
    reason: str


def differences() -> dict[str, Difference]:
    """Return why gradwire does not pass a test, by the name of the test. Raise ValueError if an
    entry in the file lacks a kind or a reason."""
    by_test = {}
    for group, tests in tomllib.loads(FILE.read_text()).items():
        for name, entry in tests.items():
            if entry["kind"] not in ("better", "impossible") or len(entry["reason"].split()) < 5:
                raise ValueError(f"{FILE.name}: {group}.{name} needs a kind and a reason")
            by_test[f"{group}.{name}"] = Difference(entry["kind"], entry["reason"])
    return by_test
