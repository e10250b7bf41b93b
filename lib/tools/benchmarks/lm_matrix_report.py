"""Tables and figures of the language-model matrix, from its records alone."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lib.core.figures import (
    BLACK,
    BLUE,
    GRAY,
    GREEN,
    MARKERS,
    PURPLE,
    SKY,
    VERMILLION,
    house_figure,
    save_figure,
)
from lib.core.records import Record, format_value
from lib.tools.benchmarks.multi_rank_report import (
    Setting,
    failure_list,
    gpu_settings,
    group_rows,
    panels,
    setting_intro,
    setting_title,
    time_ratio,
    training_rows,
)
from lib.tools.benchmarks.sections import Section, Table, write_csv
from lib.tools.benchmarks.sections import write_report as write_sections

NOTE = """Each rank is a process with a part of the batch; `none` is the baseline, where each rank
trains a model of its own while the others do the same. Wrappers are interleaved, an epoch at a
time. An epoch is a sample, its time the ranks' mean; tokens/s are those of all ranks together.
Efficiency is the time of `none` with the same kernel over the wrapper's, epoch by epoch, and
overhead the peak memory of a rank beyond that of `none`. Communication is the time in which
gradients travel, including waiting for other ranks, and exposed the part of it in which nothing
else runs, both from a trace of a few further steps: of a GPU's kernels, or of a CPU's operators.
Loss difference: the largest one to a single process that trains on the batches of all ranks, in the
first steps. A compiled model is compiled block by block for the wrappers that overlap, which need
gradients during the backward pass, and as a whole for the others.
"""
TARGETS = """Targets: as fast as `torch_ddp` or faster; 15% faster than `naive` where communication
is a real share of the step; 95% efficiency for `medium` and `large`, compiled; at most 1% more
memory than one GPU. × is how many times as fast `flashddp` is, epoch by epoch.
"""
GLOO_NOTE = "this shows what the wrappers do, not how they scale."
COLUMNS = {
    "kernel": "kernel",
    "wrapper": "wrapper",
    "status": "status",
    "tokens_per_s": "tokens/s",
    "median_ms": "ms a step",
    "iqr_ms": "IQR (ms)",
    "samples": "samples",
    "epoch_s": "s an epoch",
    "efficiency_percent": "efficiency (%)",
    "iqr_efficiency_percent": "IQR (%)",
    "peak_memory_mb": "peak memory (MB)",
    "overhead_percent": "overhead (%)",
    "communication_ms": "communication (ms)",
    "exposed_communication_ms": "exposed (ms)",
    "loss_difference": "loss difference",
}
PERCENT = {
    "scaling_efficiency": "efficiency_percent",
    "iqr_scaling_efficiency": "iqr_efficiency_percent",
    "memory_overhead": "overhead_percent",
}
# The wrappers that `flashddp` is compared with, in the same launch.
PEERS = ("torch_ddp", "naive")
COLORS = {
    "none": BLACK,
    "naive": SKY,
    "flat": GREEN,
    "overlap": PURPLE,
    "flashddp": VERMILLION,
    "torch_ddp": BLUE,
}
HATCH = {"edgecolor": "white", "hatch": "////", "linewidth": 0}


def write_report(records: Iterable[Record], output: Path) -> None:
    """Write lm_matrix_report.md, lm_matrix_results.csv and the figures, from each newest record.

    The figures are lm_matrix_time.png, _memory.png, _throughput.png and _losses.png.
    """
    rows = matrix_rows(records)
    settings = make_settings(rows)
    sections = [Section("Attention kernels and data-parallel wrappers", [NOTE], level=1)]
    targets = target_table(settings)
    if targets:
        sections.append(Section("How flashddp compares", [TARGETS, Table(targets)]))
    sections += map(_setting_section, settings)
    stem = output / "lm_matrix"
    write_sections(f"{stem}_report.md", sections)
    write_csv(f"{stem}_results.csv", [row for setting in settings for row in setting.rows])
    save_time_figure(settings, f"{stem}_time.png")
    save_memory_figure(settings, f"{stem}_memory.png")
    save_throughput_figure(settings, f"{stem}_throughput.png")
    save_losses_figure(settings, f"{stem}_losses.png")


def matrix_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A flat row for each cell, from its newest record."""
    rows = training_rows(records)
    for row in rows:
        memory = row.get("peak_memory_bytes")
        row["peak_memory_mb"] = None if memory is None else memory / 1e6
        for name, shown in PERCENT.items():
            value = row.get(name)
            row[shown] = None if value is None else round(100 * value, 2)
    return rows


