"""Tiled attention against the formula in float64: tiles, memory, types, errors.

What it has in common with the kernels is in `test_every_implementation`.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.flash_attention.reference import backward, flash_attention, forward
from tests.flash_attention.cases import Case, make_inputs, right_results, with_gradients
from tests.operators import Operators

ON_MASKS = pytest.mark.parametrize("is_causal", [False, True])


def ours(case: Case, **tiles: int):
    """`flash_attention` with the settings of `case`."""
    return lambda q, k, v: flash_attention(
        q, k, v, is_causal=case.is_causal, scale=case.scale, **tiles
    )


@settings(max_examples=60)
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


def test_log_sum_exp_of_no_keys_is_minus_infinity():
    q, k = torch.ones(2, 3, 4), torch.ones(2, 0, 4)
    out, lse = forward(q, k, k, False, 1.0, 2, 2)
    assert out.equal(torch.zeros(2, 3, 4))
    assert lse.equal(torch.full((2, 3), -math.inf))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@ON_MASKS
def test_low_precision_is_computed_in_float32_and_rounded_once(dtype, is_causal):
    # also the sum of the gradients of heads that share keys
    q, k, v, grad_out = (x.detach() for x in make_inputs(Case(100, 100, 32, key_heads=1), dtype))
    settings = (is_causal, 0.2, 16, 16)
    out, lse = forward(q, k, v, *settings)
    wide = forward(q.float(), k.float(), v.float(), *settings)
    assert out.equal(wide[0].to(dtype))
    assert lse.equal(wide[1])
    saved = (grad_out, q, k, v, out)
    gradients = backward(*saved, lse, *settings)
    wide = backward(*(x.float() for x in saved), lse, *settings)
    assert all(a.equal(b.to(dtype)) for a, b in zip(gradients, wide))


def operators_of(queries: int, keys: int, is_causal: bool, tile: int = 32) -> list[Operators]:
    """Operators of the forward and of the backward pass; one head, head_dim 16, float32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 16, generator=generator) for n in (queries, keys, keys))
    settings = (is_causal, 0.25, tile, tile)
    with Operators() as of_forward:
        out, lse = forward(q, k, v, *settings)
    with Operators() as of_backward:
        backward(out, q, k, v, out, lse, *settings)
    return [of_forward, of_backward]


@ON_MASKS
def test_no_tensor_grows_faster_than_the_length(is_causal):
    for short, long in zip(operators_of(128, 128, is_causal), operators_of(512, 512, is_causal)):
        # q has 16 numbers a token, a tile of scores 32 x 32, and all scores would be 512²
        assert max(short.made.values()) == short.made[torch.float32] == 128 * 16
        assert max(long.made.values()) == long.made[torch.float32] == 512 * 16


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


@pytest.mark.parametrize("layout", ["tokens first", "transposed"])
def test_the_operators_do_what_they_are_registered_to_do(layout):
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
    q, k, v, _ = make_inputs(Case(3, 3, 4), torch.float64)
    (gradient,) = torch.autograd.grad(flash_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


def test_autocast_leaves_float64_alone_and_refuses_integers():
    wide = make_inputs(Case(9, 9, 8), torch.float64)[:3]
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attention(*wide)
    assert out.equal(flash_attention(*wide))
    x = torch.zeros(1, 1, 4, 16, dtype=torch.int64)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="must be floating-point numbers"),
    ):
        flash_attention(x, x, x)


def test_a_first_tile_of_infinitely_small_scores_counts_as_nothing():
    q, k, v = (
        torch.randn(1, 1, n, 16, generator=torch.Generator().manual_seed(n)) for n in (4, 300, 300)
    )
    q, k[:, :, :128] = q.abs(), -math.inf
    out = flash_attention(q, k, v, is_causal=False)
    torch.testing.assert_close(
        out, flash_attention(q, k[:, :, 128:], v[:, :, 128:], is_causal=False)
    )
