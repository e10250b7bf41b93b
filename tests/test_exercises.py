"""Each exercise of each notebook both ways, each named mistake, and how a check reports."""

import random
import re
import signal
import threading
import time
from pathlib import Path

import nbformat
import numpy as np
import pytest

from lib import exercises
from lib.exercises import COUNT_PAIRS, ENCODE_PRETOKEN, MERGE_PAIR, Exercise, verdict
from lib.tokenizer import merge_pair

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
CHECKED = {"count_pairs": COUNT_PAIRS, "merge": MERGE_PAIR, "encode_pretoken": ENCODE_PRETOKEN}


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
    exec(code, {"exercises": exercises, "merge_pair": merge_pair})


@pytest.mark.parametrize(("stub", "help_text"), EXERCISES)
def test_an_untouched_stub_is_not_attempted(stub, help_text, capsys):
    run(stub)
    assert capsys.readouterr().out == "not attempted\n"


@pytest.mark.parametrize(("stub", "help_text"), EXERCISES)
def test_the_folded_solution_passes(stub, help_text, capsys):
    hint, solution = help_text.split("<summary>Solution</summary>")
    assert "<summary>Hint</summary>" in hint
    code = re.search(r"```python\n(.*?)```", solution, re.DOTALL)[1]
    call = stub.strip().splitlines()[-1]
    run(f"{code}\n{call}")
    assert capsys.readouterr().out.startswith("right")


def test_the_tokenizer_notebook_has_its_exercises():
    assert sum("01_" in case.id for case in EXERCISES) == 3


MISTAKES = [
    pytest.param(exercise, name, mistake, id=mistake.__name__.strip("_"))
    for exercise in CHECKED.values()
    for name, mistake in exercise.mistakes.items()
]


@pytest.mark.parametrize(("exercise", "name", "mistake"), MISTAKES)
@pytest.mark.parametrize("seed", range(5))
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


@pytest.mark.parametrize("exercise", CHECKED.values(), ids=CHECKED)
def test_inputs_start_short_and_hold_an_empty_one(exercise):
    generator = random.Random(0)
    inputs = [exercise.draw(generator, 1 + trial // 10) for trial in range(exercises.TRIALS)]
    assert max(len(repr(arguments)) for arguments in inputs[:5]) < 150
    assert any(not arguments[0] or () in arguments[0] for arguments in inputs)


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

    assert verdict(MERGE_PAIR, attempt) == "not attempted"


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
    handler, start = signal.getsignal(signal.SIGALRM), time.monotonic()
    text = verdict(MERGE_PAIR, merge_forever)
    assert "it did not finish in 0.2 s; does the position grow in every branch?" in text
    assert "It looks as if" not in text
    assert time.monotonic() - start < 5
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


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


def merge_as_text(ids, pair, new_id):
    text = " ".join(map(str, ids)).replace("{} {}".format(*pair), str(new_id))
    return [int(token) for token in text.split()]


def merge_same_objects(ids, pair, new_id):
    merged, i = [], 0
    while i < len(ids):
        found = i + 1 < len(ids) and ids[i] is pair[0] and ids[i + 1] is pair[1]
        merged.append(new_id if found else ids[i])
        i += 2 if found else 1
    return merged


def merge_and_filter(ids, pair, new_id):
    ids = list(ids)
    for i in range(len(ids) - 1):
        if (ids[i], ids[i + 1]) == pair:
            ids[i : i + 2] = [new_id, None]
    return [token for token in ids if token]


@pytest.mark.parametrize("attempt", [merge_as_text, merge_same_objects, merge_and_filter])
def test_a_merge_that_is_right_for_some_ids_only_fails(attempt):
    assert attempt([1, 2, 1, 2, 2], (1, 2), 9) == [9, 9, 2]
    for seed in range(40):
        assert verdict(MERGE_PAIR, attempt, seed=seed).startswith("not yet")


def test_a_list_slice_compared_with_a_tuple_is_named():
    def attempt(ids, pair, new_id):
        return [new_id] if ids[:2] == pair else ids

    assert "a list slice never equals a tuple" in verdict(MERGE_PAIR, attempt)


def test_merges_come_in_any_order():
    def attempt(ids, merges):
        for pair in merges:
            ids = merge_pair(ids, pair, merges[pair])
        return ids

    for seed in range(20):
        assert "in the dictionary's order" in verdict(ENCODE_PRETOKEN, attempt, seed=seed)


def test_overwriting_a_count_is_named_for_a_single_word():
    overwriting = exercises._count_overwriting
    exercise = Exercise(COUNT_PAIRS.solve, lambda *_: ({(2, 2, 2): 2},), COUNT_PAIRS.mistakes)
    text = verdict(exercise, lambda words: overwriting(words))
    assert "(2, 2): yours 2, expected 4" in text
    names = {function: name for name, function in COUNT_PAIRS.mistakes.items()}
    assert names[overwriting] == "a new count overwrites the one before; add to it"


@pytest.mark.parametrize("yours", [{1: 3}, {(1, 2, 1): 3}, {("1", "2"): 3}, {"1 2": 3}])
def test_keys_of_another_kind_show_the_whole_result(yours):
    message = f"it returned {yours}, with keys of another kind; expected {{(1, 2): 3}}"
    assert exercises.difference(yours, {(1, 2): 3}) == message


def test_a_long_result_with_keys_of_another_kind_is_not_shown():
    yours = dict.fromkeys(range(50), 1)
    assert exercises.difference(yours, {(1, 2): 3}) == "(1, 2): yours nothing, expected 3"
