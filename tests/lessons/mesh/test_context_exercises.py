"""The exercises of one sequence on several ranks, both ways, with their mistakes by name."""

import dataclasses
import re

import pytest

from lib.lessons.exercise import NOT_ATTEMPTED, Exercise, verdict
from lib.lessons.mesh import context_exercises

EXERCISES = {n: e for n, e in vars(context_exercises).items() if isinstance(e, Exercise)}


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_passes_each_mistake_is_named_and_a_stub_is_not_attempted(name):
    exercise = EXERCISES[name]

    def stub(*given):
        raise NotImplementedError("your code here")

    assert verdict(exercise, exercise.solve).startswith("right: as expected")
    assert verdict(exercise, stub) == NOT_ATTEMPTED
    wrong = exercise.wrong_functions()
    assert 4 <= len(wrong) <= 6
    trials = [min(exercise.trials, most) for most in (3, 15, exercise.trials)]
    for sentence, mistake in wrong.items():
        texts = [verdict(dataclasses.replace(exercise, trials=n), mistake, seed=0) for n in trials]
        assert not any(re.search("NameError|SyntaxError", text) for text in texts), texts
        assert any(f"It looks as if {sentence}." in text for text in texts), (sentence, texts)
