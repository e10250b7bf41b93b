"""A process group for ranks on one CPU whose collectives take as long as a chosen network's.

A laptop's ranks share memory, so communication costs them nothing but processor time: overlap hides
nothing there, and makes a step slower. Here a collective of n ranks ends `latency + bytes /
bandwidth` after the last rank has called it (`lib.profiling.collectives`), by the clock and without
using a core, and then hands over the right sums. Collectives follow one another, as on one link:

    launch(fn, 2, backend="simulated", options=NETWORKS["PCIe"])    # all ranks of a job
    group = simulated_group(NETWORKS["PCIe"])       # inside a job, for `group=` arguments

Wrappers, sharded optimizers and FSDP take it as they take gloo or NCCL. `group.transfers` tells
when each collective was called, started and ended.

**Miniatures.** On a GPU's network a laptop's model would wait for nothing else: it computes
thousands of times as slowly. `Network.miniature` scales latency and bandwidth until communication
takes the same share of the laptop's step as of the GPU's.

**Clocks.** With clock "virtual" nothing is waited for: each rank has a time of its own, which
`group.compute(seconds)` and waiting for collectives move forward. A simulated step then takes the
same time on any machine, busy or not.
"""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import functools
import math
import os
import pickle
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from annotated_types import Gt, Le
from torch import Tensor

from lib.core.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, require, settings
from lib.ddp.launcher import JOB_FOLDER
from lib.ddp.process_group import register_backend
from lib.lessons.ddp.costs import GRADIENT_BYTES, H200_LINKS, NETWORK_US, Cluster
from lib.model.config import ModelConfig
from lib.model.costs import flops_per_token, num_parameters
from lib.profiling.collectives import Link, predicted_ms

BACKEND = "simulated"
# Seconds between two looks at what other ranks have called.
PAUSE = 1e-4


@settings
class Straggler:
    """A rank whose calls come late."""

    rank: NonNegativeInt
    delay_ms: NonNegativeFloat


@settings
class SlowLink:
    """A link, from `rank` to the next one of the ring, with a part of its bandwidth."""

    rank: NonNegativeInt
    factor: Annotated[float, Gt(0), Le(1)]


@settings
class LostRank:
    """A rank that falls silent after this many collectives."""

    rank: NonNegativeInt
    after: NonNegativeInt = 0


@settings
class Workload:
    """The communication and computation of a training step."""

    gradient_bytes: PositiveFloat
    """Bytes of all gradients."""

    milliseconds: PositiveFloat
    """Time of a step on one rank alone."""


@settings
class Network:
    """The links between ranks, and what is wrong with them."""

    inside: Link
    """Between ranks of a host."""

    between: Link | None = None
    """The link between the halves of the ranks, which are two hosts then."""

    straggler: Straggler | None = None
    slow_link: SlowLink | None = None
    lost_rank: LostRank | None = None
    clock: Literal["wall", "virtual"] = "wall"

    def check_ranks(self, ranks: int) -> None:
        """Raise a `ValueError` if something is wrong with a rank that a job of `ranks` lacks."""
        for fault in (self.straggler, self.slow_link, self.lost_rank):
            require(
                fault is None or fault.rank < ranks,
                f"rank of {type(fault).__name__} must be below the number of ranks, {ranks}, got "
                f"{getattr(fault, 'rank', None)}",
            )

    def link(self, ranks: int) -> Link:
        """The bottleneck of a ring of `ranks`, whose neighbors all send at the same time."""
        link = self.inside
        if self.between is not None and ranks > 1:
            link = Cluster(math.ceil(ranks / 2), self.inside, self.between).link(ranks)
        return self._slowed(link) if self.slow_link is not None else link

    def link_of(self, source: int, target: int, ranks: int) -> Link:
        """The link from one rank to another."""
        half = math.ceil(ranks / 2)
        crosses = self.between is not None and (source < half) != (target < half)
        link = self.between if crosses else self.inside
        is_slow = self.slow_link is not None and self.slow_link.rank == source
        return self._slowed(link) if is_slow else link  # type: ignore[arg-type]

    def _slowed(self, link: Link) -> Link:
        return Link(link.latency_us, link.bandwidth_gbs * self.slow_link.factor)  # type: ignore[union-attr]

    def collective_ms(self, collective: str, num_bytes: float, ranks: int) -> float:
        """Milliseconds of a collective; bytes as in `lib.profiling.collectives`."""
        link = self.link(ranks)
        return predicted_ms(collective, num_bytes, ranks, link.latency_us, link.bandwidth_gbs)

    def miniature(self, real: Workload, here: Workload) -> Network:
        """The network on which a step of `here` waits for as large a part as one of `real` does."""
        slower = here.milliseconds / real.milliseconds
        smaller = here.gradient_bytes / real.gradient_bytes

        def scaled(link: Link) -> Link:
            return Link(link.latency_us * slower, link.bandwidth_gbs * smaller / slower)

        between = None if self.between is None else scaled(self.between)
        return dataclasses.replace(self, inside=scaled(self.inside), between=between)


