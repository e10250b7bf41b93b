"""A two-layer MLP and its sequences, the same on all ranks, for notebook 10."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lib.optimizer.adamw import AdamW

# Widths, and the sequences of a rank in a step.
D, D_FF, ROWS = 8, 24, 5
SHAPES = ((D_FF, D), (D, D_FF))


def first_weights() -> list[Tensor]:
    """The two matrices before training."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) / 3 for shape in SHAPES]


def batch(step: int, first: int, last: int) -> Tensor:
    """Inputs and targets of the ranks from `first` to before `last`, (2, sequences, D)."""
    parts = []
    for number in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + number)
        parts.append(torch.randn(2, ROWS, D, generator=generator))
    return torch.cat(parts, dim=1)


def mlp() -> nn.Module:
    """The MLP as a module."""
    up, down = nn.Linear(D, D_FF, bias=False), nn.Linear(D_FF, D, bias=False)
    for linear, value in zip((up, down), first_weights()):
        linear.weight.data.copy_(value)
    return nn.Sequential(up, nn.ReLU(), down)


def train_alone(steps: int, ranks: int) -> list[Tensor]:
    """Train in one process on the sequences of all ranks; return the weights."""
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, target = batch(step, 0, ranks)
        (model(x) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]
