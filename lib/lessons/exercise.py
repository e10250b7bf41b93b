"""Exercises: the reader's function runs beside the solution, and `check` says where they differ.

A check tries fresh random inputs, short ones first, and prints one of three verdicts: not
attempted, right, or not yet with the first input that failed. It never raises, so that a notebook
with open exercises runs to its end.

The solution is an ordinary function. A common mistake is an edit of its source, so that solution
and mistakes read as one page:

    def count(words):
        return sum(words.values())

    COUNT = Exercise(count, draw, {"a word counts once": ("words.values()", "map(bool, words)")})

If the reader's results are those of such an edit on every input, the check names the mistake.
Tensors and arrays are compared by shape, and then value by value up to rounding.

Exercises come in tiers: a *warm-up* takes a few lines, a *core* one is what the lesson is about, an
*optional* one belongs to a part that may be skipped, and an *open* one has a figure to beat
(`measure`), taken once the results are right.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
import random
import signal
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np

TRIALS = 150
# Seconds for one call; short, since an endless loop that appends fills memory.
TIME_LIMIT = 2
# For values of tensors and floats: a few roundings of float32.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
# Larger tensors are shown by their shape.
SHOWN_VALUES = 16
# Longer results are not shown behind an error.
SHOWN_LETTERS = 80
MISSING = object()
NOT_FINISHED = object()
# The verdict on an untouched stub.
NOT_ATTEMPTED = "not attempted: replace the `raise` line by your code, and run this cell again"
# Names the file to which checks append their verdicts, as `python -m lib exercises` reads them.
RESULTS = "WORKBOOK_EXERCISES"


@dataclass(frozen=True)
class Exercise:
    """A task for which right answers can be computed."""

    solve: Callable
    """The solution."""

    draw: Callable[[random.Random, int], tuple]
    """(generator, size) -> arguments of about that size."""

    mistakes: Mapping[str, tuple[str, str] | Callable]
    """The mistake as a sentence -> (old, new) text of the solution's source, or, where no short
    edit makes it, a function."""

    tier: Literal["warm-up", "core", "optional", "open"] = "warm-up"

    trials: int = TRIALS
    """How many inputs are tried."""

    seconds: float | None = None
    """Time limit for one call (default: TIME_LIMIT)."""

    describe: Callable[[Any, Any], str] | None = None
    """(yours, expected) -> what is wrong, where the first difference would tell too much."""

    show: Callable[..., str] | None = None
    """Arguments -> how the verdict shows them, where each by itself would tell too little."""

    measure: Callable[[Callable], float] | None = None
    """For a right attempt and the solution, a figure that is better the lower it is."""

    unit: str = ""
    """The unit of that figure."""

    baseline: Callable | None = None
    """The function to beat, if that is not the solution; measured as well, and shown by name."""

    def wrong_functions(self) -> dict[str, Callable]:
        """The mistake as a sentence -> a function that makes it."""
        return {
            sentence: mistake if callable(mistake) else edited(self.solve, *mistake)
            for sentence, mistake in self.mistakes.items()
        }


@functools.cache
def edited(function: Callable, *texts: str) -> Callable:
    """`function` with text of its source replaced; `texts` are old, new, and further such pairs.

    Raises:
        ValueError: an old text does not occur exactly once.
    """
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        if source.count(old) != 1:
            name, found = function.__name__, source.count(old)
            raise ValueError(f"{old!r} must occur once in {name}, found {found} times")
        source = source.replace(old, new)
    namespace = dict(function.__globals__)
    exec(source, namespace)
    return namespace[function.__name__]


@dataclass(frozen=True)
class Raised:
    """The result of a call that raised; equal to another with the same error in any line."""

    error: str
    line: int | None = field(compare=False)

    def __str__(self) -> str:
        where = f"line {self.line} of the cell" if self.line else "it"
        return f"{where} raised {self.error}"


class TimeLimitError(BaseException):
    """A call took too long; not an Exception, so that `except Exception` doesn't catch it."""


