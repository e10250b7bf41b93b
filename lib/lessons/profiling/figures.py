"""Pictures of notebook 04: the memory hierarchy of a GPU, timelines, samples, memory."""

from __future__ import annotations

import html
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axis import Axis
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from lib.core.figures import BLUE, GRAY, GREEN, PURPLE, SKY, VERMILLION
from lib.lessons.profiling.simulated import Kernel, ToyTrainer, draw_loop
from lib.lessons.show import show_svg

if TYPE_CHECKING:
    from IPython.display import HTML

    from lib.profiling.measurement import Measurement

# Colors of kernels by name; none of these means a kind of work elsewhere in the notebook.
TRACE_COLORS = (GREEN, PURPLE, SKY, VERMILLION)


@dataclass(frozen=True)
class Level:
    """A level of a machine's memory."""

    name: str
    size: str
    bandwidth: str
    tb_per_s: float | None
    """None: as fast as arithmetic needs it."""

    holds: str


# NVIDIA's data sheet of the H200 and white paper of its architecture (Hopper): 132 multiprocessors
# at up to 1.98 GHz, 128 bytes a clock from shared memory, 989 TFLOP/s in bfloat16. L2: its size
# as PyTorch reports it, its bandwidth by gpu-benches (gpu-l2-cache/h200.txt).
PEAK_TFLOPS = 989
LEVELS = (
    Level("registers", "35 MB", "every clock", None, "operands of the instruction that runs"),
    Level("shared memory (SRAM)", "31 MB", "33 TB/s", 33.4, "the tile that a block works on"),
    Level("L2 cache", "60 MB", "≈ 9.8 TB/s", 9.8, "what several blocks read soon after another"),
    Level(
        "HBM, the GPU's memory", "141 GB", "4.8 TB/s", 4.8, "weights, activations, AdamW's state"
    ),
    Level("another GPU (NVLink)", "141 GB", "450 GB/s", 0.45, "its own copy, or its shard"),
    Level("the host's memory (PCIe)", "≈ 1 TB", "64 GB/s", 0.064, "data, checkpoints"),
)
SVG_STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#222}.name{font-weight:600}"
    ".note{font-size:12.5px;fill:#555}.head{font-size:12.5px;fill:#555}"
)


def memory_hierarchy_svg() -> str:
    """The levels of an H200's memory as steps of a pyramid, with the intensity that each asks for.

    Drawn on an opaque light card, so that it reads the same on light and dark pages.
    """
    row, left, top = 58, 18, 66
    height = top + row * len(LEVELS) + 48
    boxes = []
    for index, level in enumerate(LEVELS):
        y = top + row * index
        width = 190 + 32 * index
        color = ("#9fd3ef", "#bfe0f5", "#d6eaf7", "#fbe3b0", "#f6d6c4", "#f0c3a8")[index]
        need = "–" if level.tb_per_s is None else f"{PEAK_TFLOPS / level.tb_per_s:,.0f}"
        boxes.append(
            f'<rect x="{left}" y="{y}" width="{width}" height="46" rx="6" fill="{color}" '
            f'stroke="#8a8f98"/><text class="name" x="{left + 12}" y="{y + 28}">{level.name}</text>'
            f'<text x="396" y="{y + 20}">{level.size} · {level.bandwidth}</text>'
            f'<text class="note" x="396" y="{y + 39}">{html.escape(level.holds)}</text>'
            f'<text class="name" x="742" y="{y + 28}" text-anchor="end">{need}</text>'
        )
    heads = (
        '<text class="name" x="18" y="28" style="font-size:16px">Memory of an H200, all 132 '
        'multiprocessors together</text><text class="head" x="396" y="54">size · bandwidth</text>'
        '<text class="head" x="742" y="54" text-anchor="end">ridge (FLOP/byte)</text>'
    )
    foot = (
        f'<text class="note" x="18" y="{height - 18}">Ridge: the FLOPs that a byte from this level '
        f"must take part in to keep {PEAK_TFLOPS} TFLOP/s of bfloat16 matmuls busy.</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img" '
        f'aria-label="{html.escape(memory_hierarchy_words())}" '
        f'style="width:760px;max-width:none"><style>{SVG_STYLE}</style>'
        f'<rect width="760" height="{height}" rx="10" fill="#FBFAF7" stroke="#D9D6CF"/>'
        f"{heads}{''.join(boxes)}{foot}</svg>"
    )


