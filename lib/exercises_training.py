"""Exercises of notebook 03: AdamW, the cosine schedule, nucleus sampling."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lib.exercises import Exercise, Raised, check
from lib.optimizer import cosine_lr

BETA1, BETA2, EPS = 0.9, 0.95, 1e-8


def _mistaken(function: Callable, name: str, **how) -> Callable:
    """`function` with the keywords `how`, which make a mistake, under a name of its own."""

    def mistaken(*arguments):
        return function(*arguments, **how)

    mistaken.__name__ = name
    return mistaken


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


def _adamw(
    weight: Tensor,
    gradients: Tensor,
    lr: float,
    weight_decay: float,
    *,
    decay: str = "first",
    correct: tuple[bool, bool] = (True, True),
    keep_corrected: bool = False,
    first_step: int = 1,
    beta2: float = BETA2,
    is_mean: bool = True,
    eps: float = EPS,
    root: str = "before eps",
    centred: bool = False,
    sign: int = -1,
) -> Tensor:
    """`weight` after a step of AdamW for each of `gradients`; the keywords make mistakes."""
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    share1, share2 = (1 - BETA1, 1 - beta2) if is_mean else (1, 1)
    for step, gradient in enumerate(gradients, start=first_step):
        if decay == "coupled":
            gradient = gradient + weight_decay * weight
        pulls = {"first": lr * weight_decay * weight, "without lr": weight_decay * weight}
        pulls["without weight"] = lr * weight_decay
        weight = weight - pulls.get(decay, 0)
        mean = BETA1 * mean + share1 * gradient
        square = beta2 * square + share2 * gradient**2
        mean_hat = mean / (1 - BETA1**step) if correct[0] else mean
        square_hat = mean**2 if centred else square
        square_hat = square_hat / (1 - beta2**step) if correct[1] else square_hat
        if keep_corrected:
            mean, square = mean_hat, square_hat
        sizes = {"before eps": square_hat.sqrt() + eps, "missing": square_hat + eps}
        sizes["of eps too"] = (square_hat + eps).sqrt()
        weight = weight + sign * lr * mean_hat / sizes[root]
        if decay == "last":
            weight = (1 - lr * weight_decay) * weight
    return weight


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
            _mistaken(_adamw, "adamw_coupled", decay="coupled")
        ),
        "the bias correction is missing; divide the moments by 1 - beta**step": (
            _mistaken(_adamw, "adamw_uncorrected", correct=(False, False))
        ),
        "only the mean is corrected; the mean of squares starts at 0 too": (
            _mistaken(_adamw, "adamw_square_uncorrected", correct=(True, False))
        ),
        "only the mean of squares is corrected; the mean starts at 0 too": (
            _mistaken(_adamw, "adamw_mean_uncorrected", correct=(False, True))
        ),
        "the corrected moments are kept for the next step; keep the uncorrected ones": (
            _mistaken(_adamw, "adamw_keeps_corrected", keep_corrected=True)
        ),
        "1 - beta is forgotten; new means are beta * old + (1 - beta) * new": (
            _mistaken(_adamw, "adamw_sums", is_mean=False)
        ),
        "beta2 is 0.999; here it is 0.95": _mistaken(_adamw, "adamw_slow_square", beta2=0.999),
        "steps are counted from 0, where the correction divides by 0; the first step is 1": (
            _mistaken(_adamw, "adamw_from_zero", first_step=0)
        ),
        "the update is added; the step goes against the gradient, so subtract it": (
            _mistaken(_adamw, "adamw_uphill", sign=1)
        ),
        "the decay lacks the learning rate; shrink by 1 - lr * weight_decay": (
            _mistaken(_adamw, "adamw_decay_without_lr", decay="without lr")
        ),
        "the decay lacks the weight; subtract lr * weight_decay * weight": (
            _mistaken(_adamw, "adamw_decay_without_weight", decay="without weight")
        ),
        "the decay comes behind the update; it shrinks the weight as it was before": (
            _mistaken(_adamw, "adamw_decay_last", decay="last")
        ),
        "eps is missing; where all gradients were 0, that is 0 / 0": (
            _mistaken(_adamw, "adamw_without_eps", eps=0.0)
        ),
        "eps is 1e-6; here it is 1e-8, which counts where gradients are tiny": (
            _mistaken(_adamw, "adamw_large_eps", eps=1e-6)
        ),
        "eps is added inside the root; add it to the root": (
            _mistaken(_adamw, "adamw_eps_inside", root="of eps too")
        ),
        "the root is missing; divide by the root of the mean of squares": (
            _mistaken(_adamw, "adamw_without_root", root="missing")
        ),
        "the square of the mean stands for the mean of the squares": (
            _mistaken(_adamw, "adamw_square_of_mean", centred=True)
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
    settings = {"warmup_steps": warmup_steps, "cosine_steps": cosine_steps}
    return np.float64(cosine_lr(step, max_lr=max_lr, min_lr=min_lr, **settings))


def _schedule_like(
    step: int,
    max_lr: float,
    min_lr: float,
    warmup_steps: int,
    cosine_steps: int,
    *,
    warm_up: str = "from 0",
    ends: bool = True,
    progress_of: str = "the fall",
    shape: str = "cosine",
    lowest: str = "min_lr",
) -> np.float64:
    """The schedule with keywords that make mistakes."""
    if warm_up != "none" and step < warmup_steps:
        first = min_lr if warm_up == "from min_lr" else 0
        share = (step + (warm_up == "from 1")) / warmup_steps
        return np.float64(first + share * (max_lr - first))
    bottom = 0.0 if lowest == "0" else min_lr
    height = max_lr - (min_lr if lowest == "min_lr" else 0.0)
    step = max(step, warmup_steps)
    begin = 0 if progress_of == "all from 0" else warmup_steps
    length = cosine_steps - begin if progress_of != "cosine_steps" else cosine_steps
    progress = (step - begin) / length
    if ends and step >= cosine_steps:
        return np.float64(bottom)
    angle = math.pi * progress * (2 if shape == "whole period" else 1)
    share = (1 + math.cos(angle) * (-1 if shape == "rising" else 1)) / 2
    return np.float64(bottom + (1 - progress if shape == "line" else share) * height)


class _DivisionByZero(Raised):
    """Equals an error of this kind in any line; its wording depends on the types divided."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Raised) and other.error.startswith("ZeroDivisionError")

    __hash__ = Raised.__hash__


