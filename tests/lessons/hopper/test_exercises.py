"""The exercises of notebook 07 against independent answers."""

import pytest

from lib.lessons.exercise import draw_inputs, verdict
from lib.lessons.hopper import exercises


def multiply_add(a, b, c):
    """By the order of lanes and registers alone: (g, t, half, column of a pair)."""

    def tall(x):
        return x.reshape(8, 4, 2, 2).permute(2, 0, 1, 3).reshape(16, 8)

    out = tall(c) + tall(a) @ b.reshape(8, 8).T
    return out.reshape(2, 8, 4, 2).permute(1, 2, 0, 3).reshape(32, 4)


def test_an_independent_multiply_add_is_right():
    assert verdict(exercises.multiply_add, multiply_add, seed=0).startswith("right")


def test_dealt_tiles_keep_the_busiest_within_one_tile_of_the_mean():
    for work, programs in draw_inputs(exercises.deal, 0):
        found = exercises.dealt(exercises.deal.solve, work, programs)
        assert sum(work) / programs <= found["busiest"] <= sum(work) / programs + max(work)


CHANGES = {
    "a tile is left out": lambda hands: [hands[0][1:], *hands[1:]],
    "a tile is dealt twice": lambda hands: [*hands[:-1], [*hands[-1], hands[0][0]]],
    "a program has no hand": lambda hands: [*hands[:-2], hands[-2] + hands[-1]],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_tile_is_dealt_once_and_each_program_has_a_hand(change):
    attempt = lambda work, programs: change(exercises.deal.solve(work, programs))  # noqa: E731
    assert verdict(exercises.deal, attempt, seed=0).startswith("not yet")
