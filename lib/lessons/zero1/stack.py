"""Steps of a stack of layers with an optimizer, on a simulated network, for notebook 09."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lib.ddp.process_group import world_size
from lib.ddp.wrappers import wrap
from lib.lessons.ddp.stack import Layers, Stack, timeline
from lib.lessons.simulated_network import Network, SimulatedGroup, simulated_group
from lib.optimizer.adamw import AdamW
from lib.profiling.collectives import messages
from lib.profiling.timeline import Timeline
from lib.sharded_optimizer.optimizer import ShardedOptimizer

# Steps before the one that is looked at: the first may agree on an order, and weights of a step may
# arrive in the next.
STEPS_BEFORE = 3


@dataclass(frozen=True)
class Step:
    """A training step of one rank on a simulated network."""

    timeline: Timeline

    sent_bytes: float
    """Bytes that this rank sends."""


# Makes, from a stack and its group, the model and what follows backward.
Maker = Callable[[Stack, SimulatedGroup], tuple[nn.Module, Callable[[], Any]]]


def of_optimizer(make: Callable[..., Any]) -> Maker:
    """A maker of `make(params, group=)`, an optimizer that averages gradients, too.

    If it has `before_part`, the stack calls that before each of its parts runs.
    """
    return partial(_with_optimizer, make)


def _with_optimizer(make: Callable, stack: Stack, group: SimulatedGroup) -> tuple:
    optimizer = make(stack.parameters(), group=group)
    stack.before_part = getattr(optimizer, "before_part", stack.before_part)

    def after_backward() -> None:
        optimizer.finish_gradient_synchronization()
        optimizer.step()

    return stack, after_backward


def flashddp(stack: Stack, group: SimulatedGroup) -> tuple:
    """Plain data parallelism: a bucket a layer, all-reduced under backward."""
    model = wrap("flashddp", stack, group=group, bucket_cap_mb=_layer_mb(stack))
    optimizer = AdamW(stack.parameters())

    def step() -> None:
        model.finish_gradient_synchronization()
        optimizer.step()

    return model, step


def zero1(stack: Stack, group: SimulatedGroup) -> tuple:
    """ZeRO-1 of the library: a bucket a layer, reduce-scattered under backward, whose weights are
    gathered under the next forward pass.
    """
    optimizer = ShardedOptimizer(
        stack.parameters(),
        AdamW,
        group=group,
        strategy="flat",
        reduces_gradients=True,
        overlap=True,
        bucket_cap_mb=_layer_mb(stack),
    )
    stack.before_part = optimizer.overlap_gather_with_forward(list(stack.parts), in_graph=False)
    return stack, optimizer.step


def _layer_mb(stack: Stack) -> float:
    return 4 * max(stack.layers.sizes) / 2**20


def time_ways(
    makers: Mapping[str, Maker], networks: Mapping[str, Network], layers: Layers
) -> dict[tuple[str, str], Step]:
    """A step on this rank in each way on each network; all ranks of a job call it.

    It begins when forward of the step before it began, and ends when its own would begin again:
    what one step leaves to the next counts once.
    """
    return {
        (place, name): _step(make, simulated_group(network), layers)
        for place, network in networks.items()
        for name, make in makers.items()
    }


def _step(make: Maker, group: SimulatedGroup, layers: Layers) -> Step:
    stack = Stack(layers, group)
    model, after_backward = make(stack, group)
    starts = []
    for _ in range(STEPS_BEFORE + 1):
        starts.append((group.clock.now(), len(group.transfers), len(stack.spans)))
        model(torch.ones(1, requires_grad=True)).backward()
        after_backward()
        stack.zero_grad()
    starts.append((group.clock.now(), len(group.transfers), len(stack.spans)))
    # all messages of the last step but one have ended
    (start, _, first), (end, _, last) = starts[-2:]
    dist.barrier()
    sent = [one for one in group.transfers if start <= one.called < end]
    whole = sum(messages(one.kind, world_size(group)) * one.num_bytes for one in sent)
    line = timeline(stack.spans[first:last], sent, start, end)
    return Step(line, whole / world_size(group))
