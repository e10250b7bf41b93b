"""What a trace of PyTorch's profiler says in a few numbers: where the time goes, and who waits.

A trace with GPU kernels is summed up by kernel. One without is summed up by operator, with the time
of each operator itself, without that of the operators it calls. (HolisticTraceAnalysis, as of 0.5,
reads no traces without a GPU.)
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lib import intervals
from lib.trace_categories import CATEGORIES, category_of
from lib.trace_file import Span, Trace, launch_times

STEP = "training step"
GAP_EDGES_US = (0, 10, 100, 1_000, 10_000, np.inf)
# host calls that wait for the device
WAITING = re.compile(r"Synchronize")
LAUNCHING = re.compile(r"Launch")


@dataclass(frozen=True)
class KernelTime:
    """All runs of one kernel, or on a CPU of one operator; per step."""

    name: str
    category: str
    calls: float
    ms: float
    share: float
    """Of the time of all kernels."""


@dataclass(frozen=True)
class CategoryTime:
    """All kernels of one category; per step."""

    category: str
    calls: float
    """On a CPU without those that only call others of their category, as linear calls addmm."""

    ms: float
    share: float
    """Of the time of all kernels."""


@dataclass(frozen=True)
class RangeTime:
    """All ranges of one name, whose number at the end is left out; per step."""

    name: str
    calls: float
    host_ms: float
    """Time that the host spends in the range."""

    device_ms: float | None
    """Time of the kernels launched meanwhile; None on a CPU."""


@dataclass(frozen=True)
class Gaps:
    """The stretches of `shortest_us` to `longest_us` without a kernel; per step."""

    shortest_us: float
    longest_us: float
    count: float
    ms: float


@dataclass(frozen=True)
class Summary:
    """A trace in numbers. Times are ms, and times and counts are per step."""

    device: Literal["gpu", "cpu"]
    steps: int
    wall_ms: float
    """From the first step's start to the end of the last step and of its kernels, over steps."""

    busy_ms: float
    """Time in which at least one kernel (on a CPU: operator) runs."""

    idle_ms: float
    """The rest: on a GPU it waits for the host, on a CPU Python runs between operators."""

    dispatch_ms: float | None
    """Time the host is in the step and does not wait for the device; a launch that waits for room
    in a full queue (about a thousand launches) counts. None on a CPU."""

    wait_ms: float | None
    """Time the host waits for the device in calls such as cudaDeviceSynchronize; None on a CPU."""

    kernels: float
    """Kernels run, copies and fills included; on a CPU operators that do some work, and of those
    of one category that call one another the innermost."""

    launches: float | None
    """Calls that launch them: a CUDA graph is one. None on a CPU."""

    communication_ms: float
    """Time in which at least one communication kernel runs."""

    exposed_communication_ms: float
    """That part of it in which nothing else runs."""

    by_category: tuple[CategoryTime, ...]
    by_kernel: tuple[KernelTime, ...]
    """The longest first."""

    by_range: tuple[RangeTime, ...]
    """In the order of their first starts."""

    gaps: tuple[Gaps, ...]

    @property
    def overlapped_communication_ms(self) -> float:
        """Communication time hidden behind other kernels."""
        return self.communication_ms - self.exposed_communication_ms


