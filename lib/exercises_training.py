"""Exercises of notebook 03: AdamW, the cosine schedule, nucleus sampling."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lib.exercises import Exercise, check
from lib.optimizer import cosine_lr

BETA1, BETA2, EPS = 0.9, 0.95, 1e-8


def _draw_adamw(generator: random.Random, size: int) -> tuple:
    width, num_steps = 1 + size // 5, 1 + size // 3
    weight = [generator.choice([-3.0, -2.0, 2.0, 3.0]) for _ in range(width)]
    # a gradient of 0 needs eps; steps of different size tell moments apart
    gradients = [
        [generator.choice([-4.0, -1.0, 0.0, 0.5, 2.0]) for _ in range(width)]
        for _ in range(num_steps)
    ]
    lr, weight_decay = generator.choice([0.1, 0.5]), generator.choice([0.0, 0.2, 1.0])
    kind = torch.float64
    return torch.tensor(weight, dtype=kind), torch.tensor(gradients, dtype=kind), lr, weight_decay


def _adamw(
    weight: Tensor,
    gradients: Tensor,
    lr: float,
    weight_decay: float,
    *,
    coupled: bool = False,
    decay_lr: bool = True,
    decay_last: bool = False,
    correct: tuple[bool, bool] = (True, True),
    first_step: int = 1,
    eps: float = EPS,
    root: bool = True,
    centred: bool = False,
) -> Tensor:
    """`weight` after a step of AdamW for each of `gradients`; the keywords make mistakes."""
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, start=first_step):
        decay = (lr if decay_lr else 1) * weight_decay
        if coupled:
            gradient = gradient + weight_decay * weight
        elif not decay_last:
            weight = (1 - decay) * weight
        mean = BETA1 * mean + (1 - BETA1) * gradient
        square = BETA2 * square + (1 - BETA2) * gradient**2
        spread = mean**2 if centred else square
        mean_correction = 1 - BETA1**step if correct[0] else 1
        square_correction = 1 - BETA2**step if correct[1] else 1
        spread = spread / square_correction if square_correction else spread * math.nan
        size = (spread.sqrt() if root else spread) + eps
        weight = (
            weight - lr * (mean / mean_correction if mean_correction else mean * math.nan) / size
        )
        if decay_last:
            weight = (1 - decay) * weight
    return weight


def _mistaken(name: str, **how) -> Callable:
    def adamw(weight: Tensor, gradients: Tensor, lr: float, weight_decay: float) -> Tensor:
        return _adamw(weight, gradients, lr, weight_decay, **how)

    adamw.__name__ = name
    return adamw


def _adamw_forgetful(weight: Tensor, gradients: Tensor, lr: float, weight_decay: float) -> Tensor:
    """The moments begin anew in each step."""
    for gradient in gradients:
        weight = _adamw(weight, gradient[None], lr, weight_decay)
    return weight


ADAMW = Exercise(
    solve=_adamw,
    draw=_draw_adamw,
    mistakes={
        "the decay is added to the gradient, as in Adam with L2; "
        "AdamW shrinks the weight itself and leaves the moments alone": (
            _mistaken("adamw_coupled", coupled=True)
        ),
        "the bias correction is missing; divide the moments by 1 - beta**step": (
            _mistaken("adamw_uncorrected", correct=(False, False))
        ),
        "only the mean is corrected; the mean of squares starts at 0 too": (
            _mistaken("adamw_square_uncorrected", correct=(True, False))
        ),
        "only the mean of squares is corrected; the mean starts at 0 too": (
            _mistaken("adamw_mean_uncorrected", correct=(False, True))
        ),
        "steps are counted from 0, where the correction divides by 0; the first step is 1": (
            _mistaken("adamw_from_zero", first_step=0)
        ),
        "the decay lacks the learning rate; shrink by 1 - lr * weight_decay": (
            _mistaken("adamw_decay_without_lr", decay_lr=False)
        ),
        "the decay comes behind the update; it shrinks the weight as it was before": (
            _mistaken("adamw_decay_last", decay_last=True)
        ),
        "eps is missing; where all gradients were 0, that is 0 / 0": (
            _mistaken("adamw_without_eps", eps=0.0)
        ),
        "the root is missing; divide by the root of the mean of squares": (
            _mistaken("adamw_without_root", root=False)
        ),
        "the square of the mean stands for the mean of the squares": (
            _mistaken("adamw_square_of_mean", centred=True)
        ),
        "the moments start anew in each step; keep them from one step to the next": (
            _adamw_forgetful
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


def _schedule(
    step: int, max_lr: float, min_lr: float, warmup_steps: int, cosine_steps: int
) -> np.float64:
    return np.float64(
        cosine_lr(
            step,
            max_lr=max_lr,
            min_lr=min_lr,
            warmup_steps=warmup_steps,
            cosine_steps=cosine_steps,
        )
    )


def _schedule_like(
    step: int,
    max_lr: float,
    min_lr: float,
    warmup_steps: int,
    cosine_steps: int,
    *,
    warm_up: bool = True,
    ends: bool = True,
    from_zero: bool = False,
    periods: float = 0.5,
    linear: bool = False,
) -> np.float64:
    """The schedule with keywords that make mistakes."""
    if warm_up and step < warmup_steps:
        return np.float64(step / warmup_steps * max_lr)
    if ends and step >= cosine_steps:
        return np.float64(min_lr)
    first = 0 if from_zero else warmup_steps
    progress = (step - first) / (cosine_steps - first)
    share = 1 - progress if linear else (1 + math.cos(2 * math.pi * periods * progress)) / 2
    return np.float64(min_lr + share * (max_lr - min_lr))


def _schedule_without_warmup(
    step: int, max_lr: float, min_lr: float, warmup_steps: int, cosine_steps: int
) -> np.float64:
    arguments = (max(step, warmup_steps), max_lr, min_lr, warmup_steps, cosine_steps)
    return _schedule(*arguments)


def _schedule_cosine_from_zero(*arguments) -> np.float64:
    return _schedule_like(*arguments, from_zero=True)


def _schedule_rising_again(*arguments) -> np.float64:
    return _schedule_like(*arguments, ends=False)


def _schedule_whole_period(*arguments) -> np.float64:
    return _schedule_like(*arguments, periods=1.0)


def _schedule_linear(*arguments) -> np.float64:
    return _schedule_like(*arguments, linear=True)


def _schedule_to_zero(
    step: int, max_lr: float, min_lr: float, warmup_steps: int, cosine_steps: int
) -> np.float64:
    return _schedule(step, max_lr, 0.0, warmup_steps, cosine_steps)


def _schedule_too_high(
    step: int, max_lr: float, min_lr: float, warmup_steps: int, cosine_steps: int
) -> np.float64:
    falling = _schedule(step, max_lr, 0.0, warmup_steps, cosine_steps)
    return falling if step < warmup_steps else falling + min_lr


SCHEDULE = Exercise(
    solve=_schedule,
    draw=_draw_schedule,
    mistakes={
        "there is no warm-up; below warmup_steps the rate climbs from 0": _schedule_without_warmup,
        "the cosine starts at step 0; it starts when the warm-up ends": (
            _schedule_cosine_from_zero
        ),
        "the rate rises again behind cosine_steps; it stays at min_lr": _schedule_rising_again,
        "the cosine runs through a whole period; half of one, from 0 to π, falls": (
            _schedule_whole_period
        ),
        "the rate falls along a straight line, and not along a cosine": _schedule_linear,
        "the rate falls to 0; it falls to min_lr": _schedule_to_zero,
        "min_lr is added to a cosine that is max_lr high; it is max_lr - min_lr high": (
            _schedule_too_high
        ),
    },
)


def _draw_top_p(generator: random.Random, size: int) -> tuple:
    count = 2 + size // 3
    weights = [float(weight) for weight in generator.sample(range(1, 4 * count), count)]
    total = sum(weights)
    sums = [partial / total for partial in accumulate(sorted(weights, reverse=True))]
    # between two sums, so that rounding decides nothing, and beyond the likeliest now and then
    rank = generator.randrange(count)
    lower = sums[rank - 1] if rank else 0.0
    top_p = generator.choice([1.0, (lower + sums[rank]) / 2, (lower + sums[rank]) / 2])
    return torch.tensor(weights, dtype=torch.float64) / total, round(top_p, 4)


def _top_p(probabilities: Tensor, top_p: float, *, shift: int = 1) -> Tensor:
    """The likeliest tokens that together reach `top_p`; `shift` 0 drops the last of them."""
    ranked, ids = probabilities.sort(descending=True)
    up_to = ranked.cumsum(-1)
    before = up_to - ranked if shift == 1 else up_to
    if shift == 2:
        before = torch.cat((torch.zeros(2, dtype=ranked.dtype), up_to))[: len(ranked)]
    kept = ranked.masked_fill(before >= top_p, 0) if top_p < 1 else ranked
    return torch.zeros_like(probabilities).scatter(-1, ids, kept / kept.sum())


def _top_p_too_few(probabilities: Tensor, top_p: float) -> Tensor:
    return _top_p(probabilities, top_p, shift=0)


def _top_p_too_many(probabilities: Tensor, top_p: float) -> Tensor:
    return _top_p(probabilities, top_p, shift=2)


def _top_p_not_normalised(probabilities: Tensor, top_p: float) -> Tensor:
    return torch.where(_top_p(probabilities, top_p) > 0, probabilities, 0.0)


def _top_p_left_sorted(probabilities: Tensor, top_p: float) -> Tensor:
    return _top_p(probabilities, top_p).sort(descending=True).values


def _top_p_rarest(probabilities: Tensor, top_p: float) -> Tensor:
    ranked, ids = probabilities.sort()
    kept = ranked.masked_fill(ranked.cumsum(-1) - ranked >= top_p, 0)
    return torch.zeros_like(probabilities).scatter(-1, ids, kept / kept.sum())


def _top_p_unsorted(probabilities: Tensor, top_p: float) -> Tensor:
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.masked_fill(before >= top_p, 0)
    return kept / kept.sum()


TOP_P = Exercise(
    solve=_top_p,
    draw=_draw_top_p,
    mistakes={
        "the token that crosses top_p is dropped; the tokens kept must reach top_p": (
            _top_p_too_few
        ),
        "one token too many is kept; stop at the one that crosses top_p": _top_p_too_many,
        "the probabilities kept do not sum to 1; divide them by their sum": _top_p_not_normalised,
        "the result is left in sorted order; each probability belongs to its own id": (
            _top_p_left_sorted
        ),
        "the tokens are sorted with the rarest first; the likeliest come first": _top_p_rarest,
        "the tokens are not sorted before they are summed": _top_p_unsorted,
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