def check(exercise: Exercise, attempt: Callable, *, seed: int | None = None) -> Callable:
    """Print the verdict on `attempt`; return it if it is right, or else the solution.

    So a notebook goes on with the reader's own function as soon as it works. `seed` repeats the
    inputs of another check.
    """
    text = verdict(exercise, attempt, seed=seed)
    report(text, attempt.__name__, exercise.tier)
    return attempt if result_of(text) == "passed" else exercise.solve


def report(text: str, name: str, tier: str) -> None:
    """Print the verdict `text` on an exercise; keep it where a report asks for it."""
    print(text)
    if results := os.environ.get(RESULTS):
        line = {"exercise": name, "tier": tier, "result": result_of(text)}
        with Path(results).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"verdict": text}) + "\n")


def result_of(text: str) -> Literal["passed", "failed", "not attempted"]:
    """Return which of its three verdicts `check` printed."""
    if text.startswith("right"):
        return "passed"
    return "not attempted" if text == NOT_ATTEMPTED else "failed"


def verdict(exercise: Exercise, attempt: Callable, *, seed: int | None = None) -> str:
    """Return what `check` prints."""
    for arguments in (inputs := draw_inputs(exercise, seed)):
        try:
            result = _call(attempt, arguments, exercise.seconds)
        except NotImplementedError:
            return NOT_ATTEMPTED
        expected = _call(exercise.solve, arguments, exercise.seconds)
        if not _equal(result, expected):
            break
    else:
        tried = f" on {len(inputs)} random inputs" if len(inputs) > 1 else ""
        return f"right: as expected{tried}{_figures(exercise, attempt)}"
    shown = exercise.show(*arguments) if exercise.show else ", ".join(map(_shown, arguments))
    if exercise.describe is None:
        found = difference(result, expected)
    else:
        found = str(result) if isinstance(result, Raised) else exercise.describe(result, expected)
    lines = [f"not yet: {attempt.__name__}({shown})", f"  {found}"]
    if result is not NOT_FINISHED and (name := _recognize(exercise, attempt, inputs)):
        lines.append(f"  It looks as if {name}.")
    return "\n".join(lines)


