"""The two backward kernels for Hopper GPUs; `lib.flash_attention.hopper.launch` starts them."""

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
    first_query,
    first_query_tile,
    is_wide,
    left_operand,
    load_queries,
    make_barriers,
    make_ring,
    num_key_tiles_seen,
    num_own_items,
    own_item,
    part_of_queries,
    release_copied,
    store_tile,
    take_item,
    times_transposed,
    two_matmuls,
    unrotate,
    visible_keys,
    wait_until_empty,
    wait_until_full,
)


class QueriesArgs(NamedTuple):
    """Arguments shared by the partitions of the kernel for dQ."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    grad_out_desc: tma.tensor_descriptor
    grad_q_desc: tma.tensor_descriptor
    out_ptr: gl.tensor
    out_batch: gl.tensor
    out_head: gl.tensor
    out_token: gl.tensor
    lse_ptr: gl.tensor
    lse_log2_ptr: gl.tensor
    minus_delta_ptr: gl.tensor
    cos_ptr: gl.tensor
    sin_ptr: gl.tensor
    scale: gl.tensor
    scale_log2: gl.tensor
    q_tiles: gl.shared_memory_descriptor
    grad_out_tiles: gl.shared_memory_descriptor
    grad_q_tiles: gl.shared_memory_descriptor
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    q_ring: Ring
    k_ring: Ring
    work_list_ptr: gl.tensor
    sizes: Sizes
    padded: gl.tensor


class KeysArgs(NamedTuple):
    """Arguments shared by the partitions of the kernel for dK and dV."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    grad_out_desc: tma.tensor_descriptor
    lse_desc: tma.tensor_descriptor
    minus_delta_desc: tma.tensor_descriptor
    grad_k_desc: tma.tensor_descriptor
    grad_v_desc: tma.tensor_descriptor
    cos_ptr: gl.tensor
    sin_ptr: gl.tensor
    scale: gl.tensor
    scale_log2: gl.tensor
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    grad_tiles: gl.shared_memory_descriptor
    q_tiles: gl.shared_memory_descriptor
    grad_out_tiles: gl.shared_memory_descriptor
    lse_tiles: gl.shared_memory_descriptor
    minus_delta_tiles: gl.shared_memory_descriptor
    p_tiles: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    k_ring: Ring
    q_ring: Ring
    work_list_ptr: gl.tensor
    sizes: Sizes
    padded: gl.tensor


@gluon.jit(do_not_specialize=[*SIZES, "padded"])
def backward_queries_kernel(
    q_desc,
    k_desc,
    v_desc,
    grad_out_desc,
    grad_q_desc,
    out_ptr,
    lse_ptr,
    lse_log2_ptr,
    minus_delta_ptr,
    out_batch,
    out_head,
    out_token,
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
    """dQ; and for the other kernel -delta = -rowsum(dO ∘ O) and the log-sum-exp in base 2.

    `padded` is the number of queries of a head, with those past the end, in these two.
    """
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # tiles of q, dO and dQ for each warpgroup; a ring of keys and values for all
    q_tiles = gl.allocate_shared_memory(dtype, [CONFIG.WARPGROUPS, ROWS, DIM], TILE)
    grad_out_tiles = gl.allocate_shared_memory(dtype, [CONFIG.WARPGROUPS, ROWS, DIM], TILE)
    grad_q_tiles = q_tiles
    if not is_wide(DIM):
        grad_q_tiles = gl.allocate_shared_memory(dtype, [CONFIG.WARPGROUPS, ROWS, DIM], TILE)
    k_tiles = gl.allocate_shared_memory(dtype, [CONFIG.STAGES, CONFIG.KEYS, DIM], TILE)
    v_tiles = gl.allocate_shared_memory(dtype, [CONFIG.STAGES, CONFIG.KEYS, DIM], TILE)
    q_ring = make_ring(CONFIG.WARPGROUPS, 1)
    k_ring = make_ring(CONFIG.STAGES, CONFIG.WARPGROUPS)
    args = QueriesArgs(
        q_desc=q_desc,
        k_desc=k_desc,
        v_desc=v_desc,
        grad_out_desc=grad_out_desc,
        grad_q_desc=grad_q_desc,
        out_ptr=out_ptr,
        out_batch=out_batch,
        out_head=out_head,
        out_token=out_token,
        lse_ptr=lse_ptr,
        lse_log2_ptr=lse_log2_ptr,
        minus_delta_ptr=minus_delta_ptr,
        cos_ptr=cos_ptr,
        sin_ptr=sin_ptr,
        scale=scale,
        scale_log2=scale * LOG2_E,
        q_tiles=q_tiles,
        grad_out_tiles=grad_out_tiles,
        grad_q_tiles=grad_q_tiles,
        k_tiles=k_tiles,
        v_tiles=v_tiles,
        q_ring=q_ring,
        k_ring=k_ring,
        work_list_ptr=work_list_ptr,
        sizes=Sizes(num_tiles, heads, group, section, num_items, num_queries, num_keys),
        padded=padded,
    )
    if CONFIG.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_grad_queries_partition, (args, 0, CONFIG)),
                (_grad_queries_partition, (args, 1, CONFIG)),
                (_load_for_queries, (args, CONFIG)),
            ],
            [4, 1],
            [CONFIG.REGISTERS, LOAD_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_grad_queries_partition, (args, 0, CONFIG)),
                (_grad_queries_partition, (args, 1, CONFIG)),
                (_grad_queries_partition, (args, 2, CONFIG)),
                (_load_for_queries, (args, CONFIG)),
            ],
            [4, 4, 1],
            [CONFIG.REGISTERS, CONFIG.REGISTERS, LOAD_REGISTERS],
        )


