"""Exercises of notebook 12: read a curve, time a run to its target, name faults, win."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lib.core.settings import require
from lib.lessons.exercise import NOT_ATTEMPTED, check_of, exercise, report
from lib.lessons.speedrun import ladder
from lib.lessons.speedrun.board import (
    P_VALUE,
    chance_of_faster,
    mean_and_interval,
    read_entries,
    times,
)
from lib.lessons.speedrun.commands import keep, own_board, race_source
from lib.lessons.speedrun.museum import FAULTS
from lib.lessons.speedrun.race import CLASSES, Recipe, program_of, source_of
from lib.lessons.speedrun.referee import FEWEST_SEEDS
from lib.lessons.training.exercises import describe_diagnosis, no_inputs

check, take = check_of(__name__), check_of(__name__, returns=True)

# 1. Time to target


def _draw_curve(generator: random.Random, size: int) -> tuple:
    tokens = seconds = 0.0
    bits, curve = 3.5, []
    for _ in range(2 + size):
        tokens += generator.randint(8, 12) * 1024
        seconds += generator.randint(2, 30) / 8
        # noisy: a curve may cross the target more than once
        bits += generator.choice([-0.5, -0.375, -0.25, -0.125, 0.0625])
        curve.append((tokens, seconds, bits))
    reached = [point[2] for point in curve]
    target = generator.choice([*reached, 3.45 - generator.random() * 1.5, min(reached) - 0.1])
    return curve, target


@exercise("warm-up", _draw_curve)
def time_to_target(curve: Sequence[tuple], target: float) -> float | None:
    last_seconds, last_bits = 0.0, None
    for _, seconds, bits in curve:
        if bits <= target:
            if last_bits is None:
                return seconds
            share = (last_bits - target) / (last_bits - bits)
            return last_seconds + share * (seconds - last_seconds)
        last_seconds, last_bits = seconds, bits
    return None


time_to_target.mistakes = """
last_seconds + share * (seconds - last_seconds) => seconds
    | the time is that of the first point below the target; go back along the line to the point
    before it
last_seconds + share * (seconds - last_seconds) => last_seconds
    | the time is that of the last point above the target; go on along the line to the point after
    it
(last_bits - target) / (last_bits - bits) => (target - bits) / (last_bits - bits)
    | the share counts from the wrong end
for _, seconds, bits in => for seconds, _, bits in
    | the result is in tokens; the first number of a point is its tokens
bits <= target => bits < target
    | a point that is exactly at the target does not count; it does
return None => return last_seconds
    | where the target is never reached, the time of the last point is returned; return None
"""


# 2. Run to the target


class ToyRace:
    """A race on a clock of its own: steps of known length, after each a model with known bits.

    Args:
        steps: (seconds, tokens, bits afterwards) of each step; the last one is repeated.
    """

    def __init__(
        self, steps: Sequence[tuple], target: float, judged_every: int, limit: float
    ) -> None:
        self.steps, self.now, self.clock_was_read = steps, 100.0, False
        self.target, self.judged_every, self.limit = target, judged_every, limit
        self.bits: dict[str, float] = {}

    def __repr__(self) -> str:
        names = ("target", "judged_every", "limit")
        rules = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        steps = f"steps of (seconds, tokens, bits after it) {self.steps}"
        return f"a toy race with {rules}, and {steps}"

    def clock(self) -> float:
        self.clock_was_read = True
        return self.now

    def require_clock(self) -> None:
        require(self.clock_was_read, "race.clock() was never read; take the time from it")

    def judge(self, model: str) -> float:
        if model not in self.bits:
            raise TypeError(f"judge takes a model that the recipe yields, got {model!r}")
        self.now += 5.0
        return self.bits[model]

    def recipe(self, race: ToyRace, seed: int) -> Iterator[tuple[str, int]]:
        if race is not self or seed != 7:
            raise ValueError("call recipe(race, seed) with what run_to_target was given")
        for step in range(50 * len(self.steps)):
            seconds, tokens, bits = self.steps[min(step, len(self.steps) - 1)]
            self.now += seconds
            model = f"the model after step {step + 1}"
            self.bits[model] = bits
            yield model, tokens
        self.require_clock()
        raise RuntimeError("the run goes on long after its target and its limit")


def on_toys(attempt: Callable, race: ToyRace) -> Any:
    """Let `attempt` run a toy race; return its curve."""
    found = attempt(race.recipe, race, 7)
    race.require_clock()
    return [tuple(point) for point in found] if isinstance(found, (list, tuple)) else found


def _draw_run(generator: random.Random, size: int) -> tuple:
    bits, steps = 6.0, []
    for _ in range(3 + 2 * size):
        bits -= generator.choice([0.0, 0.0625, 0.125])
        steps.append((generator.randint(1, 8) / 8, generator.choice([64, 96, 128]), bits))
    # often a value that is reached exactly, at times one that is not reached at all
    target = generator.choice([generator.choice(steps)[2], steps[-1][2], bits - 1])
    every = generator.choice([64, 128, 300])
    total = sum(step[0] for step in steps)
    return (ToyRace(steps, target, every, generator.choice([2 * total, total / 2])),)


@exercise("core", _draw_run, harness=on_toys)
def run_to_target(recipe: Callable, race: Any, seed: int) -> list[tuple]:
    curve, tokens, seconds, judged_at = [], 0, 0.0, 0
    steps = recipe(race, seed)
    while True:
        before = race.clock()
        model, count = next(steps)
        seconds += race.clock() - before
        tokens += count
        is_over = seconds >= race.limit
        if tokens - judged_at >= race.judged_every or is_over:
            bits = race.judge(model)
            curve.append((tokens, seconds, bits))
            judged_at = tokens
            if bits <= race.target or is_over:
                return curve


run_to_target.mistakes = """
bits = race.judge(model) =>
    before = race.clock(); bits = race.judge(model); seconds += race.clock() - before
    | judging counts as training; stop the clock before it
