"""Exercises of notebook 04: a timing function, idle time, arithmetic intensity."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lib.lessons.exercise import Exercise, check

Spans = Sequence[tuple[int, int]]


@dataclass
class ToyGPU:
    """A device that takes orders into a queue, with a clock that shows whole milliseconds.

    Example:
        >>> gpu = ToyGPU(work_ms=[90, 30])
        >>> gpu.run(), gpu.clock(), gpu.wait(), gpu.clock()
        (None, 1, None, 91)
    """

    work_ms: list[int]
    """How long the device works on each call of `run`; on further ones as on the last."""

    def __post_init__(self) -> None:
        self._now = self._busy_until = self._calls = 0

    def run(self) -> None:
        """Order one piece of work; returns after 1 ms, while the device works."""
        self._now += 1
        work = self.work_ms[min(self._calls, len(self.work_ms) - 1)]
        self._busy_until = max(self._now, self._busy_until) + work
        self._calls += 1

    def wait(self) -> None:
        """Return once the device has done everything that was ordered."""
        self._now = max(self._now, self._busy_until)

    def clock(self) -> int:
        """The time in ms."""
        return self._now


def _draw_timing(generator: random.Random, size: int) -> tuple:
    warmup, samples = generator.randint(1, 3), generator.choice([3, 4, 5, 6])
    # slow at first, and slow once more, now and then, when something else runs
    slow = [generator.randint(50, 99) for _ in range(warmup)]
    usual = generator.randint(5, 20)
    steady = [usual + generator.randint(0, 9) for _ in range(samples)]
    steady[generator.randrange(samples)] += generator.choice([0, 40])
    return ToyGPU(slow + steady), warmup, samples


def time_runs(gpu: ToyGPU, warmup: int, samples: int) -> float:
    for _ in range(warmup):
        gpu.run()
    gpu.wait()
    times = []
    for _ in range(samples):
        start = gpu.clock()
        gpu.run()
        gpu.wait()
        times.append(gpu.clock() - start)
    return statistics.median(times)


def _wait_after_the_loop(gpu: ToyGPU, warmup: int, samples: int) -> float:
    for _ in range(warmup):
        gpu.run()
    gpu.wait()
    start = gpu.clock()
    for _ in range(samples):
        gpu.run()
    gpu.wait()
    return (gpu.clock() - start) / samples


TIME_RUNS = Exercise(
    time_runs,
    _draw_timing,
    {
        "nothing waits for the device between gpu.run() and the second reading of the clock, so "
        "that only the launch is timed": ("        gpu.wait()\n", ""),
        "the warm-up is timed too; its runs must not count": (
            lambda gpu, warmup, samples: time_runs(gpu, 0, warmup + samples)
        ),
        "the mean is returned; one slow run moves it, so take the median": (
            "statistics.median",
            "statistics.mean",
        ),
        "the fastest run is returned; take the median": ("statistics.median", "min"),
        "the sum of the times is returned; take the median": ("statistics.median", "sum"),
        "the device is waited for once after all runs, which gives their mean; wait in each": (
            _wait_after_the_loop
        ),
        "the warm-up is not waited for, so that its work counts in the first sample": (
            "    gpu.wait()\n    times",
            "    times",
        ),
        "gpu.run() is called once before the samples, and not `warmup` times": (
            "range(warmup)",
            "range(1)",
        ),
        "nothing is run before the samples; the first `warmup` runs must not count": (
            "range(warmup)",
            "range(0)",
        ),
        "no time passes between the two readings of the clock; the run and the wait for it belong "
        "between them": ("gpu.clock() - start", "0"),
        "one of the two middle times is returned; for an even number of samples the median is "
        "their mean": ("statistics.median", "statistics.median_high"),
    },
)


def _draw_intervals(generator: random.Random, size: int) -> tuple:
    start = generator.randint(0, 20)
    end = start + 20 + 10 * size
    kernels = []
    for _ in range(1 + size):
        # some before the window or behind it
        first = generator.randint(start - 20, end + 5)
        kernels.append((first, first + generator.randint(1, 15)))
    if generator.random() < 0.5:
        # one inside another, and two that touch
        first, last = kernels[0]
        kernels += [(first, last + 12), (last + 12, last + 13)]
    generator.shuffle(kernels)
    return kernels, start, end


def idle_time(kernels: Spans, start: int, end: int) -> int:
    idle, reached = 0, start
    for first, last in sorted(kernels):
        idle += max(0, min(first, end) - reached)
        reached = max(reached, last)
    return idle + max(0, end - reached)


def _all_but_clipped_durations(kernels: Spans, start: int, end: int) -> int:
    inside = [max(0, min(last, end) - max(first, start)) for first, last in kernels]
    return end - start - sum(inside)


def _inner_gaps(kernels: Spans, start: int, end: int) -> int:
    first, last = min(kernels)[0], max(last for _, last in kernels)
    return idle_time(kernels, max(start, first), min(end, last))


def _gaps_of_neighbors(kernels: Spans, start: int, end: int) -> int:
    return sum(max(0, b[0] - a[1]) for a, b in itertools.pairwise(sorted(kernels)))


IDLE_TIME = Exercise(
    idle_time,
    _draw_intervals,
    {
        "durations are subtracted from the window: where kernels overlap, that counts twice, and "
        "some reach out of the window": (
            lambda kernels, start, end: end - start - sum(last - first for first, last in kernels)
        ),
        "where kernels overlap, the same time is counted twice": _all_but_clipped_durations,
        "the kernels are taken as they come; sort them by their start first": (
            "sorted(kernels)",
            "kernels",
        ),
        "each gap is measured from the end of the kernel before; "
        "measure it from the furthest end so far": ("max(reached, last)", "last"),
        "the gap before the first kernel is missing": (
            "reached = 0, start",
            "reached = 0, max(start, min(kernels)[0])",
        ),
        "the gap after the last kernel is missing": (" + max(0, end - reached)", ""),
        "only gaps between kernels count; those at both ends of the window are missing": (
            _inner_gaps
        ),
        "a kernel runs up to the end of its pair, not through it": (
            "max(reached, last)",
            "max(reached, last + 1)",
        ),
        "the gap after the last kernel is negative where a kernel reaches out of the window": (
            "max(0, end - reached)",
            "end - reached",
        ),
        "the gap before a kernel after the window goes on beyond the window's end": (
            "min(first, end)",
            "first",
        ),
        "kernels that reach out of the window are skipped; their part inside it counts": (
            "sorted(kernels)",
            "sorted(k for k in kernels if start <= k[0] and k[1] <= end)",
        ),
        "each kernel is compared with the next one alone: the window's two ends are missing, and "
        "one kernel may lie inside another": _gaps_of_neighbors,
        "the busy time is returned; the idle time is the rest of the window": (
            "idle + max(0, end - reached)",
            "end - start - idle - max(0, end - reached)",
        ),
    },
)


def _draw_sizes(generator: random.Random, size: int) -> tuple:
    m, k, n = (generator.choice([1, 2, 8, 32, 128]) * generator.randint(1, 9) for _ in range(3))
    return m, k, n, generator.choice([2, 4, 8])


def intensity(m: int, k: int, n: int, element_bytes: int) -> float:
    flops = 2 * m * k * n
    num_bytes = element_bytes * (m * k + k * n + m * n)
    return flops / num_bytes


INTENSITY = Exercise(
    intensity,
    _draw_sizes,
    {
        "a multiplication and an addition count as one; they are two operations": ("2 * m", "m"),
        "numbers are counted, and not bytes; multiply by element_bytes": ("element_bytes * (", "("),
        "the result is missing; it is written to memory too": (" + m * n", ""),
        "only the result's bytes are counted; both factors are read": (
            "m * k + k * n + m * n",
            "m * n",
        ),
        "an input is read once for each multiplication that it is in; count it once": (
            "m * k + k * n",
            "2 * m * k * n",
        ),
        "the bytes need brackets: a / b * c is (a / b) * c": (
            "flops / num_bytes",
            "flops / element_bytes * (m * k + k * n + m * n)",
        ),
        "// drops the fraction; divide with /": ("flops / num_bytes", "flops // num_bytes"),
        "a sum of k products counts k - 1 additions; count k, a multiply-add is two operations": (
            "2 * m * k * n",
            "(2 * k - 1) * m * n",
        ),
        "bytes are divided by operations; it is the other way round": (
            "flops / num_bytes",
            "num_bytes / flops",
        ),
    },
)


def check_time_runs(attempt: Callable) -> None:
    """Check `time_runs(gpu, warmup, samples)` -> the median of a run's ms; `gpu` is a `ToyGPU`."""
    check(TIME_RUNS, attempt)


def check_idle_time(attempt: Callable) -> None:
    """Check `idle_time(kernels, start, end)` -> the time in which no kernel runs."""
    check(IDLE_TIME, attempt)


def check_intensity(attempt: Callable) -> None:
    """Check `intensity(m, k, n, element_bytes)` -> FLOP/byte of the matmul (m, k) @ (k, n)."""
    check(INTENSITY, attempt)
