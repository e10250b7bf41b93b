"""A stack of residual blocks whose memory is counted, for the exercise on checkpoints."""

from __future__ import annotations

import bisect
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


def _gradients(output: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients that backward adds up; a checkpoint of one's own may know no other way."""
    for tensor in inputs:
        tensor.grad = None
    if not output.requires_grad:
        return [None for _ in inputs]
    output.square().sum().backward()
    return [tensor.grad for tensor in inputs]


def plain(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    return functools.reduce(lambda x, block: block(x), blocks, x)


@dataclass(frozen=True)
class Stack:
    """The sizes of a stack of blocks."""

    blocks: int
    width: int
    seed: int

    def __repr__(self) -> str:
        return f"{self.blocks} blocks of width {self.width}, x"


@dataclass(frozen=True)
class Run:
    """The task of the exercise: a forward and backward pass."""

    wrong_result: float | None
    """None: the result is that of a plain loop; else its norm, to three digits."""

    missing: tuple[str, ...]
    """Names of the tensors and blocks without a gradient: x, block 0, ..."""

    wrong_gradients: float | None
    """None: the others get those of a plain loop; else the norm of the wrong ones, to three
    digits."""

    most_runs: int
    """How often the block that runs most often runs."""

    too_much: int
    """0: at most half of a plain loop's peak; else how far above, in steps so coarse that the
    learner's `Checkpoint` and PyTorch's come out the same."""

    percent: float = field(compare=False)
    """The peak, of a plain loop's."""

    def problem(self) -> str:
        """The first thing that is wrong, as a sentence."""
        if self.wrong_result is not None:
            return "the result is not that of a plain loop"
        if self.missing:
            who = ", ".join(self.missing[:3]) + (", ..." if len(self.missing) > 3 else "")
            return f"the result is right, but no gradient reaches {who}"
        if self.wrong_gradients is not None:
            return "the result is right, but the gradients are not those of a plain loop"
        if self.most_runs > 2:
            return f"a block runs {self.most_runs} times, at most 2 are allowed"
        if self.too_much:
            return f"the peak is {self.percent:.0f}% of a plain loop's, at most 50% is allowed"
        return "no block runs again in the backward pass: was its input kept?"


def _differing(expected: Sequence[Tensor], found: Sequence[Tensor | None]) -> float | None:
    """The norm, to three digits, of those in `found` that are not as expected; None if all are."""
    wrong = [
        tensor.detach().flatten()
        for right, tensor in zip(expected, found)
        if tensor is not None
        and (tensor.shape != right.shape or not torch.allclose(right, tensor, rtol=1e-4))
    ]
    return float(f"{torch.cat(wrong).norm():.3g}") if wrong else None


def judged(forward: Callable) -> Callable[[Stack], Any]:
    """Return `forward` as a function of a stack's sizes, with what the exercise asks of it.

    That function returns a `Run`, or what `forward` returns if that is no tensor.
    """

    @functools.wraps(forward)
    def run(stack: Stack) -> Run:
        blocks = make_stack(stack.blocks, stack.width, stack.seed)
        x = torch.linspace(-1, 1, 64 * stack.width).view(64, stack.width).requires_grad_()
        runs = [0] * stack.blocks
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(
                lambda module, args, index=index: runs.__setitem__(index, runs[index] + 1)
            )
        inputs = [x, *blocks.parameters()]
        expected = plain([*blocks], x)
        gradients = _gradients(expected, inputs)
        runs[:] = [0] * stack.blocks
        result = forward(blocks, x)
        if not isinstance(result, Tensor):
            return result
        found = _gradients(result, inputs)
        wrong_result = _differing([expected], [result])
        names = ["x", *(f"block {name.split('.')[0]}" for name, _ in blocks.named_parameters())]
        missing = [name for name, gradient in zip(names, found) if gradient is None]
        wrong_gradients = _differing(gradients, found)
        most_runs = max(runs)
        percent = 0.0
        if result.requires_grad:
            percent = 100 * peak_bytes(forward, blocks, x) / peak_bytes(plain, blocks, x)
        too_much = bisect.bisect_left([50, 63, 75, 95], percent)
        wrong = (wrong_result, tuple(dict.fromkeys(missing)), wrong_gradients)
        return Run(*wrong, most_runs, too_much, percent)

    return run


def peak_share(run: Callable) -> float:
    """Peak memory in percent of that without checkpoints, for 16 blocks."""
    blocks, x = make_stack(16, 32, 0), torch.ones(64, 32, requires_grad=True)
    return 100 * peak_bytes(inspect.unwrap(run), blocks, x) / peak_bytes(plain, blocks, x)
