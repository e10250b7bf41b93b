"""Pictures of notebook 03 that are more than a chart: valley, band, broken runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from torch import Tensor

from lib.core.charts import lines
from lib.core.figures import BLUE, GRAY, GRID, INK, ORANGE, VERMILLION
from lib.lessons.training.band import SMOOTHED
from lib.lessons.training.faults import EVAL_INTERVAL, HEALTHY


def show_paths(paths: Mapping[str, Tensor], curvature: Tensor, *, first: int = 50) -> None:
    """Show ways down a valley from above, and the distance to its lowest point at each step.

    Args:
        paths: name -> (steps, runs, 2). Of the first run the way is drawn; the distance is the root
            of the mean square of all.
    """
    across, along = np.meshgrid(np.linspace(-2, 2, 90), np.linspace(-5, 2, 90), indexing="ij")
    height = (curvature[0].item() * along**2 + curvature[1].item() * across**2) / 2
    figure, (left, right) = plt.subplots(ncols=2, figsize=(9, 4))
    left.contour(along, across, height, levels=[0.5, 4, 15, 40, 90, 170], colors=GRID)
    for path in paths.values():
        left.plot(*path[:first, 0].T, marker="", linewidth=1.2)
    left.plot(0, 0, "x", color=INK, markersize=8, zorder=5)
    left.annotate("lowest point", (0, 0), (6, -14), textcoords="offset points", fontsize=9)
    left.set(xlabel="along the valley", ylabel="across the valley")
    left.set_title(f"One run each, the same noise, first {first} steps", fontsize=11)
    left.grid(visible=False)
    lines(
        {name: path.square().sum(-1).mean(1).sqrt() for name, path in paths.items()},
        axes=right,
        title=f"How close they come, over {next(iter(paths.values())).shape[1]} runs",
        xlabel="step",
        ylabel="distance to the lowest point",
        log="y",
        legend="none",
    )
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=len(paths))
    plt.show()


def show_band(
    curve: Mapping[int, float],
    band: Mapping[str, Sequence[float]] | None,
    *,
    levels: Mapping[str, float],
    first: int = 100,
) -> None:
    """Show a run's losses from step `first` on, and behind them a `band` of other runs.

    Args:
        band: "steps", and of each the "low" and "high" loss.
    """
    _, axes = plt.subplots(figsize=(7, 3.4))
    late = {step: loss for step, loss in curve.items() if step >= first}
    lines(
        {"your run": late or curve},
        axes=axes,
        title="Your run among eight others",
        xlabel="step",
        ylabel=f"loss, mean of {SMOOTHED} steps (nats)",
        levels=levels,
        styles={"your run": {"marker": ""}},
        legend="none",
    )
    if band:
        places = zip(band["steps"], band["low"], band["high"])
        others = zip(*(place for place in places if place[0] >= first))
        look = {"color": ORANGE, "alpha": 0.5, "linewidth": 0, "label": "eight other seeds"}
        axes.fill_between(*others, **look)
    axes.legend()
    plt.show()


def show_broken_runs(runs: Mapping[str, Mapping[str, Any]], floor: float) -> None:
    """Show losses and gradient norms of the broken runs, each above a healthy one in gray.

    Args:
        floor: the least possible loss, in nats per token.
    """
    healthy = runs[HEALTHY]
    styles = {
        "healthy run": {"color": GRAY, "linewidth": 1},
        "training": {"color": BLUE, "linewidth": 1},
        "held out": {"color": VERMILLION, "linestyle": "--", "marker": ""},
        "floor": {"color": INK, "linestyle": ":", "linewidth": 1, "marker": ""},
    }
    figure, panels = plt.subplots(
        nrows=4, ncols=3, figsize=(9, 8), sharex=True, height_ratios=[2, 1, 2, 1]
    )
    pairs = [pair for rows in (panels[:2], panels[2:]) for pair in rows.T]
    broken = {name: run for name, run in runs.items() if name != HEALTHY}
    for (upper, lower), (name, run) in zip(pairs, broken.items()):
        held_out = dict(enumerate(run["held_out_loss"], start=1))
        losses = {"healthy run": healthy["loss"], "training": run["loss"]}
        losses["held out"] = {EVAL_INTERVAL * count: loss for count, loss in held_out.items()}
        losses["floor"] = dict.fromkeys((0, len(run["loss"])), floor)
        norms = {"healthy run": healthy["grad_norm"], "training": run["grad_norm"]}
        how: dict = {"xlabel": "step", "styles": styles, "legend": "none"}
        lines(losses, axes=upper, title=f"Run {name}", ylabel="loss (nats)", ylim=(-0.3, 11), **how)
        lines(norms, axes=lower, title="", ylabel="gradient norm", log="y", ylim=(0.02, 10), **how)
        for axes in (upper, lower):
            axes.label_outer()
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    plt.show()
