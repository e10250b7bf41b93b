"""A function of a notebook, as the processes of a job can make it.

They can't import a notebook. So they get the function itself, and what it uses of its notebook:
helpers, classes, constants and imports.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any


def parcel_of(function: Callable) -> bytes:
    """Pack a function with all that it uses.

    Raises:
        TypeError: it, or a value that it uses, can't be sent.
    """
    import cloudpickle

    try:
        return cloudpickle.dumps(function)
    except Exception as error:
        for name, value in _used_by(inspect.unwrap(function)).items():
            try:
                cloudpickle.dumps(value)
            except Exception as reason:
                raise TypeError(f"`{name}` can't be sent: {_words(reason)}") from error
        raise TypeError(f"it can't be sent: {_words(error)}") from error


def function_of(parcel: bytes) -> Callable:
    """The function that `parcel_of` packed."""
    return pickle.loads(parcel)


def _used_by(function: Any) -> dict[str, Any]:
    """The values that a function looks up outside of itself, by name."""
    try:
        found = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return {}
    return {**found.globals, **found.nonlocals}


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]
