"""Records to rows, and sections to Markdown and CSV; the golden report of the template."""

import csv
import dataclasses

import pandas as pd

from lib.core.records import to_frame
from lib.tools.benchmarks.sections import (
    Chart,
    Report,
    failures,
    newest,
    section,
    settings_of,
    to_rows,
)


def record(date: str, samples: int = 3, device: str = "GPU", **figures) -> dict:
    config = {"size": figures.pop("size", 1), "samples": samples}
    about = {"device": device, "date": date, "versions": {"torch": "2.9"}, "commit": "abcdef012"}
    return {"config": config, "figures": {"status": "ok", **figures}, **about}


def test_the_last_record_of_a_config_counts_on_each_device_whatever_its_samples():
    old, other = record("1"), record("2", size=2)
    cpu, new = record("3", device="CPU"), record("4", samples=9)
    assert newest([old, other, cpu, new]) == [new, other, cpu]
    assert newest([old, new], ignore=()) == [old, new]


def test_rows_keep_integers_dicts_and_lists_and_have_none_where_a_value_is_missing():
    frame = to_frame([record("1", samples_ms=[1.0], bytes=7), record("2", memory={"peak": 3})])
    first, second = to_rows(frame)
    assert (first["size"], first["bytes"], first["samples_ms"]) == (1, 7, [1.0])
    assert type(first["bytes"]) is int
    assert (second["bytes"], second["memory"]) == (None, {"peak": 3})
    assert (first["device"], first["torch"], first["commit"]) == ("GPU", "2.9", "abcdef012")
    assert to_rows(to_frame([])) == []


GOLDEN = """\
# Speeds

GPU, torch 2.9, 2026-01-01 to 2026-01-03.

How to read it.

## All

2 rows

## size 1

GPU, torch 2.9, 2026-01-01 to 2026-01-02.

| kernel | status | time (ms) | recorded            |
| ------ | ------ | --------: | ------------------- |
| a      | ok     |      1.23 | 2026-01-02, abcdef0 |
| b      | oom    |         – | 2026-01-01, abcdef0 |

- b: oom: memory is full

## size 2,000

GPU, torch 2.9, 2026-01-03.

| kernel | status | time (ms) | recorded            |
| ------ | ------ | --------: | ------------------- |
| a      | ok     |      5.00 | 2026-01-03, abcdef0 |
"""


def test_a_report_has_a_section_for_each_setting_and_each_row_its_own_date_and_commit(tmp_path):
    records = [
        record("2026-01-01", kernel="a", ms=9.0),
        record("2026-01-01", kernel="b", status="oom", reason="memory is full"),
        record("2026-01-02", kernel="a", ms=1.234, times_ms=[1.2, 1.3], bytes={"peak": 7}),
        record("2026-01-03", kernel="a", ms=5.0, size=2000),
    ]
    for each in records:
        each["config"]["kernel"] = each["figures"].pop("kernel")
    chart = Chart("speeds.png", "bars", "kernel", "ms", "device", ("size",), ("kernel", "ms"))
    report = Report(
        "speeds",
        "Speeds",
        # a column without a value is left out
        {"kernel": "kernel", "status": "status", "ms": "time (ms)", "gb": "memory (GB)"},
        note="How to read it.",
        by=("device", "size"),
        overview=lambda frame: [section("All", f"{(frame['size'] == 1).sum()} rows")],
        further=lambda rows: [failures(rows, "kernel")],
        charts=[chart, dataclasses.replace(chart, kind="lines", x="size", panels=(), file="l.png")],
    )
    report.write(records, tmp_path)
    assert (tmp_path / "speeds.md").read_text() == GOLDEN
    rows = list(csv.DictReader((tmp_path / "speeds.csv").open()))
    assert [(row["ms"], row["date"], row["bytes.peak"]) for row in rows] == [
        ("1.234", "2026-01-02", "7"),
        ("", "2026-01-01", ""),
        ("5.0", "2026-01-03", ""),
    ]
    # nor lists
    assert "times_ms" not in rows[0]
    assert all((tmp_path / name).stat().st_size > 5_000 for name in ("speeds.png", "l.png"))
    assert report.line(records[2]) == "time (ms) 1.23"
    assert report.line(records[1]) == "oom: memory is full"


def test_a_chart_of_what_nobody_measured_is_left_out(tmp_path):
    chart = Chart("c.png", "bars", x="size", y="ms", series="size")
    for figures in ({}, {"ms": None}):
        chart.save(to_frame([record("1", **figures)]), tmp_path / "c.png")
    assert not list(tmp_path.iterdir())


def test_settings_are_named_by_what_varies():
    rows = [{"model": "s", "compile": False, "n": 1}, {"model": "s", "compile": True, "n": 1}]
    frame = pd.DataFrame(rows, dtype=object)
    titles = [title for title, _ in settings_of(frame, ("model", "compile", "n"))]
    assert titles == ["no compile", "compile"]
    titles = [title for title, _ in settings_of(frame, ("model", "n"))]
    assert titles == ["s"]
