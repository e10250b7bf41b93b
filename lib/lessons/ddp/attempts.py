"""Jobs that run an attempt at an exercise of notebook 07 on processes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp.process_group import rank, world_size
from lib.lessons.ranks import Processes
from lib.lessons.sending import function_of

ELEMENTS, STEPS, LR = 1_000_001, 3, 0.1


def ring(parcel: bytes) -> tuple[float, float]:
    """The largest difference of an attempt's sum to gloo's, and its milliseconds."""
    attempt, tensor = function_of(parcel), torch.arange(float(ELEMENTS)) / ELEMENTS + rank()
    total = tensor.clone()
    dist.all_reduce(total)
    ranks, start = Processes(), time.perf_counter()
    found = attempt(tensor, ranks)
    milliseconds = 1e3 * (time.perf_counter() - start)
    ranks.wait_for_messages()
    return (found - total).abs().max().item(), milliseconds


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


def branches_batch(step: int, number: int) -> Tensor:
    """The sequences of a rank in a step."""
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(2, 4, generator=generator)


def train_with_hooks(parcel: bytes) -> Tensor:
    """Train on this rank with hooks of an attempt, which start all-reduces; return the weights."""
    model = Branches(is_reversed=rank() == 1)
    params = list(model.parameters())
    buckets = [[7, 6, 5], [4, 3], [2, 1, 0]]
    works: list[tuple[Sequence[int], Tensor, dist.Work]] = []

    def start(number: int) -> None:
        flat = torch.cat([params[index].grad.flatten() for index in buckets[number]])  # type: ignore[union-attr]
        work = dist.all_reduce(flat, async_op=True)
        works.append((buckets[number], flat, work))  # type: ignore[arg-type]

    function_of(parcel)(params, buckets, start)
    for step in range(STEPS):
        model(branches_batch(step, rank())).backward()
        for bucket, flat, work in works:
            work.wait()
            means = flat.div(world_size()).split([params[index].numel() for index in bucket])
            for index, mean in zip(bucket, means):
                params[index].grad = mean.view_as(params[index])
        works.clear()
        _descend(params)
    return torch.cat([param.detach().flatten() for param in params])


def train_wrapped(parcel: bytes) -> Tensor:
    """Train on this rank with an attempt at a wrapper, from weights of its own."""
    model = Branches(is_reversed=rank() == 1)
    params = list(model.parameters())
    for param in params:
        param.data += rank()
    finish = function_of(parcel)(params, [[7, 6, 5], [4, 3], [2, 1, 0]], Processes())
    for step in range(STEPS):
        model(branches_batch(step, rank())).backward()
        finish()
        _descend(params)
    return torch.cat([param.detach().flatten() for param in params])


def train_branches_alone(ranks: int) -> Tensor:
    """The same training in one process, on the sequences of all ranks."""
    model = Branches(is_reversed=False)
    for step in range(STEPS):
        model(torch.cat([branches_batch(step, number) for number in range(ranks)])).backward()
        _descend(list(model.parameters()))
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@torch.no_grad()
def _descend(params: Sequence[Tensor]) -> None:
    for param in params:
        param -= LR * param.grad  # type: ignore[operator]
        param.grad = None
