"""The figure of notebook 10: who holds which block when, and how much that is."""

from __future__ import annotations

import numpy as np
from matplotlib import pyplot as plt

from lib.core.charts import gantt
from lib.core.figures import BLUE, GRAY, GREEN, INK, ORANGE, SKY
from lib.lessons.fsdp.orders import Played

# Kind of an event -> its name and its color.
KINDS = {
    "gather": ("all-gather", ORANGE),
    "forward": ("forward", GRAY),
    "backward": ("backward", BLUE),
    "reduce": ("reduce-scatter", GREEN),
    "held": ("gathered, or on its way", SKY),
}


def show_step(step: Played, blocks: int, ranks: int, *, title: str) -> None:
    """Show a rank's step: what it computes and sends, which blocks it holds, and how many weights.

    A box in the rows `compute` and `network` is an event, its number the block. Below are the
    weights on the rank, in blocks: its shards, and the blocks that it has gathered.
    """
    lanes: dict[str, list[tuple]] = {"compute": [], "network": []}
    lanes |= {f"block {block}": [] for block in range(blocks)}
    for span in step.spans:
        lane = f"block {span.block}" if span.lane == "memory" else span.lane
        words = "" if span.lane == "memory" else span.block
        lanes[lane].append((span.start, span.end, KINDS[span.kind][0], words))
    size = {"figsize": (9.5, 2.6 + 0.35 * len(lanes)), "sharex": True}
    figure, (above, below) = plt.subplots(nrows=2, height_ratios=(len(lanes), 4), **size)
    gantt(
        lanes,
        axes=above,
        title=title,
        xlabel="",
        span=(0, 1.01 * step.ms),
        styles={kind: {"color": color} for kind, color in KINDS.values()},
        legend="none",
    )
    figure.legend(*above.get_legend_handles_labels(), ncols=5, loc="outside lower center")

    # the weights at each moment at which they change
    held = [span for span in step.spans if span.lane == "memory"]
    times = np.unique([0.0, step.ms, *(t for span in held for t in (span.start, span.end))])
    gathered = [sum(span.start <= t < span.end for span in held) for t in times]
    below.step(times, np.array(gathered) + blocks / ranks, where="post", color=BLUE, marker="")
    for level, words in ((blocks, "DDP"), (blocks / ranks, "shards alone")):
        below.axhline(level, color=INK, linewidth=1.2, linestyle=":", marker="")
        place = {"transform": below.get_yaxis_transform(), "va": "center", "fontsize": 9}
        below.text(1.01, level, words, **place)
    below.set(ylim=(0, 1.1 * blocks), ylabel="weights (blocks)")
    below.set_xlabel("time from the start of the step (ms)")
    plt.show()
