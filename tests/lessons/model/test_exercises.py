"""The exercises of notebook 02 against independent answers; their mistakes: test_exercise.py."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from lib.lessons.exercise import draw_inputs, verdict
from lib.lessons.model.exercises import (
    attention,
    backward,
    bigram_gradient,
    bill,
    block,
    cross_entropy_loss,
    evaluate_formula,
    frequencies_of,
    gradients_of,
    missed_percent,
    previous_token_head,
    rotate,
    weights_by_distance,
)
from lib.model.config import ModelConfig
from lib.model.costs import flops_per_token, num_parameters
from lib.model.llama import pairs_to_halves
from lib.model.transformer import RotaryEmbedding, TransformerBlock


def bigram_by_one_hot(weight, inputs, targets):
    """Matmuls add up the rows of a token, in another order."""
    seen, came = F.one_hot(inputs, len(weight)).float(), F.one_hot(targets, len(weight)).float()
    p = (seen @ weight).softmax(-1)
    return -(p * came).sum(-1).log().mean(), seen.T @ (p - came) / len(inputs)


def backward_by_counting(result):
    """A value passes its gradient on when all that use it have passed on theirs."""
    uses, waiting = Counter(), [result]
    while waiting:
        for parent, _ in waiting.pop().parents:
            waiting += [parent] * (parent not in uses)
            uses[parent] += 1
    result.grad, ready = 1.0, [result]
    while ready:
        value = ready.pop()
        for parent, derivative in value.parents:
            parent.grad += value.grad * derivative
            uses[parent] -= 1
            ready += [parent] * (not uses[parent])


def attention_of_pytorch(x, w_q, w_k, w_v, w_out, num_heads, rope):
    q, k, v = (F.linear(x, w).unflatten(-1, (-1, len(w_q) // num_heads)) for w in (w_q, w_k, w_v))
    q, k, v = (y.movedim(-2, 1) for y in (q, k, v))
    q, k = map(rope, (q, k))
    # its own math, since the check refuses the function itself
    out, _ = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, is_causal=True)
    return F.linear(out.movedim(1, -2).flatten(-2), w_out)


def rotate_by_lib(x, theta, layout):
    """`lib` rotates neighbors; columns are reordered as an export reorders rows."""
    rope = RotaryEmbedding(x.shape[-1], x.shape[-2], theta)
    if layout == "pairs":
        return rope(x)
    pairs = torch.stack(x.chunk(2, dim=-1), -1).flatten(-2)
    return pairs_to_halves(rope(pairs).movedim(-1, 0), num_heads=1).movedim(0, -1)


def block_by_lib(x, w, num_heads, rope):
    """`lib`'s block, with the rope that is given."""
    width, d_ff = w["ffn.w2.weight"].shape
    shape = ModelConfig(
        vocab_size=2,
        context_length=99,
        d_model=width,
        num_layers=1,
        num_heads=num_heads,
        d_ff=d_ff,
        positions="none",
    )
    theirs = TransformerBlock(shape)
    return torch.func.functional_call(theirs, w, (x, lambda y, *_: rope(y)))


def bill_by_lib(d_model, d_ff, layers, heads, kv_heads, vocab_size, context):
    shape = ModelConfig(
        vocab_size=vocab_size,
        context_length=context,
        d_model=d_model,
        num_layers=layers,
        num_heads=heads,
        d_ff=d_ff,
        positions="none",
    )
    missing = layers * 2 * d_model * (heads - kv_heads) * (d_model // heads)
    return {
        "parameters": num_parameters(shape) - missing,
        "training FLOPs per token": flops_per_token(shape) - 6 * missing,
        "KV cache bytes": 4 * layers * context * (d_model // heads) * kv_heads,
    }


def uneven_head(frequencies):
    """Longer arrows for the first pair, as gradient descent finds them."""
    size = torch.zeros(len(frequencies))
    size[:5] = torch.tensor([0.726, 0.328, 0.355, 0.345, 0.346])
    size *= 2 * math.sqrt(2 * len(size)) / size.norm()
    return as_head(size, -frequencies)


def as_head(size, rotation):
    """Query and key whose pairs have lengths `size`, the query's rotated."""
    query, key = torch.polar(size, rotation), size + 0j
    return torch.view_as_real(query).flatten(), torch.view_as_real(key).flatten()


@pytest.mark.parametrize(
    ("exercise", "independent"),
    [
        (cross_entropy_loss, lambda x, y: F.nll_loss(x.log_softmax(-1), y)),
        (cross_entropy_loss, lambda x, y: F.nll_loss(x.double().log_softmax(-1), y)),
        (bigram_gradient, bigram_by_one_hot),
        (backward, backward_by_counting),
        (attention, attention_of_pytorch),
        (rotate, rotate_by_lib),
        (block, block_by_lib),
        (bill, bill_by_lib),
        (previous_token_head, uneven_head),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_independent_answer_is_right(exercise, independent):
    assert verdict(exercise, independent, seed=0).startswith("right")


def test_the_gradients_of_all_steps_are_those_of_autograd():
    for numbers, steps in draw_inputs(backward, 0):
        given = [torch.tensor(number, dtype=torch.float64).requires_grad_() for number in numbers]
        values = evaluate_formula(given, steps)
        expected = torch.autograd.grad(values[-1], values, materialize_grads=True)
        assert gradients_of(backward.solve, numbers, steps) == pytest.approx(
            list(map(float, expected))
        )


@pytest.mark.parametrize("exercise", [cross_entropy_loss, attention, rotate])
def test_expected_values_are_finite_and_the_first_inputs_fit_on_a_line(exercise):
    inputs = draw_inputs(exercise, 0)
    assert all(arguments[0].numel() <= 40 for arguments in inputs[:5])
    assert all(exercise.solve(*arguments).isfinite().all() for arguments in inputs)


def test_the_weight_on_the_token_before_is_that_of_rotated_vectors():
    frequencies = frequencies_of(32)
    query, key = previous_token_head.solve(frequencies)
    rope = RotaryEmbedding(32, 128)
    q, k = rope(query.expand(128, -1)), rope(key.expand(128, -1))
    scores = (q @ k.T / math.sqrt(32)).masked_fill(~torch.ones(128, 128).tril().bool(), -math.inf)
    expected = scores.softmax(-1).diagonal(-1)
    torch.testing.assert_close(
        weights_by_distance(query, key, frequencies)[:, 1], expected, rtol=1e-3, atol=1e-5
    )


def test_a_better_head_has_a_lower_figure():
    assert missed_percent(uneven_head) < 1 < missed_percent(previous_token_head.solve) < 10
