"""Measure the ladder of notebooks 06 and 07 and tiles of its Triton kernel; read the records.

    python -m lib lessons tiles     # appends to artifacts/attention_tiles.jsonl
    python -m lib lessons ladder    # appends to artifacts/attention_ladder.jsonl

A run of the ladder is one record. Notebooks show the middle and the extremes of several runs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lib.core.files import ROOT
from lib.core.records import Record, append_record, new_record, read_records
from lib.lessons.flash_attention.ladder_triton import (
    AHEAD,
    LADDER,
    Rung,
    base_2,
    launch_kernel,
    run_rung,
    runs_on,
)
from lib.profiling.measurement import Measurement, measure_interleaved

RECORDS = ROOT / "artifacts/attention_ladder.jsonl"
TILES = ROOT / "artifacts/attention_tiles.jsonl"
# (batch, heads, tokens, head_dim) that is measured.
SHAPE = (4, 32, 4096, 64)
QUERIES, KEYS, WARPS = (32, 64, 128, 256), (32, 64, 128), (4, 8)
PEERS = {"cudnn": "cuDNN", "fa4": "FlashAttention-4"}
# The largest relative error of a correct result: several times what bfloat16 costs.
LARGEST_ERROR = 0.03
# Runs of the ladder that notebooks show.
RUNS = 5
Shape = tuple[int, int, int, int]


def measure_tiles(path: Path = TILES, shape: Shape = SHAPE) -> Path:
    """Measure the ladder's sixth version in all tiles, interleaved; append a record for each.

    Figures are the time, registers of a thread, how many more it spills, and the shared memory of a
    program. The `status` of tiles that need more than a multiprocessor has is `too large`.
    """
    device, (q, k, v) = heads_for(shape)
    expected = _right(q, k, v)
    found: list[tuple[dict[str, int], dict[str, Any], Callable | None]] = []
    for BQ, BK, num_warps in itertools.product(QUERIES, KEYS, WARPS):
        tiles = AHEAD | {"BQ": BQ, "BK": BK, "num_warps": num_warps}
        try:
            out, made = launch_kernel(base_2, q, k, v, **tiles)
        # Triton's class of this error depends on its version
        except Exception as error:
            if type(error).__name__ != "OutOfResources":
                raise
            found.append((tiles, {"status": "too large"}, None))
            continue
        _check(out, expected, str(tiles))
        figures = {
            "registers": getattr(made, "n_regs", None),
            "spilled_registers": getattr(made, "n_spills", None),
            "shared_bytes": getattr(getattr(made, "metadata", None), "shared", None),
        }
        found.append(
            (tiles, figures, lambda tiles=tiles: launch_kernel(base_2, q, k, v, **tiles)[0])
        )
    measured = iter(_interleaved([one for *_, one in found if one], device))
    for tiles, figures, function in found:
        if function:
            figures |= _figures(next(measured), shape)
        append_record(path, _record(figures, shape, device, tiles))
    return path


def measure_ladder(path: Path = RECORDS, shape: Shape = SHAPE) -> Path:
    """Measure all versions and their peers on the same inputs, interleaved; append to `path`.

    FlashAttention-4 is among the peers if it is installed.

    Raises:
        ValueError: a version does not run here, or is wrong.
    """
    device, (q, k, v) = heads_for(shape)
    here = [rung for rung in LADDER if runs_on(rung, device)]
    if here != list(LADDER) and shape == SHAPE:
        raise ValueError("the ladder needs a Hopper GPU (compute capability 9.0)")
    functions: dict[str, Callable[[], Tensor]] = {
        rung.step: functools.partial(run_rung, rung, q, k, v) for rung in here
    }
    if device.type == "cuda":
        functions |= _peers(shape, q, k, v)
    expected = _right(q, k, v)
    for name, function in functions.items():
        _check(function(), expected, name)
    measured = _interleaved(list(functions.values()), device)
    steps = {name: _figures(one, shape) for name, one in zip(functions, measured)}
    for rung in here:
        steps[rung.step]["tiles"] = rung.tiles
    append_record(path, _record({"steps": steps}, shape, device, {}))
    return path


def _peers(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """cuDNN's attention, and FlashAttention-4 if it is installed."""
    from lib.tools.benchmarks.attention import flash_attention_4, named_attention
    from lib.tools.benchmarks.sweep import Case

    case = Case(is_causal=True, queries=shape[2], keys=shape[2])
    cudnn = named_attention("sdpa_cudnn", case, q.device)
    peers: dict[str, Callable[[], Tensor]] = {"cudnn": lambda: cudnn(q, k, v)}
    with contextlib.suppress(ImportError):
        fa4 = flash_attention_4(case, deterministic=False)
        peers["fa4"] = lambda: fa4(q, k, v)
    return peers


