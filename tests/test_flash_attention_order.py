"""Which multiprocessor does which tile: each once, evenly, and as the Hopper kernels read it."""

import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.flash_attention_order import START, work_order

# multiprocessors of an H200
PROGRAMS = 132
WORKS = st.tuples(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.integers(1, 30),
    st.integers(1, 40),
    st.booleans(),
    st.integers(1, 50),
)
REAL_SHAPES = [
    (4, 32, 4096, 64),
    (4, 32, 4096, 128),
    (32, 12, 1024, 64),
    (1, 16, 16384, 128),
    (1, 12, 65536, 64),
    (64, 4, 128, 64),
]
SIZES = [(1, 1), (1, 500), (500, 1), (63, 65), (64, 64), (65, 63), (129, 1000), (1000, 129)]
ON_SIZES = pytest.mark.parametrize("sizes", SIZES, ids=str)
ON_MASKS = pytest.mark.parametrize("is_causal", [True, False])
ON_WARPGROUPS = pytest.mark.parametrize("warpgroups", [2, 3])


def place(item: int, num_tiles: int, num_heads: int, section: int, is_last_first: bool):
    """Tile and head of an item: sections of heads, in them tiles, and of a tile all the heads."""
    for start in range(0, num_heads, section):
        heads = min(section, num_heads - start)
        if item < heads * num_tiles:
            tile, head = divmod(item, heads)
            return (num_tiles - 1 - tile if is_last_first else tile), start + head
        item -= heads * num_tiles
    raise AssertionError("an item beyond the last")


def loads(work, programs: int) -> list[float]:
    """What each program has to do, in steps, with what a tile takes beside them."""
    steps, *rest = work
    places = [place(i, len(steps), *rest) for i in range(len(steps) * rest[0])]
    table = work_order(*work, programs=programs)
    return [
        sum(steps[places[item][0]] + START for item in column[1 : 1 + column[0]])
        for column in table.T
    ]


@given(WORKS)
def test_each_item_is_done_once(case):
    *work, programs = case
    table = work_order(*work, programs=programs)
    done = sorted(item for column in table.T for item in column[1 : 1 + column[0]])
    assert done == list(range(len(work[0]) * work[1]))


@given(WORKS)
def test_the_table_has_counts_then_items_then_a_row_of_zeros(case):
    *work, programs = case
    table = work_order(*work, programs=programs)
    assert table.dtype == np.int32
    assert table.flags.c_contiguous
    assert table.shape == (2 + table[0].max(), programs)
    for count, *items in table.T:
        assert not any(items[count:])


@given(WORKS)
def test_no_program_is_idle_while_there_are_as_many_items(case):
    *work, programs = case
    counts = work_order(*work, programs=programs)[0]
    assert min(counts) >= 1 or sum(counts) < programs
    assert max(counts) <= 1 or sum(counts) > programs


@given(WORKS)
def test_no_program_has_more_than_the_mean_and_one_item(case):
    *work, programs = case
    each = loads(work, programs)
    assert max(each) <= sum(each) / programs + max(work[0]) + START + 1e-9


@given(WORKS)
def test_short_items_come_last_and_the_longest_of_them_first(case):
    work = case[:4]
    steps, *rest = work
    (items,) = work_order(*work, programs=1)[1:-1].T
    lengths = [steps[place(item, len(steps), *rest)[0]] for item in items]
    num_long = sum(n > max(steps) / 4 for n in lengths)
    assert all(n > max(steps) / 4 for n in lengths[:num_long])
    assert lengths[num_long:] == sorted(lengths[num_long:], reverse=True)
    # the long ones as they are numbered
    assert list(items[:num_long]) == sorted(items[:num_long])


def test_tiles_without_a_step_are_done_too():
    table = work_order((0, 0, 0), 2, 1, True, programs=4)
    assert sorted(table[0]) == [1, 1, 2, 2]


def test_the_same_work_gives_the_same_order():
    work = (tuple(range(1, 30)), 24, 7, True)
    assert (work_order(*work, programs=132) == work_order(*work, programs=132)).all()


@pytest.fixture(scope="module")
def hopper():
    """The file that launches the kernels; it needs a Triton with Gluon."""
    try:
        from lib import flash_attention_hopper
    except ImportError as error:
        pytest.skip(str(error))
    return flash_attention_hopper


@pytest.fixture(scope="module")
def arithmetic(hopper):
    """The kernels' own functions of integers, run as Python."""
    from lib import flash_attention_hopper_parts as parts

    names = {"gl": types.SimpleNamespace(minimum=min), "ROWS": parts.ROWS.value}
    return lambda function, *arguments: types.FunctionType(
        getattr(parts, function).fn.__code__, names
    )(*arguments)


def heads(*shape: int):
    import torch

    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def all_work(hopper, q, k, is_causal: bool) -> list:
    """Of the forward kernel, and of the two backward kernels, as they are tuned."""
    for_queries, for_keys = hopper.backward_schedules(q.shape[3])
    return [
        hopper._queries_work(q.shape, k.shape, hopper.forward_schedule(q.shape[3]), is_causal),
        hopper._queries_work(q.shape, k.shape, for_queries, is_causal),
        hopper._keys_work(q.shape, k.shape, for_keys, is_causal),
    ]


@ON_MASKS
@pytest.mark.parametrize("shape", REAL_SHAPES, ids=str)
def test_real_shapes_are_even_to_a_few_percent(hopper, shape, is_causal):
    for work in all_work(hopper, heads(*shape), heads(*shape), is_causal):
        each = loads(work, PROGRAMS)
        assert max(each) <= 1.04 * sum(each) / PROGRAMS