@gluon.jit
def _load_for_queries(args, CONFIG: gl.constexpr):
    """Load queries with dO, and keys with values, last keys first."""
    WARPGROUPS: gl.constexpr = CONFIG.WARPGROUPS
    sizes = args.sizes
    step = 0
    item = own_item(args.work_list_ptr, 0)
    for index in range(num_own_items(args.work_list_ptr)):
        tile, batch_head, item = take_item(args, item, index, CONFIG.IS_CAUSAL)
        batch = batch_head // sizes.heads
        head = batch_head % sizes.heads

        first = first_query(tile, sizes, CONFIG)
        for part in gl.static_range(WARPGROUPS):
            mbarrier.wait(args.q_ring.empty.index(part), index & 1 ^ 1)
            full = args.q_ring.full.index(part)
            mbarrier.expect(full, 2 * args.q_desc.block_type.nbytes)
            rows = [batch, head, first + part * ROWS, 0]
            tma.async_copy_global_to_shared(args.q_desc, rows, full, args.q_tiles.index(part))
            tma.async_copy_global_to_shared(
                args.grad_out_desc, rows, full, args.grad_out_tiles.index(part)
            )

        last_query = gl.minimum(first + WARPGROUPS * ROWS, sizes.num_queries) - 1
        num_key_tiles = num_key_tiles_seen(last_query, sizes.num_keys, CONFIG)
        for i in range(num_key_tiles):
            slot = wait_until_empty(args.k_ring, step + i, CONFIG)
            full = args.k_ring.full.index(slot)
            mbarrier.expect(full, 2 * args.k_desc.block_type.nbytes)
            rows = [batch, head // sizes.group, (num_key_tiles - 1 - i) * CONFIG.KEYS, 0]
            tma.async_copy_global_to_shared(args.k_desc, rows, full, args.k_tiles.index(slot))
            tma.async_copy_global_to_shared(args.v_desc, rows, full, args.v_tiles.index(slot))
        step += num_key_tiles


@gluon.jit
def _grad_queries_partition(args, PART: gl.constexpr, CONFIG: gl.constexpr):
    """Compute dQ of 64 queries at a time, in one of the warpgroups."""
    step = 0
    item = own_item(args.work_list_ptr, 0)
    for index in range(num_own_items(args.work_list_ptr)):
        tile, batch_head, item = take_item(args, item, index, CONFIG.IS_CAUSAL)
        batch = batch_head // args.sizes.heads
        head = batch_head % args.sizes.heads
        first, seen, loaded = part_of_queries(tile, args.sizes, PART, CONFIG)
        # skip the tiles of keys that only other warpgroups see
        for i in range(step, step + loaded - seen):
            mbarrier.arrive(args.k_ring.empty.index(wait_until_full(args.k_ring, i, CONFIG)))
        step += loaded - seen
        if seen > 0:
            _grad_queries(args, first, batch, head, batch_head, index, step, seen, PART, CONFIG)
            step += seen
        else:
            mbarrier.wait(args.q_ring.full.index(PART), index & 1)
            mbarrier.arrive(args.q_ring.empty.index(PART))
    tma.store_wait(0)


@gluon.jit
def _grad_queries(
    args,
    first,
    batch,
    head,
    batch_head,
    index,
    step,
    seen,
    PART: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """dQ of 64 queries from `first` on, which see `seen` tiles of keys."""
    DIM: gl.constexpr = args.grad_q_tiles.shape[2]
    dtype: gl.constexpr = args.grad_q_tiles.dtype
    SCORES: gl.constexpr = accumulator_layout(CONFIG.KEYS)
    OUT: gl.constexpr = accumulator_layout(DIM)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    # 16 bytes a thread
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    SCORES_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    grad_out_tile = args.grad_out_tiles.index(PART)
    num_queries = args.sizes.num_queries

    # read the output and the log-sum-exp before the wait for q and dO
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    column = gl.arange(0, DIM, gl.SliceLayout(0, COPY))
    # strides in 8 numbers, which a thread loads at once
    start = gl.cast(batch, gl.int64) * args.out_batch + gl.cast(head, gl.int64) * args.out_head
    start = start * 8
    offsets = gl.expand_dims(gl.cast(row, gl.int64) * args.out_token * 8, 1)
    offsets = offsets + gl.expand_dims(column, 0)
    is_inside = gl.expand_dims(row < num_queries, 1)
    if CONFIG.HEAD_DIM < DIM:
        is_inside = is_inside & (gl.expand_dims(column, 0) < CONFIG.HEAD_DIM)
    out = gl.load(args.out_ptr + start + offsets, is_inside, other=0.0)  # (64, DIM)
    row = first + gl.arange(0, ROWS, SCORES_ROW)
    lse_ptrs = args.lse_ptr + gl.cast(batch_head, gl.int64) * num_queries + row
    # past the last query an infinite log-sum-exp makes every probability 0
    lse = gl.load(lse_ptrs, row < num_queries, other=float("inf")) * LOG2_E  # (64,)
    # and likewise for a query whose scores are all -inf
    lse = gl.where(lse == -float("inf"), float("inf"), lse)

    # delta, and what the other kernel needs
    mbarrier.wait(args.q_ring.full.index(PART), index & 1)
    q = left_operand(args.q_tiles.index(PART), CONFIG.IN_REGISTERS, SCORES)
    delta = gl.sum(out.to(gl.float32) * grad_out_tile.load(COPY).to(gl.float32), 1)
    delta = gl.convert_layout(delta, SCORES_ROW)  # (64,)
    padded_row = gl.cast(batch_head, gl.int64) * args.padded + row
    gl.store(args.lse_log2_ptr + padded_row, lse)
    gl.store(args.minus_delta_ptr + padded_row, -delta)

    # dS of the first tile: the last keys, the only ones that can need a mask
    slot = wait_until_full(args.k_ring, step, CONFIG)
    k, v = args.k_tiles.index(slot), args.v_tiles.index(slot)
    scores, grad_p = two_matmuls(q, k, grad_out_tile, v, SCORES, CONFIG)  # (64, KEYS)
    scores, grad_p = warpgroup_mma_wait(0, [scores, grad_p])
    p = gl.exp2(scores * args.scale_log2 - gl.expand_dims(lse, 1))
    if CONFIG.IS_CAUSAL or not CONFIG.IS_EVEN:
        first_key = (seen - 1) * CONFIG.KEYS
        visible = visible_keys(first, first_key, args.sizes.num_keys, SCORES, CONFIG)
        p = gl.where(visible, p, 0.0)
    grad_scores = p * (grad_p - gl.expand_dims(delta, 1))
    grad_scores_operand = gl.convert_layout(grad_scores.to(dtype), OPERAND)

    acc = gl.zeros([ROWS, DIM], gl.float32, OUT)
    last = step + seen - 1
    following = (step + 1) % CONFIG.STAGES
    mbarrier.wait(
        args.k_ring.full.index(following), (step + 1) // CONFIG.STAGES & 1, pred=step < last
    )
    for i in range(step, last):
        # issue the next tile's S and dP, then this tile's part of dQ
        slot = i % CONFIG.STAGES
        following = (i + 1) % CONFIG.STAGES
        k, v = args.k_tiles.index(following), args.v_tiles.index(following)
        scores, grad_p = two_matmuls(q, k, grad_out_tile, v, SCORES, CONFIG)
        acc = warpgroup_mma(grad_scores_operand, args.k_tiles.index(slot), acc, is_async=True)
        # dS of the next tile while the last matmul runs
        scores, grad_p = warpgroup_mma_wait(1, [scores, grad_p])
        p = gl.exp2(scores * args.scale_log2 - gl.expand_dims(lse, 1))
        if CONFIG.IS_CAUSAL and CONFIG.KEYS < ROWS:
            # the diagonal goes through two tiles of keys
            first_key = (last - 1 - i) * CONFIG.KEYS
            visible = visible_keys(first, first_key, args.sizes.num_keys, SCORES, CONFIG)
            p = gl.where(visible, p, 0.0)
        grad_scores = p * (grad_p - gl.expand_dims(delta, 1))
        # wait here: the assembler moves the softmax past the next wait, but not past a loop's end
        next_slot = (i + 2) % CONFIG.STAGES
        mbarrier.wait(
            args.k_ring.full.index(next_slot), (i + 2) // CONFIG.STAGES & 1, pred=i + 1 < last
        )
        acc, grad_scores_operand, grad_scores = warpgroup_mma_wait(
            0, [acc, grad_scores_operand, grad_scores]
        )
        mbarrier.arrive(args.k_ring.empty.index(slot))
        grad_scores_operand = gl.convert_layout(grad_scores.to(dtype), OPERAND)
    if not is_wide(DIM):
        mbarrier.arrive(args.q_ring.empty.index(PART))

    # the last tile's part of dQ
    slot = last % CONFIG.STAGES
    acc = warpgroup_mma(grad_scores_operand, args.k_tiles.index(slot), acc, is_async=True)
    acc, grad_scores_operand = warpgroup_mma_wait(0, [acc, grad_scores_operand])
    mbarrier.arrive(args.k_ring.empty.index(slot))
    grad_q = acc * args.scale  # (64, DIM)
    if CONFIG.HAS_ROPE:
        grad_q = unrotate(
            grad_q, first, args.cos_ptr, args.sin_ptr, num_queries, OUT, CONFIG.HEAD_DIM
        )
    store_tile(args.grad_q_desc, [batch, head, first, 0], args.grad_q_tiles.index(PART), grad_q)
    if is_wide(DIM):
        release_copied(args.q_ring.empty.index(PART))


@gluon.jit(do_not_specialize=[*SIZES, "padded"])
def backward_keys_kernel(
    q_desc,
    k_desc,
    v_desc,
    grad_out_desc,
    lse_desc,
    minus_delta_desc,
    grad_k_desc,
    grad_v_desc,
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
    """dK and dV, in tiles of 64 keys; what goes through the ring are tiles of 64 queries."""
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # tiles of k, v and a gradient for each warpgroup; a ring of queries and what belongs to them
    k_tiles = gl.allocate_shared_memory(dtype, [CONFIG.WARPGROUPS, ROWS, DIM], TILE)
    v_tiles = gl.allocate_shared_memory(dtype, [CONFIG.WARPGROUPS, ROWS, DIM], TILE)
    grad_tiles = k_tiles
    if not is_wide(DIM):
        grad_tiles = gl.allocate_shared_memory(dtype, [CONFIG.WARPGROUPS, ROWS, DIM], TILE)
    q_tiles = gl.allocate_shared_memory(dtype, [CONFIG.STAGES, ROWS, DIM], TILE)
    grad_out_tiles = gl.allocate_shared_memory(dtype, [CONFIG.STAGES, ROWS, DIM], TILE)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [CONFIG.STAGES, ROWS], lse_desc.layout)
    minus_delta_tiles = gl.allocate_shared_memory(
        gl.float32, [CONFIG.STAGES, ROWS], lse_desc.layout
    )
    SHARERS: gl.constexpr = 2 if CONFIG.WARPGROUPS == 1 else 1
    k_ring = make_ring(CONFIG.WARPGROUPS, SHARERS)
    q_ring = make_ring(CONFIG.STAGES, CONFIG.WARPGROUPS * SHARERS)
    # P, from the warpgroup that makes dV to the one that makes dK, in slots like those of q
    p_tiles, p_full = q_tiles, q_ring.full
    if CONFIG.WARPGROUPS == 1:
        p_tiles = gl.allocate_shared_memory(dtype, [CONFIG.STAGES, ROWS, ROWS], TILE)
        p_full = make_barriers(CONFIG.STAGES, 1)
    args = KeysArgs(
        q_desc=q_desc,
        k_desc=k_desc,
        v_desc=v_desc,
        grad_out_desc=grad_out_desc,
        lse_desc=lse_desc,
        minus_delta_desc=minus_delta_desc,
        grad_k_desc=grad_k_desc,
        grad_v_desc=grad_v_desc,
        cos_ptr=cos_ptr,
        sin_ptr=sin_ptr,
        scale=scale,
        scale_log2=scale * LOG2_E,
        k_tiles=k_tiles,
        v_tiles=v_tiles,
        grad_tiles=grad_tiles,
        q_tiles=q_tiles,
        grad_out_tiles=grad_out_tiles,
        lse_tiles=lse_tiles,
        minus_delta_tiles=minus_delta_tiles,
        p_tiles=p_tiles,
        p_full=p_full,
        k_ring=k_ring,
        q_ring=q_ring,
        work_list_ptr=work_list_ptr,
        sizes=Sizes(num_tiles, heads, group, section, num_items, num_queries, num_keys),
        padded=padded,
    )
    if CONFIG.WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_one_gradient_partition, (args, False, CONFIG)),
                (_one_gradient_partition, (args, True, CONFIG)),
                (_load_for_keys, (args, CONFIG)),
            ],
            [4, 1],
            [CONFIG.REGISTERS, LOAD_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_grad_keys_partition, (args, 0, CONFIG)),
                (_grad_keys_partition, (args, 1, CONFIG)),
                (_load_for_keys, (args, CONFIG)),
            ],
            [4, 1],
            [CONFIG.REGISTERS, LOAD_REGISTERS],
        )


