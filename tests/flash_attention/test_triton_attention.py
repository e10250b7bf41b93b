"""The portable Triton kernels: tiles, precisions, memory, on a GPU and interpreted.

What they have in common with other implementations is in `test_every_implementation`.
"""

import functools
import gc

import pytest
import torch

from tests.flash_attention import test_every_implementation
from tests.flash_attention.cases import (
    GROUPED,
    LONG,
    SMALL,
    Case,
    assert_error_at_most_twice_pytorchs,
    largest,
    make_inputs,
    pytorchs_results,
    right_results,
    rotated,
    with_gradients,
)
from tests.model.kernels import (
    ON_KERNEL_DEVICES,
    OUTSIDE_THE_INTERPRETER,
    assert_passed,
)

# Whose tests of kernels are tried in the interpreter too.
INTERPRETED = (__file__, test_every_implementation.__file__)

pytest.importorskip("triton")

ON_MASKS = pytest.mark.parametrize("is_causal", [False, True])


@pytest.fixture(scope="module")
def kernels():
    """The module under test, imported only when a test runs."""
    from lib.flash_attention import triton_attention

    return triton_attention


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SMALL, *LONG, *GROUPED], ids=str)
def test_ieee_on_request_has_the_error_of_float32(kernels, case):
    attention = functools.partial(kernels.flash_attention, precision="ieee")
    assert_error_at_most_twice_pytorchs(attention, case, torch.float32, "cuda")


@ON_KERNEL_DEVICES
@pytest.mark.parametrize(
    ("tile", "sizes", "is_causal"),
    [((16, 64), (70, 100), True), ((64, 16), (100, 70), True), ((32, 32), (70, 40), False)],
    ids=str,
)
def test_the_kernels_are_right_in_any_tiles(kernels, tile, sizes, is_causal, device):
    case = Case(*sizes, 16, is_causal, heads=1, key_heads=1, batch=1)
    inputs = make_inputs(case, torch.float32, device)
    q, k, v, grad_out = (x.detach() for x in inputs)
    tiles = kernels.Tiles(*tile, num_warps=4, num_stages=1)
    out, lse = kernels.flash_forward(q, k, v, is_causal, 0.25, tiles=tiles)
    gradients = kernels.flash_backward(
        grad_out, q, k, v, out, lse, is_causal, 0.25, tiles=(tiles, tiles)
    )
    for a, b in zip((out, *gradients), right_results(inputs, case)):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@ON_KERNEL_DEVICES
@pytest.mark.parametrize(("head_dim", "is_causal"), [(16, True), (24, False)])
def test_the_kernels_rotate_gradients_back_by_the_positions(kernels, head_dim, is_causal, device):
    case = Case(33, 40, head_dim, is_causal, heads=2, key_heads=1, batch=1)
    *leaves, grad_out = make_inputs(case, torch.float32, device)
    frequencies = 0.1 ** torch.arange(head_dim // 2, device=device)
    angles = torch.arange(40, device=device)[:, None] * frequencies  # (tokens, head_dim / 2)
    q, k, v = rotated(leaves[0], angles), rotated(leaves[1], angles), leaves[2]
    settings = (is_causal, 0.2)
    saved = [x.detach() for x in (q, k, v)]
    saved += kernels.flash_forward(*saved, *settings)
    plain = kernels.flash_backward(grad_out, *saved, *settings)
    right = torch.autograd.grad((q, k, v), leaves, plain)
    results = kernels.flash_backward(
        grad_out, *saved, *settings, angles=(angles.cos(), angles.sin())
    )
    torch.testing.assert_close(results, right, rtol=1e-4, atol=1e-5)


@ON_KERNEL_DEVICES
def test_no_gradient_goes_through_the_log_sum_exp_of_the_kernels(kernels, device):
    q = torch.ones(1, 1, 4, 16, device=device, requires_grad=True)
    out, lse = torch.ops.workbook.flash_attention(q, q, q, True, 0.25, "ieee", True)
    assert (out.requires_grad, lse.requires_grad) == (True, False)


@ON_KERNEL_DEVICES
def test_the_kernels_refuse_derivatives_in_forward_mode(kernels, device):
    q = torch.ones(1, 1, 4, 16, device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            kernels.flash_attention(dual, q, q)


@pytest.mark.gpu
@ON_MASKS
def test_tf32_on_request_has_the_error_of_tf32(kernels, is_causal):
    case = Case(500, 500, 64, is_causal)
    inputs = make_inputs(case, torch.float32, "cuda")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        peers = pytorchs_results(inputs, case)
    finally:
        torch.set_float32_matmul_precision(before)
    attention = functools.partial(kernels.flash_attention, is_causal=is_causal)
    exact = with_gradients(attention, inputs)
    results = with_gradients(functools.partial(attention, precision="tf32"), inputs)
    for a, b, c, d in zip(results, peers, right_results(inputs, case), exact):
        assert largest(d - c) < largest(a - c) / 10
        # Triton cuts the last bits off, where PyTorch's products round: errors of one sign add up
        assert largest(a - c) <= 16 * largest(b - c)


def peak_bytes(attention, length: int, dtype: torch.dtype) -> int:
    """Peak memory of a forward and backward pass of one head, without its inputs."""
    inputs = make_inputs(Case(length, length, 64, heads=1, key_heads=1, batch=1), dtype, "cuda")
    with_gradients(attention, inputs)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with_gradients(attention, inputs)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.serial
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_grows_linearly(kernels, dtype):
    lengths = (4096, 16384)
    short, long = (peak_bytes(kernels.flash_attention, n, dtype) for n in lengths)
    assert long <= 4.2 * short
    # the output, three gradients, and in float32 a log-sum-exp and a delta for each row
    size = dtype.itemsize
    assert long <= 2 * lengths[1] * (4 * 64 * size + 2 * 4)


@pytest.mark.gpu
@pytest.mark.serial
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_forward_pass_allocates_its_results_and_no_more(kernels, dtype):
    q, k, v = (torch.randn(1, 8, 2048, 64, device="cuda", dtype=dtype) for _ in range(3))
    kernels.flash_attention(q, k, v)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kernels.flash_attention(q, k, v)
    results = q.numel() * dtype.itemsize + q.numel() // 64 * 4
    assert torch.cuda.max_memory_allocated() - before == results


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("layout", ["many heads", "far tokens", "far heads"])
def test_tensors_and_strides_beyond_2_to_the_31_elements(kernels, layout):
    if torch.cuda.mem_get_info()[0] < 26 << 30:
        pytest.skip("needs 26 GiB of GPU memory")
    if layout == "many heads":
        x = torch.randn(2**31 // (64 * 128) + 8, 1, 64, 128, dtype=torch.bfloat16, device="cuda")
        # views of one tensor, which spares memory; equal q and k would leave next to no gradients
        parts = [x[:-3], x[1:-2], x[2:-1], x[3:]]
    else:
        # 1025 tokens, or heads, of 64 numbers that are 2²¹ + 64 numbers apart
        x = torch.randn(1, 1025, 2**21 // 64 + 1, 64, dtype=torch.bfloat16, device="cuda")
        parts = [x[:, :, i : i + 16] for i in (0, 5, x.shape[2] - 16, 40)]
        if layout == "far tokens":
            parts = [part.transpose(1, 2) for part in parts]
    _, heads, tokens, head_dim = parts[0].shape
    case = Case(tokens, tokens, head_dim, heads=heads, key_heads=heads)
    leaves = [part.detach().requires_grad_() for part in parts[:3]]
    results = with_gradients(kernels.flash_attention, (*leaves, parts[3]))
    # the last batches are the farthest
    right = right_results([part[-4:] for part in parts], case)
    for a, b in zip(results, right):
        torch.testing.assert_close(a[-4:].double(), b, rtol=0, atol=0.02 * largest(b))


def test_a_token_stride_beyond_32_bits_within_a_tile_is_copied(kernels):
    x = torch.empty_strided((1, 1, 3, 16), (0, 0, 2**24, 1), dtype=torch.half)
    assert kernels.with_unit_stride(x).is_contiguous()
    assert kernels.with_unit_stride(x[:, :, :1].contiguous()).stride(-1) == 1


def test_the_interpreter_refuses_bfloat16_which_it_would_multiply_as_integers(kernels, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.zeros(1, 1, 3, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"q must be float16 or float32 .*, got torch\.bfloat16"):
        kernels.flash_attention(x, x, x)
    with pytest.raises(ValueError, match=r"q must be float16 or float32 .*, got torch\.bfloat16"):
        kernels.FlashAttentionTriton.apply(x[0], x[0], x[0])


def test_a_cpu_without_the_interpreter_is_refused(kernels, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.zeros(1, 1, 3, 16)
    with pytest.raises(ValueError, match="q must be on a CUDA device"):
        kernels.flash_attention(x, x, x)
    with pytest.raises(ValueError, match="q must be on a CUDA device"):
        kernels.FlashAttentionTriton.apply(x[0], x[0], x[0])


@OUTSIDE_THE_INTERPRETER
def test_the_kernels_in_the_interpreter(tried_in_interpreter):
    assert_passed(tried_in_interpreter)
