"""The functions that `lib.ddp.launcher.launch` calls on each rank in notebook 08.

ZeRO-1 by hand and by `ShardedOptimizer`, and training steps timed and traced. Models and sequences
are those of notebook 07 (`lib.lessons.ddp.ranks`).
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.ranges import annotate
from lib.ddp.process_group import (
    all_gather,
    broadcast_module,
    current_device,
    rank,
    reduce_scatter,
    world_size,
)
from lib.ddp.wrappers import wrap
from lib.lessons.ddp.ranks import batch, make_model, time_runs, trace_of
from lib.model.config import ModelConfig
from lib.optimizer.adamw import AdamW
from lib.optimizer.schedule import clip_grad_norm, grad_norm
from lib.profiling.timeline import Intervals, Timeline, timelines
from lib.profiling.trace import Trace, edges, launch_times, union
from lib.sharded_optimizer.optimizer import ShardedOptimizer
from lib.sharded_optimizer.saved_state import load_unsharded
from lib.sharded_optimizer.whole_parameters import balanced_owners
from lib.training.config import TrainConfig
from lib.training.parallelism import AveragedByOptimizer, parallelise
from lib.training.step import numerics

# With its usual eps, AdamW takes full-size steps on gradients that are mere rounding errors.
SETTINGS: dict = {"lr": 1e-2, "eps": 1e-6}
MAX_NORM = 0.5
# With these options `ShardedOptimizer` needs no wrapper.
ALONE = {"strategy": "flat", "reduces_gradients": True, "overlap": True}
# The purpose of a collective by the name of its kernel or operator. gloo makes a reduce-scatter out
# of an all-reduce, so the two look alike.
PURPOSES = {
    "gradients": re.compile("all_?reduce|reduce_?scatter", re.IGNORECASE),
    "weights": re.compile("all_?gather|broadcast", re.IGNORECASE),
}
# The host's request for a collective, not the collective itself.
REQUEST = "c10d::"


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


def train_whole_parameters(shape: ModelConfig, batch_size: int, steps: int) -> Trained:
    """ZeRO-1 by hand: each rank updates some whole parameters, and broadcasts them."""
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
    """The tensors in one buffer, padded with zeros to a multiple of the number of ranks."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return nn.functional.pad(flat, (0, -len(flat) % world_size()))


def train_flat_slices(shape: ModelConfig, batch_size: int, steps: int) -> Trained:
    """ZeRO-1 by hand: all parameters are in one buffer, and each rank updates a slice of it."""
    module = make_model(shape)
    params = list(module.parameters())
    flat, offset = flattened([param.detach() for param in params]), 0
    for param in params:
        # a view, so that the all-gather updates the parameter
        param.data = flat[offset : offset + param.numel()].view(param.shape)
        offset += param.numel()
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
    """Train in this process, with all state, on the sequences of all ranks."""
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
    """A model, wrapped unless the optimizer averages gradients, and its optimizer."""
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
    """Take a step for each batch; return the norms of the gradient and of this rank's part."""
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
    """Take each of `steps` on the sequences of all ranks; return the gradient norms."""
    norms = []
    for step in steps:
        module(*batch(module.model.config, batch_size, step, range(ranks))).backward()
        max_norm = MAX_NORM if clips else float("inf")
        norms.append(clip_grad_norm(list(module.parameters()), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@dataclass(frozen=True)
class Cycle:
    """A step from the start of backward to the end of the next forward pass, from a trace."""

    timeline: Timeline

    collectives: dict[str, Intervals]
    """When collectives for each of `PURPOSES` are in progress, in ms from the start."""


@dataclass(frozen=True)
class WayTimes:
    """The results of `time_ways` for one way to train, on one rank."""

    times_ms: list[float]
    """The duration of each cycle without a profiler; the mean over ranks."""

    cycles: list[Cycle]
    """Further cycles, from a trace; empty but on rank 0."""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def cycle(self) -> Cycle:
        """The fastest cycle, which other programs disturbed least."""
        return min(self.cycles, key=lambda cycle: cycle.timeline.step_ms)


@numerics(tf32=True, deterministic=False)
def time_ways(
    shape: ModelConfig, ways: Mapping[str, Mapping[str, Any]], batch_size: int, turns: int
) -> dict[str, WayTimes]:
    """Time cycles of `ways`, names with fields of `TrainConfig`, interleaved; on GPUs in TF32.

    A cycle ends with the next forward pass, since weights may arrive during it.
    """
    device = current_device()
    runs = {name: _Run(shape, fields, batch_size).cycle for name, fields in ways.items()}
    times = time_runs(runs, turns, device)
    trace = trace_of(runs, turns, device)
    return {name: WayTimes(times[name], cycles(trace, name) if trace else []) for name in runs}


class _Run:
    """Training in one way, on the same sequences every time."""

    def __init__(self, shape: ModelConfig, fields: Mapping[str, Any], batch_size: int) -> None:
        loss = make_model(shape)
        self.batch = batch(shape, batch_size, 0, [rank()])
        lr = torch.tensor(1e-3, device=current_device())
        config = TrainConfig(model=shape, **fields)
        self.parallel, self.optimizer = parallelise(loss, config, lr, None)
        self.loss = self.parallel(*self.batch)

    def cycle(self) -> None:
        with annotate("backward"):
            self.loss.backward()
        self.parallel.finish_gradient_synchronization()
        with annotate("optimizer"):
            self.optimizer.grad_norm()
            self.optimizer.step()
        self.optimizer.zero_grad()
        with annotate("forward"):
            self.loss = self.parallel(*self.batch)


def cycles(trace: Trace, name: str) -> list[Cycle]:
    """The cycle of each range called `name`, in order."""
    spans = [s for s in trace.kernels or trace.operators if not s.name.startswith(REQUEST)]
    launched = launch_times(spans, trace.calls)
    steps = [span for span in trace.ranges if span.name == name]
    found = []
    for line, step in zip(timelines(trace, name), steps):
        inside = [s for s, time in zip(spans, launched) if step.start <= time < step.end]
        collectives = {}
        for purpose, pattern in PURPOSES.items():
            busy = union(edges(span for span in inside if pattern.search(span.name)))
            collectives[purpose] = tuple(map(tuple, ((busy - step.start) / 1e3).tolist()))
        found.append(Cycle(line, collectives))
    return found