@gluon.jit
def _load_for_keys(args, CONFIG: gl.constexpr):
    """Load keys with values, and queries with dO, log-sum-exp and -delta."""
    WARPGROUPS: gl.constexpr = CONFIG.WARPGROUPS
    sizes = args.sizes
    num_query_tiles = (sizes.num_queries + ROWS - 1) // ROWS
    step = 0
    item = own_item(args.work_list_ptr, 0)
    for index in range(num_own_items(args.work_list_ptr)):
        # first tiles first: most queries see the first keys
        tile, batch_head, item = take_item(args, item, index, False)
        key_heads = sizes.heads // sizes.group
        batch = batch_head // key_heads
        key_head = batch_head % key_heads

        first = tile * (WARPGROUPS * ROWS)
        for part in gl.static_range(WARPGROUPS):
            mbarrier.wait(args.k_ring.empty.index(part), index & 1 ^ 1)
            full = args.k_ring.full.index(part)
            mbarrier.expect(full, 2 * args.k_desc.block_type.nbytes)
            rows = [batch, key_head, first + part * ROWS, 0]
            tma.async_copy_global_to_shared(args.k_desc, rows, full, args.k_tiles.index(part))
            tma.async_copy_global_to_shared(args.v_desc, rows, full, args.v_tiles.index(part))

        # the queries of every head that shares these keys
        first_tile = first_query_tile(first, num_query_tiles, CONFIG)
        for member in range(sizes.group):
            head = key_head * sizes.group + member
            for query_tile in range(first_tile, num_query_tiles):
                slot = wait_until_empty(args.q_ring, step, CONFIG)
                load_queries(args, batch, head, query_tile, slot)
                step += 1


