"""Attempts at exercises 2 and 7 on processes, and the same in one process."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.lessons.ranks import Processes
from lib.lessons.sending import function_of


def train_attempt(parcel: bytes, steps: int) -> Tensor:
    """Train an MLP on this rank with the function of `parcel`; return its whole weights.

    The function is an attempt at exercise 2: `name(x, shard, d_ff, ranks)` -> output, backward.
    """
    attempt, ranks, d_ff = function_of(parcel), Processes(), 12
    whole, parts = mlp_case(d_ff, ranks.count)
    shard = whole.chunk(ranks.count)[ranks.number].clone()
    x, target = (part.chunk(ranks.count)[ranks.number] for part in parts)
    for _ in range(steps):
        # an attempt may compute the block again by autograd
        y, backward = attempt(x, shard, d_ff, ranks)
        _, gradient = backward(2 * (y.detach() - target) / y.numel())
        with torch.no_grad():
            shard -= 0.1 * gradient
    return ranks.all_gather(shard.detach())


def mlp_case(d_ff: int, count: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Weights of an MLP, flat, and inputs and targets of all ranks, (4 · count, 6)."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2 * 6 * d_ff, generator=generator) / 3
    x, target = torch.randn(2, 4 * count, 6, generator=generator)
    return whole, (x, target)


def train_alone(d_ff: int, count: int, steps: int) -> Tensor:
    """The same training in one process, on the sequences of all ranks, by autograd."""
    whole, (x, target) = mlp_case(d_ff, count)
    whole.requires_grad_()
    for _ in range(steps):
        w1, w2 = whole.split(6 * d_ff)
        y = (x @ w1.view(d_ff, 6).T).relu() @ w2.view(6, d_ff).T
        (gradient,) = torch.autograd.grad((y - target).square().mean(), whole)
        with torch.no_grad():
            whole -= 0.1 * gradient
    return whole.detach()


def run_mlp_attempt(parcel: bytes) -> dict[str, Tensor]:
    """Run an MLP forward and backward on this rank with the function of `parcel`.

    The function is an attempt at exercise 7: `name(x, w1, w2, ranks)` -> output, backward.
    """
    x, w1, w2, grad_y = tensor_parallel_case()
    y, backward = function_of(parcel)(x, w1, w2, Processes())
    return dict(zip(("y", "grad_x", "grad_w1", "grad_w2"), (y.detach(), *backward(grad_y))))


def tensor_parallel_case() -> list[Tensor]:
    """Input, whole matrices, and gradient of the output, for 6 wide tokens and 12 hidden units."""
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 6), (12, 6), (6, 12), (5, 6)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def mlp_alone(number: int, count: int) -> dict[str, Tensor]:
    """The results of rank `number` of `count`, by autograd in one process with whole matrices."""
    *inputs, grad_y = tensor_parallel_case()
    x, w1, w2 = (tensor.requires_grad_() for tensor in inputs)
    y = (x @ w1.T).relu() @ w2.T
    grad_x, grad_w1, grad_w2 = torch.autograd.grad(y, (x, w1, w2), grad_y)
    return {
        "y": y.detach(),
        "grad_x": grad_x,
        "grad_w1": grad_w1.chunk(count, dim=0)[number],
        "grad_w2": grad_w2.chunk(count, dim=1)[number],
    }
