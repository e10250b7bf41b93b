"""The report of all benchmarks: from records to a DataFrame, and from it to Markdown, CSV, charts.

`Report` is the template. It has a section for each setting, with a table of what was measured in
it, and every row names the date and the commit of its own record:

    COLUMNS = {"mode": "mode", "median_ms": "median (ms)", "mfu": "MFU"}
    TIME = Chart("step_benchmark.png", "bars", x="mode", y="median_ms", series="model")
    REPORT = Report("step_benchmark", "Training steps", COLUMNS, by=("model",), charts=(TIME,))
    REPORT.write(read_records(output / "step_benchmark.jsonl"), output)
"""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes

from lib.core.figures import COLORS, MARKERS, house_figure, save_figure
from lib.core.files import write_atomically
from lib.core.records import Record, flatten, format_value, to_csv, to_markdown

# Fields of a config that say how long was measured, not what.
SAMPLING = ("warmup", "samples", "max_seconds")
# Fields of a record that a row of `to_frame` keeps, beside its config and figures.
PROVENANCE = ("device", "cpu", "cores", "seed", "commit", "date")


@dataclass(frozen=True)
class Table:
    """Rows of a report; columns without a single value are left out."""

    rows: Sequence[Mapping[str, Any]] | pd.DataFrame
    """Dicts, records (nested keys are joined by dots), or a frame."""

    columns: Mapping[str, str] | None = None
    """Key -> heading; all columns by default."""

    def to_markdown(self) -> str:
        """The table with numbers to three digits; empty without rows."""
        if not len(self.rows):
            return ""
        is_frame = isinstance(self.rows, pd.DataFrame)
        rows = to_rows(self.rows) if is_frame else [flatten(row) for row in self.rows]
        columns = self.columns or {key: key for row in rows for key in row}
        present = {key for row in rows for key, value in row.items() if value is not None}
        return to_markdown(rows, {key: columns[key] for key in columns if key in present})


@dataclass(frozen=True)
class Section:
    """A heading, and below it paragraphs of Markdown and tables in any order."""

    title: str
    parts: Sequence[str | Table] = ()
    level: int = 2

    def to_markdown(self) -> str:
        """The section as Markdown; empty texts and tables without rows are left out."""
        texts = [part if isinstance(part, str) else part.to_markdown() for part in self.parts]
        blocks = [f"{'#' * self.level} {self.title}", *(text.strip("\n") for text in texts if text)]
        return "\n\n".join(blocks) + "\n"


def write_report(path: str | os.PathLike, sections: Iterable[Section]) -> None:
    """Write the sections as one Markdown file."""
    write_atomically(path, "\n".join(section.to_markdown() for section in sections))


