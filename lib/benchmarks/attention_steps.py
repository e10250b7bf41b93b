"""The speed gained by each optimization of our attention kernels, on one Hopper GPU.

Naive attention, the portable Triton kernels, the Hopper kernels with one more feature at a time,
and cuDNN as the peer are interleaved on the same inputs: causal, in bfloat16.

`python -m lib benchmark attention-steps` writes attention_steps.jsonl, .md and .png.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lib.benchmarks.attention import AttentionCase, make_inputs, measure_right, named_attention
from lib.benchmarks.attention_report import case_name
from lib.benchmarks.sections import Section, Table, measured_on, write_report
from lib.benchmarks.sweep import run_sweep
from lib.core.figures import BLUE, PURPLE, SKY, VERMILLION, house_figure, save_figure
from lib.core.hardware import local_results, pick_device
from lib.core.records import Record
from lib.core.settings import PositiveInt, settings
from lib.model.attention import attention

# Steps in their order, as records name them and as tables and figures show them.
NAMES = {
    "textbook": "naive",
    "portable": "Triton tiles, no prefetch",
    "portable_pipelined": "… prefetch",
    "hopper": "Hopper kernel",
    "hopper_warpgroups": "… more warpgroups",
    "hopper_persistent": "… persistent",
    "hopper_ordered": "… ping-pong",
    "hopper_kept": "… operands in registers",
    "cudnn": "cuDNN",
}
# The feature of a Hopper schedule that each step adds.
FEATURES = {
    "hopper_warpgroups": "warpgroups",
    "hopper_persistent": "is_persistent",
    "hopper_ordered": "is_ordered",
    "hopper_kept": "kept",
}
SHAPE = ["batch_size", "heads", "tokens", "head_dim"]
SHAPES = ((4, 32, 4096, 64), (32, 12, 1024, 64), (4, 16, 4096, 128))
NOTE = """Causal attention in bfloat16. All rows of a table were interleaved on the same inputs.
TFLOP/s count 2 · batch · heads · tokens² · head_dim forward and 2.5 times that backward. A step
that changes nothing for a shape is left out. `error` is the largest relative error against float32,
over the results of four heads. `gain`: speed over that of the row above."""

Results = tuple[Tensor, ...]
# A step's settings in words, and a function that returns (out,) or (dq, dk, dv).
Step = tuple[str, Callable[[], Results]]
# One forward kernel, or two backward kernels: for dQ, and for dK and dV.
Tiles = tuple[Any, ...]
Schedules = tuple[Any, ...]


@settings
class AttentionStepsConfig:
    """The speed gained by each optimization of the attention kernels."""

    samples: PositiveInt = 30
    """Samples of each step."""

    device: str = "cuda"
    """A Hopper GPU: `cuda` or `cuda:N`."""

    restart: bool = False
    """Measure again what already has a record."""

    output: Path = dataclasses.field(default_factory=local_results)
    """Folder for records, table and figure."""


def measure_steps(config: AttentionStepsConfig) -> list[Record]:
    """Measure all steps that have no record yet, forward and backward; write the report.

    Raises:
        ValueError: `device` is not a Hopper GPU.
    """
    gpu = pick_device(config.device)
    if gpu.type != "cuda" or torch.cuda.get_device_capability(gpu)[0] != 9:
        raise ValueError(
            f"device must be a Hopper GPU (compute capability 9.0), got {config.device!r}: {gpu}"
        )
    cases = [
        steps_case(*shape, direction, config.samples)
        for shape in SHAPES
        for direction in ("forward", "backward")
    ]

    records = run_sweep(
        config.output / "attention_steps.jsonl",
        cases,
        lambda case: measure_case(case, device=gpu),
        expect=lambda case: {"flops": case.flops, "steps": {}},
        show=_line,
        seed=0,
        device=gpu,
        restart=config.restart,
    )
    write_steps_report(records, config.output)
    return records


def steps_case(
    batch_size: int, heads: int, tokens: int, head_dim: int, direction: str, samples: int
) -> AttentionCase:
    """The case of one record; its `kernels` are all possible steps."""
    return AttentionCase(
        queries=tokens,
        keys=tokens,
        head_dim=head_dim,
        is_causal=True,
        direction=direction,
        dtype="bfloat16",
        batch_size=batch_size,
        heads=heads,
        kernels=tuple(NAMES),
        warmup=5,
        samples=samples,
        max_seconds=20.0,
    )


def measure_case(case: AttentionCase, *, device: torch.device) -> dict[str, Any]:
    """Measure each step of a case as `lib.benchmarks.attention.measure_right` does.

    A step's figures also have `settings`, its tiles or schedules; its `error` is that of all
    results.
    """
    inputs = make_inputs(case, device, seed=0)
    out, *grads = results_in_float32(*inputs)
    expected = (out,) if case.direction == "forward" else grads

    def prepare(function: Callable[[], Results]) -> tuple[Callable, dict[str, Any]]:
        return function, {"error": largest_error(function(), expected)}

    steps = ladder(case, inputs)
    candidates = {name: functools.partial(prepare, fn) for name, (_, fn) in steps.items()}
    results = measure_right(case, candidates, device)
    return {"steps": {name: {"settings": steps[name][0]} | results[name] for name in steps}}


def ladder(case: AttentionCase, inputs: tuple[Tensor, ...]) -> dict[str, Step]:
    """All steps of a case, from naive attention to the peer."""
    naive, peer = (
        _autograd_function(named_attention(kernel, case, inputs[0].device), inputs, case.direction)
        for kernel in ("vectorized_torch", "sdpa_cudnn")
    )
    ours = _our_steps(case.direction, *(x.detach() for x in inputs))
    return {"textbook": ("", naive), **ours, "cudnn": ("", peer)}


def _autograd_function(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], direction: str
) -> Callable[[], Results]:
    """One direction of a differentiable function; the backward pass reuses one forward pass."""
    *leaves, grad_out = inputs
    if direction == "forward":
        return lambda: (function(*leaves),)
    forward = functools.cache(lambda: function(*leaves))
    return lambda: torch.autograd.grad(forward(), leaves, grad_out, retain_graph=True)


def _our_steps(
    direction: str, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor
) -> dict[str, Step]:
    """The portable kernels without and with prefetch, then the Hopper kernels by feature."""
    from lib.flash_attention import triton_attention as portable
    from lib.flash_attention.hopper import launch as hopper
    from lib.flash_attention.tiles import backward_tiles, forward_tiles

    head_dim = q.shape[3]
    qkv, options = (q, k, v), (True, head_dim**-0.5)
    if direction == "forward":
        tiles, schedules = (forward_tiles(q),), (hopper.forward_schedule(head_dim),)
        hopper_steps = schedule_steps(schedules, warpgroups=2)

        def run_portable(tiles: Tiles) -> Results:
            return portable.flash_forward(*qkv, *options, tiles=tiles[0])[:1]

        def run_hopper(schedules: Schedules) -> Results:
            return hopper.flash_forward(*qkv, *options, schedule=schedules[0])[:1]

    else:
        tiles, schedules = backward_tiles(q), hopper.backward_schedules(head_dim)
        hopper_steps = schedule_steps(schedules)
        saved = portable.flash_forward(*qkv, *options, tiles=forward_tiles(q))  # out, lse

        def run_portable(tiles: Tiles) -> Results:
            return portable.flash_backward(grad_out, *qkv, *saved, *options, tiles=tiles)

        def run_hopper(schedules: Schedules) -> Results:
            return hopper.flash_backward(grad_out, *qkv, *saved, *options, schedules=schedules)

    no_prefetch = tuple(t._replace(num_stages=1) for t in tiles)
    portable_steps = {"portable": no_prefetch, "portable_pipelined": tiles}
    return {
        name: (", ".join(map(str, settings)), functools.partial(run, settings))
        for run, steps in ((run_portable, portable_steps), (run_hopper, hopper_steps))
        for name, settings in steps.items()
    }


def schedule_steps(tuned: Sequence[Any], *, warpgroups: int | None = None) -> dict[str, tuple]:
    """Add the features of Hopper schedules one at a time, from none to all that tuning chose.

    Args:
        tuned: one schedule per kernel (`lib.flash_attention.hopper.launch.Schedule`), those of the
            last step.
        warpgroups: of the first step; as tuned by default.

    Returns:
        name -> the schedules; a feature that tuning did not choose has no step.
    """
    none = {"is_persistent": False, "is_ordered": False, "kept": 0}
    if warpgroups is not None:
        none["warpgroups"] = warpgroups
    schedules = tuple(schedule._replace(**none) for schedule in tuned)
    steps = {"hopper": schedules}
    for name, feature in FEATURES.items():
        added = tuple(
            schedule._replace(**{feature: getattr(goal, feature)})
            for schedule, goal in zip(schedules, tuned)
        )
        if added != schedules:
            steps[name] = schedules = added
    return steps


def results_in_float32(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> Results:
    """out, dq, dk and dv by the formula in float32, for the heads that `corners` picks."""
    leaves = [corners(x.detach()).float().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, kernel="vectorized_torch")
    return out.detach(), *torch.autograd.grad(out, leaves, corners(grad_out).float())


def corners(x: Tensor) -> Tensor:
    """The first and the last head of the first and the last sequence."""
    return x[:: max(1, len(x) - 1), :: max(1, x.shape[1] - 1)]


def largest_error(results: Results, expected: Sequence[Tensor]) -> float:
    """The largest relative error of one of `results`, which have all heads; NaN if one has NaN."""
    errors = [(corners(a).float() - b).norm() / b.norm() for a, b in zip(results, expected)]
    return float(torch.stack(errors).max())


def steps_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A row for each step of each record, in the order of the records."""
    rows = []
    for record in records:
        config = record["config"]
        case = {key: config[key] for key in ("batch_size", "heads", "head_dim", "direction")}
        case |= {"tokens": config["keys"], "case": case_name(config)}
        case |= {"flops": record["figures"]["flops"]}
        for step, figures in record["figures"]["steps"].items():
            rows.append({**case, "step": step, "name": NAMES[step], "tflops": None, **figures})
    return rows


