"""Figures of notebook 06: the tiles that a causal mask leaves, and the speed of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import Normalize

from lib.core.charts import heat
from lib.core.figures import ORANGE, PAPER, SKY

if TYPE_CHECKING:
    import pandas as pd


def show_visited_tiles(lengths: Sequence[int], tile: int) -> None:
    """Show the score matrix in tiles under a causal mask: skipped, in full, or with a mask."""
    colors = {"skipped": PAPER, "in full": SKY, "with a mask": ORANGE}
    _, panels = plt.subplots(ncols=len(lengths), figsize=(4.6 * len(lengths), 3.4))
    for axes, length in zip(panels, lengths):
        first = np.arange(0, length, tile)
        last = np.minimum(first + tile, length) - 1
        is_skipped, is_full = first > last[:, None], last <= first[:, None]
        kinds = np.select([is_skipped, is_full], ["skipped", "in full"], "with a mask")
        share = (kinds != "skipped").mean()
        masked = (kinds == "with a mask").sum() / (kinds != "skipped").sum()
        heat(
            kinds,
            axes=axes,
            title=f"{length:,} tokens: {share:.0%} visited\n{masked:.0%} of them masked",
            xlabel=f"tiles of {tile} keys",
            ylabel=f"tiles of {tile} queries",
            kinds=colors,
            legend="right" if axes is panels[-1] else "none",
        )
    plt.show()


def show_tile_speeds(rows: pd.DataFrame) -> None:
    """Show TFLOP/s of a kernel by BQ and BK, a panel for each number of warps.

    Args:
        rows: records of artifacts/attention_tiles.jsonl; of equal settings the last counts.
    """
    rows = rows.drop_duplicates(["BQ", "BK", "num_warps"], keep="last").astype({"tflops": float})
    numbers, best = sorted(rows["num_warps"].unique()), rows["tflops"].max()
    _, panels = plt.subplots(ncols=len(numbers), squeeze=False, figsize=(4.2 * len(numbers), 4.0))
    for axes, warps in zip(panels[0], numbers):
        table = rows[rows["num_warps"] == warps].pivot(index="BQ", columns="BK", values="tflops")
        heat(
            table,
            axes=axes,
            title=f"{warps} warps: TFLOP/s",
            xlabel="BK, keys of a tile",
            ylabel="BQ, queries of a tile",
            texts=table.map(lambda speed: "–" if np.isnan(speed) else f"{speed:.0f}").to_numpy(),
            framed=table.to_numpy() == best,
            norm=Normalize(0, best),
        )
    plt.show()
