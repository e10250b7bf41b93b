"""The exercises of notebook 02: right answers against PyTorch's own, and how tensors differ."""

import math
import random
import re

import pytest
import torch
import torch.nn.functional as F

from lib import exercises
from lib.exercises import verdict
from lib.exercises_model import CAUSAL_ATTENTION, CROSS_ENTROPY, RMS_NORM


def of_pytorch(q, k, v):
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def in_pairs_of_loops(q, k, v):
    rows = []
    for i in range(len(q)):
        scores = [float(q[i] @ k[j]) / math.sqrt(q.shape[1]) for j in range(i + 1)]
        weights = [math.exp(score - max(scores)) for score in scores]
        rows.append(sum(w * v[j] for j, w in enumerate(weights)) / sum(weights))
    return torch.stack(rows)


def norm_of_pytorch(x, weight, eps):
    return F.rms_norm(x, weight.shape, weight, eps)


@pytest.mark.parametrize(
    ("exercise", "right"),
    [
        (CROSS_ENTROPY, F.cross_entropy),
        (CROSS_ENTROPY, lambda x, y: F.cross_entropy(x, y).item()),
        (CROSS_ENTROPY, lambda x, y: F.cross_entropy(x.double(), y).numpy()),
        (CAUSAL_ATTENTION, of_pytorch),
        (CAUSAL_ATTENTION, in_pairs_of_loops),
        (RMS_NORM, norm_of_pytorch),
    ],
)
def test_other_right_answers_pass(exercise, right):
    for seed in range(3):
        assert verdict(exercise, right, seed=seed).startswith("right")


@pytest.mark.parametrize("exercise", [CROSS_ENTROPY, CAUSAL_ATTENTION, RMS_NORM])
def test_the_first_inputs_are_short_and_expected_values_finite(exercise):
    generator = random.Random(0)
    inputs = [exercise.draw(generator, 1 + trial // 10) for trial in range(exercises.TRIALS)]
    assert all(arguments[0].numel() <= 9 for arguments in inputs[:5])
    assert all(exercise.solve(*arguments).isfinite().all() for arguments in inputs)


def without_keepdim(logits, targets):
    shifted = logits - logits.amax(-1)
    return (shifted.exp().sum(-1).log() - shifted[range(len(targets)), targets]).mean()


def norm_without_keepdim(x, weight, eps):
    return x / (x.square().mean(-1) + eps).sqrt() * weight


def sum_without_keepdim(logits, targets):
    shifted = logits - logits.amax(-1, keepdim=True)
    log_probabilities = shifted - shifted.exp().sum(-1).log()
    return -log_probabilities[range(len(targets)), targets].mean()


@pytest.mark.parametrize(
    ("exercise", "attempt"),
    [
        (CROSS_ENTROPY, without_keepdim),
        (CROSS_ENTROPY, sum_without_keepdim),
        (RMS_NORM, norm_without_keepdim),
        (RMS_NORM, lambda x, w, eps: w * (x * (x.pow(2).mean(1) + eps).rsqrt())),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_a_missing_keepdim_is_an_error_of_shapes_and_named(exercise, attempt, seed):
    text = verdict(exercise, attempt, seed=seed)
    assert "it raised RuntimeError: The size of tensor a" in text
    assert "It looks as if the rows' m" in text
    assert re.search(r"keepdim=True\)? keeps it\.$", text)


def shifted_for_every_target(logits, targets):
    shifted = logits - logits.amax(-1, keepdim=True)
    return (shifted.exp().sum(-1).log() - shifted[:, targets]).mean()


def masked_scores(q, k):
    later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
    return (q @ k.T).masked_fill(later, -math.inf)


@pytest.mark.parametrize(
    ("exercise", "attempt", "name"),
    [
        (CROSS_ENTROPY, shifted_for_every_target, "logits[:, targets] takes every target"),
        (
            CAUSAL_ATTENTION,
            lambda q, k, v: masked_scores(q, k).softmax(-1) @ v / q.shape[1] ** 0.5,
            "the scale comes after the product with v",
        ),
        (
            CAUSAL_ATTENTION,
            lambda q, k, v: masked_scores(q, k) / q.shape[1] ** 0.5 @ v,
            "the softmax is missing",
        ),
        (
            CAUSAL_ATTENTION,
            lambda q, k, v: (masked_scores(q, k) / q.shape[1] ** 0.5).softmax(-1),
            "these are the weights",
        ),
        (RMS_NORM, lambda x, w, eps: w * x / (x.var(-1, keepdim=True).sqrt() + eps), "x.std is"),
        (RMS_NORM, lambda x, w, eps: w * (x / (x.norm(dim=1)[:, None] + eps)), "x.norm is"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_mistake_written_in_another_way_is_recognised(exercise, attempt, name, seed):
    assert f"It looks as if {name}" in verdict(exercise, attempt, seed=seed)


def test_a_wrong_answer_shows_input_place_and_values():
    attempt = CAUSAL_ATTENTION.mistakes["there is no mask; a query must not see later keys"]
    text = verdict(CAUSAL_ATTENTION, attempt, seed=1)
    first, second, third = text.splitlines()
    assert first.startswith("not yet: _without_mask(tensor([[")
    assert "position (0, 0): yours" in second
    assert "values differ)" in second
    assert third == "  It looks as if there is no mask; a query must not see later keys."


@pytest.mark.parametrize(
    ("yours", "message"),
    [
        (torch.zeros(2, 3), "the result: yours has shape (2, 3), expected (3, 2)"),
        (torch.tensor([[1.0, 2], [3, 4], [5, 6.5]]), "position (2, 1): yours 6.5, expected 6"),
        (
            torch.tensor([[1.0, 2], [math.nan, 4], [math.inf, 6]]),
            "position (1, 0): yours nan, expected 3 (2 of 6 values differ)",
        ),
        ([[1, 2], [3, 4]], "it returned [[1, 2], [3, 4]], which is a list; expected tensor([[1, 2"),
        (None, "it returned None (is a `return` missing?); expected tensor([[1, 2], [3, 4]"),
        ([torch.zeros(2)] * 3, "which is a list; expected tensor("),
    ],
)
def test_a_tensor_that_differs_is_described(yours, message):
    expected = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    assert message in exercises.difference(yours, expected)
    assert not exercises._equal(yours, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_rounding_and_dtype_do_not_count(dtype):
    expected = torch.tensor([1.0, 1000.0, -0.0])
    assert exercises._equal((expected * (1 + 1e-6)).to(dtype), expected)
    assert not exercises._equal(torch.tensor([1.001, 1000.0, 0.0]), expected)


def test_a_result_that_needs_gradients_is_compared():
    assert exercises._equal(torch.ones(2, requires_grad=True), torch.ones(2))


def test_a_large_tensor_is_shown_by_its_shape():
    assert exercises._shown(torch.zeros(5, 4)) == "<tensor of shape (5, 4)>"
    assert exercises._shown(torch.tensor([[1.0, -0.5]])) == "tensor([[1, -0.5]])"


def test_an_error_of_pytorch_is_one_line():
    text = verdict(CAUSAL_ATTENTION, lambda q, k, v: q @ k @ v.reshape(7, 11), seed=0)
    assert "it raised RuntimeError: " in text
    assert len(text.splitlines()) == 2
