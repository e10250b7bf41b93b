"""What each step from textbook attention to our fastest kernel gains, on one Hopper GPU.

Textbook attention, the portable Triton kernels, those for Hopper with one feature after the other,
and cuDNN as the peer take turns on the same inputs: causal, in bfloat16.

`python -m lib.benchmark_attention_steps` writes attention_steps.jsonl, .md and .png to `artifacts`.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.allocations import free_memory, is_out_of_memory
from lib.attention import attention
from lib.benchmark import run_sweep, take_turns
from lib.benchmark_attention import LARGEST_ERROR, make_inputs, named_attention
from lib.benchmark_attention_cases import AttentionCase
from lib.files import write_atomically
from lib.hardware import pick_device
from lib.plots_flash_attention import NAMES, save_steps_figure, steps_of
from lib.report import Record, to_markdown

Results = tuple[Tensor, ...]

# batch, heads, tokens, head_dim
SHAPES = ((4, 32, 4096, 64), (32, 12, 1024, 64), (4, 16, 4096, 128))
# The features of the kernels for Hopper, in the order in which they are added.
FEATURES = {
    "hopper_warpgroups": "warpgroups",
    "hopper_persistent": "is_persistent",
    "hopper_ordered": "is_ordered",
    "hopper_kept": "kept",
}
NOTE = """Causal attention in bfloat16. All rows of a table took turns on the same inputs. TFLOP/s
count 2 · batch · heads · tokens² · head_dim forward and 2.5 times that backward. A step that
changes nothing for a shape is left out. `error` is the largest relative distance from float32, over
the results of four heads. `gain`: speed over that of the row above.
"""


def measure_steps(
    output: str | os.PathLike = "artifacts",
    *,
    shapes: Sequence[tuple[int, int, int, int]] = SHAPES,
    samples: int = 30,
    device: str = "cuda",
    restart: bool = False,
) -> list[Record]:
    """Measure all steps, forward and backward, unless their records are there; write the report.

    Args:
        output: the folder for attention_steps.jsonl, a record for each shape and direction,
            attention_steps.md and attention_steps.png.
        shapes: (batch, heads, tokens, head_dim).
        samples: of each step.
        restart: measure all of them again.

    Raises:
        ValueError: `device` is no Hopper GPU.
    """
    chip = pick_device(device)
    if chip.type != "cuda" or torch.cuda.get_device_capability(chip)[0] != 9:
        raise ValueError(f"device is {device!r}; right is: a Hopper GPU (compute capability 9.0)")
    cases = [
        steps_case(*shape, direction, samples)
        for shape in shapes
        for direction in ("forward", "backward")
    ]

    def run(case: AttentionCase) -> dict[str, Any]:
        return measure_case(case, device=chip)

    records = run_sweep(
        Path(output) / "attention_steps.jsonl",
        cases,
        run,
        expect=lambda case: {"flops": case.flops, "steps": {}},
        show=line,
        seed=0,
        device=chip,
        restart=restart,
    )
    write_report(records, Path(output))
    return records


def steps_case(
    batch_size: int, heads: int, tokens: int, head_dim: int, direction: str, samples: int
) -> AttentionCase:
    """What a record is about; `kernels` are all steps that there may be."""
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


def measure_case(case: AttentionCase, *, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """The figures of a case: for each of its steps those of `Measurement`, `tflops` and `error`.

    `settings` are the tiles or the schedules. The `status` of a step is also `wrong`, and that of
    the peer `unsupported`.
    """
    inputs = make_inputs(case, device, seed)
    q, k, v, grad_out = inputs
    right = results_in_float32(q, k, v, grad_out)
    right = right[:1] if case.direction == "forward" else right[1:]
    steps: dict[str, dict[str, Any]] = {}
    functions = {}
    for name, (settings, function) in ladder(case, inputs).items():
        steps[name] = {"settings": settings}
        try:
            error = largest_error(function(), right)
        except RuntimeError as failure:
            steps[name]["status"] = _status_of(name, failure)
            free_memory(failure)
            continue
        steps[name]["error"] = error if math.isfinite(error) else None
        steps[name]["status"] = "ok" if error <= LARGEST_ERROR else "wrong"
        if steps[name]["status"] == "ok":
            functions[name] = function
    settings = {"warmup": case.warmup, "samples": case.samples, "max_seconds": case.max_seconds}
    found = take_turns(list(functions.values()), device=device, **settings)
    for name, measured in zip(functions, found):
        steps[name] |= measured.figures()
        if measured.status == "ok":
            steps[name]["tflops"] = case.flops / measured.median_ms / 1e9
    return {"steps": steps}


def ladder(
    case: AttentionCase, inputs: tuple[Tensor, ...]
) -> dict[str, tuple[str, Callable[[], Results]]]:
    """Each step's settings in words, and a function that returns (out,) or (dq, dk, dv)."""
    textbook, peer = (
        _of_torch(named_attention(kernel, case, inputs[0].device), inputs, case.direction)
        for kernel in ("vectorized_torch", "sdpa_cudnn")
    )
    plain = tuple(x.detach() for x in inputs)
    is_forward = case.direction == "forward"
    ours = _forward_steps(*plain[:3]) if is_forward else _backward_steps(*plain)
    return {"textbook": ("", textbook), **ours, "cudnn": ("", peer)}


