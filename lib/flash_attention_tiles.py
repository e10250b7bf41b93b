"""Which tiles the kernels of `lib.flash_attention_triton` work on: by chip, dtype, width of heads.

A tile must fit a block's shared memory, and its values the registers of its threads; beyond that
the best are found by measuring. The tables here hold for a class of chips;
`python -m lib.flash_attention_tune` finds those of the GPU at hand, which are kept in a file.
"""

import functools
import json
import os
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lib.files import write_atomically


class Tiles(NamedTuple):
    """How a kernel cuts its work."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def usable_precision(q: Tensor, precision: str, capability: tuple[int, int] | None = None) -> str:
    """`precision`, and `ieee` on a chip whose tensor cores do not take float32."""
    return precision if (capability or compute_capability(q.device)) >= (8, 0) else "ieee"


def forward_tiles(
    q: Tensor, capability: tuple[int, int] | None = None, precision: str = "tf32x3"
) -> Tiles:
    """For heads as wide as those of q, in its dtype.

    Those that were found on the GPU of q, or those of a table for chips of its kind. In the table
    those of Hopper in short types, and those of float32 on tensor cores, up to 128 wide, are
    measured on an H200. The others are the largest that fit the chips' shared memory and leave
    values in registers.

    Args:
        q: (batch, heads, queries, head_dim).
        capability: a compute capability, for the table alone; that of the GPU of q when left out.
        precision: of products of float32 (`lib.flash_attention_triton.flash_attention`).
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
    """Of the kernel for dQ, and of that for dK and dV; arguments as `forward_tiles`.

    Raises:
        ValueError: the GPU has too little shared memory for heads so wide.
    """
    if capability is None:
        found = found_tiles(q.device)
        kinds = [tiles_key(kind, q, precision) for kind in ("queries", "keys")]
        if all(kind in found for kind in kinds):
            return tuple(found[kind] for kind in kinds)
    capability = capability or compute_capability(q.device)
    chip = chip_class(q, capability, precision)
    is_exact = q.dtype == torch.float32
    if is_exact and q.shape[3] > 128 and capability < (8, 0):
        raise ValueError(
            f"head_dim is {q.shape[3]} in float32, whose gradients take more shared memory than "
            "this GPU has; right is: at most 128, float16, or the kernel sdpa"
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
    """The name of a choice: of the `forward` kernel, of that for `queries` or that for `keys`."""
    # the least that a matrix product takes is 16
    width = max(16, 1 << (q.shape[3] - 1).bit_length())
    products = f" {precision}" if q.dtype == torch.float32 else ""
    return f"{kind} {str(q.dtype).removeprefix('torch.')} {width}{products}"


@functools.cache
def found_tiles(device: torch.device) -> dict[str, Tiles]:
    """What `lib.flash_attention_tune` found on a GPU with this Triton, by `tiles_key`."""
    return _known_tiles().get(_chip_name(device), {}) if device.type == "cuda" else {}


def keep_tiles(device: torch.device, found: dict[str, Tiles]) -> Path:
    """Write what was found on a GPU beside what is known already; the path of the file."""
    path, known = tiles_file(), _known_tiles()
    known[_chip_name(device)] = known.get(_chip_name(device), {}) | found
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(known, indent=1) + "\n")
    found_tiles.cache_clear()
    return path


def tiles_file() -> Path:
    """Where the tiles that were found are kept: `workbook` in the user's folder for caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / (
        "workbook/attention_tiles.json"
    )


def _known_tiles() -> dict[str, dict[str, Tiles]]:
    """What is kept of all GPUs; nothing, and a warning, where the file is damaged."""
    if not tiles_file().is_file():
        return {}
    try:
        known = json.loads(tiles_file().read_text(encoding="utf-8"))
        return {
            chip: {key: Tiles(*tiles) for key, tiles in found.items()}
            for chip, found in known.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"{tiles_file()} is damaged and not used: {error}", stacklevel=2)
        return {}


def _chip_name(device: torch.device) -> str:
    import triton

    return f"{torch.cuda.get_device_name(device)}, Triton {triton.__version__}"


def chip_class(q: Tensor, capability: tuple[int, int], precision: str) -> str:
    """Which tiles are right: by the units that multiply, and by the shared memory of a block."""
    # Triton has tensor cores work for sm_80 and later
    if capability < (8, 0) or (q.dtype == torch.float32 and precision == "ieee"):
        return "no tensor cores"
    if q.dtype == torch.float32:
        return "float32"
    # 227 KB for a block; others have 99 KB, or 163 KB
    return "hopper" if capability[0] in (9, 10) else "ampere"


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU; the interpreter, on a CPU, counts as Hopper."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def _at_width(tiles: dict[int, Tiles], head_dim: int) -> Tiles:
    """Those for the least width that takes `head_dim`."""
    return tiles[min(width for width in tiles if width >= head_dim)]
