"""Trainings on several ranks, interleaved, so that all see the same machine.

First an epoch of each training, then an epoch of each in reverse order, and so on.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

import torch

from lib.core.allocator import free_memory, is_out_of_memory
from lib.ddp.process_group import current_device, gather_objects, world_size
from lib.model.costs import num_parameters
from lib.profiling.measurement import interleave, time_figures
from lib.tools.benchmarks.rank_memory import measure_memory, predicted_bytes
from lib.tools.benchmarks.rank_training import (
    Groups,
    RanksTrainingConfig,
    Training,
    method_of,
    predicted_memory,
    shape_of,
)
from lib.tools.benchmarks.step import device_memory
from lib.tools.benchmarks.sweep import Case
from lib.training.step import StepLog, numerics

log = logging.getLogger(__name__)


def measure_trainings(
    cases: Sequence[Case], config: RanksTrainingConfig, groups: Groups
) -> dict[str, dict[str, Any]]:
    """Method -> the figures of its training, the same on all ranks."""
    trainings = Trainings(cases, config, groups)
    with numerics(tf32=config.tf32, deterministic=False):
        rows = trainings.run()
    trainings.held.clear()
    free_memory()
    if config.compile:
        torch.compiler.reset()
    return rows


def first_steps(
    case: Case,
    config: RanksTrainingConfig,
    steps: int,
    groups: Groups,
    *,
    ranks_in_one: int = 1,
) -> list[StepLog]:
    """The reports of a training's first steps; arguments as those of `Training`."""
    if steps == 0:
        return []
    with numerics(tf32=config.tf32, deterministic=False):
        training = Training(case, config, groups, ranks_in_one=ranks_in_one)
        training.train(steps)
        return training.step.read_log()


def one_process(
    case: Case, config: RanksTrainingConfig, steps: int, groups: Groups
) -> list[StepLog]:
    """The first steps of one process that trains on all ranks' batches, as every rank does."""
    alone = Case(**vars(case) | {"method": "none", "wrapper": "none"})
    found = first_steps(alone, config, steps, groups, ranks_in_one=case.ranks)
    free_memory()
    return found


