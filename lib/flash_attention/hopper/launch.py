"""FlashAttention for Hopper GPUs, forward and backward, after FlashAttention-3 (Shah et al. 2024).

One warp copies tiles into rings in shared memory (TMA). Two or three warpgroups take them from
there, each for 64 queries, or 64 keys, of its own. Matmuls are asynchronous: a warpgroup issues
those of the next tile and computes exponentials while they run; the other warpgroups fill the gaps
that remain. One backward kernel makes dQ, another one dK and dV, so that each number is summed in
one order and results repeat to the bit. The kernels are written in Gluon, Triton's language with
explicit layouts, shared memory and barriers. Others are in CUDA C++: kernels that make all three
gradients, which are faster where a key has many queries (`fused.py`), and a forward one for heads
whose size is no power of two, or 64 under a causal mask (`unpadded.py`).

Programs are persistent, but for those of `fused.py`: one on each multiprocessor, for many tiles.
Under a causal mask the last queries see many keys and the first ones few. Since the work of each
tile is known, the host deals the tiles out beforehand (`schedule_tiles`), so that all
multiprocessors have about as much to do.
"""

from __future__ import annotations

import functools
import heapq
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lib.core.terminal import warn_once
from lib.flash_attention.cuda.build import has_nvrtc
from lib.flash_attention.hopper import fused, unpadded
from lib.flash_attention.hopper.backward import backward_keys_kernel, backward_queries_kernel
from lib.flash_attention.hopper.blocks import LOAD_REGISTERS, Config, Sizes
from lib.flash_attention.hopper.compiled import binary_of, kind_of, load
from lib.flash_attention.hopper.direct import DirectLaunch
from lib.flash_attention.hopper.forward import forward_kernel
from lib.flash_attention.inputs import empty_like_heads, strides

# Rows of a warpgroup's matmul.
ROWS = 64
# Heads are worked on in sections whose keys and values fit the L2 cache and are read from HBM once.
CACHE_BYTES = 24 * 2**20
# With more items than this each program does one: making a work list would take too long.
MAX_LISTED = 2**20
# Time of a tile's own loads and stores, in steps of its loop.
START = 1.5
# Tiles whose work is up to this part of the longest come last, where they fill gaps. The second
# value is tried if the busiest program then has more than BALANCED times the mean to do.
SHORT = (0.25, 0.5)
BALANCED = 1.02
# The one-kernel backward is faster than two kernels from MANY_QUERIES queries on (twice as many
# under a causal mask, which hides half of them from a key) and MANY_BLOCKS blocks for each
# multiprocessor, since few blocks end at different times. By columns, without a mask and with one.
MANY_QUERIES = 1024
MANY_BLOCKS = {
    64: (1.5, 3),
    80: (1.5, 1.5),
    96: (1.5, 1.5),
    128: (3, 3),
    160: (2.5, 2.5),
    192: (5, 5),
}
# The least number of blocks of the one-kernel backward for each multiprocessor in a section, where
# heads share keys under a mask: blocks differ in length, and with fewer the longest end alone.
SECTION_BLOCKS = 4
# Columns of q, k and v that the kernels take: tiles of 64, 128 or 256 columns end in zeros. At 32
# the portable kernels are faster.
HEAD_DIMS = range(40, 257, 8)
# Addresses of tensors are multiples of this, in bytes.
ALIGNMENT = 16
# Calls that are remembered, each in a few KB; where tensors lie at ever other addresses, in 250.
MAX_REMEMBERED = 512
Size = tuple[int, int, int, int]
Grads = tuple[Tensor, Tensor, Tensor]
# The tensors of a call, by the names of the kernels' arguments.
Tensors = dict[str, Tensor]
# A Gluon kernel, its grid, and its arguments by name.
Launch = tuple[Any, tuple[int], dict[str, Any]]
# Launches kernels on tensors at these addresses, in the order of their names.
LaunchAt = Callable[[tuple[int, ...]], None]
log = logging.getLogger(__name__)


