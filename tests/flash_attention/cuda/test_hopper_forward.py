"""The forward kernel for Hopper GPUs in CUDA C++: on a CPU, by the emulator, and compiled."""

import functools
import math

import pytest
import torch

from lib.flash_attention.hopper import unpadded
from tests.flash_attention.cases import Case, formula, make_inputs, new_memory_is_nan
from tests.flash_attention.cuda.emulator import NEEDS_COMPILER, emulate_hopper
from tests.flash_attention.cuda.test_build import NEEDS_NVCC, compile_kernels, quick_at

# Of the formula in float64: PyTorch's own output in these dtypes is as far from it.
LARGEST_ERROR = {torch.bfloat16: 0.005, torch.float16: 0.0006}


def make_plan(tiles: unpadded.Tiles, num_items: int, programs: int) -> unpadded.Plan:
    """Items dealt out to programs, one after the other; heads in sections of two."""
    if programs >= num_items:
        return unpadded.Plan(tiles, 2, None)
    dealt = [range(program, num_items, programs) for program in range(programs)]
    columns = [[len(items), *items, 0] for items in dealt]
    rows = max(map(len, columns))
    table = torch.tensor([column + [0] * (rows - len(column)) for column in columns])
    return unpadded.Plan(tiles, 2, table.T.int().contiguous())


def assert_right(
    case: Case, dtype: torch.dtype, programs: int = 2, tiles: unpadded.Tiles | None = None
) -> None:
    """The kernel's output and log-sum-exp are those of the formula."""
    q, k, v = (x.detach() for x in make_inputs(case, dtype)[:3])
    scale = 1 / math.sqrt(case.head_dim)
    expected, expected_lse = formula(q.double(), k.double(), v.double(), case)
    out = torch.full_like(q, math.nan)
    lse = torch.full(q.shape[:3], math.nan)
    tiles = tiles or unpadded.pick_tiles(case.head_dim)
    query_tiles = -(-case.queries // tiles.queries)
    plan = make_plan(tiles, query_tiles * q.shape[0] * q.shape[1], programs)
    unpadded.flash_forward(q, k, v, case.is_causal, scale, out=out, lse=lse, plan=plan)
    assert (out.double() - expected).norm() < LARGEST_ERROR[dtype] * expected.norm()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-3)


CASES = [
    Case(300, 300, 160, True, heads=2, key_heads=1, batch=1),
    Case(130, 290, 136, False, heads=1, key_heads=1, layout="tokens first"),
    Case(200, 200, 192, True, heads=1, key_heads=1, layout="amid NaN"),
    Case(70, 130, 168, False, heads=2, key_heads=1, batch=1),
    Case(330, 120, 152, True, heads=1, key_heads=1, batch=2),
    Case(1, 225, 184, False, heads=1, key_heads=1, batch=1),
    Case(260, 260, 96, True, heads=2, key_heads=1, batch=2, layout="tokens first"),
    Case(200, 370, 72, False, heads=2, key_heads=2, batch=1),
    Case(390, 200, 56, True, heads=2, key_heads=1, batch=1),
]


@NEEDS_COMPILER
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_output_is_that_of_the_formula(case, monkeypatch):
    emulate_hopper(monkeypatch)
    assert_right(case, torch.float16 if case.head_dim < 80 else torch.bfloat16)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "case", [Case(390, 200, 64, heads=2, key_heads=1), Case(70, 70, 56)], ids=str
)
def test_the_output_of_small_tiles_is_that_of_the_formula(case, monkeypatch):
    emulate_hopper(monkeypatch)
    assert_right(case, torch.bfloat16, tiles=unpadded.SHORT_TILES)


def test_small_tiles_are_for_short_sequences_and_few_blocks():
    small, (large, *_) = unpadded.SHORT_TILES, unpadded.TILES
    tiles = functools.partial(unpadded.tiles_by_length, multiprocessors=132)
    assert tiles((64, 16, 768, 64)) == tiles((1, 12, 2048, 40)) == (small, large)
    assert tiles((64, 16, 769, 64)) == tiles((1, 12, 2200, 40)) == (large, small)
    assert tiles((1, 1, 1, 96)) == (unpadded.pick_tiles(96),)


@NEEDS_COMPILER
@pytest.mark.parametrize("step", [0.5, 40.0], ids=["a little", "a lot"])
def test_maxima_may_grow_from_tile_to_tile(step, monkeypatch):
    emulate_hopper(monkeypatch)
    q = torch.ones(1, 1, 64, 136, dtype=torch.bfloat16)
    # the first tile that is worked on is the last one
    k = (
        torch.full((1, 1, 560, 136), step).bfloat16()
        * torch.arange(5, 0, -1).repeat_interleave(112)[:, None]
    )
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    out, lse = torch.empty_like(q), torch.empty(1, 1, 64)
    plan = make_plan(unpadded.pick_tiles(136), 1, 1)
    unpadded.flash_forward(q, k.bfloat16(), v, False, 0.02, out=out, lse=lse, plan=plan)
    case = Case(64, 560, 136, False, heads=1, key_heads=1, scale=0.02)
    expected, expected_lse = formula(q.double(), k.double(), v.double(), case)
    assert (out.double() - expected).norm() < LARGEST_ERROR[q.dtype] * expected.norm()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@NEEDS_COMPILER
def test_the_launcher_deals_tiles_out(monkeypatch):
    pytest.importorskip("triton")
    launch = pytest.importorskip("lib.flash_attention.hopper.launch")
    emulate_hopper(monkeypatch)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 2)
    monkeypatch.setattr(launch, "has_nvrtc", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    case = Case(400, 260, 160, True, heads=2, key_heads=1, batch=2, scale=0.1)
    q, k, v = (x.detach() for x in make_inputs(case, torch.bfloat16)[:3])
    with new_memory_is_nan():
        out, lse = launch.flash_forward(q, k, v, True, 0.1)
    expected, expected_lse = formula(q.double(), k.double(), v.double(), case)
    assert (out.double() - expected).norm() < LARGEST_ERROR[q.dtype] * expected.norm()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-3)


@NEEDS_NVCC
@pytest.mark.parametrize("tiles", quick_at((192,), (*unpadded.TILES, unpadded.SHORT_TILES)))
def test_the_kernel_fits_the_chip(tiles, tmp_path):
    macros = tiles.constants(is_bfloat16=True, is_causal=True)
    report, kernels = compile_kernels(tmp_path, "hopper_forward", macros, "sm_90a")
    # the assembler gave every matmul a wait of its own
    assert "serialized" not in report
    assert [spilled for _, spilled in kernels] == [0]
