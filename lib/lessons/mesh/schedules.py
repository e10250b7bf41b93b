"""Schedules of a pipeline, played on a clock: who waits for whom, how long, and what is held.

A stage's schedule is a list of events `(kind, micro_batch)`, or `(kind, micro_batch, chunk)` where
a rank holds several chunks of layers. Chunk c of rank r is number c · ranks + r of the model's
depth. A forward pass needs the one before it in depth, a backward pass the one after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# ("forward", micro_batch) or ("backward", micro_batch, chunk).
Event = tuple[Any, ...]


@dataclass(frozen=True)
class Span:
    """An event on a stage; start and end in milliseconds."""

    stage: int
    kind: str
    micro_batch: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class Played:
    """A step on the clock."""

    fault: str
    """The first thing that is wrong, or `nothing`."""

    ms: float
    """The time until the last stage is done."""

    held: tuple[int, ...]
    """The most micro-batches (times chunks) whose activations a stage holds at once."""

    spans: tuple[Span, ...]

    def idle_share(self) -> float:
        """The part of all stages' time in which they compute nothing."""
        busy = sum(span.end - span.start for span in self.spans)
        return 1 - busy / (len(self.held) * self.ms)


def play(
    orders: Sequence[Sequence[Event]],
    *,
    micro_batches: int,
    forward_ms: float,
    backward_ms: float,
    chunks: int = 1,
) -> Played:
    """Play a step: each stage goes through its events, and messages take no time.

    Args:
        orders: the events of each stage.
        forward_ms, backward_ms: of one micro-batch on one chunk.
    """
    step = _Step(orders, micro_batches, {"forward": forward_ms, "backward": backward_ms}, chunks)
    fault = step.fault_of_events() or step.run()
    return Played(fault or "nothing", max(step.now, default=0.0), tuple(step.most), step.spans_())


@dataclass
class _Step:
    orders: Sequence[Sequence[Event]]
    micro_batches: int
    costs: dict[str, float]
    chunks: int
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = len(self.orders)
        self.now, self.next = [0.0] * self.ranks, [0] * self.ranks
        self.held, self.most = [0] * self.ranks, [0] * self.ranks
        # (kind, micro-batch, depth) -> when it was done
        self.done: dict[tuple[str, int, int], float] = {}

    def spans_(self) -> tuple[Span, ...]:
        return tuple(self.spans)

    def depth(self, stage: int, event: Event) -> tuple[str, int, int]:
        kind, micro_batch, chunk = (*event, 0)[:3]
        return kind, micro_batch, chunk * self.ranks + stage

    def fault_of_events(self) -> str:
        """Name events that are unknown, missing or done twice."""
        for stage, events in enumerate(self.orders):
            wanted = {
                (kind, number, chunk)
                for kind in self.costs
                for number in range(self.micro_batches)
                for chunk in range(self.chunks)
            }
            for event in events:
                try:
                    wanted.remove((*event, 0)[:3])
                except (KeyError, TypeError):
                    return f"stage {stage}: {event!r} is unknown, or comes twice"
            if wanted:
                return f"stage {stage}: {_words(min(wanted), self.chunks)} is missing"
        return ""

    def needed(self, stage: int, event: Event) -> tuple[str, int, int] | None:
        """Return the event that must be done before this one, or None."""
        kind, number, depth = self.depth(stage, event)
        if kind == "forward":
            return (kind, number, depth - 1) if depth else None
        if depth == self.ranks * self.chunks - 1:
            return "forward", number, depth
        return kind, number, depth + 1

    def run(self) -> str:
        """Run all events; return who waits for whom where the stages can't go on."""
        moved = True
        while moved:
            moved = False
            for stage, events in enumerate(self.orders):
                while self.next[stage] < len(events) and self._runs(stage, events):
                    moved = True
        stuck = [
            f"stage {stage} at {_words(events[self.next[stage]], self.chunks)}"
            for stage, events in enumerate(self.orders)
            if self.next[stage] < len(events)
        ]
        return f"the stages wait for one another forever: {', '.join(stuck)}" if stuck else ""

    def _runs(self, stage: int, events: Sequence[Event]) -> bool:
        event = events[self.next[stage]]
        needed = self.needed(stage, event)
        if needed is not None and needed not in self.done:
            return False
        kind, number, depth = self.depth(stage, event)
        start = max(self.now[stage], self.done.get(needed, 0.0))  # type: ignore[arg-type]
        self.now[stage] = self.done[kind, number, depth] = start + self.costs[kind]
        self.next[stage] += 1
        self.held[stage] += 1 if kind == "forward" else -1
        self.most[stage] = max(self.most[stage], self.held[stage])
        self.spans.append(Span(stage, kind, number, depth // self.ranks, start, self.now[stage]))
        return True


def _words(event: Event, chunks: int) -> str:
    chunk = f" of chunk {(*event, 0)[2]}" if chunks > 1 else ""
    return f"{event[0]} {event[1]}{chunk}"
