"""The exercises of notebook 03 against independent answers; their mistakes: test_exercises.py."""

import math

import pytest
import torch

from lib.exercises import verdict
from lib.exercises_training import ADAMW, SCHEDULE, TOP_P
from lib.generate import next_token_probabilities

CHECKED = {"adamw": ADAMW, "schedule": SCHEDULE, "top_p": TOP_P}


def adamw(weight, gradients, lr, weight_decay):
    """PyTorch's, as a reader would not write it."""
    parameter = torch.nn.Parameter(weight.clone())
    settings = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    optimizer = torch.optim.AdamW([parameter], **settings)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def schedule(step, max_lr, min_lr, warmup_steps, cosine_steps):
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    progress = min(1, (step - warmup_steps) / (cosine_steps - warmup_steps))
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (max_lr - min_lr)


def top_p_filter(probabilities, top_p):
    return next_token_probabilities(probabilities.log(), top_p=top_p)


@pytest.mark.parametrize(
    ("exercise", "independent"),
    [(ADAMW, adamw), (SCHEDULE, schedule), (TOP_P, top_p_filter)],
    ids=CHECKED,
)
@pytest.mark.parametrize("seed", range(3))
def test_an_independent_answer_is_right(exercise, independent, seed):
    assert verdict(exercise, independent, seed=seed).startswith("right")


def test_a_plain_number_is_a_right_answer_for_the_schedule():
    assert isinstance(schedule(1, 1.0, 0.1, 2, 6), float)
    assert verdict(SCHEDULE, schedule).startswith("right")


def test_probabilities_of_another_shape_are_named():
    text = verdict(TOP_P, lambda probabilities, top_p: probabilities[:-1])
    assert "yours has shape (1,), expected (2,)" in text