def write_csv(path: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows or records as CSV: nested keys joined by dots, lists (`times_ms`) left out."""
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


def to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """A row for each record: the fields of its config, its figures and its provenance.

    A figure hides a field of the config that has its name. Dicts and lists among the figures stay
    as they are, and what a record lacks is None. `recorded` is the date and the commit in words.
    """
    rows = [
        {**record["config"], **provenance_of(record), **record["figures"]} for record in records
    ]
    # as objects, integers with gaps between them stay integers
    frame = pd.DataFrame(rows, dtype=object)
    return frame.where(frame.notna(), None)


def provenance_of(record: Record) -> dict[str, Any]:
    """Where and when a record was made, as fields of a row."""
    found = {key: record.get(key) for key in PROVENANCE}
    found["torch"] = record.get("versions", {}).get("torch")
    words = (f"{record['date']:.10}", f"{record.get('commit') or '':.7}")
    return found | {"recorded": ", ".join(filter(None, words))}


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
    """Whether y is logarithmic."""

    only: Callable[[pd.DataFrame], pd.DataFrame] | None = None
    """Chooses the rows that are drawn."""

    def save(self, frame: pd.DataFrame, path: Path) -> None:
        """Draw `frame` into the file at `path`; nothing where nothing was measured."""
        if self.y not in frame:
            return
        frame = self.only(frame) if self.only else frame
        frame = frame[frame[self.y].notna()]
        groups = list(settings_of(frame, self.panels))
        if not groups:
            return
        columns = min(3, len(groups))
        shape = {"nrows": math.ceil(len(groups) / columns), "ncols": columns, "squeeze": False}
        height = self._height(groups)
        size = {"width": 6.0 * columns, "height": height * shape["nrows"] + 0.6}
        series = list(dict.fromkeys(frame[self.series]))
        with house_figure(**shape, **size) as (figure, grid):
            for axes in grid.flat[len(groups) :]:
                axes.set_axis_off()
            handles: dict[str, Any] = {}
            for axes, (title, rows) in zip(grid.flat, groups):
                (self._draw_bars if self.kind == "bars" else self._draw_lines)(axes, rows, series)
                lines = [textwrap.fill(part, 60) for part in title.split("; ")]
                axes.set_title("\n".join(lines), fontsize="small")
                handles |= dict(zip(*reversed(axes.get_legend_handles_labels())))
            names = {"ncols": min(5, len(handles)), "loc": "outside lower center"}
            figure.legend(handles.values(), handles, fontsize="small", **names)
            save_figure(figure, path)

    def _height(self, groups: Sequence[tuple[str, pd.DataFrame]]) -> float:
        """Inches of a panel: bars need as much as there are."""
        most = max(len(rows) for _, rows in groups)
        return 1.4 + 0.22 * most if self.kind == "bars" else 3.8

    def _draw_bars(self, axes: Axes, rows: pd.DataFrame, series: Sequence[Any]) -> None:
        """A group of bars for each x, with their values beside them."""
        groups = list(dict.fromkeys(rows[self.x]))
        found = rows.drop_duplicates([self.x, self.series], keep="last")
        present = [name for name in series if name in set(found[self.series])]
        # a bar has the whole place where there is one in each group
        beside = 1 if self.series == self.x else len(present)
        width = 0.85 / beside
        for place, name in enumerate(present):
            chosen, index = found[found[self.series] == name], place % beside
            y = [groups.index(x) + (index + 0.5) * width - 0.425 for x in chosen[self.x]]
            color = COLORS[series.index(name) % len(COLORS)]
            hatch = "///" * (series.index(name) >= len(COLORS))
            style: dict = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            values = chosen[self.y].astype(float)
            bars = axes.barh(y, values, width * 0.95, label=str(name), **style)
            axes.bar_label(bars, [format_value(value) for value in values], padding=2, fontsize=7)
        axes.set_yticks(range(len(groups)), [str(group) for group in groups])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.grid(visible=False, axis="y")
        axes.set(xlabel=self.labels[1], ylabel=self.labels[0], xscale="log" * self.log or "linear")

    def _draw_lines(self, axes: Axes, rows: pd.DataFrame, series: Sequence[Any]) -> None:
        """A line for each series."""
        for name in series:
            chosen = rows[rows[self.series] == name].sort_values(self.x)
            index = series.index(name)
            style: dict = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % 7]}
            style["linestyle"] = "--" if index >= len(COLORS) else "-"
            if len(chosen):
                axes.plot(chosen[self.x], chosen[self.y].astype(float), label=str(name), **style)
        axes.set_xscale("log", base=2)
        ticks = sorted(set(rows[self.x]))[:: math.ceil(rows[self.x].nunique() / 6)]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axes.minorticks_off()
        axes.set(xlabel=self.labels[0], ylabel=self.labels[1], yscale="log" * self.log or "linear")


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

    overview: Callable[[pd.DataFrame], Sequence[Section]] | None = None
    """All rows -> sections before the settings."""

    further: Callable[[pd.DataFrame], Sequence[str | Table]] | None = None
    """Rows of a setting -> tables and texts below theirs."""

    charts: Sequence[Chart] = ()
    text: str = ".md"
    table: str = ".csv"
    """What the names of report and table have after the stem."""

    def write(self, records: Sequence[Record], output: Path) -> None:
        """Write the report, the table of all its rows, and the charts, from the newest records."""
        frame = self.rows(records)
        sections = [Section(self.title, [f"{measured_on(frame)}.", self.note], level=1)]
        sections += self.overview(frame) if self.overview else ()
        columns = {**self.columns, "recorded": "recorded"} if self.columns else {}
        for title, rows in settings_of(frame, self.by):
            table = [Table(rows, columns)] * bool(columns)
            further = self.further(rows) if self.further else ()
            parts = [f"{measured_on(rows)}.", *table, *further]
            sections.append(Section(title or "Results", parts))
        write_report(output / f"{self.stem}{self.text}", sections)
        write_csv(output / f"{self.stem}{self.table}", to_rows(frame))
        for chart in self.charts:
            chart.save(frame, output / chart.file)

    def line(self, record: Record) -> str:
        """The figures of a record in one line, for the terminal."""
        figures = record["figures"]
        if figures.get("status", "ok") != "ok":
            return ": ".join(filter(None, (figures["status"], figures.get("reason"))))
        names = [key for key in self.columns if figures.get(key) is not None]
        names = [key for key in names if key != "status" and key not in record["config"]]
        return ", ".join(f"{self.columns[key]} {format_value(figures[key])}" for key in names)
