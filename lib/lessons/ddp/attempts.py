"""Right answers of notebook 08 at work on processes: they train a model whose gradients arrive in
another order on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

STEPS, LR = 3, 0.1
BUCKETS = ((7, 6, 5), (4, 3), (2, 1, 0))


class Branches(nn.Module):
    """The sum of some linear layers, which a rank computes in an order of its own.

    So their gradients arrive in an order of its own.
    """

    def __init__(self, is_reversed: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))
        for param in self.parameters():
            param.data.normal_(generator=generator)
        self.order = [*reversed(self.layers)] if is_reversed else [*self.layers]

    def forward(self, x: Tensor) -> Tensor:
        outputs = {layer: layer(x).tanh() for layer in self.order}
        # added up in the same order everywhere
        return torch.stack([outputs[layer] for layer in self.layers]).sum(0).square().mean()


def batch(step: int, number: int) -> Tensor:
    """The sequences of a rank in a step."""
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(2, 4, generator=generator)


def train_with_hooks(add_hooks: Callable, ranks: Any) -> Tensor:
    """Train on this rank with hooks that start all-reduces; return the weights, flat."""
    model = Branches(is_reversed=ranks.number == 1)
    params = list(model.parameters())
    works: list[tuple[Sequence[int], Callable[[], Tensor]]] = []

    def start(number: int) -> None:
        bucket = BUCKETS[number]
        flat = torch.cat([params[index].grad.flatten() for index in bucket])  # type: ignore[union-attr]
        works.append((bucket, ranks.start_all_reduce(flat)))

    def finish() -> None:
        for bucket, wait in works:
            means = (wait() / ranks.count).split([params[index].numel() for index in bucket])
            for index, mean in zip(bucket, means):
                params[index].grad = mean.view_as(params[index])
        works.clear()

    add_hooks(params, BUCKETS, start)
    return train(model, finish, ranks.number)


def train_wrapped(data_parallel: Callable, ranks: Any) -> Tensor:
    """Train on this rank with a wrapper, from weights of its own; return the weights, flat."""
    model = Branches(is_reversed=ranks.number == 1)
    params = list(model.parameters())
    for param in params:
        param.data += ranks.number
    return train(model, data_parallel(params, BUCKETS, ranks), ranks.number)


def train(model: Branches, finish: Callable, *numbers: int) -> Tensor:
    """Train on the sequences of the ranks `numbers`; return the weights, flat."""
    for step in range(STEPS):
        model(torch.cat([batch(step, number) for number in numbers])).backward()
        finish()
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad, alpha=LR)  # type: ignore[arg-type]
                param.grad = None
    return torch.cat([param.detach().flatten() for param in model.parameters()])
