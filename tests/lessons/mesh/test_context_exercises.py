"""The exercises of one sequence on several ranks, both ways, with their mistakes by name."""

import dataclasses
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lib.lessons.exercise import NOT_ATTEMPTED, Exercise, verdict
from lib.lessons.mesh import context, context_exercises

NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"
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
    fewer = [dataclasses.replace(exercise, trials=number) for number in trials]
    for sentence, mistake in wrong.items():
        assert any(is_named(few, sentence, mistake) for few in fewer), sentence


def is_named(exercise, sentence, mistake):
    text = verdict(exercise, mistake, seed=0)
    assert not re.search("NameError|SyntaxError|UnboundLocalError", text), text
    return f"It looks as if {sentence}." in text


def cells():
    """Stub, and the hint and solution below it, of each exercise, in order."""
    for path in NOTEBOOKS.glob("11_*.ipynb"):
        every = json.loads(path.read_text(encoding="utf-8"))["cells"]
        for cell, below in pairwise(every):
            stub, help_text = ("".join(one["source"]) for one in (cell, below))
            name = re.match(r"def (\w+)\(", stub)
            if name and name[1] in EXERCISES and "exercise" in cell["metadata"].get("tags", []):
                yield pytest.param(stub, help_text, id=name[1])


@pytest.mark.parametrize(("stub", "help_text"), cells())
def test_in_the_notebook_a_stub_is_not_attempted_and_the_folded_solution_is_right(
    stub, help_text, capsys
):
    names = {"exercises": context_exercises, "torch": torch}
    names |= {name: getattr(context, name) for name in ("attend", "merge", "pass_on")}
    exec(stub, dict(names))
    assert capsys.readouterr().out == f"{NOT_ATTEMPTED}\n"
    hint, solution = help_text.split("<summary>Solution</summary>")
    assert "<summary>Hint</summary>" in hint
    code = re.search(r"```python\n(.*?)```", solution, re.DOTALL)[1]
    exec(f"{code}\n{stub.strip().splitlines()[-1]}", names)
    assert capsys.readouterr().out.startswith("right")


def test_each_exercise_is_in_the_notebook():
    assert {case.id for case in cells()} == EXERCISES.keys()
