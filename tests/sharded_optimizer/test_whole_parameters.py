"""Owners of whole parameters: balanced, and the same on all ranks."""

from lib.sharded_optimizer.whole_parameters import balanced_owners


def test_owners_are_balanced_largest_first_and_ties_go_to_the_lower_rank():
    loads = [0, 0, 0]
    assert balanced_owners([2, 9, 4, 4, 3], loads) == [2, 0, 1, 2, 1]
    assert loads == [9, 7, 6]
    assert balanced_owners([1, 1], loads) == [2, 1]
