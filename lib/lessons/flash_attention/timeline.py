"""When each warpgroup of the Hopper forward kernel does what, by the clock of its multiprocessor.

artifacts/attention_timeline.jsonl has it for schedules 7 and 8 of the ladder: for each warpgroup of
the first program, the clocks at each step of its loop, from 0 on. They were stored by a copy of
`lib.flash_attention.hopper.forward` with a few lines more.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from lib.core.figures import BLUE, GRAY, GRID, ORANGE, PAPER, SKY
from lib.core.files import ROOT
from lib.core.records import Record, read_records
from lib.flash_attention.hopper import launch

RECORDS = ROOT / "artifacts/attention_timeline.jsonl"
# Operations per clock of the tensor cores of a multiprocessor, in 16 bits.
FLOPS_A_CLOCK = 4096
# Work of a warpgroup from one of the five clocks of a step to the next; after the last it waits.
PARTS = ("issues matmuls", "waits for scores", "softmax", "waits for weights × values")
COLORS = (BLUE, GRAY, ORANGE, SKY)


def recorded_timelines(path: Path = RECORDS) -> dict[bool, Record]:
    """Whether warpgroups take turns -> the newest record."""
    return {record["figures"]["is_ordered"]: record for record in read_records(path)}


def shares(record: Record) -> Mapping[str, float]:
    """Activity of a warpgroup -> its share of the time from the first noted step to the last."""
    clocks = record["figures"]["clocks"]
    total = sum(steps[-1][0] - steps[0][0] for steps in clocks)
    found = dict.fromkeys((*PARTS, "rest of the loop, and its turn"), 0.0)
    for steps in clocks:
        for step, following in itertools.pairwise(steps):
            for name, start, end in zip(found, step, (*step[1:], following[0])):
                found[name] += (end - start) / total
    return found


def mean_step(record: Record) -> float:
    """Clocks of a step of the loop, on average of all warpgroups."""
    groups = record["figures"]["clocks"]
    return sum((g[-1][0] - g[0][0]) / (len(g) - 1) for g in groups) / len(groups)


def busy_share(record: Record) -> float:
    """The share of the time in which the tensor cores multiply, if they do so at their peak."""
    head_dim, warpgroups = record["config"]["head_dim"], len(record["figures"]["clocks"])
    flops = warpgroups * 4 * launch.ROWS * launch.forward_schedule(head_dim).keys * head_dim
    return flops / FLOPS_A_CLOCK / mean_step(record)


def draw_recorded(figure: Figure, record: Record, first: int = 4, steps: int = 4) -> None:
    """Draw what each warpgroup did in some steps of the loop, by the multiprocessor's clock."""
    axes, clocks = figure.subplots(), record["figures"]["clocks"]
    origin = min(group[first][0] for group in clocks)
    for row, group in enumerate(clocks):
        for step, (name, color) in itertools.product(
            group[first : first + steps], zip(PARTS, COLORS)
        ):
            start, end = step[PARTS.index(name)], step[PARTS.index(name) + 1]
            style = {"color": color, "edgecolor": PAPER, "linewidth": 0.8}
            label = name if row == 0 and step is group[first] else None
            axes.barh(row, end - start, 0.8, start - origin, label=label, **style)
    axes.set_yticks(range(len(clocks)), [f"warpgroup {'ABC'[i]}" for i in range(len(clocks))])
    axes.set(ylim=(len(clocks) - 0.4, -0.6), xlabel="time (clocks)")
    axes.grid(visible=False, axis="y")
    axes.grid(color=GRID, axis="x")
    how = "ping-pong" if record["figures"]["is_ordered"] else "unordered"
    axes.set_title(f"Three warpgroups, {how}, as recorded")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, fontsize=9)
