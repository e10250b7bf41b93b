"""Sweeps: measure many configs, append a record for each at once, and resume where it stopped."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

import torch

from lib.core.allocator import free_memory, is_out_of_memory
from lib.core.files import ROOT, lock_file, make_folder
from lib.core.records import Record, append_record, new_record, read_records, remaining
from lib.core.settings import to_dict
from lib.core.terminal import bar_size

log = logging.getLogger(__name__)
# A record that agrees with this process in all of these need not be measured again.
SAME_MACHINE = ("device", "cores", "threads", "versions", "code", "seed")


def run_sweep(
    path: str | os.PathLike,
    configs: Iterable[Any],
    run_one: Callable[[Any], Mapping[str, Any]],
    *,
    expect: Callable[[Any], Mapping[str, Any]] | None = None,
    show: Callable[[Record], str] | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
    restart: bool = False,
) -> list[Record]:
    """Measure each config and append its record to the file at `path` right away.

    A config that already has a record is skipped, so the same call resumes an interrupted sweep. A
    record counts if it was made on the same device, with the same versions, number of threads,
    seed, and code (`code_version` of the module that defines `run_one`). If another process sweeps
    into the same file, this one waits for it and then measures only what is left.

    Args:
        run_one: config -> figures. If it runs out of memory, what it held is freed and the record
            has the status `oom`.
        expect: config -> figures known beforehand, which an `oom` record has too.
        show: record -> the line to print for it.

    Returns:
        The newest record of each config, in the order of `configs`.
    """
    from tqdm import tqdm

    # fail now if the file cannot be written, not after the first measurement
    path = Path(path)
    make_folder(path.parent)
    path.open("ab").close()

    frame = {"code": code_version(run_one.__module__), "threads": torch.get_num_threads()}
    here = new_record({}, seed=seed, device=device) | frame
    with lock_file(path):
        # keep the records of this machine and this code
        records = [] if restart else read_records(path)
        records = [r for r in records if all(r.get(key) == here[key] for key in SAME_MACHINE)]

        # measure the configs without one
        wanted = {_key(to_dict(config)): config for config in configs}
        left = remaining(wanted.values(), records)
        log.info("%d of %d rows to measure, into %s", len(left), len(wanted), path)
        progress = {"total": len(wanted), "initial": len(wanted) - len(left), "unit": "row"}
        texts = differences([to_dict(config) for config in left])
        with tqdm(**progress, **bar_size(), disable=None, leave=False) as bar:
            for config, text in zip(left, texts):
                bar.set_description_str(text)
                figures = _figures(config, run_one, expect)
                record = new_record(figures, config=config, seed=seed, device=device) | frame
                append_record(path, record)
                records.append(record)
                bar.update()
                if show:
                    bar.write(show(record))
    newest = {_key(record["config"]): record for record in records}
    return [newest[key] for key in wanted]


def differences(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which configs differ, as text for a bar: `queries 64, is_causal True`."""
    varying = [
        key
        for key in (configs[0] if configs else ())
        if any(config.get(key) != configs[0][key] for config in configs)
    ]
    return [", ".join(f"{key} {config.get(key)}" for key in varying) for config in configs]


def _figures(
    config: Any,
    run_one: Callable[[Any], Mapping[str, Any]],
    expect: Callable[[Any], Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """The expected and measured figures, with the status `oom` if memory ran out."""
    figures = {"status": "ok", **(expect(config) if expect else {})}
    try:
        return figures | _finite(run_one(config))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        free_memory(error)
        return figures | {"status": "oom"}


def _finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures with None for NaN and infinities, which JSON lacks, and a status that says so."""
    bad = sorted(k for k, v in figures.items() if isinstance(v, float) and not math.isfinite(v))
    status = {"status": f"not finite: {', '.join(bad)}"} if bad else {}
    return {**figures, **dict.fromkeys(bad), **status}


def _key(config: Any) -> str:
    return json.dumps(config, sort_keys=True)


def records_like(
    path: str | os.PathLike, record: Record, keys: Iterable[str] = ("device", "versions")
) -> list[Record]:
    """The records in the file at `path` with the same `keys` as `record`: a report shows these."""
    return [r for r in read_records(path) if all(r.get(key) == record[key] for key in keys)]


def code_version(module: str, root: Path = ROOT) -> str:
    """Hash a module of `lib` and every module of `lib` that it imports, also inside functions.

    Args:
        module: such as `lib.tools.benchmarks.step`, or `__main__` for what `python -m` runs. One
            outside `lib` gets the hash of all of `lib`.

    Returns:
        Twelve hex digits, which change when one of these files does.
    """
    if module == "__main__":
        spec = sys.modules[module].__spec__
        module = spec.name if spec else module
    paths = set((root / "lib").rglob("*.py"))
    if module.startswith("lib."):
        # with this search path it finds modules of `lib` only
        finder: Any = ModuleFinder(path=[str(root)])
        finder.import_hook(module)
        paths = {Path(found.__file__) for found in finder.modules.values() if found.__file__}
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
