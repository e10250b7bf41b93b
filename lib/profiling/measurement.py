"""Time and memory of functions: warm-up, synchronization, medians and spread, interleaved peers.

`measure` times one function, and `measure_interleaved` several: it takes one sample of each in
turn, so that all of them see the same machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from lib.core.allocator import allocated_bytes, free_memory, is_out_of_memory, synchronize
from lib.core.hardware import pick_device
from lib.core.settings import require

Function = Callable[[], Any]
T = TypeVar("T")
# At least as large as the last-level cache of most CPUs.
CPU_CACHE_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Time and memory of one function."""

    status: Literal["ok", "oom"]
    """`oom`: it ran out of memory, and there are no figures."""

    times_ms: tuple[float, ...] = ()
    """Milliseconds per call, one value per sample, in the order taken."""

    calls_per_sample: int = 1
    """Number of calls that each sample is the mean of."""

    peak_memory_bytes: int | None = None
    """Peak memory of a call, less what was allocated before it; None if unknown."""

    total_memory_bytes: int | None = None
    """Peak memory allocated on the GPU during a call, by everything; None except on CUDA."""

    @property
    def samples(self) -> int:
        """The number of samples."""
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
        """The interquartile range of `times_ms`."""
        return interquartile_range(self.times_ms)

    def figures(self) -> dict[str, Any]:
        """Return everything as the figures of a record."""
        names = ("status", "median_ms", "mean_ms", "iqr_ms", "samples", "calls_per_sample")
        names += ("peak_memory_bytes", "total_memory_bytes")
        return {name: getattr(self, name) for name in names} | {"times_ms": list(self.times_ms)}


def time_figures(times_ms: Sequence[float]) -> dict[str, Any]:
    """Median, spread and number of samples, and the samples, as figures of a record."""
    return {
        "median_ms": statistics.median(times_ms),
        "iqr_ms": interquartile_range(times_ms),
        "samples": len(times_ms),
        "times_ms": list(times_ms),
    }


def interquartile_range(values: Sequence[float]) -> float | None:
    """Return the third quartile minus the first; None for fewer than two values."""
    return float(np.subtract(*np.percentile(values, [75, 25]))) if len(values) > 1 else None


def time_ratio(
    first: Sequence[float], second: Sequence[float]
) -> tuple[float | None, float | None]:
    """Median and interquartile range of the first's times over the second's, sample by sample.

    Above 1, the second is faster; None where there are no pairs of samples.
    """
    ratios = [a / b for a, b in zip(first, second)]
    return (statistics.median(ratios), interquartile_range(ratios)) if ratios else (None, None)


def measure(fn: Function, **settings: Any) -> Measurement:
    """Measure time and memory of `fn()`; `settings` are those of `measure_interleaved`.

    Example:
        >>> measure(lambda: a @ b, device="cuda", samples=50, flush_l2=True).median_ms
    """
    return measure_interleaved((fn,), **settings)[0]


def measure_interleaved(
    functions: Sequence[Function],
    *,
    device: torch.device | str = "auto",
    warmup: int = 3,
    samples: int = 20,
    min_sample_ms: float = 1.0,
    max_seconds: float = math.inf,
    flush_l2: bool = False,
) -> list[Measurement]:
    """Measure time and memory of each of `functions` on `device`, one sample of each in turn.

    The order reverses from round to round. On a GPU the time is the one between two CUDA events in
    its stream, including any time the GPU waits for the host: samples follow one another like the
    steps of a training run. Elsewhere a monotonic clock counts. The device is synchronized before
    the first sample and after the last.

    A sample is the mean of as many calls as fill `min_sample_ms`, which makes the clock's
    resolution negligible. Memory is that of one further call, on a GPU from PyTorch's allocator, on
    a CPU from PyTorch's profiler (tensors only).

    Args:
        device: where they run; `auto` is the GPU if there is one.
        warmup: calls of each before the first sample; the first call may compile.
        samples: samples of each function.
        max_seconds: take fewer samples, but at least three, where they would take longer than this.
        flush_l2: before each sample, overwrite a buffer larger than the device's last-level cache
            (not timed), so that inputs come from memory. A sample is one call then.

    Returns:
        A measurement per function; status `oom` if it ran out of memory, and what it held is freed.
    """
    require(warmup >= 1, f"warmup must be at least 1, got {warmup}")
    require(samples >= 1, f"samples must be at least 1, got {samples}")
    require(min_sample_ms >= 0, f"min_sample_ms must be at least 0, got {min_sample_ms}")
    require(max_seconds > 0, f"max_seconds must be more than 0, got {max_seconds}")
    device = pick_device(str(device))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        # warm up, and choose the number of calls per sample and of samples
        candidates = [_Candidate(fn, device) for fn in functions]
        for candidate in candidates:
            candidate.prepare(warmup, 0.0 if flush_l2 else min_sample_ms)
        round_ms = sum(candidate.sample_ms for candidate in candidates)
        if round_ms > 0:
            samples = int(min(samples, max(3, max_seconds * 1e3 / round_ms)))

        # take the samples, in an order that alternates
        flush = _cache_flush(device) if flush_l2 else None
        interleave([functools.partial(each.take_sample, flush) for each in candidates], samples)
        synchronize(device)
        return [candidate.result() for candidate in candidates]


