"""A trace of PyTorch's profiler in a few numbers: where the time goes, and who waits.

A trace with GPU kernels is summarized by kernel. One without is summarized by operator, each with
its self time, which excludes the operators that it calls. (HolisticTraceAnalysis, as of 0.5, reads
no traces without a GPU, and `torch.profiler.key_averages` no trace that is on disk.)
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from lib.profiling.trace import (
    CATEGORIES,
    Span,
    Trace,
    category_of,
    contains,
    difference,
    edges,
    intersection,
    launch_times,
    total,
    union,
)

STEP = "training step"
GAP_EDGES_US = (0, 10, 100, 1_000, 10_000, np.inf)
# calls of CUDA that wait for the device, and those that launch work
WAITING = re.compile(r"Synchronize")
LAUNCHING = re.compile(r"Launch")


class Work(NamedTuple):
    """All runs of one kernel, or on a CPU of one operator; or all kernels of one category.

    On a CPU a category's `calls` count no operators that call others of it, as linear calls addmm.
    """

    name: str
    category: str
    calls: float
    ms: float

    share: float
    """Of all kernels' time."""


class RangeTime(NamedTuple):
    """All ranges of one name, without the number at its end."""

    name: str
    calls: float

    host_ms: float
    """Time that the host spends in the range."""

    device_ms: float | None
    """Time of the kernels launched in the range; None on a CPU."""


@dataclass(frozen=True)
class Gaps:
    """The stretches without a kernel that last `shortest_us` to `longest_us`."""

    shortest_us: float
    longest_us: float
    count: float
    ms: float


@dataclass(frozen=True)
class Summary:
    """A trace in numbers; times in ms, times and counts per step."""

    device: Literal["gpu", "cpu"]
    steps: int

    wall_ms: float
    """From the start of the first step to the end of the last step and its kernels, over steps."""

    busy_ms: float
    """Time in which at least one kernel (on a CPU: operator) runs."""

    idle_ms: float
    """The rest: a GPU waits for the host; on a CPU, Python runs between operators."""

    dispatch_ms: float | None
    """Time the host is in the step without waiting for the device. Includes launches that wait
    because the queue (about a thousand launches) is full. None on a CPU."""

    wait_ms: float | None
    """Time the host waits for the device, as in cudaDeviceSynchronize; None on a CPU."""

    kernels: float
    """Kernels run, including copies and fills. On a CPU operators that do work; of operators of one
    category that call one another, the innermost."""

    launches: float | None
    """Calls that launch kernels: a CUDA graph is one. None on a CPU."""

    communication_ms: float
    """Time in which at least one communication kernel runs."""

    exposed_communication_ms: float
    """The part of it in which nothing else runs."""

    by_category: tuple[Work, ...]

    by_kernel: tuple[Work, ...]
    """Longest first."""

    by_range: tuple[RangeTime, ...]
    """In the order of their first starts."""

    gaps: tuple[Gaps, ...]

    @property
    def overlapped_communication_ms(self) -> float:
        """Communication time hidden behind other kernels."""
        return self.communication_ms - self.exposed_communication_ms


def summarize(trace: Trace) -> Summary:
    """Summarize `trace` from the start of its first step to the end of its last.

    Work that is already running when the first step starts counts from then on.

    Steps are ranges `training step`. If there is none, `ProfilerStep#N` counts, which
    `torch.profiler` makes; if there is none of those either, everything is one step.
    """
    # kernels in the steps may have been launched before them
    calls = trace.calls
    trace, window, num_steps = _cut_to_steps(trace)
    on_gpu = bool(trace.kernels)
    spans = trace.kernels if on_gpu else trace.operators
    if not spans:
        raise ValueError("the trace has no kernels and no operators in its steps")

    # of each span: when it was launched, its category, its own time, and whether it counts
    launched = np.array(launch_times(spans, calls))
    categories = np.array([category_of(span.name) for span in spans], dtype=object)
    is_communication = categories == "communication"
    # what is launched in attention or its backward, but for communication
    categories[contains(_attention_times(trace), launched) & ~is_communication] = "attention"
    if on_gpu:
        times = np.diff(edges(spans), axis=1)[:, 0]
        works = counts = np.ones(len(spans), dtype=bool)
    else:
        times, is_innermost = _nesting(spans)
        # views, and operators that only call others, do no work of their own
        works = np.array([category_of(span.name) != "other" for span in spans])
        counts = (works | (categories == "other")) & is_innermost

    # busy and idle, and what of the communication nothing hides
    whole = np.array([window])
    busy = intersection(union(edges(spans)), whole)
    idle = difference(whole, busy)
    communication = union(edges(spans)[is_communication])
    exposed = difference(communication, union(edges(spans)[works & ~is_communication]))

    per_step = 1 / num_steps
    to_ms = per_step / 1e3
    waiting = launches = dispatched = None
    if on_gpu:
        waiting = union(edges(call for call in trace.calls if WAITING.search(call.name)))
        steps = [span for span in trace.ranges if span.name == STEP]
        host = union(edges(steps or [*trace.operators, *trace.calls, *trace.ranges]))
        dispatched = total(difference(host, waiting)) / 1e3 * per_step
        launches = sum(bool(LAUNCHING.search(call.name)) for call in trace.calls) * per_step
    names = [(span.name, category) for span, category in zip(spans, categories)]
    sums = _sums(names, times, per_step).items()
    by_kernel = [Work(*name, *row) for name, row in sums]  # type: ignore[call-arg]
    by_category = _sums(categories, times, per_step, counts)
    return Summary(
        device="gpu" if on_gpu else "cpu",
        steps=num_steps,
        wall_ms=(window[1] - window[0]) * to_ms,
        busy_ms=total(busy) * to_ms,
        idle_ms=total(idle) * to_ms,
        dispatch_ms=dispatched,
        wait_ms=total(waiting) / 1e3 * per_step if on_gpu else None,
        kernels=int((works & counts).sum()) * per_step,
        launches=launches,
        communication_ms=total(communication) * to_ms,
        exposed_communication_ms=total(exposed) * to_ms,
        by_category=tuple(Work(name, name, *by_category[name]) for name in CATEGORIES),
        by_kernel=tuple(sorted(by_kernel, key=lambda row: -row.ms)),
        by_range=_by_range(trace, launched, times if on_gpu else None, per_step),
        gaps=_gap_histogram(idle, per_step),
    )


