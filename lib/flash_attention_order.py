"""Which multiprocessor does which tile of attention, so that all have the same to do.

In causal attention the last queries see many keys and the first ones few. A queue of work would
even that out while the kernel runs; here the same is worked out beforehand, as what each tile takes
is known.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

# What a tile takes beside its steps, in steps: its own loads and stores
START = 1.5
# Tiles of all heads up to this part of the longest are left for the end, where they fill gaps. The
# next part is tried when the busiest program has more to do than this, relative to the mean.
SHORT = (0.25, 0.5)
BALANCED = 1.02


def work_order(
    steps: Sequence[int], num_heads: int, section: int, is_last_first: bool, *, programs: int
) -> np.ndarray:
    """The items of work of each program.

    An item is a tile of a head: heads go in sections, whose keys and values fit a cache, and in a
    section one tile of all its heads after the other (`tile_and_head` of the kernels). Each item in
    turn goes to the program that is free first.

    Args:
        steps: of each tile of a head.
        num_heads: of all sequences.
        section: how many heads a section has.
        is_last_first: whether a section begins with the last tile of its heads.

    Returns:
        (1 + most items + 1, programs) int32: how many items a program has, then these; then zeros.
    """
    order = range(len(steps))[:: -1 if is_last_first else 1]
    starts = range(0, num_heads, section)
    in_turn = [steps[t] for s in starts for t in order for _ in range(min(section, num_heads - s))]
    for part in SHORT:
        given, busiest = _dealt(in_turn, part * max(steps), programs)
        if busiest <= BALANCED * (sum(in_turn) + START * len(in_turn)) / programs:
            break
    table = np.zeros((2 + max(map(len, given)), programs), np.int32)
    for program, theirs in enumerate(given):
        table[: 1 + len(theirs), program] = [len(theirs), *theirs]
    return table


def _dealt(steps: Sequence[int], short: float, programs: int) -> tuple[list[list[int]], float]:
    """The items of each program, those of up to `short` steps last; how long the busiest takes."""
    items = [i for i, n in enumerate(steps) if n > short]
    items += sorted((i for i, n in enumerate(steps) if n <= short), key=lambda i: -steps[i])
    free_at = [(0.0, program) for program in range(programs)]
    given: list[list[int]] = [[] for _ in range(programs)]
    for item in items:
        now, program = free_at[0]
        given[program].append(item)
        heapq.heapreplace(free_at, (now + steps[item] + START, program))
    return given, max(free_at)[0]
