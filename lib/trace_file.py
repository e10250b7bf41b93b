"""Traces of PyTorch's profiler, read into spans.

The file is JSON in the trace event format of Chrome and Perfetto, as
`torch.profiler.profile.export_chrome_trace` writes it.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# an event's category -> what it is here
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
    """One stretch of a trace."""

    name: str
    start: float
    """In µs, as `end`."""

    end: float

    lane: str
    """The host thread, or the GPU and its stream."""

    correlation: int | None = None
    """What a kernel has in common with the call that launched it."""


@dataclass(frozen=True)
class Trace:
    """The spans of a trace by kind, each kind in the order of their starts."""

    kernels: tuple[Span, ...]
    """On a GPU, copies and fills included."""

    operators: tuple[Span, ...]
    """PyTorch's operators on the host."""

    calls: tuple[Span, ...]
    """Calls of CUDA's runtime and driver on the host."""

    ranges: tuple[Span, ...]
    """What `lib.profiling.annotate` and `torch.profiler.record_function` named, on the host."""

    backward_of: tuple[tuple[float, float], ...]
    """Starts of a forward operator and of its gradient's operator, in µs."""


def launch_times(spans: Iterable[Span], calls: Iterable[Span]) -> list[float]:
    """When the host asked for each of `spans`, in µs: its own start where no call is known for it.

    A kernel may run when the host has long left the range in which it was launched.
    """
    launched = {call.correlation: call.start for call in calls if call.correlation}
    return [launched.get(span.correlation, span.start) for span in spans]


def read_trace(path: str | os.PathLike) -> Trace:
    """The trace in the JSON file at `path`, which may be compressed (`.gz`).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no trace of PyTorch's profiler.
    """
    path = Path(path)
    data = path.read_bytes()
    try:
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        return parse_trace(content["traceEvents"])
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, OSError) as error:
        raise ValueError(
            f"{path} is no trace ({type(error).__name__}: {error}); right is: what "
            "torch.profiler.profile.export_chrome_trace writes"
        ) from error


def parse_trace(events: Iterable[dict[str, Any]]) -> Trace:
    """The trace made of `events` in Chrome's trace event format, with times in µs."""
    spans: dict[str, list[Span]] = {kind: [] for kind in KINDS.values()}
    ends: dict[str, dict[Any, float]] = {"s": {}, "f": {}}
    for event in events:
        kind, phase = KINDS.get(event.get("cat")), event.get("ph")
        if kind and phase == "X":
            # communication on a CPU runs in a thread of its own, and is noted as a range there
            kind = "operator" if event["name"].startswith("gloo:") else kind
            start = float(event["ts"])
            args = event.get("args") or {}
            lane = f"{event.get('pid')}/{event.get('tid')}"
            span = Span(
                str(event["name"]),
                start,
                start + float(event.get("dur", 0)),
                lane,
                args.get("correlation"),
            )
            spans[kind].append(span)
        elif event.get("cat") == "fwdbwd" and phase in ends:
            ends[phase][event["id"]] = float(event["ts"])
    ordered = {kind: tuple(sorted(found, key=_nesting)) for kind, found in spans.items()}
    links = tuple((ends["s"][i], ends["f"][i]) for i in ends["s"].keys() & ends["f"].keys())
    return Trace(ordered["kernel"], ordered["operator"], ordered["call"], ordered["range"], links)


def _nesting(span: Span) -> tuple[float, float]:
    """Orders spans by start, and those that start together from the outermost in."""
    return span.start, -span.end
