"""From records to reports: the newest records as a DataFrame, and a report as a list of sections.

A report in ten lines:

    records = newest(read_records(output / "step_benchmark.jsonl"))
    frame = to_frame(records)
    sections = [Section("Training steps", [f"{measured_on(records)}.", NOTE], level=1)]
    for model, rows in frame.groupby("model", sort=False):
        best = rows.loc[rows["median_ms"].astype(float).idxmin()]
        table = Table(rows, {"mode": "mode", "median_ms": "median (ms)", "mfu": "MFU"})
        sections.append(Section(model, [f"Fastest: {best['mode']}.", table]))
    write_report(output / "step_benchmark.md", sections)
    write_csv(output / "step_benchmark.csv", records)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lib.core.files import write_atomically
from lib.core.records import Record, flatten, to_csv, to_markdown

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
    as they are, and what a record lacks is None.
    """
    rows = []
    for record in records:
        row = {**record["config"], **record["figures"]}
        row |= {key: record.get(key) for key in PROVENANCE}
        row["torch"] = record.get("versions", {}).get("torch")
        rows.append(row)
    # as objects, integers with gaps between them stay integers
    frame = pd.DataFrame(rows, dtype=object)
    return frame.where(frame.notna(), None)


def to_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as dicts, None where a value is missing."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def measured_on(records: Iterable[Record], *packages: str) -> str:
    """Device, versions and date of the newest record: `NVIDIA H200, torch 2.11.0, 2026-11-22`."""
    last = max(records, key=lambda record: record["date"])
    versions = [f"{name} {last['versions'][name]}" for name in ("torch", *packages)]
    return ", ".join([last["device"], *versions, last["date"]])