def gpu_step(shape: ModelConfig, tokens: int, flops_per_s: float) -> Workload:
    """A step of a model on a GPU by formula, with float32 gradients; for `Network.miniature`."""
    milliseconds = 1e3 * flops_per_token(shape) * tokens / flops_per_s
    return Workload(GRADIENT_BYTES * num_parameters(shape), milliseconds)


# PCIe 4.0 ×16: 16 GT/s per lane, 128b/130b encoding. Microseconds of a message as in
# `NETWORK_US`, PCIe's also from NCCL's src/graph/tuning.cc.
NVLINK_PAIR = H200_LINKS[2]
NETWORKS = {
    "NVLink pair": Network(NVLINK_PAIR),
    "PCIe": Network(Link(5.7, 31.5)),
    "100 Gb Ethernet": Network(Link(NETWORK_US, 12.5)),
    "two hosts": Network(NVLINK_PAIR, between=Link(NETWORK_US, 50.0)),
}


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective, or a message between two ranks; times in seconds by the network's clock."""

    kind: str
    num_bytes: int
    called: float
    """When this rank called it."""

    start: float
    """When the last rank had called it and the link was free."""

    end: float


# Clocks


class WallClock:
    """The time of this machine, which all its processes share."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, end: float) -> None:
        time.sleep(max(0.0, end - time.monotonic()))

    compute = staticmethod(time.sleep)

    def waited_until(self, end: float) -> None:
        """Do nothing: the clock tells ranks that waited."""


class VirtualClock:
    """A time of this rank's own, which starts at 0."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, end: float) -> None:
        """Return at once: what others do takes no real time."""

    def compute(self, seconds: float) -> None:
        """Let this rank be busy."""
        self.time += seconds

    def waited_until(self, end: float) -> None:
        """Move on to the end of what this rank waited for."""
        self.time = max(self.time, end)


# Calls


class Call(NamedTuple):
    """A rank's part in a transfer, which the other ranks read from its file."""

    time: float
    """When it came, by the network's clock."""

    what: str
    data: np.ndarray
    """Bytes."""

    read: int
    """The last call that this rank had read the data of."""


# Takes the tensors of all ranks, computes, and returns what writes the result where it belongs.
Receive = Callable[[list[Tensor]], Callable[[], Any]]


