"""Pictures of notebook 03: paths through a valley, sweeps, losses, broken runs, float16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from torch import Tensor

from lib.core.figures import BLUE, GRID, INK, ORANGE, SKY, VERMILLION
from lib.lessons.profiling.figures import plain_log_ticks
from lib.lessons.training.broken import EVAL_INTERVAL, HEALTHY


def show_paths(paths: Mapping[str, Tensor], curvature: Tensor, *, first: int = 50) -> None:
    """Show ways down a valley from above, and the distance to its lowest point at each step."""
    across, along = np.meshgrid(np.linspace(-2, 2, 90), np.linspace(-5, 2, 90), indexing="ij")
    height = (curvature[0].item() * along**2 + curvature[1].item() * across**2) / 2
    figure, (left, right) = plt.subplots(ncols=2, figsize=(9, 4))
    left.contour(along, across, height, levels=[0.5, 4, 15, 40, 90, 170], colors=GRID)
    for name, path in paths.items():
        left.plot(*path[:first].T, marker="", linewidth=1.2)
        right.semilogy(path.norm(dim=1), marker="", label=name)
    left.set(xlabel="along the valley", ylabel="across the valley")
    left.set_title(f"Ways down, first {first} steps")
    left.grid(visible=False)
    right.set(xlabel="step", ylabel="distance to the lowest point", title="How close they come")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=len(paths))
    plt.show()


def show_decay(curves: Mapping[str, Tensor], sizes: Sequence[float], expected: Tensor) -> None:
    """Show the mean weight of groups with gradients of different `sizes`, step by step.

    Args:
        curves: name -> (steps, groups).
        expected: (steps,), what decay alone makes of a weight of 1.
    """
    _, panels = plt.subplots(ncols=len(curves), figsize=(9, 3.2), sharey=True)
    for axes, (name, curve) in zip(panels, curves.items()):
        for size, values in zip(sizes, curve.T):
            axes.plot(values, marker="", label=f"gradients of about {size:g}")
        axes.plot(expected, "k:", marker="", label="(1 − ηλ)ᵗ")
        axes.set(xlabel="step", title=name)
    panels[0].set_ylabel("mean of the weights")
    panels[-1].legend()
    plt.show()


def show_schedule(rates: Sequence[float], warmup_steps: int) -> None:
    """Show a learning rate by step, the warm-up shaded."""
    _, axes = plt.subplots(figsize=(7, 2.6))
    axes.plot(rates, marker="")
    axes.axvspan(0, warmup_steps, color=SKY, alpha=0.3, linewidth=0)
    axes.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    axes.set_title("Warm-up (shaded), then half a cosine")
    plt.show()


def show_sweep(losses: Mapping[float, float]) -> None:
    """Show the final loss for each learning rate."""
    _, axes = plt.subplots(figsize=(7, 3))
    axes.semilogx(list(losses), list(losses.values()), marker="o")
    axes.set(xlabel="learning rate", ylabel="held-out loss (nats per token)")
    axes.set_title("A learning-rate sweep is a U")
    plt.show()


def show_norms(norms: Sequence[float], max_norm: float) -> None:
    """Show the gradient norm of each step and the limit above which it was clipped."""
    _, axes = plt.subplots(figsize=(7, 2.6))
    axes.plot(range(1, len(norms) + 1), norms, marker="")
    axes.axhline(max_norm, linestyle=":", color=INK, marker="", label="clipped above")
    axes.set(xlabel="step", ylabel="gradient norm", title="Gradient norm", ylim=(0, None))
    axes.legend()
    plt.show()


def show_surprise(tokens: Sequence[str], bits: Sequence[float]) -> None:
    """Show each token's surprise as a bar."""
    _, axes = plt.subplots(figsize=(9, 2.8))
    axes.bar(range(len(tokens)), bits)
    axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=9)
    axes.set(xlabel="token that came", ylabel="surprise (bits)", title="Where the loss is")
    axes.grid(visible=False, axis="x")
    axes.margins(x=0.01)
    plt.show()


def show_bits_per_byte(values: Mapping[str, float]) -> None:
    """Show who needs how many bits per byte; the last one is the floor."""
    _, axes = plt.subplots(figsize=(7, 3))
    models = [ORANGE if "model" not in name else BLUE for name in values]
    bars = axes.barh(list(values), list(values.values()), color=[*models[:-1], INK])
    axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.set(xlabel="bits per byte of held-out stories", title="Models, compressors and the floor")
    axes.grid(visible=False)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    plt.show()


