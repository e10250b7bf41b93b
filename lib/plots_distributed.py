"""Figures of communication: bandwidth by size against the formula, and overlap with backward."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from lib.communication_costs import (
    NVLINK_GBS,
    Link,
    ScalingPrediction,
    bus_bandwidth_gbs,
    fit_link,
    predicted_ms,
)
from lib.plots import (
    BLUE,
    COLORS,
    INK,
    MARKERS,
    PAPER,
    SKY,
    VERMILLION,
    house_figure,
    save_figure,
)

# In the order in which series are drawn.
NAMES = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "broadcast": "broadcast",
}
GROUP = ("backend", "ranks", "hosts", "dtype")
# Of more buckets, the gaps between would hide them.
MOST_GAPS = 100


def group_of(record: Mapping[str, Any]) -> tuple:
    """What records must share to be about the same ranks on the same link."""
    return (record["device"], *(record["config"][key] for key in GROUP))


def group_name(record: Mapping[str, Any]) -> str:
    """Which ranks a record is about, such as `2 × NVIDIA H200, NCCL, float32`."""
    config = record["config"]
    ranks, hosts = config["ranks"], config["hosts"]
    if config["backend"] == "nccl":
        where = f"{ranks} × {record['device']}" + (f" on {hosts} hosts" if hosts > 1 else "")
        return f"{where}, NCCL, {config['dtype']}"
    where = f"on {hosts} hosts' CPUs" if hosts > 1 else "on one host's CPU"
    return f"{ranks} processes {where} over gloo, {config['dtype']}"


def fitted_links(records: Sequence[Mapping[str, Any]]) -> dict[str, Link | None]:
    """The link that explains the records of each collective; they must be of one group."""
    times: dict[str, list] = {}
    for record in records:
        if record["figures"]["status"] == "ok":
            config = record["config"]
            point = (config["num_bytes"], record["figures"]["median_ms"])
            times.setdefault(config["collective"], []).append(point)
    ranks = records[0]["config"]["ranks"]
    return {name: fit_link(name, ranks, times[name]) for name in NAMES if name in times}


def save_communication_figure(
    records: Sequence[Mapping[str, Any]], path: str | os.PathLike
) -> Path:
    """Bus bandwidth by size from records of `python -m lib benchmark communication`.

    There is a panel for each group of ranks that has a row of status `ok`.
    """
    groups: dict[tuple, list] = {}
    for record in records:
        if record["figures"]["status"] == "ok":
            groups.setdefault(group_of(record), []).append(record)
    columns = min(2, len(groups))
    rows = math.ceil(len(groups) / columns)
    size = {"width": 7.2 * columns, "height": 5.0 * rows}
    with house_figure(nrows=rows, ncols=columns, squeeze=False, **size) as (figure, grid):
        for axes in grid.flat[len(groups) :]:
            axes.remove()
        for axes, chosen in zip(grid.flat, groups.values()):
            draw_communication(axes, chosen)
        return save_figure(figure, path)


def draw_communication(axes: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    """A point for each measured bus bandwidth of one group of ranks, and a line for each fit."""
    links, first = fitted_links(records), records[0]
    ranks, highest = first["config"]["ranks"], 0.0
    sizes = sorted({record["config"]["num_bytes"] for record in records})
    for name, link in links.items():
        place = list(NAMES).index(name)
        rows = [r for r in records if r["config"]["collective"] == name]
        points = sorted(
            (r["config"]["num_bytes"], r["figures"]["bus_bandwidth_gbs"])
            for r in rows
            if r["figures"]["status"] == "ok"
        )
        highest = max(highest, *(y for _, y in points))
        style = {"color": COLORS[place], "marker": MARKERS[place]}
        label = NAMES[name]
        if link is not None:
            label += f": {link.latency_us:.3g} µs, {link.bandwidth_gbs:.3g} GB/s"
            _draw_fit(axes, name, ranks, link, sizes, color=COLORS[place])
        axes.plot(*zip(*points), linestyle="", label=label, **style)
    peak = nvlink_gbs(first)
    if peak is not None:
        axes.axhline(peak, color=INK, linewidth=1.0, linestyle="--", marker="")
        where = {"transform": axes.get_yaxis_transform(), "va": "bottom", "fontsize": "small"}
        axes.text(0.01, peak, f"NVLink, one direction: {peak:.0f} GB/s", **where)
    axes.set_xscale("log", base=2)
    powers = range(math.ceil(math.log2(sizes[0])), math.floor(math.log2(sizes[-1])) + 1)
    # six powers of two at most, since more labels would touch
    shown = [2**power for power in powers[:: math.ceil(len(powers) / 6) or 1]] or sizes
    axes.set_xticks(shown, [size_name(size) for size in shown])
    axes.minorticks_off()
    title = group_name(first)
    if first["config"]["backend"] != "nccl":
        title += f"\n{first['device']}"
    axes.set(ylim=(0, max(highest, peak or 0) * 1.08), title=title)
    axes.set(xlabel="size of the whole tensor", ylabel="bus bandwidth (GB/s)")
    words = "points: measured; lines: the formula,\nwith a message's latency and a bandwidth of"
    where = {"loc": "upper left", "bbox_to_anchor": (0.0, 0.91)}
    legend = axes.legend(title=words, fontsize="small", title_fontsize="small", **where)
    legend.set_alignment("left")


def _draw_fit(
    axes: Axes, collective: str, ranks: int, link: Link, sizes: Sequence[int], color: str
) -> None:
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])
    span = [2 ** (low + (high - low) * step / 200) for step in range(201)]
    speeds = []
    for size in span:
        time = predicted_ms(collective, size, ranks, link.latency_us, link.bandwidth_gbs)
        speeds.append(bus_bandwidth_gbs(collective, size, ranks, time))
    axes.plot(span, speeds, color=color, marker="", linewidth=1.2, alpha=0.8)


def nvlink_gbs(record: Mapping[str, Any]) -> float | None:
    """GB/s that a GPU of the record can send over NVLink; None where it is not known or used."""
    config = record["config"]
    if config["backend"] != "nccl" or config["hosts"] > 1:
        return None
    return NVLINK_GBS.get(re.sub(r"^(NVIDIA |Tesla )+", "", record["device"]))


def size_name(num_bytes: int) -> str:
    """Bytes as `64 KiB`, to three digits."""
    power = min(3, max(0, math.floor(math.log2(num_bytes) / 10)))
    return f"{num_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def draw_overlap(axes: Axes, prediction: ScalingPrediction, *, backward_ms: float) -> None:
    """Backward and the all-reduces of its buckets over time, their exposed part in another colour.

    `prediction` is of `lib.communication_costs.predict_scaling` with the same `backward_ms`.
    """
    few = len(prediction.buckets) <= MOST_GAPS
    edge = {"edgecolor": PAPER, "linewidth": 0.6} if few else {"linewidth": 0}
    axes.broken_barh([(0, backward_ms)], (0.6, 0.8), color=BLUE, label="backward")
    hidden, exposed = [], []
    for bucket in prediction.buckets:
        cut = min(max(bucket.start_ms, backward_ms), bucket.end_ms)
        hidden.append((bucket.start_ms, cut - bucket.start_ms))
        exposed.append((cut, bucket.end_ms - cut))
    for spans, color, label in (
        (hidden, SKY, "all-reduce, hidden"),
        (exposed, VERMILLION, "all-reduce, exposed"),
    ):
        spans = [span for span in spans if span[1] > 0]
        axes.broken_barh(spans, (-0.4, 0.8), facecolor=color, label=label, **edge)
    axes.set_yticks([1, 0], ["compute", "communicate"])
    axes.set(xlabel="time from the start of backward (ms)", ylim=(-0.6, 1.6))
    axes.set_xlim(0, max(backward_ms, prediction.buckets[-1].end_ms) * 1.03)
    axes.grid(visible=False, axis="y")
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(fontsize=9, ncols=3, columnspacing=1.0, handlelength=1.2, **place)
