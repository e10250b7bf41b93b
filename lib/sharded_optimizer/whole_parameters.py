"""The readable strategy: each parameter has one owner, which updates and broadcasts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp.process_group import global_rank, rank, world_size
from lib.sharded_optimizer.shards import Shard, ShardingStrategy, whole_shard

# Smaller tensors share a message: one of their own would cost more than the copy.
SMALL_BYTES = 2**20


def balanced_owners(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Assign each parameter to a rank: the largest first, each to the least loaded rank so far.

    The largest load is at most 4/3 of the best possible (Graham 1969, longest processing time
    first). Ties go to the earlier parameter and the lower rank, so that all ranks agree.

    Args:
        sizes: elements of each parameter.
        loads: elements that each rank owns already; updated in place.

    Example:
        >>> balanced_owners([2, 3, 5, 4], [0, 0])
        [0, 1, 0, 1]
    """
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[index]] += sizes[index]
    return owners


class WholeParameters(ShardingStrategy):
    """Assigns whole parameters to ranks; after the step each owner broadcasts its own.

    Gradients must be averaged before. A group of one rank owns everything and sends nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self.loads = [0] * world_size(group)
        # (owner, parameters that share a message)
        self.messages: list[tuple[int, list[nn.Parameter]]] = []

    def add(self, params: list[nn.Parameter], first: int) -> list[Shard]:
        """Assign `params`, numbered from `first`; return the shards of this rank."""
        owners = [0] * len(params)
        # frozen parameters have no state: balance them separately, and don't count them
        for is_trained, loads in ((True, self.loads), (False, [0] * len(self.loads))):
            chosen = [i for i, param in enumerate(params) if param.requires_grad is is_trained]
            sizes = [params[index].numel() for index in chosen]
            for index, owner in zip(chosen, balanced_owners(sizes, loads)):
                owners[index] = owner

        added = [
            whole_shard(param, first + index)
            for index, param in enumerate(params)
            if owners[index] == rank(self.group)
        ]
        self.shards += added

        if len(self.loads) > 1:
            for owner in range(len(self.loads)):
                owned = [param for param, its_owner in zip(params, owners) if its_owner == owner]
                self.messages += [(owner, message) for message in _messages(owned)]
        return added

    def gather_parameters(self) -> None:
        """Broadcast every parameter from its owner, all at once."""
        broadcasts = [(message, *self._send(owner, message)) for owner, message in self.messages]
        for message, packed, work in broadcasts:
            if work is not None:
                work.wait()
            if packed is not None:
                parts = packed.split([param.numel() for param in message])
                for param, part in zip(message, parts):
                    param.detach().copy_(part.view(param.shape))

    def _send(self, owner: int, message: list[nn.Parameter]) -> tuple[Tensor | None, Any]:
        """Start a broadcast; return the tensor to unpack, if any, and the handle to wait for."""
        # frozen since the backward pass, a parameter is still updated once more
        if not any(param.requires_grad or param.grad is not None for param in message):
            return None, None
        if any(param.dtype != message[0].dtype for param in message):
            raise RuntimeError(
                "a part of the module was cast after the optimizer was created; convert modules "
                "before"
            )
        if len(message) == 1 and message[0].is_contiguous():
            # received in place
            tensor, packed = message[0].detach(), None
        elif owner == rank(self.group):
            tensor, packed = torch.cat([param.detach().reshape(-1) for param in message]), None
        else:
            tensor = packed = message[0].new_empty(sum(param.numel() for param in message))
        source = global_rank(owner, self.group)
        return packed, dist.broadcast(tensor, source, group=self.group, async_op=True)


def _messages(params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split parameters into messages: large ones alone, small ones of one kind together."""
    large, small = [], {}
    for param in params:
        if param.nbytes > SMALL_BYTES:
            large.append([param])
        else:
            kind = (param.dtype, param.device, param.requires_grad)
            small.setdefault(kind, []).append(param)
    return large + list(small.values())
