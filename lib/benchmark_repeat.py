"""Settings whose records are there already, measured again: of training on several ranks.

The tables of `benchmark lm-matrix` and `benchmark sharding` have a section for each setting. This
reads what was set from the records of one, and measures it on the machine at hand.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lib import benchmark_lm_matrix_report, benchmark_sharding_report
from lib.benchmark_lm_matrix import LM_MATRIX
from lib.benchmark_sharding import SHARDING
from lib.benchmark_turns import Benchmark, run_benchmark
from lib.config_lm_matrix import LmMatrixConfig
from lib.config_ranks import RanksBenchmarkConfig, RepeatConfig, check_ranks
from lib.config_sharding import ShardingConfig
from lib.distributed import init_from_environment, rank, world_size
from lib.plots_lm_matrix import Section
from lib.report import Record, read_records


def benchmark_repeat(config: RepeatConfig) -> list[Record]:
    """Measure the settings that `config` names again; tables and figures are written at the end.

    Under `torchrun` one set of ranks measures all of them; otherwise each has its own.

    Returns:
        The records of this call; under `torchrun` those of rank 0, none elsewhere.

    Raises:
        FileNotFoundError: there are no records.
        ValueError: no setting is of these ranks and has these words; lists those that are there.
    """
    if not config.records.exists():
        raise FileNotFoundError(f"records {config.records}: no such file")
    benchmark, sections = sections_of(read_records(config.records))
    if "RANK" not in os.environ and not dist.is_initialized():
        gpus = torch.cuda.device_count()
        backend = "nccl" if gpus else "gloo"
        return _repeat(config, benchmark, sections, backend, config.ranks or gpus or 2)
    with init_from_environment() as device:
        backend = "nccl" if device.type == "cuda" else "gloo"
        check_ranks(config.ranks, world_size())
        return _repeat(config, benchmark, sections, backend, world_size())


def sections_of(records: Iterable[Record]) -> tuple[Benchmark, list[Section]]:
    """Which benchmark the records are of, and its settings."""
    records = list(records)
    if any("method" in record["config"] for record in records):
        report = benchmark_sharding_report
        return SHARDING, report.make_sections(report.sharding_rows(records))
    report = benchmark_lm_matrix_report
    return LM_MATRIX, report.make_sections(report.matrix_rows(records))


def chosen_sections(
    sections: Sequence[Section], only: Sequence[str], backend: str, ranks: int
) -> list[Section]:
    """Those of so many ranks with this backend whose titles have one of the words `only`."""
    here = [s for s in sections if (s.rows[0]["backend"], s.rows[0]["ranks"]) == (backend, ranks)]
    chosen = [s for s in here if not only or any(words in s.title for words in only)]
    if not chosen:
        titles = "; ".join(repr(section.title) for section in here) or "none"
        raise ValueError(
            f"only is {list(only)}: no setting of {ranks} ranks over {backend} has that in its "
            f"title; there are: {titles}"
        )
    return chosen


def config_of(section: Section, config: RepeatConfig) -> RanksBenchmarkConfig:
    """What its benchmark measures a section with, as its newest record does."""
    newest: dict[str, Any] = max(section.rows, key=lambda row: row["date"])
    if "method" in newest:
        cls: type[RanksBenchmarkConfig] = ShardingConfig
        cells = {"models": (newest["model"],), "methods": _all(section, "method")}
        cells["attention_kernel"] = newest["kernel"]
    else:
        cls = LmMatrixConfig
        cells = {"kernels": _all(section, "kernel"), "wrappers": _all(section, "wrapper")}
    shared = {
        field.name: newest[field.name] for field in dataclasses.fields(cls) if field.name in newest
    }
    if not config.keep_buckets:
        shared["bucket_size_mb"] = None
    return cls(**shared | cells | {"output": config.output})


def _repeat(
    config: RepeatConfig,
    benchmark: Benchmark,
    sections: Sequence[Section],
    backend: str,
    ranks: int,
) -> list[Record]:
    chosen = chosen_sections(sections, config.only, backend, ranks)
    # once at the end, and not for each of them
    quiet = dataclasses.replace(benchmark, write_report=_no_report)
    measured = []
    for section in _in_time(chosen, config.seconds):
        if rank() == 0:
            print(f"-- {section.title}", flush=True)
        measured += run_benchmark(quiet, config_of(section, config))
    if rank() == 0:
        benchmark.write_report(read_records(config.output / benchmark.records), config.output)
    return measured


def _in_time(sections: Sequence[Section], seconds: float | None) -> Iterator[Section]:
    """The first of `sections`, and others as long as one more of the longest would be in time."""
    start = begin = time.monotonic()
    longest = 0.0
    for number, section in enumerate(sections):
        now = time.monotonic()
        longest, begin = max(longest, now - begin), now
        is_late = [seconds is not None and number > 0 and now - start + longest > seconds]
        if dist.is_initialized():
            # clocks differ, and all ranks go on or none
            dist.broadcast_object_list(is_late)
        if is_late[0]:
            left = len(sections) - number
            if rank() == 0:
                print(f"seconds {seconds:g} are over: {left} of {len(sections)} left", flush=True)
            return
        yield section


def _all(section: Section, name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row[name] for row in section.rows))


def _no_report(records: Sequence[Record], output: Path) -> None:
    """Write nothing."""