def _of_torch(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], direction: str
) -> Callable[[], Results]:
    """One direction of a function that autograd knows; a backward pass keeps its forward pass."""
    *leaves, grad_out = inputs
    if direction == "forward":
        return lambda: (function(*leaves),)
    kept: list[Tensor] = []

    def backward() -> Results:
        if not kept:
            kept.append(function(*leaves))
        return torch.autograd.grad(kept[0], leaves, grad_out, retain_graph=True)

    return backward


def _forward_steps(q: Tensor, k: Tensor, v: Tensor) -> dict[str, tuple[str, Callable]]:
    from lib import flash_attention_hopper as hopper
    from lib import flash_attention_triton as portable
    from lib.flash_attention_tiles import forward_tiles

    given = (q, k, v, True, 1 / math.sqrt(q.shape[3]))
    tiles = forward_tiles(q)
    choices = {"portable": tiles._replace(num_stages=1), "portable_pipelined": tiles}
    steps = {
        name: (str(t), lambda t=t: portable.flash_forward(*given, tiles=t)[:1])
        for name, t in choices.items()
    }
    tuned = hopper.forward_schedule(q.shape[3])
    for name, (schedule,) in schedule_steps((tuned,), warpgroups=2).items():
        run = functools.partial(hopper.flash_forward, *given, schedule=schedule)
        steps[name] = (str(schedule), lambda run=run: run()[:1])
    return steps


def _backward_steps(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor
) -> dict[str, tuple[str, Callable]]:
    from lib import flash_attention_hopper as hopper
    from lib import flash_attention_triton as portable
    from lib.flash_attention_tiles import backward_tiles, forward_tiles

    scale = 1 / math.sqrt(q.shape[3])
    out, lse = portable.flash_forward(q, k, v, True, scale, tiles=forward_tiles(q))
    given = (grad_out, q, k, v, out, lse, True, scale)
    tiles = backward_tiles(q)
    unstaged = tuple(t._replace(num_stages=1) for t in tiles)
    steps = {
        name: (str(t), functools.partial(portable.flash_backward, *given, tiles=t))
        for name, t in {"portable": unstaged, "portable_pipelined": tiles}.items()
    }
    for name, pair in schedule_steps(hopper.backward_schedules(q.shape[3])).items():
        run = functools.partial(hopper.flash_backward, *given, schedules=pair)
        steps[name] = (", ".join(map(str, pair)), run)
    return steps


def schedule_steps(tuned: Sequence[Any], *, warpgroups: int | None = None) -> dict[str, tuple]:
    """The kernel without its features, and then with one more of `FEATURES` at a time.

    Args:
        tuned: schedules of `lib.flash_attention_hopper`, one a kernel; the last step has these.
        warpgroups: of the first step; as tuned when left out.

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
    """out, dq, dk, dv by the formula in float32, of the heads that `corners` picks."""
    leaves = [corners(x.detach()).float().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, kernel="vectorized_torch")
    return out.detach(), *torch.autograd.grad(out, leaves, corners(grad_out).float())


def corners(x: Tensor) -> Tensor:
    """The first and the last head of the first and the last sequence."""
    return x[:: max(1, len(x) - 1), :: max(1, x.shape[1] - 1)]


def largest_error(results: Results, right: Results) -> float:
    """The largest relative distance of one of `results`, all heads, from that in float32."""
    errors = [(corners(a).float() - b).norm() / b.norm() for a, b in zip(results, right)]
    # NaN in one of them must not get lost
    return float(torch.stack(errors).max())


def _status_of(name: str, failure: RuntimeError) -> str:
    """The status of a step that raised `failure`; raises it where that is a fault."""
    if is_out_of_memory(failure):
        return "oom"
    if name != "cudnn":
        raise failure
    return "unsupported"


def line(record: Record) -> str:
    """What is printed of a case once it is measured."""
    if record["figures"]["status"] != "ok":
        return f"{record['config']['direction']}: {record['figures']['status']}"
    rows = steps_of([record])
    speeds = [f"{row['name']} {row['tflops'] or 0:.0f}" for row in rows]
    return f"{rows[0]['case']}: {', '.join(speeds)} TFLOP/s"


def write_report(records: Sequence[Record], output: Path) -> None:
    """Write attention_steps.md and attention_steps.png of `records` alone."""
    rows = steps_of(records)
    last = max(records, key=lambda record: record["date"])
    text = "# What each step of the attention kernels gains\n\n"
    text += f"{last['device']}, torch {last['versions']['torch']}, Triton "
    text += f"{last['versions']['triton']}, {last['date']}.\n{NOTE}"
    for case in dict.fromkeys(row["case"] for row in rows):
        chosen = [row for row in rows if row["case"] == case]
        text += f"\n## {case}\n\n{to_markdown(table(chosen))}"
    write_atomically(output / "attention_steps.md", text)
    save_steps_figure(rows, output / "attention_steps.png")


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one case as they are shown."""
    shown, before = [], None
    for row in rows:
        speed = row["tflops"]
        # the peer is no step from ours
        has_gain = speed and before and row["step"] != "cudnn"
        shown.append(
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
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the steps on this machine's GPU."""
    parser = argparse.ArgumentParser(prog="python -m lib.benchmark_attention_steps")
    parser.add_argument("--output", default="artifacts", help="folder for records and report")
    parser.add_argument("--restart", action="store_true", help="measure all of it again")
    asked = parser.parse_args(arguments)
    try:
        records = measure_steps(asked.output, restart=asked.restart)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(records)} records in {asked.output}, of {records[0]['device']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
