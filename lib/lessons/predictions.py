"""Predict, then run: the reader's guesses, kept beside what was measured.

    first_call = predict("How long does the first call take?", None, "ms")
    first_call.measured(times[0])
    score_predictions(first_call)

A guess is a number that the reader writes in place of `None`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lib.core.files import write_atomically
from lib.lessons.notebook import small, workspace


@dataclass
class Prediction:
    """A question with the reader's guess, and later with the answer and where it came from."""

    question: str
    guess: float | None
    unit: str = ""
    answer: float | None = None
    source: str = "measured"

    def measured(self, value: float) -> None:
        """Answer with what was timed or counted, here or in a record."""
        self._compare(value, "measured")

    def computed(self, value: float) -> None:
        """Answer with the value of a formula."""
        self._compare(value, "computed")

    def simulated(self, value: float) -> None:
        """Answer with what a model of the machine gives."""
        self._compare(value, "simulated")

    def _compare(self, value: float, source: str) -> None:
        """Print how `value` compares with the guess, and keep a guess for the score of all."""
        self.answer, self.source = float(value), source
        answer = f"{source}: {_with_unit(self.answer, self.unit)}"
        if self.guess is None:
            print(answer)
            return
        if not small():
            _keep(self)
        verdict = "right on" if self.factor < 1.1 else f"off by {_times(self.factor)}"
        print(f"{answer}; you said {_with_unit(self.guess, self.unit)}: {verdict}")

    @property
    def factor(self) -> float:
        """How many times the guess is off, at least 1; infinite if it has another sign."""
        if self.guess == self.answer:
            return 1.0
        if not self.guess or not self.answer or self.guess * self.answer < 0:
            return math.inf
        return max(self.guess / self.answer, self.answer / self.guess)


def predict(question: str, guess: float | None = None, unit: str = "") -> Prediction:
    """Return `question` with the reader's guess; without a guess, invite one.

    Raises:
        TypeError: `guess` is neither a number nor None.
    """
    if guess is not None and (isinstance(guess, bool) or not isinstance(guess, (int, float))):
        raise TypeError(f"guess must be a number or None, got {guess!r}")
    if guess is None:
        print(f"{question} Write your guess in place of None{f', in {unit}' if unit else ''}.")
    else:
        print(f"{question} You say: {_with_unit(guess, unit)}.")
    return Prediction(question, guess, unit)


def score_predictions(*predictions: Prediction) -> None:
    """Show guesses beside the answers, and how good the guesses in all notebooks are."""
    from IPython.display import display

    from lib.lessons.show import show_table

    display(show_table([_row(prediction) for prediction in predictions]))
    if kept := _kept():
        typical = _times(median(prediction.factor for prediction in kept))
        number = "1 guess" if len(kept) == 1 else f"{len(kept)} guesses"
        print(f"{number} so far, in all notebooks; the typical one is off by {typical}.")
    else:
        print("No guesses yet. A wrong guess teaches more than none.")


def _row(prediction: Prediction) -> dict[str, Any]:
    guess, unit = prediction.guess, prediction.unit
    answer = "–" if prediction.answer is None else _with_unit(prediction.answer, unit)
    if prediction.source != "measured":
        answer += f" ({prediction.source})"
    return {
        "question": prediction.question,
        "you said": "–" if guess is None else _with_unit(guess, unit),
        "measured": answer,
        "off by": "–" if None in (guess, prediction.answer) else _times(prediction.factor),
    }


def _with_unit(value: float, unit: str) -> str:
    space = "" if unit == "%" else " "
    number = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{number}{space}{unit}".rstrip()


def _times(factor: float) -> str:
    return "an infinite factor" if math.isinf(factor) else f"{factor:.2g}×"


def _file() -> Path:
    return workspace() / "artifacts/local/predictions.json"


def _kept() -> list[Prediction]:
    """Return the guesses of all notebooks, the last one for each question."""
    try:
        return [Prediction(**row) for row in json.loads(_file().read_text(encoding="utf-8"))]
    except (FileNotFoundError, ValueError, TypeError):
        return []


def _keep(prediction: Prediction) -> None:
    others = [other for other in _kept() if other.question != prediction.question]
    rows = [asdict(one) for one in (*others, prediction)]
    write_atomically(_file(), json.dumps(rows, indent=1, ensure_ascii=False))
