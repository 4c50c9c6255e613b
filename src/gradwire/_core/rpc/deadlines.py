"""Deadlines of calls. A deadline is a time as `time.monotonic` returns it."""

from __future__ import annotations

#: The deadline of a call without a timeout, and also the number of seconds until that deadline.
FOREVER = float("inf")


def timeout_text(timeout: float) -> str:
    """Return torch's message for a call that took longer than `timeout` seconds."""
    return (
        f"RPC ran for more than set timeout ({timeout * 1000:.0f} ms) and will now be marked with "
        "an error"
    )
