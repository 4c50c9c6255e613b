"""Sending lambdas and local functions by value: their code travels, not only their name."""

from __future__ import annotations

import pickle
from typing import Any

from torch import Tensor

from gradwire.errors import EncodingError


def closure_pickler() -> type[pickle.Pickler]:
    """Return a pickler class that sends lambdas, local functions and local classes by value."""
    try:
        import cloudpickle
    except ImportError as error:
        raise EncodingError(
            'the option closures=True needs cloudpickle: pip install "gradwire[closures]"'
        ) from error

    class ClosurePickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            # The pickler calls this method before it looks into its dispatch table. So if the table
            # has a reducer for the object, this method must call that reducer.
            reducers = self.dispatch_table
            if type(obj) in reducers or isinstance(obj, Tensor):
                return reducers[type(obj)](obj)
            return super().reducer_override(obj)

    return ClosurePickler
