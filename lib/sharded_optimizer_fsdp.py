"""Shards that FSDP2 has made: each rank's rows of parameters and of averaged gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lib.distributed import rank
from lib.sharded_optimizer_parts import Shard, make_shard


class ShardedParameters:
    """The strategy of `fully_shard`: ranks hold the rows that they update, and nothing is sent.

    Parameters are DTensors, whose rows are dealt to ranks as `torch.chunk` does. FSDP2 averages
    gradients in backward, and puts parameters together where they are needed.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, master_weights: bool) -> None:
        self.group, self.master_weights = group, master_weights
        self.shards: list[Shard] = []

    def add(self, params: list[nn.Parameter], first: int) -> list[Shard]:
        """This rank's shards of `params`, numbered from `first`.

        Raises:
            ValueError: a parameter is not sharded.
        """
        added = []
        for number, param in enumerate(params, start=first):
            if not isinstance(param, DTensor):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is not sharded; right is: "
                    "fully_shard before the optimizer is made"
                )
            weight = param.to_local().detach().view(-1)
            if weight.numel():
                start = self._first_row(param) * math.prod(param.shape[1:])
                stop = start + weight.numel()
                shard = make_shard(
                    param, number, start, stop, weight, master_weights=self.master_weights
                )
                added.append(shard)
        self.shards += added
        return added

    def _first_row(self, param: DTensor) -> int:
        mesh = param.device_mesh
        return rank(self.group) * -(-param.shape[0] // mesh.size())

    def collect(self) -> None:
        """Let every shard have its gradient."""
        for shard in self.shards:
            grad = shard.param.grad
            shard.grad = None if grad is None else grad.to_local().view(shard.weight.shape)

    def clear(self, set_to_none: bool) -> None:
        """Forget the gradients; those of the parameters are the caller's to forget."""
        for shard in self.shards:
            shard.grad = None

    def share(self) -> None:
        """Nothing to do: the next forward pass gathers."""

    def wait_for_parameters(self, params: Iterable[Tensor] | None = None) -> None:
        """Nothing to do."""

    def wait_in_forward_of(self, modules: Iterable[nn.Module], *, starts_there: bool) -> None:
        """Nothing to do."""

    def no_sync(self) -> contextlib.AbstractContextManager:
        """Nothing to do: gradients are averaged elsewhere."""
        return contextlib.nullcontext()
