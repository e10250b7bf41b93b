"""How long a control takes to answer, in charts: what plain matplotlib takes beside it.

A limit in seconds would test the machine: the same move takes twice as long where it is shared.
"""

import io
import statistics
import time
from collections.abc import Callable, Iterable

from matplotlib import pyplot as plt


def draw_chart() -> None:
    """Bars with a title, a legend and their layout, stored in the usual way."""
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for place, name in enumerate(("one", "two", "three", "four")):
        axes.bar(place, 1 + place, label=name)
    axes.set(title="title", xlabel="place", ylabel="height")
    axes.legend()
    figure.savefig(io.BytesIO(), format="png", dpi=200)
    plt.close(figure)


def process_seconds(work: Callable[[], object]) -> float:
    """What this process computes for it; other programs are not counted."""
    start = time.process_time()
    work()
    return time.process_time() - start


def charts_per_move(moves: Iterable[Callable[[], object]]) -> float:
    """The median time of `moves`, each over that of the charts drawn before and after it."""
    ratios, before = [], process_seconds(draw_chart)
    for move in moves:
        seconds, after = process_seconds(move), process_seconds(draw_chart)
        ratios.append(2 * seconds / (before + after))
        before = after
    return statistics.median(ratios)
