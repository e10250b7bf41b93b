"""Figures of notebook 08: memory by kind, partitions, slices, and steps over time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lib.core.figures import (
    BLACK,
    BLUE,
    COLORS,
    GRAY,
    GREEN,
    INK,
    MARKERS,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    VERMILLION,
)

# The kinds of bytes in a bar from left to right, with their colors.
KINDS = {
    "weights": BLUE,
    "gradients": GREEN,
    "Adam's moments": VERMILLION,
    "master weights": ORANGE,
    "activations": GRAY,
    "buffers": SKY,
}
# The memory of cards in GB, for limits.
CARDS = {16: "T4", 24: "RTX 4090", 80: "H100", 141: "H200"}
RANK_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
# Text on these is dark.
LIGHT = (ORANGE, SKY, GRAY, PURPLE)


def draw_kinds(
    axes: Axes,
    bars: Mapping[str, Mapping[str, float]],
    *,
    peaks: Mapping[str, float] | None = None,
    limits: Sequence[int] = (),
    percent: bool = False,
) -> None:
    """Draw a stacked bar of bytes by kind for each name.

    Args:
        bars: name -> bytes of each of `KINDS`.
        peaks: name -> peak bytes, drawn as a mark.
        limits: sizes of cards in GB, drawn as lines up to the first that none of the bars fills.
        percent: draw percentages instead of GB.
    """
    ends = []
    for place, kinds in enumerate(bars.values()):
        total = sum(kinds.values())
        unit = total / 100 if percent else 1e9
        left = 0.0
        for kind, num_bytes in kinds.items():
            width = num_bytes / unit
            color, label = KINDS[kind], "" if place else kind
            axes.barh(place, width, 0.66, left=left, color=color, linewidth=0, label=label)
            if percent and width > 7:
                style = {"ha": "center", "va": "center", "color": words_on(color)}
                axes.text(left + width / 2, place, f"{width:.0f}", **style)
            left += width
        ends.append(left)
        if not percent:
            # in a separate column, away from the lines of limits
            where = {"transform": axes.get_yaxis_transform(), "va": "center", "ha": "right"}
            axes.text(1.08, place, f"{left:.3g}", **where)
    if not percent:
        where = {"transform": axes.transAxes, "va": "bottom", "ha": "right", "fontsize": 9}
        axes.text(1.08, 1.02, "sum\n(GB)", **where)
    for place, name in enumerate(bars):
        if peaks:
            axes.vlines(peaks[name] / 1e9, place - 0.4, place + 0.4, color=BLACK, linewidth=2.5)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set_ylim(len(bars) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 100 if percent else 1.13 * max(ends))
    axes.set_xlabel("share of a rank's bytes (%)" if percent else "bytes of a rank (GB)")
    if limits:
        draw_limits(axes, limits, max(ends))


def draw_limits(axes: Axes, limits: Sequence[int], longest: float) -> None:
    """Draw a line for each card that is smaller than the longest bar, and for the next larger."""
    within = [size for size in limits if size <= longest]
    shown = [*within, *(size for size in limits if size > longest)][: len(within) + 1]
    axes.set_xlim(0, 1.13 * max(longest, shown[-1]))
    near = 0.13 * axes.get_xlim()[1]
    for before, size, after in zip([-near, *shown], shown, [*shown[1:], shown[-1] + 2 * near]):
        # labels of close neighbors would overlap
        side = "right" if after - size < near else "left" if size - before < near else "center"
        axes.axvline(size, color=INK, linewidth=1.4, linestyle="--", marker="")
        where = {"transform": axes.get_xaxis_transform(), "ha": side, "va": "bottom"}
        axes.text(size, 1.02, f"{size} GB\n{CARDS[size]}", fontsize=9, **where)


def words_on(color: str) -> str:
    """The color of text on `color`."""
    return INK if color in LIGHT else PAPER


def kinds_legend(figure: Figure, kinds: Sequence[str], *, peak: bool = False, **place) -> None:
    """Explain the colors of `draw_kinds`."""
    handles = [Patch(color=KINDS[kind], label=kind) for kind in kinds]
    if peak:
        handles.append(Patch(color=BLACK, label="peak"))
    figure.legend(handles=handles, ncols=len(handles), fontsize=9, **place)


def draw_partition(
    axes: Axes, sizes: Sequence[int], owners: Sequence[int], ranks: int, *, title: str
) -> None:
    """Draw the parameters that each rank owns as a row of blocks, and an equal share as a line."""
    loads = [0] * ranks
    for size, owner in zip(sizes, owners):
        style = {"color": RANK_COLORS[owner % len(RANK_COLORS)], "edgecolor": PAPER}
        axes.barh(owner, size / 1e6, 0.7, left=loads[owner] / 1e6, linewidth=1, **style)
        loads[owner] += size
    share = sum(sizes) / ranks
    axes.axvline(share / 1e6, color=INK, linewidth=1.4, linestyle="--", marker="")
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="elements (millions)", ylabel="owner")
    axes.set_title(f"{title}: largest load {max(loads) / share:.2f} × an equal share", fontsize=11)


def draw_flat(axes: Axes, sizes: Sequence[int], boundaries: Sequence[tuple[int, int]]) -> None:
    """Draw a buffer with its parameters in alternating shades, and the ranks' slices below it."""
    starts = [start / 1e6 for start in (0, *itertools.accumulate(sizes))]
    for number, (start, stop) in enumerate(itertools.pairwise(starts)):
        shade = (BLUE, SKY)[number % 2]
        axes.barh(1, stop - start, 0.62, left=start, color=shade, edgecolor=PAPER, linewidth=0.6)
    end = boundaries[-1][1] / 1e6
    if end > starts[-1]:
        style = {"facecolor": PAPER, "edgecolor": INK, "hatch": "////", "linewidth": 0.8}
        axes.barh(1, end - starts[-1], 0.62, left=starts[-1], **style)
    for rank, places in enumerate(boundaries):
        start, stop = (place / 1e6 for place in places)
        color = RANK_COLORS[1:][rank % (len(RANK_COLORS) - 1)]
        axes.barh(0, stop - start, 0.62, left=start, color=color, edgecolor=PAPER)
        words = f"rank {rank}: {places[0]:,} to {places[1]:,}"
        style = {"ha": "center", "va": "center", "fontsize": 9, "color": words_on(color)}
        axes.text((start + stop) / 2, 0, words, **style)
        axes.axvline(stop, color=INK, linewidth=1.2, linestyle="--", marker="")
    axes.set_yticks([1, 0], ["parameters", "slices"])
    axes.set(
        xlabel="offset in the buffer (millions of elements)", ylabel="buffer", xlim=(0, 1.005 * end)
    )
    axes.grid(visible=False)


