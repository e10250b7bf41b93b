"""`python -m lib race`: race an entry, keep it on a board, draw its card, check a submission."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch

from lib.core.files import make_folder
from lib.core.hardware import available_cpus, device_name, pick_device
from lib.core.records import append_record, read_records
from lib.core.settings import PositiveInt, require, settings
from lib.lessons.notebook import workspace
from lib.lessons.speedrun import ladder
from lib.lessons.speedrun.board import (
    FOLDER,
    LEADERBOARD,
    comparison,
    draw_card,
    entry_of,
    fastest,
    faults,
    leaderboard,
    machine_of,
    mean_and_interval,
    read_entries,
    times,
    tokens,
    write_leaderboard,
)
from lib.lessons.speedrun.race import CLASSES, RECIPES, RaceClass, vocab_size_of
from lib.lessons.speedrun.referee import (
    FEWEST_SEEDS,
    Course,
    Run,
    check_distinct,
    course_of,
    end_all,
    run_entry,
    seeds,
)

# How much more tokens an entry may take with other seeds, which change them by a few percent.
SAME_TOKENS = 1.15
ClassName = Literal["sprint", "pair", "full"]


def own_board() -> Path:
    """The reader's own board; git ignores it."""
    return workspace() / "artifacts/local/race"


@settings
class RaceConfig:
    """An entry, and the class that it is raced in."""

    entry: Path = RECIPES / "fastest.py"
    """The file with `recipe(race, seed)`."""

    race_class: ClassName = "sprint"
    """`sprint` (a laptop, a minute), `pair` (two ranks) or `full` (TinyStories, on a GPU)."""

    name: str = ""
    """The entry's name on the board (default: that of its file)."""

    against: Literal["record", "fastest"] = "record"
    """The comparison: with the `record` of the class's fastest entry, or with that entry
    (`fastest`), raced here in turns with yours, seed by seed, which takes as long again."""

    seeds: PositiveInt = FEWEST_SEEDS
    """Runs, each with a seed that the referee draws; fewer than three are no claim."""

    board: Path = dataclasses.field(default_factory=own_board)
    """The folder for the record; `artifacts/race` for a submission."""


@contextlib.contextmanager
def said(step: str, total: int | None) -> Iterator[Any]:
    """Say what is being made, once."""
    print(step, file=sys.stderr, flush=True)
    yield lambda count: None


