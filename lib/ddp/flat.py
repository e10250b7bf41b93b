"""Gradients in flat buckets, sent while backward computes others, in one order on all ranks.

A gradient's way, in `InOrder`: autograd calls `gradient_arrived`; the gradient that completes a
bucket has it sent (`send_complete`, `send`); `finish_gradient_synchronization` waits for all
buckets. Subclasses say what `send` starts: an all-reduce in data parallelism (`wrappers.py`), a
reduce-scatter in ZeRO-1 (`sharded_optimizer/flat_slices.py`).

`Bucket` is the layout: parameters side by side in one buffer, which can be cut into a slice per
rank. ZeRO-1 and FSDP (`fsdp/flat_parameters.py`) keep their parameters in it, too.

One bucket of two parameters for two ranks, a slice being 4 elements:

    | a a a . | b b b . |      `.` pads each start to 16 bytes, and slices to one size
    | slice 0 | slice 1 |
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import numbers
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.ranges import annotate
from lib.core.settings import require
from lib.ddp.process_group import as_real, global_rank, world_size

# Fused optimizers read and write gradients this many bytes at a time.
ALIGNMENT = 16
# A small first bucket, so that the first message starts early in backward.
FIRST_BUCKET_BYTES = 2**20


class Part(NamedTuple):
    """The part of a slice that belongs to one parameter, in elements."""

    param: Tensor

    start: int
    """Its first element of the parameter, in row-major order."""

    stop: int
    """One past its last."""

    offset: int
    """Where `start` is in the slice."""


class Bucket:
    """Parameters of one dtype and device, side by side in a buffer that is cut into equal slices.

    Each parameter starts at a multiple of 16 bytes, and so does each slice. The gaps are zeros.

    Args:
        ranks: how many slices.
        narrowest: of the dtypes that buffers of this layout will have (default: the parameters').
    """

    def __init__(
        self, params: Sequence[Tensor], ranks: int = 1, narrowest: torch.dtype | None = None
    ) -> None:
        self.params, self.ranks, self.narrowest = list(params), ranks, narrowest
        # a parameter may become a shard later
        self.shapes = [param.shape for param in self.params]
        self.sizes = [shape.numel() for shape in self.shapes]
        # gradients that have not arrived in this backward pass
        self.missing = len(self.params)
        # how it is averaged: the operation, and a divisor after it (see `averaging`)
        self.op: Any = None
        self.divisor = 1
        # while it is sent: handles to wait for, what must live until then, and what become means
        self.works: list[Any] = []
        self.sent: list[Tensor] = []
        self.means: list[Tensor] = []
        # the all-gather under way: its handle, and what is sent, which must live until then
        self.gathering: tuple[Any, Tensor] | None = None
        self.lay_out(self.params[0].detach())

    def lay_out(self, like: Tensor) -> None:
        """Compute where parameters start in a buffer of the dtype of `like`, in elements."""
        # parameters, each from a multiple of 16 bytes to the next one's start
        self.kind = like.dtype, like.device
        num_bytes = min(like.itemsize, (self.narrowest or like.dtype).itemsize)
        step = max(1, ALIGNMENT // num_bytes)
        self.lengths = [-(-size // step) * step for size in self.sizes]
        self.starts = [0, *itertools.accumulate(self.lengths)][:-1]

        # equal slices; the last length has what is left of them
        self.slice_length = -(-sum(self.lengths) // (step * self.ranks)) * step
        self.length = self.ranks * self.slice_length
        self.lengths[-1] += self.length - sum(self.lengths)

        # zeros behind each parameter; none if there is no gap anywhere
        gaps = [length - size for size, length in zip(self.sizes, self.lengths)]
        zeros = like.new_zeros(max(gaps))
        self.gaps = [zeros[:gap] for gap in gaps] if any(gaps) else []

    def pack(self, tensors: list[Tensor], last: Tensor | None = None) -> Tensor:
        """Return a buffer of `tensors`, one per parameter, and the 1-dim `last` behind them.

        A single tensor without gaps is returned as it is, flat.
        """
        if (tensors[0].dtype, tensors[0].device) != self.kind:
            self.lay_out(tensors[0])
        # tensor, gap, tensor, gap, ..., last
        pieces = [tensor.reshape(-1) for tensor in tensors]
        if self.gaps:
            pieces = [piece for pair in zip(pieces, self.gaps) for piece in pair]
        if last is not None:
            pieces.append(last)
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]  # (length + len(last),)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors in a buffer that `pack` returned, each in its parameter's shape."""
        parts = flat[: self.length].split(self.lengths)
        return [
            (part[:size] if self.gaps else part).view(shape)
            for part, size, shape in zip(parts, self.sizes, self.shapes)
        ]

    def receive_mean(self) -> None:
        """Wait for what was sent (on a GPU only its stream waits), and divide the sums."""
        for work in self.works:
            work.wait()
        # sums become means, and what was sent is freed
        if self.works and self.divisor > 1:
            for tensor in self.means:
                tensor.div_(self.divisor)
        self.works, self.sent, self.means = [], [], []

    def wait(self) -> None:
        """Wait for the all-gather under way; on a GPU only its stream waits."""
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None

    def parts(self, number: int) -> Iterator[Part]:
        """The parameters, or parts of them, in slice `number`."""
        begin = number * self.slice_length
        for param, size, at in zip(self.params, self.sizes, self.starts):
            start = max(0, begin - at)
            stop = min(size, begin + self.slice_length - at)
            if start < stop:
                yield Part(param, start, stop, at + start - begin)


def fill_buckets(params: Iterable[Tensor], *, cap_bytes: float | None = None) -> list[list[Tensor]]:
    """Divide parameters into buckets, in their order.

    A bucket has one dtype and device, and is filled up to `cap_bytes`, the first one up to 1 MiB.
    Without a cap there is one per dtype and device. Buckets are sorted by their last parameters,
    the order in which they become complete.
    """
    params = list(params)
    full: list[list[Tensor]] = []
    filling: dict[Any, list[Tensor]] = {}
    for param in params:
        # the bucket of this dtype and device that is being filled, and its size with the parameter
        bucket = filling.setdefault((param.dtype, param.device), [])
        size = sum(other.nbytes for other in bucket) + param.nbytes
        limit = cap_bytes if full else min(cap_bytes or 0, FIRST_BUCKET_BYTES)
        # begin a new one if it would be too large; a parameter above the cap gets its own
        if bucket and cap_bytes is not None and size > limit:
            full.append(bucket)
            bucket = filling[param.dtype, param.device] = []
        bucket.append(param)
    place = {param: index for index, param in enumerate(params)}
    return sorted([*full, *filling.values()], key=lambda bucket: place[bucket[-1]])


def checked_cap(bucket_cap_mb: float) -> str:
    """The cap of a bucket as text.

    Raises:
        ValueError: it is not a number more than 0.
    """
    is_cap = isinstance(bucket_cap_mb, numbers.Real) and bucket_cap_mb > 0
    require(is_cap, f"bucket_cap_mb must be more than 0, got {bucket_cap_mb!r}")
    return str(bucket_cap_mb)


class GradientSync:
    """A mixin for what averages a module's gradients in backward, unless `no_sync` is on."""

    is_syncing = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In the block, backward passes only add up gradients on this rank."""
        before, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = before

    def note_parameters(self, module: nn.Module) -> None:
        """Note the module's parameters and where they are, for `check_parameters`."""
        self.find_parameters = functools.partial(module.named_parameters, remove_duplicate=False)
        self.named = dict(self.find_parameters())
        self.frozen = {name: param for name, param in self.named.items() if not param.requires_grad}
        # the parameters and parts of each part
        self.tables = [t for part in module.modules() for t in (part._parameters, part._modules)]
        self.held = [value for table in self.tables for value in table.values()]

    def check_parameters(self) -> None:
        """Raise a `RuntimeError` if a parameter was added, replaced or unfrozen since."""
        # quick, since each step does it: the same objects in the same places
        found = [value for table in self.tables for value in table.values()]
        if len(found) != len(self.held) or not all(map(operator.is_, found, self.held)):
            # a parameter changed, or only parts without one
            for name, param in self.find_parameters():
                is_known = name in self.named
                if param is not self.named.get(name) and (is_known or param.requires_grad):
                    raise RuntimeError(
                        f"parameter {name} was {'replaced' if is_known else 'added'} after the "
                        "module was wrapped, for example by load_state_dict(assign=True); wrap the "
                        "whole module again"
                    )
        for name, param in self.frozen.items():
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name} was frozen when the module was wrapped and is trained now; "
                    "wrap the module again"
                )


