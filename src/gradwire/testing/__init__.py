"""Tools to test programs that use gradwire, and to test transports. They do not need pytest.

| name | what it does |
|---|---|
| `cluster` | runs a whole group of workers in one process |
| `transports_named` | makes a transport for the workers of a cluster |
| `Fault`, `FaultyTransport` | lose messages, deliver them late or twice, or break a connection |
| `acting_as` | lets the functions of `gradwire.rpc` act for one of the workers |
| `open_contexts` | counts the autograd contexts that were not released |
| `waiting_at_gates` | counts the threads that wait for a gradient in a backward pass |
| `hide_gpus` | lets a process and its children run as on a machine without GPUs |
| `runtime_of` | returns the internal `Runtime` of a worker |
| module `transport_checks` | has the checks that every transport must pass |
| module `connection_pairs` | opens two connected ends of a transport, for these checks |
| module `fuzz` | compares the gradients of random programs with those in one process |
| module `soak` | checks that many contexts and calls leave nothing behind |

    >>> with cluster(2) as (a, b):
    ...     a.rpc_sync("worker1", max, args=(1, 2))
    2
"""

from gradwire._core.gpus import hide_gpus
from gradwire.testing.cluster import cluster, transports_named
from gradwire.testing.faults import Fault, FaultyTransport
from gradwire.testing.inspection import (
    acting_as,
    open_contexts,
    runtime_of,
    waiting_at_gates,
)

__all__ = [
    "Fault",
    "FaultyTransport",
    "acting_as",
    "cluster",
    "hide_gpus",
    "open_contexts",
    "runtime_of",
    "transports_named",
    "waiting_at_gates",
]
