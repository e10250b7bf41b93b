"""Exercises of notebook 11: the stages of a pipeline and its schedules."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lib.lessons.differences import AtMost, Named, first_difference
from lib.lessons.exercise import check_of, exercise
from lib.lessons.inputs import choices, ints
from lib.lessons.mesh.context_exercises import (  # noqa: F401  (found by name)
    all_to_all,
    merge,
    ring_attention,
    sequence_parallel_mlp,
    zigzag_ring,
)
from lib.lessons.mesh.schedules import Event, Played, most_held, play
from lib.lessons.ranks import Threads

check, take = check_of(__name__), check_of(__name__, returns=True)


def gpipe(micro_batches: int) -> list[Event]:
    """The events of a stage: all forward passes, then all backward passes."""
    forward = [("forward", number) for number in range(micro_batches)]
    return forward + [("backward", number) for number in range(micro_batches)]


def gpipe_back_to_front(micro_batches: int) -> list[Event]:
    """GPipe, where the last micro-batch goes backward first."""
    events = gpipe(micro_batches)
    return events[:micro_batches] + events[: micro_batches - 1 : -1]


# A stage

# Tokens of a toy vocabulary.
IDS = 5


class OneMatrix(nn.Module):
    """A stage of one matrix; the first one looks rows up, by ids.

    It notes what runs, and how many of its inputs and outputs are still held meanwhile.
    """

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        rows = width if number else IDS
        values = torch.randint(-2, 3, (rows, width), generator=generator) / 2
        self.weight = nn.Parameter(values)
        self.is_first, self.ran = number == 0, []
        self.held: dict[str, list[weakref.ref]] = {"inputs": [], "outputs": []}
        self.most = {"inputs": 0, "outputs": 0}

    def forward(self, x: Tensor) -> Tensor:
        y = (self.weight[x] if self.is_first else x @ self.weight.T + x).tanh()
        number = sum(one.startswith("F") for one in self.ran)
        self.ran.append(f"F{number}")
        y.register_hook(lambda grad: self.ran.append(f"B{number}"))
        # the ids of the first stage are the check's own
        self.note("inputs", y if self.is_first else x)
        self.note("outputs", y)
        return y

    def note(self, kind: str, tensor: Tensor) -> None:
        self.held[kind] = [one for one in self.held[kind] if one() is not None]
        self.held[kind].append(weakref.ref(tensor))
        self.most[kind] = max(self.most[kind], len(self.held[kind]))


def half_square(y: Tensor, target: Tensor) -> Tensor:
    """A loss."""
    return (y - target).square().sum() / 2


def run_on_rank(attempt: Callable, schedule: str, micro_batches: int, ranks: Threads) -> Named:
    """Run a step of a schedule; return this rank's gradient and what it sent."""
    stage, events = OneMatrix(ranks.number, 3), events_of(schedule, micro_batches, ranks)
    generator = torch.Generator().manual_seed(7)
    data = []
    for _ in range(micro_batches):
        x, target = torch.randint(-3, 4, (2, 4, 3), generator=generator) / 4
        ids = torch.randint(IDS, (4,), generator=generator)
        data.append((x if ranks.number else ids, target))
    attempt([*events], stage, half_square, data, ranks)
    runs = sum(one.startswith("F") for one in stage.ran)
    if runs > micro_batches:
        words = f"the stage ran {runs} times for {micro_batches} micro-batches"
        raise ValueError(f"{words}; keep y from the forward pass")
    sent = {
        f"messages to rank {to}": count
        for (way, to), count in sorted(ranks.messages.items())
        if way == "to"
    }
    # a variable of the function may refer to one more
    most = most_held(events) + 1
    return Named(
        {"order of passes, forward (F) and backward (B)": " ".join(stage.ran)},
        **{"gradient of the stage": stage.weight.grad},
        **sent,
        **{
            f"{kind} held after their backward pass": AtMost(max(0, held - most))
            for kind, held in stage.most.items()
        },
    )