class Schedule(NamedTuple):
    """How a kernel divides its work; a program has a multiprocessor to itself."""

    warpgroups: int
    """Warpgroups that compute, 64 queries each: 2 or 3.

    For dK and dV 2, with 64 keys each, or 1: two then share 64 keys, one makes dK, the other dV.
    """

    keys: int
    """Keys in a tile of keys; dK and dV take tiles of 64 queries."""

    stages: int
    """Tiles in flight: at least 2, for dQ at least 3; with fewer a warpgroup waits forever."""

    is_ordered: bool = False
    """Whether warpgroups take turns in issuing matmuls (ping-pong); in the forward kernel only."""

    is_persistent: bool = True
    """Whether a program stays on its multiprocessor for many items of work."""

    is_kept: bool = False
    """Whether operands that stay (q, or k and v) are kept in registers."""


class Work(NamedTuple):
    """The work of a kernel."""

    steps: tuple[int, ...]
    """The steps that each tile of a head takes."""

    num_heads: int
    """Heads of all sequences."""

    section: int
    """Heads of a section (`CACHE_BYTES`)."""

    is_last_first: bool
    """Whether the last tiles are the long ones, and come first."""


def forward_schedule(head_dim: int) -> Schedule:
    """The forward schedule for this head_dim, tuned on an H200."""
    if tile_width(head_dim) == 64:
        return Schedule(3, 128, 3, is_ordered=True)
    if tile_width(head_dim) == 128:
        return Schedule(2, 128, 2, is_kept=True)
    return Schedule(2, 64, 2)


def backward_schedules(head_dim: int) -> tuple[Schedule, Schedule]:
    """The schedules of dQ, and of dK and dV, for this head_dim, tuned on an H200."""
    if tile_width(head_dim) == 64:
        return Schedule(3, 64, 4, is_kept=True), Schedule(2, 64, 4, is_kept=True)
    if tile_width(head_dim) == 128:
        return Schedule(2, 64, 4, is_kept=True), Schedule(2, 64, 3)
    return Schedule(2, 32, 3), Schedule(1, 64, 2)


def tile_width(head_dim: int) -> int:
    """Columns of a tile: zeros fill those past the last of q, k and v."""
    return next(width for width in (64, 128, 256) if head_dim <= width)


def supports(q: Tensor, k: Tensor, v: Tensor, *grads: Tensor) -> bool:
    """Whether the kernels take these tensors: 16-bit, of HEAD_DIMS, on a Hopper GPU.

    Each row of a head must start at a multiple of 16 bytes, also in gradients to be written. The
    shapes must have passed `lib.flash_attention.inputs`.
    """
    tensors = (q, k, v, *grads)
    return (
        q.is_cuda
        and torch.version.cuda is not None
        and _multiprocessors(q.device) > 0
        and not any(x.data_ptr() % ALIGNMENT for x in tensors)
        and _layouts_fit(q.dtype, *((x.shape, x.stride()) for x in tensors))
    )


@functools.lru_cache(maxsize=1024)
def _layouts_fit(dtype: torch.dtype, *layouts: tuple[Size, Size]) -> bool:
    """Whether the kernels take a dtype, and these shapes and strides of q, k, v and gradients."""
    (batch, num_heads, num_queries, head_dim), num_keys = layouts[0][0], layouts[1][0][2]
    return (
        dtype in (torch.bfloat16, torch.float16)
        and head_dim in HEAD_DIMS
        and num_keys > 0
        and batch * num_heads * num_queries > 0
        and batch * num_heads * _padded(num_queries) < 2**31
        and all(_strides_fit(*layout) for layout in layouts)
    )


def _to_copy(x: Tensor) -> Tensor:
    """x, or a copy that a tensor map can describe (CUDA driver API, cuTensorMapEncodeTiled)."""
    if x.data_ptr() % ALIGNMENT == 0 and _strides_fit(x.shape, x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=1024)
