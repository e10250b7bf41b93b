"""What the attention kernels for Hopper share: work items, tiles of tokens, barriers, products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

if not hasattr(gl, "num_warps"):
    raise ImportError("right is: Triton 3.6 or later, for its Gluon")

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# a warpgroup's matrix product takes 64 rows
ROWS = gl.constexpr(64)
# what is left for the warp that copies; the least that can be asked for
LOAD_REGISTERS = gl.constexpr(24)
# Triton 3.6 and 3.7 name it differently
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# Arguments of a kernel that are compiled once for all their values
SIZES = ["num_tiles", "heads", "group", "section", "num_items", "num_queries", "num_keys"]


@gluon.jit
def num_turns(order_ptr, IS_LISTED: gl.constexpr):
    """How many items of work a program has (`lib.flash_attention_order`)."""
    turns = 1
    if IS_LISTED:
        turns = gl.load(order_ptr + gl.program_id(0))
    return turns


@gluon.jit
def work_item(order_ptr, turn, IS_LISTED: gl.constexpr):
    """A program's `turn`-th."""
    item = gl.program_id(0)
    if IS_LISTED:
        item = gl.load(order_ptr + (turn + 1) * gl.num_programs(0) + item)
    return item


@gluon.jit
def tile_and_head(item, num_tiles, num_items, section, IS_LAST_FIRST: gl.constexpr):
    """Which tile of which head an item of work is.

    Heads go in sections whose keys and values fit the L2 cache, and a section's long tiles first.
    """
    num_heads = num_items // num_tiles
    first_head = item // (section * num_tiles) * section
    item -= first_head * num_tiles
    heads = gl.minimum(section, num_heads - first_head)
    tile = item // heads
    if IS_LAST_FIRST:
        tile = num_tiles - 1 - tile
    return tile, first_head + item % heads


@gluon.jit
def first_query(tile, num_tiles, num_queries, WARPGROUPS: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Of a tile of queries. A tile that has some of its rows only is the one with the least work.

    That is, in causal attention the first, whose first queries are below 0.
    """
    first = tile * (WARPGROUPS * ROWS)
    if IS_CAUSAL:
        first -= (num_tiles * WARPGROUPS - (num_queries + ROWS - 1) // ROWS) * ROWS
    return first


@gluon.jit
def num_key_tiles_seen(last_query, num_keys, IS_CAUSAL: gl.constexpr, KEYS: gl.constexpr):
    """How many tiles of keys the queries up to `last_query` see."""
    end = num_keys
    if IS_CAUSAL:
        end = gl.minimum(num_keys, last_query + 1)
    return (end + KEYS - 1) // KEYS


@gluon.jit
def part_of_queries(
    tile,
    num_tiles,
    num_queries,
    num_keys,
    PART: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    KEYS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):
    """A warpgroup's first query, the tiles of keys it sees, and those that are loaded for all."""
    first = first_query(tile, num_tiles, num_queries, WARPGROUPS, IS_CAUSAL)
    last = gl.minimum(first + WARPGROUPS * ROWS, num_queries) - 1
    loaded = num_key_tiles_seen(last, num_keys, IS_CAUSAL, KEYS)
    first += PART * ROWS
    seen = num_key_tiles_seen(first + ROWS - 1, num_keys, IS_CAUSAL, KEYS)
    has_rows = (first >= 0) & (first < num_queries)
    return first, gl.where(has_rows, gl.minimum(seen, loaded), 0), loaded


@gluon.jit
def visible_keys(
    first_query,
    first_key,
    num_keys,
    KEYS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """(64, KEYS): which keys of a tile a query sees."""
    query = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    key = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
    last = gl.full_like(query, 0) + (num_keys - 1)
    if IS_CAUSAL:
        last = gl.minimum(last, query)
    return gl.expand_dims(key, 0) <= gl.expand_dims(last, 1)


@gluon.jit
def first_query_tile(first_key, num_query_tiles, IS_CAUSAL: gl.constexpr):
    """The first tile of 64 queries that sees a key from `first_key` on."""
    first = 0
    if IS_CAUSAL:
        first = gl.minimum(first_key // ROWS, num_query_tiles)
    return first


@gluon.jit
def left_factor(tile, IS_KEPT: gl.constexpr, LAYOUT: gl.constexpr):
    """A left factor of many products, in registers when it is to be kept there."""
    factor = tile
    if IS_KEPT:
        factor = tile.load(gl.DotOperandLayout(0, LAYOUT, 2))
    return factor


@gluon.jit
def take_turn(order, step, PART: gl.constexpr, WARPGROUPS: gl.constexpr, IS_ORDERED: gl.constexpr):
    """Wait until the warpgroup before this one has asked for its products."""
    if IS_ORDERED:
        # the first warpgroup waits for the last one's step before
        mbarrier.wait(order.index(PART), (step ^ 1 if PART == 0 else step) & 1)


@gluon.jit
def pass_turn(order, PART: gl.constexpr, WARPGROUPS: gl.constexpr, IS_ORDERED: gl.constexpr):
    if IS_ORDERED:
        mbarrier.arrive(order.index((PART + 1) % WARPGROUPS))


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers in shared memory, each passed after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def wait_until_full(full, step, STAGES: gl.constexpr):
    """Wait for the tile of a step in a ring; its slot."""
    slot = step % STAGES
    mbarrier.wait(full.index(slot), step // STAGES & 1)
    return slot


@gluon.jit
def wait_until_empty(empty, step, STAGES: gl.constexpr):
    """Wait until the slot of a step was given back by all that read it before; the slot."""
    slot = step % STAGES
    mbarrier.wait(empty.index(slot), step // STAGES & 1 ^ 1)
    return slot


@gluon.jit
def load_tile(desc, place, full, tile):
    """Ask for a copy of the tile at `place`; `full` is passed when it is there."""
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, place, full, tile)


@gluon.jit
def two_products(a, b, c, d, LAYOUT: gl.constexpr):
    """a bᵀ and c dᵀ, asked for."""
    COLUMNS: gl.constexpr = b.shape[0]
    nothing = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    first = warpgroup_mma(a, b.permute((1, 0)), nothing, use_acc=False, is_async=True)
    second = warpgroup_mma(c, d.permute((1, 0)), nothing, use_acc=False, is_async=True)
    return first, second


@gluon.jit
def store_tile(desc, place, tile, x):
    """Copy x to `place` by way of a tile in shared memory, and do not wait for it."""
    # the copy before has left the tile
    tma.store_wait(0)
    barrier()
    tile.store(x.to(tile.dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(desc, place, tile)
