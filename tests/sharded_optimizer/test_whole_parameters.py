"""Owners of whole parameters: balanced, and the same on all ranks."""

import pytest
import torch

from lib.sharded_optimizer.whole_parameters import balanced_owners


def test_owners_are_balanced_largest_first_and_ties_go_to_the_lower_rank():
    loads = [0, 0, 0]
    assert balanced_owners([2, 9, 4, 4, 3], loads) == [2, 0, 1, 2, 1]
    assert loads == [9, 7, 6]
    assert balanced_owners([1, 1], loads) == [2, 1]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_largest_load_is_within_a_parameter_of_the_mean(ranks):
    generator = torch.Generator().manual_seed(ranks)
    sizes = torch.randint(1, 1000, (60,), generator=generator).tolist()
    loads = [0] * ranks
    owners = balanced_owners(sizes, loads)
    for rank in range(ranks):
        assert loads[rank] == sum(size for size, owner in zip(sizes, owners) if owner == rank)
    assert max(loads) <= sum(sizes) / ranks + max(sizes)
