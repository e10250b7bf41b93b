"""The table of answers as readers write them: right in another way, or wrong in an unforeseen one.

An answer is a function below `@right(exercise)` or `@wrong(exercise, "words of the verdict")`, or
an edit of the solution. What a named mistake of the exercise finds needs no row.
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from lib.lessons.exercise import Exercise, edited


class Answer(NamedTuple):
    exercise: Exercise
    attempt: Callable
    is_right: bool
    words: str
    """What the verdict must have, too."""

    @property
    def name(self) -> str:
        lesson = self.exercise.solve.__module__.split(".")[2]
        attempt = getattr(self.attempt, "__name__", "kernel").strip("<>")
        return f"{lesson}.{self.exercise.solve.__name__}-{attempt}"


ANSWERS: list[Answer] = []


def right(exercise: Exercise, words: str = "") -> Callable[[Callable], Callable]:
    """Add the function below: an answer that must pass."""
    return lambda attempt: ANSWERS.append(Answer(exercise, attempt, True, words)) or attempt


def wrong(exercise: Exercise, words: str = "") -> Callable[[Callable], Callable]:
    """Add the function below: an answer that must fail for the reason that `words` give."""
    return lambda attempt: ANSWERS.append(Answer(exercise, attempt, False, words)) or attempt


def right_edit(exercise: Exercise, *texts: str) -> None:
    """Add the solution with texts replaced (`edited`), which must pass."""
    right(exercise)(edited(exercise.solve, *texts))


def wrong_edit(exercise: Exercise, words: str, *texts: str) -> None:
    """Add the solution with texts replaced (`edited`), which must fail."""
    wrong(exercise, words)(edited(exercise.solve, *texts))


def right_answers(topic: ModuleType) -> dict[str, Callable]:
    """For each exercise of a lesson by its name, the first right answer in the table."""
    found: dict[str, Callable] = {}
    for answer in ANSWERS:
        if answer.is_right and answer.exercise.solve.__module__ == topic.__name__:
            found.setdefault(answer.exercise.solve.__name__, answer.attempt)
    return found
