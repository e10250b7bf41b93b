"""The harness that every benchmark stands on: time and memory of a function, pairs, sweeps.

`measure` times one function, `measure_pair` two in turns, and `run_sweep` many configurations, each
of which becomes a record (`lib.report`) as soon as it is measured.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lib.allocations import allocated_bytes, free_memory, is_out_of_memory, synchronise
from lib.config import require
from lib.files import lock_file, make_folder
from lib.hardware import pick_device
from lib.report import Record, append_record, new_record, read_records, remaining
from lib.strict_json import to_dict

Function = Callable[[], Any]

LIB = Path(__file__).parent
# The last cache of a CPU is no larger than this on most machines.
CPU_CACHE_BYTES = 256 << 20
# What a record must share with this process to count as measured here and now.
SAME_MACHINE = ("device", "cores", "threads", "versions", "code", "seed")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Time and memory of one function."""

    status: Literal["ok", "oom"]
    """`oom`: memory ran out, and there are no figures."""

    times_ms: tuple[float, ...] = ()
    """Milliseconds a call, one for each sample, in the order taken."""

    calls_per_sample: int = 1
    """How many calls a sample is the mean of."""

    peak_memory_bytes: int | None = None
    """The most that a call allocates beyond what was allocated before it; None: not known."""

    total_memory_bytes: int | None = None
    """The most that is allocated on the GPU during a call, by everything; None off CUDA."""

    @property
    def samples(self) -> int:
        """How many samples were taken."""
        return len(self.times_ms)

    @property
    def median_ms(self) -> float | None:
        """The median of `times_ms`."""
        return statistics.median(self.times_ms) if self.times_ms else None

    @property
    def mean_ms(self) -> float | None:
        """The mean of `times_ms`."""
        return statistics.fmean(self.times_ms) if self.times_ms else None

    @property
    def iqr_ms(self) -> float | None:
        """The interquartile range of `times_ms`: the middle half lies in it."""
        return interquartile_range(self.times_ms)

    def figures(self) -> dict[str, Any]:
        """All of it as the figures of a record."""
        names = ("status", "median_ms", "mean_ms", "iqr_ms", "samples", "calls_per_sample")
        names += ("peak_memory_bytes", "total_memory_bytes")
        return {name: getattr(self, name) for name in names} | {"times_ms": list(self.times_ms)}


