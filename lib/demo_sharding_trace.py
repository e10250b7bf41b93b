"""What is under way when in a training step of notebook 07, sharded or not: traces of its ranks."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lib import intervals
from lib.allocations import synchronise
from lib.config_training import ModelConfig, TrainConfig
from lib.demo_ddp import batch, make_model, trace_of
from lib.distributed import barrier, current_device, mean_over_ranks, rank
from lib.hardware import keep_freed_memory
from lib.profiling import annotate
from lib.trace_file import Trace, launch_times
from lib.trace_timeline import Intervals, Timeline, timelines
from lib.train_optimizer import AveragedByOptimizer, gather_under_forward, parallelise
from lib.train_step import numerics

# What a collective is for, by the names of its kernels and operators. gloo makes a reduce-scatter
# of an all-reduce, so that they cannot be told apart.
PURPOSES = {
    "gradients": re.compile("all_?reduce|reduce_?scatter", re.IGNORECASE),
    "weights": re.compile("all_?gather|broadcast", re.IGNORECASE),
}
# The host's request for it.
REQUEST = "c10d::"


@dataclass(frozen=True)
class Cycle:
    """From the start of backward to the end of the next forward pass, as a trace shows it."""

    timeline: Timeline

    collectives: dict[str, Intervals]
    """When something is under way for each of `PURPOSES`, in ms from the start."""


@dataclass(frozen=True)
class WayTimes:
    """What `time_ways` found of one way to train, on one rank."""

    times_ms: list[float]
    """Of each cycle, without a profiler; the mean over ranks."""

    cycles: list[Cycle]
    """Of further ones, from a trace; on rank 0 alone."""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def cycle(self) -> Cycle:
        """The quickest, which other programs disturbed least."""
        return min(self.cycles, key=lambda cycle: cycle.timeline.step_ms)


@numerics(tf32=True, deterministic=False)
def time_ways(
    shape: ModelConfig, ways: Mapping[str, Mapping[str, Any]], batch_size: int, turns: int
) -> dict[str, WayTimes]:
    """Cycles of `ways`, each a name and fields of `TrainConfig`, in turns.

    Each begins with backward and ends with the next forward pass, under which weights may come. On
    GPUs in TF32.
    """
    device = current_device()
    if device.type == "cpu":
        keep_freed_memory()
    runs = {name: _Run(shape, fields, batch_size) for name, fields in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    # the first steps make state, and agree on the order of buckets
    for turn in range(-3, turns):
        for name, run in runs.items():
            barrier()
            start = time.perf_counter()
            run.cycle()
            synchronise(device)
            if turn >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    every = mean_over_ranks(torch.tensor(list(times.values()))).tolist()
    trace = trace_of({name: run.cycle for name, run in runs.items()}, turns, device)
    found = {name: cycles(trace, name) if trace else [] for name in runs}
    return {name: WayTimes(mean, found[name]) for name, mean in zip(runs, every)}


class _Run:
    """Training steps of one way, again and again on the same windows."""

    def __init__(self, shape: ModelConfig, fields: Mapping[str, Any], batch_size: int) -> None:
        loss = make_model(shape)
        self.batch = batch(shape, batch_size, 0, [rank()])
        lr = torch.tensor(1e-3, device=current_device())
        config = TrainConfig(model=shape, **fields)
        self.parallel, self.optimizer = parallelise(loss, config, lr, None)
        if isinstance(self.parallel, AveragedByOptimizer):
            gather_under_forward(self.optimizer, loss, starts_there=False)
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
    """Those of all ranges called `name`, in their order.

    Raises:
        ValueError: there is no such range, or no backward pass in one.
    """
    ranges = [span for span in trace.ranges if span.name == name]
    spans = [s for s in trace.kernels or trace.operators if not s.name.startswith(REQUEST)]
    asked = launch_times(spans, trace.calls)
    found = []
    for line, cycle in zip(timelines(trace, name), ranges):
        inside = [s for s, time in zip(spans, asked) if cycle.start <= time < cycle.end]
        collectives = {}
        for purpose, pattern in PURPOSES.items():
            edges = [(span.start, span.end) for span in inside if pattern.search(span.name)]
            times = (np.array(edges, dtype=np.float64).reshape(-1, 2) - cycle.start) / 1e3
            collectives[purpose] = tuple(map(tuple, intervals.union(times).tolist()))
        found.append(Cycle(line, collectives))
    return found
