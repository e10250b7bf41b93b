"""When each warpgroup of the Hopper forward kernel does what, by the clock of its multiprocessor.

The kernel is that of `lib.flash_attention.hopper.forward` with a few lines added to its source,
which store the clock. `python -m lib lessons timeline` writes artifacts/attention_timeline.jsonl.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lib.core.figures import BLUE, GRAY, GRID, ORANGE, PAPER, SKY
from lib.core.files import ROOT
from lib.core.records import Record, append_record, new_record, read_records
from lib.flash_attention.hopper import forward, launch
from lib.lessons.flash_attention.ladder_triton import need_hopper

RECORDS = ROOT / "artifacts/attention_timeline.jsonl"
# (batch, heads, tokens, head_dim)
SHAPE = (4, 32, 4096, 64)
# Steps of the loop that are noted, and the stamps of a step.
NOTED, STAMPS = 12, 5
# Operations per clock of the tensor cores of a multiprocessor, in 16 bits.
FLOPS_A_CLOCK = 4096
# Work of a warpgroup from one stamp to the next; after the last it waits for the others.
PARTS = ("issues matmuls", "waits for scores", "softmax", "waits for weights × values")
COLORS = (BLUE, GRAY, ORANGE, SKY)

CLOCK = '''
from triton.language import core as _core


@_core.extern
def _clock(_semantic=None):
    asm = "mov.u32 $0, %clock;"
    return _core.inline_asm_elementwise(
        asm, "=r", [], dtype=_core.int32, is_pure=False, pack=1, _semantic=_semantic
    )


@gluon.jit
def _stamp(args, step, EVENT: gl.constexpr, PART: gl.constexpr):
    """Store the clock, as bits of a float32, behind the log-sum-exps of all rows."""
    now = _clock().to(gl.float32, bitcast=True)
    rows = args.sizes.num_queries * (args.sizes.num_items // args.sizes.num_tiles)
    place = rows + (PART * NOTED + step) * STAMPS + EVENT
    gl.store(args.lse_ptr + place, now, (gl.program_id(0) == 0) & (step < NOTED))


class ForwardArgs('''.replace("NOTED", str(NOTED)).replace("STAMPS", str(STAMPS))
# (old, new) text of forward.py; each old one occurs once.
EDITS = (
    ("\nclass ForwardArgs(", CLOCK),
    (
        "        wait_for_turn(args.turns, i + 1, PART, CONFIG)\n",
        "        wait_for_turn(args.turns, i + 1, PART, CONFIG)\n"
        "        _stamp(args, i, 0, PART)\n",
    ),
    (
        "        # softmax of the next tile while",
        "        _stamp(args, i, 1, PART)\n        # softmax of the next tile while",
    ),
    (
        "        new_max = gl.maximum(row_max",
        "        _stamp(args, i, 2, PART)\n        new_max = gl.maximum(row_max",
    ),
    (
        "        acc, p_operand, p, row_sum = warpgroup_mma_wait(0",
        "        _stamp(args, i, 3, PART)\n"
        "        acc, p_operand, p, row_sum = warpgroup_mma_wait(0",
    ),
    (
        "        p_operand = gl.convert_layout(p.to(dtype), OPERAND)\n    # keeps",
        "        _stamp(args, i, 4, PART)\n"
        "        p_operand = gl.convert_layout(p.to(dtype), OPERAND)\n    # keeps",
    ),
)


def stamped_kernel() -> Any:
    """The forward kernel with the lines of EDITS.

    The kernel itself has no lines for the clock, which would slow it down: the text of its file is
    edited and executed here as a module of its own. The file stays as it is.

    Raises:
        ValueError: an old text does not occur exactly once.
    """
    file = Path(forward.__file__)
    source = file.read_text(encoding="utf-8")
    for old, new in EDITS:
        if source.count(old) != 1:
            raise ValueError(f"{old!r} must occur once in {file.name}")
        source = source.replace(old, new)
    name = f"<stamped {file.name}>"
    # Triton reads the source of kernels
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = ModuleType("stamped_forward")
    module.__file__ = name
    exec(compile(source, name, "exec"), vars(module))
    return vars(module)["forward_kernel"]


def stamps(
    q: Tensor, k: Tensor, v: Tensor, schedule: launch.Schedule, kernel: Any
) -> list[list[list[int]]]:
    """For each warpgroup of the first program, the clocks of each step that it did, from 0 on."""
    out, rows = torch.empty_like(q), q[..., 0].numel()
    noted = schedule.warpgroups * NOTED * STAMPS
    lse = torch.zeros(rows + noted, device=q.device)
    work = launch._queries_work(q.shape, k.shape, schedule, True)
    is_even = k.shape[2] % schedule.keys == 0
    grid, settings = launch._launch_settings(q, k, work, schedule, True, is_even, min_stages=2)
    for _ in range(3):  # the last one counts: caches are warm
        kernel[grid](
            q_desc=launch._descriptor(q, launch.ROWS),
            k_desc=launch._descriptor(k, schedule.keys),
            v_desc=launch._descriptor(v, schedule.keys),
            out_desc=launch._descriptor(out, launch.ROWS),
            lse_ptr=lse,
            scale=q.shape[3] ** -0.5,
            **settings,
        )
    expected, _ = launch.flash_forward(q, k, v, True, q.shape[3] ** -0.5, schedule=schedule)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    clocks = lse[rows:].view(torch.int32).cpu().long().view(schedule.warpgroups, NOTED, STAMPS)
    return from_zero(clocks.tolist())


def from_zero(clocks: list[list[list[int]]]) -> list[list[list[int]]]:
    """Clocks of 32 bits from the earliest on, without the steps that a warpgroup did not do.

    A warpgroup lets the first tiles pass that only others see; their stamps are 0.
    """
    done = [[step for step in group if any(step)] for group in clocks]
    origin = done[0][0][0]
    signed = [
        [[(x - origin + 2**31) % 2**32 - 2**31 for x in step] for step in group] for group in done
    ]
    first = min(x for group in signed for step in group for x in step)
    return [[[x - first for x in step] for step in group] for group in signed]


def record_timeline(path: Path = RECORDS) -> Path:
    """Record the schedules of versions 7 and 8 of the ladder; append to `path`.

    Raises:
        ValueError: there is no Hopper GPU.
    """
    need_hopper()
    q, k, v = torch.randn(3, *SHAPE, device="cuda", dtype=torch.bfloat16)
    kernel, tuned = stamped_kernel(), launch.forward_schedule(SHAPE[3])
    for is_ordered in (False, True):
        clocks = stamps(q, k, v, tuned._replace(is_ordered=is_ordered), kernel)
        figures = {"is_ordered": is_ordered, "clocks": clocks}
        config = dict(zip(("batch_size", "heads", "tokens", "head_dim"), SHAPE))
        append_record(path, new_record(figures, config=config, device="cuda"))
    return path


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
