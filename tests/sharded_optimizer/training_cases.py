"""Training with `ShardedOptimizer` and without, for ranks of its tests."""

import functools
from typing import Any

import torch.distributed as dist

from lib.ddp.wrappers import wrap
from tests.ddp.table import Way
from tests.ddp.training_cases import Trained, reference, train

MAX_NORM = 0.7
# of which the toy model fills several
SMALL = {"bucket_cap_mb": 200 / 2**20}
FLAT = {"strategy": "flat"}
LOCAL = FLAT | {"reduces_gradients": True}
WAYS = {
    "parameters": Way("flat", {"strategy": "parameters"}),
    "flat, averaged before": Way("flashddp", FLAT | SMALL),
    "flat": Way(None, LOCAL),
    "flat, small buckets": Way(None, LOCAL | SMALL),
    "flat, overlapped": Way(None, LOCAL | SMALL | {"overlap": True}),
}


def last_ranks(size: int) -> tuple[bool, dist.ProcessGroup | None]:
    """Whether this is one of the last `size` ranks, and their group; every rank calls it."""
    world_size = dist.get_world_size()
    ranks = list(range(world_size - size, world_size))
    group = None if size == world_size else dist.new_group(ranks)
    return dist.get_rank() in ranks, group


def equality(optimizers: dict[int, list[str]]) -> dict[Any, Trained]:
    """How far training is from that in one process, for groups of each size and their optimizers.

    One launch for all of them, since starting workers takes longest; the groups are of the last
    ranks, which have other numbers there than in the job.
    """
    results = {}
    for size, names in optimizers.items():
        is_member, group = last_ranks(size)
        if not is_member:
            continue
        for name in names:
            expected = list(reference(name, 1, MAX_NORM, size))
            for way, (wrapper, zero) in WAYS.items():
                make = functools.partial(wrap, wrapper, group=group) if wrapper else None
                results[size, name, way] = train(
                    make, name, 1, MAX_NORM, zero=zero, group=group, expected=expected
                )
    return results