class Trainings:
    """The trainings of one group on one rank, all in memory, or one at a time where few fit."""

    def __init__(self, cases: Sequence[Case], config: RanksTrainingConfig, groups: Groups) -> None:
        self.cases = {method_of(case): case for case in cases}
        self.config, self.groups = config, groups
        self.device = current_device()
        memory = device_memory(self.device) or math.inf
        if self.device.type == "cpu":
            memory /= world_size()
        self.is_together = config.together and fits_together(cases, memory)
        self.held: dict[str, Training] = {}
        self.losses: dict[str, list[float]] = {}
        self.memory: dict[str, dict[str, int]] = {}

    def run(self) -> dict[str, dict[str, Any]]:
        """The figures of each training, including those that were refused."""
        launch = datetime.now(UTC).isoformat()
        rows: dict[str, dict[str, Any]] = {}
        # warm up
        for name in self.cases:
            log.info("warming up %s", name)
            if problem := self.problem_of(name):
                rows[name] = problem
        # time
        log.info("timing %d epochs of each", self.config.timed_epochs)
        names = [name for name in self.cases if name not in rows]
        samplers = [functools.partial(self.timed_epoch, name) for name in names]
        # trace afterwards, so that the profiler disturbs no timed epoch
        for name, times in zip(names, interleave(samplers, self.config.timed_epochs)):
            with self.training(name) as training:
                traced = training.trace_communication(self.config.trace_steps, self.groups.hosts)
            rows[name] = {"status": "ok", **self.figures(name, times)}
            rows[name] |= communication_figures(traced, self.device)
        return {
            name: {
                "launch": launch,
                "parameters": num_parameters(shape_of(case)),
                "predicted": predicted_bytes(predicted_memory(case)),
                **rows[name],
            }
            for name, case in self.cases.items()
        }

    def problem_of(self, name: str) -> dict[str, str] | None:
        """Warm up a training; return why it cannot be measured, if it is refused or too large.

        That is the same on all ranks, though it may be too large for one of them alone.
        """
        status, reason = "", ""
        try:
            with self.training(name):
                pass
        except ValueError as error:
            status, reason = "refused", str(error)
            free_memory(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            status, reason = "oom", str(error).partition("\n")[0]
            if self.is_together and len(self.cases) > 1:
                reason += "; --no_together holds one model at a time"
            free_memory(error)
        # where one rank alone has a problem, the others hang in its training, and time out; but in
        # `none` each trains alone
        own = {"status": status, "reason": reason} if status else None
        found = [problem for problem in gather_objects(own, self.groups.hosts) if problem]
        if not found:
            return None
        self.held.pop(name, None)
        free_memory()
        return found[0]

    def timed_epoch(self, name: str) -> float:
        """Milliseconds per step of an epoch of a training."""
        with self.training(name) as training:
            return training.timed_epoch()

    def figures(self, name: str, times: list[float]) -> dict[str, Any]:
        """Time, memory and losses of one training."""
        case, by_rank = self.cases[name], gather_objects(self.memory[name])
        figures = step_figures(case, times)
        return figures | {
            "epoch_s": figures["median_ms"] * case.steps_per_epoch / 1e3,
            # of each kind and moment the rank that has most
            "measured": {key: max(memory[key] for memory in by_rank) for key in by_rank[0]},
            "peak_memory_bytes": max(memory["peak"] for memory in by_rank),
            "optimizer_state_by_rank": [memory["optimizer_state"] for memory in by_rank],
            # up to the first that is not finite
            "losses": list(itertools.takewhile(math.isfinite, self.losses[name])),
            "is_together": self.is_together,
        }

    def warm_up(self, name: str) -> tuple[Training, dict[str, int]]:
        """A training after its warm-up, and its memory."""
        make = functools.partial(Training, self.cases[name], self.config, self.groups)
        training, memory = measure_memory(make, self.device)
        training.finish_warm_up(self.config, 3)
        return training, memory

    @contextlib.contextmanager
    def training(self, name: str) -> Iterator[Training]:
        """A warm training: the one in memory, or where only one fits, one for this block."""
        training = self.held.get(name)
        if training is None:
            training, memory = self.warm_up(name)
            self.memory.setdefault(name, memory)
        if self.is_together:
            self.held[name] = training
        yield training
        # the longest losses: a training may start anew for each epoch
        self.losses[name] = max(self.losses.get(name, []), training.losses, key=len)
        if not self.is_together:
            # the caller's frame still holds the training itself
            training.step = None
            free_memory()


def fits_together(cases: Sequence[Case], memory: float) -> bool:
    """Whether the trainings probably fit into `memory` bytes of a rank at once; one always counts.

    Each holds its memory between steps. What its peak adds is needed by one training at a time, but
    by all of them if their steps are recorded as CUDA graphs.
    """
    if len(cases) == 1:
        return True
    predicted = [predicted_memory(case) for case in cases]
    held = sum(rank.between_steps for rank in predicted)
    working = [rank.peak - rank.between_steps for rank in predicted]
    return held + (sum(working) if cases[0].cuda_graph else max(working)) < 0.8 * memory


def step_figures(case: Case, times: list[float]) -> dict[str, Any]:
    """Time per step and tokens/s of all ranks, from this rank's milliseconds per step and epoch."""
    # ranks differ where each trains alone
    means = [fmean(epoch) for epoch in zip(*gather_objects(times))]
    tokens = case.ranks * case.tr_batch_size * case.context_length
    return {"tokens_per_s": tokens / median(means) * 1e3, **time_figures(means)}


def communication_figures(
    traced: tuple[float, float, float] | None, device: torch.device
) -> dict[str, Any]:
    """The ranks' mean of what was traced; nothing if it is unknown on one of them."""
    every = gather_objects(traced)
    if None in every:
        return {}
    names = ("communication_ms", "exposed_communication_ms", "traced_step_ms")
    means: dict[str, Any] = {key: fmean(values) for key, values in zip(names, zip(*every))}
    return means | {"exposed_from": "kernels" if device.type == "cuda" else "operators"}


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float | None:
    """The largest difference between losses of the same step; None where there are none."""
    return max((abs(a - b) for a, b in zip(losses, reference)), default=None)
