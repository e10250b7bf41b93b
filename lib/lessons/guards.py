"""Sentences about what a notebook shows, each with the condition under which it is true.

    holds("The first call is the slowest.", lambda: times[0] > 2 * median(times[1:]))

is quiet where the condition is true of this run, and says so where it is not. `make notebooks`
stores no outputs in which a sentence fails, so a committed page proves what it says. At the small
sizes of tests each condition is also tried on spoiled measurements, where it must fail: one that is
true of anything says nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
from collections.abc import Callable, Mapping
from typing import Any

from lib.lessons.notebook import small

STRICT = "WORKBOOK_STRICT"
# Types of names that are no measurements; a condition may use them, and they are not spoiled.
CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


class GuardError(AssertionError):
    """A sentence of a notebook is not true of what the notebook shows."""


def holds(
    sentence: str,
    condition: Callable[[], Any],
    *,
    otherwise: str = "",
    always: bool = False,
) -> None:
    """Say that `sentence` is not true of this run, unless `condition()` is true.

    Args:
        sentence: one sentence about the outputs above, in Markdown.
        condition: takes no arguments and looks measurements up by their names in the notebook.
        otherwise: what a reader should make of it where it fails; timings on a busy machine do.
        always: it must hold on every machine and at every size, since it follows from the code.

    Raises:
        GuardError: it fails though it must hold `always` or the outputs are to be stored, or it is
            also true of spoiled measurements (tried at small sizes only).
    """
    from IPython.display import Markdown, display

    outcome = bool(condition())
    if not outcome and (always or os.environ.get(STRICT)):
        raise GuardError(f"this is not true of the outputs: {sentence}")
    if small() and is_true(spoiled(condition)):
        raise GuardError(f"this is true whatever was measured, so it guards nothing: {sentence}")
    if not outcome:
        display(Markdown(f"✗ Not in this run: {sentence} {otherwise}".rstrip()))


def is_true(condition: Callable[[], Any]) -> bool:
    """Return whether `condition()` is true; one that raises is not."""
    try:
        return bool(condition())
    except Exception:
        return False


def spoiled(condition: Callable[[], Any]) -> Callable[[], Any]:
    """Return `condition` with every measurement that it looks up replaced by NaN or by nonsense."""
    names = _names(condition.__code__)
    before = condition.__globals__
    after = {name: _spoil(before[name]) for name in names & before.keys()}
    cells = tuple(types.CellType(_spoil(c.cell_contents)) for c in condition.__closure__ or ())
    return types.FunctionType(condition.__code__, {**before, **after}, closure=cells or None)


def _names(code: types.CodeType) -> set[str]:
    """Return the global names that a function uses, those in its comprehensions included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _spoil(value: Any) -> Any:
    """Return `value` with its numbers replaced by NaN and its texts by others, all of them new.

    Two spoiled numbers are never equal, nor are two spoiled texts.
    """
    if isinstance(value, CODE) or value is None:
        return value
    if isinstance(value, (bool, int, float)):
        return math.nan * 1.0
    if isinstance(value, str):
        return f"{value} (spoiled {os.urandom(4).hex()})"
    if isinstance(value, Mapping):
        return {key: _spoil(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_spoil(item) for item in value]
    if hasattr(value, "new_full"):  # a tensor
        return value.new_full(value.shape, math.nan, dtype=_float_of(value))
    if hasattr(value, "dtype") or hasattr(value, "iloc"):  # an array or a table
        return value * math.nan
    if dataclasses.is_dataclass(value):
        fields = {f.name: _spoil(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return types.SimpleNamespace(**fields)
    return value


def _float_of(tensor: Any) -> Any:
    import torch

    return tensor.dtype if tensor.dtype.is_floating_point else torch.float32
