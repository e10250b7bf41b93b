"""Ranks for checks: threads of this process in place of processes, so that a check takes no time.

`Processes` has the same methods between the processes of a job that `launch` started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lib.ddp.process_group import all_gather, rank, reduce_scatter, world_size

# Seconds that a thread waits for the others.
PATIENCE = 5.0


class Threads:
    """One rank of several, each a thread; made by `run_on_threads`.

    Counts its collectives, and keeps what it gathered, to overwrite it.
    """

    def __init__(self, number: int, count: int, barrier: threading.Barrier, slots: list) -> None:
        self.number, self.count = number, count
        self.barrier, self.slots = barrier, slots
        self.calls = {"all-gathers": 0, "reduce-scatters": 0, "all-reduces": 0}
        self.gathered: list[Tensor] = []

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks behind one another, (count · n,) of (n,)."""
        self.calls["all-gathers"] += 1
        self.gathered.append(torch.cat(self._exchange("all_gather", part)))
        return self.gathered[-1]

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """This rank's slice of the sum over all ranks, (n,) of (count · n,)."""
        self.calls["reduce-scatters"] += 1
        total = sum(self._exchange("reduce_scatter", whole))
        return total.chunk(self.count)[self.number].clone()  # type: ignore[union-attr]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        self.calls["all-reduces"] += 1
        return sum(self._exchange("all_reduce", tensor))  # type: ignore[return-value]

    def poison(self) -> None:
        """Overwrite what was gathered so far, as memory that was freed and is used again."""
        for tensor in self.gathered:
            tensor.fill_(torch.nan)

    def _exchange(self, kind: str, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks.

        Raises:
            RuntimeError: ranks call different collectives, or one of them has ended.
            ValueError: tensors differ in their shape, or are not flat.
        """
        self.slots[self.number] = kind, tensor.detach().clone()
        self._wait()
        kinds, tensors = zip(*self.slots)
        self._wait()
        if len(set(kinds)) > 1:
            raise RuntimeError(f"ranks call different collectives: {', '.join(kinds)}")
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1 or (kind != "all_reduce" and tensor.ndim != 1):
            raise ValueError(f"{kind} takes flat tensors of one length, got shapes {shapes}")
        return list(tensors)

    def _wait(self) -> None:
        try:
            self.barrier.wait(PATIENCE)
        except threading.BrokenBarrierError:
            raise RuntimeError("another rank failed, or did not call this collective") from None


def run_on_threads(job: Callable[[Threads], Any], count: int) -> list[Any]:
    """Run `job(ranks)` on `count` threads as ranks; return their results.

    Raises:
        Exception: what the first rank that failed by itself raised.
    """
    barrier, slots = threading.Barrier(count), [None] * count
    results: list[Any] = [None] * count
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            results[number] = job(Threads(number, count, barrier, slots))
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class Processes:
    """The ranks of a job, with the methods of `Threads`."""

    def __init__(self) -> None:
        self.number, self.count = rank(), world_size()

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks behind one another, (count · n,) of (n,)."""
        whole = part.new_empty(self.count * len(part))
        all_gather(whole, part.contiguous())
        return whole

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """This rank's slice of the sum over all ranks, (n,) of (count · n,)."""
        own = whole.new_empty(len(whole) // self.count)
        reduce_scatter(own, whole.contiguous())
        return own

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        total = tensor.clone()
        dist.all_reduce(total)
        return total


def train_attempt(source: str, name: str, steps: int) -> Tensor:
    """Train an MLP on this rank with the function `name` of `source`; return its whole weights.

    The function is an attempt at exercise 2: `name(x, shard, d_ff, ranks)` -> output, backward.
    """
    namespace: dict[str, Any] = {"torch": torch}
    exec(source, namespace)
    ranks, d_ff = Processes(), 12
    whole, parts = mlp_case(d_ff, ranks.count)
    shard = whole.chunk(ranks.count)[ranks.number].clone()
    x, target = (part.chunk(ranks.count)[ranks.number] for part in parts)
    with torch.no_grad():
        for _ in range(steps):
            y, backward = namespace[name](x, shard, d_ff, ranks)
            _, gradient = backward(2 * (y - target) / y.numel())
            shard -= 0.1 * gradient
    return ranks.all_gather(shard)


def mlp_case(d_ff: int, count: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Weights of an MLP, flat, and inputs and targets of all ranks, (4 · count, 6)."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2 * 6 * d_ff, generator=generator) / 3
    x, target = torch.randn(2, 4 * count, 6, generator=generator)
    return whole, (x, target)


def train_alone(d_ff: int, count: int, steps: int) -> Tensor:
    """The same training in one process, on the sequences of all ranks, by autograd."""
    whole, (x, target) = mlp_case(d_ff, count)
    whole.requires_grad_()
    for _ in range(steps):
        w1, w2 = whole.split(6 * d_ff)
        y = (x @ w1.view(d_ff, 6).T).relu() @ w2.view(6, d_ff).T
        (gradient,) = torch.autograd.grad((y - target).square().mean(), whole)
        with torch.no_grad():
            whole -= 0.1 * gradient
    return whole.detach()
