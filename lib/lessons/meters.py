"""Meters of what an answer makes and keeps in memory, for exercises about it."""

from __future__ import annotations

import functools
import weakref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation makes, of those with a side of `width`, if given.

    Attributes:
        numbers, shape, operation: of that tensor.
    """

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.width, self.numbers, self.operation = width, 0, ""
        self.shape: tuple[int, ...] = ()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        is_meant = isinstance(result, Tensor) and self.width in (None, *result.shape)
        if is_meant and result.numel() > self.numbers:
            self.numbers, self.shape = result.numel(), tuple(result.shape)
            self.operation = op.overloadpacket.__name__
        return result


class Made(TorchDispatchMode):
    """Knows the tensors, views among them, that operations make, of one of these `sizes`."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.storages: list[StorageWeakRef] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() in self.sizes:
            self.storages.append(StorageWeakRef(result.untyped_storage()))
        return result

    def are_held(self) -> bool:
        """Return whether anything still holds the memory of one of them."""
        return not all(storage.expired() for storage in self.storages)


@functools.cache
def load_dispatch() -> None:
    """Have PyTorch import what a first operation under a mode needs, before calls are timed."""
    with Largest():
        torch.zeros(1)


class Holder:
    """A tensor that autograd keeps; it dies when backward has used it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class KeptByAutograd(saved_tensors_hooks):
    """A context that knows the tensors which autograd keeps for backward, while it keeps them."""

    def __init__(self) -> None:
        super().__init__(self.pack, lambda holder: holder.tensor)
        self.holders: weakref.WeakSet[Holder] = weakref.WeakSet()

    def pack(self, tensor: Tensor) -> Holder:
        """Note a tensor that autograd keeps from now on; return what it keeps instead."""
        self.holders.add(holder := Holder(tensor))
        return holder

    def tensors(self) -> list[Tensor]:
        """The tensors that autograd keeps now."""
        return [holder.tensor for holder in self.holders]
