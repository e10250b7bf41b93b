"""Figures of notebook 07: fragments and banks of a T4's kernel, speeds of libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from lib.core.charts import heat, lines
from lib.core.figures import GRID, ORANGE, SKY

# Colors of the four lanes of a quad.
QUAD = dict(zip("0123", ("#9fd3ef", "#fbe3b0", "#c9ead6", "#f3cfe0")))


def show_fragments(lane: int = 5) -> None:
    """Show C += A · B of m16n8k8: the lane that holds each number; `lane` has a bold frame.

    A, (16, 8), stands left of C, (16, 8), and B, (8, 8), above C, as in a product by hand.
    """
    figure, panels = plt.subplots(2, 2, height_ratios=(8, 16), figsize=(6.2, 7.6))
    figure.suptitle(f"Fragments of mma.sync m16n8k8: what lane {lane} holds")
    panels[0, 0].axis("off")
    words = (
        f"The number in a cell is its lane.\nFramed: what lane {lane} holds.\nColors: lane mod 4."
    )
    panels[0, 0].text(0, 0.5, words, va="center")
    row, column = np.indices((16, 8))
    holders = row % 8 * 4 + column // 2  # of A and of C
    matrices = {"A, 16 × 8": holders, "B, 8 × 8": holders[:8].T, "C, 16 × 8": holders}
    for axes, (title, lanes) in zip((panels[1, 0], panels[0, 1], panels[1, 1]), matrices.items()):
        _draw_lanes(axes, title, lanes, lane)
    plt.show()


def show_ldmatrix(lane: int = 5) -> None:
    """Show how two matrices of `ldmatrix` become A of m16n8k8; what `lane` gets has a bold frame.

    Left, for each row in shared memory, the lane that names its address; right, for each number,
    the lane that holds it afterwards.
    """
    figure, (naming, holding) = plt.subplots(ncols=2, figsize=(6.2, 5.4))
    figure.suptitle(f"A of mma.sync m16n8k8 by ldmatrix: what lane {lane} gets")
    heat(
        np.repeat([["upper"], ["lower"]], 8, axis=0),
        axes=naming,
        title="which lane names a row",
        xlabel="",
        ylabel="row in shared memory",
        texts=np.array([[f"lane {number}"] for number in range(16)]),
        kinds={"upper": SKY, "lower": ORANGE},
        square=False,
        legend="none",
    )
    naming.set_xticks([])
    row, column = np.indices((16, 8))
    _draw_lanes(holding, "which lane holds a number", row % 8 * 4 + column // 2, lane)
    plt.show()


def _draw_lanes(axes: Axes, title: str, holders: np.ndarray, lane: int) -> None:
    """Draw a matrix as cells with the number of the lane that holds each."""
    heat(
        (holders % 4).astype(str),
        axes=axes,
        title=title,
        xlabel="column",
        ylabel="row",
        texts=holders,
        kinds=QUAD,
        framed=holders == lane,
        legend="none",
    )


def show_banks(place: Callable[[int, int], int], chunk: int = 2) -> None:
    """Show where eight rows of eight chunks lie, as they are and moved by `place(row, chunk)`.

    The cells of one `chunk`, which ldmatrix reads together, are orange.
    """
    ways = {"as they are": lambda row, chunk: chunk, "swizzled": place}
    _, panels = plt.subplots(ncols=2, figsize=(9, 4.2))
    for axes, (name, way) in zip(panels, ways.items()):
        chunks = np.full((8, 8), -1)
        for row, number in np.ndindex(8, 8):
            chunks[row, way(row, number)] = number
        used = len({way(row, chunk) for row in range(8)})
        heat(
            np.where(chunks == chunk, "read together", "others"),
            axes=axes,
            title=f"{name}: chunk {chunk} in {used} of 8",
            xlabel="eighth of the banks (16 bytes each)",
            ylabel="row of the tile",
            texts=np.where(chunks < 0, "", chunks.astype(str)),
            kinds={"read together": ORANGE, "others": GRID},
            legend="none",
        )
    plt.show()


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


def show_peers(speeds: Mapping[str, Mapping[str, Mapping[int, float]]], *, title: str) -> None:
    """Show TFLOP/s by length, a panel for each direction of `speeds` (`peer_speeds`)."""
    figure, panels = plt.subplots(ncols=len(speeds), squeeze=False, sharey=True, figsize=(9.5, 3.8))
    figure.suptitle(title, x=0.01, ha="left")
    for axes, (direction, kernels) in zip(panels[0], speeds.items()):
        lines(
            {name: dict(sorted(found.items())) for name, found in kernels.items()},
            axes=axes,
            title=direction,
            xlabel="tokens",
            ylabel="speed (TFLOP/s)",
            log="x",
            xticks=sorted({tokens for found in kernels.values() for tokens in found}),
            ylim=(0, None),
            styles={"ours": {"linewidth": 2.6}},
            legend="none",
        )
        axes.label_outer()
    names = panels[0, 0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=3, fontsize=9)
    plt.show()
