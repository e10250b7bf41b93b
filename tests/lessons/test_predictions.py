"""Predictions: compared by their factor, kept for all notebooks, but not by small runs."""

import json
import math
from unittest import mock

import pytest

from lib.lessons import predictions
from lib.lessons.predictions import Prediction, predict, score_predictions


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "workspace", lambda: tmp_path)
    monkeypatch.delenv("WORKBOOK_SMALL", raising=False)
    return tmp_path / "artifacts/local"


@pytest.mark.parametrize(
    ("guess", "unit", "answer", "said", "compared"),
    [
        (5, "ms", 8, "5 ms", "measured: 8 ms; you said 5 ms: off by 1.6×"),
        (30, "%", 28.2, "30%", "measured: 28.2%; you said 30%: right on"),
        (2000, "", 1322.6, "2,000", "measured: 1,323; you said 2,000: off by 1.5×"),
        (0, "s", 3, "0 s", "measured: 3 s; you said 0 s: off by an infinite factor"),
    ],
)
def test_a_guess_is_compared_with_what_was_measured(guess, unit, answer, said, compared, capsys):
    predict("How much?", guess, unit).measured(answer)
    assert capsys.readouterr().out.splitlines() == [f"How much? You say: {said}.", compared]


def test_an_answer_that_nobody_measured_says_where_it_came_from(capsys):
    formula, model = predict("How much?", 5, "ms"), predict("How many?")
    formula.computed(8)
    model.simulated(3)
    said = capsys.readouterr().out.splitlines()
    assert said[2:] == ["computed: 8 ms; you said 5 ms: off by 1.6×", "simulated: 3"]
    with mock.patch("IPython.display.display") as display:
        score_predictions(formula, model)
    table = display.call_args[0][0].data
    assert "| 8 ms (computed) |" in table
    assert "| 3 (simulated)   |" in table


@pytest.mark.parametrize(
    ("guess", "answer", "factor"),
    [(5, 5, 1), (2, 8, 4), (8, 2, 4), (0, 0, 1), (0, 3, math.inf), (-1, 1, math.inf), (-2, -1, 2)],
)
def test_the_score_is_a_factor_either_way(guess, answer, factor):
    assert Prediction("?", guess, answer=answer).factor == factor


def test_without_a_guess_it_invites_one_and_keeps_nothing(capsys, folder):
    predict("How many?", None, "MB").measured(3.2)
    assert capsys.readouterr().out.splitlines() == [
        "How many? Write your guess in place of None, in MB.",
        "measured: 3.2 MB",
    ]
    assert not folder.exists()


def test_guesses_of_all_notebooks_are_kept_and_scored(capsys):
    for guess in (1, 4):  # the last one counts
        first = predict("First?", guess)
        first.measured(8)
    second = predict("Second?", 1, "s")
    second.measured(1.01)
    capsys.readouterr()
    with mock.patch("IPython.display.display") as display:
        score_predictions(first, second, predict("Third?"))
    said = capsys.readouterr().out
    assert "2 guesses so far, in all notebooks; the typical one is off by 1.5×." in said
    table = display.call_args[0][0].data
    assert "| First?   | 4        | 8        | 2×     |" in table
    assert "| Third?   | –        | –        | –      |" in table


def test_small_runs_keep_nothing(monkeypatch, folder):
    monkeypatch.setenv("WORKBOOK_SMALL", "1")
    predict("First?", 1).measured(2)
    assert not folder.exists()


def test_a_damaged_file_costs_old_guesses_and_no_new_one(folder):
    folder.mkdir(parents=True)
    (folder / "predictions.json").write_text('[{"question"')
    predict("First?", 1).measured(2)
    assert [row["question"] for row in json.loads((folder / "predictions.json").read_text())] == [
        "First?"
    ]


def test_a_guess_is_a_number():
    with pytest.raises(TypeError, match="guess must be a number or None, got '5 ms'"):
        predict("How long?", "5 ms")
