"""The kernels for Hopper GPUs in CUDA C++: on a CPU, by the emulator, and compiled."""

import functools
import gc
import math
import weakref

import pytest
import torch
from torch import Tensor

from tests.flash_attention.cases import Case, formula, make_inputs, new_memory_is_nan, rotated
from tests.flash_attention.cuda.emulator import NEEDS_COMPILER, emulate_hopper
from tests.flash_attention.cuda.test_build import NEEDS_NVCC, compile_kernels, quick_at

pytest.importorskip("triton")
try:
    from lib.flash_attention.hopper import fused, launch, unpadded
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

# Of the formula in float64: PyTorch's own results in these dtypes are as far from it.
LARGEST_ERROR = {torch.bfloat16: 0.005, torch.float16: 0.0006}
OF_GRADIENTS = {torch.bfloat16: 0.006, torch.float16: 0.0008}


@pytest.fixture
def _emulated(monkeypatch):
    """The launcher takes these kernels, on a CPU that counts as two multiprocessors."""
    emulate_hopper(monkeypatch)
    monkeypatch.setattr(launch, "has_nvrtc", lambda: True)
    monkeypatch.setattr(launch, "_one_kernel_is_faster", lambda q, k, is_causal: True)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 2)
    # large tiles for short sequences, too; as few heads a section as there can be
    monkeypatch.setattr(unpadded, "SHORT_QUERIES", 0)
    monkeypatch.setattr(launch, "CACHE_BYTES", 1)


def emulated(test):
    """Mark a test that runs the kernels on a CPU."""
    return NEEDS_COMPILER(pytest.mark.usefixtures("_emulated")(test))


# Forward


def assert_right(q: Tensor, k: Tensor, v: Tensor, case: Case) -> None:
    """The kernel's output and log-sum-exp are those of the formula."""
    scale = 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    expected, expected_lse = formula(q.double(), k.double(), v.double(), case)
    with new_memory_is_nan():
        out, lse = launch.flash_forward(q, k, v, case.is_causal, scale)
    assert (out.double() - expected).norm() < LARGEST_ERROR[q.dtype] * expected.norm()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-3)


