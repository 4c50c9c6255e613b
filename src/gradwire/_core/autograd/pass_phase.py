"""The phases of a backward pass on one worker, and the transitions between them."""

from __future__ import annotations

from enum import IntEnum


class PassPhase(IntEnum):
    """How far a backward pass has got on one worker.

    KNOWN ──> BEGUN ──> COMMITTED ──> SUCCEEDED
      │         │
      └─────────┴─────> FAILING ────> FAILED
    """

    #: Another worker has told this worker that the pass exists.
    KNOWN = 0
    #: This worker plans its part of the pass, or has planned it.
    BEGUN = 1
    #: The pass has succeeded on all workers, and can no longer fail.
    COMMITTED = 2
    #: The gradients of the pass are visible on this worker.
    SUCCEEDED = 3
    #: The pass was given up on this worker. A thread is about to tell the other workers.
    FAILING = 4
    #: The pass was given up, and the other workers were told.
    FAILED = 5


#: The phases that may follow each phase.
NEXT_PHASES: dict[PassPhase, tuple[PassPhase, ...]] = {
    PassPhase.KNOWN: (PassPhase.BEGUN, PassPhase.FAILING),
    PassPhase.BEGUN: (PassPhase.COMMITTED, PassPhase.FAILING),
    PassPhase.COMMITTED: (PassPhase.SUCCEEDED,),
    PassPhase.SUCCEEDED: (),
    PassPhase.FAILING: (PassPhase.FAILED,),
    PassPhase.FAILED: (),
}
