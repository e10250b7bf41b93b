"""Exercises of notebook 12: read a curve, time a run to its target, beat the starting recipe."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import numbers
import random
import types
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from lib.core.records import append_record
from lib.core.settings import require
from lib.lessons.exercise import NOT_ATTEMPTED, Exercise, check, name_of, report
from lib.lessons.speedrun.race import (
    FEWEST_SEEDS,
    Race,
    Recipe,
    at_target,
    board_file,
    entry_of,
    faults,
    reference_entries,
    source_of,
)
from lib.model import TransformerLM

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


TIME_TO_TARGET = Exercise(
    time_to_target,
    _draw_curve,
    {
        "the time is that of the first point below the target; go back along the line to the point "
        "before it": ("last_seconds + share * (seconds - last_seconds)", "seconds"),
        "the time is that of the last point above the target; go on along the line to the point "
        "after it": ("last_seconds + share * (seconds - last_seconds)", "last_seconds"),
        "the point half way between the two is taken; go as far as the bits have to fall": (
            "(last_bits - target) / (last_bits - bits)",
            "0.5",
        ),
        "the share counts from the wrong end": (
            "(last_bits - target) / (last_bits - bits)",
            "(target - bits) / (last_bits - bits)",
        ),
        "the result is in tokens; the first number of a point is its tokens": (
            "for _, seconds, bits in",
            "for seconds, _, bits in",
        ),
        "a point that is exactly at the target does not count; it does": (
            "bits <= target",
            "bits < target",
        ),
        "where the target is never reached, the time of the last point is returned; return None": (
            "return None",
            "return last_seconds",
        ),
        "a first point that is there already is left out; its seconds count": (
            "        if bits <= target:\n            if last_bits is None:\n"
            "                return seconds\n",
            "        if last_bits is not None and bits <= target < last_bits:\n",
        ),
        "a later crossing is taken; the first counts": (
            "for _, seconds, bits in curve:",
            "first = [p[2] <= target for p in curve].index(True) if curve[-1][2] <= target else 0\n"
            "    above = [i for i, p in enumerate(curve) if p[2] > target]\n"
            "    if first and above[-1] > first:\n"
            "        curve = curve[above[-1] :]\n"
            "    for _, seconds, bits in curve:",
        ),
    },
)


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


def on_toys(attempt: Callable) -> Callable:
    """A function that lets `attempt` run a `ToyRace`, and returns its curve."""

    @functools.wraps(attempt)
    def played(race: ToyRace) -> Any:
        found = attempt(race.recipe, race, 7)
        race.require_clock()
        return [tuple(point) for point in found] if isinstance(found, (list, tuple)) else found

    return played


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


@on_toys
def run_to_target(recipe: Recipe, race: Race, seed: int) -> list[tuple]:
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


# the solution by itself
referee = run_to_target.__wrapped__  # type: ignore[attr-defined]

RUN_TO_TARGET = Exercise(
    run_to_target,
    _draw_run,
    {
        "judging counts as training; stop the clock before it": (
            "            bits = race.judge(model)\n",
            "            before = race.clock()\n            bits = race.judge(model)\n"
            "            seconds += race.clock() - before\n",
        ),
        "the clock runs on while the model is judged; take the time anew before each step": (
            "    while True:\n        before = race.clock()\n        model, count = next(steps)\n"
            "        seconds += race.clock() - before\n",
            "    before = race.clock()\n    while True:\n        model, count = next(steps)\n"
            "        seconds = race.clock() - before\n",
        ),
        "the model of the first step is judged each time; judge the one that this step yielded": (
            "        model, count = next(steps)\n",
            "        latest, count = next(steps)\n        model = model if tokens else latest\n",
        ),
        "the model of the step before is judged; judge the one that this step yielded": (
            "    while True:\n        before = race.clock()\n        model, count = next(steps)\n",
            "    latest = None\n    while True:\n        before = race.clock()\n"
            "        model, (latest, count) = latest, next(steps)\n"
            "        model = model or latest\n",
        ),
        "each round makes a new generator, which starts anew; make it once, before the loop": (
            "next(steps)",
            "next(recipe(race, seed))",
        ),
        "the first step is taken before the clock starts; it counts, too": (
            "    while True:\n        before = race.clock()\n        model, count = next(steps)\n"
            "        seconds += race.clock() - before\n",
            "    while True:\n        before = race.clock()\n        model, count = next(steps)\n"
            "        seconds += race.clock() - before if tokens else 0\n",
        ),
        "the model is judged after every step": (
            "tokens - judged_at >= race.judged_every or is_over",
            "True",
        ),
        "the model is judged only where tokens is a multiple of judged_every; steps may not meet "
        "it": ("tokens - judged_at >= race.judged_every", "tokens % race.judged_every == 0"),
        "judged_every counts tokens since the model was judged last, not since the start": (
            "            judged_at = tokens\n",
            "",
        ),
        "judged_at moves on by judged_every, but steps overshoot that; set it to tokens": (
            "judged_at = tokens\n",
            "judged_at += race.judged_every\n",
        ),
        "after exactly judged_every tokens the model is not judged; it is due": (
            "tokens - judged_at >= race.judged_every",
            "tokens - judged_at > race.judged_every",
        ),
        "a model that is exactly at the target goes on; it has reached it": (
            "bits <= race.target",
            "bits < race.target",
        ),
        "the run goes on after the target": ("bits <= race.target or is_over", "is_over"),
        "the limit ends the run only where it would be judged anyway": (
            "race.judged_every or is_over:",
            "race.judged_every:",
        ),
        "a run at the limit returns without its last judgment; judge, append, then return": (
            "        if tokens - judged_at >= race.judged_every or is_over:\n",
            "        if is_over:\n            return curve\n"
            "        if tokens - judged_at >= race.judged_every:\n",
        ),
        "a run that is exactly at the limit goes on": (
            "seconds >= race.limit",
            "seconds > race.limit",
        ),
        "a run that never reaches its target never ends; stop at the limit": (
            "seconds >= race.limit",
            "False",
        ),
        "the last point is missing; append it before you return": (
            "            curve.append((tokens, seconds, bits))\n            judged_at = tokens\n"
            "            if bits <= race.target or is_over:\n                return curve\n",
            "            judged_at = tokens\n"
            "            if bits <= race.target or is_over:\n                return curve\n"
            "            curve.append((tokens, seconds, bits))\n",
        ),
        "the curve has its last point alone; append each": (
            "curve.append((tokens, seconds, bits))",
            "curve = [(tokens, seconds, bits)]",
        ),
        "a point is (tokens, seconds, bits), in this order": (
            "(tokens, seconds, bits)",
            "(seconds, tokens, bits)",
        ),
        "tokens are those of the last step; add them up": ("tokens += count", "tokens = count"),
        "steps are counted, not tokens": ("tokens += count", "tokens += 1"),
    },
    "core",
)


# 3. Beat the starting recipe

# Share of the starting recipe's seconds that is enough.
FAST_ENOUGH = 0.9
SEEDS = tuple(range(1, 1 + FEWEST_SEEDS))
# Seconds for which the starting recipe runs beside each run, as a yardstick.
YARDSTICK_SECONDS = 1.5
# The share of a uniform guess's bits that a model still needs after one step.
UNTRAINED = 0.8


def tokens_per_s(recipe: Recipe, race: Race) -> float:
    """The speed of `recipe` now, over YARDSTICK_SECONDS or more and without its first step."""
    steps = recipe(race, 0)
    next(steps)
    tokens, start = 0, race.clock()
    while (now := race.clock()) < start + YARDSTICK_SECONDS or not tokens:
        tokens += next(steps)[1]
    return tokens / (now - start)


def watched(
    recipe: Recipe, race: Race, seed: int, earlier: Sequence[TransformerLM]
) -> Iterator[tuple[TransformerLM, int]]:
    """Yield the steps of `recipe`, which is not given the held-out text.

    Args:
        earlier: models of other runs.

    Raises:
        ValueError: a step is against the rules, or they end.
    """
    given = dataclasses.replace(race, validation_tokens=race.validation_tokens[:0], handed_out=[])
    steps = recipe(given, seed)
    advice = "let it `yield model, tokens` after each step"
    require(isinstance(steps, Iterator), f"a recipe is a generator; {advice}")
    said = 0
    for step in steps:
        model, tokens = step if isinstance(step, tuple) and len(step) == 2 else (step, None)
        kinds = f"{type(model).__name__} and {type(tokens).__name__}"
        is_legal = isinstance(model, TransformerLM) and isinstance(tokens, numbers.Integral)
        require(is_legal, f"a recipe yields a TransformerLM and an int, got {kinds}; {advice}")
        said += tokens
        is_new = all(model is not other for other in earlier)
        require(is_new, "one model is trained in several runs; build it inside the recipe")
        # a recipe may draw its next batch early
        handed, most = sum(given.handed_out), max(given.handed_out, default=0)
        require(
            abs(said - handed) <= most,
            f"it says {said:,} tokens, but race.batch handed out {handed:,}; take every batch "
            "from there, and yield x.numel()",
        )
        yield model, tokens
    raise ValueError(f"the recipe ended after {said:,} tokens; loop with itertools.count")


def inspected(recipe: Recipe, race: Race, seed: int, earlier: Sequence[TransformerLM]) -> Any:
    """The model of `recipe` after one step, which is not raced but warms the device up.

    Raises:
        ValueError: the model knows more than one step can teach.
    """
    model, _ = next(watched(recipe, race, seed, earlier))
    rules = race.rules()
    guessing = math.log2(race.vocab_size) * rules["validation_tokens"] / rules["validation_bytes"]
    bits = race.judge(model)
    require(
        bits >= UNTRAINED * guessing,
        f"after one step the model is at {bits:.2f} bits per byte, where guessing is at "
        f"{guessing:.2f}; start from random weights, and yield after each step",
    )
    return model


def copied_from(attempt: Recipe) -> str | None:
    """The name of a recipe of the lesson that `attempt` is a copy of, or calls; or None."""
    known = {
        program_of(entry["figures"]["source"]): name for name, entry in reference_entries().items()
    }
    known_here = getattr(attempt, "__globals__", {})
    names = attempt.__code__.co_names if known_here else ()  # type: ignore[attr-defined]
    used = [known_here.get(name) for name in names]
    inside = [one for value in used if isinstance(value, dict) for one in value.values()]
    for function in (attempt, *used, *inside):
        if isinstance(function, types.FunctionType):
            try:
                program = program_of(source_of(function))
            except (OSError, SyntaxError, TypeError):
                continue
            if program in known:
                return known[program]
    return None


def program_of(source: str) -> str:
    """The program of a function, without its name, comments and spaces."""
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    body = function.body
    if ast.get_docstring(function):
        body = body[1:]
    return ast.dump(ast.Module([*body], []))


def race_verdict(attempt: Recipe, start: Recipe, tokens: float, race: Race) -> str:
    """Return the verdict on a recipe that must be faster than `start`; a right one is entered.

    What `start` would take is its tokens to the target over its speed, measured beside each run.
    """
    if name := copied_from(attempt):
        return f'not yet: this is the recipe "{name}" as it is; change something of it'
    curves, speeds = {}, []
    models: list[TransformerLM] = []
    rules = race.rules()
    for seed in SEEDS:
        try:
            models.append(inspected(attempt, race, seed, models))
            speeds.append(tokens_per_s(start, race))
            curves[seed] = referee(lambda on, seed: watched(attempt, on, seed, models), race, seed)
        except NotImplementedError:
            return NOT_ATTEMPTED
        except Exception as error:
            return f"not yet: with seed {seed} it raised {type(error).__name__}: {error}"
        if race.rules() != rules:
            return "not yet: the rules or the judge's text changed meanwhile; make `race` anew"
        if at_target(curves[seed], race.target) is None:
            bits = curves[seed][-1][2]
            return f"not yet: seed {seed} ended at {bits:.3f} bits per byte, not {race.target}"
    entry = entry_of(race, name_of(attempt), attempt, curves)
    if wrong := faults(entry, race):
        return f"not yet: {'; '.join(wrong)}"
    yours = median(run["seconds"] for run in entry["figures"]["runs"])
    ours = tokens / median(speeds)
    compared = f"{yours:.2f} s (median of {len(SEEDS)} seeds), the starting recipe {ours:.2f} s"
    if yours > FAST_ENOUGH * ours:
        return f"not yet: {compared}; get to {FAST_ENOUGH * ours:.2f} s"
    append_record(race.board or board_file(), entry)
    return f"right: {compared}; it is on your leaderboard"


def check_time_to_target(attempt: Callable) -> None:
    """Check `time_to_target(curve, target)` -> seconds, or None."""
    check(TIME_TO_TARGET, attempt)


def check_run_to_target(attempt: Callable) -> Callable:
    """Check `run_to_target(recipe, race, seed)` -> curve; return it if right, else the solution."""
    wrapped = on_toys(attempt)
    return attempt if check(RUN_TO_TARGET, wrapped) is wrapped else referee


def check_faster(attempt: Recipe, start: Recipe, tokens: float, race: Race) -> None:
    """Race `attempt(race, seed)` against `start`, which reaches the target after `tokens`."""
    report(race_verdict(attempt, start, tokens, race), name_of(attempt), "open")
