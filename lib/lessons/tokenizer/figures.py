"""The table of notebook 01: how fast encoders are, from the committed benchmark."""

from __future__ import annotations

from typing import Any

from lib.core.files import ROOT
from lib.core.records import read_records

# Names in the benchmark's records -> what the notebook calls them.
TEXTS = {"stories": "stories", "gcide": "English dictionary", "linux": "source of Linux"}
OURS = {"numba": "lib, compiled", "python": "lib, readable"}


def recorded_speeds(task: str) -> list[dict[str, Any]]:
    """MB/s of each encoder of the committed benchmark on each text; prints where and when.

    One row for each encoder, the fastest on the dictionary first.
    """
    records = read_records(ROOT / "artifacts/tokenizer_benchmark.jsonl")
    speeds: dict[str, dict[str, float]] = {}
    for figures in (record["figures"] for record in records):
        if figures["task"] == task and "MB_per_s" in figures:
            name = OURS.get(figures["candidate"], figures["candidate"])
            speeds.setdefault(name, {})[TEXTS[figures["text"]]] = figures["MB_per_s"]
    print("{device}, {date:.10}, task: {task}".format(**records[0] | {"task": task}))
    fastest_first = sorted(speeds, key=lambda name: -speeds[name][TEXTS["gcide"]])
    return [{"encoder": name} | speeds[name] for name in fastest_first]
