"""How a check runs a function: by its exercise's harness, on threads as ranks, on processes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

from lib.lessons.differences import Named, first_difference

# What is said of a function that is right on threads, but fails on processes.
PROCESSES_GET = (
    "The processes get this function, and what it uses of the notebook, as it is now; what they "
    "change there, other processes do not see."
)


def played(exercise: Any, function: Callable) -> Callable[..., Any]:
    """What a check calls with each input: the function, by its harness, on all ranks."""
    if not (exercise.ranks or exercise.harness):
        return function

    # an error names its line in the function
    @functools.wraps(function)
    def play(*arguments: Any) -> Any:
        if not exercise.ranks:
            return _harnessed(exercise.harness, function)(*arguments)
        from lib.lessons.ranks import run_on_threads

        *given, count = arguments
        found = run_on_threads(_job(exercise, function, given), count)
        return Named((f"rank {number}", one) for number, one in enumerate(found))

    return play


def _harnessed(harness: Callable | None, function: Callable) -> Callable[..., Any]:
    """A harness on a function; of one that returns None, that is said."""
    if not harness:
        return function
    returned: list[Any] = []

    @functools.wraps(function)
    def noting(*arguments: Any) -> Any:
        returned.clear()
        returned.append(result := function(*arguments))
        return result

    def run(*arguments: Any) -> Any:
        try:
            return harness(noting, *arguments)
        except (TypeError, AttributeError) as error:
            if returned == [None] and "NoneType" in str(error):
                raise TypeError("the result is None; is a `return` missing?") from error
            raise

    return run


def _job(exercise: Any, function: Callable, given: Sequence[Any]) -> Callable[[Any], Named]:
    """What each rank does; it can be sent to processes."""
    collectives, same_calls, harness = exercise.collectives, exercise.same_calls, exercise.harness

    @functools.wraps(function)
    def job(ranks: Any) -> Named:
        ranks.allowed = collectives
        # of this rank: others call the function at the same time
        found = _harnessed(harness, function)(*copy.deepcopy([*given]), ranks)
        found = found if isinstance(found, Named) else Named(result=found)
        # calls first: one that is missing explains what is wrong with the rest
        return Named({"calls": Named(ranks.calls)} | found) if same_calls else found

    return job


def on_processes(exercise: Any, attempt: Callable, text: str, arguments: tuple) -> str:
    """Run an attempt that is right on threads on processes; return the verdict `text` with that.

    `arguments` are those of a check; there are as many ranks as the exercise says.
    """
    from lib.ddp.launcher import WorkerError
    from lib.lessons.ranks import run_on_processes, run_on_threads

    count, (*given, _) = exercise.processes, arguments
    attempted, solved = (_job(exercise, function, given) for function in (attempt, exercise.solve))
    wrong = text.replace("right: ", "not yet: ", 1)
    try:
        # threads have not shown a deadlock, so a minute is for a slow machine
        found = run_on_processes(attempted, count, timeout=60)
    except TypeError as error:
        return f"{wrong}; for processes, {error}"
    except WorkerError as error:
        return f"{wrong}; on processes {str(error).splitlines()[0]}\n  {PROCESSES_GET}"
    expected = run_on_threads(solved, count)
    both = [Named((f"rank {n}", one) for n, one in enumerate(side)) for side in (found, expected)]
    if difference := first_difference(*both):
        return f"{wrong}; on {count} processes, {difference}"
    return f"{text}\n  on {count} processes, too"
