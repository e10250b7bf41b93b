"""The exercises of notebook 03 against independent answers; their mistakes: test_exercises.py."""

import math
import re

import pytest
import torch

from lib.exercises import verdict
from lib.exercises_training import ADAMW, SCHEDULE, TOP_P
from lib.generate import next_token_probabilities

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
@pytest.mark.parametrize("seed", range(3))
def test_an_independent_answer_is_right(exercise, independent, seed):
    assert verdict(exercise, independent, seed=seed).startswith("right")


def test_a_plain_number_is_a_right_answer_for_the_schedule():
    assert isinstance(schedule(1, 1.0, 0.1, 2, 6), float)
    assert verdict(SCHEDULE, schedule).startswith("right")


def test_probabilities_of_another_shape_are_named():
    text = verdict(TOP_P, lambda probabilities, top_p: probabilities[:-1])
    assert "yours has shape (1,), expected (2,)" in text


def test_the_expected_learning_rate_is_shown_as_a_number():
    text = verdict(SCHEDULE, lambda *arguments: None, seed=0)
    assert re.search(r"expected \d[\d.e-]*$", text)


@pytest.mark.parametrize(
    "climb",
    [lambda step, steps, rate: rate * step / steps, lambda step, steps, rate: step / steps * rate],
    ids=["float divided", "int divided"],
)
@pytest.mark.parametrize("seed", range(5))
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


def adamw_written_by_hand(weight, gradients, lr, weight_decay, how):
    """The notebook's solution with a line changed: `how` is (right, wrong) in its text."""
    code = """
def attempt(weight, gradients, lr, weight_decay):
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, start=1):
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        m = mean / (1 - 0.9**step)
        v = square / (1 - 0.95**step)
        weight = weight - lr * weight_decay * weight - lr * m / (v.sqrt() + 1e-8)
    return weight
"""
    right, wrong = how
    assert right in code
    names = {"torch": torch}
    exec(code.replace(right, wrong), names)
    return names["attempt"](weight, gradients, lr, weight_decay)


@pytest.mark.parametrize(
    ("right", "wrong", "name"),
    [
        ("m = mean", "m = mean = mean", None),
        ("v.sqrt() + 1e-8", "v.sqrt() + 1e-6", "eps is 1e-6"),
        ("v.sqrt() + 1e-8", "(v + 1e-8).sqrt()", "eps is added inside the root"),
        ("weight - lr * m /", "weight + lr * m /", "the update is added"),
        ("lr * weight_decay * weight", "lr * weight_decay", "the decay lacks the weight"),
        ("+ 0.1 * gradient", "+ gradient", None),
    ],
)
def test_a_changed_line_fails_and_is_named(right, wrong, name):
    def attempt(*arguments):
        return adamw_written_by_hand(*arguments, (right, wrong))

    text = verdict(ADAMW, attempt)
    assert text.startswith("not yet")
    assert name is None or f"It looks as if {name}" in text


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


TOP_P_BY_HAND = {
    "a mask": """
    keep = ranked.cumsum(0) {sign} top_p
    result[ids[keep]] = ranked[keep]
    return result / result.sum()
""",
    "in place": """
    ranked[~(torch.cumsum(ranked, dim=0) {sign} top_p)] = 0
    result[ids] = ranked / ranked.sum()
    return result
""",
    "an empty mask": """
    keep = ranked.cumsum(0) {sign} top_p
    result[ids[keep]] = ranked[keep] / ranked[keep].sum()
    return result
""",
}


@pytest.mark.parametrize("sign", ["<", "<="])
@pytest.mark.parametrize("body", TOP_P_BY_HAND.values(), ids=TOP_P_BY_HAND)
@pytest.mark.parametrize("seed", range(5))
def test_a_sum_that_counts_the_token_itself_is_named(sign, body, seed):
    head = """
def attempt(probabilities, top_p):
    ranked, ids = probabilities.sort(descending=True)
    result = torch.zeros_like(probabilities)"""
    names = {"torch": torch}
    exec(head + body.format(sign=sign), names)
    text = verdict(TOP_P, names["attempt"], seed=seed)
    assert f"It looks as if cumsum {sign} top_p drops the token that" in text
    # the first input shown says more than 0 / 0
    assert "yours nan" not in text