def summarise(trace: Trace, *, step: str = STEP) -> Summary:
    """Sum up `trace` between the first and the last of its steps.

    Of what is running already when the first step starts, the time from there on counts.

    Args:
        step: the name of the range around each step. Where there is none, `ProfilerStep#N` counts,
            which `torch.profiler` makes; where there is none either, everything is one step.

    Raises:
        ValueError: the trace holds neither kernels nor operators in its steps.
    """
    # kernels in the steps may have been launched before them
    calls = trace.calls
    trace, window, num_steps = _cut_to_steps(trace, step)
    on_gpu = bool(trace.kernels)
    spans = trace.kernels if on_gpu else trace.operators
    if not spans:
        raise ValueError("the trace holds no kernels and no operators in its steps")
    host_starts = np.array(launch_times(spans, calls))
    categories = _categories(trace, spans, host_starts)
    times = _durations(spans) if on_gpu else _self_times(spans)
    # views and what only calls other operators do no work of their own
    works = np.array([on_gpu or category_of(span.name) != "other" for span in spans])
    counts = works if on_gpu else (works | (categories == "other")) & _innermost(spans)
    busy = intervals.intersection(intervals.union(_edges(spans)), np.array([window]))
    idle = intervals.gaps(busy, *window)
    is_communication = categories == "communication"
    communication = intervals.union(_edges(spans)[is_communication])
    compute = intervals.union(_edges(spans)[works & ~is_communication])
    exposed = intervals.difference(communication, compute)
    host = _host_times(trace, step) if on_gpu else (None, None, None)
    per_step = 1 / num_steps
    to_ms = per_step / 1e3
    dispatch, wait, launches = (None if x is None else x * per_step for x in host)
    return Summary(
        device="gpu" if on_gpu else "cpu",
        steps=num_steps,
        wall_ms=(window[1] - window[0]) * to_ms,
        busy_ms=intervals.total(busy) * to_ms,
        idle_ms=intervals.total(idle) * to_ms,
        dispatch_ms=dispatch,
        wait_ms=wait,
        kernels=int((works & counts).sum()) * per_step,
        launches=launches,
        communication_ms=intervals.total(communication) * to_ms,
        exposed_communication_ms=intervals.total(exposed) * to_ms,
        by_category=_by_category(categories, times, counts, per_step),
        by_kernel=_by_kernel(spans, categories, times, per_step),
        by_range=_by_range(trace, host_starts, times if on_gpu else None, per_step),
        gaps=_gap_histogram(idle, per_step),
    )


def _cut_to_steps(trace: Trace, step: str) -> tuple[Trace, tuple[float, float], int]:
    """What happens in the steps, from when to when, and the number of steps."""
    steps = [span for span in trace.ranges if span.name == step]
    steps = steps or [span for span in trace.ranges if span.name.startswith("ProfilerStep#")]
    everything = (*trace.kernels, *trace.operators, *trace.calls, *trace.ranges)
    if not everything:
        return trace, (0.0, 0.0), 1
    start = min(span.start for span in steps or everything)
    end = max(span.end for span in steps or everything)
    if steps:
        # the host may run ahead: kernels launched in the last step count, whenever they run
        is_launch = {s.correlation for s in trace.calls if start <= s.start < end}
        late = [s.end for s in trace.kernels if s.correlation in is_launch and s.start >= start]
        kernel_end = max([end, *late])
    else:
        kernel_end = end

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


def _edges(spans: Sequence[Span]) -> np.ndarray:
    """(count, 2): starts and ends in µs."""
    return np.array([(span.start, span.end) for span in spans], dtype=np.float64).reshape(-1, 2)


def _durations(spans: Sequence[Span]) -> np.ndarray:
    return np.diff(_edges(spans), axis=1)[:, 0]


