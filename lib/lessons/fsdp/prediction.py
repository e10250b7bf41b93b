"""A step of `lib.fsdp.FSDP` by formula: how much prefetching hides.

All blocks are equal, one collective is sent at a time, and a block waits for its parameters only.
"""

from __future__ import annotations

from dataclasses import dataclass

from lib.core.settings import require
from lib.lessons.fsdp.orders import Costs, Event, play


@dataclass(frozen=True)
class FSDPPrediction:
    """Milliseconds of a step, without the optimizer's."""

    step_ms: float
    exposed_ms: float
    """The part of it spent waiting for communication."""

    communication_ms: float
    """All communication, hidden or not."""


def predict_fsdp(
    blocks: int,
    *,
    forward_ms: float,
    backward_ms: float,
    gather_ms: float,
    reduce_ms: float,
    prefetch: bool = True,
) -> FSDPPrediction:
    """Predict a step of `lib.fsdp.FSDP`, in milliseconds a block.

    Args:
        forward_ms, backward_ms: computing a block.
        gather_ms, reduce_ms: its all-gather and its reduce-scatter, by themselves.

    Raises:
        ValueError: there are fewer than one block.
    """
    require(blocks >= 1, f"blocks must be at least 1, got {blocks}")
    costs = Costs.equal(
        blocks, forward=forward_ms, backward=backward_ms, gather=gather_ms, reduce=reduce_ms
    )
    step = play(_order(blocks, prefetch), costs)
    sent = sum(span.end - span.start for span in step.spans if span.lane == "network")
    return FSDPPrediction(step.ms, step.ms - blocks * (forward_ms + backward_ms), sent)


def _order(blocks: int, prefetch: bool) -> list[Event]:
    """The events of `lib.fsdp.FSDP`; with `prefetch` it gathers a block while another computes."""
    events: list[Event] = []
    held: set[int] = set()
    for kind, order in (("forward", [*range(blocks)]), ("backward", [*reversed(range(blocks))])):
        for place, block in enumerate(order):
            wanted = order[place : place + 1 + prefetch]
            events += [("gather", one) for one in wanted if one not in held]
            held.update(wanted)
            events.append((kind, block))
            if kind == "backward":
                events.append(("reduce", block))
            # backward begins with the last block, which stays gathered
            if (kind, block) != ("forward", blocks - 1):
                events.append(("free", block))
                held.remove(block)
    return events