@gluon.jit
def _grad_keys_partition(args, PART: gl.constexpr, CONFIG: gl.constexpr):
    """Compute dK and dV of 64 keys at a time, in one of the warpgroups."""
    sizes = args.sizes
    DIM: gl.constexpr = args.k_tiles.shape[2]
    SCORES: gl.constexpr = accumulator_layout(ROWS)
    OUT: gl.constexpr = accumulator_layout(DIM)
    grad_tile = args.grad_tiles.index(PART)
    num_query_tiles = (sizes.num_queries + ROWS - 1) // ROWS
    step = 0
    item = own_item(args.work_list_ptr, 0)
    for index in range(num_own_items(args.work_list_ptr)):
        tile, batch_head, item = take_item(args, item, index, False)
        key_heads = sizes.heads // sizes.group
        first = tile * (CONFIG.WARPGROUPS * ROWS)
        loaded_from = first_query_tile(first, num_query_tiles, CONFIG)
        first += PART * ROWS
        seen_from = first_query_tile(first, num_query_tiles, CONFIG)
        seen_from = gl.where(first < sizes.num_keys, seen_from, num_query_tiles)
        grad_k = gl.zeros([ROWS, DIM], gl.float32, OUT)
        grad_v = gl.zeros([ROWS, DIM], gl.float32, OUT)

        mbarrier.wait(args.k_ring.full.index(PART), index & 1)
        k = left_operand(args.k_tiles.index(PART), CONFIG.IN_REGISTERS, SCORES)  # (64, DIM)
        v = left_operand(args.v_tiles.index(PART), CONFIG.IN_REGISTERS, SCORES)
        for _member in range(sizes.group):
            # skip the tiles of queries that only see other warpgroups' keys
            for i in range(step, step + seen_from - loaded_from):
                mbarrier.arrive(args.q_ring.empty.index(wait_until_full(args.q_ring, i, CONFIG)))
            step += seen_from - loaded_from
            if seen_from < num_query_tiles:
                grad_k, grad_v = _grad_keys(
                    args, grad_k, grad_v, k, v, step, seen_from, num_query_tiles, CONFIG
                )
                step += num_query_tiles - seen_from
        mbarrier.arrive(args.k_ring.empty.index(PART))

        grad_k = grad_k * args.scale
        if CONFIG.HAS_ROPE:
            grad_k = unrotate(
                grad_k, first, args.cos_ptr, args.sin_ptr, sizes.num_keys, OUT, CONFIG.HEAD_DIM
            )
        rows = [batch_head // key_heads, batch_head % key_heads, first, 0]
        store_tile(args.grad_v_desc, rows, grad_tile, grad_v)
        store_tile(args.grad_k_desc, rows, grad_tile, grad_k)
    tma.store_wait(0)


@gluon.jit
def _grad_keys(args, grad_k, grad_v, k, v, step, seen_from, num_query_tiles, CONFIG: gl.constexpr):
    """dK and dV with the parts of one head's queries from tile `seen_from` on added."""
    DIM: gl.constexpr = args.q_tiles.shape[2]
    dtype: gl.constexpr = args.q_tiles.dtype
    SCORES: gl.constexpr = accumulator_layout(ROWS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(DIM), 2)
    # nothing to multiply before the first tile's dS
    operand = gl.convert_layout(gl.zeros([ROWS, ROWS], dtype, SCORES), OPERAND)

    # the first tile of queries: under a causal mask that on the diagonal
    left = args.sizes.num_queries - seen_from * ROWS
    grad_k, grad_v, operand = _grad_keys_step(
        args,
        grad_k,
        grad_v,
        operand,
        k,
        v,
        step,
        left,
        CONFIG,
        IS_FIRST=True,
        IS_DIAGONAL=CONFIG.IS_CAUSAL,
        IS_WHOLE=CONFIG.IS_EVEN,
    )
    # whole tiles
    last = step + num_query_tiles - seen_from - 1
    whole_until = last + 1 if CONFIG.IS_EVEN else last
    for i in range(step + 1, whole_until):
        grad_k, grad_v, operand = _grad_keys_step(
            args, grad_k, grad_v, operand, k, v, i, ROWS, CONFIG
        )
    # a partial last tile, unless it was the first
    if not CONFIG.IS_EVEN:
        for i in range(gl.maximum(step + 1, last), last + 1):
            left = args.sizes.num_queries - (num_query_tiles - 1) * ROWS
            grad_k, grad_v, operand = _grad_keys_step(
                args, grad_k, grad_v, operand, k, v, i, left, CONFIG, IS_WHOLE=False
            )

    # the last tile's part of dK
    slot = last % CONFIG.STAGES
    grad_k = warpgroup_mma(operand, args.q_tiles.index(slot), grad_k, is_async=True)
    grad_k, operand = warpgroup_mma_wait(0, [grad_k, operand])
    mbarrier.arrive(args.q_ring.empty.index(slot))
    return grad_k, grad_v


@gluon.jit
def _grad_keys_step(
    args,
    grad_k,
    grad_v,
    operand,
    k,
    v,
    step,
    queries_left,
    CONFIG: gl.constexpr,
    IS_FIRST: gl.constexpr = False,
    IS_DIAGONAL: gl.constexpr = False,
    IS_WHOLE: gl.constexpr = True,
):
    """Add a tile of queries' part of dV, and the previous tile's part of dK; return this tile's dS.

    All tiles are (keys, queries), so that nothing that was computed has to be transposed.
    """
    DIM: gl.constexpr = args.q_tiles.shape[2]
    dtype: gl.constexpr = args.q_tiles.dtype
    SCORES: gl.constexpr = accumulator_layout(ROWS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(DIM), 2)
    SCORES_COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    previous = (step + CONFIG.STAGES - 1) % CONFIG.STAGES
    slot = wait_until_full(args.q_ring, step, CONFIG)
    q_tile = args.q_tiles.index(slot)
    grad_out_tile = args.grad_out_tiles.index(slot)

    # issue S, then dP, then the previous tile's part of dK
    zeros = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    scores = warpgroup_mma(k, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    # dP - delta: the sum of a matmul can start anywhere
    minus_delta = gl.expand_dims(args.minus_delta_tiles.index(slot).load(SCORES_COLUMN), 0)
    grad_p, _ = gl.broadcast(minus_delta, zeros)
    grad_p = warpgroup_mma(v, grad_out_tile.permute((1, 0)), grad_p, is_async=True)
    if not IS_FIRST:
        grad_k = warpgroup_mma(operand, args.q_tiles.index(previous), grad_k, is_async=True)

    # P, for which only S is needed
    lse = args.lse_tiles.index(slot).load(SCORES_COLUMN)
    scores = warpgroup_mma_wait(1 if IS_FIRST else 2, [scores])
    p = gl.exp2(scores * args.scale_log2 - gl.expand_dims(lse, 0))
    query = gl.expand_dims(gl.arange(0, ROWS, SCORES_COLUMN), 0)
    if IS_DIAGONAL:
        # the tile's first query and first key have the same number
        key = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)), 1)
        p = gl.where(key <= query, p, 0.0)
    if not IS_WHOLE:
        # past the last query q is 0, and 0 times a key of -inf is NaN
        p = gl.where(query < queries_left, p, 0.0)

    # dV, and dS while it runs
    p_operand = gl.convert_layout(p.to(dtype), OPERAND)
    grad_v = warpgroup_mma(p_operand, grad_out_tile, grad_v, is_async=True)
    if IS_FIRST:
        grad_p = warpgroup_mma_wait(1, [grad_p])
    else:
        grad_p, grad_k, operand = warpgroup_mma_wait(1, [grad_p, grad_k, operand])
        mbarrier.arrive(args.q_ring.empty.index(previous))
    grad_scores = p * grad_p
    operand = gl.convert_layout(grad_scores.to(dtype), OPERAND)
    grad_v, p_operand = warpgroup_mma_wait(0, [grad_v, p_operand])
    return grad_k, grad_v, operand


