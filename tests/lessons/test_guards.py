"""Guarded sentences: shown where true, refused where outputs are stored, never vacuous."""

from dataclasses import dataclass
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch

from lib.lessons import guards
from lib.lessons.guards import GuardError, holds, spoiled

times, later = [9.0, 1.0, 1.1], np.array([1.0, 1.1])
weights, table = torch.arange(3), pd.DataFrame({"loss": [3.0, 2.0]})
names, result = {"best": "flat"}, None


@dataclass(frozen=True)
class Result:
    loss: float


def shown(sentence, condition, **options):
    with mock.patch("IPython.display.display") as display:
        holds(sentence, condition, **options)
    return "".join(markdown.data for (markdown,), _ in display.call_args_list)


@pytest.fixture(params=["", "1"], ids=["full size", "small"], autouse=True)
def size(request, monkeypatch):
    monkeypatch.setenv("WORKBOOK_SMALL", request.param)
    monkeypatch.delenv(guards.STRICT, raising=False)
    return request.param


def test_a_true_sentence_is_quiet():
    assert not shown("The first is slow.", lambda: times[0] > 2 * later.mean())


def test_a_false_one_says_so_and_what_to_make_of_it():
    text = shown("It is fast.", lambda: times[0] < later.min(), otherwise="Is the machine busy?")
    assert text == "✗ Not in this run: It is fast. Is the machine busy?"


def test_outputs_in_which_it_is_false_are_not_stored(monkeypatch):
    monkeypatch.setenv(guards.STRICT, "1")
    with pytest.raises(GuardError, match=r"not true of the outputs: It is fast\."):
        holds("It is fast.", lambda: times[0] < later.min())


def test_what_follows_from_the_code_holds_on_every_machine():
    with pytest.raises(GuardError, match="not true"):
        holds("It is fast.", lambda: times[0] < later.min(), always=True)


@pytest.mark.parametrize(
    "condition",
    [
        lambda: len(times) == 3,
        lambda: times[0] == times[0] or True,
        lambda: not times[0] < 5,
        lambda: True,
    ],
)
def test_a_condition_that_any_measurement_meets_is_refused_in_tests(condition, size):
    if not size:
        assert not shown("It is so.", condition)
        return
    with pytest.raises(GuardError, match=r"guards nothing: It is so\."):
        holds("It is so.", condition)


@pytest.mark.parametrize(
    "condition",
    [
        lambda: times[0] > 5,
        lambda: max(times) == 9 and all(t > 0 for t in times),
        lambda: np.allclose(later, [1.0, 1.1]),
        lambda: torch.equal(weights, torch.tensor([0, 1, 2])),
        lambda: torch.allclose(weights.double(), weights.double()),
        lambda: table["loss"].is_monotonic_decreasing,
        lambda: table.loss.iloc[-1] < 2.5,
        lambda: names["best"] == "flat",
        lambda: Result(2.0).loss < 3 and times[1] < times[0],
    ],
)
def test_a_measurement_of_any_kind_is_spoiled(condition):
    assert condition()
    assert not guards.is_true(spoiled(condition))


def test_a_local_measurement_is_spoiled():
    local = Result(2.0)
    assert not shown("It is low.", lambda: local.loss < 3)


def test_measurements_themselves_stay():
    spoiled(lambda: times[0] < 1)()
    assert times == [9.0, 1.0, 1.1]
