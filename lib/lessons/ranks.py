"""Ranks for checks: threads of this process, so that a check takes no time, or real processes.

Both are `Ranks`, with the same methods and counts.
"""

from __future__ import annotations

import ctypes
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lib.ddp.launcher import launch
from lib.ddp.process_group import (
    all_gather,
    global_rank,
    rank,
    reduce_scatter,
    world_size,
)
from lib.lessons.sending import function_of, parcel_of


class Board:
    """The messages that threads as ranks post for one another; names a deadlock at once.

    A rank that waits gets on once all values that it waits for are there. If all ranks wait or have
    ended, and none can get on, they never will.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.changed = threading.Condition()
        self.values: dict[Any, Any] = {}
        # rank -> what it waits for, and that in words
        self.waiting: dict[int, tuple[list, str]] = {}
        self.ended: set[int] = set()
        self.failure = ""

    def post(self, key: Any, value: Any) -> None:
        """Put a value where others find it under `key`."""
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def wait(self, rank: int, keys: Sequence[Any], words: str) -> list[Any]:
        """Wait for the values of `keys`.

        Raises:
            RuntimeError: they never come.
        """
        with self.changed:
            self.waiting[rank] = [*keys], words
            self._look_for_deadlock()
            while not all(key in self.values for key in keys):
                if self.failure:
                    raise RuntimeError(self.failure)
                self.changed.wait()
            del self.waiting[rank]
            return [self.values[key] for key in keys]

    def end(self, rank: int) -> None:
        """Tell that a rank has ended."""
        with self.changed:
            self.ended.add(rank)
            self._look_for_deadlock()

    def stop(self) -> None:
        """Let all ranks fail that wait, now and later."""
        with self.changed:
            self.failure = "the ranks were stopped"
            self.changed.notify_all()

    def _look_for_deadlock(self) -> None:
        stuck = {
            rank: words
            for rank, (keys, words) in self.waiting.items()
            if not all(key in self.values for key in keys)
        }
        if stuck and len(stuck) + len(self.ended - stuck.keys()) == self.count:
            told = [f"rank {rank} {words}" for rank, words in sorted(stuck.items())]
            told += [f"rank {rank} has ended" for rank in sorted(self.ended - stuck.keys())]
            self.failure = f"the ranks wait for one another forever: {', '.join(told)}"
            self.changed.notify_all()


class Ranks:
    """One rank of several: what it may call, how it is counted, and what it gathered.

    `Threads` and `Processes` say how messages get from rank to rank.
    """

    def __init__(self, number: int, count: int) -> None:
        self.number, self.count = number, count
        self.calls = {"all-gathers": 0, "reduce-scatters": 0, "all-reduces": 0}
        self.elements_sent = 0
        # of all ranks together, in all-gathers and reduce-scatters
        self.elements_exchanged = 0
        # times that it waited for all others in a collective
        self.waits = 0
        # messages to and from each other rank
        self.messages: dict[tuple[str, int], int] = {}
        self.gathered: list[Tensor] = []
        # names of what it may call; anything if there are none
        self.allowed: Sequence[str] | None = None

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to rank `to`, without waiting for it.

        Raises:
            ValueError: there is no such rank.
        """
        if to not in range(self.count):
            raise ValueError(f"send takes a rank from 0 to {self.count - 1}, got {to}")
        self._check("send", tensor)
        self.elements_sent += tensor.numel()
        self._send(tensor.detach().clone(), to, self._next("to", to))

    def receive(self, source: int, like: Tensor) -> Tensor:
        """Wait for the next tensor from rank `source`, which has the shape and dtype of `like`.

        Raises:
            ValueError: it has another shape or dtype; processes take bytes as they come.
        """
        return self._receive(source, like, self._next("from", source))

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks behind one another, (count · n,) of (n,)."""
        self._check("all_gather", part)
        self.calls["all-gathers"] += 1
        self.waits += 1
        self.gathered.append(self._all_gather(part.detach()))
        self.elements_exchanged += self.gathered[-1].numel()
        return self.gathered[-1]

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """This rank's slice of the sum over all ranks, (n,) of (count · n,).

        Raises:
            ValueError: `whole` can't be cut into `count` equal slices.
        """
        self._check("reduce_scatter", whole)
        if whole.ndim == 1 and len(whole) % self.count:
            raise ValueError(
                f"reduce_scatter cuts a tensor into {self.count} equal slices, got {len(whole)} "
                f"elements; pad to a multiple of {self.count}"
            )
        self.calls["reduce-scatters"] += 1
        self.waits += 1
        self.elements_exchanged += whole.numel()
        return self._reduce_scatter(whole.detach())

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        return self.start_all_reduce(tensor)()

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to add up over all ranks; return a function that waits for the sum."""
        self._check("all_reduce", tensor)
        self.calls["all-reduces"] += 1
        finish = self._start_all_reduce(tensor.detach())

        def wait() -> Tensor:
            self.waits += 1
            return finish()

        return wait

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of rank 0."""
        self._check("broadcast", tensor)
        self.waits += 1
        return self._broadcast(tensor.detach().clone())

    @torch.no_grad()
    def poison(self) -> None:
        """Overwrite what was gathered so far, as memory that was freed and is used again."""
        for tensor in self.gathered:
            tensor.fill_(torch.nan)

    def _check(self, kind: str, tensor: Any) -> None:
        if self.allowed is not None and kind not in self.allowed:
            raise RuntimeError(f"{kind} may not be used here, only {', '.join(self.allowed)}")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{kind} takes a tensor, got {tensor!r}")

    def _next(self, direction: str, other: int) -> int:
        number = self.messages.get((direction, other), 0) + 1
        self.messages[direction, other] = number
        return number


class Threads(Ranks):
    """A rank that is a thread; made by `run_on_threads`."""

    def __init__(self, number: int, board: Board) -> None:
        super().__init__(number, board.count)
        self.board, self.collectives = board, 0

    def _send(self, tensor: Tensor, to: int, number: int) -> None:
        self.board.post((self.number, to, number), tensor)

    def _receive(self, source: int, like: Tensor, number: int) -> Tensor:
        key, words = (source, self.number, number), f"waits for message {number} of rank {source}"
        (tensor,) = self.board.wait(self.number, [key], words)
        # nobody reads it again, so it is the receiver's alone to keep
        del self.board.values[key]
        if tensor.shape != like.shape:
            shapes = f"{tuple(like.shape)}, got {tuple(tensor.shape)}"
            raise ValueError(f"what rank {source} sends must have the shape {shapes}")
        if tensor.dtype != like.dtype:
            dtypes = f"{like.dtype}, like `like`, got {tensor.dtype}"
            raise ValueError(f"what rank {source} sends must have the dtype {dtypes}")
        return tensor

    def _all_gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._post("all_gather", part)())

    def _reduce_scatter(self, whole: Tensor) -> Tensor:
        total = sum(self._post("reduce_scatter", whole)())
        return total.chunk(self.count)[self.number].clone()  # type: ignore[union-attr]

    def _start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        collect = self._post("all_reduce", tensor)
        return lambda: sum(collect())  # type: ignore[return-value]

    def _broadcast(self, tensor: Tensor) -> Tensor:
        return self._post("broadcast", tensor)()[0].clone()

    def _post(self, kind: str, tensor: Tensor) -> Callable[[], list[Tensor]]:
        """Post this rank's tensor; return a function that waits for those of all."""
        self.collectives += 1
        keys = [("collective", self.collectives, number) for number in range(self.count)]
        self.board.post(keys[self.number], (kind, tensor.clone()))
        words = f"waits in {kind}, its collective {self.collectives}"
        return lambda: self._collect(kind, keys, words)

    def _collect(self, kind: str, keys: Sequence[tuple], words: str) -> list[Tensor]:
        """The tensors of all ranks.

        Raises:
            RuntimeError: ranks call different collectives, or one of them has ended.
            ValueError: tensors differ in their shape, or are not flat.
        """
        kinds, tensors = zip(*self.board.wait(self.number, keys, words))
        if len(set(kinds)) > 1:
            raise RuntimeError(f"ranks call different collectives: {', '.join(kinds)}")
        is_flat = kind in ("all_gather", "reduce_scatter")
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len({*shapes}) > 1 or (is_flat and tensors[0].ndim != 1):
            shown = ", ".join(map(str, shapes))
            flat = "flat " if is_flat else ""
            words = f"{kind} takes {flat}tensors of one shape, got the shapes {shown}"
            raise ValueError(f"{words}; do all ranks send in the same order?")
        return list(tensors)


