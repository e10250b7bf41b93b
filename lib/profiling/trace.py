"""Traces of PyTorch's profiler: read into spans, sorted by kind of work, and counted as intervals.

A trace is a JSON file that `torch.profiler.profile.export_chrome_trace` wrote, in the trace event
format of Chrome and Perfetto. Below: spans and reading them, then the category of work that a name
means, then the arithmetic of time intervals.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

# category of a trace event -> kind of span
KINDS = {
    "kernel": "kernel",
    "gpu_memcpy": "kernel",
    "gpu_memset": "kernel",
    "cpu_op": "operator",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "user_annotation": "range",
}


@dataclass(frozen=True)
class Span:
    """A named stretch of time in a trace."""

    name: str

    start: float
    """Start in µs."""

    end: float
    """End in µs."""

    lane: str
    """The host thread, or the GPU and its stream."""

    correlation: int | None = None
    """Number shared by a kernel and the call that launched it."""


@dataclass(frozen=True)
class Trace:
    """The spans of a trace by kind, each kind ordered by start."""

    kernels: tuple[Span, ...]
    """On a GPU, including copies and fills."""

    operators: tuple[Span, ...]
    """PyTorch's operators on the host."""

    calls: tuple[Span, ...]
    """Calls of CUDA's runtime and driver on the host."""

    ranges: tuple[Span, ...]
    """Ranges of `lib.core.ranges.annotate` and `torch.profiler.record_function`, on the host."""

    backward_of: tuple[tuple[float, float], ...]
    """Pairs of starts in µs: a forward operator's and that of its gradient's operator."""


def read_trace(path: str | os.PathLike) -> Trace:
    """Read the trace in the JSON file at `path`, which may be compressed (`.gz`)."""
    path = Path(path)
    data = path.read_bytes()
    try:
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        return parse_trace(content["traceEvents"])
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, OSError) as error:
        raise ValueError(
            f"{path} must be a trace written by torch.profiler.profile.export_chrome_trace, "
            f"got {type(error).__name__}: {error}"
        ) from error


