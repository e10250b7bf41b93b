"""The order of a step's events, played on a clock: what waits for what, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# ("gather", 2): start to gather block 2; "forward" and "backward" wait for it and compute; "reduce"
# starts to send gradients; "free" gives the parameters back.
Event = tuple[str, int]


@dataclass(frozen=True)
class Costs:
    """Milliseconds of each block's all-gather, forward, backward and reduce-scatter."""

    gather: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    reduce: tuple[float, ...]

    @classmethod
    def equal(
        cls, blocks: int, *, forward: float, backward: float, gather: float, reduce: float
    ) -> Costs:
        """Blocks that are all alike."""
        return cls(*((value,) * blocks for value in (gather, forward, backward, reduce)))


@dataclass(frozen=True)
class Span:
    """An event in a lane, `compute` or `network`; start and end in milliseconds.

    In the lane `memory` a block is `held` from the call of its all-gather until it is freed.
    """

    lane: str
    kind: str
    block: int
    start: float
    end: float


@dataclass(frozen=True)
class Played:
    """A step on the clock."""

    fault: str
    """The first thing that is wrong, or `nothing`."""

    most: int
    """The most blocks, or the sum of their sizes, that were gathered or on their way at once."""

    ms: float
    spans: tuple[Span, ...]


def play(events: Sequence[Event], costs: Costs, sizes: Sequence[int] | None = None) -> Played:
    """Play a step: the host goes through `events`, and the network sends one thing at a time.

    Args:
        sizes: of the blocks, for `most`; 1 each by default.
    """
    step = _Step(costs, sizes or [1] * len(costs.gather))
    fault = "nothing"
    try:
        for number, (kind, block) in enumerate(events):
            where = f"event {number}, {kind!r} of block {block!r}"
            if kind not in KINDS or block not in range(len(costs.gather)):
                raise _FaultError(f"{where}: there is no such event")
            if problem := getattr(step, kind)(block):
                raise _FaultError(f"{where}: {problem}")
        step.check_complete()
    except _FaultError as error:
        fault = str(error)
    return Played(fault, step.most, max(step.now, step.network), tuple(step.spans))


class _FaultError(Exception):
    pass


@dataclass
class _Step:
    """The events so far; an event's method returns what is wrong with it, or ""."""

    costs: Costs
    sizes: Sequence[int]
    now: float = 0.0
    network: float = 0.0
    """When the network has sent everything."""

    most: int = 0
    called: dict[int, float] = field(default_factory=dict)
    """Block that is held -> when its all-gather was called."""

    arrival: dict[int, float] = field(default_factory=dict)
    """Block that is held -> when it is gathered."""

    done: dict[str, list[int]] = field(
        default_factory=lambda: {"forward": [], "backward": [], "reduce": []}
    )
    spans: list[Span] = field(default_factory=list)

    def gather(self, block: int) -> str:
        if block in self.arrival:
            return "it is already gathered"
        self.called[block] = self.now
        self.arrival[block] = self._send("gather", block)
        self.most = max(self.most, sum(self.sizes[b] for b in self.arrival))
        return ""

    def forward(self, block: int) -> str:
        return self._compute("forward", block, expected=len(self.done["forward"]))

    def backward(self, block: int) -> str:
        blocks = len(self.sizes)
        if len(self.done["forward"]) < blocks:
            return "forward has not run all blocks"
        return self._compute("backward", block, blocks - 1 - len(self.done["backward"]))

    def reduce(self, block: int) -> str:
        if block not in self.done["backward"] or block in self.done["reduce"]:
            return "there is no gradient to send"
        self.done["reduce"].append(block)
        self._send("reduce", block)
        return ""

    def free(self, block: int) -> str:
        if block not in self.arrival:
            return "it is not gathered"
        del self.arrival[block]
        self.spans.append(Span("memory", "held", block, self.called.pop(block), self.now))
        return ""

    def _send(self, kind: str, block: int) -> float:
        start = max(self.now, self.network)
        self.network = start + getattr(self.costs, kind)[block]
        self.spans.append(Span("network", kind, block, start, self.network))
        return self.network

    def _compute(self, kind: str, block: int, expected: int) -> str:
        if block != expected:
            return f"{kind} runs block {expected} next"
        if block not in self.arrival:
            return "its parameters are not gathered"
        start = max(self.now, self.arrival[block])
        self.now = start + getattr(self.costs, kind)[block]
        self.spans.append(Span("compute", kind, block, start, self.now))
        self.done[kind].append(block)
        return ""

    def check_complete(self) -> None:
        for kind, done in self.done.items():
            for block in sorted({*range(len(self.sizes))} - {*done}):
                raise _FaultError(f"{kind} of block {block} is missing")
        for block in sorted(self.arrival):
            raise _FaultError(f"block {block} is never freed")


KINDS = ("gather", "forward", "backward", "reduce", "free")
