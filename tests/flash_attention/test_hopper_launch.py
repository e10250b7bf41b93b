"""Launching the Hopper kernels: which inputs they take, work lists, and the kernels' arithmetic."""

import functools
import heapq
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
try:
    from lib.flash_attention.hopper import blocks, launch
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

# Multiprocessors of an H200.
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
SIZES = [(1, 1), (1, 500), (64, 64), (65, 63), (129, 1000), (1000, 129)]
ON_SIZES = pytest.mark.parametrize("sizes", SIZES, ids=str)
ON_MASKS = pytest.mark.parametrize("is_causal", [True, False])


def tile_and_head(item: int, num_tiles: int, num_heads: int, section: int, is_last_first: bool):
    """The tile and head of an item: items go by section, then tile, then head."""
    for start in range(0, num_heads, section):
        heads = min(section, num_heads - start)
        if item < heads * num_tiles:
            tile, head = divmod(item, heads)
            return (num_tiles - 1 - tile if is_last_first else tile), start + head
        item -= heads * num_tiles
    raise AssertionError("an item beyond the last")


def loads(work, programs: int) -> list[float]:
    """The work of each program in steps, with the start of each tile."""
    steps, *rest = work
    found = [tile_and_head(i, len(steps), *rest) for i in range(len(steps) * rest[0])]
    table = launch.schedule_tiles(*work, programs=programs)
    return [
        sum(steps[found[item][0]] + launch.START for item in column[1 : 1 + column[0]])
        for column in table.T
    ]


@given(WORKS)
def test_each_item_is_in_the_table_once_and_programs_share_them(case):
    *work, programs = case
    table = launch.schedule_tiles(*work, programs=programs)
    num_items = len(work[0]) * work[1]
    done = sorted(item for column in table.T for item in column[1 : 1 + column[0]])
    assert done == list(range(num_items))
    # counts, then items, then a row of zeros
    assert table.dtype == np.int32
    assert table.flags.c_contiguous
    assert table.shape == (2 + table[0].max(), programs)
    assert not any(any(items[count:]) for count, *items in table.T)
    # no program is idle as long as there are as many items
    assert min(table[0]) >= 1 or num_items < programs
    assert max(table[0]) <= 1 or num_items > programs


@given(WORKS)
def test_no_program_has_more_than_the_mean_and_one_item(case):
    *work, programs = case
    each = loads(work, programs)
    assert max(each) <= sum(each) / programs + max(work[0]) + launch.START + 1e-9


@given(WORKS)
def test_short_items_come_last_and_the_longest_of_them_first(case):
    work = case[:4]
    steps, *rest = work
    (items,) = launch.schedule_tiles(*work, programs=1)[1:-1].T
    lengths = [steps[tile_and_head(item, len(steps), *rest)[0]] for item in items]
    num_long = sum(n > max(steps) / 4 for n in lengths)
    assert all(n > max(steps) / 4 for n in lengths[:num_long])
    assert lengths[num_long:] == sorted(lengths[num_long:], reverse=True)
    # the long ones as they are numbered
    assert list(items[:num_long]) == sorted(items[:num_long])


def arithmetic(function: str, *arguments):
    """Run a function of integers of the kernels as Python."""
    names = {"gl": types.SimpleNamespace(minimum=min), "ROWS": blocks.ROWS.value}
    code = getattr(blocks, function).fn.__code__
    return types.FunctionType(code, names)(*arguments)


def sizes_of(num_tiles=0, section=0, num_items=0, num_queries=0):
    return blocks.Sizes(num_tiles, 0, 0, section, num_items, num_queries, 0)


def config_of(is_causal: bool, warpgroups: int = 2, keys: int = 64):
    return blocks.Config(warpgroups, keys, 2, 0, is_causal, False, False)


def meta_heads(*shape: int):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def all_work(q, k, is_causal: bool) -> list:
    """The work of the forward kernel and of the two backward kernels, with tuned schedules."""
    for_queries, for_keys = launch.backward_schedules(q.shape[3])
    return [
        launch._queries_work(q.shape, k.shape, launch.forward_schedule(q.shape[3]), is_causal),
        launch._queries_work(q.shape, k.shape, for_queries, is_causal),
        launch._keys_work(q.shape, k.shape, for_keys, is_causal),
    ]


@ON_MASKS
@pytest.mark.parametrize("shape", REAL_SHAPES, ids=str)
def test_real_shapes_are_even_to_a_few_percent(shape, is_causal):
    for work in all_work(meta_heads(*shape), meta_heads(*shape), is_causal):
        each = loads(work, PROGRAMS)
        assert max(each) <= 1.04 * sum(each) / PROGRAMS


