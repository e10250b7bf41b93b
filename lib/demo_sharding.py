"""What the ranks of notebook 07 do: functions that `lib.distributed.launch` calls on each of them.

Models and windows are those of notebook 06 (`lib.demo_ddp`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.config_training import ModelConfig
from lib.ddp import wrap
from lib.demo_ddp import batch, make_model
from lib.distributed import (
    all_gather,
    broadcast_module,
    current_device,
    rank,
    reduce_scatter,
    world_size,
)
from lib.optimizer import AdamW, clip_grad_norm, grad_norm
from lib.sharded_optimizer import ShardedOptimizer, load_unsharded
from lib.sharded_optimizer_parts import balanced_owners
from lib.train_optimizer import AveragedByOptimizer

# With its usual eps AdamW makes whole steps of gradients that are nothing but rounding.
SETTINGS = {"lr": 1e-2, "eps": 1e-6}
MAX_NORM = 0.5
# How `ShardedOptimizer` needs no wrapper.
ALONE = {"strategy": "flat", "reduces_gradients": True, "overlap": True}


@dataclass(frozen=True)
class Trained:
    """What one rank has after some training."""

    weights: Tensor
    """All of the model's, in a row."""

    state_bytes: int
    """Of the optimizer's state in this process."""

    norms: tuple[float, ...] = ()
    """Of the whole gradient, before it was clipped, in each step."""

    own_norms: tuple[float, ...] = ()
    """Of the part that this rank updates."""


def weights_of(module: nn.Module) -> Tensor:
    """All weights of `module` in a row."""
    return torch.cat([param.detach().flatten() for param in module.parameters()])


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def batches_of(shape: ModelConfig, batch_size: int, steps: Iterable[int]) -> list[list[Tensor]]:
    """This rank's inputs and targets of each of `steps`."""
    return [batch(shape, batch_size, step, [rank()]) for step in steps]


def train_whole_parameters(shape: ModelConfig, batch_size: int, steps: int) -> Trained:
    """ZeRO-1 by hand: whole parameters are dealt to ranks, and broadcast after the update."""
    model = wrap("flat", make_model(shape))
    params = list(model.parameters())
    owners = balanced_owners([param.numel() for param in params], [0] * world_size())
    mine = [param for param, owner in zip(params, owners) if owner == rank()]
    optimizer = AdamW(mine, **SETTINGS)
    for inputs, targets in batches_of(shape, batch_size, range(steps)):
        model(inputs, targets).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        for param, owner in zip(params, owners):
            dist.broadcast(param.detach(), src=owner)
        model.zero_grad()
    return Trained(weights_of(model), state_bytes(optimizer))


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors behind one another, and zeros up to a length that ranks can share equally."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return nn.functional.pad(flat, (0, -len(flat) % world_size()))


def train_flat_slices(shape: ModelConfig, batch_size: int, steps: int) -> Trained:
    """ZeRO-1 by hand: all parameters in one buffer, of which each rank updates a slice."""
    module = make_model(shape)
    params = list(module.parameters())
    flat, place = flattened([param.detach() for param in params]), 0
    for param in params:
        # a view, which sees what is gathered
        param.data = flat[place : place + param.numel()].view(param.shape)
        place += param.numel()
    mine = nn.Parameter(flat.chunk(world_size())[rank()])
    optimizer = AdamW([mine], **SETTINGS)
    for inputs, targets in batches_of(shape, batch_size, range(steps)):
        module(inputs, targets).backward()
        mine.grad = torch.empty_like(mine)
        reduce_scatter(mine.grad, flattened([param.grad for param in params]))
        mine.grad /= world_size()
        optimizer.step()
        all_gather(flat, mine.detach())
        module.zero_grad()
    return Trained(weights_of(module), state_bytes(optimizer))


def train_by_parameters(shape: ModelConfig, batch_size: int, steps: int) -> Trained:
    """`ShardedOptimizer` with whole parameters, behind `flashddp`; gradients are clipped."""
    return _train_sharded(shape, batch_size, steps, strategy="parameters")