@gluon.jit
def _one_gradient_partition(args, IS_VALUES: gl.constexpr, CONFIG: gl.constexpr):
    """Compute dV, or dK, of 64 keys at a time: both of wide heads would not fit the registers."""
    sizes = args.sizes
    DIM: gl.constexpr = args.k_tiles.shape[2]
    OUT: gl.constexpr = accumulator_layout(DIM)
    num_query_tiles = (sizes.num_queries + ROWS - 1) // ROWS
    key_heads = sizes.heads // sizes.group
    step = 0
    item = own_item(args.work_list_ptr, 0)
    for index in range(num_own_items(args.work_list_ptr)):
        tile, batch_head, item = take_item(args, item, index, False)
        first = tile * ROWS
        seen_from = first_query_tile(first, num_query_tiles, CONFIG)
        acc = gl.zeros([ROWS, DIM], gl.float32, OUT)
        mbarrier.wait(args.k_ring.full.index(0), index & 1)
        # the queries of every head that shares these keys
        for _member in range(sizes.group):
            for query_tile in range(seen_from, num_query_tiles):
                if IS_VALUES:
                    acc = _grad_values_step(args, acc, first, query_tile * ROWS, step, CONFIG)
                else:
                    acc = _grad_keys_only_step(args, acc, step, CONFIG)
                step += 1

        # k is read for dV only, and v for dK only
        rows = [batch_head // key_heads, batch_head % key_heads, first, 0]
        if IS_VALUES:
            store_tile(args.grad_v_desc, rows, args.k_tiles.index(0), acc)
        else:
            acc = acc * args.scale
            if CONFIG.HAS_ROPE:
                acc = unrotate(
                    acc, first, args.cos_ptr, args.sin_ptr, sizes.num_keys, OUT, CONFIG.HEAD_DIM
                )
            store_tile(args.grad_k_desc, rows, args.v_tiles.index(0), acc)
        release_copied(args.k_ring.empty.index(0))


@gluon.jit
def _grad_values_step(args, acc, first, first_query, step, CONFIG: gl.constexpr):
    """Add a tile of queries' part of dV, and hand P to the other warpgroup."""
    dtype: gl.constexpr = args.q_tiles.dtype
    SCORES: gl.constexpr = accumulator_layout(ROWS)
    DIM: gl.constexpr = args.q_tiles.shape[2]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(DIM), 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    slot = wait_until_full(args.q_ring, step, CONFIG)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    scores = times_transposed(args.k_tiles.index(0), args.q_tiles.index(slot), zeros, CONFIG)
    lse = args.lse_tiles.index(slot).load(COLUMN)
    scores = warpgroup_mma_wait(0, [scores])
    p = gl.exp2(scores * args.scale_log2 - gl.expand_dims(lse, 0))  # (keys, queries)
    query = gl.expand_dims(first_query + gl.arange(0, ROWS, COLUMN), 0)
    if CONFIG.IS_CAUSAL:
        key = gl.expand_dims(first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)), 1)
        p = gl.where(query >= key, p, 0.0)
    if first_query + ROWS > args.sizes.num_queries:
        # past the last query q is 0, and 0 times a key of -inf is NaN
        p = gl.where(query < args.sizes.num_queries, p, 0.0)

    p = p.to(dtype)
    p_operand = gl.convert_layout(p, OPERAND)
    acc = warpgroup_mma(p_operand, args.grad_out_tiles.index(slot), acc, is_async=True)
    args.p_tiles.index(slot).store(p)
    fence_async_shared()
    barrier()
    mbarrier.arrive(args.p_full.index(slot))
    acc, p_operand = warpgroup_mma_wait(0, [acc, p_operand])
    mbarrier.arrive(args.q_ring.empty.index(slot))
    return acc


