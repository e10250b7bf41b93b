"""The backward pass in one kernel, in CUDA C++: `hopper_backward.cu` of lib/flash_attention/cuda.

Heads of more than 128 have a kernel of their own there, `hopper_backward_wide.cu`.

It does five matmuls where the two kernels of `backward.py` do seven, since scores are not computed
twice. Blocks add to the same dQ: one after another, so that results repeat to the bit, or in any
order.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.flash_attention.background import Once
from lib.flash_attention.cuda.build import build
from lib.flash_attention.cuda.driver import Function
from lib.flash_attention.hopper.direct import TensorMap, make_map

ARCHITECTURE = "sm_90a"
# Rows of a warpgroup's matmul, columns of a tile in shared memory
ROWS, COLUMNS = 64, 64
STAGES = 2
WARPGROUP = 128
# CU_TENSOR_MAP_SWIZZLE_128B
SWIZZLE_128 = 3
# Maps that are kept; tensors come back to the same addresses in a training loop.
KEPT_MAPS = 256
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
        *((name, ctypes.c_void_p) for name in ("lse", "lse_log2", "delta", "sums", "turns")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_int) for name in SIZES),
        ("scale", ctypes.c_float),
        # the size is a multiple of the alignment of maps
        ("padding", ctypes.c_char * 32),
    )


# Launches blocks of a kernel.
Launch = Callable[[int, BackwardArguments], None]


def flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    *,
    grads: Grads,
    angles: tuple[Tensor, Tensor] | None,
    section: int,
    deterministic: bool,
) -> Grads:
    """Do what `lib.flash_attention.hopper.launch.flash_backward` does.

    Args:
        grad_out, out: with rows that a tensor map can describe, as those of q, k and v.
        grads: the tensors to write.
        section: heads of k, of all sequences, that are worked on at a time.
        deterministic: add to dQ in one order.
    """
    batch, num_heads, num_queries, head_dim = q.shape
    key_heads, num_keys = k.shape[1:3]
    tiles = tiles_of(head_dim)
    query_tiles, key_tiles = -(-num_queries // tiles.queries), -(-num_keys // tiles.keys)
    rows = batch * num_heads * query_tiles * tiles.queries
    for_rows = lse.new_empty(2, rows)  # log-sum-exp in base 2, and delta
    sums = lse.new_empty(rows, tiles.dim)  # of dQ
    turns = None
    if deterministic:
        turns = lse.new_empty(batch * num_heads * query_tiles, dtype=torch.int32)
    # without angles the kernels do not read these pointers
    cos, sin = angles or (lse, lse)
    stored = tiles.keys if tiles.is_wide else ROWS  # rows of dK and dV at a time
    boxes = (tiles.queries, tiles.keys, tiles.keys, tiles.queries, ROWS, stored, stored)
    maps = dict(zip(MAPS, map(tensor_map, (q, k, v, grad_out, *grads), boxes)))
    sizes = (num_heads, num_heads // key_heads, num_queries, num_keys, query_tiles, key_tiles)
    arguments = BackwardArguments(
        **maps,
        out=RowsArgument(out.data_ptr(), *out.stride()[:3]),
        grad_out_rows=RowsArgument(grad_out.data_ptr(), *grad_out.stride()[:3]),
        lse=lse.data_ptr(),
        lse_log2=for_rows[0].data_ptr(),
        delta=for_rows[1].data_ptr(),
        sums=sums.data_ptr(),
        turns=None if turns is None else turns.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        scale=scale,
        **dict(zip(SIZES, (*sizes, head_dim, batch * key_heads, section))),
    )
    kind = (q.dtype == torch.bfloat16, is_causal, angles is not None)
    prepare, backward, finish = load_kernels(tiles, q.device.index, *kind)
    prepare(rows // ROWS, arguments)
    backward(key_tiles * key_heads * batch, arguments)
    finish(rows // ROWS * (tiles.columns // COLUMNS), arguments)
    return grads


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


def tensor_map(x: Tensor, rows: int) -> ctypes.Array:
    """The tensor map of (batch, heads, tokens, head_dim), for tiles of `rows` rows."""
    return _tensor_map(x.dtype, tuple(x.shape), x.stride(), rows, x.data_ptr())


@functools.lru_cache(KEPT_MAPS)
def _tensor_map(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, address: int
) -> ctypes.Array:
    # PyTorch allows any stride in a dimension of size 1
    steps = [stride if size > 1 else 8 for stride, size in zip(strides, shape)]
    layout = {"block_size": [1, 1, rows, COLUMNS], "swizzle": SWIZZLE_128}
    return make_map(dtype, list(shape), [*steps[:3], 1], layout, address)
