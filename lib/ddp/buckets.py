"""Buckets of gradients, and their mean over the ranks."""

from __future__ import annotations

import contextlib
import numbers
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lib.core.settings import require

# Fused optimizers read and write gradients this many bytes at a time.
ALIGNMENT = 16
# A small first bucket, so that the first all-reduce starts early in backward.
FIRST_BUCKET_BYTES = 2**20


class GradientSync:
    """A mixin for wrappers that average gradients in backward, unless `no_sync` is on."""

    is_syncing = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In the block, backward passes only add up gradients on this rank."""
        before, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = before


def require_finished(must_finish: bool) -> None:
    """Refuse a forward pass after gradients that were not averaged."""
    if must_finish:
        raise RuntimeError(
            "forward after a backward pass whose gradients were not averaged; call "
            "finish_gradient_synchronization() between backward() and optimizer.step(), or run all "
            "backward passes but the last in no_sync()"
        )


def checked_cap(bucket_cap_mb: float) -> str:
    """The cap of a bucket as text.

    Raises:
        ValueError: it is not a number more than 0.
    """
    is_cap = isinstance(bucket_cap_mb, numbers.Real) and bucket_cap_mb > 0
    require(is_cap, f"bucket_cap_mb must be more than 0, got {bucket_cap_mb!r}")
    return str(bucket_cap_mb)


class MeanReduction:
    """A pending all-reduce that averages tensors of one dtype and device over the ranks.

    NCCL averages by itself and takes all tensors in one launch; other backends sum them one by
    one, and `finish` divides.

    Args:
        tensors: as many on all ranks, with equal shapes; `finish` leaves the means in them.
    """

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
        self.tensors = tensors
        # collectives need contiguous memory
        self.sent = [tensor.contiguous() for tensor in tensors]
        averages = has_average(self.sent[0], group)
        self.divisor = None if averages else dist.get_world_size(group)
        self.works = _start_all_reduce(self.sent, group, averages)

    def finish(self) -> None:
        """Wait (on a GPU only its stream waits) and leave the means in the tensors."""
        for work in self.works:
            work.wait()
        for tensor, sent in zip(self.tensors, self.sent):
            if sent is not tensor:
                tensor.copy_(sent)
            if self.divisor:
                tensor.div_(self.divisor)


def has_average(tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether the group's backend can average such a tensor by itself."""
    return tensor.is_cuda and dist.is_initialized() and dist.get_backend(group) == "nccl"


def _start_all_reduce(
    tensors: list[Tensor], group: dist.ProcessGroup | None, averages: bool
) -> list[Any]:
    op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    if len(tensors) == 1 or not averages:
        return [dist.all_reduce(tensor, op, group=group, async_op=True) for tensor in tensors]
    # as dist.all_reduce_coalesced, which warns that it is deprecated
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = op  # type: ignore[assignment]  # PyTorch's stub asks for the wrapper
    # NCCL has no complex numbers
    real = [torch.view_as_real(part) if part.is_complex() else part for part in tensors]
    return [(group or dist.group.WORLD).allreduce_coalesced(real, options)]


