"""Figures of notebook 06: the tiles that a causal mask leaves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import pyplot as plt

from lib.core.charts import heat
from lib.core.figures import ORANGE, PAPER, SKY


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