def train_by_slices(shape: ModelConfig, batch_size: int, steps: int) -> Trained:
    """`ShardedOptimizer` with flat slices, which averages gradients itself, and clips them."""
    return _train_sharded(shape, batch_size, steps, **ALONE)


def _train_sharded(shape: ModelConfig, batch_size: int, steps: int, **options: Any) -> Trained:
    model, optimizer = _sharded(shape, **options)
    norms = _train(model, optimizer, batches_of(shape, batch_size, range(steps)))
    return Trained(weights_of(model), state_bytes(optimizer), *zip(*norms))


def train_alone(
    shape: ModelConfig, batch_size: int, steps: int, ranks: int, *, clips: bool = True
) -> Trained:
    """Training in this process, with all state, on the windows of all ranks."""
    module = make_model(shape)
    optimizer = AdamW(module.parameters(), **SETTINGS)
    norms = _train_whole(module, optimizer, batch_size, range(steps), ranks, clips=clips)
    return Trained(weights_of(module), state_bytes(optimizer), tuple(norms))


def train_and_save(
    shape: ModelConfig, batch_size: int, folder: str | os.PathLike, steps: int, further: int
) -> Trained:
    """Train `steps`, save in `folder` each rank's shard and rank 0's weights, train `further`."""
    model, optimizer = _sharded(shape, **ALONE)
    _train(model, optimizer, batches_of(shape, batch_size, range(steps)))
    optimizer.save_shard(folder)
    if rank() == 0:
        torch.save(model.module.state_dict(), Path(folder) / "model.pt")
    _train(model, optimizer, batches_of(shape, batch_size, range(steps, steps + further)))
    return Trained(weights_of(model), state_bytes(optimizer))


def resume_alone(
    shape: ModelConfig,
    batch_size: int,
    folder: str | os.PathLike,
    steps: int,
    further: int,
    ranks: int,
) -> Trained:
    """Go on in this process, with a plain optimizer, where `train_and_save` saved."""
    module = make_model(shape)
    module.load_state_dict(torch.load(Path(folder) / "model.pt", map_location=current_device()))
    optimizer = AdamW(module.parameters(), **SETTINGS)
    load_unsharded(folder, optimizer)
    _train_whole(module, optimizer, batch_size, range(steps, steps + further), ranks)
    return Trained(weights_of(module), state_bytes(optimizer))


def _sharded(shape: ModelConfig, **options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    """A model, in the wrapper that it still needs, and its optimizer."""
    module = make_model(shape)
    if options.get("reduces_gradients"):
        broadcast_module(module)
        optimizer = ShardedOptimizer(module.parameters(), AdamW, **SETTINGS, **options)
        return AveragedByOptimizer(module, optimizer), optimizer
    model = wrap("flashddp", module)
    return model, ShardedOptimizer(model.parameters(), AdamW, **SETTINGS, **options)


def _train(
    model: nn.Module, optimizer: ShardedOptimizer, batches: Iterable[list[Tensor]]
) -> list[tuple[float, float]]:
    """A step for each batch; of each the gradient's norm, and that of this rank's part."""
    norms = []
    for inputs, targets in batches:
        model(inputs, targets).backward()
        model.finish_gradient_synchronization()
        optimizer.grad_norm()
        own = grad_norm([shard for shard in optimizer.shards if shard.grad is not None])
        norms.append((optimizer.clip_grad_norm(MAX_NORM).item(), own.item()))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _train_whole(
    module: nn.Module,
    optimizer: AdamW,
    batch_size: int,
    steps: Iterable[int],
    ranks: int,
    *,
    clips: bool = True,
) -> list[float]:
    """A step for each of `steps` on all windows; the norm of each gradient."""
    norms = []
    for step in steps:
        module(*batch(module.model.config, batch_size, step, range(ranks))).backward()
        max_norm = MAX_NORM if clips else float("inf")
        norms.append(clip_grad_norm(list(module.parameters()), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms
