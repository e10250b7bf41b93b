"""Figures of notebook 05: what each step gained, which tiles are visited, who works when."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lib.plots import BLUE, GRID, ORANGE, PAPER, PURPLE, SKY, VERMILLION, house_figure, save_figure
from lib.plots_attention import case_name

# The steps of lib.benchmark_attention_steps, in their order.
NAMES = {
    "textbook": "textbook",
    "portable": "tiles in Triton, loads wait",
    "portable_pipelined": "… loads run ahead",
    "hopper": "kernel for Hopper",
    "hopper_warpgroups": "… with more warpgroups",
    "hopper_persistent": "… persistent",
    "hopper_ordered": "… in turns",
    "hopper_kept": "… factors in registers",
    "cudnn": "cuDNN",
}
# How finely `simulate` cuts time: shares of one, two and three come out even.
TICKS = 12


def steps_of(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each step of each record of `lib.benchmark_attention_steps`."""
    rows = []
    for record in records:
        config = record["config"]
        frame = {key: config[key] for key in ("batch_size", "heads", "head_dim", "direction")}
        frame |= {"tokens": config["keys"], "case": case_name(config)}
        frame |= {key: record[key] for key in ("device", "date")}
        for step, figures in record["figures"]["steps"].items():
            row = {**frame, "step": step, "name": NAMES[step], "tflops": None, **figures}
            rows.append(row | {"flops": record["figures"]["flops"]})
    return rows


def save_steps_figure(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> Path:
    """Bars of TFLOP/s, a panel for each direction, from rows of `steps_of`."""
    steps = {row["step"] for row in rows}
    shapes = {tuple(row[key] for key in SHAPE) for row in rows}
    size = {"width": 11.0, "height": 1.6 + 0.16 * len(steps) * (1 + len(shapes))}
    with house_figure(**size) as (figure, axes):
        axes.remove()
        draw_steps(figure, rows)
        return save_figure(figure, path)


SHAPE = ("batch_size", "heads", "tokens", "head_dim")


def draw_steps(figure: Figure, rows: Sequence[Mapping[str, Any]]) -> None:
    """Fill an empty figure with the bars of `save_steps_figure`."""
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    panels = figure.subplots(ncols=len(directions), squeeze=False)[0]
    shapes = list(dict.fromkeys(tuple(row[key] for key in SHAPE) for row in rows))
    for axes, direction in zip(panels, directions):
        chosen = [row for row in rows if row["direction"] == direction]
        present = {row["step"] for row in chosen}
        steps = [step for step in NAMES if step in present]
        height = 0.82 / len(shapes)
        for number, shape in enumerate(shapes):
            found = {r["step"]: r for r in chosen if tuple(r[key] for key in SHAPE) == shape}
            places = [place for place, step in enumerate(steps) if step in found]
            speeds = [found[steps[place]]["tflops"] or 0 for place in places]
            offset = (number - (len(shapes) - 1) / 2) * height
            batch, heads, tokens, head_dim = shape
            label = f"{batch} × {heads} heads, {tokens:,} tokens, D = {head_dim}"
            color = (BLUE, SKY, VERMILLION, PURPLE)[number % 4]
            where = np.add(places, offset)
            bars = axes.barh(where, speeds, height, color=color, label=label)
            words = [f"{x:.0f}" if x else found[steps[p]]["status"] for p, x in zip(places, speeds)]
            axes.bar_label(bars, words, padding=2, fontsize=9)
        axes.set_yticks(range(len(steps)), [NAMES[step] for step in steps])
        axes.set(ylim=(len(steps) - 0.4, -0.6), title=direction)
        axes.set(xlabel="speed (TFLOP/s)", ylabel="step")
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.1)
    names = panels[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=min(3, len(shapes)))


