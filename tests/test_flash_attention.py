"""Tiled attention against the formula in float64: results, tiles, memory, types, errors."""

import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lib.flash_attention import FlashAttention, backward, flash_attention, forward
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
    make_inputs,
    right_results,
    with_gradients,
)

ON_DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)


def ours(case: Case, **tiles: int):
    """`flash_attention` with the settings of `case`."""
    return lambda q, k, v: flash_attention(
        q, k, v, is_causal=case.is_causal, scale=case.scale, **tiles
    )


SCALED_ODDLY = [Case(65, 65, 32, scale=scale) for scale in (0.0, -0.3)]


@ON_DTYPES
@pytest.mark.parametrize("case", SQUARE_OR_NOT + GROUPED + STRIDED + SCALED + SCALED_ODDLY, ids=str)
def test_error_is_at_most_twice_pytorchs(case, dtype):
    assert_error_at_most_twice_pytorchs(flash_attention, case, dtype)


@pytest.mark.parametrize("case", LONG, ids=str)
def test_error_of_many_tiles_is_at_most_twice_pytorchs(case):
    assert_error_at_most_twice_pytorchs(flash_attention, case, torch.float32)


@pytest.mark.gpu
@ON_DTYPES
@pytest.mark.parametrize("case", LONG + GROUPED + STRIDED + SCALED, ids=str)
def test_error_on_a_gpu_is_at_most_twice_pytorchs(case, dtype):
    assert_error_at_most_twice_pytorchs(flash_attention, case, dtype, "cuda")


@settings(max_examples=150)
@given(data=st.data())
def test_any_shape_in_any_tiles_is_the_formula(data):
    size, key_heads = st.integers(0, 40), data.draw(st.integers(1, 3))
    case = Case(
        queries=data.draw(size),
        keys=data.draw(size),
        head_dim=data.draw(st.integers(1, 9)),
        is_causal=data.draw(st.booleans()),
        heads=key_heads * data.draw(st.integers(1, 3)),
        key_heads=key_heads,
        scale=data.draw(st.sampled_from([None, 1.5, -0.5, 0.0])),
    )
    tiles = {name: data.draw(st.integers(1, 45)) for name in ("query_tile", "key_tile")}
    inputs = make_inputs(case, torch.float64)
    for a, b in zip(with_gradients(ours(case, **tiles), inputs), right_results(inputs, case)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_gradients_are_the_slopes(is_causal, key_heads):
    case = Case(5, 7, 3, is_causal, key_heads=key_heads)
    *leaves, _ = make_inputs(case, torch.float64)
    assert torch.autograd.gradcheck(ours(case, query_tile=2, key_tile=3), leaves)


@pytest.mark.parametrize("case", EMPTY, ids=str)
@ON_DTYPES
def test_nothing_to_see_gives_zeros(case, dtype):
    for result in with_gradients(ours(case), make_inputs(case, dtype)):
        assert (result == 0).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(97, 97), (97, 63), (63, 97)], ids=str)
def test_the_class_saves_one_natural_log_sum_exp(sizes, is_causal, dtype):
    case = Case(*sizes, 32, is_causal)
    q, k, v, _ = (x.flatten(0, 1) for x in make_inputs(case, dtype))
    out = FlashAttention.apply(q, k, v, is_causal)
    saved = [x for x in out.grad_fn.saved_tensors if x.shape == q.shape[:2]]
    assert len(saved) == 1
    assert saved[0].dtype == torch.promote_types(dtype, torch.float32)
    one_head = Case(*sizes, 32, is_causal, heads=1, key_heads=1)
    right, lse = formula(*(x.unsqueeze(1).double() for x in (q, k, v)), one_head)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), right.squeeze(1), rtol=8 * step, atol=8 * step)
    torch.testing.assert_close(saved[0].double(), lse.squeeze(1), rtol=1e-5, atol=1e-5)