def draw_who_holds(figure: Figure, ranks: int = 4) -> None:
    """Draw what each rank holds in data parallelism and in each stage of ZeRO, as boxes.

    A box is as high as its kind has bytes for each weight, in float32. What a rank doesn't hold is
    an empty frame.
    """
    kinds = {"weights": 4, "gradients": 4, "Adam's moments": 8}
    names = ("DDP", "stage 1", "stage 2", "stage 3")
    for stage, (axes, name) in enumerate(zip(figure.subplots(ncols=4, sharey=True), names)):
        held = 0.0
        for rank in range(ranks):
            bottom = 0.0
            for number, (kind, size) in enumerate(kinds.items()):
                # stage 1 divides the last kind, stage 2 also the one before, stage 3 all
                is_divided = number >= len(kinds) - stage
                color = KINDS[kind]
                height = size / ranks if is_divided else size
                start = bottom + (size - (rank + 1) * height if is_divided else 0)
                axes.bar(rank, size, 0.8, bottom, facecolor=PAPER, edgecolor=GRAY, linewidth=0.8)
                axes.bar(rank, height, 0.8, start, facecolor=color, edgecolor=INK, linewidth=0.8)
                held += height / ranks
                bottom += size
        axes.set_xticks(range(ranks), [str(rank) for rank in range(ranks)])
        axes.set(xlabel="rank", ylabel="bytes for each weight")
        axes.set_yticks([0, 4, 8, 16])
        axes.grid(visible=False)
        axes.set_title(f"{name}: {held:g} bytes", fontsize=11)
        axes.label_outer()
    handles = [Patch(color=KINDS[kind], label=kind) for kind in reversed(kinds)]
    figure.legend(handles=handles, ncols=3, fontsize=9, loc="outside lower center")


def draw_contexts(
    axes: Axes, curves: Mapping[str, Sequence[tuple[int, float]]], limits: Sequence[int]
) -> None:
    """Draw the peak of a rank over the tokens in a sequence, and the cards' limits.

    Args:
        curves: name -> pairs of tokens and bytes; dashed where the name tells of checkpoints.
    """
    for name, points in curves.items():
        place = [*curves].index(name) % (len(curves) // 2)
        tokens, num_bytes = zip(*points)
        line = "--" if "checkpoints" in name else "-"
        style = {"color": COLORS[place], "marker": MARKERS[place], "label": name}
        axes.plot(tokens, [value / 1e9 for value in num_bytes], linestyle=line, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    low, high = axes.get_ylim()
    ticks = [2**power for power in range(12) if low <= 2**power <= high]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    for size in limits:
        if low < size < high:
            axes.axhline(size, color=INK, linewidth=1.2, linestyle=":", marker="")
            where = {"ha": "left", "va": "bottom", "fontsize": 9}
            axes.text(tokens[0], size, f"{size} GB, {CARDS[size]}", **where)
    axes.set(xlabel="tokens in a sequence", ylabel="peak of a rank (GB)")
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