def _strides_fit(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor map can describe a tensor of 2-byte numbers at an aligned address."""
    used = [stride for stride, size in zip(strides, shape) if size > 1]
    return (
        strides[3] == 1
        and all(0 < stride < 2**38 for stride in used)
        and all(stride % 8 == 0 for stride in used[:-1])
    )


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    *,
    has_gradients: bool,
    has_rope: bool = False,
) -> None:
    """Start to compile kernels in other threads, those of this call first.

    Args:
        q, k, v, is_causal: of the `flash_forward` that follows; later ones may have other lengths,
            batch sizes and numbers of heads.
        has_gradients: whether `flash_backward` will follow, and `has_rope`, whether with `angles`.
    """
    key = (q.device, q.dtype, q.shape[3], is_causal, has_gradients, has_rope)
    if key in _prepared or not supports(q, k, v) or torch.cuda.is_current_stream_capturing():
        return
    _prepared.add(key)
    _start_forward(q, k, is_causal)
    if has_gradients:
        _start_backward(q, k, is_causal, has_rope, _one_kernel_is_faster(q, k, is_causal))


# What `prepare` has been called for.
_prepared: set[tuple] = set()


def _start_forward(q: Tensor, k: Tensor, is_causal: bool) -> None:
    """Start the forward kernel; a spare one is for other lengths."""
    head_dim = q.shape[3]
    if unpadded.is_faster(head_dim, is_causal) and has_nvrtc():
        choices = unpadded.tiles_by_length(q.shape, _multiprocessors(q.device))
        for tiles in choices:
            settings = (tiles, q.dtype == torch.bfloat16, is_causal)
            unpadded.image_of.start(*settings, is_spare=tiles != choices[0])
        return
    schedule = forward_schedule(head_dim)
    for x, lse in _small_calls(q):
        tensors = {"q_desc": x, "k_desc": x, "v_desc": x, "out_desc": x, "lse_ptr": lse}
        launch = _forward_launch(tensors, is_causal, 1.0, schedule)
        _start(launch, needs_even=_has_whole_keys(k, schedule, is_causal))


def _start_backward(
    q: Tensor, k: Tensor, is_causal: bool, has_rope: bool, takes_one_kernel: bool
) -> None:
    """Start all backward kernels; spare ones are for other lengths."""
    head_dim = q.shape[3]
    if head_dim <= fused.TILES[-1].dim and has_nvrtc():
        settings = (fused.tiles_of(head_dim), q.dtype == torch.bfloat16, is_causal, has_rope)
        fused.image_of.start(*settings, is_spare=not takes_one_kernel)
    for_queries, for_keys = backward_schedules(head_dim)
    for x, lse in _small_calls(q):
        tensors = _backward_tensors(x, x, x, x, x, lse, (x, x, x), None)
        settings = (is_causal, 1.0, has_rope)
        needs_even = None if takes_one_kernel else _has_whole_keys(k, for_queries, is_causal)
        _start(_queries_launch(tensors, *settings, for_queries), needs_even)
        needs_even = None if takes_one_kernel else _has_whole_queries(q, for_keys)
        _start(_keys_launch(tensors, *settings, for_keys), needs_even)


def _small_calls(like: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A head and its log-sum-exp in whole tiles, and in parts: their kernels are those of all."""
    heads = [like.new_empty(1, 1, length, like.shape[3]) for length in (2 * ROWS, 1)]
    return [(x, x.new_empty(1, 1, x.shape[2], dtype=torch.float32)) for x in heads]


def _start(launch: Launch, needs_even: bool | None) -> None:
    """Start to compile a kernel, as a spare one unless the call needs it (`Config.IS_EVEN`)."""
    function, _, arguments = launch
    is_spare = needs_even != arguments["CONFIG"].IS_EVEN
    binary_of.start(*kind_of(function, arguments), is_spare=is_spare)


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    *,
    schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor]:
    """Do what `lib.flash_attention.triton_attention.flash_forward` does, where `supports` holds."""
    out = empty_like_heads(q)  # (batch, heads, queries, head_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)  # (batch, heads, queries)
    key = ("forward", is_causal, scale, schedule, _layouts(q, k, v))
    if unpadded.is_faster(q.shape[3], is_causal) and not schedule and _has_compiler():
        tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
        _launch_again(key, tensors, lambda: [_unpadded_launch(tensors, is_causal, scale)])
        return out, lse
    tensors = {"q_desc": q, "k_desc": k, "v_desc": v, "out_desc": out, "lse_ptr": lse}

    def make() -> list[Launch]:
        return [
            _forward_launch(tensors, is_causal, scale, schedule or forward_schedule(q.shape[3]))
        ]

    _launch(key, tensors, make)
    return out, lse