class Bucket:
    """Parameters of one dtype and device whose gradients are averaged together.

    Args:
        packed: whether their gradients become views of one buffer, in this order, each at a
            multiple of 16 bytes.
    """

    def __init__(self, params: list[Tensor], *, packed: bool = True) -> None:
        self.params = params
        # a single gradient needs no buffer
        self.packed = packed and len(params) > 1
        # the buffer that gradients are views of; it lives as long as they do
        self.buffer: Callable[[], Tensor | None] = _no_buffer
        self._lay_out(params[0].detach())

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies, whose gradients will have a buffer of their own."""
        return vars(self) | {"buffer": _no_buffer}

    def _lay_out(self, like: Tensor) -> None:
        """Compute the gradients' padded lengths in a buffer of the dtype of `like`."""
        self.dtype = like.dtype
        step = max(1, ALIGNMENT // like.element_size())  # elements
        self.lengths = [-(-param.numel() // step) * step for param in self.params]
        # any padding would do, but zeros are equal on all ranks
        zeros = like.new_zeros(step)
        gaps = [length - param.numel() for param, length in zip(self.params, self.lengths)]
        self.gaps = [zeros[:gap] for gap in gaps] if any(gaps) else []

    def pack_gradients(self, last: Tensor | None = None) -> list[Tensor]:
        """Return the tensors to all-reduce: the gradients of all parameters, and then `last`.

        If `packed`, gradients become views of one buffer, unless they are already. `last` may be
        copied: read its mean from the last elements of the last tensor.

        Raises:
            RuntimeError: the gradients have several dtypes.
        """
        grads = [param.grad for param in self.params]
        if any(grad.dtype != grads[0].dtype for grad in grads):
            raise RuntimeError(
                "a part of the module was cast after it was wrapped; wrap the module again, since "
                "the gradients of a bucket must have one dtype"
            )
        if not self.packed:
            return grads if last is None else [*grads, last]
        buffer = self._buffer_of(grads)
        if buffer is None:
            return [self._pack(grads, last)]
        return [buffer] if last is None else [buffer, last]

    def _pack(self, grads: list[Tensor], last: Tensor | None) -> Tensor:
        """Copy the gradients into a new buffer, and make them views of it."""
        if grads[0].dtype != self.dtype:
            self._lay_out(grads[0])
        # copy: gradient, gap, gradient, gap, ..., last
        pieces = [grad.reshape(-1) for grad in grads]
        if self.gaps:
            pieces = [piece for pair in zip(pieces, self.gaps) for piece in pair]
        buffer = torch.cat(pieces if last is None else [*pieces, last])  # (sum of lengths,)
        # views
        parts = buffer.split(self.lengths if last is None else [*self.lengths, len(last)])
        for param, part in zip(self.params, parts):
            param.grad = (part[: param.numel()] if self.gaps else part).view(param.shape)
        self.buffer = weakref.ref(buffer)
        return buffer

    def _buffer_of(self, grads: list[Tensor]) -> Tensor | None:
        """The buffer that all gradients are views of; None if any was created anew since."""
        buffer, start = self.buffer(), 0
        # freed by zero_grad, in most training loops
        if buffer is None:
            return None
        for grad, length in zip(grads, self.lengths):
            is_view = grad._base is buffer
            if not (is_view and grad.storage_offset() == start and grad.is_contiguous()):
                return None
            start += length
        return buffer[:start]


def _no_buffer() -> None:
    """In place of a weak reference to a buffer."""


def fill_buckets(
    params: Iterable[Tensor], *, cap_bytes: float | None = None, packed: bool = True
) -> list[Bucket]:
    """Put parameters into buckets, in their order.

    A bucket has one dtype and device, and is filled up to `cap_bytes`, the first one up to 1 MiB.
    Without a cap there is one per dtype and device. Buckets are sorted by their last parameters,
    the order in which they become complete.
    """
    params = list(params)
    full: list[list[Tensor]] = []
    filling: dict[Any, list[Tensor]] = {}
    for param in params:
        bucket = filling.setdefault((param.dtype, param.device), [])
        size = sum(other.nbytes for other in bucket) + param.nbytes
        limit = cap_bytes if full else min(cap_bytes or 0, FIRST_BUCKET_BYTES)
        # a parameter above the cap fills a bucket by itself
        if bucket and cap_bytes is not None and size > limit:
            full.append(bucket)
            bucket = filling[param.dtype, param.device] = []
        bucket.append(param)
    index_of = {id(param): index for index, param in enumerate(params)}
    buckets = sorted([*full, *filling.values()], key=lambda bucket: index_of[id(bucket[-1])])
    return [Bucket(bucket, packed=packed) for bucket in buckets]