class Processes(Ranks):
    """A rank that is a process of a job, or of one of its groups."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(rank(group), world_size(group))
        self.group = group
        # messages on their way, and their tensors
        self.sent: list[Any] = []

    def wait_for_messages(self) -> None:
        """Wait until all that was sent is on its way; what is still queued would be lost."""
        for message, _ in self.sent:
            message.wait()
        self.sent.clear()

    def _send(self, tensor: Tensor, to: int, number: int) -> None:
        message = dist.isend(tensor, global_rank(to, self.group), group=self.group)
        self.sent.append((message, tensor))

    def _receive(self, source: int, like: Tensor, number: int) -> Tensor:
        tensor = torch.empty_like(like)
        dist.recv(tensor, global_rank(source, self.group), group=self.group)
        return tensor

    def _all_gather(self, part: Tensor) -> Tensor:
        whole = part.new_empty(self.count * len(part))
        all_gather(whole, part.contiguous(), group=self.group)
        # the backend may hold its own for a moment longer
        return whole.clone()

    def _reduce_scatter(self, whole: Tensor) -> Tensor:
        own = whole.new_empty(len(whole) // self.count)
        reduce_scatter(own, whole.contiguous(), group=self.group)
        return own

    def _start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        total = tensor.clone()
        work = dist.all_reduce(total, group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()  # type: ignore[union-attr]
            return total

        return finish

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, global_rank(0, self.group), group=self.group)
        return tensor


def run_on_threads(job: Callable[[Threads], Any], count: int) -> list[Any]:
    """Run `job(ranks)` on `count` threads as ranks; return their results.

    What is raised in this thread meanwhile, as by an interrupt or a time limit, stops all ranks.

    Raises:
        Exception: what the lowest rank raised that failed by itself, and not by waiting for others.
    """
    board = Board(count)
    results: list[Any] = [None] * count
    errors: dict[int, BaseException] = {}
    ended: queue.SimpleQueue = queue.SimpleQueue()

    def work(number: int) -> None:
        try:
            results[number] = job(Threads(number, board))
        # all, or the others would wait for a rank that has ended unseen
        except BaseException as error:
            errors[number] = error
        board.end(number)
        ended.put(number)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    try:
        # not `join`, which takes a thread for ended if an exception comes while it waits
        for _ in threads:
            _wait_for(ended)
    except BaseException:
        stopper = threading.Thread(target=_stop, args=(board, threads, ended), daemon=True)
        stopper.start()
        _wait_for(ended)
        raise
    if errors:
        # always the same one, whichever thread came first
        own = [number for number, error in errors.items() if str(error) != board.failure]
        raise errors[min(own or errors)]
    return results


def _wait_for(messages: queue.SimpleQueue) -> None:
    # A signal may reach another thread, and its handler runs in this one, when that wakes up.
    while True:
        try:
            return messages.get(timeout=0.05)
        except queue.Empty:
            pass


def _stop(board: Board, threads: Sequence[threading.Thread], ended: queue.SimpleQueue) -> None:
    """Raise SystemExit in ranks until they end; then tell `ended`.

    In a thread of its own, where no signal comes between. A rank that sleeps, or waits for a lock,
    takes no time on a processor; it ends when it wakes up.
    """
    board.stop()
    deadline = time.monotonic() + 0.3
    while (alive := [t for t in threads if t.is_alive()]) and time.monotonic() < deadline:
        for thread in alive:
            number, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)
        alive[0].join(0.01)
    ended.put(None)


def whole_numbers(generator: random.Random, *shape: int) -> Tensor:
    """Random whole numbers, whose sums over ranks are exact in any order."""
    values = [float(generator.randint(-4, 4)) for _ in range(math.prod(shape))]
    return torch.tensor(values).view(shape)


def run_job(parcel: bytes) -> Any:
    """Run a job that `parcel_of` packed on this process as a rank: `job(ranks)`."""
    ranks = Processes()
    found = function_of(parcel)(ranks)
    ranks.wait_for_messages()
    return found


def run_on_processes(job: Callable[[Processes], Any], count: int, **options: Any) -> list[Any]:
    """Run `job(ranks)` on `count` processes as ranks; return their results.

    Args:
        job: may be a function of a notebook, which processes get with all that it uses.
        options: of `launch`; the backend is gloo by default.

    Raises:
        TypeError: the job can't be sent to processes.
        WorkerError: a rank failed.
    """
    return launch(run_job, count, parcel_of(job), **{"backend": "gloo"} | options)
