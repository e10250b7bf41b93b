"""The race of notebook 12: its judge, its referee, its leaderboard, and the committed entries."""

import copy
import dataclasses
import itertools
import json
import time

import numpy as np
import pytest
import torch

from lib.core.records import read_records
from lib.data import get_batch
from lib.lessons.exercise import NOT_ATTEMPTED, verdict
from lib.lessons.speedrun import exercises, race
from lib.lessons.speedrun.exercises import (
    RUN_TO_TARGET,
    SEEDS,
    TIME_TO_TARGET,
    race_verdict,
    referee,
)
from lib.lessons.speedrun.race import (
    Judged,
    at_target,
    board_rows,
    compiled,
    digest,
    edit,
    enter,
    faults,
    reference_entries,
    source_of,
    summary,
)
from lib.training.evaluation import evaluate
from tests.lessons.speedrun.toy import notebook_with_toy_race, toy_race

CURVE = [Judged(100, 1.0, 3.0), Judged(200, 3.0, 2.0), Judged(300, 4.0, 1.0)]


@pytest.fixture
def notebook():
    return notebook_with_toy_race()


def good_recipe(target_race, seed):
    """The notebook's last kept recipe."""
    return notebook_with_toy_race()["best"](target_race, seed)


@pytest.fixture
def entry(tmp_path):
    """An entry of three seeds that stands."""
    rules = dataclasses.replace(toy_race(), board=tmp_path / "board.jsonl")
    curves = {seed: [(2048, 1.0, 7.0), (4096, 2.0, 5.5 - seed / 100)] for seed in SEEDS}
    return enter(rules, "mine", good_recipe, curves)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (3.5, Judged(100, 1.0, 3.0)),
        (2.5, Judged(150, 2.0, 2.5)),
        (2.0, Judged(200, 3.0, 2.0)),
        (0.5, None),
    ],
)
def test_the_target_is_read_off_a_straight_line(target, expected):
    assert at_target(CURVE, target) == expected
    assert TIME_TO_TARGET.solve(CURVE, target) == (expected and expected.seconds)


def test_the_libs_reading_of_a_curve_passes_the_exercise():
    def attempt(curve, target):
        found = at_target(curve, target)
        return found and found.seconds

    assert verdict(TIME_TO_TARGET, attempt).startswith("right")


def test_the_referee_stops_a_real_recipe_at_its_target(notebook):
    rules = toy_race()
    curve = referee(notebook["best"], rules, 1)
    assert curve[-1][2] <= rules.target < curve[-2][2]
    counts = [0, *(point[0] for point in curve)]
    assert (np.diff(counts) >= rules.judged_every).all()
    assert (np.diff(counts) < rules.judged_every + 8 * 64).all()
    # the same seed takes the same steps
    again = referee(notebook["best"], rules, 1)
    assert [point[0] for point in again] == counts[1:]


def test_a_referee_with_another_clock_is_told():
    def attempt(recipe, rules, seed):
        clocked = copy.copy(rules)
        clocked.clock = time.perf_counter
        return referee(lambda _, seed: recipe(rules, seed), clocked, seed)

    text = verdict(RUN_TO_TARGET, exercises.on_toys(attempt))
    assert "race.clock() was never read" in text


def test_a_toy_race_says_what_its_numbers_are():
    text = verdict(RUN_TO_TARGET, exercises.on_toys(lambda recipe, rules, seed: []))
    assert "a toy race with target=" in text
    assert "steps of (seconds, tokens, bits after it) [(" in text


def test_a_recipe_that_ends_the_generator_is_reported_not_hung():
    def attempt(recipe, rules, seed):
        rules.clock()
        return list(recipe(rules, seed))

    text = verdict(RUN_TO_TARGET, exercises.on_toys(attempt))
    assert "the run goes on long after its target and its limit" in text


def test_a_model_that_is_not_finite_is_not_judged(notebook):
    model, _ = next(notebook["recipe"](toy_race(), 0))
    with torch.no_grad():
        model.output_weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="the model is at nan bits per byte; try a lower rate"):
        toy_race().judge(model)


def test_a_batch_is_of_the_training_tokens_and_counted():
    rules = dataclasses.replace(toy_race(), handed_out=[])
    x, y = rules.batch(2, 8, np.random.default_rng(0))
    expected = get_batch(rules.train_tokens, 2, 8, "cpu", generator=np.random.default_rng(0))
    assert torch.equal(x, expected[0])
    assert torch.equal(y, expected[1])
    rules.batch(3, 4, np.random.default_rng(0))
    assert rules.handed_out == [16, 12]


def test_the_judge_is_that_of_the_workbook(notebook):
    rules = toy_race()
    model, _ = next(notebook["recipe"](rules, 0))
    tokens, sizes = rules.validation_tokens, rules.bytes_of_token
    expected = evaluate(model, tokens, sizes, batch_size=4, device="cpu")
    assert rules.judge(model) == pytest.approx(expected.bits_per_byte, rel=1e-5)
    assert rules.rules()["validation_tokens"] == expected.tokens == 512


