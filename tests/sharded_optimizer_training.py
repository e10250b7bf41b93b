"""Training with `ShardedOptimizer` and without, for workers of its tests."""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ddp_training import Toy, loss_of, part
from torch import Tensor, nn

from lib import ddp, distributed, optimizer
from lib.sharded_optimizer import ShardedOptimizer, load_unsharded

STEPS = 10
# the step before which a group of parameters is added
ADDED_AT = 3
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
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "torch adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (optimizer.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


def groups_of(module: Toy) -> list[dict[str, Any]]:
    """Two groups, of which the first has a learning rate of its own and a frozen parameter."""
    added = {id(param) for param in module.sometimes.parameters()}
    params = [param for param in module.parameters() if id(param) not in added]
    return [
        {"params": [param for param in params if param.ndim == 2], "lr": 0.02},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0},
    ]


def added_group(module: Toy) -> dict[str, Any]:
    return {"params": list(module.sometimes.parameters()), "lr": 0.005}


def schedule_of(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, (step + 1) / 4))


def clip(made: torch.optim.Optimizer) -> Tensor:
    if isinstance(made, ShardedOptimizer):
        return made.clip_grad_norm(MAX_NORM)
    params = [param for group in made.param_groups for param in group["params"]]
    if not isinstance(made, optimizer.AdamW):
        return optimizer.clip_grad_norm(params, MAX_NORM)
    norm = made.grad_norm()
    for param in params:
        if param.grad is not None:
            param.grad.mul_(optimizer.clip_coefficient(norm, MAX_NORM))
    return norm


def train(
    module: Toy,
    made: torch.optim.Optimizer,
    backward: Callable[[int], None],
    steps: range = range(STEPS),
) -> Iterator[float]:
    """Train with a schedule, clipping and a group added later; yields each step's norm."""
    schedule = schedule_of(made)
    for step in steps:
        if step == ADDED_AT:
            made.add_param_group(added_group(module))
            # schedulers do not know of groups that come after them
            schedule = schedule_of(made)
        backward(step)
        norm = clip(made)
        made.step()
        # both ways of forgetting gradients
        made.zero_grad(set_to_none=step % 3 > 0)
        schedule.step()
        yield norm.item()


def loss_at(module: nn.Module, step: int, rank: int) -> Tensor:
    return loss_of(module, *part(step, 0, rank))


def reference(name: str, world_size: int) -> Iterator[tuple[list[Tensor], float]]:
    """Parameters and norm after each step in one process on the union of the ranks' batches."""
    module = Toy(seed=0)
    cls, settings = OPTIMIZERS[name]
    made = cls(groups_of(module), **settings)

    def backward(step: int) -> None:
        for rank in range(world_size):
            (loss_at(module, step, rank) / world_size).backward()

    for norm in train(module, made, backward):
        yield [param.detach().clone() for param in module.parameters()], norm


def start_sharded(
    name: str, way: Way, group: dist.ProcessGroup | None
) -> tuple[Toy, ShardedOptimizer, Callable[[int], None]]:
    """A module with rank 0's weights, its sharded optimizer, and the backward pass of a step."""
    rank = distributed.rank(group)
    module = Toy(seed=rank)
    if way.wrapper and distributed.world_size(group) > 1:
        model = ddp.wrap(way.wrapper, module, group=group)
    else:
        distributed.broadcast_module(module, group)
        model = module
    cls, settings = OPTIMIZERS[name]
    made = ShardedOptimizer(groups_of(module), cls, group=group, **way.options, **settings)

    def backward(step: int) -> None:
        loss_at(model, step, rank).backward()
        if model is not module:
            model.finish_gradient_synchronization()

    return module, made, backward


def difference(module: nn.Module, expected: list[Tensor]) -> float:
    pairs = zip(module.parameters(), expected)
    return max((a.detach() - b).abs().max().item() for a, b in pairs)


def digest(module: nn.Module) -> str:
    bits = b"".join(
        p.detach().view(torch.uint8).cpu().numpy().tobytes() for p in module.parameters()
    )
    return hashlib.sha256(bits).hexdigest()


def last_ranks(size: int) -> tuple[bool, dist.ProcessGroup | None]:
    """Whether this is one of the last `size` ranks, and their group; every rank calls it."""
    world_size = dist.get_world_size()
    ranks = list(range(world_size - size, world_size))
    group = None if size == world_size else dist.new_group(ranks)
    return dist.get_rank() in ranks, group


def four_ranks(optimizers: dict[int, list[str]], folder: Path) -> dict[str, Any]:
    """`equality` and `resumed` in one launch."""
    return equality(optimizers) | {"resumed": resumed(folder)}


def equality(optimizers: dict[int, list[str]]) -> dict[str, Any]:
    """How far training is from that in one process, for groups of each size and their optimizers.

    One launch for all of them, since starting workers takes longest; the groups are of the last
    ranks, which have other numbers there than in the job.
    """
    results: dict[str, Any] = {"training": {}, "low precision": {}}
    for size, names in optimizers.items():
        is_member, group = last_ranks(size)
        if not is_member:
            continue
        for optimizer_name in names:
            expected = list(reference(optimizer_name, size))
            for way_name in WAYS:
                way = start_sharded(optimizer_name, WAYS[way_name], group)
                results["training"][size, optimizer_name, way_name] = compared(way, expected)
        for optimizer_name in ("sgd", "adamw") if size < 3 else ():
            expected = list(masters_by_hand(size, optimizer_name))
            for way_name in WAYS:
                error = low_precision(size, optimizer_name, WAYS[way_name], group, expected)
                results["low precision"][size, optimizer_name, way_name] = error
    return results