class InOrder(GradientSync):
    """Averages gradients over a group's ranks, a bucket at a time, in one order on all ranks.

    The order is that in which gradients arrived on rank 0 in the first step. That step overlaps
    nothing, so every step of every run has the same order, and a resumed run has the same bits. A
    bucket that is complete early waits for those before it: otherwise ranks whose backward passes
    differ would add up gradients of different parameters.

    A parameter without a gradient on this rank counts as zero. With the last bucket the ranks also
    average a 1 for each gradient that they have (`presence`): a mean of 0 means that no rank has.
    """

    # what `send` starts, for profilers and error messages
    collective = "all-reduce"
    # whether buckets are sent in backward
    overlaps = True
    # whether gradients that arrive now would be too late
    is_closed = False

    def set_up(self, group: dist.ProcessGroup | None) -> None:
        """Begin without parameters; `watch` adds them."""
        self.group, self.ranks = group, world_size(group)
        self.params: list[Tensor] = []
        # by a parameter's id, which is quicker than by the parameter: name, index, bucket
        self.names: dict[int, str] = {}
        self.number_of: dict[int, int] = {}
        self.bucket_of: dict[int, Bucket] = {}
        # ids of parameters whose gradients arrived since the last synchronization, in that order
        self.arrived: dict[int, None] = {}
        self.is_in_backward = False
        # on, too, once an error has ended it
        self.is_finishing = False
        # buckets in the order in which they are sent, empty until all ranks agree; how many were
        self.order: list[Bucket] = []
        self.num_sent = 0
        # parameters without a gradient here, the ranks' mean of who has one, and those that no
        # rank had a gradient of in the last step
        self.absent: list[Tensor] = []
        self.presence: Tensor | None = None
        self.unused: list[Tensor] = []

    def watch(self, named: Iterable[tuple[str, Tensor]], *, hooks: bool = True) -> None:
        """Add parameters whose gradients are averaged; with `hooks`, during backward."""
        for name, param in named:
            self.names[id(param)] = name
            self.number_of[id(param)] = len(self.params)
            self.params.append(param)
            if hooks:
                add_hook(param, self)

    def make_buckets(self, params: list[Tensor]) -> list[Bucket]:
        """The buckets, in the order in which they are complete if `params` arrive in this one."""
        raise NotImplementedError

    def gradient_arrived(self, param: Tensor) -> None:
        """Called by autograd when a gradient is complete; send the buckets that are, too."""
        key = id(param)
        if (key in self.arrived and self.overlaps) or self.is_closed:
            raise RuntimeError(
                f"the gradient of {self.names[key]} grew again after its {self.collective} had "
                "started; run one backward pass before finish_gradient_synchronization(), those "
                "before it in no_sync(), and checkpoints with use_reentrant=False"
            )
        if param.grad.layout != torch.strided:
            raise not_dense(self.names[key], param.grad)
        # in no_sync, gradients only add up
        if not self.is_syncing:
            return

        # if an exception ends the backward pass, `is_in_backward` stays on
        if not self.is_in_backward:
            self.is_in_backward = True
            on_end = functools.partial(setattr, self, "is_in_backward", False)
            torch.autograd.Variable._execution_engine.queue_callback(on_end)

        # the first step only records the order
        self.arrived[key] = None
        if self.overlaps and self.order:
            bucket = self.bucket_of[key]
            bucket.missing -= 1
            if not bucket.missing:
                with torch.no_grad(), annotate(self.collective):
                    self.send_complete()

    def send_complete(self) -> None:
        """Send buckets in order, up to the first one that lacks a gradient."""
        while self.num_sent < len(self.order) and not self.order[self.num_sent].missing:
            bucket, presence = self.order[self.num_sent], None
            if bucket is self.order[-1]:
                # 1, or 0 where this rank has no gradient
                presence = bucket.params[0].new_ones(len(self.params))  # (parameters,)
                for param in self.absent:
                    presence[self.number_of[id(param)]] = 0
            self.send(bucket, presence)
            self.num_sent += 1

    def send(self, bucket: Bucket, presence: Tensor | None) -> None:
        """Start to average the bucket's gradients, and `presence` (1-dim) with the last one."""
        raise NotImplementedError

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Turn every gradient into its mean over the ranks; between backward and optimizer step.

        Every rank must call it, even if its backward pass reached no parameter. Where a gradient
        is missing on this rank, the host waits for its device.

        Raises:
            RuntimeError: a parameter was added or replaced since it was watched, or was frozen
                then and is trained now.
        """
        self.check_parameters()
        # none on a single rank
        if not self.params:
            return

        self.is_finishing = True
        with annotate(self.collective):
            # send what backward did not, in the first step all
            if not self.order:
                self._agree_on_order()
            if self.num_sent < len(self.order):
                self._complete_buckets()
                self.send_complete()
            # wait for all
            for bucket in self.order:
                bucket.receive_mean()

        # a parameter that no rank has used has no gradient, as in one process
        self.unused = []
        if self.absent:
            numbers = [self.number_of[id(param)] for param in self.absent]
            shares = self.presence[numbers].tolist()  # type: ignore[index]  # sent with the last
            self.unused = [param for param, share in zip(self.absent, shares) if share == 0]
        for param in self.unused:
            param.grad = None

        # ready for the next step
        for bucket in self.order:
            bucket.missing = len(bucket.params)
        self.arrived.clear()
        self.absent, self.presence = [], None
        self.num_sent, self.is_in_backward, self.is_finishing = 0, False, False

    def _complete_buckets(self) -> None:
        """Complete the buckets that were not sent, with zeros where a gradient is missing."""
        left = self.order[self.num_sent :]
        for bucket in left:
            for param in bucket.params:
                if param.grad is None:
                    self.absent.append(param)
                    param.grad = torch.zeros_like(param)
                if param.grad.layout != torch.strided:
                    raise not_dense(self.names[id(param)], param.grad)
        for bucket in left:
            bucket.missing = 0

    def _agree_on_order(self) -> None:
        """Make the buckets; with overlap, in the order in which rank 0's gradients arrived."""
        params = self.params
        # rank 0's order: gradients as they arrived, then parameters without one
        if self.overlaps:
            left = [id(param) for param in reversed(params) if id(param) not in self.arrived]
            order = [self.number_of[key] for key in (*self.arrived, *left)]
            agreed = torch.tensor(order, device=params[0].device)  # (parameters,)
            dist.broadcast(agreed, global_rank(0, self.group), group=self.group)
            params = [self.params[number] for number in agreed.tolist()]
        self.order = self.make_buckets(params)
        for bucket in self.order:
            bucket.op, bucket.divisor = averaging(bucket.params[0], self.group)
        self.bucket_of = {id(param): bucket for bucket in self.order for param in bucket.params}


