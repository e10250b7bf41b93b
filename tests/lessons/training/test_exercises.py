"""The exercises of notebook 03 against independent answers; their mistakes: test_exercises.py."""

import math

import pytest
import torch

from lib.lessons.exercise import verdict
from lib.lessons.training.exercises import ADAMW, SCHEDULE, TOP_P
from lib.training.generation import next_token_probabilities

# the first one in a process loads PyTorch's compiler, which can take longer than a check waits
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
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
@pytest.mark.parametrize("seed", range(2))
def test_an_independent_answer_is_right(exercise, independent, seed):
    assert verdict(exercise, independent, seed=seed).startswith("right")


@pytest.mark.parametrize(
    "climb",
    [lambda step, steps, rate: rate * step / steps, lambda step, steps, rate: step / steps * rate],
    ids=["float divided", "int divided"],
)
@pytest.mark.parametrize("seed", range(2))
def test_a_warm_up_of_no_steps_that_divides_by_zero_is_named(climb, seed):
    def attempt(step, max_lr, min_lr, warmup_steps, cosine_steps):
        if step <= warmup_steps:
            return climb(step, warmup_steps, max_lr)
        return schedule(step, max_lr, min_lr, warmup_steps, cosine_steps)

    text = verdict(SCHEDULE, attempt, seed=seed)
    assert "it raised ZeroDivisionError" in text
    assert "with warmup_steps 0 there is no warm-up; compare with <" in text


def test_another_division_by_zero_is_not_called_a_warm_up():
    def attempt(step, max_lr, min_lr, warmup_steps, cosine_steps):
        return step / warmup_steps * max_lr

    assert "It looks as if" not in verdict(SCHEDULE, attempt)


@pytest.mark.parametrize(
    ("result", "name"),
    [
        (lambda p, ranked, ids, top_p: torch.where(p < top_p, 0, p), "each probability alone"),
        (lambda p, ranked, ids, top_p: ranked[ids], "the result is ranked[ids]"),
    ],
    ids=["threshold", "permuted again"],
)
def test_a_wrong_selection_of_tokens_is_named(result, name):
    def attempt(probabilities, top_p):
        ranked, ids = probabilities.sort(descending=True)
        ranked[ranked.cumsum(0) - ranked >= min(top_p, 1 - 1e-12)] = 0
        chosen = result(probabilities, ranked, ids, top_p)
        return chosen / chosen.sum()

    assert f"It looks as if {name}" in verdict(TOP_P, attempt)


@pytest.mark.parametrize("sign", ["<", "<="])
@pytest.mark.parametrize(
    "body",
    [
        # a set without any token gives 0 / 0 in the first, and zeros in the second
        "ranked[~(torch.cumsum(ranked, dim=0) {sign} top_p)] = 0\n"
        "    result[ids] = ranked / ranked.sum()",
        "keep = ranked.cumsum(0) {sign} top_p\n"
        "    result[ids[keep]] = ranked[keep] / ranked[keep].sum()",
    ],
    ids=["in place", "mask"],
)
def test_a_sum_that_counts_the_token_itself_is_named(sign, body):
    code = f"""
def attempt(probabilities, top_p):
    ranked, ids = probabilities.sort(descending=True)
    result = torch.zeros_like(probabilities)
    {body.format(sign=sign)}
    return result"""
    names = {"torch": torch}
    exec(code, names)
    text = verdict(TOP_P, names["attempt"], seed=0)
    assert f"It looks as if cumsum {sign} top_p drops the token that" in text
    # the first input shown says more than 0 / 0
    assert "yours nan" not in text
