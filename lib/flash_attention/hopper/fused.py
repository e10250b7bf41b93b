"""The backward pass in one kernel, in CUDA C++: `hopper_backward.cu` of lib/flash_attention/cuda.

Heads of more than 128 have a kernel of their own there, `hopper_backward_wide.cu`.

It does five matmuls where the two kernels of `backward.py` do seven, since scores are not computed
twice. Blocks add to the same dQ: one after another, so that results repeat to the bit, or in any
order.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.flash_attention.background import Once
from lib.flash_attention.cuda.build import build
from lib.flash_attention.cuda.driver import Function
from lib.flash_attention.hopper.direct import KEPT, Addresses, TensorMap, make_map

ARCHITECTURE = "sm_90a"
# Rows of a warpgroup's matmul, columns of a tile in shared memory
ROWS, COLUMNS = 64, 64
STAGES = 2
WARPGROUP = 128
# CU_TENSOR_MAP_SWIZZLE_128B
SWIZZLE_128 = 3
Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Tiles:
    """The tiles of the kernel for one head size."""

    dim: int
    """Columns, zeros past head_dim."""

    queries: int
    """Queries of a step."""

    @property
    def is_wide(self) -> bool:
        """Whether the kernel is that of hopper_backward_wide.cu."""
        return self.dim > 128

    @property
    def source(self) -> str:
        """The file of the kernel, without its ending."""
        return "hopper_backward_wide" if self.is_wide else "hopper_backward"

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return 96 if self.is_wide else 128

    @property
    def warpgroups(self) -> int:
        """Those that multiply."""
        return 3 if self.is_wide else 2

    @property
    def threads(self) -> int:
        """Of a block; one more warpgroup loads and adds."""
        return (self.warpgroups + 1) * WARPGROUP

    @property
    def columns(self) -> int:
        """Columns of the tiles in shared memory."""
        return -(-self.dim // COLUMNS) * COLUMNS

    @property
    def shared_bytes(self) -> int:
        """K and V; Q and dO; dS, and P if wide; dQ; log-sum-exp and delta; barriers."""
        row, tiles = 2 * COLUMNS, self.columns // COLUMNS
        # tiles of dO and dQ at a time; of Q there are STAGES
        stages = 1 if self.is_wide else STAGES
        keys = 2 * tiles * self.keys * row
        queries = (STAGES + stages) * tiles * self.queries * row
        scores = 2 * self.keys * row if self.is_wide else 2 * STAGES * self.queries * row
        grad_q = stages * self.warpgroups * ROWS * COLUMNS * 4
        numbers = (STAGES + stages) * self.queries * 4
        barriers = 2 + 2 * STAGES + 2 * stages + (0 if self.is_wide else STAGES)
        return keys + queries + scores + grad_q + numbers + 8 * barriers

    def constants(self, is_bfloat16: bool, is_causal: bool, has_rope: bool) -> dict[str, int]:
        """The macros of the source."""
        return {
            "DIM": self.dim,
            "QUERIES": self.queries,
            "SHARED_BYTES": self.shared_bytes,
            "BFLOAT16": int(is_bfloat16),
            "CAUSAL": int(is_causal),
            "ROPE": int(has_rope),
        }


TILES = (
    *(Tiles(64, 128), Tiles(80, 64), Tiles(96, 64), Tiles(128, 64)),
    *(Tiles(160, 64), Tiles(192, 64)),
)


def tiles_of(head_dim: int) -> Tiles:
    """The narrowest tiles for a head."""
    return next(tiles for tiles in TILES if tiles.dim >= head_dim)


class RowsArgument(ctypes.Structure):
    """`Rows` of hopper_backward.cuh."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_longlong),
        ("head", ctypes.c_longlong),
        ("token", ctypes.c_longlong),
    )


MAPS = ("q", "k", "v", "grad_out", "grad_q", "grad_k", "grad_v")
ADDRESSES = ("lse", "lse_log2", "delta", "sums", "turns", "cos", "sin")
SIZES = (
    *("num_heads", "group", "num_queries", "num_keys", "query_tiles", "key_tiles", "head_dim"),
    *("key_heads", "section"),
)


class BackwardArguments(ctypes.Structure):
    """`Backward` of hopper_backward.cuh."""

    _fields_ = (
        *((name, TensorMap) for name in MAPS),
        ("out", RowsArgument),
        ("grad_out_rows", RowsArgument),
        *((name, ctypes.c_void_p) for name in ADDRESSES),
        *((name, ctypes.c_int) for name in SIZES),
        ("scale", ctypes.c_float),
        # the size is a multiple of the alignment of maps
        ("padding", ctypes.c_char * 32),
    )


# Launches blocks of a kernel.
Launch = Callable[[int, BackwardArguments], None]


