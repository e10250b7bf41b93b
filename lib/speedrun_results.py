"""What a speedrun has reached, what it would have reached, and what would fit into its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lib.memory_accounting import RESERVED_BYTES, SIZES, rank_memory
from lib.model_costs import num_parameters
from lib.model_presets import model_preset

# Points that a curve needs at least, so that half of them can carry a fit of three numbers; also
# those whose mean is the loss reached.
FEWEST_POINTS = 8
# The parts of the curve that are fitted, from these shares of its points to the last.
STARTS = (0.0, 0.25, 0.5)
EXPONENTS = np.arange(0.05, 2.01, 0.05)


# What is in a results card -> how a table says it.
WORDS = {
    "full_steps": "steps of the full training",
    "tokens_per_s": "tokens/s",
    "validation_loss": "validation loss (nats per token)",
    "bits_per_byte": "bits per byte",
    "extrapolated_loss_low": "extrapolated loss, lowest (nats per token)",
    "extrapolated_loss_high": "extrapolated loss, highest (nats per token)",
    "extrapolation_held": "the first half foretold the end",
}


class Point(NamedTuple):
    """A point of a loss curve, or the mean of some."""

    tokens: float
    loss: float
    """Nats per token."""


class Range(NamedTuple):
    """From the lowest to the highest of several estimates, both in it."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def extrapolate(lines: Sequence[Mapping[str, Any]], tokens: float) -> Range | None:
    """The training loss after `tokens` tokens, if the curve goes on as a + b · tokens^-c.

    Three fits, to the whole curve and to its last three quarters and half, disagree where the curve
    is not of that form yet; the range holds all three, up to the loss reached. The fall of the
    learning rate towards the end, which usually helps, is in none of them.

    Args:
        lines: metrics of a run, as `lib.metrics.read_metrics` gives them.

    Returns:
        Nats per token; None with fewer than 8 finite losses, or where `tokens` are done already.
    """
    points = _points(lines)
    if len(points) < FEWEST_POINTS or points[-1].tokens >= tokens:
        return None
    # in units of the goal, so that the powers stay near 1
    x, y = np.array(points, dtype=np.float64).T
    x /= tokens
    ends = [sum(_power_law(x[start:], y[start:])[:2]) for start in _starts(len(x))]
    # a fit that ends above it misses the end of the curve already
    highest = reached(lines).loss
    return Range(min(*ends, highest), min(max(ends), highest))


def reached(lines: Sequence[Mapping[str, Any]]) -> Point:
    """Where the curve stands: the mean of its last 8 points, since a single loss is noisy.

    Raises:
        ValueError: no line has a finite training loss.
    """
    points = _points(lines)[-FEWEST_POINTS:]
    if not points:
        raise ValueError("no line has a finite loss; right is: at least one")
    return Point(*(sum(values) / len(points) for values in zip(*points)))


def _points(lines: Sequence[Mapping[str, Any]]) -> list[Point]:
    points = [Point(line["tokens"], line["loss"]) for line in lines if "loss" in line]
    return [point for point in points if math.isfinite(point.loss)]


def _starts(count: int) -> list[int]:
    return [int(count * share) for share in STARTS]


def _power_law(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """The a ≥ 0, b and c for which a + b · x^-c is nearest to y in squares."""
    fits = []
    for c in EXPONENTS:
        power = x**-c
        columns = np.stack((np.ones_like(x), power), axis=1)
        a, b = np.linalg.lstsq(columns, y, rcond=None)[0]
        if a < 0:
            a, b = 0.0, (power @ y) / (power @ power)
        fits.append((float(np.sum((a + b * power - y) ** 2)), float(a), float(b), float(c)))
    return min(fits)[1:]


def card_rows(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The figures of a results card, in words; of `seconds_story` they are "story (s)"."""
    rows = []
    for key, value in figures.items():
        name = WORDS.get(key, key.replace("_", " "))
        if key.startswith("seconds_"):
            name = f"{name.removeprefix('seconds ')} (s)"
        rows.append({"speedrun": name, "result": value})
    return rows


def memory_rows(memory_bytes: int, ranks: int, *, dtype: str = "float16") -> list[dict[str, Any]]:
    """What a GPU must hold to train each preset, by the formulas of `lib.memory_accounting`.

    Float32 weights and `dtype` in matrix products; one window of the preset's context for each GPU.

    Args:
        memory_bytes: of one GPU.
        ranks: GPUs in the last two columns.
    """
    rows = []
    ways = {"one GPU": (1, 0), f"{ranks} GPUs": (ranks, 0), f"{ranks} GPUs, ZeRO-1": (ranks, 1)}
    for name in ("tinystories", *SIZES):
        config = model_preset(name)
        row: dict[str, Any] = {"model": name, "weights": num_parameters(config)}
        for way, (count, stage) in ways.items():
            needed = rank_memory(config, ranks=count, stage=stage, dtype=dtype).peak
            fits = needed + RESERVED_BYTES <= memory_bytes
            row[f"{way} (GB)"] = f"{needed / 1e9:.1f}" + ("" if fits else ", too much")
        rows.append(row)
    return rows