tokens - judged_at >= race.judged_every => tokens % race.judged_every == 0
    | the model is judged only where tokens is a multiple of judged_every; steps may not meet it
judged_at = tokens => pass
    | judged_every counts tokens since the model was judged last, not since the start
bits <= race.target => bits < race.target
    | a model that is exactly at the target goes on; it has reached it
seconds >= race.limit => False
    | a run that never reaches its target never ends; stop at the limit
race.judged_every or is_over => race.judged_every
    | at the limit the run goes on to the next judgment; judge at once, and return
"""


# 3. The museum


def swapped(one: int, other: int) -> dict[int, str]:
    """The right answer but for two exhibits, which have each other's faults."""
    return FAULTS | {one: FAULTS[other], other: FAULTS[one]}


@exercise("core", no_inputs, trials=1, describe=describe_diagnosis)
def name_faults() -> dict[int, str]:
    return dict(FAULTS)


name_faults.mistakes = """
dict(FAULTS) => swapped(1, 14)
    | 1 and 14 are mixed up: both look at the answer, but one has it as its input and needs no other
    token for it
dict(FAULTS) => swapped(6, 13)
    | 6 and 13 are mixed up: in one the ranks' weights begin the same and drift apart, in the other
    they were never the same, though the gradients are
dict(FAULTS) => swapped(2, 10)
    | 2 and 10 are mixed up: one has norms twice as large and learns as usual
dict(FAULTS) => swapped(8, 11)
    | 8 and 11 are mixed up: both are odd before the first update, one in its loss, the other in
    its attention
dict(FAULTS) => swapped(5, 7)
    | 5 and 7 are mixed up: one learns as usual and then stops, the other is behind all the time
dict(FAULTS) => swapped(10, 12)
    | 10 and 12 are mixed up: in one the loss jumps in its first steps, the other starts as usual
"""


# 4. Beat the plain recipe

# Bits per byte to which the plain recipe runs here, for its speed.
HEAT = 2.0


def as_file(recipe: Callable) -> str:
    """An entry's file with a recipe of a cell, under what the plain recipe imports."""
    head, _, _ = ladder.start().partition("def recipe(")
    return head + source_of(recipe).replace(f"def {recipe.__name__}(", "def recipe(", 1)


def race_verdict(source: str) -> str:
    """Return the verdict on an entry, which must reach the sprint's target in less time.

    What the plain recipe would take here is its tokens on record over its speed here.
    """
    plain, which = ladder.start(), CLASSES["sprint"]
    if "NotImplementedError" in source:
        return NOT_ATTEMPTED
    if program_of(source) == program_of(plain):
        return "not yet: this is the plain recipe as it is; change something of it"
    on_record = [one for one in read_entries() if one["figures"]["entry"] == "start"]
    if not on_record:
        return "not yet: the plain recipe has no record; python -m lib race --board artifacts/race"
    try:
        record = race_source("my_recipe", source, which, FEWEST_SEEDS)
        heat = race_source("start", plain, replace(which, target=HEAT), 1)
    except ValueError as error:
        return f"not yet: {error}"
    speed = heat["figures"]["runs"][0]["tokens"] / times(heat)[0]
    plain_times = [run["tokens"] / speed for run in on_record[0]["figures"]["runs"]]
    mine, chance = times(record), chance_of_faster(times(record), plain_times)
    compared = (
        f"{mean_and_interval(mine)} s, the plain recipe about "
        f"{statistics.mean(plain_times):.0f} s here (p = {chance:.3f})"
    )
    record["figures"]["compared"] = compared
    keep(record, own_board())
    return (
        f"not yet: {compared}" if chance >= P_VALUE else f"right: {compared}; it is on your board"
    )


def check_faster(attempt: Recipe) -> None:
    """Race `attempt(race, seed)` in fresh processes, three seeds, against the plain recipe."""
    report(race_verdict(as_file(attempt)), attempt.__name__, "open")