def test_an_edit_is_of_text_that_occurs_once_and_can_be_read_again(notebook):
    start = notebook["recipe"]
    changed = edit(start, {"num_layers=4": "num_layers=3"})
    assert "num_layers=3" in source_of(changed)
    assert len(next(changed(toy_race(), 0))[0].layers) == 3
    assert "num_layers=4" in source_of(start)
    for old in ("step", "nowhere"):
        with pytest.raises(ValueError, match="must occur once in the recipe"):
            edit(start, {old: "x"})


def test_the_processor_clock_does_not_count_waiting():
    rules = dataclasses.replace(toy_race(), by_processor=True)
    before = rules.clock()
    time.sleep(0.2)
    assert rules.clock() - before < 0.1
    wall = toy_race()
    before = wall.clock()
    time.sleep(0.2)
    assert wall.clock() - before >= 0.2


# Claims


def test_a_true_claim_stands(entry):
    assert faults(entry, toy_race()) == []
    assert summary(entry)["seconds"] == pytest.approx(1 + 1 / 1.52)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("rules", "validation_sha256"), "0", "validation_sha256 is 0, not"),
        (("rules", "validation_tokens"), 99, "validation_tokens is 99, not 512"),
        (("rules", "target"), 2.5, "target is 2.5, not 6.0"),
        (("runs", 0, "seed"), 2, "2 of 3 seeds"),
        (("runs", 0, "seed"), None, "2 of 3 seeds"),
        (("runs", 1, "seconds"), 0.5, "seed 2: tokens or seconds are not those of its curve"),
        (("runs", 1, "tokens"), 5.0, "seed 2: tokens or seconds are not those of its curve"),
        (("runs", 2, "curve"), [[2048, 1.0, 7.0]], "seed 3 did not reach the target"),
        (("runs", 2, "curve", 0, 0), 3900, "seed 3 was judged too often"),
        (("runs", 2, "curve"), [[2048, 1.0, 7.0], [4096, 2.0, 5.48]], "gave the same curve"),
        (("source",), "def recipe(race, seed): ...", "the recipe is not the one that ran"),
    ],
)
def test_a_false_claim_is_told_by_what_is_false(entry, path, value, expected):
    forged = copy.deepcopy(entry)
    place = forged["figures"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert any(expected in fault for fault in faults(forged, toy_race()))


def test_the_board_is_sorted_and_leaves_out_other_rules(entry, monkeypatch):
    monkeypatch.setattr(race, "reference_entries", dict)
    slow = copy.deepcopy(entry)
    for run in slow["figures"]["runs"]:
        run["seconds"] *= 2
    other = copy.deepcopy(entry)
    other["figures"]["rules"]["target"] = 9.0
    rows = board_rows(toy_race(), [slow, other, entry])
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert [row["claim"] == "✓" for row in rows] == [True, False]
    assert "not those of its curve" in rows[1]["claim"]


# The open exercise


def test_a_faster_recipe_wins_and_is_kept_with_its_seeds(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr(exercises, "YARDSTICK_SECONDS", 0.1)
    board = tmp_path / "board.jsonl"
    rules = dataclasses.replace(toy_race(), board=board)
    start = notebook["start"].tokens
    better = edit(notebook["best"], {"num_layers=2": "num_layers=1"})
    text = race_verdict(better, notebook["recipe"], 3 * start, rules)
    assert text.startswith("right: ")
    (kept,) = read_records(board)
    assert [run["seed"] for run in kept["figures"]["runs"]] == list(SEEDS)
    assert kept["figures"]["source"] == source_of(better)
    assert faults(kept, toy_race()) == []


def test_a_copy_of_a_recipe_of_the_lesson_is_none_of_the_reader_s(notebook):
    best = notebook["best"]
    source = source_of(best).replace("def recipe(", "def mine(").replace("  # ", "  # my ")
    calls = "def mine(race, seed):\n    yield from recipes['short sequences'](race, seed)\n"
    names = best.__globals__ | {"recipes": {"short sequences": best}}
    for text in (source, calls):
        attempt = compiled(text, names, "mine")
        told = race_verdict(attempt, notebook["recipe"], 1e9, toy_race())
        assert told.startswith('not yet: this is the recipe "short sequences" as it is')


def test_a_recipe_that_is_no_faster_is_told_how_far_it_is(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr(exercises, "YARDSTICK_SECONDS", 0.1)
    board = tmp_path / "board.jsonl"
    rules = dataclasses.replace(toy_race(), board=board)
    slow = edit(notebook["best"], {"num_layers=2": "num_layers=3"})
    text = race_verdict(slow, notebook["recipe"], 100.0, rules)
    assert text.startswith("not yet: ")
    assert "get to" in text
    assert not board.exists()


def stands_still(rules, seed):
    model, _ = next(notebook_with_toy_race()["recipe"](rules, seed))
    while True:
        yield model, rules.batch(8, 64, np.random.default_rng(seed))[0].numel()


def breaks(rules, seed):
    yield from notebook_with_toy_race()["nothing"]


def returns(rules, seed):
    return list(next(notebook_with_toy_race()["recipe"](rules, seed)))


def swaps(rules, seed):
    for model, tokens in good_recipe(rules, seed):
        yield tokens, model


def counts(rules, seed):
    yield np.bincount(rules.train_tokens), len(rules.train_tokens)


def ends(rules, seed):
    yield from itertools.islice(good_recipe(rules, seed), 3)


def says_a_tenth(rules, seed):
    for model, tokens in good_recipe(rules, seed):
        yield model, tokens // 10


def says_a_hundredfold(rules, seed):
    for model, tokens in good_recipe(rules, seed):
        yield model, 100 * tokens


def takes_other_tokens(rules, seed):
    elsewhere = dataclasses.replace(rules, handed_out=[])
    yield from good_recipe(elsewhere, seed)


def trains_on_the_held_out_text(rules, seed):
    yield from good_recipe(dataclasses.replace(rules, train_tokens=rules.validation_tokens), seed)


def trains_before_it_yields(rules, seed):
    for step, (model, tokens) in enumerate(good_recipe(rules, seed), start=1):
        if step % 20 == 0:
            yield model, 20 * tokens


def ignores_its_seed(rules, seed):
    yield from good_recipe(rules, 0)


def moves_the_target(rules, seed):
    object.__setattr__(rules, "target", 9.0)
    yield from stands_still(rules, seed)


def changes_the_judge(rules, seed):
    rules.bytes_of_token[0] += 1
    yield from good_recipe(rules, seed)


def shares_its_model(rules, seed, kept={}):  # noqa: B006
    for model, tokens in good_recipe(rules, seed):
        yield kept.setdefault("model", model), tokens


def untouched(rules, seed):
    raise NotImplementedError("your code here")


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (stands_still, "seed 1 ended at"),
        (breaks, "with seed 1 it raised KeyError"),
        (returns, "a recipe is a generator; let it `yield model, tokens`"),
        (swaps, "a recipe yields a TransformerLM and an int, got int and TransformerLM"),
        (counts, "a recipe yields a TransformerLM and an int, got ndarray and int"),
        (ends, "the recipe ended after 1,536 tokens; loop with itertools.count"),
        (says_a_tenth, "it says 102 tokens, but race.batch handed out 1,024"),
        (says_a_hundredfold, "it says 51,200 tokens, but race.batch handed out 512"),
        (takes_other_tokens, "but race.batch handed out 0; take every batch from there"),
        (trains_on_the_held_out_text, "with seed 1 it raised ValueError: "),
        (trains_before_it_yields, "start from random weights, and yield after each step"),
        (ignores_its_seed, "two seeds gave the same curve"),
        (moves_the_target, "seed 1 ended at"),
        (changes_the_judge, "the rules or the judge's text changed meanwhile"),
        (shares_its_model, "one model is trained in several runs; build it inside the recipe"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said(attempt, expected, notebook, tmp_path, monkeypatch):
    monkeypatch.setattr(exercises, "YARDSTICK_SECONDS", 0.01)
    board = tmp_path / "board.jsonl"
    whole = toy_race()
    rules = dataclasses.replace(whole, bytes_of_token=whole.bytes_of_token.copy(), board=board)
    if attempt in (stands_still, moves_the_target):
        rules = dataclasses.replace(rules, limit=0.1)
    text = race_verdict(attempt, notebook["recipe"], 1e9, rules)
    assert text.startswith("not yet: ")
    assert expected in text
    assert not board.exists()


def test_an_untouched_recipe_is_not_attempted(notebook):
    assert race_verdict(untouched, notebook["recipe"], 1e9, toy_race()) == NOT_ATTEMPTED


# The committed entries


def test_the_committed_entries_are_of_the_notebooks_recipes_and_stand(notebook):
    entries = reference_entries()
    assert list(entries) == list(notebook["recipes"])
    for name, recipe in notebook["recipes"].items():
        figures = entries[name]["figures"]
        assert figures["source_sha256"] == digest(recipe), f"{name}: run `lib lessons race` again"
        assert [run["seed"] for run in figures["runs"]] == list(SEEDS)
        assert entries[name]["device"]
        assert all(run["curve"][-1][2] <= figures["rules"]["target"] for run in figures["runs"])
        assert json.dumps(figures)


def test_the_kept_ideas_are_faster_and_the_start_is_the_slowest():
    found = {name: summary(entry) for name, entry in reference_entries().items()}
    kept = ["start", "higher rate", "two layers", "short sequences"]
    seconds = [found[name]["seconds"] for name in kept]
    assert seconds == sorted(seconds, reverse=True)
