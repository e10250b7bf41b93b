"""The table of answers as readers write them: right in another way, or wrong in an unforeseen one.

An answer is a function below `@right(exercise)` or `@wrong(exercise, "words of the verdict")`, or
an edit of the solution. What a named mistake of the exercise finds needs no row.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from lib.lessons.exercise import Exercise, edited


class Answer(NamedTuple):
    exercise: Exercise
    answer: Callable | tuple[str, ...]
    """The reader's function, or the texts of an edit of the solution (`edited`)."""

    is_right: bool
    words: str
    """Words that the verdict must contain, too."""

    @property
    def attempt(self) -> Callable:
        if callable(self.answer):
            return self.answer
        return edited(self.exercise.solve, *self.answer)

    @property
    def name(self) -> str:
        lesson = self.exercise.solve.__module__.split(".")[2]
        answer = getattr(self.answer, "__name__", "edited").strip("<>")
        return f"{lesson}.{self.exercise.solve.__name__}-{answer}"


ANSWERS: list[Answer] = []


def right(exercise: Exercise, words: str = "") -> Callable[[Callable], Callable]:
    """Add the function below: an answer that must pass."""
    return _adding(exercise, words, is_right=True)


def wrong(exercise: Exercise, words: str = "") -> Callable[[Callable], Callable]:
    """Add the function below: an answer that must fail for the reason that `words` give."""
    return _adding(exercise, words, is_right=False)


def _adding(exercise: Exercise, words: str, *, is_right: bool) -> Callable[[Callable], Callable]:
    def add(attempt: Callable) -> Callable:
        ANSWERS.append(Answer(exercise, attempt, is_right, words))
        return attempt

    return add


def right_edit(exercise: Exercise, *texts: str) -> None:
    """Add the solution with texts replaced, which must pass."""
    ANSWERS.append(Answer(exercise, texts, True, ""))


def wrong_edit(exercise: Exercise, words: str, *texts: str) -> None:
    """Add the solution with texts replaced, which must fail."""
    ANSWERS.append(Answer(exercise, texts, False, words))


def right_answers(topic: ModuleType) -> dict[str, Callable]:
    """For each exercise of a lesson by its name, the first right answer in the table."""
    importlib.import_module(f"{__package__}.{topic.__name__.split('.')[2]}")
    found: dict[str, Callable] = {}
    for asked, answer, is_right, _ in ANSWERS:
        if is_right and callable(answer) and asked.solve.__module__ == topic.__name__:
            found.setdefault(asked.solve.__name__, answer)
    return found
