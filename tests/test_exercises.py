"""Each exercise of each notebook both ways, each named mistake, and how a check reports."""

import importlib
import math
import re
import signal
import threading
import time
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch

from lib import exercises
from lib.exercises import NOT_ATTEMPTED, Exercise, verdict
from lib.exercises_tokenizer import COUNT_PAIRS, ENCODE_PRETOKEN, MERGE_PAIR
from lib.tokenizer import merge_pair

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# every lib/exercises_topic.py by its name
TOPICS = {
    path.stem: importlib.import_module(f"lib.{path.stem}")
    for path in sorted((ROOT / "lib").glob("exercises_*.py"))
}
CHECKED = {
    name: value
    for topic in TOPICS.values()
    for name, value in vars(topic).items()
    if isinstance(value, Exercise)
}


def exercise_cells():
    """(stub, Markdown cell behind it) of every exercise in the notebooks."""
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        for number, cell in enumerate(cells):
            if "exercise" in cell.metadata.get("tags", []):
                following = cells[number + 1].source
                yield pytest.param(cell.source, following, id=f"{path.stem}-{number + 1}")


EXERCISES = list(exercise_cells())


def run(code: str) -> None:
    exec(code, {**TOPICS, "merge_pair": merge_pair, "math": math, "torch": torch})


@pytest.mark.parametrize(("stub", "help_text"), EXERCISES)
def test_an_untouched_stub_is_not_attempted(stub, help_text, capsys):
    run(stub)
    assert capsys.readouterr().out == f"{NOT_ATTEMPTED}\n"


@pytest.mark.parametrize(("stub", "help_text"), EXERCISES)
def test_the_folded_solution_passes(stub, help_text, capsys):
    hint, solution = help_text.split("<summary>Solution</summary>")
    assert "<summary>Hint</summary>" in hint
    code = re.search(r"```python\n(.*?)```", solution, re.DOTALL)[1]
    call = stub.strip().splitlines()[-1]
    run(f"{code}\n{call}")
    assert capsys.readouterr().out.startswith("right")


@pytest.mark.parametrize(
    "notebook",
    [
        "01_tokenizer",
        "02_model",
        "03_training",
        "04_profiling",
        "05_flash_attention",
        "06_ddp",
        "07_zero1",
    ],
)
def test_a_notebook_has_its_exercises(notebook):
    assert sum(notebook in case.id for case in EXERCISES) == 3


MISTAKES = [
    pytest.param(exercise, name, mistake, id=mistake.__name__.strip("_"))
    for exercise in CHECKED.values()
    for name, mistake in exercise.mistakes.items()
]


# each seed draws 150 inputs of its own
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))]


@pytest.mark.parametrize(("exercise", "name", "mistake"), MISTAKES)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_mistake_is_recognised_by_name(exercise, name, mistake, seed):
    text = verdict(exercise, mistake, seed=seed)
    assert text.startswith(f"not yet: {mistake.__name__}(")
    assert f"It looks as if {name}." in text


@pytest.mark.parametrize("exercise", CHECKED.values(), ids=CHECKED)
def test_the_right_function_passes_on_fresh_inputs(exercise):
    for _ in range(5):
        assert verdict(exercise, exercise.solve).startswith("right")


@pytest.mark.parametrize("exercise", CHECKED.values(), ids=CHECKED)
def test_a_function_that_gives_its_input_back_fails(exercise):
    assert verdict(exercise, lambda given, *_: given).startswith("not yet")


def test_a_list_of_tensors_is_compared_by_its_values():
    torch = pytest.importorskip("torch")
    tensors = [torch.tensor([3.0, 2.0]), torch.tensor([0.5])]
    exercise = Exercise(
        solve=lambda n: [[3.0, 2.0], [0.5]],
        draw=lambda generator, size: (size,),
        mistakes={"a number is left out": lambda n: [3.0, 2.0]},
    )
    assert verdict(exercise, lambda n: tensors).startswith("right")
    assert verdict(exercise, lambda n: tensors[:1]).startswith("not yet")


def attempt_with(result):
    """An exercise whose answer is `[1, 2, 3]`, tried with a function that gives `result`."""
    exercise = Exercise(
        solve=lambda n: [1, 2, 3], draw=lambda generator, size: (size,), mistakes={}
    )

    def attempt(n):
        return result(n)

    return verdict(exercise, attempt)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1, 7, 3], "position 1: yours 7, expected 2"),
        ([1, 2], "position 2: yours nothing, expected 3"),
        ([1, 2, 3, 4], "position 3: yours 4, expected nothing"),
        (None, "it returned None (is a `return` missing?); expected [1, 2, 3]"),
        ("123", "it returned '123', which is a str; expected [1, 2, 3]"),
        ({1: 2}, "it returned {1: 2}, which is a dict; expected [1, 2, 3]"),
    ],
)
def test_the_first_wrong_value_is_named(result, message):
    assert attempt_with(lambda n: result) == f"not yet: attempt(1)\n  {message}"