def draw_visited_tiles(axes: Axes, num_queries: int, num_keys: int, tile: int) -> None:
    """The score matrix in tiles, with a causal mask: passed over, in full, or with a mask."""
    query = np.arange(0, num_queries, tile)[:, None]
    key = np.arange(0, num_keys, tile)[None, :]
    last_query = np.minimum(query + tile, num_queries) - 1
    last_key = np.minimum(key + tile, num_keys) - 1
    kinds = np.where(key > last_query, 0, np.where(last_key <= query, 1, 2))
    names = ("passed over", "in full", "with a mask")
    colors = (PAPER, SKY, ORANGE)
    edges = {"edgecolors": GRID, "linewidth": 0.7}
    shown = ListedColormap(colors)
    axes.pcolormesh(kinds, cmap=shown, vmin=-0.5, vmax=2.5, **edges)
    axes.set(aspect="equal", xlim=(0, kinds.shape[1]), ylim=(kinds.shape[0], 0))
    axes.set(xlabel=f"tiles of {tile} keys", ylabel=f"tiles of {tile} queries")
    share = (kinds > 0).mean()
    masked = (kinds == 2).sum() / (kinds > 0).sum()
    axes.set_title(f"{num_queries:,} tokens: {share:.0%} visited\n{masked:.0%} of them masked")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)
    keys = [Patch(facecolor=c, edgecolor=GRID, label=n) for c, n in zip(colors, names)]
    axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.0, 1.0))


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of work of one worker in `simulate`."""

    who: int
    """The warpgroup that it is of; -1: the producer."""

    what: str
    """`load K`, `load V`, `scores`, `softmax` or `values`."""

    tile: int
    """Of keys, from 0."""

    start: float
    end: float


def simulate(
    warpgroups: int,
    tiles: int,
    *,
    runs_ahead: bool,
    in_turns: bool = False,
    stages: int = 2,
    product: float = 1.0,
    softmax: float = 2.0,
    load: float = 0.5,
) -> list[Span]:
    """Who works when in a model of one multiprocessor, in units of one product of a tile.

    The tensor cores serve one warpgroup after the other when they ask `in_turns`, and else all
    that ask at the same time, each more slowly. Exponentials are shared in the same way. The
    producer loads a tile once all warpgroups have used the one `stages` before it.

    Args:
        warpgroups: each works through all `tiles` of keys, for queries of its own.
        runs_ahead: whether a warpgroup asks for the next tile's scores together with the product
            of this tile's probabilities and values, and not after it.
        product, softmax, load: how long each takes alone.

    Raises:
        ValueError: the ring has no room for the tile that is asked for ahead.
    """
    if stages < 1 + runs_ahead:
        raise ValueError(f"stages is {stages}; right is: at least {1 + runs_ahead}")
    done: dict[tuple[int, str, int], float] = {}
    began: dict[tuple[int, str, int], float] = {}
    left: dict[tuple[int, str, int], float] = {}
    queues: list[list[tuple[int, str, int]]] = [[] for _ in range(warpgroups)]
    asked: list[tuple[int, str, int]] = []
    loads = [(-1, f"load {x}", i) for i in range(tiles) for x in "KV"]
    groups, now = range(warpgroups), 0
    while len(done) < 2 * tiles + 3 * tiles * warpgroups:
        for group in groups:
            for job in _next_products(group, tiles, done, runs_ahead):
                if job not in left:
                    left[job] = product
                    queues[group].append(job)
                    asked.append(job)
        heads = [q[0] for q in queues if q and (-1, LOADED[q[0][1]], q[0][2]) in done]
        if in_turns:
            heads = sorted(heads, key=asked.index)[:1]
        sums = [(g, "softmax", i) for g in groups for i in range(tiles) if _is_next(g, i, done)]
        loading = [job for job in loads if job not in done][:1]
        loading = [job for job in loading if _has_room(job, groups, stages, done)]
        for jobs, length in ((heads, product), (sums, softmax), (loading, load)):
            for job in jobs:
                began.setdefault(job, now / TICKS)
                left[job] = left.get(job, length) - 1 / TICKS / len(jobs)
        now += 1
        for job in (*heads, *sums, *loading):
            if left[job] < 1e-9:
                done[job] = now / TICKS
                for queue in queues:
                    if job in queue:
                        queue.remove(job)
    return [Span(*job, began[job], end) for job, end in done.items()]


# What a product reads.
LOADED = {"scores": "load K", "values": "load V"}


def _next_products(group: int, tiles: int, done: Mapping, runs_ahead: bool) -> list[tuple]:
    """The products that a warpgroup has asked for by now."""
    jobs = []
    for i in range(tiles):
        before = done.get((group, "softmax", i - 1))
        if not runs_ahead:
            before = done.get((group, "values", i - 1))
        elif (group, "values", i - 2) not in done and i >= 2:
            before = None
        if i == 0 or before is not None:
            jobs.append((group, "scores", i))
        if (group, "softmax", i) in done:
            jobs.append((group, "values", i))
    # the next tile's scores come first
    return sorted(jobs, key=lambda job: (job[2] + (job[1] == "values") * 1.5, job[1]))


def _is_next(group: int, tile: int, done: Mapping) -> bool:
    """Whether a warpgroup computes the exponentials of `tile` now."""
    return (group, "scores", tile) in done and (group, "softmax", tile) not in done


def _has_room(job: tuple, groups: Sequence[int], stages: int, done: Mapping) -> bool:
    """Whether the ring has a free slot for a load."""
    what = {"load K": "scores", "load V": "values"}[job[1]]
    old = job[2] - stages
    return old < 0 or all((group, what, old) in done for group in groups)


def busy_share(spans: Sequence[Span]) -> float:
    """For which share of the time the tensor cores multiply."""
    times = {"scores", "values"}
    edges = sorted({x for s in spans for x in (s.start, s.end)})
    busy = sum(
        b - a
        for a, b in itertools.pairwise(edges)
        if any(s.what in times and s.start <= a and b <= s.end for s in spans)
    )
    return busy / edges[-1]


def draw_timeline(figure: Figure, setting: Mapping[str, Any]) -> None:
    """The rows of a `simulate` of `setting`: the producer, the warpgroups, the tensor cores."""
    spans = simulate(**setting)
    warpgroups = setting["warpgroups"]
    axes = figure.subplots()
    colors = (BLUE, VERMILLION, PURPLE)
    rows = ["producer warp", *(f"warpgroup {i}" for i in range(warpgroups)), "tensor cores"]
    lane = 0.8 / warpgroups
    for span in spans:
        color = GRID if span.who < 0 else colors[span.who]
        row, height = 1 + span.who, 0.8
        name = {"load K": "K", "load V": "V", "softmax": "softmax ", "scores": "S", "values": "PV"}
        if span.what in LOADED:
            height = lane
            row = warpgroups + 1 + (span.who - (warpgroups - 1) / 2) * lane
        elif span.who < 0:
            # in two lanes, as the letters of neighbours would touch
            row, height = (-0.2 if span.what == "load K" else 0.2), 0.4
        style = {"color": color, "edgecolor": PAPER, "linewidth": 0.8}
        # the product with the values is paler than the scores
        style["alpha"] = 0.55 if span.what == "values" else 1.0
        axes.barh(row, span.end - span.start, height, span.start, **style)
        text = f"{name[span.what]}{span.tile}"
        middle = (span.start + span.end) / 2
        ink = "#222222" if span.who < 0 or span.what == "values" else "white"
        axes.text(middle, row, text, ha="center", va="center", fontsize=8.5, color=ink)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, max(span.end for span in spans)))
    axes.set(xlabel="time (one product of a tile alone = 1)", ylabel="who")
    axes.grid(visible=False)
    how = "in turns" if setting.get("in_turns") else "at will"
    if warpgroups == 1:
        how = "asking ahead" if setting["runs_ahead"] else "step by step"
    number = ("One warpgroup", "Two warpgroups", "Three warpgroups")[warpgroups - 1]
    busy = f"tensor cores busy {busy_share(spans):.0%} of the time"
    axes.set_title(f"{number}, {how}: {busy}")
