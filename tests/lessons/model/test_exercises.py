"""The exercises of notebook 02 against independent answers; their mistakes: test_exercise.py."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from lib.lessons.exercise import verdict
from lib.lessons.model.exercises import (
    ATTENTION,
    BILL,
    CROSS_ENTROPY,
    LOSS_IN_CHUNKS,
    PREVIOUS_TOKEN_HEAD,
    ROTATE,
    aimed,
    frequencies_of,
    frugal,
    missed_percent,
    previous_token_head,
    weights_by_distance,
)
from lib.model.config import ModelConfig
from lib.model.costs import flops_per_token, num_parameters
from lib.model.llama import pairs_to_halves
from lib.model.transformer import RotaryEmbedding


def loss_by_autograd(hidden, weight, targets, chunk_tokens):
    """Autograd chunk by chunk: its logits are freed before those of the next chunk are made."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    total = 0.0
    for h, y in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens)):
        loss = F.cross_entropy(h @ weight.T, y, reduction="sum") / len(targets)
        loss.backward()
        total += loss.item()
    return total, hidden.grad, weight.grad


def attention_of_pytorch(x, w_q, w_k, w_v, w_out, num_heads):
    q, k, v = (F.linear(x, w).unflatten(-1, (-1, len(w_q) // num_heads)) for w in (w_q, w_k, w_v))
    q, k, v = (y.movedim(-2, 1) for y in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(out.movedim(1, -2).flatten(-2), w_out)


def rotate_by_lib(x, theta, layout):
    """`lib` rotates neighbors; columns are reordered as an export reorders rows."""
    rope = RotaryEmbedding(x.shape[1], len(x), theta)
    if layout == "pairs":
        return rope(x)
    pairs = torch.stack(x.chunk(2, dim=-1), -1).flatten(-2)
    return pairs_to_halves(rope(pairs).T, num_heads=1).T


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
        (CROSS_ENTROPY, F.cross_entropy),
        (CROSS_ENTROPY, lambda x, y: F.cross_entropy(x.double(), y).numpy()),
        (LOSS_IN_CHUNKS, frugal(loss_by_autograd)),
        (ATTENTION, attention_of_pytorch),
        (ROTATE, rotate_by_lib),
        (BILL, bill_by_lib),
        (PREVIOUS_TOKEN_HEAD, aimed(uneven_head)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_independent_answer_is_right(exercise, independent):
    assert verdict(exercise, independent, seed=0).startswith("right")


def chunks_kept_in_a_list(hidden, weight, targets, chunk_tokens):
    logits = torch.cat([h @ weight.T for h in hidden.split(chunk_tokens)])
    gradient = (logits.softmax(-1) - F.one_hot(targets, len(weight))) / len(targets)
    return F.cross_entropy(logits, targets), gradient @ weight, gradient.T @ hidden


def test_logits_of_all_tokens_are_noticed_even_if_made_in_chunks():
    text = verdict(LOSS_IN_CHUNKS, frugal(chunks_kept_in_a_list), seed=0)
    assert re.search(
        r"makes a \(\d+, \d+\) tensor, as many numbers as the logits of all tokens", text
    )


def test_the_weight_on_the_token_before_is_that_of_rotated_vectors():
    frequencies = frequencies_of(32)
    query, key = previous_token_head(frequencies)
    rope = RotaryEmbedding(32, 128)
    q, k = rope(query.expand(128, -1)), rope(key.expand(128, -1))
    scores = (q @ k.T / math.sqrt(32)).masked_fill(~torch.ones(128, 128).tril().bool(), -math.inf)
    expected = scores.softmax(-1).diagonal(-1)
    torch.testing.assert_close(
        weights_by_distance(query, key, frequencies)[:, 1], expected, rtol=1e-3, atol=1e-5
    )


def test_a_better_head_has_a_lower_figure():
    assert missed_percent(uneven_head) < 1 < missed_percent(previous_token_head) < 10