@dataclasses.dataclass(frozen=True)
class PairMeasurement:
    """Two functions that took turns."""

    first: Measurement
    """Of the first function."""

    second: Measurement
    """Of the second."""

    ratios: tuple[float, ...] = ()
    """Time of the first over time of the second, pair by pair; none where one is `oom`."""

    @property
    def median_ratio(self) -> float | None:
        """The median of `ratios`: above 1, the second is faster."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def iqr_ratio(self) -> float | None:
        """The interquartile range of `ratios`."""
        return interquartile_range(self.ratios)


def interquartile_range(values: Sequence[float]) -> float | None:
    """The third quartile less the first; None of nothing."""
    return float(np.subtract(*np.percentile(values, [75, 25]))) if len(values) else None


def measure(fn: Function, **settings: Any) -> Measurement:
    """How long `fn()` takes on a device, and how much memory; `settings` are those of `take_turns`.

    Example:
        >>> measure(lambda: a @ b, device="cuda", samples=50, flush_l2=True).median_ms
    """
    return take_turns((fn,), **settings)[0]


def measure_pair(first: Function, second: Function, **settings: Any) -> PairMeasurement:
    """`measure` for two functions in turns, so that both see the same machine.

    Which of the two goes first alternates too. `settings` are those of `take_turns`, where
    `samples` is the number of pairs.
    """
    results = take_turns((first, second), **settings)
    if "oom" in (result.status for result in results):
        return PairMeasurement(*results)
    pairs = zip(*(result.times_ms for result in results))
    return PairMeasurement(*results, tuple(a / b for a, b in pairs))


def take_turns(
    functions: Sequence[Function],
    *,
    device: torch.device | str = "auto",
    warmup: int = 3,
    samples: int = 20,
    min_sample_ms: float = 1.0,
    max_seconds: float = math.inf,
    flush_l2: bool = False,
) -> list[Measurement]:
    """How long each of `functions` takes on `device`, and how much memory, sample by sample.

    On a GPU the time is the one between two CUDA events in its stream, with whatever the GPU waits
    for the host included: samples follow one another as the steps of a training do. Elsewhere it is
    a monotonic clock's. The device is waited for before the first sample and after the last.

    A sample is the mean of as many calls as take `min_sample_ms`, so that the clock's resolution
    does not count. Memory is that of one further call: on a GPU as PyTorch's allocator counts it,
    on a CPU as PyTorch's profiler does, tensors alone.

    Args:
        functions: each takes nothing; what they return is dropped.
        device: where they work; `auto` is the GPU where there is one.
        warmup: calls of each before anything counts, the first of which may compile.
        samples: how many are taken of each.
        max_seconds: fewer samples are taken, but at least three, where they would take longer.
        flush_l2: before each sample, write a buffer larger than the device's last cache, so that
            inputs come from memory; the writing is not timed. A sample is one call then.

    Returns:
        A measurement for each, of status `oom` where memory ran out; what it held is free then.

    Raises:
        ValueError: `warmup` or `samples` is below 1, `min_sample_ms` below 0, or `max_seconds` not
            above 0.
    """
    require(warmup >= 1, f"warmup is {warmup}; right is: at least 1")
    require(samples >= 1, f"samples is {samples}; right is: at least 1")
    require(min_sample_ms >= 0, f"min_sample_ms is {min_sample_ms}; right is: 0 or more")
    require(max_seconds > 0, f"max_seconds is {max_seconds}; right is: more than 0")
    device = pick_device(str(device))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        candidates = [_Candidate(fn, device) for fn in functions]
        for candidate in candidates:
            candidate.prepare(warmup, 0.0 if flush_l2 else min_sample_ms)
        milliseconds = sum(candidate.sample_ms for candidate in candidates)
        if milliseconds > 0:
            samples = int(min(samples, max(3, max_seconds * 1e3 / milliseconds)))
        flush = _cache_flush(device) if flush_l2 else None
        for turn in range(samples):
            for candidate in candidates if turn % 2 == 0 else reversed(candidates):
                if flush is not None:
                    flush()
                candidate.take()
        synchronise(device)
        return [candidate.result() for candidate in candidates]


class _Candidate:
    """A function while it is measured."""

    def __init__(self, fn: Function, device: torch.device) -> None:
        self.fn, self.device = fn, device
        self.calls, self.sample_ms = 1, 0.0
        self.memory: tuple[int | None, int | None] = (None, None)
        self.is_oom = False
        self.readings: list[Callable[[], float]] = []

    def prepare(self, warmup: int, min_sample_ms: float) -> None:
        """Warm up, measure memory, and find out how many calls make a sample."""
        with self._until_memory_is_full():
            for _ in range(warmup):
                self.fn()
            self.memory = allocated_bytes(self.fn, self.device)
            while True:
                synchronise(self.device)
                reading = self._sample()
                synchronise(self.device)
                self.sample_ms = reading() * self.calls
                if self.sample_ms >= min_sample_ms:
                    break
                growth = 1.2 * min_sample_ms / max(self.sample_ms, 1e-6)
                self.calls = math.ceil(self.calls * min(max(growth, 1.5), 10))

    def take(self) -> None:
        """Take one sample, unless memory was full before."""
        if not self.is_oom:
            with self._until_memory_is_full():
                self.readings.append(self._sample())

    def result(self) -> Measurement:
        """What was measured; the device must have finished."""
        if self.is_oom:
            return Measurement("oom")
        times = tuple(reading() for reading in self.readings)
        return Measurement("ok", times, self.calls, *self.memory)

    def _sample(self) -> Callable[[], float]:
        """Start a sample; what is returned tells its milliseconds a call, once it has finished."""
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(self.calls):
                self.fn()
            end.record()
            return lambda: start.elapsed_time(end) / self.calls
        start_ns = time.perf_counter_ns()
        for _ in range(self.calls):
            self.fn()
        synchronise(self.device)
        milliseconds = (time.perf_counter_ns() - start_ns) / 1e6 / self.calls
        return lambda: milliseconds

    @contextlib.contextmanager
    def _until_memory_is_full(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.is_oom = True
            free_memory(error)


def _cache_flush(device: torch.device) -> Callable[[], Any]:
    """Something to call that pushes everything out of the device's last cache.

    On a GPU it only queues the writing, in the stream that the next sample is timed in.
    """
    size = CPU_CACHE_BYTES
    if device.type == "cuda":
        # twice, as nothing says that what is oldest goes first
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(size, dtype=torch.int8, device=device).zero_


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
    """Measure each of `configs` and append its record to the file at `path` at once.

    A config that a record there holds already is not measured again, so that the same call goes on
    with an interrupted sweep. Records count that were made on the same device, with the same
    versions, threads, seed, and code (`code_version` of where `run_one` is from). While another
    process sweeps into the same file this one waits, and then measures only what is left.

    Args:
        configs: dataclasses.
        run_one: config -> figures. One that runs out of memory becomes a record of status `oom`,
            and what it held is freed.
        expect: config -> figures that are known before, and stand in the record of an `oom` too.
        show: record -> the line that is printed for it.
        seed, device: see `lib.hardware.provenance`.
        restart: measure all of them again.

    Returns:
        The newest record of each config, in their order.

    Raises:
        OSError: the file cannot be written; found out before anything is measured.
    """
    from tqdm import tqdm

    path = Path(path)
    make_folder(path.parent)
    # found out now and not after the first row
    with open(path, "ab"):
        pass
    frame = {"code": code_version(run_one.__module__), "threads": torch.get_num_threads()}
    here = new_record({}, seed=seed, device=device) | frame
    with lock_file(path):
        records = [] if restart else [r for r in read_records(path) if _is_from(r, here)]
        wanted = {_key(to_dict(config)): config for config in configs}
        left = remaining(wanted.values(), records)
        progress = {"total": len(wanted), "initial": len(wanted) - len(left), "unit": "row"}
        with tqdm(**progress, disable=None, leave=False) as bar:
            for config in left:
                figures = _figures_of(config, run_one, expect)
                record = new_record(figures, config=config, seed=seed, device=device) | frame
                append_record(path, record)
                records.append(record)
                bar.update()
                if show:
                    bar.write(show(record))
    newest = {_key(record["config"]): record for record in records}
    return [newest[key] for key in wanted]


def _figures_of(
    config: Any,
    run_one: Callable[[Any], Mapping[str, Any]],
    expect: Callable[[Any], Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """What `run_one` finds; of status `oom` where memory ran out."""
    figures = {"status": "ok", **(expect(config) if expect else {})}
    try:
        return figures | _finite(run_one(config))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        free_memory(error)
        return figures | {"status": "oom"}


def _finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can hold: None for NaN and infinities, and a status that says so."""
    bad = {k for k, v in figures.items() if isinstance(v, float) and not math.isfinite(v)}
    kept = {key: None if key in bad else value for key, value in figures.items()}
    return kept | {"status": f"not finite: {', '.join(sorted(bad))}"} if bad else kept


