"""Building blocks of the Hopper kernels: compile-time settings, work items, masks, rings, matmuls.

Here and in the kernels, names in capitals are compile-time constants. `tile` counts the tiles of a
head, `step` the tiles that have gone through a ring since the program started.
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
)

if not hasattr(gl, "num_warps"):
    raise ImportError("the Hopper kernels need Triton 3.6 or later, for its Gluon")


LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# Rows of a warpgroup's matmul.
ROWS = gl.constexpr(64)
# Registers of a thread in the warp that loads: the fewest that can be requested.
LOAD_REGISTERS = gl.constexpr(24)
# Triton 3.7 renamed `thread_barrier`.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


class Config(NamedTuple):
    """The compile-time settings of a kernel; each distinct one is compiled once."""

    WARPGROUPS: int
    """Warpgroups that compute, 64 rows each: 2 or 3. 1: two share 64 keys, for dK and dV."""

    KEYS: int
    """Keys in a tile of keys."""

    STAGES: int
    """Slots of a ring: how many tiles are in flight."""

    REGISTERS: int
    """Registers of a thread that computes."""

    IS_CAUSAL: bool

    IS_EVEN: bool
    """The last tile in the ring is a whole one, or needs the causal mask alone."""

    IN_REGISTERS: bool
    """The operands that stay (q, or k and v) are held in registers."""

    IS_ORDERED: bool = False
    """Warpgroups issue their matmuls one after the other (ping-pong)."""

    HAS_ROPE: bool = False
    """Rotate the gradients of q and k back by their positions."""

    HEAD_DIM: int = 0
    """Columns of q, k and v. Tiles are wider if it is neither 64, 128 nor 256: zeros fill them."""


class Sizes(NamedTuple):
    """The sizes of one call, which are not compiled in."""

    num_tiles: int
    """Tiles of a head."""

    heads: int
    """Heads of q in a sequence."""

    group: int
    """Heads of q that share one of k and v."""

    section: int
    """Heads whose keys and values fit the L2 cache together."""

    num_items: int
    """Tiles of all heads of all sequences."""

    num_queries: int

    num_keys: int


class Ring(NamedTuple):
    """The barriers of a ring of tiles in shared memory, two for each slot."""

    full: gl.shared_memory_descriptor
    """Passed once a tile has been copied into the slot."""

    empty: gl.shared_memory_descriptor
    """Passed once every warpgroup that reads the slot is done with it."""


# Triton compiles once for all values of these arguments. Each is an argument of its own, as numbers
# in a tuple would be specialized nevertheless.
SIZES = list(Sizes._fields)


@gluon.jit
def num_own_items(work_list_ptr):
    """How many items this program does (row 0 of `launch.schedule_tiles`)."""
    return gl.load(work_list_ptr + gl.program_id(0))


@gluon.jit
def own_item(work_list_ptr, index):
    """The item that this program does as number `index`."""
    return gl.load(work_list_ptr + (index + 1) * gl.num_programs(0) + gl.program_id(0))


@gluon.jit
def tile_and_head(item, sizes, IS_LAST_FIRST: gl.constexpr):
    """The tile and the head, counted over all sequences, of an item.

    Items go through the heads in sections whose keys and values fit the L2 cache; within a section,
    through the tiles of all its heads, long ones first.
    """
    num_heads = sizes.num_items // sizes.num_tiles
    first_head = item // (sizes.section * sizes.num_tiles) * sizes.section
    item -= first_head * sizes.num_tiles
    heads = gl.minimum(sizes.section, num_heads - first_head)
    tile = item // heads
    if IS_LAST_FIRST:
        tile = sizes.num_tiles - 1 - tile
    return tile, first_head + item % heads


@gluon.jit
def take_item(args, item, index, IS_LAST_FIRST: gl.constexpr):
    """The tile and the head of this program's item number `index`, and its item after that."""
    # issued long before it is needed
    following = own_item(args.work_list_ptr, index + 1)
    tile, batch_head = tile_and_head(item, args.sizes, IS_LAST_FIRST)
    return tile, batch_head, following


