"""Figures of notebook 09: a step's events on a clock."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from lib.core.figures import BLUE, GRAY, GREEN, INK, ORANGE, PAPER
from lib.lessons.fsdp.orders import Played

COLORS = {"gather": ORANGE, "forward": GRAY, "backward": BLUE, "reduce": GREEN}
# numbers on the dark ones are light
WORDS = {"gather": INK, "forward": INK, "backward": PAPER, "reduce": PAPER}
LANES = {"compute": 1.0, "network": 0.0}


def show_orders(steps: Mapping[str, Played]) -> None:
    """Draw steps above one another, on one time axis; a box is an event, its number the block."""
    figure, grid = plt.subplots(
        nrows=len(steps), sharex=True, squeeze=False, figsize=(9.5, 1.5 * len(steps) + 0.9)
    )
    end = max(step.ms for step in steps.values())
    for axes, (name, step) in zip(grid[:, 0], steps.items()):
        for span in step.spans:
            style = {"color": COLORS[span.kind], "edgecolor": "white", "height": 0.8}
            axes.barh(LANES[span.lane], span.end - span.start, left=span.start, **style)
            middle = (span.start + span.end) / 2
            if span.end - span.start > 0.015 * end:
                words = {"color": WORDS[span.kind], "ha": "center", "va": "center"}
                axes.text(middle, LANES[span.lane], span.block, **words)
        axes.set_yticks(list(LANES.values()), list(LANES))
        axes.set(ylim=(-0.5, 1.5), xlim=(0, 1.01 * end))
        axes.grid(visible=False, axis="y")
        axes.set_title(f"{name}: {step.ms:.3g} ms", fontsize=11)
    grid[-1, 0].set_xlabel("time from the start of the step (ms)")
    words = {"gather": "all-gather", "reduce": "reduce-scatter"}
    handles = [Patch(color=color, label=words.get(kind, kind)) for kind, color in COLORS.items()]
    figure.legend(handles=handles, ncols=4, fontsize=9, loc="outside lower center")
    plt.show()
