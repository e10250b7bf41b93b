"""A profile's summary as the figures of a record, and as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lib.report import to_markdown
from lib.trace_summary import Summary

SHOWN_KERNELS = 15
NAME_WIDTH = 72


def figures_of(summary: Summary, memory: Mapping[str, int] | None = None) -> dict[str, Any]:
    """What a record of the profile holds; times are ms a step.

    Args:
        memory: bytes of each category at the step's peak.
    """
    plain = ("wall_ms", "busy_ms", "idle_ms", "dispatch_ms", "wait_ms", "kernels", "launches")
    communication = ("communication_ms", "exposed_communication_ms", "overlapped_communication_ms")
    figures = {
        "task": "profile",
        "profiled": summary.device,
        "steps": summary.steps,
        **{name: getattr(summary, name) for name in (*plain, *communication)},
        "ms_by_category": {row.category: row.ms for row in summary.by_category},
        "share_by_category": {row.category: row.share for row in summary.by_category},
        "calls_by_category": {row.category: row.calls for row in summary.by_category},
        "ranges": [dataclasses.asdict(row) for row in summary.by_range],
        "kernel_times": [dataclasses.asdict(row) for row in summary.by_kernel[:SHOWN_KERNELS]],
    }
    if memory is not None:
        figures["peak_memory_bytes"] = sum(memory.values())
        figures["peak_bytes_by_category"] = dict(memory)
    return figures


def summary_markdown(summary: Summary, memory: Mapping[str, int] | None = None) -> str:
    """Tables of the summary, all values for one step; `memory` as in `figures_of`."""
    unit = "kernel" if summary.device == "gpu" else "operator"
    parts = [
        to_markdown(_overview(summary), {"what": "a step", "value": "", "unit": "unit"}),
        f"## Time by category\n\n{_categories(summary, unit)}",
        f"## Time by {unit}\n\n{_kernels(summary, unit)}",
    ]
    if summary.by_range:
        parts.append(f"## Time by range\n\n{_ranges(summary)}")
    parts.append(f"## Gaps between {unit}s\n\n{_gaps(summary)}")
    if memory is not None:
        rows = [{"category": name, "MB": size / 1e6} for name, size in memory.items()]
        rows.append({"category": "in all", "MB": sum(memory.values()) / 1e6})
        parts.append(f"## Memory at the step's peak\n\n{to_markdown(rows)}")
    return "\n".join(parts)


def _overview(summary: Summary) -> list[dict[str, Any]]:
    on_gpu = summary.device == "gpu"
    share = 100 / summary.wall_ms if summary.wall_ms else 0.0
    rows: list[tuple[str, float | None, str]] = [
        ("wall time", summary.wall_ms, "ms"),
        ("GPU busy" if on_gpu else "in operators", summary.busy_ms, "ms"),
        ("… of the wall time", summary.busy_ms * share, "%"),
        ("GPU idle" if on_gpu else "between operators", summary.idle_ms, "ms"),
        ("host dispatches", summary.dispatch_ms, "ms"),
        ("host waits for the GPU", summary.wait_ms, "ms"),
        ("kernels" if on_gpu else "operators that do work", _count(summary.kernels), ""),
        ("launches", _count(summary.launches), ""),
    ]
    if summary.communication_ms:
        overlapped = summary.overlapped_communication_ms / summary.communication_ms
        rows += [
            ("communication", summary.communication_ms, "ms"),
            ("… behind other kernels", overlapped * 100, "%"),
            ("… exposed", summary.exposed_communication_ms, "ms"),
        ]
    return [
        {"what": what, "value": value, "unit": unit}
        for what, value, unit in rows
        if value is not None
    ]


def _categories(summary: Summary, unit: str) -> str:
    rows = [
        {"category": row.category, "calls": _count(row.calls), "ms": row.ms, "%": row.share * 100}
        for row in summary.by_category
        if row.calls
    ]
    return to_markdown(rows, {"category": "category", "calls": f"{unit}s", "ms": "ms", "%": "%"})


def _kernels(summary: Summary, unit: str) -> str:
    rows = [
        {
            unit: shortened(row.name),
            "category": row.category,
            "calls": _count(row.calls),
            "ms": row.ms,
            "%": row.share * 100,
        }
        for row in summary.by_kernel[:SHOWN_KERNELS]
    ]
    return to_markdown(rows)


def _ranges(summary: Summary) -> str:
    columns = {"name": "range", "calls": "calls", "host_ms": "host (ms)"}
    if summary.device == "gpu":
        columns["device_ms"] = "kernels launched in it (ms)"
    rows = [dataclasses.asdict(row) | {"calls": _count(row.calls)} for row in summary.by_range]
    return to_markdown(rows, columns)


def _gaps(summary: Summary) -> str:
    rows = [
        {
            "length": f"{row.shortest_us:,.0f} to {row.longest_us:,.0f} µs"
            if row.longest_us < float("inf")
            else f"{row.shortest_us:,.0f} µs or more",
            "gaps": _count(row.count),
            "ms": row.ms,
        }
        for row in summary.gaps
    ]
    return to_markdown(rows)


def _count(value: float | None) -> float | None:
    """A mean that is whole as a whole number."""
    return int(value) if value is not None and float(value).is_integer() else value


def shortened(name: str) -> str:
    """A kernel's name without C++'s return type and namespaces, cut to a table's width."""
    name = (
        name.removeprefix("void ")
        .replace("at::native::", "")
        .replace("(anonymous namespace)::", "")
    )
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…"
