"""Figures and tables of notebook 01: token frequencies, speed of encoders."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from lib.core.charts import bars, lines
from lib.core.figures import BLACK
from lib.core.files import ROOT
from lib.core.records import read_records

# Names in the benchmark's records -> what the notebook calls them.
TEXTS = {"stories": "stories", "gcide": "English dictionary", "linux": "source of Linux"}
OURS = {"numba": "lib, compiled", "python": "lib, readable"}


def show_frequencies(frequencies: Mapping[str, np.ndarray]) -> None:
    """Show how often tokens occur, those of each text sorted, beside Zipf's law."""
    curves = {}
    for name, frequency in frequencies.items():
        used = np.sort(frequency[frequency > 0])[::-1]
        curves[name] = dict(enumerate(100 * used / used.sum(), start=1))
    ranks = np.arange(1, max(map(len, curves.values())) + 1)
    zipf = "Zipf: share ∝ 1 / rank"
    curves[zipf] = dict(zip(ranks, 100 / ranks / np.sum(1 / ranks)))
    lines(
        curves,
        title="A few tokens do most of the work",
        xlabel="rank of the token",
        ylabel="share of all tokens (%)",
        log="xy",
        styles={zipf: {"linestyle": "--", "color": BLACK}},
    )


def show_ladder(speeds: Mapping[str, float], *, title: str) -> None:
    """Show the speed of each step as a bar, labeled with its gain over the one before."""
    gains = [1.0, *(after / before for before, after in pairwise(speeds.values()))]
    texts = {
        name: f"{speed:.3g} MB/s" + (f"  ×{gain:.1f}" if gain != 1 else "")
        for (name, speed), gain in zip(speeds.items(), gains)
    }
    bars(speeds, title=title, xlabel="MB/s", log=True, texts=texts)


def measure_rungs(
    rungs: Mapping[str, Callable[[str], Any]], texts: Mapping[str, str], samples: int
) -> dict[str, float]:
    """MB/s of each rung on its text: the best of `samples`, all rungs interleaved.

    What a rung does once, such as filling a cache, it has done before.
    """
    seconds = dict.fromkeys(rungs, float("inf"))
    for _ in range(samples):
        for name, rung in rungs.items():
            started = time.perf_counter()
            rung(texts[name])
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return {name: len(texts[name].encode()) / 1e6 / seconds[name] for name in rungs}


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
