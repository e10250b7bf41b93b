"""The Triton kernels of attention against the formula in float64, on a GPU and interpreted."""

import dataclasses
import functools
import gc
import os
import re

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.attention_cases import (
    EMPTY,
    GROUPED,
    LONG,
    SCALED,
    SQUARE_OR_NOT,
    STRIDED,
    Case,
    assert_error_at_most_twice_pytorchs,
    formula,
    largest,
    make_inputs,
    new_memory_is_nan,
    pytorchs_results,
    right_results,
    with_gradients,
)

pytest.importorskip("triton")

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
# The tests that take `device` try the kernels: on a GPU, and in a process of their own
# (`test_the_kernels_in_the_interpreter`) on the CPU.
KERNEL_DEVICES = ["cpu"] if INTERPRETING else [pytest.param("cuda", marks=pytest.mark.gpu)]
ON_KERNEL_DEVICES = pytest.mark.parametrize("device", KERNEL_DEVICES)
# The interpreter gets bfloat16 wrong.
SHORT_TYPES = [torch.float16] if INTERPRETING else [torch.float16, torch.bfloat16]
ON_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, *SHORT_TYPES], ids=str)
ON_MASKS = pytest.mark.parametrize("is_causal", [False, True])

PLAIN = Case(33, 33, 16, batch=1)
UNUSUAL_WIDTHS = [
    Case(97, 97, head_dim, is_causal)
    for head_dim in (1, 8, 40, 192, 256)
    for is_causal in (True, False)
]
SMALL = [
    Case(queries, keys, head_dim, is_causal, batch=1, key_heads=1)
    for (queries, keys, head_dim) in [(1, 1, 16), (63, 63, 32), (97, 40, 16), (40, 97, 80)]
    for is_causal in (True, False)
]


def grid() -> list:
    """The cases for this machine; of the many sizes in each width most count as slow."""
    if INTERPRETING:
        strided = [Case(33, 33, 16, layout=case.layout) for case in STRIDED[::2]]
        scaled = dataclasses.replace(PLAIN, scale=0.7)
        return [*SMALL, *strided, Case(33, 20, 16, heads=6, batch=1), scaled]
    many = [
        case
        if case.head_dim == 64 or (case.queries, case.keys) in [(97, 97), (128, 128)]
        else pytest.param(case, marks=pytest.mark.slow)
        for case in SQUARE_OR_NOT
    ]
    return [*many, *UNUSUAL_WIDTHS, *LONG, *GROUPED, *STRIDED, *SCALED]


@pytest.fixture(scope="module")
def kernels():
    """The file of the kernels, which only these tests import."""
    from lib import flash_attention_triton

    return flash_attention_triton


def ours(kernels, case: Case):
    """`flash_attention` with the settings of `case`."""
    return lambda q, k, v: kernels.flash_attention(
        q, k, v, is_causal=case.is_causal, scale=case.scale
    )


def by_the_class(kernels, case: Case):
    """The class on (batch · heads, tokens, head_dim)."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return kernels.FlashAttentionTriton.apply(*flat, case.is_causal).unflatten(0, q.shape[:2])

    return attention


@ON_KERNEL_DEVICES
@ON_DTYPES
@pytest.mark.parametrize("case", grid(), ids=str)
def test_the_kernels_error_is_at_most_twice_pytorchs(kernels, case, dtype, device):
    # a product of two factors, each in two TF32 parts, leaves out that of the lower ones: 2⁻²²
    roundings = 2 if dtype == torch.float32 and device == "cuda" else 1
    attention = kernels.flash_attention
    assert_error_at_most_twice_pytorchs(attention, case, dtype, device, roundings=roundings)


@pytest.mark.gpu
@pytest.mark.parametrize("case", grid(), ids=str)
def test_ieee_on_request_has_the_error_of_float32(kernels, case):
    attention = functools.partial(kernels.flash_attention, precision="ieee")
    assert_error_at_most_twice_pytorchs(attention, case, torch.float32, "cuda")


@ON_KERNEL_DEVICES
@ON_DTYPES
@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_the_kernels_give_zeros_where_there_is_nothing_to_see(kernels, case, dtype, device):
    inputs = make_inputs(case, dtype, device)
    with new_memory_is_nan():
        results = with_gradients(ours(kernels, case), inputs)
    for result, like in zip(results, (inputs[0], *inputs)):
        assert result.shape == like.shape
        assert (result == 0).all()


@ON_KERNEL_DEVICES
@ON_DTYPES
@ON_MASKS
@pytest.mark.parametrize("sizes", [(64, 64), (33, 49)], ids=str)
def test_the_kernels_class_saves_one_natural_log_sum_exp(kernels, sizes, is_causal, dtype, device):
    case = Case(*sizes, 32, is_causal, heads=1, key_heads=1)
    inputs = make_inputs(case, dtype, device)
    q, k, v = (x.squeeze(1) for x in inputs[:3])
    with new_memory_is_nan():
        out = kernels.FlashAttentionTriton.apply(q, k, v, is_causal)
    saved = [x for x in out.grad_fn.saved_tensors if x.shape == q.shape[:2]]
    assert len(saved) == 1
    assert saved[0].dtype == torch.float32
    lse = formula(*(x.detach().double() for x in inputs[:3]), case)[1].squeeze(1)
    torch.testing.assert_close(saved[0].double(), lse, rtol=1e-5, atol=1e-5)


@ON_KERNEL_DEVICES
@ON_MASKS
def test_the_kernels_class_gives_what_the_function_gives(kernels, is_causal, device):
    case = Case(63, 40, 32, is_causal, batch=1)
    inputs = make_inputs(case, torch.float32, device)
    results = with_gradients(by_the_class(kernels, case), inputs)
    right = with_gradients(ours(kernels, case), inputs)
    assert all(a.equal(b) for a, b in zip(results, right))


@ON_KERNEL_DEVICES
def test_the_kernels_class_is_not_causal_unless_asked(kernels, device):
    q, k, v, _ = (x.flatten(0, 1) for x in make_inputs(Case(9, 9, 16), torch.float32, device))
    out = kernels.FlashAttentionTriton.apply(q, k, v)
    assert out.equal(kernels.FlashAttentionTriton.apply(q, k, v, False))
    assert not out.equal(kernels.FlashAttentionTriton.apply(q, k, v, True))


@ON_KERNEL_DEVICES
@ON_DTYPES
def test_the_kernels_let_no_hidden_key_have_influence(kernels, dtype, device):
    # keys so far after the last query that no tile of any size on the diagonal holds them
    case = Case(20, 300, 16, batch=1)
    inputs = make_inputs(case, dtype, device)
    right = with_gradients(ours(kernels, case), inputs)
    with torch.no_grad():
        inputs[1][:, :, 256:], inputs[2][:, :, 256:] = float("nan"), float("nan")
    again = with_gradients(ours(kernels, case), inputs)
    assert all(a.equal(b) for a, b in zip(again, right))


@ON_KERNEL_DEVICES
@ON_MASKS
def test_the_kernels_take_large_scores_without_overflow(kernels, is_causal, device):
    case = Case(60, 60, 16, is_causal, batch=1)
    *leaves, grad_out = (x.detach() for x in make_inputs(case, torch.float32, device))
    inputs = (*((x * 1e4).requires_grad_() for x in leaves), grad_out)
    results = with_gradients(ours(kernels, case), inputs)
    torch.testing.assert_close(
        results[0].double(), right_results(inputs, case)[0], rtol=1e-3, atol=1
    )
    assert all(result.isfinite().all() for result in results)


@ON_KERNEL_DEVICES
@ON_MASKS
@pytest.mark.parametrize("sizes", [(70, 100), (100, 70)], ids=str)
@pytest.mark.parametrize("tile", [(16, 64), (64, 16), (32, 32)], ids=str)
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
@ON_MASKS
@pytest.mark.parametrize("head_dim", [16, 24])
def test_the_kernels_turn_gradients_back_by_the_positions(kernels, head_dim, is_causal, device):
    case = Case(33, 40, head_dim, is_causal, heads=2, key_heads=1, batch=1)
    *leaves, grad_out = make_inputs(case, torch.float32, device)
    frequencies = 0.1 ** torch.arange(head_dim // 2, device=device)
    angles = torch.arange(40, device=device)[:, None] * frequencies  # (tokens, head_dim / 2)
    turns = torch.polar(torch.ones_like(angles), angles)

    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns[: x.shape[2]]).flatten(-2)

    q, k, v = turned(leaves[0]), turned(leaves[1]), leaves[2]
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
@ON_DTYPES
@ON_MASKS
def test_the_kernels_repeat_to_the_bit(kernels, is_causal, dtype, device):
    n = 33 if INTERPRETING else 1000
    case = Case(n, n, 64, is_causal, batch=1)
    inputs = make_inputs(case, dtype, device)
    first = with_gradients(ours(kernels, case), inputs)
    for _ in range(1 if INTERPRETING else 5):
        again = with_gradients(ours(kernels, case), inputs)
        assert all(a.equal(b) for a, b in zip(again, first))


@ON_KERNEL_DEVICES
@ON_MASKS
@pytest.mark.parametrize("tokens", [64, 63, 100])
def test_the_kernels_give_a_key_of_minus_infinity_no_gradient(kernels, tokens, is_causal, device):
    q, k, v, _ = make_inputs(Case(tokens, tokens, 32), torch.float32, device)
    q = q.detach().abs().requires_grad_()
    k = k.detach()
    k[:, :, 2] = -torch.inf
    k.requires_grad_()
    out = kernels.flash_attention(q, k, v, is_causal=is_causal)
    grad_k, grad_v = torch.autograd.grad(out.sum(), (k, v))
    assert (grad_v[:, :, 2] == 0).all()
    assert grad_k.isfinite().all()


@ON_KERNEL_DEVICES
def test_the_kernels_give_zeros_where_all_scores_are_minus_infinity(kernels, device):
    q, v = (torch.ones(1, 1, 2, 16, device=device, requires_grad=True) for _ in range(2))
    k = torch.zeros(1, 1, 2, 16, device=device)
    k[:, :, 0] = -torch.inf
    out = kernels.flash_attention(q, k, v)
    assert out[0, 0, :, 0].tolist() == [0.0, 1.0]
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert grad[0, 0, :, 0].tolist() == [0.0, 1.0]


@ON_KERNEL_DEVICES
def test_no_gradient_goes_through_the_log_sum_exp(kernels, device):
    q = torch.ones(1, 1, 4, 16, device=device, requires_grad=True)
    out, lse = torch.ops.workbook.flash_attention(q, q, q, True, 0.25, "ieee")
    assert (out.requires_grad, lse.requires_grad) == (True, False)


@ON_KERNEL_DEVICES
def test_the_kernels_take_an_expanded_upstream_gradient(kernels, device):
    case = PLAIN
    *leaves, _ = make_inputs(case, torch.float32, device)
    gradients = torch.autograd.grad(ours(kernels, case)(*leaves).sum(), leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    right = torch.autograd.grad(formula(*wide, case)[0].sum(), wide)
    for a, b in zip(gradients, right):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_the_kernels_serve_a_single_input_that_wants_gradients(kernels, wanted, device):
    case = PLAIN
    inputs = make_inputs(case, torch.float32, device)
    right = with_gradients(ours(kernels, case), inputs)[1 + wanted]
    leaves = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(inputs[:3])]
    out = ours(kernels, case)(*leaves)
    assert torch.autograd.grad(out, leaves[wanted], inputs[3])[0].equal(right)


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("dtype", SHORT_TYPES, ids=str)
def test_the_kernels_under_autocast_compute_in_its_dtype(kernels, dtype, device):
    case = PLAIN
    inputs = make_inputs(case, torch.float32, device)
    *low, grad_out = (x.detach().to(dtype) for x in inputs)
    with torch.autocast(device, dtype):
        out = ours(kernels, case)(*inputs[:3])
    gradients = torch.autograd.grad(out, inputs[:3], grad_out)
    right = with_gradients(ours(kernels, case), (*(x.requires_grad_() for x in low), grad_out))
    assert out.equal(right[0])
    for gradient, b in zip(gradients, right[1:]):
        assert gradient.dtype == torch.float32
        assert gradient.equal(b.float())


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_kernels_refuse_derivatives_in_forward_mode(kernels, requires_grad, device):
    q = torch.ones(1, 1, 4, 16, device=device, requires_grad=requires_grad)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            kernels.flash_attention(dual, q, q)


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_the_kernels_under_autocast_refuse_what_they_refuse_otherwise(kernels, dtype, device):
    x = torch.ones(1, 1, 4, 16, dtype=dtype, device=device)
    with torch.autocast(device, torch.float16), pytest.raises(ValueError, match="dtypes of q, k"):
        kernels.flash_attention(x, x, x)


@ON_KERNEL_DEVICES
def test_the_kernels_under_autocast_take_mixed_dtypes(kernels, device):
    q, k, v, _ = (x.detach() for x in make_inputs(PLAIN, torch.float32, device))
    with torch.autocast(device, torch.float16):
        out = kernels.flash_attention(q, k.half(), v)
    assert out.equal(kernels.flash_attention(q.half(), k.half(), v.half()))


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("entry", [ours, by_the_class])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_kernels_under_activation_checkpointing(kernels, entry, use_reentrant, device):
    case = PLAIN
    inputs = make_inputs(case, torch.float32, device)
    right = with_gradients(entry(kernels, case), inputs)
    q, k, v, grad_out = inputs
    out = checkpoint(entry(kernels, case), q, k, v, use_reentrant=use_reentrant)
    # the reentrant form refuses torch.autograd.grad
    out.backward(grad_out)
    assert all(a.equal(b) for a, b in zip([out, q.grad, k.grad, v.grad], right))


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("entry", [ours, by_the_class])
@pytest.mark.parametrize("layout", ["heads first", "tokens first", "packed"])
def test_the_kernels_compile_into_one_graph(kernels, entry, layout, device):
    case = dataclasses.replace(PLAIN, layout=layout)
    inputs = make_inputs(case, torch.float32, device)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return entry(kernels, case)(q * 2, k, v) + 1

    torch.compiler.reset()
    backend = "aot_eager" if INTERPRETING else "inductor"
    compiled = torch.compile(attention, backend=backend, fullgraph=True)
    for a, b in zip(with_gradients(compiled, inputs), with_gradients(attention, inputs)):
        torch.testing.assert_close(a, b)


@ON_KERNEL_DEVICES
def test_the_kernels_compile_for_lengths_that_change(kernels, device):
    torch.compiler.reset()
    backend = "aot_eager" if INTERPRETING else "inductor"
    compiled = torch.compile(
        lambda q, k, v: kernels.flash_attention(q * 2, k, v),
        backend=backend,
        fullgraph=True,
        dynamic=True,
    )
    for length in (33, 48, 64):
        inputs = make_inputs(Case(length, length, 16, batch=1), torch.float32, device)
        right = with_gradients(lambda q, k, v: kernels.flash_attention(q * 2, k, v), inputs)
        for a, b in zip(with_gradients(compiled, inputs), right):
            torch.testing.assert_close(a, b)


@pytest.mark.skipif(INTERPRETING, reason="this is the process inside")
def test_the_kernels_in_the_interpreter(run_in_interpreter):
    run_in_interpreter(__file__)


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
    attention = functools.partial(kernels.flash_attention, is_causal=is_causal, precision="tf32")
    exact = with_gradients(ours(kernels, case), inputs)
    results = with_gradients(attention, inputs)
    for a, b, c, d in zip(results, peers, right_results(inputs, case), exact):
        assert largest(d - c) < largest(a - c) / 10
        # Triton cuts the last bits off, where PyTorch's products round: errors of one sign add up
        assert largest(a - c) <= 16 * largest(b - c)


def peak_bytes(attention, length: int, dtype: torch.dtype) -> int:
    """What a forward and backward pass of one head, 64 wide, takes beside its inputs."""
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


def make_huge(*shape: int) -> Tensor:
    """A bfloat16 tensor of more than 2³¹ elements, where there is memory for six."""
    size = torch.Size(shape).numel()
    assert size > 2**31
    if torch.cuda.mem_get_info()[0] < 6 * 2 * size:
        pytest.skip(f"needs {6 * 2 * size >> 30} GiB of GPU memory")
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def assert_last_batches_are_right(kernels, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor):
    """Of the last four batches, which lie beyond the 2³¹st element; q, k and v of one shape."""
    _, heads, tokens, head_dim = q.shape
    case = Case(tokens, tokens, head_dim, heads=heads, key_heads=heads)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    results = with_gradients(kernels.flash_attention, (*leaves, grad_out))
    right = right_results([x[-4:] for x in (q, k, v, grad_out)], case)
    for a, b in zip(results, right):
        torch.testing.assert_close(a[-4:].double(), b, rtol=0, atol=0.02 * largest(b))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.serial
def test_more_than_2_to_the_31_elements(kernels):
    x = make_huge(2**31 // (64 * 128) + 8, 1, 64, 128)
    # views of one tensor, which spares memory; equal q and k would leave next to no gradients
    assert_last_batches_are_right(kernels, x[:-3], x[1:-2], x[2:-1], x[3:])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("tokens_first", [False, True])
def test_strides_that_reach_beyond_2_to_the_31_elements(kernels, tokens_first):
    # 1025 tokens, or heads, of 64 numbers that are 2²¹ + 64 numbers apart
    wide = make_huge(1, 1025, 2**21 // 64 + 1, 64)
    parts = [wide[:, :, i : i + 16] for i in (0, 5, wide.shape[2] - 16, 40)]
    if tokens_first:
        parts = [part.transpose(1, 2) for part in parts]
    assert_last_batches_are_right(kernels, *parts)


def zeros(*shape: int, dtype=torch.float32, device="cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": zeros(2, 4, 5, 16)}, "k (2, 4, 5, 16)"),
        ({"q": zeros(2, 4, 5, 16)}, "q (2, 4, 5, 16)"),
        ({"q": zeros(3, 4, 5, 8)}, "q (3, 4, 5, 8)"),
        ({"v": zeros(2, 4, 6, 8)}, "v (2, 4, 6, 8)"),
        ({"q": zeros(2, 6, 5, 8)}, "heads of q divisible by heads of k and v"),
        ({"q": zeros(4, 5, 8)}, "q (4, 5, 8)"),
        ({"k": zeros(2, 4, 5, 8, dtype=torch.half)}, "torch.float16"),
        ({"k": zeros(2, 4, 5, 8, device="meta")}, "meta"),
        (dict.fromkeys("qkv", zeros(2, 4, 5, 8, dtype=torch.double)), "torch.float64"),
        (dict.fromkeys("qkv", zeros(2, 4, 5, 8, dtype=torch.int32)), "torch.int32"),
        (dict.fromkeys("qkv", zeros(2, 4, 5, 257)), "head_dim is 257; right is: from 1 to 256"),
        (dict.fromkeys("qkv", zeros(2, 4, 5, 0)), "head_dim is 0; right is: from 1 to 256"),
        ({"scale": 0.0}, "scale is 0.0; right is: above 0"),
        ({"scale": -1.0}, "scale is -1.0; right is: above 0"),
        ({"scale": float("nan")}, "scale is nan; right is: above 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_named(kernels, change, words):
    arguments = {name: zeros(2, 4, 5, 8) for name in "qkv"} | change
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        kernels.flash_attention(**arguments)
    assert "right is: " in str(raised.value)


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 5, 8), (3, 5, 8), (3, 5, 8)],
        [(2, 5, 8), (2, 5, 8), (2, 6, 8)],
        [(2, 5, 8), (2, 5, 16), (2, 5, 16)],
    ],
    ids=str,
)
def test_the_class_refuses_what_does_not_fit(kernels, shapes):
    with pytest.raises(ValueError, match="right is: "):
        kernels.FlashAttentionTriton.apply(*(zeros(*shape) for shape in shapes))


def test_a_token_stride_beyond_32_bits_within_a_tile_is_copied(kernels):
    x = torch.empty_strided((1, 1, 3, 16), (0, 0, 2**24, 1), dtype=torch.half)
    assert kernels.with_unit_stride(x).is_contiguous()
    assert kernels.with_unit_stride(x[:, :, :1].contiguous()).stride(-1) == 1


def test_a_cpu_without_the_interpreter_is_refused(kernels, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = zeros(1, 1, 3, 16)
    with pytest.raises(ValueError, match="q is on cpu; right is: a CUDA device"):
        kernels.flash_attention(x, x, x)
    with pytest.raises(ValueError, match="q is on cpu; right is: a CUDA device"):
        kernels.FlashAttentionTriton.apply(x[0], x[0], x[0])
