"""PyTorch's ZeroRedundancyOptimizer behind the interface of `ShardedOptimizer`: the peer."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from lib.ddp.process_group import rank, world_size
from lib.optimizer.adamw import grad_norm
from lib.sharded_optimizer.saved_state import pack_shards, unpack_shards
from lib.sharded_optimizer.shards import Shard, whole_shard


class TorchZero(ZeroRedundancyOptimizer):
    """Assigns whole parameters to ranks and broadcasts them; a wrapper averages the gradients.

    It saves the same state as `ShardedOptimizer`, each rank its own.
    """

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's parameters, as `ShardedOptimizer.inner`."""
        return self.optim

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the state, as `ShardedOptimizer.group`."""
        return self.process_group

    @property
    def shards(self) -> list[Shard]:
        """The shards that this rank updates, in the order of `inner`."""
        numbers = {id(param): number for number, param in enumerate(_params(self))}
        return [whole_shard(param, numbers[id(param)]) for param in _params(self.optim)]

    def grad_norm(self) -> Tensor:
        """The L2 norm of all gradients: 0-dim, float32."""
        return grad_norm(_params(self))

    def wait_for_parameters(self) -> None:
        """Do nothing: parameters are complete when `step` returns."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's parameters, as `ShardedOptimizer.state_dict`."""
        packed = pack_shards(self.shards, self.optim, self.param_groups)
        return packed | {"rank": rank(self.group), "world_size": world_size(self.group)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's `state_dict`, or that of an unsharded optimizer."""
        self.load_state_dicts([state_dict], "state_dict")

    def load_state_dicts(
        self, state_dicts: list[dict[str, Any]], source: str | os.PathLike
    ) -> None:
        """See `ShardedOptimizer.load_state_dicts`."""
        unpack_shards(state_dicts, source, self.shards, self.optim, self.param_groups)


def _params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]