class Channel:
    """The calls that some ranks make together, in order, each in a thread that waits for its end.

    Args:
        name: of its files, the same on all of its ranks.
        ranks: in order; `own` is this rank's index.
        seconds: how long a transfer of a kind and a number of bytes takes.
    """

    def __init__(
        self,
        group: SimulatedGroup,
        name: str,
        ranks: Sequence[int],
        own: int,
        seconds: Callable[[str, int], float],
    ) -> None:
        self.group, self.ranks, self.own, self.seconds = group, list(ranks), own, seconds
        self.path = f"{group.folder}/{name}"
        self.count, self.free = 0, -math.inf
        # the last call that this rank has read, and its own last one that all have read
        self.read = self.removed = 0
        self.failure: Exception | None = None
        self.pending: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name=f"network {name}").start()

    def call(
        self, kind: str, what: str, sent: Tensor, num_bytes: int, receive: Receive, result: Any
    ) -> PendingWork:
        """Send a tensor to the channel's ranks; `receive` gets the bytes of all, in order."""
        self.count += 1
        data = sent.detach().contiguous().view(-1).view(torch.uint8).numpy()
        called = self.group.clock.now()
        if not self.group.is_lost(self.count):
            call = Call(called + self.group.delay(), what, data, self.read)
            path = self._file(self.count, self.own)
            with open(f"{path}.part", "wb") as file:
                pickle.dump(tuple(call), file, protocol=5)
            # others see it once it is complete
            os.replace(f"{path}.part", path)
        work = PendingWork(self.group.clock, result)
        self.pending.put((work, self.count, what, called, (kind, num_bytes, receive)))
        return work

    def _file(self, number: int, index: int) -> str:
        return f"{self.path} {number} of {index}"

    def _run(self) -> None:
        while True:
            # in a method of its own, so that nothing here holds its tensors afterwards
            self._finish(*self.pending.get())

    def _finish(self, work: PendingWork, number: int, what: str, called: float, sizes: Any) -> None:
        try:
            end = self._transfer(number, what, called, *sizes)
        except Exception as error:
            self.failure = self.failure or error
            work.finish(error, 0.0)
        else:
            work.finish(None, end)

    def _transfer(
        self, number: int, what: str, called: float, kind: str, num_bytes: int, receive: Receive
    ) -> float:
        """Wait for the other ranks' calls and for the end of the transfer; hand over the result."""
        if self.failure is not None:
            raise self.failure
        calls = self._calls_of_all(number, what)
        start = max(self.free, *(call.time for call in calls))
        self.free = start + self.seconds(kind, num_bytes)
        hand_over = receive([torch.from_numpy(call.data) for call in calls])
        self.group.clock.sleep_until(self.free)
        hand_over()
        self.group.transfers.append(Transfer(kind, num_bytes, called, start, self.free))
        return self.free

    def _calls_of_all(self, number: int, what: str) -> list[Call]:
        """Return what each rank called as its call `number`.

        Raises:
            TimeoutError: a rank did not call in time.
            RuntimeError: ranks called something else.
        """
        # a lost rank hears nothing, and leaves it to the others to say so
        patience = self.group.timeout * (2 if self.group.is_lost(number) else 1)
        files = {rank: self._file(number, index) for index, rank in enumerate(self.ranks)}
        deadline = time.monotonic() + patience
        while absent := [rank for rank, file in files.items() if not os.path.exists(file)]:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {', '.join(map(str, absent))} did not call {what} within "
                    f"{self.group.timeout:g} s"
                )
            time.sleep(PAUSE)
        calls = [Call(*pickle.loads(Path(file).read_bytes())) for file in files.values()]
        self.read = number
        for rank, call in zip(self.ranks, calls):
            if call.what != what:
                raise RuntimeError(
                    f"all ranks must make the same calls in the same order, but as call {number} "
                    f"rank {self.ranks[self.own]} made {what} and rank {rank} {call.what}"
                )
        while self.removed < min(call.read for call in calls):
            self.removed += 1
            os.unlink(self._file(self.removed, self.own))
        return calls


