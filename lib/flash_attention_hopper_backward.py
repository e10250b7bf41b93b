"""The backward kernels of attention for Hopper GPUs; see `lib.flash_attention_hopper`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lib.flash_attention_hopper_parts import (
    LOAD_REGISTERS,
    LOG2_E,
    ROWS,
    SIZES,
    first_query,
    first_query_tile,
    left_factor,
    make_barriers,
    num_key_tiles_seen,
    num_turns,
    part_of_queries,
    store_tile,
    tile_and_head,
    two_products,
    visible_keys,
    wait_until_empty,
    wait_until_full,
    work_item,
)


@gluon.jit
def _load_for_queries(given, CUT: gl.constexpr):
    """One warp that asks for copies of queries, dO, keys and values, last keys first."""
    descriptors, tiles, barriers, sizes = given
    WARPGROUPS: gl.constexpr = CUT[0]
    KEYS: gl.constexpr = CUT[1]
    STAGES: gl.constexpr = CUT[2]
    IS_CAUSAL: gl.constexpr = CUT[3]
    IS_LISTED: gl.constexpr = CUT[6]
    q_desc, grad_out_desc, k_desc, v_desc = descriptors
    q_tiles, grad_out_tiles, k_tiles, v_tiles, _ = tiles
    q_full, q_empty, full, empty = barriers
    order_ptr, num_tiles, heads, group, section, num_items, num_queries, num_keys = sizes
    TILE_Q: gl.constexpr = WARPGROUPS * ROWS
    step = 0
    following_item = work_item(order_ptr, 0, IS_LISTED)
    for turn in range(num_turns(order_ptr, IS_LISTED)):
        item = following_item
        # asked for long before it is needed
        following_item = work_item(order_ptr, turn + 1, IS_LISTED)
        tile, batch_head = tile_and_head(item, num_tiles, num_items, section, IS_CAUSAL)
        batch = batch_head // heads
        head = batch_head % heads
        first = first_query(tile, num_tiles, num_queries, WARPGROUPS, IS_CAUSAL)
        for i in gl.static_range(WARPGROUPS):
            mbarrier.wait(q_empty.index(i), turn & 1 ^ 1)
            mbarrier.expect(q_full.index(i), 2 * q_desc.block_type.nbytes)
            place = [batch, head, first + i * ROWS, 0]
            tma.async_copy_global_to_shared(q_desc, place, q_full.index(i), q_tiles.index(i))
            tma.async_copy_global_to_shared(
                grad_out_desc, place, q_full.index(i), grad_out_tiles.index(i)
            )
        last_query = gl.minimum(first + TILE_Q, num_queries) - 1
        num_key_tiles = num_key_tiles_seen(last_query, num_keys, IS_CAUSAL, KEYS)
        for i in range(num_key_tiles):
            slot = wait_until_empty(empty, step + i, STAGES)
            mbarrier.expect(full.index(slot), 2 * k_desc.block_type.nbytes)
            place = [batch, head // group, (num_key_tiles - 1 - i) * KEYS, 0]
            tma.async_copy_global_to_shared(k_desc, place, full.index(slot), k_tiles.index(slot))
            tma.async_copy_global_to_shared(v_desc, place, full.index(slot), v_tiles.index(slot))
        step += num_key_tiles


@gluon.jit
def _turned_back(x, first, angles, num_rows, LAYOUT: gl.constexpr):
    """The gradient of rows before RoPE turned them by their positions, from that after."""
    cos_ptr, sin_ptr = angles
    HALF: gl.constexpr = x.shape[1] // 2
    even, odd = gl.split(gl.reshape(x, [ROWS, HALF, 2]))
    PAIRS: gl.constexpr = even.type.layout
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, PAIRS)), 1)
    places = row * HALF + gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, PAIRS)), 0)
    start = gl.cast(first, gl.int64) * HALF
    cos = gl.load(cos_ptr + start + places, first + row < num_rows, other=0.0)
    sin = gl.load(sin_ptr + start + places, first + row < num_rows, other=0.0)
    turned = gl.join(even * cos + odd * sin, odd * cos - even * sin)
    return gl.convert_layout(gl.reshape(turned, [ROWS, 2 * HALF]), LAYOUT)


@gluon.jit
def _grad_queries_partition(given, PART: gl.constexpr, CUT: gl.constexpr):
    """A warpgroup that computes dQ of 64 queries at a time.

    And what the other kernel needs of them: -delta = -rowsum(dO ∘ O), log-sum-exp in base 2.
    """
    grad_q_desc, row_ptrs, angles, strides, scales, tiles, barriers, sizes, padded = given
    out_ptr, lse_ptr, lse_log2_ptr, minus_delta_ptr = row_ptrs
    WARPGROUPS: gl.constexpr = CUT[0]
    KEYS: gl.constexpr = CUT[1]
    STAGES: gl.constexpr = CUT[2]
    IS_CAUSAL: gl.constexpr = CUT[3]
    IS_EVEN: gl.constexpr = CUT[4]
    KEPT: gl.constexpr = CUT[5]
    IS_LISTED: gl.constexpr = CUT[6]
    IS_TURNED: gl.constexpr = CUT[7]
    q_tiles, grad_out_tiles, k_tiles, v_tiles, grad_q_tiles = tiles
    q_full, q_empty, full, empty = barriers
    order_ptr, num_tiles, heads, _, section, num_items, num_queries, num_keys = sizes
    out_batch, out_head, out_token = strides
    scale, scale_log2 = scales
    DIM: gl.constexpr = grad_q_tiles.shape[2]
    dtype: gl.constexpr = grad_q_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    OF_SCORES: gl.constexpr = gl.SliceLayout(1, SCORES)
    # 16 bytes per thread
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    grad_out_tile = grad_out_tiles.index(PART)
    grad_q_tile = grad_q_tiles.index(PART)

    step = 0
    following_item = work_item(order_ptr, 0, IS_LISTED)
    for turn in range(num_turns(order_ptr, IS_LISTED)):
        item = following_item
        # asked for long before it is needed
        following_item = work_item(order_ptr, turn + 1, IS_LISTED)
        tile, batch_head = tile_and_head(item, num_tiles, num_items, section, IS_CAUSAL)
        batch = batch_head // heads
        head = batch_head % heads
        first, seen, loaded = part_of_queries(
            tile, num_tiles, num_queries, num_keys, PART, WARPGROUPS, KEYS, IS_CAUSAL
        )
        # tiles of keys for other warpgroups only
        for i in range(step, step + loaded - seen):
            mbarrier.arrive(empty.index(wait_until_full(full, i, STAGES)))
        step += loaded - seen
        if seen > 0:
            row = first + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
            column = gl.arange(0, DIM, gl.SliceLayout(0, COPY))
            start = gl.cast(batch, gl.int64) * out_batch + gl.cast(head, gl.int64) * out_head
            places = gl.expand_dims(gl.cast(row, gl.int64) * out_token, 1)
            places = places + gl.expand_dims(column, 0)
            inside = gl.expand_dims(row < num_queries, 1)
            out = gl.load(out_ptr + start + places, inside, other=0.0)
            row = first + gl.arange(0, ROWS, OF_SCORES)
            lse_ptrs = lse_ptr + gl.cast(batch_head, gl.int64) * num_queries + row
            # past the last query an infinite log-sum-exp makes every probability 0
            lse = gl.load(lse_ptrs, row < num_queries, other=float("inf")) * LOG2_E
            # and so where a query sees nothing but scores of -inf
            lse = gl.where(lse == -float("inf"), float("inf"), lse)
            mbarrier.wait(q_full.index(PART), turn & 1)
            q = left_factor(q_tiles.index(PART), KEPT >= 1, SCORES)
            grad_out = left_factor(grad_out_tile, KEPT >= 2, SCORES)
            delta = gl.sum(out.to(gl.float32) * grad_out_tile.load(COPY).to(gl.float32), 1)
            delta = gl.convert_layout(delta, OF_SCORES)
            kept = gl.cast(batch_head, gl.int64) * padded + row
            gl.store(lse_log2_ptr + kept, lse)
            gl.store(minus_delta_ptr + kept, -delta)

            slot = wait_until_full(full, step, STAGES)
            scores, grad_p = two_products(
                q, k_tiles.index(slot), grad_out, v_tiles.index(slot), SCORES
            )
            scores, grad_p = warpgroup_mma_wait(0, [scores, grad_p])
            p = gl.exp2(scores * scale_log2 - gl.expand_dims(lse, 1))
            # of the tiles that a warpgroup sees only its last, the first here, can need a mask
            if IS_CAUSAL or not IS_EVEN:
                first_key = (seen - 1) * KEYS
                visible = visible_keys(first, first_key, num_keys, KEYS, IS_CAUSAL, SCORES)
                p = gl.where(visible, p, 0.0)
            grad_scores = p * (grad_p - gl.expand_dims(delta, 1))
            factor = gl.convert_layout(grad_scores.to(dtype), FACTOR)
            acc = gl.zeros([ROWS, DIM], gl.float32, OUT)
            last = step + seen - 1
            following = (step + 1) % STAGES
            mbarrier.wait(full.index(following), (step + 1) // STAGES & 1, pred=step < last)
            for i in range(step, last):
                slot = i % STAGES
                following = (i + 1) % STAGES
                scores, grad_p = two_products(
                    q,
                    k_tiles.index(following),
                    grad_out,
                    v_tiles.index(following),
                    SCORES,
                )
                acc = warpgroup_mma(factor, k_tiles.index(slot), acc, is_async=True)
                scores, grad_p = warpgroup_mma_wait(1, [scores, grad_p])
                p = gl.exp2(scores * scale_log2 - gl.expand_dims(lse, 1))
                grad_scores = p * (grad_p - gl.expand_dims(delta, 1))
                # here, as the assembler puts the softmax after the next wait, but not after a loop
                next_slot = (i + 2) % STAGES
                mbarrier.wait(full.index(next_slot), (i + 2) // STAGES & 1, pred=i + 1 < last)
                acc, factor, grad_scores = warpgroup_mma_wait(0, [acc, factor, grad_scores])
                mbarrier.arrive(empty.index(slot))
                factor = gl.convert_layout(grad_scores.to(dtype), FACTOR)
            mbarrier.arrive(q_empty.index(PART))
            acc = warpgroup_mma(factor, k_tiles.index(last % STAGES), acc, is_async=True)
            acc, factor = warpgroup_mma_wait(0, [acc, factor])
            mbarrier.arrive(empty.index(last % STAGES))
            step = last + 1
            grad_q = acc * scale
            if IS_TURNED:
                grad_q = _turned_back(grad_q, first, angles, num_queries, OUT)
            store_tile(grad_q_desc, [batch, head, first, 0], grad_q_tile, grad_q)
        else:
            mbarrier.wait(q_full.index(PART), turn & 1)
            mbarrier.arrive(q_empty.index(PART))
    tma.store_wait(0)


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
    order_ptr,
    num_tiles,
    heads,
    group,
    section,
    num_items,
    num_queries,
    num_keys,
    padded,
    scale,
    WARPGROUPS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_EVEN: gl.constexpr,
    KEPT: gl.constexpr,
    IS_LISTED: gl.constexpr,
    IS_TURNED: gl.constexpr,
):
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, DIM], TILE)
    grad_out_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, DIM], TILE)
    grad_q_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, DIM], TILE)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], TILE)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], TILE)
    q_full = make_barriers(WARPGROUPS, 1)
    q_empty = make_barriers(WARPGROUPS, 1)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, WARPGROUPS)
    sizes = (order_ptr, num_tiles, heads, group, section, num_items, num_queries, num_keys)
    tiles = (q_tiles, grad_out_tiles, k_tiles, v_tiles, grad_q_tiles)
    barriers = (q_full, q_empty, full, empty)
    descriptors = (q_desc, grad_out_desc, k_desc, v_desc)
    strides = (out_batch, out_head, out_token)
    scales = (scale, scale * LOG2_E)
    CUT: gl.constexpr = (WARPGROUPS, KEYS, STAGES, IS_CAUSAL, IS_EVEN, KEPT, IS_LISTED, IS_TURNED)
    row_ptrs = (out_ptr, lse_ptr, lse_log2_ptr, minus_delta_ptr)
    given = (
        grad_q_desc,
        row_ptrs,
        (cos_ptr, sin_ptr),
        strides,
        scales,
        tiles,
        barriers,
        sizes,
        padded,
    )
    load = (descriptors, tiles, barriers, sizes)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_grad_queries_partition, (given, 0, CUT)),
                (_grad_queries_partition, (given, 1, CUT)),
                (_load_for_queries, (load, CUT)),
            ],
            [4, 1],
            [REGISTERS, LOAD_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_grad_queries_partition, (given, 0, CUT)),
                (_grad_queries_partition, (given, 1, CUT)),
                (_grad_queries_partition, (given, 2, CUT)),
                (_load_for_queries, (load, CUT)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOAD_REGISTERS],
        )


@gluon.jit
def _load_for_keys(given, CUT: gl.constexpr):
    """One warp that asks for copies of keys, values, and queries with all that goes with them."""
    descriptors, tiles, barriers, sizes, padded = given
    WARPGROUPS: gl.constexpr = CUT[0]
    STAGES: gl.constexpr = CUT[1]
    IS_CAUSAL: gl.constexpr = CUT[2]
    IS_LISTED: gl.constexpr = CUT[5]
    q_desc, grad_out_desc, lse_desc, minus_delta_desc, k_desc, v_desc = descriptors
    q_tiles, grad_out_tiles, lse_tiles, minus_delta_tiles, k_tiles, v_tiles, _ = tiles
    k_full, k_empty, full, empty = barriers
    order_ptr, num_tiles, heads, group, section, num_items, num_queries, _ = sizes
    num_query_tiles = (num_queries + ROWS - 1) // ROWS
    step = 0
    following_item = work_item(order_ptr, 0, IS_LISTED)
    for turn in range(num_turns(order_ptr, IS_LISTED)):
        item = following_item
        # asked for long before it is needed
        following_item = work_item(order_ptr, turn + 1, IS_LISTED)
        # the first keys are seen by most queries
        tile, batch_head = tile_and_head(item, num_tiles, num_items, section, False)
        key_heads = heads // group
        batch = batch_head // key_heads
        key_head = batch_head % key_heads
        first = tile * (WARPGROUPS * ROWS)
        for i in gl.static_range(WARPGROUPS):
            mbarrier.wait(k_empty.index(i), turn & 1 ^ 1)
            mbarrier.expect(k_full.index(i), 2 * k_desc.block_type.nbytes)
            place = [batch, key_head, first + i * ROWS, 0]
            tma.async_copy_global_to_shared(k_desc, place, k_full.index(i), k_tiles.index(i))
            tma.async_copy_global_to_shared(v_desc, place, k_full.index(i), v_tiles.index(i))
        first_tile = first_query_tile(first, num_query_tiles, IS_CAUSAL)
        for member in range(group):
            head = key_head * group + member
            for query_tile in range(first_tile, num_query_tiles):
                slot = wait_until_empty(empty, step, STAGES)
                bar = full.index(slot)
                mbarrier.expect(bar, 2 * q_desc.block_type.nbytes + 2 * lse_desc.block_type.nbytes)
                rows = [batch, head, query_tile * ROWS, 0]
                tma.async_copy_global_to_shared(q_desc, rows, bar, q_tiles.index(slot))
                tma.async_copy_global_to_shared(
                    grad_out_desc, rows, bar, grad_out_tiles.index(slot)
                )
                number = (batch * heads + head) * padded + query_tile * ROWS
                tma.async_copy_global_to_shared(lse_desc, [number], bar, lse_tiles.index(slot))
                tma.async_copy_global_to_shared(
                    minus_delta_desc, [number], bar, minus_delta_tiles.index(slot)
                )
                step += 1


@gluon.jit
def _grad_keys_step(
    grad_k,
    grad_v,
    factor,
    step,
    queries_left,
    inputs,
    STAGES: gl.constexpr,
    IS_FIRST: gl.constexpr,
    IS_DIAGONAL: gl.constexpr,
    IS_WHOLE: gl.constexpr,
):
    """A tile of queries' part of dV, and of dK that of the tile before; the factor of its own.

    Everything is (keys, queries), so that no product needs a transpose of what was computed.
    """
    k, v, scale_log2, tiles, barriers = inputs
    q_tiles, grad_out_tiles, lse_tiles, minus_delta_tiles, _, _, _ = tiles
    _, _, full, empty = barriers
    DIM: gl.constexpr = q_tiles.shape[2]
    dtype: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    OF_QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    before = (step + STAGES - 1) % STAGES
    slot = wait_until_full(full, step, STAGES)
    q_tile = q_tiles.index(slot)
    grad_out_tile = grad_out_tiles.index(slot)
    nothing = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    scores = warpgroup_mma(k, q_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    # dP - delta, as the sum of products can begin anywhere
    minus_delta = gl.expand_dims(minus_delta_tiles.index(slot).load(OF_QUERIES), 0)
    grad_p, _ = gl.broadcast(minus_delta, nothing)
    grad_p = warpgroup_mma(v, grad_out_tile.permute((1, 0)), grad_p, is_async=True)
    if not IS_FIRST:
        grad_k = warpgroup_mma(factor, q_tiles.index(before), grad_k, is_async=True)
    lse = lse_tiles.index(slot).load(OF_QUERIES)
    scores = warpgroup_mma_wait(1 if IS_FIRST else 2, [scores])
    p = gl.exp2(scores * scale_log2 - gl.expand_dims(lse, 0))
    query = gl.expand_dims(gl.arange(0, ROWS, OF_QUERIES), 0)
    if IS_DIAGONAL:
        # the tile of queries that begins with the first key
        key = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)), 1)
        p = gl.where(key <= query, p, 0.0)
    if not IS_WHOLE:
        # a key of -inf times the zeros past the last query is NaN
        p = gl.where(query < queries_left, p, 0.0)
    of_v = gl.convert_layout(p.to(dtype), FACTOR)
    grad_v = warpgroup_mma(of_v, grad_out_tile, grad_v, is_async=True)
    if IS_FIRST:
        grad_p = warpgroup_mma_wait(1, [grad_p])
    else:
        grad_p, grad_k, factor = warpgroup_mma_wait(1, [grad_p, grad_k, factor])
        mbarrier.arrive(empty.index(before))
    grad_scores = p * grad_p
    factor = gl.convert_layout(grad_scores.to(dtype), FACTOR)
    grad_v, of_v = warpgroup_mma_wait(0, [grad_v, of_v])
    return grad_k, grad_v, factor


@gluon.jit
def _grad_keys_partition(given, PART: gl.constexpr, CUT: gl.constexpr):
    """A warpgroup that computes dK and dV of 64 keys at a time."""
    grad_k_desc, grad_v_desc, angles, scales, tiles, barriers, sizes = given
    WARPGROUPS: gl.constexpr = CUT[0]
    STAGES: gl.constexpr = CUT[1]
    IS_CAUSAL: gl.constexpr = CUT[2]
    IS_EVEN: gl.constexpr = CUT[3]
    KEPT: gl.constexpr = CUT[4]
    IS_LISTED: gl.constexpr = CUT[5]
    IS_TURNED: gl.constexpr = CUT[6]
    q_tiles, _, _, _, k_tiles, v_tiles, grad_tiles = tiles
    k_full, k_empty, full, empty = barriers
    order_ptr, num_tiles, heads, group, section, num_items, num_queries, num_keys = sizes
    scale, scale_log2 = scales
    DIM: gl.constexpr = k_tiles.shape[2]
    dtype: gl.constexpr = k_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    grad_tile = grad_tiles.index(PART)
    num_query_tiles = (num_queries + ROWS - 1) // ROWS
    step = 0
    following_item = work_item(order_ptr, 0, IS_LISTED)
    for turn in range(num_turns(order_ptr, IS_LISTED)):
        item = following_item
        # asked for long before it is needed
        following_item = work_item(order_ptr, turn + 1, IS_LISTED)
        tile, batch_head = tile_and_head(item, num_tiles, num_items, section, False)
        key_heads = heads // group
        first = tile * (WARPGROUPS * ROWS)
        loaded_from = first_query_tile(first, num_query_tiles, IS_CAUSAL)
        first += PART * ROWS
        seen_from = first_query_tile(first, num_query_tiles, IS_CAUSAL)
        seen_from = gl.where(first < num_keys, seen_from, num_query_tiles)
        grad_k = gl.zeros([ROWS, DIM], gl.float32, OUT)
        grad_v = gl.zeros([ROWS, DIM], gl.float32, OUT)
        mbarrier.wait(k_full.index(PART), turn & 1)
        k = left_factor(k_tiles.index(PART), KEPT >= 1, SCORES)
        v = left_factor(v_tiles.index(PART), KEPT >= 2, SCORES)
        inputs = (k, v, scale_log2, tiles, barriers)
        for _member in range(group):
            # tiles of queries for other warpgroups only
            for i in range(step, step + seen_from - loaded_from):
                mbarrier.arrive(empty.index(wait_until_full(full, i, STAGES)))
            step += seen_from - loaded_from
            if seen_from < num_query_tiles:
                # no product comes before the first
                factor = gl.convert_layout(gl.zeros([ROWS, ROWS], dtype, SCORES), FACTOR)
                left = num_queries - seen_from * ROWS
                grad_k, grad_v, factor = _grad_keys_step(
                    grad_k, grad_v, factor, step, left, inputs, STAGES, True, IS_CAUSAL, IS_EVEN
                )
                last = step + num_query_tiles - seen_from - 1
                whole_until = last + 1 if IS_EVEN else last
                for i in range(step + 1, whole_until):
                    grad_k, grad_v, factor = _grad_keys_step(
                        grad_k, grad_v, factor, i, ROWS, inputs, STAGES, False, False, True
                    )
                if not IS_EVEN:
                    # once, or not at all where the first is the last
                    for i in range(gl.maximum(step + 1, last), last + 1):
                        left = num_queries - (num_query_tiles - 1) * ROWS
                        grad_k, grad_v, factor = _grad_keys_step(
                            grad_k, grad_v, factor, i, left, inputs, STAGES, False, False, False
                        )
                slot = last % STAGES
                grad_k = warpgroup_mma(factor, q_tiles.index(slot), grad_k, is_async=True)
                grad_k, factor = warpgroup_mma_wait(0, [grad_k, factor])
                mbarrier.arrive(empty.index(slot))
                step = last + 1
        mbarrier.arrive(k_empty.index(PART))
        grad_k = grad_k * scale
        if IS_TURNED:
            grad_k = _turned_back(grad_k, first, angles, num_keys, OUT)
        place = [batch_head // key_heads, batch_head % key_heads, first, 0]
        store_tile(grad_v_desc, place, grad_tile, grad_v)
        store_tile(grad_k_desc, place, grad_tile, grad_k)
    tma.store_wait(0)


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
    order_ptr,
    num_tiles,
    heads,
    group,
    section,
    num_items,
    num_queries,
    num_keys,
    padded,
    scale,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_EVEN: gl.constexpr,
    KEPT: gl.constexpr,
    IS_LISTED: gl.constexpr,
    IS_TURNED: gl.constexpr,
):
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, DIM], TILE)
    v_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, DIM], TILE)
    grad_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, DIM], TILE)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DIM], TILE)
    grad_out_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DIM], TILE)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout)
    minus_delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout)
    k_full = make_barriers(WARPGROUPS, 1)
    k_empty = make_barriers(WARPGROUPS, 1)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, WARPGROUPS)
    sizes = (order_ptr, num_tiles, heads, group, section, num_items, num_queries, num_keys)
    tiles = (
        q_tiles,
        grad_out_tiles,
        lse_tiles,
        minus_delta_tiles,
        k_tiles,
        v_tiles,
        grad_tiles,
    )
    barriers = (k_full, k_empty, full, empty)
    descriptors = (q_desc, grad_out_desc, lse_desc, minus_delta_desc, k_desc, v_desc)
    scales = (scale, scale * LOG2_E)
    CUT: gl.constexpr = (WARPGROUPS, STAGES, IS_CAUSAL, IS_EVEN, KEPT, IS_LISTED, IS_TURNED)
    given = (grad_k_desc, grad_v_desc, (cos_ptr, sin_ptr), scales, tiles, barriers, sizes)
    load = (descriptors, tiles, barriers, sizes, padded)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_grad_keys_partition, (given, 0, CUT)),
                (_grad_keys_partition, (given, 1, CUT)),
                (_load_for_keys, (load, CUT)),
            ],
            [4, 1],
            [REGISTERS, LOAD_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_grad_keys_partition, (given, 0, CUT)),
                (_grad_keys_partition, (given, 1, CUT)),
                (_grad_keys_partition, (given, 2, CUT)),
                (_load_for_keys, (load, CUT)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOAD_REGISTERS],
        )
