"""Training of a language model with each attention kernel in each data-parallel wrapper, in turns.

With each kernel the wrappers take turns (`lib.benchmark_turns`). In the baseline `none` each rank
trains alone, in a group of its own, while the others do the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

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
    Benchmark,
    Plan,
    Turns,
    communication_figures,
    from_all_ranks,
    run_benchmark,
    time_figures,
)
from lib.config_lm_matrix import LmMatrixConfig
from lib.distributed import current_device, world_size
from lib.model_costs import num_parameters
from lib.report import Record


def benchmark_lm_matrix(config: LmMatrixConfig) -> list[Record]:
    """Measure the cells that `config` names, as `run_benchmark` does."""
    return run_benchmark(LM_MATRIX, config)


def make_plans(config: LmMatrixConfig) -> list[Plan]:
    """What is measured together: a kernel in all wrappers."""
    has_reference = config.loss_steps > 0
    return [Plan(kernel, config.wrappers, True, has_reference) for kernel in config.kernels]


def make_turns(
    config: LmMatrixConfig, plan: Plan, groups: Groups, dtype: str, folder: Path | None
) -> WrapperTurns:
    """The wrappers of one kernel."""
    cases = {name: make_case(config, plan.subject, name, dtype) for name in plan.names}
    return WrapperTurns(config, plan, cases, groups, folder)


class WrapperTurns(Turns):
    """The wrappers of one plan, as one rank measures them."""

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


LM_MATRIX = Benchmark(
    "lm_matrix.jsonl", "kernel", settled, make_plans, make_turns, line, write_report
)