def events_of(schedule: str, micro_batches: int, ranks: Threads) -> list[Event]:
    """The events of a rank in a schedule of a name."""
    if schedule == "1F1B":
        return one_f_one_b.solve(ranks.number, ranks.count, micro_batches)
    return {"GPipe": gpipe, "GPipe, last first": gpipe_back_to_front}[schedule](micro_batches)


@exercise(
    "core",
    {
        "schedule": choices("GPipe", "1F1B", "1F1B", "GPipe, last first"),
        "micro_batches": ints(1, 8),
        "ranks": ints(2, 4),
    },
    harness=run_on_rank,
    ranks=True,
    collectives=("send",),
    processes=2,
    trials=30,
)
def run_stage(
    events: Sequence[Event],
    stage: Callable[[Tensor], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    ranks: Threads,
) -> None:
    me, last, held = ranks.number, ranks.count - 1, {}
    for kind, i in events:
        if kind == "forward":
            x, target = micro_batches[i]
            if me > 0:
                x = ranks.receive(me - 1, like=x).requires_grad_()
            y = stage(x)
            if me < last:
                ranks.send(y, me + 1)
            else:
                y = loss(y, target)
            held[i] = x, y
        else:
            x, y = held.pop(i)
            y.backward(ranks.receive(me + 1, like=y) if me < last else None)
            if me > 0:
                ranks.send(x.grad, me - 1)


run_stage.mistakes = """
.requires_grad_() => | there is no gradient to send back: x must be a leaf that asks for one, by
    requires_grad_(), and x.grad is what the stage before gets
x = ranks.receive(me - 1, like=x).requires_grad_() =>
    ranks.receive(me - 1, like=x); x.requires_grad_()
    | what is received is dropped: `receive` returns a new tensor, and does not fill `like`
like=y) if me < last => like=x) if me < last
    | a gradient is received like x, but it has the shape and dtype of y; on the first stage x is
    token ids
ranks.send(x.grad, me - 1) => pass
    && y.backward(ranks.receive(me + 1, like=y) if me < last else None) =>
    y.backward(ranks.receive(me + 1, like=y) if me < last else None); ranks.send(x.grad, me - 1)
    | the first stage sends a gradient back, too, but there is no stage before it; send `if me > 0`
held.pop(i) => held[i] | outputs stay held after their backward pass; take them out, with pop
in events: => in sorted(events, key=lambda event: (event[0] == "backward", event[1])):
    | `events` is not followed: all go forward first, whatever it says
"""


# Schedules


def scheduled(attempt: Callable, ranks: int, micro_batches: int) -> Named:
    """Play the orders of all stages; return the step's time and memory."""
    orders = [list_of_events(attempt(rank, ranks, micro_batches)) for rank in range(ranks)]
    step = play(orders, micro_batches=micro_batches, forward_ms=1.0, backward_ms=2.0)
    held = {
        f"micro-batches that stage {stage} holds": AtMost(most)
        for stage, most in enumerate(step.held)
    }
    return Named({"what is wrong": step.fault} | held | {"milliseconds": AtMost(step.ms)})


def list_of_events(events: Any) -> list[Event]:
    """The events as a list of tuples."""
    if not isinstance(events, (list, tuple)):
        raise TypeError(f"the events must be a list, got {events!r}")
    return [tuple(event) if isinstance(event, list) else event for event in events]


def fault(yours: Any, expected: Any) -> str:
    """The fault of a schedule as a sentence; of a complete one, the first wrong value."""
    if isinstance(yours, dict) and yours["what is wrong"] != "nothing":
        return yours["what is wrong"]
    return first_difference(yours, expected) or ""


def few_or_many(generator: random.Random, size: int) -> int:
    """A number of micro-batches, now and then fewer than a warm-up has."""
    return generator.choice([1, 2, generator.randint(1, 2 + size)])


@exercise(
    "core",
    {"ranks": ints(2, 5), "micro_batches": few_or_many},
    harness=scheduled,
    describe=fault,
    trials=40,
)
def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> list[Event]:
    ahead = min(ranks - 1 - rank, micro_batches)
    events = [("forward", i) for i in range(ahead)]
    for i in range(ahead, micro_batches):
        events += [("forward", i), ("backward", i - ahead)]
    events += [("backward", i) for i in range(micro_batches - ahead, micro_batches)]
    return events


one_f_one_b.mistakes = """
min(ranks - 1 - rank, micro_batches) => min(rank, micro_batches)
    | the warm-up is longest on the last stage; it is the first stage that runs furthest ahead
min(ranks - 1 - rank, micro_batches) => micro_batches
    | that is GPipe: all forward passes first, so each stage holds all micro-batches
min(ranks - 1 - rank, micro_batches) => min(ranks - 1, micro_batches)
    | each stage runs equally many ahead; the later a stage, the fewer it needs
min(ranks - 1 - rank, micro_batches) => max(0, min(ranks - 2 - rank, micro_batches))
    | the warm-up has one forward pass too few: a stage waits for its first gradient
min(ranks - 1 - rank, micro_batches) => min(ranks - rank, micro_batches)
    | the warm-up has one forward pass too many: each stage holds one micro-batch more than it must
("backward", i - ahead)] => ("backward", i)]
    | forward i is followed by backward i, whose gradient is not back yet; the oldest goes backward
"""


# Interleaved stages


def one_chunk_after_another(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Event]:
    """All chunks' forward passes, chunk by chunk, then all backward passes."""
    forward = [("forward", i, c) for c in range(chunks) for i in range(micro_batches)]
    backward = [("backward", i, c) for c in reversed(range(chunks)) for i in range(micro_batches)]
    return forward + backward


def played_in_chunks(attempt: Callable, ranks: int, micro_batches: int, chunks: int) -> Named:
    """Check that the orders of all ranks make a complete step; return how long it takes."""
    step = play_chunks(attempt, ranks, micro_batches, chunks)
    return Named({"what is wrong": step.fault, "milliseconds": AtMost(round(step.ms, 6))})


def play_chunks(attempt: Callable, ranks: int, micro_batches: int, chunks: int) -> Played:
    """A step in which a micro-batch takes a rank 1 ms forward and 2 ms backward, in all."""
    orders = [list_of_events(attempt(rank, ranks, micro_batches, chunks)) for rank in range(ranks)]
    times = {"forward_ms": 1.0 / chunks, "backward_ms": 2.0 / chunks}
    return play(orders, micro_batches=micro_batches, chunks=chunks, **times)


def held_by_the_fullest(attempt: Callable) -> float:
    """Micro-batches that the fullest of four ranks holds, with eight of them and two chunks."""
    return max(play_chunks(attempt, 4, 8, 2).held) / 2


@exercise(
    "open",
    lambda generator, size: (
        ranks := generator.randint(2, 3),
        ranks * generator.randint(1, 1 + size // 6),
        generator.randint(1, 3),
    ),
    harness=played_in_chunks,
    describe=fault,
    trials=30,
    measure=held_by_the_fullest,
    unit="micro-batches",
    baseline=one_chunk_after_another,
    must_beat=True,
)
def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Event]:
    total = micro_batches * chunks

    def event(kind, number):
        # `ranks` micro-batches go through one chunk, then through the next
        group, within = divmod(number, ranks * chunks)
        chunk, i = divmod(within, ranks)
        return kind, group * ranks + i, chunk if kind == "forward" else chunks - 1 - chunk

    ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, total)
    events = [event("forward", number) for number in range(ahead)]
    for number in range(ahead, total):
        events += [event("forward", number), event("backward", number - ahead)]
    return events + [event("backward", number) for number in range(total - ahead, total)]


interleaved.mistakes = """
chunks - 1 - chunk => chunk | backward begins with chunk 0; it begins with the last one
range(total - ahead, total) => range(total, total)
    | the micro-batches of the warm-up never go backward
min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, total) => min(ranks - 1 - rank, total)
    | the warm-up is that of one chunk; the first backward pass needs a forward pass of all chunks
divmod(within, ranks) => divmod(within, chunks)[::-1]
    | a micro-batch goes through all chunks before the next one starts, so ranks wait for it
"""
