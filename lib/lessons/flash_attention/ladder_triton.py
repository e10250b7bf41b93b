"""Eight versions of causal attention, from PyTorch to the fastest kernel of `lib`, for notebook 06.

Versions 2 to 5 are the kernel that readers write, changed a few lines at a time. They run in
Triton's interpreter and on any GPU; versions 6 to 8 run on Hopper GPUs.

`python -m lib lessons ladder` measures them on a Hopper GPU, head_dim 64, and writes
artifacts/attention_ladder.jsonl.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lib.core.files import ROOT
from lib.core.records import append_record, new_record, read_records
from lib.lessons.flash_attention.solutions_triton import causal_forward
from lib.lessons.triton.recorder_triton import Run, watch
from lib.model.attention import scaled_dot_product_attention

if TYPE_CHECKING:
    from IPython.display import Markdown

    from lib.flash_attention.hopper.launch import Schedule

RECORDS = ROOT / "artifacts/attention_ladder.jsonl"
HOPPER_FILES = ROOT / "lib/flash_attention/hopper"
STEPS = ROOT / "artifacts/attention_steps.jsonl"
# (batch, heads, tokens, head_dim) that is measured.
SHAPE = (4, 32, 4096, 64)
# Beside the ladder; the second step of version 6 is a third warpgroup.
PEERS = {"hopper": "(6, with two warpgroups)", "cudnn": "cuDNN", "fa4": "FlashAttention-4"}


def every_tile(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    n,
    scale,
    D: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """Output and log-sum-exp of a tile of queries, which see no later key."""
    head = tl.program_id(1) * n  # rows of the heads before this one
    query, channel = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, D)
    q_rows = (head + query[:, None]) * D + channel[None, :]  # (BQ, D)
    q = tl.load(q_ptr + q_rows, mask=query[:, None] < n, other=0.0)
    m, l = tl.full((BQ,), float("-inf"), tl.float32), tl.zeros((BQ,), tl.float32)
    out = tl.zeros((BQ, D), tl.float32)
    for start in range(0, n, BK):
        key = start + tl.arange(0, BK)
        k_rows = (head + key[:, None]) * D + channel[None, :]  # (BK, D)
        k = tl.load(k_ptr + k_rows, mask=key[:, None] < n, other=0.0)
        v = tl.load(v_ptr + k_rows, mask=key[:, None] < n, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (BQ, BK)
        scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        p, shrink = tl.exp(scores - new_m[:, None]), tl.exp(m - new_m)
        l = l * shrink + tl.sum(p, 1)
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = new_m
    tl.store(out_ptr + q_rows, out / l[:, None], mask=query[:, None] < n)
    tl.store(lse_ptr + head + query, m + tl.log(l), mask=query < n)


def mask_on_diagonal(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    n,
    scale,
    D: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """Output and log-sum-exp of a tile of queries, which see no later key."""
    head = tl.program_id(1) * n  # rows of the heads before this one
    query, channel = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, D)
    q_rows = (head + query[:, None]) * D + channel[None, :]  # (BQ, D)
    q = tl.load(q_ptr + q_rows, mask=query[:, None] < n, other=0.0)
    m, l = tl.full((BQ,), float("-inf"), tl.float32), tl.zeros((BQ,), tl.float32)
    out = tl.zeros((BQ, D), tl.float32)
    end = tl.minimum((tl.program_id(0) + 1) * BQ, n)  # no tile behind the diagonal
    plain_end = tl.program_id(0) * BQ // BK * BK  # all queries of the tile see the keys before
    scale_log2 = scale * 1.4426950408889634  # times log2(e): exp2 is one instruction
    for phase in tl.static_range(2):  # the loop is compiled twice: without a mask, and with one
        for start in range(plain_end if phase else 0, end if phase else plain_end, BK):
            key = start + tl.arange(0, BK)
            k_rows = (head + key[:, None]) * D + channel[None, :]  # (BK, D)
            k = tl.load(k_ptr + k_rows, mask=key[:, None] < n, other=0.0)
            v = tl.load(v_ptr + k_rows, mask=key[:, None] < n, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BQ, BK)
            if phase:
                scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
            new_m = tl.maximum(m, tl.max(scores, 1) * scale_log2)
            p = tl.exp2(scores * scale_log2 - new_m[:, None])
            shrink = tl.exp2(m - new_m)
            l = l * shrink + tl.sum(p, 1)
            out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            m = new_m
    tl.store(out_ptr + q_rows, out / l[:, None], mask=query[:, None] < n)
    tl.store(lse_ptr + head + query, m * 0.6931471805599453 + tl.log(l), mask=query < n)


@dataclass(frozen=True)
class Rung:
    """A version of causal attention."""

    name: str
    step: str
    """Its name in records."""

    runs_on: str
    source: Callable | None = None
    """The Triton kernel, not yet compiled; None for PyTorch and for Hopper kernels."""

    launch: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its launch: of a compiled Triton kernel, or of a Hopper schedule."""

    def schedule(self) -> Schedule:
        """How a Hopper kernel of this version divides its work."""
        from lib.flash_attention.hopper.launch import Schedule

        return Schedule(3, 128, 3, **self.launch)

    def text(self) -> list[str]:
        """Its code: the body of the kernel, and the settings of its launch."""
        lines = inspect.getsource(self.source).splitlines() if self.source else []
        start = next((i for i, line in enumerate(lines) if '"""' in line), -1)
        settings = [f"{name}={value}" for name, value in self.launch.items()]
        return [*lines[start + 1 :], *settings]


