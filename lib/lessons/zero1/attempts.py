"""Training with an attempt at the ZeRO-1 step, on processes, and the same in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lib.lessons.ranks import Processes
from lib.lessons.sending import Parcel, function_of

# Sequences of a rank; 41 weights, which two ranks cannot divide evenly.
ROWS = 4
SHAPES = ((6, 5), (6,), (5,))


def train_attempt(parcel: Parcel, name: str, steps: int) -> Tensor:
    """Train on this rank with the function `name` of `parcel`; return its weights, flat.

    The function is an attempt at the step: `name(params, grads, state, ranks)`.
    """
    attempt, ranks = function_of(parcel, name), Processes()
    params, state = first_weights(), dict[str, Any]()
    x, target = (part.chunk(ranks.count)[ranks.number] for part in batch(ranks.count))
    for _ in range(steps):
        grads = torch.autograd.grad(loss(params, x, target), params)
        with torch.no_grad():
            # a new list: what the attempt puts into it is no parameter
            attempt([*params], list(grads), state, ranks)
    return torch.cat([param.detach().flatten() for param in params])


def train_alone(count: int, steps: int) -> Tensor:
    """The same training in one process, on the sequences of all ranks, with PyTorch's Adam."""
    params = first_weights()
    optimizer = torch.optim.Adam(params, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(params, *batch(count)).backward()
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in params])


def first_weights() -> list[Tensor]:
    """The parameters before training."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator) / 3) for shape in SHAPES]


def batch(count: int) -> tuple[Tensor, Tensor]:
    """Inputs of all ranks, (count · ROWS, 5), and targets, (count · ROWS, 6)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count * ROWS, 5, generator=generator)
    return x, torch.randn(count * ROWS, 6, generator=generator)


def loss(params: list[Tensor], x: Tensor, target: Tensor) -> Tensor:
    """The mean square error of a linear layer with scaled inputs."""
    matrix, bias, scale = params
    return ((x * scale) @ matrix.T + bias - target).square().mean()
