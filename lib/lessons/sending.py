"""A function of a notebook, as the processes of a job can make it.

They can't import a notebook. So they get the function itself, and what it uses of its notebook:
helpers, classes, constants and imports.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any


def parcel_of(function: Callable) -> bytes:
    """Pack a function with all that it uses.

    Raises:
        TypeError: it, or a value that it uses, can't be sent.
    """
    try:
        return _packed(function)
    except Exception as error:
        for name, value in _used_by(inspect.unwrap(function)).items():
            try:
                _packed(value)
            except Exception as reason:
                raise TypeError(f"`{name}` can't be sent: {_words(reason)}") from error
        raise TypeError(f"it can't be sent: {_words(error)}") from error


def function_of(parcel: bytes) -> Callable:
    """The function that `parcel_of` packed."""
    return pickle.loads(parcel)


def _packed(value: Any) -> bytes:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            # else by name, which processes do not find in their own `__main__`
            if isinstance(value, functools._lru_cache_wrapper):
                return _cached, (value.__wrapped__, value.cache_parameters())
            return super().reducer_override(value)

    packed = io.BytesIO()
    Pickler(packed).dump(value)
    return packed.getvalue()


def _cached(function: Callable, parameters: dict[str, Any]) -> Callable:
    return functools.lru_cache(**parameters)(function)


def _used_by(function: Any) -> dict[str, Any]:
    """The values that a function looks up outside of itself, by name."""
    try:
        found = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return {}
    return {**found.globals, **found.nonlocals}


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]
