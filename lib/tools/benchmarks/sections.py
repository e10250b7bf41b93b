"""The report of all benchmarks: from records to a DataFrame, and from it to Markdown, CSV, charts.

`Report` is the template. It has a section for each setting, with a table of what was measured in
it, and every row names the date and the commit of its own record:

    COLUMNS = {"mode": "mode", "median_ms": "median (ms)", "mfu": "MFU"}
    REPORT = Report("step_benchmark", "Training steps", COLUMNS, by=("model",))
    REPORT.write(read_records(output / "step_benchmark.jsonl"), output)
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes

from lib.core import charts
from lib.core.figures import COLORS, MARKERS, house_figure, save_figure
from lib.core.files import write_atomically
from lib.core.records import Record, flatten, format_value, to_csv, to_frame, to_markdown

# Fields of a config that say how long was measured, not what.
SAMPLING = ("warmup", "samples", "max_seconds")


def section(title: str, *parts: str, level: int = 2) -> str:
    """A heading and paragraphs of Markdown, of which empty ones are left out."""
    texts = (part.strip("\n") for part in parts if part)
    return "\n\n".join([f"{'#' * level} {title}", *texts]) + "\n"


def table(
    rows: pd.DataFrame | Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None = None
) -> str:
    """Rows as a Markdown table, without columns that have no value; empty without rows.

    Args:
        columns: key -> heading; all by default.
    """
    rows = to_rows(rows) if isinstance(rows, pd.DataFrame) else rows
    columns = columns or {key: key for row in rows for key in row}
    present = {key for row in rows for key, value in row.items() if value is not None}
    shown = {key: heading for key, heading in columns.items() if key in present}
    return to_markdown(rows, shown) if len(rows) else ""


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as CSV: nested keys joined by dots, lists (`times_ms`) left out."""
    flat = [flatten(row) for row in rows]
    lists = {key for row in flat for key, value in row.items() if isinstance(value, (list, tuple))}
    to_csv([{key: row[key] for key in row if key not in lists} for row in flat], path)


def newest(records: Iterable[Record], ignore: Sequence[str] = SAMPLING) -> list[Record]:
    """The last record of each config on each device, in the order of their first records.

    Records of the same thing may differ in the fields `ignore` of their config.
    """
    return list({_identity(record, ignore): record for record in records}.values())


def _identity(record: Record, ignore: Sequence[str]) -> str:
    config = {key: value for key, value in record["config"].items() if key not in ignore}
    return json.dumps([record["device"], config], sort_keys=True)


def to_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as dicts, None where a value is missing."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def measured_on(rows: pd.DataFrame) -> str:
    """Devices, versions and dates of rows: `NVIDIA H200, torch 2.11.0, 2026-11-21 to 2026-11-27`.

    The dates are the first and the last.
    """
    devices = " and ".join(dict.fromkeys(rows["device"]))
    versions = " and ".join(dict.fromkeys(f"torch {version}" for version in rows["torch"]))
    dates = sorted({f"{date:.10}" for date in rows["date"]})
    return ", ".join([devices, versions, " to ".join([dates[0], *dates[1:][-1:]])])


