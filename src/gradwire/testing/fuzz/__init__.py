"""Random programs whose gradients across workers must equal those of one process.

    python -m gradwire.testing.fuzz --programs 1000 --workers 3 [--processes] [--seed 0]

A program is data (`programs`), made from a seed (`generator`), of `operations` and calls. `running`
runs its parts; `local` says what a call means in one process and is the reference, `distributed`
what it means on workers; `comparing` does both and cuts down programs that fail; `crews` runs many
in forked processes and notices when one hangs.
"""

from gradwire.testing.fuzz.comparing import Mismatch, check
from gradwire.testing.fuzz.crews import Task, in_this_process, run_crews
from gradwire.testing.fuzz.generator import make_program
from gradwire.testing.fuzz.programs import Program

__all__ = [
    "Mismatch",
    "Program",
    "Task",
    "check",
    "in_this_process",
    "make_program",
    "run_crews",
]
