"""Test gradwire with random programs: their gradients across workers must equal those in one
process.

    python -m gradwire.testing.fuzz --programs 1000 --workers 3 [--processes] [--seed 0]

A program is data. It consists of bodies, which are lists of steps. Most steps are operations on
tensors, or calls. A call runs another body on some worker. A backend defines how calls are made.

| module | what it does |
|---|---|
| `programs` | defines the data types of programs |
| `operations` | defines the operations on tensors |
| `generator` | makes a program from a seed |
| `running` | runs bodies |
| `local` | has the backend that makes calls in one process; its results are the reference |
| `distributed` | has the backend that makes calls to other workers |
| `comparing` | runs a program with both backends, and shrinks programs that fail |
| `worker_groups` | runs many programs in forked processes, and reports those that hang |
| `command` | has the command line |
"""

from gradwire.testing.fuzz.comparing import Mismatch, check
from gradwire.testing.fuzz.generator import make_program
from gradwire.testing.fuzz.programs import Program
from gradwire.testing.fuzz.worker_groups import Task, in_this_process, run_groups

__all__ = [
    "Mismatch",
    "Program",
    "Task",
    "check",
    "in_this_process",
    "make_program",
    "run_groups",
]