def make_settings(rows: Iterable[Mapping[str, Any]]) -> list[Setting]:
    """The rows by setting, in the order in which settings and kernels were first measured."""
    settings = []
    for chosen in group_rows(rows):
        kernels = list(dict.fromkeys(row["kernel"] for row in chosen))
        chosen.sort(key=lambda row: kernels.index(row["kernel"]))
        settings.append(Setting(setting_title(chosen[0]), tuple(chosen)))
    return settings


def _setting_section(setting: Setting) -> Section:
    """The tables of a setting, and why cells failed."""
    rows = setting.rows
    last = max(rows, key=lambda row: row["date"])
    size = f"{format_value(last.get('parameters'))} parameters, "
    parts: list[str | Table] = [
        setting_intro(rows, GLOO_NOTE, size),
        Table(rows, COLUMNS),
        Table(comparison_table(rows)),
        failure_list(rows, "kernel", "wrapper"),
    ]
    return Section(setting.title, parts)


def target_table(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """How `flashddp` compares on GPUs: a row for each setting and kernel."""
    table = []
    for title, setting in gpu_settings(settings).items():
        for row in setting.rows:
            if row["wrapper"] != "flashddp" or row["status"] != "ok":
                continue
            ratio, iqr = _times_as_fast(row, "torch_ddp", setting.rows)
            table.append(
                {
                    "setting": title,
                    "kernel": row["kernel"],
                    "× torch_ddp": ratio,
                    "IQR": iqr,
                    "× naive": _times_as_fast(row, "naive", setting.rows)[0],
                    "efficiency (%)": row["efficiency_percent"],
                    "memory overhead (%)": row["overhead_percent"],
                }
            )
    return table


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`flashddp` against each peer interleaved with it: above 1, `flashddp` is faster."""
    table = []
    for row in rows:
        for peer in PEERS if row["wrapper"] == "flashddp" else ():
            ratio, iqr = _times_as_fast(row, peer, rows)
            if ratio is not None:
                line = {"kernel": row["kernel"], "flashddp against": peer}
                table.append(line | {"times as fast": ratio, "IQR": iqr})
    return table


def _times_as_fast(
    row: Mapping[str, Any], peer: str, rows: Iterable[Mapping[str, Any]]
) -> tuple[float | None, float | None]:
    """Median and IQR of the times of the wrapper `peer`, with the same kernel, over the row's."""
    found = (r for r in rows if (r["kernel"], r["wrapper"]) == (row["kernel"], peer))
    return time_ratio(next(found, None), row)


def save_time_figure(settings: Sequence[Setting], path: str | os.PathLike) -> Path:
    """Milliseconds per step, with the exposed communication hatched."""
    return _save_bars(settings, path, "median_ms", "time a step (ms)", "{:.3g}")


def save_memory_figure(settings: Sequence[Setting], path: str | os.PathLike) -> Path:
    """Peak memory of a rank, and above each bar its overhead over `none`."""
    label = "peak memory of a rank (MB)"
    return _save_bars(settings, path, "peak_memory_mb", label, "{:+.1%}", "memory_overhead")


def save_throughput_figure(settings: Sequence[Setting], path: str | os.PathLike) -> Path:
    """Tokens/s of all ranks, and above each bar the scaling efficiency."""
    label = "tokens/s of all ranks"
    return _save_bars(settings, path, "tokens_per_s", label, "{:.0%}", "scaling_efficiency")


def _save_bars(
    settings: Sequence[Setting],
    path: str | os.PathLike,
    key: str,
    label: str,
    above: str,
    ratio: str | None = None,
) -> Path:
    """Groups of bars by kernel, one per wrapper; a word where there is no figure.

    Args:
        key: the figure of a bar's height.
        above: the format of what is written above a bar, its height or its `ratio` to `none`.
    """
    columns = 3 if len(settings) > 3 else 1
    with panels(len(settings), columns=columns, width=8.0, height=3.4) as (figure, grid):
        for axes, setting in zip(grid, settings):
            kernels = list(dict.fromkeys(row["kernel"] for row in setting.rows))
            wrappers = _wrappers(setting.rows)
            width = 0.86 / len(wrappers)
            for row in setting.rows:
                offset = wrappers.index(row["wrapper"]) - (len(wrappers) - 1) / 2
                x, height = kernels.index(row["kernel"]) + offset * width, row.get(key)
                if height is None:
                    word = row["status"] if row["status"] != "ok" else "not known"
                    axes.text(x, 0, f" {word}", rotation=90, ha="center", va="bottom", fontsize=8)
                    continue
                axes.bar(x, height, width * 0.94, color=COLORS[row["wrapper"]])
                exposed = min(row.get("exposed_communication_ms") or 0.0, row["median_ms"])
                if not ratio and exposed:
                    bottom = height - exposed
                    axes.bar(x, exposed, width * 0.94, bottom=bottom, color="none", **HATCH)
                value = row.get(ratio) if ratio else height
                if value is not None and not (ratio and row["wrapper"] == "none"):
                    _write_above(axes, x, width, height, above.format(value))
            axes.set_xticks(range(len(kernels)), kernels)
            axes.set_xlim(-0.5, len(kernels) - 0.5)
            axes.set(xlabel="attention kernel", ylabel=label)
            lines = [textwrap.fill(part, 80) for part in setting.title.split("; ", 1)]
            axes.set_title("\n".join(lines), fontsize=9)
            axes.grid(visible=False, axis="x")
            axes.yaxis.set_major_formatter("{x:,.0f}" if ratio else "{x:,.4g}")
            axes.margins(y=0.17)
        rows = [row for setting in settings for row in setting.rows]
        handles = [Patch(color=COLORS[name], label=name) for name in _wrappers(rows)]
        if not ratio:
            handles.append(Patch(label="exposed communication", facecolor=GRAY, **HATCH))
        _add_legend(figure, handles)
        return save_figure(figure, path)


def _wrappers(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The wrappers of the rows, in the order of `COLORS`."""
    present = {row["wrapper"] for row in rows}
    return [wrapper for wrapper in COLORS if wrapper in present]


def _write_above(axes: Axes, x: float, width: float, y: float, text: str) -> None:
    style: dict = {"xytext": (0, 2), "textcoords": "offset points"}
    if width < 0.16 and len(text) > 4:
        style |= {"rotation": 60, "xytext": (2, 2)}
    axes.annotate(text, (x, y), ha="center", va="bottom", fontsize=7, **style)


def _add_legend(figure: Figure, handles: Sequence[Any]) -> None:
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", fontsize="small")


def save_losses_figure(settings: Sequence[Setting], path: str | os.PathLike) -> Path:
    """How far losses are from those of one process: a row for each setting and kernel."""
    rows = [
        ((setting.title, row["kernel"]), row)
        for setting in settings
        for row in setting.rows
        if row.get("loss_difference") is not None
    ]
    names = list(dict.fromkeys(name for name, _ in rows))
    wrappers = _wrappers(row for _, row in rows)
    with house_figure(width=13.0, height=2.0 + 0.4 * len(names)) as (figure, axes):
        for index, wrapper in enumerate(wrappers):
            found = [(name, row) for name, row in rows if row["wrapper"] == wrapper]
            # side by side, so that points of equal losses are all seen
            offset = 0.8 * ((index + 0.5) / len(wrappers) - 0.5)
            y = [names.index(name) + offset for name, _ in found]
            style = {"color": COLORS[wrapper], "marker": MARKERS[index], "linestyle": ""}
            axes.plot([row["loss_difference"] for _, row in found], y, label=wrapper, **style)
        axes.set_xscale("symlog", linthresh=1e-5)
        # without the machine, since the number of ranks is in the batch's words
        shown = [f"{title.rsplit('; ', 1)[0]}; {kernel}" for title, kernel in names]
        axes.set_yticks(range(len(names)), shown, fontsize=9)
        label = "largest loss difference to one process\n(nats per token; 0: equal to the last bit)"
        axes.set(xlim=(-1e-6, None), ylim=(len(names) - 0.4, -0.6), xlabel=label, ylabel="setting")
        if wrappers:
            _add_legend(figure, axes.get_legend_handles_labels()[0])
        return save_figure(figure, path)
