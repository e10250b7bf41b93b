"""A step of fully sharded data parallelism by formula: how much prefetching hides.

All blocks are equal, one collective is sent at a time, and a block waits for its parameters only.
"""

from __future__ import annotations

import dataclasses

from lib.core.settings import require


@dataclasses.dataclass(frozen=True)
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
    now = free = 0.0
    sent: list[float] = []
    arrival: dict[int, float] = {}

    def gather(wanted: list[int]) -> None:
        nonlocal free
        for block in wanted:
            if block not in arrival and 0 <= block < blocks:
                free = arrival[block] = max(free, now) + gather_ms
                sent.append(gather_ms)

    def reduce() -> float:
        nonlocal free
        free = max(free, now) + reduce_ms
        sent.append(reduce_ms)
        return free

    # forward: a block's parameters are on their way while the one before runs
    for block in range(blocks):
        gather([block, block + 1] if prefetch else [block])
        now = max(now, arrival[block]) + forward_ms
        if block > 0:
            del arrival[block - 1]

    # backward: gradients are sent when the next block begins, and waited for one block later
    ends: list[float] = []
    for block in reversed(range(blocks)):
        if block + 1 < blocks:
            ends.append(reduce())
            now = max(now, *ends[:-1]) if ends[:-1] else now
        gather([block, block - 1] if prefetch else [block])
        now = max(now, arrival[block]) + backward_ms
    step = max(now, reduce())
    computing = blocks * (forward_ms + backward_ms)
    return FSDPPrediction(step, step - computing, sum(sent))
