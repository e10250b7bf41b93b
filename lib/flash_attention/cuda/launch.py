"""Launch the CUDA C++ kernels on PyTorch's tensors: tiles, arguments, memory layouts."""

import ctypes
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.flash_attention.cuda.build import build, pick_architecture
from lib.flash_attention.cuda.driver import Function
from lib.flash_attention.inputs import empty_like_heads

# The head_dim of kernels; others up to the last are padded.
DIMS = (32, 64, 96, 128)


@dataclass(frozen=True)
class Tiles:
    """The tiles that a kernel's blocks and warps compute at a time."""

    rows: int  # of the result, for each block
    warps: int  # of a block; each takes rows / warps rows, 16 or 32
    columns: int  # rows of a tile of the other matrices in shared memory
    step: int  # how many of those a warp takes at a time
    blocks: int  # on a multiprocessor at once, which limits registers
    is_async: bool = False  # tiles are copied without registers, from sm_80 on
    stages: int = 1  # pairs of tiles in shared memory
    shared_operands: int = 0  # of the left ones, those in shared memory rather than registers

    def shared_bytes(self, dim: int) -> int:
        """Bytes of 16-bit tiles, of two float32 numbers for each of their rows, and of operands."""
        stage = 2 * self.columns * dim * 2 + 2 * self.columns * 4
        return self.stages * stage + self.shared_operands * self.rows * dim * 2


# The tiles of sources and head sizes on a T4: 64 KiB of shared memory for all blocks of a
# multiprocessor, 255 registers for a thread, of 65,536 in all. A warp of 32 rows uses each fragment
# that it reads from shared memory twice.
TILES = {
    ("forward", 32): Tiles(rows=128, warps=4, columns=32, step=32, blocks=3),
    ("forward", 64): Tiles(rows=128, warps=4, columns=64, step=64, blocks=2),
    ("forward", 96): Tiles(rows=128, warps=4, columns=32, step=32, blocks=2),
    ("forward", 128): Tiles(rows=128, warps=4, columns=16, step=16, blocks=2),
    ("backward_queries", 32): Tiles(rows=128, warps=4, columns=64, step=16, blocks=3),
    ("backward_queries", 64): Tiles(rows=128, warps=4, columns=32, step=16, blocks=2),
    ("backward_queries", 96): Tiles(rows=64, warps=4, columns=32, step=16, blocks=2),
    ("backward_queries", 128): Tiles(rows=128, warps=8, columns=64, step=16, blocks=1),
    ("backward_keys", 32): Tiles(rows=128, warps=4, columns=64, step=16, blocks=2),
    ("backward_keys", 64): Tiles(rows=128, warps=4, columns=16, step=16, blocks=2),
    ("backward_keys", 96): Tiles(rows=64, warps=4, columns=32, step=16, blocks=2),
    ("backward_keys", 128): Tiles(rows=128, warps=8, columns=32, step=16, blocks=1),
}
# On chips from sm_80 on: the fastest of those tried on an H200, each within the 99 KiB of shared
# memory that a block has on every such chip.
AMPERE_TILES = {
    ("forward", 32): Tiles(128, 4, 64, 64, blocks=3, is_async=True),
    ("forward", 64): Tiles(128, 4, 64, 64, blocks=2, is_async=True, shared_operands=1),
    ("forward", 96): Tiles(128, 4, 32, 32, blocks=2, is_async=True, shared_operands=1),
    ("forward", 128): Tiles(128, 4, 32, 32, blocks=2, is_async=True, shared_operands=1),
    ("backward_queries", 32): Tiles(128, 4, 64, 32, blocks=2, is_async=True, stages=2),
    ("backward_queries", 64): Tiles(128, 4, 64, 16, blocks=2, is_async=True, stages=2),
    ("backward_queries", 96): Tiles(64, 4, 32, 32, blocks=2, is_async=True, stages=2),
    ("backward_queries", 128): Tiles(128, 8, 64, 32, blocks=1, is_async=True, stages=2),
    ("backward_keys", 32): Tiles(128, 4, 64, 32, blocks=2, is_async=True, stages=2),
    ("backward_keys", 64): Tiles(
        128, 4, 64, 32, blocks=2, is_async=True, stages=2, shared_operands=2
    ),
    ("backward_keys", 96): Tiles(
        64, 4, 32, 32, blocks=2, is_async=True, stages=2, shared_operands=2
    ),
    ("backward_keys", 128): Tiles(
        64, 4, 32, 32, blocks=2, is_async=True, stages=2, shared_operands=2
    ),
}
# A kernel -> the source file that it is in.
FILES = {
    "forward": "forward",
    "row_dots": "backward_queries",
    "grad_queries": "backward_queries",
    "grad_keys": "backward_keys",
}


