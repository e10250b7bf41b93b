"""The board: what may be claimed, what is false is told, and the committed entries hold."""

import contextlib
import copy
import dataclasses
import signal
import subprocess
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from lib.core.records import append_record, read_records
from lib.lessons.exercise import NOT_ATTEMPTED
from lib.lessons.speedrun import board, commands, exercises, ladder, referee
from lib.lessons.speedrun.board import (
    LEADERBOARD,
    board_rows,
    chance_of_faster,
    comparison,
    doubt,
    entry_of,
    fastest,
    faults,
    half_width,
    leaderboard,
    read_entries,
    tail,
)
from lib.lessons.speedrun.race import CLASSES, RECIPES, changes, edited, vocab_size_of
from lib.lessons.speedrun.referee import Fault, Run
from tests.lessons.speedrun.toy import plain_on_paper, race_on_paper

SPRINT = CLASSES["sprint"]


def run_of(seed: int, seconds: float) -> Run:
    curve = [(40_960, seconds / 2, 0.7), (81_920, seconds, 0.6 - seed / 1e4)]
    at = seconds / 2 * (1 + 0.1 / (0.1 + seed / 1e4))
    return Run(seed, 40_960 * 2 * at / seconds, at, 0.9 * at, curve, 0.61, "Once upon a time.")


def entry(name: str, seconds: list[float]) -> dict:
    runs = [run_of(seed, one) for seed, one in enumerate(seconds, start=1)]
    return entry_of(name, SPRINT, f"NAME = '{name}'\n" + ladder.start(), runs, torch.device("cpu"))


def test_the_tails_of_students_t_are_those_of_its_tables():
    # two-sided 95% and 99% points
    for degrees, point, chance in [(2, 4.303, 0.025), (4, 2.776, 0.025), (10, 3.169, 0.005)]:
        assert tail(point, degrees) == pytest.approx(chance, rel=2e-3)
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert chance_of_faster([1, 2, 3], [1, 2, 3]) == pytest.approx(0.5)


def test_a_race_ends_with_a_verdict_and_its_reason():
    mine = entry("mine", [50, 51, 52])
    elsewhere = entry("other", [90, 95, 93]) | {"device": "NVIDIA H200"}
    for other, in_turns, verdict in [
        (entry("slow", [90, 95, 93]), False, "faster: equally fast recipes seldom differ so much"),
        (entry("near", [53, 50, 57]), True, "not shown to be faster: p = 0."),
        (entry("before", [40, 41, 42]), True, "not shown to be faster: its mean is no lower"),
        (entry("few", [90, 95]), True, "not shown to be faster: a claim needs 3 seeds of each"),
        (entry("mine", [90, 95, 93]), True, "not shown to be faster: it is the same recipe"),
        (elsewhere, False, "not shown to be faster: the other was raced on NVIDIA H200"),
        (entry("loaded", [56, 57, 58]), False, "not shown to be faster: it gains 12%, which load"),
        (entry("loaded", [56, 57, 58]), True, "faster: "),
    ]:
        first, second, said = comparison(mine, other, in_turns=in_turns).split("\n")
        assert first.startswith("mine  ")
        assert "45.9 ± 2.2 s, " in first
        assert second.startswith(other["figures"]["entry"])
        assert ("in turns" in second) == in_turns
        assert said.startswith(verdict), said
    # what load may explain needs fewer tokens
    for number, run in enumerate(mine["figures"]["runs"]):
        run["tokens"] = 50_000 + number
    assert doubt(mine, entry("loaded", [56, 57, 58])) == ""


def test_the_fastest_of_the_machine_is_compared_with_if_there_is_one():
    on_gpu = entry("on a GPU", [5, 6, 7]) | {"device": "NVIDIA H200"}
    entries = [entry("slow", [90, 95, 93]), entry("quick", [50, 51, 52]), on_gpu]
    assert fastest("sprint", entries, board.machine_of(entries[0])) == entries[1]
    assert fastest("sprint", entries, "a machine without entries") == on_gpu
    assert fastest("pair", entries) is None