@settings(max_examples=50)
@given(WORKS)
def test_the_kernels_find_the_same_tile_and_head(case):
    steps, num_heads, section, is_last_first, _ = case
    num_items = len(steps) * num_heads
    for item in range(num_items):
        sizes = sizes_of(len(steps), section, num_items)
        found = arithmetic("tile_and_head", item, sizes, is_last_first)
        assert found == tile_and_head(item, len(steps), num_heads, section, is_last_first)


@ON_SIZES
@ON_MASKS
@pytest.mark.parametrize("warpgroups", [2, 3])
def test_the_host_counts_the_steps_that_the_kernels_take(sizes, is_causal, warpgroups):
    q, k = (2, 6, sizes[0], 64), (2, 3, sizes[1], 64)
    config = config_of(is_causal, warpgroups)
    rows = 64 * warpgroups
    work = launch._queries_work(q, k, launch.Schedule(warpgroups, 64, 2), is_causal)
    tiles = sizes_of(len(work.steps), num_queries=sizes[0])
    firsts = [arithmetic("first_query", i, tiles, config) for i in range(len(work.steps))]
    lasts = [min(first + rows, sizes[0]) - 1 for first in firsts]
    seen = [arithmetic("num_key_tiles_seen", last, sizes[1], config) for last in lasts]
    assert work.steps == tuple(seen)
    work = launch._keys_work(q, k, launch.Schedule(warpgroups, 64, 2), is_causal)
    query_tiles = -(-sizes[0] // 64)
    first_tiles = [
        arithmetic("first_query_tile", first, query_tiles, config)
        for first in range(0, sizes[1], rows)
    ]
    # two heads of q share one of k
    assert work.steps == tuple(2 * (query_tiles - first) for first in first_tiles)
    assert work.num_heads == 6


def test_a_sections_keys_and_values_fit_the_cache():
    q, k = meta_heads(2, 8, 300, 128), meta_heads(2, 2, 20000, 128)
    work = launch._queries_work(q.shape, k.shape, launch.forward_schedule(128), True)
    # two heads of keys, which eight heads of queries read, take 19.5 MiB; three would take 29.3
    assert work.section == 2 * 4


@pytest.mark.parametrize(
    ("batch", "tokens", "head_dim"),
    [(1, 8192, 128), (2, 4096, 128), (1, 16384, 128), (1, 8192, 64)],
)
def test_blocks_of_shared_keys_keep_all_multiprocessors_busy(batch, tokens, head_dim):
    q, k = (batch, 32, tokens, head_dim), (batch, 8, tokens, head_dim)
    section = launch._fused_section(q, k, True, PROGRAMS)
    # as hopper_backward.cuh numbers them; each goes where a multiprocessor is free first
    free_at, total = [0] * PROGRAMS, 0
    for first in range(0, batch * 8, section):
        for tile in range(tokens // 128):
            for _ in range(min(section, batch * 8 - first)):
                total += tokens - 128 * tile
                heapq.heapreplace(free_at, free_at[0] + tokens - 128 * tile)
    assert total / PROGRAMS > 0.97 * max(free_at)


def test_sections_are_equal_where_a_slightly_larger_one_divides_the_heads():
    # three heads fit the cache
    for heads, section in [(32, 4), (13, 3), (9, 3)]:
        shape = (1, heads, 8192, 128)
        assert launch._fused_section(shape, shape, True, PROGRAMS) == section
        assert launch._fused_section(shape, shape, False, PROGRAMS) == 3


@pytest.mark.parametrize("sizes", [(192 * 2**17, 3), (3, 128 * 2**17)], ids=str)
def test_a_sections_items_can_be_counted_in_32_bits(sizes):
    # the keys, or queries, of 2¹⁵ heads would fit the cache
    q, k = (meta_heads(1, 1, tokens, 64) for tokens in sizes)
    for work in all_work(q, k, False):
        assert work.section * len(work.steps) < 2**31


class OnHopper(torch.Tensor):
    """A CPU tensor whose `is_cuda` is true."""

    is_cuda = True


def heads(*shape: int, dtype=torch.bfloat16, offset: int = 0) -> torch.Tensor:
    size = torch.Size(shape).numel()
    x = torch.zeros(size + 8, dtype=dtype)[offset : offset + size].view(shape)
    return x.as_subclass(OnHopper)


@pytest.fixture
def on_hopper(monkeypatch):
    """`launch` as on a machine with a Hopper GPU."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    return launch


WIDE = (2, 4, 5, 64)
TAKEN = [
    heads(*WIDE),
    *(heads(2, 4, 5, head_dim) for head_dim in (40, 96, 128, 136, 256)),
    heads(*WIDE, dtype=torch.float16),
    heads(2, 5, 4, 64).transpose(1, 2),
    heads(2, 5, 3, 4, 64)[:, :, 1].transpose(1, 2),
    heads(2, 4, 5, 72)[..., 8:],
    # strides of a dimension of 1 are never used
    heads(64 * 5).as_strided((1, 1, 5, 64), (3, 0, 64, 1)),
    heads(64).as_strided((1, 1, 1, 64), (1, 1, 1, 1)),
]
LEFT = [
    heads(*WIDE, dtype=torch.float32),
    *(heads(2, 4, 5, head_dim) for head_dim in (32, 84, 264)),
    heads(0, 4, 5, 64),
    heads(2, 4, 0, 64),
    *(heads(*WIDE, offset=offset) for offset in (1, 4)),
    heads(2, 4, 5, 68)[..., :64],
    heads(2, 4, 5, 128)[..., ::2],
    heads(2, 4, 64, 5).mT,
    heads(1, 4, 5, 64).expand(2, -1, -1, -1),
    heads(2, 4, 1, 64).expand(-1, -1, 5, -1),
    heads(*WIDE).as_subclass(torch.Tensor),
]


@pytest.mark.parametrize(
    ("x", "is_taken"),
    [*((x, True) for x in TAKEN), *((x, False) for x in LEFT)],
    ids=lambda x: f"{tuple(x.shape)}, {x.stride()}, {x.dtype}" if torch.is_tensor(x) else str(x),
)
def test_it_takes_aligned_rows_of_16_bit_numbers_and_leaves_others(on_hopper, x, is_taken):
    assert on_hopper.supports(x, x, x) == on_hopper.supports(x, x, x, x) == is_taken
    # as keys and values only
    assert x.shape[2] > 0 or not on_hopper.supports(heads(*WIDE), x, x)


def test_every_tensor_that_is_copied_is_checked(on_hopper):
    assert on_hopper.supports(*[heads(*WIDE)] * 6)
    for which in range(1, 6):
        tensors = [heads(*WIDE, offset=int(i == which)) for i in range(6)]
        assert not on_hopper.supports(*tensors)


def test_a_gpu_of_another_vendor_is_not_supported(on_hopper, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not on_hopper.supports(*[heads(*WIDE)] * 3)


def test_counts_of_rows_fit_32_bits_with_those_that_are_padded(on_hopper):
    # 2²⁵ heads of one token become 2³¹ rows in tiles of 64
    few, many = (
        torch.empty(n, 1, 1, 64, dtype=torch.bfloat16, device="meta").as_subclass(OnHopper)
        for n in (2**25 - 1, 2**25)
    )
    assert on_hopper.supports(few, few, few)
    assert not on_hopper.supports(many, many, many)


def test_a_work_list_is_made_once_and_not_while_a_graph_is_captured(monkeypatch):
    device = torch.device("cpu")
    is_capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(launch, "_work_lists", functools.cache(lambda device: {}))
    work = launch.Work((1, 2, 3), 7, 2, True)
    assert launch._work_list(work, 5, device) is None
    is_capturing = False
    table = launch._work_list(work, 5, device)
    assert table.dtype == torch.int32
    assert table[0].sum() == 21
    is_capturing = True
    assert launch._work_list(work, 5, device) is table
    assert launch._work_list(work, 6, device) is None


@pytest.mark.parametrize(
    ("shape", "is_causal", "is_faster"),
    [
        ((32, 12, 2048, 64), True, True),
        ((32, 12, 1024, 64), True, False),
        ((32, 12, 1024, 64), False, True),
        ((1, 8, 4096, 64), False, True),
        ((1, 8, 4096, 64), True, False),
        ((1, 8, 4096, 96), True, True),
        ((1, 8, 4096, 192), False, False),
        ((1, 8, 16384, 192), False, True),
        ((32, 12, 4096, 256), False, False),
    ],
)
def test_one_backward_kernel_takes_many_queries_and_many_blocks(
    monkeypatch, shape, is_causal, is_faster
):
    monkeypatch.setattr(launch, "has_nvrtc", lambda: True)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: PROGRAMS)
    x = torch.empty(shape, device="meta")
    assert launch._one_kernel_is_faster(x, x, is_causal) == is_faster


def kinds_of_call(monkeypatch, q, k, is_causal: bool, has_rope: bool) -> set:
    """The kinds of kernels that a call of both passes launches."""
    found = set()

    def record(key, tensors, make) -> None:
        found.update(launch.kind_of(kernel, arguments) for kernel, _, arguments in make())

    monkeypatch.setattr(launch, "_launch", record)
    angles = (torch.zeros(q.shape[2], q.shape[3] // 2),) * 2 if has_rope else None
    out, lse = launch.flash_forward(q, k, k, is_causal, 1)
    launch.flash_backward(out, q, k, k, out, lse, is_causal, 0.5, angles=angles)
    return found


@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (128, False), (256, True)])
@pytest.mark.parametrize("has_rope", [False, True])
def test_what_is_prepared_serves_every_length_number_of_heads_and_layout(
    on_hopper, monkeypatch, head_dim, is_causal, has_rope
):
    started = []
    monkeypatch.setattr(launch, "has_nvrtc", lambda: False)
    monkeypatch.setattr(launch, "_prepared", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "_work_list", lambda *work: torch.zeros(1, 2, dtype=torch.int32))
    monkeypatch.setattr(
        launch.binary_of, "start", lambda *kind, is_spare=False: started.append((kind, is_spare))
    )
    q = heads(2, 4, 128, head_dim)
    launch.prepare(q, q, q, is_causal, has_gradients=False)
    assert {kernel.__name__ for (kernel, *_), _ in started} == {"forward_kernel"}
    started.clear()
    launch.prepare(q, q, q, is_causal, has_gradients=True, has_rope=has_rope)
    # this call's kernels, the forward one first, and those for tiles in parts where there are any
    mine = [kind for kind, is_spare in started if not is_spare]
    assert [kernel.__name__ for kernel, *_ in dict.fromkeys(mine)] == [
        "forward_kernel",
        "backward_queries_kernel",
        "backward_keys_kernel",
    ]
    assert set(mine) == kinds_of_call(monkeypatch, q, q, is_causal, has_rope)
    every = {kind for kind, _ in started}
    assert len(every) == {(64, True): 4, (128, False): 6, (256, True): 3}[head_dim, is_causal]
    for shape, key_heads in [
        ((1, 1, 1), 1),
        ((3, 12, 1000), 4),
        ((1, 7, 64), 7),
        ((64, 16, 80), 1),
    ]:
        x = heads(*shape, head_dim)
        assert kinds_of_call(monkeypatch, x, x[:, :key_heads], is_causal, has_rope) <= every
        tokens_first = heads(shape[0], shape[2], shape[1], head_dim).transpose(1, 2)
        assert kinds_of_call(monkeypatch, tokens_first, x, is_causal, has_rope) <= every
    # once is enough
    before = len(started)
    launch.prepare(x, x, x, is_causal, has_gradients=True, has_rope=has_rope)
    assert len(started) == before


@pytest.mark.parametrize(("major", "number"), [(8, 0), (9, 132), (10, 0), (12, 0)])
def test_only_hopper_has_multiprocessors_here(monkeypatch, major, number):
    properties = types.SimpleNamespace(major=major, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert launch._multiprocessors.__wrapped__(torch.device("cuda:0")) == number


def test_a_program_uses_the_registers_there_are():
    for warpgroups in (1, 2, 3):
        total, computing = launch._registers(launch.Schedule(warpgroups, 64, 2))
        assert total % 8 == computing % 8 == 0
        # after the start the warps that compute take from the one that copies, and its three peers
        computing_groups = max(2, warpgroups)
        in_all = computing_groups * computing + launch.LOAD_REGISTERS.value
        assert in_all <= total * (computing_groups + 1) <= 512


def test_a_program_for_each_item_has_a_list_of_one_also_in_a_graph(monkeypatch):
    monkeypatch.setattr(launch, "_work_lists", functools.cache(lambda device: {}))
    tables = []
    for is_capturing in (True, False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda x=is_capturing: x)
        tables.append(launch._one_item_each(3, torch.device("cpu")))
    for table in tables:
        assert table.dtype == torch.int32
        assert table.tolist() == [[1, 1, 1], [0, 1, 2], [0, 0, 0]]
    # what a graph makes is its own, unless there is one already
    assert tables[0] is not tables[1]
    assert tables[1] is tables[2]
