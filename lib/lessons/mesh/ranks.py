"""A reader's `run_stage` on real ranks, by the virtual clock of a simulated network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lib.lessons.mesh.schedules import Event
from lib.lessons.mesh.toys import HIDDEN, Stage, loss_of, micro_batch
from lib.lessons.meters import KeptByAutograd
from lib.lessons.ranks import Processes, Threads, run_on_processes, run_on_threads
from lib.lessons.simulated_network import BACKEND, Network
from lib.profiling.collectives import Link

# Messages take no time: a bubble is what is left.
INSTANT = Network(Link(0.0, 1e9), clock="virtual")


@dataclass(frozen=True)
class Ran:
    """A step of one stage."""

    gradients: list[Tensor]
    """Of its parameters."""

    spans: list[tuple[int, str, int, float, float]]
    """(stage, kind, micro-batch, start, end) of each event, in milliseconds by the clock."""

    held_bytes: int
    """The most bytes that autograd held for backward."""

    bytes_of_one: int
    """Held between the first event and the second: one micro-batch."""


def run_on_ranks(
    run_stage: Callable,
    orders: Sequence[Sequence[Event]],
    micro_batches: int,
    *,
    forward_ms: float = 1.0,
    backward_ms: float = 2.0,
    network: Network = INSTANT,
) -> list[Ran]:
    """Run a step of the toy language model, of which each rank has a stage; return what each did.

    Args:
        run_stage: as in exercise 1.
        orders: the events of each stage.

    Raises:
        WorkerError: a rank failed.
    """
    times = {"forward": forward_ms / 1e3, "backward": backward_ms / 1e3}
    job = functools.partial(_run, run_stage, orders, micro_batches, times)
    return run_on_processes(job, len(orders), backend=BACKEND, options=network)


def _run(
    run_stage: Callable,
    orders: Sequence[Sequence[Event]],
    micro_batches: int,
    times: dict[str, float],
    ranks: Processes,
) -> Ran:
    me, data = ranks.number, _data(ranks.number, micro_batches)
    stage, spans = Stage(me, ranks.count), []
    saved = SavedBytes(stage.parameters())

    # it stays a module, whose parameters a reader may ask for
    stage.register_forward_pre_hook(lambda *_: saved.note())
    stage.register_forward_hook(lambda _, x, y: Busy.apply(y, times, spans, saved))

    def noted_loss(logits: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(logits, targets)
        saved.note()
        return loss

    with saved:
        run_stage([*orders[me]], stage, noted_loss, data, ranks)
    named = [(me, *event, *span) for event, span in zip(orders[me], spans)]
    gradients = [param.grad for param in stage.parameters()]
    return Ran(gradients, named, saved.most, saved.first)  # type: ignore[arg-type]


def _data(stage: int, micro_batches: int) -> list[tuple[Tensor, Tensor]]:
    """The inputs and targets of each micro-batch, as `run_stage` takes them on a stage."""
    data = [micro_batch(number) for number in range(micro_batches)]
    # later stages get the shape of what they receive
    return data if stage == 0 else [(torch.empty(HIDDEN), targets) for _, targets in data]


def with_sends_that_wait(
    run_stage: Callable, orders: Sequence[Sequence[Event]], micro_batches: int
) -> str:
    """Run a step on threads whose `send` waits for its `receive`; say that it runs, or who waits.

    All ranks that wait are seen to wait for one another; no clock decides.

    Args:
        run_stage: as in exercise 1.
        orders: the events of each stage.
    """

    def run(ranks: Threads) -> None:
        me, count = ranks.number, ranks.count
        ranks = Waiting(me, ranks.board)
        run_stage([*orders[me]], Stage(me, count), loss_of, _data(me, micro_batches), ranks)

    try:
        run_on_threads(run, len(orders))
    except RuntimeError as error:
        return str(error)
    return "runs"


class Waiting(Threads):
    """A rank whose `send` waits until the tensor is received, as a large one of NCCL's may."""

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to rank `to`, and wait until it is received."""
        super().send(tensor, to)
        received = ("received", self.number, to, self.messages["to", to])
        self.board.wait(self.number, [received], f"sends to rank {to}")

    def receive(self, source: int, like: Tensor) -> Tensor:
        """Wait for the next tensor from rank `source`."""
        tensor = super().receive(source, like)
        received = ("received", source, self.number, self.messages["from", source])
        self.board.post(received, True)
        return tensor


class Busy(torch.autograd.Function):
    """The identity, which moves the clock on, forward and backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, times: dict, spans: list, saved: SavedBytes) -> Tensor:
        ctx.times, ctx.spans, ctx.saved = times, spans, saved
        _compute("forward", times, spans)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.saved.note()
        _compute("backward", ctx.times, ctx.spans)
        return grad, None, None, None


def _compute(kind: str, times: dict[str, float], spans: list) -> None:
    group: Any = dist.group.WORLD
    start = group.clock.now()
    group.compute(times[kind])
    spans.append((1e3 * start, 1e3 * group.clock.now()))


class SavedBytes(KeptByAutograd):
    """Counts the bytes that autograd holds for backward, but for parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.ignored = {param.untyped_storage().data_ptr() for param in parameters}
        self.most = self.first = 0

    def note(self) -> None:
        """Note what is held between two events."""
        memories = [tensor.untyped_storage() for tensor in self.tensors()]
        # several tensors may be in the same memory
        held = {memory.data_ptr(): memory.nbytes() for memory in memories}
        now = sum(num_bytes for place, num_bytes in held.items() if place not in self.ignored)
        self.first, self.most = self.first or now, max(self.most, now)
