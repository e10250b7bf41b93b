"""The learning rate by step, and gradient clipping."""

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

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


@torch.no_grad()
def clip_grad_norm(params: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients in place so that their joint L2 norm is at most `max_norm`.

    The same as `torch.nn.utils.clip_grad_norm_` (Pascanu et al. 2013, arXiv:1211.5063, Algorithm
    1). Never waits for the device.

    Returns:
        The norm before clipping, as `grad_norm` does.

    Raises:
        ValueError: `max_norm` is negative.
    """
    # one norm of all gradients together, so that clipping keeps their direction
    params = [params] if isinstance(params, Tensor) else list(params)
    norm = grad_norm(params)
    coefficient = clip_coefficient(norm, max_norm)

    # all of a device and dtype in a few kernels
    grads = [param.grad for param in params if param.grad is not None]
    for (device, _), batch in group_by(grads, lambda grad: (grad.device, grad.dtype)):
        torch._foreach_mul_(batch, coefficient.to(device, non_blocking=True))
    return norm


@torch.no_grad()
def grad_norm(params: Tensor | Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients together: 0-dim, float32, on the gradients' device.

    Reads each gradient once, sums in float32, and never waits for the device. With a float64
    gradient among them, sums and result are float64.
    """
    params = [params] if isinstance(params, Tensor) else list(params)
    grads = [param.grad for param in params if param.grad is not None]
    device = grads[0].device if grads else params[0].device if params else None

    # the norm of each gradient
    norms = []
    for (_, dtype), batch in group_by(grads, lambda grad: (grad.device, grad.dtype)):
        # PyTorch refuses a norm in a narrower dtype than the gradient's
        norm_dtype = None if dtype.itemsize > 4 else torch.float32
        norms += torch._foreach_norm(batch, 2, dtype=norm_dtype)
    if not norms:
        return torch.zeros((), device=device)

    # the norm of the norms is that of all numbers
    dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    norms = [norm.to(device, dtype, non_blocking=True) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor, 0-dim and at most 1, that brings gradients of norm `norm` to `max_norm`.

    As `grad_scale` of `AdamW.step` it clips without a pass of its own over the gradients.

    Raises:
        ValueError: `max_norm` is negative.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, got {max_norm}")
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def group_by(
    tensors: Iterable[Tensor], key: Callable[[Tensor], Hashable]
) -> list[tuple[Any, list[Tensor]]]:
    """Return (key, tensors) pairs; keys and tensors stay in the order in which they came."""
    groups: dict[Hashable, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    return list(groups.items())
