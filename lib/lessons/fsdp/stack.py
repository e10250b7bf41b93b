"""All-gathers of `lib.fsdp.FSDP`, with checkpoints and without, counted for notebook 10."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.fsdp import FSDP, checkpoint_activations


class Residual(nn.Module):
    """Residual blocks of one matrix each, every one a checkpoint if `is_checkpointed`."""

    def __init__(self, blocks: int, is_checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(blocks))
        self.run = checkpoint_activations() if is_checkpointed else _run

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x + self.run(index, block, x)
        return x


def _run(index: int, block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def count_gathers(blocks: int) -> tuple[int, int]:
    """All-gathers of a step of FSDP, and those where each block is a checkpoint; on all ranks."""
    group: Any = dist.group.WORLD
    counts = []
    for is_checkpointed in (False, True):
        model, before = FSDP(Residual(blocks, is_checkpointed)), len(group.transfers)
        model(torch.ones(1, 8, requires_grad=True)).sum().backward()
        model.finish_gradient_synchronization()
        sent = group.transfers[before:]
        counts.append(sum(transfer.kind == "all_gather" for transfer in sent))
    return counts[0], counts[1]