class HeadsArgument(ctypes.Structure):
    """`Tensor` of tiles.cuh."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_longlong),
        ("head", ctypes.c_longlong),
        ("token", ctypes.c_int),
    )


class AttentionArguments(ctypes.Structure):
    """`Attention` of tiles.cuh."""

    _fields_ = (
        *((name, HeadsArgument) for name in ("q", "k", "v", "out", "grad_out")),
        *((name, HeadsArgument) for name in ("grad_q", "grad_k", "grad_v")),
        ("lse", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("batch_size", "num_heads", "group", "num_queries")),
        *((name, ctypes.c_int) for name in ("num_keys", "head_dim", "is_causal")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class Kernel:
    """A kernel that is ready to launch: `launch(blocks, arguments)`."""

    tiles: Tiles
    launch: Callable[[int, AttentionArguments], None]


def load_kernel(name: str, q: Tensor, architecture: str | None = None) -> Kernel:
    """Return a kernel of `FILES` for the GPU, dtype and head_dim of q; compile it if need be.

    Args:
        architecture: what it is compiled for, such as `compute_75`; by default that of the GPU.
    """
    file, dim = FILES[name], padded_dim(q)
    architecture = architecture or pick_architecture(torch.cuda.get_device_capability(q.device))
    function = _function(name, q.device.index, q.dtype == torch.bfloat16, dim, architecture)
    return Kernel(pick_tiles(file, dim, architecture), function)


def pick_tiles(file: str, dim: int, architecture: str) -> Tiles:
    """The tiles of a source for chips of an architecture, `sm_90` or `compute_75`."""
    return (AMPERE_TILES if is_ampere_or_later(architecture) else TILES)[file, dim]


def is_ampere_or_later(architecture: str) -> bool:
    """Whether chips of an architecture copy tiles without registers and multiply bfloat16."""
    return int(re.sub(r"\D", "", architecture)) >= 80


@functools.cache
def _function(name: str, device: int, is_bfloat16: bool, dim: int, architecture: str) -> Function:
    if is_bfloat16 and not is_ampere_or_later(architecture):
        raise ValueError(
            f"q must be float16 for code of {architecture} (WORKBOOK_CUDA_ARCHITECTURE), "
            "got torch.bfloat16"
        )
    tiles = pick_tiles(FILES[name], dim, architecture)
    image = build(FILES[name], constants(tiles, dim, is_bfloat16), architecture)
    shared_bytes = 0 if name == "row_dots" else tiles.shared_bytes(dim)
    threads = 32 * tiles.warps
    return Function(image, name, device=device, threads=threads, shared_bytes=shared_bytes)


def constants(tiles: Tiles, dim: int, is_bfloat16: bool) -> dict[str, int]:
    """The macros of a kernel's source."""
    return {
        "DIM": dim,
        "BFLOAT16": int(is_bfloat16),
        "ROWS": tiles.rows,
        "WARPS": tiles.warps,
        "COLUMNS": tiles.columns,
        "STEP": tiles.step,
        "BLOCKS": tiles.blocks,
        "ASYNC": int(tiles.is_async),
        "STAGES": tiles.stages,
        "ROWS_IN_SHARED": int(tiles.shared_operands > 0),
    }