@gluon.jit
def first_query(tile, sizes, CONFIG: gl.constexpr):
    """The first query of a tile; below 0 in a first tile that is not whole.

    Only the tile with the least work may be partial. Under a causal mask that is the first one.
    """
    first = tile * (CONFIG.WARPGROUPS * ROWS)
    if CONFIG.IS_CAUSAL:
        row_tiles = (sizes.num_queries + ROWS - 1) // ROWS
        first -= (sizes.num_tiles * CONFIG.WARPGROUPS - row_tiles) * ROWS
    return first


@gluon.jit
def num_key_tiles_seen(last_query, num_keys, CONFIG: gl.constexpr):
    """How many tiles of keys the queries up to `last_query` see."""
    end = num_keys
    if CONFIG.IS_CAUSAL:
        end = gl.minimum(num_keys, last_query + 1)
    return (end + CONFIG.KEYS - 1) // CONFIG.KEYS


@gluon.jit
def part_of_queries(tile, sizes, PART: gl.constexpr, CONFIG: gl.constexpr):
    """A warpgroup's first query, the number of key tiles it sees, and of those loaded for all."""
    first = first_query(tile, sizes, CONFIG)
    last = gl.minimum(first + CONFIG.WARPGROUPS * ROWS, sizes.num_queries) - 1
    loaded = num_key_tiles_seen(last, sizes.num_keys, CONFIG)
    first += PART * ROWS
    seen = num_key_tiles_seen(first + ROWS - 1, sizes.num_keys, CONFIG)
    has_rows = (first >= 0) & (first < sizes.num_queries)
    return first, gl.where(has_rows, gl.minimum(seen, loaded), 0), loaded