def _self_times(spans: Sequence[Span]) -> np.ndarray:
    """Durations without those of the spans that stand in them on the same thread."""
    times = _durations(spans)
    own = times.copy()
    open_in_lane: dict[str, list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        stack = open_in_lane[span.lane]
        while stack and spans[stack[-1]].end <= span.start:
            stack.pop()
        if stack:
            own[stack[-1]] -= times[index]
        stack.append(index)
    return np.maximum(own, 0)


def _innermost(spans: Sequence[Span]) -> np.ndarray:
    """Whether no span that stands in it on the same thread has a name of the same category."""
    counts = np.ones(len(spans), dtype=bool)
    open_in_lane: dict[str, list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        stack = open_in_lane[span.lane]
        while stack and spans[stack[-1]].end <= span.start:
            stack.pop()
        category = category_of(span.name)
        counts[[outer for outer in stack if category_of(spans[outer].name) == category]] = False
        stack.append(index)
    return counts


def _categories(trace: Trace, spans: Sequence[Span], host_starts: np.ndarray) -> np.ndarray:
    """By name; but everything launched inside attention, or in its backward pass, is attention.

    Args:
        host_starts: when the host launched each kernel; of operators their own starts.
    """
    names = np.array([category_of(span.name) for span in spans], dtype=object)
    is_inside = intervals.contains(_attention_times(trace), host_starts)
    # fused kernels are named in the whole; a communication kernel stays one wherever it starts
    names[is_inside & (names != "communication")] = "attention"
    return names


def _attention_times(trace: Trace) -> np.ndarray:
    """When the host is in a range called `attention`, or in the gradient of an operator in one.

    Taken of all threads together: while one waits for backward, another one runs it.
    """
    forward = intervals.union(_edges([s for s in trace.ranges if s.name == "attention"]))
    if not len(forward):
        return forward
    starts, gradients = np.array(trace.backward_of).reshape(-1, 2).T
    begun = set(gradients[intervals.contains(forward, starts)])
    backward = _edges([span for span in trace.operators if span.start in begun])
    return intervals.union(np.concatenate((forward, backward)))


def _host_times(trace: Trace, step: str) -> tuple[float, float, int]:
    """ms of dispatch and of waiting, and the number of launches."""
    waiting = intervals.union(_edges([s for s in trace.calls if WAITING.search(s.name)]))
    steps = [span for span in trace.ranges if span.name == step]
    host = intervals.union(_edges(steps or [*trace.operators, *trace.calls, *trace.ranges]))
    dispatch = intervals.total(intervals.difference(host, waiting))
    launches = sum(bool(LAUNCHING.search(call.name)) for call in trace.calls)
    return dispatch / 1e3, intervals.total(waiting) / 1e3, launches


def _by_category(
    categories: np.ndarray, times: np.ndarray, counts: np.ndarray, per_step: float
) -> tuple[CategoryTime, ...]:
    total = times.sum() or 1.0
    rows = []
    for category in CATEGORIES:
        chosen = categories == category
        ms = float(times[chosen].sum()) * per_step / 1e3
        share = float(times[chosen].sum() / total)
        calls = int((chosen & counts).sum()) * per_step
        rows.append(CategoryTime(category, calls, ms, share))
    return tuple(rows)


def _by_kernel(
    spans: Sequence[Span], categories: np.ndarray, times: np.ndarray, per_step: float
) -> tuple[KernelTime, ...]:
    total = times.sum() or 1.0
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span, category, time in zip(spans, categories, times):
        found[span.name, category].append(float(time))
    rows = [
        KernelTime(
            name, category, len(t) * per_step, sum(t) * per_step / 1e3, float(sum(t) / total)
        )
        for (name, category), t in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.ms))


def _by_range(
    trace: Trace, launched: np.ndarray, kernel_times: np.ndarray | None, per_step: float
) -> tuple[RangeTime, ...]:
    found: dict[str, list[Span]] = defaultdict(list)
    for span in trace.ranges:
        found[re.sub(r"[\s#]*\d+$", "", span.name)].append(span)
    rows = []
    for name, spans in found.items():
        times = intervals.union(_edges(spans))
        device_ms = None
        if kernel_times is not None:
            inside = intervals.contains(times, launched)
            device_ms = float(kernel_times[inside].sum()) * per_step / 1e3
        host_ms = intervals.total(times) * per_step / 1e3
        rows.append(RangeTime(name, len(spans) * per_step, host_ms, device_ms))
    return tuple(rows)


def _gap_histogram(idle: np.ndarray, per_step: float) -> tuple[Gaps, ...]:
    lengths = idle[:, 1] - idle[:, 0]
    rows = []
    for shortest, longest in itertools.pairwise(GAP_EDGES_US):
        chosen = lengths[(lengths >= shortest) & (lengths < longest)]
        rows.append(
            Gaps(shortest, longest, len(chosen) * per_step, float(chosen.sum()) * per_step / 1e3)
        )
    return tuple(rows)