FORWARD = [
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


@emulated
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_the_output_is_that_of_the_formula(case):
    dtype = torch.float16 if case.head_dim < 80 else torch.bfloat16
    assert_right(*(x.detach() for x in make_inputs(case, dtype)[:3]), case)


@emulated
@pytest.mark.parametrize(
    "case", [Case(390, 200, 64, heads=2, key_heads=1), Case(70, 70, 56)], ids=str
)
def test_the_output_of_small_tiles_is_that_of_the_formula(case, monkeypatch):
    monkeypatch.setattr(unpadded, "SHORT_QUERIES", 768)
    assert_right(*(x.detach() for x in make_inputs(case, torch.bfloat16)[:3]), case)


@emulated
def test_a_later_call_of_the_layout_launches_the_same_on_its_own_tensors(monkeypatch):
    case = Case(70, 70, 56)
    first = [x.detach() for x in make_inputs(case, torch.float16)[:3]]
    assert_right(*first, case)
    monkeypatch.setattr(unpadded, "make_launch", None)
    assert_right(*(x + 1 for x in first), case)
    # the launch that is kept holds no tensor
    left = [weakref.ref(x) for x in first]
    del first
    gc.collect()
    assert not any(x() is not None for x in left)


def test_small_tiles_are_for_short_sequences_and_few_blocks():
    small, (large, *_) = unpadded.SHORT_TILES, unpadded.TILES
    tiles = functools.partial(unpadded.tiles_by_length, multiprocessors=132)
    assert tiles((64, 16, 768, 64)) == tiles((1, 12, 2048, 40)) == (small, large)
    assert tiles((64, 16, 769, 64)) == tiles((1, 12, 2200, 40)) == (large, small)
    assert tiles((1, 1, 1, 96)) == (unpadded.pick_tiles(96),)


@emulated
@pytest.mark.parametrize("step", [0.5, 40.0], ids=["a little", "a lot"])
def test_maxima_may_grow_from_tile_to_tile(step):
    q = torch.ones(1, 1, 64, 136, dtype=torch.bfloat16)
    # the first tile that is worked on is the last one
    tiles = torch.arange(5, 0, -1).repeat_interleave(112)[:, None]
    k = (torch.full((1, 1, 560, 136), step) * tiles).bfloat16()
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert_right(q, k, v, Case(64, 560, 136, False, heads=1, key_heads=1, scale=0.02))


# Backward


def gradients(
    case: Case,
    dtype: torch.dtype,
    *,
    angles: tuple[Tensor, Tensor] | None = None,
    deterministic: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients by the kernel, and by the formula in float64."""
    *inputs, grad_out = make_inputs(case, dtype)
    q, k, v = (x.detach() for x in inputs)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    scale = 1 / math.sqrt(case.head_dim)
    out, lse = formula(*exact, case)
    expected = torch.autograd.grad(out, exact, grad_out.double())
    settings = (out.detach().to(dtype), lse.detach().float(), case.is_causal, scale)
    with new_memory_is_nan():
        grads = launch.flash_backward(
            *(grad_out, q, k, v, *settings), angles=angles, deterministic=deterministic
        )
    return list(grads), list(expected)


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for grad, right in zip(found, expected):
        error = (grad.double() - right).norm() / right.norm()
        assert error < OF_GRADIENTS[grad.dtype]


BACKWARD = [
    Case(300, 300, 64, True, heads=2, key_heads=1, batch=1),
    Case(130, 290, 56, False, heads=1, key_heads=1, layout="tokens first"),
    Case(200, 200, 128, True, heads=1, key_heads=1, layout="amid NaN"),
    Case(70, 130, 72, False, heads=2, key_heads=1, batch=1),
    Case(150, 140, 96, True, heads=2, key_heads=2, batch=1),
    Case(300, 300, 192, True, heads=2, key_heads=1, batch=2),
    Case(130, 290, 144, False, heads=1, key_heads=1, layout="amid NaN"),
]


@emulated
@pytest.mark.parametrize("case", BACKWARD, ids=str)
def test_gradients_are_those_of_the_formula(case):
    dtype = torch.float16 if case.head_dim % 32 else torch.bfloat16
    assert_close(*gradients(case, dtype))


@emulated
def test_blocks_may_add_in_any_order():
    assert_close(*gradients(BACKWARD[0], torch.bfloat16, deterministic=False))


@emulated
def test_a_later_backward_call_of_the_layout_launches_the_same_on_its_own_tensors(monkeypatch):
    # the inputs live on, so that those of the second call lie elsewhere
    first = gradients(BACKWARD[3], torch.bfloat16)
    monkeypatch.setattr(fused, "make_launch", None)
    assert_close(*gradients(BACKWARD[3], torch.bfloat16))
    assert_close(*first)


@emulated
@pytest.mark.parametrize("head_dim", [64, 144])
def test_gradients_are_rotated_back(head_dim):
    case = Case(140, 130, head_dim, False, heads=1, key_heads=1, batch=1)
    angles = torch.rand(150, head_dim // 2)
    grads, expected = gradients(case, torch.bfloat16, angles=(angles.cos(), angles.sin()))
    of_q, of_k, of_v = expected
    assert_close(grads, [rotated(of_q, -angles), rotated(of_k, -angles), of_v])


# Compiled


@NEEDS_NVCC
@pytest.mark.parametrize("tiles", quick_at((192,), (*unpadded.TILES, unpadded.SHORT_TILES)))
def test_the_forward_kernel_fits_the_chip(tiles, tmp_path):
    macros = tiles.constants(is_bfloat16=True, is_causal=True)
    report, kernels = compile_kernels(tmp_path, "hopper_forward", macros, "sm_90a")
    # the assembler gave every matmul a wait of its own
    assert "serialized" not in report
    assert [spilled for _, spilled in kernels] == [0]


@NEEDS_NVCC
@pytest.mark.parametrize("tiles", quick_at((64, 192), fused.TILES))
def test_the_backward_kernel_fits_the_chip(tiles, tmp_path):
    # with all that a kernel can have to do: fewer registers are needed without
    macros = tiles.constants(is_bfloat16=True, is_causal=True, has_rope=True)
    report, kernels = compile_kernels(tmp_path, tiles.source, macros, "sm_90a")
    # the assembler gave every matmul a wait of its own
    assert "serialized" not in report
    # the warps that load have few registers, and at 64 the first warpgroup gives some to the second
    assert len(kernels) == 3
    assert max(spilled for _, spilled in kernels) <= 160
