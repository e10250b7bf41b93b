"""What notebook 05 shows: online softmax tile by tile, code of kernels, kernels interpreted.

As in `lib.widgets`, where nobody can move a slider a few of its pictures are shown instead.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from lib.plots import BLUE, GRID, INK, SKY, VERMILLION
from lib.plots_flash_attention import draw_timeline
from lib.widgets import _line_with
from lib.widgets_model import figure_slider

if TYPE_CHECKING:
    from IPython.display import Markdown
    from ipywidgets import VBox
    from torch import Tensor

LIB = Path(__file__).parent
# What `timeline_slider` shows: the settings of `lib.plots_flash_attention.simulate`.
TIMELINES = {
    "one, step by step": {"warpgroups": 1, "tiles": 4, "runs_ahead": False},
    "one, asking ahead": {"warpgroups": 1, "tiles": 4, "runs_ahead": True},
    "two, at will": {"warpgroups": 2, "tiles": 4, "runs_ahead": True},
    "two, in turns": {"warpgroups": 2, "tiles": 4, "runs_ahead": True, "in_turns": True},
    "three, in turns": {"warpgroups": 3, "tiles": 4, "runs_ahead": True, "in_turns": True},
}


@dataclass(frozen=True)
class SoftmaxStep:
    """Online softmax of one row after some of its keys."""

    seen: int
    """How many keys."""

    before: float
    """The maximum before the last tile; -inf at first."""

    maximum: float
    """The maximum so far, m."""

    shrink: float
    """exp(before - m): the factor of what was summed before."""

    total: float
    """The sum so far of exp(score - m), l."""

    out: np.ndarray
    """The sum so far of exp(score - m) · value, o: (head_dim,)."""


def softmax_steps(scores: np.ndarray, values: np.ndarray, tile: int) -> list[SoftmaxStep]:
    """Online softmax of a row of `scores`, (keys,), with `values`, (keys, head_dim)."""
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
    """A slider through the tiles of one row: scores, exponentials, and the output so far."""
    steps = softmax_steps(scores, values, tile)
    names = {f"{number} of {len(steps) - 1}": number for number in range(len(steps))}

    def draw(figure: Figure, number: int) -> None:
        draw_softmax_step(figure, scores, steps, number)

    return figure_slider(
        draw, names, description="tiles", still=list(names)[1:], width=9.5, height=3.6
    )


def draw_softmax_step(
    figure: Figure, scores: np.ndarray, steps: Sequence[SoftmaxStep], number: int
) -> None:
    """The state after `number` tiles of a row."""
    step, end = steps[number], steps[-1]
    before = steps[max(0, number - 1)]
    left, middle, right = figure.subplots(ncols=3, width_ratios=(2, 2, 1.5))
    places = np.arange(len(scores))
    seen = places < step.seen
    colors = np.where(places < before.seen, BLUE, np.where(seen, VERMILLION, GRID))
    left.bar(places, scores, color=colors)
    if number:
        left.axhline(step.maximum, color=INK, linewidth=1.2, marker="", label="m")
    if math.isfinite(step.before):
        style = {"color": INK, "linewidth": 1.2, "linestyle": ":", "marker": ""}
        left.axhline(step.before, label="m before", **style)
    # of the legend, also where it is empty
    margin = 0.12 * np.ptp(scores)
    left.set(ylim=(scores.min() - margin, scores.max() + 3 * margin))
    left.set(xlabel="key", ylabel="score", title="scores")
    if number:
        left.legend(loc="upper left", ncols=2, fontsize=9)
    heights = np.exp(np.where(seen, scores, -np.inf) - (step.maximum if number else 0))
    middle.bar(places, heights, color=colors)
    middle.set(ylim=(0, 1.1), xlim=left.get_xlim(), xlabel="key", ylabel="exp(score - m)")
    middle.set_title(f"exp(score - m), l = {step.total:.2f}")
    channels = np.arange(len(end.out))
    right.bar(channels - 0.2, step.out, 0.4, color=SKY, label="o")
    right.bar(channels + 0.2, step.out / max(step.total, 1), 0.4, color=BLUE, label="o / l")
    style = {"color": INK, "markersize": 12, "linestyle": "", "label": "in the end"}
    right.plot(channels + 0.2, end.out / end.total, "_", **style)
    reached = [0.0, *np.ravel([[s.out, s.out / max(s.total, 1)] for s in steps])]
    right.set(ylim=(min(reached) - 0.3, 1.5 * max(reached) + 0.3), xticks=channels)
    right.set(xlabel="channel", ylabel="output", title="o, and o / l")
    right.legend(loc="upper left", fontsize=9, ncols=3, columnspacing=1, handlelength=1)
    for axes in (left, middle, right):
        axes.grid(visible=False, axis="x")
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
        f"m: {step.before:.2f} → {step.maximum:.2f}, so the sums so far are worth "
        f"exp({step.before:.2f} - {step.maximum:.2f}) = {step.shrink:.2f}:  "
        f"l = {step.shrink:.2f} · {before.total:.2f} + {new:.2f} = {step.total:.2f}"
    )


def timeline_slider() -> VBox:
    """Who works when in the kernel for Hopper, for a few ways to organise it."""
    still = list(TIMELINES)[1:]
    return figure_slider(
        draw_timeline, TIMELINES, description="warpgroups", still=still, width=9.5, height=3.9
    )


def show_kernel(file: str, name: str, first: str = "", last: str = "") -> Markdown:
    """The code of a kernel in `lib`, whether or not its compiler is installed here.

    Args:
        file: such as `flash_attention_triton`.
        name: of the function.
        first, last: texts in the lines where an excerpt begins and ends; all lines by default.

    Raises:
        ValueError: there is no such function, or no such line in it.
    """
    import textwrap

    from IPython.display import Markdown

    lines = kernel_lines(file, name)
    start = _line_with(lines, first, 0) if first else 0
    stop = _line_with(lines, last, start) if last else len(lines) - 1
    code = textwrap.dedent("\n".join(lines[start : stop + 1]))
    return Markdown(f"`lib/{file}.py`, `{name}`:\n\n```python\n{code}\n```")


@functools.cache
def kernel_lines(file: str, name: str) -> list[str]:
    """The lines of the function `name` in lib/`file`.py; nothing of it is run.

    Raises:
        ValueError: there is no such function.
    """
    text = (LIB / f"{file}.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return text.splitlines()[node.lineno - 1 : node.end_lineno]
    raise ValueError(f"lib/{file}.py has no function {name!r}")


def interpret(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *, is_causal: bool = True
) -> tuple[list[Tensor], float]:
    """The Triton kernels' output and gradients of q, k and v, by Triton's interpreter.

    In a process of its own, since Triton decides when it is imported whether it interprets.

    Args:
        q, k, v, grad_out: (batch, heads, tokens, head_dim), float32 or float16: bfloat16 is wrong
            in the interpreter.

    Returns:
        The four tensors, and the seconds that the kernels took.

    Raises:
        RuntimeError: Triton is not installed, or cannot interpret here; says why.
    """
    import torch

    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("Triton is not installed; it comes with PyTorch on Linux")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tensors.pt"
        torch.save([x.detach().cpu() for x in (q, k, v, grad_out)], path)
        code = "import sys; from lib.widgets_flash_attention import _interpret_file as run; "
        code += f"run(sys.argv[1], {bool(is_causal)})"
        changed = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            cwd=LIB.parent,
            env={**os.environ, **changed, "PYTHONPATH": str(LIB.parent)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or f"exit code {done.returncode}")[-500:])
        return tuple(torch.load(path))


def _interpret_file(path: str, is_causal: bool) -> None:
    """Replace the inputs in the file at `path` by what the kernels make of them."""
    import torch

    from lib.flash_attention_triton import flash_attention

    *leaves, grad_out = torch.load(path)
    for leaf in leaves:
        leaf.requires_grad_()
    started = time.perf_counter()
    out = flash_attention(*leaves, is_causal=is_causal)
    grads = torch.autograd.grad(out, leaves, grad_out)
    seconds = time.perf_counter() - started
    torch.save([[out.detach(), *grads], seconds], path)


def needed_row(rows: Iterable[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any]:
    """The row with the figures `wanted`, which the lesson cannot do without.

    Raises:
        LookupError: no row has them; names them.
    """
    for row in rows:
        if all(row.get(key) == value for key, value in wanted.items()):
            return row
    asked = ", ".join(f"{key} = {value!r}" for key, value in wanted.items())
    raise LookupError(f"no measured row has {asked}; the records need to be made again")


def recorded_on_gpu(path: str | os.PathLike) -> list[Mapping[str, Any]]:
    """The records of attention in the file at `path`: of the GPU with the most, of each case the
    newest."""
    from collections import Counter

    from lib.benchmark_attention_report import newest_records
    from lib.report import read_records

    records = [r for r in read_records(path) if r["device"] != r["cpu"]]
    if not records:
        return []
    device = Counter(record["device"] for record in records).most_common(1)[0][0]
    return newest_records(record for record in records if record["device"] == device)
