"""Exercises of notebook 04: a timing function, idle time, arithmetic intensity."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lib import intervals
from lib.exercises import Exercise, check

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


def _time_runs(
    gpu: ToyGPU,
    warmup: int,
    samples: int,
    *,
    waits: bool = True,
    counts_warmup: bool = False,
    summary: Callable = statistics.median,
) -> np.float64:
    """The median time of a run; the keywords make mistakes."""
    times = []
    for number in range(warmup + samples):
        gpu.wait()
        start = gpu.clock()
        gpu.run()
        if waits:
            gpu.wait()
        if counts_warmup or number >= warmup:
            times.append(gpu.clock() - start)
    return np.float64(summary(times))


def _mistaken(name: str, **how) -> Callable:
    def mistaken(gpu: ToyGPU, warmup: int, samples: int) -> np.float64:
        return _time_runs(gpu, warmup, samples, **how)

    mistaken.__name__ = name
    return mistaken


def _wait_behind_the_loop(gpu: ToyGPU, warmup: int, samples: int) -> np.float64:
    """One wait for all samples: their mean, and nothing of their spread."""
    for _ in range(warmup):
        gpu.run()
    gpu.wait()
    start = gpu.clock()
    for _ in range(samples):
        gpu.run()
    gpu.wait()
    return np.float64((gpu.clock() - start) / samples)


def _one_warmup(gpu: ToyGPU, warmup: int, samples: int) -> np.float64:
    return _time_runs(gpu, 1, samples)


def _no_warmup(gpu: ToyGPU, warmup: int, samples: int) -> np.float64:
    return _time_runs(gpu, 0, samples)


def _no_time(gpu: ToyGPU, warmup: int, samples: int) -> np.float64:
    """Both readings behind the wait, say."""
    return np.float64(0)


def _upper_middle(times: Sequence[int]) -> int:
    return sorted(times)[len(times) // 2]


def _warmup_not_waited_for(gpu: ToyGPU, warmup: int, samples: int) -> np.float64:
    """The warm-up still runs when the first sample starts."""
    times = []
    for number in range(warmup + samples):
        start = gpu.clock()
        gpu.run()
        if number >= warmup:
            gpu.wait()
            times.append(gpu.clock() - start)
    return np.float64(statistics.median(times))


TIME_RUNS = Exercise(
    solve=_time_runs,
    draw=_draw_timing,
    mistakes={
        "nothing waits for the device between gpu.run() and the second reading of the clock, so "
        "that only the order is timed": _mistaken("never_waits", waits=False),
        "the warm-up is timed too; its runs must not count": (
            _mistaken("counts_warmup", counts_warmup=True)
        ),
        "the mean is returned; one slow run moves it, so take the median": (
            _mistaken("takes_mean", summary=statistics.mean)
        ),
        "the fastest run is returned; take the median": _mistaken("takes_minimum", summary=min),
        "the sum of the times is returned; take the median": _mistaken("takes_sum", summary=sum),
        "the device is waited for once behind all runs, which gives their mean; wait in each": (
            _wait_behind_the_loop
        ),
        "the warm-up is not waited for, so that its work counts in the first sample": (
            _warmup_not_waited_for
        ),
        "gpu.run() is called once before the samples, and not `warmup` times": _one_warmup,
        "nothing is run before the samples; the first `warmup` runs must not count": _no_warmup,
        "no time passes between the two readings of the clock; the run and the wait for it belong "
        "between them": _no_time,
        "one of the two middle times is returned; for an even number of samples the median is "
        "their mean": _mistaken("upper_middle", summary=_upper_middle),
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


def _idle_time(
    kernels: Spans,
    start: int,
    end: int,
    *,
    is_sorted: bool = True,
    keeps_furthest: bool = True,
    before: bool = True,
    behind: bool = True,
    clipped: bool = True,
    end_clipped: bool = True,
) -> np.float64:
    """The time from `start` to `end` without a kernel; the keywords make mistakes."""
    order = sorted(kernels) if is_sorted else kernels
    if not before:
        start = min(max(order[0][0], start), end) if order else start
    idle, reached = 0, start
    for first, last in order:
        idle += max(0, (min(first, end) if clipped else first) - reached)
        reached = max(reached, last) if keeps_furthest else last
    last_gap = max(0, end - reached) if end_clipped else end - reached
    return np.float64(idle + (last_gap if behind else 0))


def _idle_like(name: str, **how) -> Callable:
    def mistaken(kernels: Spans, start: int, end: int) -> np.float64:
        return _idle_time(kernels, start, end, **how)

    mistaken.__name__ = name
    return mistaken


def _all_but_durations(kernels: Spans, start: int, end: int) -> np.float64:
    return np.float64(end - start - sum(last - first for first, last in kernels))


def _all_but_clipped_durations(kernels: Spans, start: int, end: int) -> np.float64:
    inside = [max(0, min(last, end) - max(first, start)) for first, last in kernels]
    return np.float64(end - start - sum(inside))


def _ends_included(kernels: Spans, start: int, end: int) -> np.float64:
    return _idle_time([(first, last + 1) for first, last in kernels], start, end)


def _only_whole_kernels(kernels: Spans, start: int, end: int) -> np.float64:
    inside = [(first, last) for first, last in kernels if start <= first and last <= end]
    return _idle_time(inside, start, end)


def _gaps_of_neighbours(kernels: Spans, start: int, end: int) -> np.float64:
    order = sorted(kernels)
    return np.float64(sum(max(0, b[0] - a[1]) for a, b in itertools.pairwise(order)))


def _busy_time(kernels: Spans, start: int, end: int) -> np.float64:
    return np.float64(end - start) - _idle_time(kernels, start, end)


def _idle_by_intervals(kernels: Spans, start: int, end: int) -> np.float64:
    return np.float64(intervals.total(intervals.gaps(intervals.union(kernels), start, end)))


IDLE_TIME = Exercise(
    solve=_idle_by_intervals,
    draw=_draw_intervals,
    mistakes={
        "durations are subtracted from the window: where kernels overlap, that counts twice, and "
        "some reach out of the window": _all_but_durations,
        "where kernels overlap, the same time is counted twice": _all_but_clipped_durations,
        "the kernels are taken as they come; sort them by their start first": (
            _idle_like("unsorted", is_sorted=False)
        ),
        "each gap is measured from the end of the kernel before; "
        "measure it from the furthest end so far": (_idle_like("last_end", keeps_furthest=False)),
        "the gap before the first kernel is missing": _idle_like("no_first_gap", before=False),
        "the gap behind the last kernel is missing": _idle_like("no_last_gap", behind=False),
        "only gaps between kernels count; those at both ends of the window are missing": (
            _idle_like("inner_gaps", before=False, behind=False)
        ),
        "a kernel runs through the end of its pair; it runs up to it, and not in it": (
            _ends_included
        ),
        "the gap behind the last kernel is negative where a kernel reaches out of the window": (
            _idle_like("last_gap_not_clipped", end_clipped=False)
        ),
        "the gap before a kernel behind the window goes on beyond the window's end": (
            _idle_like("not_clipped", clipped=False)
        ),
        "kernels that reach out of the window are skipped; their part inside it counts": (
            _only_whole_kernels
        ),
        "each kernel is compared with the next one alone: the window's two ends are missing, and "
        "one kernel may lie inside another": _gaps_of_neighbours,
        "the busy time is returned; the idle time is the rest of the window": _busy_time,
    },
)


def _draw_product(generator: random.Random, size: int) -> tuple:
    m, k, n = (generator.choice([1, 2, 8, 32, 128]) * generator.randint(1, 9) for _ in range(3))
    return m, k, n, generator.choice([2, 4, 8])


def _intensity(
    m: int,
    k: int,
    n: int,
    element_bytes: int,
    *,
    per_step: int = 2,
    moved: Callable[[int, int, int], int] = lambda m, k, n: m * k + k * n + m * n,
    in_bytes: bool = True,
) -> np.float64:
    """FLOPs over bytes of (m, k) @ (k, n); the keywords make mistakes."""
    return np.float64(per_step * m * k * n / (moved(m, k, n) * (element_bytes if in_bytes else 1)))


def _intensity_like(name: str, **how) -> Callable:
    def mistaken(m: int, k: int, n: int, element_bytes: int) -> np.float64:
        return _intensity(m, k, n, element_bytes, **how)

    mistaken.__name__ = name
    return mistaken


def _inverse_intensity(m: int, k: int, n: int, element_bytes: int) -> np.float64:
    return 1 / _intensity(m, k, n, element_bytes)


def _not_in_brackets(m: int, k: int, n: int, element_bytes: int) -> np.float64:
    return np.float64(2 * m * k * n / element_bytes * (m * k + k * n + m * n))


def _rounded_down(m: int, k: int, n: int, element_bytes: int) -> np.float64:
    return np.float64(int(_intensity(m, k, n, element_bytes)))


def _one_addition_less(m: int, k: int, n: int, element_bytes: int) -> np.float64:
    return np.float64((2 * k - 1) * m * n / (element_bytes * (m * k + k * n + m * n)))


INTENSITY = Exercise(
    solve=_intensity,
    draw=_draw_product,
    mistakes={
        "a multiplication and an addition count as one; they are two operations": (
            _intensity_like("one_per_pair", per_step=1)
        ),
        "numbers are counted, and not bytes; multiply by element_bytes": (
            _intensity_like("numbers", in_bytes=False)
        ),
        "the result is missing; it is written to memory too": (
            _intensity_like("no_result", moved=lambda m, k, n: m * k + k * n)
        ),
        "only the result's bytes are counted; both factors are read": (
            _intensity_like("result_alone", moved=lambda m, k, n: m * n)
        ),
        "a factor is read once for each product that it is in; count it once": (
            _intensity_like("read_again", moved=lambda m, k, n: 2 * m * k * n + m * n)
        ),
        "the bytes need brackets: a / b * c is (a / b) * c": _not_in_brackets,
        "// drops the fraction; divide with /": _rounded_down,
        "a sum of k products counts k - 1 additions; count k, a multiply-add is two operations": (
            _one_addition_less
        ),
        "bytes are divided by operations; it is the other way round": _inverse_intensity,
    },
)


def check_time_runs(attempt: Callable) -> None:
    """Check `time_runs(gpu, warmup, samples)` -> the median of a run's ms; `gpu` is a `ToyGPU`."""
    check(TIME_RUNS, attempt)


def check_idle_time(attempt: Callable) -> None:
    """Check `idle_time(kernels, start, end)` -> the time in which no kernel runs."""
    check(IDLE_TIME, attempt)


def check_intensity(attempt: Callable) -> None:
    """Check `intensity(m, k, n, element_bytes)` -> FLOP/byte of a product (m, k) @ (k, n)."""
    check(INTENSITY, attempt)
