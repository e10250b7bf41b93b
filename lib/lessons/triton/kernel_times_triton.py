"""Time the kernels of notebook 05 on a GPU, beside PyTorch's: `python -m lib lessons kernels`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from lib.core.records import append_record, new_record
from lib.lessons.triton import solutions_triton as solutions
from lib.lessons.triton.records import KERNELS
from lib.profiling.measurement import measure_interleaved

EPS = 1e-5
# Calls in a CUDA graph.
CALLS = 20


# Rows of what is normalized, as many as tokens in a step, and the numbers in each.
ROWS, WIDTH = 32_768, 768
# Edge of the matrices that are multiplied, and rows of tiles in a group of a matmul's programs.
EDGE, GROUPS = 8192, (1, 2, 4, 8, 16)
SAMPLES = 30


def measure_kernels(path: Path = KERNELS) -> None:
    """Time all candidates on this GPU, in float16, and append a record for each to `path`.

    Each is recorded as a CUDA graph of many calls: launched one by one, kernels as short as these
    take as long as their launch.

    Raises:
        ValueError: there is no CUDA device.
        AssertionError: the result of a norm or of a matmul is not PyTorch's.
    """
    if not torch.cuda.is_available():
        raise ValueError("lessons kernels needs a CUDA device, found none")
    device = torch.device("cuda")
    config = {"rows": ROWS, "width": WIDTH, "edge": EDGE, "samples": SAMPLES}
    for candidates in (row_candidates(), matmul_candidates()):
        expected = next(iter(candidates.values()))()
        for name, run in candidates.items():
            if name.startswith(("F.", "rms_norm", "RMSNorm", "matmul")):
                torch.testing.assert_close(run(), expected, rtol=1e-2, atol=1e-1)
        graphs = [graph_of(run).replay for run in candidates.values()]
        measured = measure_interleaved(graphs, device=device, warmup=3, samples=SAMPLES)
        for name, found in zip(candidates, measured):
            us, iqr_us = (1e3 * ms / CALLS for ms in (found.median_ms, found.iqr_ms))
            figures = {"name": name, "median_us": us, "iqr_us": iqr_us}
            append_record(path, new_record(figures, config=config, seed=0, device=device))
            print(f"{name:28} {us:10.1f} µs, IQR {iqr_us:.1f}")


def graph_of(run: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    """CALLS calls of `run`, recorded."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    # what happens only once must not be recorded
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    return graph


def row_candidates() -> dict[str, Callable[[], Tensor]]:
    """Kernels that pass over rows: RMSNorm in five ways, softmax, a sum with a bias."""
    rows, width = ROWS, WIDTH
    x, bias = (
        torch.randn(rows, width, device="cuda").half(),
        torch.randn(width, device="cuda").half(),
    )
    y = torch.empty_like(x)
    kernels = {
        name: triton.jit(getattr(solutions, name).solve)
        for name in ("rms_norm", "softmax", "add_bias")
    }
    tiles = {"ROWS": 8, "COLUMNS": 256}
    grid = (triton.cdiv(rows, 8), triton.cdiv(width, 256))
    block = triton.next_power_of_2(width)

    def separate() -> Tensor:
        return (x.float() * (x.float().square().mean(-1, keepdim=True) + EPS).rsqrt()).half()

    def launch(name: str, grid: tuple, *arguments: object, **options: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            kernels[name][grid](*arguments, **options)
            return y

        return run

    fused = torch.compile(lambda x: F.rms_norm(x, (width,), eps=EPS))
    return {
        "F.rms_norm": lambda: F.rms_norm(x, (width,), eps=EPS),
        "F.rms_norm, compiled": lambda: fused(x),
        "RMSNorm, separate operations": separate,
        "rms_norm": launch("rms_norm", (rows,), x, y, width, EPS, BLOCK=256),
        "rms_norm, BLOCK of a row": launch("rms_norm", (rows,), x, y, width, EPS, BLOCK=block),
        "softmax": launch("softmax", (rows,), x, y, width, BLOCK=block),
        "torch.softmax": lambda: torch.softmax(x, -1),
        "add_bias": launch("add_bias", grid, x, bias, y, rows, width, **tiles),
        "x + bias": lambda: x + bias,
    }


def matmul_candidates() -> dict[str, Callable[[], Tensor]]:
    """A matmul by cuBLAS, and by tiles of 128 × 128 with its programs in groups."""
    n = EDGE
    a, b = (0.1 * torch.randn(n, n, device="cuda") for _ in range(2))
    a, b, c = a.half(), b.half(), torch.empty(n, n, device="cuda", dtype=torch.float16)
    sizes = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64}
    programs = triton.cdiv(n, 128) ** 2

    def by_group(group: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            solutions.grouped_matmul[(programs,)](
                a, b, c, n, n, n, **sizes, GROUP=group, num_warps=8, num_stages=3
            )
            return c

        return run

    found = {f"matmul, groups of {group}": by_group(group) for group in GROUPS}
    return {"torch.matmul": lambda: a @ b} | found
