"""The exercises of notebook 01: their inputs, and wrong answers that are nearly right."""

import pytest

from lib.lessons.exercise import Exercise, draw_inputs, verdict
from lib.lessons.tokenizer.exercises import COUNT_PAIRS, ENCODE_PRETOKEN, MERGE_PAIR


@pytest.mark.parametrize("exercise", [COUNT_PAIRS, MERGE_PAIR, ENCODE_PRETOKEN])
def test_inputs_start_short_and_hold_an_empty_one(exercise):
    inputs = draw_inputs(exercise, 0)
    assert max(len(repr(arguments)) for arguments in inputs[:5]) < 150
    assert any(not arguments[0] or () in arguments[0] for arguments in inputs)


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
def test_a_merge_that_is_right_only_for_some_ids_fails(attempt):
    assert attempt([1, 2, 1, 2, 2], (1, 2), 9) == [9, 9, 2]
    for seed in range(5):
        assert verdict(MERGE_PAIR, attempt, seed=seed).startswith("not yet")


def test_overwriting_a_count_is_named_for_a_single_word():
    name = "a new count overwrites the one before; add to it"
    overwriting = COUNT_PAIRS.wrong_functions()[name]
    exercise = Exercise(COUNT_PAIRS.solve, lambda *_: ({(2, 2, 2): 2},), COUNT_PAIRS.mistakes)
    text = verdict(exercise, lambda words: overwriting(words))
    assert "(2, 2): yours 2, expected 4" in text