def draw_inputs(exercise: Exercise, seed: int | None) -> list[tuple]:
    """Return the arguments of each trial, small ones first."""
    generator, trials = random.Random(seed), exercise.trials
    return [exercise.draw(generator, 1 + 15 * trial // trials) for trial in range(trials)]


def _figures(exercise: Exercise, attempt: Callable) -> str:
    """Return what is measured of a right attempt beside the solution; "" if nothing is."""
    if exercise.measure is None:
        return ""
    compared = {"yours": attempt, "the solution": exercise.solve}
    if exercise.baseline is not None:
        compared[f"`{exercise.baseline.__name__}`"] = exercise.baseline
    unit = f" {exercise.unit}".rstrip()
    figures = (f"{name} {_rounded(exercise.measure(f))}{unit}" for name, f in compared.items())
    return f"\n  {', '.join(figures)}"


def _rounded(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError after `seconds` of work, not counting what other processes take.

    No limit on Windows or outside the main thread.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not (in_main and hasattr(signal, "setitimer")):
        yield
        return

    def stop(number, frame):
        raise TimeLimitError

    handler = signal.signal(signal.SIGPROF, stop)
    timer = signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        signal.setitimer(signal.ITIMER_PROF, *timer)


def _call(function: Callable, arguments: tuple, seconds: float | None) -> Any:
    try:
        # a copy, since a function may change the list that it is given
        arguments = copy.deepcopy(arguments)
        with _time_limit(seconds or TIME_LIMIT):
            return function(*arguments)
    except TimeLimitError:
        return NOT_FINISHED
    except NotImplementedError:
        raise
    except Exception as error:
        # in the function's own file, which for a cell holds its inner functions and nothing else
        code = getattr(inspect.unwrap(function), "__code__", None)
        file = code.co_filename if code else None
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame.lineno for frame in frames if frame.filename == file]
        # the first line: in PyTorch's errors, hints and addresses follow
        message = f"{type(error).__name__}: {error}".split("\n")[0]
        # Python's wording depends on the types divided
        message = message.replace("float division by zero", "division by zero")
        return Raised(message, inside[-1] if inside else None)


def _recognize(exercise: Exercise, attempt: Callable, inputs: Sequence[tuple]) -> str | None:
    """Find the mistake that gives the results of `attempt` on all inputs."""
    results = []
    for arguments in inputs:
        try:
            results.append(_call(attempt, arguments, exercise.seconds))
        except NotImplementedError:
            return None
        # no mistake loops forever, and each further input might take the whole limit
        if results[-1] is NOT_FINISHED:
            return None
    for name, function in exercise.wrong_functions().items():
        made = (_call(function, arguments, exercise.seconds) for arguments in inputs)
        if all(map(_equal, made, results)):
            return name
    return None


def _plain(value: Any) -> Any:
    """Convert mappings to dicts, sequences and arrays to lists, so that only values count."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) if _is_array(item) else item for item in value]
    return value


def _is_array(value: Any) -> bool:
    """Whether `value` is a tensor or an array; torch itself need not be loaded."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _are_arrays(yours: Any, expected: Any) -> bool:
    """Whether to compare up to rounding, as arrays; two ints are compared exactly.

    A number counts as an array of no dimensions.
    """
    values = (yours, expected)
    is_inexact = [_is_array(value) or isinstance(value, float) for value in values]
    return any(is_inexact) and all(_is_array(v) or isinstance(v, (int, float)) for v in values)


def _array(value: Any) -> np.ndarray:
    """A number, an array or a tensor of any kind as an array of float64."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    return np.asarray(value, dtype=np.float64)


def _equal(yours: Any, expected: Any) -> bool:
    if _are_arrays(yours, expected):
        return _array_difference(_array(yours), _array(expected)) is None
    return not _is_array(expected) and _plain(yours) == _plain(expected)


def _array_difference(yours: np.ndarray, expected: np.ndarray) -> str | None:
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


def difference(yours: Any, expected: Any) -> str:
    """The first value in which a result differs from the expected one, as a sentence."""
    if _are_arrays(yours, expected):
        return _array_difference(_array(yours), _array(expected))
    if not _is_array(expected):
        yours, expected = _plain(yours), _plain(expected)
    if yours is NOT_FINISHED:
        return "it did not finish in time; is there a loop that never ends?"
    if isinstance(yours, Raised):
        # a long result would bury the error
        shown = _shown(expected)
        return f"{yours}; expected {shown}" if len(shown) <= SHOWN_LETTERS else str(yours)
    if yours is None:
        return f"it returned None (is a `return` missing?); expected {_shown(expected)}"
    if type(yours) is not type(expected):
        kind = type(yours).__name__
        return f"it returned {_shown(yours)}, of type {kind}; expected {_shown(expected)}"
    if isinstance(expected, dict):
        strange = expected and {*map(_shape, yours)} - {*map(_shape, expected)}
        if strange and len(repr(yours)) <= 80:
            return f"it returned {yours!r}, with keys of another kind; expected {_shown(expected)}"
        keys = [*expected, *(key for key in yours if key not in expected)]
        places = [(repr(key), yours.get(key, MISSING), expected.get(key, MISSING)) for key in keys]
    elif isinstance(expected, list):
        pairs = enumerate(zip_longest(yours, expected, fillvalue=MISSING))
        places = [(f"position {i}", mine, right) for i, (mine, right) in pairs]
    else:
        places = [("result", yours, expected)]
    place, mine, right = next(place for place in places if place[1] != place[2])
    return f"{place}: yours {_shown(mine)}, expected {_shown(right)}"


def _shape(key: Any) -> Any:
    return tuple(map(type, key)) if isinstance(key, tuple) else type(key)


def _shown(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    if not _is_array(value):
        return repr(value)
    if (array := _array(value)).size > SHOWN_VALUES:
        return f"<tensor of shape {array.shape}>"
    if not array.ndim:
        return f"{array.item():.6g}"
    form: Any = {"float_kind": lambda number: f"{number:.6g}"}
    values = np.array2string(array, separator=", ", formatter=form, max_line_width=1000)
    return f"tensor({' '.join(values.split())})"
