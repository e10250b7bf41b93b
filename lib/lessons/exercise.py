"""Exercises: the reader's function runs beside the solution, and `check` says where they differ.

A check tries fresh random inputs, short ones first, and prints one of three verdicts: not
attempted, right, or not yet with the first input that failed. It never raises, so that a notebook
with open exercises runs to its end.

An exercise is data: the solution, how its inputs are drawn, and the mistakes that readers make,
each an edit of the solution's source and the sentence that names it:

    @exercise("warm-up", dict(words=lists(choices("the", "cat"), 1, 9), most=ints(1, 3)))
    def count(words, most):
        return min(len(set(words)), most)

    count.mistakes = '''
    set(words) => words | a word that comes twice counts twice
    min( => max( | `most` is a limit: the count is never above it
    '''

    check = check_of(__name__)

The notebook calls `exercises.check(count)`. If the reader's results are those of an edit on every
input, the check names the mistake. Tensors and arrays are compared by shape, and then value by
value up to rounding.

Where a result can't be compared as it is, a `harness(function, *inputs)` calls the function and
returns what is compared, by name. With `ranks=True` the last input is a number of ranks: the
function, or its harness, runs on each of them with `ranks` last, and each rank's result and calls
are compared. `collectives` lists those that it may call; `processes` runs a right answer on that
many processes, too. A harness gives what something costs as `AtMost(cost)`: less is as right.

Exercises come in tiers: a *warm-up* takes a few lines, a *core* one is what the lesson is about, an
*optional* one belongs to a part that may be skipped, and an *open* one has a figure to beat
(`measure`), taken once the results are right.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import os
import random
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lib.lessons.calls import NOT_FINISHED, Raised, call
from lib.lessons.differences import equal, first_difference, shown
from lib.lessons.inputs import LARGEST, Draw
from lib.lessons.play import on_processes, played

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

Tier = Literal["warm-up", "core", "optional", "open"]


@dataclass
class Exercise:
    """A task for which right answers can be computed."""

    solve: Callable
    """The solution."""

    draw: Draw
    """(generator, size) -> a tuple of arguments of about that size."""

    tier: Tier = "warm-up"

    mistakes: str = ""
    """`old => new | sentence`, each an edit of the solution's source."""

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

    must_beat: bool = False
    """Whether only what measures better than the baseline is right."""

    at_most: float | None = None
    """Where the figure counts: a right attempt has at most this many times the solution's."""

    harness: Callable | None = None
    """harness(function, *arguments) -> what is compared, instead of what the function returns."""

    ranks: bool = False
    """Whether the function runs on ranks; the last argument that is drawn is their number."""

    collectives: tuple[str, ...] | None = None
    """What ranks may call, such as "all_gather" and "send" (default: anything)."""

    same_calls: bool = True
    """Whether each rank must call as many collectives of each kind as in the solution."""

    processes: int = 0
    """How many processes a right attempt runs on, too."""

    def wrong_functions(self) -> dict[str, Callable]:
        """The mistake as a sentence -> a function that makes it."""
        edits = _edits_in(self.mistakes).items()
        return {sentence: edited(self.solve, *texts) for sentence, texts in edits}


def exercise(
    tier: Tier, inputs: Mapping[str, Draw] | Draw, **options: Any
) -> Callable[[Callable], Exercise]:
    """Make an exercise of the solution below; its `mistakes` follow.

    Args:
        inputs: how each argument is drawn, by name, in their order; or a function that draws a
            tuple of all.
        options: the other fields of `Exercise`.

    Raises:
        ValueError: there is no such tier, or the names are not those of the arguments.
    """
    if tier not in get_args(Tier):
        raise ValueError(f"tier must be one of {', '.join(get_args(Tier))}, got {tier!r}")

    def draw(generator: random.Random, size: int) -> tuple:
        return tuple(one(generator, size) for one in inputs.values())  # type: ignore[union-attr]

    def made(solve: Callable) -> Exercise:
        found = Exercise(solve, inputs if callable(inputs) else draw, tier, **options)
        if not callable(inputs) and [*inputs] not in _signatures(found):
            names = " or ".join(map(str, _signatures(found)))
            raise ValueError(f"inputs of {solve.__name__} must be named {names}, got {[*inputs]}")
        return found

    return made


