"""Training with `ShardedOptimizer` and without, for ranks of its tests."""

import functools
import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lib.ddp import process_group
from lib.ddp.wrappers import wrap
from lib.optimizer.adamw import AdamW
from lib.sharded_optimizer.optimizer import ShardedOptimizer
from lib.training.checkpoint import load_checkpoint, save_checkpoint
from tests.ddp.training_cases import (
    Net,
    difference,
    groups_of,
    loss_of,
    part,
    reference,
    train,
)

STEPS = 10
# of a batch, for one, two or three ranks
PARTS = 6
MAX_NORM = 0.7


class Way(NamedTuple):
    """How gradients are averaged and the optimizer is sharded."""

    wrapper: str | None
    options: dict[str, Any]


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


def three_ranks(optimizers: dict[int, list[str]], folder: Path) -> dict[str, Any]:
    """`equality` and `resumed` in one launch."""
    return equality(optimizers) | {"resumed": resumed(folder)}


def equality(optimizers: dict[int, list[str]]) -> dict[str, Any]:
    """How far training is from that in one process, for groups of each size and their optimizers.

    One launch for all of them, since starting workers takes longest; the groups are of the last
    ranks, which have other numbers there than in the job.
    """
    results: dict[str, Any] = {"training": {}}
    for size, names in optimizers.items():
        is_member, group = last_ranks(size)
        if not is_member:
            continue
        for name in names:
            expected = list(reference(name, 1, MAX_NORM, size))
            for way, (wrapper, zero) in WAYS.items():
                make = functools.partial(wrap, wrapper, group=group) if wrapper else None
                results["training"][size, name, way] = train(
                    make, name, 1, MAX_NORM, zero=zero, group=group, expected=expected
                )
    return results


def resumed(folder: Path) -> dict[Any, float]:
    """Errors of training that three ranks began and that goes on elsewhere, against those ranks.

    Every run takes the same `PARTS` of each batch, however many ranks share them.
    """
    errors = {}
    for saved in ("parameters", "flat, overlapped"):
        place = folder / saved
        module, made, run = start_parts(WAYS[saved], None)
        run(range(5))
        made.param_groups[0]["lr"] *= 0.5
        save_checkpoint(place, step=5, model={}, optimizer=made)
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        run(range(5, STEPS))
        expected = [param.detach().clone() for param in module.parameters()]
        for size, loaded in itertools.product((3, 2, 1), ("parameters", "flat, overlapped")):
            is_member, group = last_ranks(size)
            if is_member:
                module, made, run = start_parts(WAYS[loaded], group)
                module.load_state_dict(weights)
                load_checkpoint(place, optimizer=made)
                run(range(5, STEPS))
                errors[saved, size, loaded] = difference(module.parameters(), expected)
        module = Net(seed=0)
        module.load_state_dict(weights)
        made = AdamW(groups_of(module), lr=0.5)
        load_checkpoint(place, optimizer=made)
        run_parts(module, made, None, range(PARTS), range(5, STEPS))
        errors[saved, 1, "unsharded"] = difference(module.parameters(), expected)
    return errors


def start_parts(way: Way, group: dist.ProcessGroup | None) -> tuple[Net, ShardedOptimizer, Any]:
    """A module, its optimizer, and what runs steps in which the ranks share the parts."""
    module = model = Net(seed=process_group.rank(group))
    if way.wrapper:
        model = wrap(way.wrapper, module, group=group)
    else:
        process_group.broadcast_module(module, group)
    made = ShardedOptimizer(groups_of(module), AdamW, group=group, **way.options, lr=0.01)
    parts = range(PARTS)[process_group.rank(group) :: process_group.world_size(group)]
    syncing = model if way.wrapper else made
    return module, made, lambda steps: run_parts(model, made, syncing, parts, steps)


def run_parts(
    model: nn.Module, made: torch.optim.Optimizer, syncing: Any, parts: range, steps: range
) -> None:
    for step in steps:
        for number in parts:
            holds_back = syncing and number != parts[-1]
            with syncing.no_sync() if holds_back else nullcontext():
                (loss_of(model, *part(step, 0, number)) / len(parts)).backward()
        if syncing:
            syncing.finish_gradient_synchronization()
        made.step()
        made.zero_grad()
