"""The functions that `lib.ddp.launcher.launch` calls on each rank in notebook 09.

Training with `ShardedOptimizer`, its norms and its checkpoints. Models and sequences are those of
notebook 08 (`lib.lessons.ddp.ranks`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lib.ddp.process_group import (
    broadcast_module,
    rank,
)
from lib.lessons.ddp.ranks import batch, make_model
from lib.model.config import ModelConfig
from lib.optimizer.adamw import AdamW
from lib.optimizer.schedule import clip_grad_norm, grad_norm
from lib.sharded_optimizer.optimizer import ShardedOptimizer
from lib.training.checkpoint import load_checkpoint, save_checkpoint

# With its usual eps, AdamW takes full-size steps on gradients that are mere rounding errors.
SETTINGS: dict = {"lr": 1e-2, "eps": 1e-4}
MAX_NORM = 0.5
# With these options `ShardedOptimizer` needs no wrapper.
ALONE = {"strategy": "flat", "reduces_gradients": True, "overlap": True}


@dataclass(frozen=True)
class Trained:
    """The state of one rank after some training."""

    weights: Tensor
    """The model's weights, flattened."""

    state_bytes: int
    """The size of the optimizer's state in this process."""

    norms: tuple[float, ...] = ()
    """The norm of the whole gradient before clipping, in each step."""

    own_norms: tuple[float, ...] = ()
    """The norm of the part that this rank updates, in each step."""


def weights_of(module: nn.Module) -> Tensor:
    """The flattened weights of `module`."""
    return torch.cat([param.detach().flatten() for param in module.parameters()])


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def batches_of(shape: ModelConfig, batch_size: int, steps: Iterable[int]) -> list[list[Tensor]]:
    """This rank's inputs and targets of each of `steps`."""
    return [batch(shape, batch_size, step, [rank()]) for step in steps]


def train_by_slices(shape: ModelConfig, batch_size: int, steps: int) -> Trained:
    """`ShardedOptimizer` with flat slices, which averages gradients itself, and clips them."""
    model, optimizer = _sharded(shape)
    norms = _train(model, optimizer, batches_of(shape, batch_size, range(steps)))
    return Trained(weights_of(model), state_bytes(optimizer), *zip(*norms))


def train_alone(shape: ModelConfig, batch_size: int, steps: int, ranks: int) -> Trained:
    """Train in this process, with all state and clipping, on the sequences of all ranks."""
    module = make_model(shape)
    optimizer = AdamW(module.parameters(), **SETTINGS)
    norms = _train_whole(module, optimizer, batch_size, range(steps), ranks)
    return Trained(weights_of(module), state_bytes(optimizer), tuple(norms))


def train_and_save(
    shape: ModelConfig, batch_size: int, folder: str | os.PathLike, steps: int, further: int
) -> Trained:
    """Train `steps`, save a checkpoint in `folder`, train `further`."""
    model, optimizer = _sharded(shape)
    _train(model, optimizer, batches_of(shape, batch_size, range(steps)))
    save_checkpoint(folder, step=steps, model=model, optimizer=optimizer)
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
    optimizer = AdamW(module.parameters(), **SETTINGS)
    load_checkpoint(folder, model=module, optimizer=optimizer)
    _train_whole(module, optimizer, batch_size, range(steps, steps + further), ranks)
    return Trained(weights_of(module), state_bytes(optimizer))


def _sharded(shape: ModelConfig) -> tuple[nn.Module, ShardedOptimizer]:
    """A model, and its optimizer, which averages gradients."""
    module = make_model(shape)
    broadcast_module(module)
    optimizer = ShardedOptimizer(module.parameters(), AdamW, **SETTINGS, **ALONE)
    return module, optimizer


def _train(
    model: nn.Module, optimizer: ShardedOptimizer, batches: Iterable[list[Tensor]]
) -> list[tuple[float, float]]:
    """Take a step for each batch; return the norms of the gradient and of this rank's part."""
    norms = []
    for inputs, targets in batches:
        model(inputs, targets).backward()
        optimizer.finish_gradient_synchronization()
        optimizer.grad_norm()
        own = grad_norm(shard.leaf for shard in optimizer.shards)
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
) -> list[float]:
    """Take each of `steps` on the sequences of all ranks; return the gradient norms."""
    norms = []
    for step in steps:
        module(*batch(module.model.config, batch_size, step, range(ranks))).backward()
        norms.append(clip_grad_norm(list(module.parameters()), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms
