"""The backward kernel for Hopper GPUs in CUDA C++: on a CPU, by the emulator, and compiled."""

import math

import pytest
import torch
from torch import Tensor

from tests.flash_attention.cases import Case, formula, make_inputs, new_memory_is_nan, rotated
from tests.flash_attention.cuda.emulator import NEEDS_COMPILER, emulate_hopper
from tests.flash_attention.cuda.test_build import NEEDS_NVCC, compile_kernels, quick_at

pytest.importorskip("triton")
try:
    from lib.flash_attention.hopper import fused, launch
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

# Of the formula in float64: PyTorch's own gradients in these dtypes are as far from it.
LARGEST_ERROR = {torch.bfloat16: 0.006, torch.float16: 0.0008}


EMULATED = pytest.mark.usefixtures("_emulated")


@pytest.fixture
def _emulated(monkeypatch):
    """The launcher takes the kernel, on a CPU that counts as one multiprocessor."""
    emulate_hopper(monkeypatch)
    monkeypatch.setattr(launch, "_one_kernel_is_faster", lambda q, k, is_causal: True)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 1)
    # a head a section
    monkeypatch.setattr(launch, "CACHE_BYTES", 1)


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
        assert error < LARGEST_ERROR[grad.dtype]


CASES = [
    Case(300, 300, 64, True, heads=2, key_heads=1, batch=1),
    Case(130, 290, 56, False, heads=1, key_heads=1, layout="tokens first"),
    Case(200, 200, 128, True, heads=1, key_heads=1, layout="amid NaN"),
    Case(70, 130, 72, False, heads=2, key_heads=1, batch=1),
    Case(150, 140, 96, True, heads=2, key_heads=2, batch=1),
    Case(300, 300, 192, True, heads=2, key_heads=1, batch=2),
    Case(130, 290, 144, False, heads=1, key_heads=1, layout="amid NaN"),
]


@NEEDS_COMPILER
@EMULATED
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_the_formula(case):
    dtype = torch.float16 if case.head_dim % 32 else torch.bfloat16
    assert_close(*gradients(case, dtype))


@NEEDS_COMPILER
@EMULATED
def test_blocks_may_add_in_any_order():
    assert_close(*gradients(CASES[0], torch.bfloat16, deterministic=False))


@NEEDS_COMPILER
@EMULATED
def test_a_later_call_of_the_layout_launches_the_same_on_its_own_tensors(monkeypatch):
    # the inputs live on, so that those of the second call lie elsewhere
    first = gradients(CASES[3], torch.bfloat16)
    monkeypatch.setattr(fused, "make_launch", None)
    assert_close(*gradients(CASES[3], torch.bfloat16))
    assert_close(*first)


@NEEDS_COMPILER
@EMULATED
@pytest.mark.parametrize("head_dim", [64, 144])
def test_gradients_are_rotated_back(head_dim):
    case = Case(140, 130, head_dim, False, heads=1, key_heads=1, batch=1)
    angles = torch.rand(150, head_dim // 2)
    grads, expected = gradients(case, torch.bfloat16, angles=(angles.cos(), angles.sin()))
    of_q, of_k, of_v = expected
    assert_close(grads, [rotated(of_q, -angles), rotated(of_k, -angles), of_v])


@NEEDS_NVCC
@pytest.mark.parametrize("tiles", quick_at((64, 192), fused.TILES))
def test_the_kernel_fits_the_chip(tiles, tmp_path):
    # with all that a kernel can have to do: fewer registers are needed without
    macros = tiles.constants(is_bfloat16=True, is_causal=True, has_rope=True)
    report, kernels = compile_kernels(tmp_path, tiles.source, macros, "sm_90a")
    # the assembler gave every matmul a wait of its own
    assert "serialized" not in report
    # the warps that load have few registers, and at 64 the first warpgroup gives some to the second
    assert len(kernels) == 3
    assert max(spilled for _, spilled in kernels) <= 160
