"""How the inputs of an exercise are drawn: small ones first, which show a difference best."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

# (generator, size) -> a value of about that size.
Draw = Callable[[random.Random, int], Any]
# The size of the largest inputs; the first ones have 1.
LARGEST = 15


def ints(low: int, high: int) -> Draw:
    """Whole numbers from `low` on, in the largest inputs up to `high`."""
    return lambda generator, size: generator.randint(low, low - (low - high) * size // LARGEST)


def choices(*values: Any) -> Draw:
    """One of `values`."""
    return lambda generator, size: generator.choice(values)


def lists(of: Draw, low: int, high: int) -> Draw:
    """Lists of `low` to `high` values, at first short ones."""
    length = ints(low, high)
    return lambda generator, size: [of(generator, size) for _ in range(length(generator, size))]