def interleave(samplers: Sequence[Callable[[], T]], rounds: int) -> list[list[T]]:
    """Call each of `samplers` once a round; return what each returned, round by round.

    There and back, so that no one always follows the same other.
    """
    found: list[list[T]] = [[] for _ in samplers]
    order = range(len(samplers))
    for number in range(rounds):
        for index in order if number % 2 == 0 else reversed(order):
            found[index].append(samplers[index]())
    return found


class _Candidate:
    """A function being measured."""

    def __init__(self, fn: Function, device: torch.device) -> None:
        self.fn, self.device = fn, device
        self.calls, self.sample_ms, self.is_oom = 1, 0.0, False
        self.memory: tuple[int | None, int | None] = (None, None)
        # read only at the end: on a GPU a sample's time is known once its events have passed
        self.read_sample_ms: list[Callable[[], float]] = []

    def prepare(self, warmup: int, min_sample_ms: float) -> None:
        """Warm up, measure memory, and find out how many calls fill a sample."""
        with self._note_oom():
            for _ in range(warmup):
                self.fn()
            self.memory = allocated_bytes(self.fn, self.device)
            while True:
                synchronize(self.device)
                read_ms = self._start_sample()
                synchronize(self.device)
                self.sample_ms = read_ms() * self.calls
                if self.sample_ms >= min_sample_ms:
                    break
                growth = 1.2 * min_sample_ms / max(self.sample_ms, 1e-6)
                self.calls = math.ceil(self.calls * min(max(growth, 1.5), 10))

    def take_sample(self, before: Function | None) -> None:
        """Take one sample after calling `before`, unless the function ran out of memory."""
        if before is not None:
            before()
        if not self.is_oom:
            with self._note_oom():
                self.read_sample_ms.append(self._start_sample())

    def result(self) -> Measurement:
        """Return the measurement; the device must have been synchronized."""
        if self.is_oom:
            return Measurement("oom")
        times = tuple(read_ms() for read_ms in self.read_sample_ms)
        return Measurement("ok", times, self.calls, *self.memory)

    def _start_sample(self) -> Callable[[], float]:
        return start_sample(self.fn, self.calls, self.device)

    @contextlib.contextmanager
    def _note_oom(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.is_oom = True
            free_memory(error)


def wall_ms(fn: Function, calls: int, device: torch.device) -> float:
    """Milliseconds per call of `calls` of `fn` on an idle device, by the clock: the host counts."""
    synchronize(device)
    start_ns = time.perf_counter_ns()
    for _ in range(calls):
        fn()
    synchronize(device)
    return (time.perf_counter_ns() - start_ns) / 1e6 / calls


def start_sample(fn: Function, calls: int, device: torch.device) -> Callable[[], float]:
    """Call `fn`; return a function for its ms per call, valid once `device` is done."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        return lambda: start.elapsed_time(end) / calls
    milliseconds = wall_ms(fn, calls, device)
    return lambda: milliseconds


def _cache_flush(device: torch.device) -> Callable[[], Any]:
    """Return a function that evicts everything from the device's last-level cache.

    On a GPU it only enqueues the write, in the stream in which the next sample is timed.
    """
    size = CPU_CACHE_BYTES
    if device.type == "cuda":
        # twice the cache, since eviction need not be oldest first
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(size, dtype=torch.int8, device=device).zero_
