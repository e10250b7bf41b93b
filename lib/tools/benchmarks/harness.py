"""The harness of all benchmarks: cases are measured one after another, and each leaves a record.

A benchmark is the settings that become its flags, a table of cases and a function that measures
one; `.github/CONTRIBUTING.md` has a whole one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lib.core.allocator import free_memory, is_out_of_memory
from lib.core.files import ROOT, lock_file, make_folder
from lib.core.hardware import keep_freed_memory, local_results, pick_device
from lib.core.records import Record, append_record, new_record, read_records
from lib.core.settings import NonNegativeInt, PositiveFloat, PositiveInt, settings
from lib.core.terminal import bar_size
from lib.tools.benchmarks.sections import SAMPLING, Report

log = logging.getLogger(__name__)
# A record that agrees with this process in all of these need not be measured again.
SAME_MACHINE = ("device", "cores", "threads", "versions", "code", "seed")
# What is measured, as the `config` of a record has it: plain JSON values.
Case = SimpleNamespace


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
    """A benchmark in one process; called with a config it measures what has no record yet."""

    report: Report
    """Makes tables and figures from records; those are in the file STEM.jsonl beside them."""

    cases: Callable[[Any, torch.device], Sequence[Any]]
    """(config, device) -> what to measure: cases, or lists of cases that are measured together.

    Raises `ValueError` for what the device lacks.
    """

    measure: Callable[[Any, Any, torch.device], Any]
    """(case, config, device) -> figures; of a list of cases, those of each, in order."""

    packages: tuple[str, ...] = ()
    """Whose versions a record names, too, where they are installed."""

    def __call__(self, config: Any) -> list[Record]:
        """Measure the cases of `config` without a record; write tables and figures.

        The report shows all records in `output` of this device and these versions.

        Returns:
            The records of the cases of `config`.

        Raises:
            ValueError: none of the cases could be measured.
        """
        device = pick_device(getattr(config, "device", "cpu"))
        if device.type == "cpu":
            keep_freed_memory()
        cases = self.cases(config, device)
        are_groups = isinstance(cases[0], list)

        def measure(group: Sequence[Case]) -> Iterator[dict[str, Any]]:
            def figures() -> Iterable[Mapping[str, Any]]:
                measured = self.measure(group if are_groups else group[0], config, device)
                return measured if are_groups else [measured]

            for found in or_out_of_memory(figures, len(group)):
                yield {"status": "ok", **found}
            # reference cycles would keep what these cases held
            free_memory()

        records = run_sweep(
            config.output / f"{self.report.stem}.jsonl",
            cases if are_groups else [[case] for case in cases],
            measure,
            line=self.report.line,
            seed=config.seed,
            device=device,
            packages=self.packages,
            restart=config.restart,
        )
        return finish(self.report, records, config.output)


def or_out_of_memory(
    measure: Callable[[], Iterable[Mapping[str, Any]]], count: int
) -> list[Mapping[str, Any]]:
    """Return what `measure` returns, or, if memory runs out, `count` out-of-memory results."""
    try:
        return list(measure())
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        free_memory(error)
    return [{"status": "oom"}] * count


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


def run_sweep(
    path: str | os.PathLike,
    groups: Iterable[Sequence[Case]],
    measure: Callable[[Sequence[Case]], Iterable[Mapping[str, Any]]],
    *,
    line: Callable[[Record], str] | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
    packages: Sequence[str] = (),
    restart: bool = False,
) -> list[Record]:
    """Measure groups of cases and append a record for each case right away.

    The cases of a group are measured in one call, such as candidates that are interleaved. A group
    is skipped if all its cases have a record, so the same call resumes an interrupted sweep; a case
    that has failed is not tried again. A record counts if it was made on the same device, with the
    same versions, number of threads, seed and code of `lib`. If another process sweeps into the
    same file, this one waits for it and then measures only what is left.

    Args:
        measure: group -> the figures of its cases, in their order.
        line: record -> the line to print for it.
        packages: whose versions a record names, too, where they are installed.
        restart: ignore all existing records.

    Returns:
        The newest record of each case, in the order of `groups`.
    """
    from tqdm import tqdm

    code = code_version()
    # fail now if the file cannot be written, not after the first measurement
    path = Path(path)
    make_folder(path.parent)
    path.open("ab").close()

    def record_of(figures: Mapping[str, Any], case: Case | None = None) -> Record:
        made = new_record(figures, config=case and vars(case), seed=seed, device=device)
        made["versions"] |= versions_of(packages)
        # lists for tuples, as they are read again
        return json.loads(json.dumps(made | {"code": code, "threads": torch.get_num_threads()}))

    here = record_of({})
    groups = [{_key(vars(case)): case for case in group} for group in groups]
    cases = {key: case for group in groups for key, case in group.items()}
    names = dict(zip(cases, differences([vars(case) for case in cases.values()])))
    with lock_file(path):
        # keep the records of this machine and this code
        records = [] if restart else read_records(path)
        same = [r for r in records if all(r.get(key) == here[key] for key in SAME_MACHINE)]
        found = {_key(record["config"]): record for record in same}

        left: list[list[str]] = []
        wanted: set[str] = set()
        for group in groups:
            # a case that is asked for twice is measured once
            keys = [key for key in group if key not in wanted]
            wanted.update(keys)
            if not found.keys() >= set(keys):
                left.append([key for key in keys if key not in found or not has_failed(found[key])])
        count = sum(map(len, left))
        log.info("%d of %d rows to measure, into %s", count, len(cases), path)
        progress = {"total": len(cases), "initial": len(cases) - count, "unit": "row"}
        with tqdm(**progress, **bar_size(), disable=None, leave=False) as bar:
            for keys in left:
                bar.set_description_str(names[keys[0]])
                for key, figures in zip(keys, measure([cases[key] for key in keys])):
                    found[key] = record_of(figures, cases[key])
                    append_record(path, found[key])
                    bar.update()
                    if line:
                        bar.write(": ".join(filter(None, (names[key], line(found[key])))))
    return [found[key] for key in cases]


def has_failed(record: Record) -> bool:
    """Whether a record says that its case cannot be measured here."""
    return record["figures"].get("status") in ("oom", "failed", "refused")


def differences(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which configs differ, as text: `queries 64, is_causal True`."""
    varying = [
        key
        for key in (configs[0] if configs else ())
        if any(config.get(key) != configs[0][key] for config in configs)
    ]
    return [
        ", ".join(f"{key} {config[key]}" for key in varying if key in config) for config in configs
    ]


def _key(config: Any) -> str:
    return json.dumps(config, sort_keys=True)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def is_prediction(record: Record) -> bool:
    """Whether a record holds no measured figures."""
    return record.get("figures", {}).get("status") == "predicted"


def records_like(path: str | os.PathLike, records: Sequence[Record]) -> list[Record]:
    """The records in the file at `path` of the device and versions of `records`, these last.

    So where a case was asked for again, the record asked for counts as the newest. Predictions are
    made on any machine.
    """
    keys = ("device", "versions")
    same = [
        record
        for record in read_records(path)
        if is_prediction(record) or all(record.get(key) == records[0][key] for key in keys)
    ]
    return [*same, *records]


def code_version(root: Path = ROOT) -> str:
    """Hash the code of `lib`: twelve hex digits that change when one of its files does."""
    digest = hashlib.sha256()
    for path in sorted((root / "lib").rglob("*.*")):
        if path.suffix in (".py", ".cu", ".cuh"):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
