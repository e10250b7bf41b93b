"""Benchmarks on several ranks: rank 0 sweeps, and tells the others what to measure next."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from annotated_types import Ge

from lib.core.files import make_folder
from lib.core.hardware import device_name, keep_freed_memory
from lib.core.records import Record
from lib.core.settings import PositiveFloat, check, settings
from lib.ddp.launcher import launch
from lib.ddp.process_group import (
    check_same,
    checked_backend,
    current_device,
    init_from_environment,
    rank,
    world_size,
)
from lib.tools.benchmarks.harness import (
    BenchmarkConfig,
    Case,
    finish,
    or_out_of_memory,
    run_sweep,
)
from lib.tools.benchmarks.sections import Report

Group = Sequence[Case]


@settings
class RanksConfig(BenchmarkConfig):
    """Settings that the benchmarks on several ranks share."""

    ranks: Annotated[int, Ge(1)] | None = None
    """Processes; by default one per GPU, or 2 on a CPU. Under `torchrun`, as many as it started."""

    backend: Literal["nccl", "gloo"] | None = None
    """`nccl` (GPUs) or `gloo` (CPU); by default NCCL where there are enough GPUs."""

    timeout: PositiveFloat = 300.0
    """Seconds that a rank waits for the others."""


def check_group(config: RanksConfig, ranks: int, backend: str) -> None:
    """Refuse a config that asks for other ranks than there are."""
    for field, actual in (("ranks", ranks), ("backend", backend)):
        is_right = getattr(config, field) in (None, actual)
        check(config, field, is_right, f"None or the group's {actual!r}")


@dataclasses.dataclass(frozen=True)
class RanksBenchmark:
    """A benchmark on ranks; called with a config it measures what has no record yet."""

    report: Report
    """Makes tables and figures from records; those are in the file STEM.jsonl beside them."""

    groups: Callable[[Any, int, str], list[Group]]
    """(config, ranks, backend) -> the cases, in groups that are interleaved.

    Raises `ValueError` for settings that do not fit together or this machine.
    """

    measure: Callable[[Group, Any], Iterable[Mapping[str, Any]]]
    """(group, config) -> figures of each case, the same on all ranks."""

    def __call__(self, config: Any) -> list[Record]:
        """Measure what has no record, and write tables and figures of all records in `output`.

        Runs on the ranks that there are under `torchrun` and in a process that is a rank already;
        otherwise it starts them. A rank that fails ends the benchmark; records that were made
        stay.

        Returns:
            The records of what `config` asks for; none on ranks other than 0.

        Raises:
            ValueError: settings that do not fit together or this machine, or every case failed.
            OSError: `output` cannot be written; found before anything is measured.
            WorkerError: a rank failed; its traceback ends with what was being measured.
        """
        if dist.is_initialized() or "RANK" in os.environ:
            with init_from_environment(config.backend, timeout=config.timeout):
                records = self.sweep(config)
        else:
            gpus = 0 if config.backend == "gloo" else torch.cuda.device_count()
            ranks = config.ranks or (gpus if gpus > 1 else 2)
            backend = checked_backend(config.backend, ranks)
            # refuse bad settings and folders here, before processes start
            self.groups(config, ranks, backend)
            make_folder(config.output)
            level = logging.getLogger("lib").level
            options: dict[str, Any] = {"backend": backend, "timeout": config.timeout}
            [records, *_] = launch(RanksBenchmark.sweep, ranks, self, config, level, **options)
        return finish(self.report, records, config.output) if records else records

    def sweep(self, config: Any, log_level: int | None = None) -> list[Record]:
        """Measure on all ranks; rank 0 decides what, and writes and returns the records.

        Args:
            log_level: of rank 0; None: as it is.
        """
        device = current_device()
        if device.type == "cpu":
            # as training does
            keep_freed_memory()
        check_same({"device": device_name(device)})
        groups = self.groups(config, world_size(), dist.get_backend())
        if rank() > 0:
            logging.getLogger(__package__).setLevel(logging.WARNING)
            while (group := _broadcast()) is not None:
                self._figures(group, config)
            return []
        if log_level is not None:
            logging.basicConfig(format="%(message)s")
            logging.getLogger("lib").setLevel(log_level)

        def measure(group: Group) -> list[Mapping[str, Any]]:
            _broadcast(group)
            return self._figures(group, config)

        records = run_sweep(
            config.output / f"{self.report.stem}.jsonl",
            groups,
            measure,
            line=self.report.line,
            seed=config.seed,
            device=device,
            restart=config.restart,
        )
        _broadcast(None)
        return records

    def _figures(self, group: Group, config: Any) -> list[Mapping[str, Any]]:
        """Measure a group on this rank; memory that runs out on all ranks is a result."""
        try:
            return or_out_of_memory(lambda: self.measure(group, config), len(group))
        except Exception as error:
            error.add_note(f"while this was measured: {[vars(case) for case in group]}")
            raise


def _broadcast(group: Group | None = None) -> Group | None:
    """The group that rank 0 measures next; None at the end."""
    box = [group]
    dist.broadcast_object_list(box, src=0, device=current_device())
    return box[0]