def workers_for(device: torch.device, which: RaceClass) -> ThreadPoolExecutor:
    """Threads that each follow a run: one on a GPU, on a CPU as many as have a core for a rank."""
    if device.type != "cpu":
        return ThreadPoolExecutor(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    return ThreadPoolExecutor(max(1, available_cpus() // which.ranks))


def courses_of(
    which: RaceClass, sources: Sequence[str], stack: contextlib.ExitStack
) -> dict[int, Course]:
    """Vocabulary -> course, for all vocabularies of entries; they last as long as `stack`."""
    sizes = {vocab_size_of(source): source for source in sources}
    return {
        size: stack.enter_context(course_of(which, source, said)) for size, source in sizes.items()
    }


def race_in_turns(
    entries: Sequence[tuple[str, str]], which: RaceClass, count: int
) -> list[dict[str, Any]]:
    """Race entries, (name, source), and return their records.

    Each seed is run by all of them before the next; on a CPU runs are side by side, on one thread
    each.

    Raises:
        Fault: one broke a rule, failed, or did not reach the target.
    """

    def run(name: str, source: str, course: Course, seed: int) -> Run:
        found = run_entry(source, course, seed)
        say = f"{found.seconds:.1f} s"
        if course.race.device.type == "cpu":
            say = f"{found.processor_s:.1f} s of processor time, {say} on the wall"
        say += f", {found.tokens:,.0f} tokens"
        print(f"{name}, seed {seed}: {say}", file=sys.stderr, flush=True)
        return found

    with contextlib.ExitStack() as stack:
        courses = courses_of(which, [source for _, source in entries], stack)
        tracks = [(name, source, courses[vocab_size_of(source)]) for name, source in entries]
        device = tracks[0][2].race.device
        workers = stack.enter_context(workers_for(device, which))
        jobs = [(*track, seed) for seed in seeds(count) for track in tracks]
        try:
            runs = list(workers.map(run, *zip(*jobs)))
        except BaseException:
            # leaving the workers waits for them
            end_all()
            raise
    records = []
    for number, (name, source) in enumerate(entries):
        its = runs[number :: len(entries)]
        check_distinct(its)
        records.append(entry_of(name, which, source, its, device))
    return records


def race_source(name: str, source: str, which: RaceClass, count: int) -> dict[str, Any]:
    """Race an entry alone, and return its record."""
    (record,) = race_in_turns([(name, source)], which, count)
    return record


def keep(record: dict[str, Any], folder: Path) -> Path:
    """Write an entry's record into a board's folder; one of its name before is `NAME.jsonl.old`."""
    make_folder(folder)
    path = folder / f"{record['figures']['entry']}.jsonl"
    if path.exists():
        path.replace(path.with_suffix(".jsonl.old"))
    append_record(path, record)
    return path


def race(config: RaceConfig) -> Path:
    """Race an entry with seeds of the referee's, keep its record, and compare it."""
    require(config.entry.is_file(), f"entry must be a file with a recipe, got {config.entry}")
    source = config.entry.read_text(encoding="utf-8")
    name = config.name or config.entry.stem
    require(Path(name).name == name, f"name must be that of a file, without a folder, got {name}")
    # what is wrong with the board is found before the race
    make_folder(config.board)
    read_entries(config.board)
    which = CLASSES[config.race_class]
    entries, others = read_entries(), []
    if config.against == "fastest":
        best = fastest(which.name, entries)
        require(best is not None, f"against must be 'record': the board has no {which.name} yet")
        others = [(best["figures"]["entry"], best["figures"]["source"])]
    record, *raced = race_in_turns([(name, source), *others], which, config.seeds)
    other = raced[0] if raced else fastest(which.name, entries, machine_of(record))
    compared = f"{name}: {mean_and_interval(times(record))} s; the board has no {which.name} yet"
    if other is not None:
        compared = comparison(record, other, in_turns=bool(raced))
    record["figures"]["compared"] = compared
    path = keep(record, config.board)
    print(record["figures"]["runs"][0]["story"], compared, sep="\n\n")
    write_leaderboard(config.board)
    return path


def board() -> Path:
    """Make LEADERBOARD.md anew from the committed records."""
    return write_leaderboard()


@settings
class CardConfig:
    """The entry that is drawn."""

    entry: Path | None = None
    """Its record (default: the newest on your own board)."""

    output: Path = Path("race_card.png")
    """The picture."""


def card(config: CardConfig) -> Path:
    """Draw one picture of an entry to share."""
    newest = sorted(own_board().glob("*.jsonl"), key=lambda path: path.stat().st_mtime)[-1:]
    path = config.entry or next(iter(newest), None)
    require(path is not None, "no entry is on your board yet; race one: python -m lib race FILE")
    found = path.suffix == ".jsonl" and path.is_file()
    require(found, f"entry must be a record, such as {own_board() / 'my_run.jsonl'}, got {path}")
    entries = read_entries(path)
    require(entries, f"entry must be a record of a race, but {path} holds none")
    return draw_card(entries[-1], config.output)


@settings
class CheckConfig:
    """A submission to the committed board."""

    entries: tuple[Path, ...] = ()
    """The records to race again (default: those that differ from `base`)."""

    base: str = "origin/main"
    """The branch that a submission is compared with."""


def check(config: CheckConfig) -> int:
    """Check a submission: its claim holds, the board is made from it, and its sprint runs again.

    Seconds are of another machine, but the tokens to the target are not.

    Returns:
        The exit code: 0 if all is well.
    """
    entries = config.entries or changed_entries(config.base)
    wrong = []
    for path in entries:
        (record,) = read_records(path)
        found = faults(record)
        if record["figures"]["class"]["name"] == "sprint" and not found:
            found = raced_again(record)
        wrong += [f"{path.name}: {fault}" for fault in found]
    if leaderboard(read_entries()) != LEADERBOARD.read_text(encoding="utf-8"):
        wrong.append("LEADERBOARD.md is not made from the records; run `python -m lib race board`")
    for line in wrong:
        print(line)
    print(f"{len(entries)} entries checked, {len(wrong)} faults")
    return int(bool(wrong))


def raced_again(record: dict[str, Any]) -> list[str]:
    """The faults of an entry that show when its source is raced with other seeds."""
    figures = record["figures"]
    try:
        again = race_source(figures["entry"], figures["source"], CLASSES["sprint"], FEWEST_SEEDS)
    except ValueError as error:
        return [f"raced again, {error}"]
    claimed, found = (statistics.mean(tokens(one)) for one in (record, again))
    if max(claimed, found) > SAME_TOKENS * min(claimed, found):
        return [f"raced again, it takes {found:,.0f} tokens, and the record says {claimed:,.0f}"]
    return []


def changed_entries(base: str) -> list[Path]:
    """The committed records that differ from those of the branch `base`."""
    command = ["git", "-C", str(FOLDER), "diff", "--name-only", "--relative", f"{base}...HEAD"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return [FOLDER / name for name in names if name.endswith(".jsonl") and (FOLDER / name).exists()]


@settings
class LadderConfig:
    """Where the ladder is recorded."""

    output: Path = ladder.RECORDS
    """The file of records. What it has of this device is not raced again, but for the recipes that
    new ideas change."""

    only: tuple[str, ...] = ()
    """Names of recipes (default: all)."""


def to_climb(
    only: Sequence[str], records: Sequence[dict[str, Any]], *, on_gpu: bool
) -> dict[str, str]:
    """Idea -> source of the recipes without a record, and of those that they change."""
    done, recipes = {record["figures"]["source"] for record in records}, ladder.recipes()
    names = {
        name
        for name, source in recipes.items()
        if (not only or name in only) and (on_gpu or name not in ladder.ON_GPU)
        if source not in done
    }
    # a gain needs both in one climb
    names |= {ladder.before(name) for name in names}
    return {name: source for name, source in recipes.items() if name in names}


def climb(config: LadderConfig) -> Path:
    """Race every recipe of the ladder with three seeds, and record what each idea gains.

    On a CPU all runs share the processors, one thread each; on a GPU they follow one another.
    """
    which, device = CLASSES["sprint"], pick_device("auto")
    records = ladder.read(config.output).get(device_name(device), [])
    todo = to_climb(config.only, records, on_gpu=device.type == "cuda")
    with contextlib.ExitStack() as stack, workers_for(device, which) as workers:
        courses = courses_of(which, [*todo.values()], stack)

        def run(name: str, seed: int) -> Run | str:
            try:
                return run_entry(todo[name], courses[vocab_size_of(todo[name])], seed)
            except ValueError as error:
                return f"{name}: {error}"

        futures = {
            name: [workers.submit(run, name, seed) for seed in ladder.SEEDS] for name in todo
        }
        for name, runs in futures.items():
            results = [future.result() for future in runs]
            found = [result for result in results if isinstance(result, Run)]
            if len(found) < len(results):
                failed = (result for result in results if isinstance(result, str))
                print(*failed, sep="\n", file=sys.stderr, flush=True)
                continue
            record = entry_of(name, which, todo[name], found, device)
            append_record(config.output, record)
            print(name, *map(round, times(record)), file=sys.stderr, flush=True)
    return config.output