def test_the_class_is_not_causal_unless_asked():
    q, k, v, _ = (x.flatten(0, 1) for x in make_inputs(Case(9, 9, 8), torch.float32))
    out = FlashAttention.apply(q, k, v)
    assert out.equal(FlashAttention.apply(q, k, v, False))
    assert not out.equal(FlashAttention.apply(q, k, v, True))


def test_log_sum_exp_of_no_keys_is_minus_infinity():
    q, k = torch.ones(2, 3, 4), torch.ones(2, 0, 4)
    out, lse = forward(q, k, k, False, 1.0, 2, 2)
    assert out.equal(torch.zeros(2, 3, 4))
    assert lse.equal(torch.full((2, 3), -math.inf))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_low_precision_is_computed_in_float32_and_rounded_once(dtype, is_causal):
    q, k, v, grad_out = (x.detach() for x in make_inputs(Case(100, 100, 32), dtype))
    settings = (is_causal, 0.2, 16, 16)
    out, lse = forward(q, k, v, *settings)
    wide = forward(q.float(), k.float(), v.float(), *settings)
    assert out.equal(wide[0].to(dtype))
    assert lse.equal(wide[1])
    saved = (grad_out, q, k, v, out)
    gradients = backward(*saved, lse, *settings)
    wide = backward(*(x.float() for x in saved), lse, *settings)
    assert all(a.equal(b.to(dtype)) for a, b in zip(gradients, wide))


@pytest.mark.parametrize("is_causal", [False, True])
def test_large_scores_do_not_overflow(is_causal):
    case = Case(200, 200, 16, is_causal)
    inputs = [x.detach() * 1e4 for x in make_inputs(case, torch.float32)]
    inputs = [*(x.requires_grad_() for x in inputs[:3]), inputs[3]]
    # apart from ties one key has all the weight, and float32 must find the same one
    out, *gradients = with_gradients(ours(case), inputs)
    torch.testing.assert_close(out.double(), right_results(inputs, case)[0], rtol=1e-3, atol=1)
    assert all(gradient.isfinite().all() for gradient in gradients)


class Operators(TorchDispatchMode):
    """Notes the name of each operator and the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


def operators_of(queries: int, keys: int, is_causal: bool, tile: int = 32) -> list[Operators]:
    """Those of the forward and of the backward pass; one head, 16 wide, float32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 16, generator=generator) for n in (queries, keys, keys))
    settings = (is_causal, 0.25, tile, tile)
    with Operators() as of_forward:
        out, lse = forward(q, k, v, *settings)
    with Operators() as of_backward:
        backward(out, q, k, v, out, lse, *settings)
    return [of_forward, of_backward]


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_tensor_grows_faster_than_the_length(is_causal):
    for short, long in zip(operators_of(256, 256, is_causal), operators_of(1024, 1024, is_causal)):
        # q has 16 numbers a token, a tile of scores 32 x 32, and all scores would be 1024²
        assert short.largest == 256 * 16 * 4
        assert long.largest == 1024 * 16 * 4


@pytest.mark.parametrize(
    ("queries", "keys", "visited", "on_diagonal"),
    # tiles of 32 x 32
    [(128, 128, 10, 4), (128, 64, 7, 2), (64, 128, 3, 2), (100, 100, 10, 4), (32, 1, 1, 0)],
)
def test_hidden_tiles_are_not_visited_and_diagonal_ones_alone_masked(
    queries, keys, visited, on_diagonal
):
    of_forward, of_backward = operators_of(queries, keys, is_causal=True)
    assert of_forward.names.count("bmm") == 2 * visited
    assert of_backward.names.count("bmm") == 5 * visited
    for operators in (of_forward, of_backward):
        assert operators.names.count("masked_fill") == on_diagonal


def test_full_attention_has_no_mask():
    for operators in operators_of(100, 70, is_causal=False):
        assert "masked_fill" not in operators.names


def test_keys_that_nobody_sees_have_no_influence():
    case = Case(40, 100, 16)
    inputs = make_inputs(case, torch.float32)
    right = with_gradients(ours(case, query_tile=20, key_tile=20), inputs)
    with torch.no_grad():
        inputs[1][:, :, 40:], inputs[2][:, :, 40:] = math.nan, math.nan
    again = with_gradients(ours(case, query_tile=20, key_tile=20), inputs)
    assert all(a.equal(b) for a, b in zip(again, right))


