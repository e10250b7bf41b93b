"""FSDP of a language model's loss, and the strategy of `ShardedOptimizer` for its shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from lib.fsdp.wrapper import FSDP
from lib.sharded_optimizer.shards import Shard, ShardingStrategy, whole_shard

if TYPE_CHECKING:
    from lib.model.transformer import MeanLoss


class ShardedLoss(FSDP):
    """A model's loss whose matrices are divided among ranks: each block's are gathered together.

    Blocks are gathered in the dtype of the matmuls. Embedding and head are gathered in their own,
    since the gradient of a frequent token is a sum of many.

    Raises:
        ValueError: models differ between ranks.
    """

    def __init__(self, loss: MeanLoss, group: dist.ProcessGroup | None) -> None:
        model = loss.model
        # not the layers themselves: on a GPU a fused kernel runs from one into the next
        blocks: list[Any] = [[layer.attn, layer.ffn] for layer in model.layers]  # type: ignore[union-attr]
        outer: list[nn.Module] = [model.token_embeddings]
        blocks.insert(0, model.token_embeddings)
        if model.lm_head is not None:
            outer.append(model.lm_head)
            blocks.append(model.lm_head)
        super().__init__(loss, loss.dtype, blocks=blocks, full_precision=outer, group=group)
        # the head's matrix is read without calling it
        model.before_part = self.before_forward

    def whole_state_dict(self) -> dict[str, Tensor]:
        """Gather the model's state dict on rank 0's CPU, block by block; empty on other ranks."""
        full = self.full_parameters(on_first_only=True)
        loss: Any = self.module
        names = loss.model.state_dict()
        return {name: full[f"model.{name}"] for name in names if f"model.{name}" in full}


class FSDPShards(ShardingStrategy):
    """The strategy of `ShardedOptimizer` for the parameters of an FSDP: ranks send nothing here.

    FSDP averages gradients and leaves them in its shards.

    The optimizer is given whole parameters, `whole_parameters`, which have a shape but no memory.
    """

    def __init__(self, fsdp: FSDP) -> None:
        super().__init__(fsdp.group)
        self.fsdp = fsdp
        self.place_of = {id(w): (flat, i) for flat in fsdp.flats for i, w in enumerate(flat.whole)}

    def whole_parameters(self) -> list[nn.Parameter]:
        """Parameters in their whole shapes, in the module's order."""
        whole = {n: w for flat in self.fsdp.flats for n, w in zip(flat.names, flat.whole)}
        return [whole.get(name, p) for name, p in self.fsdp.module.named_parameters()]

    def add(self, params: list[nn.Parameter], first: int) -> list[Shard]:
        """Take this rank's parts of `params`, numbered from `first`; vectors are whole."""
        added = []
        for number, param in enumerate(params, start=first):
            if id(param) not in self.place_of:
                self.copies.append(whole_shard(param, number))
                added.append(self.copies[-1])
                continue
            flat, index = self.place_of[id(param)]
            part, leaf = flat.own[index], flat.shards[index]
            if part.stop > part.start:
                added.append(Shard(param, number, part.start, part.stop, leaf))
        self.shards += added
        return added