def test_entries_raced_in_turns_share_seeds_and_each_keeps_its_own_runs(monkeypatch, capsys):
    ran = []

    def run(source, course, seed):
        ran.append((source, seed))
        return dataclasses.replace(run_of(seed, 50 + len(ran)), story=source)

    class Course:
        race = dataclasses.make_dataclass("Race", ["device"])(torch.device("cpu"))

    monkeypatch.setattr(commands, "course_of", lambda *asked: contextlib.nullcontext(Course))
    monkeypatch.setattr(commands, "workers_for", lambda *asked: ThreadPoolExecutor(1))
    monkeypatch.setattr(commands, "run_entry", run)
    monkeypatch.setattr(commands, "seeds", lambda count: [*range(1, count + 1)])
    sources = ladder.start(), ladder.best()
    found = commands.race_in_turns([*zip(("mine", "fastest"), sources)], SPRINT, 3)
    assert ran == [(source, seed) for seed in (1, 2, 3) for source in sources]
    for record, source in zip(found, sources):
        runs = record["figures"]["runs"]
        assert [(one["seed"], one["story"]) for one in runs] == [(n, source) for n in (1, 2, 3)]
    assert "mine, seed 1: 45." in capsys.readouterr().err


@pytest.mark.parametrize("against", ["record", "fastest"])
def test_a_race_keeps_says_and_draws_how_it_compares(against, tmp_path, monkeypatch, capsys):
    entries = [entry("quick", [50, 51, 52]), entry("slow", [90, 95, 93])]
    asked = []

    def race_on_paper(sources, which, count):
        asked.extend(name for name, _ in sources)
        return [entry(name, [40, 41, 42 + 9 * n]) for n, (name, _) in enumerate(sources)]

    monkeypatch.setattr(commands, "read_entries", lambda *at: read_entries(*at) if at else entries)
    monkeypatch.setattr(commands, "race_in_turns", race_on_paper)
    (file := tmp_path / "my_run.py").write_text(ladder.best(), encoding="utf-8")
    path = commands.race(commands.RaceConfig(entry=file, against=against, board=tmp_path))
    assert asked == ["my_run"] + ["quick"] * (against == "fastest")
    (record,) = read_records(path)
    said = record["figures"]["compared"]
    assert capsys.readouterr().out.endswith(f"\n\n{said}\n")
    assert said.split("\n")[1].endswith("(raced in turns with it)") == (against == "fastest")
    verdict = "faster: " if against == "record" else "not shown to be faster: p = "
    assert said.split("\n")[2].startswith(verdict)
    picture = commands.card(commands.CardConfig(path, tmp_path / "card.png"))
    assert picture.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match=r"entry must be a record, such as .*, got .*my_run.py"):
        commands.card(commands.CardConfig(file, tmp_path / "card.png"))
    # the record before stays
    commands.race(commands.RaceConfig(entry=file, against=against, board=tmp_path))
    assert read_records(path.with_suffix(".jsonl.old")) == [record]


