"""The exercises of notebook 06 against independent answers; their mistakes: test_exercise.py."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from lib.lessons.exercise import draw_inputs, verdict
from lib.lessons.flash_attention.exercises import ATTEND, FRAGMENTS, GRAD_SCORES, ONLINE_SOFTMAX

CHECKED = {"online softmax": ONLINE_SOFTMAX, "attend": ATTEND, "gradient": GRAD_SCORES}


def max_and_sum(tiles):
    """All at once, from PyTorch's logarithm of the sum."""
    scores = torch.cat(tiles).double()
    return torch.stack([scores.max(), (scores.logsumexp(0) - scores.max()).exp()])


def attend(q, k, v, first, tile):
    visible = torch.ones(first + len(q), len(k), dtype=torch.bool).tril()[first:]
    return F.scaled_dot_product_attention(q[None], k[None], v[None], visible)[0]


def grad_scores(scores, v, out, lse, grad_out):
    """By autograd through one further key, which stands for all that the tile lacks."""
    scores = scores.double().requires_grad_()
    p = torch.exp(scores - lse[:, None])
    rest = 1 - p.detach().sum(1, keepdim=True)
    other = (out - p.detach() @ v.double()) / rest
    weights = torch.cat([scores, (lse + rest.squeeze(1).log())[:, None]], 1).softmax(1)
    total = weights[:, :-1] @ v.double() + weights[:, -1:] * other
    return torch.autograd.grad(total, scores, grad_out.double())[0]


def multiply_add(a, b, c):
    """By the order of lanes and registers alone: (g, t, half, column of a pair)."""

    def tall(x):
        return x.reshape(8, 4, 2, 2).permute(2, 0, 1, 3).reshape(16, 8)

    out = tall(c) + tall(a) @ b.reshape(8, 8).T
    return out.reshape(2, 8, 4, 2).permute(1, 2, 0, 3).reshape(32, 4)


@pytest.mark.parametrize(
    ("exercise", "independent"),
    [
        *((ONLINE_SOFTMAX, max_and_sum), (ATTEND, attend), (GRAD_SCORES, grad_scores)),
        (FRAGMENTS, multiply_add),
    ],
    ids=[*CHECKED, "fragments"],
)
@pytest.mark.parametrize("seed", range(3))
def test_an_independent_answer_is_right(exercise, independent, seed):
    assert verdict(exercise, independent, seed=seed).startswith("right")


@pytest.mark.parametrize("exercise", CHECKED.values(), ids=CHECKED)
def test_expected_values_are_finite_and_the_first_inputs_small(exercise):
    inputs = draw_inputs(exercise, 0)
    assert all(exercise.solve(*arguments).isfinite().all() for arguments in inputs)
    for arguments in inputs[:5]:
        tensors = arguments[0] if isinstance(arguments[0], list) else arguments[:3]
        assert all(tensor.numel() <= 16 for tensor in tensors)


def test_queries_begin_before_at_and_behind_the_edge_of_a_tile():
    drawn = [ATTEND.draw(random.Random(seed), 6) for seed in range(100)]
    remainders = {(first % tile, (first + len(q)) % tile) for q, _, _, first, tile in drawn}
    assert {(0, 0), (1, 0), (0, 1), (1, 2)} <= remainders


def test_a_tile_of_keys_is_never_all_that_a_row_sees():
    for seed in range(50):
        scores, _, _, lse, _ = GRAD_SCORES.draw(random.Random(seed), 6)
        assert (scores.logsumexp(1) < lse).all()


def test_an_update_of_the_maximum_before_its_use_is_named():
    def attempt(tiles):
        m, total = torch.tensor(-math.inf), torch.tensor(0.0)
        for scores in tiles:
            m = torch.maximum(m, scores.max())
            total = total * torch.exp(m - m) + torch.exp(scores - m).sum()
        return torch.stack([m, total])

    assert "must still be known there" in verdict(ONLINE_SOFTMAX, attempt)
