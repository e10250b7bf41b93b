"""The functions that `lib.ddp.launcher.launch` calls on each rank in notebook 07.

They are in a file, since new processes cannot import a notebook's cells.
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

from lib.core import ranges
from lib.core.allocator import synchronise, without_stderr
from lib.core.hardware import device_name, keep_freed_memory
from lib.core.ranges import annotate
from lib.ddp.process_group import barrier, current_device, mean_over_ranks, rank, world_size
from lib.ddp.wrappers import wrap
from lib.model.config import ModelConfig
from lib.model.transformer import MeanLoss, TransformerLM
from lib.profiling.timeline import Timeline, timelines
from lib.profiling.trace import Trace, read_trace
from lib.training.step import numerics


@dataclass(frozen=True)
class Introduction:
    """A rank's identity, and its numbers before and after two collectives."""

    rank: int
    world_size: int
    process_id: int
    device: str

    own: Tensor
    """The rank's own numbers, (4,)."""

    after_broadcast: Tensor
    after_all_reduce: Tensor


def introduce() -> Introduction:
    """Identify this rank; broadcast rank 0's numbers, and all-reduce those of all ranks."""
    own = torch.arange(4.0, device=current_device()) + 10 * (rank() + 1)
    received = own.clone()
    dist.broadcast(received, src=0)
    total = own.clone()
    dist.all_reduce(total)
    device = device_name(current_device())
    return Introduction(rank(), world_size(), os.getpid(), device, own, received, total)


def in_turn(jobs: Sequence[tuple[Callable[..., Any], tuple]]) -> list[Any]:
    """The results of `jobs`, pairs of a function and its arguments, one after the other."""
    return [fn(*arguments) for fn, arguments in jobs]


def make_model(shape: ModelConfig, seed: int = 0) -> nn.Module:
    """A randomly initialized model as a module that maps inputs and targets to the mean loss."""
    device = current_device()
    model = TransformerLM(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    return MeanLoss(model, device, None, 0.0)


def batch(shape: ModelConfig, batch_size: int, step: int, ranks: Iterable[int]) -> list[Tensor]:
    """Random inputs and targets of one step, those of `ranks` concatenated.

    Each rank has its own `batch_size` sequences; inputs and targets are (sequences, length).
    """
    size = (batch_size, shape.context_length + 1)
    parts = []
    for number in ranks:
        generator = torch.Generator().manual_seed(1000 * step + number)
        parts.append(torch.randint(shape.vocab_size, size, generator=generator))
    tokens = torch.cat(parts).to(current_device())
    return [tokens[:, :-1], tokens[:, 1:]]


def gradient(shape: ModelConfig, batch_size: int, ranks: Iterable[int]) -> Tensor:
    """The flattened gradient of the mean loss over the sequences of `ranks`."""
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
    """Train a wrapped `model`, a step for each batch; return its flattened weights."""
    for inputs, targets in batches:
        loss = model(inputs, targets)
        loss.backward()
        model.finish_gradient_synchronization()
        descend(model)
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@torch.no_grad()
def descend(model: nn.Module, lr: float = 0.1) -> None:
    """Take a step of plain gradient descent, and drop the gradients."""
    for param in model.parameters():
        if param.grad is not None:
            param -= lr * param.grad
            param.grad = None


def train_alone(shape: ModelConfig, batch_size: int, steps: int, ranks: int) -> Tensor:
    """Weights after training in this process on the sequences of all ranks."""
    batches = [batch(shape, batch_size, step, range(ranks)) for step in range(steps)]
    return train(wrap("none", make_model(shape)), batches)


def train_on_ranks(
    shape: ModelConfig, batch_size: int, steps: int, wrappers: Sequence[str]
) -> dict[str, Tensor]:
    """Weights by wrapper, after training on this rank's sequences.

    Ranks begin with different weights; the wrapper must broadcast those of rank 0.
    """
    batches = [batch(shape, batch_size, step, [rank()]) for step in range(steps)]
    return {name: train(wrap(name, make_model(shape, seed=rank())), batches) for name in wrappers}


@dataclass(frozen=True)
class Setup:
    """A way to train, to be timed."""

    wrapper: str
    """With `none`, each rank trains by itself."""

    batch_size: int
    """Sequences of each rank."""

    bucket_cap_mb: float = 25.0


@dataclass(frozen=True)
class SetupTimes:
    """The results of `time_setups` for one setup, on one rank."""

    setup: Setup

    times_ms: list[float]
    """The duration of each step without a profiler; the mean over ranks."""

    timelines: list[Timeline]
    """Further steps, from a trace; empty but on rank 0."""

    num_buckets: int | None
    """None for a wrapper without buckets."""

    gradient_bytes: int

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def timeline(self) -> Timeline:
        """The fastest step, which other programs disturbed least."""
        return min(self.timelines, key=lambda line: line.step_ms)

    @property
    def backward_ms(self) -> float:
        """Backward in a step without a profiler, by its share of the traced steps."""
        share = statistics.median(line.backward_ms / line.step_ms for line in self.timelines)
        return share * self.median_ms


@numerics(tf32=True, deterministic=False)
def time_setups(
    shape: ModelConfig, setups: Sequence[Setup], turns: int, traced_pairs: int
) -> list[SetupTimes]:
    """Time training steps of `setups`, interleaved; on GPUs in TF32.

    Args:
        turns: timed steps of each.
        traced_pairs: pairs of steps of each that are traced afterwards, on rank 0 alone.
    """
    device = current_device()
    # every rank creates the group of each rank
    alone = [dist.new_group([other]) for other in range(world_size())][rank()]
    steps = [_Step(shape, setup, alone) for setup in setups]
    runs = {f"step of setup {number}": step.run for number, step in enumerate(steps)}
    times = time_runs(runs, turns, device)
    # in pairs: the second finds the memory that it needs, after steps of another setup
    trace = trace_of(runs, traced_pairs, device, at_once=2)
    return [
        SetupTimes(
            setup,
            times[name],
            timelines(trace, name) if trace else [],
            step.num_buckets,
            step.gradient_bytes,
        )
        for setup, step, name in zip(setups, steps, runs)
    ]


def time_runs(
    runs: Mapping[str, Callable[[], Any]], turns: int, device: torch.device
) -> dict[str, list[float]]:
    """The ms of each call of interleaved functions, which ranks start together: means over ranks.

    Three calls of each go before, which allocate memory and optimizer state, and agree on the order
    of buckets.
    """
    if device.type == "cpu":
        keep_freed_memory()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-3, turns):
        for name, run in runs.items():
            barrier()
            start = time.perf_counter()
            run()
            synchronise(device)
            if turn >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    means = mean_over_ranks(torch.tensor(list(times.values()))).tolist()
    return dict(zip(times, means))


class _Step:
    """A training step on the same sequences every time."""

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


def trace_of(
    runs: Mapping[str, Callable[[], Any]], turns: int, device: torch.device, *, at_once: int = 1
) -> Trace | None:
    """Trace interleaved functions, each call in a range with its name; None except on rank 0.

    Args:
        at_once: consecutive calls of each function.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # the first profiled calls are slow, and do not count
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with tempfile.TemporaryDirectory() as folder, without_stderr():
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
            for run in runs.values():
                run()
            synchronise(device)
            profiler.step()
            with ranges.enabled():
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
