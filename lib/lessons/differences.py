"""Compare an attempt's result with the expected one, and name the first value that differs.

Numbers are equal up to rounding where one of them is a float, also inside lists and dicts; tuples
are equal to lists. Nothing here raises, whatever a reader's function returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from types import FunctionType
from typing import Any

import numpy as np

# For values of tensors and floats: a few roundings of float32.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
# Larger tensors are shown by their shape.
SHOWN_VALUES = 16
# Longer texts are cut.
SHOWN_LETTERS = 2000
# A list in a list is shown as one value up to this length.
SHOWN_WHOLE = 60
MISSING = object()


class Named(dict):
    """Results by name; a difference is named "rank 0, step 1, m", without quotes."""


class AtMost(float):
    """A cost, expected as an upper bound: less is as right."""


def equal(yours: Any, expected: Any) -> bool:
    """Return whether a result is right; what can't be compared is not."""
    try:
        return _compare(yours, expected, "") is None
    except Exception:
        return False


def first_difference(yours: Any, expected: Any) -> str | None:
    """The first value in which a result differs from the expected one; None if it doesn't."""
    try:
        return _compare(yours, expected, "")
    except Exception as error:
        return f"it returned {shown(yours)}, which can't be compared: {type(error).__name__}"


def _compare(yours: Any, expected: Any, path: str) -> str | None:
    """What differs first, with its `path` from the result on, which is empty for all of it."""
    # numbers of NumPy's are numbers
    yours, expected = (v.item() if isinstance(v, np.generic) else v for v in (yours, expected))
    if isinstance(expected, AtMost):
        return None if yours <= expected else f"{path}: yours {yours:g}, at most {expected:g}"
    if _are_arrays(yours, expected):
        return _array_difference(_array(yours), _array(expected), path)
    if is_array(expected):
        return _unequal(yours, expected, path)
    if is_array(yours):
        yours = yours.tolist()
    both = yours, expected
    if all(isinstance(value, Mapping) for value in both):
        strange = expected and {*map(_kind, yours)} - {*map(_kind, expected)}
        if strange and not path and len(repr(yours)) <= 80:
            return f"it returned {yours!r}, with keys of another kind; expected {shown(expected)}"
        keys = [*expected, *(key for key in yours if key not in expected)]
        label = str if isinstance(expected, Named) else repr
        parts = [(label(key), yours.get(key, MISSING), expected.get(key, MISSING)) for key in keys]
    elif all(isinstance(value, (list, tuple)) for value in both):
        pairs = enumerate(zip_longest(*both, fillvalue=MISSING))
        parts = [(f"position {place}", mine, right) for place, (mine, right) in pairs]
    else:
        return None if _same(yours, expected) else _unequal(yours, expected, path)
    within = f"{path}, " if path else ""
    found = (_compare(mine, right, within + label) for label, mine, right in parts)
    first = next((words for words in found if words), None)
    # a short list is shown whole
    if first and path and _is_flat(expected) and max(map(len, map(shown, both))) <= SHOWN_WHOLE:
        return _unequal(yours, expected, path)
    return first


def _same(yours: Any, expected: Any) -> bool:
    if type(yours) is type(expected) and type(yours).__eq__ is object.__eq__:
        # objects that are equal to themselves alone, such as a toy's losses, by what they show
        return repr(yours) == repr(expected)
    return bool(yours == expected)


def _is_flat(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not any(
        isinstance(part, (Mapping, list)) or is_array(part) for part in value
    )


def is_array(value: Any) -> bool:
    """Return whether `value` is a tensor or an array; torch itself need not be loaded."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "tolist")


def _are_arrays(yours: Any, expected: Any) -> bool:
    """Whether to compare up to rounding; two ints are compared exactly.

    A number counts as an array of no dimensions, but where a tensor is expected it is none.
    """
    if is_array(expected) and not is_array(yours):
        return False
    is_inexact = any(is_array(value) or _is_float(value) for value in (yours, expected))
    return is_inexact and all(is_array(v) or isinstance(v, (int, float)) for v in (yours, expected))


def _is_float(value: Any) -> bool:
    # one with a comparison of its own keeps it
    return isinstance(value, float) and type(value).__eq__ is float.__eq__


def _array(value: Any) -> np.ndarray:
    """A number, an array or a tensor of any kind as an array of float64."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value if value.is_complex() else value.double()).numpy()
    if np.iscomplexobj(value):
        raise TypeError("complex numbers")
    return np.asarray(value, dtype=np.float64)


def _array_difference(yours: np.ndarray, expected: np.ndarray, path: str) -> str | None:
    """The shape or the first value that differs, up to rounding; NaN equals NaN."""
    if yours.shape != expected.shape:
        where = path or "the result"
        return f"{where}: yours has shape {yours.shape}, expected {expected.shape}"
    wrong = ~np.isclose(yours, expected, **TOLERANCE, equal_nan=True)
    if not wrong.any():
        return None
    place = tuple(np.argwhere(wrong)[0].tolist())
    where = ", ".join(filter(None, (path, f"position {place}" if place else "")))
    text = f"{where or 'result'}: yours {yours[place]:.6g}, expected {expected[place]:.6g}"
    return f"{text} ({wrong.sum()} of {wrong.size} values differ)" if place else text


def _unequal(yours: Any, expected: Any, path: str) -> str:
    right = shown(expected)
    if is_array(expected) and not right.startswith((_kind_of(expected), "<")):
        right = f"{_kind_of(expected)}({right})"
    if not path and yours is None:
        return f"it returned None (is a `return` missing?); expected {right}"
    if path or type(yours) is type(expected):
        return f"{path or 'result'}: yours {shown(yours)}, expected {right}"
    return f"it returned {shown(yours)}, of type {type(yours).__name__}; expected {right}"


def _kind(key: Any) -> Any:
    return tuple(map(type, key)) if isinstance(key, tuple) else type(key)


def _kind_of(array: Any) -> str:
    return "tensor" if hasattr(array, "detach") else "array"


def shown(value: Any) -> str:
    """A value as a verdict shows it."""
    if value is MISSING:
        return "nothing"
    if isinstance(value, FunctionType):
        return value.__name__
    try:
        text = _array_shown(value) if is_array(value) else repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}…"


def _array_shown(value: Any) -> str:
    if (array := _array(value)).size > SHOWN_VALUES:
        return f"<{_kind_of(value)} of shape {array.shape}>"
    if not array.ndim:
        return f"{array.item():.6g}"
    form: Any = {"float_kind": lambda number: f"{number:.6g}"}
    values = np.array2string(array, separator=", ", formatter=form, max_line_width=1000)
    return f"{_kind_of(value)}({' '.join(values.split())})"
