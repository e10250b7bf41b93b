"""Benchmarks on several ranks: rank 0 sweeps, and tells the others what to measure next."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from annotated_types import Ge

from lib.core.allocator import is_out_of_memory
from lib.core.files import make_folder
from lib.core.hardware import device_name, keep_freed_memory
from lib.core.records import Record, append_record, new_record, read_records
from lib.core.settings import PositiveFloat, check, settings
from lib.ddp.launcher import WorkerError, launch
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
    code_version,
    finish,
    or_out_of_memory,
    run_sweep,
)
from lib.tools.benchmarks.sections import Report

log = logging.getLogger(__name__)
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


class CaseFailedError(Exception):
    """A case that ended the ranks, as one does that runs out of memory while others wait."""

    def __init__(self, case: Case, error: Exception) -> None:
        self.config = vars(case)
        self.status = "oom" if is_out_of_memory(error) else "failed"
        self.reason = f"{type(error).__name__}: {str(error).split(chr(10))[0]}"
        super().__init__(f"{self.config}: {self.reason}")


@contextlib.contextmanager
def blame(case: Case) -> Iterator[None]:
    """Name `case` in an error of the block, except in a `ValueError`, which all ranks raise alike.

    Raises:
        CaseFailedError: from any other error.
    """
    try:
        yield
    except (ValueError, CaseFailedError):
        raise
    except Exception as error:
        raise CaseFailedError(case, error) from error


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
    """(group, config) -> figures of each case, the same on all ranks; uses `blame`."""

    def __call__(self, config: Any) -> list[Record]:
        """Measure what has no record, and write tables and figures of all records in `output`.

        Runs on the ranks that there are under `torchrun` and in a process that is a rank already,
        where one that fails ends the benchmark. Otherwise it starts the ranks, and where a case
        ends them, it becomes a record with a status and a reason, and new ranks measure the rest.

        Returns:
            The records of what `config` asks for; none on ranks other than 0.

        Raises:
            ValueError: settings that do not fit together or this machine, or every case failed.
            OSError: `output` cannot be written; found before anything is measured.
            WorkerError: a rank failed outside of a case.
        """
        if dist.is_initialized() or "RANK" in os.environ:
            with init_from_environment(config.backend, timeout=config.timeout):
                records = self.sweep(config)
        else:
            gpus = 0 if config.backend == "gloo" else torch.cuda.device_count()
            ranks = config.ranks or (gpus if gpus > 1 else 2)
            backend = checked_backend(config.backend, ranks)
            # refuse bad settings here, before processes start
            self.groups(config, ranks, backend)
            records = self._launch_until_done(config, ranks, backend)
        return finish(self.report, records, config.output) if records else records

    def _path(self, config: Any) -> Path:
        return config.output / f"{self.report.stem}.jsonl"

    def _launch_until_done(self, config: Any, ranks: int, backend: str) -> list[Record]:
        """Start ranks that sweep; where a case ends them, start new ones for the rest."""
        make_folder(config.output)
        path, failed = self._path(config), config.output / f"{self.report.stem}.failed.json"
        skipped = len(read_records(path)) if config.restart else 0
        options: dict[str, Any] = {"backend": backend, "timeout": config.timeout}
        level = logging.getLogger("lib").level
        while True:
            failed.unlink(missing_ok=True)
            log.info("starting %d ranks", ranks)
            try:
                arguments = (self, config, failed, skipped, level)
                [records, *_] = launch(RanksBenchmark.sweep, ranks, *arguments, **options)
                return records
            except WorkerError as error:
                if not failed.exists():
                    raise
                word = json.loads(failed.read_text(encoding="utf-8"))
                failed.unlink()
                # what others raised follows from a rank that died
                if error.has_died and word["status"] != "oom":
                    word["reason"] = str(error).split("\n")[0]
            log.error("%s: %s, %s", word["config"], word["status"], word["reason"])
            if word["status"] == "oom" and getattr(config, "together", False):
                # models that are too large together are tried one at a time before one is given up
                config = dataclasses.replace(config, together=False)
                continue
            figures = {"status": word["status"], "reason": word["reason"]}
            device = torch.device("cuda" if backend == "nccl" else "cpu")
            record = new_record(figures, config=word["config"], seed=config.seed, device=device)
            append_record(path, record | {"code": code_version(), "threads": word["threads"]})

    def sweep(
        self,
        config: Any,
        failed: Path | None = None,
        skipped: int | None = None,
        log_level: int | None = None,
    ) -> list[Record]:
        """Measure on all ranks; rank 0 decides what, and writes and returns the records.

        Args:
            failed: the file for the case that ends the ranks.
            skipped: number of existing records to ignore; by default as `config` says.
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
                self._figures(group, config, failed)
            return []
        if log_level is not None:
            logging.basicConfig(format="%(message)s")
            logging.getLogger("lib").setLevel(log_level)

        def measure(group: Group) -> list[Mapping[str, Any]]:
            _broadcast(group)
            return self._figures(group, config, failed)

        records = run_sweep(
            self._path(config),
            groups,
            measure,
            line=self.report.line,
            seed=config.seed,
            device=device,
            restart=config.restart if skipped is None else skipped,
        )
        _broadcast(None)
        return records

    def _figures(self, group: Group, config: Any, failed: Path | None) -> list[Mapping[str, Any]]:
        """Measure a group on this rank; leave word in `failed` of a case that ends the ranks."""
        try:
            # memory that runs out on all ranks is a result
            return or_out_of_memory(lambda: self.measure(group, config), len(group))
        except CaseFailedError as error:
            if failed:
                word = json.dumps(vars(error) | {"threads": torch.get_num_threads()})
                # the first rank's word counts, as what others raise follows from it
                with contextlib.suppress(FileExistsError), open(failed, "x") as file:
                    file.write(word)
            raise


def _broadcast(group: Group | None = None) -> Group | None:
    """The group that rank 0 measures next; None at the end."""
    box = [group]
    dist.broadcast_object_list(box, src=0, device=current_device())
    return box[0]
