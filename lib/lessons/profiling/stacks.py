"""A stack of residual blocks whose memory is counted, for the exercise on checkpoints."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lib.lessons.differences import AtMost, Named

# Peaks in % of a plain loop's, in steps so coarse that the reader's own `Checkpoint` and PyTorch's
# come out the same. The first is what the exercise asks for; the last is as much or more.
PEAKS = (50, 64, 75, 95, 100)


def make_stack(num_blocks: int, width: int, seed: int) -> nn.ModuleList:
    """Blocks of a small residual network, each of which keeps about nine times its input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.ModuleList(Residual(width) for _ in range(num_blocks))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class _Alive(TorchDispatchMode):
    """Adds up the bytes of tensors alive after each operation, without those in `outside`."""

    def __init__(self, outside: Sequence[Tensor]) -> None:
        super().__init__()
        self.outside = {tensor.untyped_storage()._cdata for tensor in outside}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self.outside:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def peak_bytes(forward: Callable, blocks: nn.ModuleList, x: Tensor) -> int:
    """The most bytes of tensors alive during a forward and backward pass, beside x, the weights and
    the gradients of both."""
    given = [x, *blocks.parameters()]
    for tensor in given:
        tensor.grad = torch.zeros_like(tensor)
    with _Alive([*given, *(tensor.grad for tensor in given)]) as memory:
        forward(blocks, x).sum().backward()
    return memory.peak


def plain(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    return functools.reduce(lambda x, block: block(x), blocks, x)


@dataclass(frozen=True)
class Stack:
    """The sizes of a stack of blocks."""

    blocks: int
    width: int
    seed: int

    def __repr__(self) -> str:
        return f"{self.blocks} blocks of width {self.width}"


def draw_stack(generator: random.Random, size: int) -> tuple:
    sizes = generator.choice([8, 10, 12]), generator.choice([16, 24]), generator.randrange(1000)
    return (Stack(*sizes),)


def run_stack(forward: Callable, stack: Stack) -> Named:
    """The result, the gradients that reach x and each block, runs of a block, and the peak."""
    blocks = make_stack(stack.blocks, stack.width, stack.seed)
    x = torch.linspace(-1, 1, 64 * stack.width).view(64, stack.width).requires_grad_()
    runs = [0] * stack.blocks

    def count(index: int) -> None:
        runs[index] += 1

    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, index=index: count(index))

    result = forward(blocks, x)
    if not isinstance(result, Tensor):
        raise TypeError(f"the result must be that of the last block, got {result!r:.60}")
    found = Named(result=result.detach())
    if result.requires_grad:
        # added up, since a checkpoint of one's own may know no other way
        result.square().sum().backward()
    found["gradient of x"] = x.grad
    for name, weight in blocks.named_parameters():
        found[f"gradient of block {name}"] = weight.grad
    found["runs of a block"] = AtMost(max(runs))
    if result.requires_grad:
        percent = 100 * peak_bytes(forward, blocks, x) / peak_bytes(plain, blocks, x)
        step = next((peak for peak in PEAKS if percent <= peak), PEAKS[-1])
        found["peak, % of a plain loop's"] = AtMost(step)
    return found


def peak_share(forward: Callable) -> float:
    """Peak memory in percent of that without checkpoints, for 16 blocks."""
    blocks, x = make_stack(16, 32, 0), torch.ones(64, 32, requires_grad=True)
    return 100 * peak_bytes(forward, blocks, x) / peak_bytes(plain, blocks, x)
