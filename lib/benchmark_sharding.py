"""Memory and time of training with a sharded optimizer, against the whole one, PyTorch's and FSDP2.

Of each model the methods take turns (`lib.benchmark_turns`). In `none` each rank trains alone, in a
group of its own, while the others do the same.
"""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path
from typing import Any

from lib.benchmark_lm_matrix_training import Groups, Training, communication
from lib.benchmark_sharding_cases import (
    ShardingCase,
    compared,
    fits_together,
    make_case,
    predicted_bytes,
    settled,
)
from lib.benchmark_sharding_memory import watched
from lib.benchmark_sharding_report import line, write_report
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
from lib.config_sharding import ShardingConfig
from lib.distributed import current_device, world_size
from lib.model_costs import num_parameters
from lib.report import Record


def benchmark_sharding(config: ShardingConfig) -> list[Record]:
    """Measure the methods that `config` names, as `run_benchmark` does."""
    return run_benchmark(SHARDING, config)


def make_plans(config: ShardingConfig) -> list[Plan]:
    """What is measured together: a model by all methods."""
    return [Plan(model, config.methods) for model in config.models]


def make_turns(
    config: ShardingConfig, plan: Plan, groups: Groups, dtype: str, folder: Path | None
) -> MethodTurns:
    """The methods of one model."""
    cases = {name: make_case(config, plan.subject, name, dtype) for name in plan.names}
    return MethodTurns(config, plan, cases, groups, folder)


def predicted(case: dict[str, Any]) -> dict[str, Any]:
    """Its memory by formula."""
    return {"predicted": predicted_bytes(ShardingCase(**case).predicted)}


class MethodTurns(Turns):
    """The methods of one model, as one rank measures them."""

    def __init__(
        self,
        config: ShardingConfig,
        plan: Plan,
        cases: dict[str, ShardingCase],
        groups: Groups,
        folder: Path | None,
    ) -> None:
        self.config, self.groups, self.device = config, groups, current_device()
        memory = device_memory(self.device) or float("inf")
        if self.device.type == "cpu":
            memory /= world_size()
        is_together = plan.is_together and fits_together(list(cases.values()), memory)
        super().__init__(cases, folder, is_together=is_together)
        self.losses: dict[str, list[float]] = {}
        self.memory: dict[str, dict[str, int]] = {}

    def start(self, name: str) -> Training:
        """A training after its epochs of warm-up; the first one's memory is kept."""
        case, group = self.cases[name], self.groups.own if name == "none" else None
        make = functools.partial(Training, case, self.config, group)
        training, held = watched(make, self.device)
        self.memory.setdefault(name, held)
        training.record()
        epochs = self.config.epochs - self.config.timed_epochs
        training.take(max(1, epochs * case.steps_per_epoch - 3))
        training.read_losses()
        return training

    def ends(self, name: str, training: Training) -> None:
        """Keep the losses."""
        self.losses[name] = max(self.losses.get(name, []), training.losses, key=len)

    def figures(self, times: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
        """The figures of each method that ran, those too that compare it with `flashddp`."""
        rows = {}
        for name in times:
            with self.training(name) as training:
                traced = communication(training, self.config.trace_steps, self.groups.hosts)
            rows[name] = self._figures(name, times[name], traced)
        further = compared(rows)
        return {name: {**rows[name], **further[name]} for name in rows}

    def _figures(
        self, name: str, times: list[float], traced: tuple[float, float, float] | None
    ) -> dict[str, Any]:
        """A method's own figures, of all ranks: of memory those of the rank that has most."""
        case = self.cases[name]
        every = from_all_ranks(self.memory[name])
        return {
            "parameters": num_parameters(case.shape),
            **time_figures(case, times),
            "measured": {key: max(held[key] for held in every) for key in every[0]},
            "optimizer_state_by_rank": [held["optimizer_state"] for held in every],
            "is_together": self.is_together,
            "losses": list(itertools.takewhile(math.isfinite, self.losses[name])),
            # not in the turns, so that it cannot disturb them
            **communication_figures(traced, self.device),
            # compared with those of the same launch, before any record is written
            "predicted": predicted_bytes(case.predicted),
        }


SHARDING = Benchmark(
    "sharding_benchmark.jsonl",
    "model",
    settled,
    make_plans,
    make_turns,
    line,
    write_report,
    known=predicted,
)