def _forward_launch(tensors: Tensors, is_causal: bool, scale: float, schedule: Schedule) -> Launch:
    """The forward kernel."""
    q, k = tensors["q_desc"], tensors["k_desc"]
    work = _queries_work(q.shape, k.shape, schedule, is_causal)
    config = _config(
        q, schedule, IS_CAUSAL=is_causal, IS_EVEN=_has_whole_keys(k, schedule, is_causal)
    )
    return _launch_of(forward_kernel, tensors, work, schedule, config, scale)


def _unpadded_launch(tensors: Tensors, is_causal: bool, scale: float) -> LaunchAt:
    """The forward kernel where tiles need not be wider than heads."""
    q, k = tensors["q"], tensors["k"]
    multiprocessors = _multiprocessors(q.device)
    tiles = unpadded.tiles_by_length(q.shape, multiprocessors)[0]
    schedule = Schedule(tiles.warpgroups, tiles.keys, tiles.stages)
    work = _queries_work(q.shape, k.shape, schedule, is_causal)
    # a list for each block that multiprocessors have room for, if it has much to do
    num_items, programs = len(work.steps) * work.num_heads, multiprocessors * tiles.blocks
    work_list = None
    if programs < num_items <= MAX_LISTED:
        work_list = _work_list(work, programs, q.device)
    return unpadded.make_launch(
        tensors, is_causal, scale, tiles=tiles, section=work.section, work_list=work_list
    )


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
    grads: Grads | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
    deterministic: bool = True,
) -> Grads:
    """Do what `lib.flash_attention.triton_attention.flash_backward` does, where `supports` holds.

    Under a causal mask there is a query for each key.

    Args:
        schedules: of the kernel for dQ, and of that for dK and dV.
        grads: the tensors to write; a tensor map must be able to describe each.
        deterministic: whether results must repeat to the bit.
    """
    grads = grads or (empty_like_heads(q), empty_like_heads(k), empty_like_heads(v))
    out, grad_out = map(_to_copy, (out, grad_out))
    inputs = (grad_out, q, k, v, out, lse, grads, angles)
    settings = (is_causal, scale, angles is not None)
    layouts = _layouts(q, k, v, grad_out, out, *grads)

    # one kernel for all three gradients
    if not schedules and _one_kernel_is_faster(q, k, is_causal):
        tensors = fused.make_tensors(*inputs, deterministic=deterministic)
        section = _fused_section(q.shape, k.shape, is_causal, _multiprocessors(q.device))
        key = ("one backward", settings, deterministic, section, layouts)
        _launch_again(key, tensors, lambda: [fused.make_launch(tensors, *settings, section)])
        return grads

    # one for dQ, and one for dK and dV
    tensors = _backward_tensors(*inputs)

    def make() -> list[Launch]:
        for_queries, for_keys = schedules or backward_schedules(q.shape[3])
        return [
            _queries_launch(tensors, *settings, for_queries),
            _keys_launch(tensors, *settings, for_keys),
        ]

    _launch(("backward", settings, schedules, layouts), tensors, make)
    return grads