def compared(
    way: tuple[Toy, ShardedOptimizer, Callable[[int], None]],
    expected: list[tuple[list[Tensor], float]],
) -> dict[str, Any]:
    """Errors of parameters and norms over all steps, and what is left at the end."""
    module, made, backward = way
    error = norm_error = 0.0
    for (params, norm), own_norm in zip(expected, train(module, made, backward)):
        error = max(error, difference(module, params))
        norm_error = max(norm_error, abs(own_norm / norm - 1))
    return {
        "error": error,
        "norm error": norm_error,
        "digest": digest(module),
        "elements": state_elements(made),
    }


def state_elements(made: ShardedOptimizer) -> int:
    """How many elements this rank's state has, without step counts."""
    tensors = [value for state in made.inner.state.values() for value in state.values()]
    return sum(v.numel() for v in tensors if isinstance(v, Tensor) and v.dim())


def masters_by_hand(size: int, name: str) -> Iterator[list[Tensor]]:
    """bfloat16 parameters after each step of an optimizer on float32 copies of them."""
    module = Toy(seed=0).bfloat16()
    params = list(module.parameters())
    masters = [nn.Parameter(param.detach().float()) for param in params]
    cls, settings = OPTIMIZERS[name]
    made = cls(masters, **settings)
    for step in range(STEPS):
        for rank in range(size):
            (loss_at(module, step, rank) / size).backward()
        for param, master in zip(params, masters):
            master.grad = None if param.grad is None else param.grad.float()
            param.grad = None
        made.step()
        for param, master in zip(params, masters):
            param.data.copy_(master.data)
        yield [param.detach().clone() for param in params]


def low_precision(
    size: int,
    name: str,
    way: Way,
    group: dist.ProcessGroup | None,
    expected: list[list[Tensor]],
) -> float:
    """The error of bfloat16 training with float32 masters, AdamW's own or the sharded optimizer's.

    The mean of two ranks is rounded as the sum of two halves is; of more they add up otherwise.
    """
    module = Toy(seed=0).bfloat16()
    model = ddp.wrap(way.wrapper, module, group=group) if way.wrapper and size > 1 else module
    cls, settings = OPTIMIZERS[name]
    made = ShardedOptimizer(
        module.parameters(), cls, group=group, master_weights=True, **way.options, **settings
    )
    error = 0.0
    for step, params in enumerate(expected):
        loss_at(model, step, distributed.rank(group)).backward()
        if model is not module:
            model.finish_gradient_synchronization()
        made.step()
        made.zero_grad()
        error = max(error, difference(module, params))
    return error


def resumed(folder: Path) -> dict[Any, float]:
    """Errors of training that four ranks began and that goes on elsewhere, against those ranks.

    Every run takes the same four parts of each batch, however many ranks share them.
    """
    errors = {}
    for way_name in ("parameters", "flat, overlapped"):
        place = folder / way_name
        module, made, run = start_parts(WAYS[way_name], None)
        run(range(5))
        made.param_groups[0]["lr"] *= 0.5
        made.save_shard(place)
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        run(range(5, STEPS))
        expected = [param.detach().clone() for param in module.parameters()]
        for size, other_name in itertools.product((4, 2, 1), ("parameters", "flat, overlapped")):
            is_member, group = last_ranks(size)
            if is_member:
                module, made, run = start_parts(WAYS[other_name], group)
                module.load_state_dict(weights)
                made.load_shards(place)
                run(range(5, STEPS))
                errors[way_name, size, other_name] = difference(module, expected)
        module = Toy(seed=0)
        module.load_state_dict(weights)
        made = optimizer.AdamW(groups_of(module), lr=0.5)
        load_unsharded(place, made)
        run_parts(module, made, module, range(4), range(5, STEPS))
        errors[way_name, "unsharded"] = difference(module, expected)
    return errors


def start_parts(way: Way, group: dist.ProcessGroup | None) -> tuple[Toy, ShardedOptimizer, Any]:
    """A module, its optimizer, and what runs steps in which the ranks share four parts."""
    size = distributed.world_size(group)
    parts = range(4)[distributed.rank(group) :: size]
    module = Toy(seed=0)
    model = ddp.wrap(way.wrapper, module, group=group) if way.wrapper and size > 1 else module
    made = ShardedOptimizer(groups_of(module), optimizer.AdamW, group=group, **way.options, lr=0.01)
    return module, made, lambda steps: run_parts(module, made, model, parts, steps)


def run_parts(
    module: Toy, made: torch.optim.Optimizer, model: nn.Module, parts: range, steps: range
) -> None:
    waits = model if model is not module else made
    for step in steps:
        for number in parts:
            holds_back = number != parts[-1] and hasattr(waits, "no_sync")
            with waits.no_sync() if holds_back else nullcontext():
                (loss_at(model, step, number) / len(parts)).backward()
        if model is not module:
            model.finish_gradient_synchronization()
        made.step()
        made.zero_grad()
