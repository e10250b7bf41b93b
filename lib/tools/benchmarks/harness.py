"""The harness of all benchmarks: settings, cases and a function become a command with a report.

A benchmark is the settings that become its flags, a table of cases and a function that measures
one; `.github/CONTRIBUTING.md` has a whole one. With `RanksConfig` it runs on several ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from annotated_types import Ge

from lib.core.files import make_folder
from lib.core.hardware import device_name, keep_freed_memory, local_results, pick_device
from lib.core.records import Record
from lib.core.settings import NonNegativeInt, PositiveFloat, PositiveInt, check, settings
from lib.ddp.launcher import launch
from lib.ddp.process_group import (
    agree,
    checked_backend,
    current_device,
    init_from_environment,
    rank,
    world_size,
)
from lib.tools.benchmarks.sections import SAMPLING, Report
from lib.tools.benchmarks.sweep import (
    Case,
    Figures,
    Store,
    differences,
    or_out_of_memory,
    records_like,
    run_sweep,
)

log = logging.getLogger(__name__)
Config = TypeVar("Config", bound="RanksConfig")


@settings
class BenchmarkConfig:
    """Settings that all benchmarks share."""

    seed: NonNegativeInt = 0
    """Seed of everything random."""

    restart: bool = False
    """Measure again what already has a record."""

    output: Path = dataclasses.field(default_factory=local_results)
    """Folder for records, tables and figures; records of other settings there are kept."""


@settings
class SamplingConfig(BenchmarkConfig):
    """Settings of benchmarks that time calls on one device."""

    warmup: PositiveInt = 3
    """Calls before sampling."""

    samples: PositiveInt = 20
    """Samples of each candidate; fewer, but at least 3, if they exceed max_seconds."""

    max_seconds: PositiveFloat = 1.0
    """Approximate time limit for the samples of one case."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`."""


@settings
class RanksConfig(BenchmarkConfig):
    """Settings that the benchmarks on several ranks share."""

    ranks: Annotated[int, Ge(1)] | None = None
    """Processes; by default one per GPU, or 2 on a CPU. Under `torchrun`, as many as it started."""

    backend: Literal["nccl", "gloo"] | None = None
    """`nccl` (GPUs) or `gloo` (CPU); by default NCCL where there are enough GPUs."""

    timeout: PositiveFloat = 300.0
    """Seconds that a rank waits for the others."""

    @property
    def device(self) -> str:
        """The ranks' kind of device; `backend` must be set."""
        return "cuda" if self.backend == "nccl" else "cpu"


def for_group(config: Config, ranks: int, backend: str) -> Config:
    """The config with the ranks and the backend that there are.

    Raises:
        ValueError: it asks for others.
    """
    for field, actual in (("ranks", ranks), ("backend", backend)):
        is_right = getattr(config, field) in (None, actual)
        check(config, field, is_right, f"None or the group's {actual!r}")
    return dataclasses.replace(config, ranks=ranks, backend=backend)


def sampling(of: Any) -> dict[str, Any]:
    """The fields of a config or a case that say how long is measured: `measure`'s arguments."""
    return {name: getattr(of, name) for name in SAMPLING}