def code_version(module: str, folder: Path = LIB) -> str:
    """Twelve hex digits for a file of `lib` and those it imports, other ones once one is changed.

    Args:
        module: such as `lib.benchmark_step`, or `__main__` for what `python -m` runs; with one
            outside `lib` all files count.
    """
    if module == "__main__":
        spec = sys.modules[module].__spec__
        module = spec.name if spec else module
    names = {path.stem for path in folder.glob("*.py")}
    package, _, name = module.partition(".")
    counted, left = set(), {name} if package == "lib" and name in names else names
    while left:
        counted |= left
        left = _imported_by(left, folder) & names - counted
    digest = hashlib.sha256()
    for name in sorted(counted):
        digest.update(name.encode() + b"\0" + (folder / f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]


def _imported_by(names: Iterable[str], folder: Path) -> set[str]:
    return set().union(*(_imported((folder / f"{name}.py").read_bytes()) for name in names))


# to parse all of `lib` takes a second, and a sweep asks for every one of its records
@functools.cache
def _imported(source: bytes) -> frozenset[str]:
    """The files of `lib` that one with this text imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "lib":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").removeprefix("lib."))
        elif isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("lib.") for alias in node.names}
    return frozenset(names)


def _is_from(record: Record, here: Record) -> bool:
    return all(record.get(key) == here[key] for key in SAME_MACHINE)


def _key(config: Any) -> str:
    return json.dumps(config, sort_keys=True)
