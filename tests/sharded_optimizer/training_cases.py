"""Training with `ShardedOptimizer` and without, for ranks of its tests."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp import process_group, wrappers
from lib.optimizer import adamw
from lib.optimizer.schedule import clip_coefficient, clip_grad_norm
from lib.sharded_optimizer.optimizer import ShardedOptimizer
from lib.training.checkpoint import load_checkpoint, save_checkpoint
from tests.ddp.training_cases import Net, difference, digest, loss_of, part

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
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "torch adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (adamw.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


def groups_of(module: Net) -> list[dict[str, Any]]:
    """Three groups; the first has its own learning rate and a frozen parameter."""
    named = dict(module.named_parameters())
    sometimes = [named.pop(name) for name in list(named) if "sometimes" in name]
    params = list(named.values())
    return [
        {"params": [param for param in params if param.ndim == 2], "lr": 0.02},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0},
        {"params": sometimes, "lr": 0.005},
    ]


def schedule_of(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, (step + 1) / 4))


def clip(made: torch.optim.Optimizer) -> Tensor:
    if isinstance(made, ShardedOptimizer):
        return made.clip_grad_norm(MAX_NORM)
    params = [param for group in made.param_groups for param in group["params"]]
    if not isinstance(made, adamw.AdamW):
        return clip_grad_norm(params, MAX_NORM)
    norm = made.grad_norm()
    for param in params:
        if param.grad is not None:
            param.grad.mul_(clip_coefficient(norm, MAX_NORM))
    return norm


def train(
    module: Net,
    made: torch.optim.Optimizer,
    backward: Callable[[int], None],
    steps: range = range(STEPS),
) -> Iterator[float]:
    """Train with a schedule and clipping; yields each step's norm."""
    schedule = schedule_of(made)
    for step in steps:
        backward(step)
        norm = clip(made)
        made.step()
        # both ways of forgetting gradients
        made.zero_grad(set_to_none=step % 3 > 0)
        schedule.step()
        yield norm.item()


def loss_at(module: nn.Module, step: int, rank: int) -> Tensor:
    return loss_of(module, *part(step, 0, rank))


def reference(name: str, world_size: int) -> Iterator[tuple[list[Tensor], float, int]]:
    """Parameters, norm and elements of state after each step in one process on all batches."""
    module = Net(seed=0)
    cls, settings = OPTIMIZERS[name]
    made = cls(groups_of(module), **settings)

    def backward(step: int) -> None:
        for rank in range(world_size):
            (loss_at(module, step, rank) / world_size).backward()

    for norm in train(module, made, backward):
        yield [param.detach().clone() for param in module.parameters()], norm, state_elements(made)


def start_sharded(
    name: str, way: Way, group: dist.ProcessGroup | None
) -> tuple[Net, nn.Module, ShardedOptimizer]:
    """A module with rank 0's weights, what runs it, and its sharded optimizer."""
    module = model = Net(seed=process_group.rank(group))
    if way.wrapper and process_group.world_size(group) > 1:
        model = wrappers.wrap(way.wrapper, module, group=group)
    else:
        process_group.broadcast_module(module, group)
    cls, settings = OPTIMIZERS[name]
    made = ShardedOptimizer(groups_of(module), cls, group=group, **way.options, **settings)
    return module, model, made


def finish(model: nn.Module) -> None:
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()


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
            expected = list(reference(name, size))
            for way in WAYS:
                found = compare(name, WAYS[way], group, expected)
                results["training"][size, name, way] = found
    return results


def compare(name: str, way: Way, group: dist.ProcessGroup | None, expected: list) -> dict[str, Any]:
    """Errors of parameters and norms over all steps, and what is left at the end."""
    module, model, made = start_sharded(name, way, group)

    def backward(step: int) -> None:
        loss_at(model, step, process_group.rank(group)).backward()
        finish(model)

    error = norm_error = 0.0
    for (params, norm, _), own_norm in zip(expected, train(module, made, backward)):
        error = max(error, difference(module.parameters(), params))
        norm_error = max(norm_error, abs(own_norm / norm - 1))
    return {
        "error": error,
        "norm error": norm_error,
        "digest": digest(module.parameters()),
        "elements": state_elements(made.inner),
        "whole elements": expected[-1][2],
    }


def state_elements(made: torch.optim.Optimizer) -> int:
    """How many elements its state has, without step counts."""
    tensors = [value for state in made.state.values() for value in state.values()]
    return sum(v.numel() for v in tensors if isinstance(v, Tensor) and v.dim())


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
        made = adamw.AdamW(groups_of(module), lr=0.5)
        load_checkpoint(place, optimizer=made)
        run_parts(module, made, module, range(PARTS), range(5, STEPS))
        errors[saved, 1, "unsharded"] = difference(module.parameters(), expected)
    return errors


def start_parts(way: Way, group: dist.ProcessGroup | None) -> tuple[Net, ShardedOptimizer, Any]:
    """A module, its optimizer, and what runs steps in which the ranks share the parts."""
    module, model, made = start_sharded("adamw", way, group)
    parts = range(PARTS)[process_group.rank(group) :: process_group.world_size(group)]
    return module, made, lambda steps: run_parts(module, made, model, parts, steps)


def run_parts(
    module: Net, made: torch.optim.Optimizer, model: nn.Module, parts: range, steps: range
) -> None:
    waits = model if model is not module else made
    for step in steps:
        for number in parts:
            holds_back = number != parts[-1] and hasattr(waits, "no_sync")
            with waits.no_sync() if holds_back else nullcontext():
                (loss_at(model, step, number) / len(parts)).backward()
        finish(model)
        made.step()
        made.zero_grad()
