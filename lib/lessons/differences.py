"""Compare an attempt's result with the expected one, and say where they differ.

Numbers are equal up to rounding where one of them is a float, also inside lists and dicts; tuples
are equal to lists. Nothing here raises, whatever a reader's function returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import numpy as np

# For values of tensors and floats: a few roundings of float32.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
# Larger tensors are shown by their shape.
SHOWN_VALUES = 16
# Longer texts are cut.
SHOWN_LETTERS = 2000
MISSING = object()


def equal(yours: Any, expected: Any) -> bool:
    """Return whether a result is right; what can't be compared is not."""
    try:
        return _equal(yours, expected)
    except Exception:
        return False


def _equal(yours: Any, expected: Any) -> bool:
    if are_arrays(yours, expected):
        return array_difference(_array(yours), _array(expected)) is None
    if is_array(expected):
        return False
    if is_array(yours):
        yours = yours.tolist()
    if isinstance(yours, Mapping) and isinstance(expected, Mapping):
        return yours.keys() == expected.keys() and all(
            _equal(yours[key], value) for key, value in expected.items()
        )
    if isinstance(yours, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(yours) == len(expected) and all(map(_equal, yours, expected))
    if type(yours) is type(expected) and type(yours).__eq__ is object.__eq__:
        # objects that are equal to themselves alone, such as a toy's losses, by what they show
        return repr(yours) == repr(expected)
    return bool(yours == expected)


def is_array(value: Any) -> bool:
    """Return whether `value` is a tensor or an array; torch itself need not be loaded."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "tolist")


def are_arrays(yours: Any, expected: Any) -> bool:
    """Return whether to compare up to rounding; two ints are compared exactly.

    A number counts as an array of no dimensions, but where a tensor is expected it is none.
    """
    if is_array(expected) and not is_array(yours):
        return False
    is_inexact = any(is_array(value) or _is_float(value) for value in (yours, expected))
    return is_inexact and all(is_array(v) or isinstance(v, (int, float)) for v in (yours, expected))


def _is_float(value: Any) -> bool:
    # one with a comparison of its own, as `Close`, keeps it
    return isinstance(value, float) and type(value).__eq__ is float.__eq__


def _array(value: Any) -> np.ndarray:
    """A number, an array or a tensor of any kind as an array of float64."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value if value.is_complex() else value.double()).numpy()
    if np.iscomplexobj(value):
        raise TypeError("complex numbers")
    return np.asarray(value, dtype=np.float64)


def array_difference(yours: np.ndarray, expected: np.ndarray) -> str | None:
    """The shape or the first value in which `yours` differs; None where they are equal.

    Equal up to rounding; NaN equals NaN.
    """
    if yours.shape != expected.shape:
        return f"the result: yours has shape {yours.shape}, expected {expected.shape}"
    wrong = ~np.isclose(yours, expected, **TOLERANCE, equal_nan=True)
    if not wrong.any():
        return None
    place = tuple(np.argwhere(wrong)[0].tolist())
    where = f"position {place}" if place else "result"
    text = f"{where}: yours {yours[place]:.6g}, expected {expected[place]:.6g}"
    return f"{text} ({wrong.sum()} of {wrong.size} values differ)" if place else text


def first_difference(yours: Any, expected: Any) -> str:
    """The first value in which a result that is not equal to the expected one differs from it."""
    try:
        return _first_difference(yours, expected)
    except Exception as error:
        return f"it returned {shown(yours)}, which can't be compared: {type(error).__name__}"


def _first_difference(yours: Any, expected: Any) -> str:
    if are_arrays(yours, expected):
        return array_difference(_array(yours), _array(expected))  # type: ignore[return-value]
    if yours is None:
        return f"it returned None (is a `return` missing?); expected {shown(expected)}"
    if not is_array(expected) and is_array(yours):
        yours = yours.tolist()
    for kind in (Mapping, (list, tuple)):
        if isinstance(yours, kind) and isinstance(expected, kind):
            break
    else:
        if type(yours) is type(expected):
            return f"result: yours {shown(yours)}, expected {shown(expected)}"
        name = type(yours).__name__
        right = shown(expected)
        if is_array(expected) and not right.startswith(("tensor", "<")):
            right = f"tensor({right})"
        return f"it returned {shown(yours)}, of type {name}; expected {right}"
    if isinstance(expected, Mapping):
        strange = expected and {*map(_kind, yours)} - {*map(_kind, expected)}
        if strange and len(repr(yours)) <= 80:
            return f"it returned {yours!r}, with keys of another kind; expected {shown(expected)}"
        keys = [*expected, *(key for key in yours if key not in expected)]
        places = [(repr(key), yours.get(key, MISSING), expected.get(key, MISSING)) for key in keys]
    else:
        pairs = enumerate(zip_longest(yours, expected, fillvalue=MISSING))
        places = [(f"position {i}", mine, right) for i, (mine, right) in pairs]
    place, mine, right = next(place for place in places if not equal(place[1], place[2]))
    return f"{place}: yours {shown(mine)}, expected {shown(right)}"


def _kind(key: Any) -> Any:
    return tuple(map(type, key)) if isinstance(key, tuple) else type(key)


def shown(value: Any) -> str:
    """A value as a verdict shows it."""
    if value is MISSING:
        return "nothing"
    try:
        text = _array_shown(value) if is_array(value) else repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}…"


def _array_shown(value: Any) -> str:
    if (array := _array(value)).size > SHOWN_VALUES:
        return f"<tensor of shape {array.shape}>"
    if not array.ndim:
        return f"{array.item():.6g}"
    form: Any = {"float_kind": lambda number: f"{number:.6g}"}
    values = np.array2string(array, separator=", ", formatter=form, max_line_width=1000)
    return f"tensor({' '.join(values.split())})"