def heads_for(shape: Shape) -> tuple[torch.device, tuple[Tensor, ...]]:
    """The GPU, or else the CPU, and q, k and v there, in bfloat16 on a GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    return device, torch.randn(3, *shape, device=device, dtype=dtype, generator=generator).unbind()


def _corners(x: Tensor) -> Tensor:
    """The first and the last head of the first and the last sequence, in float32."""
    return x[:: max(1, len(x) - 1), :: max(1, x.shape[1] - 1)].float()


def _right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Naive attention of those heads."""
    return run_rung(LADDER[0], *map(_corners, (q, k, v)))


def _check(out: Tensor, expected: Tensor, name: str) -> None:
    error = float((_corners(out) - expected).norm() / expected.norm())
    if not error <= LARGEST_ERROR:
        raise ValueError(f"{name} must be right up to {LARGEST_ERROR}, got an error of {error:.2g}")


def _interleaved(functions: Sequence[Callable], device: torch.device) -> list[Measurement]:
    samples = 30 if device.type == "cuda" else 2
    return measure_interleaved(functions, device=device, warmup=5, samples=samples)


def _figures(measured: Measurement, shape: Shape) -> dict[str, Any]:
    batch_size, heads, tokens, head_dim = shape
    # a causal mask hides half of the pairs
    flops = 4 * head_dim * batch_size * heads * tokens**2 / 2
    tflops = flops / measured.median_ms / 1e9 if measured.median_ms else None
    found = measured.figures()
    del found["times_ms"]
    return found | {"tflops": tflops}


def _record(
    figures: dict[str, Any], shape: Shape, device: torch.device, config: dict[str, Any]
) -> Record:
    sizes = dict(zip(("batch_size", "heads", "tokens", "head_dim"), shape))
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    return new_record(figures, config=sizes | {"dtype": dtype} | config, seed=0, device=device)


def recorded_ladder(
    rungs: Sequence[Rung] = LADDER, path: Path = RECORDS
) -> tuple[list[dict[str, Any]], list[Record]]:
    """A row for each version of `rungs`, and the records that it comes from: the newest RUNS.

    TFLOP/s are the median of the runs and their extremes. Gain is over the version before, of each
    run by itself: what is measured interleaved is compared.
    """
    runs = [record for record in read_records(path) if record["device"] != record["cpu"]]
    runs = [record for record in runs if record["commit"] == runs[-1]["commit"]][-RUNS:]
    rows = []
    for rung in rungs:
        speeds = speeds_of(rung.step, runs)
        row: dict[str, Any] = {"version": rung.name, "queries × keys, warps": rung.tiles}
        row |= {"TFLOP/s": interval(speeds) or "not measured", "gain": None}
        before = [one for one in LADDER[: LADDER.index(rung)] if speeds_of(one.step, runs)]
        if speeds and before:
            old = speeds_of(before[-1].step, runs)
            row["gain"] = interval([new / slow for new, slow in zip(speeds, old)])
        rows.append(row)
    return rows, runs


def speeds_of(step: str, runs: Sequence[Record]) -> list[float]:
    """TFLOP/s of a version or a peer in each run; empty if one of them lacks it."""
    found = [record["figures"]["steps"].get(step, {}).get("tflops") for record in runs]
    return found if all(found) else []


def interval(values: Sequence[float]) -> str:
    """The median of some values, and their extremes if these are not written alike."""
    if not len(values):
        return ""
    middle, low, high = (f"{x:.3g}" for x in (median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"
