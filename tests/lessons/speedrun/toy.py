"""A small race, whose leaderboard is thrown away, in which notebook 12's own recipe runs."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib.lessons.speedrun.exercises import referee
from lib.lessons.speedrun.race import Race, at_target
from lib.lessons.speedrun.record import notebook_names


@functools.cache
def toy_race(target: float = 6.0) -> Race:
    """Tokens that follow one another by a rule, with noise: a model learns them in some steps."""
    draws = np.random.default_rng(0)
    steps = draws.choice([1, 2, 5], p=[0.7, 0.2, 0.1], size=20_000)
    tokens = (np.cumsum(steps) % 64).astype(np.uint16)
    sizes = np.ones(64, np.int64)
    board = Path(tempfile.mkdtemp()) / "board.jsonl"
    device = torch.device("cpu")
    return Race(tokens[:-1000], tokens[-513:], sizes, target, 1024, 60.0, device, board=board)


@functools.cache
def notebook_with_toy_race() -> dict[str, Any]:
    """The names that the cells of notebook 12 need, with a toy race."""
    names = notebook_names(("c004", "recipe", "changes"))
    race = toy_race()
    tokens = at_target(referee(names["recipe"], race, 0), race.target).tokens
    return names | {"race": race, "start": at_target([(tokens, 1.0, 0.0)], 1.0)}
