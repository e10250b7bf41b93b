"""All-reduce on a ring, step by step in NumPy: what moves when, and what each rank then holds.

Each rank sends to the next one, the last to the first, and all send at the same time (Patarasuk and
Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RingStep:
    """A ring after some of its steps."""

    phase: str
    """`start`, `reduce-scatter` or `all-gather`."""

    values: np.ndarray
    """(ranks, chunks): what each rank holds."""

    added: np.ndarray
    """(ranks, chunks): of how many ranks the numbers are in it."""

    sent: tuple[int, ...]
    """The chunk that each rank sent in this step; nothing at the start."""


def ring_all_reduce(values: np.ndarray) -> list[RingStep]:
    """The start and the 2(n - 1) steps of an all-reduce of `values`, (n ranks, n chunks).

    In reduce-scatter a chunk is added to what the next rank holds; after n - 1 steps each rank has
    the whole sum of one chunk. In all-gather it replaces what the next rank holds.

    Raises:
        ValueError: there are not as many chunks as ranks.
    """
    values = np.array(values, dtype=float)
    ranks = len(values)
    if values.shape != (ranks, ranks):
        raise ValueError(f"values has shape {values.shape}; right is: as many chunks as ranks")
    added = np.ones((ranks, ranks), dtype=int)
    steps = [RingStep("start", values.copy(), added.copy(), ())]
    for number in range(2 * (ranks - 1)):
        is_sum = number < ranks - 1
        # after its own first one, each passes on the chunk that it has just received
        sent = [(rank - number) % ranks for rank in range(ranks)]
        # all send what they held before the step
        messages = [(values[rank, c], added[rank, c]) for rank, c in enumerate(sent)]
        for rank, (chunk, (value, count)) in enumerate(zip(sent, messages)):
            receiver = (rank + 1) % ranks
            values[receiver, chunk] = value + is_sum * values[receiver, chunk]
            added[receiver, chunk] = count + is_sum * added[receiver, chunk]
        phase = "reduce-scatter" if is_sum else "all-gather"
        steps.append(RingStep(phase, values.copy(), added.copy(), tuple(sent)))
    return steps