def add_hook(param: Tensor, owner: Any) -> None:
    """Have autograd call `owner.gradient_arrived(param)` whenever the gradient is complete.

    The hook is removed when `owner` is freed; the parameter may live longer.
    """
    hook = functools.partial(type(owner).gradient_arrived, weakref.proxy(owner))
    handle = param.register_post_accumulate_grad_hook(hook)
    weakref.finalize(owner, handle.remove).atexit = False  # type: ignore[misc]  # settable


def not_dense(name: str, grad: Tensor) -> ValueError:
    """The error for a gradient that has no flat memory."""
    return ValueError(f"the gradient of {name} must be dense (sparse=False), got {grad.layout}")


def not_finished(what: str) -> RuntimeError:
    """The error for what comes after gradients that were not averaged, such as a forward pass."""
    return RuntimeError(
        f"{what} after a backward pass whose gradients were not averaged; call "
        "finish_gradient_synchronization() between backward() and optimizer.step(), or run all "
        "backward passes but the last in no_sync()"
    )


def averaging(tensor: Tensor, group: dist.ProcessGroup | None) -> tuple[Any, int]:
    """How a group averages such a tensor: the operation to send it with, and a divisor after it.

    NCCL averages by itself; with gloo, sums are divided by the number of ranks.
    """
    if tensor.is_cuda and dist.is_initialized() and dist.get_backend(group) == "nccl":
        return dist.ReduceOp.AVG, 1
    return dist.ReduceOp.SUM, world_size(group)


def start_all_reduce(tensors: list[Tensor], op: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Start to reduce contiguous tensors in place; return what to wait for.

    NCCL takes all tensors in one launch; other backends, which only sum, take them one by one.
    """
    if len(tensors) == 1 or op == dist.ReduceOp.SUM:
        return [dist.all_reduce(tensor, op, group=group, async_op=True) for tensor in tensors]
    # as dist.all_reduce_coalesced, which warns that it is deprecated
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = op
    real = [as_real(tensor) for tensor in tensors]
    return [(group or dist.group.WORLD).allreduce_coalesced(real, options)]
