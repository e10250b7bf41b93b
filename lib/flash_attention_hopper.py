"""FlashAttention for Hopper GPUs, forward and backward, after FlashAttention-3 (Shah et al. 2024).

A warp asks for copies of tiles into rings in shared memory (TMA). Two or three warpgroups take them
from there, each for 64 queries, or 64 keys, of its own. Matrix products run asynchronously: a
warpgroup asks for those of the next tile and computes exponentials while they run; what gaps are
left the other warpgroups fill. As in `lib.flash_attention_triton`, which has the portable kernels,
one backward kernel makes dQ and one dK and dV, so that results are the same every time. Written in
Gluon, Triton's language with explicit layouts, shared memory and barriers. `supports` says which
inputs it takes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lib.config import require
from lib.flash_attention_hopper_backward import backward_keys_kernel, backward_queries_kernel
from lib.flash_attention_hopper_forward import forward_kernel
from lib.flash_attention_hopper_parts import LOAD_REGISTERS
from lib.flash_attention_inputs import empty_like_heads
from lib.flash_attention_order import work_order

# a warpgroup's matrix product takes 64 rows
ROWS = 64
# keys and values of as many heads as fit this are read from memory once
CACHE_BYTES = 24 * 2**20
# beyond so many items of work each program does one: an order would take long to make
MOST_LISTED = 2**20

Size = tuple[int, int, int, int]


class Schedule(NamedTuple):
    """How a kernel cuts its work.

    `warpgroups`, 2 or 3, of 64 queries each share tiles of `keys` keys, of which `stages` are in
    flight: 2 or more, for dQ 3 or more. (For dK and dV, of 64 keys each, tiles of 64 queries.) A
    program has a multiprocessor to itself, and stays there for many items of work when
    `is_persistent`. Warpgroups take turns in asking for products when `is_ordered`, which the
    forward kernel can. The first `kept` of the factors that stay (q and dO, or k and v) are in
    registers.
    """

    warpgroups: int
    keys: int
    stages: int
    is_ordered: bool = False
    is_persistent: bool = True
    kept: int = 0


class Work(NamedTuple):
    """What a kernel has to do.

    `steps` of the tiles of a head, of `num_heads` in all sequences, `section` of which fit the L2
    cache; `is_last_first`: the last tiles are the long ones.
    """

    steps: tuple[int, ...]
    num_heads: int
    section: int
    is_last_first: bool


def forward_schedule(head_dim: int) -> Schedule:
    """For heads so wide, on an H200."""
    if head_dim == 64:
        return Schedule(3, 128, 3, is_ordered=True)
    return Schedule(2, 128, 2, kept=1)


def backward_schedules(head_dim: int) -> tuple[Schedule, Schedule]:
    """Of the kernel for dQ, and of that for dK and dV, for heads so wide, on an H200."""
    if head_dim == 64:
        return Schedule(3, 64, 4, kept=1), Schedule(2, 64, 4, kept=2)
    return Schedule(2, 64, 4, kept=1), Schedule(2, 64, 3)


def supports(q: Tensor, k: Tensor, v: Tensor, *grads: Tensor) -> bool:
    """Whether the kernels take them: 16-bit heads 64 or 128 wide on a Hopper GPU.

    Rows of a head must start at whole 16 bytes, those of gradients to be written, too. The shapes
    are taken to be right (`lib.flash_attention_inputs.check`).
    """
    return (
        q.is_cuda
        and torch.version.cuda is not None
        and _multiprocessors(q.device) > 0
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[3] in (64, 128)
        and k.shape[2] > 0
        and q.numel() > 0
        and q.shape[0] * q.shape[1] * _tiles(q.shape[2], ROWS) * ROWS < 2**31
        and all(map(can_be_copied, (q, k, v, *grads)))
    )


def can_be_copied(x: Tensor) -> bool:
    """Whether a tensor map can describe it (CUDA driver API, cuTensorMapEncodeTiled)."""
    strides = [stride for stride, size in zip(x.stride(), x.shape) if size > 1]
    return (
        x.data_ptr() % 16 == 0
        and x.stride(3) == 1
        and all(0 < stride < 2**38 for stride in strides)
        and all(stride % 8 == 0 for stride in strides[:-1])
    )


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    *,
    schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor]:
    """As `lib.flash_attention_triton.flash_forward`, for inputs that `supports` takes."""
    schedule = schedule or forward_schedule(q.shape[3])
    out = empty_like_heads(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    work = _queries_work(q.shape, k.shape, schedule, is_causal)
    grid, sizes, settings = _launch(q, k, work, schedule, is_causal, least_stages=2)
    forward_kernel[grid](
        _descriptor(q, ROWS),
        _descriptor(k, schedule.keys),
        _descriptor(v, schedule.keys),
        _descriptor(out, ROWS),
        lse,
        *sizes,
        scale,
        KEYS=schedule.keys,
        IS_EVEN=k.shape[2] % schedule.keys == 0,
        IS_ORDERED=schedule.is_ordered,
        **settings,
    )
    return out, lse


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
    schedules: tuple[Schedule, Schedule] | None = None,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `lib.flash_attention_triton.flash_backward`, for inputs that `supports` takes.

    Args:
        schedules: of the kernel for q, and of that for k and v.
        grads: where to write them; `can_be_copied` must take them.
    """
    grads = grads or (empty_like_heads(q), empty_like_heads(k), empty_like_heads(v))
    out = out if out.stride(3) == 1 else out.contiguous()
    if not can_be_copied(grad_out):
        grad_out = grad_out.clone(memory_format=torch.contiguous_format)
    for_queries, for_keys = schedules or backward_schedules(q.shape[3])
    q_, grad_out_, grad_q_, k_, v_, grad_k_, grad_v_ = (
        _descriptor(x, ROWS) for x in (q, grad_out, grads[0], k, v, *grads[1:])
    )
    # the second kernel reads whole tiles of both, so the first also writes what is past the end
    padded = _tiles(q.shape[2], ROWS) * ROWS
    lse_log2, minus_delta = lse.new_empty(2, lse.shape[0] * lse.shape[1] * padded)
    is_turned = angles is not None
    # without angles the kernels read nothing there
    angles = angles or (lse, lse)

    work = _queries_work(q.shape, k.shape, for_queries, is_causal)
    grid, sizes, settings = _launch(q, k, work, for_queries, is_causal, least_stages=3)
    backward_queries_kernel[grid](
        q_,
        _descriptor(k, for_queries.keys),
        _descriptor(v, for_queries.keys),
        grad_out_,
        grad_q_,
        out,
        lse,
        lse_log2,
        minus_delta,
        *out.stride()[:3],
        *angles,
        *sizes,
        padded,
        scale,
        KEYS=for_queries.keys,
        IS_EVEN=k.shape[2] % for_queries.keys == 0,
        IS_TURNED=is_turned,
        **settings,
    )
    work = _keys_work(q.shape, k.shape, for_keys, is_causal)
    grid, sizes, settings = _launch(q, k, work, for_keys, is_causal, least_stages=2)
    backward_keys_kernel[grid](
        q_,
        k_,
        v_,
        grad_out_,
        _row_descriptor(lse_log2),
        _row_descriptor(minus_delta),
        grad_k_,
        grad_v_,
        *angles,
        *sizes,
        padded,
        scale,
        IS_EVEN=q.shape[2] % ROWS == 0,
        IS_TURNED=is_turned,
        **settings,
    )
    return grads


