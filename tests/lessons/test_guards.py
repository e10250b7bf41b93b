"""Guarded sentences: quiet where true, said where false, refused where outputs are stored."""

from unittest import mock

import pytest

from lib.lessons import guards
from lib.lessons.guards import GuardError, holds

times = [9.0, 1.0, 1.1]


def shown(sentence, condition, **options):
    with mock.patch("IPython.display.display") as display:
        holds(sentence, condition, **options)
    return "".join(markdown.data for (markdown,), _ in display.call_args_list)


@pytest.fixture(autouse=True)
def read_by_a_learner(monkeypatch):
    monkeypatch.delenv(guards.STRICT, raising=False)


def test_a_true_sentence_is_quiet():
    assert not shown("The first is slow.", lambda: times[0] > 2 * times[1])


def test_a_false_one_says_so_and_what_to_make_of_it():
    text = shown("It is fast.", lambda: times[0] < times[1], otherwise="Is the machine busy?")
    assert text == "✗ Not in this run: It is fast. Is the machine busy?"


def test_outputs_in_which_it_is_false_are_not_stored(monkeypatch):
    monkeypatch.setenv(guards.STRICT, "1")
    with pytest.raises(GuardError, match=r"not true of the outputs: It is fast\."):
        holds("It is fast.", lambda: times[0] < times[1])


def test_what_follows_from_the_code_holds_on_every_machine():
    with pytest.raises(GuardError, match="not true"):
        holds("It is fast.", lambda: times[0] < times[1], always=True)
