"""Measure settings of kept records again, of `benchmark lm-matrix` or `benchmark sharding`.

The reports of both have a section per setting. This reads a setting from its newest record, and
measures it on the machine at hand.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from lib.core.hardware import local_results
from lib.core.records import Record, read_records
from lib.core.settings import PositiveInt, settings
from lib.ddp.process_group import init_from_environment, rank, world_size
from lib.tools.benchmarks import lm_matrix_report, sharding_report
from lib.tools.benchmarks.lm_matrix import LmMatrix, LmMatrixConfig
from lib.tools.benchmarks.multi_rank import Interleaved, run_benchmark
from lib.tools.benchmarks.multi_rank_report import Setting, training_rows
from lib.tools.benchmarks.rank_training import RanksBenchmarkConfig, check_ranks
from lib.tools.benchmarks.sharding import Sharding
from lib.tools.benchmarks.sharding_cases import ShardingConfig


@settings
class RepeatConfig:
    """Measure settings of kept records of training on several ranks again."""

    records: Path = Path("artifacts/lm_matrix.jsonl")
    """Record file of `benchmark lm-matrix` or `benchmark sharding`."""

    only: tuple[str, ...] = ()
    """Only settings whose report title contains one of these strings; all by default."""

    ranks: PositiveInt | None = None
    """Only settings of this many processes; by default one per GPU, or 2 on a CPU."""

    restart: bool = False
    """Measure again what already has a record in `output`."""

    output: Path = dataclasses.field(default_factory=local_results)
    """Folder for records, tables and figures; records of other settings there are kept."""


def benchmark_repeat(config: RepeatConfig) -> list[Record]:
    """Measure the settings that `config` names again, then write tables and figures.

    What this machine has a record of in `output` is skipped, so that the same call resumes.
    Under `torchrun` one set of ranks measures all settings; otherwise each has its own.

    Returns:
        All records in `output`; none on ranks other than 0.

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
        for setting in choose_settings(settings, config.only, backend, ranks):
            if rank() == 0:
                print(f"-- {setting.title}", flush=True)
            run_benchmark(benchmark, config_of(setting, config), report=False)
        if rank() != 0:
            return []
    records = read_records(config.output / benchmark.records)
    benchmark.write_report(records, config.output)
    return records


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
    newest = max(setting.rows, key=lambda row: row["date"])

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
    return cls(**shared | cells | {"output": config.output, "restart": config.restart})
