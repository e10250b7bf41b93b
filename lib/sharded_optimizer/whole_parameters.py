"""The readable strategy: each parameter has one owner, which updates and broadcasts it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp.flat import Bucket, fill_buckets
from lib.ddp.process_group import global_rank, rank, world_size
from lib.sharded_optimizer.shards import Shard, whole_shard

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


class WholeParameters:
    """Assigns whole parameters to ranks; after the step each owner broadcasts its own.

    Gradients must be averaged before.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.rank = group, rank(group)
        self.loads = [0] * world_size(group)
        # (owner, its number among all processes, parameters that share a message)
        self.messages: list[tuple[int, int, Bucket]] = []

    def add(self, params: list[nn.Parameter], first: int) -> list[Shard]:
        """Assign `params`, numbered from `first`; return the shards of this rank."""
        owner_of: dict[Tensor, int] = {}
        # frozen parameters have no state: balance them separately, and don't count them
        for is_trained, loads in ((True, self.loads), (False, [0] * len(self.loads))):
            chosen = [param for param in params if param.requires_grad is is_trained]
            owners = balanced_owners([param.numel() for param in chosen], loads)
            owner_of |= zip(chosen, owners)
            # large ones are sent alone, small ones of one dtype together
            for owner in range(len(loads)):
                owned = [param for param in chosen if owner_of[param] == owner]
                messages = fill_buckets(param for param in owned if param.nbytes <= SMALL_BYTES)
                messages += [[param] for param in owned if param.nbytes > SMALL_BYTES]
                source = global_rank(owner, self.group)
                self.messages += [(owner, source, Bucket(message)) for message in messages]

        return [
            whole_shard(param, number)
            for number, param in enumerate(params, start=first)
            if owner_of[param] == self.rank
        ]

    def gather_parameters(self) -> None:
        """Broadcast every parameter from its owner, all at once."""
        sent = []
        for owner, source, bucket in self.messages:
            params = bucket.params
            # frozen since the backward pass, a parameter is still updated once more
            if not any(param.requires_grad or param.grad is not None for param in params):
                continue
            if any(param.dtype != params[0].dtype for param in params):
                raise RuntimeError(
                    "a part of the module was cast after the optimizer was created; convert "
                    "modules before"
                )
            # one parameter alone is received in place
            flat = bucket.pack([param.detach() for param in params])
            work = dist.broadcast(flat, source, group=self.group, async_op=True)
            sent.append((owner, bucket, flat, work))

        for owner, bucket, flat, work in sent:
            work.wait()
            if owner != self.rank:
                for param, view in zip(bucket.params, bucket.views(flat)):
                    if view.data_ptr() != param.data_ptr():
                        param.detach().copy_(view)