def make_tensors(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: Grads,
    angles: tuple[Tensor, Tensor] | None,
    *,
    deterministic: bool,
) -> dict[str, Tensor]:
    """The tensors of a call by the names of `BackwardArguments`, with memory that kernels need.

    Args:
        grad_out, out: with rows that a tensor map can describe, as those of q, k and v.
        grads: the tensors to write.
        deterministic: add to dQ in one order.
    """
    batch, num_heads, num_queries, head_dim = q.shape
    tiles = tiles_of(head_dim)
    query_tiles = -(-num_queries // tiles.queries)
    rows = batch * num_heads * query_tiles * tiles.queries
    lse_log2, delta = lse.new_empty(2, rows).unbind()  # log-sum-exp in base 2
    # without angles the kernels do not read these pointers
    cos, sin = angles or (lse, lse)
    tensors = {"q": q, "k": k, "v": v, "grad_out": grad_out, "out": out, "lse": lse}
    tensors |= dict(zip(("grad_q", "grad_k", "grad_v"), grads))
    tensors |= {"lse_log2": lse_log2, "delta": delta, "cos": cos, "sin": sin}
    tensors["sums"] = lse.new_empty(rows, tiles.dim)  # of dQ
    if deterministic:
        tensors["turns"] = lse.new_empty(batch * num_heads * query_tiles, dtype=torch.int32)
    return tensors


def make_launch(
    tensors: Mapping[str, Tensor],
    is_causal: bool,
    scale: float,
    has_rope: bool,
    section: int,
) -> Callable[[Addresses], None]:
    """The launch of the three kernels, for tensors like those of `make_tensors` at any addresses.

    Args:
        has_rope: whether gradients of q and k are rotated back.
        section: heads of k, of all sequences, that are worked on at a time.
    """
    q, k = tensors["q"], tensors["k"]
    batch, num_heads, num_queries, head_dim = q.shape
    key_heads, num_keys = k.shape[1:3]
    tiles = tiles_of(head_dim)
    query_tiles, key_tiles = -(-num_queries // tiles.queries), -(-num_keys // tiles.keys)
    stored = tiles.keys if tiles.is_wide else ROWS  # rows of dK and dV at a time
    boxes = (tiles.queries, tiles.keys, tiles.keys, tiles.queries, ROWS, stored, stored)
    maps = {name: tensor_map(tensors[name], rows) for name, rows in zip(MAPS, boxes)}
    strides = {name: tensors[name].stride()[:3] for name in ("out", "grad_out")}
    sizes = (num_heads, num_heads // key_heads, num_queries, num_keys, query_tiles, key_tiles)
    numbers = dict(zip(SIZES, (*sizes, head_dim, batch * key_heads, section)))
    names = tuple(tensors)

    @functools.lru_cache(KEPT)
    def pack(addresses: Addresses) -> BackwardArguments:
        at = dict(zip(names, addresses))
        return BackwardArguments(
            **{name: map_at(at[name]) for name, map_at in maps.items()},
            out=RowsArgument(at["out"], *strides["out"]),
            grad_out_rows=RowsArgument(at["grad_out"], *strides["grad_out"]),
            **{name: at.get(name) for name in ADDRESSES},
            scale=scale,
            **numbers,
        )

    kind = (q.dtype == torch.bfloat16, is_causal, has_rope)
    prepare, backward, finish = load_kernels(tiles, q.device.index, *kind)
    row_tiles = batch * num_heads * query_tiles * tiles.queries // ROWS

    def launch(addresses: Addresses) -> None:
        arguments = pack(addresses)
        prepare(row_tiles, arguments)
        backward(key_tiles * key_heads * batch, arguments)
        finish(row_tiles * (tiles.columns // COLUMNS), arguments)

    return launch


@functools.cache
def load_kernels(
    tiles: Tiles, device: int, is_bfloat16: bool, is_causal: bool, has_rope: bool
) -> tuple[Launch, Launch, Launch]:
    """The three kernels for a GPU and dtype."""
    image = image_of(tiles, is_bfloat16, is_causal, has_rope)
    load = functools.partial(Function, image, device=device)
    return (
        load("prepare", threads=WARPGROUP, shared_bytes=0),
        load("backward", threads=tiles.threads, shared_bytes=tiles.shared_bytes),
        load("finish", threads=WARPGROUP, shared_bytes=2 * ROWS * COLUMNS),
    )


@Once
def image_of(tiles: Tiles, is_bfloat16: bool, is_causal: bool, has_rope: bool) -> bytes:
    """The machine code of the three kernels."""
    return build(tiles.source, tiles.constants(is_bfloat16, is_causal, has_rope), ARCHITECTURE)


def tensor_map(x: Tensor, rows: int) -> Callable[[int], ctypes.Array]:
    """Return a function: address -> tensor map of a tensor like x, for tiles of `rows` rows.

    Args:
        x: (batch, heads, tokens, head_dim).
    """
    # PyTorch allows any stride in a dimension of size 1
    steps = [stride if size > 1 else 8 for stride, size in zip(x.stride(), x.shape)]
    layout = {"block_size": [1, 1, rows, COLUMNS], "swizzle": SWIZZLE_128}
    make = functools.partial(make_map, x.dtype, list(x.shape), [*steps[:3], 1], layout)
    return functools.lru_cache(KEPT)(make)