def table(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one case as a table shows them."""
    lines, before = [], None
    for row in rows:
        speed = row["tflops"]
        # the peer is not a step beyond ours
        has_gain = speed and before and row["step"] != "cudnn"
        lines.append(
            {
                "step": row["name"],
                "TFLOP/s": speed or row["status"],
                "gain": speed / before if has_gain else None,
                "median (ms)": row.get("median_ms"),
                "IQR (ms)": row.get("iqr_ms"),
                "samples": row.get("samples"),
                "error": row.get("error"),
                "settings": row["settings"] or None,
            }
        )
        before = speed or before
    return lines


def write_steps_report(records: Sequence[Record], output: Path) -> None:
    """Write attention_steps.md and attention_steps.png from records."""
    rows = steps_of(records)
    versions = measured_on(records, "triton").replace("triton", "Triton")
    title = "What each step of the attention kernels gains"
    sections = [Section(title, [f"{versions}.\n{NOTE}"], level=1)]
    for case in dict.fromkeys(row["case"] for row in rows):
        lines = table(row for row in rows if row["case"] == case)
        sections.append(Section(case, [Table(lines)]))
    write_report(output / "attention_steps.md", sections)
    save_steps_figure(rows, output / "attention_steps.png")


def _line(record: Record) -> str:
    """Describe a finished case in one line, for the log."""
    if record["figures"]["status"] != "ok":
        return f"{record['config']['direction']}: {record['figures']['status']}"
    rows = steps_of([record])
    speeds = [f"{row['name']} {row['tflops'] or 0:.0f}" for row in rows]
    return f"{rows[0]['case']}: {', '.join(speeds)} TFLOP/s"


def save_steps_figure(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> Path:
    """Save the figure of `draw_steps`."""
    frame = pd.DataFrame(rows)
    num_bars = frame["step"].nunique() * (1 + len(frame[SHAPE].drop_duplicates()))
    with house_figure(width=11.0, height=1.6 + 0.16 * num_bars) as (figure, axes):
        axes.remove()
        draw_steps(figure, rows)
        return save_figure(figure, path)


def draw_steps(figure: Figure, rows: Sequence[Mapping[str, Any]]) -> None:
    """Fill an empty figure with bars of TFLOP/s, a panel for each direction."""
    directions = pd.DataFrame(rows).groupby("direction", sort=False)
    panels = figure.subplots(ncols=len(directions), squeeze=False)[0]
    for axes, (direction, chosen) in zip(panels, directions):
        steps = [step for step in NAMES if step in set(chosen["step"])]
        shapes = chosen.groupby(SHAPE, sort=False)
        height = 0.82 / len(shapes)
        for index, ((batch, heads, tokens, head_dim), found) in enumerate(shapes):
            y = found["step"].map(steps.index) + (index - (len(shapes) - 1) / 2) * height
            bars = axes.barh(
                y,
                found["tflops"].astype(float).fillna(0),
                height,
                color=(BLUE, SKY, VERMILLION, PURPLE)[index % 4],
                label=f"{batch} × {heads} heads, {tokens:,} tokens, D = {head_dim}",
            )
            pairs = zip(found["tflops"], found["status"])
            words = [f"{speed:.0f}" if speed > 0 else status for speed, status in pairs]
            axes.bar_label(bars, words, padding=2, fontsize=9)
        axes.set_yticks(range(len(steps)), [NAMES[step] for step in steps])
        axes.set(ylim=(len(steps) - 0.4, -0.6), title=direction)
        axes.set(xlabel="speed (TFLOP/s)", ylabel="step")
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.1)
    labels = panels[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=min(3, len(shapes)))
