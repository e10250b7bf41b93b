"""What the ranks of notebook 06 do: functions that `lib.distributed.launch` calls on each of them.

New processes can import nothing from a notebook's cells, so that these stand here.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib import profiling
from lib.allocations import synchronise, without_stderr
from lib.config_training import ModelConfig
from lib.ddp import wrap
from lib.distributed import barrier, current_device, mean_over_ranks, rank, world_size
from lib.hardware import device_name, keep_freed_memory
from lib.model import TransformerLM
from lib.profiling import annotate
from lib.trace_file import Trace, read_trace
from lib.trace_timeline import Timeline, timelines
from lib.train_step import MeanLoss, numerics


@dataclass(frozen=True)
class Introduction:
    """What a rank says of itself, and holds after two collectives."""

    rank: int
    world_size: int
    process_id: int
    device: str

    own: Tensor
    """Its own numbers, (4,)."""

    after_broadcast: Tensor
    after_all_reduce: Tensor


def introduce() -> Introduction:
    """Tell who this rank is; broadcast its numbers from rank 0, and add up those of all ranks."""
    own = torch.arange(4.0, device=current_device()) + 10 * (rank() + 1)
    received = own.clone()
    dist.broadcast(received, src=0)
    total = own.clone()
    dist.all_reduce(total)
    device = device_name(current_device())
    return Introduction(rank(), world_size(), os.getpid(), device, own, received, total)


def in_turn(jobs: Sequence[tuple[Callable[..., Any], tuple]]) -> list[Any]:
    """The results of all `jobs`, pairs of a function and its arguments."""
    return [fn(*arguments) for fn, arguments in jobs]


def make_model(shape: ModelConfig, seed: int = 0) -> nn.Module:
    """The loss of a model with random weights, a module of inputs and targets."""
    device = current_device()
    model = TransformerLM(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    return MeanLoss(model, device, None, 0.0)


def batch(shape: ModelConfig, batch_size: int, step: int, ranks: Iterable[int]) -> list[Tensor]:
    """Inputs and targets of a step, of `ranks` behind one another: random tokens, (batch, length).

    Each rank has `batch_size` windows of its own.
    """
    size = (batch_size, shape.context_length + 1)
    parts = []
    for number in ranks:
        generator = torch.Generator().manual_seed(1000 * step + number)
        parts.append(torch.randint(shape.vocab_size, size, generator=generator))
    windows = torch.cat(parts).to(current_device())
    return [windows[:, :-1], windows[:, 1:]]


def gradient(shape: ModelConfig, batch_size: int, ranks: Iterable[int]) -> Tensor:
    """The gradient of the mean loss over the windows of `ranks`, all parameters in a row."""
    model = make_model(shape)
    model(*batch(shape, batch_size, 0, ranks)).backward()
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def average_gradients(shape: ModelConfig, batch_size: int) -> tuple[Tensor, Tensor]:
    """This rank's gradient, and the mean of all ranks' gradients."""
    own = gradient(shape, batch_size, [rank()])
    mean = own.clone()
    dist.all_reduce(mean)
    mean /= world_size()
    return own, mean


def train(model: nn.Module, batches: Iterable[list[Tensor]]) -> Tensor:
    """Train a wrapped `model`, a step for each batch; all its weights in a row."""
    for inputs, targets in batches:
        loss = model(inputs, targets)
        loss.backward()
        model.finish_gradient_synchronization()
        descend(model)
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@torch.no_grad()
def descend(model: nn.Module, lr: float = 0.1) -> None:
    """A step of plain gradient descent; the gradients are gone afterwards."""
    for param in model.parameters():
        if param.grad is not None:
            param -= lr * param.grad
            param.grad = None


def train_alone(shape: ModelConfig, batch_size: int, steps: int, ranks: int) -> Tensor:
    """Weights after training in this process on the windows of all ranks."""
    batches = [batch(shape, batch_size, step, range(ranks)) for step in range(steps)]
    return train(wrap("none", make_model(shape)), batches)


def train_on_ranks(
    shape: ModelConfig, batch_size: int, steps: int, wrappers: Sequence[str]
) -> dict[str, Tensor]:
    """For each wrapper, weights after training on this rank's windows.

    Ranks begin with different weights; the wrapper is to give all of them those of rank 0.
    """
    batches = [batch(shape, batch_size, step, [rank()]) for step in range(steps)]
    return {name: train(wrap(name, make_model(shape, seed=rank())), batches) for name in wrappers}


@dataclass(frozen=True)
class Setup:
    """One way to train that is timed."""

    wrapper: str
    """`none`: each rank trains by itself."""

    batch_size: int
    """Windows of each rank."""

    bucket_cap_mb: float = 25.0


@dataclass(frozen=True)
class SetupTimes:
    """What `time_setups` found of one setup, on one rank."""

    setup: Setup

    times_ms: list[float]
    """Of each step, without a profiler; the mean over ranks."""

    timelines: list[Timeline]
    """Of further steps, from a trace."""

    num_buckets: int | None
    """None where the wrapper has none."""

    gradient_bytes: int

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def timeline(self) -> Timeline:
        """The quickest, which other programs disturbed least."""
        return min(self.timelines, key=lambda line: line.step_ms)

    @property
    def backward_ms(self) -> float:
        """Of a step without a profiler, by backward's share of those with one."""
        share = statistics.median(line.backward_ms / line.step_ms for line in self.timelines)
        return share * self.median_ms


