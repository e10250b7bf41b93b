"""The forward kernel of attention for Hopper GPUs; see `lib.flash_attention_hopper`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lib.flash_attention_hopper_parts import (
    LN_2,
    LOAD_REGISTERS,
    LOG2_E,
    ROWS,
    SIZES,
    first_query,
    left_factor,
    load_tile,
    make_barriers,
    num_key_tiles_seen,
    num_turns,
    part_of_queries,
    pass_turn,
    store_tile,
    take_turn,
    tile_and_head,
    visible_keys,
    wait_until_empty,
    wait_until_full,
    work_item,
)


@gluon.jit
def _load_partition(given, CUT: gl.constexpr):
    """One warp that asks for copies of queries, keys and values, last keys first."""
    descriptors, tiles, barriers, sizes = given
    WARPGROUPS: gl.constexpr = CUT[0]
    KEYS: gl.constexpr = CUT[1]
    STAGES: gl.constexpr = CUT[2]
    IS_CAUSAL: gl.constexpr = CUT[3]
    IS_LISTED: gl.constexpr = CUT[7]
    q_desc, k_desc, v_desc = descriptors
    q_tiles, k_tiles, v_tiles, _ = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = barriers
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
        key_head = head // group
        first = first_query(tile, num_tiles, num_queries, WARPGROUPS, IS_CAUSAL)
        for i in gl.static_range(WARPGROUPS):
            mbarrier.wait(q_empty.index(i), turn & 1 ^ 1)
            place = [batch, head, first + i * ROWS, 0]
            load_tile(q_desc, place, q_full.index(i), q_tiles.index(i))
        last_query = gl.minimum(first + TILE_Q, num_queries) - 1
        num_key_tiles = num_key_tiles_seen(last_query, num_keys, IS_CAUSAL, KEYS)
        # keys are asked for one tile ahead of values, as they are used
        for i in range(num_key_tiles + 1):
            if i < num_key_tiles:
                slot = wait_until_empty(k_empty, step + i, STAGES)
                place = [batch, key_head, (num_key_tiles - 1 - i) * KEYS, 0]
                load_tile(k_desc, place, k_full.index(slot), k_tiles.index(slot))
            if i > 0:
                slot = wait_until_empty(v_empty, step + i - 1, STAGES)
                place = [batch, key_head, (num_key_tiles - i) * KEYS, 0]
                load_tile(v_desc, place, v_full.index(slot), v_tiles.index(slot))
        step += num_key_tiles


@gluon.jit
def _lane_sums(x):
    """(rows, keys) summed to (rows, 4): what each of a row's four threads holds.

    In short chains of additions, as each waits for the one before.
    """
    x = gl.reshape(x, [x.shape[0], 4, x.shape[1] // 32, 4, 2])
    return gl.sum(gl.sum(gl.sum(x, 4), 2), 1)


@gluon.jit
def _row_max(x, LAYOUT: gl.constexpr):
    """The greatest of each row, in the layout of a column."""
    x = gl.reshape(x, [x.shape[0], 4, x.shape[1] // 32, 4, 2])
    x = gl.max(gl.max(gl.max(x, 4), 2), 1)
    return gl.convert_layout(gl.max(x, 1), LAYOUT)


@gluon.jit
def _attend_partition(given, PART: gl.constexpr, CUT: gl.constexpr):
    """A warpgroup that computes the output of 64 queries at a time (Algorithm 2)."""
    out_desc, lse_ptr, scale_log2, tiles, barriers, sizes = given
    WARPGROUPS: gl.constexpr = CUT[0]
    KEYS: gl.constexpr = CUT[1]
    STAGES: gl.constexpr = CUT[2]
    IS_CAUSAL: gl.constexpr = CUT[3]
    IS_EVEN: gl.constexpr = CUT[4]
    IS_ORDERED: gl.constexpr = CUT[5]
    KEPT: gl.constexpr = CUT[6]
    IS_LISTED: gl.constexpr = CUT[7]
    q_tiles, k_tiles, v_tiles, out_tiles = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty, order = barriers
    order_ptr, num_tiles, heads, _, section, num_items, num_queries, num_keys = sizes
    DIM: gl.constexpr = out_tiles.shape[2]
    dtype: gl.constexpr = out_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    OF_SCORES: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_OUT: gl.constexpr = gl.SliceLayout(1, OUT)
    out_tile = out_tiles.index(PART)
    no_scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)

    step = 0
    following_item = work_item(order_ptr, 0, IS_LISTED)
    for turn in range(num_turns(order_ptr, IS_LISTED)):
        item = following_item
        # asked for long before it is needed
        following_item = work_item(order_ptr, turn + 1, IS_LISTED)
        tile, batch_head = tile_and_head(item, num_tiles, num_items, section, IS_CAUSAL)
        first, seen, loaded = part_of_queries(
            tile, num_tiles, num_queries, num_keys, PART, WARPGROUPS, KEYS, IS_CAUSAL
        )
        # tiles of keys for other warpgroups only
        for i in range(step, step + loaded - seen):
            take_turn(order, i, PART, WARPGROUPS, IS_ORDERED)
            pass_turn(order, PART, WARPGROUPS, IS_ORDERED)
            mbarrier.arrive(k_empty.index(wait_until_full(k_full, i, STAGES)))
            mbarrier.arrive(v_empty.index(wait_until_full(v_full, i, STAGES)))
        step += loaded - seen
        mbarrier.wait(q_full.index(PART), turn & 1)
        if seen > 0:
            q = left_factor(q_tiles.index(PART), KEPT >= 1, SCORES)
            slot = wait_until_full(k_full, step, STAGES)
            take_turn(order, step, PART, WARPGROUPS, IS_ORDERED)
            k = k_tiles.index(slot).permute((1, 0))
            scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
            pass_turn(order, PART, WARPGROUPS, IS_ORDERED)
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(k_empty.index(slot))
            # of the tiles that a warpgroup sees only its last can need a mask
            if IS_CAUSAL or not IS_EVEN:
                first_key = (seen - 1) * KEYS
                visible = visible_keys(first, first_key, num_keys, KEYS, IS_CAUSAL, SCORES)
                scores = gl.where(visible, scores, float("-inf"))
            # not below what is finite: where all scores are -inf, -inf - -inf would be NaN
            row_max = gl.maximum(_row_max(scores, OF_SCORES) * scale_log2, -3.0e38)
            p = gl.exp2(scores * scale_log2 - gl.expand_dims(row_max, 1))
            row_sum = _lane_sums(p)
            factor = gl.convert_layout(p.to(dtype), FACTOR)
            acc = gl.zeros([ROWS, DIM], gl.float32, OUT)
            shrink = gl.full([ROWS], 1.0, gl.float32, OF_SCORES)
            # a constant would let the compiler move the products with it in front of the first wait
            acc, shrink = warpgroup_mma_wait(0, [acc, shrink])

            last = step + seen - 1
            following = (step + 1) % STAGES
            mbarrier.wait(k_full.index(following), (step + 1) // STAGES & 1, pred=step < last)
            for i in range(step, last):
                following = (i + 1) % STAGES
                take_turn(order, i + 1, PART, WARPGROUPS, IS_ORDERED)
                k = k_tiles.index(following).permute((1, 0))
                scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
                slot = wait_until_full(v_full, i, STAGES)
                acc = acc * gl.expand_dims(gl.convert_layout(shrink, OF_OUT), 1)
                acc = warpgroup_mma(factor, v_tiles.index(slot), acc, is_async=True)
                pass_turn(order, PART, WARPGROUPS, IS_ORDERED)
                scores = warpgroup_mma_wait(1, [scores])
                mbarrier.arrive(k_empty.index(following))
                new_max = gl.maximum(row_max, _row_max(scores, OF_SCORES) * scale_log2)
                p = gl.exp2(scores * scale_log2 - gl.expand_dims(new_max, 1))
                shrink = gl.exp2(row_max - new_max)
                row_max = new_max
                shrink_sum = gl.convert_layout(shrink, gl.SliceLayout(1, row_sum.type.layout))
                row_sum = row_sum * gl.expand_dims(shrink_sum, 1) + _lane_sums(p)
                # here, as the assembler puts the softmax after the next wait, but not after a loop
                next_slot = (i + 2) % STAGES
                mbarrier.wait(k_full.index(next_slot), (i + 2) // STAGES & 1, pred=i + 1 < last)
                acc, factor, p, row_sum = warpgroup_mma_wait(0, [acc, factor, p, row_sum])
                mbarrier.arrive(v_empty.index(slot))
                factor = gl.convert_layout(p.to(dtype), FACTOR)
            step = last
            # else the compiler would move the next product, which the loop has too, before both
            acc, shrink = warpgroup_mma_wait(0, [acc, shrink])

            mbarrier.arrive(q_empty.index(PART))
            slot = wait_until_full(v_full, step, STAGES)
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, OF_OUT), 1)
            acc = warpgroup_mma(factor, v_tiles.index(slot), acc, is_async=True)
            total = gl.convert_layout(gl.sum(row_sum, 1), OF_SCORES)
            lse = row_max * LN_2 + gl.log(total)
            row = first + gl.arange(0, ROWS, OF_SCORES)
            places = lse_ptr + gl.cast(batch_head, gl.int64) * num_queries + row
            gl.store(places, lse, row < num_queries)
            # a query that sees keys of score -inf only gets zeros, as one that sees none
            share = gl.convert_layout(1 / gl.where(total == 0, 1.0, total), OF_OUT)
            acc, factor = warpgroup_mma_wait(0, [acc, factor])
            mbarrier.arrive(v_empty.index(slot))
            step += 1
            out = acc * gl.expand_dims(share, 1)
            store_tile(out_desc, [batch_head // heads, batch_head % heads, first, 0], out_tile, out)
        else:
            mbarrier.arrive(q_empty.index(PART))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    order_ptr,
    num_tiles,
    heads,
    group,
    section,
    num_items,
    num_queries,
    num_keys,
    scale,
    WARPGROUPS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_EVEN: gl.constexpr,
    IS_ORDERED: gl.constexpr,
    KEPT: gl.constexpr,
    IS_LISTED: gl.constexpr,
):
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, DIM], TILE)
    out_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, DIM], TILE)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], TILE)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], TILE)
    q_full = make_barriers(WARPGROUPS, 1)
    q_empty = make_barriers(WARPGROUPS, 1)
    k_full = make_barriers(STAGES, 1)
    k_empty = make_barriers(STAGES, WARPGROUPS)
    v_full = make_barriers(STAGES, 1)
    v_empty = make_barriers(STAGES, WARPGROUPS)
    order = make_barriers(WARPGROUPS, 1)
    sizes = (order_ptr, num_tiles, heads, group, section, num_items, num_queries, num_keys)
    tiles = (q_tiles, k_tiles, v_tiles, out_tiles)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, order)
    descriptors = (q_desc, k_desc, v_desc)
    scale_log2 = scale * LOG2_E
    CUT: gl.constexpr = (WARPGROUPS, KEYS, STAGES, IS_CAUSAL, IS_EVEN, IS_ORDERED, KEPT, IS_LISTED)
    given = (out_desc, lse_ptr, scale_log2, tiles, barriers, sizes)
    load = (descriptors, tiles, barriers, sizes)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_attend_partition, (given, 0, CUT)),
                (_attend_partition, (given, 1, CUT)),
                (_load_partition, (load, CUT)),
            ],
            [4, 1],
            [REGISTERS, LOAD_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_partition, (given, 0, CUT)),
                (_attend_partition, (given, 1, CUT)),
                (_attend_partition, (given, 2, CUT)),
                (_load_partition, (load, CUT)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOAD_REGISTERS],
        )
