"""Helpers and checkers of notebook 02's exercises; test_answers.py has the answers to them."""

import math

import pytest
import torch

from lib.lessons.exercise import draw_inputs
from lib.lessons.model.exercises import (
    attention,
    backward,
    block,
    cross_entropy_loss,
    evaluate_formula,
    frequencies_of,
    gradients_of,
    missed_percent,
    previous_token_head,
    rotate,
    take,
    weights_by_distance,
)
from lib.model.transformer import RotaryEmbedding
from tests.lessons.answers.model import uneven_head


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


def test_the_solutions_block_calls_the_attention_of_the_page(capsys):
    calls = []
    page = {"attention": lambda x, *_: calls.append(x) or x}
    exec("def block(*_):\n    raise NotImplementedError", page)
    taken = take(page["block"])
    taken(*draw_inputs(block, 0)[0])
    assert len(calls) == 1
    assert taken.__module__ == block.solve.__module__  # `whose` calls it the solution


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
