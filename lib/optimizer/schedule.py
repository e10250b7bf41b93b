"""The learning rate by step."""

import math

from lib.core.settings import require


def cosine_lr(
    step: int, *, max_lr: float, min_lr: float, warmup_steps: int, cosine_steps: int
) -> float:
    """Return the learning rate at `step`: a linear warm-up, half a cosine, then constant.

    It rises from 0 to `max_lr` at `warmup_steps`, falls to `min_lr` at `cosine_steps`, and stays
    there (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts).

    Raises:
        ValueError: an argument is negative, or they are out of order.
    """
    require(step >= 0, f"step must be at least 0, got {step}")
    require(warmup_steps >= 0, f"warmup_steps must be at least 0, got {warmup_steps}")
    in_order = cosine_steps >= warmup_steps
    require(in_order, f"cosine_steps must be at least {warmup_steps=}, got {cosine_steps}")
    require(0 <= min_lr <= max_lr, f"min_lr must be between 0 and {max_lr=}, got {min_lr}")

    # warm-up: AdamW's moments are means of only a few gradients yet
    if step < warmup_steps:
        return step / warmup_steps * max_lr
    if step >= cosine_steps:
        return min_lr

    # half a cosine, from 1 down to -1
    progress = (step - warmup_steps) / (cosine_steps - warmup_steps)
    return min_lr + (1 + math.cos(math.pi * progress)) / 2 * (max_lr - min_lr)
