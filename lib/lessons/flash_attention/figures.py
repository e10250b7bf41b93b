"""Figures of notebook 06: visited tiles, fragments, banks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from lib.core.figures import GRID, INK, ORANGE, PAPER, SKY

# Colors of the four lanes of a quad.
QUAD = ("#9fd3ef", "#fbe3b0", "#c9ead6", "#f3cfe0")


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


def draw_fragments(figure: Figure, lane: int = 5) -> None:
    """Draw C += A · B of m16n8k8: the lane that holds each number; `lane` has a bold frame.

    A, (16, 8), stands left of C, (16, 8), and B, (8, 8), above C, as in a product by hand.
    """
    figure.suptitle(f"Fragments of mma.sync m16n8k8: what lane {lane} holds")
    panels = figure.subplots(2, 2, height_ratios=(8, 16), width_ratios=(1, 1))
    panels[0, 0].axis("off")
    words = f"The number in a cell is its lane.\nBold: what lane {lane} holds.\nColors: lane mod 4."
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


def draw_ldmatrix(figure: Figure, lane: int = 5) -> None:
    """Draw how two matrices of `ldmatrix` become A of m16n8k8; what `lane` gets has a bold frame.

    Left, for each row in shared memory, the lane that names its address; right, for each number,
    the lane that holds it afterwards.
    """
    figure.suptitle(f"A of mma.sync m16n8k8 by ldmatrix: what lane {lane} gets")
    naming, holding = figure.subplots(ncols=2)
    row, column = np.indices((16, 8))
    for number in range(16):
        style = {"facecolor": SKY if number < 8 else ORANGE, "edgecolor": PAPER, "linewidth": 1.5}
        naming.add_patch(Rectangle((0, number), 8, 1, **style))
        text = {"ha": "center", "va": "center", "fontsize": 8.5, "color": INK}
        naming.text(4, number + 0.5, f"lane {number}", **text)
    naming.set(xlim=(-0.1, 8.1), ylim=(16.1, -0.1), aspect="equal")
    naming.set_title("which lane names a row", fontsize=11)
    naming.axis("off")
    _draw_lanes(holding, "which lane holds a number", row % 8 * 4 + column // 2, lane)


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


# Names of kernels in the sweep's report -> their names in a figure, ours first.
KERNELS = {
    "flash_attention_triton": "ours",
    "sdpa_cudnn": "cuDNN",
    "fa4": "FlashAttention-4",
    "fa4_deterministic": "FlashAttention-4, repeatable",
    "sdpa_flash": "FlashAttention-2",
    "flex_attention": "FlexAttention",
}


def peer_speeds(
    rows: Sequence[Mapping[str, Any]], direction: str, head_dim: int
) -> dict[str, dict[int, float]]:
    """Kernel -> tokens -> TFLOP/s, causal, with as many queries as keys; KERNELS that have any."""
    wanted = {"direction": direction, "head_dim": head_dim, "mask": "causal"}
    square = [row for row in rows if row["queries"] == row["keys"] and row.get("tflops")]
    found: dict[str, dict[int, float]] = {}
    for kernel, name in KERNELS.items():
        for row in square:
            if row["kernel"] == kernel and all(row[key] == value for key, value in wanted.items()):
                found.setdefault(name, {})[row["queries"]] = row["tflops"]
    return found


def draw_peers(figure: Figure, speeds: Mapping[str, Mapping[str, Mapping[int, float]]]) -> None:
    """Draw TFLOP/s by length, a panel for each direction of `speeds` (`peer_speeds`)."""
    panels = figure.subplots(ncols=len(speeds), squeeze=False, sharey=True)[0]
    for axes, (direction, kernels) in zip(panels, speeds.items()):
        for name, found in kernels.items():
            tokens = sorted(found)
            width = 2.6 if name == "ours" else 1.4
            axes.plot(tokens, [found[n] for n in tokens], label=name, linewidth=width)
        axes.set_xscale("log", base=2)
        ticks = sorted({n for found in kernels.values() for n in found})
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
        axes.set(xlabel="tokens", ylabel="speed (TFLOP/s)", title=direction, ylim=(0, None))
    panels[0].legend(fontsize=8, ncols=2, loc="lower right")