def _edits_in(mistakes: str) -> dict[str, tuple[str, ...]]:
    """Sentence -> (old, new, …) of `old => new | sentence`, or `old => new && old => new | …`.

    A line without `=>`, or after `&&`, continues the one before it.

    Raises:
        ValueError: one is not written so, or has the sentence of another one.
    """
    entries: list[str] = []
    for line in mistakes.strip().splitlines():
        if not entries or ("=>" in line and not line.lstrip().startswith("&&")):
            entries.append(line.strip())
        else:
            entries[-1] += f" {line.strip()}"
    found = {}
    for entry in entries:
        edits, _, sentence = entry.rpartition(" | ")
        pairs = [edit.split("=>") for edit in edits.split("&&")]
        if sentence in found or any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"a mistake is `old => new | a sentence of its own`, got {entry!r}")
        found[sentence] = tuple(text.strip() for pair in pairs for text in pair)
    return found


@functools.cache
def edited(function: Callable, *texts: str) -> Callable:
    """`function` with text of its source replaced; `texts` are old, new, and further such pairs.

    Raises:
        ValueError: an old text does not occur exactly once, or the new source is not valid.
    """
    source = textwrap.dedent(inspect.getsource(function))
    # without the data of the exercise above it
    source = re.sub(r"\A@exercise\(.*?^(?=def |@)", "", source, flags=re.DOTALL | re.MULTILINE)
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        if source.count(old) != 1:
            name, found = function.__name__, source.count(old)
            raise ValueError(f"{old!r} must occur once in {name}, found {found} times")
        source = source.replace(old, new)
    namespace = dict(function.__globals__)
    try:
        exec(source, namespace)
    except SyntaxError as error:
        new = ", ".join(map(repr, texts[1::2]))
        raise ValueError(f"{function.__name__} with {new} is no valid Python") from error
    return namespace[function.__name__]


def check(exercise: Exercise, attempt: Callable) -> Callable:
    """Print the verdict on `attempt`; return it if it is right, or else the solution.

    So a notebook goes on with the reader's own function as soon as it works.
    """
    # that of kernels compiles them, too
    if own_check := getattr(exercise.harness, "check", None):
        return own_check(exercise, attempt)
    text = verdict(exercise, attempt)
    if exercise.processes and result_of(text) == "passed":
        text = on_processes(exercise, attempt, text, draw_inputs(exercise, 0)[-1])
    report(text, name_of(attempt), exercise.tier)
    return attempt if result_of(text) == "passed" else exercise.solve


def check_of(module: str, *, returns: bool = False) -> Callable[..., Any]:
    """The function `check(attempt)` of a module's exercises, which finds them by their names.

    With `returns`, it returns the attempt if that is right, or else the solution.
    """

    def check_by_name(attempt: Callable, name: str = "") -> Any:
        """Check a function against the exercise of its name, or of another `name`."""
        values = vars(sys.modules[module]).items()
        found = {key: value for key, value in values if isinstance(value, Exercise)}
        wanted = name or name_of(attempt)
        if wanted not in found:
            text = f"not yet: no exercise is called {wanted}, but {', '.join(found)}"
            return report(text, wanted, "")
        right = check(found[wanted], attempt)
        return right if returns else None

    return check_by_name


def whose(*functions: Callable) -> None:
    """Print which functions are the reader's, and which are solutions."""
    solutions = [
        str(getattr(function, "__module__", "")).startswith("lib.") for function in functions
    ]
    pairs = zip(map(name_of, functions), solutions)
    print(", ".join(f"{name}: {'the solution' if is_ours else 'yours'}" for name, is_ours in pairs))


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
    """The name of a function or kernel, or of the kind of thing that was given in its place."""
    # under `triton.autotune` and the like
    while hasattr(attempt, "fn") and not hasattr(attempt, "__name__"):
        attempt = attempt.fn
    return getattr(attempt, "__name__", None) or type(attempt).__name__


def verdict(exercise: Exercise, attempt: Callable, *, seed: int | None = None) -> str:
    """Return what `check` prints; `seed` repeats the inputs of another verdict."""
    for arguments in (inputs := draw_inputs(exercise, seed)):
        try:
            result, left = _run(exercise, attempt, arguments)
        except NotImplementedError:
            return NOT_ATTEMPTED
        expected, solution_left = _run(exercise, exercise.solve, arguments)
        if trouble := trouble_of(expected):
            return (
                f"no verdict: the exercise is at fault, since its own solution fails\n  {trouble}"
            )
        if not equal(result, expected):
            wrong = _described(exercise, result, expected)
            break
        if changed := _changed(exercise, arguments, left, solution_left):
            wrong = f"it changes {changed}, which is given; work on a copy"
            break
    else:
        tried = f"as expected on {len(inputs)} random inputs" if len(inputs) > 1 else "as expected"
        return _measured(exercise, attempt, tried)
    lines = [f"not yet: {_called(exercise, attempt, arguments)}", f"  {wrong}"]
    if result is not NOT_FINISHED and (name := _recognize(exercise, attempt, inputs)):
        lines.append(f"  It looks as if {name}.")
    return "\n".join(lines)


