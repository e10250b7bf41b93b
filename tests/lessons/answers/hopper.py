"""Answers to the exercises of notebook 07."""

import heapq

from lib.lessons.hopper import exercises
from tests.lessons.answers.table import right, wrong


@right(exercises.multiply_add)
def by_lanes_and_registers(a, b, c):
    """By their order alone: (g, t, half, column of a pair)."""

    def tall(x):
        return x.reshape(8, 4, 2, 2).permute(2, 0, 1, 3).reshape(16, 8)

    out = tall(c) + tall(a) @ b.reshape(8, 8).T
    return out.reshape(2, 8, 4, 2).permute(1, 2, 0, 3).reshape(32, 4)


@right(exercises.deal)
def by_a_heap(work, programs):
    hands = [[] for _ in range(programs)]
    heap = [(0, program) for program in range(programs)]
    for tile in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        busy, program = heapq.heappop(heap)
        hands[program].append(tile)
        heapq.heappush(heap, (busy + work[tile], program))
    return hands


@wrong(exercises.deal, "longer tiles come before shorter ones: yours False, expected True")
def short_tiles_first_in_each_hand(work, programs):
    return [hand[::-1] for hand in exercises.deal.solve(work, programs)]


@wrong(exercises.deal, "It looks as if tiles go round in turn, whatever is still to do")
def sorted_and_round_robin(work, programs):
    order = sorted(range(len(work)), key=lambda tile: -work[tile])
    return [order[program::programs] for program in range(programs)]


@wrong(exercises.deal)
def a_tile_left_out(work, programs):
    first, *others = exercises.deal.solve(work, programs)
    return [first[1:], *others]


@wrong(exercises.deal)
def a_tile_twice(work, programs):
    *others, last = hands = exercises.deal.solve(work, programs)
    return [*others, [*last, hands[0][0]]]


@wrong(exercises.deal)
def a_program_without_a_hand(work, programs):
    *others, one, another = exercises.deal.solve(work, programs)
    return [*others, one + another]


@wrong(exercises.deal, "it changes `work`")
def sorts_in_place(work, programs):
    work.sort(reverse=True)
    return exercises.deal.solve(work, programs)