def _one_kernel_is_faster(q: Tensor, k: Tensor, is_causal: bool) -> bool:
    """Whether one backward kernel is faster than two."""
    batch, _, num_queries, head_dim = q.shape
    if head_dim > fused.TILES[-1].dim:
        return False
    tiles = fused.tiles_of(head_dim)
    blocks = batch * k.shape[1] * _num_tiles(k.shape[2], tiles.keys) / _multiprocessors(q.device)
    queries = num_queries / 2 if is_causal else num_queries
    is_large = queries >= MANY_QUERIES and blocks >= MANY_BLOCKS[tiles.dim][is_causal]
    return is_large and _has_compiler()


def _has_compiler() -> bool:
    """Whether a kernel in CUDA C++, the faster one, can be compiled; where not, says so once."""
    if has_nvrtc():
        return True
    message = "attention runs its kernels in Gluon, slower here than those in CUDA C++, which need"
    warn_once(log, f"{message} NVRTC: pip install nvidia-cuda-nvrtc")
    return False


def _fused_section(
    q: Sequence[int], k: Sequence[int], is_causal: bool, multiprocessors: int
) -> int:
    """Heads of k whose blocks of the one backward kernel are worked on at a time.

    Args:
        q, k: shapes.
    """
    (batch, num_heads, num_queries, head_dim), (_, key_heads, num_keys, _) = q, k
    # the sums of dQ take the cache too
    section = _queries_section(batch, num_heads, key_heads, 2 * num_queries, head_dim)
    if not is_causal:
        return section
    all_heads = batch * key_heads
    if num_heads > key_heads:
        blocks_of_head = _num_tiles(num_keys, fused.tiles_of(head_dim).keys)
        section = max(section, min(SECTION_BLOCKS * multiprocessors // blocks_of_head, all_heads))
    # equal sections, if a slightly larger one divides the heads
    return next((n for n in range(section, 2 * section) if all_heads % n == 0), section)


def _backward_tensors(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: Grads,
    angles: tuple[Tensor, Tensor] | None,
) -> Tensors:
    """The tensors of both backward kernels, with memory that they need."""
    if angles and any(x.data_ptr() % ALIGNMENT for x in angles):
        angles = (angles[0].clone(), angles[1].clone())
    # without angles the kernels do not read these pointers
    cos, sin = angles or (lse, lse)
    # whole tiles of these are read, so rows past the last query are written too
    rows = q.shape[0] * q.shape[1] * _padded(q.shape[2])
    lse_log2, minus_delta = lse.new_empty(2, rows).unbind()
    return {
        "q_desc": q,
        "k_desc": k,
        "v_desc": v,
        "grad_out_desc": grad_out,
        "grad_q_desc": grads[0],
        "grad_k_desc": grads[1],
        "grad_v_desc": grads[2],
        "out_ptr": out,
        "lse_ptr": lse,
        "lse_log2_ptr": lse_log2,
        "lse_desc": lse_log2,
        "minus_delta_ptr": minus_delta,
        "minus_delta_desc": minus_delta,
        "cos_ptr": cos,
        "sin_ptr": sin,
    }


def _queries_launch(
    tensors: Tensors, is_causal: bool, scale: float, has_rope: bool, schedule: Schedule
) -> Launch:
    """The kernel for dQ, -delta and the log-sum-exp in base 2."""
    q, k = tensors["q_desc"], tensors["k_desc"]
    work = _queries_work(q.shape, k.shape, schedule, is_causal)
    is_even = _has_whole_keys(k, schedule, is_causal)
    config = _config(q, schedule, IS_CAUSAL=is_causal, IS_EVEN=is_even, HAS_ROPE=has_rope)
    # in steps of 8 numbers, which a thread loads at once
    steps = {name: stride // 8 for name, stride in strides(out=tensors["out_ptr"]).items()}
    others = steps | {"padded": _padded(q.shape[2])}
    return _launch_of(backward_queries_kernel, tensors, work, schedule, config, scale, **others)


def _keys_launch(
    tensors: Tensors, is_causal: bool, scale: float, has_rope: bool, schedule: Schedule
) -> Launch:
    """The kernel for dK and dV."""
    q, k = tensors["q_desc"], tensors["k_desc"]
    work = _keys_work(q.shape, k.shape, schedule, is_causal)
    is_even = _has_whole_queries(q, schedule)
    config = _config(q, schedule, IS_CAUSAL=is_causal, IS_EVEN=is_even, HAS_ROPE=has_rope)
    padded = _padded(q.shape[2])
    return _launch_of(backward_keys_kernel, tensors, work, schedule, config, scale, padded=padded)


def _layouts(*tensors: Tensor) -> tuple:
    """Everything but the settings that determines the kernels and their arguments."""
    return tensors[0].dtype, *((x.shape, x.stride()) for x in tensors)


# The launches of each call that has been made: its settings and layouts -> one or two.
_remembered: dict[tuple, list[LaunchAt]] = {}


def _launch(key: tuple, tensors: Tensors, make: Callable[[], list[Launch]]) -> None:
    """Launch the Gluon kernels of `make`; those of a call with an earlier `key` are known."""
    _launch_again(key, tensors, lambda: _load(make(), tensors))


def _load(kernels: list[Launch], tensors: Tensors) -> list[LaunchAt]:
    """The launches of Gluon kernels, which are compiled side by side."""
    index, names = next(iter(tensors.values())).device.index, tuple(tensors)
    kinds = [kind_of(function, arguments) for function, _, arguments in kernels]
    for kind in kinds:
        binary_of.start(*kind)
    return [
        DirectLaunch(*load(index, *kind), grid, arguments, names)
        for kind, (_, grid, arguments) in zip(kinds, kernels)
    ]


def _launch_again(key: tuple, tensors: Tensors, make: Callable[[], list[LaunchAt]]) -> None:
    """Launch what `make` gives; it is known from a call with an earlier `key`."""
    device = next(iter(tensors.values())).device
    key = (key, device, _multiprocessors(device))
    launches = _remembered.get(key)
    if launches is None:
        launches = make()
        if len(_remembered) >= MAX_REMEMBERED:
            _remembered.clear()
        # while a CUDA graph is recorded there may be no work list yet
        if not torch.cuda.is_current_stream_capturing():
            _remembered[key] = launches
    addresses = tuple([x.data_ptr() for x in tensors.values()])
    for launch in launches:
        launch(addresses)


def _launch_of(
    kernel: Any,
    tensors: Tensors,
    work: Work,
    schedule: Schedule,
    config: Config,
    scale: float,
    **others: int,
) -> Launch:
    """A kernel with its grid and arguments; `others` are those that not every kernel has."""
    q, k = tensors["q_desc"], tensors["k_desc"]
    num_heads, num_queries = q.shape[1:3]
    num_items = len(work.steps) * work.num_heads
    programs = min(num_items, _multiprocessors(q.device))
    work_list = None
    if schedule.is_persistent and programs < num_items <= MAX_LISTED:
        work_list = _work_list(work, programs, q.device)
    if work_list is None:
        work_list = _one_item_each(num_items, q.device)
    sizes = Sizes(
        num_tiles=len(work.steps),
        heads=num_heads,
        group=num_heads // k.shape[1],
        section=work.section,
        num_items=num_items,
        num_queries=num_queries,
        num_keys=k.shape[2],
    )
    arguments = {
        "work_list_ptr": work_list,
        **sizes._asdict(),
        "scale": float(scale),
        **others,
        "CONFIG": config,
        "num_warps": 4,
        "maxnreg": _registers(schedule)[0],
    }
    keys = {"k_desc": schedule.keys, "v_desc": schedule.keys}
    for name, x in tensors.items():
        if name in kernel.arg_names:
            is_descriptor = name.endswith("_desc")
            arguments[name] = _descriptor(x, keys.get(name, ROWS)) if is_descriptor else x
    return kernel, (work_list.shape[1],), arguments


def _config(q: Tensor, schedule: Schedule, **flags: bool) -> Config:
    """The compile-time settings of a kernel."""
    return Config(
        WARPGROUPS=schedule.warpgroups,
        KEYS=schedule.keys,
        STAGES=schedule.stages,
        REGISTERS=_registers(schedule)[1],
        IN_REGISTERS=schedule.is_kept,
        IS_ORDERED=schedule.is_ordered,
        HEAD_DIM=q.shape[3],
        **flags,
    )


def _has_whole_keys(k: Tensor, schedule: Schedule, is_causal: bool) -> bool:
    """Whether the last tile of keys needs no mask but the causal one."""
    return is_causal or k.shape[2] % schedule.keys == 0


def _has_whole_queries(q: Tensor, schedule: Schedule) -> bool:
    """Whether the last tile of queries needs no mask; where two share the keys all have one."""
    return schedule.warpgroups > 1 and q.shape[2] % ROWS == 0


@functools.lru_cache(maxsize=256)
def _queries_work(q: Size, k: Size, schedule: Schedule, is_causal: bool) -> Work:
    """The work of a kernel whose tiles are of queries; a step is a tile of keys that they see.

    Args:
        q, k: shapes.
    """
    batch, num_heads, num_queries, head_dim = q
    _, key_heads, num_keys, _ = k
    rows = schedule.warpgroups * ROWS
    seen = [num_keys] * _num_tiles(num_queries, rows)
    if is_causal:
        # the last tile ends with the last query (`first_query` in blocks.py)
        end = _padded(num_queries)
        seen = [min(num_keys, last) for last in range(end, 0, -rows)][::-1]
    steps = tuple(_num_tiles(n, schedule.keys) for n in seen)
    # keys and values of 2 bytes each
    section = max(1, CACHE_BYTES // (4 * num_keys * head_dim)) * (num_heads // key_heads)
    return Work(steps, batch * num_heads, min(section, batch * num_heads), is_causal)


@functools.lru_cache(maxsize=256)
def _keys_work(q: Size, k: Size, schedule: Schedule, is_causal: bool) -> Work:
    """The work of a kernel whose tiles are of keys; a step is a tile of queries that see them.

    Args:
        q, k: shapes.
    """
    batch, num_heads, num_queries, head_dim = q
    _, key_heads, num_keys, _ = k
    group = num_heads // key_heads
    query_tiles = _num_tiles(num_queries, ROWS)
    firsts = range(0, num_keys, schedule.warpgroups * ROWS)
    hidden = [min(first // ROWS, query_tiles) if is_causal else 0 for first in firsts]
    steps = tuple(group * (query_tiles - n) for n in hidden)
    section = _queries_section(batch, num_heads, key_heads, num_queries, head_dim)
    return Work(steps, batch * key_heads, section, False)


def _queries_section(
    batch: int, num_heads: int, key_heads: int, num_queries: int, head_dim: int
) -> int:
    """Heads of k whose queries and dO, of 2 bytes each, fit the L2 cache."""
    bytes_of_head = 4 * num_queries * head_dim * (num_heads // key_heads)
    return min(max(1, CACHE_BYTES // bytes_of_head), batch * key_heads)


def _num_tiles(length: int, size: int) -> int:
    """How many tiles of a size cover a length."""
    return -(-length // size)


def _padded(num_queries: int) -> int:
    """Queries of a head with those past the end, in whole tiles of ROWS."""
    return _num_tiles(num_queries, ROWS) * ROWS


def _registers(schedule: Schedule) -> tuple[int, int]:
    """Registers of a thread when the program starts, and then of one that computes."""
    computing_groups = max(2, schedule.warpgroups)
    groups = computing_groups + 1
    total = 65536 // (groups * 128) // 8 * 8
    computing = (total * groups - LOAD_REGISTERS.value) // computing_groups // 8 * 8
    return total, min(computing, 240)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a Hopper GPU has; 0 for other GPUs."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major == 9 else 0


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Copies of `rows` rows of (batch, heads, tokens, head_dim), or of ROWS float32 numbers.

    What is past the end of x is copied as zeros.
    """
    if x.ndim == 1:
        return TensorDescriptor(x, [len(x)], [1], [ROWS], _layout(0, 32, 1))
    # PyTorch allows any stride in a dimension of size 1
    strides = [stride if size > 1 else 8 for stride, size in zip(x.stride(), x.shape)]
    block = [1, 1, rows, tile_width(x.shape[3])]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], block, _layout(128, 16, 4))


# Cached, as checking a layout takes longer than the rest of making a descriptor.
_layout = functools.cache(gl.NVMMASharedLayout)


def _work_list(work: Work, programs: int, device: torch.device) -> Tensor | None:
    """The table of `schedule_tiles` on the GPU, made once.

    None if it has not been made yet and a CUDA graph is being captured, where nothing can be copied
    to the GPU. It is never freed, since a captured graph reads it whenever it is replayed.
    """
    key = (work, programs)
    known = _work_lists(device)
    if key not in known and not torch.cuda.is_current_stream_capturing():
        table = torch.from_numpy(schedule_tiles(*work, programs=programs)).to(device)
        # another thread may have been faster; then take its table
        known.setdefault(key, table)
    return known.get(key)


@functools.cache
def _work_lists(device: torch.device) -> dict[tuple[Work, int] | int, Tensor]:
    return {}


def _one_item_each(num_items: int, device: torch.device) -> Tensor:
    """The table for a program for each item, as `_work_list` makes it for several items each."""
    known = _work_lists(device)
    if torch.cuda.is_current_stream_capturing() and num_items not in known:
        # made on the GPU, in each replay
        table = torch.zeros(3, num_items, dtype=torch.int32, device=device)
        table[0] = 1
        torch.arange(num_items, out=table[1])
        return table
    if num_items not in known:
        table = np.zeros((3, num_items), np.int32)
        table[0], table[1] = 1, np.arange(num_items)
        known.setdefault(num_items, torch.from_numpy(table).to(device))
    return known[num_items]


def schedule_tiles(
    steps: Sequence[int], num_heads: int, section: int, is_last_first: bool, *, programs: int
) -> np.ndarray:
    """The items of work that each program does, in order.

    An item is a tile of a head. Items are numbered section by section, in a section tile by tile,
    and for a tile head by head (`tile_and_head` in blocks.py). Each item in turn is dealt to the
    program that is free first.

    Args:
        steps: the steps that each tile of a head takes.
        num_heads: heads of all sequences.
        section: heads of a section.
        is_last_first: whether the last tile of the heads of a section comes first.
        programs: how many run at the same time.

    Returns:
        (1 + the most items of a program + 1, programs) int32: in each column the number of items
        of a program, these items, and zeros.
    """
    order = range(len(steps))[:: -1 if is_last_first else 1]
    starts = range(0, num_heads, section)
    by_item = [steps[t] for s in starts for t in order for _ in range(min(section, num_heads - s))]
    mean = (sum(by_item) + START * len(by_item)) / programs
    for part in SHORT:
        dealt, busiest = _deal_items(by_item, part * max(steps), programs)
        if busiest <= BALANCED * mean:
            break
    table = np.zeros((2 + max(map(len, dealt)), programs), np.int32)
    for program, items in enumerate(dealt):
        table[: 1 + len(items), program] = [len(items), *items]
    return table


def _deal_items(steps: Sequence[int], short: float, programs: int) -> tuple[list[list[int]], float]:
    """The items of each program, those of up to `short` steps last, and the time of the busiest."""
    items = [i for i, n in enumerate(steps) if n > short]
    items += sorted((i for i, n in enumerate(steps) if n <= short), key=lambda i: -steps[i])
    free_at = [(0.0, program) for program in range(programs)]
    dealt: list[list[int]] = [[] for _ in range(programs)]
    for item in items:
        now, program = free_at[0]
        dealt[program].append(item)
        heapq.heapreplace(free_at, (now + steps[item] + START, program))
    return dealt, max(free_at)[0]
