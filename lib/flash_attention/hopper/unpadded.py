"""The forward pass in CUDA C++, where that is faster than Gluon: `cuda/hopper_forward.cu`.

A tensor of Gluon has a power of two columns: heads of 80 take tiles of 128 there, and heads of 160
tiles of 256. Here tiles have as many columns as matmuls need, and as many keys as fit. Heads of 64
are faster under a causal mask.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.flash_attention.background import Once
from lib.flash_attention.cuda.build import build
from lib.flash_attention.cuda.driver import Function
from lib.flash_attention.hopper import fused
from lib.flash_attention.hopper.direct import KEPT, Addresses, TensorMap

# Queries of a warpgroup, columns of a tile in shared memory
ROWS, COLUMNS = 64, 64


@dataclass(frozen=True)
class Tiles:
    """The tiles of the kernel for one head size."""

    dim: int
    """Columns, zeros past head_dim."""

    keys: int
    """Keys of a step."""

    warpgroups: int = 2
    """Warpgroups that multiply."""

    stages: int = 2
    """Tiles of K, and of V, in shared memory at a time."""

    is_ordered: bool = False
    """Whether warpgroups take turns in issuing matmuls."""

    blocks: int = 1
    """Blocks that share a multiprocessor."""

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return self.warpgroups * ROWS

    @property
    def shared_bytes(self) -> int:
        """Q, K and V; barriers."""
        row, tiles = 2 * COLUMNS, -(-self.dim // COLUMNS)
        barriers = 2 * self.warpgroups + 4 * self.stages
        return tiles * row * (self.queries + 2 * self.stages * self.keys) + 8 * barriers

    def constants(self, is_bfloat16: bool, is_causal: bool) -> dict[str, int]:
        """The macros of the source."""
        return {
            "DIM": self.dim,
            "KEYS": self.keys,
            "READERS": self.warpgroups,
            "STAGES": self.stages,
            "ORDERED": int(self.is_ordered),
            "BLOCKS": self.blocks,
            "SHARED_BYTES": self.shared_bytes,
            "BFLOAT16": int(is_bfloat16),
            "CAUSAL": int(is_causal),
        }


# In order of their width, tuned on an H200
TILES = (
    Tiles(64, 128, warpgroups=3, stages=3, is_ordered=True),
    Tiles(80, 112, warpgroups=3, is_ordered=True),
    Tiles(96, 112, warpgroups=3, is_ordered=True),
    Tiles(160, 112),
    Tiles(192, 112),
)
# Small tiles for heads of up to 64 are faster up to SHORT_QUERIES queries, and where larger ones
# would leave multiprocessors idle.
SHORT_TILES, SHORT_QUERIES = Tiles(64, 64, warpgroups=1, blocks=3), 768
# Sizes that fill a tile of 128 or 256 columns to three quarters at most; those of a tile of 64.
HEAD_DIMS = (*range(72, 97, 8), *range(136, 193, 8))
CAUSAL_HEAD_DIMS = range(40, 65, 8)
MAPS = ("q", "k", "v", "out")
SIZES = ("num_heads", "group", "num_queries", "num_keys", "query_tiles", "all_heads", "section")


class ForwardArguments(ctypes.Structure):
    """`Forward` of hopper_forward.cu."""

    _fields_ = (
        *((name, TensorMap) for name in MAPS),
        *((name, ctypes.c_void_p) for name in ("lse", "work_list")),
        *((name, ctypes.c_int) for name in SIZES),
        ("scale", ctypes.c_float),
        # the size is a multiple of the alignment of maps
        ("padding", ctypes.c_char * 16),
    )


# Launches blocks of the kernel.
Launch = Callable[[int, ForwardArguments], None]


def is_faster(head_dim: int, is_causal: bool) -> bool:
    """Whether this kernel is faster than that in Gluon."""
    return head_dim in HEAD_DIMS or (is_causal and head_dim in CAUSAL_HEAD_DIMS)


def pick_tiles(head_dim: int) -> Tiles:
    """The tiles for long sequences of heads of HEAD_DIMS or CAUSAL_HEAD_DIMS."""
    return next(tiles for tiles in TILES if tiles.dim >= head_dim)


def tiles_by_length(q: Sequence[int], multiprocessors: int) -> tuple[Tiles, ...]:
    """The tiles for queries of shape `q`, and then those that other lengths of these heads have."""
    batch, num_heads, num_queries, head_dim = q
    large = pick_tiles(head_dim)
    if head_dim > SHORT_TILES.dim:
        return (large,)
    blocks = batch * num_heads * -(-num_queries // large.queries)
    is_short = num_queries <= SHORT_QUERIES or blocks <= multiprocessors
    return (SHORT_TILES, large) if is_short else (large, SHORT_TILES)


def make_launch(
    tensors: Mapping[str, Tensor],
    is_causal: bool,
    scale: float,
    *,
    tiles: Tiles,
    section: int,
    work_list: Tensor | None,
) -> Callable[[Addresses], None]:
    """The launch of the kernel, for tensors like these at any addresses, in their order.

    Args:
        tensors: q, k, v, out and lse by name; the last two are written.
        section: heads of q, of all sequences, that are worked on at a time.
        work_list: the table of `launch.schedule_tiles` for blocks; None: one for each tile.
    """
    q, k = tensors["q"], tensors["k"]
    batch, num_heads, num_queries, _ = q.shape
    key_heads, num_keys = k.shape[1:3]
    query_tiles = -(-num_queries // tiles.queries)
    boxes = (ROWS, tiles.keys, tiles.keys, ROWS)
    maps = {name: fused.tensor_map(tensors[name], rows) for name, rows in zip(MAPS, boxes)}
    sizes = (num_heads, num_heads // key_heads, num_queries, num_keys, query_tiles)
    numbers = dict(zip(SIZES, (*sizes, batch * num_heads, section)))
    names = tuple(tensors)

    @functools.lru_cache(KEPT)
    def pack(addresses: Addresses) -> ForwardArguments:
        at = dict(zip(names, addresses))
        return ForwardArguments(
            **{name: map_at(at[name]) for name, map_at in maps.items()},
            lse=at["lse"],
            work_list=None if work_list is None else work_list.data_ptr(),
            scale=scale,
            **numbers,
        )

    kernel = load_kernel(tiles, q.device.index, q.dtype == torch.bfloat16, is_causal)
    blocks = query_tiles * num_heads * batch if work_list is None else work_list.shape[1]
    return lambda addresses: kernel(blocks, pack(addresses))


@functools.cache
def load_kernel(tiles: Tiles, device: int, is_bfloat16: bool, is_causal: bool) -> Launch:
    """The kernel for a GPU and dtype."""
    image = image_of(tiles, is_bfloat16, is_causal)
    threads = (tiles.warpgroups + 1) * fused.WARPGROUP
    return Function(
        image, "forward", device=device, threads=threads, shared_bytes=tiles.shared_bytes
    )


@Once
def image_of(tiles: Tiles, is_bfloat16: bool, is_causal: bool) -> bytes:
    """The machine code of the kernel."""
    return build("hopper_forward", tiles.constants(is_bfloat16, is_causal), fused.ARCHITECTURE)
