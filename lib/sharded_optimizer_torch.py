"""PyTorch's ZeroRedundancyOptimizer behind the interface of `ShardedOptimizer`: the peer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

from lib.distributed import rank, world_size
from lib.optimizer import grad_norm
from lib.ranks import on_each_rank
from lib.sharded_optimizer_parts import Shard
from lib.sharded_optimizer_state import pack_shards, read_shards, unpack_shards, write_shard


class TorchZero(ZeroRedundancyOptimizer):
    """Whole parameters dealt to ranks, each broadcast after the step; gradients come averaged.

    Its saved state is that of `ShardedOptimizer`, each rank's own.
    """

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's parameters."""
        return self.optim

    @property
    def shards(self) -> list[Shard]:
        """What this rank updates, in the order of the inner optimizer."""
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = {id(param): number for number, param in enumerate(params)}
        return [
            Shard(param, numbers[id(param)], 0, param.numel(), param.detach(), param)
            for group in self.optim.param_groups
            for param in group["params"]
        ]

    def grad_norm(self) -> Tensor:
        """The L2 norm of all gradients: 0-dim, float32."""
        return grad_norm(param for group in self.param_groups for param in group["params"])

    def wait_for_parameters(self) -> None:
        """Nothing to do: `step` returns when they are there."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's parameters, as `ShardedOptimizer.state_dict`."""
        group = self.process_group
        packed = pack_shards(self.shards, self.optim, self.param_groups)
        return packed | {"rank": rank(group), "world_size": world_size(group)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over that of this rank, or of an unsharded optimizer."""
        self._load([state_dict], "state_dict")

    def save_shard(self, folder: str | os.PathLike, group: dist.ProcessGroup | None = None) -> Path:
        """As `ShardedOptimizer.save_shard`."""
        return write_shard(folder, self.state_dict(), group or self.process_group)

    def load_shards(self, folder: str | os.PathLike) -> None:
        """As `ShardedOptimizer.load_shards`."""
        on_each_rank(lambda: self._load(read_shards(folder), folder), self.process_group)

    def _load(self, state_dicts: list[dict[str, Any]], what: str | os.PathLike) -> None:
        unpack_shards(state_dicts, what, self.shards, self.optim, self.param_groups)