@gluon.jit
def visible_keys(first_query, first_key, num_keys, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """(64, KEYS) bool: which keys of a tile each query sees."""
    query = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    key = first_key + gl.arange(0, CONFIG.KEYS, gl.SliceLayout(0, LAYOUT))
    last = gl.full_like(query, 0) + (num_keys - 1)
    if CONFIG.IS_CAUSAL:
        last = gl.minimum(last, query)
    return gl.expand_dims(key, 0) <= gl.expand_dims(last, 1)


@gluon.jit
def first_query_tile(first_key, num_query_tiles, CONFIG: gl.constexpr):
    """The first tile of 64 queries that sees a key from `first_key` on."""
    first = 0
    if CONFIG.IS_CAUSAL:
        first = gl.minimum(first_key // ROWS, num_query_tiles)
    return first


@gluon.jit
def wait_for_turn(turns, step, PART: gl.constexpr, CONFIG: gl.constexpr):
    """Wait until the warpgroup before this one has issued its matmuls of this step."""
    if CONFIG.IS_ORDERED:
        # the first warpgroup waits for the last one's previous step
        mbarrier.wait(turns.index(PART), (step ^ 1 if PART == 0 else step) & 1)


@gluon.jit
def pass_turn(turns, PART: gl.constexpr, CONFIG: gl.constexpr):
    """Let the next warpgroup issue its matmuls."""
    if CONFIG.IS_ORDERED:
        mbarrier.arrive(turns.index((PART + 1) % CONFIG.WARPGROUPS))


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers in shared memory that are passed after COUNT arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def make_ring(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """The barriers of a ring whose slots are read by READERS warpgroups each."""
    full = make_barriers(SLOTS, 1)
    empty = make_barriers(SLOTS, READERS)
    return Ring(full, empty)


@gluon.jit
def wait_until_full(ring, step, CONFIG: gl.constexpr):
    """Wait until the tile of a step has arrived; return its slot."""
    slot = step % CONFIG.STAGES
    mbarrier.wait(ring.full.index(slot), step // CONFIG.STAGES & 1)
    return slot


@gluon.jit
def wait_until_empty(ring, step, CONFIG: gl.constexpr):
    """Wait until the slot for a step's tile has been released by all its readers; return it."""
    slot = step % CONFIG.STAGES
    mbarrier.wait(ring.empty.index(slot), step // CONFIG.STAGES & 1 ^ 1)
    return slot


@gluon.jit
def load_tile(desc, coordinates, full, tile):
    """Start the copy of a tile into shared memory; `full` is passed once it has arrived."""
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, coordinates, full, tile)


@gluon.jit
def load_queries(args, batch, head, query_tile, slot):
    """Load 64 rows of q and dO, with their log-sum-exp and -delta."""
    full = args.q_ring.full.index(slot)
    mbarrier.expect(full, 2 * args.q_desc.block_type.nbytes + 2 * args.lse_desc.block_type.nbytes)
    rows = [batch, head, query_tile * ROWS, 0]
    tma.async_copy_global_to_shared(args.q_desc, rows, full, args.q_tiles.index(slot))
    tma.async_copy_global_to_shared(args.grad_out_desc, rows, full, args.grad_out_tiles.index(slot))
    first = (batch * args.sizes.heads + head) * args.padded + query_tile * ROWS
    tma.async_copy_global_to_shared(args.lse_desc, [first], full, args.lse_tiles.index(slot))
    tma.async_copy_global_to_shared(
        args.minus_delta_desc, [first], full, args.minus_delta_tiles.index(slot)
    )


@gluon.jit
def store_tile(desc, coordinates, tile, x):
    """Start the copy of x to global memory through a tile in shared memory."""
    # the previous copy out of the tile must be done
    tma.store_wait(0)
    barrier()
    tile.store(x.to(tile.dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(desc, coordinates, tile)


@gluon.jit
def release_copied(empty):
    """Release a tile of an operand through which results left, once they have been copied."""
    tma.store_wait(0)
    barrier()
    mbarrier.arrive(empty)


@gluon.constexpr_function
def is_wide(columns):
    """Whether there is no room for a tile of results: it leaves through one of an operand."""
    return columns > 128


@gluon.constexpr_function
def ends_in_zeros(width, head_dim):
    """Whether the last 64 columns of a wide tile are zeros, so that matmuls leave them out."""
    return is_wide(width) and head_dim <= 192


@gluon.jit
def times_transposed(a, b, start, CONFIG: gl.constexpr, HAS_START: gl.constexpr = False):
    """Issue a bᵀ, added to `start` if HAS_START, without the last 64 columns if all are zeros."""
    acc = start
    if not ends_in_zeros(b.shape[1], CONFIG.HEAD_DIM):
        acc = warpgroup_mma(a, b.permute((1, 0)), acc, use_acc=HAS_START, is_async=True)
    else:
        for part in gl.static_range(3):
            left, right = a.slice(64 * part, 64, 1), b.slice(64 * part, 64, 1)
            acc = warpgroup_mma(
                left, right.permute((1, 0)), acc, use_acc=HAS_START or part > 0, is_async=True
            )
    return acc


@gluon.constexpr_function
def accumulator_layout(columns):
    """How the registers of a warpgroup hold the (64, columns) result of a matmul."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def left_operand(tile, IS_IN_REGISTERS: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile as the left operand of many matmuls: itself, or a copy in registers."""
    operand = tile
    if IS_IN_REGISTERS:
        operand = tile.load(gl.DotOperandLayout(0, LAYOUT, 2))
    return operand


@gluon.jit
def two_matmuls(a, b, c, d, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Issue a bᵀ and c dᵀ."""
    COLUMNS: gl.constexpr = b.shape[0]
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    return times_transposed(a, b, zeros, CONFIG), times_transposed(c, d, zeros, CONFIG)


@gluon.jit
def unrotate(x, first, cos_ptr, sin_ptr, num_rows, LAYOUT: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The gradient of 64 rows before RoPE, from that after it; pairs are neighbors."""
    HALF: gl.constexpr = HEAD_DIM // 2
    WIDTH: gl.constexpr = x.shape[1] // 2
    even, odd = gl.split(gl.reshape(x, [ROWS, WIDTH, 2]))  # (64, WIDTH) each
    PAIRS: gl.constexpr = even.type.layout
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, PAIRS)), 1)
    column = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, PAIRS)), 0)
    offsets = row * HALF + column
    is_inside = first + row < num_rows
    if HALF < WIDTH:
        is_inside = is_inside & (column < HALF)
    start = gl.cast(first, gl.int64) * HALF
    cos = gl.load(cos_ptr + start + offsets, is_inside, other=0.0)
    sin = gl.load(sin_ptr + start + offsets, is_inside, other=0.0)
    unrotated = gl.join(even * cos + odd * sin, odd * cos - even * sin)  # (64, WIDTH, 2)
    return gl.convert_layout(gl.reshape(unrotated, [ROWS, 2 * WIDTH]), LAYOUT)