def test_what_is_wrong_with_a_board_is_found_before_a_race(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "race_in_turns", lambda *a: pytest.fail("it races"))
    (file := tmp_path / "my_run.py").write_text(ladder.best(), encoding="utf-8")
    (tmp_path / "board").mkdir()
    (tmp_path / "board/foreign.jsonl").write_text('{"a": 1}\n')
    for change, message in (
        ({"board": file}, "my_run.py"),
        ({"board": tmp_path / "board"}, r"foreign.jsonl holds a record that is none of a race"),
        ({"name": "a/b"}, "name must be that of a file, without a folder, got a/b"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            commands.race(commands.RaceConfig(entry=file, **({"board": tmp_path} | change)))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"entry must be a record of a race, but .*empty"):
        commands.card(commands.CardConfig(tmp_path / "empty.jsonl", tmp_path / "card.png"))


def test_the_board_says_who_is_faster_and_a_single_run_claims_nothing():
    slow, near, mine = entry("slow", [90, 95, 93]), entry("near", [53, 50, 57]), entry("one", [50])
    rows = board_rows([slow, near, mine])
    assert [row["entry"] for row in rows] == ["one", "near", "slow"]
    assert [row["faster than"] for row in rows] == ["–", "slow", "–"]
    assert [row["claim"] for row in rows] == ["1 of 3 seeds", "✓", "✓"]


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


def test_what_an_entry_changes_is_told_against_the_recipe_that_it_was_copied_from():
    mine = edited(ladder.best(), {"num_layers=2": "num_layers=3"})
    parent, changed = changes(mine)
    assert parent == "fastest"
    assert [line[0] for line in changed if "layers" in line or "VOCAB" in line] == ["-", "+"]
    assert changes(edited(ladder.start(), {"num_layers=4": "num_layers=3"}))[0] == "start"


def test_the_fastest_recipe_is_the_ladders_best_as_a_file():
    file = (RECIPES / "fastest.py").read_text(encoding="utf-8")
    assert file.split('"""', 2)[2] == ladder.best().split('"""', 2)[2]


def test_the_vocabulary_is_read_and_an_edit_is_of_text_that_occurs_once():
    assert vocab_size_of(ladder.start()) == 1024
    assert vocab_size_of("def recipe(race, seed): ...") == 1024
    with pytest.raises(ValueError, match="VOCAB_SIZE must be a number from 257 to 32768"):
        vocab_size_of("VOCAB_SIZE = 2 ** 20")
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
    measured = ladder.read()
    for entries in measured.values():
        sources = {one["figures"]["entry"]: one["figures"]["source"] for one in entries}
        assert sources.items() <= recipes.items()
        assert ladder.steps(entries).keys() == sources.keys()
    ideas = {one["figures"]["entry"] for entries in measured.values() for one in entries}
    assert [row["idea"] for row in ladder.rows(measured)] == [n for n in recipes if n in ideas]


def climbed(number: int, minute: int, seconds: float, cores: int = 2) -> dict:
    """The record of the ladder's recipe of this number, whose runs took three minutes."""
    one = entry([*ladder.recipes()][number], [seconds, seconds + 1, seconds + 2])
    return one | {"date": f"2026-11-29T16:{minute:02}:00+00:00", "cores": cores}


def test_the_ladder_compares_what_one_climb_measured():
    three = [climbed(0, 4, 60), climbed(1, 8, 59), climbed(2, 12, 58)]
    # the last began six minutes after the third had ended
    records = [*three, climbed(3, 21, 30)]
    assert [len(climb) for climb in ladder.climbs(records)] == [3, 1]
    assert [step.gain is None for step in ladder.steps(records).values()] == [False] * 3 + [True]
    assert ladder.rows({"GPU": records})[3]["GPU: times as fast"] == ""
    # other cores are another machine, whatever its name
    elsewhere = [*three, climbed(3, 13, 30, cores=4)]
    assert [len(climb) for climb in ladder.climbs(elsewhere)] == [3, 1]


def test_a_later_climb_adds_ideas_beside_the_recipe_that_it_measured_again():
    records = [climbed(0, 4, 60), climbed(1, 8, 59), climbed(2, 12, 58)]
    records += [climbed(2, 31, 100), climbed(3, 34, 50)]
    found = ladder.rows({"GPU": records})
    # processor time, a tenth less than the wall's
    assert [row["GPU: seconds"][:5] for row in found] == ["54.8 ", "53.9 ", "53.0 ", "45.9 "]
    assert found[2]["GPU: times as fast"] == "1.02"
    assert found[3]["GPU: times as fast"] == "1.98 * (over 90.8 s)"


def test_a_climb_races_what_has_no_record_beside_the_recipe_that_it_changes():
    top = [*ladder.KEPT][-1]
    records = [{"figures": {"source": source}} for source in ladder.recipes().values()]
    assert commands.to_climb((), records, on_gpu=True) == {}
    assert [*commands.to_climb((), records[:-1], on_gpu=True)] == [top, "CUDA graphs"]
    assert commands.to_climb((), records[:-1], on_gpu=False) == {}
    assert [*commands.to_climb(("QK-norm",), [], on_gpu=False)] == [
        "zero start into the residual stream",
        "QK-norm",
    ]
    assert [*commands.to_climb((), [], on_gpu=True)] == [*ladder.recipes()]


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


def test_an_interrupt_ends_the_runs_of_a_race(monkeypatch):
    def run_entry(source, course, seed):
        if seed == 1:
            is_running.wait()
            raise KeyboardInterrupt
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        referee.RUNNING.add(process)
        is_running.set()
        ended.append(process.wait())

    is_running, ended = threading.Event(), []
    monkeypatch.setattr(commands, "seeds", lambda count: [1, 2])
    monkeypatch.setattr(referee, "RUNNING", set())
    monkeypatch.setattr(commands, "run_entry", run_entry)
    course = SimpleNamespace(race=SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(commands, "courses_of", lambda *given: defaultdict(lambda: course))
    monkeypatch.setattr(commands, "workers_for", lambda *given: ThreadPoolExecutor(2))
    with pytest.raises(KeyboardInterrupt):
        commands.race_in_turns([("mine", ladder.best())], CLASSES["sprint"], 2)
    assert ended == [-signal.SIGKILL]