class PendingWork(dist.Work):
    """A transfer that has been called: wait for it, as for any other work of torch.distributed."""

    def __init__(self, clock: WallClock | VirtualClock, result: Any) -> None:
        super().__init__()
        self.clock, self.value = clock, result
        self.done, self.end = threading.Event(), 0.0
        self.error: Exception | None = None
        # PyTorch's DDP waits for it in C++
        self.future: torch.futures.Future = torch.futures.Future()

    def finish(self, error: Exception | None, end: float) -> None:
        """Let those that wait go on."""
        self.error, self.end = error, end
        self.done.set()
        if error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(error)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the end of the transfer, after which the result is in place."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        self.clock.waited_until(self.end)
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()

    def get_future(self) -> torch.futures.Future:
        return self.future


# The process group

REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: Tensor.add_,
    dist.ReduceOp.AVG: Tensor.add_,
    dist.ReduceOp.MAX: lambda a, b: a.copy_(torch.maximum(a, b)),
}


def reduce_tensors(op: Any, tensors: list[Tensor]) -> Tensor:
    """Reduce in order of the ranks, so that all get the same bits."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        REDUCTIONS[op.op](total, tensor)
    return total.div_(len(tensors)) if op.op == dist.ReduceOp.AVG else total


def describe(kind: str, tensor: Tensor, detail: str = "") -> str:
    """A call in words that are the same on all ranks: `all_reduce (sum) of 96 float32`."""
    return f"{kind}{detail} of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


class SimulatedGroup(dist.ProcessGroup):
    """The ranks on a simulated network; made by `launch` or `simulated_group`."""

    def __init__(self, network: Network, folder: str, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # needs no store
        self.network, self.folder, self.timeout = network, folder, timeout
        self.own, self.ranks = rank, size
        self.clock = WallClock() if network.clock == "wall" else VirtualClock()
        self.transfers: list[Transfer] = []
        self.channels: dict[str, Channel] = {}

    def compute(self, seconds: float) -> None:
        """Be busy for this long, by the network's clock."""
        self.clock.compute(seconds)

    def delay(self) -> float:
        """Seconds by which this rank's calls come late."""
        straggler = self.network.straggler
        return straggler.delay_ms / 1e3 if straggler and straggler.rank == self.own else 0.0

    def is_lost(self, call: int) -> bool:
        """Whether the others hear nothing of this rank's call number `call`, counted from 1."""
        lost = self.network.lost_rank
        return lost is not None and lost.rank == self.own and call > lost.after

    def _collective(
        self, kind: str, what: str, sent: Tensor, num_bytes: int, receive: Receive, result: Any
    ) -> PendingWork:
        if "all" not in self.channels:
            ranks = range(self.ranks)
            self.channels["all"] = Channel(self, "all", ranks, self.own, self._collective_seconds)
        dtype = sent.dtype
        return self.channels["all"].call(
            kind, what, sent, num_bytes, lambda data: receive([d.view(dtype) for d in data]), result
        )

    def _collective_seconds(self, kind: str, num_bytes: int) -> float:
        kind = "all_reduce" if kind == "barrier" else kind
        return self.network.collective_ms(kind, num_bytes, self.ranks) / 1e3

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:  # type: ignore[override]
        (tensor,) = tensors
        op: Any = (opts or dist.AllreduceOptions()).reduceOp

        def receive(sent: list[Tensor]) -> Callable[[], Any]:
            total = reduce_tensors(op, sent)
            return lambda: tensor.detach().copy_(total.view(tensor.shape))

        what = describe("all_reduce", tensor, f" ({op.op.name.lower()})")
        return self._collective("all_reduce", what, tensor, tensor.nbytes, receive, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> PendingWork:  # type: ignore[override]
        (tensor,), root = tensors, opts.rootRank

        def receive(sent: list[Tensor]) -> Callable[[], Any]:
            return lambda: tensor.detach().copy_(sent[root].view(tensor.shape))

        what = describe("broadcast", tensor, f" from rank {root}")
        return self._collective("broadcast", what, tensor, tensor.nbytes, receive, tensors)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> PendingWork:
        def receive(sent: list[Tensor]) -> Callable[[], Any]:
            return lambda: output.detach().view(-1).copy_(torch.cat(sent))

        what = describe("all_gather", tensor)
        size = tensor.nbytes * self.ranks
        return self._collective("all_gather", what, tensor, size, receive, [output])

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None
    ) -> PendingWork:
        (parts,), (tensor,) = outputs, tensors

        def receive(sent: list[Tensor]) -> Callable[[], Any]:
            def hand_over() -> None:
                for part, one in zip(parts, sent):
                    part.detach().copy_(one.view(part.shape))

            return hand_over

        what, size = describe("all_gather", tensor), tensor.nbytes * self.ranks
        return self._collective("all_gather", what, tensor, size, receive, outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> PendingWork:
        op = opts.reduceOp

        def receive(sent: list[Tensor]) -> Callable[[], Any]:
            total = reduce_tensors(op, [one.chunk(self.ranks)[self.own] for one in sent])
            return lambda: output.detach().copy_(total.view(output.shape))

        what = describe("reduce_scatter", tensor, f" ({op.op.name.lower()})")
        return self._collective("reduce_scatter", what, tensor, tensor.nbytes, receive, [output])

    def barrier(self, opts: Any = None) -> PendingWork:
        nothing = torch.zeros(1)
        return self._collective("barrier", "barrier", nothing, 0, lambda sent: lambda: None, [])

    # as PyTorch named them before 2.13
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    # Messages between two ranks: each direction is a link of its own

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> PendingWork:
        """Send to rank `target`; done when its `recv` is, as with NCCL."""
        (tensor,) = tensors
        return self._message(self.own, target, tensor, lambda sent: lambda: None)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> PendingWork:
        (tensor,) = tensors

        def receive(sent: list[Tensor]) -> Callable[[], Any]:
            return lambda: tensor.detach().copy_(sent[0].view(tensor.dtype).view(tensor.shape))

        return self._message(source, self.own, tensor, receive)

    def _message(self, source: int, target: int, tensor: Tensor, receive: Receive) -> PendingWork:
        name = f"{source} to {target}"
        if name not in self.channels:
            seconds = functools.partial(self._message_seconds, source, target)
            own = 0 if source == self.own else 1
            self.channels[name] = Channel(self, name, (source, target), own, seconds)
        what = describe("message", tensor)
        return self.channels[name].call("message", what, tensor, tensor.nbytes, receive, [tensor])

    def _message_seconds(self, source: int, target: int, kind: str, num_bytes: int) -> float:
        link = self.network.link_of(source, target, self.ranks)
        return link.latency_us / 1e6 + num_bytes / (link.bandwidth_gbs * 1e9)

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]