def padded_dim(x: Tensor) -> int:
    """The head_dim of the kernels for x."""
    return next(dim for dim in DIMS if dim >= x.shape[-1])


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, queries, head_dim) and natural log-sum-exp (batch, heads, queries).

    Args:
        q, k, v, is_causal, scale: as for `flash_attention`.
    """
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if not k.shape[2]:
        return empty_like_heads(q).zero_(), lse.fill_(-math.inf)
    if not q.numel():
        return empty_like_heads(q), lse
    result = empty_like_heads(q)
    q, k, v = map(with_chunks, (q, k, v))
    out = _with_columns(result, q)
    kernel = load_kernel("forward", q)
    arguments = kernel_arguments(q, k, v, is_causal, scale, lse=lse, out=out)
    kernel.launch(num_blocks(q, kernel), arguments)
    return _without_padding(out, result), lse


def flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v.

    Args:
        grad_out: gradient of the output.
        q, k, v, out, lse: inputs and results of `flash_forward`; `is_causal`, `scale` as there.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    if not num_keys or not q.numel():
        return empty_like_heads(q).zero_(), empty_like_heads(k).zero_(), empty_like_heads(v).zero_()
    results = [empty_like_heads(x) for x in (q, k, v)]
    q, k, v, out, grad_out = map(with_chunks, (q, k, v, out, grad_out))
    grads = grad_q, grad_k, grad_v = [_with_columns(x, q) for x in results]
    if is_causal and num_keys > num_queries:
        # no query sees a key after the last query
        for grad in (grad_k, grad_v):
            grad[:, :, num_queries:].zero_()
        k, v, grad_k, grad_v = (x[:, :, :num_queries] for x in (k, v, grad_k, grad_v))
    arguments = kernel_arguments(
        q,
        k,
        v,
        is_causal,
        scale,
        lse=lse,
        delta=(delta := torch.empty_like(lse)),
        out=out,
        grad_out=grad_out,
        grad_q=grad_q,
        grad_k=grad_k,
        grad_v=grad_v,
    )
    # delta of each query, then dQ, then dK with dV
    dots, queries, keys = (load_kernel(x, q) for x in ("row_dots", "grad_queries", "grad_keys"))
    dots.launch(-(-delta.numel() // (2 * dots.tiles.warps)), arguments)
    queries.launch(num_blocks(q, queries), arguments)
    keys.launch(num_blocks(k, keys), arguments)
    grad_q, grad_k, grad_v = map(_without_padding, grads, results)
    return grad_q, grad_k, grad_v


def num_blocks(x: Tensor, kernel: Kernel) -> int:
    """How many blocks compute a result like x."""
    return -(-x.shape[2] // kernel.tiles.rows) * x.shape[0] * x.shape[1]


def kernel_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    *,
    lse: Tensor,
    delta: Tensor | None = None,
    **heads: Tensor,
) -> AttentionArguments:
    """The kernels' argument; `heads` are out, grad_out, grad_q, grad_k and grad_v, as needed."""
    batch_size, num_heads, num_queries, head_dim = q.shape
    num_keys = min(k.shape[2], num_queries) if is_causal else k.shape[2]
    given = {"q": q, "k": k, "v": v, **heads}
    return AttentionArguments(
        **{name: (x.data_ptr(), *x.stride()[:3]) for name, x in given.items()},
        lse=lse.data_ptr(),
        delta=None if delta is None else delta.data_ptr(),
        batch_size=batch_size,
        num_heads=num_heads,
        group=num_heads // k.shape[1],
        num_queries=num_queries,
        num_keys=num_keys,
        head_dim=head_dim,
        is_causal=is_causal,
        scale=scale,
    )


def with_chunks(x: Tensor) -> Tensor:
    """x, or a copy, padded with zeros, if its rows are not chunks of 16 bytes, 8 numbers each."""
    *strides, last = x.stride()
    is_aligned = x.data_ptr() % 16 == 0 and not any(stride % 8 for stride in strides)
    # offsets within a tile are 32-bit
    if last == 1 and x.shape[-1] % 8 == 0 and is_aligned and strides[2] < 2**23:
        return x
    copy = x.new_zeros(*x.shape[:-1], -(-x.shape[-1] // 8) * 8)
    copy[..., : x.shape[-1]] = x
    return copy


def _with_columns(result: Tensor, q: Tensor) -> Tensor:
    """`result`, or memory for it with as many columns as q, which may have been padded."""
    padded = q.shape[-1]
    return result if result.shape[-1] == padded else q.new_empty(*result.shape[:-1], padded)


def _without_padding(x: Tensor, result: Tensor) -> Tensor:
    """What `_with_columns` gave, in the layout of `result`, which `torch.compile` was promised."""
    return result if x is result else result.copy_(x[..., : result.shape[-1]])
