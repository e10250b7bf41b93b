"""A small race on tokens that follow one another by a rule, and an entry that learns it."""

import dataclasses
import functools
import json
import tempfile
import threading
from multiprocessing import Pipe
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from lib.lessons.speedrun import entrant
from lib.lessons.speedrun.board import entry_of
from lib.lessons.speedrun.race import Race, RaceClass
from lib.lessons.speedrun.referee import Course, Run, job_of, judge_run

TOY = RaceClass("toy", 3.5, corpus="a rule", judged_every=1024, limit=60.0)
ENTRY = """
import itertools
import numpy as np
import torch
from lib.model import ModelConfig, TransformerLM
from lib.optimizer import AdamW

def recipe(race, seed):
    shape = ModelConfig(
        vocab_size=race.vocab_size, context_length=32, d_model=32, num_layers=1, num_heads=2,
        d_ff=64,
    )
    model = TransformerLM(shape, generator=torch.Generator().manual_seed(seed))
    optimizer = AdamW(model.parameters(), lr=0.01)
    draws = np.random.default_rng(seed)
    for step in itertools.count(1):
        x, y = race.batch(8, 32, draws)
        model.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield model, x.numel()
"""


def rule(size: int, seed: int) -> np.ndarray:
    """Tokens that go on by 1, 2 or 5, and now and then repeat a long random text."""
    steps = np.random.default_rng(seed).choice([1, 2, 5], p=[0.7, 0.2, 0.1], size=size)
    return (np.cumsum(steps) % 64).astype(np.uint16)


class ToyCourse(Course):
    """A course whose fresh text follows the same rule."""

    def fresh_text(self) -> np.ndarray:
        return rule(513, 7)


@functools.cache
def toy_course() -> ToyCourse:
    """A course that an entry finishes in a second."""
    file = Path(tempfile.mkdtemp()) / "train.npy"
    np.save(file, rule(20_000, 0))
    race = Race(
        train_tokens=rule(20_000, 0),
        vocab_size=64,
        device=torch.device("cpu"),
        validation_tokens=rule(513, 1),
        bytes_of_token=np.ones(64, np.int64),
        target=TOY.target,
        judged_every=TOY.judged_every,
        limit=TOY.limit,
    )
    return ToyCourse(TOY, race, file, None)


def run_here(source: str, seed: int = 1, **rules) -> Run:
    """Race `source` as the referee does, but in a thread of this process, and unguarded."""
    course = toy_course()
    if rules:
        course = dataclasses.replace(course, race=dataclasses.replace(course.race, **rules))
    referees, entrants = Pipe()
    with mock.patch.object(entrant, "guard"):
        referees.send_bytes(json.dumps(job_of(source, course, seed)).encode())
        thread = threading.Thread(target=entrant.perform, args=(0, entrants), daemon=True)
        thread.start()
        try:
            return judge_run(referees, course, seed)
        finally:
            referees.close()
            thread.join(10)


def race_on_paper(name: str, source: str, which: RaceClass, count: int) -> dict:
    """The record of a race that nobody ran: the plain recipe is slow, any other takes a minute."""
    compile(source, name, "exec")
    # to its whole target the plain recipe needs many more than in a heat of one run
    tokens = 1_000.0 * count**3 if name == "start" else 60_000.0
    seconds = [60.0 + number for number in range(count)]
    runs = [
        Run(n, tokens, s, s, [(tokens, s, which.target)], 0.6, "") for n, s in enumerate(seconds)
    ]
    return entry_of(name, which, source, runs, torch.device("cpu"))


def plain_on_paper() -> list[dict]:
    """Committed entries for a test: the plain one, which is all that is looked at."""
    return [race_on_paper("start", "", TOY, 3)]