def _run(exercise: Exercise, function: Callable, arguments: tuple) -> tuple[Any, tuple]:
    """The result of a function on a copy of an input, and what it left of that copy."""
    given = copy.deepcopy(arguments)
    seconds = exercise.seconds or TIME_LIMIT
    return call(played(exercise, function), given, seconds), given


def _changed(exercise: Exercise, given: tuple, left: tuple, solution_left: tuple) -> str:
    """The argument that a right attempt has changed, but the solution has not; "" without one.

    What can't be compared, such as a model, may change.
    """
    for number, (before, mine, theirs) in enumerate(zip(given, left, solution_left)):
        if not equal(mine, theirs) and equal(theirs, before):
            names = _names_of(exercise, given)
            return f"`{names[number]}`" if names else "an input"
    return ""


def _names_of(exercise: Exercise, arguments: tuple) -> list[str] | None:
    """The names of the arguments in the harness or the function; None for those of a kernel."""
    return next((names for names in _signatures(exercise) if len(names) == len(arguments)), None)


def _signatures(exercise: Exercise) -> list[list[str]]:
    """The names of arguments: of a harness behind the function that it calls, of the function."""
    given = [*inspect.signature(exercise.solve).parameters]
    if exercise.harness is None:
        return [given]
    return [[*inspect.signature(exercise.harness).parameters][1:], given]


def _called(exercise: Exercise, attempt: Callable, arguments: tuple) -> str:
    """The call that failed, or what it was run with, where a check calls it with something else.

    For one, a function of `tensor` and `ranks` runs on several ranks, each with a tensor of its
    own: the check draws all `tensors`.
    """
    name = name_of(attempt)
    if exercise.show:
        return f"{name}, with {exercise.show(*arguments)}"
    if (exercise.harness or exercise.ranks) and (names := _names_of(exercise, arguments)):
        given = ", ".join(map("{}={}".format, names, map(shown, arguments)))
        return f"{name}, run with {given}"
    return f"{name}({', '.join(map(shown, arguments))})"


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
    return [exercise.draw(generator, 1 + LARGEST * trial // trials) for trial in range(trials)]


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
    # the other way round, NaN would be as good as any
    if exercise.must_beat and not figures["yours"] < [*figures.values()][-1]:
        return f"not yet: {tried}, but no better than {[*figures][-1]}\n  {told}"
    most = exercise.at_most * figures["the solution"] if exercise.at_most else math.inf
    if not figures["yours"] <= most:
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

    @functools.cache
    def result_on(trial: int) -> Any:
        return _run(exercise, attempt, inputs[trial])[0]

    def makes_the_same(function: Callable, trial: int) -> bool:
        # no mistake loops forever, and each further input might take the whole limit
        if (mine := result_on(trial)) is NOT_FINISHED:
            return False
        theirs, _ = _run(exercise, function, inputs[trial])
        # both ways, since a cost may be lower
        return equal(mine, theirs) and equal(theirs, mine)

    try:
        for name, function in exercise.wrong_functions().items():
            if all(makes_the_same(function, trial) for trial in range(len(inputs))):
                return name
    # the attempt is a stub in one of its branches
    except NotImplementedError:
        pass
    return None


def difference(yours: Any, expected: Any) -> str:
    """The first value in which a result differs from the expected one, as a sentence."""
    if trouble := trouble_of(yours):
        # a long result would bury the error
        is_short = type(yours) is Raised and len(shown(expected)) <= SHOWN_BESIDE_ERRORS
        return f"{trouble}; expected {shown(expected)}" if is_short else trouble
    return first_difference(yours, expected) or ""


def trouble_of(result: Any) -> str | None:
    """The error of a call, or that it did not finish, as a sentence; None where it has a result."""
    if result is NOT_FINISHED:
        return "it did not finish in time; is there a loop that never ends?"
    return str(result) if isinstance(result, Raised) else None