def events_of(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    """Return what a profiler has recorded, in Chrome's trace event format."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_bytes())["traceEvents"]


def parse_trace(events: Iterable[dict[str, Any]]) -> Trace:
    """Build a trace from `events` in Chrome's trace event format, times in µs."""
    spans: dict[str, list[Span]] = {kind: [] for kind in KINDS.values()}
    ends: dict[str, dict[Any, float]] = {"s": {}, "f": {}}
    for event in events:
        kind, phase = KINDS.get(event.get("cat")), event.get("ph")
        if kind and phase == "X":
            # on a CPU, communication runs in a thread of its own and is recorded as a range there
            kind = "operator" if event["name"].startswith("gloo:") else kind
            start = float(event["ts"])
            end = start + float(event.get("dur", 0))
            lane = f"{event.get('pid')}/{event.get('tid')}"
            correlation = (event.get("args") or {}).get("correlation")
            spans[kind].append(Span(str(event["name"]), start, end, lane, correlation))
        elif event.get("cat") == "fwdbwd" and phase in ends:
            ends[phase][event["id"]] = float(event["ts"])
    # spans that start together: the outermost first
    ordered = {
        kind: tuple(sorted(found, key=lambda span: (span.start, -span.end)))
        for kind, found in spans.items()
    }
    links = tuple((ends["s"][i], ends["f"][i]) for i in ends["s"].keys() & ends["f"].keys())
    return Trace(ordered["kernel"], ordered["operator"], ordered["call"], ordered["range"], links)


def phases_of(ranges: Sequence[Span]) -> list[Span]:
    """Return the outermost ranges inside the longest one, which is the whole step."""
    if not ranges:
        return []
    whole = max(ranges, key=lambda span: span.end - span.start)
    phases: list[Span] = []
    for span in ranges:
        inside = span is not whole and whole.start <= span.start and span.end <= whole.end
        if inside and not (phases and span.end <= phases[-1].end):
            phases.append(span)
    return phases


def step_events(events: Iterable[dict[str, Any]], step: str) -> list[dict[str, Any]]:
    """Return the events of one step that a drawing needs, with times in µs from its start.

    Of several steps, the middle one. Kept are ranges, calls of CUDA, kernels launched in the step
    and those launched before that still run in it; operators only where there are no kernels. The
    result is small enough to commit, and Perfetto reads it, too.

    Raises:
        ValueError: there is no range called `step`.
    """
    events = [event for event in events if event.get("ph") == "X" and event.get("cat") in KINDS]
    steps = [e for e in events if KINDS[e["cat"]] == "range" and e["name"] == step]
    if not steps:
        raise ValueError(f"the trace has no range {step!r}")
    steps.sort(key=lambda event: float(event["ts"]))
    chosen = steps[len(steps) // 2]
    start = float(chosen["ts"])
    end = start + float(chosen["dur"])

    def correlation(event: dict[str, Any]) -> int | None:
        return (event.get("args") or {}).get("correlation")

    inside = [e for e in events if start <= float(e["ts"]) < end and KINDS[e["cat"]] != "kernel"]
    launched = {correlation(e) for e in inside if KINDS[e["cat"]] == "call"} - {None}
    on_gpu = [event for event in events if KINDS[event["cat"]] == "kernel"]
    kernels = [event for event in on_gpu if correlation(event) in launched]
    # the host runs ahead: when it begins a step, the GPU may still be busy with the one before
    first = min((float(event["ts"]) for event in kernels), default=start)
    kernels += [e for e in on_gpu if start < float(e["ts"]) + float(e["dur"]) <= first]
    unwanted = "operator" if kernels else None
    kept = [*(e for e in inside if KINDS[e["cat"]] != unwanted), *kernels]
    return [
        {key: event[key] for key in ("ph", "cat", "name", "pid", "tid")}
        | {"ts": round(float(event["ts"]) - start, 3), "dur": float(event.get("dur", 0))}
        | ({"args": {"correlation": number}} if (number := correlation(event)) else {})
        for event in sorted(kept, key=lambda event: float(event["ts"]))
    ]


def launch_times(spans: Iterable[Span], calls: Iterable[Span]) -> list[float]:
    """Return when the host launched each of `spans`, in µs; its own start if no call is known.

    A kernel may run long after the host has left the range in which it was launched.
    """
    launched = {call.correlation: call.start for call in calls if call.correlation}
    return [launched.get(span.correlation, span.start) for span in spans]


def edges(spans: Iterable[Span]) -> np.ndarray:
    """Return the start and end of each span in µs, (count, 2)."""
    return _array((span.start, span.end) for span in spans)


CATEGORIES = ("matmul", "attention", "elementwise", "communication", "copy", "other")
# The first pattern found in a name decides. Names are those of CUDA kernels, of operators, and of
# Triton kernels, this library's and torch.compile's. "elementwise" is everything bound by memory,
# including reductions, norms, softmax, loss and optimizer.
RULES = tuple(
    (category, re.compile(pattern, re.IGNORECASE))
    for category, pattern in (
        # the host only requests it
        ("other", r"^c10d::"),
        ("communication", r"nccl|^gloo:|all_?reduce|all_?gather|reduce_?scatter"),
        # `torch.compile` names a kernel after everything it fuses, including attention's inputs
        ("elementwise", r"^triton_(poi|red|per|for)_"),
        (
            "attention",
            r"flash|fmha|attention|sdpa|dot_do_o|convert_dq"
            r"|^_forward_kernel|^_backward_(queries|keys)_kernel",
        ),
        (
            "matmul",
            r"gemm|gemv|xmma|cutlass|nvjet|cublas|splitk|matmul_kernel|triton_tem"
            r"|^(aten|mkldnn|mkl|inductor|prims)::_*(\w*linear\w*|addmm|mm|bmm|baddbmm|addmv_?|mv|dot)"
            r"(_out)?$",
        ),
        ("copy", r"^memcpy|^memset|^aten::(copy_|fill_|cat)$"),
        # views, allocations, and operators that only call others
        (
            "other",
            r"^aten::(_?\w*view\w*|as_strided\w*|reshape|_reshape_alias|t|transpose|permute"
            r"|expand\w*|select|slice|split\w*|chunk|unbind|un?flatten|(un)?squeeze|narrow|detach_?"
            r"|alias|lift_fresh|to|empty\w*|new_empty\w*|resize_?|set_|item|_local_scalar_dense"
            r"|is_\w+|result_type|clone|zero_|zeros\w*|ones\w*|stack|_to_copy|contiguous"
            r"|matmul|einsum|linear)$",
        ),
        ("elementwise", r"^aten::|at::native|cub::|kernel|triton_|CompiledFxGraph|cpp_fused"),
    )
)


@functools.cache
def category_of(name: str) -> str:
    """Return the one of `CATEGORIES` that the name of a kernel or operator means."""
    return next((category for category, pattern in RULES if pattern.search(name)), "other")


# Intervals are float arrays of shape (count, 2), each row a start and an end. The functions below
# return them disjoint, in ascending order, and none of them empty.


def union(spans: Iterable[tuple[float, float]] | np.ndarray) -> np.ndarray:
    """Return the times in at least one of `spans`, which may overlap and touch.

    Example:
        >>> union([(4, 6), (0, 2), (1, 3), (3, 3.5)]).tolist()
        [[0.0, 3.5], [4.0, 6.0]]
    """
    spans = _array(spans)
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    # how far the previous ones reach: a start beyond that begins a new interval
    reach = np.maximum.accumulate(spans[:, 1])
    begins = np.concatenate(([True], spans[1:, 0] > reach[:-1]))
    lasts = np.concatenate((np.flatnonzero(begins)[1:] - 1, [len(spans) - 1]))
    return np.stack((spans[begins, 0], reach[lasts]), axis=1)


def intersection(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the times in both of two sets of intervals, each as from `union`."""
    return _overlay(first, second, state=3)


def difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the times in `first` but not in `second`, each as from `union`."""
    return _overlay(first, second, state=1)


def _overlay(first: np.ndarray, second: np.ndarray, *, state: int) -> np.ndarray:
    """Return the times that are in the first only (state 1), the second only (2) or both (3)."""
    times = np.concatenate((first.ravel(), second.ravel()))
    changes = np.concatenate((np.tile([1, -1], len(first)), np.tile([2, -2], len(second))))
    order = np.argsort(times)
    times, states = times[order], np.cumsum(changes[order])
    return union(np.stack((times[:-1], times[1:]), axis=1)[states[:-1] == state])


def total(intervals: np.ndarray) -> float:
    """Return the summed length of disjoint `intervals`."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def contains(intervals: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return for each of `times` whether one of `intervals` contains it, starts included: bool."""
    times = np.asarray(times, dtype=np.float64)
    if not len(intervals):
        return np.zeros(times.shape, dtype=bool)
    index = np.searchsorted(intervals[:, 0], times, side="right") - 1
    return (index >= 0) & (times < intervals[index, 1])


def _array(spans: Iterable[tuple[float, float]] | np.ndarray) -> np.ndarray:
    spans = spans if isinstance(spans, np.ndarray) else list(spans)
    return np.asarray(spans, dtype=np.float64).reshape(-1, 2)
