"""All-reduce on a ring, step by step in NumPy: which chunks move, and what each rank then holds.

Each rank sends to the next one, the last to the first, and all send at the same time (Patarasuk and
Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RingStep:
    """The ring after one of its steps."""

    phase: str
    """`start`, `reduce-scatter` or `all-gather`."""

    values: np.ndarray
    """The numbers that each rank holds, (ranks, chunks)."""

    added: np.ndarray
    """From how many ranks each number is the sum, (ranks, chunks)."""

    sent: tuple[int, ...]
    """The chunk that each rank sent in this step; empty at the start."""


def ring_all_reduce(values: np.ndarray) -> list[RingStep]:
    """Return the start and the 2(n - 1) steps of an all-reduce of `values`, (n ranks, n chunks).

    In reduce-scatter a chunk is added to what the next rank holds; after n - 1 steps each rank has
    the complete sum of one chunk. In all-gather it replaces what the next rank holds.

    Raises:
        ValueError: there are not as many chunks as ranks.
    """
    values = np.array(values, dtype=float)
    ranks = len(values)
    if values.shape != (ranks, ranks):
        raise ValueError(f"values must have as many chunks as ranks, got shape {values.shape}")
    added = np.ones((ranks, ranks), dtype=int)
    steps = [RingStep("start", values.copy(), added.copy(), ())]
    for number in range(2 * (ranks - 1)):
        is_sum = number < ranks - 1
        # first each rank's own chunk, then the one that it has just received
        sent = [(rank - number) % ranks for rank in range(ranks)]
        # read everything before anything is written: all send at the same time
        messages = [(values[rank, c], added[rank, c]) for rank, c in enumerate(sent)]
        for rank, (chunk, (value, count)) in enumerate(zip(sent, messages)):
            receiver = (rank + 1) % ranks
            values[receiver, chunk] = value + is_sum * values[receiver, chunk]
            added[receiver, chunk] = count + is_sum * added[receiver, chunk]
        phase = "reduce-scatter" if is_sum else "all-gather"
        steps.append(RingStep(phase, values.copy(), added.copy(), tuple(sent)))
    return steps
