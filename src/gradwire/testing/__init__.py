"""Tools for testing programs that use gradwire, and transports written for it. Needs no pytest.

`cluster` puts many workers in one process, `faults` makes a transport misbehave on purpose,
`transports` has the checks that every transport must pass.
"""

from gradwire.testing.faults import Fault, FaultyTransport
from gradwire.testing.workers import cluster, transports_named

__all__ = ["Fault", "FaultyTransport", "cluster", "transports_named"]