def simulated_group(network: Network, *, timeout: float = 300.0) -> SimulatedGroup:
    """Make a group of all ranks on a simulated network; all ranks of the job call it.

    Args:
        timeout: seconds that a rank waits for the others to make the same call.
    """
    require(dist.is_initialized(), "simulated_group must be called in a job, but there is no group")
    network.check_ranks(dist.get_world_size())
    limit = datetime.timedelta(seconds=timeout)
    return dist.new_group(timeout=limit, backend=BACKEND, pg_options=network)  # type: ignore


def _create(options: Any, network: Network | None) -> SimulatedGroup:
    # a subgroup of a job on such a network has the same one
    network = network or dist.group.WORLD.network  # type: ignore
    rank, size, store = options.group_rank, options.group_size, options.store
    if rank == 0:
        job = os.environ.get(JOB_FOLDER)
        folder = tempfile.mkdtemp(prefix="network-", dir=job)
        # in a job the launcher removes it, when no rank reads from it any more
        if job is None:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        store.set("folder", folder)
    folder = store.get("folder").decode()
    return SimulatedGroup(network, folder, rank, size, options.timeout.total_seconds())


def _check(options: Any, ranks: int) -> None:
    require(isinstance(options, Network), f"options must be a Network, got {options!r}")
    options.check_ranks(ranks)


register_backend(BACKEND, _create, _check)
