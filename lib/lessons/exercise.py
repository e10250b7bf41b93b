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

import functools
import inspect
import json
import math
import os
import random
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lib.lessons.calls import NOT_FINISHED, Raised, call
from lib.lessons.differences import equal, first_difference, shown

TRIALS = 150
# Seconds for one call; short, since an endless loop that appends fills memory.
TIME_LIMIT = 2
# Seconds for what is measured of a right attempt.
MEASURING_LIMIT = 60
# Longer results are not shown behind an error.
SHOWN_BESIDE_ERRORS = 80
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
    """Arguments -> how the verdict tells them, where each by itself would tell too little."""

    measure: Callable[[Callable], float] | None = None
    """For a right attempt and the solution, a figure that is better the lower it is."""

    unit: str = ""
    """The unit of that figure."""

    baseline: Callable | None = None
    """The function to beat, if that is not the solution; measured as well, and shown by name."""

    at_most: float | None = None
    """Where the figure counts: a right attempt has at most this many times the solution's."""

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


def check(exercise: Exercise, attempt: Callable, *, seed: int | None = None) -> Callable:
    """Print the verdict on `attempt`; return it if it is right, or else the solution.

    So a notebook goes on with the reader's own function as soon as it works. `seed` repeats the
    inputs of another check.
    """
    text = verdict(exercise, attempt, seed=seed)
    report(text, name_of(attempt), exercise.tier)
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


def name_of(attempt: Any) -> str:
    """The name of a function, or of the kind of thing that was given in its place."""
    return getattr(attempt, "__name__", None) or type(attempt).__name__


def verdict(exercise: Exercise, attempt: Callable, *, seed: int | None = None) -> str:
    """Return what `check` prints."""
    seconds = exercise.seconds or TIME_LIMIT
    for arguments in (inputs := draw_inputs(exercise, seed)):
        try:
            result = call(attempt, arguments, seconds)
        except NotImplementedError:
            return NOT_ATTEMPTED
        expected = call(exercise.solve, arguments, seconds)
        if not equal(result, expected):
            break
    else:
        tried = f"as expected on {len(inputs)} random inputs" if len(inputs) > 1 else "as expected"
        return _measured(exercise, attempt, tried)
    lines = [f"not yet: {_called(exercise, attempt, arguments)}"]
    lines.append(f"  {_described(exercise, result, expected)}")
    if result is not NOT_FINISHED and (name := _recognize(exercise, attempt, inputs)):
        lines.append(f"  It looks as if {name}.")
    return "\n".join(lines)


def _called(exercise: Exercise, attempt: Callable, arguments: tuple) -> str:
    """The call that failed, or what it was run with, where a check calls it with something else.

    For one, a function of `tensor` and `ranks` runs on several ranks, each with a tensor of its
    own: the check draws all `tensors`.
    """
    name = name_of(attempt)
    if exercise.show:
        return f"{name}, with {exercise.show(*arguments)}"
    played, inner = _parameters(exercise.solve), _parameters(inspect.unwrap(exercise.solve))
    if len(played) == len(arguments) and played != inner:
        given = ", ".join(map("{}={}".format, played, map(shown, arguments)))
        return f"{name}, run with {given}"
    return f"{name}({', '.join(map(shown, arguments))})"


def _parameters(function: Callable) -> list[str]:
    """The names of the arguments of a function itself, whatever it wraps."""
    try:
        return [*inspect.signature(function, follow_wrapped=False).parameters]
    except (TypeError, ValueError):
        # one of Python's own
        return []


def _described(exercise: Exercise, result: Any, expected: Any) -> str:
    """The first difference between a result and the expected one, as a sentence."""
    if exercise.describe is None:
        return difference(result, expected)
    if trouble := trouble_of(result):
        return trouble
    try:
        return exercise.describe(result, expected)
    # it counts on a result of the right kind
    except Exception:
        return difference(result, expected)


def draw_inputs(exercise: Exercise, seed: int | None) -> list[tuple]:
    """Return the arguments of each trial, small ones first."""
    generator, trials = random.Random(seed), exercise.trials
    return [exercise.draw(generator, 1 + 15 * trial // trials) for trial in range(trials)]


def _measured(exercise: Exercise, attempt: Callable, tried: str) -> str:
    """The verdict on an attempt that is right so far, with its figure beside the solution's."""
    if exercise.measure is None:
        return f"right: {tried}"
    compared = {"yours": attempt, "the solution": exercise.solve}
    if exercise.baseline is not None:
        compared[f"`{exercise.baseline.__name__}`"] = exercise.baseline
    figures: dict[str, Any] = {}
    for name, function in compared.items():
        figures[name] = call(_measuring(exercise, function), (), MEASURING_LIMIT)
        if trouble := trouble_of(figures[name]):
            return f"not yet: {tried}, but not where it is measured\n  {trouble}"
    unit = f" {exercise.unit}".rstrip()
    told = ", ".join(f"{name} {_rounded(figure)}{unit}" for name, figure in figures.items())
    most = exercise.at_most * figures["the solution"] if exercise.at_most else math.inf
    if figures["yours"] > most:
        return f"not yet: {tried}, but at too high a cost\n  {told}; {_rounded(most)}{unit} will do"
    return f"right: {tried}\n  {told}"


def _measuring(exercise: Exercise, function: Callable) -> Callable[[], float]:
    @functools.wraps(function)
    def measure() -> float:
        return exercise.measure(function)  # type: ignore[misc]

    return measure


def _rounded(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _recognize(exercise: Exercise, attempt: Callable, inputs: Sequence[tuple]) -> str | None:
    """Find the mistake that gives the results of `attempt` on all inputs."""
    results, seconds = [], exercise.seconds or TIME_LIMIT
    for arguments in inputs:
        try:
            results.append(call(attempt, arguments, seconds))
        except NotImplementedError:
            return None
        # no mistake loops forever, and each further input might take the whole limit
        if results[-1] is NOT_FINISHED:
            return None
    for name, function in exercise.wrong_functions().items():
        made = (call(function, arguments, seconds) for arguments in inputs)
        if all(map(equal, made, results)):
            return name
    return None


def difference(yours: Any, expected: Any) -> str:
    """The first value in which a result differs from the expected one, as a sentence."""
    if trouble := trouble_of(yours):
        # a long result would bury the error
        is_short = isinstance(yours, Raised) and len(shown(expected)) <= SHOWN_BESIDE_ERRORS
        return f"{trouble}; expected {shown(expected)}" if is_short else trouble
    return first_difference(yours, expected)


def trouble_of(result: Any) -> str | None:
    """The error of a call, or that it did not finish, as a sentence; None where it has a result."""
    if result is NOT_FINISHED:
        return "it did not finish in time; is there a loop that never ends?"
    return str(result) if isinstance(result, Raised) else None
