"""gradwire: call functions on other PyTorch workers and differentiate through the calls."""

from gradwire import errors, rpc
from gradwire._version import __version__
from gradwire.agent.futures import Future
from gradwire.config import Options
from gradwire.errors import GradwireError
from gradwire.ids import WorkerInfo
from gradwire.refs.rref import RRef
from gradwire.worker import Worker

__all__ = [
    "Future",
    "GradwireError",
    "Options",
    "RRef",
    "Worker",
    "WorkerInfo",
    "__version__",
    "errors",
    "rpc",
]
