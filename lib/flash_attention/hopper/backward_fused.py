"""The backward pass in one kernel of five matmuls, for Hopper GPUs, after FlashAttention-3.

A program holds the keys of 128 rows and adds up their dK and dV over the tiles of queries. Each
tile's part of dQ is added to float32 sums in global memory, in the order in which programs come to
it, so that the last bits of dQ differ from run to run. `prepare_backward_kernel` comes before and
`finish_queries_kernel` after; `lib.flash_attention.hopper.launch` starts all three.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lib.flash_attention.hopper.blocks import (
    LOAD_REGISTERS,
    LOG2_E,
    ROWS,
    SIZES,
    Ring,
    Sizes,
    accumulator_layout,
    barrier,
    first_query_tile,
    left_operand,
    load_queries,
    make_barriers,
    make_ring,
    num_own_items,
    own_item,
    store_tile,
    tile_and_head,
    unrotate,
    wait_until_empty,
    wait_until_full,
)


class FusedArgs(NamedTuple):
    """Arguments shared by the partitions of the fused kernel."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    k_half_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    grad_out_desc: tma.tensor_descriptor
    lse_desc: tma.tensor_descriptor
    minus_delta_desc: tma.tensor_descriptor
    grad_k_desc: tma.tensor_descriptor
    grad_v_desc: tma.tensor_descriptor
    sums_ptr: gl.tensor
    cos_ptr: gl.tensor
    sin_ptr: gl.tensor
    scale: gl.tensor
    scale_log2: gl.tensor
    k_tiles: gl.shared_memory_descriptor
    k_halves: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    grad_tiles: gl.shared_memory_descriptor
    grad_scores_tiles: gl.shared_memory_descriptor
    q_tiles: gl.shared_memory_descriptor
    grad_out_tiles: gl.shared_memory_descriptor
    lse_tiles: gl.shared_memory_descriptor
    minus_delta_tiles: gl.shared_memory_descriptor
    k_ring: Ring
    q_ring: Ring
    grad_scores_full: gl.shared_memory_descriptor
    work_list_ptr: gl.tensor
    sizes: Sizes
    padded: gl.tensor


