"""Figures of notebook 06: visited tiles, fragments, banks, and a model of the Hopper schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from lib.core.figures import BLUE, GRID, INK, ORANGE, PAPER, PURPLE, SKY, VERMILLION
from lib.profiling.trace import union

# Ticks per unit of time in `simulate`; divisible by 2 and 3, so that shared work ends on a tick.
TICKS = 12
# How long each takes alone.
MATMUL, SOFTMAX, LOAD = 1.0, 2.0, 0.5
# Tiles of keys, and of values, that the ring in shared memory holds.
STAGES = 2
# Of the four lanes of a quad.
QUAD = ("#9fd3ef", "#fbe3b0", "#c9ead6", "#f3cfe0")
# What a matmul reads.
LOADED = {"scores": "load K", "values": "load V"}


def draw_visited_tiles(axes: Axes, num_queries: int, num_keys: int, tile: int) -> None:
    """Draw the score matrix in tiles under a causal mask: skipped, in full, or with a mask."""
    query = np.arange(0, num_queries, tile)[:, None]
    key = np.arange(0, num_keys, tile)[None, :]
    last_query = np.minimum(query + tile, num_queries) - 1
    last_key = np.minimum(key + tile, num_keys) - 1
    kinds = np.where(key > last_query, 0, np.where(last_key <= query, 1, 2))
    colors = {"skipped": PAPER, "in full": SKY, "with a mask": ORANGE}
    style = {"edgecolors": GRID, "linewidth": 0.7, "vmin": -0.5, "vmax": 2.5}
    axes.pcolormesh(kinds, cmap=ListedColormap([*colors.values()]), **style)
    axes.set(aspect="equal", xlim=(0, kinds.shape[1]), ylim=(kinds.shape[0], 0))
    axes.set(xlabel=f"tiles of {tile} keys", ylabel=f"tiles of {tile} queries")
    share = (kinds > 0).mean()
    masked = (kinds == 2).sum() / (kinds > 0).sum()
    axes.set_title(f"{num_queries:,} tokens: {share:.0%} visited\n{masked:.0%} of them masked")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)
    keys = [Patch(facecolor=c, edgecolor=GRID, label=name) for name, c in colors.items()]
    axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.0, 1.0))


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of work in `simulate`."""

    who: int
    """The warpgroup; -1 for the producer."""

    what: str
    """`load K`, `load V`, `scores`, `softmax` or `values`."""

    tile: int
    """The tile of keys, from 0."""

    start: float
    end: float


def simulate(
    warpgroups: int, tiles: int, *, runs_ahead: bool, in_turns: bool = False
) -> list[Span]:
    """Simulate the schedule of one multiprocessor; the time unit is one matmul of a tile.

    With `in_turns` (ping-pong) the tensor cores serve one warpgroup after the other; without, all
    that have issued a matmul share them, each more slowly. Exponentials are shared like that, too.
    The producer loads a tile once all warpgroups have used the one `STAGES` before it.

    Args:
        warpgroups: each goes through all `tiles` of keys, for its own queries.
        runs_ahead: whether a warpgroup issues the next tile's scores along with this tile's matmul
            of probabilities and values, not after it.
    """
    # jobs are (who, what, tile)
    began: dict[tuple[int, str, int], float] = {}
    left: dict[tuple[int, str, int], float] = {}
    done: dict[tuple[int, str, int], float] = {}
    issued: list[tuple[int, str, int]] = []
    loads = [(-1, f"load {x}", i) for i in range(tiles) for x in "KV"]
    groups, now = range(warpgroups), 0
    while len(done) < 2 * tiles + 3 * tiles * warpgroups:
        # each warpgroup issues what it can; its matmuls run in that order, once their tile is there
        for group in groups:
            jobs = _next_matmuls(group, tiles, done, runs_ahead)
            issued += [job for job in jobs if job not in issued]
        waiting = [job for job in issued if job not in done]
        heads = [next((job for job in waiting if job[0] == group), None) for group in groups]
        heads = [job for job in heads if job and (-1, LOADED[job[1]], job[2]) in done]
        if in_turns:
            heads = sorted(heads, key=issued.index)[:1]
        sums = [(g, "softmax", i) for g in groups for i in range(tiles) if _is_next(g, i, done)]
        loading = [job for job in loads if job not in done][:1]
        loading = [job for job in loading if _has_room(job, groups, done)]

        # one tick, shared by all jobs of a kind
        for jobs, length in ((heads, MATMUL), (sums, SOFTMAX), (loading, LOAD)):
            for job in jobs:
                began.setdefault(job, now / TICKS)
                left[job] = left.get(job, length) - 1 / TICKS / len(jobs)
        now += 1
        for job in (*heads, *sums, *loading):
            if left[job] < 1e-9:
                done[job] = now / TICKS
    return [Span(*job, began[job], end) for job, end in done.items()]


def _next_matmuls(group: int, tiles: int, done: Mapping, runs_ahead: bool) -> list[tuple]:
    """The matmuls that a warpgroup has issued by now."""
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


def _has_room(job: tuple, groups: Sequence[int], done: Mapping) -> bool:
    """Whether the ring has a free slot for a load."""
    reader = {"load K": "scores", "load V": "values"}[job[1]]
    old = job[2] - STAGES
    return old < 0 or all((group, reader, old) in done for group in groups)


