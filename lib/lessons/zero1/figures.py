"""Figures of notebook 09: memory by kind, partitions, slices, contexts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from lib.core.charts import bars, gantt, lines
from lib.core.figures import BLACK, BLUE, COLORS, GRAY, GREEN, INK, MARKERS, ORANGE, SKY, VERMILLION

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


def draw_kinds(
    axes: Axes,
    memories: Mapping[str, Mapping[str, float]],
    peaks: Mapping[str, float],
) -> None:
    """Draw a stacked bar of bytes by kind for each name, its peak, and the cards around it.

    Args:
        memories: name -> bytes of each of `KINDS`.
        peaks: name -> peak bytes, drawn as a mark.
    """
    gigabytes = {
        name: {kind: num_bytes / 1e9 for kind, num_bytes in kinds.items()}
        for name, kinds in memories.items()
    }
    bars(
        gigabytes,
        axes=axes,
        title="",
        xlabel="bytes of a rank (GB), with their sum; black: the peak",
        ylabel="sharding",
        stacked=True,
        texts="{:.3g}",
        styles={kind: {"color": color} for kind, color in KINDS.items()},
        legend="below",
    )
    for place, name in enumerate(memories):
        axes.vlines(peaks[name] / 1e9, place - 0.4, place + 0.4, color=BLACK, linewidth=2.5)
    longest = max(sum(kinds.values()) for kinds in gigabytes.values())
    within = [size for size in CARDS if size <= longest]
    shown = [*within, *(size for size in CARDS if size > longest)][: len(within) + 1]
    axes.set_xlim(0, 1.13 * max(longest, shown[-1]))
    for size in shown:
        axes.axvline(size, color=INK, linewidth=1.4, linestyle="--", marker="")
        where = {"transform": axes.get_xaxis_transform(), "rotation": 90, "fontsize": 9}
        axes.text(size, 1.02, f"{size} GB, {CARDS[size]}", ha="center", va="bottom", **where)


def show_partitions(sizes: Sequence[int], owners: Mapping[str, Sequence[int]], ranks: int) -> None:
    """Show the parameters that each rank owns as a row of blocks, and an equal share as a line.

    Args:
        sizes: elements of each parameter.
        owners: a way to share them out -> the owner of each.
    """
    share = sum(sizes) / ranks
    _, panels = plt.subplots(ncols=len(owners), figsize=(10, 2.6), sharex=True)
    for axes, (name, chosen) in zip(panels, owners.items()):
        lanes: dict[str, list[tuple]] = {f"rank {rank}": [] for rank in range(ranks)}
        loads = [0] * ranks
        for size, rank in zip(sizes, chosen):
            start, loads[rank] = loads[rank], loads[rank] + size
            lanes[f"rank {rank}"].append((start / 1e6, loads[rank] / 1e6, f"rank {rank}"))
        gantt(
            lanes,
            axes=axes,
            title=f"{name}: largest load {max(loads) / share:.2f} × an equal share",
            xlabel="elements (millions)",
            ylabel="owner",
            legend="none",
        )
        axes.axvline(share / 1e6, color=INK, linewidth=1.4, linestyle="--", marker="")
    # the widest of them, since both have one axis
    axes.set_xlim(0, 1.05 * max(max(x.dataLim.x1 for x in panels), share / 1e6))
    plt.show()


def show_flat(sizes: Sequence[int], boundaries: Sequence[tuple[int, int]], *, title: str) -> None:
    """Show a buffer with its parameters in alternating shades, and the ranks' slices below it."""
    starts = [start / 1e6 for start in (0, *itertools.accumulate(sizes))]
    spans = itertools.pairwise(starts)
    parameters = [(*span, ("_even", "_odd")[i % 2]) for i, span in enumerate(spans)]
    parameters.append((starts[-1], boundaries[-1][1] / 1e6, "_padding"))
    slices = [
        (start / 1e6, stop / 1e6, f"_{rank}", f"{rank}: {start:,} to {stop:,}")
        for rank, (start, stop) in enumerate(boundaries)
    ]
    colors = {"_even": BLUE, "_odd": SKY, "_padding": GRAY}
    colors |= {f"_{rank}": COLORS[1 + rank % 5] for rank in range(len(boundaries))}
    gantt(
        {"parameters": parameters, "slices of ranks": slices},
        title=title,
        xlabel="offset in the buffer (millions of elements)",
        ylabel="buffer",
        styles={kind: {"color": color} for kind, color in colors.items()},
        size=(10, 2),
    )


def show_contexts(curves: Mapping[str, Mapping[int, float]], *, title: str) -> None:
    """Show the peak of a rank over the tokens in a sequence, and the cards' limits.

    Args:
        curves: name -> {tokens: bytes}; dashed where the name tells of checkpoints.
    """
    styles = {}
    for index, name in enumerate(curves):
        place = index % (len(curves) // 2)
        line = "--" if "checkpoints" in name else "-"
        styles[name] = {"color": COLORS[place], "marker": MARKERS[place], "linestyle": line}
    gigabytes = {
        name: {tokens: peak / 1e9 for tokens, peak in points.items()}
        for name, points in curves.items()
    }
    reached = [peak for points in gigabytes.values() for peak in points.values()]
    lines(
        gigabytes,
        title=title,
        xlabel="tokens in a sequence",
        ylabel="peak of a rank (GB)",
        log="xy",
        xticks=list(next(iter(curves.values()))),
        levels={
            f"{size} GB, {card}": size
            for size, card in CARDS.items()
            if min(reached) < size < max(reached)
        },
        styles=styles,
        legend="below",
        size=(10, 4.4),
    )
