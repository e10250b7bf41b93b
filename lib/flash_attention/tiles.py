"""Tile sizes of the portable kernels, by chip, dtype and head_dim.

A tile must fit the shared memory of a block, and its values the registers of the block's threads;
beyond that, the fastest sizes are found by measuring. The tables here are for classes of chips.
`python -m lib benchmark tune-attention` measures the GPU at hand and stores what is fastest there
in a file, which then takes precedence.
"""

import functools
import json
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lib.core.files import user_cache, write_atomically


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

    Tuned tiles of q's GPU if there are any, otherwise those of the table for its class of chips.
    In the table, Hopper in 16 bits, and float32 on tensor cores up to head_dim 128, were measured
    on an H200. The others are the largest tiles that fit shared memory and registers.

    Args:
        q: (batch, heads, queries, head_dim).
        capability: look up the table for this compute capability; by default that of q's GPU.
        precision: of float32 matmuls (`lib.flash_attention.triton_attention.flash_attention`).
    """
    if capability is None:
        found = found_tiles(q.device).get(tiles_key("forward", q, precision))
        if found:
            return found
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
    if capability is None:
        found = found_tiles(q.device)
        queries, keys = (tiles_key(kind, q, precision) for kind in ("queries", "keys"))
        if queries in found and keys in found:
            return found[queries], found[keys]
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


def tiles_key(kind: str, q: Tensor, precision: str) -> str:
    """The key of a kernel's tiles in the file; `kind` is `forward`, `queries` or `keys`."""
    # a matmul takes at least 16 columns
    width = max(16, 1 << (q.shape[3] - 1).bit_length())
    suffix = f" {precision}" if q.dtype == torch.float32 else ""
    return f"{kind} {str(q.dtype).removeprefix('torch.')} {width}{suffix}"


@functools.cache
def found_tiles(device: torch.device) -> dict[str, Tiles]:
    """The tuned tiles of a GPU with this version of Triton, by `tiles_key`."""
    return _known_tiles().get(_chip_name(device), {}) if device.type == "cuda" else {}


def keep_tiles(device: torch.device, found: dict[str, Tiles]) -> Path:
    """Add tuned tiles of a GPU to the file, and return its path."""
    path, known = tiles_file(), _known_tiles()
    known[_chip_name(device)] = known.get(_chip_name(device), {}) | found
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(known, indent=1) + "\n")
    found_tiles.cache_clear()
    return path


def tiles_file() -> Path:
    """The file of tuned tiles."""
    return user_cache() / "attention_tiles.json"


def _known_tiles() -> dict[str, dict[str, Tiles]]:
    """The tuned tiles of all GPUs; none, with a warning, if the file is damaged."""
    try:
        known = json.loads(tiles_file().read_text(encoding="utf-8"))
        return {
            chip: {key: Tiles(*tiles) for key, tiles in found.items()}
            for chip, found in known.items()
        }
    except (FileNotFoundError, NotADirectoryError):
        # nothing was tuned, or there is no home folder
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"{tiles_file()} is damaged and not used: {error}", stacklevel=2)
        return {}


def _chip_name(device: torch.device) -> str:
    import triton

    return f"{torch.cuda.get_device_name(device)}, Triton {triton.__version__}"


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
