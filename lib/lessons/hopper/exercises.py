"""Exercises of notebook 07: tiles dealt to multiprocessors, and what the tensor cores do."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lib.lessons.differences import AtMost, Named
from lib.lessons.exercise import check_of, exercise
from lib.lessons.inputs import ints, lists

take = check_of(__name__, returns=True)


def dealt(deal: Callable, work: Sequence[int], programs: int) -> Named:
    """The tiles of all programs, the work of the busiest, and whether long tiles come first."""
    hands = deal(work, programs)
    busiest = max(sum(work[tile] for tile in hand) for hand in hands)
    tiles = sorted(tile for hand in hands for tile in hand)
    is_sorted = all(
        work[tile] >= work[after] for hand in hands for tile, after in itertools.pairwise(hand)
    )
    order = {"in each hand, longer tiles come before shorter ones": is_sorted}
    return Named(programs=len(hands), tiles=tiles, busiest=AtMost(busiest), **order)


@exercise("core", {"work": lists(ints(1, 32), 4, 24), "programs": ints(2, 6)}, harness=dealt)
def deal(work: Sequence[int], programs: int) -> list[list[int]]:
    hands, busy = [[] for _ in range(programs)], [0] * programs
    for tile in sorted(range(len(work)), key=lambda tile: -work[tile]):
        program = busy.index(min(busy))
        hands[program].append(tile)
        busy[program] += work[tile]
    return hands


deal.mistakes = """
busy.index(min(busy)) => sum(map(len, hands)) % programs
    | tiles go round in turn, whatever is still to do; give each to the program that is free first
busy.index(min(busy)) => tile % programs
    && sorted(range(len(work)), key=lambda tile: -work[tile]) => range(len(work))
    | tiles go round in turn, in their own order; the longest come first, and each goes to the
    program that is free first
sorted(range(len(work)), key=lambda tile: -work[tile]) => range(len(work))
    | tiles are dealt in their own order; the longest come first, and short ones fill gaps
-work[tile] => work[tile] | the shortest tiles come first, and a long one at the end runs alone
.append(tile) => .append(work[tile]) | hands hold the work of tiles; return their numbers
[[] for _ in range(programs)] => [[]] * programs
    | all programs share one list: `[[]] * n` is n times the same
"""


def draw_fragments(generator: random.Random, size: int) -> tuple:
    def draw(*shape: int) -> Tensor:
        # halves, which print short and exactly
        values = [generator.randint(-6, 6) / 2 for _ in range(math.prod(shape))]
        return torch.tensor(values).reshape(shape)

    return draw(32, 4), draw(32, 2), draw(32, 4)


@exercise("optional", draw_fragments)
def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    lane = torch.arange(32)
    g, t = lane // 4, lane % 4
    left, right, total = torch.zeros(16, 8), torch.zeros(8, 8), torch.zeros(16, 8)
    for i in range(4):
        left[g + i // 2 * 8, 2 * t + i % 2] = a[:, i]
        total[g + i // 2 * 8, i % 2 + 2 * t] = c[:, i]
    for i in range(2):
        right[2 * t + i, g] = b[:, i]
    total = total + left @ right
    return torch.stack([total[8 * (i // 2) + g, 2 * t + i % 2] for i in range(4)], 1)


multiply_add.mistakes = """
right[2 * t + i, g] => right[g, 2 * t + i]
    | B is laid out as A; a lane's pair lies in a column of B, rows 2t and 2t + 1
left[g + i // 2 * 8, 2 * t + i % 2] => left[g + i % 2 * 8, 2 * t + i // 2]
    | registers 1 and 2 of A are swapped; a pair is two columns of one row
left[g + i // 2 * 8 => left[2 * g + i // 2
    | a lane's second pair of A is in the row below; it is 8 rows below
lane // 4, lane % 4 => lane % 8, lane // 8
    | g and t are those of a warp of four rows of eight; g is lane // 4, t is lane % 4
total + left => left | the C that comes in is lost; the result is C + A · B
return torch.stack([total[8 * (i // 2) + g, 2 * t + i % 2] for i in range(4)], 1) => return total
    | the result is the whole matrix; return what each lane holds of it, (32, 4)
"""
