"""The board: what may be claimed, what is false is told, and the committed entries hold."""

import copy
import dataclasses
import statistics

import pytest
import torch

from lib.core.records import append_record
from lib.lessons.exercise import NOT_ATTEMPTED
from lib.lessons.speedrun import board, commands, exercises, ladder
from lib.lessons.speedrun.board import (
    LEADERBOARD,
    board_rows,
    chance_of_faster,
    draw_card,
    entry_of,
    faults,
    half_width,
    leaderboard,
    read_entries,
    tail,
)
from lib.lessons.speedrun.race import CLASSES, edited, vocab_size_of
from lib.lessons.speedrun.referee import Fault, Run
from tests.lessons.speedrun.toy import plain_on_paper, race_on_paper

SPRINT = CLASSES["sprint"]


def run_of(seed: int, seconds: float) -> Run:
    curve = [(40_960, seconds / 2, 0.7), (81_920, seconds, 0.6 - seed / 1e4)]
    at = seconds / 2 * (1 + 0.1 / (0.1 + seed / 1e4))
    return Run(seed, 40_960 * 2 * at / seconds, at, 0.9 * at, curve, 0.61, "Once upon a time.")


def entry(name: str, seconds: list[float]) -> dict:
    runs = [run_of(seed, one) for seed, one in enumerate(seconds, start=1)]
    return entry_of(name, SPRINT, f"# {name}\n" + ladder.start(), runs, torch.device("cpu"))


def test_the_tails_of_students_t_are_those_of_its_tables():
    # two-sided 95% and 99% points
    for degrees, point, chance in [(2, 4.303, 0.025), (4, 2.776, 0.025), (10, 3.169, 0.005)]:
        assert tail(point, degrees) == pytest.approx(chance, rel=2e-3)
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert chance_of_faster([1, 2, 3], [1, 2, 3]) == pytest.approx(0.5)


def test_a_gain_that_load_may_explain_needs_fewer_tokens():
    mine, loaded = entry("mine", [50, 51, 52]), entry("the same", [56, 57, 58])
    assert board_rows([mine, loaded])[0]["faster than"] == "–"
    for number, run in enumerate(mine["figures"]["runs"]):
        run["tokens"] = 50_000 + number
    assert board_rows([mine, loaded])[0]["faster than"] == "the same"


def test_a_single_run_is_on_the_board_and_claims_nothing():
    (row, _) = board_rows([entry("one", [50]), entry("slow", [90, 95, 93])])
    assert (row["seconds"], row["faster than"], row["claim"]) == ("45.0", "–", "1 of 3 seeds")


