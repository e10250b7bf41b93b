"""The exercises of notebook 02: right answers against PyTorch's own."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from lib.lessons.exercise import draw_inputs, verdict
from lib.lessons.model.exercises import CAUSAL_ATTENTION, CROSS_ENTROPY, RMS_NORM


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
    for seed in range(2):
        assert verdict(exercise, right, seed=seed).startswith("right")


@pytest.mark.parametrize("exercise", [CROSS_ENTROPY, CAUSAL_ATTENTION, RMS_NORM])
def test_the_first_inputs_are_short_and_expected_values_finite(exercise):
    inputs = draw_inputs(exercise, 0)
    assert all(arguments[0].numel() <= 9 for arguments in inputs[:5])
    assert all(exercise.solve(*arguments).isfinite().all() for arguments in inputs)


def without_keepdim(logits, targets):
    shifted = logits - logits.amax(-1)
    return (shifted.exp().sum(-1).log() - shifted[range(len(targets)), targets]).mean()


def sum_without_keepdim(logits, targets):
    shifted = logits - logits.amax(-1, keepdim=True)
    log_probabilities = shifted - shifted.exp().sum(-1).log()
    return -log_probabilities[range(len(targets)), targets].mean()


@pytest.mark.parametrize(
    ("exercise", "attempt"),
    [
        (CROSS_ENTROPY, without_keepdim),
        (CROSS_ENTROPY, sum_without_keepdim),
        (RMS_NORM, lambda x, w, eps: w * (x * (x.pow(2).mean(1) + eps).rsqrt())),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_a_missing_keepdim_is_an_error_of_shapes_and_named(exercise, attempt, seed):
    text = verdict(exercise, attempt, seed=seed)
    assert "it raised RuntimeError: The size of tensor a" in text
    assert "It looks as if the rows' m" in text
    assert re.search(r"keepdim=True\)? keeps it\.$", text)


def masked_scores(q, k):
    later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
    return (q @ k.T).masked_fill(later, -math.inf)


@pytest.mark.parametrize(
    ("exercise", "attempt", "name"),
    [
        (
            CROSS_ENTROPY,
            lambda x, y: (x.logsumexp(-1) - x[:, y]).mean(),
            "logits[:, targets] takes every target",
        ),
        (
            CAUSAL_ATTENTION,
            lambda q, k, v: masked_scores(q, k).softmax(-1) @ v / q.shape[1] ** 0.5,
            "the scale comes after the matmul with v",
        ),
        (RMS_NORM, lambda x, w, eps: w * x / (x.var(-1, keepdim=True).sqrt() + eps), "x.std is"),
        (RMS_NORM, lambda x, w, eps: w * (x / (x.norm(dim=1)[:, None] + eps)), "x.norm is"),
    ],
)
def test_a_mistake_written_in_another_way_is_recognised(exercise, attempt, name):
    assert f"It looks as if {name}" in verdict(exercise, attempt, seed=0)