def memory_hierarchy_words() -> str:
    """The picture in words."""
    levels = ", ".join(f"{level.name}: {level.size}, {level.bandwidth}" for level in LEVELS)
    return f"Levels of memory of an H200 from fast and small to slow and large. {levels}."


def show_memory_hierarchy() -> HTML:
    """The memory hierarchy of an H200."""
    return show_svg(memory_hierarchy_svg())


def show_samples(times_ms: Sequence[float], *, title: str, measurement: Measurement | None = None):
    """Show samples in their order; with a measurement, its median, mean and middle half too."""
    _, axes = plt.subplots(figsize=(7, 2.8))
    axes.plot(range(1, len(times_ms) + 1), times_ms, "o", label="a sample")
    if measurement is not None:
        low, high = np.percentile(times_ms, [25, 75])
        axes.axhspan(low, high, color=SKY, alpha=0.4, linewidth=0, label="middle half (IQR)")
        axes.axhline(measurement.median_ms, color=BLUE, marker="", label="median")
        style = {"color": VERMILLION, "linestyle": "--", "marker": ""}
        axes.axhline(measurement.mean_ms, **style, label="mean")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4)
    axes.set(xlabel="call", ylabel="time (ms)", ylim=(0, 1.1 * max(times_ms)), title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plt.show()


def show_lines(
    lines: Mapping[str, Mapping[float, float]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    ticks: Sequence[float] | None = None,
) -> None:
    """Show name -> {x: y} on logarithmic axes; `ticks`: where the x-axis is labeled."""
    _, axes = plt.subplots(figsize=(7, 3.4))
    for name, points in lines.items():
        axes.loglog(list(points), list(points.values()), "o-", label=name)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    plain_log_ticks(axes.yaxis)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if ticks is not None:
        axes.set_xticks(ticks)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.legend()
    plt.show()


def plain_log_ticks(axis: Axis) -> None:
    """Label a logarithmic axis 1, 2, 5, 10, 20, … in plain digits."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())


def show_loop(trainer: ToyTrainer, *, title: str) -> None:
    """Show what host and device of a toy training loop did."""
    _, axes = plt.subplots(figsize=(9, 1.7))
    draw_loop(axes, trainer)
    axes.set_title(title)
    plt.show()


def short(name: str, width: int = 36) -> str:
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
    _, panels = plt.subplots(nrows=len(traces), figsize=(9, 1.75 * len(traces)))
    for axes, (title, kernels) in zip(np.atleast_1d(panels), traces.items()):
        origin = kernels[0].start
        spent: dict[str, float] = defaultdict(float)
        for kernel in kernels:
            spent[short(kernel.name)] += kernel.end - kernel.start
        colors = dict(zip(sorted(spent, key=lambda name: -spent[name])[:named], TRACE_COLORS))
        for name in spent:
            spans = [(k.start - origin, k.end - k.start) for k in kernels if short(k.name) == name]
            bars = {"facecolors": colors.get(name, GRAY), "edgecolor": "white", "linewidth": 0.3}
            axes.broken_barh(spans, (-0.4, 0.8), **bars)
        for name, color in colors.items():
            axes.plot([], [], "s", color=color, label=f"{spent[name]:,.0f} µs {name}")
        axes.set_yticks([0], ["GPU"])
        axes.set(ylim=(0.5, -0.5), title=f"Trace {title}", ylabel="")
        axes.grid(visible=False, axis="y")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    axes.set_xlabel("time (µs)")
    plt.show()