@functools.lru_cache(maxsize=256)
def _queries_work(q: Size, k: Size, schedule: Schedule, is_causal: bool) -> Work:
    """Of q and k so large: a tile's steps are the tiles of keys that its last query sees."""
    batch, num_heads, num_queries, head_dim = q
    _, key_heads, num_keys, _ = k
    rows = schedule.warpgroups * ROWS
    seen = [num_keys] * _tiles(num_queries, rows)
    if is_causal:
        # tiles end with the last query, as `first_query` of the kernels has it
        last = _tiles(num_queries, ROWS) * ROWS
        seen = [min(num_keys, n) for n in range(last, 0, -rows)][::-1]
    steps = tuple(_tiles(n, schedule.keys) for n in seen)
    section = max(1, CACHE_BYTES // (4 * num_keys * head_dim)) * (num_heads // key_heads)
    return Work(steps, batch * num_heads, min(section, batch * num_heads), is_causal)


@functools.lru_cache(maxsize=256)
def _keys_work(q: Size, k: Size, schedule: Schedule, is_causal: bool) -> Work:
    """Of q and k so large: a tile's steps are the tiles of queries that see its first key."""
    batch, num_heads, num_queries, head_dim = q
    _, key_heads, num_keys, _ = k
    group = num_heads // key_heads
    query_tiles = _tiles(num_queries, ROWS)
    firsts = range(0, num_keys, schedule.warpgroups * ROWS)
    hidden = [min(first // ROWS, query_tiles) if is_causal else 0 for first in firsts]
    steps = tuple(group * (query_tiles - n) for n in hidden)
    # queries and their dO
    section = max(1, CACHE_BYTES // (4 * num_queries * head_dim * group))
    return Work(steps, batch * key_heads, min(section, batch * key_heads), False)


def _tiles(length: int, size: int) -> int:
    """How many of a size it takes."""
    return -(-length // size)


def _launch(
    q: Tensor, k: Tensor, work: Work, schedule: Schedule, is_causal: bool, *, least_stages: int
) -> tuple[tuple[int], tuple, dict]:
    """A kernel's grid, its arguments from `order_ptr` to `num_keys`, and what is compiled in."""
    # with fewer a warpgroup would wait for ever
    require(
        schedule.stages >= least_stages,
        f"stages is {schedule.stages}; right is: at least {least_stages}",
    )
    num_items = len(work.steps) * work.num_heads
    programs = min(num_items, _multiprocessors(q.device))
    order = None
    if schedule.is_persistent and programs < num_items <= MOST_LISTED:
        order = _order(work, programs, q.device)
    sizes = (len(work.steps), q.shape[1], q.shape[1] // k.shape[1], work.section, num_items)
    registers, computing = _registers(schedule)
    settings = {
        "WARPGROUPS": schedule.warpgroups,
        "STAGES": schedule.stages,
        "REGISTERS": computing,
        "IS_CAUSAL": is_causal,
        "KEPT": schedule.kept,
        "IS_LISTED": order is not None,
        "num_warps": 4,
        "maxnreg": registers,
    }
    if order is None:
        # an item for each program; q stands for the order, of which nothing is read
        return (num_items,), (q, *sizes, q.shape[2], k.shape[2]), settings
    return (programs,), (order, *sizes, q.shape[2], k.shape[2]), settings


def _order(work: Work, programs: int, device: torch.device) -> Tensor | None:
    """`work_order` on the GPU, made once.

    None when it is not made yet and a CUDA graph is being recorded: nothing can be copied there.
    It is kept for good, as a recorded graph reads it whenever it runs.
    """
    key = (work, programs)
    known = _orders(device)
    if key not in known and not torch.cuda.is_current_stream_capturing():
        table = torch.from_numpy(work_order(*work, programs=programs)).to(device)
        # another thread's, if it was faster
        known.setdefault(key, table)
    return known.get(key)


@functools.cache
def _orders(device: torch.device) -> dict[tuple[Work, int], Tensor]:
    return {}


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Of a Hopper GPU; 0 for others."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major == 9 else 0


def _registers(schedule: Schedule) -> tuple[int, int]:
    """Of a thread when the program starts, and of one that computes thereafter."""
    groups = schedule.warpgroups + 1
    total = 65536 // (groups * 128) // 8 * 8
    each = (total * groups - LOAD_REGISTERS.value) // schedule.warpgroups // 8 * 8
    return total, min(each, 240)


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Of (rows, head_dim) tiles of (batch, heads, tokens, head_dim); zeros beyond the tokens."""
    block = [1, 1, rows, x.shape[3]]
    # the stride of a dimension of 1 can be anything in PyTorch
    strides = [stride if size > 1 else 8 for stride, size in zip(x.stride(), x.shape)]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], block, _layout(128, 16, 4))


def _row_descriptor(x: Tensor) -> TensorDescriptor:
    """Of 64 numbers of a float32 vector."""
    return TensorDescriptor(x, [len(x)], [1], [ROWS], _layout(0, 32, 1))


# made once, as its checks take longer than all else of a descriptor
_layout = functools.cache(gl.NVMMASharedLayout)