def busy_share(spans: Sequence[Span]) -> float:
    """The share of the time in which the tensor cores multiply."""
    busy = union([(span.start, span.end) for span in spans if span.what in LOADED])
    return float(np.diff(busy).sum() / max(span.end for span in spans))


def draw_timeline(figure: Figure, setting: Mapping[str, Any]) -> None:
    """Draw `simulate(**setting)`: rows of the producer, the warpgroups and the tensor cores."""
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
            # two lanes, so that neighboring labels do not touch
            row, height = (-0.2 if span.what == "load K" else 0.2), 0.4
        style = {"color": color, "edgecolor": PAPER, "linewidth": 0.8}
        # the matmul with the values is paler than the scores
        style["alpha"] = 0.55 if span.what == "values" else 1.0
        axes.barh(row, span.end - span.start, height, span.start, **style)
        text = f"{name[span.what]}{span.tile}"
        middle = (span.start + span.end) / 2
        ink = "#222222" if span.who < 0 or span.what == "values" else "white"
        axes.text(middle, row, text, ha="center", va="center", fontsize=8.5, color=ink)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, max(span.end for span in spans)))
    axes.set(xlabel="time (1 = one matmul of a tile, alone)", ylabel="worker")
    axes.grid(visible=False)
    how = "in turns" if setting.get("in_turns") else "at will"
    if warpgroups == 1:
        how = "asking ahead" if setting["runs_ahead"] else "step by step"
    number = ("One warpgroup", "Two warpgroups", "Three warpgroups")[warpgroups - 1]
    busy = f"tensor cores busy {busy_share(spans):.0%} of the time"
    axes.set_title(f"{number}, {how}: {busy}")


def draw_fragments(figure: Figure, lane: int = 5) -> None:
    """Draw C += A · B of m16n8k8: the lane that holds each number; `lane` has a bold frame.

    A, (16, 8), stands left of C, (16, 8), and B, (8, 8), above C, as in a product by hand.
    """
    figure.suptitle(f"Fragments of mma.sync m16n8k8: what lane {lane} holds")
    panels = figure.subplots(2, 2, height_ratios=(8, 16), width_ratios=(1, 1))
    panels[0, 0].axis("off")
    words = (
        f"The number in a cell is its lane.\nBold: what lane {lane} holds.\nColours: lane mod 4."
    )
    panels[0, 0].text(0, 0.5, words, fontsize=11, va="center", color=INK)
    row, column = np.indices((16, 8))
    holders = row % 8 * 4 + column // 2  # of A and of C
    _draw_lanes(panels[1, 0], "A, 16 × 8", holders, lane)
    _draw_lanes(panels[1, 1], "C, 16 × 8", holders, lane)
    _draw_lanes(panels[0, 1], "B, 8 × 8", holders[:8].T, lane)


def _draw_lanes(axes: Axes, title: str, holders: np.ndarray, lane: int) -> None:
    """Draw a matrix as cells with the number of the lane that holds each."""
    for (row, column), holder in np.ndenumerate(holders):
        style = {"facecolor": QUAD[holder % 4], "edgecolor": PAPER, "linewidth": 1}
        axes.add_patch(Rectangle((column, row), 1, 1, **style))
        weight = "bold" if holder == lane else "normal"
        text = {"ha": "center", "va": "center", "fontsize": 8.5, "color": INK, "weight": weight}
        axes.text(column + 0.5, row + 0.5, str(holder), **text)
    for row, column in np.argwhere(holders == lane):
        style = {"facecolor": "none", "edgecolor": INK, "linewidth": 2.2, "zorder": 3}
        axes.add_patch(Rectangle((column, row), 1, 1, **style))
    rows, columns = holders.shape
    axes.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 0.1, -0.1), aspect="equal")
    axes.set_title(title, fontsize=11)
    axes.axis("off")


def draw_banks(figure: Figure, place: Callable[[int, int], int], chunk: int = 2) -> None:
    """Draw where eight rows of eight chunks lie, as they are and moved by `place(row, chunk)`.

    The cells of one `chunk`, which ldmatrix reads together, are orange.
    """
    ways = {"as they are": lambda row, chunk: chunk, "swizzled": place}
    for axes, (name, way) in zip(figure.subplots(ncols=2), ways.items()):
        for row in range(8):
            for number in range(8):
                color = ORANGE if number == chunk else GRID
                style = {"facecolor": color, "edgecolor": PAPER, "linewidth": 1.5}
                column = way(row, number)
                axes.add_patch(Rectangle((column, row), 1, 1, **style))
                text = {"ha": "center", "va": "center", "fontsize": 9, "color": INK}
                axes.text(column + 0.5, row + 0.5, str(number), **text)
        used = len({way(row, chunk) for row in range(8)})
        axes.set(xlim=(0, 8), ylim=(8, 0), aspect="equal")
        axes.set(xlabel="eighth of the banks (16 bytes each)", ylabel="row of the tile")
        axes.set_title(f"{name}: chunk {chunk} in {used} of 8")
        axes.set_xticks(np.arange(8) + 0.5, range(8))
        axes.set_yticks(np.arange(8) + 0.5, range(8))
        axes.tick_params(length=0)
        axes.grid(visible=False)
