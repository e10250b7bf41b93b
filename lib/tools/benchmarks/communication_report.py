"""Tables and figure of the communication benchmark: times against the α–β formula, from records."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from lib.core.figures import COLORS, INK, MARKERS, save_figure
from lib.core.records import Record
from lib.profiling.collectives import Link, bus_bandwidth_gbs, fit_link, predicted_ms
from lib.tools.benchmarks.multi_rank_report import panels
from lib.tools.benchmarks.sections import Section, Table, measured_on, newest, write_csv
from lib.tools.benchmarks.sections import write_report as write_sections

# Collective -> its name in reports, in the order in which series are drawn.
NAMES = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "broadcast": "broadcast",
}
COLUMNS = {
    "name": "collective",
    "size": "size",
    "figures.status": "status",
    "figures.median_ms": "median (ms)",
    "figures.iqr_ms": "IQR (ms)",
    "figures.samples": "samples",
    "figures.algorithm_bandwidth_gbs": "algorithm bandwidth (GB/s)",
    "figures.bus_bandwidth_gbs": "bus bandwidth (GB/s)",
    "predicted_ms": "by formula (ms)",
    "formula_over_measured": "formula / measured",
}
# GB/s that a GPU sends over NVLink: half of the sum of both directions in NVIDIA's architecture
# white papers (V100 300, A100 600, H100 900) and H200's datasheet (900). Keys are as in
# lib.core.hardware.PEAKS. Without a switch, some of the links go to each of the other GPUs.
NVLINK_GBS = {
    "V100-SXM2-16GB": 150.0,
    "V100-SXM2-32GB": 150.0,
    "A100-SXM4-40GB": 300.0,
    "A100-SXM4-80GB": 300.0,
    "H100 80GB HBM3": 450.0,
    "H200": 450.0,
}
NOTE = """\
Each sample is that of the slowest rank: the mean of calls that follow one another, including what
the host needs to start them. Size: all-reduce and broadcast, the tensor on each rank;
reduce-scatter, the input; all-gather, the output. Algorithm bandwidth is size over time; bus
bandwidth is that times 2(n-1)/n for all-reduce, (n-1)/n for reduce-scatter and all-gather and 1 for
broadcast, with n ranks (nccl-tests). The result of each row was checked on all ranks. The formula
is a ring's: (n-1) messages one after another, for all-reduce twice as many, each of which takes a
latency and its bytes over the bandwidth. Both are fitted to the rows (least squares of the
logarithm of formula / measured).
"""
GLOO_NOTE = """
gloo's reduce-scatter is an all-reduce of which each rank keeps a part, so its bus bandwidth comes
out at half or less. Processes of one host exchange data through its memory and share its cores:
that says nothing of a network.
"""


def write_report(records: list[Record], output: Path) -> None:
    """Write communication_benchmark.csv, .md and .png from the newest record of each row.

    There is no figure where nothing was measured.
    """
    order = list(NAMES)

    def place(record: Record) -> tuple:
        config = record["config"]
        return group_of(record), order.index(config["collective"]), config["num_bytes"]

    records = sorted(newest(records), key=place)
    is_gloo = any(record["config"]["backend"] == "gloo" for record in records)
    intro = f"{measured_on(records)}.\n{NOTE}"
    sections = [Section("Communication", [intro, GLOO_NOTE if is_gloo else ""], level=1)]
    rows = []
    for group in group_records(records):
        links = fitted_links(group)
        fitted = [with_formula(record, links) for record in group]
        fits = link_table(links, fitted)
        parts = [Table(fits) if fits else "One size alone gives no fit.", Table(fitted, COLUMNS)]
        sections.append(Section(group_name(group[0]), parts))
        rows += fitted
    stem = output / "communication_benchmark"
    write_sections(f"{stem}.md", sections)
    write_csv(f"{stem}.csv", rows)
    if any(record["figures"]["status"] == "ok" for record in records):
        save_communication_figure(records, f"{stem}.png")


def group_of(record: Mapping[str, Any]) -> tuple:
    """The fields that are equal in records of the same ranks on the same link."""
    fields = ("backend", "ranks", "hosts", "dtype")
    return (record["device"], *(record["config"][key] for key in fields))


def group_records(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each `group_of`, in the order in which they appear."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(group_of(record), []).append(record)
    return list(groups.values())


def group_name(record: Mapping[str, Any]) -> str:
    """The ranks of a record in words, such as `2 × NVIDIA H200, NCCL, float32`."""
    config = record["config"]
    ranks, hosts = config["ranks"], config["hosts"]
    if config["backend"] == "nccl":
        where = f"{ranks} × {record['device']}" + (f" on {hosts} hosts" if hosts > 1 else "")
        return f"{where}, NCCL, {config['dtype']}"
    where = f"on {hosts} hosts' CPUs" if hosts > 1 else "on one host's CPU"
    return f"{ranks} processes {where} over gloo, {config['dtype']}"


def size_name(num_bytes: int) -> str:
    """Bytes as `64 KiB`, to three digits."""
    power = min(3, max(0, math.floor(math.log2(num_bytes) / 10)))
    return f"{num_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def fitted_links(records: Sequence[Mapping[str, Any]]) -> dict[str, Link | None]:
    """Collective -> the link that explains its times best; the records must be of one group."""
    times: dict[str, list] = {}
    for record in records:
        if record["figures"]["status"] == "ok":
            config = record["config"]
            point = (config["num_bytes"], record["figures"]["median_ms"])
            times.setdefault(config["collective"], []).append(point)
    ranks = records[0]["config"]["ranks"]
    return {name: fit_link(name, ranks, times[name]) for name in NAMES if name in times}


def with_formula(record: Record, links: Mapping[str, Link | None]) -> Record:
    """`record` with its names in a table, and the formula's time with its collective's link."""
    config = record["config"]
    collective, num_bytes = config["collective"], config["num_bytes"]
    row = record | {"name": NAMES[collective], "size": size_name(num_bytes)}
    link = links.get(collective)
    if link is None or record["figures"]["status"] != "ok":
        return row
    cost = (collective, num_bytes, config["ranks"], link.latency_us, link.bandwidth_gbs)
    predicted = predicted_ms(*cost)
    measured = record["figures"]["median_ms"]
    return row | {"predicted_ms": predicted, "formula_over_measured": predicted / measured}


def link_table(links: Mapping[str, Link | None], rows: Sequence[Record]) -> list[dict[str, Any]]:
    """Latency and bandwidth of each fit, and how far its formula is off."""
    table = []
    for name, link in links.items():
        fitted = [r for r in rows if r["config"]["collective"] == name]
        ratios = [r["formula_over_measured"] for r in fitted if "formula_over_measured" in r]
        if link is not None:
            line = {"fitted": NAMES[name], "latency a message (µs)": link.latency_us}
            line |= {"bandwidth (GB/s)": link.bandwidth_gbs}
            table.append(line | {"formula / measured, least": min(ratios), "most": max(ratios)})
    return table


def save_communication_figure(records: Sequence[Record], path: str | os.PathLike) -> Path:
    """Bus bandwidth by size, a panel for each group of ranks that has a row of status `ok`."""
    groups = group_records([r for r in records if r["figures"]["status"] == "ok"])
    with panels(len(groups), columns=2, width=7.2, height=5.0) as (figure, grid):
        for axes, group in zip(grid, groups):
            draw_communication(axes, group)
        return save_figure(figure, path)


def draw_communication(axes: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    """A point for each bus bandwidth that one group of ranks measured, and a line for each fit."""
    links, first = fitted_links(records), records[0]
    ranks, highest = first["config"]["ranks"], 0.0
    sizes = sorted({record["config"]["num_bytes"] for record in records})
    for name, link in links.items():
        index = list(NAMES).index(name)
        points = sorted(
            (r["config"]["num_bytes"], r["figures"]["bus_bandwidth_gbs"])
            for r in records
            if r["config"]["collective"] == name and r["figures"]["status"] == "ok"
        )
        highest = max(highest, *(speed for _, speed in points))
        label = NAMES[name]
        if link is not None:
            label += f": {link.latency_us:.3g} µs, {link.bandwidth_gbs:.3g} GB/s"
            _draw_fit(axes, name, ranks, link, sizes, color=COLORS[index])
        style = {"color": COLORS[index], "marker": MARKERS[index]}
        axes.plot(*zip(*points), linestyle="", label=label, **style)
    peak = nvlink_gbs(first)
    if peak is not None:
        axes.axhline(peak, color=INK, linewidth=1.0, linestyle="--", marker="")
        where = {"transform": axes.get_yaxis_transform(), "va": "bottom", "fontsize": "small"}
        axes.text(0.01, peak, f"NVLink, one direction: {peak:.0f} GB/s", **where)
    _label_sizes(axes, sizes)
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
    span = np.geomspace(sizes[0], sizes[-1], 201)
    times = [predicted_ms(collective, x, ranks, link.latency_us, link.bandwidth_gbs) for x in span]
    speeds = [bus_bandwidth_gbs(collective, x, ranks, ms) for x, ms in zip(span, times)]
    axes.plot(span, speeds, color=color, marker="", linewidth=1.2, alpha=0.8)


def _label_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    """A logarithmic axis of sizes with at most six labels, since more would touch."""
    axes.set_xscale("log", base=2)
    powers = range(math.ceil(math.log2(sizes[0])), math.floor(math.log2(sizes[-1])) + 1)
    shown = [2**power for power in powers[:: math.ceil(len(powers) / 6) or 1]] or sizes
    axes.set_xticks(shown, [size_name(size) for size in shown])
    axes.minorticks_off()


def nvlink_gbs(record: Mapping[str, Any]) -> float | None:
    """GB/s that a GPU of the record sends over NVLink; None where it is unknown or not used."""
    config = record["config"]
    if config["backend"] != "nccl" or config["hosts"] > 1:
        return None
    return NVLINK_GBS.get(re.sub(r"^(NVIDIA |Tesla )+", "", record["device"]))