def grid(**axes: Any) -> list[Case]:
    """A case for each combination of values; the last axis varies fastest.

    Tuples are axes, and anything else is the same in all cases.
    """
    values = [value if isinstance(value, tuple) else (value,) for value in axes.values()]
    return [Case(**dict(zip(axes, chosen))) for chosen in itertools.product(*values)]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark; called with a config it measures what has no record yet."""

    report: Report
    """Makes tables and figures from records; those are in the file STEM.jsonl beside them."""

    cases: Callable[[Any, torch.device], Sequence[Any]]
    """(config, device) -> what to measure: cases, or lists of cases that are measured together.

    A `RanksConfig` has its `ranks` and `backend` here. Raises `ValueError` for what the device
    lacks, and for settings that do not fit together.
    """

    measure: Callable[[Any, Any, torch.device], Any]
    """(case, config, device) -> figures; of a list of cases, those of each, in order.

    On ranks all call it together, and get the same figures.
    """

    packages: tuple[str, ...] = ()
    """Whose versions a record names, too, where they are installed."""

    def __call__(self, config: Any) -> list[Record]:
        """Measure the cases of `config` without a record; write tables and figures.

        The report shows all records in `output` of this device and these versions. A `RanksConfig`
        is measured on the ranks that there are under `torchrun` and in a process that is a rank
        already; otherwise they are started here. A rank that fails ends the benchmark; records that
        were made stay.

        Returns:
            The records of the cases of `config`; none on ranks other than 0.

        Raises:
            ValueError: settings that do not fit together or this machine, or every case failed.
            OSError: `output` cannot be written; found before anything is measured.
            WorkerError: a rank failed; its traceback ends with what was being measured.
        """
        if not isinstance(config, RanksConfig):
            records = self.sweep(config, pick_device(getattr(config, "device", "cpu")))
        elif dist.is_initialized() or "RANK" in os.environ:
            with init_from_environment(config.backend, timeout=config.timeout) as device:
                config = for_group(config, world_size(), dist.get_backend())
                records = self.sweep(config, device)
        else:
            records = self._on_new_ranks(config)
        return finish(self.report, records, config.output) if records else records

    def _on_new_ranks(self, config: RanksConfig) -> list[Record]:
        """Start ranks, and sweep on them."""
        gpus = 0 if config.backend == "gloo" else torch.cuda.device_count()
        ranks = config.ranks or (gpus if gpus > 1 else 2)
        config = for_group(config, ranks, checked_backend(config.backend, ranks))
        # refuse bad settings and folders here, before processes start
        self.cases(config, torch.device(config.device))
        make_folder(config.output)
        level = logging.getLogger("lib").level
        options: dict[str, Any] = {"backend": config.backend, "timeout": config.timeout}
        [records, *_] = launch(sweep_on_rank, ranks, self, config, level, **options)
        return records

    def sweep(self, config: Any, device: torch.device) -> list[Record]:
        """Measure in this process, or on all ranks; rank 0 writes and returns the records."""
        if device.type == "cpu":
            # as training does
            keep_freed_memory()
        agree(lambda: {"device": device_name(device)})
        cases = self.cases(config, device)
        if not cases:
            raise ValueError("there is nothing to measure: a setting is empty")
        are_groups = isinstance(cases[0], list)

        def measure(group: Sequence[Case]) -> Iterable[Figures]:
            measured = self.measure(group if are_groups else group[0], config, device)
            return measured if are_groups else [measured]

        path = config.output / f"{self.report.stem}.jsonl"
        return run_sweep(
            Store(path, config.seed, device, self.packages),
            cases if are_groups else [[case] for case in cases],
            lambda group: or_out_of_memory(measure, group),
            line=self.report.line,
            restart=config.restart,
        )


def sweep_on_rank(benchmark: Benchmark, config: RanksConfig, log_level: int) -> list[Record]:
    """Sweep on a rank that was started for it; rank 0 logs at the level of who started it."""
    if rank() == 0:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("lib").setLevel(log_level)
    return benchmark.sweep(config, current_device())


def finish(report: Report, records: list[Record], output: Path) -> list[Record]:
    """Write the report of all records like `records` in `output`, and log which of these failed.

    Raises:
        ValueError: all of them failed.
    """
    report.write(records_like(output / f"{report.stem}.jsonl", records), output)
    configs = [record["config"] for record in records]
    # what a single case is called is in the columns of the report
    shown = [{key: c[key] for key in report.columns if key in c} for c in configs[:1]]
    names = differences(configs if len(configs) > 1 else [*shown, {}])
    failed = [
        ": ".join(filter(None, (name, report.line(record))))
        for name, record in zip(names, records)
        if not report.was_measured(record)
    ]
    if failed and len(failed) == len(records):
        raise ValueError(f"nothing could be measured (--restart tries again): {'; '.join(failed)}")
    if failed:
        count = f"{len(failed)} of {len(records)} could not be measured (--restart tries again):"
        log.warning("\n- ".join([count, *failed]))
    return records
