"""Finds the fastest tiles of the Triton attention kernels for this machine's GPU.

`python -m lib benchmark tune-attention` compiles candidates for each kernel in parallel, measures
them interleaved, and saves the best to a file that `lib.flash_attention.tiles` reads. It does not
change the kernels that Hopper GPUs use for a head_dim from 40 to 256 in 16 bits
(`lib.flash_attention.hopper.launch`).
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from lib.core.hardware import available_cpus, pick_device, pick_dtype
from lib.core.records import to_markdown
from lib.core.settings import NonEmpty, PositiveInt, settings
from lib.core.terminal import bar_size
from lib.flash_attention.tiles import (
    Tiles,
    backward_tiles,
    chip_class,
    compute_capability,
    forward_tiles,
    keep_tiles,
    tiles_key,
    usable_precision,
)
from lib.flash_attention.triton_attention import PRECISIONS, flash_backward, flash_forward
from lib.profiling.measurement import measure_interleaved

# The kernels: forward, backward for dQ, backward for dK and dV.
KINDS = ("forward", "queries", "keys")
# The causal attention that is measured.
TOKENS, HEADS = 2048, 64
# (queries, keys, num_warps, num_stages) for a head_dim of about 64, by `chip_class`
# fmt: off
CANDIDATES = {
    "no tensor cores": [
        (64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 4, 1), (64, 16, 8, 1), (16, 16, 4, 1),
    ],
    "float32": [
        (64, 32, 4, 2), (64, 64, 4, 2), (32, 32, 4, 1), (128, 64, 8, 2), (64, 32, 8, 1),
    ],
    "ampere": [
        (128, 64, 4, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 4, 3),
        (32, 128, 8, 2), (32, 64, 4, 2),
    ],
    "hopper": [
        (64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 3), (128, 128, 8, 2),
        (32, 128, 4, 2), (32, 64, 4, 2),
    ],
}
# fmt: on


@settings
class TuneConfig:
    """Settings of the attention tuner."""

    head_dims: Annotated[tuple[PositiveInt, ...], NonEmpty] = (64, 128)
    """Head dimensions; others use the tiles of the next power of two."""


class Choice(NamedTuple):
    """A kernel to tune."""

    kind: str
    head_dim: int
    dtype: str

    def table(self, device: torch.device) -> tuple[Tensor, tuple[int, int], str]:
        """The arguments of the tables of tiles: a q without memory, and the GPU's limits."""
        dtype = getattr(torch, self.dtype)
        q = torch.empty(1, 1, 1, self.head_dim, dtype=dtype, device="meta")
        capability = compute_capability(device)
        return q, capability, usable_precision(q, PRECISIONS[0], capability)


def tune(config: TuneConfig) -> list[dict[str, Any]]:
    """Find, print and save the best tiles of the three kernels in the GPU's fast 16-bit dtype.

    Returns:
        A row for each kernel: its key, the tiles of the table and the best, and their times in ms;
        None for the table's if they do not fit this GPU.

    Raises:
        ValueError: there is no GPU.
    """
    gpu = pick_device("auto")
    if gpu.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {gpu}")
    dtype = str(pick_dtype(gpu, "auto")).removeprefix("torch.")
    choices = [Choice(kind, head_dim, dtype) for head_dim in config.head_dims for kind in KINDS]
    with torch.cuda.device(gpu):
        jobs = [(choice, tiles) for choice in choices for tiles in candidates(choice, gpu)]
        print(f"{len(jobs)} kernels to compile", file=sys.stderr, flush=True)
        usable = compile_all(jobs)

        rows, best = [], {}
        for choice in tqdm(choices, desc="measured", disable=None, **bar_size()):
            q, _, precision = choice.table(gpu)
            key = tiles_key(choice.kind, q, precision)
            of_table, *_ = tried = candidates(choice, gpu)
            tiles = [t for t in tried if (choice, t) in usable]
            row: dict = {"kernel": key, "table": str(tuple(of_table)), "ms": None}
            row |= {"best": "none fits", "best ms": None}
            if tiles:
                functions = _functions(choice, tiles, TOKENS, HEADS)
                measurements = measure_interleaved(functions, device=gpu, max_seconds=0.5)
                times = {t: m.median_ms for t, m in zip(tiles, measurements)}
                milliseconds, best[key] = min((ms, t) for t, ms in times.items())
                row["ms"] = times.get(of_table)
                row |= {"best": str(tuple(best[key])), "best ms": milliseconds}
            rows.append(row)
    keep_tiles(gpu, best)
    print(to_markdown(rows))
    return rows


def candidates(choice: Choice, device: torch.device) -> list[Tiles]:
    """The tiles to try, the table's first."""
    table = choice.table(device)
    tiles = dict(zip(KINDS, (forward_tiles(*table), *backward_tiles(*table))))
    others = (Tiles(*numbers) for numbers in CANDIDATES[chip_class(*table)])
    return list(dict.fromkeys([tiles[choice.kind], *others]))


def compile_all(jobs: Sequence[tuple[Choice, Tiles]]) -> set[tuple[Choice, Tiles]]:
    """The jobs that compile and fit the GPU; Triton caches what they compile on disk."""
    # the table's tiles first: the other backward candidates run next to them
    table = list({choice: (choice, tiles) for choice, tiles in reversed(jobs)}.values())
    order = [*table, *(job for job in jobs if job not in table)]
    # never fork after CUDA has started
    context = multiprocessing.get_context("spawn")
    # each process needs a CUDA context, and those take longer the more there are
    workers = min(len(jobs), available_cpus(), 16)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        return {job for job, is_usable in zip(order, pool.map(_runs, order)) if is_usable}


def _runs(job: tuple[Choice, Tiles]) -> bool:
    choice, tiles = job
    try:
        # sizes divisible by all tiles and by 16, like the measured ones: Triton compiles others,
        # such as a single head, separately
        _functions(choice, [tiles], 256, 16)[0]()
        torch.cuda.synchronize()
    # Triton does not document the exception for a tile that is too large
    except Exception:
        return False
    return True


def _functions(
    choice: Choice, tiles: Sequence[Tiles], tokens: int, heads: int
) -> list[Callable[[], Any]]:
    """A call with each of `tiles`; the other backward kernel has the table's."""
    # the heads of a token lie side by side: (1, heads, tokens, head_dim)
    size = (1, tokens, heads, choice.head_dim)
    options = {"device": "cuda", "dtype": getattr(torch, choice.dtype)}
    q, k, v, grad_out = (torch.randn(size, **options).transpose(1, 2) for _ in range(4))
    settings, table = (True, choice.head_dim**-0.5), choice.table(q.device)
    precision: dict = {"precision": table[2]}
    if choice.kind == "forward":
        return [lambda t=t: flash_forward(q, k, v, *settings, tiles=t, **precision) for t in tiles]
    saved = flash_forward(q, k, v, *settings, tiles=forward_tiles(*table), **precision)  # out, lse
    for_queries, for_keys = backward_tiles(*table)
    pairs = [(t, for_keys) if choice.kind == "queries" else (for_queries, t) for t in tiles]
    given = (grad_out, q, k, v, *saved, *settings)
    return [lambda pair=pair: flash_backward(*given, tiles=pair, **precision) for pair in pairs]
