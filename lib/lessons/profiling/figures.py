"""Pictures of notebook 04 that are more than a chart: samples, a loop, traces of kernels."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import pyplot as plt

from lib.core.charts import gantt, lines
from lib.core.figures import BLUE, GRAY, INK, PURPLE, SKY, VERMILLION
from lib.lessons.profiling.simulated import Kernel, ToyTrainer

if TYPE_CHECKING:
    from lib.profiling.measurement import Measurement

# Colors of kernels by name; none of these means a kind of work elsewhere in the notebook.
TRACE_COLORS = (PURPLE, "#44AA99", "#DDCC77", "#882255")


def show_samples(times_ms: Sequence[float], *, title: str, measurement: Measurement | None = None):
    """Show samples in their order; with a measurement, its median, mean and middle half too."""
    _, axes = plt.subplots(figsize=(7, 2.8))
    series = {"a sample": dict(enumerate(times_ms, start=1))}
    if measurement is not None:
        low, high = np.percentile(times_ms, [25, 75])
        axes.axhspan(low, high, color=SKY, alpha=0.4, linewidth=0, label="middle half (IQR)")
        for name, value in (("median", measurement.median_ms), ("mean", measurement.mean_ms)):
            series[name] = dict.fromkeys((1, len(times_ms)), value)
    lines(
        series,
        axes=axes,
        title=title,
        xlabel="call",
        ylabel="time (ms)",
        ylim=(0, 1.1 * max(times_ms)),
        styles={
            "a sample": {"linestyle": "", "marker": "o"},
            "median": {"color": BLUE, "marker": ""},
            "mean": {"color": VERMILLION, "linestyle": "--", "marker": ""},
        },
        legend="right",
    )
    plt.show()


def show_loop(trainer: ToyTrainer, *, title: str) -> None:
    """Show what host and device of a toy training loop did."""
    colors = {"load": GRAY, "launch": INK, "wait": VERMILLION, "step": BLUE}
    lanes: dict[str, list[tuple]] = {"host": [], "GPU": []}
    for kind, start, end in trainer.spans:
        if kind in colors:
            lanes["GPU" if kind == "step" else "host"].append((start, end, kind))
    styles = {kind: {"color": color} for kind, color in colors.items()}
    gantt(lanes, title=title, xlabel="time (ms)", styles=styles, size=(9, 1.8))


def short(name: str, width: int = 48) -> str:
    """A kernel's name without its C++ namespaces and template arguments, cut to `width`.

    >>> short("void at::native::vectorized_elementwise_kernel<4, at::native::AddOp<float>>(int)")
    'vectorized_elementwise_kernel'
    """
    name = re.sub(r"^void |\(anonymous namespace\)::", "", name)
    name = re.split(r"[<(]", name)[0].rpartition("::")[2]
    return name if len(name) <= width else f"{name[: width - 1]}…"


def show_traces(traces: Mapping[str, Sequence[Kernel]], *, named: int = 4) -> None:
    """Show traces, name -> kernels, each on its own time axis, and the names that take longest.

    Colors tell names apart and mean nothing else; names beyond the first `named` are gray.
    """
    for title, kernels in traces.items():
        origin = kernels[0].start
        spent: dict[str, float] = defaultdict(float)
        for kernel in kernels:
            spent[short(kernel.name)] += kernel.end - kernel.start
        longest = sorted(spent, key=lambda name: -spent[name])[:named]
        labels = {name: f"{spent[name]:,.0f} µs {name}" for name in longest}
        # the longest first, also in the legend
        kernels = sorted(kernels, key=lambda kernel: -spent[short(kernel.name)])
        boxes = [
            (k.start - origin, k.end - origin, labels.get(short(k.name), "_rest")) for k in kernels
        ]
        styles = {label: {"color": c} for label, c in zip(labels.values(), TRACE_COLORS)}
        styles["_rest"] = {"color": GRAY}
        how: dict = {"xlabel": "time (µs)", "styles": styles, "size": (10.5, 1.7)}
        gantt({"GPU": boxes}, title=f"Trace {title}", **how)
