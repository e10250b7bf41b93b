"""Widgets and helpers of notebook 06: online softmax tile by tile, kernel source, records.

Where a slider cannot be moved, some of its pictures are shown instead (`lib.lessons.explorer`).
"""

from __future__ import annotations

import ast
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from lib.core.charts import bars
from lib.core.figures import BLUE, GRID, INK, SKY, VERMILLION
from lib.core.files import ROOT
from lib.lessons.explorer import explorer, picture
from lib.lessons.show import show_excerpt

if TYPE_CHECKING:
    from IPython.display import Markdown
    from ipywidgets import VBox


@dataclass(frozen=True)
class SoftmaxStep:
    """The state of online softmax in one row after some of its keys."""

    seen: int
    """The number of keys so far."""

    before: float
    """The maximum before the last tile; -inf at first."""

    maximum: float
    """m, the maximum so far."""

    shrink: float
    """exp(before - m), the factor by which the earlier sums were rescaled."""

    total: float
    """l, the sum so far of exp(score - m)."""

    out: np.ndarray
    """o, the sum so far of exp(score - m) · value: (head_dim,)."""


def softmax_steps(scores: np.ndarray, values: np.ndarray, tile: int) -> list[SoftmaxStep]:
    """The states of online softmax over `scores`, (keys,), and `values`, (keys, head_dim)."""
    steps = [SoftmaxStep(0, -math.inf, -math.inf, 1.0, 0.0, np.zeros(values.shape[1]))]
    for start in range(0, len(scores), tile):
        part, last = scores[start : start + tile], steps[-1]
        maximum = max(last.maximum, float(part.max()))
        shrink = math.exp(last.maximum - maximum)
        p = np.exp(part - maximum)
        total = shrink * last.total + float(p.sum())
        out = shrink * last.out + p @ values[start : start + tile]
        seen = min(start + tile, len(scores))
        steps.append(SoftmaxStep(seen, last.maximum, maximum, shrink, total, out))
    return steps


def softmax_stepper(scores: np.ndarray, values: np.ndarray, *, tile: int) -> VBox:
    """A slider through the tiles of one row: scores, exponentials and the output so far."""
    steps = softmax_steps(scores, values, tile)

    def draw(figure: Figure, tiles: int) -> None:
        draw_softmax_step(figure, scores, steps, tiles)

    still = [(1,), (2,), (len(steps) - 1,)]
    return explorer(picture(draw, width=9.5, height=3.6), tiles=range(len(steps)), still=still)


def draw_softmax_step(
    figure: Figure, scores: np.ndarray, steps: Sequence[SoftmaxStep], number: int
) -> None:
    """Draw the state after `number` tiles."""
    step, end, before = steps[number], steps[-1], steps[max(0, number - 1)]
    panels = figure.subplots(ncols=3, width_ratios=(2, 2, 1.5))
    when = np.digitize(np.arange(len(scores)), [before.seen, step.seen])
    colors = dict(enumerate({"color": (BLUE, VERMILLION, GRID)[w]} for w in when))
    how: dict = {"upright": True, "styles": colors}
    bars(
        dict(enumerate(scores)),
        axes=panels[0],
        title=f"scores, m = {step.maximum:.2f}" if number else "scores",
        xlabel="key",
        ylabel="score",
        **how,
    )
    if number:
        panels[0].axhline(step.maximum, color=INK, linewidth=1.2, marker="")
        if math.isfinite(step.before):
            panels[0].axhline(step.before, color=INK, linewidth=1.2, linestyle=":", marker="")
    heights = np.exp(np.where(when < 2, scores, -np.inf) - (step.maximum if number else 0))
    title = f"exp(score - m), l = {step.total:.2f}"
    labels: dict = {"xlabel": "key", "ylabel": "exp(score - m)"}
    bars(dict(enumerate(heights)), axes=panels[1], title=title, **labels, **how)
    panels[1].set_ylim(0, 1.1)
    rows = zip(step.out, step.out / max(step.total, 1), end.out / end.total)
    bars(
        {c: dict(zip(("o", "o / l", "final"), values)) for c, values in enumerate(rows)},
        axes=panels[2],
        title="o, and o / l",
        xlabel="channel",
        ylabel="output",
        upright=True,
        styles={"o": {"color": SKY}, "o / l": {"color": BLUE}, "final": {"color": INK}},
        legend="upper left",
    )
    reached = [0.0, *np.ravel([[s.out, s.out / max(s.total, 1)] for s in steps])]
    panels[2].set_ylim(min(reached) - 0.3, 1.5 * max(reached) + 0.3)
    for axes in panels[:2]:
        axes.set_xticks(range(0, len(scores), 5))
    figure.suptitle(_words(step, before), x=0.01, ha="left", fontsize=11)


def _words(step: SoftmaxStep, before: SoftmaxStep) -> str:
    if step.seen == 0:
        return "Nothing seen: m = -∞, l = 0, o = 0"
    new = step.total - step.shrink * before.total
    if before.seen == 0:
        return f"First tile: m = {step.maximum:.2f}, l = {new:.2f}"
    if step.shrink == 1:
        return f"m stays {step.maximum:.2f}:  l = {before.total:.2f} + {new:.2f} = {step.total:.2f}"
    return (
        f"m: {step.before:.2f} → {step.maximum:.2f}, so the earlier sums are multiplied by "
        f"exp({step.before:.2f} - {step.maximum:.2f}) = {step.shrink:.2f}:  "
        f"l = {step.shrink:.2f} · {before.total:.2f} + {new:.2f} = {step.total:.2f}"
    )


def show_kernel(file: str, name: str, first: str = "", last: str = "") -> Markdown:
    """Show the function `name` of lib/`file`.py, which is not imported: its compiler may be
    missing here. `first` and `last` as in `lib.lessons.show.show_excerpt`."""
    path = ROOT / "lib" / f"{file}.py"
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            source = ast.get_source_segment(text, node, padded=True)
            return show_excerpt(source, f"lib/{file}.py", name, first, last, line=node.lineno)
    raise ValueError(f"lib/{file}.py has no function {name!r}")


def show_cuda(file: str, name: str, first: str, last: str) -> Markdown:
    """Show the lines of lib/flash_attention/cuda/`file` from `first` to `last`, in `name`."""
    path = f"lib/flash_attention/cuda/{file}"
    text = (ROOT / path).read_text(encoding="utf-8")
    return show_excerpt(text, path, name, first, last, language="cpp")


def needed_row(rows: Iterable[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any]:
    """The first row with the values `wanted`; LookupError if there is none."""
    for row in rows:
        if all(row.get(key) == value for key, value in wanted.items()):
            return row
    asked = ", ".join(f"{key} = {value!r}" for key, value in wanted.items())
    raise LookupError(f"no measured row has {asked}; the records need to be made again")


def recorded_on_gpu(path: str | os.PathLike) -> Sequence[Mapping[str, Any]]:
    """The newest record of each case in an attention sweep, on the GPU with the most records."""
    from collections import Counter

    from lib.core.records import read_records
    from lib.tools.benchmarks.attention_report import newest_records

    records = [r for r in read_records(path) if r["device"] != r["cpu"]]
    device = Counter(record["device"] for record in records).most_common(1)[0][0]
    return newest_records(record for record in records if record["device"] == device)
