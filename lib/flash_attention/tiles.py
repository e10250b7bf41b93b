"""Tile sizes of the portable kernels, by chip, dtype and head_dim.

A tile must fit the shared memory of a block, and its values the registers of the block's threads;
beyond that, the fastest sizes are found by measuring. The tables here are for classes of chips.
Hopper in 16 bits, and float32 on tensor cores up to head_dim 128, were measured on an H200 (the
program is in the history: `lib/tools/benchmarks/tune_attention.py`). The others are the largest
tiles that fit shared memory and registers.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Tiles(NamedTuple):
    """The tile of one program of a kernel, and how Triton compiles it."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def usable_precision(q: Tensor, precision: str, capability: tuple[int, int] | None = None) -> str:
    """`precision`, or `ieee` on a chip whose tensor cores do not take float32."""
    return precision if (capability or compute_capability(q.device)) >= (8, 0) else "ieee"


def forward_tiles(
    q: Tensor, capability: tuple[int, int] | None = None, precision: str = "tf32x3"
) -> Tiles:
    """The tiles of the forward kernel for the dtype and head_dim of q.

    Args:
        q: (batch, heads, queries, head_dim).
        capability: look up the table for this compute capability; by default that of q's GPU.
        precision: of float32 matmuls (`lib.flash_attention.triton_attention.flash_attention`).
    """
    chip = chip_class(q, capability or compute_capability(q.device), precision)
    if chip == "float32":
        tiles = {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 32, 8, 1)}
    elif chip == "no tensor cores":
        tiles = {64: Tiles(64, 32, 8, 1), 128: Tiles(32, 32, 8, 1), 256: Tiles(32, 16, 8, 1)}
    elif chip == "hopper":
        tiles = {64: Tiles(64, 64, 4, 3), 128: Tiles(128, 32, 8, 3), 256: Tiles(128, 64, 8, 2)}
    else:
        tiles = {
            32: Tiles(64, 64, 4, 3),
            64: Tiles(128, 64, 4, 3),
            128: Tiles(128, 64, 8, 2),
            256: Tiles(64, 64, 8, 1),
        }
    return _at_width(tiles, q.shape[3])


def backward_tiles(
    q: Tensor, capability: tuple[int, int] | None = None, precision: str = "tf32x3"
) -> tuple[Tiles, Tiles]:
    """The tiles of the kernel for dQ, and of that for dK and dV; arguments as `forward_tiles`.

    Raises:
        ValueError: the GPU has too little shared memory for this head_dim.
    """
    capability = capability or compute_capability(q.device)
    chip = chip_class(q, capability, precision)
    is_exact = q.dtype == torch.float32
    if is_exact and q.shape[3] > 128 and capability < (8, 0):
        raise ValueError(
            f"head_dim must be at most 128 in float32, got {q.shape[3]}: gradients would need more "
            "shared memory than this GPU has; take float16, or the kernel sdpa"
        )
    if chip == "float32":
        for_queries = {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 8, 1)}
        for_keys = {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 8, 1)}
    elif chip == "no tensor cores":
        for_queries = {64: Tiles(32, 32, 8, 1), 256: Tiles(16, 16, 8, 1)}
        for_keys = dict(for_queries)
        if is_exact and capability >= (8, 0):
            for_keys[128] = Tiles(32, 32, 8, 1)
    elif chip == "hopper":
        for_queries = {
            64: Tiles(64, 64, 4, 3),
            128: Tiles(128, 128, 8, 2),
            256: Tiles(64, 32, 8, 2),
        }
        for_keys = {
            32: Tiles(32, 128, 4, 2),
            64: Tiles(64, 64, 4, 3, 168),
            128: Tiles(64, 64, 4, 2),
            256: Tiles(16, 64, 8, 2),
        }
    else:
        for_queries = {
            32: Tiles(64, 64, 4, 3),
            64: Tiles(128, 64, 8, 2),
            128: Tiles(64, 64, 8, 2),
            256: Tiles(64, 32, 8, 1),
        }
        for_keys = {
            32: Tiles(32, 128, 4, 2),
            64: Tiles(32, 128, 8, 2),
            128: Tiles(32, 64, 8, 2),
            256: Tiles(32, 32, 8, 2),
        }
    head_dim = q.shape[3]
    return _at_width(for_queries, head_dim), _at_width(for_keys, head_dim)


def chip_class(q: Tensor, capability: tuple[int, int], precision: str) -> str:
    """The class of chips whose tiles fit: by the units that multiply, and by shared memory."""
    # Triton uses tensor cores from sm_80 on
    if capability < (8, 0) or (q.dtype == torch.float32 and precision == "ieee"):
        return "no tensor cores"
    if q.dtype == torch.float32:
        return "float32"
    # 227 KB of shared memory for a block; others have 99 KB or 163 KB
    return "hopper" if capability[0] in (9, 10) else "ampere"


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; a CPU, where Triton interprets, counts as Hopper."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def _at_width(tiles: dict[int, Tiles], head_dim: int) -> Tiles:
    """The tiles for the smallest width that holds `head_dim`."""
    if head_dim > max(tiles):
        raise ValueError(f"head_dim must be at most {max(tiles)}, got {head_dim}")
    return tiles[min(width for width in tiles if width >= head_dim)]
