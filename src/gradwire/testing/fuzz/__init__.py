"""Test gradwire with random programs: their gradients across workers must equal those in one
process.

    python -m gradwire.testing.fuzz --programs 1000 --workers 3 [--processes] [--seed 0]

A program is data (`programs`) that `generator` makes from a seed, out of `operations` and calls. A
call runs a body, which is a list of steps, on some worker; `running` runs bodies. A backend defines
how calls are made: `local` runs everything in one process and is the reference, `distributed` runs
bodies on workers. `comparing` runs a program with both backends, and shrinks programs that fail.
`worker_groups` runs many programs in forked processes, and reports the programs that hang.
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
