"""The figure of notebook 10: a step's events on a clock."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib import pyplot as plt

from lib.core.charts import gantt
from lib.core.figures import BLUE, GRAY, GREEN, ORANGE
from lib.lessons.fsdp.orders import Played

# Kind of an event -> its name and its color.
KINDS = {
    "gather": ("all-gather", ORANGE),
    "forward": ("forward", GRAY),
    "backward": ("backward", BLUE),
    "reduce": ("reduce-scatter", GREEN),
}


def show_orders(steps: Mapping[str, Played]) -> None:
    """Show steps above one another, on one time axis; a box is an event, its number the block."""
    size = (9.5, 1.5 * len(steps) + 0.9)
    figure, grid = plt.subplots(nrows=len(steps), sharex=True, squeeze=False, figsize=size)
    end = max(step.ms for step in steps.values())
    for axes, (name, step) in zip(grid[:, 0], steps.items()):
        lanes: dict[str, list[tuple]] = {"compute": [], "network": []}
        for span in step.spans:
            lanes[span.lane].append((span.start, span.end, KINDS[span.kind][0], span.block))
        gantt(
            lanes,
            axes=axes,
            title=f"{name}: {step.ms:.3g} ms",
            xlabel="time from the start of the step (ms)",
            span=(0, 1.01 * end),
            styles={kind: {"color": color} for kind, color in KINDS.values()},
            legend="none",
        )
        axes.label_outer()
    figure.legend(*axes.get_legend_handles_labels(), ncols=4, loc="outside lower center")
    plt.show()
