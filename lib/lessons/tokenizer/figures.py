"""Figures and tables of notebook 01: growing word lists, token frequencies, compression, speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from lib.core.figures import BLACK, BLUE
from lib.core.files import ROOT
from lib.core.records import read_records

# Names in the benchmark's records -> what the notebook calls them.
TEXTS = {"stories": "stories", "gcide": "English dictionary", "linux": "source of Linux"}
OURS = {"numba": "lib, compiled", "python": "lib, readable"}


def show_growth(growth: Mapping[str, Mapping[int, int]]) -> None:
    """Show for each text {words read: distinct words so far}."""
    _, axes = plt.subplots(figsize=(7, 3.4))
    for name, points in growth.items():
        axes.loglog(list(points), list(points.values()), label=name)
    axes.set(xlabel="words read", ylabel="distinct words so far")
    axes.set_title("People keep making new words")
    axes.legend()
    plt.show()


def show_frequencies(frequencies: Mapping[str, np.ndarray]) -> None:
    """Show how often tokens occur, those of each text sorted, beside Zipf's law."""
    _, axes = plt.subplots(figsize=(7, 3.6))
    longest = 1
    for name, frequency in frequencies.items():
        used = np.sort(frequency[frequency > 0])[::-1]
        longest = max(longest, len(used))
        axes.loglog(np.arange(1, len(used) + 1), used / used.sum(), marker="", label=name)
    rank = np.arange(1, longest + 1)
    style = {"linestyle": "--", "color": BLACK, "marker": ""}
    axes.loglog(rank, 1 / rank / np.sum(1 / rank), label="Zipf: share ∝ 1 / rank", **style)
    axes.set(xlabel="rank of the token", ylabel="share of all tokens")
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.set_title("A few tokens do most of the work")
    axes.legend()
    plt.show()


def show_compression(sizes: Sequence[int], curves: Mapping[str, Sequence[float]]) -> None:
    """Show bytes per token by the size of the vocabulary."""
    _, axes = plt.subplots(figsize=(7, 3.8))
    for name, curve in curves.items():
        (drawn,) = axes.plot(sizes, curve)
        place = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(name, (sizes[-1], curve[-1]), color=drawn.get_color(), **place)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_ylim(bottom=0.8)
    axes.set(xlabel="vocabulary (tokens)", ylabel="compression (bytes per token)")
    axes.set_title("A vocabulary fits the text that it was trained on")
    plt.show()


def show_ladder(speeds: Mapping[str, float], *, title: str) -> None:
    """Show the speed of each step as a bar, labeled with its gain over the one before."""
    names, values = list(speeds), list(speeds.values())
    _, axes = plt.subplots(figsize=(7, 0.5 + 0.42 * len(names)))
    axes.barh(names, values, color=BLUE)
    for row, value in enumerate(values):
        gain = f"  ×{value / values[row - 1]:.1f}" if row else ""
        axes.text(value, row, f" {value:.3g} MB/s{gain}", va="center")
    axes.set(xscale="log", xlim=(min(values) / 2, 8 * max(values)), xlabel="MB/s", title=title)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    plt.show()


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