def _schedule_divides_by_zero(
    step: int, max_lr: float, min_lr: float, warmup_steps: int, cosine_steps: int
) -> np.float64 | Raised:
    """`step <= warmup_steps`: right unless both are 0."""
    if step == warmup_steps == 0:
        return _DivisionByZero("ZeroDivisionError: division by zero", None)
    return _schedule(step, max_lr, min_lr, warmup_steps, cosine_steps)


SCHEDULE = Exercise(
    solve=_schedule,
    draw=_draw_schedule,
    mistakes={
        "there is no warm-up; below warmup_steps the rate climbs from 0": (
            _mistaken(_schedule_like, "schedule_without_warmup", warm_up="none")
        ),
        "the warm-up starts at min_lr; it starts at 0": (
            _mistaken(_schedule_like, "schedule_warmup_from_min", warm_up="from min_lr")
        ),
        "the warm-up is one step ahead (step + 1); at step 0 the rate is 0": (
            _mistaken(_schedule_like, "schedule_warmup_ahead", warm_up="from 1")
        ),
        "step 0 counts as warm-up where there is none: with warmup_steps 0 there is no warm-up; "
        "compare with <, and not with <=": _schedule_divides_by_zero,
        "the cosine starts at step 0; it starts when the warm-up ends": (
            _mistaken(_schedule_like, "schedule_cosine_from_zero", progress_of="all from 0")
        ),
        "the progress is divided by cosine_steps; divide by cosine_steps - warmup_steps": (
            _mistaken(_schedule_like, "schedule_slow_cosine", progress_of="cosine_steps")
        ),
        "the rate rises again behind cosine_steps; it stays at min_lr": (
            _mistaken(_schedule_like, "schedule_rising_again", ends=False)
        ),
        "the cosine runs through a whole period; half of one, from 0 to π, falls": (
            _mistaken(_schedule_like, "schedule_whole_period", shape="whole period")
        ),
        "1 - cos stands where 1 + cos should, so that the rate rises": (
            _mistaken(_schedule_like, "schedule_rising", shape="rising")
        ),
        "the rate falls along a straight line, and not along a cosine": (
            _mistaken(_schedule_like, "schedule_linear", shape="line")
        ),
        "the rate falls to 0; it falls to min_lr": (
            _mistaken(_schedule_like, "schedule_to_zero", lowest="0")
        ),
        "min_lr is added to a cosine that is max_lr high; it is max_lr - min_lr high": (
            _mistaken(_schedule_like, "schedule_too_high", lowest="added")
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


def _top_p(probabilities: Tensor, top_p: float, *, more: int = 0) -> Tensor:
    """The likeliest tokens that together reach `top_p`, and `more` too many."""
    ranked, ids = probabilities.sort(descending=True)
    before = torch.cat((ranked.new_zeros(more), ranked.cumsum(-1) - ranked))[: len(ranked)]
    kept = ranked.masked_fill(before >= top_p, 0)
    return torch.zeros_like(probabilities).scatter(-1, ids, kept / kept.sum())


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


def _top_p_of_each(probabilities: Tensor, top_p: float) -> Tensor:
    kept = probabilities.masked_fill(probabilities < top_p, 0)
    return kept / kept.sum()


def _top_p_up_to(
    probabilities: Tensor, top_p: float, *, compare: Callable, empty: float = math.nan
) -> Tensor:
    """Tokens are kept by the sum up to and with each; `empty` is the result where none is."""
    ranked, ids = probabilities.sort(descending=True)
    kept = ranked * compare(ranked.cumsum(-1), top_p)
    kept = kept / kept.sum() if kept.any() else torch.full_like(kept, empty)
    return torch.zeros_like(probabilities).scatter(-1, ids, kept)


def _top_p_permuted_again(probabilities: Tensor, top_p: float) -> Tensor:
    ids = probabilities.argsort(descending=True)
    return _top_p_left_sorted(probabilities, top_p)[ids]


TOP_P = Exercise(
    solve=_top_p,
    draw=_draw_top_p,
    mistakes={
        "cumsum <= top_p drops the token that crosses; keep where cumsum - ranked < top_p": (
            _mistaken(_top_p_up_to, "top_p_up_to", compare=torch.le)
        ),
        "cumsum < top_p drops the token that reaches top_p; keep where cumsum - ranked < top_p": (
            _mistaken(_top_p_up_to, "top_p_below", compare=torch.lt)
        ),
        "cumsum <= top_p drops the token that crosses, even a first one, which leaves none; "
        "keep where cumsum - ranked < top_p": (
            _mistaken(_top_p_up_to, "top_p_up_to_or_none", compare=torch.le, empty=0.0)
        ),
        "cumsum < top_p drops the token that reaches top_p, even a first one, which leaves none; "
        "keep where cumsum - ranked < top_p": (
            _mistaken(_top_p_up_to, "top_p_below_or_none", compare=torch.lt, empty=0.0)
        ),
        "one token too many is kept; stop at the one that crosses top_p": (
            _mistaken(_top_p, "top_p_too_many", more=1)
        ),
        "the probabilities kept do not sum to 1; divide them by their sum": _top_p_not_normalised,
        "the result is left in sorted order; each probability belongs to its own id": (
            _top_p_left_sorted
        ),
        "the result is ranked[ids], which permutes again; result[ids] = ranked puts values back": (
            _top_p_permuted_again
        ),
        "each probability alone is compared with top_p; what counts is the sum of those before": (
            _top_p_of_each
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
