"""The committed entries of notebook 12's leaderboard, measured with the notebook's own cells."""

from __future__ import annotations

import dataclasses
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lib.core.files import ROOT
from lib.lessons.speedrun.exercises import SEEDS, referee
from lib.lessons.speedrun.race import RECORDS, compiled, enter, summary

NOTEBOOK = ROOT / "notebooks/12_speedrun.ipynb"
# Cells that make `race` and `recipes`, by their ids.
CELLS = ("c002", "c004", "text", "rules", "recipe", "changes")


def notebook_names(ids: tuple[str, ...] = CELLS, *, path: Path = NOTEBOOK) -> dict[str, Any]:
    """Run the cells `ids` of the notebook, and return the names that they set."""
    import nbformat

    cells = {cell.id: cell.source for cell in nbformat.read(path, as_version=4).cells}
    names: dict[str, Any] = {}
    for cell in ids:
        with redirect_stdout(sys.stderr):
            if cell == "recipe":
                # its source must be readable, as it is in a notebook
                names["recipe"] = compiled(cells[cell] + "\n", names, "recipe")
            else:
                exec(cells[cell], names)
    return names


def measure_race(path: Path = RECORDS) -> Path:
    """Run every recipe of notebook 12 with each seed, and write the entries to `path`.

    Each run has one thread and counts its processor time: what it would take on a quiet core.

    Raises:
        RuntimeError: the sizes are those of tests.
    """
    import torch

    if os.environ.get("WORKBOOK_SMALL", "0") not in ("", "0"):
        raise RuntimeError("the race must be run at full size, got WORKBOOK_SMALL=1")
    names = notebook_names()
    torch.set_num_threads(1)
    race = dataclasses.replace(names["race"], by_processor=True, board=path)
    with ProcessPoolExecutor(len(SEEDS), mp_context=get_context("spawn")) as workers:
        futures = {
            (name, seed): workers.submit(run_one, name, seed)
            # interleaved, so that a slow minute of the machine slows every recipe
            for seed in SEEDS
            for name in names["recipes"]
        }
        curves = {key: future.result() for key, future in futures.items()}
    path.unlink(missing_ok=True)
    for name, recipe in names["recipes"].items():
        runs = {seed: curves[name, seed] for seed in SEEDS}
        entry = enter(race, name, recipe, runs)
        print(name, summary(entry), file=sys.stderr, flush=True)
    return path


def run_one(name: str, seed: int) -> list[tuple]:
    """Run one recipe of notebook 12 to its target, on one thread."""
    import torch

    torch.set_num_threads(1)
    names = notebook_names()
    race = dataclasses.replace(names["race"], by_processor=True)
    recipe = names["recipes"][name]
    # the first step of a process pays for loading; it is not raced
    next(recipe(race, seed))
    curve = referee(recipe, race, seed)
    print(name, seed, curve[-1], file=sys.stderr, flush=True)
    return curve
