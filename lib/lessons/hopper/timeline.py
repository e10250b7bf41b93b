"""When each warpgroup of the Hopper forward kernel does what, by the clock of its multiprocessor.

artifacts/attention_timeline.jsonl has it for schedules 7 and 8 of the ladder: for each warpgroup of
the first program, the clocks at each step of its loop, from 0 on. They were stored by a copy of
`lib.flash_attention.hopper.forward` with a few lines more.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from lib.core.charts import gantt
from lib.core.figures import BLUE, GRAY, ORANGE, SKY
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


def show_recorded(record: Record, first: int = 4, steps: int = 4) -> None:
    """Show what each warpgroup did in some steps of the loop, by the multiprocessor's clock."""
    clocks = record["figures"]["clocks"]
    origin = min(group[first][0] for group in clocks)
    lanes = {
        f"warpgroup {letter}": [
            (start - origin, end - origin, part)
            for step in group[first : first + steps]
            for part, (start, end) in zip(PARTS, itertools.pairwise(step))
        ]
        for letter, group in zip("ABC", clocks)
    }
    how = "ping-pong" if record["figures"]["is_ordered"] else "unordered"
    gantt(
        lanes,
        title=f"Three warpgroups, {how}, as recorded",
        xlabel="time (clocks)",
        styles={part: {"color": color} for part, color in zip(PARTS, COLORS)},
    )
