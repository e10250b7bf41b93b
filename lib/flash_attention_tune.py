"""Finds the tiles with which the attention kernels are fastest on the GPU at hand.

`python -m lib.flash_attention_tune` compiles some candidates for each kernel in parallel, measures
them in turns, and keeps the best in a file that `lib.flash_attention_tiles` reads. On Hopper GPUs
heads 64 and 128 wide in 16 bits have kernels of their own (`lib.flash_attention_hopper`), which
this does not change.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from lib.benchmark import take_turns
from lib.flash_attention_tiles import (
    Tiles,
    backward_tiles,
    chip_class,
    compute_capability,
    forward_tiles,
    keep_tiles,
    tiles_key,
    usable_precision,
)
from lib.flash_attention_triton import PRECISIONS, flash_backward, flash_forward
from lib.hardware import pick_device, pick_dtype
from lib.parallel import available_cpus
from lib.report import to_markdown

KINDS = ("forward", "queries", "keys")
# By the class of chips (`chip_class`), for heads about 64 wide: queries, keys, warps, stages
CANDIDATES = {
    "no tensor cores": [
        (64, 32, 8, 1),
        (32, 32, 8, 1),
        (32, 32, 4, 1),
        (64, 16, 8, 1),
        (16, 16, 4, 1),
    ],
    "float32": [
        (64, 32, 4, 2),
        (64, 64, 4, 2),
        (32, 32, 4, 1),
        (128, 64, 8, 2),
        (64, 32, 8, 1),
    ],
    "ampere": [
        (128, 64, 4, 3),
        (128, 64, 8, 2),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 32, 4, 3),
        (32, 128, 8, 2),
        (32, 64, 4, 2),
    ],
    "hopper": [
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (128, 64, 8, 2),
        (128, 32, 8, 3),
        (128, 128, 8, 2),
        (32, 128, 4, 2),
        (32, 64, 4, 2),
    ],
}


class Choice(NamedTuple):
    """A kernel to be tuned."""

    kind: str
    head_dim: int
    dtype: str
    precision: str = PRECISIONS[0]


def tune(
    head_dims: Sequence[int] = (64, 128),
    dtypes: Sequence[str] = (),
    *,
    device: str = "auto",
    tokens: int = 2048,
    heads: int = 64,
) -> list[dict[str, Any]]:
    """Find and keep the best tiles of the three kernels.

    Args:
        head_dims: widths of heads; others take those of the next power of two.
        dtypes: the 16-bit type that the GPU is fast in, when left out.
        tokens, heads: of the causal attention that is measured.

    Returns:
        A row for each kernel: its key, the tiles of the table and the best, and their times in ms;
        None for the table's where they do not fit this GPU.

    Raises:
        ValueError: there is no GPU.
    """
    gpu = pick_device(device)
    if gpu.type != "cuda":
        raise ValueError(f"device is {gpu}; right is: a CUDA device")
    short = str(pick_dtype(gpu, "auto")).removeprefix("torch.")
    dtypes = dtypes or (short,)
    choices = [
        Choice(kind, head_dim, dtype)
        for dtype in dtypes
        for head_dim in head_dims
        for kind in KINDS
    ]
    with torch.cuda.device(gpu):
        jobs = [(c, tiles) for c in choices for tiles in candidates(c, gpu)]
        print(f"{len(jobs)} kernels to compile", file=sys.stderr, flush=True)
        usable = compile_all(jobs)
        rows, found = [], {}
        for choice in tqdm(choices, desc="measured", disable=None):
            q = _example(choice)
            precision = usable_precision(q, choice.precision, compute_capability(gpu))
            key = tiles_key(choice.kind, q, precision)
            of_table, *_ = tried = candidates(choice, gpu)
            tiles = [t for t in tried if (choice, t) in usable]
            row = {"kernel": key, "table": str(tuple(of_table)), "ms": None}
            row |= {"best": "none fits", "best ms": None}
            if tiles:
                functions = _functions(choice, tiles, tokens, heads)
                times = [m.median_ms for m in take_turns(functions, device=gpu, max_seconds=0.5)]
                milliseconds, found[key] = min(zip(times, tiles))
                row["ms"] = dict(zip(tiles, times)).get(of_table)
                row |= {"best": str(tuple(found[key])), "best ms": milliseconds}
            rows.append(row)
    keep_tiles(gpu, found)
    return rows


def candidates(choice: Choice, device: torch.device) -> list[Tiles]:
    """The tiles to try, those of the table first."""
    q = _example(choice)
    capability = compute_capability(device)
    precision = usable_precision(q, choice.precision, capability)
    if choice.kind == "forward":
        first = forward_tiles(q, capability, precision)
    else:
        first = backward_tiles(q, capability, precision)[KINDS.index(choice.kind) - 1]
    others = CANDIDATES[chip_class(q, capability, precision)]
    return list(dict.fromkeys([first, *(Tiles(*tiles) for tiles in others)]))


def compile_all(jobs: Sequence[tuple[Choice, Tiles]]) -> set[tuple[Choice, Tiles]]:
    """Those of `jobs` that compile and fit the GPU; Triton keeps what it compiled on disk."""
    # those of the table first, which the other candidates of the backward pass run beside
    table = list({choice: (choice, tiles) for choice, tiles in reversed(jobs)}.values())
    order = [*table, *(job for job in jobs if job not in table)]
    # never fork after CUDA has started
    context = multiprocessing.get_context("spawn")
    # each has a context of its own on the GPU, which takes longer the more there are
    workers = min(len(jobs), available_cpus(), 16)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        return {job for job, is_usable in zip(order, pool.map(_runs, order)) if is_usable}


def _runs(job: tuple[Choice, Tiles]) -> bool:
    choice, tiles = job
    try:
        # sizes that divide by all tiles and by 16, as those that are measured: for others, as for a
        # single head, Triton compiles anew
        _functions(choice, [tiles], 256, 16)[0]()
        torch.cuda.synchronize()
    # Triton's own, of a tile that is too large, is none of a kind that it documents
    except Exception:
        return False
    return True


def _example(choice: Choice) -> Tensor:
    """A q of its width and dtype, without memory."""
    return torch.empty(1, 1, 1, choice.head_dim, dtype=getattr(torch, choice.dtype), device="meta")


def _heads(choice: Choice, tokens: int, heads: int) -> list[Tensor]:
    """q, k, v and dO; tokens outside heads."""
    size = (1, tokens, heads, choice.head_dim)
    dtype = getattr(torch, choice.dtype)
    return [torch.randn(size, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(4)]


def _functions(
    choice: Choice, tiles: Sequence[Tiles], tokens: int, heads: int
) -> list[Callable[[], Any]]:
    """A call with each of `tiles`; of a backward kernel, with the other's from the table."""
    q, k, v, grad_out = _heads(choice, tokens, heads)
    settings = (True, choice.head_dim**-0.5)
    options = {"precision": usable_precision(q, choice.precision)}
    table = (q, compute_capability(q.device), options["precision"])
    if choice.kind == "forward":
        return [lambda t=t: flash_forward(q, k, v, *settings, tiles=t, **options) for t in tiles]
    out, lse = flash_forward(q, k, v, *settings, tiles=forward_tiles(*table), **options)
    for_queries, for_keys = backward_tiles(*table)
    pairs = [(t, for_keys) if choice.kind == "queries" else (for_queries, t) for t in tiles]
    return [
        lambda pair=pair: flash_backward(
            grad_out, q, k, v, out, lse, *settings, tiles=pair, **options
        )
        for pair in pairs
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune the kernels for this machine's GPU."""
    parser = argparse.ArgumentParser(prog="python -m lib.flash_attention_tune")
    parser.add_argument("head_dims", nargs="*", type=int, default=[64, 128], help="widths of heads")
    asked = parser.parse_args(arguments)
    try:
        print(to_markdown(tune(asked.head_dims)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
