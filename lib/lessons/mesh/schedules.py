"""Schedules of a pipeline, played on a clock: who waits for whom, how long, and what is held.

A stage's schedule is a list of events `(kind, micro_batch)`, or `(kind, micro_batch, chunk)` where
a rank holds several chunks of layers. Chunk c of rank r is number c · ranks + r of the model's
depth. A forward pass needs the one before it in depth, a backward pass the one after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# ("forward", micro_batch) or ("backward", micro_batch, chunk).
Event = tuple[Any, ...]


@dataclass(frozen=True)
class Played:
    """A step on the clock."""

    fault: str
    """The first thing that is wrong, or `nothing`."""

    ms: float
    """The time until the last stage is done."""

    held: tuple[int, ...]
    """The most micro-batches (times chunks) whose activations a stage holds at once."""


def most_held(events: Sequence[Event]) -> int:
    """The most micro-batches that have gone forward and not yet backward."""
    steps = (1 if kind == "forward" else -1 for kind, *_ in events)
    return max(itertools.accumulate(steps, initial=0))


def play(
    orders: Sequence[Sequence[Event]],
    *,
    micro_batches: int,
    forward_ms: float,
    backward_ms: float,
    chunks: int = 1,
    message_ms: float = 0.0,
) -> Played:
    """Play a step: each stage goes through its events, and computes while messages travel.

    Args:
        orders: the events of each stage.
        forward_ms, backward_ms: of one micro-batch on one chunk.
        message_ms: of a message between two ranks; one link has one at a time in each direction.
    """
    ranks, costs = len(orders), {"forward": forward_ms, "backward": backward_ms}
    if fault := _fault_of_events(orders, micro_batches, chunks):
        return Played(fault, 0.0, (0,) * ranks)
    now, left = [0.0] * ranks, [[(*event, 0)[:3] for event in events] for events in orders]
    # (kind, micro-batch, depth) -> when the next event may use it; and when a link is free again
    done: dict[Event, float] = {}
    free: dict[tuple[str, int], float] = {}
    moved = True
    while moved:
        moved = False
        for stage, events in enumerate(left):
            while events:
                kind, number, chunk = events[0]
                depth = chunk * ranks + stage
                needed = _needed(kind, number, depth, ranks * chunks)
                if needed is not None and needed not in done:
                    break
                start = max(now[stage], done.get(needed, 0.0))  # type: ignore[arg-type]
                now[stage] = done[kind, number, depth] = start + costs[kind]
                # the last forward pass is followed by backward on the same rank
                if message_ms and ranks > 1 and (kind, depth) != ("forward", ranks * chunks - 1):
                    leaves = max(now[stage], free.get((kind, stage), 0.0))
                    done[kind, number, depth] = free[kind, stage] = leaves + message_ms
                events.pop(0)
                moved = True
    stuck = [f"stage {n} at {_words(events[0], chunks)}" for n, events in enumerate(left) if events]
    fault = f"the stages wait for one another forever: {', '.join(stuck)}" if stuck else "nothing"
    return Played(fault, max(now, default=0.0), tuple(most_held(events) for events in orders))


def _fault_of_events(orders: Sequence[Sequence[Event]], micro_batches: int, chunks: int) -> str:
    """Name an event that is unknown, missing or done twice."""
    kinds = ("forward", "backward")
    for stage, events in enumerate(orders):
        wanted = {*itertools.product(kinds, range(micro_batches), range(chunks))}
        for event in events:
            try:
                wanted.remove((*event, 0)[:3])
            except (KeyError, TypeError):
                return f"stage {stage}: {event!r} is unknown, or comes twice"
        if wanted:
            return f"stage {stage}: {_words(min(wanted), chunks)} is missing"
    return ""


def _needed(kind: str, number: int, depth: int, depths: int) -> Event | None:
    """The event that must be done before this one, or None."""
    if kind == "forward":
        return (kind, number, depth - 1) if depth else None
    return (kind, number, depth + 1) if depth < depths - 1 else ("forward", number, depth)


def _words(event: Event, chunks: int) -> str:
    chunk = f" of chunk {event[2]}" if chunks > 1 else ""
    return f"{event[0]} {event[1]}{chunk}"