ANY_GPU, HOPPER = "any GPU, interpreter", "Hopper"
LADDER = (
    Rung("1 · naive: scores in memory", "textbook", "anywhere"),
    Rung("2 · tiles: one kernel", "every_tile", ANY_GPU, every_tile, {"num_stages": 1}),
    Rung("3 · hidden tiles skipped", "skipping", ANY_GPU, causal_forward, {"num_stages": 1}),
    Rung("4 · mask on the diagonal", "portable", ANY_GPU, mask_on_diagonal, {"num_stages": 1}),
    Rung("5 · prefetch", "portable_pipelined", ANY_GPU, mask_on_diagonal, {"num_stages": 3}),
    Rung(
        "6 · warp specialization",
        "hopper_warpgroups",
        HOPPER,
        launch={"is_persistent": False, "is_ordered": False},
    ),
    Rung(
        "7 · persistent",
        "hopper_persistent",
        HOPPER,
        launch={"is_persistent": True, "is_ordered": False},
    ),
    Rung(
        "8 · ping-pong",
        "hopper_ordered",
        HOPPER,
        launch={"is_persistent": True, "is_ordered": True},
    ),
)


def diff(number: int) -> list[str]:
    """The lines that version `number` (2 to 8) changes, with `-` and `+` before them.

    Lines that are only indented otherwise are left out, but for one under a new `if`.
    Version 6 is in another language, Gluon: its two loops are shown as new. Versions 7 and 8 switch
    lines on that it has already.
    """
    rung = LADDER[number - 1]
    if number == 6:
        return [f"+{line}" for line in _hopper_loops()]
    old, new = LADDER[number - 2].text(), rung.text()
    plain = [[line.strip() for line in lines] for lines in (old, new)]
    changed = []
    for kind, a, b, c, d in difflib.SequenceMatcher(
        a=plain[0], b=plain[1], autojunk=False
    ).get_opcodes():
        if kind != "equal":
            changed += [f"-{line}" for line in old[a:b]] + [f"+{line}" for line in new[c:d]]
        elif changed and changed[-1].lstrip("+ ").startswith("if "):
            # an old line, now under a new `if`
            changed.append(f" {new[c]}")
    return changed + [f"+{line}" for line in _switched_on(rung)]


def _hopper_loops() -> list[str]:
    """The loops of the producer warp and of a warpgroup."""
    lines = (HOPPER_FILES / "forward.py").read_text(encoding="utf-8").splitlines()
    found = []
    for title, first, last in (
        ("# the producer warp", "for i in range(num_key_tiles + 1)", "args.v_desc, rows"),
        ("# each warpgroup", "for i in range(step, last)", "row_sum = row_sum * gl.expand"),
    ):
        start = next(i for i, line in enumerate(lines) if first in line)
        stop = next(i for i, line in enumerate(lines) if i > start and last in line)
        found += [title, *textwrap.dedent("\n".join(lines[start : stop + 1])).splitlines()]
    return found


def _switched_on(rung: Rung) -> list[str]:
    """The lines of the Hopper kernels that the newest setting of a version switches on."""
    flag = {"hopper_persistent": "HAS_WORK_LIST", "hopper_ordered": "IS_ORDERED"}.get(rung.step)
    text = (HOPPER_FILES / "blocks.py").read_text(encoding="utf-8")
    found = []
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    for function in functions if flag else ():
        for node in function.body:
            if isinstance(node, ast.If) and ast.unparse(node.test) == f"CONFIG.{flag}":
                body = text.splitlines()[node.lineno - 1 : node.end_lineno]
                found += [f"# {function.name}", *textwrap.dedent("\n".join(body)).splitlines()]
    return found


def show_diff(number: int) -> Markdown:
    """Show `diff(number)`."""
    from IPython.display import Markdown

    name = LADDER[number - 1].name
    return Markdown("\n".join([f"**{name}**", "", "```diff", *diff(number), "```"]))


def runs_on(rung: Rung, device: torch.device) -> bool:
    """Whether a version runs on `device`, interpreted if it is a CPU."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return is_hopper or rung.runs_on != HOPPER


def need_hopper() -> None:
    """ValueError where there is no Hopper GPU."""
    if not (torch.cuda.is_available() and runs_on(LADDER[-1], torch.device("cuda"))):
        raise ValueError("this needs a Hopper GPU (compute capability 9.0)")


def run_rung(rung: Rung, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by this version: (batch, heads, tokens, head_dim), contiguous, 16-bit on a
    Hopper GPU."""
    if rung.runs_on == HOPPER:
        from lib.flash_attention.hopper import launch as hopper

        return hopper.flash_forward(q, k, v, True, q.shape[3] ** -0.5, schedule=rung.schedule())[0]
    if rung.source is None:
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        return scaled_dot_product_attention(q, k, v, mask=hidden)
    heads, out, grid, arguments = _launch(q, k, v)
    _jitted(rung.source)[grid](*heads, *out, *arguments, BQ=64, BK=64, num_warps=4, **rung.launch)
    return out[0].view_as(q)