def failures(rows: pd.DataFrame, *names: str) -> str:
    """A list of the rows that were not measured, each by its fields `names`, and why."""
    lines = [
        f"- {', '.join(str(row[name]) for name in names)}: {row['status']}: {row['reason']}"
        for row in to_rows(rows)
        if row.get("reason") and row["status"] != "ok"
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Chart:
    """A figure: `y` over `x`, a panel for each combination of values of `panels`."""

    file: str
    """Name of the .png file."""

    kind: Literal["bars", "lines"]
    """Horizontal bars, or lines over a logarithmic axis."""

    x: str
    y: str
    series: str
    """The field that has a color for each value."""

    panels: tuple[str, ...] = ()
    labels: tuple[str, str] = ("", "")
    """Of x and y, with units."""

    log: bool = False
    """Whether y of lines is logarithmic."""

    only: Callable[[pd.DataFrame], pd.DataFrame] | None = None
    """Chooses the rows that are drawn."""

    def save(self, frame: pd.DataFrame, path: Path) -> None:
        """Draw `frame` into the file at `path`; nothing where nothing was measured."""
        if self.y not in frame:
            return
        frame = self.only(frame) if self.only else frame
        frame = frame[frame[self.y].notna()]
        panels = list(settings_of(frame, self.panels))
        if not panels:
            return
        is_bars, columns = self.kind == "bars", min(3, len(panels))
        shape = {"nrows": math.ceil(len(panels) / columns), "ncols": columns, "squeeze": False}
        most = max(len(rows) for _, rows in panels)
        height = 1.4 + 0.22 * most if is_bars else 3.8
        size = {"width": 6.0 * columns, "height": height * shape["nrows"] + 0.6}
        # a series looks the same in all panels; after the last color, colors come again
        styles = {}
        for index, name in enumerate(dict.fromkeys(frame[self.series])):
            again = index >= len(COLORS)
            style = {"linestyle": "--" if again else "-", "marker": MARKERS[index % len(MARKERS)]}
            styles[name] = {"color": COLORS[index % len(COLORS)]} | ({} if is_bars else style)
        with house_figure(**shape, **size) as (figure, grid):
            handles: dict[str, Any] = {}
            for axes, (title, rows) in zip(grid.flat, panels):
                (self._draw_bars if is_bars else self._draw_lines)(axes, rows, styles)
                lines = [textwrap.fill(part, 60) for part in title.split("; ")]
                axes.set_title("\n".join(lines), fontsize="small")
                handles |= dict(zip(*reversed(axes.get_legend_handles_labels())))
            for axes in grid.flat[len(panels) :]:
                axes.set_axis_off()
            if handles:
                where = {"ncols": min(5, len(handles)), "loc": "outside lower center"}
                figure.legend(handles.values(), handles, fontsize="small", **where)
            save_figure(figure, path)

    def _draw_bars(self, axes: Axes, rows: pd.DataFrame, styles: charts.Styles) -> None:
        """A group of bars for each x, with their values beside them."""
        values: dict[Any, Any] = {}
        for row in to_rows(rows):
            values.setdefault(row[self.x], {})[row[self.series]] = row[self.y]
        texts = "{:,.0f}" if rows[self.y].max() >= 1000 else "{:.3g}"
        names = {"xlabel": self.labels[1], "ylabel": self.labels[0], "title": ""}
        charts.bars(values, axes=axes, texts=texts, styles=styles, legend="none", **names)

    def _draw_lines(self, axes: Axes, rows: pd.DataFrame, styles: charts.Styles) -> None:
        """A line for each series."""
        series: dict[Any, Any] = {}
        for row in to_rows(rows.sort_values(self.x)):
            series.setdefault(row[self.series], {})[row[self.x]] = row[self.y]
        ticks = sorted(set(rows[self.x]))[:: math.ceil(rows[self.x].nunique() / 6)]
        names = {"xlabel": self.labels[0], "ylabel": self.labels[1], "title": ""}
        options = {"log": "xy" if self.log else "x", "xticks": ticks, "legend": "none"}
        ordered = {name: series[name] for name in styles if name in series}
        charts.lines(ordered, axes=axes, styles=styles, **options, **names)


def settings_of(frame: pd.DataFrame, by: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each combination of the values `by`, in order, and those that vary in words."""
    if not len(by):
        if len(frame):
            yield "", frame
        return
    by = [name for name in by if name in frame]
    varying = [name for name in by if frame[name].map(str).nunique() > 1] or [*by[:1]]
    keys = frame[by].map(str).apply(tuple, axis=1)
    for _, rows in frame.groupby(keys, sort=False):
        words = [_setting(name, rows[name].iloc[0]) for name in varying]
        yield ", ".join(filter(None, words)), rows


def _setting(name: str, value: Any) -> str:
    """A setting in words: the value of texts, `no NAME`, or name and number."""
    name = name.replace("_", " ")
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if value is None or isinstance(value, str):
        return value or ""
    return f"{name} {value:,}"


def newest_frame(records: Sequence[Record]) -> pd.DataFrame:
    """The newest record of each config."""
    return to_frame(newest(records))


@dataclass(frozen=True)
class Report:
    """The template: a title, a note, an overview, and a section for each setting with its table."""

    stem: str
    """The files' names begin with this."""

    title: str
    columns: Mapping[str, str]
    """Field -> heading of the table of each setting."""

    note: str = ""
    """How to read the numbers."""

    by: tuple[str, ...] = ()
    """Fields that make a setting; rows that share them are compared."""

    rows: Callable[[Sequence[Record]], pd.DataFrame] = newest_frame
    """Records -> what is shown."""

    overview: Callable[[pd.DataFrame], Sequence[str]] | None = None
    """All rows -> sections before the settings."""

    further: Callable[[pd.DataFrame], Sequence[str]] | None = None
    """Rows of a setting -> tables and texts below theirs."""

    charts: Sequence[Chart] = ()
    text: str = ".md"
    table: str = ".csv"
    """The endings of the file names of report and table."""

    @property
    def name(self) -> str:
        """The file of the report."""
        return f"{self.stem}{self.text}"

    def write(self, records: Sequence[Record], output: Path) -> None:
        """Write the report, the table of all its rows, and the charts, from the newest records."""
        frame = self.rows(records)
        sections = [section(self.title, f"{measured_on(frame)}.", self.note, level=1)]
        sections += self.overview(frame) if self.overview else ()
        columns = {**self.columns, "recorded": "recorded"}
        for title, rows in settings_of(frame, self.by):
            figures = table(rows, columns) if self.columns else ""
            further = self.further(rows) if self.further else ()
            sections.append(section(title or "Results", f"{measured_on(rows)}.", figures, *further))
        write_atomically(output / self.name, "\n".join(sections))
        write_csv(output / f"{self.stem}{self.table}", to_rows(frame))
        for chart in self.charts:
            chart.save(frame, output / chart.file)

    def was_measured(self, record: Record) -> bool:
        """Whether a record has figures of what was to be measured."""
        return record["figures"].get("status", "ok") == "ok"

    def line(self, record: Record) -> str:
        """The figures of a record in one line, for the terminal."""
        figures = record["figures"]
        if not self.was_measured(record):
            return ": ".join(filter(None, (figures["status"], figures.get("reason"))))
        names = [key for key in self.columns if figures.get(key) is not None]
        names = [key for key in names if key != "status" and key not in record["config"]]
        return ", ".join(f"{self.columns[key]} {format_value(figures[key])}" for key in names)
