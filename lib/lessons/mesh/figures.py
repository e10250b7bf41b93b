"""Figures of notebook 11: the schedules of a pipeline, and what a ring's ranks compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from lib.core.figures import BLUE, GRAY, INK, ORANGE, PAPER

COLORS = {"forward": GRAY, "backward": BLUE}
# numbers on the dark ones are light
WORDS = {"forward": INK, "backward": PAPER}


def show_schedules(steps: Mapping[str, Iterable[tuple[int, str, int, float, float]]]) -> None:
    """Draw steps above one another; a box is an event, its number the micro-batch.

    Args:
        steps: name -> (stage, kind, micro-batch, start, end) of each event, in milliseconds.
    """
    steps = {name: list(spans) for name, spans in steps.items()}
    stages = 1 + max(span[0] for spans in steps.values() for span in spans)
    end = max(span[4] for spans in steps.values() for span in spans)
    figure, grid = plt.subplots(
        nrows=len(steps),
        sharex=True,
        squeeze=False,
        figsize=(9.5, len(steps) * (0.8 + 0.32 * stages) + 0.5),
    )
    for axes, (name, spans) in zip(grid[:, 0], steps.items()):
        for stage, kind, number, start, stop in spans:
            style = {"color": COLORS[kind], "edgecolor": "white", "height": 0.9}
            axes.barh(stage, stop - start, left=start, **style)
            if stop - start > 0.015 * end:
                words = {"color": WORDS[kind], "ha": "center", "va": "center", "fontsize": 9}
                axes.text((start + stop) / 2, stage, number, **words)
        axes.set_yticks(range(stages))
        # the first stage on top
        axes.set(ylim=(stages - 0.5, -0.5), xlim=(0, 1.01 * end), ylabel="stage")
        axes.grid(visible=False, axis="y")
        axes.set_title(name, fontsize=11)
    grid[-1, 0].set_xlabel("time from the start of the step (ms)")
    handles = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=handles, ncols=2, fontsize=9, loc="outside lower center")
    plt.show()


def show_work(pairs: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Draw what each rank of a ring computes; a box is a step, its number that of the step.

    Args:
        pairs: name -> the visible pairs of each step, and in it of each rank.
    """
    _, grid = plt.subplots(nrows=len(pairs), sharex=True, squeeze=False, figsize=(9, 4.4))
    for axes, (name, steps) in zip(grid[:, 0], pairs.items()):
        ranks = len(steps[0])
        equal = sum(map(sum, steps)) / ranks
        ends = [0.0] * ranks
        for step, counts in enumerate(steps):
            for rank, count in enumerate(counts):
                if count:
                    color, ink = (ORANGE, INK) if step == 0 else (BLUE, PAPER)
                    style = {"color": color, "edgecolor": PAPER, "height": 0.8}
                    axes.barh(rank, count / equal, left=ends[rank], **style)
                    middle = ends[rank] + count / equal / 2
                    axes.text(middle, rank, step, color=ink, ha="center", va="center")
                ends[rank] += count / equal
        axes.axvline(1, color=INK, linestyle=":", marker="", zorder=0)
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_title(f"{name}: the busiest rank has {max(ends):.2f} equal shares", fontsize=11)
    grid[-1, 0].set_xlabel("visible pairs, in equal shares of all; a box is a step of the ring")
    plt.show()
