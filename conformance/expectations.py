"""The tests that gradwire does not pass, and why."""

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
    #: "better": gradwire does more than the test allows. "cannot be": torch gives no way to it.
    kind: str
    reason: str


def differences() -> dict[str, Difference]:
    """Test -> why it is not passed. Each must have a kind and a reason."""
    found = {}
    for group, tests in tomllib.loads(FILE.read_text()).items():
        for name, said in tests.items():
            if said["kind"] not in ("better", "cannot be") or len(said["reason"].split()) < 5:
                raise ValueError(f"{FILE.name}: {group}.{name} needs a kind and a reason")
            found[f"{group}.{name}"] = Difference(said["kind"], said["reason"])
    return found