@numerics(tf32=True, deterministic=False)
def time_setups(
    shape: ModelConfig, setups: Sequence[Setup], turns: int, traced_pairs: int
) -> list[SetupTimes]:
    """Training steps of `setups` in turns, which all ranks begin together; on GPUs in TF32.

    Args:
        turns: steps of each that are timed.
        traced_pairs: pairs of steps of each that are traced afterwards. Only rank 0 reads its
            trace, and only its result has timelines.
    """
    device = current_device()
    if device.type == "cpu":
        keep_freed_memory()
    # made by all ranks for each rank
    alone = [dist.new_group([other]) for other in range(world_size())][rank()]
    steps = [_Step(shape, setup, alone) for setup in setups]
    for step in steps * 2:
        step.run()
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(turns):
        for step, found in zip(steps, times):
            barrier()
            start = time.perf_counter()
            step.run()
            synchronise(device)
            found.append(1e3 * (time.perf_counter() - start))
    every = mean_over_ranks(torch.tensor(times)).tolist()
    lines = _trace(steps, traced_pairs, device)
    return [
        SetupTimes(setup, mean, line, step.num_buckets, step.gradient_bytes)
        for setup, step, mean, line in zip(setups, steps, every, lines)
    ]


class _Step:
    """A training step, again and again on the same windows."""

    def __init__(self, shape: ModelConfig, setup: Setup, alone: dist.ProcessGroup) -> None:
        module = make_model(shape)
        group = alone if setup.wrapper == "none" else None
        self.model = wrap(setup.wrapper, module, group=group, bucket_cap_mb=setup.bucket_cap_mb)
        self.batch = batch(shape, setup.batch_size, 0, [rank()])
        self.gradient_bytes = sum(param.nbytes for param in module.parameters())

    def run(self) -> None:
        with annotate("forward"):
            loss = self.model(*self.batch)
        with annotate("backward"):
            loss.backward()
        self.model.finish_gradient_synchronization()
        with annotate("optimizer"):
            descend(self.model, lr=1e-3)

    @property
    def num_buckets(self) -> int | None:
        buckets = getattr(self.model, "buckets", None)
        return None if buckets is None else len(buckets)


def _trace(steps: Sequence[_Step], traced_pairs: int, device: torch.device) -> list[list[Timeline]]:
    """Timelines of each of `steps`; none on ranks other than 0."""
    runs = {f"step of setup {number}": step.run for number, step in enumerate(steps)}
    # the second of a pair finds memory that fits, after steps of another setup
    trace = trace_of(runs, traced_pairs, device, at_once=2)
    return [timelines(trace, name) if trace else [] for name in runs]


def trace_of(
    runs: Mapping[str, Callable[[], Any]], turns: int, device: torch.device, *, at_once: int = 1
) -> Trace | None:
    """The trace of functions that take turns, each call in a range of its name; None but on rank 0.

    Args:
        at_once: how often a function is called in its turn.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # the first calls that are watched are slow, and do not count
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with tempfile.TemporaryDirectory() as folder, without_stderr():
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
            for run in runs.values():
                run()
            synchronise(device)
            profiler.step()
            with profiling.enabled():
                for name in [name for _ in range(turns) for name in runs for _ in range(at_once)]:
                    barrier()
                    with annotate(name):
                        runs[name]()
                    synchronise(device)
            profiler.step()
        if rank() > 0:
            return None
        profiler.export_chrome_trace(str(path))
        return read_trace(path)
