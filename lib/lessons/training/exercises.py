"""Exercises of notebook 03: AdamW, the cosine schedule, nucleus sampling."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from lib.lessons.exercise import Exercise, check


def _draw_adamw(generator: random.Random, size: int) -> tuple:
    width, num_steps = 1 + size // 5, 1 + size // 3
    weight = [generator.choice([-3.0, -2.0, 2.0, 3.0]) for _ in range(width)]
    # a gradient of 0 needs eps, a tiny one the right eps; unlike sizes tell moments apart
    gradients = [
        [generator.choice([-4.0, -1.0, 0.0, 1e-7, 0.5, 2.0]) for _ in range(width)]
        for _ in range(num_steps)
    ]
    lr, weight_decay = generator.choice([0.1, 0.5]), generator.choice([0.0, 0.2, 1.0])
    kind = torch.float64
    return torch.tensor(weight, dtype=kind), torch.tensor(gradients, dtype=kind), lr, weight_decay


def adamw(weight: Tensor, gradients: Tensor, lr: float, weight_decay: float) -> Tensor:
    beta1, beta2, eps = 0.9, 0.95, 1e-8
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, start=1):
        weight = weight - lr * weight_decay * weight
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        mean_hat = mean / (1 - beta1**step)
        square_hat = square / (1 - beta2**step)
        weight = weight - lr * mean_hat / (square_hat.sqrt() + eps)
    return weight


ADAMW = Exercise(
    adamw,
    _draw_adamw,
    {
        "the decay is added to the gradient, as in Adam with L2; "
        "AdamW shrinks the weight itself and leaves the moments alone": (
            "weight = weight - lr * weight_decay * weight",
            "gradient = gradient + weight_decay * weight",
        ),
        "the bias correction is missing; divide the moments by 1 - beta**step": (
            "mean / (1 - beta1**step)\n        square_hat = square / (1 - beta2**step)",
            "mean\n        square_hat = square",
        ),
        "only the mean is corrected; the mean of squares starts at 0 too": (
            "square / (1 - beta2**step)",
            "square",
        ),
        "only the mean of squares is corrected; the mean starts at 0 too": (
            "mean / (1 - beta1**step)",
            "mean",
        ),
        "the corrected moments are kept for the next step; keep the uncorrected ones": (
            "        weight = weight - lr * mean_hat",
            "        mean, square = mean_hat, square_hat\n        weight = weight - lr * mean_hat",
        ),
        "1 - beta is forgotten; new means are beta * old + (1 - beta) * new": (
            "(1 - beta1) * gradient\n        square = beta2 * square + (1 - beta2) * gradient**2",
            "gradient\n        square = beta2 * square + gradient**2",
        ),
        "beta2 is 0.999; here it is 0.95": ("0.95", "0.999"),
        "steps are counted from 0, where the correction divides by 0; the first step is 1": (
            "start=1",
            "start=0",
        ),
        "the update is added; the step goes against the gradient, so subtract it": (
            "weight - lr * mean_hat",
            "weight + lr * mean_hat",
        ),
        "the decay lacks the learning rate; shrink by 1 - lr * weight_decay": (
            "lr * weight_decay * weight",
            "weight_decay * weight",
        ),
        "the decay lacks the weight; subtract lr * weight_decay * weight": (
            "lr * weight_decay * weight",
            "lr * weight_decay",
        ),
        # the decay then shrinks the update too
        "the decay comes after the update; it shrinks the weight as it was before": (
            "lr * mean_hat",
            "(1 - lr * weight_decay) * lr * mean_hat",
        ),
        "eps is missing; where all gradients were 0, that is 0 / 0": (" + eps", ""),
        "eps is 1e-6; here it is 1e-8, which counts where gradients are tiny": ("1e-8", "1e-6"),
        "eps is added inside the root; add it to the root": (
            "square_hat.sqrt() + eps",
            "(square_hat + eps).sqrt()",
        ),
        "the root is missing; divide by the root of the mean of squares": (".sqrt()", ""),
        "this is the square of the mean; take the mean of the squares": (
            "square_hat = square",
            "square_hat = mean**2",
        ),
        "the moments start anew in each step; keep them from one step to the next": (
            "        weight = weight - lr * weight_decay",
            "        mean, square, step = 0, 0, 1\n        weight = weight - lr * weight_decay",
        ),
    },
)


def _draw_schedule(generator: random.Random, size: int) -> tuple:
    warmup_steps = generator.choice([0, 1, 2, 5, 10])
    cosine_steps = warmup_steps + generator.choice([4, 10, 20])
    corners = [0, warmup_steps, cosine_steps, cosine_steps + 3]
    step = generator.choice([*corners, generator.randrange(cosine_steps + 1)])
    max_lr, min_lr = generator.choice([1.0, 2.0]), generator.choice([0.0, 0.1, 0.5])
    return step, max_lr, min_lr, warmup_steps, cosine_steps


def schedule(
    step: int, max_lr: float, min_lr: float, warmup_steps: int, cosine_steps: int
) -> float:
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    if step >= cosine_steps:
        return min_lr
    progress = (step - warmup_steps) / (cosine_steps - warmup_steps)
    return min_lr + (1 + math.cos(math.pi * progress)) / 2 * (max_lr - min_lr)


SCHEDULE = Exercise(
    schedule,
    _draw_schedule,
    {
        "there is no warm-up; below warmup_steps the rate climbs from 0": (
            "max_lr * step / warmup_steps",
            "max_lr",
        ),
        "the warm-up starts at min_lr; it starts at 0": (
            "max_lr * step / warmup_steps",
            "min_lr + (max_lr - min_lr) * step / warmup_steps",
        ),
        "the warm-up is one step ahead (step + 1); at step 0 the rate is 0": (
            "max_lr * step",
            "max_lr * (step + 1)",
        ),
        "step 0 counts as warm-up where there is none: with warmup_steps 0 there is no warm-up; "
        "compare with <, and not with <=": ("step < warmup", "step <= warmup"),
        "the cosine starts at step 0; it starts when the warm-up ends": (
            "(step - warmup_steps) / (cosine_steps - warmup_steps)",
            "step / cosine_steps",
        ),
        "the progress is divided by cosine_steps; divide by cosine_steps - warmup_steps": (
            "(cosine_steps - warmup_steps)",
            "cosine_steps",
        ),
        "the rate rises again after cosine_steps; it stays at min_lr": (
            "step >= cosine_steps",
            "False",
        ),
        "the cosine runs through a whole period; half of one, from 0 to π, falls": (
            "math.pi",
            "2 * math.pi",
        ),
        "the formula has 1 - cos, so that the rate rises; it is 1 + cos": ("1 + math", "1 - math"),
        "the rate falls along a straight line, and not along a cosine": (
            "(1 + math.cos(math.pi * progress)) / 2",
            "(1 - progress)",
        ),
        "the rate falls to 0; it falls to min_lr": (
            lambda step, max_lr, min_lr, *steps: schedule(step, max_lr, 0.0, *steps)
        ),
        "min_lr is added to a cosine that is max_lr high; it is max_lr - min_lr high": (
            "(max_lr - min_lr)",
            "max_lr",
        ),
    },
)


def _draw_top_p(generator: random.Random, size: int) -> tuple:
    count = 2 + size // 3
    weights = generator.sample(range(1, 4 * count), count)
    # over a power of two no sum is rounded, and that of all tokens is 1
    total = 1 << (sum(weights) - 1).bit_length()
    weights[weights.index(max(weights))] += total - sum(weights)
    sums = [partial / total for partial in accumulate(sorted(weights, reverse=True))]
    # The likeliest alone reaches top_p now and then, but not at first: a set without it would be
    # empty, and 0 / 0 tells a reader little.
    rank = generator.randrange(1 if size < 4 else 0, count)
    lower = sums[rank - 1] if rank else 0.0
    top_p = generator.choice([1.0, (lower + sums[rank]) / 2, (lower + sums[rank]) / 2])
    return torch.tensor(weights, dtype=torch.float64) / total, round(top_p, 4)


def top_p_filter(probabilities: Tensor, top_p: float) -> Tensor:
    ranked, ids = probabilities.sort(descending=True)
    before = ranked.cumsum(0) - ranked
    ranked[before >= top_p] = 0
    result = torch.zeros_like(probabilities)
    result[ids] = ranked / ranked.sum()
    return result


TOP_P = Exercise(
    top_p_filter,
    _draw_top_p,
    {
        "cumsum <= top_p drops the token that crosses; keep where cumsum - ranked < top_p": (
            "before >= top_p",
            "ranked.cumsum(0) > top_p",
        ),
        "cumsum < top_p drops the token that reaches top_p; keep where cumsum - ranked < top_p": (
            "before >= top_p",
            "ranked.cumsum(0) >= top_p",
        ),
        "cumsum <= top_p drops the token that crosses, even a first one, which leaves none; "
        "keep where cumsum - ranked < top_p": (
            "before >= top_p] = 0",
            "ranked.cumsum(0) > top_p] = 0\n    if not ranked.any():\n        return ranked",
        ),
        "cumsum < top_p drops the token that reaches top_p, even a first one, which leaves none; "
        "keep where cumsum - ranked < top_p": (
            "before >= top_p] = 0",
            "ranked.cumsum(0) >= top_p] = 0\n    if not ranked.any():\n        return ranked",
        ),
        "one token too many is kept; stop at the one that crosses top_p": (
            "ranked[before >= top_p]",
            "ranked[1:][before[:-1] >= top_p]",
        ),
        "the probabilities kept do not sum to 1; divide them by their sum": (" / ranked.sum()", ""),
        "the result is left in sorted order; each probability belongs to its own id": (
            "result[ids] =",
            "result =",
        ),
        "the result is ranked[ids], which permutes again; result[ids] = ranked puts values back": (
            "result[ids] = ranked / ranked.sum()",
            "result = (ranked / ranked.sum())[ids]",
        ),
        "each probability alone is compared with top_p; what counts is the sum of those before": (
            "before >= top_p",
            "ranked < top_p",
        ),
        "the tokens are sorted with the rarest first; the likeliest come first": (
            "descending=True",
            "descending=False",
        ),
        "the tokens are not sorted before they are summed": (
            "probabilities.sort(descending=True)",
            "probabilities.clone(), torch.arange(len(probabilities))",
        ),
    },
)


def check_adamw(attempt: Callable) -> None:
    """Check `adamw(weight (n,), gradients (steps, n), lr, weight_decay)` -> weight (n,)."""
    check(ADAMW, attempt)


def check_schedule(attempt: Callable) -> None:
    """Check `schedule(step, max_lr, min_lr, warmup_steps, cosine_steps)` -> learning rate."""
    check(SCHEDULE, attempt)


def check_top_p(attempt: Callable) -> None:
    """Check `top_p_filter(probabilities (vocab,), top_p)` -> probabilities (vocab,)."""
    check(TOP_P, attempt)