def _cut_to_steps(trace: Trace) -> tuple[Trace, tuple[float, float], int]:
    """Return the trace within its steps, their start and end, and the number of steps."""
    steps = [span for span in trace.ranges if span.name == STEP]
    steps = steps or [span for span in trace.ranges if span.name.startswith("ProfilerStep#")]
    everything = (*trace.kernels, *trace.operators, *trace.calls, *trace.ranges)
    if not everything:
        return trace, (0.0, 0.0), 1
    start = min(span.start for span in steps or everything)
    end = kernel_end = max(span.end for span in steps or everything)
    if steps:
        # the host may run ahead: kernels launched in the last step count whenever they run
        launches = {call.correlation for call in trace.calls if start <= call.start < end}
        late = [s.end for s in trace.kernels if s.correlation in launches and s.start >= start]
        kernel_end = max([end, *late])

    def cut(spans: tuple[Span, ...], last: float) -> tuple[Span, ...]:
        return tuple(span for span in spans if start <= span.start < last)

    def running(spans: tuple[Span, ...]) -> tuple[Span, ...]:
        return tuple(replace(s, start=start) for s in spans if s.start < start < s.end)

    inside = Trace(
        running(trace.kernels) + cut(trace.kernels, kernel_end),
        running(trace.operators) + cut(trace.operators, end),
        cut(trace.calls, end),
        cut(trace.ranges, end),
        trace.backward_of,
    )
    return inside, (start, kernel_end), max(1, len(steps))


def _nesting(spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    """Return each span's time less that of spans directly inside, and whether it is innermost.

    Innermost is a span with none of its category inside. Only spans of the same thread nest.
    """
    times = np.diff(edges(spans), axis=1)[:, 0]
    own, is_innermost = times.copy(), np.ones(len(spans), dtype=bool)
    open_in_lane: dict[str, list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        # the spans around this one, outermost first
        around = open_in_lane[span.lane]
        while around and spans[around[-1]].end <= span.start:
            around.pop()
        if around:
            own[around[-1]] -= times[index]
        category = category_of(span.name)
        same = [outer for outer in around if category_of(spans[outer].name) == category]
        is_innermost[same] = False
        around.append(index)
    return np.maximum(own, 0), is_innermost


def _attention_times(trace: Trace) -> np.ndarray:
    """Return when the host is in a range `attention`, or in the gradient of an operator in one.

    All threads together: while one waits for the backward pass, another one runs it.
    """
    forward = union(edges(span for span in trace.ranges if span.name == "attention"))
    if not len(forward):
        return forward
    starts, gradients = np.array(trace.backward_of).reshape(-1, 2).T
    begun = set(gradients[contains(forward, starts)])
    backward = edges(span for span in trace.operators if span.start in begun)
    return union(np.concatenate((forward, backward)))


def _sums(
    keys: Iterable[Any], times: np.ndarray, per_step: float, counts: np.ndarray | None = None
) -> dict[Any, tuple[float, float, float]]:
    """Return calls, ms and share of all time by key; `counts`: which spans count as calls."""
    found: dict[Any, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        found[key].append(index)
    whole = times.sum() or 1.0
    sums: dict[Any, tuple[float, float, float]] = defaultdict(lambda: (0.0, 0.0, 0.0))
    for key, chosen in found.items():
        calls = len(chosen) if counts is None else int(counts[chosen].sum())
        time = float(times[chosen].sum())
        sums[key] = (calls * per_step, time * per_step / 1e3, float(time / whole))
    return sums


def _by_range(
    trace: Trace, launched: np.ndarray, kernel_times: np.ndarray | None, per_step: float
) -> tuple[RangeTime, ...]:
    found: dict[str, list[Span]] = defaultdict(list)
    for span in trace.ranges:
        # block 0, block 1, ... are all `block`
        found[re.sub(r"[\s#]*\d+$", "", span.name)].append(span)
    rows = []
    for name, spans in found.items():
        times = union(edges(spans))
        device_ms = None
        if kernel_times is not None:
            inside = contains(times, launched)
            device_ms = float(kernel_times[inside].sum()) * per_step / 1e3
        rows.append(
            RangeTime(name, len(spans) * per_step, total(times) * per_step / 1e3, device_ms)
        )
    return tuple(rows)


def _gap_histogram(idle: np.ndarray, per_step: float) -> tuple[Gaps, ...]:
    lengths = idle[:, 1] - idle[:, 0]
    counts, _ = np.histogram(lengths, GAP_EDGES_US)
    times, _ = np.histogram(lengths, GAP_EDGES_US, weights=lengths)
    rows = zip(itertools.pairwise(GAP_EDGES_US), counts.tolist(), times.tolist())
    return tuple(Gaps(*ends, n * per_step, us * per_step / 1e3) for ends, n, us in rows)