@gluon.jit
def _grad_keys_only_step(args, acc, step, CONFIG: gl.constexpr):
    """Add a tile of queries' part of dK, with P from the other warpgroup."""
    dtype: gl.constexpr = args.q_tiles.dtype
    SCORES: gl.constexpr = accumulator_layout(ROWS)
    DIM: gl.constexpr = args.q_tiles.shape[2]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(DIM), 2)
    slot = wait_until_full(args.q_ring, step, CONFIG)
    minus_delta = args.minus_delta_tiles.index(slot).load(gl.SliceLayout(0, SCORES))
    # dP - delta: the sum of a matmul can start anywhere
    zeros = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    grad_p, _ = gl.broadcast(gl.expand_dims(minus_delta, 0), zeros)
    v, grad_out = args.v_tiles.index(0), args.grad_out_tiles.index(slot)
    grad_p = times_transposed(v, grad_out, grad_p, CONFIG, HAS_START=True)
    mbarrier.wait(args.p_full.index(slot), step // CONFIG.STAGES & 1)
    p = args.p_tiles.index(slot).load(SCORES).to(gl.float32)  # (keys, queries)
    grad_p = warpgroup_mma_wait(0, [grad_p])
    operand = gl.convert_layout((p * grad_p).to(dtype), OPERAND)
    acc = warpgroup_mma(operand, args.q_tiles.index(slot), acc, is_async=True)
    acc, operand = warpgroup_mma_wait(0, [acc, operand])
    mbarrier.arrive(args.q_ring.empty.index(slot))
    return acc