def show_above_floor(bits_per_byte: Mapping[int, float], marks: Mapping[str, float]) -> None:
    """Show a run's bits per byte by step, and others' as horizontal lines."""
    _, axes = plt.subplots(figsize=(7, 3))
    axes.semilogy(list(bits_per_byte), list(bits_per_byte.values()), marker="")
    for name, value in marks.items():
        axes.axhline(value, color=INK, linewidth=1, linestyle=":", marker="")
        place = (max(bits_per_byte), value)
        axes.annotate(name, place, xytext=(0, 3), textcoords="offset points", ha="right")
    axes.set(xlabel="step", ylabel="bits per byte", title="Your run, and how low it could go")
    axes.set_ylim(0.08, 4)
    plain_log_ticks(axes.yaxis)
    plt.show()


def show_broken_runs(runs: Mapping[str, Mapping[str, Any]], floor: float) -> None:
    """Show losses and gradient norms of the broken runs, each above a healthy one in gray.

    Args:
        floor: the least possible loss, in nats per token.
    """
    broken = {name: run for name, run in runs.items() if name != HEALTHY}
    healthy = runs[HEALTHY]
    figure, panels = plt.subplots(
        nrows=4, ncols=3, figsize=(9, 8), sharex=True, height_ratios=[2, 1, 2, 1]
    )
    for index, (name, run) in enumerate(broken.items()):
        row, column = 2 * (index // 3), index % 3
        upper, lower = panels[row, column], panels[row + 1, column]
        at = np.arange(1, len(run["held_out_loss"]) + 1) * EVAL_INTERVAL
        gray = {"color": "#9a9a9a", "marker": "", "linewidth": 1}
        upper.plot(healthy["loss"], label="healthy run", **gray)
        upper.plot(run["loss"], color=BLUE, marker="", linewidth=1, label="training")
        upper.plot(at, run["held_out_loss"], "--", color=VERMILLION, marker="", label="held out")
        upper.axhline(floor, color=INK, linestyle=":", linewidth=1, label="floor")
        upper.set(title=f"Run {name}", ylim=(-0.3, 11))
        lower.semilogy(healthy["grad_norm"], **gray)
        lower.semilogy(run["grad_norm"], color=BLUE, marker="", linewidth=1)
        lower.set_ylim(0.02, 10)
    for row in range(4):
        panels[row, 0].set_ylabel("gradient norm" if row % 2 else "loss (nats)")
    for axes in panels[-1]:
        axes.set_xlabel("step")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    plt.show()


def show_token_times(times_ms: Mapping[str, Mapping[int, float]]) -> None:
    """Show the time of the next token by the number of tokens before it."""
    _, axes = plt.subplots(figsize=(7, 3))
    for name, points in times_ms.items():
        axes.plot(list(points), list(points.values()), label=name)
    axes.set(xlabel="tokens before", ylabel="time of the next one (ms)", ylim=(0, None))
    axes.set_title("What the next token costs")
    axes.legend()
    plt.show()


def show_float16(gradient: Tensor) -> None:
    """Show the sizes of gradients, as they are and times 2¹⁶, and what float16 can hold."""
    _, axes = plt.subplots(figsize=(7, 2.8))
    sizes = gradient[gradient != 0].abs().log2()
    for name, shift, color in (("as they are", 0, ORANGE), ("loss times 2¹⁶", 16, BLUE)):
        axes.hist(sizes + shift, bins=80, alpha=0.8, color=color, label=name)
    axes.axvspan(axes.get_xlim()[0], -25, color=INK, alpha=0.12, linewidth=0)
    axes.axvspan(-25, -14, color=INK, alpha=0.05, linewidth=0)
    axes.set(xlabel="log₂ of a gradient's size", ylabel="number of gradients")
    axes.set_title("What float16 can hold")
    for place, words in ((-25, "becomes 0 "), (-14, "loses digits ")):
        where = {"xycoords": ("data", "axes fraction"), "ha": "right", "va": "top"}
        axes.annotate(words, (place, 0.98), **where)
    axes.margins(x=0, y=0.15)
    axes.legend()
    plt.show()
