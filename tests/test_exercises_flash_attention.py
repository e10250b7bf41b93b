"""The exercises of notebook 05 against independent answers; their mistakes: test_exercises.py."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from lib.exercises import TRIALS, verdict
from lib.exercises_flash_attention import ATTEND, GRAD_SCORES, ONLINE_SOFTMAX

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


@pytest.mark.parametrize(
    ("exercise", "independent"),
    [(ONLINE_SOFTMAX, max_and_sum), (ATTEND, attend), (GRAD_SCORES, grad_scores)],
    ids=CHECKED,
)
@pytest.mark.parametrize("seed", range(3))
def test_an_independent_answer_is_right(exercise, independent, seed):
    assert verdict(exercise, independent, seed=seed).startswith("right")


@pytest.mark.parametrize("exercise", CHECKED.values(), ids=CHECKED)
def test_expected_values_are_finite_and_the_first_inputs_small(exercise):
    generator = random.Random(0)
    inputs = [exercise.draw(generator, 1 + trial // 10) for trial in range(TRIALS)]
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


MAX_AND_SUM = """
def attempt(tiles):
    m, total = torch.tensor(-math.inf), torch.tensor(0.0)
    for scores in tiles:
        new_max = torch.maximum(m, scores.max())
        total = total * torch.exp(m - new_max) + torch.exp(scores - new_max).sum()
        m = new_max
    return torch.stack([m, total])
"""
BY_TILES = """
def attempt(q, k, v, first, tile):
    out = torch.zeros_like(q)
    total = torch.zeros(len(q), 1)
    m = torch.full((len(q), 1), -math.inf)
    query = first + torch.arange(len(q))[:, None]
    for start in range(0, first + len(q), tile):
        K, V = k[start : start + tile], v[start : start + tile]
        scores = q @ K.T / math.sqrt(q.shape[1])
        key = start + torch.arange(len(K))
        scores = scores.masked_fill(key > query, -math.inf)
        new_max = torch.maximum(m, scores.amax(1, keepdim=True))
        p = torch.exp(scores - new_max)
        shrink = torch.exp(m - new_max)
        total = total * shrink + p.sum(1, keepdim=True)
        out = out * shrink + p @ V
        m = new_max
    return out / total
"""
GRADIENT = """
def attempt(scores, v, out, lse, grad_out):
    p = torch.exp(scores - lse[:, None])
    delta = (grad_out * out).sum(-1, keepdim=True)
    return p * (grad_out @ v.T - delta)
"""


def written_by_hand(code, right="", wrong=""):
    """A solution as a reader writes it, with one text in it changed."""
    assert right in code
    names = {"torch": torch, "math": math}
    exec(code.replace(right, wrong, 1) if right else code, names)
    return names["attempt"]


@pytest.mark.parametrize(
    ("exercise", "code"),
    [(ONLINE_SOFTMAX, MAX_AND_SUM), (ATTEND, BY_TILES), (GRAD_SCORES, GRADIENT)],
    ids=CHECKED,
)
def test_a_solution_written_by_hand_is_right(exercise, code):
    assert verdict(exercise, written_by_hand(code)).startswith("right")


@pytest.mark.parametrize(
    ("exercise", "code", "right", "wrong", "name"),
    [
        (ONLINE_SOFTMAX, MAX_AND_SUM, "m - new_max", "new_max - m", "the sum so far is rescaled"),
        (ONLINE_SOFTMAX, MAX_AND_SUM, "total * torch.exp(m - new_max)", "total", "the sum so far"),
        (ONLINE_SOFTMAX, MAX_AND_SUM, "-math.inf", "0.0", "the maximum begins with 0"),
        (ATTEND, BY_TILES, " / math.sqrt(q.shape[1])", "", "the scale is missing"),
        (ATTEND, BY_TILES, "out * shrink", "out", "the output so far is not rescaled"),
        (ATTEND, BY_TILES, "total * shrink", "total", "the sum so far is not rescaled"),
        (ATTEND, BY_TILES, "out / total", "out", "the division by the sum"),
        (ATTEND, BY_TILES, "first + torch.arange", "torch.arange", "the mask counts the queries"),
        (ATTEND, BY_TILES, "start + torch.arange", "torch.arange", "the mask counts the keys"),
        (ATTEND, BY_TILES, "key > query", "key >= query", "a query does not see its own key"),
        (ATTEND, BY_TILES, "range(0, first + len(q)", "range(0, first", "the loop ends before"),
        (ATTEND, BY_TILES, "range(0, first + len(q)", "range(0, len(q)", "the loop takes only"),
        (ATTEND, BY_TILES, "m - new_max", "new_max - m", "sum and output so far are rescaled"),
        (ATTEND, BY_TILES, "scores - new_max", "scores - scores.amax(1, keepdim=True)", "each til"),
        (ATTEND, BY_TILES, "        m = new_max\n", "", "the new maximum is not kept"),
        (GRAD_SCORES, GRADIENT, " - delta", "", "delta is missing"),
        (GRAD_SCORES, GRADIENT, "grad_out @ v.T - delta", "grad_out @ v.T + delta", "delta is add"),
        (GRAD_SCORES, GRADIENT, "lse[:, None]", "lse", "lse needs a dimension"),
        (GRAD_SCORES, GRADIENT, ".sum(-1, keepdim=True)", ".sum(-1)", "delta has lost its last"),
        (GRAD_SCORES, GRADIENT, "- delta)", "- delta) / math.sqrt(v.shape[1])", "the result is di"),
    ],
)
def test_a_changed_line_fails_and_is_named(exercise, code, right, wrong, name):
    text = verdict(exercise, written_by_hand(code, right, wrong))
    assert text.startswith("not yet")
    assert f"It looks as if {name}" in text


def test_an_update_of_the_maximum_before_its_use_is_named():
    def attempt(tiles):
        m, total = torch.tensor(-math.inf), torch.tensor(0.0)
        for scores in tiles:
            m = torch.maximum(m, scores.max())
            total = total * torch.exp(m - m) + torch.exp(scores - m).sum()
        return torch.stack([m, total])

    assert "must still be known there" in verdict(ONLINE_SOFTMAX, attempt)


def test_a_number_for_each_part_in_a_tuple_is_told_apart():
    def attempt(tiles):
        return tuple(max_and_sum(tiles))

    assert "which is a tuple; expected tensor(" in verdict(ONLINE_SOFTMAX, attempt)
