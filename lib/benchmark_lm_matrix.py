"""Training of a language model with each attention kernel in each data-parallel wrapper, in turns.

With each kernel the wrappers take turns (`lib.benchmark_turns`). In the baseline `none` each rank
trains alone, in a group of its own, while the others do the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lib.allocations import free_memory
from lib.benchmark_lm_matrix_cases import (
    LmMatrixCase,
    fits_together,
    loss_difference,
    make_case,
    paired_figures,
    settled,
)
from lib.benchmark_lm_matrix_report import line, write_report
from lib.benchmark_lm_matrix_training import Groups, Training, communication, warmed_up
from lib.benchmark_step_cases import device_memory
from lib.benchmark_turns import (
    Plan,
    Turns,
    communication_figures,
    from_all_ranks,
    launch_plans,
    measure_plans,
    run_on_ranks,
    time_figures,
)
from lib.config_lm_matrix import LmMatrixConfig
from lib.distributed import current_device, launch, world_size
from lib.files import make_folder
from lib.model_costs import num_parameters
from lib.report import Record, append_record, new_record, read_records

RECORDS = "lm_matrix.jsonl"


def benchmark_lm_matrix(config: LmMatrixConfig) -> list[Record]:
    """Measure what `config` names, and write tables and figures of all records in its `output`.

    Starts its ranks itself, or is one of those that `torchrun` started, of which rank 0 writes. A
    cell that fails is a record of status `refused`, `oom` or `failed` with its reason; of ranks
    started here the rest is measured by new ones.

    Returns:
        The records of this call; under `torchrun` those of rank 0, none elsewhere.

    Raises:
        ValueError: settings that do not fit together or this machine.
        OSError: `output` cannot be written; found out before anything is measured.
        WorkerError: a rank failed before the first cell.
    """
    make_folder(config.output)
    path = config.output / RECORDS
    # found out now and not after the first kernel
    with open(path, "ab"):
        pass
    before = len(read_records(path))

    def measure_here(chosen: LmMatrixConfig) -> None:
        measure(chosen, make_plans(chosen), None)

    if not run_on_ranks(config, settled, measure_here, measure_all):
        return []
    records = read_records(path)
    write_report(records, config.output)
    return records[before:]


def make_plans(config: LmMatrixConfig) -> list[Plan]:
    """What is measured together: a kernel in all wrappers."""
    has_reference = config.loss_steps > 0
    return [Plan(kernel, config.wrappers, True, has_reference) for kernel in config.kernels]


def measure_all(config: LmMatrixConfig) -> None:
    """Measure in ranks started for it; where a cell ends them, the rest in new ones."""
    options = {"backend": config.backend, "timeout": config.timeout}
    start = functools.partial(launch, measure, config.ranks, config, **options)
    keep = functools.partial(keep_record, config=config)
    launch_plans(start, make_plans(config), lambda case: case["kernel"], keep)


def measure(config: LmMatrixConfig, plans: Sequence[Plan], folder: Path | None) -> None:
    """What each rank does; rank 0 adds the records of each kernel once it is done.

    Args:
        folder: where each rank leaves word of what it is doing.
    """

    def make_turns(plan: Plan, groups: Groups, dtype: str) -> WrapperTurns:
        cases = {name: make_case(config, plan.subject, name, dtype) for name in plan.names}
        return WrapperTurns(config, plan, cases, groups, folder)

    keep = functools.partial(keep_record, config=config)
    measure_plans(config, plans, make_turns, keep, line)


def keep_record(figures: dict[str, Any], case: dict[str, Any], config: LmMatrixConfig) -> Record:
    """Add the record of a cell to those in `output`."""
    device = torch.device("cuda" if case["backend"] == "nccl" else "cpu")
    record = new_record(figures, config=case, seed=config.seed, device=device)
    append_record(config.output / RECORDS, record)
    return record


class WrapperTurns(Turns):
    """The wrappers of one plan, as one rank measures them.

    Args:
        folder: as in `measure`.
    """

    def __init__(
        self,
        config: LmMatrixConfig,
        plan: Plan,
        cases: dict[str, LmMatrixCase],
        groups: Groups,
        folder: Path | None,
    ) -> None:
        self.config, self.plan, self.groups = config, plan, groups
        self.device = current_device()
        memory = device_memory(self.device) or float("inf")
        if self.device.type == "cpu":
            memory /= world_size()
        is_together = plan.is_together and fits_together(list(cases.values()), memory)
        super().__init__(cases, folder, is_together=is_together)
        self.losses: dict[str, list[float]] = {}
        self.memory: dict[str, int | None] = {}
        self.reference: list[float] = []

    def run(self, timed_epochs: int) -> dict[str, dict[str, Any]]:
        """The figures of each wrapper, the same on all ranks."""
        if self.plan.has_reference:
            self.reference = self._reference()
        shared = {"parameters": num_parameters(next(iter(self.cases.values())).shape)}
        return {name: {**shared, **row} for name, row in super().run(timed_epochs).items()}

    def figures(self, times: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
        """The figures of each wrapper that ran, those too that compare it with `none`."""
        rows = {}
        for name in times:
            with self.training(name) as training:
                traced = communication(training, self.config.trace_steps, self.groups.hosts)
            rows[name] = self._figures(name, times[name], traced)
        further = paired_figures(rows)
        return {name: {**rows[name], **further[name]} for name in rows}

    def ends(self, name: str, training: Training) -> None:
        """Keep the losses."""
        self.losses[name] = max(self.losses.get(name, []), training.losses, key=len)

    def start(self, name: str) -> Training:
        """A training after its epochs of warm-up; the first one's memory is kept."""
        case, group = self.cases[name], self.groups.own if name == "none" else None
        epochs = self.config.epochs - self.config.timed_epochs
        training, peak = warmed_up(case, self.config, group, epochs * case.steps_per_epoch)
        self.memory.setdefault(name, peak)
        return training

    def _reference(self) -> list[float]:
        """Losses of one process that trains on the batches of all ranks, as all ranks do here."""
        case = dataclasses.replace(next(iter(self.cases.values())), wrapper="none")
        with self.noted(case, None), contextlib.suppress(ValueError):
            training = Training(case, self.config, self.groups.own, parts=case.ranks)
            training.take(case.compared_steps)
            training.read_losses()
            losses = training.losses
            del training
            free_memory()
            return losses
        return []

    def _figures(
        self,
        name: str,
        times: list[float],
        traced: tuple[float, float, float] | None,
    ) -> dict[str, Any]:
        """A wrapper's own figures, of all ranks."""
        case = self.cases[name]
        peaks = from_all_ranks(self.memory[name])
        figures = time_figures(case, times)
        figures |= {
            "epoch_s": figures["median_ms"] * case.steps_per_epoch / 1e3,
            "peak_memory_bytes": max(peaks) if None not in peaks else None,
            "is_together": self.is_together,
            **communication_figures(traced, self.device),
        }
        if name != "none" or case.ranks == 1:
            losses = list(itertools.takewhile(math.isfinite, self.losses[name]))
            figures |= {"losses": losses, "reference_losses": self.reference}
            figures["loss_difference"] = loss_difference(losses, self.reference)
        return figures
