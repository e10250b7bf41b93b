"""Steps of a stack of layers on a simulated network, for notebook 08: how long, and who waits."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.lessons.simulated_network import (
    NETWORKS,
    Network,
    SimulatedGroup,
    Transfer,
    VirtualClock,
    Workload,
    gpu_step,
    simulated_group,
)
from lib.model.config import model_preset
from lib.model.transformer import do_nothing
from lib.profiling.timeline import Timeline
from lib.profiling.trace import difference, union

# Rows of the matrices that a layer multiplies by the wall clock.
WIDTH = 320


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of a stack.

    By a virtual clock `forward` and `backward` are milliseconds, by the wall clock matmuls.
    """

    sizes: tuple[int, ...]
    """The weights of each, in order."""

    forward: float
    backward: float

    @property
    def gradient_bytes(self) -> int:
        return 4 * sum(self.sizes)


def miniatures(layers: Layers) -> dict[str, Network]:
    """The library's networks, by a virtual clock, on which `layers` wait as `large` does.

    That is, sending takes the same share of a step as on H200s with 16,384 tokens each.
    """
    real = gpu_step(model_preset("large"), tokens=16_384, flops_per_s=4e14)
    alone_ms = len(layers.sizes) * (layers.forward + layers.backward)
    here = Workload(layers.gradient_bytes, alone_ms)
    return {
        name: dataclasses.replace(network.miniature(real, here), clock="virtual")
        for name, network in NETWORKS.items()
    }


def step_rows(
    took: Mapping[tuple[str, str], float], predicted: Mapping[tuple[str, str], float]
) -> list[dict[str, str]]:
    """Rows of a table of steps by network and way; the milliseconds predicted are in brackets."""
    rows: dict[str, dict[str, str]] = {}
    for (place, name), step_ms in took.items():
        row = rows.setdefault(name, {"step in ms, simulated (predicted)": name})
        row[place] = f"{step_ms:.4g} ({predicted[place, name]:.4g})"
    return list(rows.values())


class Stack(nn.Module):
    """Layers that are busy for their time on the network's clock, and note when."""

    def __init__(self, layers: Layers, group: SimulatedGroup) -> None:
        super().__init__()
        self.layers, self.group = layers, group
        self.parts = nn.ModuleList(Layer(size, self) for size in layers.sizes)
        # called with each part before it runs, as that of `TransformerLM`
        self.before_part: Callable[[nn.Module], Any] = do_nothing
        self.spans: list[tuple[str, float, float]] = []
        self.matrix, self.result = torch.randn(2, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            self.before_part(part)
            x = part(x)
        return x

    def finish_gradient_synchronization(self) -> None:
        """Do nothing: without a wrapper a rank trains by itself."""

    def compute(self, phase: str, amount: float) -> None:
        """Be busy, and note from when to when."""
        clock = self.group.clock
        start = clock.now()
        if isinstance(clock, VirtualClock):
            clock.compute(amount / 1e3)
        else:
            for _ in range(round(amount)):
                torch.mm(self.matrix, self.matrix, out=self.result)
        self.spans.append((phase, start, clock.now()))


class Layer(nn.Module):
    """A matrix, and the time that a layer of this size is busy."""

    def __init__(self, size: int, stack: Stack) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, size))
        # the stack is no part of its layers
        self.busy = lambda x: Busy.apply(x, stack)

    def forward(self, x: Tensor) -> Tensor:
        # backward is busy before the weight's gradient is there
        return self.busy(x + self.weight.sum())


class Busy(torch.autograd.Function):
    """The identity, which takes its time forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: Stack) -> Tensor:
        ctx.stack = stack
        stack.compute("forward", stack.layers.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.stack.compute("backward", ctx.stack.layers.backward)
        return grad, None


def time_steps(
    makers: Mapping[str, Callable | None],
    networks: Mapping[str, Network],
    layers: Layers,
    samples: int = 1,
) -> dict[tuple[str, str], Timeline]:
    """The fastest step with each wrapper on each network; all ranks of a job call it.

    It is the same step on all ranks, the one whose slowest rank is fastest: by the wall clock other
    programs disturbed that one least. Wrappers are interleaved, so that all see the same machine.

    Args:
        makers: name -> makes the wrapper from a module and `group=`; None trains each rank alone.
    """
    found = {}
    for place, network in networks.items():
        group = simulated_group(network)
        stacks = {name: Stack(layers, group) for name in makers}
        models: dict[str, Any] = {
            name: stacks[name] if make is None else make(stacks[name], group=group)
            for name, make in makers.items()
        }
        turns = [
            {name: _step(model, stacks[name]) for name, model in models.items()}
            for _ in range(samples + 1)
        ]
        for name in makers:
            # the first step may agree on an order
            steps = [turn[name] for turn in turns[1:]]
            slowest = torch.tensor([step.step_ms for step in steps])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[place, name] = steps[int(slowest.argmin())]
    return found


def _step(model: Any, stack: Stack) -> Timeline:
    """A step that all ranks start together."""
    group = stack.group
    dist.barrier(group)
    stack.spans.clear()
    before, start = len(group.transfers), group.clock.now()
    model(torch.ones(1, requires_grad=True)).backward()
    model.finish_gradient_synchronization()
    end = group.clock.now()
    stack.zero_grad()
    return timeline(stack.spans, group.transfers[before:], start, end)


def time_accumulation(
    make: Callable, networks: Mapping[str, Network], layers: Layers, micro_batches: int = 4
) -> dict[tuple[str, bool], tuple[float, Tensor]]:
    """Milliseconds and gradients of a step of several backward passes; all ranks call it.

    Args:
        make: makes a wrapper with `no_sync` from a module and `group=`.

    Returns:
        By network, and whether all passes but the last run in `no_sync`.
    """
    found = {}
    for (place, network), waits in itertools.product(networks.items(), (False, True)):
        group = simulated_group(network)
        stack = Stack(layers, group)
        model, start = make(stack, group=group), group.clock.now()
        for number in range(micro_batches):
            is_quiet = waits and number < micro_batches - 1
            with model.no_sync() if is_quiet else contextlib.nullcontext():
                model(torch.ones(1, requires_grad=True)).backward()
            if not is_quiet:
                model.finish_gradient_synchronization()
        gradients = torch.cat([weight.grad for weight in stack.parameters()], dim=1)  # type: ignore[misc]
        found[place, waits] = 1e3 * (group.clock.now() - start), gradients
    return found


def timeline(
    spans: Sequence[tuple[str, float, float]],
    transfers: Sequence[Transfer],
    start: float,
    end: float,
) -> Timeline:
    """A step from what the rank computed and sent; all times in seconds by one clock.

    Communication is from a call until its end, with the wait for other ranks; exposed is the part
    of it in which the rank computes nothing.
    """

    def milliseconds(intervals: Any) -> np.ndarray:
        return 1e3 * (union(np.array(intervals, dtype=float).reshape(-1, 2)) - start)

    def pairs(array: np.ndarray) -> tuple[tuple[float, float], ...]:
        return tuple((a, b) for a, b in array.tolist())

    busy = {
        phase: milliseconds([(a, b) for name, a, b in spans if name == phase])
        for phase in ("forward", "backward")
    }
    sent = milliseconds([(one.called, one.end) for one in transfers])
    computing = union(np.concatenate([*busy.values()]))
    return Timeline(
        step_ms=1e3 * (end - start),
        backward=(busy["backward"].min().item(), busy["backward"].max().item()),
        compute=tuple((phase, pairs(found)) for phase, found in busy.items()),
        communication=pairs(sent),
        exposed=pairs(difference(sent, computing)),
    )
