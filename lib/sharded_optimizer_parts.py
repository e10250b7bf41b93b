"""Who updates what: shards of parameters, and the strategy that deals whole parameters to ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.distributed import rank, world_size

# Smaller tensors are sent together: a message of its own would cost more than the copy.
SMALL_BYTES = 2**20


@dataclasses.dataclass(eq=False)
class Shard:
    """The elements of one parameter that this rank updates."""

    param: nn.Parameter
    """The whole parameter."""

    number: int
    """Its place among all parameters of the optimizer."""

    start: int
    """The first of its elements, counted in row-major order, that is in the shard."""

    stop: int
    """The one behind the last."""

    weight: Tensor
    """These elements, in the parameter's memory; of its shape where they are all of them."""

    leaf: nn.Parameter
    """What the inner optimizer updates: `weight` itself, or a float32 copy of it."""

    grad: Tensor | None = None
    """Their averaged gradient, in the shape and dtype of `weight`."""

    is_fresh: bool = False
    """Whether the float32 copy is yet to be made of the weights as they are by then."""

    @property
    def has_master(self) -> bool:
        return self.leaf.dtype != self.weight.dtype

    def grad_in(self, whole: Tensor | None) -> Tensor | None:
        """The part of the parameter's gradient that belongs to the shard, where possible a view."""
        if whole is None or whole.shape == self.weight.shape:
            return whole
        return whole.reshape(-1)[self.start : self.stop]


def make_shard(
    param: nn.Parameter,
    number: int,
    start: int,
    stop: int,
    weight: Tensor | None = None,
    *,
    master_weights: bool,
) -> Shard:
    """A shard of `param`; without a `weight` all of it."""
    is_short = param.dtype in (torch.bfloat16, torch.float16)
    if weight is None:
        weight, leaf = param.detach(), param
    else:
        weight = weight.view(param.shape) if stop - start == param.numel() else weight
        leaf = nn.Parameter(weight)
    is_fresh = master_weights and is_short
    if is_fresh:
        leaf = nn.Parameter(weight.float())
    return Shard(param, number, start, stop, weight, leaf, is_fresh=is_fresh)


def balanced_owners(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """The rank that owns each parameter: the largest first, each to the rank with the least so far.

    That is at most 4/3 of the best possible largest load (Graham 1969, longest processing time
    first). Ties go to the earlier parameter and the lower rank, so that all ranks deal alike.

    Args:
        sizes: elements of each parameter.
        loads: elements that each rank owns already; counted on in place.

    Example:
        >>> balanced_owners([2, 3, 5, 4], [0, 0])
        [0, 1, 0, 1]
    """
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[index]] += sizes[index]
    return owners


class WholeParameters:
    """Deals whole parameters to ranks; after the step each owner broadcasts its own.

    Gradients must be averaged before. A group of one rank owns all, and sends nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, master_weights: bool) -> None:
        self.group, self.master_weights = group, master_weights
        self.loads = [0] * world_size(group)
        self.shards: list[Shard] = []
        # (owner, parameters that go in one message)
        self.messages: list[tuple[int, list[nn.Parameter]]] = []

    def add(self, params: list[nn.Parameter], first: int) -> list[Shard]:
        """Deal `params`, numbered from `first`; return the shards of this rank."""
        owners = [0] * len(params)
        # apart, so that frozen ones, which have no state, do not count
        for kind, loads in ((True, self.loads), (False, [0] * len(self.loads))):
            chosen = [index for index, p in enumerate(params) if p.requires_grad is kind]
            sizes = [params[index].numel() for index in chosen]
            for index, owner in zip(chosen, balanced_owners(sizes, loads)):
                owners[index] = owner
        added = [
            make_shard(p, first + i, 0, p.numel(), master_weights=self.master_weights)
            for i, p in enumerate(params)
            if owners[i] == rank(self.group)
        ]
        self.shards += added
        if len(self.loads) > 1:
            for owner in range(len(self.loads)):
                owned = [param for param, its in zip(params, owners) if its == owner]
                self.messages += [(owner, message) for message in _messages(owned)]
        return added

    def collect(self) -> None:
        """Let every shard have its gradient."""
        for shard in self.shards:
            shard.grad = shard.param.grad

    def clear(self, set_to_none: bool) -> None:
        """Forget the gradients; those of the parameters are the caller's to forget."""
        for shard in self.shards:
            shard.grad = None

    def share(self) -> None:
        """Give all ranks what each has updated."""
        sent = [self._send(owner, message) for owner, message in self.messages]
        for (_, message), (packed, work) in zip(self.messages, sent):
            if work is None:
                continue
            work.wait()
            if packed is not None:
                parts = packed.split([param.numel() for param in message])
                for param, part in zip(message, parts):
                    param.detach().copy_(part.view(param.shape))

    def wait_for_parameters(self, params: Iterable[Tensor] | None = None) -> None:
        """Nothing to do: `share` returns when they are there."""

    def wait_in_forward_of(self, modules: Iterable[nn.Module], *, starts_there: bool) -> None:
        """Nothing to do."""

    def no_sync(self) -> contextlib.AbstractContextManager:
        """Nothing to do: gradients are averaged elsewhere."""
        return contextlib.nullcontext()

    def _send(self, owner: int, message: list[nn.Parameter]) -> tuple[Tensor | None, Any]:
        """Start a broadcast; the tensor to unpack, None where it arrives in place, and its end."""
        # one that was frozen since is still updated where it has a gradient
        if not any(param.requires_grad or param.grad is not None for param in message):
            return None, None
        source = owner if self.group is None else dist.get_global_rank(self.group, owner)
        if len(message) == 1 and message[0].is_contiguous():
            tensor, packed = message[0].detach(), None
        elif owner == rank(self.group):
            tensor, packed = torch.cat([param.detach().reshape(-1) for param in message]), None
        else:
            tensor = packed = message[0].new_empty(sum(param.numel() for param in message))
        return packed, dist.broadcast(tensor, source, group=self.group, async_op=True)


def _messages(params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters as they are sent: large ones alone, small ones of one kind together."""
    large, small = [], {}
    for param in params:
        if param.nbytes > SMALL_BYTES:
            large.append([param])
        else:
            kind = (param.dtype, param.device, param.requires_grad)
            small.setdefault(kind, []).append(param)
    return large + list(small.values())
