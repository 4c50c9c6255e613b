"""Lambdas and local functions, sent by value."""

from __future__ import annotations

import pickle
from typing import Any

from torch import Tensor

from gradwire.errors import EncodingError


def closure_pickler() -> type[pickle.Pickler]:
    """A pickler that sends lambdas and local functions and classes by value."""
    try:
        import cloudpickle
    except ImportError as error:
        raise EncodingError(
            'the option closures=True needs cloudpickle: pip install "gradwire[closures]"'
        ) from error

    class ClosurePickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            reducers = self.dispatch_table
            if type(obj) in reducers or isinstance(obj, Tensor):
                return reducers[type(obj)](obj)
            return super().reducer_override(obj)

    return ClosurePickler