def test_faster_is_said_only_where_chance_would_not():
    clear, near, slow = (
        entry("clear", [50, 51, 52]),
        entry("near", [53, 50, 57]),
        entry("slow", [90, 95, 93]),
    )
    rows = {row["entry"]: row for row in board_rows([slow, near, clear])}
    assert [*rows] == ["clear", "near", "slow"]
    assert [row["faster than"] for row in rows.values()] == ["slow", "slow", "–"]
    assert all(row["claim"] == "✓" for row in rows.values())


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("class", "target"), 0.9, "the rules of 'sprint' are others"),
        (("runs", 0, "seed"), 2, "2 of 3 seeds"),
        (("runs", 1, "seconds"), 0.5, "seed 2: tokens or seconds are not those of its curve"),
        (("runs", 2, "curve"), [[40_960, 30.0, 0.7]], "seed 3 did not reach the target"),
        (("runs", 0, "fresh_bits"), 0.8, "seed 1 is worse on fresh text"),
        (("source",), "def recipe(race, seed): ...", "the recipe is not the one that ran"),
    ],
)
def test_a_false_claim_is_told_by_what_is_false(path, value, expected):
    forged = copy.deepcopy(entry("forged", [50, 51, 52]))
    place = forged["figures"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert any(expected in fault for fault in faults(forged))


def test_a_submission_is_checked_and_its_sprint_raced_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(commands, "LEADERBOARD", tmp_path / "LEADERBOARD.md")
    monkeypatch.setattr(commands, "read_entries", lambda: read_entries(tmp_path))
    append_record(tmp_path / "mine.jsonl", mine := entry("mine", [50, 51, 52]))
    (tmp_path / "LEADERBOARD.md").write_text(leaderboard([mine]), encoding="utf-8")
    raced = []
    again = [mine]
    monkeypatch.setattr(commands, "race_source", lambda *asked: raced.append(asked[0]) or again[0])
    config = commands.CheckConfig(entries=(tmp_path / "mine.jsonl",))
    assert commands.check(config) == 0
    assert raced == ["mine"]
    (tmp_path / "LEADERBOARD.md").write_text("mine is the fastest", encoding="utf-8")
    assert commands.check(config) == 1
    assert "not made from the records" in capsys.readouterr().out
    # its source does not do what its record says
    again[0] = copy.deepcopy(mine)
    for run in again[0]["figures"]["runs"]:
        run["tokens"] *= 2
    assert commands.check(config) == 1
    assert "mine.jsonl: raced again, it takes" in capsys.readouterr().out


def test_a_card_is_one_picture(tmp_path):
    path = draw_card(entry("mine", [50, 51, 52]), tmp_path / "card.png")
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_the_vocabulary_is_read_from_the_file_and_checked():
    assert vocab_size_of(ladder.start()) == 1024
    assert vocab_size_of("def recipe(race, seed): ...") == 1024
    with pytest.raises(ValueError, match="VOCAB_SIZE must be a number from 257 to 32768"):
        vocab_size_of("VOCAB_SIZE = 2 ** 20")


def test_an_edit_is_of_text_that_occurs_once():
    with pytest.raises(ValueError, match="must occur once in the recipe, found 2 times"):
        edited("a a", {"a": "b"})


# What is committed


def test_the_leaderboard_is_made_from_the_committed_entries_which_hold():
    entries = read_entries()
    assert leaderboard(entries) == LEADERBOARD.read_text(encoding="utf-8")
    assert [faults(one) for one in entries] == [[]] * len(entries)
    sources = {one["figures"]["entry"]: one["figures"]["source"] for one in entries}
    ours = {"start": ladder.start(), "fastest": ladder.best()}
    assert [name for name, text in ours.items() if sources.get(name, text) != text] == []


def test_the_ladder_has_a_recipe_for_each_idea_and_its_records_are_of_them():
    recipes = ladder.recipes()
    assert len(ladder.KEPT) >= 10
    assert len({*recipes.values()}) == len(recipes)
    for entries in ladder.read().values():
        assert {name: one["figures"]["source"] for name, one in entries.items()}.items() <= (
            recipes.items()
        )
        assert ladder.steps(entries).keys() == entries.keys()
    ideas = {name for entries in ladder.read().values() for name in entries}
    assert [row["idea"] for row in ladder.rows(ladder.read())] == [n for n in recipes if n in ideas]
    assert dataclasses.asdict(SPRINT)["target"] == 0.6
    assert statistics.mean(board.times(entry("mine", [50, 51, 52]))) < 51


# The open exercise


def my_recipe(race, seed):
    yield from ()


def untouched(race, seed):
    raise NotImplementedError("your code here")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (exercises.as_file(my_recipe), "right: "),
        (exercises.as_file(untouched), NOT_ATTEMPTED),
        (ladder.start().replace("# of the norms", "# of all norms"), "not yet: this is the plain"),
    ],
)
def test_an_entry_is_told_whether_it_is_faster(source, told, tmp_path, monkeypatch):
    monkeypatch.setattr(exercises, "race_source", race_on_paper)
    monkeypatch.setattr(exercises, "read_entries", plain_on_paper)
    monkeypatch.setattr(exercises, "own_board", lambda: tmp_path)
    assert exercises.race_verdict(source).startswith(told)
    assert (tmp_path / "my_recipe.jsonl").exists() == told.startswith("right")


def test_a_fault_of_an_entry_is_its_verdict(tmp_path, monkeypatch):
    source = exercises.as_file(my_recipe)
    monkeypatch.setattr(exercises, "own_board", lambda: tmp_path)
    monkeypatch.setattr(exercises, "race_source", raises)
    monkeypatch.setattr(exercises, "read_entries", list)
    assert "the plain recipe has no record" in exercises.race_verdict(source)
    monkeypatch.setattr(exercises, "read_entries", plain_on_paper)
    assert exercises.race_verdict(source) == "not yet: it has seen that"


def raises(*asked):
    raise Fault("it has seen that")