# Making one takes milliseconds, longer than the kernels themselves.
_jitted = functools.cache(triton.jit)


def watch_rung(rung: Rung, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Run]:
    """Run versions 2 to 5 as `run_rung` does, in tiles of 16; also return what was touched."""
    heads, out, grid, arguments = _launch(q, k, v, queries=16)
    run = watch(rung.source, grid, *heads, *out, *arguments, BQ=16, BK=16)
    return out[0].view_as(q), run


def _launch(q: Tensor, k: Tensor, v: Tensor, queries: int = 64) -> tuple:
    """(q, k, v) and (out, lse) with all heads in one dimension, the grid, and (n, scale, D)."""
    heads = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    (count, n, head_dim), like = heads[0].shape, heads[0]
    out = torch.empty_like(like), like.new_empty((count, n), dtype=torch.float32)
    return heads, out, (triton.cdiv(n, queries), count), (n, head_dim**-0.5, head_dim)


def measure_ladder(path: Path = RECORDS) -> Path:
    """Measure all versions and their peers on the same inputs, interleaved; append to `path`.

    FlashAttention-4 is among the peers if it is installed.

    Raises:
        ValueError: there is no Hopper GPU.
    """
    need_hopper()
    from lib.flash_attention.hopper import launch as hopper
    from lib.tools.benchmarks.attention import (
        flash_attention_4,
        flops,
        make_inputs,
        measure_right,
        named_attention,
    )
    from lib.tools.benchmarks.harness import Case

    device, (batch_size, heads, tokens, head_dim) = torch.device("cuda"), SHAPE
    case = Case(
        queries=tokens,
        keys=tokens,
        head_dim=head_dim,
        is_causal=True,
        direction="forward",
        dtype="bfloat16",
        batch_size=batch_size,
        heads=heads,
        warmup=5,
        samples=30,
        max_seconds=20.0,
        in_graph=False,
    )
    q, k, v, _ = make_inputs(case, device, seed=0)
    expected = run_rung(LADDER[0], *(_corners(x).float() for x in (q, k, v)))

    def prepare(function: Callable[[], tuple[Tensor]]) -> tuple[Callable, dict[str, Any]]:
        error = (_corners(function()[0]).float() - expected).norm() / expected.norm()
        return function, {"error": float(error)}

    functions = {rung.step: lambda rung=rung: (run_rung(rung, q, k, v),) for rung in LADDER}
    two = LADDER[5].schedule()._replace(warpgroups=2)
    cudnn = named_attention("sdpa_cudnn", case, device)
    peers: dict[str, Callable] = {
        "hopper": lambda: hopper.flash_forward(q, k, v, True, head_dim**-0.5, schedule=two)[:1],
        "cudnn": lambda: (cudnn(q, k, v),),
    }
    with contextlib.suppress(ImportError):
        fa4 = flash_attention_4(case, deterministic=False)
        peers["fa4"] = lambda: (fa4(q, k, v),)
    candidates = {
        name: lambda function=function: prepare(function)
        for name, function in {**functions, **peers}.items()
    }
    case.kernels = list(candidates)
    figures = {"flops": flops(case), "steps": measure_right(case, candidates, device)}
    record = new_record(figures, config=vars(case), seed=0, device=device)
    append_record(path, record)
    return path


def _corners(x: Tensor) -> Tensor:
    """The first and the last head of the first and the last sequence."""
    return x[:: max(1, len(x) - 1), :: max(1, x.shape[1] - 1)]


def recorded_ladder() -> tuple[list[dict[str, Any]], str]:
    """(version, what it runs on, TFLOP/s, gain; then peers), the newest record.

    What has no record is "not measured", and gain is over the last version that has one. The second
    value says where it was measured.
    """
    from lib.lessons.profiling.records import place_of

    shape = dict(zip(("batch_size", "heads", "keys", "head_dim"), SHAPE))
    wanted = shape | {"direction": "forward"}
    found = [
        record
        for path in (STEPS, RECORDS)
        for record in read_records(path)
        if record["device"] != record["cpu"]
        and {key: record["config"].get(key) for key in wanted} == wanted
    ]
    if not found:
        return [], ""
    steps, rows, before = found[-1]["figures"]["steps"], [], None
    for rung in LADDER:
        speed = steps.get(rung.step, {}).get("tflops")
        row = {"version": rung.name, "runs on": rung.runs_on, "TFLOP/s": speed or "not measured"}
        rows.append(row | {"gain": speed / before if speed and before else None})
        before = speed or before
    for step, name in PEERS.items():
        if speed := steps.get(step, {}).get("tflops"):
            rows.append({"version": name, "runs on": HOPPER, "TFLOP/s": speed, "gain": None})
    return rows, place_of(found[-1])