@ON_DTYPES
def test_repeats_are_equal_to_the_bit(dtype):
    case = Case(150, 150, 32, heads=4)
    inputs = make_inputs(case, dtype)
    first, second = (with_gradients(ours(case), inputs) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second))


def test_the_upstream_gradient_may_be_an_expanded_number():
    case = Case(9, 9, 8)
    *leaves, _ = make_inputs(case, torch.float64)
    gradients = torch.autograd.grad(ours(case)(*leaves).sum(), leaves)
    right = torch.autograd.grad(formula(*leaves, case)[0].sum(), leaves)
    torch.testing.assert_close(gradients, right)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_only_one_input_may_want_gradients(wanted):
    case = Case(9, 9, 8)
    inputs = make_inputs(case, torch.float64)
    right = right_results(inputs, case)[1 + wanted]
    leaves = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(inputs[:3])]
    (gradient,) = torch.autograd.grad(ours(case)(*leaves), leaves[wanted], inputs[3])
    torch.testing.assert_close(gradient, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_as_if_the_inputs_had_its_dtype(dtype):
    case = Case(97, 97, 32)
    inputs = make_inputs(case, torch.float32)
    low = [x.detach().to(dtype) for x in inputs]
    low = [*(x.requires_grad_() for x in low[:3]), low[3]]
    with torch.autocast("cpu", dtype):
        # the backward pass, too, is not to lose float32 between its tiles
        results = with_gradients(ours(case), [*inputs[:3], low[3]])
    right = with_gradients(ours(case), low)
    assert results[0].dtype == dtype
    for a, b in zip(results, right):
        torch.testing.assert_close(a.to(dtype), b, rtol=0, atol=0)
    assert all(gradient.dtype == torch.float32 for gradient in results[1:])


def test_autocast_takes_mixed_dtypes():
    q, k, v, _ = make_inputs(Case(9, 9, 8), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attention(q, k.bfloat16(), v)
    assert out.equal(flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_autocast_leaves_float64_alone():
    *leaves, _ = make_inputs(Case(9, 9, 8), torch.float64)
    right = flash_attention(*leaves)
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attention(*leaves).equal(right)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(use_reentrant):
    case = Case(97, 97, 32)
    inputs = make_inputs(case, torch.float32)

    def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(ours(case), q, k, v, use_reentrant=use_reentrant)

    q, k, v, grad_out = inputs
    right = with_gradients(ours(case), inputs)
    out = checkpointed(q, k, v)
    # the reentrant form refuses torch.autograd.grad
    out.backward(grad_out)
    assert all(a.equal(b) for a, b in zip([out, q.grad, k.grad, v.grad], right))


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_compiles_into_one_graph(backend, key_heads):
    case = Case(97, 97, 32, key_heads=key_heads, layout="tokens first")
    inputs = make_inputs(case, torch.float32)
    compiled = torch.compile(
        lambda q, k, v: ours(case)(q * 2, k, v) + 1, backend=backend, fullgraph=True
    )
    results = with_gradients(compiled, inputs)
    right = with_gradients(lambda q, k, v: ours(case)(q * 2, k, v) + 1, inputs)
    for a, b in zip(results, right):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", ["heads first", "tokens first", "amid NaN", "transposed"])
def test_the_operators_are_as_they_are_registered(layout):
    case = Case(9, 7, 8, layout=layout)
    q, k, v, grad_out = (x.detach() for x in make_inputs(case, torch.float32))
    settings = (True, 0.3, 4, 4)
    checks = ("test_schema", "test_faketensor")
    names = torch.ops.workbook
    torch.library.opcheck(
        names.flash_attention_torch.default, (q, k, v, *settings), test_utils=checks
    )
    saved = (q, k, v, *forward(q, k, v, *settings))
    torch.library.opcheck(
        names.flash_attention_torch_backward.default,
        (grad_out, *saved, *settings),
        test_utils=checks,
    )


def test_gradients_of_gradients_are_refused():
    case = Case(3, 3, 4)
    q, k, v, _ = make_inputs(case, torch.float64)
    (gradient,) = torch.autograd.grad(ours(case)(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


def zeros(*shape: int, dtype=torch.float32, device="cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": zeros(2, 4, 5, 16)}, r"v has shape \(2, 4, 5, 8\); right is: \(2, 4, 5, 16\), as k"),
        ({"q": zeros(2, 4, 5, 16)}, "k has head_dim 8; right is: 16, as q"),
        ({"q": zeros(3, 4, 5, 8)}, "k has batch 2; right is: 3, as q"),
        ({"v": zeros(2, 4, 6, 8)}, r"v has shape \(2, 4, 6, 8\); right is: \(2, 4, 5, 8\), as k"),
        ({"q": zeros(2, 6, 5, 8)}, "heads 6 of q is not divisible by heads 4 of k and v"),
        ({"q": zeros(2, 3, 5, 8)}, "heads 3 of q is not divisible by heads 4 of k and v"),
        (
            {"k": zeros(2, 4, 5, 8, dtype=torch.half)},
            "k has dtype torch.float16; right is",
        ),
        ({"v": zeros(2, 4, 5, 8, dtype=torch.double)}, "v has dtype torch.float64; right is"),
        ({"k": zeros(2, 4, 5, 8, device="meta")}, "k has device meta; right is: cpu, as q"),
        ({"q": zeros(4, 5, 8)}, r"q has shape \(4, 5, 8\); right is: \(batch, heads, tokens, hea"),
        (dict.fromkeys("qkv", zeros(2, 4, 5, 0)), "q has head_dim 0; right is: at least 1"),
        ({"query_tile": 0}, "query_tile is 0; right is: at least 1"),
        ({"key_tile": -1}, "key_tile is -1; right is: at least 1"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    arguments = {name: zeros(2, 4, 5, 8) for name in "qkv"} | change
    with pytest.raises(ValueError, match=message):
        flash_attention(**arguments)


def test_integers_are_refused():
    q = torch.ones(1, 1, 2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"q has dtype torch.int64; right is: one of torch.f"):
        flash_attention(q, q, q)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 5, 8), (3, 5, 8), (3, 5, 8)], "k has batch 3; right is: 2, as q"),
        ([(2, 5, 8), (2, 5, 8), (2, 6, 8)], r"v has shape \(2, 6, 8\)"),
        ([(2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)], "k has number of dimensions 4; right is: 3"),
        ([(5, 8), (5, 8), (5, 8)], r"q has shape \(5, 8\); right is: \(batch, queries, head_dim\)"),
    ],
)
def test_the_class_names_what_does_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        FlashAttention.apply(*(zeros(*shape) for shape in shapes))


def test_a_first_tile_of_infinitely_small_scores_counts_as_nothing():
    q, k, v = (
        torch.randn(1, 1, n, 16, generator=torch.Generator().manual_seed(n)) for n in (4, 300, 300)
    )
    q, k[:, :, :128] = q.abs(), -math.inf
    out = flash_attention(q, k, v, is_causal=False)
    torch.testing.assert_close(
        out, flash_attention(q, k[:, :, 128:], v[:, :, 128:], is_causal=False)
    )


def test_where_all_scores_are_minus_infinity_there_is_no_gradient():
    q, v = (torch.ones(1, 1, 2, 16, requires_grad=True) for _ in range(2))
    k = torch.zeros(1, 1, 2, 16)
    k[:, :, 0] = -math.inf
    out = flash_attention(q, k, v)
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert out[0, 0, :, 0].tolist() == grad[0, 0, :, 0].tolist() == [0.0, 1.0]


def test_integers_are_refused_under_autocast_too():
    x = torch.ones(1, 1, 4, 16, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="q has dtype"):
        flash_attention(x, x, x)
