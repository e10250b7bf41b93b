"""Measure settings of kept records again, of `benchmark lm-matrix` or `benchmark sharding`.

The reports of both have a section per setting. This reads a setting from its newest record, and
measures it on the machine at hand.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lib.benchmarks import lm_matrix_report, sharding_report
from lib.benchmarks.lm_matrix import LmMatrix, LmMatrixConfig
from lib.benchmarks.multi_rank import Interleaved, run_benchmark
from lib.benchmarks.multi_rank_report import Setting, training_rows
from lib.benchmarks.rank_training import RanksBenchmarkConfig, check_ranks
from lib.benchmarks.sharding import Sharding
from lib.benchmarks.sharding_cases import ShardingConfig
from lib.core.hardware import local_results
from lib.core.records import Record, read_records
from lib.core.settings import check, check_fields
from lib.ddp.process_group import init_from_environment, rank, world_size


@dataclasses.dataclass(frozen=True)
class RepeatConfig:
    """Measure settings of kept records of training on several ranks again."""

    records: Path = Path("artifacts/lm_matrix.jsonl")
    """Record file of `benchmark lm-matrix` or `benchmark sharding`."""

    only: tuple[str, ...] = ()
    """Only settings with one of these texts in their title in the report; all by default."""

    ranks: int | None = None
    """Only settings of this many processes; by default one per GPU, or 2 on a CPU."""

    keep_buckets: bool = True
    """Use the records' bucket size; otherwise the one that training chooses."""

    seconds: float | None = None
    """Start no further setting that would probably end later than this; no limit by default."""

    restart: bool = False
    """Measure again what already has a record in `output`."""

    output: Path = dataclasses.field(default_factory=local_results)
    """Folder for records, tables and figures; records of other settings there are kept."""

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("ranks", "seconds"):
            value = getattr(self, field)
            check(self, field, value is None or value > 0, "more than 0")


def benchmark_repeat(config: RepeatConfig) -> list[Record]:
    """Measure the settings that `config` names again, then write tables and figures.

    Under `torchrun` one set of ranks measures all settings; otherwise each has its own.

    Returns:
        The records of this call; under `torchrun` rank 0 returns them, and the others none.

    Raises:
        FileNotFoundError: there are no records.
        ValueError: no setting has these ranks and texts; lists those that there are.
    """
    if not config.records.exists():
        raise FileNotFoundError(f"records {config.records}: no such file")
    benchmark, settings = settings_of(read_records(config.records))
    is_rank = "RANK" in os.environ or dist.is_initialized()
    with init_from_environment() as device:
        if is_rank:
            check_ranks(config.ranks, world_size())
        ranks = world_size() if is_rank else config.ranks or torch.cuda.device_count() or 2
        backend = "nccl" if device.type == "cuda" else "gloo"
        measured = []
        chosen = choose_settings(settings, config.only, backend, ranks)
        for setting in _in_time(chosen, config.seconds):
            if rank() == 0:
                print(f"-- {setting.title}", flush=True)
            measured += run_benchmark(benchmark, config_of(setting, config), report=False)
        if rank() == 0:
            benchmark.write_report(read_records(config.output / benchmark.records), config.output)
    return measured


def settings_of(records: Sequence[Record]) -> tuple[type[Interleaved], list[Setting]]:
    """The benchmark that made the records, and its settings."""
    if any("method" in record["config"] for record in records):
        return Sharding, sharding_report.make_settings(training_rows(records))
    return LmMatrix, lm_matrix_report.make_settings(training_rows(records))


def choose_settings(
    settings: Sequence[Setting], only: Sequence[str], backend: str, ranks: int
) -> list[Setting]:
    """The settings of these ranks and this backend with one of the texts `only` in their title."""
    here = [s for s in settings if (s.rows[0]["backend"], s.rows[0]["ranks"]) == (backend, ranks)]
    chosen = [s for s in here if not only or any(text in s.title for text in only)]
    if not chosen:
        titles = "; ".join(repr(setting.title) for setting in here) or "none"
        raise ValueError(
            f"only must be in the title of a setting of {ranks} ranks over {backend}, got "
            f"{list(only)}; there are: {titles}"
        )
    return chosen


def config_of(setting: Setting, config: RepeatConfig) -> RanksBenchmarkConfig:
    """The benchmark's config for all rows of a setting, with the fields of its newest record."""
    newest: dict[str, Any] = max(setting.rows, key=lambda row: row["date"])

    def names(key: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row[key] for row in setting.rows))

    if "method" in newest:
        cls: type[RanksBenchmarkConfig] = ShardingConfig
        cells = {"models": names("model"), "methods": names("method")}
        cells["attention_kernel"] = newest["kernel"]
    else:
        cls = LmMatrixConfig
        cells = {"kernels": names("kernel"), "wrappers": names("wrapper")}
    fields = [field.name for field in dataclasses.fields(cls)]
    shared = {name: newest[name] for name in fields if name in newest}
    if not config.keep_buckets:
        shared["bucket_size_mb"] = None
    return cls(**shared | cells | {"output": config.output, "restart": config.restart})


def _in_time(settings: Sequence[Setting], seconds: float | None) -> Iterator[Setting]:
    """The first setting, and further ones while one more of the longest would still be in time."""
    start = begin = time.monotonic()
    longest = 0.0
    for number, setting in enumerate(settings):
        now = time.monotonic()
        longest, begin = max(longest, now - begin), now
        is_late = [seconds is not None and number > 0 and now - start + longest > seconds]
        if dist.is_initialized():
            # rank 0 decides for all, as clocks differ
            dist.broadcast_object_list(is_late)
        if is_late[0]:
            left = len(settings) - number
            if rank() == 0:
                print(f"seconds {seconds:g} are over: {left} of {len(settings)} left", flush=True)
            return
        yield setting