@pytest.mark.parametrize("result", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3])])
def test_the_kind_of_sequence_does_not_count(result):
    assert attempt_with(lambda n: result).startswith("right")


@pytest.mark.parametrize(
    ("yours", "message"),
    [
        ({(1, 2): 3}, "(2, 1): yours nothing, expected 5"),
        ({(1, 2): 4, (2, 1): 5}, "(1, 2): yours 4, expected 3"),
        ({(1, 2): 3, (2, 1): 5, (9, 9): 1}, "(9, 9): yours 1, expected nothing"),
    ],
)
def test_dictionaries_are_compared_key_by_key(yours, message):
    assert exercises.difference(yours, {(1, 2): 3, (2, 1): 5}) == message


def test_an_error_names_its_line():
    def attempt(words):
        return words["nothing"]

    line = attempt.__code__.co_firstlineno + 1
    text = verdict(COUNT_PAIRS, attempt)
    assert f"it raised KeyError: 'nothing' in line {line} of the cell; expected" in text


def test_the_same_error_in_another_line_is_the_same_mistake():
    def fail(words):
        return words["nothing"]

    def fail_later(words):
        nothing = "nothing"
        return words[nothing]

    exercise = Exercise(
        solve=lambda words: 1,
        draw=lambda generator, size: ({},),
        mistakes={"there is nothing": fail},
    )
    text = verdict(exercise, fail_later)
    line = fail_later.__code__.co_firstlineno + 2
    assert f"it raised KeyError: 'nothing' in line {line} of the cell" in text
    assert "It looks as if there is nothing." in text


def test_an_unusual_mistake_is_shown_without_a_guess():
    text = verdict(MERGE_PAIR, lambda ids, pair, new_id: [777, *merge_pair(ids, pair, new_id)])
    assert "position 0: yours 777" in text
    assert "It looks as if" not in text


def test_a_function_may_change_its_argument():
    def attempt(ids, pair, new_id):
        i = 0
        while i < len(ids) - 1:
            if (ids[i], ids[i + 1]) == pair:
                ids[i : i + 2] = [new_id]
            i += 1
        return ids

    assert verdict(MERGE_PAIR, attempt).startswith("right")


def test_a_stub_that_is_half_done_is_not_attempted():
    def attempt(ids, pair, new_id):
        if len(ids) < 5:
            return merge_pair(ids, pair, new_id)
        raise NotImplementedError

    assert verdict(MERGE_PAIR, attempt) == NOT_ATTEMPTED


def test_inputs_are_fresh_and_can_be_repeated():
    def attempt(ids, merges):
        return None

    texts = {verdict(ENCODE_PRETOKEN, attempt) for _ in range(5)}
    assert len(texts) > 1
    assert len({verdict(ENCODE_PRETOKEN, attempt, seed=3) for _ in range(5)}) == 1


def merge_forever(ids, pair, new_id):
    merged, i = [], 0
    while i < len(ids):
        try:
            merged.append(ids[i])
            i += tuple(ids[i : i + 2]) != pair
        except Exception:
            break
    return merged


NEEDS_TIMER = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer on Windows")


@NEEDS_TIMER
def test_an_endless_loop_is_stopped(monkeypatch):
    monkeypatch.setattr(exercises, "TIME_LIMIT", 0.2)
    handler, start = signal.getsignal(signal.SIGPROF), time.monotonic()
    text = verdict(MERGE_PAIR, merge_forever)
    assert "it did not finish in 0.2 s; does the position grow in every branch?" in text
    assert "It looks as if" not in text
    assert time.monotonic() - start < 5
    assert signal.getsignal(signal.SIGPROF) is handler
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


@NEEDS_TIMER
def test_a_wrong_value_before_an_endless_loop_costs_one_limit(monkeypatch):
    monkeypatch.setattr(exercises, "TIME_LIMIT", 0.2)
    start = time.monotonic()

    def attempt(ids, pair, new_id):
        while len(ids) > 5:
            pass
        return [-1]

    assert "It looks as if" not in verdict(MERGE_PAIR, attempt)
    assert time.monotonic() - start < 5


def test_a_check_works_outside_the_main_thread():
    texts = []
    thread = threading.Thread(target=lambda: texts.append(verdict(MERGE_PAIR, merge_pair)))
    thread.start()
    thread.join()
    assert texts[0].startswith("right")


@pytest.mark.parametrize("yours", [{1: 3}, {(1, 2, 1): 3}, {("1", "2"): 3}, {"1 2": 3}])
def test_keys_of_another_kind_show_the_whole_result(yours):
    message = f"it returned {yours}, with keys of another kind; expected {{(1, 2): 3}}"
    assert exercises.difference(yours, {(1, 2): 3}) == message


def test_a_long_result_with_keys_of_another_kind_is_not_shown():
    yours = dict.fromkeys(range(50), 1)
    assert exercises.difference(yours, {(1, 2): 3}) == "(1, 2): yours nothing, expected 3"
