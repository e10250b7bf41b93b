"""Steps of `lib.fsdp.FSDP` on a simulated network, for notebook 10: timed ones and real matmuls."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp.process_group import mean_over_ranks, world_size
from lib.fsdp import FSDP, checkpoint_activations
from lib.lessons.ddp import stack as timed
from lib.lessons.simulated_network import Network, SimulatedGroup, simulated_group
from lib.profiling.collectives import Link

# An all-gather takes this part of a block's forward pass.
SHARE = 0.8
# A bandwidth at which messages take no time.
INSTANT_GBS = 1e9


class TimedBlock(nn.Module):
    """A matrix that is as large as a layer of notebook 08's stack, and as long busy."""

    def __init__(self, size: int, stack: timed.Stack) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, size))
        # the stack is no part of this module
        self.busy = lambda x: timed.Busy.apply(x, stack)

    def forward(self, x: Tensor) -> Tensor:
        # backward is busy before the weight's gradient is there
        return self.busy(x + self.weight.sum())


def timed_fsdp(stack: timed.Stack, group: SimulatedGroup, *, prefetch: bool = True) -> FSDP:
    """FSDP of blocks like the layers of notebook 08's stack, which notes when they are busy."""
    blocks = nn.Sequential(*(TimedBlock(size, stack) for size in stack.layers.sizes))
    return FSDP(blocks, group=group, prefetch=prefetch)


class Stack(nn.Module):
    """Residual blocks of two matrices each."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width, bias=False),
                nn.ReLU(),
                nn.Linear(4 * width, width, bias=False),
            )
            for _ in range(blocks)
        )
        self.around_block: Callable = lambda index, block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x + self.around_block(index, block, x)
        return x


@dataclass(frozen=True)
class Steps:
    """The results of `time_steps`; milliseconds are the best on rank 0."""

    computing_ms: float
    """A step of one rank that sends nothing, while the other does the same."""

    gather_ms: float
    """One all-gather of a block on this network, as predicted."""

    prefetch_ms: float
    just_in_time_ms: float
    instant_ms: float
    """With prefetching, where messages take no time: computing, and what FSDP itself does."""

    gathers: int
    """All-gathers of a step."""

    gathers_checkpointed: int
    """The same, where each block is a checkpoint."""


def time_steps(blocks: int, width: int, tokens: int, samples: int) -> Steps:
    """Time steps with and without prefetching; all ranks of a job call it."""
    x = torch.randn(tokens, width, requires_grad=True)
    plain = Stack(blocks, width)
    dist.barrier()
    (computing,) = _best_ms([lambda: _backward(plain, x)], samples)
    # all ranks must have the same network
    block_ms = mean_over_ranks(computing) / 3 / blocks
    num_bytes = 4 * 8 * width**2
    bandwidth_gbs = num_bytes / world_size() / (SHARE * block_ms * 1e6)
    network = Network(Link(0.0, bandwidth_gbs))
    group, instant = (simulated_group(one) for one in (network, Network(Link(0.0, INSTANT_GBS))))
    models = [
        FSDP(Stack(blocks, width), group=group),
        FSDP(Stack(blocks, width), group=group, prefetch=False),
        FSDP(Stack(blocks, width), group=instant),
    ]
    steps = [partial(_step, model, x) for model in models]
    again, *times = _best_ms([lambda: _backward(plain, x), *steps], samples)
    return Steps(
        computing_ms=min(computing, again),
        gather_ms=network.collective_ms("all_gather", num_bytes, world_size()),
        prefetch_ms=times[0],
        just_in_time_ms=times[1],
        instant_ms=times[2],
        gathers=_gathers(Stack(blocks, width), x, group),
        gathers_checkpointed=_gathers(_checkpointed(Stack(blocks, width)), x, group),
    )


def _backward(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad()


def _step(model: FSDP, x: Tensor) -> None:
    model(x).sum().backward()
    model.finish_gradient_synchronization()
    model.zero_grad()


def _best_ms(steps: list[Callable[[], None]], samples: int) -> list[float]:
    """The shortest time of each step, interleaved: other programs only make one longer."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(samples + 1):
        for step, taken in zip(steps, times):
            dist.barrier()
            start = time.perf_counter()
            step()
            taken.append(1e3 * (time.perf_counter() - start))
    # the first one warms up
    return [min(taken[1:]) for taken in times]


def _checkpointed(stack: Stack) -> Stack:
    stack.around_block = checkpoint_activations()
    return stack


def _gathers(stack: Stack, x: Tensor, group: SimulatedGroup) -> int:
    model, before = FSDP(stack, group=group), len(group.transfers)
    _step(model, x)
    return sum(transfer.kind == "all_gather" for transfer in group.transfers[before:])
