"""The forward kernel for Hopper GPUs; `lib.flash_attention.hopper.launch` starts it."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lib.flash_attention.hopper.blocks import (
    LN_2,
    LOAD_REGISTERS,
    LOG2_E,
    ROWS,
    SIZES,
    Ring,
    Sizes,
    accumulator_layout,
    first_query,
    is_wide,
    left_operand,
    load_tile,
    make_barriers,
    make_ring,
    num_key_tiles_seen,
    num_own_items,
    own_item,
    part_of_queries,
    pass_turn,
    release_copied,
    store_tile,
    take_item,
    times_transposed,
    visible_keys,
    wait_for_turn,
    wait_until_empty,
    wait_until_full,
)


class ForwardArgs(NamedTuple):
    """Arguments shared by the partitions of the forward kernel."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    out_desc: tma.tensor_descriptor
    lse_ptr: gl.tensor
    scale_log2: gl.tensor
    q_tiles: gl.shared_memory_descriptor
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    out_tiles: gl.shared_memory_descriptor
    q_ring: Ring
    k_ring: Ring
    v_ring: Ring
    turns: gl.shared_memory_descriptor
    work_list_ptr: gl.tensor
    sizes: Sizes


@gluon.jit(do_not_specialize=SIZES)
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    work_list_ptr,
    num_tiles,
    heads,
    group,
    section,
    num_items,
    num_queries,
    num_keys,
    scale,
    CONFIG: gl.constexpr,
):
    """Output and log-sum-exp: one warp loads, two or three warpgroups compute."""
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # a tile of q and one of the output for each warpgroup; rings of keys and of values for all
    q_tiles = gl.allocate_shared_memory(dtype, [CONFIG.WARPGROUPS, ROWS, DIM], TILE)
    out_tiles = q_tiles
    if not is_wide(DIM):
        out_tiles = gl.allocate_shared_memory(dtype, [CONFIG.WARPGROUPS, ROWS, DIM], TILE)
    k_tiles = gl.allocate_shared_memory(dtype, [CONFIG.STAGES, CONFIG.KEYS, DIM], TILE)
    v_tiles = gl.allocate_shared_memory(dtype, [CONFIG.STAGES, CONFIG.KEYS, DIM], TILE)
    q_ring = make_ring(CONFIG.WARPGROUPS, 1)
    k_ring = make_ring(CONFIG.STAGES, CONFIG.WARPGROUPS)
    v_ring = make_ring(CONFIG.STAGES, CONFIG.WARPGROUPS)
    turns = make_barriers(CONFIG.WARPGROUPS, 1)
    args = ForwardArgs(
        q_desc=q_desc,
        k_desc=k_desc,
        v_desc=v_desc,
        out_desc=out_desc,
        lse_ptr=lse_ptr,
        scale_log2=scale * LOG2_E,
        q_tiles=q_tiles,
        k_tiles=k_tiles,
        v_tiles=v_tiles,
        out_tiles=out_tiles,
        q_ring=q_ring,
        k_ring=k_ring,
        v_ring=v_ring,
        turns=turns,
        work_list_ptr=work_list_ptr,
        sizes=Sizes(num_tiles, heads, group, section, num_items, num_queries, num_keys),
    )
    if CONFIG.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_attend_partition, (args, 0, CONFIG)),
                (_attend_partition, (args, 1, CONFIG)),
                (_load_partition, (args, CONFIG)),
            ],
            [4, 1],
            [CONFIG.REGISTERS, LOAD_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_partition, (args, 0, CONFIG)),
                (_attend_partition, (args, 1, CONFIG)),
                (_attend_partition, (args, 2, CONFIG)),
                (_load_partition, (args, CONFIG)),
            ],
            [4, 4, 1],
            [CONFIG.REGISTERS, CONFIG.REGISTERS, LOAD_REGISTERS],
        )


@gluon.jit
def _load_partition(args, CONFIG: gl.constexpr):
    """Load queries, keys and values, last keys first."""
    WARPGROUPS: gl.constexpr = CONFIG.WARPGROUPS
    sizes = args.sizes
    step = 0
    item = own_item(args.work_list_ptr, 0)
    for index in range(num_own_items(args.work_list_ptr)):
        tile, batch_head, item = take_item(args, item, index, CONFIG.IS_CAUSAL)
        batch = batch_head // sizes.heads
        head = batch_head % sizes.heads
        key_head = head // sizes.group

        # 64 queries for each warpgroup, once it is done with those before
        first = first_query(tile, sizes, CONFIG)
        for part in gl.static_range(WARPGROUPS):
            mbarrier.wait(args.q_ring.empty.index(part), index & 1 ^ 1)
            rows = [batch, head, first + part * ROWS, 0]
            load_tile(args.q_desc, rows, args.q_ring.full.index(part), args.q_tiles.index(part))

        last_query = gl.minimum(first + WARPGROUPS * ROWS, sizes.num_queries) - 1
        num_key_tiles = num_key_tiles_seen(last_query, sizes.num_keys, CONFIG)
        # keys are loaded one tile ahead of values, in the order in which they are used
        for i in range(num_key_tiles + 1):
            if i < num_key_tiles:
                slot = wait_until_empty(args.k_ring, step + i, CONFIG)
                rows = [batch, key_head, (num_key_tiles - 1 - i) * CONFIG.KEYS, 0]
                load_tile(args.k_desc, rows, args.k_ring.full.index(slot), args.k_tiles.index(slot))
            if i > 0:
                slot = wait_until_empty(args.v_ring, step + i - 1, CONFIG)
                rows = [batch, key_head, (num_key_tiles - i) * CONFIG.KEYS, 0]
                load_tile(args.v_desc, rows, args.v_ring.full.index(slot), args.v_tiles.index(slot))
        step += num_key_tiles


@gluon.jit
def _attend_partition(args, PART: gl.constexpr, CONFIG: gl.constexpr):
    """Compute the output of 64 queries at a time, in one of the warpgroups."""
    step = 0
    item = own_item(args.work_list_ptr, 0)
    for index in range(num_own_items(args.work_list_ptr)):
        tile, batch_head, item = take_item(args, item, index, CONFIG.IS_CAUSAL)
        first, seen, loaded = part_of_queries(tile, args.sizes, PART, CONFIG)
        # skip the tiles of keys that only other warpgroups see
        for i in range(step, step + loaded - seen):
            wait_for_turn(args.turns, i, PART, CONFIG)
            pass_turn(args.turns, PART, CONFIG)
            mbarrier.arrive(args.k_ring.empty.index(wait_until_full(args.k_ring, i, CONFIG)))
            mbarrier.arrive(args.v_ring.empty.index(wait_until_full(args.v_ring, i, CONFIG)))
        step += loaded - seen
        mbarrier.wait(args.q_ring.full.index(PART), index & 1)
        if seen > 0:
            _attend(args, first, batch_head, step, seen, PART, CONFIG)
            step += seen
        else:
            mbarrier.arrive(args.q_ring.empty.index(PART))
    tma.store_wait(0)


@gluon.jit
def _attend(args, first, batch_head, step, seen, PART: gl.constexpr, CONFIG: gl.constexpr):
    """The output of 64 queries from `first` on, which see `seen` tiles of keys (Algorithm 2)."""
    DIM: gl.constexpr = args.out_tiles.shape[2]
    dtype: gl.constexpr = args.out_tiles.dtype
    KEYS: gl.constexpr = CONFIG.KEYS
    SCORES: gl.constexpr = accumulator_layout(KEYS)
    OUT: gl.constexpr = accumulator_layout(DIM)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    SCORES_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    no_scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)

    # the scores of the first tile: the last keys, the only ones that can need a mask
    q = left_operand(args.q_tiles.index(PART), CONFIG.IN_REGISTERS, SCORES)  # (64, DIM)
    slot = wait_until_full(args.k_ring, step, CONFIG)
    wait_for_turn(args.turns, step, PART, CONFIG)
    scores = times_transposed(q, args.k_tiles.index(slot), no_scores, CONFIG)  # (64, KEYS)
    pass_turn(args.turns, PART, CONFIG)
    scores = warpgroup_mma_wait(0, [scores])
    mbarrier.arrive(args.k_ring.empty.index(slot))
    if CONFIG.IS_CAUSAL or not CONFIG.IS_EVEN:
        first_key = (seen - 1) * KEYS
        visible = visible_keys(first, first_key, args.sizes.num_keys, SCORES, CONFIG)
        scores = gl.where(visible, scores, float("-inf"))

    # online softmax, in base 2: the scale goes into the argument of exp2
    # a finite lower bound, as -inf - -inf would be NaN where all scores are -inf
    row_max = gl.maximum(_row_max(scores, SCORES_ROW) * args.scale_log2, -3.0e38)  # (64,)
    p = gl.exp2(scores * args.scale_log2 - gl.expand_dims(row_max, 1))  # (64, KEYS)
    row_sum = _lane_sums(p)  # (64, 4)
    p_operand = gl.convert_layout(p.to(dtype), OPERAND)
    acc = gl.zeros([ROWS, DIM], gl.float32, OUT)
    shrink = gl.full([ROWS], 1.0, gl.float32, SCORES_ROW)
    # hides the constant: the compiler would move the matmul that takes it ahead of the first wait
    acc, shrink = warpgroup_mma_wait(0, [acc, shrink])

    last = step + seen - 1
    following = (step + 1) % CONFIG.STAGES
    mbarrier.wait(
        args.k_ring.full.index(following), (step + 1) // CONFIG.STAGES & 1, pred=step < last
    )
    for i in range(step, last):
        # issue the next tile's scores, then this tile's weights times values
        following = (i + 1) % CONFIG.STAGES
        wait_for_turn(args.turns, i + 1, PART, CONFIG)
        scores = times_transposed(q, args.k_tiles.index(following), no_scores, CONFIG)
        slot = wait_until_full(args.v_ring, i, CONFIG)
        acc = _times_rows(acc, shrink)
        acc = warpgroup_mma(p_operand, args.v_tiles.index(slot), acc, is_async=True)
        pass_turn(args.turns, PART, CONFIG)
        # softmax of the next tile while the second matmul runs
        scores = warpgroup_mma_wait(1, [scores])
        mbarrier.arrive(args.k_ring.empty.index(following))
        new_max = gl.maximum(row_max, _row_max(scores, SCORES_ROW) * args.scale_log2)
        p = gl.exp2(scores * args.scale_log2 - gl.expand_dims(new_max, 1))
        shrink = gl.exp2(row_max - new_max)
        row_max = new_max
        shrink_sum = gl.convert_layout(shrink, gl.SliceLayout(1, row_sum.type.layout))
        row_sum = row_sum * gl.expand_dims(shrink_sum, 1) + _lane_sums(p)
        # wait here: the assembler moves the softmax past the next wait, but not past a loop's end
        next_slot = (i + 2) % CONFIG.STAGES
        mbarrier.wait(
            args.k_ring.full.index(next_slot), (i + 2) // CONFIG.STAGES & 1, pred=i + 1 < last
        )
        acc, p_operand, p, row_sum = warpgroup_mma_wait(0, [acc, p_operand, p, row_sum])
        mbarrier.arrive(args.v_ring.empty.index(slot))
        p_operand = gl.convert_layout(p.to(dtype), OPERAND)
    # keeps the compiler from moving the next matmul, which the loop has too, ahead of both
    acc, shrink = warpgroup_mma_wait(0, [acc, shrink])
    if not is_wide(DIM):
        mbarrier.arrive(args.q_ring.empty.index(PART))

    # the last tile's weights times values; meanwhile the log-sum-exp
    slot = wait_until_full(args.v_ring, last, CONFIG)
    acc = _times_rows(acc, shrink)
    acc = warpgroup_mma(p_operand, args.v_tiles.index(slot), acc, is_async=True)
    total = gl.convert_layout(gl.sum(row_sum, 1), SCORES_ROW)  # (64,)
    lse = row_max * LN_2 + gl.log(total)
    row = first + gl.arange(0, ROWS, SCORES_ROW)
    lse_ptrs = args.lse_ptr + gl.cast(batch_head, gl.int64) * args.sizes.num_queries + row
    gl.store(lse_ptrs, lse, row < args.sizes.num_queries)
    # zeros, and not NaN, for a query whose scores are all -inf
    share = gl.convert_layout(1 / gl.where(total == 0, 1.0, total), gl.SliceLayout(1, OUT))
    acc, p_operand = warpgroup_mma_wait(0, [acc, p_operand])
    mbarrier.arrive(args.v_ring.empty.index(slot))
    out = _times_rows(acc, share)  # (64, DIM)
    heads = args.sizes.heads
    rows = [batch_head // heads, batch_head % heads, first, 0]
    store_tile(args.out_desc, rows, args.out_tiles.index(PART), out)
    if is_wide(DIM):
        release_copied(args.q_ring.empty.index(PART))


@gluon.jit
def _times_rows(x, factors):
    """Each row of x times its factor."""
    ROW: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.expand_dims(gl.convert_layout(factors, ROW), 1)


@gluon.jit
def _lane_sums(x):
    """(rows, keys) summed to (rows, 4): one sum for each of the four threads that hold a row.

    As a tree, in short chains of additions, since each addition waits for the one before.
    """
    x = gl.reshape(x, [x.shape[0], 4, x.shape[1] // 32, 4, 2])
    return gl.sum(gl.sum(gl.sum(x, 4), 2), 1)


@gluon.jit
def _row_max(x, LAYOUT: gl.constexpr):
    """The maximum of each row, in `LAYOUT`."""
    x = gl.reshape(x, [x.shape[0], 4, x.shape[1] // 32, 4, 2])
    x = gl.max(gl.max(gl.max(x, 4), 2), 1)
    return gl.convert_layout(gl.max(x, 1), LAYOUT)