@ON_MASKS
@pytest.mark.parametrize("shape", [(1, 12, 1024, 64), (8, 8, 256, 64), (2, 2, 100, 128)], ids=str)
def test_with_fewer_items_than_programs_each_has_one(hopper, shape, is_causal):
    for work in all_work(hopper, heads(*shape), heads(*shape), is_causal):
        num_items = len(work.steps) * work.num_heads
        assert num_items <= PROGRAMS
        table = work_order(*work, programs=num_items)
        assert (table[0] == 1).all()


@settings(max_examples=50)
@given(WORKS)
def test_the_kernels_find_the_same_tile_and_head(arithmetic, case):
    steps, num_heads, section, is_last_first, _ = case
    num_items = len(steps) * num_heads
    for item in range(num_items):
        found = arithmetic("tile_and_head", item, len(steps), num_items, section, is_last_first)
        assert found == place(item, len(steps), num_heads, section, is_last_first)


def visible(num_queries: int, num_keys: int, is_causal: bool) -> np.ndarray:
    every = np.ones((num_queries, num_keys), bool)
    return np.tril(every) if is_causal else every


def tiles_with_any(seen: np.ndarray, rows: range, size: int) -> int:
    """How many tiles of `size` columns have one that any of `rows` sees."""
    columns = seen[[row for row in rows if 0 <= row < len(seen)]].any(0)
    return len({column // size for column in np.flatnonzero(columns)})


@ON_SIZES
@ON_MASKS
@ON_WARPGROUPS
@pytest.mark.parametrize("keys", [64, 128])
def test_a_tile_of_queries_takes_the_tiles_of_keys_it_sees(
    hopper, arithmetic, sizes, is_causal, warpgroups, keys
):
    q, k = heads(2, 6, sizes[0], 64), heads(2, 3, sizes[1], 64)
    work = hopper._queries_work(q.shape, k.shape, hopper.Schedule(warpgroups, keys, 2), is_causal)
    seen, rows = visible(*sizes, is_causal), 64 * warpgroups
    firsts = [
        arithmetic("first_query", tile, len(work.steps), sizes[0], warpgroups, is_causal)
        for tile in range(len(work.steps))
    ]
    assert work.steps == tuple(
        tiles_with_any(seen, range(first, first + rows), keys) for first in firsts
    )
    # and the kernels go as far
    assert work.steps == tuple(
        arithmetic("num_key_tiles_seen", min(first + rows, sizes[0]) - 1, sizes[1], is_causal, keys)
        for first in firsts
    )


@ON_SIZES
@ON_MASKS
@ON_WARPGROUPS
def test_each_query_is_in_one_tile(hopper, arithmetic, sizes, is_causal, warpgroups):
    q, k = heads(1, 1, sizes[0], 64), heads(1, 1, sizes[1], 64)
    work = hopper._queries_work(q.shape, k.shape, hopper.Schedule(warpgroups, 64, 2), is_causal)
    tiles = len(work.steps)
    firsts = [
        arithmetic("first_query", tile, tiles, sizes[0], warpgroups, is_causal)
        for tile in range(tiles)
    ]
    in_tiles = [row for first in firsts for row in range(first, first + 64 * warpgroups)]
    assert [row for row in in_tiles if 0 <= row < sizes[0]] == list(range(sizes[0]))
    # whole warpgroups only, as the mask of a tile on the diagonal needs it
    assert all(first % 64 == 0 for first in firsts)


@ON_SIZES
@ON_MASKS
@ON_WARPGROUPS
@pytest.mark.parametrize("key_heads", [1, 3, 6])
def test_a_tile_of_keys_takes_the_tiles_of_queries_that_see_it(
    hopper, arithmetic, sizes, is_causal, warpgroups, key_heads
):
    q, k = heads(2, 6, sizes[0], 64), heads(2, key_heads, sizes[1], 64)
    work = hopper._keys_work(q.shape, k.shape, hopper.Schedule(warpgroups, 64, 2), is_causal)
    seen = visible(*sizes, is_causal).T
    firsts = range(0, sizes[1], 64 * warpgroups)
    group = 6 // key_heads
    assert work.steps == tuple(
        group * tiles_with_any(seen, range(first, first + 64 * warpgroups), 64) for first in firsts
    )
    query_tiles = -(-sizes[0] // 64)
    assert work.steps == tuple(
        group * (query_tiles - arithmetic("first_query_tile", first, query_tiles, is_causal))
        for first in firsts
    )
    assert work.num_heads == 2 * key_heads


def test_a_sections_keys_and_values_fit_the_cache(hopper):
    q, k = heads(2, 8, 300, 128), heads(2, 2, 20000, 128)
    work = hopper._queries_work(q.shape, k.shape, hopper.forward_schedule(128), True)
    # two heads of keys, which eight heads of queries read, take 19.5 MiB; three would take 29.3
    assert work.section == 2 * 4


@pytest.mark.parametrize("sizes", [(192 * 2**17, 3), (3, 128 * 2**17)], ids=str)
def test_a_sections_items_can_be_counted_in_32_bits(hopper, sizes):
    # the keys, or queries, of 2¹⁵ heads would fit the cache
    q, k = (heads(1, 1, tokens, 64) for tokens in sizes)
    for work in all_work(hopper, q, k, False):
        assert work.section * len(work.steps) < 2**31