@gluon.jit(do_not_specialize=[*SIZES, "padded"])
def backward_fused_kernel(
    q_desc,
    k_desc,
    k_half_desc,
    v_desc,
    grad_out_desc,
    lse_desc,
    minus_delta_desc,
    grad_k_desc,
    grad_v_desc,
    sums_ptr,
    cos_ptr,
    sin_ptr,
    work_list_ptr,
    num_tiles,
    heads,
    group,
    section,
    num_items,
    num_queries,
    num_keys,
    padded,
    scale,
    CONFIG: gl.constexpr,
):
    """dK, dV, and the sums of dQ; what goes through the ring are tiles of 64 queries."""
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HALF: gl.constexpr = gl.NVMMASharedLayout(DIM, 16, 2)
    # tiles of k, v and a gradient for each warpgroup; a ring of queries and what belongs to them
    k_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, DIM], TILE)
    v_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, DIM], TILE)
    grad_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, DIM], TILE)
    q_tiles = gl.allocate_shared_memory(dtype, [CONFIG.STAGES, ROWS, DIM], TILE)
    grad_out_tiles = gl.allocate_shared_memory(dtype, [CONFIG.STAGES, ROWS, DIM], TILE)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [CONFIG.STAGES, ROWS], lse_desc.layout)
    minus_delta_tiles = gl.allocate_shared_memory(
        gl.float32, [CONFIG.STAGES, ROWS], lse_desc.layout
    )
    # for dQ: half of the columns of all keys for each warpgroup, and dS of two steps
    k_halves = gl.allocate_shared_memory(dtype, [4, ROWS, DIM // 2], HALF)
    grad_scores_tiles = gl.allocate_shared_memory(dtype, [4, ROWS, ROWS], TILE)
    k_ring = make_ring(2, 1)
    q_ring = make_ring(CONFIG.STAGES, 2)
    grad_scores_full = make_barriers(2, 2)
    args = FusedArgs(
        q_desc=q_desc,
        k_desc=k_desc,
        k_half_desc=k_half_desc,
        v_desc=v_desc,
        grad_out_desc=grad_out_desc,
        lse_desc=lse_desc,
        minus_delta_desc=minus_delta_desc,
        grad_k_desc=grad_k_desc,
        grad_v_desc=grad_v_desc,
        sums_ptr=sums_ptr,
        cos_ptr=cos_ptr,
        sin_ptr=sin_ptr,
        scale=scale,
        scale_log2=scale * LOG2_E,
        k_tiles=k_tiles,
        k_halves=k_halves,
        v_tiles=v_tiles,
        grad_tiles=grad_tiles,
        grad_scores_tiles=grad_scores_tiles,
        q_tiles=q_tiles,
        grad_out_tiles=grad_out_tiles,
        lse_tiles=lse_tiles,
        minus_delta_tiles=minus_delta_tiles,
        k_ring=k_ring,
        q_ring=q_ring,
        grad_scores_full=grad_scores_full,
        work_list_ptr=work_list_ptr,
        sizes=Sizes(num_tiles, heads, group, section, num_items, num_queries, num_keys),
        padded=padded,
    )
    gl.warp_specialize(
        [
            (_grad_fused_partition, (args, 0, CONFIG)),
            (_grad_fused_partition, (args, 1, CONFIG)),
            (_load_for_fused, (args, CONFIG)),
        ],
        [4, 1],
        [CONFIG.REGISTERS, LOAD_REGISTERS],
    )


@gluon.jit
def _load_for_fused(args, CONFIG: gl.constexpr):
    """Load keys with values, and queries with dO, log-sum-exp and -delta."""
    sizes = args.sizes
    num_query_tiles = (sizes.num_queries + ROWS - 1) // ROWS
    key_heads = sizes.heads // sizes.group
    step = 0
    next_item = own_item(args.work_list_ptr, 0, CONFIG)
    for index in range(num_own_items(args.work_list_ptr, CONFIG)):
        item = next_item
        # issued long before it is needed
        next_item = own_item(args.work_list_ptr, index + 1, CONFIG)
        tile, batch_head = tile_and_head(item, sizes, False)
        batch = batch_head // key_heads
        key_head = batch_head % key_heads

        first = tile * (2 * ROWS)
        for part in gl.static_range(2):
            _load_keys(args, [batch, key_head, first], index, part)

        # the queries of every head that shares these keys
        first_tile = first_query_tile(first, num_query_tiles, CONFIG)
        for member in range(sizes.group):
            head = key_head * sizes.group + member
            for query_tile in range(first_tile, num_query_tiles):
                slot = wait_until_empty(args.q_ring, step, CONFIG)
                load_queries(args, batch, head, query_tile, slot)
                step += 1


@gluon.jit
def _load_keys(args, place, index, PART: gl.constexpr):
    """Load a warpgroup's 64 keys and values, and its half of the columns of all 128 keys."""
    HALF: gl.constexpr = args.k_halves.shape[2]
    mbarrier.wait(args.k_ring.empty.index(PART), index & 1 ^ 1)
    full = args.k_ring.full.index(PART)
    mbarrier.expect(
        full, 2 * args.k_desc.block_type.nbytes + 2 * args.k_half_desc.block_type.nbytes
    )
    rows = [place[0], place[1], place[2] + PART * ROWS, 0]
    tma.async_copy_global_to_shared(args.k_desc, rows, full, args.k_tiles.index(PART))
    tma.async_copy_global_to_shared(args.v_desc, rows, full, args.v_tiles.index(PART))
    for other in gl.static_range(2):
        rows = [place[0], place[1], place[2] + other * ROWS, PART * HALF]
        tile = args.k_halves.index(2 * PART + other)
        tma.async_copy_global_to_shared(args.k_half_desc, rows, full, tile)


@gluon.jit
def _grad_fused_partition(args, PART: gl.constexpr, CONFIG: gl.constexpr):
    """Compute dK and dV of 64 keys at a time, and half of the columns of dQ of all 128."""
    sizes = args.sizes
    DIM: gl.constexpr = args.k_tiles.shape[2]
    SCORES: gl.constexpr = accumulator_layout(ROWS)
    OUT: gl.constexpr = accumulator_layout(DIM)
    grad_tile = args.grad_tiles.index(PART)
    num_query_tiles = (sizes.num_queries + ROWS - 1) // ROWS
    key_heads = sizes.heads // sizes.group
    step = 0
    next_item = own_item(args.work_list_ptr, 0, CONFIG)
    for index in range(num_own_items(args.work_list_ptr, CONFIG)):
        item = next_item
        # issued long before it is needed
        next_item = own_item(args.work_list_ptr, index + 1, CONFIG)
        tile, batch_head = tile_and_head(item, sizes, False)
        first = tile * (2 * ROWS)
        first_tile = first_query_tile(first, num_query_tiles, CONFIG)
        first += PART * ROWS
        grad_k = gl.zeros([ROWS, DIM], gl.float32, OUT)
        grad_v = gl.zeros([ROWS, DIM], gl.float32, OUT)

        mbarrier.wait(args.k_ring.full.index(PART), index & 1)
        k = left_operand(args.k_tiles.index(PART), CONFIG.IN_REGISTERS >= 1, SCORES)  # (64, DIM)
        v = left_operand(args.v_tiles.index(PART), CONFIG.IN_REGISTERS >= 2, SCORES)
        batch = batch_head // key_heads
        head = batch * sizes.heads + batch_head % key_heads * sizes.group
        for _member in range(sizes.group):
            if first_tile < num_query_tiles:
                grad_k, grad_v = _add_head(
                    args, grad_k, grad_v, k, v, step, first, head, first_tile, PART, CONFIG
                )
            step += num_query_tiles - first_tile
            head += 1
        mbarrier.arrive(args.k_ring.empty.index(PART))

        grad_k = grad_k * args.scale
        if CONFIG.HAS_ROPE:
            grad_k = unrotate(
                grad_k, first, args.cos_ptr, args.sin_ptr, sizes.num_keys, OUT, CONFIG.HEAD_DIM
            )
        rows = [batch, batch_head % key_heads, first, 0]
        store_tile(args.grad_v_desc, rows, grad_tile, grad_v)
        store_tile(args.grad_k_desc, rows, grad_tile, grad_k)
    tma.store_wait(0)


@gluon.jit
def _add_head(
    args,
    grad_k,
    grad_v,
    k,
    v,
    step,
    first,
    head,
    first_tile,
    PART: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """dK and dV of the keys from `first` on, with the parts of one head's queries added."""
    SCORES: gl.constexpr = accumulator_layout(ROWS)
    num_query_tiles = (args.sizes.num_queries + ROWS - 1) // ROWS
    tile_size = args.k_tiles.shape[2] * ROWS
    zeros = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    sums = args.sums_ptr + (
        gl.cast(head, gl.int64) * args.padded * args.k_tiles.shape[2]
        + first_tile * tile_size
        + PART * (tile_size // 2)
    )

    slot = wait_until_full(args.q_ring, step, CONFIG)
    scores = warpgroup_mma(
        k, args.q_tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, [scores])
    last = step + num_query_tiles - first_tile - 1
    for i in range(step, last):
        grad_k, grad_v, grad_q = _fused_step(
            args, grad_k, grad_v, scores, v, i, first, first_tile + i - step, PART, CONFIG
        )
        # the next tile's scores, and meanwhile this tile's part of dQ
        slot = wait_until_full(args.q_ring, i + 1, CONFIG)
        scores = warpgroup_mma(
            k, args.q_tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        _add_to_sums(sums, grad_q)
        scores = warpgroup_mma_wait(0, [scores])
        sums += tile_size
    grad_k, grad_v, grad_q = _fused_step(
        args, grad_k, grad_v, scores, v, last, first, num_query_tiles - 1, PART, CONFIG
    )
    _add_to_sums(sums, grad_q)
    return grad_k, grad_v


@gluon.jit
def _fused_step(
    args,
    grad_k,
    grad_v,
    scores,
    v,
    step,
    first,
    query_tile,
    PART: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """Add a tile of queries' part of dK and dV; return them and half of the columns of its dQ.

    All tiles are (keys, queries), as in `backward_keys_kernel`.
    """
    DIM: gl.constexpr = args.q_tiles.shape[2]
    dtype: gl.constexpr = args.q_tiles.dtype
    SCORES: gl.constexpr = accumulator_layout(ROWS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(DIM), 2)
    SCORES_COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    QUERIES: gl.constexpr = accumulator_layout(DIM // 2)
    slot = step % CONFIG.STAGES
    q_tile = args.q_tiles.index(slot)
    grad_out_tile = args.grad_out_tiles.index(slot)

    # issue dP - delta: the sum of a matmul can start anywhere
    zeros = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    minus_delta = gl.expand_dims(args.minus_delta_tiles.index(slot).load(SCORES_COLUMN), 0)
    grad_p, _ = gl.broadcast(minus_delta, zeros)
    grad_p = warpgroup_mma(v, grad_out_tile.permute((1, 0)), grad_p, is_async=True)

    # P, with zeros where a query does not see a key, or there is none
    lse = args.lse_tiles.index(slot).load(SCORES_COLUMN)
    p = gl.exp2(scores * args.scale_log2 - gl.expand_dims(lse, 0))
    first_query = query_tile * ROWS
    num_queries, num_keys = args.sizes.num_queries, args.sizes.num_keys
    needs_mask = (first + ROWS > num_keys) | (first_query + ROWS > num_queries)
    if CONFIG.IS_CAUSAL:
        needs_mask = needs_mask | (first_query < first + ROWS - 1)
    if needs_mask:
        key = gl.expand_dims(first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)), 1)
        query = gl.expand_dims(first_query + gl.arange(0, ROWS, SCORES_COLUMN), 0)
        visible = (key < num_keys) & (query < num_queries)
        if CONFIG.IS_CAUSAL:
            visible = visible & (key <= query)
        p = gl.where(visible, p, 0.0)

    # dV; then dS, which both warpgroups need
    p_operand = gl.convert_layout(p.to(dtype), OPERAND)
    grad_v = warpgroup_mma(p_operand, grad_out_tile, grad_v, is_async=True)
    grad_p = warpgroup_mma_wait(1, [grad_p])
    grad_scores = (p * grad_p).to(dtype)
    number = step % 2 * 2
    args.grad_scores_tiles.index(number + PART).store(grad_scores)
    fence_async_shared()
    barrier()
    mbarrier.arrive(args.grad_scores_full.index(step % 2))

    # dK, and dQ once the other warpgroup's dS is there
    operand = gl.convert_layout(grad_scores, OPERAND)
    grad_k = warpgroup_mma(operand, q_tile, grad_k, is_async=True)
    grad_q = gl.zeros([ROWS, DIM // 2], gl.float32, QUERIES)
    mbarrier.wait(args.grad_scores_full.index(step % 2), step // 2 & 1)
    for part in gl.static_range(2):
        grad_scores_tile = args.grad_scores_tiles.index(number + part).permute((1, 0))
        k_half = args.k_halves.index(2 * PART + part)
        grad_q = warpgroup_mma(grad_scores_tile, k_half, grad_q, use_acc=part > 0, is_async=True)
    grad_q, grad_k, operand, grad_v, p_operand = warpgroup_mma_wait(
        0, [grad_q, grad_k, operand, grad_v, p_operand]
    )
    mbarrier.arrive(args.q_ring.empty.index(slot))
    return grad_k, grad_v, grad_q


@gluon.constexpr_function
def add_instructions(blocks):
    """PTX that adds four numbers to global memory, for each of a thread's blocks of 8 columns.

    Its operands are, of each block: a result that nothing reads, the address of the first block,
    and four numbers. Blocks lie 2,048 bytes apart (`red`: PTX ISA 8.1, for sm_90).
    """
    lines = [
        f"red.relaxed.gpu.global.add.v4.f32 [${blocks} + {2048 * i}], "
        f"{{{', '.join(f'${(2 + part) * blocks + i}' for part in range(4))}}};"
        f" mov.b32 ${i}, 0;"
        for i in range(blocks)
    ]
    return " ".join(lines)


@gluon.constexpr_function
def add_constraints(blocks):
    """The types of the operands of `add_instructions`."""
    return ",".join(["=r"] * blocks + ["l"] * blocks + ["f"] * (4 * blocks))


@gluon.jit
def _add_to_sums(sums, x):
    """Add a (64, columns) result of a matmul to as many numbers in global memory.

    They lie in the order in which threads hold them, four to a thread: rows r and r + 8, columns
    2 c and 2 c + 1. `finish_queries_kernel` brings them into the usual order.
    """
    BLOCKS: gl.constexpr = x.shape[1] // 8
    LAYOUT: gl.constexpr = x.type.layout
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    place = row // 16 * 128 + row % 8 * 16 + column % 8 // 2 * 4
    place, _, _, _ = _fours(place)
    a, b, c, d = _fours(x)
    gl.inline_asm_elementwise(
        add_instructions(BLOCKS),
        add_constraints(BLOCKS),
        [gl.cast(sums + place, gl.int64), a, b, c, d],
        dtype=gl.int32,
        is_pure=False,
        pack=BLOCKS,
    )


@gluon.jit
def _fours(x):
    """A (64, columns) tensor as four of (4, 8, columns / 8, 4): what a thread holds of 2 × 2."""
    x = gl.reshape(x, [4, 2, 8, x.shape[1] // 8, 4, 2])
    first, second = gl.split(gl.permute(x, [0, 2, 3, 4, 1, 5]))
    a, c = gl.split(first)
    b, d = gl.split(second)
    return a, b, c, d


@gluon.jit(do_not_specialize=["heads", "num_queries", "padded"])
def prepare_backward_kernel(
    out_ptr,
    grad_out_ptr,
    lse_ptr,
    lse_log2_ptr,
    minus_delta_ptr,
    sums_ptr,
    out_batch,
    out_head,
    out_token,
    grad_out_batch,
    grad_out_head,
    grad_out_token,
    heads,
    num_queries,
    padded,
    DIM: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """-delta = -rowsum(dO ∘ O), the log-sum-exp in base 2, and zeros in the sums of dQ."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, COPY)
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    tiles = padded // ROWS
    batch_head = gl.program_id(0) // tiles
    row = gl.program_id(0) % tiles * ROWS + gl.arange(0, ROWS, ROW)
    column = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, COPY)), 0)
    batch = gl.cast(batch_head // heads, gl.int64)
    head = gl.cast(batch_head % heads, gl.int64)
    is_inside = row < num_queries
    mask = gl.expand_dims(is_inside, 1)
    if HEAD_DIM < DIM:
        mask = mask & (column < HEAD_DIM)
    token = gl.expand_dims(gl.cast(row, gl.int64), 1)

    start = batch * out_batch + head * out_head
    out = gl.load(out_ptr + start + token * out_token + column, mask, other=0.0)  # (64, DIM)
    start = batch * grad_out_batch + head * grad_out_head
    offsets = start + token * grad_out_token + column
    grad_out = gl.load(grad_out_ptr + offsets, mask, other=0.0)
    delta = gl.sum(out.to(gl.float32) * grad_out.to(gl.float32), 1)  # (64,)
    start = gl.cast(batch_head, gl.int64)
    # past the last query an infinite log-sum-exp makes every probability 0
    lse = gl.load(lse_ptr + start * num_queries + row, is_inside, other=float("inf")) * LOG2_E
    # and likewise for a query whose scores are all -inf
    lse = gl.where(lse == -float("inf"), float("inf"), lse)
    gl.store(lse_log2_ptr + start * padded + row, lse)
    gl.store(minus_delta_ptr + start * padded + row, -delta)
    first = gl.cast(gl.program_id(0), gl.int64) * (ROWS * DIM)
    place = gl.arange(0, ROWS * DIM, LINE)
    gl.store(sums_ptr + first + place, gl.zeros([ROWS * DIM], gl.float32, LINE))


@gluon.jit(do_not_specialize=["heads", "num_queries", "padded"])
def finish_queries_kernel(
    sums_ptr,
    grad_q_ptr,
    grad_q_batch,
    grad_q_head,
    grad_q_token,
    cos_ptr,
    sin_ptr,
    heads,
    num_queries,
    padded,
    scale,
    DIM: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HAS_ROPE: gl.constexpr,
):
    """dQ from its sums: scaled, rotated back if need be, in the usual order and dtype."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    tiles = padded // ROWS
    batch_head = gl.program_id(0) // tiles
    first_row = gl.program_id(0) % tiles * ROWS
    first = gl.cast(gl.program_id(0), gl.int64) * (ROWS * DIM)
    x = gl.load(sums_ptr + first + gl.arange(0, ROWS * DIM, LINE))
    # halves of the columns, blocks of 8 columns, warps, rows, pairs of columns, 2 rows, 2 columns
    x = gl.permute(gl.reshape(x, [2, DIM // 16, 4, 8, 4, 2, 2]), [2, 5, 3, 0, 1, 4, 6])
    grad_q = gl.convert_layout(gl.reshape(x, [ROWS, DIM]), COPY) * scale
    if HAS_ROPE:
        grad_q = unrotate(grad_q, first_row, cos_ptr, sin_ptr, num_queries, COPY, HEAD_DIM)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    column = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, COPY)), 0)
    batch = gl.cast(batch_head // heads, gl.int64)
    head = gl.cast(batch_head % heads, gl.int64)
    offsets = gl.expand_dims(gl.cast(row, gl.int64) * grad_q_token, 1) + column
    offsets = offsets + batch * grad_q_batch + head * grad_q_head
    mask = gl.expand_dims(row < num_queries, 1)
    if HEAD_DIM < DIM:
        mask = mask & (column < HEAD_DIM)
    gl.store(grad_q_ptr + offsets, grad_q.to(grad_q_ptr.dtype.element_ty), mask)
